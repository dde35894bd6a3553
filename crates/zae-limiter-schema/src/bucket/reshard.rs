//! Splitting one shard of a bucket in two, and merging two into one.
//!
//! Shard `s` of `n` holds the share `s` of `n` of every limit: of its ceiling, and of what it earns. A
//! split leaves it the share `s` of `2n` and gives the share `s + n` of `2n` to a new shard: together
//! exactly what it was. Both change in one transaction, so that the shares always add up to the limit,
//! whatever crashes. Some shards of a bucket may be split while others are not yet. The first shard is
//! split first and merged last, so that its count is the highest.
//!
//! A merged shard stays as a retired item for one day, with a count that is not above its number. A
//! process that still writes to it sees at once that it holds nothing.

use std::sync::Arc;
use std::time::Duration;

use zae_limiter_core::{Bucket, Cell, Millitokens, Timestamp};

use super::item::share_of;
use super::{
    After, Alive, BucketItem, Expiry, IDLE, ONE_WRITE, Owner, REFILLED_AT, REMAINDERS_AT,
    SHARD_COUNT, SHARDS_SEEN, TTL, WCU, WCU_CAPACITY, attribute, count_write, create,
    next_generation, pin_balances, pin_rate, pin_snapshot, push_copies, push_idle, push_limits,
    push_limits_at, push_remainder, push_tokens, push_whole_wcu, same_shard_count, ttl_of,
};
use crate::expression::{Action, Condition};
use crate::keys::BucketItemKey;
use crate::table::{Change, Update};
use crate::value::Value;

/// How long a retired shard stays in the table.
const RETIRED_FOR: Duration = Duration::from_secs(24 * 60 * 60);

/// The `wcu` balance after a split: 800 of 1,000 writes. High enough that the same rush does not split
/// the shard again, low enough that a longer rush does.
const WRITES_AFTER_SPLIT: i64 = WCU_CAPACITY * 8 / 10;

/// A shard, and the one that was or will be split off it.
#[derive(Clone, Copy, Debug)]
pub struct ShardPair<'a> {
    /// The shard with the lower number.
    pub low: &'a BucketItem,
    /// The shard with the higher number, if its item exists.
    pub high: Option<&'a BucketItem>,
}

fn keys(key: &BucketItemKey, distance: u32) -> [BucketItemKey; 2] {
    let high = BucketItemKey { bucket: key.bucket.clone(), shard: key.shard + distance };
    [key.clone(), high]
}

/// Splits a shard in two. Balances and debts are split as the limits are. Time since `rf` is not added
/// yet; both shards earn their share of it later.
pub fn split(key: &BucketItemKey, pair: ShardPair<'_>, now: Timestamp) -> Vec<Change> {
    let snapshot = pair.low;
    let old_count = snapshot.shard_count.next_power_of_two();
    let count = 2 * old_count;
    let [low_key, high_key] = keys(key, old_count);
    let (mut actions, mut conditions) = (Vec::new(), Vec::new());
    pin_snapshot(snapshot, &mut conditions);
    conditions.push(same_shard_count(snapshot.shard_count));
    conditions.push(Alive::After(now).condition());
    actions.push(Action::Set(SHARD_COUNT.to_owned(), Value::number(count.into())));
    actions.push(next_generation(snapshot, now));
    Expiry::Never.push(&mut actions);
    if let Some(expiry) = snapshot.expires_at {
        push_idle(&mut actions, key, expiry.millis_since(now));
    }
    if snapshot.wcu.is_some() {
        let left = Value::number(WRITES_AFTER_SPLIT);
        actions.push(Action::Set(attribute(WCU, "tk"), left));
        actions.push(Action::Add(attribute(WCU, "tc"), Value::number(ONE_WRITE)));
    }
    let [low, high] = split_states(snapshot);
    for (at, ((name, whole), cell)) in
        snapshot.whole.iter().zip(snapshot.bucket.cells()).enumerate()
    {
        let [stays, goes] = [&low, &high].map(|bucket| ceiling(bucket, at));
        let tokens = attribute(name.as_str(), "tk");
        let all = stays + goes;
        let leaving = high.cells()[at].tokens.get();
        pin_rate(name.as_str(), whole, &mut conditions);
        if cell.tokens.get() >= all {
            conditions.push(Condition::AtLeast(tokens.clone(), Value::number(all)));
            actions.push(Action::Set(tokens, Value::number(stays)));
        } else {
            if leaving > 0 {
                conditions.push(Condition::AtLeast(tokens.clone(), Value::number(leaving)));
            }
            let highest = Value::number(stays.saturating_add(leaving));
            conditions.push(Condition::AtMost(tokens.clone(), highest));
            if leaving != 0 {
                actions.push(Action::Add(tokens, Value::number(leaving.saturating_neg())));
            }
        }
    }
    let low = Update { key: low_key.item_key(), actions, conditions };
    let limits_at = snapshot.limits_at;
    let after = After { bucket: &high, whole: &snapshot.whole, shard_count: count, limits_at };
    let owner = Owner { parent: snapshot.parent.as_ref() };
    let high = match pair.high {
        None => create(&high_key, &after, &owner, Expiry::Never),
        Some(empty) => rebuild(&high_key, empty, &after, &owner),
    };
    let mut changes = vec![Change::Update(low), Change::Update(high)];
    if key.shard != 0 {
        // The first shard must have the highest count: deleting the bucket finds the others by it.
        let first = BucketItemKey { bucket: key.bucket.clone(), shard: 0 };
        let count = Condition::AtLeast(SHARD_COUNT.to_owned(), Value::number(count.into()));
        changes.push(Change::Check(first.item_key(), vec![count]));
    }
    changes
}

