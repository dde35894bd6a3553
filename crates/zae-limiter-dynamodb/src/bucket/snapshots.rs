//! The snapshots of a bucket: what the last answers said of its shards, and the shard count. They decide which
//! shard a request goes to, and allow refusals without a call.

use std::sync::Arc;
use std::time::Duration;

use smallvec::SmallVec;
use zae_limiter_core::{
    Bucket, Leg, LegTaken, LimitStatus, Millitokens, Placement, Timestamp, refused_statuses,
};
use zae_limiter_schema::SHARD_ZERO;
use zae_limiter_schema::bucket::{BucketItem, WRITES_MAX};

use super::decide::{Request, Snapshot, held_for};
use super::shards::{self, ShardMap, Shards, apart_ms};
use crate::options::DynamoOptions;

/// Pause per write that is missing from the shard's budget.
const PAUSE_PER_WRITE: Duration = Duration::from_micros(80);

/// Pause per write that failed because another process had moved the refill time. A failed write costs as much
/// as a successful one.
const PAUSE_PER_LOST: Duration = Duration::from_millis(4);

/// 60 ms: twelve round trips of 5 ms.
const PAUSE_MAX: Duration = Duration::from_millis(60);

/// The snapshot of one shard.
#[derive(Debug)]
pub(crate) struct Shard {
    number: u32,
    /// What the last answer said, and when.
    snapshot: Option<(Snapshot, Timestamp)>,
    /// Without a snapshot: the item as a transaction of this process left it, or as it is assumed to be. Only for
    /// statuses.
    assumed: Option<Arc<BucketItem>>,
    /// How often the snapshot has changed.
    pub(crate) version: u64,
    /// Writes that failed since the last batch because other processes were first.
    pub(crate) lost: u32,
    /// The shard's count of writes at the last batch, of all processes.
    writes: i64,
}

impl Shard {
    pub(crate) fn set_snapshot(&mut self, snapshot: Snapshot, now: Timestamp) {
        self.forget();
        if let Snapshot::Item(_) = snapshot {
            self.snapshot = Some((snapshot, now));
        }
    }

    /// Drops the snapshot: there is no item.
    pub(crate) fn forget(&mut self) {
        (self.snapshot, self.assumed) = (None, None);
        self.version += 1;
    }

    /// Drops the snapshot: the item may have changed.
    pub(crate) fn distrust(&mut self) {
        if let Some((Snapshot::Item(item), _)) = self.snapshot.take() {
            self.assumed = Some(item);
        }
        self.version += 1;
    }

    /// Drops the snapshot: a transaction has probably left this item.
    pub(crate) fn replace(&mut self, item: BucketItem) {
        self.forget();
        self.assumed = Some(Arc::new(item));
    }

    /// The item, by the last answer or as it is assumed to be.
    fn item(&self) -> Option<&BucketItem> {
        match &self.snapshot {
            Some((Snapshot::Item(item), _)) => Some(item),
            _ => self.assumed.as_deref(),
        }
    }

    pub(crate) fn snapshot(&self) -> Option<&Snapshot> {
        self.snapshot.as_ref().map(|(snapshot, _)| snapshot)
    }

    /// The snapshot, if it is younger than `trust`.
    pub(crate) fn fresh(&self, now: Timestamp, trust: Duration) -> Option<&Snapshot> {
        let (snapshot, at) = self.snapshot.as_ref()?;
        (Duration::from_millis(apart_ms(now, *at)) < trust).then_some(snapshot)
    }

    /// How long the lane pauses before its next batch, so that the batch grows: because the shard has more
    /// writes than a partition accepts, or writes failed because other processes were first. The pause grows
    /// with both, until all processes together stay within the budget. A process that is alone pauses only
    /// when more than half of the shard's budget is used.
    pub(crate) fn pause(&mut self) -> Option<Duration> {
        let lost = std::mem::take(&mut self.lost);
        let Some((Snapshot::Item(item), at)) = &self.snapshot else { return None };
        let writes = item.writes - std::mem::replace(&mut self.writes, item.writes);
        let is_alone = writes <= 1 && lost == 0;
        let spared = if is_alone { WRITES_MAX / 2 } else { 0 };
        let short = u32::try_from(WRITES_MAX - item.writes_left(*at) - spared).unwrap_or(0);
        let pause = PAUSE_PER_WRITE * short + PAUSE_PER_LOST * lost;
        (!pause.is_zero()).then_some(pause.min(PAUSE_MAX))
    }
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Snapshots {
    options: Arc<DynamoOptions>,
    /// Sorted by number.
    shards: Vec<Shard>,
    /// Few buckets have several shards.
    map: Option<Box<ShardMap>>,
    drawn: u64,
}

impl Snapshots {
    pub(crate) fn new(options: Arc<DynamoOptions>) -> Self {
        Self { options, shards: Vec::new(), map: None, drawn: 0 }
    }

