//! Aligned columns, printed page by page, so that a long list is never in memory as a whole.

use unicode_width::UnicodeWidthStr as _;

use crate::printer::{Look, Printer};

/// Which way a column leans.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lean {
    /// Text.
    Left,
    /// Numbers.
    Right,
}

/// A piece of text in a column.
#[derive(Clone, Debug)]
pub(crate) struct Cell {
    text: String,
    look: Look,
}

impl Cell {
    /// Text in a look.
    pub(crate) fn new(look: Look, text: impl ToString) -> Self {
        // A line break or an escape in somebody's metadata must not spoil the table.
        let text = text.to_string().replace(|c: char| c.is_control(), " ");
        Self { text, look }
    }
}

impl<T: ToString> From<T> for Cell {
    fn from(text: T) -> Self {
        Self::new(Look::Plain, text)
    }
}

/// A table that is being printed.
#[derive(Debug)]
pub(crate) struct Columns {
    heads: Vec<(&'static str, Lean)>,
    widths: Vec<usize>,
    head_printed: bool,
}

impl Columns {
    /// A table with these heads.
    pub(crate) fn new(heads: &[(&'static str, Lean)]) -> Self {
        let widths = heads.iter().map(|(head, _)| head.width()).collect();
        Self { heads: heads.to_vec(), widths, head_printed: false }
    }

    /// Prints some rows. The columns are as wide as the widest cell so far.
    pub(crate) fn print(&mut self, printer: &mut Printer, rows: &[Vec<Cell>]) {
        for row in rows {
            for (width, cell) in self.widths.iter_mut().zip(row) {
                *width = (*width).max(cell.text.width());
            }
        }
        let mut text = String::new();
        if !std::mem::replace(&mut self.head_printed, true) {
            let heads: Vec<Cell> =
                self.heads.iter().map(|(head, _)| Cell::new(Look::Head, head)).collect();
            self.line(printer, &heads, &mut text);
        }
        for row in rows {
            self.line(printer, row, &mut text);
        }
        printer.write(&text);
    }

    fn line(&self, printer: &Printer, row: &[Cell], text: &mut String) {
        let mut line = String::new();
        for (at, cell) in row.iter().enumerate() {
            let pad = " ".repeat(self.widths[at].saturating_sub(cell.text.width()));
            let painted = printer.paint(cell.look, &cell.text);
            if at > 0 {
                line.push_str("  ");
            }
            match self.heads[at].1 {
                Lean::Right => line.push_str(&format!("{pad}{painted}")),
                Lean::Left if at + 1 == row.len() => line.push_str(&painted),
                Lean::Left => line.push_str(&format!("{painted}{pad}")),
            }
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
}

/// Prints what is known about one thing, a line for each field.
pub(crate) fn print_fields(printer: &mut Printer, fields: Vec<(&'static str, Cell)>) {
    let width = fields.iter().map(|(name, _)| name.width()).max().unwrap_or(0);
    let mut text = String::new();
    for (name, value) in fields {
        let pad = " ".repeat(width - name.width());
        let (name, value) =
            (printer.paint(Look::Head, name), printer.paint(value.look, &value.text));
        text.push_str(format!("{name}{pad}  {value}").trim_end());
        text.push('\n');
    }
    printer.write(&text);
}
