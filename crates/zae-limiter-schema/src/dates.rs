//! The table's own time, from the dates of its responses.

use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use zae_limiter_core::{MAX_CLOCK_SKEW, TimeCheck, Timestamp};

/// What a process knows of its table's time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TableTime {
    /// Its responses have no date.
    Never,
    /// There was no response yet.
    NotYet,
    /// It is this moment, or up to a second and the way of a response later.
    At(Timestamp),
}

impl TableTime {
    /// Compares a time with the table's.
    pub fn check(self, now: Timestamp, max_skew: Duration) -> TimeCheck {
        let Self::At(table) = self else { return TimeCheck::Unknown };
        let apart = now.millis_since(table).max(table.millis_since(now));
        match Duration::from_millis(apart) <= max_skew {
            true => TimeCheck::Within,
            false => TimeCheck::Beyond(table),
        }
    }
}

/// Two seconds: how far the time by a response may be behind that of an earlier one before it counts. A date has whole
/// seconds, and the way of a response takes time.
const BEHIND_MAX_MS: i64 = 2_000;

/// No response yet, and responses without a date.
const NOT_YET: i64 = i64::MIN;
const NEVER: i64 = i64::MIN + 1;

/// Remembers the dates of responses. It is cheap: three numbers for all calls. Each is a time at the stopwatch's zero, in
/// milliseconds.
#[derive(Debug)]
pub struct ResponseDates {
    /// The table's time.
    origin: AtomicI64,
    /// The table's time by a response that was far behind the one before it. The next one may confirm it.
    behind: AtomicI64,
    /// The time of this machine's clock at the last response.
    clock: AtomicI64,
}

impl Default for ResponseDates {
    fn default() -> Self {
        let not_yet = || AtomicI64::new(NOT_YET);
        Self { origin: not_yet(), behind: not_yet(), clock: not_yet() }
    }
}

fn origin_of(time: Timestamp, stopwatch: Duration) -> i64 {
    let stopwatch = i64::try_from(stopwatch.as_millis()).unwrap_or(i64::MAX);
    time.as_millis().saturating_sub(stopwatch).max(NEVER + 1)
}

impl ResponseDates {
    /// A response has arrived at this reading of the clock and of the stopwatch. `date` is that of the response, if it
    /// has one.
    pub fn note(&self, date: Option<Timestamp>, now: Timestamp, stopwatch: Duration) {
        let known = self.origin.load(Ordering::Relaxed);
        let Some(date) = date else {
            if known == NOT_YET {
                self.origin.store(NEVER, Ordering::Relaxed);
            }
            return;
        };
        self.clock.store(origin_of(now, stopwatch), Ordering::Relaxed);
        let origin = origin_of(date, stopwatch);
        // A date is too early rather than too late, so the latest is the best. One that is far behind may have waited
        // to be read: it counts if the next one says the same.
        let is_behind = known > NEVER && origin < known.saturating_sub(BEHIND_MAX_MS);
        let before = self.behind.swap(if is_behind { origin } else { NOT_YET }, Ordering::Relaxed);
        let is_confirmed =
            before != NOT_YET && before.abs_diff(origin) <= BEHIND_MAX_MS.unsigned_abs();
        if known <= NEVER || origin > known || is_behind && is_confirmed {
            self.origin.store(origin, Ordering::Relaxed);
        }
    }

    /// The table's time at a reading of the clock and of the stopwatch. It is not known if the two do not go together
    /// since the last response: the machine has slept, or its clock was set.
    pub fn at(&self, now: Timestamp, stopwatch: Duration) -> TableTime {
        let jump = self.clock.load(Ordering::Relaxed).abs_diff(origin_of(now, stopwatch));
        match self.origin.load(Ordering::Relaxed) {
            NOT_YET => TableTime::NotYet,
            NEVER => TableTime::Never,
            _ if Duration::from_millis(jump) > MAX_CLOCK_SKEW => TableTime::NotYet,
            origin => TableTime::At(Timestamp::from_millis(origin).saturating_add(stopwatch)),
        }
    }
}

