//! What the table was asked, and what it cost.

use std::sync::{Mutex, PoisonError};

use zae_limiter_core::Cost;
use zae_limiter_schema::Consumed;

#[derive(Debug, Default)]
pub(crate) struct Meter(Mutex<Cost>);

impl Meter {
    /// Counts a call that was answered.
    pub(crate) fn count(&self, consumed: Consumed) {
        let mut cost = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        cost.round_trips += 1;
        cost.write_units += consumed.write;
        cost.read_units += consumed.read;
    }

    /// Counts a call that was not: what it cost nobody knows.
    pub(crate) fn count_unanswered(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).round_trips += 1;
    }

    pub(crate) fn so_far(&self) -> Cost {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
