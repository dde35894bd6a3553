//! Reading and writing records. A batch is one transaction, which also updates the registries of limits.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use zae_limiter_core::{
    ConfigLevel, Key, NamespaceId, Precondition, Record, StoreError, StoreErrorKind, Timestamp,
    Write, Written,
};
use zae_limiter_schema::bucket::further_shards;
use zae_limiter_schema::records::registry::{self, ResourceChanges};
use zae_limiter_schema::records::{self, Before, CONFIG_VERSION};
use zae_limiter_schema::{
    Change, Condition, Item, ItemKey, ParsedKey, Transacted, Update, Updated, Value, parse_key,
};

use crate::driver::Driver;
use crate::error::CallError;

/// How often a batch is tried while other processes change the items it was computed from.
const ATTEMPTS_MAX: u32 = 16;

impl Driver {
    /// Reads records, in the order of the keys.
    pub(crate) async fn get(
        self: &Arc<Self>,
        keys: &[Key],
    ) -> Result<Vec<Option<Record>>, StoreError> {
        let is_record = |key: &&Key| !matches!(key, Key::Bucket(_));
        let items = self.read_items(keys.iter().filter(is_record).map(ItemKey::of)).await?;
        let mut found = Vec::with_capacity(keys.len());
        for key in keys {
            found.push(match items.get(&ItemKey::of(key)) {
                Some(item) => records::decode(key, item).map_err(CallError::from)?,
                None => None,
            });
        }
        Ok(found)
    }

    /// Applies all writes of a batch, or none.
    pub(crate) async fn write(self: &Arc<Self>, batch: &[Write]) -> Result<Written, StoreError> {
        check_keys(batch)?;
        for _ in 0..ATTEMPTS_MAX {
            let seen = self.read_before(batch).await?;
            if let Some(at) = conflict_seen(batch, &seen) {
                return Ok(Written::Conflict(at));
            }
            let prepared = prepare(batch, &seen);
            match self.send(&prepared.changes).await? {
                None => {
                    self.after(batch, &prepared).await;
                    return Ok(Written::Done);
                }
                Some(failed) => {
                    if let Some(at) = prepared.conflict(batch, &failed) {
                        return Ok(Written::Conflict(at));
                    }
                }
            }
        }
        let message =
            format!("other processes changed the records {ATTEMPTS_MAX} times in a row; try again");
        Err(StoreError::new(StoreErrorKind::Unavailable, message))
    }

    /// Reads the items that the batch is computed from.
    async fn read_before(
        self: &Arc<Self>,
        batch: &[Write],
    ) -> Result<HashMap<ItemKey, Option<Item>>, StoreError> {
        let mut keys: Vec<ItemKey> = batch
            .iter()
            .filter(|write| needs_read(write))
            .map(|w| ItemKey::of(&key_of(w)))
            .collect();
        for (ns, changes) in resource_changes(batch) {
            if changes.depends_on_before() {
                keys.push(ItemKey::resources(&ns));
            }
        }
        let mut found = self.read_items(keys.iter().cloned()).await?;
        Ok(keys.into_iter().map(|key| (key.clone(), found.remove(&key))).collect())
    }

    /// Applies the changes. `None` on success. Otherwise, for each change: `None` if its conditions held, else
    /// the item as it is.
    async fn send(
        self: &Arc<Self>,
        changes: &[Change],
    ) -> Result<Option<Vec<Option<Option<Item>>>>, StoreError> {
        match changes {
            [] => Ok(None),
            // Half the price of a transaction.
            [Change::Update(update)] => Ok(match self.update(update).await? {
                Updated::Done(..) => None,
                Updated::Unmet(item, _) => Some(vec![Some(item)]),
            }),
            [Change::Delete(key, conditions)] if conditions.is_empty() => {
                self.remove(std::slice::from_ref(key)).await?;
                Ok(None)
            }
            changes => Ok(match self.transact(changes).await? {
                Transacted::Done(_) => None,
                Transacted::Unmet(failed, _) => Some(failed),
            }),
        }
    }

