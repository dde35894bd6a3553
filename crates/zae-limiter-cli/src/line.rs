//! A styled line of text that knows its width.

use unicode_width::{UnicodeWidthChar as _, UnicodeWidthStr as _};

use crate::printer::{Look, Printer};

/// A line of styled pieces.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Line(Vec<(Look, String)>);

impl Line {
    /// A line in one look.
    pub(crate) fn of(look: Look, text: impl AsRef<str>) -> Self {
        let mut line = Self::default();
        line.push(look, text);
        line
    }

    /// Appends text.
    pub(crate) fn push(&mut self, look: Look, text: impl AsRef<str>) {
        let text = text.as_ref();
        match self.0.last_mut() {
            // Avoids needless escape sequences.
            Some((last, before)) if *last == look => before.push_str(text),
            _ => self.0.push((look, text.to_owned())),
        }
    }

    /// Width in columns.
    pub(crate) fn width(&self) -> usize {
        self.0.iter().map(|(_, text)| text.width()).sum()
    }

    /// Appends spaces up to a column.
    pub(crate) fn pad_to(&mut self, column: usize) {
        let missing = column.saturating_sub(self.width());
        self.push(Look::Plain, " ".repeat(missing));
    }

    /// Cuts the line to a width.
    #[must_use]
    pub(crate) fn cut(mut self, columns: usize) -> Self {
        let mut left = columns;
        for (_, text) in &mut self.0 {
            let whole = text.width();
            let fits = cut(text, left).len();
            text.truncate(fits);
            // After a cut piece, later pieces must not move up, even if they would fit.
            left = left.saturating_sub(whole);
        }
        self
    }

    /// The text with the colours of stdout.
    pub(crate) fn paint(&self, printer: &Printer) -> String {
        let painted: String =
            self.0.iter().map(|(look, text)| printer.paint(*look, text)).collect();
        painted.trim_end().to_owned()
    }

    /// The text alone.
    #[cfg(test)]
    pub(crate) fn plain(&self) -> String {
        let text: String = self.0.iter().map(|(_, text)| text.as_str()).collect();
        text.trim_end().to_owned()
    }
}

/// The longest prefix of a text that fits into `columns`.
pub(crate) fn cut(text: &str, columns: usize) -> &str {
    let mut width = 0;
    for (at, c) in text.char_indices() {
        width += c.width().unwrap_or(0);
        if width > columns {
            return &text[..at];
        }
    }
    text
}

/// Wraps words at `columns`. A longer word gets its own line.
pub(crate) fn wrap(text: &str, columns: usize) -> String {
    let mut wrapped = String::new();
    let mut width = 0;
    for word in text.split_whitespace() {
        if width > 0 && width + 1 + word.width() > columns {
            wrapped.push('\n');
            width = 0;
        } else if width > 0 {
            wrapped.push(' ');
            width += 1;
        }
        wrapped.push_str(word);
        width += word.width();
    }
    wrapped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_cut_by_columns_and_not_by_bytes() {
        let mut line = Line::of(Look::Good, "▁▂▃");
        line.push(Look::Bad, "漢字x");
        assert_eq!(line.width(), 8);
        for (columns, text) in [(0, ""), (2, "▁▂"), (4, "▁▂▃"), (5, "▁▂▃漢"), (80, "▁▂▃漢字x")]
        {
            assert_eq!(line.clone().cut(columns).plain(), text, "{columns}");
        }
    }

    #[test]
    fn words_are_wrapped() {
        assert_eq!(wrap("", 5), "");
        assert_eq!(wrap("a bc  def", 4), "a bc\ndef");
        assert_eq!(wrap("abcdef gh i", 4), "abcdef\ngh i");
    }
}
