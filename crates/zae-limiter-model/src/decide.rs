//! Admits or refuses requests on buckets.

use crate::{Bucket, Millitokens, Timestamp};

/// An amount to take from one limit of a bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Take {
    /// The index of the limit's cell.
    pub cell: usize,
    /// The amount; not negative in an acquire.
    pub amount: Millitokens,
}

/// A request to one bucket of the chain.
#[derive(Debug)]
pub struct Ask<'a> {
    /// The bucket, as the store holds it.
    pub bucket: &'a mut Bucket,
    /// The amounts, by limit.
    pub takes: &'a [Take],
}

/// What [`decide`] decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// All amounts were taken, from all buckets.
    Admitted,
    /// At least one balance was too low. Nothing was taken from any bucket.
    Refused,
}

/// Refills every bucket of the chain up to `now`, then takes all amounts from all of them, or nothing
/// from any.
///
/// # Panics
///
/// When an amount is negative, or its cell does not exist: callers check both.
///
/// ```
/// # use std::sync::Arc;
/// # use zae_limiter_model::*;
/// let limits = Arc::new(LimitSet::new([Limit::per_minute("rpm", 1)])?);
/// let now = Timestamp::from_millis(0);
/// let mut bucket = Bucket::full(limits, now);
/// let takes = [Take { cell: 0, amount: amount(1)? }];
/// let mut ask = |now| decide(&mut [Ask { bucket: &mut bucket, takes: &takes }], now);
/// assert_eq!(ask(now), Verdict::Admitted);
/// assert_eq!(ask(now), Verdict::Refused);
/// assert_eq!(ask(Timestamp::from_millis(60_000)), Verdict::Admitted);
/// # Ok::<(), Invalid>(())
/// ```
pub fn decide(asks: &mut [Ask<'_>], now: Timestamp) -> Verdict {
    for ask in asks.iter_mut() {
        ask.bucket.refill(now);
    }
    if !asks.iter().all(fits) {
        return Verdict::Refused;
    }
    for ask in asks.iter_mut() {
        for take in ask.takes {
            let charged = ask.bucket.charge(take.cell, take.amount);
            charged.expect("the balance covers the amount");
        }
    }
    Verdict::Admitted
}

fn fits(ask: &Ask<'_>) -> bool {
    ask.takes.iter().enumerate().all(|(at, take)| {
        assert!(take.amount >= Millitokens::ZERO, "an acquire never takes a negative amount");
        // The balance of a limit that is named twice must cover the sum.
        let before = ask.takes[..at].iter().filter(|earlier| earlier.cell == take.cell);
        let asked = before.fold(take.amount, |sum, earlier| sum.saturating_add(earlier.amount));
        ask.bucket.holds(take.cell, asked)
    })
}
