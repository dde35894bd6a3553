//! What can go wrong between a client and the table.

use std::ops::RangeInclusive;

use fastrand::Rng;
use zae_limiter_schema::{TableError, TableErrorKind};

/// How often what goes wrong. Rates are between 0 and 1, times in microseconds.
#[derive(Clone, Debug)]
pub struct Faults {
    /// How long a request is on its way, and an answer again.
    pub delay_us: RangeInclusive<u64>,
    /// How often it takes [`slow_us`](Self::slow_us) instead.
    pub slow: f64,
    /// How long a slow one takes.
    pub slow_us: RangeInclusive<u64>,
    /// Requests that never arrive.
    pub lost_request: f64,
    /// Answers that never arrive: the change was made.
    pub lost_answer: f64,
    /// Requests that the table turns away.
    pub throttled: f64,
    /// Requests that a partition turns away.
    pub partition_throttled: f64,
    /// Writes that meet somebody else's transaction.
    pub conflict: f64,
    /// How far an index, or an eventual read, is behind at most.
    pub lag_us: u64,
    /// How many write units a partition, of the table or of an index, takes in a second.
    pub partition_units: Option<f64>,
    /// Calls that never return. The request arrives, or it does not.
    pub hung: f64,
    /// Writes with which a partition becomes hot: it turns every write away for [`hot_us`](Self::hot_us).
    pub hot_partition: f64,
    /// How long a partition stays hot.
    pub hot_us: RangeInclusive<u64>,
    /// Tasks of the store that are dropped at one of their first polls.
    pub dropped_task: f64,
    /// Tasks of the store that panic in one of their first table calls.
    pub panicked_task: f64,
}

impl Faults {
    /// Nothing goes wrong and nothing takes time.
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

    /// Nothing goes wrong; every way takes that long.
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
            (self.lost_answer, Outcome::LostAnswer),
            (self.throttled, Outcome::Turned(TableErrorKind::Throttled)),
            (self.partition_throttled, Outcome::Turned(TableErrorKind::PartitionThrottled)),
            (self.conflict, Outcome::Turned(TableErrorKind::Conflict)),
            (self.hung / 2.0, Outcome::HungRequest),
            (self.hung / 2.0, Outcome::HungAnswer),
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

/// What becomes of one call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Journey {
    pub(crate) there_us: u64,
    pub(crate) back_us: u64,
    pub(crate) outcome: Outcome,
}

impl Outcome {
    /// Whether the caller never gets an answer.
    pub(crate) fn is_hung(self) -> bool {
        matches!(self, Self::HungRequest | Self::HungAnswer)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Answered,
    LostRequest,
    LostAnswer,
    Turned(TableErrorKind),
    /// Never arrives, and nobody ever says so.
    HungRequest,
    /// Arrives and takes effect, and nobody ever says so.
    HungAnswer,
}

/// What a client sees when a request or its answer is lost: it cannot tell which.
pub(crate) fn lost() -> TableError {
    TableError::new(TableErrorKind::Unavailable, "no answer from the simulated table")
        .maybe_applied()
}
