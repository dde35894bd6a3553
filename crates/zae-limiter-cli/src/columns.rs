//! Tables with aligned columns. They print page by page, so that memory holds one page only.

use unicode_width::UnicodeWidthStr as _;

use crate::printer::{Look, Printer};

/// The alignment of a column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Align {
    /// Text.
    Left,
    /// Numbers.
    Right,
}

/// The text of one cell.
#[derive(Clone, Debug)]
pub(crate) struct Cell {
    text: String,
    look: Look,
}

impl Cell {
    /// Replaces control characters with spaces.
    pub(crate) fn new(look: Look, text: impl ToString) -> Self {
        // A line break or an escape sequence in user data must not break the table.
        let text = text.to_string().replace(|c: char| c.is_control(), " ");
        Self { text, look }
    }
}

impl<T: ToString> From<T> for Cell {
    fn from(text: T) -> Self {
        Self::new(Look::Plain, text)
    }
}

/// A table that prints page by page.
#[derive(Debug)]
pub(crate) struct Columns {
    heads: Vec<(&'static str, Align)>,
    widths: Vec<usize>,
    head_printed: bool,
}

impl Columns {
    /// A table with these heads.
    pub(crate) fn new(heads: &[(&'static str, Align)]) -> Self {
        let widths = heads.iter().map(|(head, _)| head.width()).collect();
        Self { heads: heads.to_vec(), widths, head_printed: false }
    }

    /// Leaves out columns that do not fit, in the given order of their heads, with their cells.
    pub(crate) fn fit(
        heads: &[(&'static str, Align)],
        rows: Vec<Vec<Cell>>,
        columns: usize,
        order: &[&str],
    ) -> (Self, Vec<Vec<Cell>>) {
        let (mut heads, mut rows) = (heads.to_vec(), rows);
        for dropped in order {
            let widths = heads.iter().enumerate().map(|(at, (head, _))| {
                rows.iter().map(|row| row[at].text.width()).fold(head.width(), usize::max)
            });
            let gaps = 2 * heads.len().saturating_sub(1);
            if widths.sum::<usize>() + gaps <= columns {
                break;
            }
            if let Some(at) = heads.iter().position(|(head, _)| head == dropped) {
                heads.remove(at);
                rows.iter_mut().for_each(|row| drop(row.remove(at)));
            }
        }
        (Self::new(&heads), rows)
    }

    /// Prints rows. Each column is as wide as its widest cell so far.
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
                Align::Right => line.push_str(&format!("{pad}{painted}")),
                Align::Left if at + 1 == row.len() => line.push_str(&painted),
                Align::Left => line.push_str(&format!("{painted}{pad}")),
            }
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
}

/// Prints one record, a line for each field.
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
