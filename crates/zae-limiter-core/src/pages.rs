use futures_core::future::BoxFuture;
use std::fmt;
use std::future::Future;

use crate::error::Error;
use crate::page::{Page, PageRequest};

/// How many items a page has unless somebody asks for another number.
const PAGE: usize = 500;

/// A long list, read page by page: however long it is, no more than a page is in memory.
///
/// ```
/// # use zae_limiter_core::{MemoryStore, RateLimiter};
/// # tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(async {
/// # let limiter = RateLimiter::builder(MemoryStore::new()).open().await?;
/// let mut pages = limiter.children("project-1")?;
/// while let Some(children) = pages.next().await? {
///     for child in children {
///         println!("{}", child.id);
///     }
/// }
/// # Ok::<(), zae_limiter_core::Error>(())
/// # }).unwrap();
/// ```
#[must_use = "nothing is read before the first page is asked for"]
pub struct Pages<T> {
    fetch: Box<dyn Fn(PageRequest) -> BoxFuture<'static, Result<Page<T>, Error>> + Send>,
    /// The next page to read; absent after the last one.
    next: Option<PageRequest>,
}

impl<T> Pages<T> {
    pub(crate) fn new<F>(fetch: impl Fn(PageRequest) -> F + Send + 'static) -> Self
    where
        F: Future<Output = Result<Page<T>, Error>> + Send + 'static,
    {
        let fetch = move |page| Box::pin(fetch(page)) as BoxFuture<'static, Result<Page<T>, Error>>;
        Self { fetch: Box::new(fetch), next: Some(PageRequest::first(PAGE)) }
    }

    /// With at most so many items on a page, 1 to [`PAGE_MAX`](crate::PAGE_MAX).
    pub fn page_size(mut self, items: usize) -> Self {
        if let Some(next) = &mut self.next {
            next.size = PageRequest::first(items).size;
        }
        self
    }

    /// The next page that has anything on it, or `None` after the last.
    ///
    /// # Errors
    ///
    /// When the store cannot be read. The same page can be asked for again.
    pub async fn next(&mut self) -> Result<Option<Vec<T>>, Error> {
        while let Some(request) = &self.next {
            let page = (self.fetch)(request.clone()).await?;
            let size = request.size;
            self.next = page.next.map(|after| PageRequest { size, after: Some(after) });
            if !page.items.is_empty() {
                return Ok(Some(page.items));
            }
        }
        Ok(None)
    }

    /// All items at once, for lists that are known to be short.
    ///
    /// # Errors
    ///
    /// When the store cannot be read.
    pub async fn all(mut self) -> Result<Vec<T>, Error> {
        let mut all = Vec::new();
        while let Some(items) = self.next().await? {
            all.extend(items);
        }
        Ok(all)
    }
}

impl<T> fmt::Debug for Pages<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pages").field("next", &self.next).finish_non_exhaustive()
    }
}
