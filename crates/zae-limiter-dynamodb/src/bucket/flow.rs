//! Flows: procedures of several table calls, written as straight-line code that does no IO.
//!
//! A flow stops at each call. The machine returns the call as a command and resumes the flow with the result.
//! Nothing else wakes a flow, so it is as deterministic as the machine: the same results give the same calls and
//! notes.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use zae_limiter_core::{BucketKey, StoreError, Timestamp};
use zae_limiter_schema::bucket::{self, BucketItem};
use zae_limiter_schema::{BucketItemKey, Change, TableErrorKind, Transacted, Update, Updated};

use super::decide::Snapshot;
use super::message::{Call, CallResult, Counted, Queued, Reply, Response, decode, snapshot_of};
use super::time::Time;
use crate::error::{COLLISIONS_MAX, CallError};

/// How often refill times are rewound before a read is taken as it is.
const REWINDS_MAX: u32 = 4;

/// A message from a flow to its machine.
#[derive(Debug)]
pub(crate) enum Note<C> {
    /// The bucket has this many shards.
    Count(u32),
    /// This shard is retired: drop its snapshot.
    Forget(u32),
    /// A transaction has left a shard like this, unless other processes wrote in between. It replaces the snapshot,
    /// but nothing is decided by it.
    Left(Box<BucketItem>),
    /// All shards together have counted this many writes.
    Writes(i64),
    Counted(Counted),
    /// Requests that wait for a split continue.
    Unpark,
    Reply(Queued<C>, Result<Reply, StoreError>),
    /// The reply to a task.
    Finish(C, Result<Option<u32>, StoreError>),
    /// Queue the request at this shard.
    Enqueue(u32, Queued<C>),
    /// Queue the request at the shard that the machine chooses.
    Dispatch(Queued<C>),
    /// The shard `from` is missing or retired. These requests go to the shard that has its share.
    Redirect {
        from: u32,
        to: Result<u32, CallError>,
        batch: Vec<Queued<C>>,
    },
}

struct Slots<C> {
    call: Option<Call>,
    result: Option<CallResult>,
    notes: Vec<Note<C>>,
    count: u32,
    /// When the flow was started.
    now: Timestamp,
    time: Time,
}

