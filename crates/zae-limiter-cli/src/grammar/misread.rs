use std::fmt;
use std::ops::Range;

/// Text that is not what it should be: where it goes wrong, and how it is written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Misread {
    input: String,
    at: Range<usize>,
    problem: String,
    rule: String,
}

impl Misread {
    /// `problem` says what is wrong with `input[at]`; `rule` says how to write it.
    pub fn new(
        input: &str,
        at: Range<usize>,
        problem: impl Into<String>,
        rule: impl Into<String>,
    ) -> Self {
        Self { input: input.to_owned(), at, problem: problem.into(), rule: rule.into() }
    }

    /// Where `part`, a slice of `input`, stands in it.
    pub(crate) fn place(input: &str, part: &str) -> Range<usize> {
        let start = part.as_ptr().addr().saturating_sub(input.as_ptr().addr()).min(input.len());
        start..(start + part.len()).min(input.len())
    }

    /// The part of the input that is wrong, as a range of bytes.
    pub fn at(&self) -> Range<usize> {
        self.at.clone()
    }
}

/// The longest input that is shown with a marker under it.
const SHOWN_MAX: usize = 100;

impl fmt::Display for Misread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.problem)?;
        // What would spoil the terminal, or the place of the marker, is not repeated.
        let plain = self.input.chars().all(|c| c.is_ascii_graphic() || c == ' ');
        if plain && !self.input.is_empty() && self.input.len() <= SHOWN_MAX {
            let marker = "^".repeat(self.at.len().max(1));
            writeln!(f, "\n    {}\n    {}{marker}\n", self.input, " ".repeat(self.at.start))?;
        }
        write!(f, "  {}", self.rule)
    }
}

impl std::error::Error for Misread {}
