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
//! A caller does its own transaction while no other call waits ([`CommitOn`]). Otherwise callers queue their plans for
//! one writer thread. The writer puts all queued plans into one transaction, decides them in order, commits, and only
//! then replies. A second thread reads. Both threads end with the last handle of the store.
//!
//! All processes that open the same file share one budget: SQLite's lock serialises their
//! transactions. A process that forks must do so before it opens the store. A child has none of its
//! parent's threads and none of its locks: there, calls on the inherited handle are rejected, and so
//! is opening a file that the parent had open.
//!
//! `docs/sqlite-format.md` describes the file.

mod baseline;
mod bucket_states;
mod codec;
mod cursor;
mod error;
mod job;
mod keys;
mod ledger;
mod list;
mod log;
mod open_files;
mod opened;
mod options;
mod pending;
mod queue;
mod reader;
mod records;
mod schema;
mod sweep;
mod writer;
mod writer_lock;

#[cfg(test)]
mod caller_tests;
#[cfg(test)]
mod cancellation_tests;
#[cfg(test)]
mod closing_tests;
#[cfg(test)]
mod format_tests;
#[cfg(test)]
mod full_disk_tests;

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::thread::JoinHandle;

use tokio::sync::oneshot;
use tokio::task::coop;
use zae_limiter_core::{
    Admission, BATCH_MAX, BoxFuture, Bucket, BucketKey, BucketQuery, Cost, Key, Millitokens,
    NamespaceId, Page, PageRequest, Plan, Query, Record, ResourceList, ResourceName, Scope,
    Settlement, Store, StoreError, StoreErrorKind, StoredBucket, Take, Target, Timestamp,
    UsageRecording, Write, Written,
};

pub use crate::options::{CommitOn, Durability, SqliteOptions};

use crate::error::Failure;
use crate::job::{Caller, Job};
use crate::ledger::Ledger;
use crate::open_files::OpenHere;
use crate::pending::{PendingAcquire, PendingSettlement};
use crate::queue::{Closed, Queue};
use crate::reader::ReadJob;
use crate::writer_lock::WriterLock;

/// The most keys that one transaction deletes.
const DELETE_MAX: usize = 256;

/// A [`Store`] in one SQLite file. Clones are handles to the same store.
///
/// Dropping the last handle finishes all accepted calls and closes the file. The drop waits for
/// that, but only about ten seconds for another program that keeps the file locked. What cannot be
/// written even then, for example on a full disk, is lost, and the store warns.
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
#[derive(Clone)]
pub struct SqliteStore {
    shared: Arc<Shared>,
}

/// State that all handles share.
struct Shared {
    file: PathBuf,
    writer: Arc<Queue<Job>>,
    write_now: Arc<WriterLock>,
    reader: Arc<Queue<Box<dyn ReadJob>>>,
    // Both are joined when the last handle is dropped.
    write_thread: Option<JoinHandle<()>>,
    read_thread: Option<JoinHandle<()>>,
    // The process that has these threads. A forked child does not have them.
    process: u32,
    // Dropped after the threads have closed the file.
    _open: OpenHere,
}

impl SqliteStore {
    /// Opens a file with the default options, and creates it if it does not exist.
    ///
    /// # Errors
    ///
    /// See [`SqliteOptions::open`].
    pub fn open(path: impl AsRef<Path>) -> Result<Self, StoreError> {
        SqliteOptions::new(path).open()
    }

    /// The absolute path of the file.
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
            // The threads are in the parent, and so may be the holders of the queues' locks.
            return;
        }
        // The writer closes last and alone. SQLite removes the log when the last connection closes,
        // and of two that close at once neither is the last.
        self.reader.close();
        join(self.read_thread.take());
        self.writer.close();
        join(self.write_thread.take());
    }
}

fn join(thread: Option<JoinHandle<()>>) {
    // A waker may own the last handle, and the store's own thread may drop that waker.
    let other = thread.filter(|thread| thread.thread().id() != std::thread::current().id());
    if other.is_some_and(|thread| thread.join().is_err()) {
        tracing::error!("a thread of the SQLite store panicked");
    }
}

impl Shared {
    fn was_forked(&self) -> bool {
        self.process != std::process::id()
    }

    /// Rejects calls in a forked child: no thread there would ever reply.
    fn check_process(&self) -> Result<(), StoreError> {
        if !self.was_forked() {
            return Ok(());
        }
        let message =
            "this process was forked after the store was opened; fork first, then open the store";
        Err(StoreError::new(StoreErrorKind::Rejected, message))
    }

    /// Queues a job for the writer whose reply nobody awaits.
    fn submit_detached(&self, job: Job) {
        if !self.was_forked() {
            // If the writer has ended, the job is lost as after a crash.
            let _ = self.writer.put_always(job);
        }
    }

    fn closed_error(&self, closed: Closed) -> StoreError {
        let file = self.file.display();
        let message = match closed {
            Closed::Full => format!("too many calls are queued for {file}; try again later"),
            Closed::Ended => {
                format!("the store's thread for {file} has ended; open the store again")
            }
        };
        StoreError::new(StoreErrorKind::Unavailable, message)
    }

