//! The writer: one connection, on which a thread puts many jobs into one transaction, or a caller its own call.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use zae_limiter_core::{StoreError, Timestamp};

use crate::error::Failure;
use crate::job::{Commit, Job};
use crate::ledger::Ledger;
use crate::log::Log;
use crate::opened::OpenedFile;
use crate::queue::Queue;
use crate::sweep::Sweeper;

/// The most jobs in one transaction. Other processes wait for it to end.
const BATCH_MAX: usize = 1_024;

/// The most times that the writer yields to other threads before a batch, while that brings jobs.
const COLLECT_MAX: usize = 16;

/// Transactions between two steps of the sweeper.
pub(crate) const SWEEP_EVERY: u64 = 64;

/// Steps of the sweeper that can be due before callers leave their calls to the thread, which does these first.
const STEPS_DUE_MAX: u32 = 2;

/// Pauses between two tries to lock a file that another process has locked. Short at first, because
/// most transactions are short; longer for a process that keeps the lock.
const BUSY_WAITS: [Duration; 3] =
    [Duration::from_micros(100), Duration::from_millis(1), Duration::from_millis(5)];

/// How many tries use each of these pauses. The last one is used from then on.
const BUSY_TRIES: u32 = 100;

/// How long the writer waits for a locked file after the store was closed, all batches together: the sum of its pauses.
pub(crate) const WAIT_AT_END_MAX: Duration =
    Duration::from_millis(if cfg!(test) { 200 } else { 10_000 });

/// How often the writer tries before it replies that the file is locked: about five seconds, half the deadline of a
/// change. Without that reply the caller could not say why there is none, nor that nothing was changed.
const BUSY_TRIES_MAX: u32 = if cfg!(test) { 200 } else { 1_100 };

/// How long the writer waits before it tries again what failed and what nobody else will try again.
const RETRY_PAUSE: Duration = Duration::from_millis(if cfg!(test) { 1 } else { 1_000 });

/// The pause after so many tries to lock the file.
pub(crate) fn busy_wait(tries: u32) -> Duration {
    let step = usize::try_from(tries / BUSY_TRIES).unwrap_or(usize::MAX);
    BUSY_WAITS[step.min(BUSY_WAITS.len() - 1)]
}

/// The writer's state.
#[derive(Debug)]
pub(crate) struct Writer {
    file: OpenedFile,
    queue: Arc<Queue<Job>>,
    ledger: Ledger,
    log: Log,
    sweeper: Sweeper,
    // Taken from the queue, but not carried out yet.
    pending: VecDeque<Job>,
    // Background jobs whose transaction failed. They are tried again before each batch, and after each pause.
    retries: VecDeque<Job>,
    retry_is_due: bool,
    // How many of the next jobs get a transaction of their own, because one of them failed a batch.
    one_by_one: usize,
    transactions: u64,
    // Steps of the sweeper that are due, and the moment of the last acquire.
    steps_due: u32,
    // See `work`.
    last: Option<Job>,
    now: Option<Timestamp>,
    // How many jobs the thread's last batch had. Callers share a transaction while there were others.
    last_batch: usize,
    // Whether another process has written since the last transaction.
    others_write: bool,
    // How long it has waited for a locked file since the store was closed.
    waited_at_end: Duration,
}

impl Writer {
    pub(crate) fn new(
        file: OpenedFile,
        queue: Arc<Queue<Job>>,
        mut ledger: Ledger,
    ) -> Result<Self, Failure> {
        let log = Log::new(file.log().to_owned(), crate::schema::LOG_BYTES_MAX);
        log.watch(&mut ledger.conn)?;
        Ok(Self {
            file,
            log,
            queue,
            ledger,
            sweeper: Sweeper::default(),
            pending: VecDeque::new(),
            retries: VecDeque::new(),
            retry_is_due: false,
            one_by_one: 0,
            transactions: 0,
            steps_due: 0,
            last: None,
            now: None,
            last_batch: 0,
            others_write: false,
            waited_at_end: Duration::ZERO,
        })
    }

