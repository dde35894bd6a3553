//! Usage that the Python aggregator booked into one item.
//!
//! There all windows are named by their first moment, so the hour from 00:00 on, its day and, on the
//! first, its month are one item, and what is used in that hour is booked into it once for each of
//! them. With x used in that hour, H in the other hours of the day and S in the other days of the
//! month, the item holds
//!
//! > V = x + (x + H) + (x + H + S)
//!
//! as far as the windows are booked at all. H and S are known from the other items, so x is, and with
//! it the day and the month. The shared item stays as it is, for those who read it that way; the day
//! and the month are written under names of their own.

use std::collections::BTreeMap;

use zae_limiter_core::{Key, LimitName, Millitokens, Record, Timestamp, Usage, UsageKey, Window};
use zae_limiter_schema::records::{Before, decode, encode};
use zae_limiter_schema::{
    Consistency, Item, ItemKey, PAGE_ITEMS_MAX, Query, Range, Step, Table, TableError,
    TableErrorKind, Update, Updated, Value,
};

use super::{Counts, MigrateError, Migration, Run};

/// Amounts by limit, and the number of events under no name.
type Amounts = BTreeMap<Option<LimitName>, i64>;

/// What day and month come to, and whether that is exact.
#[derive(Debug, Default, PartialEq, Eq)]
struct Split {
    day: Option<Amounts>,
    month: Option<Amounts>,
    inexact: bool,
}

impl Migration {
    /// Writes day and month out of an item that holds them, where they are not there yet.
    pub(super) async fn split_usage(
        &self,
        table: &dyn Table,
        key: &UsageKey,
        item: &Item,
        counts: &mut Counts,
    ) -> Result<(), MigrateError> {
        let is_shared = key.window == Window::Hourly && Window::Daily.start(key.start) == key.start;
        // Ours book windows apart and say so in the name.
        let label = item.get("window_start").and_then(Value::as_str).unwrap_or_default();
        if !is_shared || !label.ends_with("T00:00:00Z") || is_ours(item) {
            return Ok(());
        }
        let month = self.month_of(table, key).await?;
        let split = self.split(key, item, &month)?;
        for (window, amounts) in [(Window::Daily, split.day), (Window::Monthly, split.month)] {
            let Some(amounts) = amounts else { continue };
            let record = usage_of(key, window, &amounts, item);
            if self.write_usage(table, record).await? {
                counts.usage += 1;
                counts.inexact += u64::from(split.inexact);
            }
        }
        Ok(())
    }

    /// All usage items of the entity on the resource in the month, by their first moment.
    async fn month_of(
        &self,
        table: &dyn Table,
        key: &UsageKey,
    ) -> Result<BTreeMap<Timestamp, Item>, MigrateError> {
        let month = Window::Monthly.label(Window::Monthly.start(key.start));
        let prefix = format!("#USAGE#{}#{month}-", key.resource);
        let partition = ItemKey::of(&Key::Usage(key.clone())).pk;
        let mut query = Query {
            index: None,
            partition,
            range: Range::StartsWith(prefix),
            step: Step::Forward,
            limit: PAGE_ITEMS_MAX,
            consistency: Consistency::Strong,
            after: None,
        };
        let mut found = BTreeMap::new();
        loop {
            let answer = table.query(&query).await?;
            for item in answer.items {
                let label = item.get("SK").and_then(Value::as_str).unwrap_or_default();
                let label = label.rsplit('#').next().unwrap_or_default();
                if let Some(start) = Window::Hourly.start_of(label).filter(|_| label.len() == 20) {
                    found.insert(start, item);
                }
            }
            match answer.next {
                Some(next) => query.after = Some(next),
                None => return Ok(found),
            }
        }
    }

    fn split(
        &self,
        key: &UsageKey,
        item: &Item,
        month: &BTreeMap<Timestamp, Item>,
    ) -> Result<Split, MigrateError> {
        let has = |window| self.windows.contains(&window);
        let has_month = has(Window::Monthly) && Window::Monthly.start(key.start) == key.start;
        let (day, mut inexact) = self.day(key, item, month, has_month)?;
        let mut split = Split::default();
        if has_month {
            let mut total = day.clone();
            let days = month.iter().filter(|(start, _)| {
                **start > key.start && Window::Daily.start(**start) == **start
            });
            for (start, item) in days {
                let other = UsageKey { start: *start, ..key.clone() };
                let (amounts, odd) = self.day(&other, item, month, false)?;
                inexact |= odd;
                add(&mut total, &amounts);
            }
            split.month = Some(total);
        }
        if has(Window::Daily) {
            split.day = Some(day);
        }
        split.inexact = inexact;
        Ok(split)
    }

