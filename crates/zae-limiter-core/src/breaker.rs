//! Answers at once while the store is out of order, instead of letting every call run into its
//! deadline.

use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU32, Ordering};
use std::time::Duration;

use zae_limiter_model::Timestamp;

/// When the breaker opens, and how often the store is then probed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BreakerSettings {
    /// It opens after so many failures in a row; 0 switches it off.
    pub failures: u32,
    /// How long after a failure the store is probed.
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
    /// Go to the store.
    Closed,
    /// Do not; the store has failed too often.
    Open,
    /// Do not, but see to it that the store is probed.
    OpenAndProbe,
}

/// Its atomics are independent readings: a call that sees one late goes to the store once more or
/// once less, and nothing depends on that.
#[derive(Debug)]
pub(crate) struct Breaker {
    settings: BreakerSettings,
    /// Failures in a row.
    failures: AtomicU32,
    /// When the last one happened, in milliseconds since the epoch.
    failed_at: AtomicI64,
    /// Whether a probe is under way.
    probing: AtomicBool,
}

impl Breaker {
    pub(crate) fn new(settings: BreakerSettings) -> Self {
        Self {
            settings,
            failures: AtomicU32::new(0),
            failed_at: AtomicI64::new(0),
            probing: AtomicBool::new(false),
        }
    }

    pub(crate) fn gate(&self, now: Timestamp) -> Gate {
        let failures = self.failures.load(Ordering::Relaxed);
        if self.settings.failures == 0 || failures < self.settings.failures {
            return Gate::Closed;
        }
        let failed_at = Timestamp::from_millis(self.failed_at.load(Ordering::Relaxed));
        if now >= failed_at.saturating_add(self.settings.cooldown)
            && !self.probing.swap(true, Ordering::Relaxed)
        {
            return Gate::OpenAndProbe;
        }
        Gate::Open
    }

    pub(crate) fn succeeded(&self) {
        // Read first: a store in order must not cost every call a shared write.
        if self.failures.load(Ordering::Relaxed) != 0 {
            self.failures.store(0, Ordering::Relaxed);
        }
    }

    pub(crate) fn failed(&self, now: Timestamp) {
        self.failed_at.store(now.as_millis(), Ordering::Relaxed);
        let failures = self.failures.fetch_add(1, Ordering::Relaxed).saturating_add(1);
        if failures == self.settings.failures {
            tracing::warn!(failures, "the store keeps failing; calls are answered without it");
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
        let at = Timestamp::from_millis;
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
        (0..100).for_each(|n| breaker.failed(Timestamp::from_millis(n)));
        assert_eq!(breaker.gate(Timestamp::from_millis(100)), Gate::Closed);
    }
}
