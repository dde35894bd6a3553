//! Pages of long lists.

use std::fmt;

/// The most items a page may have.
pub const PAGE_MAX: usize = 1_000;

/// The position where a page ended. Only the store that made it can read it. It may contain an entity id,
/// so its `Debug` text is redacted.
#[derive(Clone, PartialEq, Eq)]
pub struct Cursor(String);

impl fmt::Debug for Cursor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Cursor").finish_non_exhaustive()
    }
}

impl Cursor {
    /// A position, in the store's own format.
    pub fn new(place: impl Into<String>) -> Self {
        Self(place.into())
    }

    /// The position, in the store's own format.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// A request for one page of a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PageRequest {
    /// The most items on the page: 1 to [`PAGE_MAX`].
    pub size: usize,
    /// The cursor of the previous page; `None` for the first page.
    pub after: Option<Cursor>,
}

impl PageRequest {
    /// The first page of `size` items.
    pub fn first(size: usize) -> Self {
        Self { size: size.clamp(1, PAGE_MAX), after: None }
    }
}

/// A page of a list. It may be empty without being the last one.
#[derive(Clone, PartialEq, Eq)]
pub struct Page<T> {
    /// The items.
    pub items: Vec<T>,
    /// The cursor for the next page; `None` on the last one.
    pub next: Option<Cursor>,
}

impl<T> Page<T> {
    /// The page with its items filtered and mapped.
    pub fn filter_map<U>(self, each: impl FnMut(T) -> Option<U>) -> Page<U> {
        Page { items: self.items.into_iter().filter_map(each).collect(), next: self.next }
    }
}

impl<T: fmt::Debug> fmt::Debug for Page<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Page").field("items", &self.items).field("next", &self.next).finish()
    }
}
