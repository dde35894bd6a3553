//! Which seeds a test plays, and what it says of those that fail.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// The seeds of a test, from the environment:
///
/// - `ZAEL_SIM_SEED=n` plays seed n alone;
/// - `ZAEL_SIM_SEEDS=n` plays n seeds, starting at `ZAEL_SIM_BASE` (0).
#[derive(Clone, Debug)]
pub struct Seeds {
    range: Range<u64>,
    step: usize,
    is_alone: bool,
    replay: String,
}

impl Seeds {
    /// So many seeds, unless the environment says otherwise. The command replays the test once
    /// `ZAEL_SIM_SEED` is set.
    pub fn from_env(count: u64, replay: &str) -> Self {
        let alone = number_from("ZAEL_SIM_SEED");
        let first = number_from("ZAEL_SIM_BASE").unwrap_or(0);
        let count = number_from("ZAEL_SIM_SEEDS").unwrap_or(count);
        let range = match alone {
            Some(seed) => seed..seed + 1,
            None => first..first + count,
        };
        Self { range, step: 1, is_alone: alone.is_some(), replay: replay.to_owned() }
    }

    /// Only every second seed: the even ones, or the odd ones.
    #[must_use]
    pub fn every_second(mut self, odd: bool) -> Self {
        if (self.range.start % 2 == 1) != odd {
            self.range.start += 1;
        }
        self.step = 2;
        self
    }

    /// Whether somebody replays one seed: then nothing follows from what does not happen in it.
    pub fn is_alone(&self) -> bool {
        self.is_alone
    }

    /// Plays them all, also when some fail.
    ///
    /// # Panics
    ///
    /// When some fail: with each of them, and the command that replays it.
    pub fn play<T>(&self, play: impl Fn(u64) -> T) -> Vec<T> {
        self.play_and_print(play, |_| ())
    }

    /// The same, and prints something of those that did not fail, whether others did or not.
    ///
    /// # Panics
    ///
    /// As [`play`](Self::play) does.
    pub fn play_and_print<T>(&self, play: impl Fn(u64) -> T, print: impl FnOnce(&[T])) -> Vec<T> {
        let (mut played, mut failed) = (Vec::new(), Vec::new());
        for seed in self.range.clone().step_by(self.step) {
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
