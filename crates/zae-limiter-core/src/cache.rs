//! What holds for an entity on a resource, remembered for a while.
//!
//! Reading is one lookup. Missing is one read of the store, however many callers miss at once. An
//! entry is trusted until its time is over by the limiter's own clock; a change made by this
//! process drops what it concerns at once.
//!
//! Tables of pointers to targets, and nothing more: with a hundred thousand entities the time goes
//! into fetching memory, and everything a call needs, the bucket of a memory store included, stands
//! together in the target. A general cache keeps keys, values and bookkeeping apart.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

use hashbrown::HashTable;
use zae_limiter_model::{EntityId, LimitSet, NamespaceId, ResourceName, Timestamp};

use crate::memory::locked;
use crate::plan::{Target, bucket_hash};
use crate::telemetry;

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

/// The most tables the entries are spread over.
const TABLES_MAX: usize = 64;

/// So many resources are dropped one by one when an entity changes; with more, everything is.
const RESOURCES_MAX: usize = 64;

/// So far ahead of a caller's clock an entry may have been read and still be trusted.
const AHEAD_MAX: Duration = Duration::from_secs(1);

/// So many different sets of limits are shared.
const LIMIT_SETS_MAX: usize = 32;

pub(crate) struct ConfigCache {
    namespace: NamespaceId,
    ttl: Duration,
    /// A power of two of them.
    tables: Box<[Table]>,
    /// How many entries each may have.
    table_capacity: usize,
    /// Who is reading, and the turn that the others wait for.
    flights: Mutex<HashMap<(EntityId, ResourceName), Arc<Turn>>>,
    /// Rises with every change, so that a read that began before it is not kept.
    generation: AtomicU64,
    /// Which resources have entries: an entity's entries are found through them, and all keys
    /// share these names.
    resources: Mutex<Vec<ResourceName>>,
    /// Sets of limits that were read last: thousands of entities on the same defaults share one.
    limit_sets: Mutex<Vec<Arc<LimitSet>>>,
    hits: Striped,
    misses: AtomicU64,
    loads: AtomicU64,
}

/// A table has cache lines of its own, so that two threads on two tables do not slow each other.
#[repr(align(128))]
#[derive(Default)]
struct Table(RwLock<HashTable<Arc<Target>>>);

type Turn = tokio::sync::Mutex<()>;

impl ConfigCache {
    pub(crate) fn new(namespace: NamespaceId, ttl: Duration, capacity: usize) -> Self {
        let capacity = capacity.max(1);
        // A small cache has few tables, so that its bound is kept.
        let tables = (capacity / 64).clamp(1, TABLES_MAX).next_power_of_two();
        Self {
            namespace,
            ttl,
            tables: (0..tables).map(|_| Table::default()).collect(),
            table_capacity: capacity / tables,
            flights: Mutex::default(),
            generation: AtomicU64::new(0),
            resources: Mutex::default(),
            limit_sets: Mutex::default(),
            hits: Striped::default(),
            misses: AtomicU64::new(0),
            loads: AtomicU64::new(0),
        }
    }

    fn table(&self, hash: u64) -> &RwLock<HashTable<Arc<Target>>> {
        // The upper bits: the tables themselves use the lower ones and the topmost seven.
        let at = usize::try_from((hash >> 32) % self.tables.len() as u64);
        &self.tables[at.expect("below the number of tables")].0
    }

    /// The entry, if it is there and its time is not over.
    pub(crate) fn get(&self, entity: &str, resource: &str, now: Timestamp) -> Option<Arc<Target>> {
        let found = self.find(entity, resource, now)?;
        self.hits.add_one();
        telemetry::cache_hit();
        Some(found)
    }

    fn find(&self, entity: &str, resource: &str, now: Timestamp) -> Option<Arc<Target>> {
        let hash = bucket_hash(&self.namespace, entity, resource);
        let table = self.table(hash).read().unwrap_or_else(PoisonError::into_inner);
        let found = table.find(hash, |entry| entry.is_for(entity, resource))?;
        self.is_fresh(found, now).then(|| Arc::clone(found))
    }

    fn is_fresh(&self, entry: &Target, now: Timestamp) -> bool {
        let read_at = entry.origin().read_at;
        // Another thread may have read the clock a moment later. An entry from further ahead was read
        // before the clock was set back: it must not be trusted until the clock has caught up.
        Duration::from_millis(read_at.millis_since(now)) <= AHEAD_MAX
            && Duration::from_millis(now.millis_since(read_at)) < self.ttl
    }

    /// The entry, read by `load` if it is not there. Callers that miss together load once.
    pub(crate) async fn get_or_load<E>(
        &self,
        entity: &EntityId,
        resource: &ResourceName,
        now: Timestamp,
        load: impl AsyncFnOnce() -> Result<Target, E>,
    ) -> Result<Arc<Target>, E> {
        self.misses.fetch_add(1, Ordering::Relaxed);
        telemetry::cache_miss();
        if self.ttl.is_zero() {
            self.loads.fetch_add(1, Ordering::Relaxed);
            return load().await.map(Arc::new);
        }
        let flight = Flight::join(&self.flights, entity, resource);
        let _turn = flight.turn.lock().await;
        // Whoever had the turn before may have read it.
        if let Some(found) = self.find(entity.as_str(), resource.as_str(), now) {
            return Ok(found);
        }
        let generation = self.generation.load(Ordering::SeqCst);
        self.loads.fetch_add(1, Ordering::Relaxed);
        let loaded = Arc::new(load().await?);
        self.insert(&loaded, generation, now);
        Ok(loaded)
    }

