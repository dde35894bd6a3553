//! The buckets, each in the slot of a [`Target`].
//!
//! Tables find a bucket's target by its key. Most calls need no table, because the bucket is in the slot
//! of the target that the limiter's cache returned. The bucket may be in the slot of another target: of
//! another limiter on the same store, or of an expired cache entry. Then the table finds it.
//!
//! Invariants:
//! - a target in a table has its bucket in its slot, and a slot is emptied only under the table's lock;
//! - locks are taken in this order: tables, ascending; then slots; then usage. A slot is locked without
//!   its table only by calls that then lock nothing but usage.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use hashbrown::HashTable;
use hashbrown::hash_table::Entry;
use smallvec::SmallVec;
use zae_limiter_model::{Bucket, Millitokens, Overflow, Timestamp};

use super::locked;
use crate::bucket_state::{Booking, BucketState, admit, settle, take_now};
use crate::plan::{Admission, BucketKey, Leg, Plan, Settlement, SingleLeg, SlotEntry, Target};

/// The number of tables: enough that threads rarely contend, few enough that a small store stays small.
const TABLES: usize = 64;

/// A table on its own cache lines, so that two threads on two tables do not slow each other.
#[repr(align(128))]
#[derive(Debug, Default)]
struct Table(Mutex<Targets>);

type Targets = HashTable<Arc<Target>>;

fn table_of(hash: u64) -> usize {
    // The upper bits: the tables themselves use the lower ones and the topmost seven.
    usize::try_from((hash >> 32) % TABLES as u64).expect("below the number of tables")
}

/// Several tables, locked together.
struct LockedTables<'a> {
    places: SmallVec<[usize; 8]>,
    guards: SmallVec<[MutexGuard<'a, Targets>; 8]>,
}

impl LockedTables<'_> {
    fn of(&mut self, hash: u64) -> &mut Targets {
        let at = self.places.binary_search(&table_of(hash)).expect("locked with the others");
        &mut self.guards[at]
    }

    /// The target whose slot holds the bucket.
    fn holder(&mut self, hash: u64, key: &BucketKey) -> Option<Arc<Target>> {
        self.of(hash).find(hash, |target| target.key() == key).cloned()
    }
}

/// A guard of a slot, with the bucket state in it.
type Guard<'a> = MutexGuard<'a, Option<SlotEntry>>;

fn state_in<'a>(guard: &'a mut Guard<'_>) -> &'a mut BucketState {
    &mut guard.as_mut().expect("a target in a table has its bucket in its slot").state
}

#[derive(Debug)]
pub(super) struct Buckets {
    /// Distinguishes this store's buckets from those of another store with the same target.
    store: u64,
    tables: Box<[Table]>,
}

impl Buckets {
    pub(super) fn new() -> Self {
        static STORES: AtomicU64 = AtomicU64::new(0);
        Self {
            store: STORES.fetch_add(1, Ordering::Relaxed),
            tables: (0..TABLES).map(|_| Table::default()).collect(),
        }
    }

