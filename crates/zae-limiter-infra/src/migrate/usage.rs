//! Splits usage items that the Python aggregator shares between windows.
//!
//! The Python aggregator names a window by its start. So the hour from 00:00 on, its day and, on
//! the first of a month, its month share one item. Usage in that hour is booked to the item once
//! for each of them. With x used in that hour, H in the other hours of the day, and S on the other
//! days of the month, the item holds
//!
//! > V = x + (x + H) + (x + H + S)
//!
//! without the terms of windows that are not configured. Other items hold H and S. That gives x,
//! and with it the day and the month. One transaction writes both under their own names and leaves
//! the rest to the hour. The sum of all records stays the same.

use std::collections::BTreeMap;

use zae_limiter_core::{Key, LimitName, Millitokens, Record, Timestamp, Usage, UsageKey, Window};
use zae_limiter_schema::records::{Before, Encoded, decode, encode};
use zae_limiter_schema::{
    Change, Consistency, Item, ItemKey, PAGE_ITEMS_MAX, Query, Range, Step, Table, TableError,
    TableErrorKind, Transacted, Update, Value,
};

use super::{Counts, MigrateError, Migration, Run};

/// Amounts by limit. `None` has the number of events.
type Amounts = BTreeMap<Option<LimitName>, i64>;

/// The result of splitting an item.
#[derive(Debug, Default, PartialEq, Eq)]
struct Split {
    hour: Amounts,
    day: Option<Amounts>,
    month: Option<Amounts>,
    inexact: bool,
}

/// The usage items of one entity on one resource in one month, by the start of their window.
#[derive(Debug, Default)]
struct Month {
    /// Items that are named by a time: hours, and shared items.
    moments: BTreeMap<Timestamp, Item>,
    /// Items of days under their own names.
    days: BTreeMap<Timestamp, Item>,
}

impl Migration {
    /// Splits an item that an hour, a day and perhaps a month share, unless that is done already.
    pub(super) async fn split_usage(
        &self,
        table: &dyn Table,
        key: &UsageKey,
        item: &Item,
        counts: &mut Counts,
    ) -> Result<(), MigrateError> {
        let is_shared = key.window == Window::Hourly && Window::Daily.start(key.start) == key.start;
        let has_month = self.windows.contains(&Window::Monthly)
            && Window::Monthly.start(key.start) == key.start;
        if !is_shared || is_ours(item) || !(self.windows.contains(&Window::Daily) || has_month) {
            return Ok(());
        }
        let month = self.month_of(table, key).await?;
        if month.days.contains_key(&key.start) {
            return Ok(());
        }
        let split = self.split(key, item, &month, has_month)?;
        let mut changes = Vec::new();
        for (window, amounts) in [(Window::Daily, &split.day), (Window::Monthly, &split.month)] {
            let Some(amounts) = amounts else { continue };
            changes.push(change(usage_of(key, window, amounts, item), Before::Absent));
        }
        let written = changes.len() as u64;
        let hour = usage_of(key, Window::Hourly, &split.hour, item);
        changes.push(match split.hour.values().all(|amount| *amount == 0) {
            // Nothing was used in that hour, so the item held only the day.
            true => Change::Delete(item_key(key), encode_over(hour, item).pins),
            false => change(hour, Before::Item(item)),
        });
        if self.run == Run::Real {
            match table.transact(&changes).await? {
                Transacted::Done(_) => {}
                // Another run has split it meanwhile.
                Transacted::Unmet(failed, _) if failed.first().is_some_and(Option::is_some) => {
                    return Ok(());
                }
                // The aggregator has changed it meanwhile.
                Transacted::Unmet(..) => {
                    counts.busy += 1;
                    return Ok(());
                }
            }
        }
        counts.usage += written;
        counts.inexact += u64::from(split.inexact);
        Ok(())
    }

    /// All usage items of the entity on the resource in the month.
    async fn month_of(&self, table: &dyn Table, key: &UsageKey) -> Result<Month, MigrateError> {
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
        let mut found = Month::default();
        loop {
            let page = table.query(&query).await?;
            for item in page.items {
                let label = item.get("SK").and_then(Value::as_str).unwrap_or_default();
                let label = label.rsplit('#').next().unwrap_or_default();
                if let Some(start) = Window::Daily.start_of(label).filter(|_| label.len() == 10) {
                    found.days.insert(start, item);
                } else if let Some(start) = Window::Hourly.start_of(label) {
                    found.moments.insert(start, item);
                }
            }
            match page.next {
                Some(next) => query.after = Some(next),
                None => return Ok(found),
            }
        }
    }

