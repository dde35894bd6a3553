//! A bucket in several shards: how one shard becomes two, and two become one again.
//!
//! A shard with the number `s` of a bucket in `n` shards holds the share `s` of `n` of every limit: of
//! its ceiling, and of what it earns. Splitting it makes it the share `s` of `2n`, and puts the share
//! `s + n` of `2n` beside it: together exactly what it was. Both happen in one transaction, so that
//! at every moment, whoever crashes, the shares add up to the limit. The shards of a bucket need not
//! be split equally often; the first shard is split first and merged last, so that its
//! count is the highest.
//!
//! A shard that was merged with another stays as an item for a day, with a count that is not
//! above its number: whoever still writes to it learns at once that it holds nothing.

use std::sync::Arc;
use std::time::Duration;

use zae_limiter_core::{Bucket, Cell, Millitokens, Timestamp};

use super::item::share_of;
use super::{
    After, Alive, BucketItem, Expiry, IDLE, ONE_WRITE, Owner, REFILLED_AT, REMAINDERS_AT,
    SHARD_COUNT, SHARDS_SEEN, TTL, WCU, WCU_CAPACITY, attribute, count_write, create,
    next_generation, pin_balances, pin_known, pin_rate, push_copies, push_idle, push_limits,
    push_limits_at, push_remainder, push_tokens, push_whole_wcu, same_shard_count, ttl_of,
};
use crate::expression::{Action, Condition};
use crate::keys::BucketItemKey;
use crate::table::{Change, Update};
use crate::value::Value;

/// How long a shard is kept that holds nothing any more.
const RETIRED_FOR: Duration = Duration::from_secs(24 * 60 * 60);

/// What a split shard may still take at once, of its writes in a second: enough that it is not
/// split again by the same rush, little enough that it is when the rush goes on.
const WRITES_AFTER_SPLIT: i64 = WCU_CAPACITY * 8 / 10;

/// A shard, and the one beside it that it was or is split into.
#[derive(Clone, Copy, Debug)]
pub struct Halves<'a> {
    /// The shard with the lower number.
    pub low: &'a BucketItem,
    /// The other, if there is an item.
    pub high: Option<&'a BucketItem>,
}

fn keys(key: &BucketItemKey, distance: u32) -> [BucketItemKey; 2] {
    let high = BucketItemKey { bucket: key.bucket.clone(), shard: key.shard + distance };
    [key.clone(), high]
}

/// Splits a shard in two. What it holds is split as its limits are, debts too; time that was not
/// paid out yet will be, to both.
pub fn split(key: &BucketItemKey, halves: Halves<'_>, now: Timestamp) -> Vec<Change> {
    let known = halves.low;
    let old_count = known.shard_count.next_power_of_two();
    let count = 2 * old_count;
    let [low_key, high_key] = keys(key, old_count);
    let (mut actions, mut conditions) = (Vec::new(), Vec::new());
    pin_known(known, &mut conditions);
    conditions.push(same_shard_count(known.shard_count));
    conditions.push(Alive::After(now).condition());
    actions.push(Action::Set(SHARD_COUNT.to_owned(), Value::number(count.into())));
    actions.push(next_generation(known, now));
    Expiry::Never.push(&mut actions);
    if let Some(expiry) = known.expires_at {
        push_idle(&mut actions, key, expiry.millis_since(now));
    }
    if known.wcu.is_some() {
        let left = Value::number(WRITES_AFTER_SPLIT);
        actions.push(Action::Set(attribute(WCU, "tk"), left));
        actions.push(Action::Add(attribute(WCU, "tc"), Value::number(ONE_WRITE)));
    }
    let [low, high] = [low_key.shard, high_key.shard].map(|s| share_of(&known.whole, s, count));
    let mut moved = Vec::new();
    for (at, ((name, whole), cell)) in known.whole.iter().zip(known.bucket.cells()).enumerate() {
        let [stays, goes] = [&low, &high].map(|share| share.rates()[at].capacity().get());
        let tokens = attribute(name.as_str(), "tk");
        let all = stays + goes;
        let part = i128::from(cell.tokens.get()) * i128::from(goes);
        let part = i64::try_from(part.div_euclid(all.into())).unwrap_or(0);
        pin_rate(name.as_str(), whole, &mut conditions);
        if cell.tokens.get() >= all {
            conditions.push(Condition::AtLeast(tokens.clone(), Value::number(all)));
            actions.push(Action::Set(tokens, Value::number(stays)));
        } else {
            if part > 0 {
                conditions.push(Condition::AtLeast(tokens.clone(), Value::number(part)));
            }
            let highest = Value::number(stays.saturating_add(part));
            conditions.push(Condition::AtMost(tokens.clone(), highest));
            if part != 0 {
                actions.push(Action::Add(tokens, Value::number(part.saturating_neg())));
            }
        }
        moved.push(Cell { tokens: Millitokens::new(part), ..Cell::default() });
    }
    let low = Update { key: low_key.item_key(), actions, conditions };
    let bucket = Bucket::from_parts(high, moved, known.bucket.refilled_at());
    let limits_at = known.limits_at;
    let after = After { bucket: &bucket, whole: &known.whole, shard_count: count, limits_at };
    let owner = Owner { parent: known.parent.as_ref() };
    let high = match halves.high {
        None => create(&high_key, &after, &owner, Expiry::Never),
        Some(empty) => revive(&high_key, empty, &after, &owner),
    };
    let mut changes = vec![Change::Update(low), Change::Update(high)];
    if key.shard != 0 {
        // The first shard has the highest count: by that the others are found when the bucket is deleted.
        let first = BucketItemKey { bucket: key.bucket.clone(), shard: 0 };
        let count = Condition::AtLeast(SHARD_COUNT.to_owned(), Value::number(count.into()));
        changes.push(Change::Check(first.item_key(), vec![count]));
    }
    changes
}

