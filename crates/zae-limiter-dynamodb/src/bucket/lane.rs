//! The queue of a shard, and batches: the requests of one write.

use std::collections::VecDeque;

use zae_limiter_core::{Millitokens, Takes, Timestamp};
use zae_limiter_schema::SHARD_ZERO;

use super::decide::{Request, Snapshot};
use super::message::{Caller, Queued};

/// The queue of one shard.
#[derive(Debug)]
pub(crate) struct Lane<C> {
    shard: u32,
    pub(crate) queue: VecDeque<Queued<C>>,
    /// A batch is in progress, or the lane pauses.
    pub(crate) is_busy: bool,
}

/// The lanes of a bucket, by their shards.
#[derive(Debug)]
pub(crate) struct Lanes<C>(Vec<Lane<C>>);

impl<C> Default for Lanes<C> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<C: Caller> Lanes<C> {
    pub(crate) fn of(&mut self, shard: u32) -> &mut Lane<C> {
        let at = match self.0.binary_search_by_key(&shard, |lane| lane.shard) {
            Ok(at) => at,
            Err(at) => {
                self.0.insert(at, Lane { shard, queue: VecDeque::new(), is_busy: false });
                at
            }
        };
        &mut self.0[at]
    }

    /// The length of all queues together.
    pub(crate) fn queued(&self) -> usize {
        self.0.iter().map(|lane| lane.queue.len()).sum()
    }

    /// Whether all queues are empty and no batch is in progress.
    pub(crate) fn are_idle(&self) -> bool {
        self.0.iter().all(|lane| !lane.is_busy && lane.queue.is_empty())
    }

    /// Removes the requests of callers that were dropped.
    pub(crate) fn sweep(&mut self) {
        self.0.iter_mut().for_each(|lane| lane.queue.retain(|one| !one.is_abandoned()));
    }
}

/// The requests of one write, and the snapshot it is computed from.
#[derive(Debug)]
pub(crate) struct Batch<C> {
    pub(crate) shard: u32,
    /// The latest time of the requests.
    pub(crate) now: Timestamp,
    pub(crate) members: Vec<Queued<C>>,
    pub(crate) attempt: u32,
    pub(crate) snapshot: Option<Snapshot>,
    /// The snapshot is recent enough to refuse requests.
    pub(crate) is_fresh: bool,
    /// The snapshot is from this batch, so that refunds to limits it lacks can be ignored.
    pub(crate) is_just_seen: bool,
    /// The indexes of the members that the current write is for.
    pub(crate) written: Vec<usize>,
    /// What other shards must settle, by the member's index.
    pub(crate) left_over: Vec<(usize, Takes)>,
    /// The current write rewinds the refill time, and is for no member.
    pub(crate) is_rewind: bool,
}

impl<C> Batch<C> {
    /// Whether the batch is for a shard, other than the first, that holds no share.
    pub(crate) fn is_no_shard(&self) -> bool {
        match &self.snapshot {
            None => false,
            Some(Snapshot::Item(item)) if item.is_live(self.now) => false,
            Some(_) => self.shard != SHARD_ZERO,
        }
    }

    /// Whether a refund would be ignored because an old snapshot lacks the bucket or the limit. Another process
    /// may have created it since.
    pub(crate) fn is_unsure_of(&self, request: &Request) -> bool {
        let Some(settlement) = request.settlement() else { return false };
        let bucket = match &self.snapshot {
            Some(Snapshot::Item(item)) if !item.is_expired(self.now) => Some(&item.bucket),
            _ => None,
        };
        let names = settlement.target.limits().names();
        !self.is_just_seen
            && settlement.differences.iter().any(|difference| {
                let limit = names[difference.cell].as_str();
                difference.amount < Millitokens::ZERO
                    && bucket.is_none_or(|bucket| bucket.limits().position(limit).is_none())
            })
    }
}
