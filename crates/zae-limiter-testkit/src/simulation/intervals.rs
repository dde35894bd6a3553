//! The over-admission check: net consumption in any interval is at most the ceiling plus what the
//! interval earns.

use std::collections::BTreeMap;

use zae_limiter_core::Rate;

/// One limit of one bucket's item.
pub(super) type Place = (String, String);

/// The history of a limit, reduced to what the check needs.
#[derive(Debug)]
pub(super) struct LimitHistory {
    rate: Rate,
    /// Net consumption under the present rate.
    net: i128,
    /// The lowest value of `net - rate * time`, times the period.
    lowest: i128,
    /// The latest time of a write so far.
    latest_ms: i64,
    /// How far the clocks may differ.
    slack_ms: i64,
}

impl LimitHistory {
    pub(super) fn new(rate: Rate) -> Self {
        Self { rate, net: 0, lowest: i128::MAX, latest_ms: i64::MIN, slack_ms: 0 }
    }
}

/// The times of a write.
#[derive(Clone, Copy)]
pub(super) struct Moments {
    /// The earliest time that the write may be about.
    pub(super) base_ms: i64,
    pub(super) rf: i64,
    pub(super) slack_ms: i64,
}

/// Checks all intervals that end with this write.
pub(super) fn check_interval(
    limits: &mut BTreeMap<Place, LimitHistory>,
    place: &Place,
    rate: &Rate,
    debt: i128,
    net: i128,
    Moments { base_ms, rf, slack_ms }: Moments,
) -> Result<(), String> {
    let period = i128::from(rate.period_ms());
    let earns = |ms: i64| i128::from(rate.refill_amount().get()) * i128::from(ms);
    let record = limits.entry(place.clone()).or_insert_with(|| LimitHistory::new(*rate));
    if record.rate != *rate {
        *record = LimitHistory::new(*rate);
    }
    record.lowest = record.lowest.min(record.net * period - earns(base_ms));
    record.latest_ms = record.latest_ms.max(base_ms).max(rf);
    record.slack_ms = record.slack_ms.max(slack_ms);
    record.net += net;
    let risen =
        (record.net - debt) * period - earns(record.latest_ms + record.slack_ms) - record.lowest;
    // One millitoken more, because fractions are carried over.
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
