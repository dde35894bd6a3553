use std::collections::VecDeque;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use futures_core::Stream;
use futures_core::future::BoxFuture;

use crate::error::Error;
use crate::page::{Page, PageRequest};

/// The default number of items on a page.
const PAGE: usize = 500;

/// A list that is read page by page, so that only one page is in memory.
///
/// ```
/// # use zae_limiter_core::{MemoryStore, RateLimiter};
/// # tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(async {
/// # let limiter = RateLimiter::builder(MemoryStore::new()).open().await?;
/// let mut pages = limiter.children("project-1")?;
/// while let Some(children) = pages.next_page().await? {
///     for child in children {
///         println!("{}", child.id);
///     }
/// }
/// # Ok::<(), zae_limiter_core::Error>(())
/// # }).unwrap();
/// ```
///
/// It is also a [`Stream`] of single items, for the combinators of the `futures` crate. The stream ends after the last
/// item, or after the first error.
#[must_use = "nothing is read before the first page is requested"]
pub struct Pages<T> {
    fetch: Box<dyn Fn(PageRequest) -> PageFuture<T> + Send>,
    /// The next page to read; `None` after the last one.
    next: Option<PageRequest>,
    /// Items that the stream has read and not yet returned.
    ready: VecDeque<T>,
    /// The page that the stream is reading.
    reading: Option<PageFuture<T>>,
    /// Whether the stream has returned an error.
    has_failed: bool,
}

/// The read of one page.
type PageFuture<T> = BoxFuture<'static, Result<Page<T>, Error>>;

impl<T> Pages<T> {
    pub(crate) fn new<F>(fetch: impl Fn(PageRequest) -> F + Send + 'static) -> Self
    where
        F: Future<Output = Result<Page<T>, Error>> + Send + 'static,
    {
        let fetch = move |page| Box::pin(fetch(page)) as PageFuture<T>;
        Self {
            fetch: Box::new(fetch),
            next: Some(PageRequest::first(PAGE)),
            ready: VecDeque::new(),
            reading: None,
            has_failed: false,
        }
    }

    /// Sets the most items on a page: 1 to [`PAGE_MAX`](crate::PAGE_MAX) (500).
    pub fn page_size(mut self, items: usize) -> Self {
        if let Some(next) = &mut self.next {
            next.size = PageRequest::first(items).size;
        }
        self
    }

    /// The next page that is not empty, or `None` after the last one. Items that the stream has read, but not returned,
    /// come first.
    ///
    /// # Errors
    ///
    /// When the store cannot be read. The next call reads the same page again.
    pub async fn next_page(&mut self) -> Result<Option<Vec<T>>, Error> {
        if !self.ready.is_empty() {
            return Ok(Some(std::mem::take(&mut self.ready).into()));
        }
        self.reading = None;
        while let Some(request) = &self.next {
            let page = (self.fetch)(request.clone()).await?;
            self.advance(page.next);
            if !page.items.is_empty() {
                return Ok(Some(page.items));
            }
        }
        Ok(None)
    }

    /// Reads all items, for short lists.
    ///
    /// # Errors
    ///
    /// When the store cannot be read.
    pub async fn all(mut self) -> Result<Vec<T>, Error> {
        let mut all = Vec::new();
        while let Some(items) = self.next_page().await? {
            all.extend(items);
        }
        Ok(all)
    }

    fn advance(&mut self, after: Option<crate::Cursor>) {
        let size = self.next.as_ref().map_or(PAGE, |request| request.size);
        self.next = after.map(|after| PageRequest { size, after: Some(after) });
    }
}

impl<T: Unpin> Stream for Pages<T> {
    type Item = Result<T, Error>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            if let Some(item) = self.ready.pop_front() {
                return Poll::Ready(Some(Ok(item)));
            }
            if self.has_failed {
                return Poll::Ready(None);
            }
            if self.reading.is_none() {
                let Some(request) = self.next.clone() else { return Poll::Ready(None) };
                self.reading = Some((self.fetch)(request));
            }
            let Some(reading) = &mut self.reading else { unreachable!("made above") };
            let page = ready!(reading.as_mut().poll(context));
            self.reading = None;
            match page {
                Ok(page) => {
                    self.advance(page.next);
                    self.ready = page.items.into();
                }
                Err(error) => {
                    self.has_failed = true;
                    return Poll::Ready(Some(Err(error)));
                }
            }
        }
    }
}

impl<T> fmt::Debug for Pages<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pages").field("next", &self.next).finish_non_exhaustive()
    }
}
