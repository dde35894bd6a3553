//! The check that nothing was over-admitted, from a record of what a bucket was asked and answered.
//!
//! A bucket holds at most its capacity and earns at most its rate. So whatever moment the counting
//! starts at, what has left it by an admission is at most
//!
//! ```text
//! capacity + rate × (time of the admission - start)
//! ```
//!
//! where what was given back has come in again. What an adjustment takes may leave debt, which no
//! bound holds for; but the next admission has to wait until it is repaid, so it counts there. All
//! starts are checked with each admission at no more cost than one: of all that could be the start,
//! the one with the least `left before - rate × start` is the worst.
//!
//! Everything is an integer: millitokens times the milliseconds of the refill period.

use zae_limiter::Timestamp;
use zae_limiter::model::{MILLI, Rate};

/// When something happened to a bucket: at some moment from the first to the last.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Span {
    /// Read before the call.
    pub from: Timestamp,
    /// Read after it.
    pub until: Timestamp,
}

/// What was asked of one limit of one entity.
#[derive(Clone, Debug)]
pub(crate) struct LimitCheck {
    rate: Rate,
    /// Millitokens that acquires took.
    admitted: i128,
    /// Millitokens that leases gave back.
    given_back: i128,
    /// Millitokens that leases took when they were settled.
    added: i128,
    /// The least `left before - rate × start` of all starts so far.
    worst_start: Option<i128>,
    /// The most that left the bucket in any interval on top of what it earned meanwhile.
    most: i128,
    first: Option<Timestamp>,
    /// The latest reading of a clock that may step back.
    latest: Timestamp,
}

impl LimitCheck {
    /// Of a limit with this rate, full at the beginning.
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

    /// An acquire took so many tokens.
    pub(crate) fn admit(&mut self, tokens: u64, span: Span) {
        self.start(span);
        self.admitted += i128::from(tokens) * i128::from(MILLI);
        let left = self.left() * self.period() - self.earned_until(self.latest);
        let worst = self.worst_start.expect("set when an interval starts, which one just did");
        self.most = self.most.max(left - worst);
    }

    /// A lease took more, or gave back.
    pub(crate) fn settle(&mut self, difference: i64, span: Span) {
        self.start(span);
        let millitokens = i128::from(difference) * i128::from(MILLI);
        if millitokens < 0 {
            self.given_back -= millitokens;
        } else {
            self.added += millitokens;
        }
    }

    /// An interval may start here, before what is now entered.
    fn start(&mut self, span: Span) {
        // Not from the latest reading: a clock that stepped back gives the bucket the same time
        // twice, which is the skew that the promise allows for.
        let start = self.left() * self.period() - self.earned_until(span.from);
        self.worst_start = Some(self.worst_start.map_or(start, |worst| worst.min(start)));
        self.first.get_or_insert(span.from);
        self.latest = self.latest.max(span.until);
    }

    /// What has left the bucket, in millitokens.
    fn left(&self) -> i128 {
        self.admitted + self.added - self.given_back
    }

    fn period(&self) -> i128 {
        i128::from(self.rate.period_ms())
    }

    fn earned_until(&self, moment: Timestamp) -> i128 {
        i128::from(self.rate.refill_amount().get()) * i128::from(moment.as_millis())
    }

    /// The rate.
    pub(crate) fn rate(&self) -> &Rate {
        &self.rate
    }

    /// Tokens that acquires took.
    pub(crate) fn admitted(&self) -> i128 {
        self.admitted / i128::from(MILLI)
    }

    /// Tokens that leases gave back.
    pub(crate) fn given_back(&self) -> i128 {
        self.given_back / i128::from(MILLI)
    }

    /// Tokens that leases took when they were settled.
    pub(crate) fn added(&self) -> i128 {
        self.added / i128::from(MILLI)
    }

    /// What should have been recorded as used, in tokens.
    pub(crate) fn used(&self) -> i128 {
        self.left() / i128::from(MILLI)
    }

    /// The most that the limit allows from the first entry to the last, in tokens.
    pub(crate) fn allowed(&self) -> i128 {
        let elapsed = self.first.map_or(0, |first| self.latest.millis_since(first));
        allowed(&self.rate, elapsed)
    }