    /// Cleans up after a batch was applied.
    async fn after(self: &Arc<Self>, batch: &[Write], prepared: &Prepared) {
        for write in batch {
            if let Write::Delete(Key::Bucket(key), _) = write {
                self.forget(key);
            }
        }
        self.forget_counters(&prepared.counts).await;
    }

    /// Removes counters that are 0. A counter of 0 means the same as none, so a failure does no harm.
    pub(crate) async fn forget_counters(self: &Arc<Self>, counts: &Counts) {
        for (ns, counts) in counts {
            for (counter, _) in counts.iter().filter(|(_, by)| **by < 0) {
                if let Err(error) = self.update(&registry::forget_counter(ns, counter)).await {
                    let error = error.to_store_error();
                    tracing::debug!(%error, "could not remove an empty counter");
                }
            }
        }
    }
}

/// Changes of the counts of entities with limits of their own, by namespace and counter.
pub(crate) type Counts = BTreeMap<NamespaceId, BTreeMap<String, i64>>;

pub(crate) fn count(counts: &mut Counts, ns: &NamespaceId, counter: String, by: i64) {
    *counts.entry(ns.clone()).or_default().entry(counter).or_default() += by;
}

/// The updates of counters.
pub(crate) fn count_changes(counts: &Counts) -> impl Iterator<Item = Change> {
    counts
        .iter()
        .filter_map(|(ns, counts)| registry::count_entities(ns, counts))
        .map(Change::Update)
}

fn key_of(write: &Write) -> Key {
    match write {
        Write::Put(record, _) => record.key(),
        Write::Delete(key, _) | Write::Check(key, _) => key.clone(),
    }
}

fn precondition_of(write: &Write) -> &Precondition {
    match write {
        Write::Put(_, precondition)
        | Write::Delete(_, precondition)
        | Write::Check(_, precondition) => precondition,
    }
}

/// A transaction names each item once.
fn check_keys(batch: &[Write]) -> Result<(), StoreError> {
    let mut keys = BTreeSet::new();
    if batch.iter().all(|write| keys.insert(ItemKey::of(&key_of(write)))) {
        return Ok(());
    }
    let message = "the batch names a record twice; split it into two batches";
    Err(StoreError::new(StoreErrorKind::Rejected, message))
}

/// The first write whose condition does not hold, if the items that were read show it. `None` if an earlier
/// condition is on an item that was not read: it might be the first.
fn conflict_seen(batch: &[Write], seen: &HashMap<ItemKey, Option<Item>>) -> Option<usize> {
    for (at, write) in batch.iter().enumerate() {
        match seen.get(&ItemKey::of(&key_of(write))) {
            Some(item) if !holds(write, item.as_ref()) => return Some(at),
            None if *precondition_of(write) != Precondition::Always => return None,
            _ => {}
        }
    }
    None
}

/// Whether a write's precondition holds for an item.
fn holds(write: &Write, item: Option<&Item>) -> bool {
    let key = key_of(write);
    // A damaged record meets no precondition on its contents.
    let decoded = || item.and_then(|item| records::decode(&key, item).ok().flatten());
    match precondition_of(write) {
        Precondition::Always => true,
        // The record of a name may outlive its namespace.
        Precondition::Absent if is_name(&key) => item.is_none() || decoded().is_none(),
        Precondition::Absent => item.is_none(),
        Precondition::Present => item.is_some(),
        Precondition::Version(wanted) => {
            let wanted = i64::try_from(*wanted).ok();
            is_config(&key)
                && wanted.is_some()
                && item.is_some_and(|item| version_of(item) == wanted)
        }
        Precondition::Status(status) => {
            matches!(decoded(), Some(Record::Namespace(found)) if found.status() == *status)
        }
        Precondition::NameOf(id) => {
            matches!(decoded(), Some(Record::NamespaceName(_, of)) if of == *id)
        }
        Precondition::Parent(parent) => {
            matches!(decoded(), Some(Record::Entity(entity)) if entity.parent == *parent)
        }
    }
}

