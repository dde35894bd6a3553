//! A simulated DynamoDB table in memory.
//!
//! It evaluates conditions and actions (`expression`, `number`), keeps items and indexes that lag
//! behind (`items`, `index`), counts capacity units as DynamoDB bills them ([`Totals`]), and
//! injects faults ([`Faults`]). It can also run the tasks of a store, and end them early (`tasks`).
//!
//! Without [time](SimTable::in_time) every call completes at once, without faults. With time, a
//! call is a journey. The request arrives after a delay and takes effect then, even if the caller
//! has given up meanwhile. The reply takes another delay. Either of them can be lost or hang, and
//! the table can throttle the request. All of that is drawn from a seed.
//!
//! A [`Watch`] sees every write in order. The auditor of a simulation is one.

mod expression;
mod faults;
mod index;
mod items;
mod number;
mod tasks;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::future::{pending, ready};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use zae_limiter_core::{BoxFuture, Clock, Timestamp};

use fastrand::Rng;
use tokio::sync::oneshot;
use zae_limiter_schema::{
    BatchRead, Change, Consistency, Consumed, Index, Item, ItemKey, Query, QueryOutput,
    ResponseDates, Scanned, Table, TableError, TableErrorKind, TableTime, Task, Transacted, Update,
    Updated, Value,
};

pub use faults::Faults;
pub use index::Projection;

use crate::simulation::VirtualTime;
use faults::{Journey, Outcome, lost};
use items::Items;
use tasks::Tasks;

/// The client that makes a call. Client 0 is the default.
pub type ClientId = u32;

/// DynamoDB's sizes in bytes: a write unit, a read unit, the largest item, and a page.
const WRITE_UNIT: usize = 1_024;
const READ_UNIT: usize = 4_096;
const ITEM_MAX: usize = 400 * 1_024;
const PAGE_MAX: usize = 1_024 * 1_024;

/// The write units of so many bytes.
fn write_units(bytes: usize) -> f64 {
    units(bytes, WRITE_UNIT)
}

#[expect(clippy::cast_precision_loss, reason = "sizes are small")]
fn units(bytes: usize, unit: usize) -> f64 {
    bytes.div_ceil(unit).max(1) as f64
}

/// A write to an item, as a [`Watch`] sees it.
#[derive(Debug)]
pub struct Wrote<'a> {
    /// The client. `None` for the table itself, which deletes expired items.
    pub client: Option<ClientId>,
    /// The true time of the write, in microseconds since the start.
    pub at_us: u64,
    /// The key of the item.
    pub key: &'a ItemKey,
    /// The item before the write.
    pub old: Option<&'a Item>,
    /// The item after the write.
    pub new: Option<&'a Item>,
}

/// A change, as the table's stream would deliver it.
#[derive(Clone, Debug, PartialEq)]
pub struct Changed {
    /// The true time of the write, in microseconds since the start.
    pub at_us: u64,
    /// The key of the item.
    pub key: ItemKey,
    /// The item before the write.
    pub old: Option<Item>,
    /// The item after the write.
    pub new: Option<Item>,
    /// Whether the table itself deleted the item, because it had expired.
    pub by_table: bool,
}

