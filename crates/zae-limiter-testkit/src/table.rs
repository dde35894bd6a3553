//! A DynamoDB table in memory: what it answers, what it bills, and what goes wrong on the way.
//!
//! Without [time](SimTable::in_time) every call is answered at once. With it, a request travels: it
//! arrives after a while and takes effect then, whatever has become of the caller meanwhile, and the
//! answer travels back.

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
use zae_limiter_core::BoxFuture;

use fastrand::Rng;
use tokio::sync::oneshot;
use zae_limiter_schema::{
    BatchRead, Change, Consistency, Consumed, Index, Item, ItemKey, Query, QueryOutput, Table,
    TableError, TableErrorKind, Task, Transacted, Update, Updated,
};

pub use faults::Faults;
pub use index::Projection;

use crate::simulation::VirtualTime;
use faults::{Journey, Outcome, lost};
use items::Items;
use tasks::Tasks;

/// Who makes a call. Nobody in particular is client 0.
pub type ClientId = u32;

/// Bytes of a write unit, of a read unit, of the largest item, and of a page.
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

/// A change that was made to an item.
#[derive(Debug)]
pub struct Wrote<'a> {
    /// By whom; `None` is the table itself, which removes what has expired.
    pub client: Option<ClientId>,
    /// When, in true time.
    pub at_us: u64,
    /// Which item.
    pub key: &'a ItemKey,
    /// What it was.
    pub old: Option<&'a Item>,
    /// What it is.
    pub new: Option<&'a Item>,
}

/// A change as the table's stream would tell it.
#[derive(Clone, Debug, PartialEq)]
pub struct Changed {
    /// When, in true time.
    pub at_us: u64,
    /// Which item.
    pub key: ItemKey,
    /// What it was.
    pub old: Option<Item>,
    /// What it is.
    pub new: Option<Item>,
    /// Whether the table itself made it, because the item had expired.
    pub by_table: bool,
}

/// Somebody who is told of everything that happens to a table, in the order in which it happens.
pub trait Watch: Send + Sync {
    /// A request is on its way.
    fn sent(&self, client: ClientId);
    /// A change was made.
    fn wrote(&self, wrote: &Wrote<'_>);
    /// Changes were made, all in one step.
    fn wrote_together(&self, wrote: &[Wrote<'_>]) {
        wrote.iter().for_each(|wrote| self.wrote(wrote));
    }
    /// A call is over: answered, failed (`faulted`), or lost with its client.
    fn done(&self, client: ClientId, faulted: bool);
    /// A client will never know what became of a call: no answer came, it gave up waiting, or its task
    /// has ended. A table that turns a request away has answered.
    fn unanswered(&self, client: ClientId) {
        let _ = client;
    }
    /// A task that the client's store started panicked, and not because the simulation made it.
    fn task_panicked(&self, client: ClientId, message: &str) {
        let _ = (client, message);
    }
}

/// What all calls so far came to.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Totals {
    /// Calls that arrived.
    pub calls: u64,
    /// Those of them that write.
    pub writing_calls: u64,
    /// Those that failed, on the way or on arrival.
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
    /// Tasks that ended before their time.
    ended_tasks: u64,
    /// Of every call that arrived and what became of it.
    digest: DefaultHasher,
    /// What has changed since it was last asked for, once somebody has.
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
        Self { inside: Arc::new(inside), client: 0, leaves_tasks: false }
    }

    /// An empty table in a world with time.
    pub fn in_time(time: Arc<VirtualTime>, watch: Option<Arc<dyn Watch>>, seed: u64) -> Self {
        Self::new(Some(time), watch, seed)
    }

    /// The table as that client sees it.
    #[must_use]
    pub fn for_client(&self, client: ClientId) -> Self {
        Self { client, ..self.clone() }
    }

    /// The same table, on which a store runs its tasks on a runtime of its own, as on DynamoDB.
    #[must_use]
    pub fn leaving_tasks(&self) -> Self {
        Self { leaves_tasks: true, ..self.clone() }
    }

    /// From now on these things go wrong.
    pub fn set_faults(&self, faults: Faults) {
        let state = &mut *self.inside.lock();
        state.items.cool();
        state.faults = faults;
    }

