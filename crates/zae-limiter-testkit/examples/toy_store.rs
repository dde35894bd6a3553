//! The smallest store that keeps the contract: maps behind one lock. Start here to write your own.
//!
//!     cargo run  -p zae-limiter-testkit --example toy_store
//!     cargo test -p zae-limiter-testkit --example toy_store
//!
//! Each call locks, does all its work and unlocks within one poll of its future. So it is one step
//! for everybody else, and a future that is dropped has done all or nothing. The arithmetic comes
//! from `account`.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};
use zae_limiter_core::{BoxFuture, Cost, StoreError, UsageRecording};

use zae_limiter_core::bucket_state::{self, Booking, BucketState};
use zae_limiter_core::*;

/// Keeps everything in memory.
#[derive(Debug, Default)]
struct ToyStore {
    // A std mutex: it is never held across an await.
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    buckets: BTreeMap<BucketKey, BucketState>,
    records: BTreeMap<Key, Record>,
}

impl ToyStore {
    /// An answer that is found under the lock, when it is first polled.
    fn answer<'a, T: 'a>(
        &'a self,
        find: impl FnOnce(&mut State) -> Result<T, StoreError> + Send + 'a,
    ) -> BoxFuture<'a, Result<T, StoreError>> {
        let lock = || self.state.lock().unwrap_or_else(PoisonError::into_inner);
        Box::pin(async move { find(&mut lock()) })
    }
}

impl Store for ToyStore {
    fn cost(&self) -> Option<Cost> {
        None
    }

    fn usage_recording(&self) -> UsageRecording {
        UsageRecording::Immediate
    }

    fn acquire<'a>(&'a self, plan: &'a Plan) -> BoxFuture<'a, Result<Admission, StoreError>> {
        self.answer(move |state| Ok(state.acquire(plan)))
    }

    fn settle<'a>(
        &'a self,
        settlements: &'a [Settlement],
        now: Timestamp,
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        self.answer(move |state| state.settle(settlements, now))
    }

    fn peek<'a>(
        &'a self,
        keys: &'a [BucketKey],
        now: Timestamp,
    ) -> BoxFuture<'a, Result<Vec<Option<Bucket>>, StoreError>> {
        self.answer(move |state| {
            let live = |bucket: &&BucketState| !bucket.is_expired(now);
            let found = keys.iter().map(|key| state.buckets.get(key).filter(live));
            Ok(found.map(|bucket| bucket.map(|bucket| bucket.bucket.clone())).collect())
        })
    }

    fn reconfigure<'a>(
        &'a self,
        target: &'a Target,
        now: Timestamp,
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        self.answer(move |state| {
            let bucket = state.buckets.get_mut(target.key());
            let live = bucket.filter(|bucket| !bucket.is_expired(now));
            let booking = live.and_then(|bucket| bucket.reconfigure(target, now));
            state.book(target.key(), booking);
            Ok(())
        })
    }

    fn get<'a>(
        &'a self,
        keys: &'a [Key],
    ) -> BoxFuture<'a, Result<Vec<Option<Record>>, StoreError>> {
        self.answer(move |state| {
            Ok(keys.iter().map(|key| state.records.get(key).cloned()).collect())
        })
    }

    fn write<'a>(&'a self, batch: &'a [Write]) -> BoxFuture<'a, Result<Written, StoreError>> {
        self.answer(move |state| Ok(state.write(batch)))
    }

    fn delete<'a>(&'a self, keys: &'a [Key]) -> BoxFuture<'a, Result<(), StoreError>> {
        self.answer(move |state| {
            for key in keys {
                match key {
                    Key::Bucket(bucket) => drop(state.buckets.remove(bucket)),
                    key => drop(state.records.remove(key)),
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
        self.answer(move |state| {
            state.book_all();
            let found = state.records.values().filter(|record| asked_for(query, record));
            page_of(found.map(|record| (place_in(query, record), record.clone())), page)
        })
    }

    fn list_buckets<'a>(
        &'a self,
        query: &'a BucketQuery,
        page: &'a PageRequest,
    ) -> BoxFuture<'a, Result<Page<StoredBucket>, StoreError>> {
        self.answer(move |state| {
            let found = state.buckets.iter().filter(|(key, _)| match query {
                BucketQuery::OfEntity(ns, id) => key.namespace == *ns && key.entity == *id,
                BucketQuery::OnResource(ns, on) => key.namespace == *ns && key.resource == *on,
            });
            let placed = found.map(|(key, state)| {
                let (key, bucket) = (key.clone(), state.bucket.clone());
                let place = place(&Key::Bucket(key.clone()));
                (place, StoredBucket { key, bucket, expires_at: state.expires_at })
            });
            page_of(placed, page)
        })
    }

    fn list_keys<'a>(
        &'a self,
        scope: &'a Scope,
        page: &'a PageRequest,
    ) -> BoxFuture<'a, Result<Page<Key>, StoreError>> {
        self.answer(move |state| {
            state.book_all();
            let prefix = match scope {
                Scope::Entity(ns, id) => format!("{ns}\0entity\0{id}\0"),
                Scope::Namespace(ns) => format!("{ns}\0"),
            };
            let buckets = state.buckets.keys().cloned().map(Key::Bucket);
            let keys = buckets.chain(state.records.keys().cloned());
            let placed = keys.map(|key| (place(&key), key));
            page_of(placed.filter(|(place, _)| place.starts_with(&prefix)), page)
        })
    }

    fn list_resources<'a>(
        &'a self,
        namespace: &'a NamespaceId,
        which: ResourceList,
        page: &'a PageRequest,
    ) -> BoxFuture<'a, Result<Page<ResourceName>, StoreError>> {
        self.answer(move |state| {
            let resource = |key: &Key| match (which, key) {
                (_, Key::Config(ns, _)) if ns != namespace => None,
                (ResourceList::WithDefaults, Key::Config(_, ConfigLevel::Resource(on))) => {
                    Some(on.clone())
                }
                (
                    ResourceList::WithEntityConfigs,
                    Key::Config(_, ConfigLevel::EntityResource(_, on)),
                ) => Some(on.clone()),
                _ => None,
            };
            let names: BTreeSet<_> = state.records.keys().filter_map(resource).collect();
            page_of(names.into_iter().map(|name| (name.to_string(), name)), page)
        })
    }
}

