//! What the writer is asked to do, and how it answers.

use std::path::Path;
use std::sync::Arc;

use tokio::sync::oneshot;
use zae_limiter_core::{
    Admission, BucketKey, BucketQuery, Key, Placement, Plan, Settlement, StoreError, Take, Target,
    Timestamp, Write, Written,
};

use crate::error::Failure;

/// What a caller waits for.
pub(crate) type Reply<T> = oneshot::Sender<Result<T, StoreError>>;

/// Where a caller waits, and what it will be told once the transaction is in the file.
#[derive(Debug)]
pub(crate) struct Caller<T> {
    reply: Reply<T>,
    outcome: Option<Result<T, Arc<Failure>>>,
}

/// Whether the file holds what was done.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Commit<'a> {
    /// It does.
    Done,
    /// Nothing of it.
    Undone(&'a Arc<Failure>),
    /// Nobody knows.
    Unknown(&'a Arc<Failure>),
}

impl<T> Caller<T> {
    pub(crate) fn new() -> (Self, oneshot::Receiver<Result<T, StoreError>>) {
        let (reply, receiver) = oneshot::channel();
        (Self { reply, outcome: None }, receiver)
    }

    pub(crate) fn decide(&mut self, outcome: Result<T, Failure>) {
        self.outcome = Some(outcome.map_err(Arc::new));
    }

    /// Tells the caller; gives back what it would have been told when it has gone away.
    fn tell(self, commit: Commit<'_>, file: &Path) -> Option<T> {
        let answer = match commit {
            // Not decided means that the caller had gone away before.
            Commit::Done => self.outcome?.map_err(|failure| failure.told(file)),
            Commit::Undone(failure) => Err(failure.told(file)),
            Commit::Unknown(failure) => Err(failure.told(file).maybe_applied()),
        };
        self.reply.send(answer).err()?.ok()
    }
}

/// Something to do in the next transaction.
#[derive(Debug)]
pub(crate) enum Job {
    Acquire(Plan, Caller<Admission>),
    /// Without a caller it is owed: the refund of an acquire whose caller has gone away, or a settlement
    /// whose caller had gone before it could be told of a failure.
    Settle(Vec<Settlement>, Timestamp, Option<Caller<()>>),
    Reconfigure(Target, Timestamp, Caller<()>),
    Write(Vec<Write>, Caller<Written>),
    Delete(Vec<Key>, Caller<()>),
    /// Books the unbooked usage of some of these buckets; answers where to go on.
    Book(BucketQuery, Option<BucketKey>, Caller<Option<BucketKey>>),
    /// Stops the writer in the middle of a transaction until the test lets it go.
    #[cfg(test)]
    Gate(std::sync::mpsc::Sender<()>, std::sync::mpsc::Receiver<()>),
    /// Ends the transaction as a disk that cannot be written does.
    #[cfg(test)]
    Fail,
}

impl Job {
    /// The job that undoes an acquire.
    pub(crate) fn give_back(plan: &Plan) -> Self {
        let back = |leg: &zae_limiter_core::Leg| Settlement {
            target: Arc::clone(&leg.target),
            placement: Placement::default(),
            differences: leg
                .takes
                .iter()
                .map(|take| Take { cell: take.cell, amount: -take.amount })
                .collect(),
        };
        Self::Settle(plan.legs.iter().map(back).collect(), plan.now, None)
    }

    /// Whether nobody waits for it any more and it need not be done. A settlement is owed whoever
    /// waits for it.
    pub(crate) fn is_abandoned(&self) -> bool {
        match self {
            Self::Acquire(_, caller) => caller.reply.is_closed(),
            Self::Settle(..) => false,
            Self::Reconfigure(_, _, caller) | Self::Delete(_, caller) => caller.reply.is_closed(),
            Self::Write(_, caller) => caller.reply.is_closed(),
            Self::Book(_, _, caller) => caller.reply.is_closed(),
            #[cfg(test)]
            Self::Gate(..) | Self::Fail => false,
        }
    }

    /// Tells the caller what became of the job. What comes back is still owed: the undoing of an
    /// acquire, or a settlement, whose caller has gone away.
    pub(crate) fn answer(self, commit: Commit<'_>, file: &Path) -> Option<Self> {
        match self {
            Self::Acquire(plan, caller) => match caller.tell(commit, file)? {
                Admission::Taken(_) => return Some(Self::give_back(&plan)),
                Admission::Refused(_) => {}
            },
            Self::Settle(settlements, now, Some(caller)) => match commit {
                // A caller that is told tries again itself.
                Commit::Undone(failure) if failure.is_outage() => {
                    let gone = caller.reply.send(Err(failure.told(file))).is_err();
                    return gone.then_some(Self::Settle(settlements, now, None));
                }
                _ => {
                    let _ = caller.tell(commit, file);
                }
            },
            Self::Settle(_, _, None) => match commit {
                Commit::Done => {}
                Commit::Undone(failure) if failure.is_outage() => return Some(self),
                // Either it can never be done, or it may have been, and must not be twice.
                Commit::Undone(failure) | Commit::Unknown(failure) => {
                    tracing::warn!(%failure, "a settlement without a caller may be lost");
                }
            },
            Self::Reconfigure(_, _, caller) | Self::Delete(_, caller) => {
                let _ = caller.tell(commit, file);
            }
            Self::Write(_, caller) => drop(caller.tell(commit, file)),
            Self::Book(_, _, caller) => drop(caller.tell(commit, file)),
            #[cfg(test)]
            Self::Gate(..) | Self::Fail => {}
        }
        None
    }
}
