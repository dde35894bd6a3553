//! Splitting a bucket into more shards, restoring a missing shard, and merging shards.
//!
//! The first shard is split first, then the others, each in its own transaction: see
//! [`zae_limiter_schema::bucket::split`]. A process that finds a shard that is not split yet splits it.

use std::sync::Arc;
use std::time::Duration;

use zae_limiter_core::{Bucket, Cell, StoreError, Timestamp};
use zae_limiter_schema::bucket::{self, After, BucketItem, Owner, ShardPair, share_of};
use zae_limiter_schema::{SHARD_ZERO, Transacted};

use super::decide::Snapshot;
use super::flow::{Note, Port};
use super::message::{Counted, decode};
use super::shards::{Shards, origin};
use crate::error::{CallError, contended};

/// How often a write to one shard is tried while other processes change it.
pub(crate) const ATTEMPTS_MAX: u32 = 16;

/// How often splitting a shard is tried. It is hot: other processes write to it all the time.
const SPLITS_MAX: u32 = 64;

/// How often all shards are read while a bucket is split into many: six splits from 1 to 64, and six more for
/// changes of other processes.
pub(crate) const READS_MAX: u32 = 12;

/// How long a split waits after a conflict or a throttled partition.
pub(crate) const BETWEEN_SPLITS: Duration = Duration::from_millis(10);

/// A bucket is calm below this many writes a second, all shards together.
const CALM_WRITES_PER_SECOND: i64 = 500;

/// Reads all shards of a bucket, as many as the highest shard count says.
pub(crate) async fn read_all<C>(port: &Port<C>) -> Result<Shards, CallError> {
    let mut requested = port.count();
    loop {
        let numbers: Vec<u32> = (0..requested).collect();
        let items = port.read(&numbers).await?;
        let shards = Shards::live(items.into_iter().flatten(), port.now());
        port.note(Note::Count(shards.count()));
        if shards.count() <= requested {
            return Ok(shards);
        }
        requested = shards.count();
    }
}

/// Splits the first shard of a bucket with `from` shards: from then on it has twice as many. False if it no
/// longer has `from` shards.
pub(crate) async fn begin_split<C>(port: &Port<C>, from: u32) -> Result<bool, CallError> {
    let is_split = split(port, SHARD_ZERO, from).await?;
    if is_split {
        port.note(Note::Counted(Counted::Split(2 * from)));
        port.note(Note::Unpark);
    }
    Ok(is_split)
}

/// Splits the other shards. After an error, a request for a missing shard continues the split.
pub(crate) async fn finish_split<C>(port: &Port<C>, from: u32) -> Result<(), CallError> {
    for shard in 1..from {
        split(port, shard, from).await?;
    }
    Ok(())
}

/// Splits a bucket until it has `wanted` shards and all of them exist. Returns the number of shards, or `None`
/// if there is no bucket.
pub(crate) async fn split_into<C>(port: &Port<C>, wanted: u32) -> Result<Option<u32>, StoreError> {
    for _ in 0..READS_MAX {
        let shards = read_all(port).await?;
        if shards.iter().next().is_none() {
            return Ok(None);
        }
        let counts = shards.iter().map(|(shard, item)| (shard, item.shard_count));
        let counts = counts.map(|(shard, count)| (shard, count.next_power_of_two()));
        let unsplit: Vec<(u32, u32)> = counts.filter(|(_, count)| *count < wanted).collect();
        if unsplit.is_empty() && shards.is_complete() {
            return Ok(Some(shards.count()));
        }
        // The first shard goes first, because its count is authoritative.
        for (shard, count) in unsplit {
            let is_split = split(port, shard, count).await?;
            if shard == SHARD_ZERO && !is_split {
                break;
            }
            if shard == SHARD_ZERO {
                port.note(Note::Counted(Counted::Split(2 * count)));
            }
        }
        for shard in shards.missing(shards.count()) {
            restore(port, shard).await?;
        }
    }
    Err(contended(READS_MAX))
}

