//! Checks each reading of the clock: against the store's own time if it has one, and otherwise against the time that
//! has passed in this process.
//!
//! A reading beyond the bound is corrected. Without that, one call from a clock that is a year ahead would move the
//! refill time of its bucket by a year, and nobody would earn tokens until then.

use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use zae_limiter_model::Timestamp;

use crate::clock::Clock;
use crate::store::{Store, TimeCheck};
use crate::telemetry;

/// Two minutes: the default bound. Clocks that are synchronised differ by milliseconds; a virtual machine that was
/// suspended for a moment, or a leap second, is far below.
pub const MAX_CLOCK_SKEW: Duration = Duration::from_secs(120);

/// Five minutes: how long a clock that has jumped must keep its new time before the process believes it. A clock that
/// was set right, or a machine that was suspended, keeps it for good.
pub(crate) const BELIEVED_AFTER: Duration = Duration::from_secs(300);

/// Ten minutes: the time between two warnings.
pub(crate) const WARNING_EVERY: Duration = Duration::from_secs(600);

/// One second: the most that [`ClockCheck::near_ms`] can be.
const NEAR_MS_MAX: i64 = 1_000;

/// One second: a clock that was set back by more makes what was cached look younger than it is.
const BACK_MAX_MS: i64 = 1_000;

/// No reading was checked yet, or the last one was beyond the bound.
const NONE: i64 = i64::MIN;

/// A checked reading of the clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Checked {
    pub(crate) now: Timestamp,
    /// See [`Plan::max_skew`](crate::Plan::max_skew).
    pub(crate) max_skew: Option<Duration>,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct ClockCheck {
    /// Zero switches the check against the process off.
    bound: Duration,
    /// What [`Checked::max_skew`] is for a clock that is right.
    max_skew: Option<Duration>,
    /// Readings this close to one that was checked need no check of their own, in milliseconds.
    near_ms: u64,
    /// The last reading within the bound, in milliseconds, or [`NONE`]. Most calls read only this.
    checked: AtomicI64,
    // A std mutex: it is never held across an await.
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// The time of day at the stopwatch's zero, in milliseconds, by the last reading that was believed.
    origin: Option<i64>,
    /// The origin by the readings since a jump, and the stopwatch at the first of them.
    jump: Option<(i64, Duration)>,
    warned_at: Option<Duration>,
    /// The clock has jumped, or was set back, and nobody has forgotten what was cached before.
    has_new_time: bool,
}

fn millis(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)
}

impl State {
    /// Goes on from this time of day at the stopwatch's zero.
    fn believe(&mut self, origin: i64) {
        let is_back = |before: i64| origin < before.saturating_sub(BACK_MAX_MS);
        self.has_new_time |= self.jump.is_some() || self.origin.is_some_and(is_back);
        (self.origin, self.jump) = (Some(origin), None);
    }

    /// The time to use for a reading of the clock, or `None` if the reading is within the bound.
    fn correction(&mut self, now: i64, stopwatch: Duration, bound: Duration) -> Option<i64> {
        let bound = u64::try_from(bound.as_millis()).unwrap_or(u64::MAX);
        let read = now.saturating_sub(millis(stopwatch));
        let origin = self.origin.unwrap_or(read);
        if origin.abs_diff(read) <= bound {
            // Follows a clock that is corrected in small steps.
            self.believe(read);
            return None;
        }
        let since = match self.jump {
            Some((jumped, since)) if jumped.abs_diff(read) <= bound => since,
            _ => stopwatch,
        };
        if stopwatch.saturating_sub(since) >= BELIEVED_AFTER {
            self.believe(read);
            tracing::info!("the clock kept its new time for five minutes; it is used from now on");
            return None;
        }
        // The machine may have slept: then what was cached is older than it looks.
        self.has_new_time |= self.jump.is_none();
        self.jump = Some((read, since));
        Some(origin.saturating_add(millis(stopwatch)))
    }

    /// Whether a warning is due.
    fn warns(&mut self, stopwatch: Duration) -> bool {
        let is_due = |at: Duration| stopwatch.saturating_sub(at) >= WARNING_EVERY;
        let warns = self.warned_at.is_none_or(is_due);
        if warns {
            self.warned_at = Some(stopwatch);
        }
        warns
    }
}

