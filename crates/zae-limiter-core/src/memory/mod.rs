//! A store in the memory of one process: the fastest, gone when the process ends.
//!
//! Buckets are spread over many small tables, each behind a lock of its own, by the hash of their
//! key. A plan locks the tables of its legs in ascending order, so that chains that overlap cannot
//! wait for each other in a circle. Records and usage are cold and stand behind one lock each; no
//! lock is held while another kind is waited for, except buckets before usage.

mod records;
mod smallest;
mod usage;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hashbrown::HashTable;
use hashbrown::hash_table::Entry;
use smallvec::SmallVec;
use zae_limiter_model::{Bucket, NamespaceId, ResourceName, Timestamp};

use self::records::Records;
use self::smallest::{Smallest, place};
use self::usage::UsageTable;
use crate::account::{Account, Booking, admit, settle};
use crate::error::{StoreError, StoreErrorKind};
use crate::page::{Page, PageRequest};
use crate::plan::{Admission, BucketKey, Plan, Settlement, Target};
use crate::record::{Key, Record};
use crate::store::{
    Answer, BucketQuery, Query, ResourceList, Scope, Store, StoredBucket, Write, Written,
};
use crate::window::UsageSettings;

/// How many tables the buckets are spread over: enough that threads rarely meet, few enough that a
/// small store stays small.
const TABLES: usize = 64;

/// A [`Store`] in memory.
#[derive(Debug)]
pub struct MemoryStore {
    tables: Box<[Table]>,
    records: Mutex<Records>,
    usage: Mutex<UsageTable>,
}

/// A table has cache lines of its own, so that two threads on two tables do not slow each other.
#[repr(align(128))]
#[derive(Debug, Default)]
struct Table(Mutex<HashTable<Slot>>);

/// A bucket under its key. The target is shared with the limiter's configuration cache.
#[derive(Debug)]
struct Slot {
    target: Arc<Target>,
    account: Account,
}

impl Slot {
    fn is(&self, target: &Arc<Target>) -> bool {
        Arc::ptr_eq(&self.target, target) || self.target.key() == target.key()
    }
}

/// Several tables, locked together.
struct Locked<'a> {
    places: SmallVec<[usize; 8]>,
    guards: SmallVec<[MutexGuard<'a, HashTable<Slot>>; 8]>,
}

impl Locked<'_> {
    fn of(&mut self, hash: u64) -> &mut HashTable<Slot> {
        let at = self.places.binary_search(&table_of(hash)).expect("locked with the others");
        &mut self.guards[at]
    }
}

impl Default for MemoryStore {
    fn default() -> Self {
        Self::new()
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic elsewhere must not stop every other caller: accounts are changed as a whole.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn table_of(hash: u64) -> usize {
    // The upper bits: the tables themselves use the lower ones and the topmost seven.
    usize::try_from((hash >> 32) % TABLES as u64).expect("below the number of tables")
}

impl MemoryStore {
    /// An empty store that keeps hourly, daily and monthly usage.
    pub fn new() -> Self {
        Self::with_usage(UsageSettings::default())
    }

    /// An empty store with other usage windows.
    pub fn with_usage(settings: UsageSettings) -> Self {
        Self {
            tables: (0..TABLES).map(|_| Table::default()).collect(),
            records: Mutex::default(),
            usage: Mutex::new(UsageTable::new(settings)),
        }
    }

    fn table(&self, hash: u64) -> MutexGuard<'_, HashTable<Slot>> {
        locked(&self.tables[table_of(hash)].0)
    }

    /// Locks the tables of several buckets, in ascending order.
    fn lock_tables(&self, hashes: impl Iterator<Item = u64>) -> Locked<'_> {
        let mut places: SmallVec<[usize; 8]> = hashes.map(table_of).collect();
        places.sort_unstable();
        places.dedup();
        let guards = places.iter().map(|&at| locked(&self.tables[at].0)).collect();
        Locked { places, guards }
    }

    fn book(&self, key: &BucketKey, booking: Booking) {
        locked(&self.usage).book(key, booking);
    }

    /// The usual case: one bucket, decided in place.
    fn acquire_one(&self, plan: &Plan) -> Admission {
        let target = &plan.legs[0].target;
        let key = target.key();
        let mut table = self.table(target.hash());
        if let Some(slot) = table.find_mut(target.hash(), |slot| slot.is(target)) {
            let admission = admit(plan, &mut [&mut slot.account], |_, b| self.book(key, b));
            if !Arc::ptr_eq(&slot.target, target) {
                // The key is the same; the target that is in use is found faster.
                slot.target = Arc::clone(target);
            }
            return admission;
        }
        let mut account = Account::open(target, plan.now);
        let admission = admit(plan, &mut [&mut account], |_, b| self.book(key, b));
        if matches!(admission, Admission::Taken(_)) {
            self.insert(&mut table, target, account, plan.now);
        }
        admission
    }

