//! Admission from several parts of a bucket at once: what no part has, all together may have.

use std::sync::Arc;

use smallvec::SmallVec;
use zae_limiter_core::{
    Bucket, BucketKey, Leg, LegTaken, Millitokens, Settlement, StoreError, Take, Takes, Timestamp,
};
use zae_limiter_schema::bucket::BucketItem;
use zae_limiter_schema::{BucketItemKey, Change, SHARD_ZERO, Transacted};

use crate::Shared;
use crate::error::Trouble;
use crate::lane::{Told, Waiting};
use crate::parts::{self, Parts};
use crate::round::{Request, State, decided};
use crate::work::{MOVES_MAX, contended};

/// How often all parts are looked at because they changed meanwhile: others divide them, or put them
/// together, one by one.
const GATHERINGS_MAX: u32 = 128;

impl Shared {
    /// Takes from as many parts as it needs, or refuses because all of them have too little.
    pub(crate) async fn gather(self: Arc<Self>, waiting: Waiting) {
        let Request::Take(leg) = &waiting.request else { return };
        let told = self.gathered(leg, &waiting).await;
        let (leg, now) = (leg.clone(), waiting.now);
        let shard = match &told {
            Ok(Some(Told::Taken(taken))) => Some(taken.shard),
            _ => None,
        };
        let told = match told {
            Ok(Some(told)) => Ok(told),
            // Nobody waits for it any more.
            Ok(None) => return,
            Err(error) => Err(error),
        };
        if waiting.tell(told).is_err()
            && let Some(shard) = shard
        {
            self.give_back(&leg, shard, now);
        }
    }

    async fn gathered(
        self: &Arc<Self>,
        leg: &Leg,
        waiting: &Waiting,
    ) -> Result<Option<Told>, StoreError> {
        let now = waiting.now;
        for _ in 0..GATHERINGS_MAX {
            if waiting.is_abandoned() {
                return Ok(None);
            }
            let parts = self.read_parts(leg.target.key(), now).await?;
            let Some(first) = parts.iter().next() else {
                // It is gone, and starts anew where it starts.
                let request = Request::Take(leg.clone());
                return self.submit_to(SHARD_ZERO, request, now).await.map(Some);
            };
            if !parts.is_complete() {
                for shard in parts.missing(parts.count()) {
                    self.restore(&self.lanes.get(leg.target.key(), shard), now).await?;
                }
                continue;
            }
            let buckets = parts.buckets(leg, now);
            let statuses = parts::statuses(0, leg, &buckets, now);
            if statuses.iter().any(|status| status.exceeded) {
                return Ok(Some(Told::Refused(statuses)));
            }
            let taken = divided_among(leg, &buckets);
            let change = |(shard, takes): &(u32, Takes)| {
                let (_, item) = parts.iter().find(|(at, _)| at == shard)?;
                change(leg, item, takes, now)
            };
            let Some(changes) = taken.iter().map(change).collect::<Option<Vec<Change>>>() else {
                continue;
            };
            match self.transact(&changes).await {
                Ok(Transacted::Done(_)) => {
                    for (shard, _) in &taken {
                        self.forget_part(leg.target.key(), *shard);
                    }
                    self.count_gathered();
                    let shard = taken.first().map_or(first.0, |(shard, _)| *shard);
                    let left =
                        statuses.iter().map(|one| one.available.saturating_add(-one.requested));
                    return Ok(Some(Told::Taken(LegTaken { shard, left: left.collect() })));
                }
                Ok(Transacted::Unmet(..)) => {}
                Err(trouble) if trouble.is_passing() => {}
                Err(trouble) => return Err(trouble.told()),
            }
        }
        Err(contended())
    }

    /// A part is full, but what is given back belongs to the bucket: to the part that has the most
    /// room. When none has any, the bucket is full.
    pub(crate) async fn give_elsewhere(self: Arc<Self>, mut waiting: Waiting, rest: Settlement) {
        waiting.is_begun = true;
        waiting.moves += 1;
        let now = waiting.now;
        let parts = match self.read_parts(rest.target.key(), now).await {
            Ok(parts) => parts,
            Err(error) => return drop(waiting.tell(Err(error))),
        };
        let roomiest = parts.iter().max_by_key(|(_, item)| room(item, &rest, now));
        let roomiest = roomiest.filter(|(_, item)| room(item, &rest, now) > 0);
        waiting.request = match roomiest.filter(|_| waiting.moves <= MOVES_MAX) {
            Some((shard, _)) => Request::Settle(Settlement { shard, ..rest }),
            None => Request::SettleRest(rest),
        };
        self.dispatch(waiting);
    }

