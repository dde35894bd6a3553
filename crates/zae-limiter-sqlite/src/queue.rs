//! The queue between callers and a thread of the store.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// The most jobs that wait. More callers than this at once are told that the store is unavailable.
pub(crate) const WAITING_MAX: usize = 65_536;

/// Why a job was not taken.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Closed {
    /// The thread has ended.
    Ended,
    /// Too many jobs wait.
    Full,
}

/// First in, first out; many put, one takes.
#[derive(Debug)]
pub(crate) struct Queue<T> {
    // A std mutex: it is never held across an await, nor while anything is done.
    state: Mutex<State<T>>,
    ready: Condvar,
}

#[derive(Debug)]
struct State<T> {
    waiting: VecDeque<T>,
    // Set when the last handle goes: what waits is still taken.
    is_closed: bool,
    // So that a put without a sleeper costs no system call.
    sleeps: bool,
}

impl<T> Queue<T> {
    pub(crate) fn new() -> Self {
        let state = State { waiting: VecDeque::new(), is_closed: false, sleeps: false };
        Self { state: Mutex::new(state), ready: Condvar::new() }
    }

    fn state(&self) -> MutexGuard<'_, State<T>> {
        // Nothing in here can panic halfway, so a poisoned lock guards a sound state.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts a job at the end, unless too many wait.
    pub(crate) fn put(&self, job: T) -> Result<(), Closed> {
        self.put_within(job, WAITING_MAX)
    }

    /// Puts a job at the end however many wait: for what must not be lost.
    pub(crate) fn put_always(&self, job: T) -> Result<(), Closed> {
        self.put_within(job, usize::MAX)
    }

    fn put_within(&self, job: T, waiting_max: usize) -> Result<(), Closed> {
        let mut state = self.state();
        if state.is_closed {
            return Err(Closed::Ended);
        }
        if state.waiting.len() >= waiting_max {
            return Err(Closed::Full);
        }
        state.waiting.push_back(job);
        let wake = std::mem::take(&mut state.sleeps);
        drop(state);
        if wake {
            self.ready.notify_one();
        }
        Ok(())
    }

    /// Moves what waits to the end of `into`, and says how much it was.
    pub(crate) fn take(&self, into: &mut VecDeque<T>) -> usize {
        let mut state = self.state();
        let taken = state.waiting.len();
        if into.is_empty() {
            std::mem::swap(into, &mut state.waiting);
        } else {
            into.append(&mut state.waiting);
        }
        taken
    }

    /// Waits until there is something to take. `false` when there never will be.
    pub(crate) fn wait(&self) -> bool {
        let mut state = self.state();
        while state.waiting.is_empty() {
            if state.is_closed {
                return false;
            }
            state.sleeps = true;
            state = self.ready.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.sleeps = false;
        true
    }

    /// Lets nothing more in, and wakes the thread so that it can finish.
    pub(crate) fn close(&self) {
        self.state().is_closed = true;
        self.ready.notify_all();
    }

    /// Whether nothing more comes in.
    pub(crate) fn is_closed(&self) -> bool {
        self.state().is_closed
    }
}

/// Closes the queue and drops what waits when its thread ends, however it ends: a caller must not
/// wait for a thread that has panicked.
#[derive(Debug)]
pub(crate) struct EndOfThread<'a, T>(pub(crate) &'a Queue<T>);

impl<T> Drop for EndOfThread<'_, T> {
    fn drop(&mut self) {
        self.0.close();
        let mut rest = VecDeque::new();
        self.0.take(&mut rest);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_put_before_the_end_is_taken_and_no_more() {
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
    fn a_full_queue_takes_only_what_must_not_be_lost() {
        let queue = Queue::new();
        for n in 0..WAITING_MAX {
            assert_eq!(queue.put(n), Ok(()));
        }
        assert_eq!(queue.put(0), Err(Closed::Full));
        assert_eq!(queue.put_always(0), Ok(()));
    }
}