    /// A chain: all its tables are locked, the accounts decided aside and put back together.
    fn acquire_chain(&self, plan: &Plan) -> Admission {
        let hashes = plan.legs.iter().map(|leg| leg.target.hash());
        let mut tables = self.lock_tables(hashes);
        let mut accounts: SmallVec<[Account; 4]> = SmallVec::new();
        for target in plan.legs.iter().map(|leg| &leg.target) {
            let found = tables.of(target.hash()).find(target.hash(), |slot| slot.is(target));
            let account = found.map(|slot| slot.account.clone());
            accounts.push(account.unwrap_or_else(|| Account::open(target, plan.now)));
        }
        let admission = {
            let mut decided: SmallVec<[&mut Account; 4]> = accounts.iter_mut().collect();
            let book = |at: usize, booking| self.book(plan.legs[at].target.key(), booking);
            admit(plan, &mut decided, book)
        };
        if matches!(admission, Admission::Taken(_)) {
            for (leg, account) in plan.legs.iter().zip(accounts) {
                self.insert(tables.of(leg.target.hash()), &leg.target, account, plan.now);
            }
        }
        admission
    }

    /// Puts an account in its place.
    fn insert(
        &self,
        table: &mut HashTable<Slot>,
        target: &Arc<Target>,
        account: Account,
        now: Timestamp,
    ) {
        if table.len() == table.capacity() {
            // Before a table grows it forgets what has expired: it stays as large as what lives.
            table.retain(|slot| self.keep(slot, now));
        }
        let entry = table.entry(target.hash(), |slot| slot.is(target), |slot| slot.target.hash());
        let slot = Slot { target: Arc::clone(target), account };
        match entry {
            Entry::Occupied(mut occupied) => *occupied.get_mut() = slot,
            Entry::Vacant(vacant) => {
                vacant.insert(slot);
            }
        }
    }

    fn keep(&self, slot: &mut Slot, now: Timestamp) -> bool {
        let expired = slot.account.is_expired(now);
        if expired && let Some(booking) = slot.account.take_booking() {
            self.book(slot.target.key(), booking);
        }
        !expired
    }

    fn settle_one(&self, settlement: &Settlement, now: Timestamp) -> Result<(), StoreError> {
        let target = &settlement.target;
        let mut table = self.table(target.hash());
        let Some(slot) = table.find_mut(target.hash(), |slot| slot.is(target)) else {
            return Ok(());
        };
        let mut account = slot.account.clone();
        let mut booked = None;
        settle(settlement, &mut account, now, |booking| booked = Some(booking)).map_err(
            |overflow| {
                StoreError::new(StoreErrorKind::Rejected, overflow.to_string()).caused_by(overflow)
            },
        )?;
        slot.account = account;
        if let Some(booking) = booked {
            self.book(target.key(), booking);
        }
        Ok(())
    }

    fn reconfigure_one(&self, target: &Target, now: Timestamp) {
        let mut table = self.table(target.hash());
        let found = table.find_mut(target.hash(), |slot| slot.target.key() == target.key());
        if let Some(slot) = found.filter(|slot| !slot.account.is_expired(now))
            && let Some(booking) = slot.account.reconfigure(target, now)
        {
            self.book(target.key(), booking);
        }
    }

    /// All at one moment, so that a chain is seen whole.
    fn peek_now(&self, keys: &[BucketKey], now: Timestamp) -> Vec<Option<Bucket>> {
        let mut tables = self.lock_tables(keys.iter().map(Target::hash_of));
        let mut peek = |key: &BucketKey| {
            let hash = Target::hash_of(key);
            let slot = tables.of(hash).find(hash, |slot| slot.target.key() == key)?;
            (!slot.account.is_expired(now)).then(|| slot.account.bucket.clone())
        };
        keys.iter().map(&mut peek).collect()
    }

    fn delete_bucket(&self, key: &BucketKey) {
        let hash = Target::hash_of(key);
        let mut table = self.table(hash);
        if let Ok(found) = table.find_entry(hash, |slot| slot.target.key() == key) {
            found.remove();
        }
    }

    /// Books all that is unbooked, one table at a time, for somebody who wants to see usage.
    fn book_all(&self, concerned: impl Fn(&BucketKey) -> bool) {
        for table in &self.tables {
            for slot in locked(&table.0).iter_mut() {
                if concerned(slot.target.key())
                    && let Some(booking) = slot.account.take_booking()
                {
                    self.book(slot.target.key(), booking);
                }
            }
        }
    }

