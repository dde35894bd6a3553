//! Time that passes only when nobody has anything to do.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::oneshot;
use zae_limiter_core::{Clock, Timestamp, Waiting};

use crate::given::NOW;

type Event = Box<dyn FnOnce() + Send>;

/// The true time of a simulation, and what will happen in it.
#[derive(Default)]
pub struct VirtualTime {
    // A std mutex: it is never held across an await, nor while an event happens.
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    now_us: u64,
    /// By their moments, and then in the order in which they were planned.
    events: BTreeMap<(u64, u64), Event>,
    planned: u64,
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

    /// What a clock without fault shows.
    pub fn now(&self) -> Timestamp {
        NOW.saturating_add_millis(self.now_us() / 1_000)
    }

    /// Has something happen later.
    pub(crate) fn after(&self, us: u64, event: impl FnOnce() + Send + 'static) {
        let mut state = self.lock();
        let at = (state.now_us + us, state.planned);
        state.planned += 1;
        state.events.insert(at, Box::new(event));
    }

    /// Moves to the next event and lets it happen. False when nothing will ever happen again.
    pub(crate) fn step(&self) -> bool {
        let event = {
            let mut state = self.lock();
            let Some(((at, _), event)) = state.events.pop_first() else { return false };
            state.now_us = at;
            event
        };
        event();
        true
    }

    /// Waits in true time.
    pub fn sleep(&self, wait: Duration) -> Waiting<'static> {
        let (wake, woken) = oneshot::channel();
        let us = u64::try_from(wait.as_micros()).unwrap_or(u64::MAX / 2);
        self.after(us, move || {
            // A sleeper that has gone away needs no waking.
            let _ = wake.send(());
        });
        Box::pin(async {
            let _ = woken.await;
        })
    }
}

/// A client's clock: off by a little, running too fast or too slow, and set anew now and then, but
/// never further from the truth than its bound.
#[derive(Debug)]
pub struct ClientClock {
    time: Arc<VirtualTime>,
    bound_us: i64,
    drift_ppm: i64,
    offset_us: Mutex<i64>,
}

impl ClientClock {
    /// A clock that is never more than `bound_us` off.
    pub fn new(time: Arc<VirtualTime>, bound_us: i64, offset_us: i64, drift_ppm: i64) -> Self {
        Self { time, bound_us, drift_ppm, offset_us: Mutex::new(offset_us) }
    }

    /// Sets it anew.
    pub fn set_offset(&self, offset_us: i64) {
        *self.offset_us.lock().unwrap_or_else(PoisonError::into_inner) = offset_us;
    }
}

impl Clock for ClientClock {
    fn now(&self) -> Timestamp {
        let true_us = i64::try_from(self.time.now_us()).unwrap_or(i64::MAX / 2);
        let drifted = true_us / 1_000 * self.drift_ppm / 1_000;
        let offset = *self.offset_us.lock().unwrap_or_else(PoisonError::into_inner);
        let error = (offset + drifted).clamp(-self.bound_us, self.bound_us);
        Timestamp::from_millis(NOW.as_millis() + (true_us + error).div_euclid(1_000))
    }

    fn sleep(&self, wait: Duration) -> Waiting<'_> {
        self.time.sleep(wait)
    }

    fn stopwatch(&self) -> Duration {
        Duration::from_micros(self.time.now_us())
    }
}
