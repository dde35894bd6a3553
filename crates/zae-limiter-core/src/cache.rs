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
use zae_limiter_model::{EntityId, LimitSet, ResourceName, Timestamp};

use crate::plan::Target;
use crate::telemetry;

/// What holds for one entity on one resource. Small, because the cache hands out copies.
#[derive(Clone, Debug)]
pub(crate) struct Resolved {
    /// The bucket with its limits; absent when there are limits at no level.
    pub(crate) target: Option<Arc<Target>>,
    /// Where the limits come from.
    pub(crate) source: Source,
    /// The entity above, if what is taken is also taken there.
    pub(crate) parent: Option<EntityId>,
    /// When it was read.
    pub(crate) read_at: Timestamp,
}

/// The level that limits come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    EntityResource,
    Entity,
    Resource,
    System,
    /// The limiter's own defaults, or nothing at all.
    Limiter,
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

/// So many different sets of limits are shared.
const LIMIT_SETS_MAX: usize = 32;

pub(crate) struct ConfigCache {
    ttl: Duration,
    entries: Cache<CacheKey, Resolved>,
    /// Rises with every change, so that a read that began before it is not kept.
    generation: AtomicU64,
    /// Which resources have entries: an entity's entries are found through them, and all keys
    /// share these names.
    resources: std::sync::Mutex<Vec<ResourceName>>,
    /// Sets of limits that were read last: thousands of entities on the same defaults share one.
    limit_sets: std::sync::Mutex<Vec<Arc<LimitSet>>>,
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
            limit_sets: std::sync::Mutex::default(),
            hits: Striped::default(),
            misses: AtomicU64::new(0),
            loads: AtomicU64::new(0),
        }
    }

    /// The entry, if it is there and its time is not over.
    pub(crate) fn get(&self, entity: &str, resource: &str, now: Timestamp) -> Option<Resolved> {
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
    ) -> Result<Resolved, E> {
        self.misses.fetch_add(1, Ordering::Relaxed);
        telemetry::cache_miss();
        if self.ttl.is_zero() {
            self.loads.fetch_add(1, Ordering::Relaxed);
            return load().await;
        }
        let key = CacheKey(entity.clone(), self.intern(resource));
        let guard = loop {
            match self.entries.get_value_or_guard_async(&key).await {
                Ok(found) if self.is_fresh(&found, now) => return Ok(found),
                Ok(stale) => {
                    self.entries.remove_if(&key, |current| current.read_at == stale.read_at);
                }
                Err(guard) => break guard,
            }
        };
        let generation = self.generation.load(Ordering::SeqCst);
        self.loads.fetch_add(1, Ordering::Relaxed);
        let loaded = load().await?;
        // Refused only when the entry was removed meanwhile: the value is good for this call.
        let _ = guard.insert(loaded.clone());
        if self.generation.load(Ordering::SeqCst) != generation {
            // Read before a change, inserted after it. The order here, insert and then look, and
            // in `invalidate`, count and then remove, leaves no gap between them.
            self.entries.remove(&key);
        }
        Ok(loaded)
    }

    /// The one copy of a resource's name that all keys share: comparing keys then touches the same
    /// memory for all entities.
    pub(crate) fn intern(&self, resource: &ResourceName) -> ResourceName {
        let mut resources = self.resources.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(known) = resources.iter().find(|known| *known == resource) {
            return known.clone();
        }
        if resources.len() <= RESOURCES_MAX {
            resources.push(resource.clone());
        }
        resource.clone()
    }

    /// The shared copy of a set of limits.
    pub(crate) fn intern_limits(&self, limits: LimitSet) -> Arc<LimitSet> {
        let mut sets = self.limit_sets.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(known) = sets.iter().find(|known| ***known == limits) {
            return Arc::clone(known);
        }
        let limits = Arc::new(limits);
        if sets.len() == LIMIT_SETS_MAX {
            sets.remove(0);
        }
        sets.push(Arc::clone(&limits));
        limits
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
