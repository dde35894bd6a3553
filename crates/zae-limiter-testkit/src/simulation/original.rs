//! Clients with the behaviour of the Python original.
//!
//! They use the balances, rates, refill time and shard count of an item, and none of the other
//! attributes. They differ from our clients:
//!
//! - they take from a shard without checking its refill time or its ceiling: the idle time of a
//!   full shard refills twice;
//! - they take after a refill without checking the balance again: it may end below zero;
//! - they split a bucket by raising a number on its first shard, and announce it to the other
//!   shards later or never. The first client that uses a new shard creates it, full;
//! - older ones know nothing of shares: they create and refill shards as large as the whole bucket.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use zae_limiter_core::{BucketKey, Clock, LimitSet, Rate, Timestamp};
use zae_limiter_schema::{
    Action, BucketItemKey, Condition, Consistency, Item, Table, TableError, Update, Updated, Value,
};

use super::ClientClock;
use super::scene::draw_amounts;
use super::workload::{Stage, locked};
use crate::table::ClientId;

/// The most shards to which the original splits a bucket.
const SHARDS_MAX: i64 = 16;

/// The reserved limit: the amount of one write, the ceiling and the period.
const ONE_WRITE: i64 = 1_000;
const WRITES_MAX: i64 = 1_000_000;
const WRITES_PERIOD_MS: i64 = 1_000;

/// A client of the original.
pub(super) struct Original {
    table: Arc<dyn Table>,
    clock: ClientClock,
    /// Whether it is a newer one, which divides limits into shares and announces splits.
    knows_shares: bool,
    /// The shard counts that it has read, by bucket.
    counts: Mutex<BTreeMap<usize, i64>>,
}

/// Amounts to take, by limit, in millitokens.
type Amounts = BTreeMap<String, i64>;

impl Original {
    pub(super) fn new(stage: &Stage, id: ClientId) -> Self {
        let skew_us = stage.scene.skew_us;
        let (offset, is_new) = stage.draw(|rng| (rng.i64(-skew_us..=skew_us), rng.u32(..4) > 0));
        Self {
            table: Arc::new(stage.world.table.for_client(id)),
            clock: ClientClock::new(Arc::clone(&stage.world.time), skew_us, offset, 0),
            knows_shares: is_new,
            counts: Mutex::default(),
        }
    }

    /// Makes one call, and ignores errors.
    pub(super) async fn call(&self, stage: &Stage) {
        let bucket = stage.draw(|rng| rng.usize(..stage.scene.buckets.len()));
        let _ = match stage.draw(|rng| rng.u32(..5)) {
            0 => self.split(stage, bucket).await,
            _ => self.acquire(stage, bucket).await,
        };
    }

    fn count(&self, bucket: usize) -> i64 {
        locked(&self.counts).get(&bucket).copied().unwrap_or(1)
    }

    /// Raises the cached shard count. It never falls.
    fn raise_count(&self, bucket: usize, count: i64) {
        let mut counts = locked(&self.counts);
        let cached = counts.entry(bucket).or_insert(1);
        *cached = count.max(*cached);
    }

    async fn acquire(&self, stage: &Stage, bucket: usize) -> Result<(), TableError> {
        let target = stage.scene.target(bucket, 0, None);
        let drawn = stage.draw(|rng| draw_amounts(rng, &[Arc::clone(&target)]));
        let amounts: Amounts =
            drawn.into_iter().map(|(name, amount)| (name, amount.get())).collect();
        if amounts.values().all(|amount| *amount == 0) {
            return Ok(());
        }
        let shard = stage.draw(|rng| rng.i64(..self.count(bucket)));
        let key = item_key_of(target.key(), shard);
        let taken = match self.table.update(&take(&key, &amounts)).await? {
            Updated::Done(item, _) => {
                self.raise_count(bucket, number(&item, "shard_count").unwrap_or(1));
                true
            }
            Updated::Unmet(Some(item), _) => {
                self.raise_count(bucket, number(&item, "shard_count").unwrap_or(1));
                self.refill(&key, &amounts).await?
            }
            Updated::Unmet(None, _) => self.create(bucket, &key, target.limits(), &amounts).await?,
        };
        if !taken || stage.draw(|rng| rng.bool()) {
            return Ok(());
        }
        stage.pause().await;
        self.refund(stage, &key, &amounts).await
    }

