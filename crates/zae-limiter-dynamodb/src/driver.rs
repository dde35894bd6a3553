//! The driver: owns the machines of all buckets, runs their commands against the table, and feeds the results
//! back. Only the driver spawns tasks.
//!
//! Every call runs on the store's own runtime and has a time limit. The machine gets the result of every call
//! (an answer, an error, a timeout, a panic, an ended runtime), so that a bucket never waits for a lost call.

use std::cell::RefCell;
use std::collections::HashMap;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::{Arc, OnceLock};
use std::task::Poll;
use std::time::Duration;

use tokio::sync::oneshot;
use zae_limiter_core::{BucketKey, Leg, LimitStatus, StoreError, StoreErrorKind, Timestamp};
use zae_limiter_schema::{
    BucketItemKey, Consistency, Consumed, ItemKey, Table, TableError, TableErrorKind, Task,
    Transacted, Updated,
};

use crate::bucket::decide::Request;
use crate::bucket::message::{
    self, Call, CallResult, Caller, Command, Event, Op, Queued, Response,
};
use crate::bucket::time::Time;
use crate::buckets::{Bucket, Buckets};
use crate::error::CallError;
use crate::meter::{Meter, Resharding};
use crate::options::DynamoOptions;
use crate::runtime::Runtime;

/// The sender of a reply.
#[derive(Debug)]
pub(crate) struct Sender(oneshot::Sender<Result<Reply, StoreError>>);

pub(crate) type Reply = message::Reply;
pub(crate) type ReplyReceiver = oneshot::Receiver<Result<Reply, StoreError>>;

impl Caller for Sender {
    fn has_gone(&self) -> bool {
        self.0.is_closed()
    }
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Driver {
    pub(crate) table: Arc<dyn Table>,
    pub(crate) options: Arc<DynamoOptions>,
    buckets: Buckets<Sender>,
    runtime: OnceLock<Arc<Runtime>>,
    pub(crate) meter: Meter,
    pub(crate) resharding: Resharding,
}

/// Awaits the reply. It is an error if the task was dropped before there was one.
pub(crate) async fn receive_reply(receiver: &mut ReplyReceiver) -> Result<Reply, StoreError> {
    receiver.await.unwrap_or_else(|_| {
        let message = "the call was dropped before the table answered; try again";
        Err(StoreError::new(StoreErrorKind::Unavailable, message).maybe_applied())
    })
}

impl Driver {
    pub(crate) fn new(table: Arc<dyn Table>, options: DynamoOptions) -> Self {
        let (meter, resharding) = (Meter::default(), Resharding::default());
        let options = Arc::new(options);
        let buckets = Buckets::new(Arc::clone(&options));
        Self { table, options, buckets, runtime: OnceLock::new(), meter, resharding }
    }

    /// Checks that the store was opened in this process.
    ///
    /// # Errors
    ///
    /// In a forked child, which has none of the runtime's threads.
    pub(crate) fn check(&self) -> Result<(), StoreError> {
        self.runtime.get().map_or(Ok(()), |runtime| runtime.check())
    }

    /// The table's time.
    pub(crate) fn time(&self) -> Time {
        Time::new(self.table.time(), self.options.max_clock_skew)
    }

    /// Submits a request to its bucket.
    pub(crate) fn submit(self: &Arc<Self>, request: Request, now: Timestamp) -> ReplyReceiver {
        let (sender, receiver) = oneshot::channel();
        let bucket = self.buckets.get(request.target().key());
        let queued = Queued::new(request, now, Some(Sender(sender)));
        self.feed(&bucket, Event::Request(queued));
        receiver
    }

    /// Refunds in the background what was taken for a caller that was dropped.
    pub(crate) fn refund(self: &Arc<Self>, leg: &Leg, shard: u32, now: Timestamp) {
        let bucket = self.buckets.get(leg.target.key());
        self.feed(&bucket, Event::Request(Queued::refund(leg, shard, now)));
    }

    /// Runs a task on a whole bucket.
    pub(crate) async fn run(
        self: &Arc<Self>,
        key: &BucketKey,
        task: message::Task,
        now: Timestamp,
    ) -> Result<Option<u32>, StoreError> {
        let (sender, mut receiver) = oneshot::channel();
        self.feed(&self.buckets.get(key), Event::Task(task, now, Sender(sender)));
        match receive_reply(&mut receiver).await? {
            Reply::Done(count) => Ok(count),
            other => unreachable!("a task is done, not {other:?}"),
        }
    }

