//! The invariants of the arithmetic, for every limit, every bucket and every run of calls. An oracle
//! computes the same in exact fractions.
//!
//! Inputs come from a fixed seed, so that a failure repeats on the next run. For more or other inputs:
//! `PROPTEST_CASES=100000 PROPTEST_RNG_SEED=7 cargo test -p zae-limiter-model`.

mod admission;
mod bounds;
mod change;
mod generate;
mod oracle;
mod refill;
mod render;
mod retry;
mod share;

use std::fmt::Debug;

use proptest::prelude::*;
use proptest::test_runner::{RngSeed, TestCaseResult, TestRunner};

const SEED: u64 = 20_261_115;

/// Runs a property over the inputs, and fails with the smallest input found to break it.
fn check<S: Strategy>(inputs: S, property: impl Fn(S::Value) -> TestCaseResult)
where
    S::Value: Debug,
{
    let mut config = ProptestConfig {
        failure_persistence: None,
        max_shrink_iters: 4_000,
        ..ProptestConfig::default()
    };
    if config.rng_seed == RngSeed::Random {
        config.rng_seed = RngSeed::Fixed(SEED);
    }
    if let Err(broken) = TestRunner::new(config).run(&inputs, property) {
        panic!("{broken}");
    }
}