/// Makes a shard of an item that holds nothing any more. Net consumption goes on counting.
fn revive(key: &BucketItemKey, known: &BucketItem, after: &After<'_>, owner: &Owner<'_>) -> Update {
    let (mut actions, mut conditions) = (Vec::new(), Vec::new());
    pin_known(known, &mut conditions);
    conditions.push(same_shard_count(known.shard_count));
    actions.push(next_generation(known, after.bucket.refilled_at()));
    for name in known.whole.names() {
        if after.whole.position(name.as_str()).is_none() {
            for suffix in ["tk", "cp", "ra", "rp", "tc", "rm", "bx"] {
                actions.push(Action::Remove(attribute(name.as_str(), suffix)));
            }
        }
    }
    push_limits(&mut actions, after.bucket, after.whole);
    push_tokens(&mut actions, after.bucket);
    push_limits_at(&mut actions, after.limits_at, known.limits_at);
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

/// Makes a shard that the one it was split from counts as there, although it is missing, or only an item
/// is left that holds nothing: another client has raised that one's count, and nothing else. It starts
/// with nothing, and only if the other one still says so: the bucket may be deleted at any moment.
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
        Some(left) => revive(key, left, after, owner),
    };
    vec![Change::Update(made), still]
}

/// Makes one shard of two, if they have the same limits: `None` where they do not. The higher one
/// stays behind empty. A bucket that expired before it was split does so again once it is in one shard.
pub fn merge(key: &BucketItemKey, halves: Halves<'_>, now: Timestamp) -> Option<Vec<Change>> {
    let Halves { low: known, high } = halves;
    let old_count = known.shard_count.next_power_of_two();
    let count = old_count / 2;
    let [low_key, high_key] = keys(key, count);
    if high.is_some_and(|high| high.whole != known.whole) {
        return None;
    }
    let refilled_at = known.bucket.refilled_at();
    let at = high.map_or(refilled_at, |high| refilled_at.max(high.bucket.refilled_at())).max(now);
    let (mut actions, mut conditions) = (Vec::new(), Vec::new());
    pin_known(known, &mut conditions);
    pin_balances(known, &mut conditions);
    conditions.push(same_shard_count(known.shard_count));
    conditions.push(Alive::After(now).condition());
    actions.push(Action::Set(SHARD_COUNT.to_owned(), Value::number(count.into())));
    if low_key.shard == 0 {
        let seen = Value::number(known.shards_seen.max(old_count).into());
        actions.push(Action::Set(SHARDS_SEEN.to_owned(), seen));
    }
    actions.push(next_generation(known, at));
    for name in [REFILLED_AT, REMAINDERS_AT] {
        actions.push(Action::Set(name.to_owned(), Value::number(at.as_millis())));
    }
    // The limits are the same. Whoever read them last says how old others may be.
    let limits_at = high.and_then(|high| high.limits_at).max(known.limits_at);
    push_limits_at(&mut actions, limits_at, known.limits_at);
    let bucket = joined(known, high, low_key.shard, count, at);
    for (name, cell) in known.whole.names().iter().zip(bucket.cells()) {
        let tokens = Value::number(cell.tokens.get());
        actions.push(Action::Set(attribute(name.as_str(), "tk"), tokens));
        push_remainder(&mut actions, name, cell.remainder);
    }
    if let Some(writes) = known.wcu {
        count_write(&mut actions, writes, refilled_at, at);
    }
    if let Some(idle_s) = known.idle_s.filter(|_| count == 1) {
        // Never before it is full.
        let lives = Duration::from_secs(idle_s.into()).max(bucket.wait_until_full(at));
        Expiry::At(at.saturating_add(lives)).push(&mut actions);
        actions.push(Action::Remove(IDLE.to_owned()));
    }
    let low = Update { key: low_key.item_key(), actions, conditions };
    let high = retire(&high_key, halves, count, at);
    Some(vec![Change::Update(low), Change::Update(high)])
}

