//! The circuit breaker: while the store is unavailable, calls fail at once instead of waiting for their
//! deadlines.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// When the circuit breaker opens, and how often it then probes the store.
///
/// It opens when the store does not answer. An error that concerns one bucket
/// ([`Busy`](crate::StoreErrorKind::Busy)) never counts. A call that runs into its deadline counts only if
/// a probe, with the limiter's whole deadline, gets no answer either.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BreakerSettings {
    /// The number of failures in a row after which it opens (5); 0 switches it off.
    pub failures: u32,
    /// The time from a failure to the next probe (1 s).
    pub cooldown: Duration,
}

impl Default for BreakerSettings {
    fn default() -> Self {
        Self { failures: 5, cooldown: Duration::from_secs(1) }
    }
}

/// What a call may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Gate {
    /// Call the store.
    Closed,
    /// Fail: the store has failed too often.
    Open,
    /// Fail, and start a probe.
    OpenAndProbe,
}

/// Times are readings of [`Clock::stopwatch`](crate::Clock::stopwatch): setting the clock neither opens
/// the breaker nor keeps it open.
///
/// The atomics are independent: a call that reads a stale value calls the store once more or once less,
/// which is harmless.
#[derive(Debug)]
pub(crate) struct Breaker {
    settings: BreakerSettings,
    /// Failures in a row.
    failures: AtomicU32,
    /// Calls that ran into their deadlines since the store last answered. The cause is the store or a
    /// short deadline; a probe finds out.
    suspicions: AtomicU32,
    /// The stopwatch's reading at the last failure, in milliseconds.
    failed_at: AtomicU64,
    /// Whether a probe is under way.
    probing: AtomicBool,
}

impl Breaker {
    pub(crate) fn new(settings: BreakerSettings) -> Self {
        Self {
            settings,
            failures: AtomicU32::new(0),
            suspicions: AtomicU32::new(0),
            failed_at: AtomicU64::new(0),
            probing: AtomicBool::new(false),
        }
    }

    pub(crate) fn gate(&self, now: Duration) -> Gate {
        let failures = self.failures.load(Ordering::Relaxed);
        if self.settings.failures == 0 || failures < self.settings.failures {
            return Gate::Closed;
        }
        let failed_at = Duration::from_millis(self.failed_at.load(Ordering::Relaxed));
        if now >= failed_at.saturating_add(self.settings.cooldown)
            && !self.probing.swap(true, Ordering::Relaxed)
        {
            return Gate::OpenAndProbe;
        }
        Gate::Open
    }

    /// The store answered.
    pub(crate) fn succeeded(&self) {
        // Read first: while the store answers, calls must not write to a shared cache line.
        for count in [&self.failures, &self.suspicions] {
            if count.load(Ordering::Relaxed) != 0 {
                count.store(0, Ordering::Relaxed);
            }
        }
    }

    /// The store reported an outage.
    pub(crate) fn failed(&self, now: Duration) {
        self.count(1, now);
    }

    /// A call ran into its deadline. Returns `true` when the caller must start a probe.
    #[must_use]
    pub(crate) fn suspect(&self) -> bool {
        self.suspicions.fetch_add(1, Ordering::Relaxed);
        self.settings.failures != 0 && !self.probing.swap(true, Ordering::Relaxed)
    }

    /// A probe got no answer: the calls that ran into their deadlines count as failures of the store.
    pub(crate) fn probe_failed(&self, now: Duration) {
        self.count(self.suspicions.swap(0, Ordering::Relaxed).max(1), now);
    }

    fn count(&self, more: u32, now: Duration) {
        let millis = u64::try_from(now.as_millis()).unwrap_or(u64::MAX);
        self.failed_at.store(millis, Ordering::Relaxed);
        let before = self.failures.fetch_add(more, Ordering::Relaxed);
        let failures = before.saturating_add(more);
        let opens = before < self.settings.failures && self.settings.failures <= failures;
        if opens {
            tracing::warn!(failures, "the store keeps failing; the circuit breaker is open");
        }
    }

    /// A probe is under way until this is dropped.
    pub(crate) fn probing(&self) -> Probing<'_> {
        Probing(self)
    }

    pub(crate) fn failures(&self) -> u32 {
        self.failures.load(Ordering::Relaxed)
    }
}

/// See [`Breaker::probing`].
pub(crate) struct Probing<'a>(&'a Breaker);

impl Drop for Probing<'_> {
    fn drop(&mut self) {
        self.0.probing.store(false, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_opens_after_failures_in_a_row_and_probes_once_per_cooldown() {
        let settings = BreakerSettings { failures: 2, cooldown: Duration::from_secs(1) };
        let breaker = Breaker::new(settings);
        let at = Duration::from_millis;
        breaker.failed(at(0));
        breaker.succeeded();
        breaker.failed(at(1));
        assert_eq!(breaker.gate(at(1)), Gate::Closed);
        breaker.failed(at(2));
        assert_eq!(breaker.gate(at(1_001)), Gate::Open);
        assert_eq!(breaker.gate(at(1_002)), Gate::OpenAndProbe);
        assert_eq!(breaker.gate(at(1_002)), Gate::Open);
        breaker.failed(at(1_003));
        drop(breaker.probing());
        assert_eq!(breaker.gate(at(2_002)), Gate::Open);
        assert_eq!(breaker.gate(at(2_003)), Gate::OpenAndProbe);
        breaker.succeeded();
        drop(breaker.probing());
        assert_eq!(breaker.gate(at(2_003)), Gate::Closed);
    }

    #[test]
    fn it_can_be_switched_off() {
        let breaker = Breaker::new(BreakerSettings { failures: 0, ..Default::default() });
        (0..100).for_each(|n| breaker.failed(Duration::from_millis(n)));
        assert_eq!(breaker.gate(Duration::from_millis(100)), Gate::Closed);
        assert!(!breaker.suspect(), "nobody needs a probe");
    }

    #[test]
    fn suspicions_count_when_a_probe_fails_and_not_before() {
        let settings = BreakerSettings { failures: 3, cooldown: Duration::from_secs(1) };
        let breaker = Breaker::new(settings);
        let at = Duration::from_millis;
        assert!(breaker.suspect(), "the first starts a probe");
        (0..100).for_each(|_| assert!(!breaker.suspect(), "one probe at a time"));
        assert_eq!(breaker.gate(at(0)), Gate::Closed);
        breaker.succeeded();
        drop(breaker.probing());
        assert!(breaker.suspect());
        breaker.probe_failed(at(1));
        drop(breaker.probing());
        assert_eq!(breaker.gate(at(1)), Gate::Closed, "one suspicion, one failure");
        assert!(breaker.suspect());
        assert!(!breaker.suspect());
        breaker.probe_failed(at(2));
        drop(breaker.probing());
        assert_eq!(breaker.gate(at(2)), Gate::Open, "one and two make three");
    }
}
