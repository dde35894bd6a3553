//! The rate limiter's embedded store: one SQLite file, shared by many processes on one machine.
//!
//! ```
//! use zae_limiter_sqlite::{Durability, SqliteOptions};
//! # let folder = tempfile::tempdir()?;
//! # let path = folder.path().join("limits.db");
//! let store = SqliteOptions::new(&path).durability(Durability::Full).open()?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Callers hand their plans to one writer thread, which puts all that wait into one transaction,
//! decides them one after the other, commits, and only then answers. A second thread reads. Both
//! end with the last handle of the store.
//!
//! Every process that opens the same file takes from the same budget: SQLite's lock makes their
//! transactions follow each other. A process that forks opens the store again in the child, which has
//! none of its parent's threads; calls on the inherited handle are rejected there.

mod baseline;
mod bucket_states;
mod codec;
mod cursor;
mod error;
mod job;
mod keys;
mod ledger;
mod list;
mod options;
mod queue;
mod reader;
mod records;
mod schema;
mod sweep;
mod writer;

#[cfg(test)]
mod cancellation_tests;

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;

use tokio::sync::oneshot;
use zae_limiter_core::{
    Admission, Applied, BATCH_MAX, BoxFuture, Bucket, BucketKey, BucketQuery, Cost, Key,
    Millitokens, NamespaceId, Page, PageRequest, Plan, Query, Record, ResourceList, ResourceName,
    Scope, Settlement, Store, StoreError, StoreErrorKind, StoredBucket, Take, Target, Timestamp,
    UsageRecording, Write, Written,
};

pub use crate::options::{Durability, SqliteOptions};

use crate::error::Failure;
use crate::job::{Caller, Job};
use crate::queue::{Closed, Queue};
use crate::reader::Question;

/// How many keys one transaction deletes.
const DELETE_MAX: usize = 256;

/// A [`Store`] in one SQLite file. Clones are handles to the same store.
///
/// ```
/// # use zae_limiter_core::RateLimiter;
/// use zae_limiter_sqlite::SqliteStore;
/// # tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(async {
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("limits.db");
/// let store = SqliteStore::open(&path)?;
/// let limiter = RateLimiter::builder(store).open().await?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// # }).unwrap();
/// ```
///
/// When the last handle is dropped the store carries out what it has accepted and closes the file;
/// the drop waits for that, but not much longer than ten seconds for another program that keeps
/// the file locked.
#[derive(Clone)]
pub struct SqliteStore {
    shared: Arc<Shared>,
}

/// What all handles share.
struct Shared {
    file: PathBuf,
    writer: Arc<Queue<Job>>,
    reader: Arc<Queue<Box<dyn Question>>>,
    // Both joined when the last handle goes.
    write_thread: Option<JoinHandle<()>>,
    read_thread: Option<JoinHandle<()>>,
    // The process that has these threads; a child that it forks off has not.
    process: u32,
}

impl SqliteStore {
    /// Opens a file with the default options; creates it where there is none.
    ///
    /// # Errors
    ///
    /// See [`SqliteOptions::open`].
    pub fn open(path: impl AsRef<Path>) -> Result<Self, StoreError> {
        SqliteOptions::new(path).open()
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.shared.file
    }
}

impl fmt::Debug for SqliteStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SqliteStore").field("file", &self.shared.file).finish_non_exhaustive()
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if self.was_forked() {
            // The threads, and whoever may hold the queues' locks, are in the other process.
            return;
        }
        // The writer goes last and alone: the last connection tidies the log away, and of two that
        // close at once neither would be the last.
        self.reader.close();
        join(self.read_thread.take());
        self.writer.close();
        join(self.write_thread.take());
    }
}

fn join(thread: Option<JoinHandle<()>>) {
    // A waker may own the last handle and be dropped by the thread that woke it.
    let other = thread.filter(|thread| thread.thread().id() != std::thread::current().id());
    if other.is_some_and(|thread| thread.join().is_err()) {
        tracing::error!("a thread of the store has panicked");
    }
}

impl Shared {
    fn was_forked(&self) -> bool {
        self.process != std::process::id()
    }

    /// Nobody would ever answer in a forked child.
    fn check_process(&self) -> Result<(), StoreError> {
        if !self.was_forked() {
            return Ok(());
        }
        let message =
            "this process was forked after the store was opened; open the store in the child";
        Err(StoreError::new(StoreErrorKind::Rejected, message))
    }

    /// Has the writer do something that nobody waits for.
    fn owe(&self, job: Job) {
        if !self.was_forked() {
            // A writer that has ended can do nothing any more, as after a crash.
            let _ = self.writer.put_always(job);
        }
    }

    fn refused(&self, closed: Closed) -> StoreError {
        let file = self.file.display();
        let message = match closed {
            Closed::Full => format!("too many calls wait for {file}; try again later"),
            Closed::Ended => {
                format!("the thread that works on {file} has ended; open the store again")
            }
        };
        StoreError::new(StoreErrorKind::Unavailable, message)
    }