    /// Drops everything: the bucket was deleted.
    pub(crate) fn forget(&mut self) {
        self.map = None;
        self.shards.iter_mut().for_each(|shard| shard.forget());
    }

    pub(crate) fn shard(&mut self, number: u32) -> &mut Shard {
        let at = match self.shards.binary_search_by_key(&number, |shard| shard.number) {
            Ok(at) => at,
            Err(at) => {
                let shard =
                    Shard { number, snapshot: None, assumed: None, version: 0, lost: 0, writes: 0 };
                self.shards.insert(at, shard);
                at
            }
        };
        &mut self.shards[at]
    }

    fn find(&self, number: u32) -> Option<&Shard> {
        let at = self.shards.binary_search_by_key(&number, |shard| shard.number).ok()?;
        self.shards.get(at)
    }

    pub(crate) fn map(&mut self, now: Timestamp) -> &mut ShardMap {
        self.map.get_or_insert_with(|| Box::new(ShardMap::new(now)))
    }

    /// The shard count, by the last answers.
    pub(crate) fn count(&self) -> u32 {
        self.map.as_ref().map_or(1, |map| map.count)
    }

    pub(crate) fn set_count(&mut self, count: u32, now: Timestamp) {
        if count == 1 && self.count() == 1 {
            return;
        }
        let drawn = self.draw(count);
        self.map(now).set_count(count, drawn, now);
    }

    /// Updates the count from a shard's snapshot. The first shard's count is authoritative; another live shard
    /// can only raise it, and a retired one only lower it.
    pub(crate) fn update_count(&mut self, shard: u32, snapshot: &Snapshot, now: Timestamp) {
        match snapshot {
            Snapshot::Item(item) if item.is_retired() => {
                self.set_count(self.count().min(item.shard_count.next_power_of_two()), now);
            }
            Snapshot::Item(item) if !item.is_expired(now) => {
                let count = item.shard_count.next_power_of_two();
                if shard == SHARD_ZERO || count > self.count() {
                    self.set_count(count, now);
                }
            }
            _ if shard == SHARD_ZERO => self.set_count(1, now),
            _ => {}
        }
    }

    pub(crate) fn is_busy_all_over(&mut self, shard: u32, now: Timestamp) -> bool {
        // Without group commit, calls go to all shards anyway.
        if !self.options.group_commit {
            return true;
        }
        let drawn = self.draw(self.count());
        self.map(now).is_busy_all_over(shard, drawn, now)
    }

    /// The shard for a take. A process stays with one shard while that has tokens, so that all its callers share
    /// one write, however many shards there are.
    pub(crate) fn choose(&mut self, leg: &Leg, now: Timestamp, avoid: &[u32]) -> u32 {
        let map = self.map(now);
        let (count, current, is_stale) = (map.count, map.current, map.is_stale(now));
        if is_stale && avoid.is_empty() {
            return SHARD_ZERO;
        }
        let may_stay = self.options.group_commit && current < count && !avoid.contains(&current);
        if may_stay && self.headroom(leg, current, now).is_none_or(|room| room >= 0) {
            return current;
        }
        let others: Vec<u32> = (0..count).filter(|shard| !avoid.contains(shard)).collect();
        let mut draw = || {
            let drawn = self.draw(u32::try_from(others.len()).unwrap_or(0));
            others.get(usize::try_from(drawn).unwrap_or(0)).copied()
        };
        let better = match (draw(), draw()) {
            (Some(one), Some(other)) => {
                let room = |shard| self.headroom(leg, shard, now).unwrap_or(0);
                if room(other) > room(one) { other } else { one }
            }
            _ => SHARD_ZERO,
        };
        self.map(now).current = better;
        better
    }

    /// The shard most likely to cover a leg, among those not tried; `None` if none can.
    pub(crate) fn next_best(&self, leg: &Leg, now: Timestamp, tried: &[u32]) -> Option<u32> {
        let others = (0..self.count()).filter(|shard| !tried.contains(shard));
        let rooms = others.map(|shard| (self.headroom(leg, shard, now).unwrap_or(0), shard));
        rooms.filter(|(room, _)| *room >= 0).max_by_key(|(room, _)| *room).map(|(_, shard)| shard)
    }