/// The flow's side: it sends calls and notes.
pub(crate) struct Port<C> {
    // A std mutex: only the task that polls the flow ever holds it.
    slots: Arc<Mutex<Slots<C>>>,
    pub(crate) bucket: BucketKey,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<C> Port<C> {
    pub(crate) fn note(&self, note: Note<C>) {
        locked(&self.slots).notes.push(note);
    }

    /// When the flow was started. The first response may correct it.
    pub(crate) fn now(&self) -> Timestamp {
        locked(&self.slots).now
    }

    /// How many shards the bucket has, by the machine's snapshots.
    pub(crate) fn count(&self) -> u32 {
        locked(&self.slots).count
    }

    pub(crate) fn key(&self, shard: u32) -> BucketItemKey {
        BucketItemKey { bucket: self.bucket.clone(), shard }
    }

    async fn call(&self, call: Call) -> CallResult {
        locked(&self.slots).call = Some(call);
        poll_fn(|_| match locked(&self.slots).result.take() {
            Some(result) => Poll::Ready(result),
            None => Poll::Pending,
        })
        .await
    }

    /// Reads shards, in the order given. A refill time that a wrong clock has written is rewound first: what is
    /// computed from several shards relies on each.
    pub(crate) async fn read(&self, shards: &[u32]) -> Result<Vec<Option<BucketItem>>, CallError> {
        for _ in 0..REWINDS_MAX {
            let items = self.read_once(shards).await?;
            let time = locked(&self.slots).time;
            let mut is_rewound = false;
            for item in items.iter().flatten().filter(|item| time.is_ahead(item)) {
                let now = time.rewound_to(self.now());
                let rewind = bucket::rewind(&self.key(item.shard), item, now);
                match self.update(item.shard, rewind).await {
                    Err(error) if !error.is_transient() => return Err(error),
                    _ => is_rewound = true,
                }
            }
            if !is_rewound {
                return Ok(items);
            }
        }
        self.read_once(shards).await
    }

    async fn read_once(&self, shards: &[u32]) -> Result<Vec<Option<BucketItem>>, CallError> {
        let keys: Vec<BucketItemKey> = shards.iter().map(|shard| self.key(*shard)).collect();
        let Response::Read(items) = self.call(Call::Read(keys.clone())).await? else {
            unreachable!("a read is answered by a read")
        };
        let decode = |(key, item): (&BucketItemKey, Option<_>)| match decode(key, item.as_ref())? {
            Snapshot::Item(item) => Ok(Some(Arc::unwrap_or_clone(item))),
            Snapshot::Absent => Ok(None),
        };
        keys.iter().zip(items).map(decode).collect()
    }

    /// Updates a shard. Returns whether the update was applied, and the item as it is now.
    pub(crate) async fn update(
        &self,
        shard: u32,
        update: Update,
    ) -> Result<(bool, Snapshot), CallError> {
        match self.call(Call::Update(shard, update)).await? {
            Response::Updated(Updated::Done(item, _)) => {
                let snapshot = snapshot_of(Some(item));
                Ok((true, snapshot.map_err(CallError::maybe_applied)?))
            }
            Response::Updated(Updated::Unmet(item, _)) => Ok((false, snapshot_of(item)?)),
            _ => unreachable!("an update is answered by an update"),
        }
    }

    pub(crate) async fn transact(&self, changes: &[Change]) -> Result<Transacted, CallError> {
        let mut sent = 0;
        loop {
            sent += 1;
            match self.call(Call::Transact(changes.to_vec())).await {
                Ok(Response::Transacted(transacted)) => return Ok(transacted),
                Ok(_) => unreachable!("a transaction is answered by a transaction"),
                Err(error) if error.is(TableErrorKind::Conflict) && sent < COLLISIONS_MAX => {}
                Err(error) => return Err(error),
            }
        }
    }

    pub(crate) async fn pause(&self, wait: Duration) {
        // A failed pause counts as over.
        let _ = self.call(Call::Pause(wait)).await;
    }
}

/// The machine's side of a flow.
pub(crate) struct Flow<C> {
    work: Pin<Box<dyn Future<Output = ()> + Send>>,
    slots: Arc<Mutex<Slots<C>>>,
}

impl<C: Send + 'static> Flow<C> {
    /// A flow that has not started.
    pub(crate) fn new<F>(
        bucket: BucketKey,
        now: Timestamp,
        time: Time,
        work: impl FnOnce(Port<C>) -> F,
    ) -> Self
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let slots = Slots { call: None, result: None, notes: Vec::new(), count: 1, now, time };
        let slots = Arc::new(Mutex::new(slots));
        let port = Port { slots: Arc::clone(&slots), bucket };
        Self { work: Box::pin(work(port)), slots }
    }

    fn now(&self) -> Timestamp {
        locked(&self.slots).now
    }

    /// Runs to the next call, or to the end.
    fn resume(
        &mut self,
        result: Option<CallResult>,
        count: u32,
        time: Time,
    ) -> (Vec<Note<C>>, Option<Call>) {
        {
            let mut slots = locked(&self.slots);
            slots.result = result;
            slots.count = count;
            (slots.now, slots.time) = (time.corrected(slots.now), time);
        }
        let is_over = self.work.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready();
        let mut slots = locked(&self.slots);
        let notes = std::mem::take(&mut slots.notes);
        (notes, slots.call.take().filter(|_| !is_over))
    }
}

impl<C> std::fmt::Debug for Flow<C> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Flow").finish_non_exhaustive()
    }
}

/// Why a flow runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FlowKind {
    /// It changes the number of shards. At most one runs.
    Reshard,
    Gather,
    /// It charges all shards. At most one runs.
    Charge,
    /// It restores a shard. The lane of the shard is busy meanwhile.
    Restore(u32),
    Other,
}

/// The running flows of a machine.
#[derive(Debug)]
pub(crate) struct Flows<C>(Vec<(u64, FlowKind, Flow<C>)>);

/// The state of a flow after it was resumed.
pub(crate) struct Resumed<C> {
    /// When it was started.
    pub(crate) now: Timestamp,
    pub(crate) notes: Vec<Note<C>>,
    /// Its next call, or its kind if it has ended.
    pub(crate) next: Result<Call, FlowKind>,
}

impl<C> Default for Flows<C> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<C: Send + 'static> Flows<C> {
    pub(crate) fn insert(&mut self, id: u64, kind: FlowKind, flow: Flow<C>) {
        self.0.push((id, kind, flow));
    }

    /// How many of this kind run.
    pub(crate) fn count(&self, kind: FlowKind) -> usize {
        self.0.iter().filter(|(_, one, _)| *one == kind).count()
    }

    /// When a flow was started.
    pub(crate) fn now_of(&self, id: u64) -> Option<Timestamp> {
        self.0.iter().find(|(one, ..)| *one == id).map(|(.., flow)| flow.now())
    }

    /// Runs a flow to its next call, or to its end, and then removes it.
    pub(crate) fn resume(
        &mut self,
        id: u64,
        result: Option<CallResult>,
        count: u32,
        time: Time,
    ) -> Option<Resumed<C>> {
        let at = self.0.iter().position(|(one, ..)| *one == id)?;
        let (_, kind, flow) = &mut self.0[at];
        let kind = *kind;
        let (notes, call) = flow.resume(result, count, time);
        let now = flow.now();
        if call.is_none() {
            self.0.swap_remove(at);
        }
        Some(Resumed { now, notes, next: call.ok_or(kind) })
    }
}
