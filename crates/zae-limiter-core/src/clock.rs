//! The clock, as a parameter.
//!
//! The limiter reads the clock once at the start of each call; everything below is a function of that
//! moment. Nothing else in the workspace may read or wait for real time (`clippy.toml`).

use futures_core::future::BoxFuture;
use std::cell::Cell;
use std::fmt;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use tokio::runtime::Handle;
use tokio::sync::oneshot;
use zae_limiter_model::Timestamp;

use crate::background;

/// The time source of a limiter.
pub trait Clock: fmt::Debug + Send + Sync + 'static {
    /// The current time.
    fn now(&self) -> Timestamp;

    /// Completes when `wait` has passed.
    fn sleep(&self, wait: Duration) -> BoxFuture<'_, ()>;

    /// A monotonic reading for measuring durations: setting the time of day does not change it. The default
    /// derives it from [`now`](Self::now), which is right for clocks that are never set.
    fn stopwatch(&self) -> Duration {
        Duration::from_millis(self.now().as_millis().max(0).unsigned_abs())
    }
}

/// The machine's clock. Inside a tokio runtime it waits with that runtime's timer, which must be enabled;
/// elsewhere with the limiter's own thread.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    #[inline]
    fn now(&self) -> Timestamp {
        Timestamp::from_millis(i64::try_from(unix_nanos() / 1_000_000).unwrap_or(i64::MAX))
    }

    #[expect(clippy::disallowed_methods, reason = "this is the injected clock")]
    fn sleep(&self, wait: Duration) -> BoxFuture<'_, ()> {
        if Handle::try_current().is_ok() {
            return Box::pin(tokio::time::sleep(wait));
        }
        Box::pin(async move {
            let timer = background::runtime().spawn(async move { tokio::time::sleep(wait).await });
            // It cannot fail: a sleep does not panic, and is never cancelled.
            let _ = timer.await;
        })
    }

    #[expect(clippy::disallowed_methods, reason = "this is the injected clock")]
    fn stopwatch(&self) -> Duration {
        static START: LazyLock<Instant> = LazyLock::new(Instant::now);
        START.elapsed()
    }
}

/// 100 µs: how long a reading of the time of day is continued with the processor's counter, which costs half as much to
/// read. A time of day that is set, or a machine that was suspended, is noticed this much later.
const CONTINUED_FOR_NS: u64 = 100_000;

/// 5 µs: a reading of the time of day that took longer was interrupted, and is not continued.
const READ_WITHIN_NS: u64 = 5_000;

/// A reading of the time of day, in nanoseconds since 1970, and of the processor's counter right before it.
#[derive(Clone, Copy)]
struct Reading {
    counter: u64,
    nanos: u64,
}

thread_local! {
    static LAST: Cell<Option<Reading>> = const { Cell::new(None) };
}

/// The processor's counter, or the monotonic clock where that cannot be used.
static COUNTER: LazyLock<quanta::Clock> = LazyLock::new(quanta::Clock::new);

/// The time of day, in nanoseconds since 1970.
#[inline]
fn unix_nanos() -> u64 {
    let counter = COUNTER.raw();
    LAST.with(|last| {
        // A counter that ran back is another processor's.
        if let Some(reading) = last.get()
            && counter >= reading.counter
        {
            let passed = COUNTER.delta_as_nanos(reading.counter, counter);
            if passed < CONTINUED_FOR_NS {
                return reading.nanos + passed;
            }
        }
        read_time_of_day(counter, last)
    })
}

#[cold]
#[expect(clippy::disallowed_methods, reason = "this is the injected clock")]
fn read_time_of_day(counter: u64, last: &Cell<Option<Reading>>) -> u64 {
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    // It fits until the year 2554.
    let nanos = u64::try_from(since_epoch.as_nanos()).unwrap_or(u64::MAX / 2);
    let is_precise = COUNTER.delta_as_nanos(counter, COUNTER.raw()) < READ_WITHIN_NS;
    last.set(is_precise.then_some(Reading { counter, nanos }));
    nanos
}

/// A clock that only moves when a test moves it.
///
/// ```
/// # use std::time::Duration;
/// # use zae_limiter_core::{Clock, ManualClock, Timestamp};
/// let clock = ManualClock::new(Timestamp::from_millis(1_000));
/// clock.advance(Duration::from_millis(5));
/// assert_eq!(clock.now(), Timestamp::from_millis(1_005));
/// ```
#[derive(Debug, Default)]
pub struct ManualClock {
    // A std mutex: it is never held across an await.
    state: Mutex<ManualState>,
}

#[derive(Debug, Default)]
struct ManualState {
    now: Timestamp,
    /// The time that has passed since the clock was created.
    stopwatch: Duration,
    /// The sleeping callers, each with the stopwatch reading at which it wakes.
    sleepers: Vec<(Duration, oneshot::Sender<()>)>,
}

impl ManualClock {
    /// A clock that stands at `now`.
    pub fn new(now: Timestamp) -> Self {
        Self { state: Mutex::new(ManualState { now, ..ManualState::default() }) }
    }

    /// Moves the clock forward and wakes the callers whose wait is over.
    pub fn advance(&self, by: Duration) {
        let now = self.now().saturating_add(by);
        self.set(now);
    }

    /// Sets the clock to `now`. Forward, the time between passes; backward, no time passes.
    pub fn set(&self, now: Timestamp) {
        let mut state = self.lock();
        let passed = Duration::from_millis(now.millis_since(state.now));
        let stopwatch = state.stopwatch.saturating_add(passed);
        (state.now, state.stopwatch) = (now, stopwatch);
        let (due, sleepers) = state.sleepers.drain(..).partition(|(until, _)| *until <= stopwatch);
        state.sleepers = sleepers;
        drop(state);
        let due: Vec<(Duration, oneshot::Sender<()>)> = due;
        for (_, sleeper) in due {
            // The sleeper may have been dropped.
            let _ = sleeper.send(());
        }
    }

    /// Corrects the time of day, forward or back, without any time passing: the stopwatch stands, and no
    /// caller wakes.
    pub fn correct(&self, now: Timestamp) {
        self.lock().now = now;
    }

    fn lock(&self) -> MutexGuard<'_, ManualState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many callers sleep on this clock.
    pub fn sleepers(&self) -> usize {
        let mut state = self.lock();
        state.sleepers.retain(|(_, sleeper)| !sleeper.is_closed());
        state.sleepers.len()
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Timestamp {
        self.lock().now
    }

    fn sleep(&self, wait: Duration) -> BoxFuture<'_, ()> {
        if wait.is_zero() {
            return Box::pin(std::future::ready(()));
        }
        let mut state = self.lock();
        let until = state.stopwatch.saturating_add(wait);
        let (wake, woken) = oneshot::channel();
        state.sleepers.push((until, wake));
        Box::pin(async {
            // Dropping the clock wakes all sleepers.
            let _ = woken.await;
        })
    }

    fn stopwatch(&self) -> Duration {
        self.lock().stopwatch
    }
}
