//! How long calls took, in little memory: what is needed of a histogram here is to count, to add up
//! and to tell quantiles.

use std::time::Duration;

/// Each doubling is divided into so many parts: a quantile is at most 1.6 % too long.
const PARTS: usize = 64;
const PARTS_BITS: u32 = PARTS.trailing_zeros();

/// The first parts are single nanoseconds; each further doubling of 64 bits has its own.
const BUCKETS: usize = (65 - PARTS_BITS as usize) * PARTS;

/// How often calls took how long.
#[derive(Clone, Debug)]
pub(super) struct Histogram {
    counts: Box<[u64]>,
    total: u64,
    max: Duration,
}

impl Histogram {
    pub(super) fn new() -> Self {
        Self { counts: vec![0; BUCKETS].into(), total: 0, max: Duration::ZERO }
    }

    /// Counts a call.
    pub(super) fn record(&mut self, took: Duration) {
        self.counts[bucket(nanos(took))] += 1;
        self.total += 1;
        self.max = self.max.max(took);
    }

    /// Counts all that another one has counted.
    pub(super) fn add(&mut self, other: &Self) {
        for (count, more) in self.counts.iter_mut().zip(&other.counts) {
            *count += more;
        }
        self.total += other.total;
        self.max = self.max.max(other.max);
    }

    /// The time within which so many of a thousand calls were done; `None` when there was none.
    pub(super) fn permille(&self, permille: u64) -> Option<Duration> {
        let rank = (u128::from(self.total) * u128::from(permille)).div_ceil(1_000).max(1);
        let mut seen = 0;
        for (at, count) in self.counts.iter().enumerate() {
            seen += u128::from(*count);
            if seen >= rank {
                return Some(Duration::from_nanos(highest_in(at)).min(self.max));
            }
        }
        None
    }

    /// The longest; `None` when there was none.
    pub(super) fn max(&self) -> Option<Duration> {
        (self.total > 0).then_some(self.max)
    }
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

fn bucket(nanos: u64) -> usize {
    let doublings = (u64::BITS - nanos.leading_zeros()).saturating_sub(PARTS_BITS + 1);
    let part = usize::try_from(nanos >> doublings).expect("seven bits are left");
    doublings as usize * PARTS + part
}

/// The longest time that falls into a bucket.
fn highest_in(bucket: usize) -> u64 {
    let doublings = (bucket / PARTS).saturating_sub(1);
    let part = u128::try_from(bucket - doublings * PARTS).expect("it is small");
    let next = (part + 1) << doublings;
    u64::try_from(next - 1).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_time_falls_into_a_bucket_that_is_hardly_longer() {
        let mut rng = fastrand::Rng::with_seed(1);
        let edges = (0..64).flat_map(|bit| [(1 << bit) - 1, 1 << bit, (1 << bit) + 1]);
        let drawn = (0..10_000).map(|_| rng.u64(..) >> rng.u32(..64));
        for nanos in edges.chain(drawn).chain([u64::MAX]) {
            let at = bucket(nanos);
            assert!(at < BUCKETS, "{nanos}");
            let highest = highest_in(at);
            assert!(highest >= nanos && highest - nanos <= nanos / 64, "{nanos} {highest}");
            assert_eq!(bucket(highest), at, "{nanos}");
        }
    }

    #[test]
    fn quantiles_are_those_of_the_sorted_times() {
        let (mut one, mut other) = (Histogram::new(), Histogram::new());
        assert_eq!((one.permille(500), one.max()), (None, None));
        for micros in 1..=1_000 {
            let half = if micros % 2 == 0 { &mut one } else { &mut other };
            half.record(Duration::from_micros(micros));
        }
        one.add(&other);
        for (permille, micros) in [(0, 1), (500, 500), (990, 990), (1_000, 1_000)] {
            let exact = Duration::from_micros(micros);
            let told = one.permille(permille).unwrap();
            assert!(told >= exact && told <= exact + exact / 60, "{permille}: {told:?}");
        }
        assert_eq!(one.max(), Some(Duration::from_millis(1)));
    }
}
