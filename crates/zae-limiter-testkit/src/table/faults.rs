//! Faults between a client and the table.

use std::ops::RangeInclusive;

use fastrand::Rng;
use zae_limiter_schema::{TableError, TableErrorKind};

/// The rates of faults. Rates are between 0 and 1, times in microseconds.
#[derive(Clone, Debug)]
pub struct Faults {
    /// The delay of a request, and again of its reply.
    pub delay_us: RangeInclusive<u64>,
    /// Delays that are [`slow_us`](Self::slow_us) instead.
    pub slow: f64,
    /// The delay of a slow request or reply.
    pub slow_us: RangeInclusive<u64>,
    /// Requests that never arrive.
    pub lost_request: f64,
    /// Replies that never arrive, although the request took effect.
    pub lost_answer: f64,
    /// Requests that the table throttles.
    pub throttled: f64,
    /// Requests that a partition throttles.
    pub partition_throttled: f64,
    /// Writes that conflict with another transaction.
    pub conflict: f64,
    /// The longest lag of an index or an eventually consistent read.
    pub lag_us: u64,
    /// The write units per second of a partition, of the table or of an index.
    pub partition_units: Option<f64>,
    /// Calls that never return. Half of their requests arrive.
    pub hung: f64,
    /// Writes that make their partition hot: it throttles all writes for [`hot_us`](Self::hot_us).
    pub hot_partition: f64,
    /// How long a partition stays hot.
    pub hot_us: RangeInclusive<u64>,
    /// Tasks of the store that are dropped before one of their first polls.
    pub dropped_task: f64,
    /// Tasks of the store that panic in one of their first table calls.
    pub panicked_task: f64,
}

impl Faults {
    /// No faults and no delays.
    pub fn none() -> Self {
        Self {
            delay_us: 0..=0,
            slow: 0.0,
            slow_us: 0..=0,
            lost_request: 0.0,
            lost_answer: 0.0,
            throttled: 0.0,
            partition_throttled: 0.0,
            conflict: 0.0,
            lag_us: 0,
            partition_units: None,
            hung: 0.0,
            hot_partition: 0.0,
            hot_us: 1_000_000..=10_000_000,
            dropped_task: 0.0,
            panicked_task: 0.0,
        }
    }

    /// No faults. Every request and every reply takes `us`.
    pub fn delay(us: u64) -> Self {
        Self { delay_us: us..=us, ..Self::none() }
    }

    fn way(&self, rng: &mut Rng) -> u64 {
        let range = if rng.f64() < self.slow { &self.slow_us } else { &self.delay_us };
        rng.u64(range.clone())
    }

    pub(crate) fn draw(&self, rng: &mut Rng) -> Journey {
        let (there_us, back_us) = (self.way(rng), self.way(rng));
        let mut left = rng.f64();
        let outcomes = [
            (self.lost_request, Outcome::LostRequest),
            (self.lost_answer, Outcome::LostReply),
            (self.throttled, Outcome::Rejected(TableErrorKind::Throttled)),
            (self.partition_throttled, Outcome::Rejected(TableErrorKind::PartitionThrottled)),
            (self.conflict, Outcome::Rejected(TableErrorKind::Conflict)),
            (self.hung / 2.0, Outcome::HungRequest),
            (self.hung / 2.0, Outcome::HungReply),
        ];
        let mut outcome = Outcome::Answered;
        for (rate, one) in outcomes {
            if left < rate {
                outcome = one;
                break;
            }
            left -= rate;
        }
        Journey { there_us, back_us, outcome }
    }
}

/// The delays and the outcome of one call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Journey {
    pub(crate) there_us: u64,
    pub(crate) back_us: u64,
    pub(crate) outcome: Outcome,
}

impl Outcome {
    /// Whether the caller never gets a reply.
    pub(crate) fn is_hung(self) -> bool {
        matches!(self, Self::HungRequest | Self::HungReply)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Answered,
    LostRequest,
    LostReply,
    Rejected(TableErrorKind),
    /// The request never arrives, and there is no reply.
    HungRequest,
    /// The request takes effect, but there is no reply.
    HungReply,
}

/// The error of a client whose request or reply is lost. The client cannot know which.
pub(crate) fn lost() -> TableError {
    TableError::new(TableErrorKind::Unavailable, "no reply from the simulated table")
        .maybe_applied()
}