fn is_name(key: &Key) -> bool {
    matches!(key, Key::NamespaceName(_))
}

/// Whether the record has a version: only stored limits do.
fn is_config(key: &Key) -> bool {
    matches!(key, Key::Config(..))
}

fn version_of(item: &Item) -> Option<i64> {
    item.get(CONFIG_VERSION).map_or(Some(0), Value::as_i64)
}

fn conditions_of(key: &Key, precondition: &Precondition) -> Vec<Condition> {
    let pk = || "PK".to_owned();
    let never = || vec![Condition::Exists(pk()), Condition::Absent(pk())];
    let version = || CONFIG_VERSION.to_owned();
    match precondition {
        Precondition::Always => Vec::new(),
        Precondition::Absent if is_name(key) => vec![records::is_free()],
        Precondition::Absent => vec![Condition::Absent(pk())],
        Precondition::Present => vec![Condition::Exists(pk())],
        Precondition::Status(status) if matches!(key, Key::Namespace(_)) => {
            vec![Condition::Exists(pk()), records::has_status(*status)]
        }
        Precondition::NameOf(id) if is_name(key) => vec![records::is_name_of(id)],
        Precondition::Parent(parent) if matches!(key, Key::Entity(..)) => {
            vec![Condition::Exists(pk()), records::has_parent(parent.as_ref())]
        }
        // Contradictory, so that it never holds.
        Precondition::Status(_) | Precondition::NameOf(_) | Precondition::Parent(_) => never(),
        Precondition::Version(_) if !is_config(key) => never(),
        Precondition::Version(0) => {
            let zero = Condition::Equal(version(), Value::number(0));
            let none = Condition::Absent(version());
            vec![Condition::Exists(pk()), Condition::Any(vec![none, zero])]
        }
        Precondition::Version(wanted) => {
            let wanted = i64::try_from(*wanted).unwrap_or(i64::MAX);
            vec![Condition::Equal(version(), Value::number(wanted))]
        }
    }
}

/// Whether the item must be read before the write can be prepared.
fn needs_read(write: &Write) -> bool {
    match write {
        // An item that must be absent needs no read.
        Write::Put(record, precondition) => {
            records::depends_on_before(record) && *precondition != Precondition::Absent
        }
        // A counter goes down only if the item exists.
        Write::Delete(Key::Config(_, level), Precondition::Always) => {
            registry::counter(level).is_some()
        }
        Write::Delete(Key::Bucket(_), _) => true,
        Write::Delete(..) | Write::Check(..) => false,
    }
}

/// The changes of the registry of resources.
fn resource_changes(batch: &[Write]) -> BTreeMap<NamespaceId, ResourceChanges> {
    let mut all: BTreeMap<NamespaceId, ResourceChanges> = BTreeMap::new();
    for write in batch {
        let Key::Config(ns, ConfigLevel::Resource(resource)) = key_of(write) else { continue };
        let resource = resource.to_string();
        match write {
            Write::Put(..) => drop(all.entry(ns).or_default().added.insert(resource)),
            Write::Delete(_, precondition) if *precondition != Precondition::Absent => {
                all.entry(ns).or_default().removed.insert(resource);
            }
            Write::Delete(..) | Write::Check(..) => {}
        }
    }
    all
}

/// A batch as changes of items.
#[derive(Default)]
struct Prepared {
    changes: Vec<Change>,
    /// For each change, the index of its write; `None` for the registries.
    origins: Vec<Option<usize>>,
    counts: Counts,
}

impl Prepared {
    fn push(&mut self, at: usize, change: Change) {
        self.changes.push(change);
        self.origins.push(Some(at));
    }

    /// The first write whose own precondition did not hold. Without one, another pinned attribute has changed,
    /// and the batch must be prepared again.
    fn conflict(&self, batch: &[Write], failed: &[Option<Option<Item>>]) -> Option<usize> {
        let mut conflicts: Vec<usize> = Vec::new();
        for (origin, failed) in self.origins.iter().zip(failed) {
            if let (Some(at), Some(item)) = (origin, failed)
                && !holds(&batch[*at], item.as_ref())
            {
                conflicts.push(*at);
            }
        }
        conflicts.into_iter().min()
    }
}

