//! The simulated table, with something that happens before or instead of each call.

use std::fmt;
use std::future::{Future, pending};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use zae_limiter_core::BoxFuture;

use tokio::sync::Semaphore;
use zae_limiter_schema::{
    BatchRead, Change, Consistency, Consumed, ItemKey, Query, QueryOutput, Table, TableError, Task,
    Transacted, Update, Updated,
};
use zae_limiter_testkit::SimTable;

/// Which call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Called {
    Update,
    Transact,
    Read,
    Query,
    Delete,
}

/// What becomes of a call.
pub(crate) enum Outcome {
    Pass,
    Fail(TableError),
    /// It never arrives.
    Hang,
    /// It arrives, and its answer waits for [`Hooked::answer_late`].
    Silent,
    Panic,
}

type Deciding = Pin<Box<dyn Future<Output = Outcome> + Send>>;
type Hook = dyn Fn(Called, &[&ItemKey]) -> Deciding + Send + Sync;

pub(crate) struct Hooked {
    table: SimTable,
    hook: Box<Hook>,
    calls: AtomicUsize,
    leaves_tasks: bool,
    time_is_up: Semaphore,
    late_answers: Arc<Semaphore>,
}

impl fmt::Debug for Hooked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hooked").finish_non_exhaustive()
    }
}

impl Hooked {
    pub(crate) fn new(
        table: SimTable,
        hook: impl Fn(Called, &[&ItemKey]) -> Deciding + Send + Sync + 'static,
    ) -> Self {
        Self {
            table,
            hook: Box::new(hook),
            calls: AtomicUsize::new(0),
            leaves_tasks: false,
            time_is_up: Semaphore::new(0),
            late_answers: Arc::new(Semaphore::new(0)),
        }
    }

    /// The store runs its tasks on a runtime of its own.
    pub(crate) fn leaving_tasks(self) -> Self {
        Self { leaves_tasks: true, ..self }
    }

    /// How many calls were made.
    pub(crate) fn calls(&self) -> usize {
        self.calls.load(Ordering::SeqCst)
    }

    /// The time limit of one call has passed.
    pub(crate) fn time_is_up(&self) {
        self.time_is_up.add_permits(1);
    }

    /// Silent calls are answered.
    pub(crate) fn answer_late(&self) {
        self.late_answers.close();
    }

    fn call<'a, T: Send + 'a>(
        &'a self,
        called: Called,
        keys: &[&ItemKey],
        call: BoxFuture<'a, Result<T, TableError>>,
    ) -> BoxFuture<'a, Result<T, TableError>> {
        self.calls.fetch_add(1, Ordering::SeqCst);
        let deciding = (self.hook)(called, keys);
        Box::pin(async move {
            match deciding.await {
                Outcome::Pass => call.await,
                Outcome::Fail(error) => Err(error),
                Outcome::Hang => pending().await,
                Outcome::Silent => {
                    let answered = call.await;
                    // Ends when it is closed.
                    let _ = self.late_answers.acquire().await;
                    answered
                }
                Outcome::Panic => std::panic::resume_unwind(Box::new("a call panics")),
            }
        })
    }
}

impl Table for Hooked {
    fn update<'a>(&'a self, update: &'a Update) -> BoxFuture<'a, Result<Updated, TableError>> {
        self.call(Called::Update, &[&update.key], self.table.update(update))
    }

    fn transact<'a>(
        &'a self,
        changes: &'a [Change],
    ) -> BoxFuture<'a, Result<Transacted, TableError>> {
        let keys: Vec<&ItemKey> = changes.iter().map(Change::key).collect();
        self.call(Called::Transact, &keys, self.table.transact(changes))
    }

    fn read<'a>(
        &'a self,
        keys: &'a [ItemKey],
        consistency: Consistency,
    ) -> BoxFuture<'a, Result<BatchRead, TableError>> {
        let all: Vec<&ItemKey> = keys.iter().collect();
        self.call(Called::Read, &all, self.table.read(keys, consistency))
    }

    fn query<'a>(&'a self, query: &'a Query) -> BoxFuture<'a, Result<QueryOutput, TableError>> {
        self.call(Called::Query, &[], self.table.query(query))
    }

    fn delete<'a>(&'a self, keys: &'a [ItemKey]) -> BoxFuture<'a, Result<Consumed, TableError>> {
        let all: Vec<&ItemKey> = keys.iter().collect();
        self.call(Called::Delete, &all, self.table.delete(keys))
    }

    fn pause(&self, wait: Duration) -> BoxFuture<'_, ()> {
        self.table.pause(wait)
    }

    fn timeout(&self, _: Duration) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            self.time_is_up.acquire().await.expect("it is never closed").forget();
        })
    }

    fn spawn(&self, task: Task) -> Result<(), Task> {
        if self.leaves_tasks { Err(task) } else { self.table.spawn(task) }
    }
}
