//! Usage by entity and resource, per hour, day or month.

use std::collections::BTreeMap;

use zae_limiter_model::{EntityId, LimitName, MILLI, Millitokens, ResourceName, Timestamp};

use crate::error::Error;
use crate::limiter::RateLimiter;
use crate::pages::Pages;
use crate::record::{Record, Usage};
use crate::store::Query;
use crate::window::Window;

/// A query for usage records. Made by [`RateLimiter::usage`].
#[derive(Clone)]
#[must_use = "nothing is read before `pages` or `summary` is called"]
pub struct UsageQuery<'a> {
    limiter: &'a RateLimiter,
    entity: Option<&'a str>,
    resource: Option<&'a str>,
    window: Window,
    from: Timestamp,
    until: Timestamp,
}

/// Totals and averages over usage records.
///
/// ```
/// # use zae_limiter_core::{Limit, MemoryStore, RateLimiter};
/// # tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(async {
/// # let limiter = RateLimiter::builder(MemoryStore::new())
/// #     .default_limits([Limit::per_minute("rpm", 100)]).open().await?;
/// limiter.acquire("key-1", "gpt-4").take("rpm", 3).await?.commit().await?;
/// limiter.acquire("key-2", "gpt-4").take("rpm", 5).await?.commit().await?;
/// let summary = limiter.usage().resource("gpt-4").summary().await?;
/// assert_eq!(summary.consumed["rpm"], 8);
/// assert_eq!(summary.events, 2);
/// # Ok::<(), zae_limiter_core::Error>(())
/// # }).unwrap();
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct UsageSummary {
    /// Net consumption by limit, in whole tokens, rounded down.
    pub consumed: BTreeMap<LimitName, i64>,
    /// Net consumption by limit per record, in tokens. A window without usage has no record, so it does not count.
    pub average: BTreeMap<LimitName, f64>,
    /// The number of changes of buckets: acquires, and settlements of leases.
    pub events: u64,
    /// The number of records: one for each entity, resource and window.
    pub records: u64,
    /// The start of the first window.
    pub first: Option<Timestamp>,
    /// The start of the last window.
    pub last: Option<Timestamp>,
}

impl RateLimiter {
    /// Usage records: by entity, by resource, or by both.
    ///
    /// ```
    /// # use zae_limiter_core::{Limit, MemoryStore, RateLimiter, Window};
    /// # tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(async {
    /// # let limiter = RateLimiter::builder(MemoryStore::new())
    /// #     .default_limits([Limit::per_minute("rpm", 100)]).open().await?;
    /// limiter.acquire("key-1", "gpt-4").take("rpm", 3).await?.commit().await?;
    /// let summary = limiter.usage().entity("key-1").window(Window::Daily).summary().await?;
    /// assert_eq!(summary.consumed["rpm"], 3);
    /// assert_eq!(summary.average["rpm"], 3.0); // per day
    /// # Ok::<(), zae_limiter_core::Error>(())
    /// # }).unwrap();
    /// ```
    pub fn usage(&self) -> UsageQuery<'_> {
        UsageQuery {
            limiter: self,
            entity: None,
            resource: None,
            window: Window::Hourly,
            from: Timestamp::from_millis(i64::MIN),
            until: Timestamp::from_millis(i64::MAX),
        }
    }
}

/// The entity id is hashed: it is often an API key.
impl std::fmt::Debug for UsageQuery<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("UsageQuery")
            .field("entity", &self.entity.and_then(|entity| EntityId::new(entity).ok()))
            .field("resource", &self.resource)
            .field("window", &self.window)
            .field("from", &self.from)
            .field("until", &self.until)
            .finish_non_exhaustive()
    }
}

impl<'a> UsageQuery<'a> {
    /// Selects one entity.
    pub fn entity(mut self, entity: &'a str) -> Self {
        self.entity = Some(entity);
        self
    }

    /// Selects one resource.
    pub fn resource(mut self, resource: &'a str) -> Self {
        self.resource = Some(resource);
        self
    }

    /// Selects the kind of window (hourly).
    pub fn window(mut self, window: Window) -> Self {
        self.window = window;
        self
    }

    /// Selects windows that start at this moment or later.
    pub fn from(mut self, from: Timestamp) -> Self {
        self.from = from;
        self
    }

    /// Selects windows that start before this moment.
    pub fn until(mut self, until: Timestamp) -> Self {
        self.until = until;
        self
    }

    /// The records. Those of an entity are sorted by resource and start, those of a resource by start and entity.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for a name, or when neither an entity nor a resource was named.
    pub fn pages(&self) -> Result<Pages<Usage>, Error> {
        let namespace = self.limiter.namespace_id().clone();
        let resource = self.resource.map(ResourceName::new).transpose()?;
        let range = self.from..self.until;
        let query = match (self.entity, resource) {
            (Some(entity), resource) => {
                let entity = EntityId::new(entity)?;
                Query::UsageOfEntity(namespace, entity, resource, self.window, range)
            }
            (None, Some(resource)) => {
                Query::UsageOfResource(namespace, resource, self.window, range)
            }
            (None, None) => {
                let rule = "name an entity, a resource, or both";
                return Err(zae_limiter_model::Invalid::new("usage query", "", rule).into());
            }
        };
        Ok(self.limiter.pages(query, |record: Record, now| {
            record.into_usage().filter(|usage| usage.expires_at.is_none_or(|expiry| expiry > now))
        }))
    }

    /// Adds up the records, page by page.
    ///
    /// # Errors
    ///
    /// As [`pages`](Self::pages); an error of the store.
    pub async fn summary(&self) -> Result<UsageSummary, Error> {
        let mut summary = UsageSummary::default();
        // In millitokens: fractions of tokens add up, too.
        let mut consumed: BTreeMap<LimitName, Millitokens> = BTreeMap::new();
        let mut pages = self.pages()?;
        while let Some(records) = pages.next_page().await? {
            for usage in records {
                for (limit, more) in usage.consumed {
                    let sum = consumed.entry(limit).or_default();
                    *sum = sum.saturating_add(more);
                }
                summary.events += usage.events;
                summary.records += 1;
                let start = usage.key.start;
                summary.first = Some(summary.first.map_or(start, |first| first.min(start)));
                summary.last = Some(summary.last.map_or(start, |last| last.max(start)));
            }
        }
        for (limit, sum) in consumed {
            #[expect(clippy::cast_precision_loss, reason = "a figure for people")]
            let average = sum.get() as f64 / MILLI as f64 / summary.records as f64;
            summary.average.insert(limit.clone(), average);
            summary.consumed.insert(limit, sum.whole_tokens());
        }
        Ok(summary)
    }
}