/// Splits one of `from` shards in two. False if its shard count is no longer `from`.
async fn split<C>(port: &Port<C>, shard: u32, from: u32) -> Result<bool, CallError> {
    let (low_key, high_key) = (port.key(shard), port.key(shard + from));
    let (mut low, mut high) = (None, None);
    for _ in 0..SPLITS_MAX {
        let item = match low.take() {
            Some(item) => item,
            None => match port.read(&[shard]).await?.pop().flatten() {
                Some(item) => item,
                None => return Ok(false),
            },
        };
        if item.shard_count.next_power_of_two() != from || !item.is_live(port.now()) {
            return Ok(false);
        }
        let pair = ShardPair { low: &item, high: high.as_ref() };
        match port.transact(&bucket::split(&low_key, pair, port.now())).await {
            Ok(Transacted::Done(_)) => {
                for half in bucket::after_split(&item) {
                    port.note(Note::Left(Box::new(half)));
                }
                if shard == SHARD_ZERO {
                    port.note(Note::Count(2 * from));
                }
                return Ok(true);
            }
            // The first shard has a lower count by now.
            Ok(Transacted::Unmet(found, _)) if found.get(2).is_some_and(Option::is_some) => {
                return Ok(false);
            }
            Ok(Transacted::Unmet(found, _)) => {
                if let Some(Some(Some(found))) = found.first() {
                    low = Some(BucketItem::decode(&low_key, found)?);
                }
                if let Some(Some(found)) = found.get(1) {
                    high = match decode(&high_key, found.as_ref())? {
                        Snapshot::Item(item) => Some(Arc::unwrap_or_clone(item)),
                        Snapshot::Absent => None,
                    };
                }
            }
            Err(error) if error.is_transient() => port.pause(BETWEEN_SPLITS).await,
            Err(error) => return Err(error),
        }
    }
    Ok(false)
}

/// Restores a missing shard other than the first. Either the bucket has fewer shards by now, or the shard is not
/// split off yet, or it was lost: then it starts with no tokens. Returns the shard that has its share now.
pub(crate) async fn restore<C>(port: &Port<C>, shard: u32) -> Result<u32, CallError> {
    let Some((from, from_count)) = origin(shard) else { return Ok(SHARD_ZERO) };
    let numbers = match from {
        SHARD_ZERO => vec![SHARD_ZERO, shard],
        _ => vec![SHARD_ZERO, from, shard],
    };
    let mut items = port.read(&numbers).await?;
    let left = items.pop().flatten();
    let origin = items.last().cloned().flatten().filter(|origin| origin.is_live(port.now()));
    let first = items.swap_remove(0).filter(|first| !first.is_expired(port.now()));
    let count = first.as_ref().map_or(1, |first| first.shard_count.next_power_of_two());
    port.note(Note::Count(count));
    let (Some(first), Some(origin)) = (first, origin) else { return Ok(from) };
    if left.as_ref().is_some_and(|left| left.is_live(port.now())) {
        return Ok(shard);
    }
    let origin_count = origin.shard_count.next_power_of_two();
    // The first shard's count is authoritative, but another client may have raised that of the origin.
    let count = count.max(origin_count);
    if shard >= count || origin_count < from_count {
        return Ok(from);
    }
    if origin_count == from_count {
        return Ok(if split(port, from, from_count).await? { shard } else { from });
    }
    create_empty(port, shard, (&first, &origin), left.as_ref(), count).await?;
    Ok(shard)
}

