//! A store in the memory of one process: the fastest one. Its state is lost when the process ends.
//!
//! Most calls find their bucket without a lookup, and each bucket has its own lock (see [`buckets`]).
//! Records and usage are cold, with one lock each.

mod buckets;
mod records;
mod scan;
mod smallest;
mod usage;

use futures_core::future::BoxFuture;
use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};

use zae_limiter_model::{Bucket, Millitokens, NamespaceId, ResourceName, Timestamp};

use self::buckets::Buckets;
use self::records::Records;
use self::smallest::{Smallest, place};
use self::usage::UsageTable;
use crate::bucket_state::Booking;
use crate::error::{StoreError, StoreErrorKind};
use crate::page::{Page, PageRequest};
use crate::plan::{Admission, BucketKey, Plan, Settlement, SingleLeg, Target};
use crate::record::{Key, Record};
use crate::store::{
    BucketQuery, Cost, Query, ResourceList, Scope, Store, StoredBucket, UsageRecording, Write,
    Written,
};
use crate::window::UsageSettings;

/// A [`Store`] in memory. Its state is lost when the process ends.
///
/// ```
/// # use std::sync::Arc;
/// # use zae_limiter_core::{MemoryStore, RateLimiter};
/// # tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(async {
/// let store = Arc::new(MemoryStore::new());
/// let one = RateLimiter::builder(Arc::clone(&store)).open().await?;
/// let two = RateLimiter::builder(store).open().await?; // both share their buckets
/// # Ok::<(), zae_limiter_core::Error>(())
/// # }).unwrap();
/// ```
pub struct MemoryStore {
    buckets: Buckets,
    records: Mutex<Records>,
    usage: Mutex<UsageTable>,
}

/// Without the contents, which are large and contain entity ids.
impl fmt::Debug for MemoryStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryStore").finish_non_exhaustive()
    }
}

impl Default for MemoryStore {
    fn default() -> Self {
        Self::new()
    }
}

pub(crate) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic of one caller must not stop the others: bucket states are replaced as a whole.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl MemoryStore {
    /// An empty store that keeps hourly, daily and monthly usage.
    pub fn new() -> Self {
        Self::with_usage(UsageSettings::default())
    }

    /// An empty store with other usage windows.
    pub fn with_usage(settings: UsageSettings) -> Self {
        Self {
            buckets: Buckets::new(),
            records: Mutex::default(),
            usage: Mutex::new(UsageTable::new(settings)),
        }
    }

    fn book(&self, key: &BucketKey, booking: Booking) {
        locked(&self.usage).book(key, booking);
    }

    /// Books all unbooked usage of some buckets, before usage is read.
    fn book_all(&self, concerned: impl Fn(&BucketKey) -> bool) {
        self.buckets.for_each(|key, state| {
            if concerned(key)
                && let Some(booking) = state.take_booking()
            {
                self.book(key, booking);
            }
        });
    }

    fn list_now(&self, query: &Query, page: &PageRequest) -> Result<Page<Record>, StoreError> {
        match query {
            Query::UsageOfEntity(namespace, entity, resource, window, range) => {
                self.book_all(|key| key.namespace == *namespace && key.entity == *entity);
                let of = usage::Of::Entity(namespace, entity, resource.as_ref());
                usage::list(&self.usage, of, *window, range, page)
            }
            Query::UsageOfResource(namespace, resource, window, range) => {
                self.book_all(|key| key.namespace == *namespace && key.resource == *resource);
                let of = usage::Of::Resource(namespace, resource);
                usage::list(&self.usage, of, *window, range, page)
            }
            cold => records::list(&self.records, cold, page).map(|(page, _)| page),
        }
    }

    fn list_buckets_now(
        &self,
        query: &BucketQuery,
        page: &PageRequest,
    ) -> Result<Page<StoredBucket>, StoreError> {
        let mut found = Smallest::new(page)?;
        self.buckets.for_each(|key, state| {
            let place = match query {
                BucketQuery::OfEntity(namespace, entity) => (key.namespace == *namespace
                    && key.entity == *entity)
                    .then(|| key.resource.as_str()),
                BucketQuery::OnResource(namespace, resource) => (key.namespace == *namespace
                    && key.resource == *resource)
                    .then(|| key.entity.as_str()),
            };
            if let Some(place) = place {
                found.offer(place.to_owned(), || StoredBucket {
                    key: key.clone(),
                    bucket: state.bucket.clone(),
                    expires_at: state.expires_at,
                });
            }
        });
        Ok(found.into_page())
    }

    fn list_keys_now(&self, scope: &Scope, page: &PageRequest) -> Result<Page<Key>, StoreError> {
        let mut found = Smallest::new(page)?;
        records::offer_keys(&self.records, scope, &mut found);
        usage::offer_keys(&self.usage, scope, &mut found);
        self.buckets.for_each(|key, _| {
            let belongs = match scope {
                Scope::Entity(namespace, entity) => {
                    key.namespace == *namespace && key.entity == *entity
                }
                Scope::Namespace(namespace) => key.namespace == *namespace,
            };
            if belongs {
                let place = place(["bucket", key.entity.as_str(), key.resource.as_str()]);
                found.offer(place, || Key::Bucket(key.clone()));
            }
        });
        Ok(found.into_page())
    }
}

