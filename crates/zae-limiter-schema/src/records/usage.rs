//! A usage record. Every number whose name a limit could have is the usage of that limit.

use std::collections::BTreeSet;

use zae_limiter_core::{LimitName, Millitokens, Usage, UsageKey};

use super::number::{in_thousandths, thousandths};
use super::reader::Reader;
use super::{Before, moment, push_namespace, remove, set};
use crate::expression::{Action, Condition};
use crate::keys::{Index, entity_partition, resource_partition};
use crate::value::{Item, Malformed, Value};

pub(super) const EVENTS: &str = "total_events";

fn limits_of(item: &Item) -> impl Iterator<Item = (LimitName, &Value)> {
    let numbers = item.iter().filter(|(_, value)| matches!(value, Value::N(_)));
    numbers.filter_map(|(name, value)| Some((LimitName::new(name).ok()?, value)))
}

pub(super) fn encode(usage: &Usage, before: Before<'_>) -> (Vec<Action>, Vec<Condition>) {
    let mut actions = Vec::new();
    let UsageKey { namespace, entity, resource, window, start } = &usage.key;
    let label = window.label(*start);
    set(&mut actions, "entity_id", Value::text(entity.as_str()));
    set(&mut actions, "resource", Value::text(resource.as_str()));
    set(&mut actions, "window", Value::text(window.as_str()));
    set(&mut actions, "window_start", Value::text(&label));
    set(&mut actions, EVENTS, Value::number(i64::try_from(usage.events).unwrap_or(i64::MAX)));
    for (limit, amount) in &usage.consumed {
        set(&mut actions, limit.as_str(), thousandths(amount.get()));
    }
    moment::push_ttl(&mut actions, usage.expires_at);
    set(&mut actions, Index::Resource.pk(), Value::S(resource_partition(namespace, resource)));
    set(&mut actions, Index::Resource.sk(), Value::S(format!("USAGE#{label}#{entity}")));
    push_namespace(&mut actions, namespace, &entity_partition(namespace, entity));
    let pins = match before {
        Before::Unknown => Vec::new(),
        Before::Absent => vec![Condition::Absent("PK".to_owned())],
        Before::Item(item) => {
            let stored: BTreeSet<LimitName> = limits_of(item).map(|(limit, _)| limit).collect();
            let removed = stored.iter().filter(|limit| !usage.consumed.contains_key(*limit));
            removed.for_each(|limit| remove(&mut actions, limit.as_str()));
            // Every booking counts an event, so this pins the usage of all limits.
            let pin = match item.get(EVENTS) {
                Some(events) => Condition::Equal(EVENTS.to_owned(), events.clone()),
                None => Condition::Absent(EVENTS.to_owned()),
            };
            vec![Condition::Exists("PK".to_owned()), pin]
        }
    };
    (actions, pins)
}

pub(super) fn decode(key: &UsageKey, reader: &Reader<'_>) -> Result<Usage, Malformed> {
    let consumed = limits_of(reader.item).map(|(limit, value)| {
        let amount = in_thousandths(value).ok_or_else(|| {
            reader.malformed(limit.as_str(), "a number with at most three decimals")
        })?;
        Ok((limit, Millitokens::new(amount)))
    });
    Ok(Usage {
        key: key.clone(),
        consumed: consumed.collect::<Result<_, Malformed>>()?,
        events: reader.count(EVENTS)?,
        expires_at: moment::read_ttl(reader)?,
    })
}
