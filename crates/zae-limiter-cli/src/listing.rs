//! Long lists, printed page by page: rows for people, one JSON array for scripts. Memory holds one
//! page only.

use std::marker::PhantomData;

use serde::Serialize;
use zae_limiter::{Error, Pages};

use crate::columns::{Align, Cell, Columns};
use crate::printer::{Printer, to_json};

/// An item of a list: a table row, or a JSON object.
pub(crate) trait Item: Serialize {
    /// The column heads.
    const HEADS: &'static [(&'static str, Align)];

    /// A cell for each head.
    fn row(&self) -> Vec<Cell>;
}

/// Prints a list until its end, or until the reader closes the pipe. Returns the number of items.
///
/// # Errors
///
/// When a page cannot be read. The pages before it are printed already.
pub(crate) async fn print_pages<T, I: Item>(
    printer: &mut Printer,
    mut pages: Pages<T>,
    item: impl Fn(T) -> I,
) -> Result<u64, Error> {
    let mut listing = Listing::new();
    while let Some(page) = pages.next_page().await? {
        let items: Vec<I> = page.into_iter().map(&item).collect();
        listing.print(printer, &items);
        if !printer.has_reader() {
            break;
        }
    }
    Ok(listing.end(printer))
}

/// A list that prints page by page.
#[derive(Debug)]
pub(crate) struct Listing<I> {
    table: Columns,
    /// The JSON text before the first item.
    opening: String,
    /// The indentation of the items' lines.
    indent: &'static str,
    count: u64,
    items: PhantomData<fn(I)>,
}

impl<I: Item> Listing<I> {
    /// A list that is a whole JSON document.
    pub(crate) fn new() -> Self {
        Self::after("[".to_owned(), "  ")
    }

    /// A list that is the `field` of a JSON document, after the fields of `before`.
    pub(crate) fn inside(before: &impl Serialize, field: &str) -> Self {
        let object = to_json(before);
        let open = object.strip_suffix("\n}").expect("an object with fields, over several lines");
        Self::after(format!("{open},\n  \"{field}\": ["), "    ")
    }

    fn after(opening: String, indent: &'static str) -> Self {
        let table = Columns::new(I::HEADS);
        Self { table, opening, indent, count: 0, items: PhantomData }
    }

    /// Prints more items.
    pub(crate) fn print(&mut self, printer: &mut Printer, items: &[I]) {
        self.print_with(printer, items, None);
    }

    /// As [`print`](Self::print), with an extra row below that is not in the JSON document.
    pub(crate) fn print_with(
        &mut self,
        printer: &mut Printer,
        items: &[I],
        below: Option<Vec<Cell>>,
    ) {
        if !printer.is_json() {
            let rows: Vec<Vec<Cell>> = items.iter().map(Item::row).chain(below).collect();
            self.table.print(printer, &rows);
        } else if !items.is_empty() {
            let mut text = std::mem::take(&mut self.opening);
            for (at, item) in items.iter().enumerate() {
                text.push_str(if at == 0 && self.count == 0 { "\n" } else { ",\n" });
                // JSON escapes line breaks within strings, so every line belongs to the layout.
                for (at, line) in to_json(item).lines().enumerate() {
                    text.push_str(if at == 0 { "" } else { "\n" });
                    text.push_str(self.indent);
                    text.push_str(line);
                }
            }
            printer.write(&text);
        }
        self.count += items.len() as u64;
    }

    /// Ends a list that is a whole document. Returns the number of items.
    pub(crate) fn end(self, printer: &mut Printer) -> u64 {
        self.close(printer, "\n")
    }

    /// Ends a list that is a field, then the document with the fields of `after`.
    pub(crate) fn end_with(self, printer: &mut Printer, after: &impl Serialize) -> u64 {
        let object = to_json(after);
        let rest = object.strip_prefix('{').expect("an object with fields");
        self.close(printer, &format!(",{rest}\n"))
    }

    fn close(self, printer: &mut Printer, rest: &str) -> u64 {
        if printer.is_json() {
            let bracket = match self.count {
                0 => "]".to_owned(),
                _ => format!("\n{}]", &self.indent[2..]),
            };
            printer.write(&format!("{}{bracket}{rest}", self.opening));
        }
        self.count
    }
}