impl Store for MemoryStore {
    fn cost(&self) -> Option<Cost> {
        None
    }

    fn usage_recording(&self) -> UsageRecording {
        UsageRecording::Immediate
    }

    fn acquire_now(&self, plan: &Plan) -> Option<Result<Admission, StoreError>> {
        Some(Ok(self.buckets.acquire(plan, |key, booking| self.book(key, booking))))
    }

    #[inline]
    fn take_now(&self, leg: &SingleLeg<'_>, left: &mut [Millitokens]) -> bool {
        self.buckets.take(leg, left)
    }

    fn acquire<'a>(&'a self, plan: &'a Plan) -> BoxFuture<'a, Result<Admission, StoreError>> {
        Box::pin(async { self.acquire_now(plan).expect("this store answers at once") })
    }

    fn settle<'a>(
        &'a self,
        settlements: &'a [Settlement],
        now: Timestamp,
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        Box::pin(async move {
            let book = |key: &BucketKey, booking| self.book(key, booking);
            self.buckets.settle(settlements, now, book).map_err(|overflow| {
                let message = overflow.to_string();
                StoreError::new(StoreErrorKind::Rejected, message).caused_by(overflow)
            })
        })
    }

    fn peek<'a>(
        &'a self,
        keys: &'a [BucketKey],
        now: Timestamp,
    ) -> BoxFuture<'a, Result<Vec<Option<Bucket>>, StoreError>> {
        Box::pin(async move { Ok(self.buckets.peek(keys, now)) })
    }

    fn reconfigure<'a>(
        &'a self,
        target: &'a Target,
        now: Timestamp,
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        Box::pin(async move {
            self.buckets.reconfigure(target, now, |booking| self.book(target.key(), booking));
            Ok(())
        })
    }

    fn get<'a>(
        &'a self,
        keys: &'a [Key],
    ) -> BoxFuture<'a, Result<Vec<Option<Record>>, StoreError>> {
        Box::pin(async {
            let records = locked(&self.records);
            let usage = locked(&self.usage);
            let get = |key: &Key| match key {
                Key::Usage(key) => usage.get(key),
                key => records.get(key),
            };
            Ok(keys.iter().map(get).collect())
        })
    }

    fn write<'a>(&'a self, batch: &'a [Write]) -> BoxFuture<'a, Result<Written, StoreError>> {
        Box::pin(async { Ok(locked(&self.records).write(batch, &mut locked(&self.usage))) })
    }

    fn delete<'a>(&'a self, keys: &'a [Key]) -> BoxFuture<'a, Result<(), StoreError>> {
        Box::pin(async move {
            for key in keys {
                match key {
                    Key::Bucket(key) => self.buckets.remove(key),
                    Key::Usage(key) => locked(&self.usage).remove(key),
                    key => locked(&self.records).remove(key),
                }
            }
            Ok(())
        })
    }

    fn list<'a>(
        &'a self,
        query: &'a Query,
        page: &'a PageRequest,
    ) -> BoxFuture<'a, Result<Page<Record>, StoreError>> {
        Box::pin(async { self.list_now(query, page) })
    }

    fn list_buckets<'a>(
        &'a self,
        query: &'a BucketQuery,
        page: &'a PageRequest,
    ) -> BoxFuture<'a, Result<Page<StoredBucket>, StoreError>> {
        Box::pin(async { self.list_buckets_now(query, page) })
    }

    fn list_keys<'a>(
        &'a self,
        scope: &'a Scope,
        page: &'a PageRequest,
    ) -> BoxFuture<'a, Result<Page<Key>, StoreError>> {
        Box::pin(async { self.list_keys_now(scope, page) })
    }

    fn list_everything<'a>(
        &'a self,
        now: Timestamp,
        page: &'a PageRequest,
    ) -> BoxFuture<'a, Result<Page<Key>, StoreError>> {
        let _ = now;
        Box::pin(async {
            let mut found = Smallest::new(page)?;
            records::offer_everything(&self.records, &mut found);
            usage::offer_everything(&self.usage, &mut found);
            self.buckets.for_each(|key, _| {
                let names =
                    [key.namespace.as_str(), "bucket", key.entity.as_str(), key.resource.as_str()];
                found.offer(place(names), || Key::Bucket(key.clone()));
            });
            Ok(found.into_page())
        })
    }

    fn list_resources<'a>(
        &'a self,
        namespace: &'a NamespaceId,
        which: ResourceList,
        page: &'a PageRequest,
    ) -> BoxFuture<'a, Result<Page<ResourceName>, StoreError>> {
        Box::pin(async move { records::list_resources(&self.records, namespace, which, page) })
    }
}
