//! Dividing a bucket into more parts, bringing back a part that is missing, and putting parts
//! together again.
//!
//! A bucket is divided when one of its parts is written nearly as often as a partition can bear, when
//! the table says that it is too much, or, without group commit, when calls are in each other's way.
//! The first part goes first, then the others, each by itself: see
//! [`zae_limiter_schema::bucket::split`]. Whoever finds one that is not divided yet, goes on. When all
//! parts together have been written little for a while, they are put together.

use std::sync::Arc;
use std::time::Duration;

use zae_limiter_core::{Bucket, BucketKey, Cell, Leg, StoreError, Timestamp, spawn_in_background};
use zae_limiter_schema::bucket::{self, After, BucketItem, Expiry, Halves, Owner, share_of};
use zae_limiter_schema::{BucketItemKey, Change, SHARD_ZERO, Transacted};

use crate::Shared;
use crate::error::Trouble;
use crate::lane::Lane;
use crate::parts::origin;
use crate::round::State;
use crate::work::{ATTEMPTS_MAX, contended, decode};

/// A part is hot when it can take fewer writes than this at once.
const WRITES_LEFT_MIN: i64 = 150;

/// How long a new count is given to make a difference before the table's complaints count again: they
/// come by the second.
const PATIENCE_MS: u64 = 1_500;

/// The same for calls that were in each other's way.
const CONTENDED_PATIENCE_MS: u64 = 300;

/// How often dividing a part is tried: others write to it all the time, that is why.
const SPLITS_MAX: u32 = 64;

/// How often all parts are looked at while a bucket is divided into many: six times twice as many, and
/// as often again for what others do meanwhile.
const DIVISIONS_MAX: u32 = 12;

/// How long a table is left alone that was too busy for it.
const BETWEEN_SPLITS: Duration = Duration::from_millis(10);

/// Above this many parts something else is wrong.
const SHARDS_USUAL: u32 = 32;

/// Below so many writes a second, of all parts together, one part less would do.
const CALM_WRITES_PER_SECOND: i64 = 500;

impl Shared {
    /// After a write: divides the bucket when the part is too hot.
    pub(crate) fn divide_if_hot(self: &Arc<Self>, lane: &Lane, state: &State, now: Timestamp) {
        let State::Item(item) = state else { return };
        let count = item.shard_count.next_power_of_two();
        let is_hot = item.writes_left(now) < WRITES_LEFT_MIN && item.is_live(now);
        if !is_hot || count >= self.options.parts_max {
            return;
        }
        if !self.is_busy_all_over(&lane.key.bucket, lane.key.shard, now) {
            return;
        }
        let (shared, bucket) = (Arc::clone(self), lane.key.bucket.clone());
        let busy = self.division(&bucket, now, |division| division.gate.try_lock().is_err());
        if !busy {
            spawn_in_background(async move { shared.double(&bucket, count, now).await });
        }
    }

    /// The table has turned a write away because of its partition.
    pub(crate) async fn divide_throttled(self: &Arc<Self>, lane: &Lane, now: Timestamp) {
        if self.is_busy_all_over(&lane.key.bucket, lane.key.shard, now) {
            self.double_again(&lane.key.bucket, PATIENCE_MS, now).await;
        }
    }

    /// Others are first again and again: on fewer items more callers are in each other's way.
    pub(crate) async fn divide_contended(self: &Arc<Self>, lane: &Lane, now: Timestamp) {
        self.double_again(&lane.key.bucket, CONTENDED_PATIENCE_MS, now).await;
    }

    /// Divides a bucket unless that was done just now.
    async fn double_again(self: &Arc<Self>, bucket: &BucketKey, patience_ms: u64, now: Timestamp) {
        let (count, is_early) = self.division(bucket, now, |division| {
            let changed_at = division.changed_at;
            (division.count, changed_at.is_some_and(|at| now.millis_since(at) < patience_ms))
        });
        if !is_early {
            self.double(bucket, count, now).await;
        }
    }