    /// What was used on the day that begins with `key`, and whether the shares do not add up.
    fn day(
        &self,
        key: &UsageKey,
        item: &Item,
        month: &BTreeMap<Timestamp, Item>,
        has_month: bool,
    ) -> Result<(Amounts, bool), MigrateError> {
        let shared = amounts(key, item)?;
        let mut others = Amounts::new();
        let end = Window::Daily.end(key.start);
        for (start, item) in month.iter().filter(|(at, _)| **at > key.start && **at < end) {
            add(&mut others, &amounts(&UsageKey { start: *start, ..key.clone() }, item)?);
        }
        let mut other_days = Amounts::new();
        if has_month {
            for (start, item) in
                month.iter().filter(|(at, _)| **at > key.start && Window::Daily.start(**at) == **at)
            {
                let other = UsageKey { start: *start, ..key.clone() };
                add(&mut other_days, &self.day(&other, item, month, false)?.0);
            }
        }
        // Who wrote the item first: without the hour among them, nothing was used in it.
        let first = item.get("window").and_then(Value::as_str).unwrap_or("hourly");
        let has_hour = first == "hourly";
        let has_day = self.windows.contains(&Window::Daily);
        let times = i64::from(has_hour) + i64::from(has_day) + i64::from(has_month);
        let (mut day, mut inexact) = (Amounts::new(), false);
        for (name, total) in &shared {
            let of = |amounts: &Amounts| amounts.get(name).copied().unwrap_or(0);
            let known = i64::from(has_day) * of(&others)
                + i64::from(has_month) * (of(&others) + of(&other_days));
            let rest = (total - known).max(0);
            let unit = if name.is_some() { 1_000 } else { 1 };
            inexact |= total < &known || rest % (times.max(1) * unit) != 0;
            day.insert(name.clone(), rest / times.max(1) + of(&others));
        }
        Ok((day, inexact))
    }

    /// Whether the record was not there. A dry run looks, and writes nothing.
    async fn write_usage(&self, table: &dyn Table, usage: Usage) -> Result<bool, MigrateError> {
        let key = ItemKey::of(&Key::Usage(usage.key.clone()));
        if self.run == Run::Dry {
            let read = table.read(&[key], Consistency::Strong).await?;
            return Ok(read.items.is_empty());
        }
        let encoded = encode(&Record::Usage(usage), Before::Absent);
        let update = Update { key, actions: encoded.actions, conditions: encoded.pins };
        Ok(matches!(table.update(&update).await?, Updated::Done(..)))
    }
}

/// Only items of the Python aggregator call themselves by the first moment and say `daily` beside an
/// hour's name, or share one; ours carry the last sequence number that was booked.
fn is_ours(item: &Item) -> bool {
    item.keys().any(|name| name.starts_with("seq"))
}

fn amounts(key: &UsageKey, item: &Item) -> Result<Amounts, MigrateError> {
    let malformed = |error: &dyn std::fmt::Display| {
        TableError::new(TableErrorKind::Incompatible, format!("an item cannot be read: {error}"))
    };
    let record = decode(&Key::Usage(key.clone()), item).map_err(|error| malformed(&error))?;
    let Some(Record::Usage(usage)) = record else { return Ok(Amounts::new()) };
    let mut amounts: Amounts =
        usage.consumed.into_iter().map(|(name, amount)| (Some(name), amount.get())).collect();
    amounts.insert(None, i64::try_from(usage.events).unwrap_or(i64::MAX));
    Ok(amounts)
}

fn add(to: &mut Amounts, more: &Amounts) {
    for (name, amount) in more {
        *to.entry(name.clone()).or_default() += amount;
    }
}

fn usage_of(key: &UsageKey, window: Window, amounts: &Amounts, item: &Item) -> Usage {
    let expires_at = match item.get("ttl") {
        Some(Value::N(seconds)) => seconds.parse::<i64>().ok(),
        _ => None,
    };
    Usage {
        key: UsageKey { window, start: window.start(key.start), ..key.clone() },
        consumed: amounts
            .iter()
            .filter_map(|(name, amount)| Some((name.clone()?, Millitokens::new(*amount))))
            .collect(),
        events: amounts.get(&None).map_or(0, |events| events.max(&0).unsigned_abs()),
        expires_at: expires_at.map(|seconds| Timestamp::from_millis(seconds.saturating_mul(1_000))),
    }
}
