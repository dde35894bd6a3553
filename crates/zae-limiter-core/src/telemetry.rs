//! Counters and histograms, behind the feature `metrics`. Entity ids are never labels: there are
//! too many of them, and they are often secrets.

use tracing::level_filters::LevelFilter;
use zae_limiter_model::LimitName;

use crate::clock::Clock;

/// Whether a subscriber may record the span of a call. Without one, the warm path makes no span: that costs as much as
/// the rest.
#[inline]
pub(crate) fn may_be_traced() -> bool {
    LevelFilter::current() >= LevelFilter::DEBUG
}

/// How an acquire ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Admitted,
    Refused,
    /// Admitted without the store, which was unavailable.
    Degraded,
    /// Failed because the store was unavailable.
    Unavailable,
}

#[cfg(feature = "metrics")]
mod enabled {
    use std::time::Duration;

    use super::{Clock, LimitName, Outcome};

    pub(crate) fn decided(outcome: Outcome) {
        let outcome = match outcome {
            Outcome::Admitted => "admitted",
            Outcome::Refused => "refused",
            Outcome::Degraded => "degraded",
            Outcome::Unavailable => "unavailable",
        };
        metrics::counter!("zae_limiter_decisions_total", "outcome" => outcome).increment(1);
    }

    pub(crate) fn refused(limit: &LimitName) {
        let limit = limit.to_string();
        metrics::counter!("zae_limiter_refusals_total", "limit" => limit).increment(1);
    }

    pub(crate) fn unsettled() {
        metrics::counter!("zae_limiter_unsettled_leases_total").increment(1);
    }

    pub(crate) fn clock_corrected() {
        metrics::counter!("zae_limiter_clock_corrections_total").increment(1);
    }

    pub(crate) fn cache_miss() {
        metrics::counter!("zae_limiter_config_cache_misses_total").increment(1);
    }

    pub(crate) fn cache_hit() {
        metrics::counter!("zae_limiter_config_cache_hits_total").increment(1);
    }

    /// The stopwatch reading at the start of a call.
    pub(crate) struct Started(Duration);

    pub(crate) fn start(clock: &dyn Clock) -> Started {
        Started(clock.stopwatch())
    }

    pub(crate) fn finish(clock: &dyn Clock, started: Started) {
        let took = clock.stopwatch().saturating_sub(started.0);
        metrics::histogram!("zae_limiter_acquire_seconds").record(took.as_secs_f64());
    }
}

#[cfg(not(feature = "metrics"))]
mod disabled {
    use super::{Clock, LimitName, Outcome};

    pub(crate) fn decided(_: Outcome) {}
    pub(crate) fn refused(_: &LimitName) {}
    pub(crate) fn unsettled() {}
    pub(crate) fn clock_corrected() {}
    pub(crate) fn cache_miss() {}
    pub(crate) fn cache_hit() {}
    /// Nothing is measured.
    pub(crate) struct Started;

    pub(crate) fn start(_: &dyn Clock) -> Started {
        Started
    }

    pub(crate) fn finish(_: &dyn Clock, _: Started) {}
}

#[cfg(not(feature = "metrics"))]
pub(crate) use disabled::*;
#[cfg(feature = "metrics")]
pub(crate) use enabled::*;