    /// Carries out all jobs that wait, and what is due beside them. Only the writer's thread does this.
    ///
    /// Returns a job that was alone in the last batch and is committed. Its caller may call again at once, so it should
    /// get the reply when the lock is free.
    pub(crate) fn work(&mut self) -> Option<Job> {
        self.retry_is_due = !self.retries.is_empty();
        loop {
            let waits = self.queue.take(&mut self.pending) > 0 || !self.pending.is_empty();
            if !waits && !self.has_upkeep() {
                return self.last.take();
            }
            if let Some(job) = self.last.take() {
                self.reply([job].into(), Commit::Done);
            }
            self.keep_up();
            self.retry();
            if self.pending.is_empty() {
                continue;
            }
            self.collect();
            match self.begin() {
                Ok(true) => {
                    let batch = self.next_batch();
                    self.carry_out(batch);
                }
                Ok(false) => {}
                Err(failure) => {
                    let all = std::mem::take(&mut self.pending);
                    self.reply(all, Commit::Undone(&Arc::new(failure)));
                }
            }
        }
    }

    /// Whether a caller may do a transaction: nothing waits for the thread, the commit flushes nothing, no other caller was
    /// there a moment ago, and no other process waits for the file.
    pub(crate) fn is_free(&self) -> bool {
        let nothing_waits = self.pending.is_empty() && self.retries.is_empty();
        let is_kept_up =
            self.steps_due < STEPS_DUE_MAX && !self.log.is_due() && !self.log.starts_over();
        nothing_waits && is_kept_up && self.last_batch <= 1 && !self.others_write
    }

    /// Does one call in a transaction, if nothing stands in the way. `None` means that nothing has changed.
    pub(crate) fn transact_now<T>(
        &mut self,
        now: Option<Timestamp>,
        work: impl FnOnce(&mut Ledger) -> Result<T, Failure>,
    ) -> Option<Result<T, StoreError>> {
        self.others_write = self.try_begin().ok()?;
        // A hot job that fails has changed nothing. It may have rewound a bucket.
        let outcome = work(&mut self.ledger);
        if self.ledger.store().is_err() {
            self.roll_back();
            return None;
        }
        let committed = self.commit();
        self.now = now.or(self.now);
        self.count();
        let file = self.file.path();
        let Err(failure) = committed else {
            return Some(outcome.map_err(|failure| Arc::new(failure).to_store_error(file)));
        };
        self.roll_back();
        if failure.is_short_write() {
            return None;
        }
        let error = Arc::new(failure).to_store_error(self.file.path());
        Some(Err(error.maybe_applied()))
    }

    /// Counts a transaction.
    fn count(&mut self) {
        self.transactions += 1;
        self.steps_due += u32::from(self.transactions.is_multiple_of(SWEEP_EVERY));
    }

    /// Whether the thread has something to do beside jobs.
    pub(crate) fn has_upkeep(&self) -> bool {
        self.steps_due > 0 || self.log.is_due() || self.retry_is_due
    }

    /// Does what is due beside jobs: steps of the sweeper, and what keeps the log short.
    fn keep_up(&mut self) {
        let was_due = self.steps_due > 0 || self.log.is_due();
        self.log.checkpoint_if_due(&self.ledger.conn);
        while self.steps_due > 0 {
            self.steps_due -= 1;
            if let Some(now) = self.now {
                self.sweep(now);
            }
        }
        if was_due {
            self.log.bound(&self.ledger.conn);
            if self.log.starts_over() {
                self.start_log();
            }
        }
    }

    /// Starts a log over that was copied, so that no caller has to. If it fails, the next job does it.
    fn start_log(&mut self) {
        if self.try_begin().is_err() {
            return;
        }
        let started = crate::schema::touch(&self.ledger.conn).and_then(|()| self.commit());
        if let Err(failure) = started {
            tracing::debug!(%failure, "could not start SQLite's log over");
            self.roll_back();
        }
        if self.log.is_due() {
            // A reader keeps it as it is. The next job shows that.
            self.log.forget_length();
        }
    }

    /// Collects a batch. Callers that just got a reply often call again at once, so a short wait
    /// lets one commit serve all of them.
    fn collect(&mut self) {
        self.queue.take(&mut self.pending);
        for _ in 0..COLLECT_MAX {
            std::thread::yield_now();
            if self.queue.take(&mut self.pending) == 0 {
                break;
            }
        }
        self.drop_abandoned();
    }

    fn drop_abandoned(&mut self) {
        self.pending.retain(|job| !job.is_abandoned());
    }