    /// Waits for an answer.
    async fn answer<T>(
        &self,
        answer: oneshot::Receiver<Result<T, StoreError>>,
    ) -> Result<T, StoreError> {
        match answer.await {
            Ok(answer) => answer,
            Err(_) => Err(self.refused(Closed::Ended).maybe_applied()),
        }
    }

    /// Has the writer do something.
    async fn submit<T>(&self, job: impl FnOnce(Caller<T>) -> Job) -> Result<T, StoreError> {
        self.check_process()?;
        let (caller, answer) = Caller::new();
        self.writer.put(job(caller)).map_err(|closed| self.refused(closed))?;
        self.answer(answer).await
    }

    /// Has the reader read something.
    async fn read<T: Send + 'static>(
        &self,
        read: impl FnMut(&rusqlite::Connection) -> Result<T, Failure> + Send + 'static,
    ) -> Result<T, StoreError> {
        self.check_process()?;
        let (question, answer) = reader::question(read);
        self.reader.put(question).map_err(|closed| self.refused(closed))?;
        self.answer(answer).await
    }

    /// Has the writer book all unbooked usage of these buckets, in small steps.
    async fn book(&self, of: &BucketQuery) -> Result<(), StoreError> {
        let mut after = None;
        loop {
            let job = |caller| Job::Book(of.clone(), after.take(), caller);
            after = self.submit(job).await?;
            if after.is_none() {
                return Ok(());
            }
        }
    }
}

/// The answer to an acquire, on its way. Dropped before it was read, it gives back what was taken.
struct Acquiring<'a> {
    shared: &'a Shared,
    plan: &'a Plan,
    answer: oneshot::Receiver<Result<Admission, StoreError>>,
}

impl Drop for Acquiring<'_> {
    fn drop(&mut self) {
        // After this the writer sees that nobody waits. Before it, the answer lies here.
        self.answer.close();
        if let Ok(Ok(Admission::Taken(_))) = self.answer.try_recv() {
            self.shared.owe(Job::give_back(self.plan));
        }
    }
}

/// The answer to a settlement, on its way. Dropped before a failure was read, it settles again: what was
/// polled once is carried out.
struct Settling<'a> {
    shared: &'a Shared,
    settlements: &'a [Settlement],
    now: Timestamp,
    answer: oneshot::Receiver<Result<(), StoreError>>,
}

impl Drop for Settling<'_> {
    fn drop(&mut self) {
        // After this the writer sees that nobody waits. Before it, the answer lies here.
        self.answer.close();
        let Ok(Err(error)) = self.answer.try_recv() else { return };
        let may_pass = error.is_transient() || error.kind() == StoreErrorKind::Denied;
        if may_pass && error.applied() == Applied::No {
            self.shared.owe(Job::Settle(self.settlements.to_vec(), self.now, None));
        }
    }
}

/// Plans and settlements that cannot be carried out end here and not in the writer, where others
/// would suffer.
fn check_takes(target: &Target, takes: &[Take], least: Millitokens) -> Result<(), StoreError> {
    let sound = |take: &Take| take.cell < target.limits().len() && take.amount >= least;
    if takes.iter().all(sound) {
        return Ok(());
    }
    let message = "an amount is out of bounds or names no limit of its bucket";
    Err(StoreError::new(StoreErrorKind::Rejected, message))
}

fn check_plan(plan: &Plan) -> Result<(), StoreError> {
    for (at, leg) in plan.legs.iter().enumerate() {
        check_takes(&leg.target, &leg.takes, Millitokens::ZERO)?;
        if plan.legs[..at].iter().any(|other| other.target.key() == leg.target.key()) {
            let message = "a plan names the same bucket twice";
            return Err(StoreError::new(StoreErrorKind::Rejected, message));
        }
    }
    Ok(())
}

fn check_batch(len: usize) -> Result<(), StoreError> {
    if len <= BATCH_MAX {
        return Ok(());
    }
    let message = format!("{len} records in one call; use at most {BATCH_MAX}");
    Err(StoreError::new(StoreErrorKind::Rejected, message))
}

impl Store for SqliteStore {
    fn cost(&self) -> Option<Cost> {
        None
    }

    fn usage_recording(&self) -> UsageRecording {
        UsageRecording::Immediate
    }

    fn acquire<'a>(&'a self, plan: &'a Plan) -> BoxFuture<'a, Result<Admission, StoreError>> {
        Box::pin(async move {
            check_plan(plan)?;
            let shared = &*self.shared;
            shared.check_process()?;
            let (caller, answer) = Caller::new();
            let put = shared.writer.put(Job::Acquire(plan.clone(), caller));
            put.map_err(|closed| shared.refused(closed))?;
            let mut acquiring = Acquiring { shared, plan, answer };
            match (&mut acquiring.answer).await {
                Ok(answer) => answer,
                Err(_) => Err(shared.refused(Closed::Ended).maybe_applied()),
            }
        })
    }

