//! The writer's jobs and their replies.

use std::path::Path;
use std::sync::Arc;

use tokio::sync::oneshot;
use zae_limiter_core::{
    Admission, BucketKey, BucketQuery, Key, Placement, Plan, Settlement, StoreError, Take, Target,
    Timestamp, Write, Written,
};

use crate::error::Failure;

/// The sending side of a caller's reply.
pub(crate) type ReplySender<T> = oneshot::Sender<Result<T, StoreError>>;

/// A waiting caller, and the outcome that it gets once the transaction is committed.
#[derive(Debug)]
pub(crate) struct Caller<T> {
    reply: ReplySender<T>,
    outcome: Option<Result<T, Arc<Failure>>>,
}

/// How a transaction ended.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Commit<'a> {
    /// Committed.
    Done,
    /// Rolled back: the file holds nothing of it.
    Undone(&'a Arc<Failure>),
    /// `COMMIT` failed: the file may hold all of it or nothing.
    Unknown(&'a Arc<Failure>),
}

impl<T> Caller<T> {
    pub(crate) fn new() -> (Self, oneshot::Receiver<Result<T, StoreError>>) {
        let (reply, receiver) = oneshot::channel();
        (Self { reply, outcome: None }, receiver)
    }

    /// Forgets the outcome, because its transaction was rolled back.
    fn forget(&mut self) {
        self.outcome = None;
    }

    pub(crate) fn decide(&mut self, outcome: Result<T, Failure>) {
        self.outcome = Some(outcome.map_err(Arc::new));
    }

    /// Sends the reply. Returns the value if the caller no longer waits for it.
    fn reply(self, commit: Commit<'_>, file: &Path) -> Option<T> {
        let reply = match commit {
            // There is no outcome if the caller left before the job was done.
            Commit::Done => self.outcome?.map_err(|failure| failure.to_store_error(file)),
            Commit::Undone(failure) => Err(failure.to_store_error(file)),
            Commit::Unknown(failure) => Err(failure.to_store_error(file).maybe_applied()),
        };
        self.reply.send(reply).err()?.ok()
    }
}

/// A job for the next transaction.
#[derive(Debug)]
pub(crate) enum Job {
    Acquire(Plan, Caller<Admission>),
    /// Without a caller it is a background job: the refund of an acquire whose caller left, or a
    /// settlement whose caller left before it got the error.
    Settle(Vec<Settlement>, Timestamp, Option<Caller<()>>),
    Reconfigure(Target, Timestamp, Caller<()>),
    Write(Vec<Write>, Caller<Written>),
    Delete(Vec<Key>, Caller<()>),
    /// Books the unbooked usage of some of these buckets. Replies with the key to go on after.
    Book(BucketQuery, Option<BucketKey>, Caller<Option<BucketKey>>),
    /// Blocks the writer within a transaction until the test opens the gate.
    #[cfg(test)]
    Gate(std::sync::mpsc::Sender<()>, std::sync::mpsc::Receiver<()>),
    /// Fails the transaction: with `Unavailable` like a disk that cannot be written, with `Corrupt` like one bad row.
    #[cfg(test)]
    Fail(zae_limiter_core::StoreErrorKind),
    /// Sets SQLite's `max_page_count`, so that inserts fail like those on a full disk.
    #[cfg(test)]
    PagesMax(u32),
}

impl Job {
    /// The job that refunds an acquire.
    pub(crate) fn refund(plan: &Plan) -> Self {
        let refund = |leg: &zae_limiter_core::Leg| Settlement {
            target: Arc::clone(&leg.target),
            placement: Placement::default(),
            differences: leg
                .takes
                .iter()
                .map(|take| Take { cell: take.cell, amount: -take.amount })
                .collect(),
        };
        Self::Settle(plan.legs.iter().map(refund).collect(), plan.now, None)
    }

    /// Whether the job can be dropped because its caller left. A settlement is always carried out.
    pub(crate) fn is_abandoned(&self) -> bool {
        match self {
            Self::Acquire(_, caller) => caller.reply.is_closed(),
            Self::Settle(..) => false,
            Self::Reconfigure(_, _, caller) | Self::Delete(_, caller) => caller.reply.is_closed(),
            Self::Write(_, caller) => caller.reply.is_closed(),
            Self::Book(_, _, caller) => caller.reply.is_closed(),
            #[cfg(test)]
            Self::Gate(..) | Self::Fail(_) | Self::PagesMax(_) => false,
        }
    }

    /// Makes the job ready for another transaction after its own was rolled back. A caller that leaves before that
    /// must not get a refund for what was undone.
    pub(crate) fn reset(&mut self) {
        match self {
            Self::Acquire(_, caller) => caller.forget(),
            Self::Settle(_, _, caller) => {
                if let Some(caller) = caller {
                    caller.forget();
                }
            }
            Self::Reconfigure(_, _, caller) | Self::Delete(_, caller) => caller.forget(),
            Self::Write(_, caller) => caller.forget(),
            Self::Book(_, _, caller) => caller.forget(),
            #[cfg(test)]
            Self::Gate(..) | Self::Fail(_) | Self::PagesMax(_) => {}
        }
    }

    /// Replies to the caller. Returns a background job if one is still to be done: the refund of an
    /// acquire, or a settlement, whose caller left.
    pub(crate) fn reply(self, commit: Commit<'_>, file: &Path) -> Option<Self> {
        match self {
            Self::Acquire(plan, caller) => match caller.reply(commit, file)? {
                Admission::Taken(_) => return Some(Self::refund(&plan)),
                Admission::Refused(_) => {}
            },
            Self::Settle(settlements, now, Some(caller)) => match commit {
                // A caller that gets the error retries itself.
                Commit::Undone(failure) if failure.is_outage() => {
                    let has_left = caller.reply.send(Err(failure.to_store_error(file))).is_err();
                    return has_left.then_some(Self::Settle(settlements, now, None));
                }
                _ => {
                    let _ = caller.reply(commit, file);
                }
            },
            Self::Settle(_, _, None) => match commit {
                Commit::Done => {}
                Commit::Undone(failure) if failure.is_outage() => return Some(self),
                // A retry would fail again, or might apply the settlement twice.
                Commit::Undone(failure) | Commit::Unknown(failure) => {
                    tracing::warn!(%failure, "a background settlement may be lost");
                }
            },
            Self::Reconfigure(_, _, caller) | Self::Delete(_, caller) => {
                let _ = caller.reply(commit, file);
            }
            Self::Write(_, caller) => drop(caller.reply(commit, file)),
            Self::Book(_, _, caller) => drop(caller.reply(commit, file)),
            #[cfg(test)]
            Self::Gate(..) | Self::Fail(_) | Self::PagesMax(_) => {}
        }
        None
    }
}
