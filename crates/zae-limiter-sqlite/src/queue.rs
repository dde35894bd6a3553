//! The queue between callers and a thread of the store.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The most jobs in a queue. Further calls fail with `Unavailable`.
pub(crate) const QUEUED_MAX: usize = 65_536;

/// Why the queue does not accept a job.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Closed {
    /// The thread has ended.
    Ended,
    /// The queue is full.
    Full,
}

/// A first-in, first-out queue with many producers and one consumer.
#[derive(Debug)]
pub(crate) struct Queue<T> {
    // A std mutex: it is never held across an await, nor while a job runs.
    state: Mutex<State<T>>,
    ready: Condvar,
}

#[derive(Debug)]
struct State<T> {
    queued: VecDeque<T>,
    // Nothing more is accepted. The consumer still takes what is queued.
    is_closed: bool,
    // Whether the consumer has work that is not in the queue.
    is_woken: bool,
    // Whether the consumer waits. If not, `put` saves the system call that wakes it.
    sleeps: bool,
}

impl<T> Queue<T> {
    pub(crate) fn new() -> Self {
        let queued = VecDeque::new();
        let state = State { queued, is_closed: false, is_woken: false, sleeps: false };
        Self { state: Mutex::new(state), ready: Condvar::new() }
    }

    fn state(&self) -> MutexGuard<'_, State<T>> {
        // Nothing in here can panic halfway, so a poisoned lock guards a sound state.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Appends a job, unless the queue is full.
    pub(crate) fn put(&self, job: T) -> Result<(), Closed> {
        self.put_within(job, QUEUED_MAX)
    }

    /// Appends a job even to a full queue: for jobs that must not be lost.
    pub(crate) fn put_always(&self, job: T) -> Result<(), Closed> {
        self.put_within(job, usize::MAX)
    }

    fn put_within(&self, job: T, queued_max: usize) -> Result<(), Closed> {
        let mut state = self.state();
        if state.is_closed {
            return Err(Closed::Ended);
        }
        if state.queued.len() >= queued_max {
            return Err(Closed::Full);
        }
        state.queued.push_back(job);
        let wake = std::mem::take(&mut state.sleeps);
        drop(state);
        if wake {
            self.ready.notify_one();
        }
        Ok(())
    }

    /// Moves all queued jobs to the end of `into`, and returns their number.
    pub(crate) fn take(&self, into: &mut VecDeque<T>) -> usize {
        let mut state = self.state();
        let taken = state.queued.len();
        if into.is_empty() {
            std::mem::swap(into, &mut state.queued);
        } else {
            into.append(&mut state.queued);
        }
        taken
    }

    /// Wakes the consumer for work that is not in the queue.
    pub(crate) fn wake(&self) {
        let mut state = self.state();
        state.is_woken = true;
        let wake = std::mem::take(&mut state.sleeps);
        drop(state);
        if wake {
            self.ready.notify_one();
        }
    }

    /// Whether the queue is open and no job waits.
    pub(crate) fn is_idle(&self) -> bool {
        let state = self.state();
        state.queued.is_empty() && !state.is_closed
    }

    /// Waits for a job, or for [`wake`](Self::wake). Returns `false` if the queue is closed and empty.
    pub(crate) fn wait(&self) -> bool {
        self.wait_at_most(None)
    }

    /// The same, but after this time it returns `true` also without a job.
    pub(crate) fn wait_at_most(&self, time: Option<Duration>) -> bool {
        let mut state = self.state();
        while state.queued.is_empty() && !std::mem::take(&mut state.is_woken) {
            if state.is_closed {
                return false;
            }
            state.sleeps = true;
            let Some(time) = time else {
                state = self.ready.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let waited = self.ready.wait_timeout(state, time);
            let (woken, waited) = waited.unwrap_or_else(PoisonError::into_inner);
            state = woken;
            if waited.timed_out() {
                break;
            }
        }
        state.sleeps = false;
        true
    }

    /// Closes the queue for new jobs, and wakes the consumer so that it can finish.
    pub(crate) fn close(&self) {
        self.state().is_closed = true;
        self.ready.notify_all();
    }

    /// Closes the queue and drops its jobs: a caller must not wait for a consumer that has ended.
    pub(crate) fn end(&self) {
        self.close();
        let mut rest = VecDeque::new();
        self.take(&mut rest);
    }

    /// Whether the queue is closed for new jobs.
    pub(crate) fn is_closed(&self) -> bool {
        self.state().is_closed
    }
}

/// [Ends](Queue::end) the queue when the consumer ends, even by a panic.
#[derive(Debug)]
pub(crate) struct EndOfThread<'a, T>(pub(crate) &'a Queue<T>);

impl<T> Drop for EndOfThread<'_, T> {
    fn drop(&mut self) {
        self.0.end();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_closed_queue_keeps_its_jobs_and_accepts_no_more() {
        let queue = Queue::new();
        assert_eq!(queue.put(1), Ok(()));
        assert_eq!(queue.put_always(2), Ok(()));
        queue.close();
        assert_eq!(queue.put(3), Err(Closed::Ended));
        assert!(queue.wait());
        let mut taken = VecDeque::from([0]);
        assert_eq!(queue.take(&mut taken), 2);
        assert_eq!(taken, [0, 1, 2]);
        assert!(!queue.wait());
    }

    #[test]
    fn a_consumer_is_woken_once_for_work_that_is_not_in_the_queue() {
        let queue = Queue::<u8>::new();
        queue.wake();
        queue.wake();
        assert!(queue.wait());
        queue.close();
        assert!(!queue.wait());
    }

    #[test]
    fn a_consumer_can_wait_for_a_limited_time() {
        let queue = Queue::<u8>::new();
        assert!(queue.wait_at_most(Some(Duration::ZERO)));
        queue.close();
        assert!(!queue.wait_at_most(Some(Duration::ZERO)));
    }

    #[test]
    fn a_full_queue_accepts_only_jobs_that_must_not_be_lost() {
        let queue = Queue::new();
        for n in 0..QUEUED_MAX {
            assert_eq!(queue.put(n), Ok(()));
        }
        assert_eq!(queue.put(0), Err(Closed::Full));
        assert_eq!(queue.put_always(0), Ok(()));
    }
}
