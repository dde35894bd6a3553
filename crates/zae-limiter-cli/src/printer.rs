//! All output: data to stdout, messages to stderr.
//!
//! Printing never fails for its caller. A closed pipe (`| head`) ends the output silently. The
//! program reports any other error when the command is done.

use std::io::{self, ErrorKind, Write};

use anstyle::{AnsiColor, Style};
use clap::ValueEnum;
use serde::Serialize;

use crate::failure::Failure;
use crate::line::{Line, cut};
use crate::suggestion::Place;
use crate::world::Terminal;

/// The output format.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum Output {
    /// Columns for people.
    #[default]
    Table,
    /// One JSON document for scripts.
    Json,
}

/// When to use colours.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum Color {
    /// On a terminal.
    #[default]
    Auto,
    /// Always.
    Always,
    /// Never.
    Never,
}

/// Which messages go to stderr.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Verbosity {
    /// Errors and warnings.
    Quiet,
    /// Also results of commands.
    Normal,
    /// Also details.
    Verbose,
}

/// The meaning of a piece of text, which decides its colour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Look {
    /// No colour.
    Plain,
    /// The head of a table, or a title.
    Head,
    /// Success.
    Good,
    /// Warning.
    Warn,
    /// Refused or failed.
    Bad,
    /// Secondary.
    Dim,
}

impl Look {
    fn style(self) -> Style {
        let color = |color: AnsiColor| Style::new().fg_color(Some(color.into()));
        match self {
            Self::Plain => Style::new(),
            Self::Head => Style::new().bold(),
            Self::Good => color(AnsiColor::Green),
            Self::Warn => color(AnsiColor::Yellow),
            Self::Bad => color(AnsiColor::Red).bold(),
            Self::Dim => Style::new().dimmed(),
        }
    }
}

/// Writes stdout and stderr.
pub(crate) struct Printer {
    out: Stream,
    err: Stream,
    pub output: Output,
    pub verbosity: Verbosity,
    /// Gives the width and height of views and charts.
    pub terminal: Terminal,
    /// Options that suggested commands need.
    pub place: Place,
    /// Whether a progress line is on the terminal, to be wiped before the next output.
    progress_shown: bool,
    /// Lines of the view above the cursor.
    view_lines: usize,
    /// The size of the terminal when they were drawn.
    view_size: (usize, usize),
}

impl std::fmt::Debug for Printer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Printer").field("output", &self.output).finish_non_exhaustive()
    }
}

struct Stream {
    to: Box<dyn Write + Send>,
    colors: bool,
    /// Whether a write has failed: nothing more is written.
    closed: bool,
    failed: Option<io::Error>,
}

impl Stream {
    fn new(to: Box<dyn Write + Send>, colors: bool) -> Self {
        Self { to, colors, closed: false, failed: None }
    }

    fn write(&mut self, text: &str) {
        if self.closed {
            return;
        }
        if let Err(error) = self.to.write_all(text.as_bytes()).and_then(|()| self.to.flush()) {
            self.closed = true;
            if error.kind() != ErrorKind::BrokenPipe {
                self.failed = Some(error);
            }
        }
    }

    fn paint(&self, look: Look, text: &str) -> String {
        if !self.colors || look == Look::Plain || text.is_empty() {
            return text.to_owned();
        }
        let style = look.style();
        format!("{style}{text}{style:#}")
    }
}

impl Printer {
    /// A printer on these streams.
    pub(crate) fn new(
        out: Box<dyn Write + Send>,
        err: Box<dyn Write + Send>,
        terminal: Terminal,
        color: Color,
    ) -> Self {
        let colors = |is_terminal: bool| match color {
            Color::Always => true,
            Color::Never => false,
            Color::Auto => is_terminal,
        };
        Self {
            out: Stream::new(out, colors(terminal.stdout)),
            err: Stream::new(err, colors(terminal.stderr)),
            output: Output::default(),
            verbosity: Verbosity::Normal,
            terminal,
            place: Place::default(),
            progress_shown: false,
            view_lines: 0,
            view_size: (0, 0),
        }
    }

    /// Whether the output format is JSON.
    pub(crate) fn is_json(&self) -> bool {
        self.output == Output::Json
    }

    /// Text for stdout, coloured if stdout has colours.
    pub(crate) fn paint(&self, look: Look, text: impl AsRef<str>) -> String {
        self.out.paint(look, text.as_ref())
    }

    /// Prints a line of data.
    pub(crate) fn line(&mut self, text: impl AsRef<str>) {
        self.write(&format!("{}\n", text.as_ref()));
    }

    /// Prints data as it is.
    pub(crate) fn write(&mut self, text: &str) {
        self.wipe_progress();
        self.out.write(text);
    }

    /// Prints a JSON document.
    pub(crate) fn json(&mut self, document: &impl Serialize) {
        self.line(to_json(document));
    }

    /// Prints a command's result: the document with `-o json`, else the words on stderr.
    pub(crate) fn done(&mut self, document: &impl Serialize, words: impl AsRef<str>) {
        if self.is_json() {
            self.json(document);
        }
        self.say_unless_json(words);
    }

    /// Prints a message on stderr, unless `-q` was given.
    pub(crate) fn say(&mut self, text: impl AsRef<str>) {
        if self.verbosity >= Verbosity::Normal {
            self.message("message", Look::Plain, text.as_ref());
        }
    }

    /// As [`say`](Self::say), unless the output format is JSON.
    pub(crate) fn say_unless_json(&mut self, text: impl AsRef<str>) {
        if !self.is_json() {
            self.say(text);
        }
    }