impl State {
    fn acquire(&mut self, plan: &Plan) -> Admission {
        let mut buckets: Vec<BucketState> = Vec::new();
        for Leg { target, .. } in &plan.legs {
            let bucket = self.buckets.get(target.key()).cloned();
            buckets.push(bucket.unwrap_or_else(|| BucketState::open(target, plan.now)));
        }
        let mut bookings = Vec::new();
        let mut borrowed: Vec<&mut BucketState> = buckets.iter_mut().collect();
        let admission = bucket_state::admit(plan, &mut borrowed, |at, b| bookings.push((at, b)));
        // A refusal leaves everything as it was: accounts and bookings were copies.
        if matches!(admission, Admission::Taken(_)) {
            for (at, booking) in bookings {
                self.book(plan.legs[at].target.key(), Some(booking));
            }
            for (leg, bucket) in plan.legs.iter().zip(buckets) {
                self.buckets.insert(leg.target.key().clone(), bucket);
            }
        }
        admission
    }

    fn settle(&mut self, settlements: &[Settlement], now: Timestamp) -> Result<(), StoreError> {
        let mut settled = BTreeMap::new();
        let mut bookings = Vec::new();
        for settlement in settlements {
            let key = settlement.target.key();
            // Another settlement of this call may have changed it.
            let bucket = settled.entry(key).or_insert_with(|| self.buckets.get(key).cloned());
            bucket_state::settle(settlement, bucket, now, |b| bookings.push((key, b)))
                .map_err(|error| StoreError::new(StoreErrorKind::Rejected, error.to_string()))?;
        }
        // Only now that all of them went well is anything stored.
        for (key, bucket) in settled {
            self.buckets.extend(bucket.map(|bucket| (key.clone(), bucket)));
        }
        for (key, booking) in bookings {
            self.book(key, Some(booking));
        }
        Ok(())
    }

