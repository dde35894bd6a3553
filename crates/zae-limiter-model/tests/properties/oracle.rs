//! The same rules in exact fractions: a balance is counted in millitokens times the limit's period, so
//! nothing is rounded. It shares no arithmetic with the crate.

use proptest::prelude::*;
use proptest::test_runner::TestCaseResult;
use zae_limiter_model::{Bucket, Cell, Rate, Take, Timestamp};

/// The expected balance of one limit. All but `taken` and `credited` are in millitokens times the period.
#[derive(Clone, Debug)]
pub(crate) struct Tally {
    capacity: i128,
    amount: i128,
    period: i128,
    opening: i128,
    earned: i128,
    /// What a full bucket had no room for.
    dropped: i128,
    taken: i128,
    credited: i128,
    consumed: i128,
    unbooked: i128,
}

impl Tally {
    pub(crate) fn open(cell: &Cell, rate: &Rate) -> Self {
        let period = i128::from(rate.period_ms());
        let mut tally = Self {
            capacity: i128::from(rate.capacity().get()),
            amount: i128::from(rate.refill_amount().get()),
            period,
            opening: i128::from(cell.tokens.get()) * period + i128::from(cell.remainder),
            earned: 0,
            dropped: 0,
            taken: 0,
            credited: 0,
            consumed: i128::from(cell.consumed.get()),
            unbooked: i128::from(cell.unbooked.get()),
        };
        tally.drop_excess();
        tally
    }

    /// Conservation: what was there and came in, less what went out.
    fn exact(&self) -> i128 {
        self.opening + self.earned + (self.credited - self.taken) * self.period - self.dropped
    }

    fn drop_excess(&mut self) {
        self.dropped += (self.exact() - self.capacity * self.period).max(0);
    }

    pub(crate) fn tokens(&self) -> i128 {
        self.exact().div_euclid(self.period)
    }

    pub(crate) fn pass(&mut self, millis: i128) {
        self.earned += self.amount * millis;
        self.drop_excess();
    }

    /// Applies a difference. Returns false, and changes nothing, if the balance would not fit `i64`.
    pub(crate) fn charge(&mut self, difference: i64) -> bool {
        let difference = i128::from(difference);
        if self.tokens() - difference < i128::from(i64::MIN) {
            return false;
        }
        self.taken += difference.max(0);
        self.credited += (-difference).max(0);
        self.drop_excess();
        for counter in [&mut self.consumed, &mut self.unbooked] {
            *counter = (*counter + difference).clamp(i64::MIN.into(), i64::MAX.into());
        }
        true
    }

    pub(crate) fn agrees_with(&self, cell: &Cell) -> TestCaseResult {
        prop_assert_eq!(i128::from(cell.tokens.get()), self.tokens(), "tokens");
        let remainder = self.exact().rem_euclid(self.period);
        prop_assert_eq!(i128::from(cell.remainder), remainder, "remainder");
        prop_assert_eq!(i128::from(cell.consumed.get()), self.consumed, "consumed");
        prop_assert_eq!(i128::from(cell.unbooked.get()), self.unbooked, "unbooked");
        Ok(())
    }
}

/// The expected balances of all limits of a bucket.
#[derive(Clone, Debug)]
pub(crate) struct Oracle {
    pub(crate) tallies: Vec<Tally>,
    refilled_at: Timestamp,
}

impl Oracle {
    pub(crate) fn open(bucket: &Bucket) -> Self {
        let limits = bucket.cells().iter().zip(bucket.limits().rates());
        let tallies = limits.map(|(cell, rate)| Tally::open(cell, rate)).collect();
        Self { tallies, refilled_at: bucket.refilled_at() }
    }

    /// Time never runs back, and one step is at most 2^63 - 1 ms.
    pub(crate) fn pass_to(&mut self, now: Timestamp) {
        let elapsed = i128::from(now.as_millis()) - i128::from(self.refilled_at.as_millis());
        for tally in &mut self.tallies {
            tally.pass(elapsed.clamp(0, i64::MAX.into()));
        }
        self.refilled_at = self.refilled_at.max(now);
    }

    pub(crate) fn holds(&self, takes: &[Take]) -> bool {
        self.tallies.iter().enumerate().all(|(cell, tally)| {
            let own = takes.iter().filter(|take| take.cell == cell);
            let asked: i128 = own.map(|take| i128::from(take.amount.get())).sum();
            asked == 0 || tally.tokens() >= asked
        })
    }

    pub(crate) fn take(&mut self, takes: &[Take]) {
        for take in takes {
            assert!(self.tallies[take.cell].charge(take.amount.get()), "what is held fits");
        }
    }

    pub(crate) fn agree_with(&self, bucket: &Bucket) -> TestCaseResult {
        prop_assert_eq!(bucket.cells().len(), self.tallies.len());
        prop_assert_eq!(bucket.refilled_at(), self.refilled_at, "refilled_at");
        for (cell, tally) in bucket.cells().iter().zip(&self.tallies) {
            tally.agrees_with(cell)?;
        }
        Ok(())
    }
}
