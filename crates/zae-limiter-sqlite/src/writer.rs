//! The writer: one thread, one connection, many jobs in one transaction.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use zae_limiter_core::Timestamp;

use crate::error::Failure;
use crate::job::{Commit, Job};
use crate::ledger::Ledger;
use crate::queue::{EndOfThread, Queue};
use crate::sweep::Sweeper;

/// The most jobs in one transaction: other processes wait meanwhile.
const BATCH_MAX: usize = 1_024;

/// How often the writer lets other threads go first, as long as that brings more jobs.
const GATHER_MAX: usize = 16;

/// One step of the sweeper after so many transactions.
const SWEEP_EVERY: u64 = 64;

/// How long the writer waits for another process's transaction before it looks again: short at
/// first, because such transactions are; longer for somebody who sits on the lock.
const BUSY_WAITS: [Duration; 3] =
    [Duration::from_micros(100), Duration::from_millis(1), Duration::from_millis(5)];

/// How often each of them is waited before the next.
const BUSY_TRIES: u32 = 100;

/// How often an ending writer looks before it gives up what is left: about ten seconds.
const BUSY_TRIES_AT_END_MAX: u32 = 2_000;

/// The writer's state.
#[derive(Debug)]
pub(crate) struct Writer {
    file: PathBuf,
    queue: Arc<Queue<Job>>,
    ledger: Ledger,
    sweeper: Sweeper,
    // Taken from the queue and not begun.
    pending: VecDeque<Job>,
    // Could not be done and must not be lost: goes along with the next batch.
    owed: VecDeque<Job>,
    // So many jobs are carried out one by one, because one of them spoiled a batch.
    single: usize,
    transactions: u64,
    // Another process wrote since the last transaction.
    has_company: bool,
}

impl Writer {
    pub(crate) fn new(file: PathBuf, queue: Arc<Queue<Job>>, ledger: Ledger) -> Self {
        Self {
            file,
            queue,
            ledger,
            sweeper: Sweeper::default(),
            pending: VecDeque::new(),
            owed: VecDeque::new(),
            single: 0,
            transactions: 0,
            has_company: false,
        }
    }

    /// Carries out jobs until the queue is closed and empty.
    pub(crate) fn run(mut self) {
        let queue = Arc::clone(&self.queue);
        let _end = EndOfThread(&queue);
        while !self.pending.is_empty() || self.queue.wait() {
            self.gather();
            match self.begin() {
                Ok(true) => self.carry_out(),
                Ok(false) => {}
                Err(failure) => {
                    let all = std::mem::take(&mut self.pending);
                    self.answer(all, Commit::Undone(&Arc::new(failure)));
                }
            }
        }
        self.settle_up();
    }