    /// Keeps an entry, unless something has changed since that generation.
    fn insert(&self, entry: &Arc<Target>, generation: u64, now: Timestamp) {
        let hash = entry.hash();
        let mut table = self.table(hash).write().unwrap_or_else(PoisonError::into_inner);
        // Looked at under the lock; a change counts first and then takes the lock to remove. So
        // what was read before a change is removed by it, or not inserted after it.
        if self.generation.load(Ordering::SeqCst) != generation {
            return;
        }
        if let Ok(stale) = table.find_entry(hash, |other| other.key() == entry.key()) {
            stale.remove();
        }
        if table.len() >= self.table_capacity {
            table.retain(|entry| self.is_fresh(entry, now));
        }
        if table.len() >= self.table_capacity {
            // All of them are in use: every other one has to be read again when it is needed.
            let mut kept = false;
            table.retain(|_| {
                kept = !kept;
                kept && self.table_capacity > 1
            });
        }
        table.insert_unique(hash, Arc::clone(entry), |entry| entry.hash());
    }

    fn remove(&self, entity: &EntityId, resource: &ResourceName) {
        let hash = bucket_hash(&self.namespace, entity.as_str(), resource.as_str());
        let mut table = self.table(hash).write().unwrap_or_else(PoisonError::into_inner);
        let is_it = |entry: &Arc<Target>| entry.is_for(entity.as_str(), resource.as_str());
        if let Ok(found) = table.find_entry(hash, is_it) {
            found.remove();
        }
    }

    /// The one copy of a resource's name that all keys share: comparing keys then touches the same
    /// memory for all entities.
    pub(crate) fn intern(&self, resource: &ResourceName) -> ResourceName {
        let mut resources = locked(&self.resources);
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
        let mut sets = locked(&self.limit_sets);
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
        let resources = locked(&self.resources).clone();
        if resources.len() > RESOURCES_MAX {
            return self.invalidate_all();
        }
        self.generation.fetch_add(1, Ordering::SeqCst);
        // Whoever comes from now on does not wait for a read that began before the change.
        locked(&self.flights).retain(|(reading, _), _| reading != entity);
        resources.iter().for_each(|resource| self.remove(entity, resource));
    }

    /// Drops everything.
    pub(crate) fn invalidate_all(&self) {
        self.generation.fetch_add(1, Ordering::SeqCst);
        locked(&self.flights).clear();
        for table in &self.tables {
            table.0.write().unwrap_or_else(PoisonError::into_inner).clear();
        }
    }

    pub(crate) fn stats(&self) -> CacheStats {
        let len = |table: &Table| table.0.read().unwrap_or_else(PoisonError::into_inner).len();
        CacheStats {
            hits: self.hits.sum(),
            misses: self.misses.load(Ordering::Relaxed),
            loads: self.loads.load(Ordering::Relaxed),
            entries: self.tables.iter().map(len).sum(),
        }
    }
}

impl fmt::Debug for ConfigCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConfigCache").field("ttl", &self.ttl).field("stats", &self.stats()).finish()
    }
}

/// One of those who want the same entry read. The last to leave takes the turn off the board.
struct Flight<'a> {
    flights: &'a Mutex<HashMap<(EntityId, ResourceName), Arc<Turn>>>,
    key: (EntityId, ResourceName),
    turn: Arc<Turn>,
}

impl<'a> Flight<'a> {
    fn join(
        flights: &'a Mutex<HashMap<(EntityId, ResourceName), Arc<Turn>>>,
        entity: &EntityId,
        resource: &ResourceName,
    ) -> Self {
        let key = (entity.clone(), resource.clone());
        let turn = Arc::clone(locked(flights).entry(key.clone()).or_default());
        Self { flights, key, turn }
    }
}

impl Drop for Flight<'_> {
    fn drop(&mut self) {
        let mut flights = locked(self.flights);
        // After a change another turn may stand there under the same key.
        let ours = flights.get(&self.key).is_some_and(|turn| Arc::ptr_eq(turn, &self.turn));
        // One reference is the board's, one is ours.
        if ours && Arc::strong_count(&self.turn) == 2 {
            flights.remove(&self.key);
        }
    }
}

/// A number of its own for each thread, to spread what all threads do at once.
pub(crate) fn stripe() -> usize {
    static THREADS: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static STRIPE: usize = THREADS.fetch_add(1, Ordering::Relaxed);
    }
    STRIPE.with(|stripe| *stripe)
}

/// A counter on several cache lines, so that threads that count at once do not wait for each other.
#[derive(Debug, Default)]
struct Striped([Stripe; 8]);

#[repr(align(128))]
#[derive(Debug, Default)]
struct Stripe(AtomicU64);

impl Striped {
    fn add_one(&self) {
        self.0[stripe() % self.0.len()].0.fetch_add(1, Ordering::Relaxed);
    }

    fn sum(&self) -> u64 {
        self.0.iter().map(|stripe| stripe.0.load(Ordering::Relaxed)).sum()
    }
}