    fn split(
        &self,
        key: &UsageKey,
        item: &Item,
        month: &Month,
        has_month: bool,
    ) -> Result<Split, MigrateError> {
        let others = self.other_days(key, month, has_month)?;
        let (day, inexact) = self.day(key, item, month, has_month.then_some(&others))?;
        let mut split = Split { inexact, hour: amounts(key, item)?, ..Split::default() };
        if self.windows.contains(&Window::Daily) {
            subtract(&mut split.hour, &day);
            split.day = Some(day.clone());
        }
        if has_month {
            let mut total = day;
            add(&mut total, &others);
            subtract(&mut split.hour, &total);
            split.month = Some(total);
        }
        Ok(split)
    }

    /// The usage on the other days of the month that begins with `key`.
    fn other_days(
        &self,
        key: &UsageKey,
        month: &Month,
        has_month: bool,
    ) -> Result<Amounts, MigrateError> {
        let mut total = Amounts::new();
        let is_other_day =
            |at: &Timestamp| *at > key.start && Window::Daily.start(*at) == *at && has_month;
        for (start, item) in month.days.iter().filter(|(at, _)| is_other_day(at)) {
            add(&mut total, &amounts(&UsageKey { start: *start, ..key.clone() }, item)?);
        }
        for (start, item) in month.moments.iter().filter(|(at, _)| is_other_day(at)) {
            if !month.days.contains_key(start) {
                let other = UsageKey { start: *start, ..key.clone() };
                add(&mut total, &self.day(&other, item, month, None)?.0);
            }
        }
        Ok(total)
    }

    /// The usage on the day that begins with `key`, from the item that it shares with its first
    /// hour, and whether the split is inexact. `others` is the usage on the other days, if the item
    /// also holds the month.
    fn day(
        &self,
        key: &UsageKey,
        item: &Item,
        month: &Month,
        others: Option<&Amounts>,
    ) -> Result<(Amounts, bool), MigrateError> {
        let mut hours = Amounts::new();
        let end = Window::Daily.end(key.start);
        for (start, item) in month.moments.iter().filter(|(at, _)| **at > key.start && **at < end) {
            add(&mut hours, &amounts(&UsageKey { start: *start, ..key.clone() }, item)?);
        }
        // The item names the window that was booked first. If that is not the hour, nothing was
        // used in the hour.
        let has_hour = item.get("window").and_then(Value::as_str) != Some("daily")
            && item.get("window").and_then(Value::as_str) != Some("monthly");
        let has_day = self.windows.contains(&Window::Daily);
        let times = i64::from(has_hour) + i64::from(has_day) + i64::from(others.is_some());
        let (mut day, mut inexact) = (Amounts::new(), false);
        for (name, total) in amounts(key, item)? {
            let of = |amounts: &Amounts| amounts.get(&name).copied().unwrap_or(0);
            let elsewhere = i64::from(has_day) * of(&hours)
                + others.map_or(0, |others| of(&hours) + of(others));
            let rest = (total - elsewhere).max(0);
            let unit = if name.is_some() { 1_000 } else { 1 };
            inexact |= total < elsewhere || rest % (times.max(1) * unit) != 0;
            let in_hour = rest / times.max(1) / unit * unit;
            // An item that holds only the day has the day's usage.
            let alone = !has_hour && others.is_none();
            let used = if alone { total } else { in_hour + of(&hours) };
            day.insert(name, used);
        }
        Ok((day, inexact))
    }
}

fn item_key(key: &UsageKey) -> ItemKey {
    ItemKey::of(&Key::Usage(key.clone()))
}

fn encode_over(usage: Usage, item: &Item) -> Encoded {
    encode(&Record::Usage(usage), Before::Item(item))
}

fn change(usage: Usage, before: Before<'_>) -> Change {
    let key = item_key(&usage.key);
    let encoded = encode(&Record::Usage(usage), before);
    Change::Update(Update { key, actions: encoded.actions, conditions: encoded.pins })
}

/// Whether this program's aggregator wrote the item: then it has the last sequence number.
fn is_ours(item: &Item) -> bool {
    item.keys().any(|name| name.starts_with("seq"))
}

fn amounts(key: &UsageKey, item: &Item) -> Result<Amounts, MigrateError> {
    let malformed = |error: &dyn std::fmt::Display| {
        TableError::new(
            TableErrorKind::Incompatible,
            format!("a usage item does not decode: {error}"),
        )
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

fn subtract(from: &mut Amounts, less: &Amounts) {
    for (name, amount) in less {
        *from.entry(name.clone()).or_default() -= amount;
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