/// Creates a lost shard without tokens, unless another process has meanwhile. `count` is the bucket's shard count.
async fn create_empty<C>(
    port: &Port<C>,
    shard: u32,
    (first, origin): (&BucketItem, &BucketItem),
    left: Option<&BucketItem>,
    count: u32,
) -> Result<(), CallError> {
    let since = left.map_or(port.now(), |left| left.bucket.refilled_at().max(port.now()));
    let limits = share_of(&first.whole, shard, count);
    let nothing = vec![Cell::default(); limits.len()];
    let empty = Bucket::from_parts(limits, nothing, since);
    let (whole, limits_at) = (&*first.whole, first.limits_at);
    let after = After { bucket: &empty, whole, shard_count: count, limits_at };
    let owner = Owner { parent: first.parent.as_ref() };
    let changes = bucket::restore(&port.key(shard), left, origin, &after, &owner);
    match port.transact(&changes).await {
        Ok(Transacted::Done(_)) => {
            let made = BucketItem { shard, bucket: empty, shard_count: count, ..first.clone() };
            port.note(Note::Left(Box::new(made)));
            Ok(())
        }
        Err(error) if !error.is_transient() => Err(error),
        _ => Ok(()),
    }
}

/// Counts the writes of a bucket, and merges it into half as many shards if there were few since the last count.
pub(crate) async fn merge_if_calm<C>(
    port: &Port<C>,
    before: Option<(Timestamp, i64)>,
) -> Result<(), CallError> {
    let writes = count_writes(port).await?;
    let Some((at, before)) = before else { return Ok(()) };
    let seconds = i64::try_from(port.now().millis_since(at) / 1_000).unwrap_or(i64::MAX).max(1);
    if writes < before || (writes - before) / seconds >= CALM_WRITES_PER_SECOND {
        return Ok(());
    }
    let count = port.count();
    if count > 1 {
        let merged = merge_to_half(port, count).await;
        // Retired shards no longer count.
        count_writes(port).await?;
        merged?;
    }
    Ok(())
}

async fn count_writes<C>(port: &Port<C>) -> Result<i64, CallError> {
    let shards = read_all(port).await?;
    let writes = shards.iter().map(|(_, item)| item.writes).sum();
    port.note(Note::Writes(writes));
    Ok(writes)
}

/// Merges a bucket of `count` shards into half as many. The first shard comes last, because its count is
/// authoritative.
pub(crate) async fn merge_to_half<C>(port: &Port<C>, count: u32) -> Result<(), CallError> {
    for shard in (0..count / 2).rev() {
        if !merge(port, shard, count).await? {
            return Ok(());
        }
    }
    port.note(Note::Counted(Counted::Merged(count / 2)));
    Ok(())
}

/// Merges one of `count` shards with the one that was split off it. False if that is not possible now.
async fn merge<C>(port: &Port<C>, shard: u32, count: u32) -> Result<bool, CallError> {
    let high_shard = shard + count / 2;
    for _ in 0..ATTEMPTS_MAX {
        let mut items = port.read(&[shard, high_shard]).await?;
        let (high, low) = (items.pop().flatten(), items.pop().flatten());
        let Some(low) = low else { return Ok(false) };
        let is_one = |item: &BucketItem| {
            item.shard_count.next_power_of_two() == count && item.is_live(port.now())
        };
        if low.shard_count.next_power_of_two() == count / 2 {
            return Ok(true);
        }
        if !is_one(&low) || high.as_ref().is_some_and(|high| !is_one(high)) {
            return Ok(false);
        }
        let pair = ShardPair { low: &low, high: high.as_ref() };
        let Some(changes) = bucket::merge(&port.key(shard), pair, port.now()) else {
            return Ok(false);
        };
        match port.transact(&changes).await {
            Ok(Transacted::Done(_)) => {
                port.note(Note::Left(Box::new(bucket::after_merge(pair, port.now()))));
                port.note(Note::Forget(high_shard));
                if shard == SHARD_ZERO {
                    port.note(Note::Count(count / 2));
                }
                return Ok(true);
            }
            Ok(Transacted::Unmet(..)) => {}
            Err(error) if error.is_transient() => {}
            Err(error) => return Err(error),
        }
    }
    Ok(false)
}