    fn lock_tables(&self, hashes: impl Iterator<Item = u64>) -> LockedTables<'_> {
        let mut places: SmallVec<[usize; 8]> = hashes.map(table_of).collect();
        places.sort_unstable();
        places.dedup();
        let guards = places.iter().map(|&at| locked(&self.tables[at].0)).collect();
        LockedTables { places, guards }
    }

    /// The bucket, if it is in this target's slot.
    #[inline]
    fn in_slot<'a>(&self, target: &'a Target) -> Option<Guard<'a>> {
        let guard = locked(target.slot());
        match &*guard {
            Some(entry) if entry.store == self.store => Some(guard),
            _ => None,
        }
    }

    /// Takes from a bucket in its target's slot that needs no preparation.
    #[inline]
    pub(super) fn take(&self, leg: &SingleLeg<'_>, left: &mut [Millitokens]) -> bool {
        let Some(mut guard) = self.in_slot(leg.target) else { return false };
        take_now(leg, state_in(&mut guard), left)
    }

    pub(super) fn acquire(
        &self,
        plan: &Plan,
        mut book: impl FnMut(&BucketKey, Booking),
    ) -> Admission {
        if let [leg] = &plan.legs[..]
            && let Some(mut guard) = self.in_slot(&leg.target)
        {
            let state = state_in(&mut guard);
            return admit(plan, &mut [state], |_, b| book(leg.target.key(), b));
        }
        let mut tables = self.lock_tables(plan.legs.iter().map(|leg| leg.target.hash()));
        let holders: SmallVec<[Option<Arc<Target>>; 1]> = plan
            .legs
            .iter()
            .map(|leg| tables.holder(leg.target.hash(), leg.target.key()))
            .collect();
        let mut fresh: SmallVec<[Option<BucketState>; 1]> = plan
            .legs
            .iter()
            .zip(&holders)
            .map(|(leg, holder)| holder.is_none().then(|| BucketState::open(&leg.target, plan.now)))
            .collect();
        let admission = {
            let mut guards: SmallVec<[Option<Guard<'_>>; 1]> = holders
                .iter()
                .map(|holder| holder.as_ref().map(|holder| locked(holder.slot())))
                .collect();
            let states = guards.iter_mut().zip(&mut fresh).map(|(guard, fresh)| match guard {
                Some(guard) => state_in(guard),
                None => fresh.as_mut().expect("a bucket without a holder is new"),
            });
            let mut states: SmallVec<[&mut BucketState; 1]> = states.collect();
            admit(plan, &mut states, |at, b| book(plan.legs[at].target.key(), b))
        };
        if matches!(admission, Admission::Taken(_)) {
            for ((leg, holder), fresh) in plan.legs.iter().zip(holders).zip(fresh) {
                let table = tables.of(leg.target.hash());
                match (holder, fresh) {
                    (None, Some(state)) => {
                        self.insert(table, &leg.target, state, plan.now, &mut book);
                    }
                    (Some(holder), _) => self.move_in(table, leg, &holder),
                    (None, None) => unreachable!("a bucket without a holder is new"),
                }
            }
        }
        admission
    }

    /// Inserts a new bucket: in the target's slot, unless another store uses that.
    fn insert(
        &self,
        table: &mut Targets,
        target: &Arc<Target>,
        state: BucketState,
        now: Timestamp,
        book: &mut impl FnMut(&BucketKey, Booking),
    ) {
        if table.len() == table.capacity() {
            // Before a table grows, it drops expired buckets.
            table.retain(|target| keep(target, now, book));
        }
        let slot = locked(target.slot());
        let holder = if slot.is_none() {
            Arc::clone(target)
        } else {
            let limits = Arc::clone(target.limits());
            Arc::new(Target::new(target.key().clone(), limits, target.lifetime()))
        };
        drop(slot);
        *locked(holder.slot()) = Some(SlotEntry { store: self.store, state });
        let same = |other: &Arc<Target>| other.key() == holder.key();
        match table.entry(holder.hash(), same, |other| other.hash()) {
            Entry::Vacant(vacant) => {
                vacant.insert(holder);
            }
            Entry::Occupied(_) => unreachable!("the bucket is new, and the table is locked"),
        }
    }

    /// Moves a bucket from a target that only the table still references to the one in use.
    fn move_in(&self, table: &mut Targets, leg: &Leg, holder: &Arc<Target>) {
        // One reference is the table's, one is ours.
        if Arc::ptr_eq(holder, &leg.target) || Arc::strong_count(holder) > 2 {
            return;
        }
        let mut slot = locked(leg.target.slot());
        if slot.is_some() {
            return;
        }
        *slot = locked(holder.slot()).take();
        let found = table.find_mut(holder.hash(), |other| Arc::ptr_eq(other, holder));
        *found.expect("the table holds its holder") = Arc::clone(&leg.target);
    }

    /// Applies all settlements, or none of them.
    pub(super) fn settle(
        &self,
        settlements: &[Settlement],
        now: Timestamp,
        mut book: impl FnMut(&BucketKey, Booking),
    ) -> Result<(), Overflow> {
        if let [only] = settlements
            && let Some(mut guard) = self.in_slot(&only.target)
        {
            let state = state_in(&mut guard);
            let mut changed = Some(state.clone());
            let mut booked = None;
            settle(only, &mut changed, now, |booking| booked = Some(booking))?;
            *state = changed.expect("a settlement removes no bucket");
            if let Some(booking) = booked {
                book(only.target.key(), booking);
            }
            return Ok(());
        }
        self.settle_in_slots(settlements, now, book)
    }

    /// The slow path: finds each bucket by its key. Several settlements may name the same bucket.
    fn settle_in_slots(
        &self,
        settlements: &[Settlement],
        now: Timestamp,
        mut book: impl FnMut(&BucketKey, Booking),
    ) -> Result<(), Overflow> {
        let mut tables = self.lock_tables(settlements.iter().map(|each| each.target.hash()));
        let mut targets: SmallVec<[&Arc<Target>; 1]> = SmallVec::new();
        for Settlement { target, .. } in settlements {
            if targets.iter().all(|other| other.key() != target.key()) {
                targets.push(target);
            }
        }
        let holders: SmallVec<[Option<Arc<Target>>; 1]> =
            targets.iter().map(|target| tables.holder(target.hash(), target.key())).collect();
        let mut guards: SmallVec<[Option<Guard<'_>>; 1]> = holders
            .iter()
            .map(|holder| holder.as_ref().map(|holder| locked(holder.slot())))
            .collect();
        let copies = guards.iter_mut().map(|guard| guard.as_mut().map(|g| state_in(g).clone()));
        let mut states: SmallVec<[Option<BucketState>; 1]> = copies.collect();
        let mut booked: SmallVec<[(&BucketKey, Booking); 1]> = SmallVec::new();
        for each in settlements {
            let key = each.target.key();
            let at = targets.iter().position(|target| target.key() == key);
            let state = &mut states[at.expect("every target was collected")];
            settle(each, state, now, |booking| booked.push((key, booking)))?;
        }
        // All settlements fit: apply them.
        let mut fresh: SmallVec<[(&Arc<Target>, BucketState); 1]> = SmallVec::new();
        for ((target, guard), state) in targets.into_iter().zip(&mut guards).zip(states) {
            match (guard, state) {
                (Some(guard), Some(state)) => *state_in(guard) = state,
                (None, Some(state)) => fresh.push((target, state)),
                (None, None) => {}
                (Some(_), None) => unreachable!("a settlement removes no bucket"),
            }
        }
        booked.into_iter().for_each(|(key, booking)| book(key, booking));
        drop(guards);
        for (target, state) in fresh {
            self.insert(tables.of(target.hash()), target, state, now, &mut book);
        }
        Ok(())
    }

    pub(super) fn reconfigure(&self, target: &Target, now: Timestamp, book: impl FnOnce(Booking)) {
        let mut tables = self.lock_tables([target.hash()].into_iter());
        let Some(holder) = tables.holder(target.hash(), target.key()) else { return };
        let mut guard = locked(holder.slot());
        let state = state_in(&mut guard);
        if !state.is_expired(now)
            && let Some(booking) = state.reconfigure(target, now)
        {
            book(booking);
        }
    }

    /// Reads all buckets at one moment, so that a chain is consistent: chains change under table locks.
    pub(super) fn peek(&self, keys: &[BucketKey], now: Timestamp) -> Vec<Option<Bucket>> {
        let mut tables = self.lock_tables(keys.iter().map(BucketKey::hash));
        let peek = |key: &BucketKey| {
            let holder = tables.holder(key.hash(), key)?;
            let mut guard = locked(holder.slot());
            let state = state_in(&mut guard);
            (!state.is_expired(now)).then(|| state.bucket.clone())
        };
        keys.iter().map(peek).collect()
    }

    pub(super) fn remove(&self, key: &BucketKey) {
        let hash = key.hash();
        let mut tables = self.lock_tables([hash].into_iter());
        if let Ok(found) = tables.of(hash).find_entry(hash, |target| target.key() == key) {
            let (target, _) = found.remove();
            *locked(target.slot()) = None;
        }
    }

    /// Calls `each` for every bucket, one table at a time.
    pub(super) fn for_each(&self, mut each: impl FnMut(&BucketKey, &mut BucketState)) {
        for table in &self.tables {
            for target in locked(&table.0).iter() {
                each(target.key(), state_in(&mut locked(target.slot())));
            }
        }
    }
}

/// Whether a bucket has not expired. An expired one is removed from its slot.
fn keep(target: &Arc<Target>, now: Timestamp, book: &mut impl FnMut(&BucketKey, Booking)) -> bool {
    let mut guard = locked(target.slot());
    let state = state_in(&mut guard);
    if !state.is_expired(now) {
        return true;
    }
    if let Some(booking) = state.take_booking() {
        book(target.key(), booking);
    }
    *guard = None;
    false
}
