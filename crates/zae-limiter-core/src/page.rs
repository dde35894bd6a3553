//! Long lists, a page at a time.

use std::fmt;

/// The most items a page may have.
pub const PAGE_MAX: usize = 1_000;

/// Where a page ended; only the store that made it can read it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cursor(String);

impl Cursor {
    /// A place in a store's own words.
    pub fn new(place: impl Into<String>) -> Self {
        Self(place.into())
    }

    /// The place in the store's own words.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// Which page of a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PageRequest {
    /// At most so many items, 1 to [`PAGE_MAX`].
    pub size: usize,
    /// From where on; from the beginning when absent.
    pub after: Option<Cursor>,
}

impl PageRequest {
    /// The first page of `size` items.
    pub fn first(size: usize) -> Self {
        Self { size: size.clamp(1, PAGE_MAX), after: None }
    }
}

/// A page. It may be empty and still not be the last one.
#[derive(Clone, PartialEq, Eq)]
pub struct Page<T> {
    /// The items.
    pub items: Vec<T>,
    /// Where the next page starts; absent on the last one.
    pub next: Option<Cursor>,
}

impl<T> Page<T> {
    /// The same page of other things.
    pub fn filter_map<U>(self, each: impl FnMut(T) -> Option<U>) -> Page<U> {
        Page { items: self.items.into_iter().filter_map(each).collect(), next: self.next }
    }
}

impl<T: fmt::Debug> fmt::Debug for Page<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Page").field("items", &self.items).field("next", &self.next).finish()
    }
}