/// What two shards hold together at a moment, to the last part of a millitoken.
fn joined(
    low: &BucketItem,
    high: Option<&BucketItem>,
    shard: u32,
    count: u32,
    at: Timestamp,
) -> Bucket {
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
            let parts = cell.remainder + other.remainder;
            let carried = Millitokens::new(i64::from(parts >= rate.period_ms()));
            let tokens = cell.tokens.saturating_add(other.tokens).saturating_add(carried);
            Cell { tokens, remainder: parts % rate.period_ms(), ..*cell }
        })
        .collect();
    Bucket::from_parts(share_of(&low.whole, shard, count), cells, at)
}

/// What is left of a shard that another one has taken over.
fn retire(key: &BucketItemKey, halves: Halves<'_>, count: u32, at: Timestamp) -> Update {
    let gone_at = at.saturating_add(RETIRED_FOR);
    let Some(known) = halves.high else {
        // An item all the same, so that nobody brings the shard back who has not seen this.
        let nothing = vec![Cell::default(); halves.low.whole.len()];
        let bucket = Bucket::from_parts(Arc::clone(&halves.low.whole), nothing, at);
        let (whole, limits_at) = (&*halves.low.whole, halves.low.limits_at);
        let after = After { bucket: &bucket, whole, shard_count: count, limits_at };
        let owner = Owner { parent: halves.low.parent.as_ref() };
        return create(key, &after, &owner, Expiry::At(gone_at));
    };
    let (mut actions, mut conditions) = (Vec::new(), Vec::new());
    pin_known(known, &mut conditions);
    pin_balances(known, &mut conditions);
    conditions.push(same_shard_count(known.shard_count));
    actions.push(Action::Set(SHARD_COUNT.to_owned(), Value::number(count.into())));
    actions.push(next_generation(known, at));
    for name in known.whole.names() {
        actions.push(Action::Set(attribute(name.as_str(), "tk"), Value::number(0)));
        actions.push(Action::Remove(attribute(name.as_str(), "rm")));
    }
    actions.push(Action::Set(TTL.to_owned(), Value::number(ttl_of(gone_at))));
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
    fn a_merged_shard_is_as_new_as_the_one_whose_limits_were_read_last() {
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
            let halves = Halves { low: &one, high: Some(&other) };
            let changes = merge(&key, halves, Timestamp::from_millis(2_000)).unwrap();
            let Change::Update(update) = &changes[0] else { panic!("an update") };
            let set = set.map(|at| Action::Set(LIMITS_AT.to_owned(), Value::number(at)));
            let found = update.actions.iter().find(|one| format!("{one:?}").contains(LIMITS_AT));
            assert_eq!(found, set.as_ref(), "{low:?} and {high:?}");
        }
    }
}