    /// Calls `each` for every bucket, one table at a time.
    fn for_each_slot(&self, mut each: impl FnMut(&Slot)) {
        for table in &self.tables {
            locked(&table.0).iter().for_each(&mut each);
        }
    }

    fn list_now(&self, query: &Query, page: &PageRequest) -> Result<Page<Record>, StoreError> {
        match query {
            Query::UsageOfEntity(namespace, entity, resource, window, range) => {
                self.book_all(|key| key.namespace == *namespace && key.entity == *entity);
                let resource = resource.as_ref();
                locked(&self.usage).of_entity(namespace, entity, resource, *window, range, page)
            }
            Query::UsageOfResource(namespace, resource, window, range) => {
                self.book_all(|key| key.namespace == *namespace && key.resource == *resource);
                locked(&self.usage).of_resource(namespace, resource, *window, range, page)
            }
            cold => locked(&self.records).list(cold, page),
        }
    }

    fn list_buckets_now(
        &self,
        query: &BucketQuery,
        page: &PageRequest,
    ) -> Result<Page<StoredBucket>, StoreError> {
        let mut found = Smallest::new(page)?;
        self.for_each_slot(|slot| {
            let key = slot.target.key();
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
                    bucket: slot.account.bucket.clone(),
                    expires_at: slot.account.expires_at,
                });
            }
        });
        Ok(found.into_page())
    }

    fn list_keys_now(&self, scope: &Scope, page: &PageRequest) -> Result<Page<Key>, StoreError> {
        let mut found = Smallest::new(page)?;
        locked(&self.records).offer_keys(scope, &mut found);
        locked(&self.usage).offer_keys(scope, &mut found);
        self.for_each_slot(|slot| {
            let key = slot.target.key();
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
    fn acquire_now(&self, plan: &Plan) -> Option<Result<Admission, StoreError>> {
        Some(Ok(if plan.legs.len() == 1 {
            self.acquire_one(plan)
        } else {
            self.acquire_chain(plan)
        }))
    }

    fn acquire<'a>(&'a self, plan: &'a Plan) -> Answer<'a, Admission> {
        Box::pin(async { self.acquire_now(plan).expect("this store answers at once") })
    }

    fn settle<'a>(&'a self, settlements: &'a [Settlement], now: Timestamp) -> Answer<'a, ()> {
        Box::pin(async move { settlements.iter().try_for_each(|each| self.settle_one(each, now)) })
    }

    fn peek<'a>(
        &'a self,
        keys: &'a [BucketKey],
        now: Timestamp,
    ) -> Answer<'a, Vec<Option<Bucket>>> {
        Box::pin(async move { Ok(self.peek_now(keys, now)) })
    }

    fn reconfigure<'a>(&'a self, target: &'a Target, now: Timestamp) -> Answer<'a, ()> {
        Box::pin(async move {
            self.reconfigure_one(target, now);
            Ok(())
        })
    }

    fn get<'a>(&'a self, keys: &'a [Key]) -> Answer<'a, Vec<Option<Record>>> {
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

    fn write<'a>(&'a self, batch: &'a [Write]) -> Answer<'a, Written> {
        Box::pin(async { Ok(locked(&self.records).write(batch, &mut locked(&self.usage))) })
    }

    fn delete<'a>(&'a self, keys: &'a [Key]) -> Answer<'a, ()> {
        Box::pin(async move {
            for key in keys {
                match key {
                    Key::Bucket(key) => self.delete_bucket(key),
                    Key::Usage(key) => locked(&self.usage).remove(key),
                    key => locked(&self.records).remove(key),
                }
            }
            Ok(())
        })
    }

    fn list<'a>(&'a self, query: &'a Query, page: &'a PageRequest) -> Answer<'a, Page<Record>> {
        Box::pin(async { self.list_now(query, page) })
    }

    fn list_buckets<'a>(
        &'a self,
        query: &'a BucketQuery,
        page: &'a PageRequest,
    ) -> Answer<'a, Page<StoredBucket>> {
        Box::pin(async { self.list_buckets_now(query, page) })
    }

    fn list_keys<'a>(&'a self, scope: &'a Scope, page: &'a PageRequest) -> Answer<'a, Page<Key>> {
        Box::pin(async { self.list_keys_now(scope, page) })
    }

    fn list_resources<'a>(
        &'a self,
        namespace: &'a NamespaceId,
        which: ResourceList,
        page: &'a PageRequest,
    ) -> Answer<'a, Page<ResourceName>> {
        Box::pin(async move { locked(&self.records).list_resources(namespace, which, page) })
    }
}
