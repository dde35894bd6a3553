//! The over-admission check: compares what a limit admitted with what it allows.
//!
//! A bucket holds at most its capacity and refills at most at its rate. For any interval, the tokens
//! that left the bucket up to an admission are at most
//!
//! ```text
//! capacity + rate × (time of the admission - start of the interval)
//! ```
//!
//! Refunds reduce what has left. An adjustment may leave debt, so the bound does not hold after it;
//! but the next admission must wait until the debt is repaid, so the check counts it there. Each
//! admission is checked against all earlier starts in constant time: the worst start is the one with
//! the smallest `left before - rate × start`.
//!
//! All arithmetic is on integers, in millitokens times the milliseconds of the refill period.

use zae_limiter::Timestamp;
use zae_limiter::model::{MILLI, Rate};

/// The time of a call on a bucket: the store applied it somewhere in between.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Span {
    /// The clock before the call.
    pub from: Timestamp,
    /// The clock after the call.
    pub until: Timestamp,
}

/// The over-admission check of one limit of one entity.
#[derive(Clone, Debug)]
pub(crate) struct LimitCheck {
    rate: Rate,
    /// Millitokens that acquires took.
    admitted: i128,
    /// Millitokens that leases refunded.
    given_back: i128,
    /// Millitokens that leases took when they settled.
    added: i128,
    /// The smallest `left before - rate × start` of all starts so far.
    worst_start: Option<i128>,
    /// The most that left the bucket in any interval, minus the refill in that interval.
    most: i128,
    first: Option<Timestamp>,
    /// The highest reading so far of a clock that may step back.
    latest: Timestamp,
}

impl LimitCheck {
    /// The check of a limit whose bucket starts full.
    pub(crate) fn new(rate: Rate) -> Self {
        Self {
            rate,
            admitted: 0,
            given_back: 0,
            added: 0,
            worst_start: None,
            most: 0,
            first: None,
            latest: Timestamp::from_millis(i64::MIN),
        }
    }

    /// Records an admitted acquire.
    pub(crate) fn admit(&mut self, tokens: u64, span: Span) {
        self.start(span);
        self.admitted += i128::from(tokens) * i128::from(MILLI);
        let left = self.left() * self.period() - self.earned_until(self.latest);
        let worst = self.worst_start.expect("set when an interval starts, which one just did");
        self.most = self.most.max(left - worst);
    }

    /// Records the settlement of a lease: a charge, or a refund if negative.
    pub(crate) fn settle(&mut self, difference: i64, span: Span) {
        self.start(span);
        let millitokens = i128::from(difference) * i128::from(MILLI);
        if millitokens < 0 {
            self.given_back -= millitokens;
        } else {
            self.added += millitokens;
        }
    }

    /// Starts an interval before the entry that follows.
    fn start(&mut self, span: Span) {
        // Uses `span.from` and not `latest`: after a clock stepped back, the bucket refills for the
        // same time twice. The promise allows for that skew.
        let start = self.left() * self.period() - self.earned_until(span.from);
        self.worst_start = Some(self.worst_start.map_or(start, |worst| worst.min(start)));
        self.first.get_or_insert(span.from);
        self.latest = self.latest.max(span.until);
    }

    /// Millitokens that have left the bucket.
    fn left(&self) -> i128 {
        self.admitted + self.added - self.given_back
    }

    fn period(&self) -> i128 {
        i128::from(self.rate.period_ms())
    }

    fn earned_until(&self, moment: Timestamp) -> i128 {
        i128::from(self.rate.refill_amount().get()) * i128::from(moment.as_millis())
    }

    pub(crate) fn rate(&self) -> &Rate {
        &self.rate
    }

    /// Tokens that acquires took.
    pub(crate) fn admitted(&self) -> i128 {
        self.admitted / i128::from(MILLI)
    }

    /// Tokens that leases refunded.
    pub(crate) fn given_back(&self) -> i128 {
        self.given_back / i128::from(MILLI)
    }

    /// Tokens that leases took when they settled.
    pub(crate) fn added(&self) -> i128 {
        self.added / i128::from(MILLI)
    }

    /// Tokens that the usage records must show.
    pub(crate) fn used(&self) -> i128 {
        self.left() / i128::from(MILLI)
    }

    /// Tokens that the limit allows from the first entry to the last.
    pub(crate) fn allowed(&self) -> i128 {
        let elapsed = self.first.map_or(0, |first| self.latest.millis_since(first));
        allowed(&self.rate, elapsed)
    }

    /// Tokens that the worst interval admitted beyond what is allowed, rounded up; else 0.
    pub(crate) fn over_admitted(&self) -> i128 {
        let capacity = i128::from(self.rate.capacity().get()) * self.period();
        tokens_above(self.most - capacity, self.period())
    }
}

/// Tokens that a limit allows in an interval, rounded down.
pub(crate) fn allowed(rate: &Rate, elapsed_ms: u64) -> i128 {
    budget(rate, elapsed_ms) / (i128::from(rate.period_ms()) * i128::from(MILLI))
}

