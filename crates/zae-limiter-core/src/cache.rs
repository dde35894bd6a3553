//! The configuration cache: the limits of an entity on a resource.
//!
//! A hit is one lookup. Callers that miss at the same time share one read of the store. An entry is
//! valid until its TTL is over by the limiter's own clock. A change made by this process drops the
//! entries that it affects at once.
//!
//! The tables hold only pointers to targets. With a hundred thousand entities, memory access dominates,
//! so everything that a call needs is in the target, including the bucket of a memory store. A general
//! cache would keep keys, values and metadata apart.

use std::cell::Cell;
use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicI64, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

use hashbrown::HashTable;
use zae_limiter_model::{EntityId, LimitSet, NamespaceId, ResourceName, Timestamp};

use crate::memory::locked;
use crate::plan::{Target, hash_in, millis_rounded_up, namespace_hash};
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

/// One second, in milliseconds: how far ahead of a caller's clock an entry may have been read and still be valid.
const AHEAD_MAX_MS: i64 = 1_000;

/// 146 million years: a longer TTL counts as this one.
const TTL_MAX_MS: u64 = 1 << 62;

/// How often a limiter without a cache checks that its namespace exists.
const UNCACHED_INTERVAL: Duration = Duration::from_secs(1);

/// The most limit sets that are shared.
const LIMIT_SETS_MAX: usize = 32;