    /// From now on a partition turns every write away, for so long or until faults are set.
    pub fn heat(&self, key: &ItemKey, for_us: u64) {
        let until_us = self.inside.now_us() + for_us;
        self.inside.lock().items.heat(&key.pk, until_us);
    }

    /// What an index shows; only while the table is empty.
    pub fn set_projection(&self, index: Index, projection: Projection) {
        self.inside.lock().items.set_projection(index, projection);
    }

    /// What all calls so far came to.
    pub fn totals(&self) -> Totals {
        self.inside.lock().items.totals
    }

    /// An item as it is, for nothing.
    pub fn item(&self, key: &ItemKey) -> Option<Item> {
        self.inside.lock().items.get(key).cloned()
    }

    /// All items, for nothing.
    pub fn items(&self) -> Vec<Item> {
        self.inside.lock().items.all().cloned().collect()
    }

    /// A number for everything that has happened: the same for the same seed.
    pub fn digest(&self) -> u64 {
        self.inside.lock().digest.finish()
    }

    /// What has changed since the last call, in its order; the first call finds nothing.
    pub fn take_changes(&self) -> Vec<Changed> {
        self.inside.lock().stream.replace(Vec::new()).unwrap_or_default()
    }

    /// Ends a client. Its requests that are on the way arrive or not; it hears of none of them.
    pub fn crash(&self, client: ClientId) {
        self.inside.lock().crashed.insert(client);
        self.inside.drop_tasks(client);
    }

    /// Ends the runtime on which a client's tasks run: all of them are dropped. Those that the client
    /// starts later run on another one.
    pub fn end_runtime(&self, client: ClientId) {
        if self.inside.drop_tasks(client) {
            self.inside.note_fault(client);
            self.inside.lock().ended_tasks += 1;
        }
    }

    /// How many tasks of clients that have not crashed still run.
    pub fn running_tasks(&self) -> usize {
        self.inside.running()
    }

    /// How many tasks were dropped or panicked because the simulation had it so.
    pub fn ended_tasks(&self) -> u64 {
        self.inside.lock().ended_tasks
    }

    /// Removes the items whose `ttl` lies before a moment, as the table does when it gets to it.
    pub fn sweep(&self, before_s: i64) {
        let inside = &*self.inside;
        let now_us = inside.now_us();
        let mut state = inside.lock();
        for key in state.items.expired(before_s) {
            let old = state.items.remove(&key, now_us);
            state.note(now_us, u32::MAX, &key);
            let wrote =
                Wrote { client: None, at_us: now_us, key: &key, old: old.as_ref(), new: None };
            state.tell(&wrote);
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
                return inside.arrive(client, Outcome::Answered, work);
            };
            let (answer, answering) = oneshot::channel();
            let journey = inside.depart(client);
            let Some(journey) = journey else { return pending().await };
            // Whoever waits for an answer that never comes has something in hand until it gives up.
            let _in_hand = journey.outcome.is_hung().then(|| InHand::begin(&inside, client));
            let mut asking = Asking { inside: Arc::clone(&inside), client, is_answered: false };
            let there = Arc::clone(&inside);
            let back = Arc::clone(&time);
            time.after(journey.there_us, move || {
                there.travel(client, journey, work, answer, &back);
            });
            inside.panic_if_doomed();
            match answering.await {
                Ok(answered) => {
                    let is_lost = |error: &TableError| error.kind == TableErrorKind::Unavailable;
                    asking.is_answered = !answered.as_ref().is_err_and(is_lost);
                    answered
                }
                // The client is no more.
                Err(_) => pending().await,
            }
        })
    }
}

/// Somebody who waits for an answer.
struct Asking {
    inside: Arc<Inside>,
    client: ClientId,
    is_answered: bool,
}

impl Drop for Asking {
    fn drop(&mut self) {
        if let Some(watch) = self.inside.watch.as_ref().filter(|_| !self.is_answered) {
            watch.unanswered(self.client);
        }
    }
}

/// What a call does to the items.
type Work<T> = Box<dyn FnOnce(&mut Site<'_>) -> Result<T, TableError> + Send>;

/// The items, and the moment.
struct Site<'a> {
    items: &'a mut Items,
    now_us: u64,
    /// How far behind the indexes will be.
    lag_us: u64,
    /// How far behind this read is, if it may be.
    read_lag_us: u64,
    partition_units: Option<f64>,
    /// The partition that is written to becomes hot for so long.
    heats_us: Option<u64>,
    wrote: Vec<(ItemKey, Option<Item>, Option<Item>)>,
}

