//! Tasks for a whole bucket: splitting, merging, and setting limits.

use std::sync::Arc;

use zae_limiter_core::{StoreError, Target};
use zae_limiter_schema::bucket::BucketItem;

use super::decide::{Snapshot, is_older, reconfigured};
use super::flow::{Note, Port};
use super::message::Task;
use super::reshard::{
    ATTEMPTS_MAX, BETWEEN_SPLITS, READS_MAX, begin_split, finish_split, merge_to_half, read_all,
    split_into,
};
use crate::error::{CallError, contended};

/// Runs a task and replies.
pub(crate) async fn run_task<C>(port: &Port<C>, task: Task, shards_max: u32, caller: C) {
    let (done, split_from) = match task {
        Task::SplitTo(wanted) => {
            let wanted = wanted.clamp(1, shards_max).next_power_of_two();
            (split_into(port, wanted).await, None)
        }
        Task::Split => match split_once_more(port, shards_max).await {
            Ok(split_from) => (Ok(split_from), split_from),
            Err(error) => (Err(error.to_store_error()), None),
        },
        Task::Merge => (merge_once(port).await.map_err(StoreError::from), None),
        Task::Reconfigure(target) => (reconfigure(port, &target).await.map(|()| None), None),
    };
    port.note(Note::Finish(caller, done));
    if let Some(from) = split_from {
        // After an error, a request for a missing shard continues the split.
        let _ = finish_split(port, from).await;
    }
}

/// Splits the first shard. Returns the count before, if that was done.
async fn split_once_more<C>(port: &Port<C>, shards_max: u32) -> Result<Option<u32>, CallError> {
    let shards = read_all(port).await?;
    let count = shards.count();
    let can_split = shards.iter().next().is_some() && count < shards_max;
    let is_split = can_split && begin_split(port, count).await?;
    Ok(is_split.then_some(count))
}

async fn merge_once<C>(port: &Port<C>) -> Result<Option<u32>, CallError> {
    let shards = read_all(port).await?;
    if shards.count() > 1 {
        merge_to_half(port, shards.count()).await?;
    }
    Ok(Some(port.count()))
}

/// Gives every shard of an existing bucket exactly the target's limits and lifetime. A shard that is split
/// meanwhile passes its old limits on, so all shards are then read again.
async fn reconfigure<C>(port: &Port<C>, target: &Target) -> Result<(), StoreError> {
    for _ in 0..READS_MAX {
        let mut is_split = false;
        for (shard, item) in read_all(port).await?.iter() {
            let count = reconfigure_shard(port, target, shard, item.clone()).await?;
            is_split |= count > item.shard_count;
        }
        if !is_split {
            return Ok(());
        }
    }
    Err(contended(READS_MAX))
}

/// Returns the shard count of the item that was written.
async fn reconfigure_shard<C>(
    port: &Port<C>,
    target: &Target,
    shard: u32,
    mut item: BucketItem,
) -> Result<u32, StoreError> {
    for _ in 0..ATTEMPTS_MAX {
        // The change of another process is newer.
        if !item.is_live(port.now()) || is_older(target, item.limits_at, port.now()) {
            return Ok(item.shard_count);
        }
        let update = reconfigured(&port.key(shard), &item, target, port.now());
        match port.update(shard, update).await {
            Ok((false, Snapshot::Item(found))) => item = Arc::unwrap_or_clone(found),
            Ok(_) => return Ok(item.shard_count),
            Err(error) if error.is_transient() => port.pause(BETWEEN_SPLITS).await,
            Err(error) => return Err(error.to_store_error()),
        }
    }
    Err(contended(ATTEMPTS_MAX))
}
