//! The shards of a bucket together. Pure: it depends only on its arguments.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use zae_limiter_core::{Bucket, Cell, Leg, LimitStatus, Millitokens, Takes, Target, Timestamp};
use zae_limiter_schema::SHARD_ZERO;
use zae_limiter_schema::bucket::{BucketItem, share_of};

use super::decide::held_for;

/// The live shards of a bucket, by number.
#[derive(Clone, Debug, Default)]
pub(crate) struct Shards(BTreeMap<u32, BucketItem>);

/// The shard that a shard was split from, and the shard count before; `None` for the first one.
pub(crate) fn origin(shard: u32) -> Option<(u32, u32)> {
    let highest = 1_u32.checked_shl(shard.checked_ilog2()?)?;
    Some((shard - highest, highest))
}

/// The shard that a retired shard was merged into.
pub(crate) fn origin_of(shard: u32) -> u32 {
    origin(shard).map_or(SHARD_ZERO, |(origin, _)| origin)
}

impl Shards {
    /// The items that hold a share. Leaves out expired and retired ones, and those of an earlier bucket.
    pub(crate) fn live(items: impl IntoIterator<Item = BucketItem>, now: Timestamp) -> Self {
        let mut live: BTreeMap<u32, BucketItem> = BTreeMap::new();
        let mut items: Vec<BucketItem> = items.into_iter().collect();
        items.sort_by_key(|item| item.shard);
        for item in items {
            let belongs = match origin(item.shard) {
                None => true,
                Some((origin, count)) => {
                    live.get(&origin).is_some_and(|origin| origin.shard_count > count)
                }
            };
            if belongs && item.is_live(now) {
                live.insert(item.shard, item);
            }
        }
        Self(live)
    }

    /// Whether their shares add up to the whole bucket.
    pub(crate) fn is_complete(&self) -> bool {
        const WHOLE: u64 = 1 << 32;
        let share = |item: &BucketItem| WHOLE / u64::from(item.shard_count.next_power_of_two());
        self.0.values().map(share).sum::<u64>() == WHOLE
    }

    /// The highest shard count on any of them.
    pub(crate) fn count(&self) -> u32 {
        let counts = self.0.values().map(|item| item.shard_count.next_power_of_two());
        counts.max().unwrap_or(1)
    }

