//! What goes into a bucket's machine, and what comes out of it.

use std::sync::Arc;
use std::time::Duration;

use smallvec::SmallVec;
use zae_limiter_core::{
    Leg, LegTaken, LimitStatus, Placement, Settlement, StoreError, Take, Target, Timestamp,
};
use zae_limiter_schema::bucket::BucketItem;
use zae_limiter_schema::{BucketItemKey, Change, Item, Transacted, Update, Updated};

use super::decide::{Request, Snapshot};
use crate::error::CallError;

/// Who waits for a reply.
pub(crate) trait Caller: Send + Sync + 'static {
    /// Whether nobody will read the reply.
    fn has_gone(&self) -> bool;
}

/// The answer to a request.
#[derive(Debug, PartialEq)]
pub(crate) enum Reply {
    /// The tokens are taken.
    Taken(LegTaken),
    /// The differences are applied.
    Settled,
    /// Nothing is taken.
    Refused(Vec<LimitStatus>),
    /// What was asked of the bucket as a whole is done; the count of its shards, `None` without a bucket.
    Done(Option<u32>),
}

/// A request and who waits for it.
#[derive(Debug)]
pub(crate) struct Queued<C> {
    pub(crate) request: Request,
    /// When it was asked.
    pub(crate) now: Timestamp,
    /// `None` for background refunds: nobody awaits the reply.
    pub(crate) caller: Option<C>,
    /// The shards that could not admit it.
    pub(crate) tried: SmallVec<[u32; 4]>,
    /// How often it went to another shard because one was retired, missing or throttled.
    pub(crate) moves: u32,
    /// How often it was turned away and tried again, as settlements are.
    pub(crate) tries: u32,
    /// Some of it is applied, so an error must not say that nothing was.
    pub(crate) is_begun: bool,
    /// What is to be settled once the request is.
    pub(crate) then: Option<Box<Settlement>>,
}

impl<C: Caller> Queued<C> {
    pub(crate) fn new(request: Request, now: Timestamp, caller: Option<C>) -> Self {
        let (tried, moves, tries) = (SmallVec::new(), 0, 0);
        Self { request, now, caller, tried, moves, tries, is_begun: false, then: None }
    }

    /// What gives a leg's tokens back in the background.
    pub(crate) fn refund(leg: &Leg, shard: u32, now: Timestamp) -> Self {
        Self::new(Request::Settle(credit(leg, shard)), now, None)
    }

    /// Whether the caller of a take has gone. A settlement is carried out all the same.
    pub(crate) fn is_abandoned(&self) -> bool {
        matches!(self.request, Request::Take(_))
            && self.caller.as_ref().is_some_and(Caller::has_gone)
    }
}

/// What gives a leg's tokens back.
pub(crate) fn credit(leg: &Leg, shard: u32) -> Settlement {
    let differences = leg.takes.iter().map(|take| Take { cell: take.cell, amount: -take.amount });
    Settlement {
        target: Arc::clone(&leg.target),
        placement: Placement::new(shard),
        differences: differences.collect(),
    }
}

/// What is asked of a bucket as a whole.
#[derive(Clone, Debug)]
pub(crate) enum Task {
    /// Split it into twice as many shards.
    Split,
    /// Split it until it has so many.
    SplitTo(u32),
    /// Merge it into half as many.
    Merge,
    /// Give all shards exactly these limits and this lifetime.
    Reconfigure(Arc<Target>),
}

/// A call to the table, or a wait.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Call {
    /// Update the item of a shard.
    Update(u32, Update),
    Transact(Vec<Change>),
    /// Read items of shards.
    Read(Vec<BucketItemKey>),
    Pause(Duration),
}

/// What a call came to.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Response {
    Updated(Updated),
    Transacted(Transacted),
    /// In the order of the keys.
    Read(Vec<Option<Item>>),
    Woke,
}

pub(crate) type CallResult = Result<Response, CallError>;

/// The number of a call under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Op(pub(crate) u64);

/// What happens to a machine.
#[derive(Debug)]
pub(crate) enum Event<C> {
    /// Somebody asks for something.
    Request(Queued<C>),
    /// Somebody asks for something of the bucket as a whole.
    Task(Task, Timestamp, C),
    /// A call has ended: answered, failed, or given up after its time limit.
    Answered(Op, CallResult),
    /// A caller who waited has gone.
    Abandoned,
    /// The bucket was deleted.
    Deleted,
}

/// What a machine wants done.
#[derive(Debug)]
pub(crate) enum Command<C> {
    Call(Op, Call),
    /// Send a reply. When the caller has gone, `undo` is asked for instead.
    Reply {
        caller: C,
        reply: Result<Reply, StoreError>,
        undo: Option<Box<Queued<C>>>,
    },
    /// A background refund failed.
    LostRefund(StoreError),
    Count(Counted),
}

/// What the store counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Counted {
    /// A bucket was split into so many shards.
    Split(u32),
    /// A bucket was merged into so many.
    Merged(u32),
    /// One request was taken from several shards.
    Gathered,
}

/// Reads an item that an answer holds.
pub(crate) fn decode(key: &BucketItemKey, item: Option<&Item>) -> Result<Snapshot, CallError> {
    match item {
        None => Ok(Snapshot::Absent),
        Some(item) => Ok(Snapshot::Item(BucketItem::decode(key, item)?)),
    }
}