    /// Takes what waits. Callers that were just answered are about to ask again: one commit for all
    /// of them is worth a moment.
    fn gather(&mut self) {
        self.queue.take(&mut self.pending);
        for _ in 0..GATHER_MAX {
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

    /// Begins a transaction, however long another process holds the file, as long as somebody waits
    /// for it. `false` when nobody does.
    fn begin(&mut self) -> Result<bool, Failure> {
        if self.has_company {
            // The others wait in the same way; without a pause one process could hog the file.
            std::thread::park_timeout(BUSY_WAITS[0]);
        }
        let mut tries: u32 = 0;
        loop {
            if self.pending.is_empty() {
                return Ok(false);
            }
            match self.try_begin() {
                Err(failure) if failure.is_busy() => {
                    if tries > BUSY_TRIES_AT_END_MAX && self.queue.is_closed() {
                        return Err(failure);
                    }
                }
                begun => {
                    self.has_company = begun?;
                    return Ok(true);
                }
            }
            let step = usize::try_from(tries / BUSY_TRIES).unwrap_or(usize::MAX);
            std::thread::park_timeout(BUSY_WAITS[step.min(BUSY_WAITS.len() - 1)]);
            self.queue.take(&mut self.pending);
            self.drop_abandoned();
            tries = tries.saturating_add(1);
        }
    }

    /// Says whether others have written since the last transaction.
    fn try_begin(&mut self) -> Result<bool, Failure> {
        self.ledger.conn.prepare_cached("BEGIN IMMEDIATE")?.execute([])?;
        let begun = self.ledger.states.begin(&self.ledger.conn);
        if begun.is_err() {
            self.roll_back();
        }
        begun
    }

    /// Puts jobs into the transaction that has begun, ends it, and answers.
    fn carry_out(&mut self) {
        self.queue.take(&mut self.pending);
        let size = if self.single > 0 { 1 } else { self.pending.len().min(BATCH_MAX) };
        let mut batch: VecDeque<Job> = self.owed.drain(..).collect();
        batch.extend(self.pending.drain(..size));
        self.single = self.single.saturating_sub(1);

        let mut now = None;
        match self.transact(&mut batch, &mut now) {
            Ok(()) => match self.commit() {
                Ok(()) => self.answer(batch, Commit::Done),
                Err(failure) => {
                    self.roll_back_after(&failure);
                    self.answer(batch, Commit::Unknown(&Arc::new(failure)));
                }
            },
            Err(failure) => {
                self.roll_back_after(&failure);
                if batch.len() > 1 && !failure.is_outage() {
                    // One job alone is to blame: each gets a transaction of its own.
                    self.single = batch.len();
                    batch.append(&mut self.pending);
                    self.pending = batch;
                } else {
                    self.answer(batch, Commit::Undone(&Arc::new(failure)));
                }
            }
        }
        self.transactions += 1;
        if self.transactions.is_multiple_of(SWEEP_EVERY)
            && let Some(now) = now
        {
            self.sweep(now);
        }
    }

    fn transact(
        &mut self,
        batch: &mut VecDeque<Job>,
        now: &mut Option<Timestamp>,
    ) -> Result<(), Failure> {
        for job in batch {
            self.ledger.check()?;
            if job.is_abandoned() {
                continue;
            }
            match job {
                Job::Acquire(plan, caller) => {
                    *now = Some(plan.now);
                    caller.decide(self.ledger.acquire(plan));
                }
                Job::Settle(settlements, now, caller) => {
                    let settled = self.ledger.settle(settlements, *now);
                    if let Some(caller) = caller {
                        caller.decide(settled);
                    } else if let Err(failure) = settled {
                        tracing::warn!(%failure, "a settlement without a caller is lost");
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
                    // A test that has failed meanwhile holds nothing up.
                    let _ = reached.send(());
                    let _ = open.recv();
                }
                #[cfg(test)]
                Job::Fail => {
                    let message = "cannot be written, on purpose";
                    let kind = zae_limiter_core::StoreErrorKind::Unavailable;
                    return Err(Failure::Unusable(kind, message));
                }
            }
        }
        self.ledger.check()?;
        self.ledger.store()
    }

    fn commit(&self) -> Result<(), Failure> {
        self.ledger.conn.prepare_cached("COMMIT")?.execute([])?;
        Ok(())
    }

    fn roll_back(&mut self) {
        self.ledger.forget();
        if !self.ledger.conn.is_autocommit()
            && let Err(failure) = self.ledger.conn.execute_batch("ROLLBACK")
        {
            tracing::warn!(%failure, "a transaction could not be rolled back");
        }
    }

    fn roll_back_after(&mut self, failure: &Failure) {
        self.roll_back();
        // A log that was carried over can be written anew from its start, which needs no room.
        if failure.is_full() {
            let sql = "PRAGMA wal_checkpoint(TRUNCATE)";
            if let Err(failure) = self.ledger.conn.query_row(sql, [], |_| Ok(())) {
                tracing::warn!(%failure, "the log of a full disk could not be shortened");
            }
        }
    }

    fn answer(&mut self, batch: VecDeque<Job>, commit: Commit<'_>) {
        let owed = batch.into_iter().filter_map(|job| job.answer(commit, &self.file));
        match commit {
            Commit::Done => self.pending.extend(owed),
            Commit::Undone(_) | Commit::Unknown(_) => self.owed.extend(owed),
        }
    }

    /// Tidies up in a transaction of its own, so that it cannot spoil anybody's call.
    fn sweep(&mut self, now: Timestamp) {
        if self.try_begin().is_err() {
            return;
        }
        let swept = self.sweeper.step(&mut self.ledger, now).and_then(|()| self.commit());
        if let Err(failure) = swept {
            tracing::warn!(%failure, "expired rows were not removed");
            self.roll_back();
        }
    }

    /// The last chance for what could not be done before.
    fn settle_up(&mut self) {
        if !self.owed.is_empty() {
            self.pending.append(&mut self.owed);
            if let Ok(true) = self.begin() {
                self.carry_out();
            }
        }
    }
}
