//! The windows of usage records: hours, days and months of UTC.

use std::fmt;
use std::time::Duration;

use jiff::civil::{Date, DateTime};
use jiff::tz::TimeZone;
use zae_limiter_model::{Invalid, Timestamp};

const HOUR_MS: i64 = 3_600_000;

/// The length of a usage record's window, in UTC.
///
/// ```
/// # use zae_limiter_core::{Timestamp, Window};
/// let at = Timestamp::from_millis(1_794_752_736_789); // 2026-11-15T14:25:36.789Z
/// assert_eq!(Window::Hourly.label(at), "2026-11-15T14:00:00Z");
/// assert_eq!(Window::Monthly.label(at), "2026-11");
/// assert_eq!(Window::Daily.start_of("2026-11-15"), Some(Window::Daily.start(at)));
/// assert_eq!("daily".parse(), Ok(Window::Daily));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Window {
    /// One hour.
    Hourly,
    /// One day.
    Daily,
    /// One calendar month.
    Monthly,
}

impl Window {
    /// All windows, shortest first.
    pub const ALL: [Self; 3] = [Self::Hourly, Self::Daily, Self::Monthly];

    /// `hourly`, `daily` or `monthly`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Hourly => "hourly",
            Self::Daily => "daily",
            Self::Monthly => "monthly",
        }
    }

    /// The first moment of the window that contains `at`.
    pub fn start(self, at: Timestamp) -> Timestamp {
        self.floor(civil(at)).map_or(at, timestamp)
    }

    /// The first moment after the window that contains `at`.
    pub fn end(self, at: Timestamp) -> Timestamp {
        let next = self.floor(civil(at)).and_then(|start| {
            let span = match self {
                Self::Hourly => jiff::Span::new().hours(1),
                Self::Daily => jiff::Span::new().days(1),
                Self::Monthly => jiff::Span::new().months(1),
            };
            start.checked_add(span).ok()
        });
        next.map_or(at, timestamp)
    }

    /// The label of the window that starts at `start`: `2026-11-15T14:00:00Z`, `2026-11-15` or `2026-11`.
    pub fn label(self, start: Timestamp) -> String {
        let civil = civil(start);
        match self {
            Self::Hourly => civil.strftime("%Y-%m-%dT%H:00:00Z").to_string(),
            Self::Daily => civil.strftime("%Y-%m-%d").to_string(),
            Self::Monthly => civil.strftime("%Y-%m").to_string(),
        }
    }

    /// The start of the window with this label; `None` if it is not a label.
    pub fn start_of(self, label: &str) -> Option<Timestamp> {
        let civil = match self {
            Self::Hourly => DateTime::strptime("%Y-%m-%dT%H:%M:%SZ", label).ok()?,
            Self::Daily => Date::strptime("%Y-%m-%d", label).ok()?.at(0, 0, 0, 0),
            Self::Monthly => Date::strptime("%Y-%m-%d", format!("{label}-01")).ok()?.at(0, 0, 0, 0),
        };
        let start = timestamp_of(civil)?;
        (self.label(start) == label).then_some(start)
    }

    fn floor(self, at: DateTime) -> Option<DateTime> {
        let day = if self == Self::Monthly { 1 } else { at.day() };
        let hour = if self == Self::Hourly { at.hour() } else { 0 };
        DateTime::new(at.year(), at.month(), day, hour, 0, 0, 0).ok()
    }
}

impl fmt::Display for Window {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl std::str::FromStr for Window {
    type Err = Invalid;

    fn from_str(text: &str) -> Result<Self, Invalid> {
        let found = Self::ALL.into_iter().find(|window| window.as_str() == text);
        found.ok_or_else(|| Invalid::new("window", text, "use hourly, daily or monthly"))
    }
}

/// Which usage records a store keeps, and for how long.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UsageSettings {
    /// The windows with usage records (all); empty switches usage records off.
    pub windows: Vec<Window>,
    /// How long a record is kept after the end of its window (90 days).
    pub retention: Duration,
}