    /// Reads the shard, refills it, and takes: on condition that the refill time is unchanged.
    async fn refill(&self, key: &BucketItemKey, amounts: &Amounts) -> Result<bool, TableError> {
        let read = self.table.read(&[key.item_key()], Consistency::Strong).await?;
        let Some(item) = read.items.into_iter().next() else { return Ok(false) };
        let now_ms = self.clock.now().as_millis();
        let Some(rf) = number(&item, "rf").filter(|rf| *rf < now_ms) else { return Ok(false) };
        let count = if self.knows_shares { number(&item, "shard_count").unwrap_or(1) } else { 1 };
        let mut actions = vec![Action::Set("rf".to_owned(), Value::number(now_ms))];
        for limit in limits_of(&item) {
            let of = |suffix: &str| number(&item, &attribute(&limit, suffix)).unwrap_or(0);
            let (held, whole) = (of("tk"), limit == "wcu");
            let [ceiling, amount] =
                [of("cp"), of("ra")].map(|all| if whole { all } else { all / count });
            let earned = (now_ms - rf) * amount / of("rp").max(1);
            let refilled = (held + earned).min(ceiling) - held;
            let taken = if whole { ONE_WRITE } else { amounts.get(&limit).copied().unwrap_or(0) };
            if held + refilled < taken && !whole {
                return Ok(false);
            }
            actions.push(add(&attribute(&limit, "tk"), refilled - taken));
            actions.push(add(&attribute(&limit, "tc"), taken));
        }
        let conditions = vec![Condition::Equal("rf".to_owned(), Value::number(rf))];
        let update = Update { key: key.item_key(), actions, conditions };
        match self.table.update(&update).await? {
            Updated::Done(..) => Ok(true),
            // Another client has refilled it: takes without a refill.
            Updated::Unmet(..) => {
                let again = self.table.update(&take(key, amounts)).await?;
                Ok(matches!(again, Updated::Done(..)))
            }
        }
    }

    /// Creates a shard, full less what is taken.
    async fn create(
        &self,
        bucket: usize,
        key: &BucketItemKey,
        limits: &LimitSet,
        amounts: &Amounts,
    ) -> Result<bool, TableError> {
        let count = self.count(bucket);
        let share = if self.knows_shares { count } else { 1 };
        let mut actions = Vec::new();
        let mut set = |name: String, value| actions.push(Action::Set(name, Value::number(value)));
        for (name, rate) in limits.iter() {
            let taken = amounts.get(name.as_str()).copied().unwrap_or(0);
            let left = rate.capacity().get() / share - taken;
            if left < 0 {
                return Ok(false);
            }
            push_limit(&mut set, name.as_str(), rate, left, taken);
        }
        push_writes(&mut set);
        set("rf".to_owned(), self.now().as_millis());
        set("shard_count".to_owned(), count);
        let conditions = vec![Condition::Absent("PK".to_owned())];
        let update = Update { key: key.item_key(), actions, conditions };
        Ok(matches!(self.table.update(&update).await?, Updated::Done(..)))
    }

    fn now(&self) -> Timestamp {
        self.clock.now()
    }

    /// Refunds some of it, without checking whether the shard still exists.
    async fn refund(
        &self,
        stage: &Stage,
        key: &BucketItemKey,
        amounts: &Amounts,
    ) -> Result<(), TableError> {
        let mut actions = Vec::new();
        for (limit, amount) in amounts {
            let back = stage.draw(|rng| rng.i64(0..=*amount));
            actions.push(add(&attribute(limit, "tk"), back));
            actions.push(add(&attribute(limit, "tc"), -back));
        }
        let update = Update { key: key.item_key(), actions, conditions: Vec::new() };
        self.table.update(&update).await.map(drop)
    }

