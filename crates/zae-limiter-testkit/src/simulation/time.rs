//! Virtual time, which advances only while all tasks wait.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::oneshot;
use zae_limiter_core::{BoxFuture, Clock, Timestamp};

use crate::given::NOW;

type Event = Box<dyn FnOnce() + Send>;

/// The true time of a simulation, and its future events.
#[derive(Default)]
pub struct VirtualTime {
    // A std mutex: it is never held across an await, nor while an event runs.
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    now_us: u64,
    /// Sorted by time, and then by the order in which they were scheduled.
    events: BTreeMap<(u64, u64), Event>,
    planned: u64,
    /// The number of events that have run.
    steps: u64,
}

impl fmt::Debug for VirtualTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VirtualTime").field("now_us", &self.now_us()).finish_non_exhaustive()
    }
}

impl VirtualTime {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Microseconds since the start.
    pub fn now_us(&self) -> u64 {
        self.lock().now_us
    }

    /// The time that a correct clock shows.
    pub fn now(&self) -> Timestamp {
        NOW.saturating_add_millis(self.now_us() / 1_000)
    }

    /// Schedules an event.
    pub(crate) fn after(&self, us: u64, event: impl FnOnce() + Send + 'static) {
        let mut state = self.lock();
        let at = (state.now_us + us, state.planned);
        state.planned += 1;
        state.events.insert(at, Box::new(event));
    }

    /// Advances to the next event and runs it. Returns false if there is none.
    pub(crate) fn step(&self) -> bool {
        let event = {
            let mut state = self.lock();
            let Some(((at, _), event)) = state.events.pop_first() else { return false };
            state.now_us = at;
            state.steps += 1;
            event
        };
        event();
        true
    }

    /// The number of events that have run.
    pub(crate) fn steps(&self) -> u64 {
        self.lock().steps
    }

    /// Waits in virtual time.
    pub fn sleep(&self, wait: Duration) -> BoxFuture<'static, ()> {
        let (wake, woken) = oneshot::channel();
        let us = u64::try_from(wait.as_micros()).unwrap_or(u64::MAX / 2);
        self.after(us, move || {
            // The sleeper may have been dropped.
            let _ = wake.send(());
        });
        Box::pin(async {
            let _ = woken.await;
        })
    }
}

/// A client's clock. It has an offset and a drift, but is never further from the true time than its
/// bound, unless it jumps.
#[derive(Debug)]
pub struct ClientClock {
    time: Arc<VirtualTime>,
    bound_us: i64,
    error: Mutex<ClockError>,
}

#[derive(Clone, Copy, Debug)]
struct ClockError {
    offset_us: i64,
    drift_ppm: i64,
    /// How far it has jumped, beyond the bound.
    jump_us: i64,
}

impl ClientClock {
    /// A clock that is off by at most `bound_us`.
    pub fn new(time: Arc<VirtualTime>, bound_us: i64, offset_us: i64, drift_ppm: i64) -> Self {
        let error = ClockError { offset_us, drift_ppm, jump_us: 0 };
        Self { time, bound_us, error: Mutex::new(error) }
    }

    fn lock(&self) -> MutexGuard<'_, ClockError> {
        self.error.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the offset.
    pub fn set_offset(&self, offset_us: i64) {
        self.lock().offset_us = offset_us;
    }

    /// Adds an error beyond the bound, until the next call. 0 removes it.
    pub fn jump(&self, us: i64) {
        self.lock().jump_us = us;
    }

    /// Makes the clock correct from now on.
    pub fn correct(&self) {
        *self.lock() = ClockError { offset_us: 0, drift_ppm: 0, jump_us: 0 };
    }
}

impl Clock for ClientClock {
    fn now(&self) -> Timestamp {
        let true_us = i64::try_from(self.time.now_us()).unwrap_or(i64::MAX / 2);
        let ClockError { offset_us, drift_ppm, jump_us } = *self.lock();
        let drifted = true_us / 1_000 * drift_ppm / 1_000;
        let error = (offset_us + drifted).clamp(-self.bound_us, self.bound_us) + jump_us;
        Timestamp::from_millis(NOW.as_millis() + (true_us + error).div_euclid(1_000))
    }

    fn sleep(&self, wait: Duration) -> BoxFuture<'_, ()> {
        self.time.sleep(wait)
    }

    fn stopwatch(&self) -> Duration {
        Duration::from_micros(self.time.now_us())
    }
}
