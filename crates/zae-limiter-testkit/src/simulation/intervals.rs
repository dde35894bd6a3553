//! Never over-admitted: net taken in any interval is at most the ceiling and what the interval earns.

use std::collections::BTreeMap;

use zae_limiter_core::Rate;

/// One limit of one bucket's item.
pub(super) type Place = (String, String);

/// What is remembered of a limit.
#[derive(Debug)]
pub(super) struct LimitBook {
    rate: Rate,
    /// Net taken since this rate holds.
    net: i128,
    /// The lowest value of `net - rate * time`, times the period.
    lowest: i128,
    /// The latest moment from which an interval starts.
    latest_ms: i64,
    /// By how much more time the clocks may differ.
    slack_ms: i64,
}

impl LimitBook {
    pub(super) fn new(rate: Rate) -> Self {
        Self { rate, net: 0, lowest: i128::MAX, latest_ms: i64::MIN, slack_ms: 0 }
    }
}

/// When a write happened.
#[derive(Clone, Copy)]
pub(super) struct Moments {
    /// The earliest moment that it may carry.
    pub(super) base_ms: i64,
    pub(super) rf: i64,
    pub(super) slack_ms: i64,
}

/// Net taken in any interval that ends now is at most the ceiling and what the interval earns.
pub(super) fn check_interval(
    limits: &mut BTreeMap<Place, LimitBook>,
    place: &Place,
    rate: &Rate,
    debt: i128,
    net: i128,
    Moments { base_ms, rf, slack_ms }: Moments,
) -> Result<(), String> {
    let period = i128::from(rate.period_ms());
    let earns = |ms: i64| i128::from(rate.refill_amount().get()) * i128::from(ms);
    let book = limits.entry(place.clone()).or_insert_with(|| LimitBook::new(*rate));
    if book.rate != *rate {
        *book = LimitBook::new(*rate);
    }
    book.lowest = book.lowest.min(book.net * period - earns(base_ms));
    book.latest_ms = book.latest_ms.max(base_ms).max(rf);
    book.slack_ms = book.slack_ms.max(slack_ms);
    book.net += net;
    let risen = (book.net - debt) * period - earns(book.latest_ms + book.slack_ms) - book.lowest;
    // What is less than a millitoken is carried over.
    let most = (i128::from(rate.capacity().get()) + 1) * period;
    if risen > most {
        return Err(format!(
            "{}: over-admitted by {} millitokens over some interval that ends here",
            place.1,
            (risen - most) / period
        ));
    }
    Ok(())
}
