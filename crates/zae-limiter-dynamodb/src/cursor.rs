//! Cursors: the list that a page belongs to, and the key after which the next page starts.
//!
//! `{list}|{text}|{text}…`, where `%` and `|` within a text are written `%25` and `%7C`. The texts are the key
//! of the last item without its partition, which the next request names again.

use zae_limiter_core::{Cursor, PageRequest, StoreError, StoreErrorKind};
use zae_limiter_schema::{Index, Item, Value};

pub(crate) fn foreign() -> StoreError {
    let message = "the cursor is not from this list; start again at the first page";
    StoreError::new(StoreErrorKind::Rejected, message)
}

/// Writes a cursor.
pub(crate) fn write<'a>(list: &str, texts: impl IntoIterator<Item = &'a str>) -> Cursor {
    let mut place = list.to_owned();
    for text in texts {
        place.push('|');
        place.push_str(&text.replace('%', "%25").replace('|', "%7C"));
    }
    Cursor::new(place)
}

/// Reads a cursor: which of these lists it belongs to, and its texts. `None` for the first page.
pub(crate) fn read(
    page: &PageRequest,
    lists: &[&'static str],
) -> Result<Option<(usize, Vec<String>)>, StoreError> {
    let Some(cursor) = &page.after else { return Ok(None) };
    let mut parts = cursor.as_str().split('|');
    let name = parts.next().unwrap_or_default();
    let list = lists.iter().position(|list| *list == name).ok_or_else(foreign)?;
    let texts = parts.map(|part| part.replace("%7C", "|").replace("%25", "%")).collect();
    Ok(Some((list, texts)))
}

/// The key attributes besides the partition key.
fn places(index: Option<Index>) -> Vec<&'static str> {
    match index {
        None => vec!["SK"],
        Some(index) => vec![index.sk(), "PK", "SK"],
    }
}

/// The cursor after an item.
pub(crate) fn behind(list: &str, index: Option<Index>, item: &Item) -> Cursor {
    let text = |name| item.get(name).and_then(Value::as_str).unwrap_or_default();
    write(list, places(index).into_iter().map(text))
}

/// The key after which a page starts, as the table needs it. `None` without texts: the partition's start.
pub(crate) fn start(
    texts: Vec<String>,
    index: Option<Index>,
    partition: &str,
) -> Result<Option<Item>, StoreError> {
    if texts.is_empty() {
        return Ok(None);
    }
    let places = places(index);
    if places.len() != texts.len() || texts.iter().any(String::is_empty) {
        return Err(foreign());
    }
    let places = places.into_iter().map(str::to_owned);
    let mut key: Item = places.zip(texts.into_iter().map(Value::S)).collect();
    key.insert(index.map_or("PK", Index::pk).to_owned(), Value::text(partition));
    Ok(Some(key))
}

/// The one text of a cursor.
pub(crate) fn only(texts: Vec<String>) -> Result<String, StoreError> {
    <[String; 1]>::try_from(texts).map(|[text]| text).map_err(|_| foreign())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(after: Cursor) -> PageRequest {
        PageRequest { size: 1, after: Some(after) }
    }

    #[test]
    fn a_cursor_comes_back_as_it_was_written() {
        let text = |text: &str| Value::text(text);
        for odd in ["a", "a|b", "%7C", "%", "100%25|"] {
            let item = Item::from([
                ("PK".to_owned(), text("ns/ENTITY#a")),
                ("SK".to_owned(), text(odd)),
                ("GSI3PK".to_owned(), text("ns/ENTITY_CONFIG#r")),
                ("GSI3SK".to_owned(), text("z")),
            ]);
            let request = page(behind("b", Some(Index::Entity), &item));
            let (list, texts) = read(&request, &["a", "b"]).unwrap().unwrap();
            assert_eq!(list, 1);
            let start = start(texts, Some(Index::Entity), "ns/ENTITY_CONFIG#r").unwrap();
            assert_eq!(start, Some(item));
        }
        let (list, texts) = read(&page(write("b", [])), &["a", "b"]).unwrap().unwrap();
        assert_eq!((list, start(texts, None, "p").unwrap()), (1, None));
    }

    #[test]
    fn a_foreign_is_refused() {
        for place in ["", "x", "x|a", "é|é", "list|", "list|a|b", "list||", "list|a|b|c|d"] {
            let read = read(&page(Cursor::new(place)), &["list"]);
            let read = read.map(|found| found.unwrap().1).and_then(|texts| start(texts, None, "p"));
            assert_eq!(read.unwrap_err().kind(), StoreErrorKind::Rejected, "{place}");
        }
    }
}
