//! Points in time: a day, a moment, or a duration before now.

use std::time::Duration;

use jiff::civil::{Date, DateTime};
use jiff::tz::TimeZone;
use zae_limiter::Timestamp;

use super::{Misread, duration};

const RULE: &str = "write a day (2026-11-15), a moment of UTC (2026-11-15T14:00 or \
                    2026-11-15T14:00:00Z), or how long ago (24h, 7d)";

/// A parsed point in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// An absolute time.
    At(Timestamp),
    /// A duration before now.
    Ago(Duration),
}

impl Moment {
    /// The absolute time, given the current one.
    pub fn seen_from(self, now: Timestamp) -> Timestamp {
        match self {
            Self::At(moment) => moment,
            Self::Ago(duration) => {
                let millis = i64::try_from(duration.as_millis()).unwrap_or(i64::MAX);
                Timestamp::from_millis(now.as_millis().saturating_sub(millis))
            }
        }
    }
}

/// Parses a moment.
///
/// # Errors
///
/// [`Misread`], which points at the wrong characters.
pub fn moment(input: &str) -> Result<Moment, Misread> {
    let at =
        |moment: jiff::Timestamp| Ok(Moment::At(Timestamp::from_millis(moment.as_millisecond())));
    if let Ok(ago) = duration(input) {
        return Ok(Moment::Ago(ago));
    }
    if let Ok(moment) = input.parse::<jiff::Timestamp>() {
        return at(moment);
    }
    let civil = match input.parse::<Date>() {
        Ok(day) if !input.contains(['T', ' ']) => {
            Ok(day.to_datetime(jiff::civil::Time::midnight()))
        }
        _ => input.parse::<DateTime>(),
    };
    match civil.and_then(|civil| TimeZone::UTC.to_timestamp(civil)) {
        Ok(moment) => at(moment),
        Err(_) => {
            let problem = format!("{input:?} is not a point in time");
            Err(Misread::new(input, 0..input.len(), problem, RULE))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_are_read() {
        let day = 1_794_700_800_000; // 2026-11-15T00:00:00Z
        let now = Timestamp::from_millis(day);
        for (text, millis) in [
            ("2026-11-15", day),
            ("2026-11-15T14:00", day + 14 * 3_600_000),
            ("2026-11-15T14:00:00Z", day + 14 * 3_600_000),
            ("2026-11-15T14:00:00+02:00", day + 12 * 3_600_000),
            ("24h", day - 86_400_000),
        ] {
            let read = moment(text).map(|moment| moment.seen_from(now));
            assert_eq!(read, Ok(Timestamp::from_millis(millis)), "{text}");
        }
        for text in ["", "yesterday", "2026-13-01", "2026-11-15T25:00", "15.11.2026"] {
            assert!(moment(text).is_err(), "{text}");
        }
    }
}