pub(crate) struct ConfigCache {
    /// The hash of the namespace, from which those of its entries are made.
    namespace_hash: u64,
    ttl: Duration,
    /// The same in milliseconds, rounded up.
    ttl_ms: u64,
    /// When the namespace was last known to exist, in milliseconds. Like an entry, that is valid for the TTL.
    namespace_seen_at: AtomicI64,
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
    pub(crate) fn new(namespace: &NamespaceId, ttl: Duration, capacity: usize) -> Self {
        let capacity = capacity.max(1);
        // A small cache has few tables, so that it stays within its capacity.
        let tables = (capacity / 64).clamp(1, TABLES_MAX).next_power_of_two();
        Self {
            namespace_hash: namespace_hash(namespace),
            ttl,
            ttl_ms: millis_rounded_up(ttl),
            namespace_seen_at: AtomicI64::new(i64::MIN),
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

    #[inline]
    fn table(&self, hash: u64) -> &RwLock<HashTable<Arc<Target>>> {
        // The upper bits: the tables themselves use the lower ones and the topmost seven. The number of tables is a
        // power of two, below 2^32.
        let at = usize::try_from(hash >> 32).unwrap_or(0) & (self.tables.len() - 1);
        &self.tables[at].0
    }

    /// The hash of a resource, from which those of its entries are made.
    #[inline]
    pub(crate) fn resource_hash(&self, resource: &str) -> u64 {
        hash_in(self.namespace_hash, resource)
    }

    fn hash(&self, entity: &str, resource: &str) -> u64 {
        hash_in(self.resource_hash(resource), entity)
    }

    /// The entry, if it exists and its TTL is not over.
    pub(crate) fn get(&self, entity: &str, resource: &str, now: Timestamp) -> Option<Arc<Target>> {
        let found = self.find(entity, resource, now)?;
        self.count_hit(stripe());
        Some(found)
    }

    fn find(&self, entity: &str, resource: &str, now: Timestamp) -> Option<Arc<Target>> {
        self.with(self.resource_hash(resource), entity, resource, now, Arc::clone)
    }

    /// Calls `use_it` with the entry, if it exists and its TTL is not over: under the table's lock, which saves a
    /// reference count. It must not call the cache. The hash is that of the [resource](Self::resource_hash).
    #[inline]
    pub(crate) fn with<T>(
        &self,
        resource_hash: u64,
        entity: &str,
        resource: &str,
        now: Timestamp,
        use_it: impl FnOnce(&Arc<Target>) -> T,
    ) -> Option<T> {
        let hash = hash_in(resource_hash, entity);
        let table = self.table(hash).read().unwrap_or_else(PoisonError::into_inner);
        let found = table.find(hash, |entry| entry.is_for(entity, resource))?;
        (self.is_fresh(found, now) && self.is_namespace_fresh(now)).then(|| use_it(found))
    }

    #[inline]
    pub(crate) fn count_hit(&self, stripe: usize) {
        self.hits.add_one(stripe);
        telemetry::cache_hit();
    }

    #[inline]
    fn is_fresh(&self, entry: &Target, now: Timestamp) -> bool {
        is_valid(entry.origin().read_at, self.ttl_ms, now)
    }

    #[inline]
    fn is_namespace_fresh(&self, now: Timestamp) -> bool {
        is_valid(self.namespace_seen_at(), self.ttl_ms, now)
    }

    fn namespace_seen_at(&self) -> Timestamp {
        Timestamp::from_millis(self.namespace_seen_at.load(Ordering::Relaxed))
    }

    /// Whether the next read should include the namespace. After half the TTL: then a busy limiter learns in time,
    /// with a read that it makes anyway, that the namespace still exists. Without a cache, once a second: all reads of
    /// all namespaces would go to one partition.
    pub(crate) fn is_namespace_due(&self, now: Timestamp) -> bool {
        let interval = if self.ttl.is_zero() { UNCACHED_INTERVAL } else { self.ttl / 2 };
        !is_valid(self.namespace_seen_at(), millis_rounded_up(interval), now)
    }

    /// Notes that the namespace existed at that moment.
    pub(crate) fn namespace_exists(&self, at: Timestamp) {
        self.namespace_seen_at.store(at.as_millis(), Ordering::Relaxed);
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
        let hash = self.hash(entity.as_str(), resource.as_str());
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

    /// Drops everything that has an age: all entries, and that the namespace exists.
    pub(crate) fn forget(&self) {
        self.invalidate_all();
        self.namespace_exists(Timestamp::from_millis(i64::MIN));
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

/// Whether what was read at a moment is less than `ttl_ms` old.
#[inline]
fn is_valid(read_at: Timestamp, ttl_ms: u64, now: Timestamp) -> bool {
    // Another thread may have read the clock a moment later. An entry from further ahead was read
    // before the clock was set back, and must not stay valid until the clock has caught up: its age wraps around, and
    // is longer than any TTL.
    let age_ms = now.as_millis().wrapping_sub(read_at.as_millis()).wrapping_add(AHEAD_MAX_MS);
    let ttl_ms = ttl_ms.min(TTL_MAX_MS) + AHEAD_MAX_MS.unsigned_abs();
    age_ms.cast_unsigned() < ttl_ms
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
#[inline]
pub(crate) fn stripe() -> usize {
    static THREADS: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static STRIPE: Cell<usize> = const { Cell::new(usize::MAX) };
    }
    STRIPE.with(|stripe| {
        if stripe.get() == usize::MAX {
            stripe.set(THREADS.fetch_add(1, Ordering::Relaxed));
        }
        stripe.get()
    })
}

/// A counter on several cache lines, so that counting threads do not contend. Each of the first threads of the process
/// has a stripe for itself, where counting needs no atomic addition.
#[derive(Debug, Default)]
struct Striped {
    own: [Stripe; 8],
    shared: Stripe,
}

#[repr(align(128))]
#[derive(Debug, Default)]
struct Stripe(AtomicU64);

impl Striped {
    #[inline]
    fn add_one(&self, stripe: usize) {
        match self.own.get(stripe) {
            Some(Stripe(own)) => own.store(own.load(Ordering::Relaxed) + 1, Ordering::Relaxed),
            None => _ = self.shared.0.fetch_add(1, Ordering::Relaxed),
        }
    }

    fn sum(&self) -> u64 {
        let own = self.own.iter().map(|stripe| stripe.0.load(Ordering::Relaxed));
        own.sum::<u64>() + self.shared.0.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_is_valid_from_a_second_before_it_was_read_until_its_time_is_over() {
        let at = Timestamp::from_millis;
        for read_at in [0, 1_794_751_200_000, -5_000] {
            for (age, valid) in [
                (-1_001, false),
                (-1_000, true),
                (-1, true),
                (0, true),
                (59_999, true),
                (60_000, false),
                (i64::MAX / 2, false),
                (i64::MIN / 2, false),
            ] {
                assert_eq!(is_valid(at(read_at), 60_000, at(read_at + age)), valid, "{age}");
            }
            assert!(is_valid(at(read_at), u64::MAX, at(read_at + i64::MAX / 4)));
            assert!(!is_valid(at(read_at), u64::MAX, at(read_at - 1_001)));
            assert!(!is_valid(at(i64::MIN), 60_000, at(read_at)), "never read");
        }
    }

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
