//! The parts of a bucket, seen together. Pure: everything it depends on is handed in.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use zae_limiter_core::{Bucket, Cell, Leg, LimitStatus, Millitokens, Timestamp};
use zae_limiter_schema::bucket::BucketItem;

/// The parts that hold the shares of a bucket, by their numbers.
#[derive(Clone, Debug, Default)]
pub(crate) struct Parts(BTreeMap<u32, BucketItem>);

/// What a part holds at a moment, under a leg's limits.
pub(crate) fn held_for(leg: &Leg, item: &BucketItem, now: Timestamp) -> Bucket {
    let mut bucket = item.bucket.clone();
    bucket.follow(&item.share_of(leg.target.limits()), now);
    bucket.refill(now);
    bucket
}

/// The part that a part was divided from; the first was there from the start.
pub(crate) fn origin(shard: u32) -> Option<(u32, u32)> {
    let highest = 1_u32.checked_shl(shard.checked_ilog2()?)?;
    Some((shard - highest, highest))
}

impl Parts {
    /// Leaves out what holds no share: expired, put together with another, or left over from a
    /// bucket that is gone.
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

    /// Whether their shares are the whole bucket.
    pub(crate) fn is_complete(&self) -> bool {
        const WHOLE: u64 = 1 << 32;
        let share = |item: &BucketItem| WHOLE / u64::from(item.shard_count.next_power_of_two());
        self.0.values().map(share).sum::<u64>() == WHOLE
    }

    /// The highest count that one of them knows of.
    pub(crate) fn count(&self) -> u32 {
        let counts = self.0.values().map(|item| item.shard_count.next_power_of_two());
        counts.max().unwrap_or(1)
    }

    /// Parts that should be there, of so many, and are not; those that are still to be divided from
    /// others are not missing.
    pub(crate) fn missing(&self, count: u32) -> Vec<u32> {
        let is_missing = |shard: &u32| {
            let Some((origin, divided)) = origin(*shard) else { return false };
            let origin = self.0.get(&origin);
            !self.0.contains_key(shard) && origin.is_some_and(|item| item.shard_count > divided)
        };
        (0..count).filter(is_missing).collect()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (u32, &BucketItem)> {
        self.0.iter().map(|(shard, item)| (*shard, item))
    }

    /// What each part holds at a moment, under a leg's limits.
    pub(crate) fn buckets(&self, leg: &Leg, now: Timestamp) -> Vec<(u32, Bucket)> {
        self.0.iter().map(|(shard, item)| (*shard, held_for(leg, item, now))).collect()
    }

    /// All parts as one bucket: limits once, balances together.
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

/// The statuses of a leg on a bucket in several parts: of the bucket, never of a part.
pub(crate) fn statuses(
    level: usize,
    leg: &Leg,
    parts: &[(u32, Bucket)],
    now: Timestamp,
) -> Vec<LimitStatus> {
    let limits = leg.target.limits();
    let status = |take: &zae_limiter_core::Take| {
        let (name, rate) = (&limits.names()[take.cell], limits.rates()[take.cell]);
        let cells = Cells::of(name.as_str(), parts);
        let retry_after = match take.amount {
            Millitokens::ZERO => Duration::ZERO,
            amount => cells.wait_for(amount, now),
        };
        LimitStatus {
            entity_id: leg.target.key().entity.clone(),
            level,
            resource: leg.target.key().resource.clone(),
            limit_name: name.clone(),
            rate,
            available: cells.at(now),
            requested: take.amount,
            exceeded: !retry_after.is_zero(),
            retry_after,
            full_after: cells.wait_for(rate.capacity(), now),
        }
    };
    leg.takes.iter().map(status).collect()
}

/// One limit in all parts.
struct Cells<'a> {
    parts: Vec<(usize, &'a Bucket)>,
}

impl<'a> Cells<'a> {
    fn of(name: &str, parts: &'a [(u32, Bucket)]) -> Self {
        let place =
            |(_, bucket): &'a (u32, Bucket)| Some((bucket.limits().position(name)?, bucket));
        Self { parts: parts.iter().filter_map(place).collect() }
    }

    /// What they hold together at a moment, debts included.
    fn at(&self, moment: Timestamp) -> Millitokens {
        let held = |(at, bucket): &(usize, &Bucket)| {
            let (cell, rate) = (bucket.cells()[*at], bucket.limits().rates()[*at]);
            let elapsed = moment.millis_since(bucket.refilled_at());
            let (earned, _) = rate.earned(elapsed, cell.remainder);
            cell.tokens.saturating_add(earned).min(rate.capacity())
        };
        self.parts.iter().map(held).fold(Millitokens::ZERO, Millitokens::saturating_add)
    }

    /// How long until they hold so much together: not a millisecond less.
    fn wait_for(&self, amount: Millitokens, now: Timestamp) -> Duration {
        let full = |(at, bucket): &(usize, &Bucket)| {
            bucket.wait_for(*at, bucket.limits().rates()[*at].capacity(), now)
        };
        let full = self.parts.iter().map(full).max().unwrap_or_default();
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
