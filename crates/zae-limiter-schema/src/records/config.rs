//! Stored limits, of all four levels.

use std::collections::BTreeSet;

use zae_limiter_core::{
    AUDIT_RETENTION_DAYS_MAX, Config, ConfigLevel, DEFAULT_RESOURCE, EntityId, LimitName, LimitSet,
    Millitokens, NamespaceId, Rate, ResourceName,
};

use super::number::{in_thousandths, thousandths};
use super::reader::Reader;
use super::{Before, push_namespace, remove, set};
use crate::expression::{Action, Condition};
use crate::keys::{Index, ItemKey, entity_configs_partition};
use crate::value::{Item, Malformed, Value};

/// The version of stored limits. The first clients always write 1. Items with other settings only have
/// none, which counts as 0.
pub const CONFIG_VERSION: &str = "config_version";

const ON_UNAVAILABLE: &str = "on_unavailable";

/// How many days audit events are kept, as all clients read it. One function of the Python client sets only
/// this, without a version; another replaces the item and loses it.
const AUDIT_RETENTION: &str = "audit_retention_days";

/// The stored number of days. Any other value is ignored, and left as it is.
fn retention_of(item: &Item) -> Option<u32> {
    let days = item.get(AUDIT_RETENTION).and_then(Value::as_i64)?;
    u32::try_from(days).ok().filter(|days| (1..=AUDIT_RETENTION_DAYS_MAX).contains(days))
}

fn attribute(limit: &str, suffix: &str) -> String {
    format!("l_{limit}_{suffix}")
}

/// The limits of an item: those that have a ceiling.
fn limits_of(item: &Item) -> impl Iterator<Item = &str> {
    let names = item.keys();
    names.filter_map(|name| name.strip_prefix("l_").and_then(|name| name.strip_suffix("_cp")))
}

/// All attributes of a limit, of any release.
fn attributes_of<'a>(item: &'a Item, limit: &'a str) -> impl Iterator<Item = &'a str> {
    let prefix = attribute(limit, "");
    let is_of_limit = move |name: &&String| {
        // `l_a_b_cp` is not an attribute of `a`.
        name.strip_prefix(&prefix).is_some_and(|suffix| !suffix.contains('_'))
    };
    item.keys().filter(is_of_limit).map(String::as_str)
}

pub(super) fn encode(config: &Config, before: Before<'_>) -> (Vec<Action>, Vec<Condition>) {
    let mut actions = Vec::new();
    push_owner(&mut actions, config);
    let version = i64::try_from(config.version).unwrap_or(i64::MAX);
    set(&mut actions, CONFIG_VERSION, Value::number(version));
    if config.level == ConfigLevel::System {
        match config.on_unavailable {
            Some(choice) => set(&mut actions, ON_UNAVAILABLE, Value::text(choice.as_str())),
            None => remove(&mut actions, ON_UNAVAILABLE),
        }
        let is_foreign = matches!(before, Before::Item(item) if retention_of(item).is_none());
        match config.audit_retention_days {
            Some(days) => set(&mut actions, AUDIT_RETENTION, Value::number(days.into())),
            None if is_foreign => {}
            None => remove(&mut actions, AUDIT_RETENTION),
        }
    }
    for (name, rate) in config.limits.iter() {
        let period = i64::try_from(rate.period_ms()).unwrap_or(i64::MAX);
        for (suffix, value) in
            [("cp", rate.capacity().get()), ("ra", rate.refill_amount().get()), ("rp", period)]
        {
            set(&mut actions, &attribute(name.as_str(), suffix), thousandths(value));
        }
    }
    let pins = match before {
        Before::Unknown => Vec::new(),
        Before::Absent => vec![Condition::Absent("PK".to_owned())],
        Before::Item(item) => {
            push_removed(&mut actions, &config.limits, item);
            pins(item, &config.level)
        }
    };
    (actions, pins)
}

/// Removes the limits that the config no longer has, and the burst attributes of older clients.
fn push_removed(actions: &mut Vec<Action>, limits: &LimitSet, item: &Item) {
    let removed: BTreeSet<&str> = limits_of(item)
        .flat_map(|limit| {
            let is_kept = limits.position(limit).is_some();
            let attributes = attributes_of(item, limit);
            attributes.filter(move |name| !is_kept || name.ends_with("_bx"))
        })
        .collect();
    removed.into_iter().for_each(|name| remove(actions, name));
}