/// Parses the date of an HTTP response: `Sun, 06 Nov 1994 08:49:37 GMT`.
pub fn parse_http_date(text: &str) -> Option<Timestamp> {
    const MONTHS: &[u8] = b"JanFebMarAprMayJunJulAugSepOctNovDec";
    let bytes = text.as_bytes();
    if bytes.len() != 29 || &bytes[25..] != b" GMT" {
        return None;
    }
    let number = |from: usize, to: usize| {
        bytes[from..to].iter().try_fold(0_i64, |sum, digit| {
            digit.is_ascii_digit().then(|| sum * 10 + i64::from(digit - b'0'))
        })
    };
    let month = MONTHS.chunks(3).position(|name| *name == bytes[8..11])?;
    let (day, month) = (number(5, 7)?, i64::try_from(month).ok()? + 1);
    let (hour, minute, second) = (number(17, 19)?, number(20, 22)?, number(23, 25)?);
    if !(1..=31).contains(&day) || hour > 23 || minute > 59 || second > 60 {
        return None;
    }
    // Days since 1970-01-01, in years that begin in March: then a leap day is the last day of its year.
    let year = number(12, 16)? - i64::from(month <= 2);
    let of_year = (153 * (month + if month > 2 { -3 } else { 9 }) + 2) / 5 + day - 1;
    let days = year * 365 + year / 4 - year / 100 + year / 400 + of_year - 719_468;
    let seconds = ((days * 24 + hour) * 60 + minute) * 60 + second;
    Some(Timestamp::from_millis(seconds * 1_000))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(millis: i64) -> Timestamp {
        Timestamp::from_millis(millis)
    }

    #[test]
    fn the_date_of_a_response_is_read() {
        for (text, iso) in [
            ("Sun, 06 Nov 1994 08:49:37 GMT", "1994-11-06T08:49:37Z"),
            ("Thu, 01 Jan 1970 00:00:00 GMT", "1970-01-01T00:00:00Z"),
            ("Thu, 29 Feb 2024 23:59:59 GMT", "2024-02-29T23:59:59Z"),
            ("Fri, 01 Mar 2024 00:00:00 GMT", "2024-03-01T00:00:00Z"),
            ("Wed, 18 Nov 2026 14:42:16 GMT", "2026-11-18T14:42:16Z"),
            ("Thu, 31 Dec 2099 12:00:00 GMT", "2099-12-31T12:00:00Z"),
            ("Mon, 28 Feb 2101 12:00:00 GMT", "2101-02-28T12:00:00Z"),
        ] {
            let expected: jiff::Timestamp = iso.parse().expect("a time");
            assert_eq!(parse_http_date(text), Some(at(expected.as_millisecond())), "{text}");
        }
        for text in [
            "",
            "Sun, 06 Nov 1994 08:49:37 UTC",
            "Sunday, 06-Nov-94 08:49:37 GMT",
            "Sun, 06 Nov 1994 24:49:37 GMT",
            "Sun, 0a Nov 1994 08:49:37 GMT",
            "Sun, 06 Foo 1994 08:49:37 GMT",
            "Sün, 06 Nov 1994 08:49:37 GM",
        ] {
            assert_eq!(parse_http_date(text), None, "{text}");
        }
    }

    const SECOND: i64 = 1_000;

    fn secs(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn the_latest_date_counts_unless_two_are_far_behind() {
        let dates = ResponseDates::default();
        // The clock and the stopwatch go together.
        let note = |date: i64, seconds: u64| {
            dates.note(Some(at(date * SECOND)), at(0).saturating_add(secs(seconds)), secs(seconds));
        };
        let time = |seconds: u64| dates.at(at(0).saturating_add(secs(seconds)), secs(seconds));
        let is = |seconds: i64| TableTime::At(at(seconds * SECOND));
        assert_eq!(time(1), TableTime::NotYet);
        note(100, 10);
        assert_eq!((time(10), time(70)), (is(100), is(160)));
        // The same second, a second later.
        note(100, 11);
        assert_eq!(time(11), is(101));
        note(103, 12);
        assert_eq!(time(12), is(103));
        // The stopwatch stood.
        note(3_600, 13);
        assert_eq!(time(13), is(3_600));
        // A response was read a minute late.
        note(3_601, 74);
        assert_eq!(time(74), is(3_661));
        note(3_662, 75);
        // The table's clock was set back.
        note(50, 76);
        assert_eq!(time(76), is(3_663));
        note(51, 77);
        assert_eq!(time(77), is(51));
        dates.note(None, at(0), secs(78));
        assert_eq!(time(78), is(52));
    }

    #[test]
    fn a_clock_that_leaves_the_stopwatch_waits_for_the_next_response() {
        let dates = ResponseDates::default();
        dates.note(Some(at(0)), at(0), secs(10));
        // An hour of sleep, in which the stopwatch stood; or the clock was set.
        for now in [3_600 * SECOND, -3_600 * SECOND] {
            assert_eq!(dates.at(at(now), secs(11)), TableTime::NotYet);
        }
        dates.note(Some(at(3_600 * SECOND)), at(3_600 * SECOND), secs(12));
        assert_eq!(dates.at(at(3_600 * SECOND), secs(12)), TableTime::At(at(3_600 * SECOND)));
        // A clock that is always wrong by as much is no jump.
        dates.note(Some(at(3_601 * SECOND)), at(0), secs(13));
        assert_eq!(dates.at(at(SECOND), secs(14)), TableTime::At(at(3_602 * SECOND)));
    }

    #[test]
    fn a_table_without_dates_has_no_time() {
        let dates = ResponseDates::default();
        dates.note(None, at(0), Duration::ZERO);
        assert_eq!(dates.at(at(0), Duration::ZERO), TableTime::Never);
        dates.note(Some(at(1)), at(0), Duration::ZERO);
        assert_eq!(dates.at(at(0), Duration::ZERO), TableTime::At(at(1)));
    }
}