    /// What a shard has beyond a leg's amount, for the scarcest limit, by its snapshot.
    fn headroom(&self, leg: &Leg, shard: u32, now: Timestamp) -> Option<i64> {
        let Some((Snapshot::Item(item), _)) = &self.find(shard)?.snapshot else { return None };
        let bucket = item.is_live(now).then(|| held_for(leg, item, now))?;
        let names = leg.target.limits().names();
        let rooms = leg.takes.iter().map(|take| {
            let held =
                bucket.cell(names[take.cell].as_str()).map_or(0, |(cell, _)| cell.tokens.get());
            held.saturating_sub(take.amount.get())
        });
        rooms.min()
    }

    /// A pseudo-random number below `bound`, from the store's seed and the number of draws.
    fn draw(&mut self, bound: u32) -> u32 {
        // SplitMix64.
        self.drawn += 1;
        let drawn = self.drawn.wrapping_add(self.options.seed);
        let mixed = drawn.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        let mixed = u32::try_from((mixed ^ (mixed >> 31)) >> 32).unwrap_or(0);
        if bound == 0 { 0 } else { mixed % bound }
    }

    /// The shards by their snapshots, however old, and by the transactions of this process.
    fn cached_shards(&self, now: Timestamp) -> Shards {
        let cached = (0..self.count()).filter_map(|shard| self.find(shard)?.item().cloned());
        Shards::live(cached, now)
    }

    /// Assumes that shards which this process has not seen are as full as `item` was before a request.
    fn assume_unseen(
        &mut self,
        item: &BucketItem,
        request: &Request,
        later: &[(String, Millitokens)],
        now: Timestamp,
    ) {
        let count = item.shard_count.next_power_of_two();
        let is_unseen = |number: &u32| self.find(*number).and_then(Shard::item).is_none();
        let others = (0..count).filter(|number| *number != item.shard);
        let unseen: Vec<u32> = others.filter(is_unseen).collect();
        if unseen.is_empty() {
            return;
        }
        let like = before(item, request, later, now);
        for number in unseen {
            self.shard(number).assumed = Some(Arc::new(shards::as_full_as(&like, number)));
        }
    }

    /// Whether the snapshots may refuse a leg. Cheaper than its statuses, and rarely true. On several shards only
    /// the statuses tell.
    pub(crate) fn may_refuse(&self, leg: &Leg, now: Timestamp) -> bool {
        let trust = self.options.local_refusal;
        match self.find(SHARD_ZERO).and_then(|shard| shard.fresh(now, trust)) {
            Some(Snapshot::Item(item)) if self.count() > 1 || item.shard_count > 1 => true,
            Some(snapshot) => refuses(&bucket_for(leg, snapshot, now), leg, now),
            None => false,
        }
    }

    /// The statuses of a leg, if the snapshots of all shards are fresh.
    pub(crate) fn statuses_from_snapshots(
        &self,
        level: usize,
        leg: &Leg,
        now: Timestamp,
    ) -> Option<Vec<LimitStatus>> {
        let mut items = Vec::new();
        for shard in 0..self.count() {
            let snapshot = self.find(shard)?.fresh(now, self.options.local_refusal)?;
            if let Snapshot::Item(item) = snapshot
                && !self.options.max_clock_skew.is_zero()
                && item.bucket.is_ahead(now, self.options.max_clock_skew)
            {
                // The table's time may show that a wrong clock has written it.
                return None;
            }
            match snapshot {
                Snapshot::Item(item) if self.count() > 1 || item.shard_count > 1 => {
                    items.push(BucketItem::clone(item));
                }
                snapshot => return Some(statuses_of(level, leg, snapshot, now)),
            }
        }
        let cached = Some(Shards::live(items, now)).filter(Shards::is_complete)?;
        Some(shards::statuses(level, leg, &cached.buckets(leg, now), now))
    }