/// Observes everything that happens to a table, in order.
pub trait Watch: Send + Sync {
    /// A client has sent a request.
    fn sent(&self, client: ClientId);
    /// An item was written.
    fn wrote(&self, wrote: &Wrote<'_>);
    /// Several items were written in one transaction.
    fn wrote_together(&self, wrote: &[Wrote<'_>]) {
        wrote.iter().for_each(|wrote| self.wrote(wrote));
    }
    /// A call is over. `faulted` if it failed, or if its reply did not reach the client.
    fn done(&self, client: ClientId, faulted: bool);
    /// A client will never learn the outcome of a call: no reply came, the client gave up waiting,
    /// or its task has ended. A throttled request does have a reply.
    fn unanswered(&self, client: ClientId) {
        let _ = client;
    }
    /// A task that the client's store started has panicked, and the simulation did not cause that.
    fn task_panicked(&self, client: ClientId, message: &str) {
        let _ = (client, message);
    }
}

/// Counts of all calls so far, and the capacity units that they consumed.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Totals {
    /// Calls that arrived.
    pub calls: u64,
    /// Calls that arrived and write.
    pub writing_calls: u64,
    /// Calls that failed, on the way or on arrival.
    pub failed: u64,
    /// Write units of the table itself.
    pub table_writes: f64,
    /// Write units of the indexes, in the order of [`Index::ALL`].
    pub index_writes: [f64; 4],
    /// Read units.
    pub reads: f64,
}

impl Totals {
    /// All write units.
    pub fn writes(&self) -> f64 {
        self.table_writes + self.index_writes.iter().sum::<f64>()
    }
}

/// A simulated table, as one client sees it. Clones are handles to the same table.
#[derive(Clone)]
pub struct SimTable {
    inside: Arc<Inside>,
    client: ClientId,
    leaves_tasks: bool,
    dates: Option<Dates>,
}

/// The dates of a table's responses to one client.
#[derive(Clone)]
struct Dates {
    /// The table's own clock.
    clock: Arc<dyn Clock>,
    /// The client's.
    stopwatch: Arc<dyn Clock>,
    seen: Arc<ResponseDates>,
}

struct Inside {
    time: Option<Arc<VirtualTime>>,
    watch: Option<Arc<dyn Watch>>,
    // A std mutex: it is never held across an await.
    state: Mutex<State>,
    tasks: Mutex<Tasks>,
}

struct State {
    items: Items,
    faults: Faults,
    rng: Rng,
    crashed: BTreeSet<ClientId>,
    /// Tasks that the simulation has ended early.
    ended_tasks: u64,
    /// A hash of all calls that arrived, with their outcomes.
    digest: DefaultHasher,
    /// The changes since the last [`SimTable::take_changes`]. `None` until its first call.
    stream: Option<Vec<Changed>>,
}

impl fmt::Debug for SimTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SimTable").field("client", &self.client).finish_non_exhaustive()
    }
}

impl Default for SimTable {
    fn default() -> Self {
        Self::new(None, None, 0)
    }
}

impl SimTable {
    fn new(time: Option<Arc<VirtualTime>>, watch: Option<Arc<dyn Watch>>, seed: u64) -> Self {
        let state = State {
            items: Items::default(),
            faults: Faults::none(),
            rng: Rng::with_seed(seed),
            crashed: BTreeSet::new(),
            ended_tasks: 0,
            digest: DefaultHasher::new(),
            stream: None,
        };
        let inside = Inside { time, watch, state: Mutex::new(state), tasks: Mutex::default() };
        Self { inside: Arc::new(inside), client: 0, leaves_tasks: false, dates: None }
    }

    /// An empty table in virtual time.
    pub fn in_time(time: Arc<VirtualTime>, watch: Option<Arc<dyn Watch>>, seed: u64) -> Self {
        Self::new(Some(time), watch, seed)
    }

    /// The table as that client sees it.
    #[must_use]
    pub fn for_client(&self, client: ClientId) -> Self {
        let fresh = |dates: &Dates| Dates { seen: Arc::default(), ..dates.clone() };
        let dates = self.dates.as_ref().map(fresh);
        Self { client, dates, ..self.clone() }
    }

    /// The same table with responses that have a date, by this clock. As with DynamoDB a date has whole seconds, and
    /// a response takes up to a second.
    #[must_use]
    pub fn dated_by(&self, clock: Arc<dyn Clock>) -> Self {
        self.dated_for(Arc::clone(&clock), clock)
    }

    /// As [`dated_by`](Self::dated_by), for a client with a stopwatch of its own, which may stand.
    #[must_use]
    pub fn dated_for(&self, clock: Arc<dyn Clock>, stopwatch: Arc<dyn Clock>) -> Self {
        let dates = Dates { clock, stopwatch, seen: Arc::default() };
        Self { dates: Some(dates), ..self.clone() }
    }

    /// A response has arrived.
    fn note_date<T>(&self, result: &Result<T, TableError>) {
        let is_lost = |error: &TableError| error.kind == TableErrorKind::Unavailable;
        let Some(dates) = &self.dates else { return };
        if !result.as_ref().is_err_and(is_lost) {
            let sent = dates.clock.now().as_millis() - 999;
            let date = Timestamp::from_millis(sent.div_euclid(1_000) * 1_000);
            let client = &dates.stopwatch;
            dates.seen.note(Some(date), client.now(), client.stopwatch());
        }
    }

    /// The same table, but a store runs its tasks on its own runtime, as with DynamoDB.
    #[must_use]
    pub fn leaving_tasks(&self) -> Self {
        Self { leaves_tasks: true, ..self.clone() }
    }

    /// Sets the faults from now on. No partition stays hot.
    pub fn set_faults(&self, faults: Faults) {
        let state = &mut *self.inside.lock();
        state.items.cool();
        state.faults = faults;
    }