impl ClockCheck {
    pub(crate) fn new(bound: Duration) -> Self {
        let checked = AtomicI64::new(NONE);
        let near_ms = NEAR_MS_MAX.min(millis(bound) / 2).unsigned_abs();
        let max_skew = (!bound.is_zero()).then_some(bound);
        Self { bound, max_skew, near_ms, checked, state: Mutex::default() }
    }

    /// Reads the clock. Calls `forget` once after the clock has jumped, or was set back: the age of what was cached
    /// before is not known then.
    #[inline]
    pub(crate) fn now(
        &self,
        clock: &dyn Clock,
        store: &dyn Store,
        forget: Option<impl FnOnce()>,
    ) -> Checked {
        let now = clock.now();
        match store.check_time(now) {
            TimeCheck::Unknown => self.within_process(now, clock, forget),
            TimeCheck::Within => self.by_store(now, now, clock, forget),
            TimeCheck::Beyond(time) => self.by_store(now, time, clock, forget),
        }
    }

    #[inline]
    fn within_process(
        &self,
        now: Timestamp,
        clock: &dyn Clock,
        forget: Option<impl FnOnce()>,
    ) -> Checked {
        if self.needs_no_check(now) {
            return Checked { now, max_skew: self.max_skew };
        }
        self.by_stopwatch(now, clock, forget)
    }

    /// Whether a reading differs from the checked one by less than the bound: then the clock has not jumped.
    #[inline]
    fn needs_no_check(&self, now: Timestamp) -> bool {
        let checked = self.checked.load(Ordering::Relaxed);
        let is_near = checked != NONE && now.as_millis().abs_diff(checked) < self.near_ms;
        is_near || self.bound.is_zero()
    }

    #[cold]
    fn by_stopwatch(
        &self,
        now: Timestamp,
        clock: &dyn Clock,
        forget: Option<impl FnOnce()>,
    ) -> Checked {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let correction = state.correction(now.as_millis(), clock.stopwatch(), self.bound);
        let is_remembered = forget_before(state, forget);
        match correction {
            None => {
                self.note_checked(now, is_remembered);
                Checked { now, max_skew: self.max_skew }
            }
            Some(time) => {
                self.checked.store(NONE, Ordering::Relaxed);
                let time = Timestamp::from_millis(time);
                self.report(now, time, clock);
                // This process cannot tell which of the two is right, so it rewinds nothing by its own.
                Checked { now: time, max_skew: None }
            }
        }
    }

    /// The store has confirmed the reading, or says the right time. It is remembered: later the store may not
    /// [know](TimeCheck::Unknown). Out of line: stores without a time of their own have the shortest calls.
    #[cold]
    fn by_store(
        &self,
        now: Timestamp,
        time: Timestamp,
        clock: &dyn Clock,
        forget: Option<impl FnOnce()>,
    ) -> Checked {
        let is_right = now == time;
        if !is_right || !self.needs_no_check(now) {
            let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            state.believe(time.as_millis().saturating_sub(millis(clock.stopwatch())));
            let is_remembered = forget_before(state, forget);
            self.note_checked(now, is_remembered || !is_right);
        }
        if !is_right {
            self.report(now, time, clock);
        }
        Checked { now: time, max_skew: self.max_skew }
    }

    /// Until somebody forgets, every call is checked.
    fn note_checked(&self, now: Timestamp, is_remembered: bool) {
        let checked = if is_remembered { NONE } else { now.as_millis() };
        self.checked.store(checked, Ordering::Relaxed);
    }

    #[cold]
    fn report(&self, now: Timestamp, time: Timestamp, clock: &dyn Clock) {
        telemetry::clock_corrected();
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.warns(clock.stopwatch()) {
            let ahead_ms = now.as_millis().saturating_sub(time.as_millis());
            tracing::warn!(
                ahead_ms,
                "this machine's clock is wrong; calls use the corrected time. Synchronise the clock"
            );
        }
    }
}