    fn settle<'a>(
        &'a self,
        settlements: &'a [Settlement],
        now: Timestamp,
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        Box::pin(async move {
            for settlement in settlements {
                let least = Millitokens::new(i64::MIN + 1);
                check_takes(&settlement.target, &settlement.differences, least)?;
            }
            let shared = &*self.shared;
            shared.check_process()?;
            let (caller, answer) = Caller::new();
            let job = Job::Settle(settlements.to_vec(), now, Some(caller));
            shared.writer.put_always(job).map_err(|closed| shared.refused(closed))?;
            let mut settling = Settling { shared, settlements, now, answer };
            match (&mut settling.answer).await {
                Ok(answer) => answer,
                Err(_) => Err(shared.refused(Closed::Ended).maybe_applied()),
            }
        })
    }

    fn peek<'a>(
        &'a self,
        keys: &'a [BucketKey],
        now: Timestamp,
    ) -> BoxFuture<'a, Result<Vec<Option<Bucket>>, StoreError>> {
        Box::pin(async move {
            let keys = keys.to_vec();
            let read =
                move |conn: &_| keys.iter().map(|key| reader::peek(conn, key, now)).collect();
            self.shared.read(read).await
        })
    }

    fn reconfigure<'a>(
        &'a self,
        target: &'a Target,
        now: Timestamp,
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        Box::pin(async move {
            let limits = Arc::clone(target.limits());
            let target = Target::new(target.key().clone(), limits, target.lifetime());
            self.shared.submit(|caller| Job::Reconfigure(target, now, caller)).await
        })
    }

    fn get<'a>(
        &'a self,
        keys: &'a [Key],
    ) -> BoxFuture<'a, Result<Vec<Option<Record>>, StoreError>> {
        Box::pin(async move {
            check_batch(keys.len())?;
            let keys = keys.to_vec();
            let read = move |conn: &_| keys.iter().map(|key| records::get(conn, key)).collect();
            self.shared.read(read).await
        })
    }

    fn write<'a>(&'a self, batch: &'a [Write]) -> BoxFuture<'a, Result<Written, StoreError>> {
        Box::pin(async move {
            check_batch(batch.len())?;
            self.shared.submit(|caller| Job::Write(batch.to_vec(), caller)).await
        })
    }

    fn delete<'a>(&'a self, keys: &'a [Key]) -> BoxFuture<'a, Result<(), StoreError>> {
        Box::pin(async move {
            for keys in keys.chunks(DELETE_MAX) {
                self.shared.submit(|caller| Job::Delete(keys.to_vec(), caller)).await?;
            }
            Ok(())
        })
    }

    fn list<'a>(
        &'a self,
        query: &'a Query,
        page: &'a PageRequest,
    ) -> BoxFuture<'a, Result<Page<Record>, StoreError>> {
        Box::pin(async move {
            // What is booked for the first page is there for the others.
            if page.after.is_none() {
                match query {
                    Query::UsageOfEntity(ns, entity, ..) => {
                        let of = BucketQuery::OfEntity(ns.clone(), entity.clone());
                        self.shared.book(&of).await?;
                    }
                    Query::UsageOfResource(ns, resource, ..) => {
                        let of = BucketQuery::OnResource(ns.clone(), resource.clone());
                        self.shared.book(&of).await?;
                    }
                    _ => {}
                }
            }
            let (query, page) = (query.clone(), page.clone());
            self.shared.read(move |conn| list::records(conn, &query, &page)).await
        })
    }

    fn list_buckets<'a>(
        &'a self,
        query: &'a BucketQuery,
        page: &'a PageRequest,
    ) -> BoxFuture<'a, Result<Page<StoredBucket>, StoreError>> {
        Box::pin(async move {
            let (query, page) = (query.clone(), page.clone());
            self.shared.read(move |conn| list::buckets(conn, &query, &page)).await
        })
    }

    fn list_keys<'a>(
        &'a self,
        scope: &'a Scope,
        page: &'a PageRequest,
    ) -> BoxFuture<'a, Result<Page<Key>, StoreError>> {
        Box::pin(async move {
            let (scope, page) = (scope.clone(), page.clone());
            self.shared.read(move |conn| keys::keys(conn, &scope, &page)).await
        })
    }

    fn list_resources<'a>(
        &'a self,
        namespace: &'a NamespaceId,
        which: ResourceList,
        page: &'a PageRequest,
    ) -> BoxFuture<'a, Result<Page<ResourceName>, StoreError>> {
        Box::pin(async move {
            let (namespace, page) = (namespace.clone(), page.clone());
            let read = move |conn: &_| list::resources(conn, &namespace, which, &page);
            self.shared.read(read).await
        })
    }
}

/// Decodes bytes in every way the store does, for fuzzing: any input gives a value or an error.
#[doc(hidden)]
pub fn fuzz_decode(bytes: &[u8]) {
    let _ = codec::decode_state(bytes, None, None);
    let _ = codec::decode_limits(bytes);
    let _ = codec::decode_consumed(bytes);
}