/// Tokens by which an amount exceeds what the limit allows in an interval, rounded up; else 0.
pub(crate) fn over_admitted(rate: &Rate, elapsed_ms: u64, tokens: u128) -> i128 {
    let period = i128::from(rate.period_ms());
    let admitted = i128::try_from(tokens).unwrap_or(i128::MAX / 2);
    let admitted = admitted.saturating_mul(i128::from(MILLI)).saturating_mul(period);
    tokens_above(admitted.saturating_sub(budget(rate, elapsed_ms)), period)
}

/// Capacity plus refill, in millitokens times milliseconds of the period.
fn budget(rate: &Rate, elapsed_ms: u64) -> i128 {
    i128::from(rate.capacity().get()) * i128::from(rate.period_ms())
        + i128::from(rate.refill_amount().get()) * i128::from(elapsed_ms)
}

fn tokens_above(excess: i128, period: i128) -> i128 {
    let one_token = period * i128::from(MILLI);
    (excess.max(0) + one_token - 1) / one_token
}

#[cfg(test)]
mod tests {
    use zae_limiter::Limit;
    use zae_limiter::model::LimitSet;

    use super::*;

    fn rate(limit: Limit) -> Rate {
        LimitSet::new([limit]).unwrap().rates()[0]
    }

    fn at(millis: i64) -> Span {
        let moment = Timestamp::from_millis(millis);
        Span { from: moment, until: moment }
    }

    /// One token a second, at most ten.
    fn check() -> LimitCheck {
        LimitCheck::new(rate(Limit::per_minute("rpm", 60).burst(10)))
    }

    #[test]
    fn taking_all_that_is_allowed_is_no_over_admission() {
        let mut check = check();
        check.admit(10, at(5_000));
        check.admit(1, at(6_000));
        check.settle(-4, at(6_000));
        check.admit(4, at(6_000));
        check.admit(10, at(16_000));
        assert_eq!(check.over_admitted(), 0);
        assert_eq!((check.admitted(), check.given_back(), check.used()), (25, 4, 21));
        assert_eq!(check.allowed(), 10 + 11);
    }

    #[test]
    fn one_token_too_many_is_found_in_its_interval() {
        let mut check = check();
        check.admit(1, at(0));
        // After an hour the whole run would be allowed thousands.
        check.admit(10, at(3_600_000));
        assert_eq!(check.over_admitted(), 0);
        check.admit(1, at(3_600_999));
        assert_eq!(check.over_admitted(), 1);
        assert!(check.used() < check.allowed());
    }

    #[test]
    fn debt_is_no_over_admission_but_must_be_repaid() {
        let mut check = check();
        check.admit(5, at(0));
        check.settle(20, at(0));
        assert_eq!(check.over_admitted(), 0);
        let mut too_early = check.clone();
        too_early.admit(1, at(15_999));
        assert_eq!(too_early.over_admitted(), 1);
        check.admit(1, at(16_000));
        assert_eq!(check.over_admitted(), 0);
    }

    #[test]
    fn the_whole_run_is_checked_to_the_millitoken() {
        let rate = rate(Limit::per_minute("rpm", 60).burst(10));
        assert_eq!(over_admitted(&rate, 1_000, 11), 0);
        assert_eq!(over_admitted(&rate, 999, 11), 1);
        assert_eq!(allowed(&rate, 999), 10);
        assert!(over_admitted(&rate, u64::MAX, u128::MAX) > 0);
    }

    /// Compares the constant-time check with one that looks at every interval.
    #[test]
    fn every_start_of_an_interval_is_checked() {
        let mut rng = fastrand::Rng::with_seed(1);
        for _ in 0..500 {
            let limit = Limit::per_minute("x", rng.u64(1..200)).burst(rng.u64(1..20));
            let rate = rate(limit);
            let mut check = LimitCheck::new(rate);
            let mut entries: Vec<(i64, i64, bool)> = Vec::new();
            let mut now = 0;
            for _ in 0..rng.usize(1..30) {
                now += rng.i64(0..2_000);
                let tokens = rng.i64(-5..10);
                let is_admission = tokens >= 0 && rng.bool();
                match is_admission {
                    true => check.admit(tokens.unsigned_abs(), at(now)),
                    false => check.settle(tokens, at(now)),
                }
                entries.push((now, tokens, is_admission));
            }
            let mut worst = 0;
            for (from, start) in entries.iter().enumerate() {
                let mut sum = 0;
                for (moment, tokens, is_admission) in &entries[from..] {
                    sum += tokens;
                    let elapsed = u64::try_from(moment - start.0).unwrap();
                    if *is_admission && sum > 0 {
                        let sum = u128::from(sum.unsigned_abs());
                        worst = worst.max(over_admitted(&rate, elapsed, sum));
                    }
                }
            }
            assert_eq!(check.over_admitted(), worst, "{entries:?} {rate:?}");
        }
    }
}