/// Calls `forget` if the clock has jumped or was set back. Returns whether somebody else has to.
fn forget_before(mut state: MutexGuard<'_, State>, forget: Option<impl FnOnce()>) -> bool {
    if state.has_new_time
        && let Some(forget) = forget
    {
        state.has_new_time = false;
        forget();
    }
    state.has_new_time
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::clock::ManualClock;
    use crate::memory::MemoryStore;

    const HOUR: i64 = 3_600_000;
    const YEAR: i64 = 365 * 24 * HOUR;

    fn read(check: &ClockCheck, clock: &Arc<ManualClock>) -> Checked {
        check.now(&**clock, &MemoryStore::new(), Some(|| {}))
    }

    fn at(millis: i64) -> Timestamp {
        Timestamp::from_millis(millis)
    }

    #[test]
    fn a_reading_within_the_bound_is_used_as_it_is() {
        let clock = Arc::new(ManualClock::new(at(YEAR)));
        let check = ClockCheck::new(MAX_CLOCK_SKEW);
        for step in [0, 1, 500, 999, 1_000, 119_999, 120_000, -120_000, -1, -1_000] {
            clock.correct(at(clock.now().as_millis() + step));
            let expected = Checked { now: clock.now(), max_skew: Some(MAX_CLOCK_SKEW) };
            assert_eq!(read(&check, &clock), expected, "{step}");
            clock.advance(Duration::from_secs(100_000));
            assert_eq!(read(&check, &clock).now, clock.now());
        }
    }

    #[test]
    fn a_clock_that_jumps_is_corrected_until_it_returns() {
        for jump in [120_001, -120_001, HOUR, -HOUR, YEAR, -YEAR, i64::MAX / 2, i64::MIN / 2] {
            let clock = Arc::new(ManualClock::new(at(YEAR)));
            let check = ClockCheck::new(MAX_CLOCK_SKEW);
            read(&check, &clock);
            clock.correct(at(YEAR + jump));
            for passed in [0_i64, 1, 60_000, 299_998] {
                let before = clock.stopwatch();
                clock.advance(Duration::from_millis(passed.unsigned_abs()) - before);
                let expected = Checked { now: at(YEAR + passed), max_skew: None };
                assert_eq!(read(&check, &clock), expected, "{jump} {passed}");
            }
            clock.correct(at(YEAR + 299_998));
            assert_eq!(read(&check, &clock).max_skew, Some(MAX_CLOCK_SKEW), "{jump}");
        }
    }

    #[test]
    fn a_clock_that_keeps_its_new_time_for_five_minutes_is_believed() {
        for jump in [HOUR, -HOUR] {
            let clock = Arc::new(ManualClock::new(at(YEAR)));
            let check = ClockCheck::new(MAX_CLOCK_SKEW);
            read(&check, &clock);
            clock.correct(at(YEAR + jump));
            assert_eq!(read(&check, &clock).now, at(YEAR));
            clock.advance(BELIEVED_AFTER - Duration::from_millis(1));
            assert_eq!(read(&check, &clock).now, at(YEAR + 299_999));
            // Another jump starts the five minutes again.
            clock.correct(at(YEAR + 3 * jump));
            clock.advance(Duration::from_millis(1));
            assert_eq!(read(&check, &clock).now, at(YEAR + 300_000));
            clock.advance(BELIEVED_AFTER);
            let expected = Checked { now: clock.now(), max_skew: Some(MAX_CLOCK_SKEW) };
            assert_eq!(read(&check, &clock), expected);
        }
    }

    #[test]
    fn the_check_can_be_switched_off() {
        let clock = Arc::new(ManualClock::new(at(YEAR)));
        let check = ClockCheck::new(Duration::ZERO);
        for now in [YEAR, 0, 2 * YEAR] {
            clock.correct(at(now));
            assert_eq!(read(&check, &clock), Checked { now: at(now), max_skew: None });
        }
    }

    #[test]
    fn there_is_one_warning_in_ten_minutes() {
        let mut state = State::default();
        let at = Duration::from_secs;
        let warned = [0, 1, 599, 600, 601, 1_199, 1_200].map(|second| state.warns(at(second)));
        assert_eq!(warned, [true, false, false, true, false, false, true]);
    }
}
