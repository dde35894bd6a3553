//! The simulated traffic. The same seed gives the same traffic.

use fastrand::Rng;

use super::cast::CAST;

/// A phase of the run, with more or less traffic.
#[derive(Debug)]
pub(super) struct Phase {
    /// Its end, in thousandths of the run.
    until_permille: u64,
    /// Traffic, in percent of a member's `calls_per_minute`.
    percent: u64,
    pub name: &'static str,
}

const PHASES: [Phase; 5] = [
    Phase { until_permille: 130, percent: 35, name: "a quiet start" },
    Phase { until_permille: 400, percent: 100, name: "a busy day" },
    Phase { until_permille: 620, percent: 230, name: "a rush" },
    Phase { until_permille: 830, percent: 100, name: "a busy day" },
    Phase { until_permille: 1_000, percent: 25, name: "an evening" },
];

/// The phase at a time of the run.
pub(super) fn phase(elapsed_ms: u64, total_ms: u64) -> &'static Phase {
    let permille = elapsed_ms * 1_000 / total_ms.max(1);
    PHASES.iter().find(|phase| permille < phase.until_permille).unwrap_or(&PHASES[4])
}

/// Milliseconds until a key calls again.
pub(super) fn gap_ms(rng: &mut Rng, key: usize, phase: &Phase) -> u64 {
    let mean = 60_000 * 100 / (CAST[key].calls_per_minute * phase.percent);
    // Uniform up to twice the mean, for bursts and pauses.
    rng.u64(1..=mean * 2)
}

/// A simulated call.
#[derive(Clone, Copy, Debug)]
pub(super) struct Request {
    /// Tokens that it acquires.
    pub estimate: u64,
    /// Tokens that it uses; `None` if it fails.
    pub actual: Option<u64>,
    /// Duration of its work.
    pub work_ms: u64,
}

/// The next call.
pub(super) fn request(rng: &mut Rng) -> Request {
    let estimate = rng.u64(4..=40) * 25;
    let work_ms = rng.u64(150..=1_400);
    let percent = match rng.u64(..100) {
        0..6 => None,
        6..20 => Some(rng.u64(120..=300)),
        _ => Some(rng.u64(45..=100)),
    };
    Request { estimate, actual: percent.map(|percent| estimate * percent / 100), work_ms }
}
