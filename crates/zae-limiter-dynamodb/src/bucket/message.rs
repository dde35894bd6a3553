//! Events, calls, responses and commands of a bucket's machine.

use std::sync::Arc;
use std::time::Duration;

use smallvec::SmallVec;
use zae_limiter_core::{
    Leg, LegTaken, LimitStatus, Placement, Settlement, StoreError, Take, Target, Timestamp,
};
use zae_limiter_schema::bucket::BucketItem;
use zae_limiter_schema::{BucketItemKey, Change, Decoded, Item, Transacted, Update, Updated};

use super::decide::{Request, Snapshot};
use crate::error::CallError;

/// A caller that waits for a reply.
pub(crate) trait Caller: Send + Sync + 'static {
    /// Whether the caller was dropped and will not read the reply.
    fn has_gone(&self) -> bool;
}

/// The reply to a request or task.
#[derive(Debug, PartialEq)]
pub(crate) enum Reply {
    /// The tokens were taken.
    Taken(LegTaken),
    /// The differences were applied.
    Settled,
    /// Nothing was taken.
    Refused(Vec<LimitStatus>),
    /// The task is done. The shard count, or `None` if there is no bucket.
    Done(Option<u32>),
}

/// A request in a queue, and its caller.
#[derive(Debug)]
pub(crate) struct Queued<C> {
    pub(crate) request: Request,
    /// When it was submitted.
    pub(crate) now: Timestamp,
    /// `None` for background refunds: nobody awaits the reply.
    pub(crate) caller: Option<C>,
    /// The shards that refused it.
    pub(crate) tried: SmallVec<[u32; 4]>,
    /// How often it went to another shard because one was retired, missing or throttled.
    pub(crate) moves: u32,
    /// How often a settlement was retried after an error.
    pub(crate) tries: u32,
    /// Some of it was applied, so that an error must say `Applied::Maybe`.
    pub(crate) is_begun: bool,
    /// What to settle after this request.
    pub(crate) then: Option<Box<Settlement>>,
}

impl<C: Caller> Queued<C> {
    pub(crate) fn new(request: Request, now: Timestamp, caller: Option<C>) -> Self {
        let (tried, moves, tries) = (SmallVec::new(), 0, 0);
        Self { request, now, caller, tried, moves, tries, is_begun: false, then: None }
    }

    /// Refunds a leg in the background.
    pub(crate) fn refund(leg: &Leg, shard: u32, now: Timestamp) -> Self {
        Self::new(Request::Settle(credit(leg, shard)), now, None)
    }

    /// Whether the caller of a take was dropped. A settlement is executed nevertheless.
    pub(crate) fn is_abandoned(&self) -> bool {
        matches!(self.request, Request::Take(_))
            && self.caller.as_ref().is_some_and(Caller::has_gone)
    }
}

/// The settlement that refunds a leg.
pub(crate) fn credit(leg: &Leg, shard: u32) -> Settlement {
    let differences = leg.takes.iter().map(|take| Take { cell: take.cell, amount: -take.amount });
    Settlement {
        target: Arc::clone(&leg.target),
        placement: Placement::new(shard),
        differences: differences.collect(),
    }
}

/// A task for a whole bucket.
#[derive(Clone, Debug)]
pub(crate) enum Task {
    /// Split it into twice as many shards.
    Split,
    /// Split it until it has this many shards.
    SplitTo(u32),
    /// Merge it into half as many shards.
    Merge,
    /// Give all shards exactly the target's limits and lifetime.
    Reconfigure(Arc<Target>),
}

/// A call to the table, or a pause.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Call {
    /// Update the item of a shard.
    Update(u32, Update),
    Transact(Vec<Change>),
    /// Read items of shards.
    Read(Vec<BucketItemKey>),
    Pause(Duration),
}

/// The response to a call.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Response {
    Updated(Updated<Decoded>),
    Transacted(Transacted),
    /// In the order of the keys.
    Read(Vec<Option<Item>>),
    Woke,
}

pub(crate) type CallResult = Result<Response, CallError>;

/// The number of a call in progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Op(pub(crate) u64);

/// An event for a machine.
#[derive(Debug)]
pub(crate) enum Event<C> {
    /// A request was submitted.
    Request(Queued<C>),
    /// A task was submitted.
    Task(Task, Timestamp, C),
    /// A call has returned, failed, or exceeded its time limit.
    Answered(Op, CallResult),
    /// A waiting caller was dropped.
    Abandoned,
    /// The bucket was deleted.
    Deleted,
}

/// A command of a machine.
#[derive(Debug)]
pub(crate) enum Command<C> {
    Call(Op, Call),
    /// Send a reply. If the caller was dropped, submit `undo` instead.
    Reply {
        caller: C,
        reply: Result<Reply, StoreError>,
        undo: Option<Box<Queued<C>>>,
    },
    /// A background refund failed.
    LostRefund(StoreError),
    /// A refill time was far in the future and is set to now.
    Rewound,
    Count(Counted),
}

/// What [`ReshardCounts`](crate::ReshardCounts) counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Counted {
    /// A bucket was split into this many shards.
    Split(u32),
    /// A bucket was merged into this many shards.
    Merged(u32),
    /// A request was gathered from several shards.
    Gathered,
}

/// Decodes an item from a response.
pub(crate) fn decode(key: &BucketItemKey, item: Option<&Item>) -> Result<Snapshot, CallError> {
    match item {
        None => Ok(Snapshot::Absent),
        Some(item) => Ok(Snapshot::of(BucketItem::decode(key, item)?)),
    }
}

/// The item of an answer to an update.
pub(crate) fn snapshot_of(item: Option<Decoded>) -> Result<Snapshot, CallError> {
    match item {
        None => Ok(Snapshot::Absent),
        Some(decoded) => Ok(Snapshot::of(decoded?)),
    }
}
