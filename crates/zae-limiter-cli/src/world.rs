//! All external inputs of a run: arguments, environment, clocks, streams, signals. A test passes
//! its own, so that a run repeats exactly.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::{self, BufRead, BufReader, IsTerminal as _, Write};
use std::path::PathBuf;
use std::sync::Arc;

use zae_limiter::testing::{Clock, Entropy, SystemClock};

use crate::interrupts::Interrupts;

/// Which streams are terminals, and the size of the terminal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Terminal {
    /// Whether stdin is a terminal.
    pub stdin: bool,
    /// Whether stdout is a terminal.
    pub stdout: bool,
    /// Whether stderr is a terminal.
    pub stderr: bool,
    /// Columns and lines.
    pub size: Option<(u16, u16)>,
}

impl Terminal {
    /// The terminal's columns, or 80. Some terminals report 0.
    pub fn columns(&self) -> usize {
        self.size.map_or(80, |(columns, _)| if columns == 0 { 80 } else { usize::from(columns) })
    }

    /// The terminal's lines, or 24.
    pub fn rows(&self) -> usize {
        self.size.map_or(24, |(_, rows)| if rows == 0 { 24 } else { usize::from(rows) })
    }
}

/// The external inputs of one run.
pub struct World {
    /// The arguments, without the program's name.
    pub args: Vec<OsString>,
    /// The environment.
    pub env: BTreeMap<String, String>,
    /// The folder of the default store.
    pub data_dir: Option<PathBuf>,
    /// The path of this program.
    pub program: Option<PathBuf>,
    /// The limiter's clock.
    pub clock: Arc<dyn Clock>,
    /// The clock of the program's own waits: `--wait`, the frames of the demo. It is not the
    /// limiter's clock, so that a test can skip these waits without missing deadlines.
    pub pace: Arc<dyn Clock>,
    /// Creates a source of random ids.
    pub entropy: fn() -> Entropy,
    /// Answers to prompts.
    pub stdin: Box<dyn BufRead + Send>,
    /// Data.
    pub stdout: Box<dyn Write + Send>,
    /// Messages.
    pub stderr: Box<dyn Write + Send>,
    /// Which streams are terminals.
    pub terminal: Terminal,
    /// Ctrl-C and SIGTERM.
    pub interrupts: Interrupts,
}

impl World {
    /// The inputs of this process.
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