impl Default for UsageSettings {
    fn default() -> Self {
        Self { windows: Window::ALL.to_vec(), retention: Duration::from_secs(90 * 86_400) }
    }
}

/// The number of the hour that contains `at`, since the epoch. Every window starts and ends with an hour,
/// so usage within one hour can be added up before it is recorded.
pub fn hour_of(at: Timestamp) -> i64 {
    at.as_millis().div_euclid(HOUR_MS)
}

/// Whether an hour contains `at`: [`hour_of`] without the division.
#[inline]
pub(crate) fn is_in_hour(hour: i64, at: Timestamp) -> bool {
    let start = hour.checked_mul(HOUR_MS);
    let since = start.and_then(|start| at.as_millis().checked_sub(start));
    since.is_some_and(|since| (0..HOUR_MS).contains(&since))
}

/// The first moment of an hour.
pub fn start_of_hour(hour: i64) -> Timestamp {
    Timestamp::from_millis(hour.saturating_mul(HOUR_MS))
}

/// `at` as `YYYY-MM-DDTHH:MM:SSZ`.
pub fn format_time(at: Timestamp) -> String {
    civil(at).strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

/// Moments outside the calendar count as the years 1 and 9998, which leaves room for the window before and
/// after.
fn civil(at: Timestamp) -> DateTime {
    const FIRST_MS: i64 = -62_135_596_800_000;
    const LAST_MS: i64 = 253_370_764_799_999;
    let moment = jiff::Timestamp::from_millisecond(at.as_millis().clamp(FIRST_MS, LAST_MS));
    TimeZone::UTC.to_datetime(moment.expect("within the calendar"))
}

fn timestamp(civil: DateTime) -> Timestamp {
    timestamp_of(civil).expect("made from a moment of the calendar")
}

fn timestamp_of(civil: DateTime) -> Option<Timestamp> {
    let moment = TimeZone::UTC.to_timestamp(civil).ok()?;
    Some(Timestamp::from_millis(moment.as_millisecond()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_moment_is_in_its_own_hour_and_in_no_other() {
        for at in [0, 1, -1, HOUR_MS - 1, HOUR_MS, -HOUR_MS, 1_794_752_736_789, i64::MAX] {
            let at = Timestamp::from_millis(at);
            let hour = hour_of(at);
            assert!(is_in_hour(hour, at));
            assert!(!is_in_hour(hour - 1, at) && !is_in_hour(hour + 1, at), "{at:?}");
            assert!(!is_in_hour(i64::MAX, at) && !is_in_hour(i64::MIN, at));
        }
    }

    #[test]
    fn windows_follow_the_calendar() {
        // 2026-11-15T14:25:36.789Z
        let at = Timestamp::from_millis(1_794_752_736_789);
        for (window, label, end) in [
            (Window::Hourly, "2026-11-15T14:00:00Z", "2026-11-15T15:00:00Z"),
            (Window::Daily, "2026-11-15", "2026-11-16T00:00:00Z"),
            (Window::Monthly, "2026-11", "2026-12-01T00:00:00Z"),
        ] {
            assert_eq!(window.label(window.start(at)), label);
            assert_eq!(format_time(window.end(at)), end);
            assert_eq!(window.as_str().parse::<Window>(), Ok(window));
            assert_eq!(window.start_of(label), Some(window.start(at)));
            assert_eq!(window.start_of("2026-13"), None);
            assert_eq!(window.start_of(&format!("{label}x")), None);
        }
        assert_eq!(format_time(start_of_hour(hour_of(at))), "2026-11-15T14:00:00Z");
        assert!("weekly".parse::<Window>().is_err());
    }

    #[test]
    fn moments_outside_the_calendar_have_windows() {
        for millis in [i64::MIN, -1, 0, i64::MAX] {
            for window in Window::ALL {
                let at = Timestamp::from_millis(millis);
                assert!(!window.label(window.start(at)).is_empty());
                assert!(window.end(at) > window.start(at));
            }
        }
    }
}