    /// Divides a bucket into twice as many parts, unless somebody has meanwhile.
    pub(crate) async fn double(self: &Arc<Self>, bucket: &BucketKey, from: u32, now: Timestamp) {
        let gate = self.division(bucket, now, |division| Arc::clone(&division.gate));
        let _turn = gate.lock().await;
        if self.count(bucket) != from || from >= self.options.parts_max {
            return;
        }
        match self.split(bucket, SHARD_ZERO, from, now).await {
            Ok(true) => {
                self.count_doubling(2 * from);
                if 2 * from > SHARDS_USUAL {
                    let (entity, resource) = (&bucket.entity, &bucket.resource);
                    tracing::warn!(%entity, %resource, parts = 2 * from, "a bucket is very hot");
                }
                let (shared, bucket) = (Arc::clone(self), bucket.clone());
                spawn_in_background(async move {
                    for shard in 1..from {
                        if let Err(trouble) = shared.split(&bucket, shard, from, now).await {
                            // Whoever asks for the part that is missing goes on.
                            tracing::debug!(error = %trouble.told(), shard, "a part stays as it is");
                        }
                    }
                });
            }
            Ok(false) => {}
            Err(trouble) => {
                tracing::debug!(error = %trouble.told(), "a hot bucket could not be divided");
            }
        }
    }

    /// Divides a bucket until it has so many parts, and all of them are there. Returns how many it has;
    /// `None` when there is no bucket.
    pub(crate) async fn divide(
        self: &Arc<Self>,
        bucket: &BucketKey,
        wanted: u32,
        now: Timestamp,
    ) -> Result<Option<u32>, StoreError> {
        let wanted = wanted.clamp(1, self.options.parts_max).next_power_of_two();
        let gate = self.division(bucket, now, |division| Arc::clone(&division.gate));
        let _turn = gate.lock().await;
        for _ in 0..DIVISIONS_MAX {
            let parts = self.read_parts(bucket, now).await?;
            if parts.iter().next().is_none() {
                return Ok(None);
            }
            let counts = parts.iter().map(|(shard, item)| (shard, item.shard_count));
            let counts = counts.map(|(shard, count)| (shard, count.next_power_of_two()));
            let larger: Vec<(u32, u32)> = counts.filter(|(_, count)| *count < wanted).collect();
            if larger.is_empty() && parts.is_complete() {
                return Ok(Some(parts.count()));
            }
            // The first part goes first: it knows the count.
            for (shard, count) in larger {
                if self.split(bucket, shard, count, now).await? && shard == SHARD_ZERO {
                    self.count_doubling(2 * count);
                }
            }
            for shard in parts.missing(parts.count()) {
                self.restore(&self.lanes.get(bucket, shard), now).await?;
            }
        }
        Err(contended())
    }

    /// Divides one part of so many in two; false when it is not one of so many any more.
    async fn split(
        &self,
        bucket: &BucketKey,
        shard: u32,
        from: u32,
        now: Timestamp,
    ) -> Result<bool, Trouble> {
        let key = |shard| BucketItemKey { bucket: bucket.clone(), shard };
        let (low_key, high_key) = (key(shard), key(shard + from));
        let (mut low, mut high) = (None, None);
        for _ in 0..SPLITS_MAX {
            let item = match low.take() {
                Some(item) => item,
                None => match decode(&low_key, self.look(&low_key).await?)? {
                    State::Item(item) => item,
                    State::Absent => return Ok(false),
                },
            };
            self.learn(&self.lanes.get(bucket, shard), &State::Item(item.clone()), now);
            if item.shard_count.next_power_of_two() != from || !item.is_live(now) {
                return Ok(false);
            }
            let halves = Halves { low: &item, high: high.as_ref() };
            match self.transact(&bucket::split(&low_key, halves, now)).await {
                Ok(Transacted::Done(_)) => {
                    self.forget_part(bucket, shard);
                    self.forget_part(bucket, shard + from);
                    if shard == SHARD_ZERO {
                        self.set_count(bucket, 2 * from, now);
                    }
                    return Ok(true);
                }
                Ok(Transacted::Unmet(found, _)) => {
                    if let Some(Some(Some(found))) = found.first() {
                        low = Some(BucketItem::decode(&low_key, found)?);
                    }
                    if let Some(Some(found)) = found.get(1) {
                        let found =
                            found.as_ref().map(|found| BucketItem::decode(&high_key, found));
                        high = found.transpose()?;
                    }
                }
                Err(trouble) if trouble.is_passing() => self.table.pause(BETWEEN_SPLITS).await,
                Err(trouble) => return Err(trouble),
            }
        }
        Ok(false)
    }