    /// Whether a bucket's snapshots may refuse a leg.
    pub(crate) fn may_refuse(&self, leg: &Leg, now: Timestamp) -> bool {
        let bucket = self.buckets.find(leg.target.key());
        bucket.is_some_and(|bucket| bucket.lock().may_refuse(leg, now))
    }

    /// The statuses of a leg by a bucket's snapshots, if they are fresh.
    pub(crate) fn statuses_from_snapshots(
        &self,
        level: usize,
        leg: &Leg,
        now: Timestamp,
    ) -> Option<Vec<LimitStatus>> {
        let bucket = self.buckets.find(leg.target.key())?;
        let machine = bucket.lock();
        machine.statuses_from_snapshots(level, leg, now)
    }

    /// The statuses of a leg that was admitted, by the last snapshots.
    pub(crate) fn last_statuses(
        &self,
        level: usize,
        leg: &Leg,
        now: Timestamp,
    ) -> Vec<LimitStatus> {
        self.buckets.get(leg.target.key()).lock().last_statuses(level, leg, now)
    }

    /// Drops the snapshots of a bucket that was deleted.
    pub(crate) fn forget(self: &Arc<Self>, key: &BucketKey) {
        if let Some(bucket) = self.buckets.find(key) {
            self.feed(&bucket, Event::Deleted);
        }
    }

    /// A caller that waited for a bucket was dropped.
    pub(crate) fn abandon(self: &Arc<Self>, key: &BucketKey) {
        if let Some(bucket) = self.buckets.find(key) {
            self.feed(&bucket, Event::Abandoned);
        }
    }

    /// Feeds an event to a machine and runs its commands. One call is returned, for the current task to
    /// make; the others get tasks of their own.
    fn feed_within(
        self: &Arc<Self>,
        bucket: &Arc<Bucket<Sender>>,
        event: Event<Sender>,
    ) -> Option<Running> {
        let (mut mine, mut follows_task_reply) = (None, false);
        let mut events = vec![event];
        while let Some(event) = events.pop() {
            let commands = {
                let mut machine = bucket.lock();
                machine.set_time(self.time());
                machine.on(event)
            };
            for command in commands {
                match command {
                    Command::Call(op, call) => {
                        let (driver, bucket) = (Arc::clone(self), Arc::clone(bucket));
                        let (call, has_returned) = (Some(call), false);
                        let running =
                            Running { driver, bucket, op, call, has_returned, follows_task_reply };
                        if let Some(other) = mine.replace(running) {
                            self.spawn(Box::pin(other.go()));
                        }
                    }
                    Command::Reply { caller, reply, undo } => {
                        follows_task_reply |= matches!(reply, Ok(Reply::Done(_)));
                        // The caller was dropped just now: undo what was taken for it.
                        if caller.0.send(reply).is_err() {
                            events.extend(undo.map(|undo| Event::Request(*undo)));
                        }
                    }
                    Command::LostRefund(error) => {
                        tracing::warn!(%error, "could not refund a cancelled acquire");
                    }
                    Command::Rewound => {
                        tracing::info!("a refill time far in the future was set to now");
                    }
                    Command::Count(counted) => self.resharding.count(counted, &bucket.key),
                }
            }
        }
        mine
    }

    fn feed(self: &Arc<Self>, bucket: &Arc<Bucket<Sender>>, event: Event<Sender>) {
        if let Some(running) = self.feed_within(bucket, event) {
            self.spawn(Box::pin(running.go()));
        }
    }

    /// Runs a task where the table wants it, or else on the runtime from the options, or on the store's own. A
    /// task that cannot run is dropped, and its callers get an error.
    pub(crate) fn spawn(&self, task: Task) {
        let Err(task) = self.table.spawn(task) else { return };
        if let Some(runtime) = &self.options.runtime {
            runtime.spawn(task);
            return;
        }
        match self.own_runtime() {
            Ok(runtime) => runtime.spawn(task),
            Err(error) => tracing::error!(%error, "could not start the store's runtime"),
        }
    }

    fn own_runtime(&self) -> Result<&Arc<Runtime>, StoreError> {
        if let Some(runtime) = self.runtime.get() {
            runtime.check()?;
            return Ok(runtime);
        }
        let runtime = Runtime::shared(self.options.worker_threads)?;
        Ok(self.runtime.get_or_init(|| runtime))
    }