fn prepare(batch: &[Write], seen: &HashMap<ItemKey, Option<Item>>) -> Prepared {
    let mut prepared = Prepared::default();
    for (at, write) in batch.iter().enumerate() {
        let key = ItemKey::of(&key_of(write));
        let before = match (seen.get(&key), precondition_of(write)) {
            (Some(Some(item)), _) => Before::Item(item),
            (Some(None), _) | (None, Precondition::Absent) => Before::Absent,
            (None, _) => Before::Unknown,
        };
        match write {
            Write::Put(record, _) => put(&mut prepared, batch, at, record, before),
            Write::Delete(deleted, precondition) => {
                delete(&mut prepared, at, deleted, precondition, before);
            }
            Write::Check(_, Precondition::Always) => {}
            Write::Check(_, precondition) => {
                prepared.push(at, Change::Check(key, conditions_of(&key_of(write), precondition)));
            }
        }
    }
    let mut registries: Vec<Change> = Vec::new();
    for (ns, changes) in resource_changes(batch) {
        let before = seen.get(&ItemKey::resources(&ns)).and_then(Option::as_ref);
        registries.extend(changes.update(&ns, before).map(Change::Update));
    }
    registries.extend(count_changes(&prepared.counts));
    prepared.origins.resize(prepared.changes.len() + registries.len(), None);
    prepared.changes.extend(registries);
    prepared
}

fn put(prepared: &mut Prepared, batch: &[Write], at: usize, record: &Record, before: Before<'_>) {
    let key = record.key();
    let mut conditions = conditions_of(&key, precondition_of(&batch[at]));
    let encoded = records::encode(record, before);
    for pin in encoded.pins {
        if !conditions.contains(&pin) {
            conditions.push(pin);
        }
    }
    let actions = match record {
        Record::NamespaceName(name, id) => records::encode_name(name, id, created_at(batch, id)),
        _ => encoded.actions,
    };
    if let (Key::Config(ns, level), Before::Absent) = (&key, before)
        && let Some(counter) = registry::counter(level)
    {
        count(&mut prepared.counts, ns, counter, 1);
    }
    let update = Update { key: ItemKey::of(&key), actions, conditions };
    prepared.push(at, Change::Update(update));
}

/// When the namespace was registered, if the same batch writes its record.
fn created_at(batch: &[Write], id: &NamespaceId) -> Option<Timestamp> {
    batch.iter().find_map(|write| match write {
        Write::Put(Record::Namespace(namespace), _) if namespace.id == *id => {
            Some(namespace.created_at)
        }
        _ => None,
    })
}

fn delete(
    prepared: &mut Prepared,
    at: usize,
    key: &Key,
    precondition: &Precondition,
    before: Before<'_>,
) {
    let item_key = ItemKey::of(key);
    let mut conditions = conditions_of(key, precondition);
    if *precondition == Precondition::Absent {
        return prepared.push(at, Change::Check(item_key, conditions));
    }
    if let Key::Config(ns, level) = key
        && let Some(counter) = registry::counter(level)
    {
        if matches!(before, Before::Absent) {
            let absent = conditions_of(key, &Precondition::Absent);
            return prepared.push(at, Change::Check(item_key, absent));
        }
        // The counter goes down only if the item exists.
        if *precondition == Precondition::Always {
            conditions = conditions_of(key, &Precondition::Present);
        }
        count(&mut prepared.counts, ns, counter, -1);
    }
    if let (Key::Bucket(bucket), Before::Item(item)) = (key, before) {
        for shard in further_shards(bucket, item) {
            prepared.push(at, Change::Delete(shard, Vec::new()));
        }
    }
    prepared.push(at, Change::Delete(item_key, conditions));
}

/// The key of the record that an item holds, if it is one.
pub(crate) fn record_key(key: &ItemKey) -> Option<Key> {
    match parse_key(key)? {
        ParsedKey::Record(key) => Some(key),
        _ => None,
    }
}