fn ceiling(bucket: &Bucket, at: usize) -> i64 {
    bucket.limits().rates()[at].capacity().get()
}

/// The states of a shard and of the one that is split off it.
fn split_states(snapshot: &BucketItem) -> [Bucket; 2] {
    let old_count = snapshot.shard_count.next_power_of_two();
    let [low, high] = [snapshot.shard, snapshot.shard + old_count]
        .map(|shard| share_of(&snapshot.whole, shard, 2 * old_count));
    let (mut stay, mut go) = (Vec::new(), Vec::new());
    for (at, cell) in snapshot.bucket.cells().iter().enumerate() {
        let [stays, goes] = [&low, &high].map(|share| share.rates()[at].capacity().get());
        let all = stays + goes;
        let tokens = cell.tokens.get();
        let leaving = i128::from(tokens) * i128::from(goes);
        let leaving = i64::try_from(leaving.div_euclid(all.into())).unwrap_or(0);
        let left = if tokens >= all { stays } else { tokens - leaving };
        stay.push(Cell { tokens: Millitokens::new(left), ..*cell });
        go.push(Cell { tokens: Millitokens::new(leaving), ..Cell::default() });
    }
    let since = snapshot.bucket.refilled_at();
    [Bucket::from_parts(low, stay, since), Bucket::from_parts(high, go, since)]
}

/// The two shards after [`split`], if no other client wrote in between. Only their balances, limits and count are
/// exact.
pub fn after_split(snapshot: &BucketItem) -> [BucketItem; 2] {
    let old_count = snapshot.shard_count.next_power_of_two();
    let [low, high] = split_states(snapshot);
    let (shard_count, expires_at) = (2 * old_count, None);
    let shard =
        |shard, bucket| BucketItem { shard, bucket, shard_count, expires_at, ..snapshot.clone() };
    [shard(snapshot.shard, low), shard(snapshot.shard + old_count, high)]
}

/// The shard after [`merge`], as exact as those of [`after_split`].
pub fn after_merge(pair: ShardPair<'_>, now: Timestamp) -> BucketItem {
    let shard_count = pair.low.shard_count.next_power_of_two() / 2;
    let (bucket, _) = merged_state(pair, now);
    BucketItem { bucket, shard_count, ..pair.low.clone() }
}

/// Turns a retired item into a shard again. Net consumption keeps counting.
fn rebuild(
    key: &BucketItemKey,
    snapshot: &BucketItem,
    after: &After<'_>,
    owner: &Owner<'_>,
) -> Update {
    let (mut actions, mut conditions) = (Vec::new(), Vec::new());
    pin_snapshot(snapshot, &mut conditions);
    conditions.push(same_shard_count(snapshot.shard_count));
    actions.push(next_generation(snapshot, after.bucket.refilled_at()));
    for name in snapshot.whole.names() {
        if after.whole.position(name.as_str()).is_none() {
            for suffix in ["tk", "cp", "ra", "rp", "tc", "rm", "bx"] {
                actions.push(Action::Remove(attribute(name.as_str(), suffix)));
            }
        }
    }
    push_limits(&mut actions, after.bucket, after.whole);
    push_tokens(&mut actions, after.bucket);
    push_limits_at(&mut actions, after.limits_at, snapshot.limits_at);
    for name in after.whole.names() {
        actions.push(Action::Add(attribute(name.as_str(), "tc"), Value::number(0)));
        actions.push(Action::Remove(attribute(name.as_str(), "bx")));
    }
    push_whole_wcu(&mut actions);
    actions.push(Action::Add(attribute(WCU, "tc"), Value::number(ONE_WRITE)));
    let count = Value::number(after.shard_count.into());
    actions.push(Action::Set(SHARD_COUNT.to_owned(), count));
    push_copies(&mut actions, key, owner);
    Expiry::Never.push(&mut actions);
    Update { key: key.item_key(), actions, conditions }
}

