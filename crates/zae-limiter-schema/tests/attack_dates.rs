//! Attacks on the table's time (`docs/clocks.md`): a right clock must not be corrected.

use std::time::Duration;

use zae_limiter_core::{TimeCheck, Timestamp};
use zae_limiter_schema::ResponseDates;

const BOUND: Duration = Duration::from_secs(120);

fn at(seconds: u64) -> Timestamp {
    Timestamp::from_millis(1_794_751_200_000).saturating_add(Duration::from_secs(seconds))
}

/// "The `Date` of its last response, plus the time that has passed since." The process is paused for three minutes while
/// a response is on its way: its date is three minutes old when the process reads it. The clock was right all the time,
/// and an earlier date has shown it.
#[test]
fn a_response_that_is_read_late_does_not_make_a_right_clock_wrong() {
    let dates = ResponseDates::default();
    dates.note(Some(at(0)), at(0), Duration::ZERO);
    // Sent at 1 s, read at 181 s.
    dates.note(Some(at(1)), at(181), Duration::from_secs(181));
    let now = dates.at(at(181), Duration::from_secs(181));
    assert_eq!(now.check(at(181), BOUND), TimeCheck::Within);
}