impl State {
    fn note(&mut self, now_us: u64, client: ClientId, what: &impl fmt::Debug) {
        (now_us, client, format!("{what:?}")).hash(&mut self.digest);
    }

    /// A write that changes nothing is not in the stream.
    fn tell(&mut self, wrote: &Wrote<'_>) {
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

    /// A request leaves its client, if that still lives.
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

    /// A request arrives, and its answer leaves.
    fn travel<T: fmt::Debug + Send + 'static>(
        self: Arc<Self>,
        client: ClientId,
        journey: Journey,
        work: Work<T>,
        answer: oneshot::Sender<Result<T, TableError>>,
        time: &VirtualTime,
    ) {
        let mut outcome = journey.outcome;
        if answer.is_closed() || self.lock().crashed.contains(&client) {
            // Nobody waits any more: it was sent in time, or it was not.
            outcome =
                if self.lock().rng.bool() { Outcome::LostAnswer } else { Outcome::LostRequest };
        }
        let answered = self.arrive(client, outcome, work);
        if outcome.is_hung() {
            // Nobody will ever say more of it; the caller waits for as long as it likes.
            if let Some(watch) = &self.watch {
                watch.done(client, true);
            }
            return;
        }
        time.after(journey.back_us, move || {
            // Whoever gave the call up knows as little as after a lost answer.
            let faulted = outcome != Outcome::Answered || answered.is_err() || answer.is_closed();
            if let Some(watch) = &self.watch {
                watch.done(client, faulted);
            }
            if !self.lock().crashed.contains(&client) {
                // The caller may have gone away.
                let _ = answer.send(answered);
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
        let answered = match outcome {
            Outcome::LostRequest | Outcome::HungRequest => Err(lost()),
            Outcome::Turned(kind) => {
                Err(TableError::new(kind, "turned away by the simulated table"))
            }
            Outcome::Answered => work(&mut site),
            Outcome::LostAnswer | Outcome::HungAnswer => work(&mut site).and_then(|_| Err(lost())),
        };
        let wrote = std::mem::take(&mut site.wrote);
        state.items.totals.failed += u64::from(answered.is_err());
        state.note(now_us, client, &(&answered, &wrote));
        // Still under the lock: whoever watches sees changes in their order.
        let told: Vec<Wrote<'_>> = wrote
            .iter()
            .map(|(key, old, new)| {
                let (old, new) = (old.as_ref(), new.as_ref());
                Wrote { client: Some(client), at_us: now_us, key, old, new }
            })
            .collect();
        told.iter().for_each(|wrote| state.tell(wrote));
        if let Some(watch) = &self.watch {
            watch.wrote_together(&told);
        }
        answered
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

    fn delete<'a>(&'a self, keys: &'a [ItemKey]) -> BoxFuture<'a, Result<Consumed, TableError>> {
        let keys = keys.to_vec();
        self.call(Box::new(move |site| site.delete(&keys)))
    }

    /// At once, where no time passes. Whoever watches sees a call until the pause is over or dropped: the
    /// client has something in hand.
    fn pause(&self, wait: Duration) -> BoxFuture<'_, ()> {
        let Some(time) = &self.inside.time else { return Box::pin(ready(())) };
        let in_hand = InHand::begin(&self.inside, self.client);
        let over = time.sleep(wait);
        Box::pin(async move {
            over.await;
            let is_crashed = in_hand.inside.lock().crashed.contains(&in_hand.client);
            // A client that is no more has nothing in hand.
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

    /// In the runtime of the simulated world, which is the one that calls, unless the table leaves tasks
    /// to the store.
    fn spawn(&self, task: Task) -> Result<(), Task> {
        match self.inside.time {
            _ if self.leaves_tasks => return Err(task),
            Some(_) => self.inside.spawn(self.client, task),
            None => drop(tokio::spawn(task)),
        }
        Ok(())
    }
}

/// Something that a client has in hand, until it is dropped.
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

/// What partitions have taken in the present second.
type Load = BTreeMap<(Option<Index>, String), (u64, f64)>;