    /// Makes a call for a bucket.
    async fn perform(&self, bucket: &BucketKey, call: Call) -> CallResult {
        let limit = self.options.call_timeout;
        match call {
            Call::Pause(wait) => {
                self.table.pause(wait).await;
                Ok(Response::Woke)
            }
            Call::Update(shard, update) => {
                let key = BucketItemKey { bucket: bucket.clone(), shard };
                let updated = self.within(limit, self.table.update_bucket(&key, update)).await?;
                let (Updated::Done(_, consumed) | Updated::Unmet(_, consumed)) = &updated;
                self.meter.count(*consumed);
                Ok(Response::Updated(updated))
            }
            Call::Transact(changes) => {
                let transacted = self.within(limit, self.table.transact(&changes)).await?;
                let (Transacted::Done(consumed) | Transacted::Unmet(_, consumed)) = &transacted;
                self.meter.count(*consumed);
                Ok(Response::Transacted(transacted))
            }
            Call::Read(keys) => {
                let keys: Vec<ItemKey> = keys.iter().map(BucketItemKey::item_key).collect();
                let read = self.table.read(&keys, Consistency::Strong);
                let read = self.within(limit, read).await?;
                self.meter.count(read.consumed);
                let found = read.items.into_iter().filter_map(|item| Some((key_of(&item)?, item)));
                let mut found: HashMap<ItemKey, _> = found.collect();
                Ok(Response::Read(keys.iter().map(|key| found.remove(key)).collect()))
            }
        }
    }

    /// Makes a call with a time limit. After it the call is dropped, and may have been applied.
    pub(crate) async fn within<T>(
        &self,
        limit: Duration,
        call: impl Future<Output = Result<T, TableError>>,
    ) -> Result<T, CallError> {
        let mut call = pin!(call);
        // The timer starts only when the call is pending.
        let mut timer = None;
        let result = poll_fn(|context| {
            if let Poll::Ready(result) = call.as_mut().poll(context) {
                return Poll::Ready(Some(result));
            }
            let timer = timer.get_or_insert_with(|| self.table.timeout(limit));
            timer.as_mut().poll(context).map(|()| None)
        });
        let result = result.await.unwrap_or_else(|| {
            let message = format!("the table did not answer within {limit:?}");
            Err(TableError::new(TableErrorKind::Unavailable, message).maybe_applied())
        });
        if result.is_err() {
            self.meter.count(Consumed::default());
        }
        Ok(result?)
    }
}

/// The key of an item. Every index projects it.
pub(crate) fn key_of(item: &zae_limiter_schema::Item) -> Option<ItemKey> {
    let text = |name| item.get(name).and_then(|value| value.as_str());
    Some(ItemKey::new(text("PK")?, text("SK")?))
}

/// A call of a machine. If it is dropped before it returns, by a panic or an ended runtime, the machine gets an
/// error that says it may have been applied.
struct Running {
    driver: Arc<Driver>,
    bucket: Arc<Bucket<Sender>>,
    op: Op,
    /// `None` once it was made.
    call: Option<Call>,
    has_returned: bool,
    /// The same event also replied to a task.
    follows_task_reply: bool,
}

impl Running {
    async fn go(self) {
        let mut next = Some(self);
        while let Some(mut running) = next.take() {
            let Some(call) = running.call.take() else { return };
            let result = running.driver.perform(&running.bucket.key, call).await;
            running.has_returned = true;
            let event = Event::Answered(running.op, result);
            next = running.driver.feed_within(&running.bucket, event);
            if next.as_ref().is_some_and(|next| next.follows_task_reply) {
                // Let the caller of the task run first.
                tokio::task::yield_now().await;
            }
        }
    }
}

type Dropped = Vec<(Arc<Driver>, Arc<Bucket<Sender>>, Op)>;

thread_local! {
    /// Calls that were dropped while a dropped call was being handled. On a runtime that has ended every next
    /// call is dropped at once, and handling them recursively would exhaust the stack.
    static DROPPED: RefCell<Option<Dropped>> = const { RefCell::new(None) };
}

impl Drop for Running {
    fn drop(&mut self) {
        if self.has_returned {
            return;
        }
        let dropped = (Arc::clone(&self.driver), Arc::clone(&self.bucket), self.op);
        let is_nested = DROPPED.with_borrow_mut(|list| match list {
            Some(list) => {
                list.push(dropped);
                true
            }
            None => {
                *list = Some(vec![dropped]);
                false
            }
        });
        if is_nested {
            return;
        }
        while let Some((driver, bucket, op)) =
            DROPPED.with_borrow_mut(|list| list.as_mut().and_then(Vec::pop))
        {
            let message = "the call was dropped before the table answered; try again";
            let error = TableError::new(TableErrorKind::Unavailable, message).maybe_applied();
            driver.feed(&bucket, Event::Answered(op, Err(error.into())));
        }
        DROPPED.with_borrow_mut(|list| *list = None);
    }
}
