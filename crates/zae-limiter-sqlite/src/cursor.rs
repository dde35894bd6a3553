//! Cursors: the key of a page's last row, as text.
//!
//! The format is `{list}|{value}|{value}…`. A value is `i` and a number, or `t` and a text in which
//! `%` is written `%25` and `|` is written `%7C`.

use rusqlite::types::Value;
use zae_limiter_core::{Cursor, PageRequest};

use crate::error::Failure;

const WRONG_CURSOR: Failure =
    Failure::Rejected("the cursor is not from this list; start again at the first page");

/// The type of a key's column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Number,
    Text,
}

/// Writes a cursor for a list.
pub(crate) fn write(list: &str, values: &[Value]) -> Cursor {
    let mut place = list.to_owned();
    for value in values {
        place.push('|');
        match value {
            Value::Integer(number) => place.push_str(&format!("i{number}")),
            Value::Text(text) => {
                place.push('t');
                place.push_str(&text.replace('%', "%25").replace('|', "%7C"));
            }
            other => unreachable!("keys are numbers and texts, not {other:?}"),
        }
    }
    Cursor::new(place)
}

/// Splits a page's cursor into the list's name and the values. `None` for the first page.
pub(crate) fn split(page: &PageRequest) -> Option<(&str, &str)> {
    page.after.as_ref().map(|cursor| {
        let place = cursor.as_str();
        place.split_once('|').unwrap_or((place, ""))
    })
}

/// Parses the values of a cursor, one for each of `kinds`.
pub(crate) fn values(text: &str, kinds: &[Kind]) -> Result<Vec<Value>, Failure> {
    let mut parts = text.split('|');
    let mut values = Vec::with_capacity(kinds.len());
    for kind in kinds {
        let part = parts.next().ok_or(WRONG_CURSOR)?;
        values.push(match (kind, part.split_at_checked(1)) {
            (Kind::Number, Some(("i", number))) => {
                Value::Integer(number.parse().map_err(|_| WRONG_CURSOR)?)
            }
            (Kind::Text, Some(("t", text))) => {
                Value::Text(text.replace("%7C", "|").replace("%25", "%"))
            }
            _ => return Err(WRONG_CURSOR),
        });
    }
    if parts.next().is_some() { Err(WRONG_CURSOR) } else { Ok(values) }
}

/// The values after which a page of a list starts. `None` for the first page.
pub(crate) fn read(
    page: &PageRequest,
    list: &str,
    kinds: &[Kind],
) -> Result<Option<Vec<Value>>, Failure> {
    match split(page) {
        None => Ok(None),
        Some((name, text)) if name == list => values(text, kinds).map(Some),
        Some(_) => Err(WRONG_CURSOR),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(place: &str) -> PageRequest {
        PageRequest { size: 1, after: Some(Cursor::new(place)) }
    }

    #[test]
    fn a_cursor_reads_back_what_was_written() {
        let kinds = [Kind::Text, Kind::Number, Kind::Text];
        for case in ["", "a", "a|b", "%7C", "%", "100%25|"] {
            let text = |text: &str| Value::Text(text.to_owned());
            let values = [text(case), Value::Integer(i64::MIN), text("z")];
            let cursor = write("list", &values);
            let request = PageRequest { size: 1, after: Some(cursor) };
            assert_eq!(read(&request, "list", &kinds).unwrap(), Some(values.to_vec()));
        }
    }

    #[test]
    fn a_cursor_of_another_list_is_rejected() {
        for place in
            ["", "x", "list", "list|", "list|t", "list|ia", "list|i1|i2", "other|i1", "é|é"]
        {
            let refused = read(&page(place), "list", &[Kind::Number]);
            assert!(matches!(refused, Err(Failure::Rejected(_))), "{place}");
        }
    }
}
