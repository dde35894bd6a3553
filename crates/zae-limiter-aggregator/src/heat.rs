//! Measures how often an item is written.

use crate::change::BucketChange;

/// The shortest time over which a rate is measured: a few writes at once do not make a bucket hot.
const SPAN_MS_MIN: u64 = 100;

/// The writes of an item per second, measured from its changes in the order of the stream.
///
/// The stream's times have a resolution of one second. A large batch shows the rate by its fullest
/// second. A hundred changes within one second do not: they may have come in any part of it. Then
/// the changes that move the refill time count, which is in milliseconds. Both are lower bounds.
pub(crate) fn writes_per_second(changes: &[&BucketChange]) -> u64 {
    let second = |change: &&BucketChange| change.at.as_millis().div_euclid(1_000);
    let fullest = changes.chunk_by(|a, b| second(a) == second(b)).map(<[_]>::len).max();
    let by_stream = u64::try_from(fullest.unwrap_or(0)).unwrap_or(u64::MAX);
    let mut timed = changes.iter().enumerate().filter_map(|(at, c)| Some((at, c.refilled_at?)));
    let by_refills = match (timed.next(), timed.next_back()) {
        (Some((from, began)), Some((to, ended))) => {
            let writes = u64::try_from(to - from).unwrap_or(u64::MAX);
            writes.saturating_mul(1_000) / ended.millis_since(began).max(SPAN_MS_MIN)
        }
        _ => 0,
    };
    by_stream.max(by_refills)
}
