use std::fmt;
use std::time::Duration;

/// The longest wait that is told: about 292 million years. A bucket can be so deep in debt at so
/// slow a rate that the true answer does not fit; it is then cut to this.
pub const WAIT_MAX: Duration = Duration::from_millis(i64::MAX as u64);

/// A moment: milliseconds since 1970-01-01T00:00:00Z.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Timestamp(i64);

impl Timestamp {
    /// The moment so many milliseconds after the epoch.
    pub const fn from_millis(millis: i64) -> Self {
        Self(millis)
    }

    /// Milliseconds since the epoch.
    pub const fn as_millis(self) -> i64 {
        self.0
    }

    /// Milliseconds from `earlier` to here; 0 when `earlier` is not earlier.
    pub const fn millis_since(self, earlier: Self) -> u64 {
        match self.0.checked_sub(earlier.0) {
            Some(millis) if millis > 0 => millis.unsigned_abs(),
            Some(_) => 0,
            // The difference does not fit i64: the two are of opposite sign.
            None if self.0 > earlier.0 => i64::MAX.unsigned_abs(),
            None => 0,
        }
    }

    /// This moment and `wait` later, rounded up to a millisecond, at most the last moment there is.
    #[must_use]
    pub fn saturating_add(self, wait: Duration) -> Self {
        let millis = wait.as_nanos().div_ceil(1_000_000);
        self.saturating_add_millis(u64::try_from(millis).unwrap_or(u64::MAX))
    }

    /// This moment and so many milliseconds later, at most the last moment there is.
    #[must_use]
    pub const fn saturating_add_millis(self, millis: u64) -> Self {
        Self(self.0.saturating_add_unsigned(millis))
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
    fn a_wait_is_rounded_up() {
        let later = Timestamp(0).saturating_add(Duration::from_nanos(1));
        assert_eq!(later, Timestamp(1));
    }
}