    /// The missing shards below `count`. A shard that is not split off yet is not missing.
    pub(crate) fn missing(&self, count: u32) -> Vec<u32> {
        let is_missing = |shard: &u32| {
            let Some((origin, before)) = origin(*shard) else { return false };
            let origin = self.0.get(&origin);
            !self.0.contains_key(shard) && origin.is_some_and(|item| item.shard_count > before)
        };
        (0..count).filter(is_missing).collect()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (u32, &BucketItem)> {
        self.0.iter().map(|(shard, item)| (*shard, item))
    }

    /// The balances of each shard at a moment, under a leg's limits.
    pub(crate) fn buckets(&self, leg: &Leg, now: Timestamp) -> Vec<(u32, Bucket)> {
        self.0.iter().map(|(shard, item)| (*shard, held_for(leg, item, now))).collect()
    }

    /// All shards as one bucket: the whole limits, and the sums of the balances.
    pub(crate) fn whole(&self, now: Option<Timestamp>) -> Option<Bucket> {
        let first = self.0.get(&0)?;
        let refilled_at = self.0.values().map(|item| item.bucket.refilled_at()).max()?;
        let at = now.map_or(refilled_at, |now| now.max(refilled_at));
        if self.0.len() == 1 && first.shard_count == 1 {
            return Some(first.bucket.clone());
        }
        let mut cells = vec![Cell::default(); first.whole.len()];
        for item in self.0.values() {
            let mut bucket = item.bucket.clone();
            bucket.refill(at);
            for (name, sum) in first.whole.names().iter().zip(&mut cells) {
                let Some((cell, _)) = bucket.cell(name.as_str()) else { continue };
                sum.tokens = sum.tokens.saturating_add(cell.tokens);
                sum.consumed = sum.consumed.saturating_add(cell.consumed);
            }
        }
        Some(Bucket::from_parts(Arc::clone(&first.whole), cells, at))
    }
}

/// A shard that is as full as another one of its bucket. No debt is assumed.
pub(crate) fn as_full_as(like: &BucketItem, shard: u32) -> BucketItem {
    let limits = share_of(&like.whole, shard, like.shard_count.next_power_of_two());
    let cells = like.bucket.limits().rates().iter().zip(like.bucket.cells()).zip(limits.rates());
    let cells = cells.map(|((rate, cell), own)| {
        let (ceiling, own) = (rate.capacity().get().into(), i128::from(own.capacity().get()));
        let tokens = i128::from(cell.tokens.get()).clamp(0, ceiling) * own / ceiling.max(1);
        let tokens = Millitokens::new(i64::try_from(tokens).unwrap_or(0));
        Cell { tokens, ..Cell::default() }
    });
    let bucket = Bucket::from_parts(Arc::clone(&limits), cells, like.bucket.refilled_at());
    BucketItem { shard, bucket, ..like.clone() }
}

/// A shard with the state `bucket`, after it was charged.
pub(crate) fn charged(
    item: &BucketItem,
    mut bucket: Bucket,
    target: &Target,
    charges: &Takes,
) -> BucketItem {
    for charge in charges {
        let name = target.limits().names()[charge.cell].as_str();
        // If it overflowed, the table has rejected it.
        let _ = bucket.limits().position(name).map(|at| bucket.charge(at, charge.amount));
    }
    BucketItem { bucket, ..item.clone() }
}

/// The statuses of a leg on a bucket with several shards. They are about the bucket, never about a shard.
pub(crate) fn statuses(
    level: usize,
    leg: &Leg,
    shards: &[(u32, Bucket)],
    now: Timestamp,
) -> Vec<LimitStatus> {
    let limits = leg.target.limits();
    let status = |take: &zae_limiter_core::Take| {
        let (name, rate) = (&limits.names()[take.cell], limits.rates()[take.cell]);
        let cells = Cells::of(name.as_str(), shards);
        let available = cells.at(now);
        // More than the ceiling is refused, however full the bucket is.
        let is_exceeded = take.amount > Millitokens::ZERO && available < take.amount;
        let retry_after = match is_exceeded {
            true => cells.wait_for(take.amount, now).max(Duration::from_millis(1)),
            false => Duration::ZERO,
        };
        LimitStatus {
            entity_id: leg.target.key().entity.clone(),
            level,
            resource: leg.target.key().resource.clone(),
            limit_name: name.clone(),
            rate,
            available,
            requested: take.amount,
            exceeded: is_exceeded,
            retry_after,
            full_after: cells.wait_for(rate.capacity(), now),
        }
    };
    leg.takes.iter().map(status).collect()
}

/// One limit in all shards.
struct Cells<'a> {
    shards: Vec<(usize, &'a Bucket)>,
}

impl<'a> Cells<'a> {
    fn of(name: &str, shards: &'a [(u32, Bucket)]) -> Self {
        let place =
            |(_, bucket): &'a (u32, Bucket)| Some((bucket.limits().position(name)?, bucket));
        Self { shards: shards.iter().filter_map(place).collect() }
    }

    /// The sum of the balances at a moment, debts included.
    fn at(&self, moment: Timestamp) -> Millitokens {
        let held = |(at, bucket): &(usize, &Bucket)| {
            let (cell, rate) = (bucket.cells()[*at], bucket.limits().rates()[*at]);
            let elapsed = moment.millis_since(bucket.refilled_at());
            let (earned, _) = rate.earned(elapsed, cell.remainder);
            cell.tokens.saturating_add(earned).min(rate.capacity())
        };
        self.shards.iter().map(held).fold(Millitokens::ZERO, Millitokens::saturating_add)
    }