/// Creates a shard that is missing or retired although the shard it was split from counts it: another
/// client has raised that count, and nothing else. The new shard starts with no tokens. The write
/// requires that the count is still the same, because the bucket may be deleted at any time.
pub fn restore(
    key: &BucketItemKey,
    left: Option<&BucketItem>,
    origin: &BucketItem,
    after: &After<'_>,
    owner: &Owner<'_>,
) -> Vec<Change> {
    let origin_key = BucketItemKey { bucket: key.bucket.clone(), shard: origin.shard };
    let still = Change::Check(origin_key.item_key(), vec![same_shard_count(origin.shard_count)]);
    let made = match left {
        None => create(key, after, owner, Expiry::Never),
        Some(left) => rebuild(key, left, after, owner),
    };
    vec![Change::Update(made), still]
}

/// Merges two shards into one; `None` when their limits differ. The higher one is retired. A bucket that
/// had an expiry before it was split has one again once it is in one shard.
pub fn merge(key: &BucketItemKey, pair: ShardPair<'_>, now: Timestamp) -> Option<Vec<Change>> {
    let ShardPair { low: snapshot, high } = pair;
    let old_count = snapshot.shard_count.next_power_of_two();
    let count = old_count / 2;
    let [low_key, high_key] = keys(key, count);
    if high.is_some_and(|high| high.whole != snapshot.whole) {
        return None;
    }
    let (bucket, at) = merged_state(pair, now);
    let (mut actions, mut conditions) = (Vec::new(), Vec::new());
    pin_snapshot(snapshot, &mut conditions);
    pin_balances(snapshot, &mut conditions);
    conditions.push(same_shard_count(snapshot.shard_count));
    conditions.push(Alive::After(now).condition());
    actions.push(Action::Set(SHARD_COUNT.to_owned(), Value::number(count.into())));
    if low_key.shard == 0 {
        let seen = Value::number(snapshot.shards_seen.max(old_count).into());
        actions.push(Action::Set(SHARDS_SEEN.to_owned(), seen));
    }
    actions.push(next_generation(snapshot, at));
    for name in [REFILLED_AT, REMAINDERS_AT] {
        actions.push(Action::Set(name.to_owned(), Value::number(at.as_millis())));
    }
    // The limits are the same, so the later reading counts.
    let limits_at = high.and_then(|high| high.limits_at).max(snapshot.limits_at);
    push_limits_at(&mut actions, limits_at, snapshot.limits_at);
    for (name, cell) in snapshot.whole.names().iter().zip(bucket.cells()) {
        let tokens = Value::number(cell.tokens.get());
        actions.push(Action::Set(attribute(name.as_str(), "tk"), tokens));
        push_remainder(&mut actions, name, cell.remainder);
    }
    if let Some(writes) = snapshot.wcu {
        count_write(&mut actions, writes, snapshot.bucket.refilled_at(), at);
    }
    if let Some(idle_s) = snapshot.idle_s.filter(|_| count == 1) {
        // Not before it is full.
        let lives = Duration::from_secs(idle_s.into()).max(bucket.wait_until_full(at));
        Expiry::At(at.saturating_add(lives)).push(&mut actions);
        actions.push(Action::Remove(IDLE.to_owned()));
    }
    let low = Update { key: low_key.item_key(), actions, conditions };
    let high = retire(&high_key, pair, count, at);
    Some(vec![Change::Update(low), Change::Update(high)])
}

