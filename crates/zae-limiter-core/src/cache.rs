//! The configuration cache: the limits of an entity on a resource.
//!
//! A hit is one lookup. Callers that miss at the same time share one read of the store. An entry is
//! valid until its TTL is over by the limiter's own clock. A change made by this process drops the
//! entries that it affects at once.
//!
//! The tables hold only pointers to targets. With a hundred thousand entities, memory access dominates,
//! so everything that a call needs is in the target, including the bucket of a memory store. A general
//! cache would keep keys, values and metadata apart.

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

/// Counters of the configuration cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CacheStats {
    /// Lookups that were answered from the cache.
    pub hits: u64,
    /// Lookups that had to wait for the store.
    pub misses: u64,
    /// Reads of the store. Fewer than misses when callers shared a read.
    pub loads: u64,
    /// The current number of entries.
    pub entries: usize,
}

/// The most tables that the entries are spread over.
const TABLES_MAX: usize = 64;

/// The most resources of which a changed entity's entries are dropped one by one. With more resources,
/// all entries are dropped.
const RESOURCES_MAX: usize = 64;

/// How far ahead of a caller's clock an entry may have been read and still be valid.
const AHEAD_MAX: Duration = Duration::from_secs(1);

/// The most limit sets that are shared.
const LIMIT_SETS_MAX: usize = 32;

pub(crate) struct ConfigCache {
    namespace: NamespaceId,
    ttl: Duration,
    /// Their number is a power of two.
    tables: Box<[Table]>,
    /// The most entries of one table.
    table_capacity: usize,
    /// The reads in progress, each with the lock that the other callers wait for.
    flights: Mutex<HashMap<(EntityId, ResourceName), Arc<Turn>>>,
    /// Incremented by every change, so that a read that began before it is not cached.
    generation: AtomicU64,
    /// The resources that have entries, to find an entity's entries. All keys share these names.
    resources: Mutex<Vec<ResourceName>>,
    /// The limit sets read last: thousands of entities on the same defaults share one.
    limit_sets: Mutex<Vec<Arc<LimitSet>>>,
    hits: Striped,
    misses: AtomicU64,
    loads: AtomicU64,
}

/// A table on its own cache lines, so that two threads on two tables do not slow each other.
#[repr(align(128))]
#[derive(Default)]
struct Table(RwLock<HashTable<Arc<Target>>>);

type Turn = tokio::sync::Mutex<()>;

impl ConfigCache {
    pub(crate) fn new(namespace: NamespaceId, ttl: Duration, capacity: usize) -> Self {
        let capacity = capacity.max(1);
        // A small cache has few tables, so that it stays within its capacity.
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

    /// The entry, if it exists and its TTL is not over.
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
        // before the clock was set back, and must not stay valid until the clock has caught up.
        Duration::from_millis(read_at.millis_since(now)) <= AHEAD_MAX
            && Duration::from_millis(now.millis_since(read_at)) < self.ttl
    }