    /// The shortest wait until the sum reaches an amount, to the millisecond.
    fn wait_for(&self, amount: Millitokens, now: Timestamp) -> Duration {
        let full = |(at, bucket): &(usize, &Bucket)| {
            bucket.wait_for(*at, bucket.limits().rates()[*at].capacity(), now)
        };
        let full = self.shards.iter().map(full).max().unwrap_or_default();
        let (mut least, mut most) = (0, u64::try_from(full.as_millis()).unwrap_or(u64::MAX));
        while least < most {
            let half = least + (most - least) / 2;
            match self.at(now.saturating_add_millis(half)) >= amount {
                true => most = half,
                false => least = half + 1,
            }
        }
        Duration::from_millis(least)
    }
}

/// How long a process trusts the shard count before it asks the first shard again.
const COUNT_TRUSTED_MS: u64 = 60_000;

/// How long a busy shard counts as busy.
const BUSY_MS: u64 = 1_000;

/// The distance of two moments. The clock may have been set back in between.
pub(crate) fn apart_ms(one: Timestamp, other: Timestamp) -> u64 {
    one.millis_since(other).max(other.millis_since(one))
}

/// A process's view of the shards of a bucket. Few buckets have more than one.
#[derive(Debug)]
pub(crate) struct ShardMap {
    /// The shard count.
    pub(crate) count: u32,
    /// When the first shard confirmed it.
    asked_at: Timestamp,
    /// When the count last changed, as far as this process saw.
    changed_at: Option<Timestamp>,
    /// The shard that takes are sent to.
    pub(crate) current: u32,
    /// The shard that was busy last, and when.
    busy: Option<(u32, Timestamp)>,
    /// When the writes of all shards were last counted, and their number.
    counted: Option<(Timestamp, i64)>,
}

impl ShardMap {
    pub(crate) fn new(now: Timestamp) -> Self {
        let (changed_at, busy, counted) = (None, None, None);
        Self { count: 1, asked_at: now, changed_at, current: 0, busy, counted }
    }

    /// Sets the count. If it has changed, takes go to shard `drawn`: otherwise all processes would stay with
    /// the shard that was busy.
    pub(crate) fn set_count(&mut self, count: u32, drawn: u32, now: Timestamp) {
        if self.count != count {
            self.count = count;
            self.changed_at = Some(now);
            self.current = drawn;
            self.busy = None;
        }
        self.asked_at = match apart_ms(self.asked_at, now) < COUNT_TRUSTED_MS {
            true => self.asked_at.max(now),
            false => now,
        };
    }

    /// Whether the first shard has not confirmed the count for a while.
    pub(crate) fn is_stale(&self, now: Timestamp) -> bool {
        apart_ms(self.asked_at, now) >= COUNT_TRUSTED_MS
    }

    /// Whether the count has changed within this time.
    pub(crate) fn has_changed_within(&self, patience_ms: u64, now: Timestamp) -> bool {
        self.changed_at.is_some_and(|at| apart_ms(at, now) < patience_ms)
    }

    /// Records that a shard is busy, and moves takes to shard `drawn`. True if the whole bucket is busy: it has
    /// one shard, or another shard was busy just now.
    pub(crate) fn is_busy_all_over(&mut self, shard: u32, drawn: u32, now: Timestamp) -> bool {
        if self.count == 1 {
            return true;
        }
        if self.current == shard {
            self.current = drawn;
        }
        let busy = self.busy.filter(|(_, at)| apart_ms(*at, now) < BUSY_MS);
        self.busy = busy.or(Some((shard, now)));
        busy.is_some_and(|(other, _)| other != shard)
    }

    /// The last count of writes, if another one is due. It counts as started then.
    #[expect(clippy::option_option, reason = "due or not, and known or not")]
    pub(crate) fn recount_due(
        &mut self,
        every: Duration,
        now: Timestamp,
    ) -> Option<Option<(Timestamp, i64)>> {
        let every_ms = u64::try_from(every.as_millis()).unwrap_or(u64::MAX);
        let is_due = self.counted.is_none_or(|(at, _)| apart_ms(at, now) >= every_ms);
        is_due.then(|| self.counted.replace((now, i64::MAX)))
    }

    pub(crate) fn set_writes(&mut self, writes: i64, now: Timestamp) {
        self.counted = Some((now, writes));
    }
}