    /// Begins a transaction. Retries while another process holds the lock and a caller waits.
    /// Returns `false` if no caller is left.
    fn begin(&mut self) -> Result<bool, Failure> {
        if self.others_write {
            // Without a pause one process could keep the others from getting the lock.
            std::thread::park_timeout(BUSY_WAITS[0]);
        }
        let mut tries: u32 = 0;
        loop {
            if self.pending.is_empty() {
                return Ok(false);
            }
            match self.try_begin() {
                Err(failure) if failure.is_busy() => {
                    if self.gives_up(tries) {
                        return Err(failure);
                    }
                }
                begun => {
                    self.others_write = begun?;
                    return Ok(true);
                }
            }
            std::thread::park_timeout(busy_wait(tries));
            self.queue.take(&mut self.pending);
            self.drop_abandoned();
            tries = tries.saturating_add(1);
        }
    }

    /// Whether a try to lock the file was the last one, after so many others for this batch. Otherwise a pause follows.
    fn gives_up(&mut self, tries: u32) -> bool {
        if !self.queue.is_closed() {
            return tries > BUSY_TRIES_MAX;
        }
        self.waited_at_end = self.waited_at_end.saturating_add(busy_wait(tries));
        self.waited_at_end > WAIT_AT_END_MAX
    }

    /// Returns whether others have written since the last transaction.
    fn try_begin(&mut self) -> Result<bool, Failure> {
        self.ledger.conn.prepare_cached("BEGIN IMMEDIATE")?.execute([])?;
        let checked = self.file.check(&self.ledger.conn);
        match checked {
            Ok(others_wrote) => self.ledger.states.begin(others_wrote),
            Err(_) => self.roll_back(),
        }
        checked
    }

    /// Takes the jobs of the next transaction.
    fn next_batch(&mut self) -> VecDeque<Job> {
        self.queue.take(&mut self.pending);
        let size = if self.one_by_one > 0 { 1 } else { self.pending.len().min(BATCH_MAX) };
        self.one_by_one = self.one_by_one.saturating_sub(1);
        self.last_batch = size;
        self.pending.drain(..size).collect()
    }

    /// Carries out a batch in the transaction that has begun, ends it, and replies.
    fn carry_out(&mut self, mut batch: VecDeque<Job>) {
        match self.transact(&mut batch) {
            Ok(()) => match self.commit() {
                Ok(()) if batch.len() == 1 => self.last = batch.pop_front(),
                Ok(()) => self.reply(batch, Commit::Done),
                Err(failure) => {
                    self.roll_back_after(&failure);
                    let failure = Arc::new(failure);
                    let is_undone = failure.is_short_write();
                    let commit = if is_undone { Commit::Undone } else { Commit::Unknown };
                    self.reply(batch, commit(&failure));
                }
            },
            Err(failure) => {
                self.roll_back_after(&failure);
                if batch.len() > 1 && !failure.is_outage() {
                    // One job has failed the others: each now gets a transaction of its own.
                    self.one_by_one = batch.len();
                    batch.iter_mut().for_each(Job::reset);
                    batch.append(&mut self.pending);
                    self.pending = batch;
                } else {
                    self.reply(batch, Commit::Undone(&Arc::new(failure)));
                }
            }
        }
        self.count();
    }

    fn transact(&mut self, batch: &mut VecDeque<Job>) -> Result<(), Failure> {
        for job in batch {
            self.ledger.check()?;
            if job.is_abandoned() {
                continue;
            }
            match job {
                Job::Acquire(plan, caller) => {
                    self.now = Some(plan.now);
                    caller.decide(self.ledger.acquire(plan));
                }
                Job::Settle(settlements, now, caller) => {
                    let settled = self.ledger.settle(settlements, *now);
                    if let Some(caller) = caller {
                        caller.decide(settled);
                    } else if let Err(failure) = settled {
                        tracing::warn!(%failure, "a background settlement is lost");
                    }
                }
                Job::Reconfigure(target, now, caller) => {
                    caller.decide(self.ledger.reconfigure(target, *now));
                }
                Job::Write(batch, caller) => caller.decide(Ok(self.ledger.write(batch)?)),
                Job::Delete(keys, caller) => caller.decide(Ok(self.ledger.delete(keys)?)),
                Job::Book(of, after, caller) => {
                    caller.decide(Ok(self.ledger.book_next(of, after.as_ref())?));
                }
                #[cfg(test)]
                Job::Gate(reached, open) => {
                    // Both fail at once if the test has panicked meanwhile.
                    let _ = reached.send(());
                    let _ = open.recv();
                }
                #[cfg(test)]
                Job::Fail(kind) => {
                    let message = "cannot be written, on purpose";
                    return Err(Failure::Unusable(*kind, message));
                }
                #[cfg(test)]
                Job::PagesMax(max) => {
                    let sql = format!("PRAGMA max_page_count = {max}");
                    self.ledger.conn.query_row(&sql, [], |_| Ok(()))?;
                }
            }
        }
        self.ledger.store()
    }