    /// Splits a bucket: on the first shard, and then on the other existing ones. Sometimes it stops
    /// before it has announced the split to all of them.
    async fn split(&self, stage: &Stage, bucket: usize) -> Result<(), TableError> {
        let (count, key) = (self.count(bucket), &stage.scene.buckets[bucket].key);
        if count >= SHARDS_MAX {
            return Ok(());
        }
        let set = |shard: i64, condition: Condition| Update {
            key: item_key_of(key, shard).item_key(),
            actions: vec![Action::Set("shard_count".to_owned(), Value::number(2 * count))],
            conditions: vec![condition],
        };
        let name = || "shard_count".to_owned();
        let first = set(0, Condition::Equal(name(), Value::number(count)));
        let (Updated::Done(found, _) | Updated::Unmet(Some(found), _)) =
            self.table.update(&first).await?
        else {
            return Ok(());
        };
        let found = number(&found, "shard_count").unwrap_or(1);
        self.raise_count(bucket, found);
        for shard in 1..count {
            if found != 2 * count || !self.knows_shares || stage.draw(|rng| rng.u32(..8)) == 0 {
                return Ok(());
            }
            let below = Condition::AtMost(name(), Value::number(2 * count - 1));
            let _ = self.table.update(&set(shard, below)).await?;
        }
        Ok(())
    }
}

fn item_key_of(bucket: &BucketKey, shard: i64) -> BucketItemKey {
    BucketItemKey { bucket: bucket.clone(), shard: u32::try_from(shard).unwrap_or(0) }
}

fn number(item: &Item, name: &str) -> Option<i64> {
    item.get(name).and_then(Value::as_i64)
}

fn attribute(limit: &str, suffix: &str) -> String {
    format!("b_{limit}_{suffix}")
}

fn add(name: &str, amount: i64) -> Action {
    Action::Add(name.to_owned(), Value::number(amount))
}

/// The names of an item's limits, including the reserved one.
fn limits_of(item: &Item) -> Vec<String> {
    let limit = |name: &String| Some(name.strip_prefix("b_")?.strip_suffix("_cp")?.to_owned());
    item.keys().filter_map(limit).collect()
}

/// An update that takes if the balance suffices, without a refill.
fn take(key: &BucketItemKey, amounts: &Amounts) -> Update {
    let reserved = ("wcu".to_owned(), ONE_WRITE);
    let (mut actions, mut conditions) = (Vec::new(), vec![Condition::Exists("PK".to_owned())]);
    for (limit, amount) in amounts.clone().into_iter().chain([reserved]) {
        actions.push(add(&attribute(&limit, "tk"), -amount));
        actions.push(add(&attribute(&limit, "tc"), amount));
        conditions.push(Condition::AtLeast(attribute(&limit, "tk"), Value::number(amount)));
    }
    Update { key: key.item_key(), actions, conditions }
}

fn push_limit(set: &mut impl FnMut(String, i64), name: &str, rate: &Rate, left: i64, taken: i64) {
    let period = i64::try_from(rate.period_ms()).unwrap_or(i64::MAX);
    for (suffix, value) in [
        ("tk", left),
        ("tc", taken),
        ("cp", rate.capacity().get()),
        ("ra", rate.refill_amount().get()),
        ("rp", period),
    ] {
        set(attribute(name, suffix), value);
    }
}

fn push_writes(set: &mut impl FnMut(String, i64)) {
    for (suffix, value) in [
        ("tk", WRITES_MAX),
        ("tc", 0),
        ("cp", WRITES_MAX),
        ("ra", WRITES_MAX),
        ("rp", WRITES_PERIOD_MS),
    ] {
        set(attribute("wcu", suffix), value);
    }
}
