use std::fmt;
use std::time::{Duration, SystemTime};

/// The longest wait that a refusal reports: about 292 million years. Longer waits, of a deep debt at a slow rate,
/// are reported as this one.
pub const WAIT_MAX: Duration = Duration::from_millis(i64::MAX as u64);

/// A moment: milliseconds since 1970-01-01T00:00:00Z.
///
/// ```
/// # use std::time::{Duration, SystemTime};
/// # use zae_limiter_model::Timestamp;
/// let moment = Timestamp::from(SystemTime::UNIX_EPOCH + Duration::from_secs(5));
/// assert_eq!(moment, Timestamp::from_millis(5_000));
/// assert_eq!(SystemTime::from(moment), SystemTime::UNIX_EPOCH + Duration::from_secs(5));
/// ```
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Timestamp(i64);

impl Timestamp {
    /// The moment `millis` milliseconds after the epoch.
    pub const fn from_millis(millis: i64) -> Self {
        Self(millis)
    }

    /// Milliseconds since the epoch.
    pub const fn as_millis(self) -> i64 {
        self.0
    }

    /// Milliseconds from `earlier` to here, at most `i64::MAX`; 0 when `earlier` is not earlier.
    pub const fn millis_since(self, earlier: Self) -> u64 {
        match self.0.checked_sub(earlier.0) {
            Some(millis) if millis > 0 => millis.unsigned_abs(),
            Some(_) => 0,
            // The difference does not fit i64: the two are of opposite sign.
            None if self.0 > earlier.0 => i64::MAX.unsigned_abs(),
            None => 0,
        }
    }

    /// The moment `wait` later, rounded up to a millisecond. It saturates at the last moment.
    #[must_use]
    pub fn saturating_add(self, wait: Duration) -> Self {
        let millis = wait.as_nanos().div_ceil(1_000_000);
        self.saturating_add_millis(u64::try_from(millis).unwrap_or(u64::MAX))
    }

    /// The moment `millis` milliseconds later. It saturates at the last moment.
    #[must_use]
    pub const fn saturating_add_millis(self, millis: u64) -> Self {
        Self(self.0.saturating_add_unsigned(millis))
    }
}

/// Rounded down to a millisecond. A moment out of range becomes the first or the last one.
impl From<SystemTime> for Timestamp {
    fn from(moment: SystemTime) -> Self {
        match moment.duration_since(SystemTime::UNIX_EPOCH) {
            Ok(since) => Self(i64::try_from(since.as_millis()).unwrap_or(i64::MAX)),
            Err(before) => {
                let millis = before.duration().as_nanos().div_ceil(1_000_000);
                Self(i64::try_from(millis).map_or(i64::MIN, |millis| -millis))
            }
        }
    }
}

/// A moment that the system's clock cannot express becomes the epoch.
impl From<Timestamp> for SystemTime {
    fn from(moment: Timestamp) -> Self {
        let distance = Duration::from_millis(moment.0.unsigned_abs());
        let found = match moment.0 >= 0 {
            true => Self::UNIX_EPOCH.checked_add(distance),
            false => Self::UNIX_EPOCH.checked_sub(distance),
        };
        found.unwrap_or(Self::UNIX_EPOCH)
    }
}

impl fmt::Debug for Timestamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ms", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_does_not_overflow() {
        let (first, last) = (Timestamp(i64::MIN), Timestamp(i64::MAX));
        assert_eq!(last.millis_since(first), i64::MAX as u64);
        assert_eq!(first.millis_since(last), 0);
        assert_eq!(last.saturating_add(Duration::MAX), last);
        assert_eq!(Timestamp(5).millis_since(Timestamp(3)), 2);
    }

    #[test]
    fn a_moment_of_the_system_clock_is_rounded_down() {
        let epoch = SystemTime::UNIX_EPOCH;
        for (nanos, millis) in [(0, 0), (1, 0), (999_999, 0), (1_000_000, 1), (1_999_999, 1)] {
            let after = epoch + Duration::from_nanos(nanos);
            assert_eq!(Timestamp::from(after), Timestamp(millis), "{nanos}");
        }
        for (nanos, millis) in [(1, -1), (999_999, -1), (1_000_000, -1), (1_000_001, -2)] {
            let before = epoch - Duration::from_nanos(nanos);
            assert_eq!(Timestamp::from(before), Timestamp(millis), "-{nanos}");
        }
        for millis in [0, 1, -1, 1_763_000_000_123, -1_763_000_000_123] {
            let there_and_back = Timestamp::from(SystemTime::from(Timestamp(millis)));
            assert_eq!(there_and_back, Timestamp(millis));
        }
        for extreme in [i64::MIN, i64::MAX] {
            let _ = SystemTime::from(Timestamp(extreme));
        }
    }

    #[test]
    fn a_wait_is_rounded_up() {
        let later = Timestamp(0).saturating_add(Duration::from_nanos(1));
        assert_eq!(later, Timestamp(1));
    }
}