    /// By how many tokens the worst interval of all is beyond what was allowed, rounded up; 0 when
    /// none is.
    pub(crate) fn over_admitted(&self) -> i128 {
        let capacity = i128::from(self.rate.capacity().get()) * self.period();
        tokens_above(self.most - capacity, self.period())
    }
}

/// The most that a limit allows in so many milliseconds, in whole tokens.
pub(crate) fn allowed(rate: &Rate, elapsed_ms: u64) -> i128 {
    budget(rate, elapsed_ms) / (i128::from(rate.period_ms()) * i128::from(MILLI))
}

/// By how many tokens the amount is beyond what the limit allows in that time, rounded up.
pub(crate) fn over_admitted(rate: &Rate, elapsed_ms: u64, tokens: u128) -> i128 {
    let period = i128::from(rate.period_ms());
    let admitted = i128::try_from(tokens).unwrap_or(i128::MAX / 2);
    let admitted = admitted.saturating_mul(i128::from(MILLI)).saturating_mul(period);
    tokens_above(admitted.saturating_sub(budget(rate, elapsed_ms)), period)
}

/// Capacity and earnings, in millitokens times milliseconds of the period.
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

    /// One a second, ten at most.
    fn account() -> LimitCheck {
        LimitCheck::new(rate(Limit::per_minute("rpm", 60).burst(10)))
    }

    #[test]
    fn all_that_a_bucket_can_give_is_no_over_admission() {
        let mut account = account();
        account.admit(10, at(5_000));
        account.admit(1, at(6_000));
        account.settle(-4, at(6_000));
        account.admit(4, at(6_000));
        account.admit(10, at(16_000));
        assert_eq!(account.over_admitted(), 0);
        assert_eq!((account.admitted(), account.given_back(), account.used()), (25, 4, 21));
        assert_eq!(account.allowed(), 10 + 11);
    }

    #[test]
    fn one_token_too_many_is_found_in_the_interval_where_it_was_given() {
        let mut account = account();
        account.admit(1, at(0));
        // An hour later the run as a whole could have had thousands.
        account.admit(10, at(3_600_000));
        assert_eq!(account.over_admitted(), 0);
        account.admit(1, at(3_600_999));
        assert_eq!(account.over_admitted(), 1);
        assert!(account.used() < account.allowed());
    }

    #[test]
    fn debt_is_no_over_admission_but_must_be_repaid() {
        let mut account = account();
        account.admit(5, at(0));
        account.settle(20, at(0));
        assert_eq!(account.over_admitted(), 0);
        let mut too_early = account.clone();
        too_early.admit(1, at(15_999));
        assert_eq!(too_early.over_admitted(), 1);
        account.admit(1, at(16_000));
        assert_eq!(account.over_admitted(), 0);
    }

    #[test]
    fn the_whole_run_is_checked_to_the_millitoken() {
        let rate = rate(Limit::per_minute("rpm", 60).burst(10));
        assert_eq!(over_admitted(&rate, 1_000, 11), 0);
        assert_eq!(over_admitted(&rate, 999, 11), 1);
        assert_eq!(allowed(&rate, 999), 10);
        assert!(over_admitted(&rate, u64::MAX, u128::MAX) > 0);
    }

    /// The quick check against the slow one, which looks at every interval.
    #[test]
    fn all_starts_are_checked() {
        let mut rng = fastrand::Rng::with_seed(1);
        for _ in 0..500 {
            let limit = Limit::per_minute("x", rng.u64(1..200)).burst(rng.u64(1..20));
            let rate = rate(limit);
            let mut account = LimitCheck::new(rate);
            let mut entries: Vec<(i64, i64, bool)> = Vec::new();
            let mut now = 0;
            for _ in 0..rng.usize(1..30) {
                now += rng.i64(0..2_000);
                let tokens = rng.i64(-5..10);
                let is_admission = tokens >= 0 && rng.bool();
                match is_admission {
                    true => account.admit(tokens.unsigned_abs(), at(now)),
                    false => account.settle(tokens, at(now)),
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
            assert_eq!(account.over_admitted(), worst, "{entries:?} {rate:?}");
        }
    }
}
