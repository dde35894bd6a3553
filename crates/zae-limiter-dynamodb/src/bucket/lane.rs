//! The queue of a shard, and the requests that go together in one write.

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
    /// A batch is under way, or the lane pauses.
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

    /// How many wait in all queues.
    pub(crate) fn queued(&self) -> usize {
        self.0.iter().map(|lane| lane.queue.len()).sum()
    }

    /// Whether no call is under way, and nobody waits.
    pub(crate) fn are_idle(&self) -> bool {
        self.0.iter().all(|lane| !lane.is_busy && lane.queue.is_empty())
    }

    /// Forgets callers who have gone.
    pub(crate) fn sweep(&mut self) {
        self.0.iter_mut().for_each(|lane| lane.queue.retain(|one| !one.is_abandoned()));
    }
}

/// Requests that go in one write, and what it is computed from.
#[derive(Debug)]
pub(crate) struct Batch<C> {
    pub(crate) shard: u32,
    /// The latest moment of them.
    pub(crate) now: Timestamp,
    pub(crate) members: Vec<Queued<C>>,
    pub(crate) attempt: u32,
    pub(crate) snapshot: Option<Snapshot>,
    /// Recent enough to refuse by.
    pub(crate) is_fresh: bool,
    /// Seen in this batch, so that what is missing there may be passed over.
    pub(crate) is_just_seen: bool,
    /// The members that the write under way is for, by their places.
    pub(crate) written: Vec<usize>,
    /// What some of them must settle elsewhere.
    pub(crate) left_over: Vec<(usize, Takes)>,
}

impl<C> Batch<C> {
    /// Whether a shard other than the first holds no share.
    pub(crate) fn is_no_shard(&self) -> bool {
        match &self.snapshot {
            None => false,
            Some(Snapshot::Item(item)) if item.is_live(self.now) => false,
            Some(_) => self.shard != SHARD_ZERO,
        }
    }

    /// Whether a refund would be passed over, but only by memory: somebody may have brought the
    /// bucket, or the limit, back since.
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