    fn write(&mut self, batch: &[Write]) -> Written {
        let holds =
            |key: &Key, precondition: &Precondition| match (precondition, self.records.get(key)) {
                (Precondition::Always, _)
                | (Precondition::Absent, None)
                | (Precondition::Present, Some(_)) => true,
                (Precondition::Version(version), Some(Record::Config(config))) => {
                    config.version == *version
                }
                (Precondition::Status(status), Some(Record::Namespace(namespace))) => {
                    namespace.status() == *status
                }
                (Precondition::NameOf(id), Some(Record::NamespaceName(_, of))) => of == id,
                (Precondition::Parent(parent), Some(Record::Entity(entity))) => {
                    entity.parent == *parent
                }
                _ => false,
            };
        let unmet = batch.iter().position(|write| match write {
            Write::Put(record, precondition) => !holds(&record.key(), precondition),
            Write::Delete(key, precondition) | Write::Check(key, precondition) => {
                !holds(key, precondition)
            }
        });
        if let Some(at) = unmet {
            return Written::Conflict(at);
        }
        for write in batch {
            match write {
                Write::Put(record, _) => drop(self.records.insert(record.key(), record.clone())),
                Write::Delete(key, _) => drop(self.records.remove(key)),
                Write::Check(..) => {}
            }
        }
        Written::Done
    }

    /// Books the unbooked usage of all buckets, before usage records are read.
    fn book_all(&mut self) {
        let waiting = self.buckets.iter_mut().map(|(key, a)| (key.clone(), a.take_booking()));
        for (key, booking) in waiting.collect::<Vec<_>>() {
            self.book(&key, booking);
        }
    }

    /// Adds consumption to the usage records of its hour, day and month.
    fn book(&mut self, bucket: &BucketKey, booking: Option<Booking>) {
        let Some(booking) = booking else { return };
        let settings = UsageSettings::default();
        for window in settings.windows {
            let start = window.start(start_of_hour(booking.hour));
            let BucketKey { namespace, entity, resource } = bucket.clone();
            let key = UsageKey { namespace, entity, resource, window, start };
            let expires_at = Some(window.end(start).saturating_add(settings.retention));
            let new = Usage { key: key.clone(), consumed: BTreeMap::new(), events: 0, expires_at };
            let record = self.records.entry(Key::Usage(key)).or_insert(Record::Usage(new));
            let Record::Usage(usage) = record else { unreachable!("kept under a usage key") };
            usage.events += booking.events;
            for (limit, amount) in &booking.consumed {
                let total = usage.consumed.entry(limit.clone()).or_default();
                *total = total.saturating_add(*amount);
            }
        }
    }
}

fn asked_for(query: &Query, record: &Record) -> bool {
    match (query, record) {
        (Query::Children(ns, parent), Record::Entity(entity)) => {
            entity.namespace == *ns && entity.parent.as_ref() == Some(parent)
        }
        (Query::EntityConfigs(ns, on), Record::Config(config)) => match &config.level {
            _ if config.namespace != *ns => false,
            ConfigLevel::Entity(_) => on.is_none(),
            ConfigLevel::EntityResource(_, resource) => on.as_ref() == Some(resource),
            _ => false,
        },
        (Query::Audit(ns, subject), Record::Audit(event)) => {
            event.namespace == *ns && event.subject == *subject
        }
        (Query::UsageOfEntity(ns, id, on, window, range), Record::Usage(Usage { key, .. })) => {
            (&key.namespace, &key.entity, key.window) == (ns, id, *window)
                && on.as_ref().is_none_or(|on| key.resource == *on)
                && range.contains(&key.start)
        }
        (Query::UsageOfResource(ns, on, window, range), Record::Usage(Usage { key, .. })) => {
            (&key.namespace, &key.resource, key.window) == (ns, on, *window)
                && range.contains(&key.start)
        }
        (Query::Namespaces, Record::Namespace(_)) => true,
        _ => false,
    }
}

/// Where a record stands in a list.
fn place_in(query: &Query, record: &Record) -> String {
    match (query, record) {
        (Query::UsageOfResource(..), Record::Usage(Usage { key, .. })) => {
            format!("{}\0{}", sortable(key.start), key.entity)
        }
        _ => place(&record.key()),
    }
}

