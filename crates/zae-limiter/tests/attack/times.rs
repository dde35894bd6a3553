//! `Timestamp` from and to `SystemTime`.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use zae_limiter::Timestamp;

/// Promise: "Rounded down to a millisecond", also before 1970.
#[test]
fn moments_are_rounded_down_on_both_sides_of_the_epoch() {
    let nanos = Duration::from_nanos;
    for (moment, expected) in [
        (UNIX_EPOCH, 0),
        (UNIX_EPOCH + nanos(999_999), 0),
        (UNIX_EPOCH + nanos(1_000_000), 1),
        (UNIX_EPOCH + nanos(1_999_999), 1),
        (UNIX_EPOCH - nanos(1), -1),
        (UNIX_EPOCH - nanos(999_999), -1),
        (UNIX_EPOCH - nanos(1_000_000), -1),
        (UNIX_EPOCH - nanos(1_000_001), -2),
        (UNIX_EPOCH - Duration::from_secs(86_400 * 365 * 100), -86_400_000 * 365 * 100),
    ] {
        assert_eq!(Timestamp::from(moment).as_millis(), expected, "{moment:?}");
    }
}

/// Promise: what the system's clock can express comes back; what not becomes the epoch; no panic.
#[test]
fn every_moment_comes_back_or_is_the_epoch() {
    let mut random = fastrand::Rng::with_seed(1);
    let ends = [
        i64::MIN,
        i64::MIN + 1,
        -1_001,
        -1_000,
        -999,
        -1,
        0,
        1,
        999,
        1_000,
        i64::MAX - 1,
        i64::MAX,
    ];
    for millis in ends.into_iter().chain((0..10_000).map(|_| random.i64(..) >> random.u32(0..63))) {
        let moment = Timestamp::from_millis(millis);
        let system = SystemTime::from(moment);
        let expressible = if millis >= 0 {
            UNIX_EPOCH.checked_add(Duration::from_millis(millis.unsigned_abs()))
        } else {
            UNIX_EPOCH.checked_sub(Duration::from_millis(millis.unsigned_abs()))
        };
        assert_eq!(system, expressible.unwrap_or(UNIX_EPOCH), "{millis}");
        if expressible.is_some() {
            assert_eq!(Timestamp::from(system), moment);
        }
    }
}

/// Promise: "a moment beyond the range becomes the first or last one there is".
#[test]
fn moments_beyond_the_range_become_its_ends() {
    let far = Duration::from_secs(u64::try_from(i64::MAX).unwrap());
    if let Some(late) = UNIX_EPOCH.checked_add(far) {
        assert_eq!(Timestamp::from(late).as_millis(), i64::MAX);
    }
    if let Some(early) = UNIX_EPOCH.checked_sub(far) {
        assert_eq!(Timestamp::from(early).as_millis(), i64::MIN);
    }
    let last = Timestamp::from_millis(i64::MAX);
    assert_eq!(last.saturating_add(Duration::MAX), last);
    assert_eq!(Timestamp::from_millis(i64::MIN).saturating_add(Duration::MAX), last);
    assert_eq!(Timestamp::from_millis(0).saturating_add(Duration::from_nanos(1)).as_millis(), 1);
}

/// Promise (`millis_since`): "Milliseconds from `earlier` to here, at most `i64::MAX`".
#[test]
fn the_longest_distance_is_cut() {
    let (first, last) = (Timestamp::from_millis(i64::MIN), Timestamp::from_millis(i64::MAX));
    assert_eq!(first.millis_since(last), 0);
    assert_eq!(last.millis_since(Timestamp::from_millis(0)), i64::MAX.unsigned_abs());
    assert_eq!(last.millis_since(first), i64::MAX.unsigned_abs());
}
