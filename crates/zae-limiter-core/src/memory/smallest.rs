//! A page of unordered items: the first ones after the cursor.

use std::collections::BTreeMap;

use crate::error::{StoreError, StoreErrorKind};
use crate::page::{Cursor, Page, PageRequest};

/// The prefix of this store's cursors.
const CURSOR: &str = "memory:";

/// The place of an item in a list: its fields, in the order they are compared.
pub(super) fn place<const N: usize>(fields: [&str; N]) -> String {
    // No name contains NUL, and NUL sorts before everything: a prefix comes first.
    fields.join("\0")
}

/// Collects the items with the smallest places, no more than a page of them.
pub(super) struct Smallest<T> {
    size: usize,
    after: Option<String>,
    found: BTreeMap<String, T>,
    more: bool,
}

impl<T> Smallest<T> {
    pub(super) fn new(page: &PageRequest) -> Result<Self, StoreError> {
        let after = match &page.after {
            None => None,
            Some(cursor) => match cursor.as_str().strip_prefix(CURSOR) {
                Some(place) => Some(place.to_owned()),
                None => {
                    let message = "the cursor is from another store; start from the first page";
                    return Err(StoreError::new(StoreErrorKind::Rejected, message));
                }
            },
        };
        let size = PageRequest::first(page.size).size;
        Ok(Self { size, after, found: BTreeMap::new(), more: false })
    }

    /// The place after which the page starts.
    pub(super) fn after(&self) -> Option<&str> {
        self.after.as_deref()
    }

    /// Whether no greater place can change the page any more.
    pub(super) fn is_complete(&self) -> bool {
        self.more
    }

    /// Takes the item if it is among the smallest so far.
    pub(super) fn offer(&mut self, place: String, item: impl FnOnce() -> T) {
        if self.after.as_ref().is_some_and(|after| place <= *after) {
            return;
        }
        if self.found.len() == self.size {
            self.more = true;
            match self.found.last_key_value() {
                Some((last, _)) if place < *last => self.found.pop_last(),
                _ => return,
            };
        }
        self.found.insert(place, item());
    }

    pub(super) fn into_page(self) -> Page<T> {
        let last = self.found.last_key_value().map(|(place, _)| place);
        let next = if self.more { last } else { None };
        Page {
            next: next.map(|place| Cursor::new(format!("{CURSOR}{place}"))),
            items: self.found.into_values().collect(),
        }
    }
}