    /// Makes a partition throttle every write for `for_us`, or until faults are set.
    pub fn heat(&self, key: &ItemKey, for_us: u64) {
        let until_us = self.inside.now_us() + for_us;
        self.inside.lock().items.heat(&key.pk, until_us);
    }

    /// Sets the projection of an index. The table must be empty.
    pub fn set_projection(&self, index: Index, projection: Projection) {
        self.inside.lock().items.set_projection(index, projection);
    }

    /// The totals of all calls so far.
    pub fn totals(&self) -> Totals {
        self.inside.lock().items.totals
    }

    /// Reads an item, without a call that counts.
    pub fn item(&self, key: &ItemKey) -> Option<Item> {
        self.inside.lock().items.get(key).cloned()
    }

    /// Reads all items, without a call that counts.
    pub fn items(&self) -> Vec<Item> {
        self.inside.lock().items.all().cloned().collect()
    }

    /// A hash of all calls and their outcomes. The same seed gives the same hash.
    pub fn digest(&self) -> u64 {
        self.inside.lock().digest.finish()
    }

    /// The changes since the last call, in order. The first call starts the recording.
    pub fn take_changes(&self) -> Vec<Changed> {
        self.inside.lock().stream.replace(Vec::new()).unwrap_or_default()
    }

    /// Crashes a client. Its requests in flight may still arrive. It gets no more replies.
    pub fn crash(&self, client: ClientId) {
        self.inside.lock().crashed.insert(client);
        self.inside.drop_tasks(client);
    }

    /// Ends the runtime of a client's tasks: drops all of them. Later tasks run on a new runtime.
    pub fn end_runtime(&self, client: ClientId) {
        if self.inside.drop_tasks(client) {
            self.inside.note_fault(client);
            self.inside.lock().ended_tasks += 1;
        }
    }

    /// The number of running tasks of clients that have not crashed.
    pub fn running_tasks(&self) -> usize {
        self.inside.running()
    }

    /// The number of tasks that the simulation has dropped or made panic.
    pub fn ended_tasks(&self) -> u64 {
        self.inside.lock().ended_tasks
    }

    /// Deletes the items whose `ttl` is before `before_s`, as DynamoDB does after a while.
    pub fn sweep(&self, before_s: i64) {
        let inside = &*self.inside;
        let now_us = inside.now_us();
        let mut state = inside.lock();
        for key in state.items.expired(before_s) {
            let old = state.items.remove(&key, now_us);
            state.note(now_us, u32::MAX, &key);
            let wrote =
                Wrote { client: None, at_us: now_us, key: &key, old: old.as_ref(), new: None };
            state.record(&wrote);
            if let Some(watch) = &inside.watch {
                watch.wrote(&wrote);
            }
        }
    }

    fn call<'a, T: fmt::Debug + Send + 'static>(
        &'a self,
        work: Work<T>,
    ) -> BoxFuture<'a, Result<T, TableError>> {
        let (inside, client) = (Arc::clone(&self.inside), self.client);
        Box::pin(async move {
            let Some(time) = inside.time.clone() else {
                let result = inside.arrive(client, Outcome::Answered, work);
                self.note_date(&result);
                return result;
            };
            let (reply, receiver) = oneshot::channel();
            let journey = inside.depart(client);
            let Some(journey) = journey else { return pending().await };
            // A client that waits for a reply that never comes is busy until it gives up.
            let _in_hand = journey.outcome.is_hung().then(|| InHand::begin(&inside, client));
            let mut pending_call =
                PendingCall { inside: Arc::clone(&inside), client, is_answered: false };
            let there = Arc::clone(&inside);
            let back = Arc::clone(&time);
            time.after(journey.there_us, move || {
                there.travel(client, journey, work, reply, &back);
            });
            inside.panic_if_doomed();
            match receiver.await {
                Ok(result) => {
                    let is_lost = |error: &TableError| error.kind == TableErrorKind::Unavailable;
                    pending_call.is_answered = !result.as_ref().is_err_and(is_lost);
                    self.note_date(&result);
                    result
                }
                // The client has crashed.
                Err(_) => pending().await,
            }
        })
    }
}

/// A call whose caller waits for the reply. Dropped without one, the call is unanswered.
struct PendingCall {
    inside: Arc<Inside>,
    client: ClientId,
    is_answered: bool,
}

impl Drop for PendingCall {
    fn drop(&mut self) {
        if let Some(watch) = self.inside.watch.as_ref().filter(|_| !self.is_answered) {
            watch.unanswered(self.client);
        }
    }
}

