//! All external inputs of a run: arguments, environment, clocks, streams, signals. A test passes
//! its own, so that a run repeats exactly.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::{self, BufRead, BufReader, IsTerminal as _, Write};
use std::path::PathBuf;
use std::sync::Arc;

use zae_limiter::testing::{Clock, Entropy, SystemClock};

use crate::interrupts::Interrupts;

/// Which streams are terminals, and how to ask for the terminal's size.
#[derive(Clone, Debug, Default)]
pub struct Terminal {
    /// Whether stdin is a terminal.
    pub stdin: bool,
    /// Whether stdout is a terminal.
    pub stdout: bool,
    /// Whether stderr is a terminal.
    pub stderr: bool,
    /// The size, which may change at any time.
    pub size: TerminalSize,
}

impl Terminal {
    /// The terminal's columns now, or 80.
    pub fn columns(&self) -> usize {
        self.size().0
    }

    /// The terminal's columns and lines now, or 80 and 24. Some terminals report 0.
    pub fn size(&self) -> (usize, usize) {
        let (columns, rows) = self.size.ask().unwrap_or_default();
        let or = |number: u16, other| if number == 0 { other } else { usize::from(number) };
        (or(columns, 80), or(rows, 24))
    }
}

/// Asks for the columns and lines of the terminal.
#[derive(Clone)]
pub struct TerminalSize(Arc<dyn Fn() -> Option<(u16, u16)> + Send + Sync>);

impl TerminalSize {
    /// The size that `ask` returns each time; `None` for an unknown size.
    pub fn new(ask: impl Fn() -> Option<(u16, u16)> + Send + Sync + 'static) -> Self {
        Self(Arc::new(ask))
    }

    /// A size that does not change.
    pub fn fixed(columns: u16, rows: u16) -> Self {
        Self::new(move || Some((columns, rows)))
    }

    fn ask(&self) -> Option<(u16, u16)> {
        (self.0)()
    }
}

impl Default for TerminalSize {
    fn default() -> Self {
        Self::new(|| None)
    }
}

impl std::fmt::Debug for TerminalSize {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("TerminalSize")
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
    /// Ends the process at once, with this status.
    pub exit: fn(u8),
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
                size: TerminalSize::new(|| {
                    terminal_size::terminal_size().map(|(columns, lines)| (columns.0, lines.0))
                }),
            },
            interrupts: Interrupts::none(),
            exit: |status| std::process::exit(status.into()),
        }
    }
}

impl std::fmt::Debug for World {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("World").field("args", &self.args).finish_non_exhaustive()
    }
}
