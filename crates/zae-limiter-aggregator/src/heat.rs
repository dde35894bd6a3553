//! How often an item is written.

use crate::change::BucketChange;

/// Less time than this says nothing about a rate: a few writes at once are no flood.
const SPAN_MS_MIN: u64 = 100;

/// The writes of an item in a second, as far as its changes, in their order, show them.
///
/// The stream tells moments to the second only: the fullest second of a large batch counts, but a
/// hundred changes within one could be anything between a hundred a second and a flood. A change that
/// moves the refill time tells its own moment to the millisecond. Both show no more than there is.
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