    /// The entry, read by `load` if it is missing. Callers that miss at the same time load once.
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
        let _turn = flight.turn().lock().await;
        // The caller that had the turn before may have read it.
        if let Some(found) = self.find(entity.as_str(), resource.as_str(), now) {
            return Ok(found);
        }
        let generation = self.generation.load(Ordering::SeqCst);
        self.loads.fetch_add(1, Ordering::Relaxed);
        let loaded = Arc::new(load().await?);
        self.insert(&loaded, generation, now);
        Ok(loaded)
    }

    /// Caches an entry, unless a change was made since `generation`.
    fn insert(&self, entry: &Arc<Target>, generation: u64, now: Timestamp) {
        let hash = entry.hash();
        let mut table = self.table(hash).write().unwrap_or_else(PoisonError::into_inner);
        // Checked under the lock. A change first increments the generation and then takes the lock to
        // remove. So an entry read before a change is removed by it, or not inserted after it.
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
            // All of them are fresh: drop every other one, to be read again when needed.
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

    /// The shared copy of a resource's name, so that comparing keys reads the same memory for all
    /// entities.
    pub(crate) fn intern(&self, resource: &ResourceName) -> ResourceName {
        let mut resources = locked(&self.resources);
        if let Some(shared) = resources.iter().find(|shared| *shared == resource) {
            return shared.clone();
        }
        if resources.len() <= RESOURCES_MAX {
            resources.push(resource.clone());
        }
        resource.clone()
    }

    /// The shared copy of a set of limits.
    pub(crate) fn intern_limits(&self, limits: LimitSet) -> Arc<LimitSet> {
        let mut sets = locked(&self.limit_sets);
        if let Some(shared) = sets.iter().find(|shared| ***shared == limits) {
            return Arc::clone(shared);
        }
        let limits = Arc::new(limits);
        if sets.len() == LIMIT_SETS_MAX {
            sets.remove(0);
        }
        sets.push(Arc::clone(&limits));
        limits
    }

    /// Drops the entries of one entity.
    pub(crate) fn invalidate_entity(&self, entity: &EntityId) {
        let resources = locked(&self.resources).clone();
        if resources.len() > RESOURCES_MAX {
            return self.invalidate_all();
        }
        self.generation.fetch_add(1, Ordering::SeqCst);
        // Later callers do not wait for a read that began before the change.
        locked(&self.flights).retain(|(reading, _), _| reading != entity);
        resources.iter().for_each(|resource| self.remove(entity, resource));
    }

    /// Drops all entries.
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

/// A caller that wants an entry read. The last one removes the turn.
struct Flight<'a> {
    flights: &'a Mutex<HashMap<(EntityId, ResourceName), Arc<Turn>>>,
    key: (EntityId, ResourceName),
    /// `None` only after it has left.
    turn: Option<Arc<Turn>>,
}

impl<'a> Flight<'a> {
    fn join(
        flights: &'a Mutex<HashMap<(EntityId, ResourceName), Arc<Turn>>>,
        entity: &EntityId,
        resource: &ResourceName,
    ) -> Self {
        let key = (entity.clone(), resource.clone());
        let turn = Arc::clone(locked(flights).entry(key.clone()).or_default());
        Self { flights, key, turn: Some(turn) }
    }

    fn turn(&self) -> &Turn {
        self.turn.as_ref().expect("kept until the drop")
    }

    fn leave(&mut self) {
        let mut flights = locked(self.flights);
        // Dropped under the lock: of two that leave at once, the second one sees that it is the last.
        drop(self.turn.take());
        // Others join under the same lock: nobody waits for a turn that only the map holds.
        if flights.get(&self.key).is_some_and(|turn| Arc::strong_count(turn) == 1) {
            flights.remove(&self.key);
        }
    }
}

impl Drop for Flight<'_> {
    fn drop(&mut self) {
        self.leave();
    }
}

/// A number per thread, to spread writes of all threads over several cache lines.
pub(crate) fn stripe() -> usize {
    static THREADS: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static STRIPE: usize = THREADS.fetch_add(1, Ordering::Relaxed);
    }
    STRIPE.with(|stripe| *stripe)
}

/// A counter on several cache lines, so that counting threads do not contend.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn callers_that_end_at_once_leave_no_turn_behind() {
        let flights = Mutex::default();
        let entity = EntityId::new("key").expect("a valid id");
        let resource = ResourceName::new("gpt-4").expect("a valid name");
        let join = || Flight::join(&flights, &entity, &resource);
        let (mut one, mut other) = (join(), join());
        assert_eq!(locked(&flights).len(), 1);
        // Two threads drop them: both leave before either has dropped its fields.
        one.leave();
        assert_eq!(locked(&flights).len(), 1, "the other one still needs the turn");
        other.leave();
        assert!(locked(&flights).is_empty());
        drop((one, other));

        // After a change the map holds a new turn. A caller of the old one leaves it there.
        let old = join();
        locked(&flights).clear();
        let new = join();
        drop(old);
        assert_eq!(locked(&flights).len(), 1);
        drop(new);
        assert!(locked(&flights).is_empty());
    }
}