    /// A part other than the first is not there. Either there are fewer parts than was believed, or
    /// it is still to be divided from another, or it has been lost: then it starts with nothing.
    /// Returns the part that has its share now, or knows more of it.
    pub(crate) async fn restore(
        self: &Arc<Self>,
        lane: &Lane,
        now: Timestamp,
    ) -> Result<u32, Trouble> {
        let (bucket, shard) = (&lane.key.bucket, lane.key.shard);
        let Some((from, from_count)) = origin(shard) else { return Ok(SHARD_ZERO) };
        let key = |shard| BucketItemKey { bucket: bucket.clone(), shard };
        let keys = [key(SHARD_ZERO), key(from), key(shard)];
        let items = self.read_items(keys.iter().map(BucketItemKey::item_key)).await?;
        let item = |key: &BucketItemKey| match items.get(&key.item_key()) {
            Some(item) => BucketItem::decode(key, item).map(Some),
            None => Ok(None),
        };
        let [first, origin, part] = [item(&keys[0])?, item(&keys[1])?, item(&keys[2])?];
        let first = first.filter(|first| !first.is_expired(now));
        let count = first.as_ref().map_or(1, |first| first.shard_count.next_power_of_two());
        self.set_count(bucket, count, now);
        let origin = origin.filter(|origin| origin.is_live(now));
        let (Some(first), Some(origin)) = (first, origin) else { return Ok(from) };
        if part.as_ref().is_some_and(|part| part.is_live(now)) {
            return Ok(shard);
        }
        let origin_count = origin.shard_count.next_power_of_two();
        // The first part knows the count, but another client may have raised that of the origin since.
        let count = count.max(origin_count);
        if shard >= count || origin_count < from_count {
            return Ok(from);
        }
        if origin_count == from_count {
            let is_split = self.split(bucket, from, from_count, now).await?;
            return Ok(if is_split { shard } else { from });
        }
        self.start_with_nothing(&keys[2], (&first, &origin), part.as_ref(), count, now).await?;
        Ok(shard)
    }

    /// Makes a part that has been lost, unless somebody has meanwhile. `count` is that of the bucket.
    async fn start_with_nothing(
        &self,
        key: &BucketItemKey,
        (first, origin): (&BucketItem, &BucketItem),
        part: Option<&BucketItem>,
        count: u32,
        now: Timestamp,
    ) -> Result<(), Trouble> {
        let since = part.map_or(now, |part| part.bucket.refilled_at().max(now));
        let limits = share_of(&first.whole, key.shard, count);
        let nothing = vec![Cell::default(); limits.len()];
        let empty = Bucket::from_parts(limits, nothing, since);
        let after = After { bucket: &empty, whole: &first.whole, shard_count: count };
        let owner = Owner { parent: first.parent.as_ref() };
        let update = match part {
            None => bucket::create(key, &after, &owner, Expiry::Never),
            Some(retired) if retired.is_retired() => {
                let changes = bucket::bring_back(key, retired, origin, &after, &owner);
                return match self.transact(&changes).await {
                    Err(trouble) if !trouble.is_passing() => Err(trouble),
                    _ => Ok(()),
                };
            }
            Some(expired) => bucket::rewrite(key, expired, &after, &owner, Expiry::Never),
        };
        self.update(&update).await.map(drop)
    }

    /// Now and then, looks whether a bucket is still written so often that it needs its parts.
    pub(crate) fn watch_for_calm(self: &Arc<Self>, leg: &Leg, now: Timestamp) {
        let bucket = leg.target.key();
        let calm_ms = u64::try_from(self.options.merge_after.as_millis()).unwrap_or(u64::MAX);
        let before = self.division(bucket, now, |division| {
            let is_due = division.counted.is_none_or(|(at, _)| now.millis_since(at) >= calm_ms);
            is_due.then(|| division.counted.replace((now, i64::MAX)))
        });
        let Some(before) = before else { return };
        let (shared, bucket) = (Arc::clone(self), bucket.clone());
        spawn_in_background(async move { shared.put_together_if_calm(&bucket, before, now).await });
    }