/// Requires that limits and audit retention are as they were read. The version alone is not enough: the
/// first clients replace an item and write version 1, whatever it was.
fn pins(item: &Item, level: &ConfigLevel) -> Vec<Condition> {
    let mut pins = vec![Condition::Exists("PK".to_owned())];
    let ceilings = limits_of(item).map(|limit| attribute(limit, "cp"));
    let retention = (*level == ConfigLevel::System).then(|| AUDIT_RETENTION.to_owned());
    let settings = std::iter::once(CONFIG_VERSION.to_owned()).chain(retention);
    for name in settings.chain(ceilings) {
        pins.push(match item.get(&name) {
            Some(value) => Condition::Equal(name, value.clone()),
            None => Condition::Absent(name),
        });
    }
    pins
}

fn push_owner(actions: &mut Vec<Action>, config: &Config) {
    let ns = &config.namespace;
    let (entity, resource) = match &config.level {
        ConfigLevel::System => (None, None),
        ConfigLevel::Resource(resource) => (None, Some(resource.as_str())),
        ConfigLevel::Entity(entity) => (Some(entity), Some(DEFAULT_RESOURCE)),
        ConfigLevel::EntityResource(entity, resource) => (Some(entity), Some(resource.as_str())),
    };
    if let Some(resource) = resource {
        set(actions, "resource", Value::text(resource));
    }
    if let Some(entity) = entity {
        let resource = match &config.level {
            ConfigLevel::EntityResource(_, resource) => Some(resource),
            _ => None,
        };
        push_entity(actions, ns, entity, resource);
    }
    let key = ItemKey::of(&zae_limiter_core::Key::Config(ns.clone(), config.level.clone()));
    push_namespace(actions, ns, &key.pk);
}

fn push_entity(
    actions: &mut Vec<Action>,
    ns: &NamespaceId,
    entity: &EntityId,
    resource: Option<&ResourceName>,
) {
    set(actions, "entity_id", Value::text(entity.as_str()));
    set(actions, Index::Entity.pk(), Value::S(entity_configs_partition(ns, resource)));
    set(actions, Index::Entity.sk(), Value::text(entity.as_str()));
}

pub(super) fn decode(
    ns: &NamespaceId,
    level: &ConfigLevel,
    reader: &Reader<'_>,
) -> Result<Config, Malformed> {
    let mut rates = Vec::new();
    for limit in limits_of(reader.item) {
        let ceiling = attribute(limit, "cp");
        let name = LimitName::new(limit)
            .map_err(|_| reader.malformed(&ceiling, "named after a legal limit"))?;
        rates.push((name, rate(reader, limit)?));
    }
    let limits = LimitSet::from_rates(rates)
        .map_err(|_| reader.malformed("l_*_cp", "of at most 32 limits"))?;
    let (on_unavailable, audit_retention_days) = match level {
        ConfigLevel::System => (reader.name_if_any(ON_UNAVAILABLE)?, retention_of(reader.item)),
        _ => (None, None),
    };
    Ok(Config {
        namespace: ns.clone(),
        level: level.clone(),
        limits,
        on_unavailable,
        audit_retention_days,
        version: reader.count(CONFIG_VERSION)?,
    })
}

fn rate(reader: &Reader<'_>, limit: &str) -> Result<Rate, Malformed> {
    let number = |suffix| {
        let name = attribute(limit, suffix);
        let value = reader.value(&name);
        let value = value.ok_or_else(|| reader.malformed(&name, "present"))?;
        in_thousandths(value)
            .ok_or_else(|| reader.malformed(&name, "a number with at most three decimals"))
    };
    let ceiling = match reader.value(&attribute(limit, "bx")) {
        // Older clients store the burst in an attribute of its own.
        Some(_) => number("cp")?.max(number("bx")?),
        None => number("cp")?,
    };
    let illegal = || reader.malformed(&attribute(limit, "cp"), "the ceiling of a legal limit");
    let period = u64::try_from(number("rp")?).map_err(|_| illegal())?;
    let (capacity, refill_amount) = (Millitokens::new(ceiling), Millitokens::new(number("ra")?));
    Rate::new(capacity, refill_amount, period).map_err(|_| illegal())
}
