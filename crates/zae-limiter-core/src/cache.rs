//! What holds for an entity on a resource, remembered for a while.
//!
//! Reading is one lookup. Missing is one read of the store, however many callers miss at once. An
//! entry is trusted until its time is over by the limiter's own clock; a change made by this
//! process drops what it concerns at once.

use std::fmt;
use std::hash::Hash;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use quick_cache::Equivalent;
use quick_cache::sync::Cache;
use zae_limiter_model::{EntityId, ResourceName, Timestamp};

use crate::plan::Target;
use crate::record::ConfigLevel;
use crate::telemetry;

/// What holds for one entity on one resource.
#[derive(Debug)]
pub(crate) struct Resolved {
    /// The bucket with its limits; absent when there are limits at no level.
    pub(crate) target: Option<Arc<Target>>,
    /// Where the limits come from; absent when they are the limiter's own defaults.
    pub(crate) level: Option<ConfigLevel>,
    /// The entity above, if what is taken is also taken there.
    pub(crate) parent: Option<EntityId>,
    /// When it was read.
    pub(crate) read_at: Timestamp,
}

/// How the cache is doing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheStats {
    /// Lookups that were answered from the cache.
    pub hits: u64,
    /// Lookups that had to wait for the store.
    pub misses: u64,
    /// Reads of the store. Fewer than misses when callers missed together.
    pub loads: u64,
    /// Entries there are now.
    pub entries: usize,
}

#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct CacheKey(EntityId, ResourceName);

/// A key that is still text: the names in the cache are valid, so what equals one is too.
#[derive(Hash)]
struct TextKey<'a>(&'a str, &'a str);

impl Equivalent<CacheKey> for TextKey<'_> {
    fn equivalent(&self, key: &CacheKey) -> bool {
        key.0.as_str() == self.0 && key.1.as_str() == self.1
    }
}

/// So many resources are dropped one by one when an entity changes; with more, everything is.
const RESOURCES_MAX: usize = 64;

pub(crate) struct ConfigCache {
    ttl: Duration,
    entries: Cache<CacheKey, Arc<Resolved>>,
    /// Rises with every change, so that a read that began before it is not kept.
    generation: AtomicU64,
    /// Which resources have entries: an entity's entries are found through them.
    resources: std::sync::Mutex<Vec<ResourceName>>,
    hits: Striped,
    misses: AtomicU64,
    loads: AtomicU64,
}

impl ConfigCache {
    pub(crate) fn new(ttl: Duration, capacity: usize) -> Self {
        Self {
            ttl,
            entries: Cache::new(capacity),
            generation: AtomicU64::new(0),
            resources: std::sync::Mutex::default(),
            hits: Striped::default(),
            misses: AtomicU64::new(0),
            loads: AtomicU64::new(0),
        }
    }

    /// The entry, if it is there and its time is not over.
    pub(crate) fn get(
        &self,
        entity: &str,
        resource: &str,
        now: Timestamp,
    ) -> Option<Arc<Resolved>> {
        let found = self.entries.get(&TextKey(entity, resource))?;
        if !self.is_fresh(&found, now) {
            return None;
        }
        self.hits.add_one();
        telemetry::cache_hit();
        Some(found)
    }

    fn is_fresh(&self, entry: &Resolved, now: Timestamp) -> bool {
        // A clock that ran back is no reason to trust an entry for longer.
        now >= entry.read_at && now < entry.read_at.saturating_add(self.ttl)
    }

    /// The entry, read by `load` if it is not there. Callers that miss together load once.
    pub(crate) async fn get_or_load<E>(
        &self,
        entity: &EntityId,
        resource: &ResourceName,
        now: Timestamp,
        load: impl AsyncFnOnce() -> Result<Resolved, E>,
    ) -> Result<Arc<Resolved>, E> {
        self.misses.fetch_add(1, Ordering::Relaxed);
        telemetry::cache_miss();
        if self.ttl.is_zero() {
            self.loads.fetch_add(1, Ordering::Relaxed);
            return load().await.map(Arc::new);
        }
        let key = CacheKey(entity.clone(), resource.clone());
        let guard = loop {
            match self.entries.get_value_or_guard_async(&key).await {
                Ok(found) if self.is_fresh(&found, now) => return Ok(found),
                Ok(stale) => {
                    self.entries.remove_if(&key, |current| Arc::ptr_eq(current, &stale));
                }
                Err(guard) => break guard,
            }
        };
        let generation = self.generation.load(Ordering::SeqCst);
        self.loads.fetch_add(1, Ordering::Relaxed);
        let loaded = Arc::new(load().await?);
        self.remember(resource);
        // Refused only when the entry was removed meanwhile: the value is good for this call.
        let _ = guard.insert(Arc::clone(&loaded));
        if self.generation.load(Ordering::SeqCst) != generation {
            // Read before a change, inserted after it. The order here, insert and then look, and
            // in `invalidate`, count and then remove, leaves no gap between them.
            self.entries.remove(&key);
        }
        Ok(loaded)
    }

    fn remember(&self, resource: &ResourceName) {
        let mut resources = self.resources.lock().unwrap_or_else(|e| e.into_inner());
        if resources.len() <= RESOURCES_MAX && !resources.contains(resource) {
            resources.push(resource.clone());
        }
    }

    /// Drops what is known of one entity.
    pub(crate) fn invalidate_entity(&self, entity: &EntityId) {
        let resources = self.resources.lock().unwrap_or_else(|e| e.into_inner()).clone();
        if resources.len() > RESOURCES_MAX {
            return self.invalidate_all();
        }
        self.generation.fetch_add(1, Ordering::SeqCst);
        for resource in resources {
            self.entries.remove(&CacheKey(entity.clone(), resource));
        }
    }

    /// Drops everything.
    pub(crate) fn invalidate_all(&self) {
        self.generation.fetch_add(1, Ordering::SeqCst);
        self.entries.clear();
    }

    pub(crate) fn stats(&self) -> CacheStats {
        CacheStats {
            hits: self.hits.sum(),
            misses: self.misses.load(Ordering::Relaxed),
            loads: self.loads.load(Ordering::Relaxed),
            entries: self.entries.len(),
        }
    }
}

impl fmt::Debug for ConfigCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConfigCache").field("ttl", &self.ttl).field("stats", &self.stats()).finish()
    }
}

/// A counter on several cache lines, so that threads that count at once do not wait for each other.
#[derive(Debug, Default)]
struct Striped([Stripe; 8]);

#[repr(align(128))]
#[derive(Debug, Default)]
struct Stripe(AtomicU64);

impl Striped {
    fn add_one(&self) {
        static THREADS: AtomicUsize = AtomicUsize::new(0);
        thread_local! {
            static STRIPE: usize = THREADS.fetch_add(1, Ordering::Relaxed);
        }
        let stripe = STRIPE.with(|stripe| stripe % self.0.len());
        self.0[stripe].0.fetch_add(1, Ordering::Relaxed);
    }

    fn sum(&self) -> u64 {
        self.0.iter().map(|stripe| stripe.0.load(Ordering::Relaxed)).sum()
    }
}