    async fn put_together_if_calm(
        self: &Arc<Self>,
        bucket: &BucketKey,
        before: Option<(Timestamp, i64)>,
        now: Timestamp,
    ) {
        let Ok(parts) = self.read_parts(bucket, now).await else { return };
        let writes: i64 = parts.iter().map(|(_, item)| item.writes).sum();
        self.division(bucket, now, |division| division.counted = Some((now, writes)));
        let Some((at, before)) = before else { return };
        let seconds = i64::try_from(now.millis_since(at) / 1_000).unwrap_or(i64::MAX).max(1);
        if writes < before || (writes - before) / seconds >= CALM_WRITES_PER_SECOND {
            return;
        }
        let count = self.count(bucket);
        if count > 1
            && let Err(trouble) = self.halve(bucket, count, now).await
        {
            tracing::debug!(error = %trouble.told(), "the parts of a bucket stay as they are");
        }
        // Parts that are gone have taken their counts with them.
        self.division(bucket, now, |division| division.counted = Some((now, i64::MAX)));
        if let Ok(parts) = self.read_parts(bucket, now).await {
            let writes = parts.iter().map(|(_, item)| item.writes).sum();
            self.division(bucket, now, |division| division.counted = Some((now, writes)));
        }
    }

    /// Makes half as many parts of so many: the first comes last, because it knows the count.
    pub(crate) async fn halve(
        self: &Arc<Self>,
        bucket: &BucketKey,
        count: u32,
        now: Timestamp,
    ) -> Result<(), Trouble> {
        let gate = self.division(bucket, now, |division| Arc::clone(&division.gate));
        let _turn = gate.lock().await;
        for shard in (0..count / 2).rev() {
            if !self.merge(bucket, shard, count, now).await? {
                return Ok(());
            }
        }
        self.count_merge(count / 2);
        Ok(())
    }

    /// Puts a part of so many and the one that was divided from it together; false when that cannot
    /// be done now.
    async fn merge(
        &self,
        bucket: &BucketKey,
        shard: u32,
        count: u32,
        now: Timestamp,
    ) -> Result<bool, Trouble> {
        let key = |shard| BucketItemKey { bucket: bucket.clone(), shard };
        let (low_key, high_key) = (key(shard), key(shard + count / 2));
        for _ in 0..ATTEMPTS_MAX {
            let keys = [low_key.item_key(), high_key.item_key()];
            let items = self.read_items(keys.clone()).await?;
            let low = items.get(&keys[0]).map(|item| BucketItem::decode(&low_key, item));
            let high = items.get(&keys[1]).map(|item| BucketItem::decode(&high_key, item));
            let (Some(low), high) = (low.transpose()?, high.transpose()?) else { return Ok(false) };
            let is_part = |item: &BucketItem| {
                item.shard_count.next_power_of_two() == count && item.is_live(now)
            };
            if low.shard_count.next_power_of_two() == count / 2 {
                return Ok(true);
            }
            if !is_part(&low) || high.as_ref().is_some_and(|high| !is_part(high)) {
                return Ok(false);
            }
            let halves = Halves { low: &low, high: high.as_ref() };
            let Some(changes) = bucket::merge(&low_key, halves, now) else {
                return Ok(false);
            };
            if self.try_merge(&changes, bucket, [shard, high_key.shard]).await? {
                if shard == SHARD_ZERO {
                    self.set_count(bucket, count / 2, now);
                }
                return Ok(true);
            }
        }
        Ok(false)
    }

    async fn try_merge(
        &self,
        changes: &[Change],
        bucket: &BucketKey,
        shards: [u32; 2],
    ) -> Result<bool, Trouble> {
        match self.transact(changes).await {
            Ok(Transacted::Done(_)) => {
                shards.into_iter().for_each(|shard| self.forget_part(bucket, shard));
                Ok(true)
            }
            Ok(Transacted::Unmet(..)) => Ok(false),
            Err(trouble) if trouble.is_passing() => Ok(false),
            Err(trouble) => Err(trouble),
        }
    }
}