    /// Reads all parts of a bucket, as many as any of them says there are, and remembers them.
    pub(crate) async fn read_parts(
        &self,
        bucket: &BucketKey,
        now: Timestamp,
    ) -> Result<Parts, StoreError> {
        let mut asked = self.count(bucket);
        loop {
            let key = |shard| BucketItemKey { bucket: bucket.clone(), shard };
            let keys: Vec<BucketItemKey> = (0..asked).map(key).collect();
            let lanes: Vec<_> = keys.iter().map(|key| self.lanes.get(bucket, key.shard)).collect();
            let learnt: Vec<u64> = lanes.iter().map(|lane| lane.lock().learnt).collect();
            let items = self.read_buckets(&keys).await?;
            for ((lane, learnt), item) in lanes.iter().zip(learnt).zip(&items) {
                let mut inside = lane.lock();
                // What a write has told since is younger than what was read.
                if inside.learnt == learnt {
                    inside.know(item.clone().map(|item| (State::Item(item), now)));
                }
            }
            let parts = Parts::live(items.into_iter().flatten(), now);
            self.set_count(bucket, parts.count(), now);
            if parts.count() <= asked {
                return Ok(parts);
            }
            asked = parts.count();
        }
    }

    /// What is known of a part no longer holds.
    pub(crate) fn forget_part(&self, bucket: &BucketKey, shard: u32) {
        if let Some(lane) = self.lanes.find(bucket, shard) {
            lane.lock().know(None);
        }
    }
}

/// How much of what is given back a part has room for.
fn room(item: &BucketItem, rest: &Settlement, now: Timestamp) -> i64 {
    let mut bucket = item.bucket.clone();
    bucket.refill(now);
    let names = rest.target.limits().names();
    let rooms = rest.differences.iter().filter_map(|difference| {
        let (cell, rate) = bucket.cell(names[difference.cell].as_str())?;
        let room = rate.capacity().get().saturating_sub(cell.tokens.get());
        Some(room.min(difference.amount.get().saturating_neg()))
    });
    rooms.max().unwrap_or(0)
}

/// Which part gives how much: the fullest first, so that few are needed. Together they have it.
fn divided_among(leg: &Leg, buckets: &[(u32, Bucket)]) -> Vec<(u32, Takes)> {
    let names = leg.target.limits().names();
    let held = |bucket: &Bucket, take: &Take| {
        let cell = bucket.cell(names[take.cell].as_str());
        cell.map_or(Millitokens::ZERO, |(cell, _)| cell.tokens.max(Millitokens::ZERO))
    };
    let mut by_fullness: Vec<&(u32, Bucket)> = buckets.iter().collect();
    by_fullness.sort_by_key(|(_, bucket)| {
        let scarcest = leg.takes.iter().map(|take| held(bucket, take)).min();
        std::cmp::Reverse(scarcest)
    });
    let mut left: SmallVec<[Take; 2]> = leg.takes.clone();
    let mut taken: Vec<(u32, Takes)> = Vec::new();
    for (shard, bucket) in by_fullness {
        let mut takes = Takes::new();
        for missing in &mut left {
            let amount = missing.amount.min(held(bucket, missing));
            if amount > Millitokens::ZERO {
                takes.push(Take { cell: missing.cell, amount });
                missing.amount = missing.amount.saturating_add(-amount);
            }
        }
        if !takes.is_empty() {
            taken.push((*shard, takes));
        }
    }
    taken
}

/// What one part gives.
fn change(leg: &Leg, item: &BucketItem, takes: &Takes, now: Timestamp) -> Option<Change> {
    let key = BucketItemKey { bucket: leg.target.key().clone(), shard: item.shard };
    let leg = Leg { target: Arc::clone(&leg.target), takes: takes.clone() };
    let round = decided(&key, &State::Item(item.clone()), &[&Request::Take(leg)], now);
    round.update.map(Change::Update)
}

impl Trouble {
    /// Whether the same call may well go through the next time, and did nothing this time.
    pub(crate) fn is_passing(&self) -> bool {
        use zae_limiter_core::Applied;
        use zae_limiter_schema::TableErrorKind::{Conflict, PartitionThrottled};
        match self {
            Self::Table(error) => {
                matches!(error.kind, Conflict | PartitionThrottled) && error.applied == Applied::No
            }
            Self::Item(_) => false,
        }
    }
}
