//! Reading one partition, page by page.

use std::ops::Range as Span;
use std::sync::Arc;

use zae_limiter_core::{PAGE_MAX, Page, PageRequest, StoreError, Timestamp, Window};
use zae_limiter_schema::{
    Consistency, Index, Item, PAGE_ITEMS_MAX, Query as TableQuery, Range, Step,
};

use crate::cursor;
use crate::driver::Driver;

/// The most pages of the table that are read for one page of a list. If few items of a partition belong to the
/// list, its page may be short and still have a next one.
const TABLE_PAGES_MAX: usize = 16;

pub(crate) fn size(page: &PageRequest) -> usize {
    page.size.clamp(1, PAGE_MAX)
}

/// A list in one partition.
pub(crate) struct Walk {
    /// The list's name in cursors.
    pub(crate) list: &'static str,
    pub(crate) index: Option<Index>,
    pub(crate) partition: String,
    pub(crate) range: Range,
    pub(crate) step: Step,
    /// Only some of the items belong to the list.
    pub(crate) is_selective: bool,
}

impl Walk {
    pub(crate) fn new(
        list: &'static str,
        index: Option<Index>,
        partition: String,
        range: Range,
    ) -> Self {
        Self { list, index, partition, range, step: Step::Forward, is_selective: false }
    }

    pub(crate) fn selective(self) -> Self {
        Self { is_selective: true, ..self }
    }

    /// The key after which a page starts.
    pub(crate) fn start(&self, page: &PageRequest) -> Result<Option<Item>, StoreError> {
        match cursor::read(page, &[self.list])? {
            None => Ok(None),
            Some((_, texts)) => cursor::start(texts, self.index, &self.partition),
        }
    }
}

impl Driver {
    /// Reads from a key on until `size` items are accepted.
    pub(crate) async fn walk<T>(
        self: &Arc<Self>,
        walk: &Walk,
        after: Option<Item>,
        size: usize,
        mut accept: impl FnMut(&Item) -> Result<Option<T>, StoreError>,
    ) -> Result<Page<T>, StoreError> {
        let mut query = TableQuery {
            index: walk.index,
            partition: walk.partition.clone(),
            range: walk.range.clone(),
            step: walk.step,
            limit: PAGE_ITEMS_MAX,
            after,
            consistency: Consistency::freshest(walk.index),
        };
        let mut accepted = Vec::new();
        for _ in 0..TABLE_PAGES_MAX {
            let left = size - accepted.len();
            // Some more, because a few items do not belong: days and months among hours.
            let some_more = if walk.is_selective { left / 16 + 2 } else { 0 };
            query.limit = (left + some_more).min(PAGE_ITEMS_MAX);
            let output = self.query(&query).await?;
            let count = output.items.len();
            for (at, item) in output.items.iter().enumerate() {
                accepted.extend(accept(item)?);
                let is_end = at + 1 == count && output.next.is_none();
                if accepted.len() == size && !is_end {
                    let next = Some(cursor::behind(walk.list, walk.index, item));
                    return Ok(Page { items: accepted, next });
                }
            }
            match output.next {
                Some(after) => query.after = Some(after),
                None => return Ok(Page { items: accepted, next: None }),
            }
        }
        let next = query.after.map(|after| cursor::behind(walk.list, walk.index, &after));
        Ok(Page { items: accepted, next })
    }
}

/// The labels of the first and the last window that may start in a span. Labels sort by time.
pub(crate) fn labels(window: Window, span: &Span<Timestamp>) -> [String; 2] {
    [span.start, span.end].map(|moment| window.label(window.start(moment)))
}