    /// The statuses of a leg that was admitted, by the last snapshots.
    pub(crate) fn last_statuses(
        &self,
        level: usize,
        leg: &Leg,
        now: Timestamp,
    ) -> Vec<LimitStatus> {
        let passed = |status: LimitStatus| LimitStatus {
            // It was admitted, even if other callers have taken the rest since.
            exceeded: false,
            retry_after: Duration::ZERO,
            ..status
        };
        if self.count() > 1 {
            let cached = self.cached_shards(now);
            let statuses = shards::statuses(level, leg, &cached.buckets(leg, now), now);
            // One shard may have covered it while another owes: then the bucket as a whole does not cover
            // it, and the statuses say so.
            return match cached.is_complete() {
                true => statuses,
                false => statuses.into_iter().map(passed).collect(),
            };
        }
        let cached = self.find(SHARD_ZERO).and_then(Shard::snapshot);
        let statuses = statuses_of(level, leg, cached.unwrap_or(&Snapshot::Absent), now);
        statuses.into_iter().map(passed).collect()
    }

    /// The result of a take: its shard, and what is left in the whole bucket. On several shards this is what a read
    /// of all of them would say, if no other process has written since the snapshots. Shards that this process has
    /// not seen count as full as this one was before.
    pub(crate) fn taken(
        &mut self,
        shard: u32,
        request: &Request,
        snapshot: &Snapshot,
        later: &[(String, Millitokens)],
        now: Timestamp,
    ) -> LegTaken {
        let Request::Take(leg) = request else { unreachable!("only takes are taken") };
        let mut buckets = vec![bucket_for(leg, snapshot, now)];
        if let Snapshot::Item(item) = snapshot
            && snapshot.is_sharded(now)
        {
            self.assume_unseen(item, request, later, now);
            let others = self.cached_shards(now).buckets(leg, now);
            let others = others.into_iter().filter(|(other, _)| *other != shard);
            buckets.extend(others.map(|(_, bucket)| bucket));
        }
        let left = amounts(request).map(|(limit, _)| {
            let held = |bucket: &Bucket| bucket.cell(&limit).map(|(cell, _)| cell.tokens);
            let tokens = buckets.iter().filter_map(held);
            let tokens = tokens.fold(Millitokens::ZERO, Millitokens::saturating_add);
            let later = later.iter().filter(|(other, _)| *other == limit);
            later.fold(tokens, |tokens, (_, amount)| tokens.saturating_add(*amount))
        });
        LegTaken { placement: Placement::new(shard), left: left.collect() }
    }
}

/// A shard before a request and all later ones took from it.
fn before(
    item: &BucketItem,
    request: &Request,
    later: &[(String, Millitokens)],
    now: Timestamp,
) -> BucketItem {
    let mut bucket = item.bucket.clone();
    bucket.refill(now);
    for (limit, amount) in amounts(request).chain(later.iter().cloned()) {
        // It held that much.
        let _ = bucket.limits().position(&limit).map(|at| bucket.charge(at, -amount));
    }
    BucketItem { bucket, ..item.clone() }
}

impl Snapshot {
    /// Whether it is a live one of several shards.
    pub(crate) fn is_sharded(&self, now: Timestamp) -> bool {
        matches!(self, Self::Item(item) if item.shard_count > 1 && item.is_live(now))
    }
}

fn statuses_of(level: usize, leg: &Leg, snapshot: &Snapshot, now: Timestamp) -> Vec<LimitStatus> {
    refused_statuses(level, leg, &bucket_for(leg, snapshot, now), now).collect()
}

/// Whether one of the statuses of a leg on this bucket is exceeded.
fn refuses(bucket: &Bucket, leg: &Leg, now: Timestamp) -> bool {
    let names = leg.target.limits().names();
    leg.takes.iter().any(|take| {
        let at = bucket.limits().position(names[take.cell].as_str());
        at.is_some_and(|at| !bucket.wait_for(at, take.amount, now).is_zero())
    })
}

/// The bucket, or its shard, under a leg's limits.
fn bucket_for(leg: &Leg, snapshot: &Snapshot, now: Timestamp) -> Bucket {
    match snapshot {
        Snapshot::Item(item) if !item.is_expired(now) => held_for(leg, item, now),
        _ => Bucket::full(Arc::clone(leg.target.limits()), now),
    }
}

pub(crate) fn amounts(request: &Request) -> impl Iterator<Item = (String, Millitokens)> {
    let takes: SmallVec<[_; 2]> = match request {
        Request::Take(leg) => {
            let names = leg.target.limits().names();
            leg.takes.iter().map(|take| (names[take.cell].to_string(), take.amount)).collect()
        }
        Request::Settle(_) | Request::SettleRest(_) => SmallVec::new(),
    };
    takes.into_iter()
}
