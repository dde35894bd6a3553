//! Chooses the seeds of a test, and prints how to replay those that fail.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// The seeds of a test, from the environment:
///
/// - `ZAEL_SIM_SEED=n` runs only seed n;
/// - `ZAEL_SIM_SEEDS=n` runs n seeds, starting at `ZAEL_SIM_BASE` (0).
#[derive(Clone, Debug)]
pub struct Seeds {
    range: Range<u64>,
    step: usize,
    /// Seeds that have found a defect.
    pinned: Vec<u64>,
    is_alone: bool,
    replay: String,
}

impl Seeds {
    /// `count` seeds, unless the environment sets others. `replay` is the command that replays the
    /// test with `ZAEL_SIM_SEED` set.
    pub fn from_env(count: u64, replay: &str) -> Self {
        let alone = number_from("ZAEL_SIM_SEED");
        let first = number_from("ZAEL_SIM_BASE").unwrap_or(0);
        let count = number_from("ZAEL_SIM_SEEDS").unwrap_or(count);
        let range = match alone {
            Some(seed) => seed..seed + 1,
            None => first..first + count,
        };
        let (is_alone, replay) = (alone.is_some(), replay.to_owned());
        Self { range, step: 1, pinned: Vec::new(), is_alone, replay }
    }

    /// Keeps only the even or the odd seeds.
    #[must_use]
    pub fn every_second(mut self, odd: bool) -> Self {
        if (self.range.start % 2 == 1) != odd {
            self.range.start += 1;
        }
        self.step = 2;
        self
    }

    /// Also plays seeds that have found a defect, unless only one seed is replayed.
    #[must_use]
    pub fn with_pinned(mut self, pinned: &[u64]) -> Self {
        if !self.is_alone {
            self.pinned.extend(pinned);
        }
        self
    }

    /// Whether only one seed is replayed. Then a test must not require that rare events happen.
    pub fn is_alone(&self) -> bool {
        self.is_alone
    }

    /// Runs all seeds, even if some fail.
    ///
    /// # Panics
    ///
    /// If some fail, with the command that replays each of them.
    pub fn play<T>(&self, play: impl Fn(u64) -> T) -> Vec<T> {
        self.play_and_print(play, |_| ())
    }

    /// As [`play`](Self::play), and calls `print` with the reports of the seeds that did not fail.
    ///
    /// # Panics
    ///
    /// As [`play`](Self::play) does.
    pub fn play_and_print<T>(&self, play: impl Fn(u64) -> T, print: impl FnOnce(&[T])) -> Vec<T> {
        let (mut played, mut failed) = (Vec::new(), Vec::new());
        for seed in self.range.clone().step_by(self.step).chain(self.pinned.iter().copied()) {
            match catch_unwind(AssertUnwindSafe(|| play(seed))) {
                Ok(report) => played.push(report),
                Err(_) => failed.push(seed),
            }
        }
        print(&played);
        let replay = |seed: &u64| format!("\n  ZAEL_SIM_SEED={seed} {}", self.replay);
        let commands: String = failed.iter().map(replay).collect();
        let all = played.len() + failed.len();
        assert!(failed.is_empty(), "{} of {all} seeds fail; replay:{commands}", failed.len());
        played
    }
}

fn number_from(variable: &str) -> Option<u64> {
    let text = std::env::var(variable).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{variable} is not a number: {text}")))
}
