//! The lock around the writer, which lets a caller do its own transaction.
//!
//! The writer's thread holds the lock while it carries out jobs. While no job waits, a caller takes the lock, does one
//! transaction on its own thread, and has its reply without waking another thread. A caller never waits for the lock, for
//! another process or for a disk flush (but see `docs/choosing-a-store.md`): if it cannot begin at once, or if anything
//! fails, it leaves the file as it was, and its call becomes a job for the thread.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use zae_limiter_core::{StoreError, Timestamp};

use crate::CommitOn;
use crate::error::Failure;
use crate::job::{Commit, Job};
use crate::ledger::Ledger;
use crate::queue::Queue;
use crate::writer::Writer;

/// The writer, shared by its thread and callers.
#[derive(Debug)]
pub(crate) struct WriterLock {
    /// `None` once the thread has ended. A std mutex: it is never held across an await.
    writer: Mutex<Option<Writer>>,
    queue: Arc<Queue<Job>>,
    file: PathBuf,
    commit_on: CommitOn,
}

impl WriterLock {
    pub(crate) fn new(
        writer: Writer,
        queue: Arc<Queue<Job>>,
        file: PathBuf,
        commit_on: CommitOn,
    ) -> Self {
        Self { writer: Mutex::new(Some(writer)), queue, file, commit_on }
    }

    /// The transaction of one caller, on this thread. `None` if the thread has to do it: then nothing has changed.
    ///
    /// `now` is the moment of an acquire.
    pub(crate) fn try_now<T>(
        &self,
        now: Option<Timestamp>,
        work: impl FnOnce(&mut Ledger) -> Result<T, Failure>,
    ) -> Option<Result<T, StoreError>> {
        // The lock is poisoned if the thread has panicked.
        let mut held = match self.commit_on {
            CommitOn::Caller => self.writer.try_lock().ok()?,
            CommitOn::Thread => return None,
        };
        let writer = held.as_mut()?;
        // First come, first served.
        if !self.queue.is_idle() || !writer.is_free() {
            return None;
        }
        let done = match catch_unwind(AssertUnwindSafe(|| writer.transact_now(now, work))) {
            Ok(done) => done,
            Err(panic) => {
                // The store goes on without this call.
                writer.roll_back();
                drop(held);
                resume_unwind(panic)
            }
        };
        let has_upkeep = writer.has_upkeep();
        drop(held);
        if has_upkeep {
            self.queue.wake();
        }
        done
    }

    fn lock(&self) -> MutexGuard<'_, Option<Writer>> {
        self.writer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The thread: carries out jobs until the queue is closed and empty.
    pub(crate) fn run(&self) {
        let _end = EndOfWriter(self);
        let mut pause = None;
        while self.queue.wait_at_most(pause) {
            let worked = self.lock().as_mut().map(|writer| (writer.work(), writer.retry_pause()));
            // The lock is free again.
            let (last, until_retry) = worked.unwrap_or_default();
            pause = until_retry;
            let left = last.and_then(|job| job.reply(Commit::Done, &self.file));
            let Some(left) = left else { continue };
            if let Some(writer) = &mut *self.lock() {
                writer.put_back(left);
            }
            self.queue.wake();
        }
        if let Some(writer) = &mut *self.lock() {
            writer.retry_at_end();
        }
    }

    /// Holds the lock meanwhile.
    #[cfg(test)]
    pub(crate) fn with<T>(&self, work: impl FnOnce(&mut Writer) -> T) -> T {
        work(self.lock().as_mut().expect("the thread runs"))
    }
}

/// Closes the queue, drops its jobs and closes the file when the thread ends, even by a panic.
struct EndOfWriter<'a>(&'a WriterLock);

impl Drop for EndOfWriter<'_> {
    fn drop(&mut self) {
        self.0.queue.end();
        let writer = self.0.lock().take();
        writer.into_iter().for_each(Writer::close);
    }
}
