//! Everything that a run of the program depends on, handed in: a test is a process of its own
//! making, with its own time, and replays exactly.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::{self, BufRead, BufReader, IsTerminal as _, Write};
use std::path::PathBuf;
use std::sync::Arc;

use zae_limiter::testing::{Clock, Entropy, SystemClock};

use crate::interrupts::Interrupts;

/// What the streams are connected to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Terminal {
    /// Whether a person can answer.
    pub stdin: bool,
    /// Whether a person reads the data.
    pub stdout: bool,
    /// Whether a person reads the talk.
    pub stderr: bool,
    /// How many columns and lines there are, where it is a terminal.
    pub size: Option<(u16, u16)>,
}

impl Terminal {
    /// Columns to fill: the terminal's, or 80. Some terminals say that they have none.
    pub fn columns(&self) -> usize {
        self.size.map_or(80, |(columns, _)| if columns == 0 { 80 } else { usize::from(columns) })
    }

    /// Lines to fill: the terminal's, or 24.
    pub fn rows(&self) -> usize {
        self.size.map_or(24, |(_, rows)| if rows == 0 { 24 } else { usize::from(rows) })
    }
}

/// What surrounds one run.
pub struct World {
    /// The arguments, without the program's name.
    pub args: Vec<OsString>,
    /// The environment.
    pub env: BTreeMap<String, String>,
    /// Where the default store is kept.
    pub data_dir: Option<PathBuf>,
    /// This program's own file.
    pub program: Option<PathBuf>,
    /// The limiter's clock.
    pub clock: Arc<dyn Clock>,
    /// The clock by which the program itself waits (`--wait`, the pictures of the demo), apart from
    /// the limiter's, whose waits are deadlines: a test lets these waits pass at once.
    pub pace: Arc<dyn Clock>,
    /// Where randomness comes from.
    pub entropy: fn() -> Entropy,
    /// What a person answers.
    pub stdin: Box<dyn BufRead + Send>,
    /// Data.
    pub stdout: Box<dyn Write + Send>,
    /// Talk.
    pub stderr: Box<dyn Write + Send>,
    /// What the streams are connected to.
    pub terminal: Terminal,
    /// Ctrl-C and SIGTERM.
    pub interrupts: Interrupts,
}

impl World {
    /// The real one.
    pub fn of_this_process() -> Self {
        let text = |text: OsString| text.into_string().ok();
        Self {
            args: std::env::args_os().skip(1).collect(),
            env: std::env::vars_os().filter_map(|(k, v)| Some((text(k)?, text(v)?))).collect(),
            data_dir: etcetera::choose_base_strategy()
                .ok()
                .map(|dirs| etcetera::BaseStrategy::data_dir(&dirs).join("zae-limiter")),
            program: std::env::current_exe().ok(),
            clock: Arc::new(SystemClock),
            pace: Arc::new(SystemClock),
            entropy: Entropy::from_os,
            stdin: Box::new(BufReader::new(io::stdin())),
            stdout: Box::new(io::stdout()),
            stderr: Box::new(io::stderr()),
            terminal: Terminal {
                stdin: io::stdin().is_terminal(),
                stdout: io::stdout().is_terminal(),
                stderr: io::stderr().is_terminal(),
                size: terminal_size::terminal_size().map(|(columns, lines)| (columns.0, lines.0)),
            },
            interrupts: Interrupts::none(),
        }
    }
}

impl std::fmt::Debug for World {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("World").field("args", &self.args).finish_non_exhaustive()
    }
}