    fn commit(&self) -> Result<(), Failure> {
        self.ledger.conn.prepare_cached("COMMIT")?.execute([])?;
        Ok(())
    }

    pub(crate) fn roll_back(&mut self) {
        self.ledger.clear();
        if !self.ledger.conn.is_autocommit()
            && let Err(failure) = self.ledger.conn.execute_batch("ROLLBACK")
        {
            tracing::warn!(%failure, "could not roll back a transaction");
        }
    }

    fn roll_back_after(&mut self, failure: &Failure) {
        self.roll_back();
        // After a checkpoint the log is written again from its start, which needs no more room.
        if failure.is_full()
            && let Err(failure) = self.log.empty(&self.ledger.conn, Duration::ZERO)
        {
            tracing::warn!(%failure, "could not truncate the log on a full disk");
        }
    }

    fn reply(&mut self, batch: VecDeque<Job>, commit: Commit<'_>) {
        let left = batch.into_iter().filter_map(|job| job.reply(commit, self.file.path()));
        match commit {
            Commit::Done => self.pending.extend(left),
            Commit::Undone(_) | Commit::Unknown(_) => self.retries.extend(left),
        }
    }

    /// Tries again to carry out background jobs, in a transaction of their own, so that they cannot fail a call.
    fn retry(&mut self) {
        self.retry_is_due = false;
        if self.retries.is_empty() {
            return;
        }
        match self.try_begin() {
            Ok(others_write) => {
                self.others_write = others_write;
                let left = self.retries.len();
                let batch = self.retries.drain(..left.min(BATCH_MAX)).collect();
                self.carry_out(batch);
                // It goes on while that helps.
                self.retry_is_due = !self.retries.is_empty() && self.retries.len() < left;
            }
            Err(failure) => tracing::debug!(%failure, "a background settlement has to wait"),
        }
    }

    /// When to call [`work`](Self::work) again if no job comes.
    pub(crate) fn retry_pause(&self) -> Option<Duration> {
        (!self.retries.is_empty()).then_some(RETRY_PAUSE)
    }

    /// Runs a step of the sweeper in a transaction of its own, so that it cannot fail a call.
    fn sweep(&mut self, now: Timestamp) {
        if self.try_begin().is_err() {
            return;
        }
        let swept = self.sweeper.step(&mut self.ledger, now).and_then(|()| self.commit());
        if let Err(failure) = swept {
            tracing::warn!(%failure, "could not delete expired rows");
            self.roll_back();
        }
    }

    /// Looks at the file once more before the connection closes.
    pub(crate) fn close(mut self) {
        self.file.is_replaced(&self.ledger.conn);
    }

    /// Adds a job that is to be done soon.
    pub(crate) fn put_back(&mut self, job: Job) {
        self.pending.push_back(job);
    }

    #[cfg(test)]
    pub(crate) fn conn(&mut self) -> &mut rusqlite::Connection {
        &mut self.ledger.conn
    }

    /// Bounds the log at fewer bytes.
    #[cfg(test)]
    pub(crate) fn shorten_log(&mut self, normal_bytes: u64) {
        self.log = Log::new(self.file.log().to_owned(), normal_bytes);
        self.log.watch(&mut self.ledger.conn).unwrap();
    }

    #[cfg(test)]
    pub(crate) fn log(&mut self) -> &mut Log {
        &mut self.log
    }

    /// How many jobs are not carried out yet.
    #[cfg(test)]
    pub(crate) fn left(&self) -> usize {
        self.pending.len() + self.retries.len()
    }

    /// Carries out background jobs that failed before, as far as that goes. Waits for a locked file, but not anew.
    pub(crate) fn retry_at_end(&mut self) {
        while !self.retries.is_empty() {
            let left = self.retries.len();
            self.pending.append(&mut self.retries);
            // Its caller has left.
            drop(self.work());
            if self.retries.len() >= left {
                tracing::warn!(
                    left,
                    "settlements are lost: the file could not be written when the store was closed"
                );
                return;
            }
        }
    }
}