    /// Waits for a reply. A channel that closes without one means that the thread has ended.
    async fn wait_for<T>(
        &self,
        reply: &mut oneshot::Receiver<Result<T, StoreError>>,
    ) -> Result<T, StoreError> {
        match reply.await {
            Ok(reply) => reply,
            Err(_) => Err(self.closed_error(Closed::Ended).maybe_applied()),
        }
    }

    /// Acquires on this thread, if the writer is free.
    fn acquire_now(&self, plan: &Plan) -> Option<Result<Admission, StoreError>> {
        if let Err(error) = check_plan(plan).and_then(|()| self.check_process()) {
            return Some(Err(error));
        }
        self.write_now(Some(plan.now), |ledger| ledger.acquire(plan))
    }

    /// Does a transaction on this thread, if the writer is free and the task need not yield.
    fn write_now<T>(
        &self,
        now: Option<Timestamp>,
        work: impl FnOnce(&mut Ledger) -> Result<T, Failure>,
    ) -> Option<Result<T, StoreError>> {
        // A task whose calls are all done here would never yield to the others of its runtime. If it has to, the call goes
        // to the thread, and the wait for its reply yields.
        let mut context = Context::from_waker(Waker::noop());
        let Poll::Ready(budget) = coop::poll_proceed(&mut context) else { return None };
        let done = self.write_now.try_now(now, work)?;
        budget.made_progress();
        Some(done)
    }

    /// Queues a job for the writer and waits for the reply.
    async fn submit<T>(&self, job: impl FnOnce(Caller<T>) -> Job) -> Result<T, StoreError> {
        self.check_process()?;
        let (caller, mut reply) = Caller::new();
        self.writer.put(job(caller)).map_err(|closed| self.closed_error(closed))?;
        self.wait_for(&mut reply).await
    }

    /// Queues a read for the reader and waits for the reply.
    async fn read<T: Send + 'static>(
        &self,
        read: impl FnMut(&rusqlite::Connection) -> Result<T, Failure> + Send + 'static,
    ) -> Result<T, StoreError> {
        self.check_process()?;
        let (job, mut reply) = reader::read_job(read);
        self.reader.put(job).map_err(|closed| self.closed_error(closed))?;
        self.wait_for(&mut reply).await
    }

    /// Makes the writer book all unbooked usage of these buckets, a bounded number at a time.
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

/// Rejects invalid plans and settlements before the writer gets them: there they would fail the
/// batch of other callers.
fn check_takes(target: &Target, takes: &[Take], least: Millitokens) -> Result<(), StoreError> {
    let sound = |take: &Take| take.cell < target.limits().len() && take.amount >= least;
    if takes.iter().all(sound) {
        return Ok(());
    }
    let message = "an amount is out of bounds, or its limit is not in the bucket";
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
    let message = format!("{len} records in one call; send at most {BATCH_MAX}");
    Err(StoreError::new(StoreErrorKind::Rejected, message))
}

impl Store for SqliteStore {
    fn cost(&self) -> Option<Cost> {
        None
    }

    fn usage_recording(&self) -> UsageRecording {
        UsageRecording::Immediate
    }

    fn acquire_now(&self, plan: &Plan) -> Option<Result<Admission, StoreError>> {
        self.shared.acquire_now(plan)
    }

    fn acquire<'a>(&'a self, plan: &'a Plan) -> BoxFuture<'a, Result<Admission, StoreError>> {
        Box::pin(async move {
            let shared = &*self.shared;
            if let Some(done) = shared.acquire_now(plan) {
                return done;
            }
            let (caller, reply) = Caller::new();
            let put = shared.writer.put(Job::Acquire(plan.clone(), caller));
            put.map_err(|closed| shared.closed_error(closed))?;
            let mut pending = PendingAcquire { shared, plan, reply };
            shared.wait_for(&mut pending.reply).await
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
            if let Some(done) = shared.write_now(None, |ledger| ledger.settle(settlements, now)) {
                return done;
            }
            let (caller, reply) = Caller::new();
            let job = Job::Settle(settlements.to_vec(), now, Some(caller));
            shared.writer.put_always(job).map_err(|closed| shared.closed_error(closed))?;
            let mut pending = PendingSettlement { shared, settlements, now, reply };
            shared.wait_for(&mut pending.reply).await
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
            // Booking once is enough: later pages read the same records.
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

    fn list_everything<'a>(
        &'a self,
        _now: Timestamp,
        page: &'a PageRequest,
    ) -> BoxFuture<'a, Result<Page<Key>, StoreError>> {
        Box::pin(async move {
            let page = page.clone();
            self.shared.read(move |conn| keys::everything(conn, &page)).await
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

/// Runs every decoder on the bytes, for fuzzing: any input must give a value or an error.
#[doc(hidden)]
pub fn fuzz_decode(bytes: &[u8]) {
    let _ = codec::decode_state(bytes, None, None);
    let _ = codec::decode_limits(bytes);
    let _ = codec::decode_consumed(bytes);
}