    /// Prints a message on stderr if `-v` was given.
    pub(crate) fn detail(&mut self, text: impl AsRef<str>) {
        if self.verbosity >= Verbosity::Verbose {
            self.message("detail", Look::Dim, text.as_ref());
        }
    }

    /// Prints a warning on stderr.
    pub(crate) fn warn(&mut self, text: impl AsRef<str>) {
        self.message("warning", Look::Warn, text.as_ref());
    }

    /// Prints a message on stderr: a line of text, or with `-o json` an object on one line.
    fn message(&mut self, kind: &str, look: Look, text: &str) {
        self.wipe_progress();
        let text = self.place.add_to(text);
        let line = match (self.is_json(), look) {
            (true, _) => serde_json::json!({ kind: text }).to_string(),
            (false, Look::Warn) => format!("{} {text}", self.err.paint(look, "warning:")),
            (false, look) => self.err.paint(look, &text),
        };
        self.err.write(&format!("{line}\n"));
    }

    /// Writes text to stderr as it is: a prompt, or clap's output.
    pub(crate) fn write_err(&mut self, text: &str) {
        self.wipe_progress();
        self.err.write(text);
    }

    /// Replaces the progress line. Does nothing unless stderr is a terminal, nor with `-o json`.
    pub(crate) fn progress(&mut self, text: impl AsRef<str>) {
        if !self.shows_progress() {
            return;
        }
        // A line that wraps could not be wiped.
        let text = cut(text.as_ref(), self.terminal.columns().saturating_sub(1));
        let text = self.err.paint(Look::Dim, text);
        self.err.write(&format!("\r\x1b[K{text}"));
        self.progress_shown = true;
    }

    /// Whether the progress line is visible.
    pub(crate) fn shows_progress(&self) -> bool {
        self.terminal.stderr && !self.is_json() && self.verbosity >= Verbosity::Normal
    }

    /// Removes the progress line.
    pub(crate) fn wipe_progress(&mut self) {
        if std::mem::take(&mut self.progress_shown) {
            self.err.write("\r\x1b[K");
        }
    }

    /// Draws lines on a terminal over those of the last call. `draw` gets the columns that a line may have. Cuts the
    /// lines to the screen: a line that wraps or scrolls away cannot be overwritten.
    pub(crate) fn redraw(&mut self, draw: impl FnOnce(usize) -> Vec<Line>) {
        self.wipe_progress();
        let size = self.terminal.size();
        let (columns, rows) = (size.0.saturating_sub(1), size.1);
        let lines = draw(columns);
        let mut text = self.back_to_view_start(size);
        let shown = &lines[..lines.len().min(rows.saturating_sub(1))];
        for line in shown {
            let line = line.clone().cut(columns).paint(self);
            text.push_str(&format!("{line}\x1b[K\n"));
        }
        (self.view_lines, self.view_size) = (shown.len(), size);
        // One write, to avoid flicker.
        self.out.write(&format!("{text}\x1b[J"));
    }

    /// Removes the view.
    pub(crate) fn wipe_view(&mut self) {
        if self.view_lines > 0 {
            let text = self.back_to_view_start(self.terminal.size());
            self.out.write(&format!("{text}\x1b[J"));
            self.view_lines = 0;
        }
    }

    /// Moves the cursor to the first line of the view. After a change of the size nobody knows where that is: some
    /// terminals wrap the old lines anew, others do not. So the screen is cleared.
    fn back_to_view_start(&self, size: (usize, usize)) -> String {
        match self.view_lines {
            0 => String::new(),
            _ if size != self.view_size => "\x1b[2J\x1b[H".to_owned(),
            lines => format!("\x1b[{lines}A\r"),
        }
    }

    /// Prints an error.
    pub(crate) fn failure(&mut self, failure: &Failure) {
        self.wipe_progress();
        let hint = failure.hint.as_deref().map(|hint| self.place.add_to(hint));
        if self.is_json() {
            let document = to_json(&failure.to_json(hint.as_deref()));
            self.err.write(&format!("{document}\n"));
            return;
        }
        let mut text = format!("{} {}\n", self.err.paint(Look::Bad, "error:"), failure.message);
        for cause in &failure.causes {
            text.push_str(&format!("  {} {cause}\n", self.err.paint(Look::Dim, "cause:")));
        }
        if let Some(hint) = hint {
            text.push_str(&format!("  {} {hint}\n", self.err.paint(Look::Good, "hint:")));
        }
        self.err.write(&text);
    }

    /// Whether stdout is still open. A long list stops when it is not.
    pub(crate) fn has_reader(&self) -> bool {
        !self.out.closed
    }

    /// Whether stderr has colours.
    pub(crate) fn colors_on_err(&self) -> bool {
        self.err.colors
    }

    /// Whether stdout has colours.
    pub(crate) fn colors_on_out(&self) -> bool {
        self.out.colors
    }

    /// The error of a failed write to stdout, except for a closed pipe.
    pub(crate) fn take_error(&mut self) -> Option<io::Error> {
        self.out.failed.take()
    }
}

/// `1 item`, `2 items`.
pub(crate) fn count(number: u64, what: &str) -> String {
    if number == 1 { format!("1 {what}") } else { format!("{number} {what}s") }
}

/// Indented JSON.
pub(crate) fn to_json(document: &impl Serialize) -> String {
    serde_json::to_string_pretty(document).expect("our documents have string keys and plain values")
}