/// A text for each key, such that what is listed together stands together and in its order. No
/// name has a NUL in it, so shards cannot run together.
fn place(key: &Key) -> String {
    match key {
        // It records usage at once and needs none.
        Key::Tombstone(_) => String::new(),
        Key::Entity(ns, id) => format!("{ns}\0entity\0{id}\0"),
        Key::Config(ns, ConfigLevel::System) => format!("{ns}\0config\0"),
        Key::Config(ns, ConfigLevel::Resource(on)) => format!("{ns}\0config\0{on}"),
        Key::Config(ns, ConfigLevel::Entity(id)) => format!("{ns}\0entity\0{id}\0config\0"),
        Key::Config(ns, ConfigLevel::EntityResource(id, on)) => {
            format!("{ns}\0entity\0{id}\0config\0{on}")
        }
        Key::Audit(ns, subject, id) => {
            // Newest first: the id's bytes turned around.
            let reversed: String = id.bytes().map(|byte| char::from(!byte)).collect();
            format!("{ns}\0audit\0{subject}\0{reversed}")
        }
        Key::Usage(UsageKey { namespace, entity, resource, window, start }) => {
            let start = sortable(*start);
            format!("{namespace}\0entity\0{entity}\0usage\0{resource}\0{window}\0{start}")
        }
        Key::Bucket(BucketKey { namespace, entity, resource }) => {
            format!("{namespace}\0entity\0{entity}\0bucket\0{resource}")
        }
        Key::Namespace(id) => format!("\0namespace\0{id}"),
        Key::NamespaceName(name) => format!("\0name\0{name}"),
    }
}

/// Digits that sort as the moments do, those before 1970 too.
fn sortable(at: Timestamp) -> String {
    format!("{:020}", i128::from(at.as_millis()) - i128::from(i64::MIN))
}

/// The page that follows the cursor's place. A real store would not look at the other pages.
fn page_of<T>(
    items: impl Iterator<Item = (String, T)>,
    request: &PageRequest,
) -> Result<Page<T>, StoreError> {
    let after = match &request.after {
        None => "",
        Some(cursor) => cursor.as_str().strip_prefix("after:").ok_or_else(|| {
            StoreError::new(StoreErrorKind::Rejected, "the cursor is not from this store")
        })?,
    };
    let mut items: Vec<_> = items.filter(|(place, _)| place.as_str() > after).collect();
    items.sort_by(|(a, _), (b, _)| a.cmp(b));
    let more = items.len() > request.size;
    items.truncate(request.size);
    let last = items.last().filter(|_| more);
    let next = last.map(|(place, _)| Cursor::new(format!("after:{place}")));
    Ok(Page { items: items.into_iter().map(|(_, item)| item).collect(), next })
}

fn main() -> Result<(), Invalid> {
    let (namespace, entity) = (NamespaceId::new("example-ns1")?, EntityId::new("key-1")?);
    let key = BucketKey { namespace, entity, resource: ResourceName::new("gpt-4")? };
    let limits = Arc::new(LimitSet::new([Limit::per_minute("rpm", 2)])?);
    let target = Arc::new(Target::new(key, limits, Lifetime::Forever));
    let store = ToyStore::default();
    for seconds in [0, 1, 2, 30] {
        let takes = [Take { cell: 0, amount: amount(1)? }].into_iter().collect();
        let legs = [Leg { target: Arc::clone(&target), takes }].into_iter().collect();
        let plan = Plan { max_skew: None, now: Timestamp::from_millis(seconds * 1_000), legs };
        // No runtime: a toy store's futures are ready when they are first polled.
        let answer = store.acquire(&plan).as_mut().poll(&mut Context::from_waker(Waker::noop()));
        match answer {
            Poll::Ready(Ok(Admission::Taken(taken))) => {
                println!("{seconds:2} s: taken, {} left", taken[0].left[0]);
            }
            Poll::Ready(Ok(Admission::Refused(statuses))) => {
                println!("{seconds:2} s: refused, retry in {:?}", statuses[0].retry_after);
            }
            other => println!("{seconds:2} s: {other:?}"),
        }
    }
    Ok(())
}

#[cfg(test)]
zae_limiter_testkit::conformance_tests!(contract, || async { Arc::new(ToyStore::default()) });
#[cfg(test)]
zae_limiter_testkit::usage_conformance_tests!(usage, || async { Arc::new(ToyStore::default()) });
#[cfg(test)]
zae_limiter_testkit::one_step_conformance_tests!(steps, || async { Arc::new(ToyStore::default()) });