/// What two shards hold together, remainders included, and at which moment: now, or when they were last refilled.
fn merged_state(ShardPair { low, high }: ShardPair<'_>, now: Timestamp) -> (Bucket, Timestamp) {
    let count = low.shard_count.next_power_of_two() / 2;
    let refilled_at = low.bucket.refilled_at();
    let at = high.map_or(refilled_at, |high| refilled_at.max(high.bucket.refilled_at())).max(now);
    let mut low_bucket = low.bucket.clone();
    low_bucket.refill(at);
    let high_bucket = high.map(|high| {
        let mut bucket = high.bucket.clone();
        bucket.refill(at);
        bucket
    });
    let cells = low_bucket.limits().rates().iter().zip(low_bucket.cells()).enumerate();
    let cells: Vec<Cell> = cells
        .map(|(place, (rate, cell))| {
            let other = high_bucket.as_ref().map(|bucket| bucket.cells()[place]);
            let other = other.unwrap_or_default();
            let remainder = cell.remainder + other.remainder;
            let carried = Millitokens::new(i64::from(remainder >= rate.period_ms()));
            let tokens = cell.tokens.saturating_add(other.tokens).saturating_add(carried);
            Cell { tokens, remainder: remainder % rate.period_ms(), ..*cell }
        })
        .collect();
    (Bucket::from_parts(share_of(&low.whole, low.shard, count), cells, at), at)
}

/// Retires the shard whose share the other one takes over.
fn retire(key: &BucketItemKey, pair: ShardPair<'_>, count: u32, at: Timestamp) -> Update {
    let expires_at = at.saturating_add(RETIRED_FOR);
    let Some(snapshot) = pair.high else {
        // The item is created, so that a process with an older snapshot does not restore the shard.
        let nothing = vec![Cell::default(); pair.low.whole.len()];
        let bucket = Bucket::from_parts(Arc::clone(&pair.low.whole), nothing, at);
        let (whole, limits_at) = (&*pair.low.whole, pair.low.limits_at);
        let after = After { bucket: &bucket, whole, shard_count: count, limits_at };
        let owner = Owner { parent: pair.low.parent.as_ref() };
        return create(key, &after, &owner, Expiry::At(expires_at));
    };
    let (mut actions, mut conditions) = (Vec::new(), Vec::new());
    pin_snapshot(snapshot, &mut conditions);
    pin_balances(snapshot, &mut conditions);
    conditions.push(same_shard_count(snapshot.shard_count));
    actions.push(Action::Set(SHARD_COUNT.to_owned(), Value::number(count.into())));
    actions.push(next_generation(snapshot, at));
    for name in snapshot.whole.names() {
        actions.push(Action::Set(attribute(name.as_str(), "tk"), Value::number(0)));
        actions.push(Action::Remove(attribute(name.as_str(), "rm")));
    }
    actions.push(Action::Set(TTL.to_owned(), Value::number(ttl_of(expires_at))));
    Update { key: key.item_key(), actions, conditions }
}

#[cfg(test)]
mod tests {
    use zae_limiter_core::{BucketKey, EntityId, Limit, LimitSet, NamespaceId, ResourceName};

    use super::super::LIMITS_AT;
    use super::*;

    fn shard(shard: u32, limits_at: Option<i64>) -> BucketItem {
        let whole = Arc::new(LimitSet::new([Limit::per_minute("rpm", 100)]).unwrap());
        let cells = vec![Cell::default(); whole.len()];
        let since = Timestamp::from_millis(1_000);
        BucketItem {
            shard,
            bucket: Bucket::from_parts(share_of(&whole, shard, 2), cells, since),
            whole,
            wcu: None,
            generation: 1,
            writes: 0,
            shard_count: 2,
            shards_seen: 2,
            parent: None,
            expires_at: None,
            idle_s: None,
            limits_at: limits_at.map(Timestamp::from_millis),
            has_remainders: true,
            is_remnant: false,
        }
    }

    #[test]
    fn a_merged_shard_keeps_the_later_time_at_which_limits_were_read() {
        let bucket = BucketKey {
            namespace: NamespaceId::new("ns000000001").unwrap(),
            entity: EntityId::new("e").unwrap(),
            resource: ResourceName::new("r").unwrap(),
        };
        let key = BucketItemKey { bucket, shard: 0 };
        for (low, high, set) in [
            (None, None, None),
            (Some(5), None, None),
            (Some(5), Some(4), None),
            (Some(5), Some(5), None),
            (Some(5), Some(6), Some(6)),
            (None, Some(6), Some(6)),
        ] {
            let (one, other) = (shard(0, low), shard(1, high));
            let pair = ShardPair { low: &one, high: Some(&other) };
            let changes = merge(&key, pair, Timestamp::from_millis(2_000)).unwrap();
            let Change::Update(update) = &changes[0] else { panic!("an update") };
            let set = set.map(|at| Action::Set(LIMITS_AT.to_owned(), Value::number(at)));
            let found = update.actions.iter().find(|one| format!("{one:?}").contains(LIMITS_AT));
            assert_eq!(found, set.as_ref(), "{low:?} and {high:?}");
        }
    }
}