/// The effect of a call on the items.
type Work<T> = Box<dyn FnOnce(&mut Site<'_>) -> Result<T, TableError> + Send>;

/// The items, and the parameters of one call.
struct Site<'a> {
    items: &'a mut Items,
    now_us: u64,
    /// How long the indexes lag behind this write.
    lag_us: u64,
    /// How stale this read is, if it is eventually consistent.
    read_lag_us: u64,
    partition_units: Option<f64>,
    /// How long the written partition becomes hot, if it does.
    heats_us: Option<u64>,
    wrote: Vec<(ItemKey, Option<Item>, Option<Item>)>,
}

impl State {
    fn note(&mut self, now_us: u64, client: ClientId, what: &impl fmt::Debug) {
        (now_us, client, format!("{what:?}")).hash(&mut self.digest);
    }

    /// Adds a change to the stream. A write that changes nothing is not in it.
    fn record(&mut self, wrote: &Wrote<'_>) {
        if let Some(stream) = &mut self.stream
            && wrote.old != wrote.new
        {
            stream.push(Changed {
                at_us: wrote.at_us,
                key: wrote.key.clone(),
                old: wrote.old.cloned(),
                new: wrote.new.cloned(),
                by_table: wrote.client.is_none(),
            });
        }
    }
}

impl Inside {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now_us(&self) -> u64 {
        self.time.as_ref().map_or(0, |time| time.now_us())
    }

    /// Sends a request, unless the client has crashed.
    fn depart(&self, client: ClientId) -> Option<Journey> {
        let journey = {
            let State { faults, rng, crashed, .. } = &mut *self.lock();
            if crashed.contains(&client) {
                return None;
            }
            faults.draw(rng)
        };
        if let Some(watch) = &self.watch {
            watch.sent(client);
        }
        Some(journey)
    }

    /// Lets a request arrive, and sends its reply.
    fn travel<T: fmt::Debug + Send + 'static>(
        self: Arc<Self>,
        client: ClientId,
        journey: Journey,
        work: Work<T>,
        reply: oneshot::Sender<Result<T, TableError>>,
        time: &VirtualTime,
    ) {
        let mut outcome = journey.outcome;
        if reply.is_closed() || self.lock().crashed.contains(&client) {
            // The caller has left. Whether the request was sent before that is drawn.
            outcome =
                if self.lock().rng.bool() { Outcome::LostReply } else { Outcome::LostRequest };
        }
        let result = self.arrive(client, outcome, work);
        if outcome.is_hung() {
            // There is no reply: the caller waits until its own time limit.
            if let Some(watch) = &self.watch {
                watch.done(client, true);
            }
            return;
        }
        time.after(journey.back_us, move || {
            // A caller that gave up knows as little as after a lost reply.
            let faulted = outcome != Outcome::Answered || result.is_err() || reply.is_closed();
            if let Some(watch) = &self.watch {
                watch.done(client, faulted);
            }
            if !self.lock().crashed.contains(&client) {
                // The caller may have left.
                let _ = reply.send(result);
            }
        });
    }

    fn arrive<T: fmt::Debug>(
        &self,
        client: ClientId,
        outcome: Outcome,
        work: Work<T>,
    ) -> Result<T, TableError> {
        let now_us = self.now_us();
        let mut state = self.lock();
        let State { items, faults, rng, .. } = &mut *state;
        let mut site = Site {
            items,
            now_us,
            lag_us: rng.u64(0..=faults.lag_us),
            read_lag_us: rng.u64(0..=faults.lag_us),
            partition_units: faults.partition_units,
            heats_us: match faults.hot_partition > 0.0 && rng.f64() < faults.hot_partition {
                true => Some(rng.u64(faults.hot_us.clone())),
                false => None,
            },
            wrote: Vec::new(),
        };
        let result = match outcome {
            Outcome::LostRequest | Outcome::HungRequest => Err(lost()),
            Outcome::Rejected(kind) => {
                Err(TableError::new(kind, "rejected by the simulated table"))
            }
            Outcome::Answered => work(&mut site),
            Outcome::LostReply | Outcome::HungReply => work(&mut site).and_then(|_| Err(lost())),
        };
        let wrote = std::mem::take(&mut site.wrote);
        state.items.totals.failed += u64::from(result.is_err());
        state.note(now_us, client, &(&result, &wrote));
        // Still under the lock, so that the watch sees writes in order.
        let writes: Vec<Wrote<'_>> = wrote
            .iter()
            .map(|(key, old, new)| {
                let (old, new) = (old.as_ref(), new.as_ref());
                Wrote { client: Some(client), at_us: now_us, key, old, new }
            })
            .collect();
        writes.iter().for_each(|wrote| state.record(wrote));
        if let Some(watch) = &self.watch {
            watch.wrote_together(&writes);
        }
        result
    }
}

