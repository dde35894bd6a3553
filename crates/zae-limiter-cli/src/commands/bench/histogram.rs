//! A small histogram of latencies: counts, merges and quantiles.

use std::time::Duration;

/// Buckets per power of two: a quantile is at most 1/64 (1.6 %) too long.
const STEPS: usize = 64;
const STEPS_BITS: u32 = STEPS.trailing_zeros();

/// The first 64 buckets are single nanoseconds; each further bit of a u64 has 64 of its own.
const BUCKETS: usize = (65 - STEPS_BITS as usize) * STEPS;

/// The distribution of latencies.
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

    /// Adds the counts of another histogram.
    pub(super) fn add(&mut self, other: &Self) {
        for (count, more) in self.counts.iter_mut().zip(&other.counts) {
            *count += more;
        }
        self.total += other.total;
        self.max = self.max.max(other.max);
    }

    /// The quantile in thousandths, rounded up by at most 1.6 %; `None` without calls.
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

    /// The longest latency; `None` without calls.
    pub(super) fn max(&self) -> Option<Duration> {
        (self.total > 0).then_some(self.max)
    }
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

fn bucket(nanos: u64) -> usize {
    let shift = (u64::BITS - nanos.leading_zeros()).saturating_sub(STEPS_BITS + 1);
    let step = usize::try_from(nanos >> shift).expect("seven bits are left");
    shift as usize * STEPS + step
}

/// The longest latency of a bucket, in nanoseconds.
fn highest_in(bucket: usize) -> u64 {
    let shift = (bucket / STEPS).saturating_sub(1);
    let step = u128::try_from(bucket - shift * STEPS).expect("at most 127");
    let next = (step + 1) << shift;
    u64::try_from(next - 1).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_latency_of_a_bucket_is_at_most_one_64th_longer() {
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
            let quantile = one.permille(permille).unwrap();
            assert!(
                quantile >= exact && quantile <= exact + exact / 60,
                "{permille}: {quantile:?}"
            );
        }
        assert_eq!(one.max(), Some(Duration::from_millis(1)));
    }
}