impl Table for SimTable {
    fn update<'a>(&'a self, update: &'a Update) -> BoxFuture<'a, Result<Updated, TableError>> {
        let update = update.clone();
        self.call(Box::new(move |site| site.update(&update)))
    }

    fn transact<'a>(
        &'a self,
        changes: &'a [Change],
    ) -> BoxFuture<'a, Result<Transacted, TableError>> {
        let changes = changes.to_vec();
        self.call(Box::new(move |site| site.transact(&changes)))
    }

    fn read<'a>(
        &'a self,
        keys: &'a [ItemKey],
        consistency: Consistency,
    ) -> BoxFuture<'a, Result<BatchRead, TableError>> {
        let keys = keys.to_vec();
        self.call(Box::new(move |site| Ok(site.read(&keys, consistency))))
    }

    fn query<'a>(&'a self, query: &'a Query) -> BoxFuture<'a, Result<QueryOutput, TableError>> {
        let query = query.clone();
        self.call(Box::new(move |site| site.query(&query)))
    }

    fn scan<'a>(
        &'a self,
        after: Option<&'a ItemKey>,
        limit: usize,
    ) -> BoxFuture<'a, Result<Scanned, TableError>> {
        Box::pin(async move {
            let text = |item: &Item, name: &str| {
                item.get(name).and_then(Value::as_str).unwrap_or_default().to_owned()
            };
            let key_of = |item: &Item| ItemKey::new(text(item, "PK"), text(item, "SK"));
            let mut items = self.items();
            items.retain(|item| after.is_none_or(|after| key_of(item) > *after));
            items.sort_by_key(key_of);
            let has_more = items.len() > limit;
            items.truncate(limit);
            let next = items.last().filter(|_| has_more).map(key_of);
            Ok(Scanned { items, next, consumed: Consumed::default() })
        })
    }

    fn delete<'a>(&'a self, keys: &'a [ItemKey]) -> BoxFuture<'a, Result<Consumed, TableError>> {
        let keys = keys.to_vec();
        self.call(Box::new(move |site| site.delete(&keys)))
    }

    fn time(&self) -> TableTime {
        let Some(Dates { stopwatch, seen, .. }) = &self.dates else { return TableTime::Never };
        seen.at(stopwatch.now(), stopwatch.stopwatch())
    }

    /// Ends at once without virtual time. For the watch the client is busy until the pause is over
    /// or dropped.
    fn pause(&self, wait: Duration) -> BoxFuture<'_, ()> {
        let Some(time) = &self.inside.time else { return Box::pin(ready(())) };
        let in_hand = InHand::begin(&self.inside, self.client);
        let over = time.sleep(wait);
        Box::pin(async move {
            over.await;
            let is_crashed = in_hand.inside.lock().crashed.contains(&in_hand.client);
            // A crashed client is not busy any more.
            drop(in_hand);
            if is_crashed {
                pending::<()>().await;
            }
        })
    }

    fn timeout(&self, limit: Duration) -> BoxFuture<'_, ()> {
        match &self.inside.time {
            Some(time) => time.sleep(limit),
            None => Box::pin(pending()),
        }
    }

    /// Spawns on the simulated runtime of the client, unless the table leaves tasks to the store.
    fn spawn(&self, task: Task) -> Result<(), Task> {
        match self.inside.time {
            _ if self.leaves_tasks => return Err(task),
            Some(_) => self.inside.spawn(self.client, task),
            None => drop(tokio::spawn(task)),
        }
        Ok(())
    }
}

/// Makes a client count as busy until it is dropped.
struct InHand {
    inside: Arc<Inside>,
    client: ClientId,
}

impl InHand {
    fn begin(inside: &Arc<Inside>, client: ClientId) -> Self {
        if let Some(watch) = &inside.watch {
            watch.sent(client);
        }
        Self { inside: Arc::clone(inside), client }
    }
}

impl Drop for InHand {
    fn drop(&mut self) {
        if let Some(watch) = &self.inside.watch {
            watch.done(self.client, false);
        }
    }
}

/// The write units of each partition in the present second.
type Load = BTreeMap<(Option<Index>, String), (u64, f64)>;
