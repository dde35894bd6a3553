//! Sweeping: finds and removes what belongs to nothing.
//!
//! A namespace's record is written before anything in it, and its id is never used twice. So an item whose namespace has
//! no record, read after the item, stays an orphan for ever. Namespaces that a name points to are left alone in any
//! case: another client may keep its records differently.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use zae_limiter_model::{EntityId, NamespaceId, NamespaceName, Timestamp};

use crate::error::Error;
use crate::namespaces::{Holder, Namespaces};
use crate::page::PageRequest;
use crate::record::{AuditAction, AuditSubject, Key, Namespace, NamespaceStatus, Record};
use crate::store::{BATCH_MAX, Precondition, Query, Scope, Write, Written};

/// How long a change is left alone: others may still be at it.
const SETTLED_AFTER: Duration = Duration::from_secs(15 * 60);

/// Items of namespaces that do not exist, by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct OrphanItems {
    /// Buckets. A bucket with several shards may count once for each.
    pub buckets: u64,
    /// Entities.
    pub entities: u64,
    /// Stored limits.
    pub limits: u64,
    /// Usage records.
    pub usage: u64,
    /// Audit events.
    pub audit_events: u64,
    /// Items that are no records.
    pub other: u64,
}

impl OrphanItems {
    /// All of them.
    pub fn total(&self) -> u64 {
        self.buckets + self.entities + self.limits + self.usage + self.audit_events + self.other
    }

    fn count(&mut self, key: &Key) {
        match key {
            Key::Bucket(_) => self.buckets += 1,
            Key::Entity(..) => self.entities += 1,
            Key::Config(..) => self.limits += 1,
            Key::Usage(_) => self.usage += 1,
            Key::Audit(..) => self.audit_events += 1,
            Key::Namespace(_) => self.other += 1,
            Key::NamespaceName(_) | Key::Tombstone(_) => {}
        }
    }

    fn add(&mut self, more: &Self) {
        self.buckets += more.buckets;
        self.entities += more.entities;
        self.limits += more.limits;
        self.usage += more.usage;
        self.audit_events += more.audit_events;
        self.other += more.other;
    }
}

/// What belongs to nothing: the result of [`Namespaces::find_orphans`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Orphans {
    /// How many items the store has, those of a bucket's further shards included.
    pub scanned: u64,
    /// The items of namespaces that do not exist.
    pub items: OrphanItems,
    /// Usage records of deleted entities, in namespaces that exist.
    pub deleted_usage: u64,
    /// Names that point to a namespace without a record, but with items. They are left alone: registering the name
    /// again repairs it, and makes the items orphans.
    pub broken_names: u64,
    gone: BTreeSet<NamespaceId>,
    dangling: BTreeMap<NamespaceName, NamespaceId>,
    nameless: Vec<Namespace>,
    deleted: Vec<(NamespaceId, EntityId)>,
    tombstones: Vec<Key>,
}

impl Orphans {
    /// The number of namespaces that do not exist, but have items.
    pub fn namespaces(&self) -> u64 {
        self.gone.len() as u64
    }

    /// The number of names that point to nothing.
    pub fn names(&self) -> u64 {
        self.dangling.len() as u64
    }

    /// The number of registered namespaces that have lost their name. They are soft-deleted, so that they can be
    /// recovered or purged.
    pub fn nameless(&self) -> u64 {
        self.nameless.len() as u64
    }

    /// The number of tombstones past their time.
    pub fn tombstones(&self) -> u64 {
        self.tombstones.len() as u64
    }

    /// Whether there is nothing to remove.
    pub fn is_empty(&self) -> bool {
        self.total() == 0
    }

    /// Everything that [`Namespaces::remove_orphans`] removes or repairs.
    pub fn total(&self) -> u64 {
        let repaired = self.names() + self.nameless() + self.tombstones();
        self.items.total() + self.deleted_usage + repaired
    }
}

/// What the scan has seen.
#[derive(Default)]
struct Seen {
    items: BTreeMap<NamespaceId, OrphanItems>,
    names: BTreeMap<NamespaceName, NamespaceId>,
    /// Entities with audit events, and those with a record.
    audited: BTreeSet<(NamespaceId, EntityId)>,
    created: BTreeSet<(NamespaceId, EntityId)>,
    tombstones: Vec<Key>,
    scanned: u64,
}

impl Namespaces {
    /// Finds what belongs to nothing: items of namespaces that do not exist, usage of deleted entities, names that point
    /// to nothing, namespaces without their name, and tombstones past their time. Changes nothing. It reads the whole
    /// store, and calls `progress` with the number of items so far.
    ///
    /// ```
    /// # use zae_limiter_core::{MemoryStore, RateLimiter};
    /// # tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(async {
    /// # let limiter = RateLimiter::builder(MemoryStore::new()).open().await?;
    /// let orphans = limiter.namespaces().find_orphans(|_| {}).await?;
    /// limiter.namespaces().remove_orphans(&orphans, |_| {}).await?;
    /// assert!(orphans.is_empty());
    /// # Ok::<(), zae_limiter_core::Error>(())
    /// # }).unwrap();
    /// ```
    ///
    /// # Errors
    ///
    /// An error of the store, also if it cannot list all its items.
    pub async fn find_orphans(&self, mut progress: impl FnMut(u64)) -> Result<Orphans, Error> {
        let mut seen = Seen::default();
        self.each_page(async |keys| {
            self.look(keys, &mut seen).await?;
            progress(seen.scanned);
            Ok(())
        })
        .await?;
        let now = self.now();
        let ids: BTreeSet<&NamespaceId> = seen.items.keys().chain(seen.names.values()).collect();
        let records = self.records_of(&ids).await?;
        let named: BTreeSet<&NamespaceId> = seen.names.values().collect();
        let mut found = Orphans { scanned: seen.scanned, ..Orphans::default() };
        for (id, items) in &seen.items {
            // The registries of a namespace are listed as the namespace, like its own record.
            if !records.contains_key(id) && !named.contains(id) {
                found.gone.insert(id.clone());
                found.items.add(items);
            }
        }
        for (name, id) in &seen.names {
            match (records.contains_key(id), seen.items.contains_key(id)) {
                (true, _) => {}
                (false, true) => found.broken_names += 1,
                (false, false) => drop(found.dangling.insert(name.clone(), id.clone())),
            }
        }
        let is_nameless = |it: &&Namespace| {
            it.status() == NamespaceStatus::Active
                && seen.names.get(&it.name) != Some(&it.id)
                && is_settled(it.created_at, now)
        };
        found.nameless = records.values().filter(is_nameless).cloned().collect();
        found.tombstones = seen.tombstones;
        for (ns, entity) in seen.audited.difference(&seen.created) {
            let usage = match records.contains_key(ns) {
                true => self.usage_of_deleted(ns, entity).await?,
                false => Vec::new(),
            };
            if !usage.is_empty() {
                found.deleted_usage += usage.len() as u64;
                found.deleted.push((ns.clone(), entity.clone()));
            }
        }
        Ok(found)
    }

    /// Removes what [`find_orphans`](Self::find_orphans) has found, unless it belongs to something by now. Calls
    /// `progress` with the number of items removed so far, and returns it. A call that was interrupted can be repeated.
    ///
    /// # Errors
    ///
    /// An error of the store.
    pub async fn remove_orphans(
        &self,
        found: &Orphans,
        mut progress: impl FnMut(u64),
    ) -> Result<u64, Error> {
        let mut removed = 0;
        let ids: BTreeSet<&NamespaceId> = found.gone.iter().collect();
        let exist = self.records_of(&ids).await?;
        let is_gone = |id: &NamespaceId| found.gone.contains(id) && !exist.contains_key(id);
        if !found.gone.is_empty() {
            self.each_page(async |keys| {
                let is_orphan = |key: &Key| namespace_of(key).is_some_and(is_gone);
                let orphans: Vec<Key> = keys.iter().filter(|key| is_orphan(key)).cloned().collect();
                if !orphans.is_empty() {
                    self.call(self.store.delete(&orphans)).await?;
                    removed += orphans.len() as u64;
                    progress(removed);
                }
                Ok(())
            })
            .await?;
        }
        for (ns, entity) in &found.deleted {
            let usage = self.usage_of_deleted(ns, entity).await?;
            self.call(self.store.delete(&usage)).await?;
            removed += usage.len() as u64;
            progress(removed);
        }
        for (name, id) in &found.dangling {
            removed += u64::from(self.free_name(name, id).await?);
        }
        for namespace in &found.nameless {
            removed += u64::from(self.soft_delete(namespace).await?);
        }
        if !found.tombstones.is_empty() {
            self.each_page(async |keys| {
                // Those that are still past their time: an entity may have been deleted again.
                let is_found = |key: &&Key| found.tombstones.contains(*key);
                let old: Vec<Key> = keys.iter().filter(is_found).cloned().collect();
                self.call(self.store.delete(&old)).await?;
                removed += old.len() as u64;
                Ok(())
            })
            .await?;
        }
        Ok(removed)
    }

    async fn each_page(
        &self,
        mut work: impl AsyncFnMut(&[Key]) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let now = self.now();
        let mut request = PageRequest::first(crate::PAGE_MAX);
        loop {
            let page = self.call(self.store.list_everything(now, &request)).await?;
            work(&page.items).await?;
            match page.next {
                Some(after) => request.after = Some(after),
                None => return Ok(()),
            }
        }
    }

    async fn look(&self, keys: &[Key], seen: &mut Seen) -> Result<(), Error> {
        let mut names = Vec::new();
        for key in keys {
            seen.scanned += 1;
            match key {
                Key::NamespaceName(_) => names.push(key.clone()),
                Key::Tombstone(_) => seen.tombstones.push(key.clone()),
                Key::Entity(ns, id) => drop(seen.created.insert((ns.clone(), id.clone()))),
                Key::Audit(ns, AuditSubject::Entity(id), _) => {
                    seen.audited.insert((ns.clone(), id.clone()));
                }
                _ => {}
            }
            if let Some(ns) = namespace_of(key) {
                seen.items.entry(ns.clone()).or_default().count(key);
            }
        }
        for names in names.chunks(BATCH_MAX) {
            for record in self.call(self.store.get(names)).await?.into_iter().flatten() {
                if let Record::NamespaceName(name, id) = record {
                    seen.names.insert(name, id);
                }
            }
        }
        Ok(())
    }

    /// Those of the namespaces that have a record.
    async fn records_of(
        &self,
        ids: &BTreeSet<&NamespaceId>,
    ) -> Result<BTreeMap<NamespaceId, Namespace>, Error> {
        let keys: Vec<Key> = ids.iter().map(|id| Key::Namespace((*id).clone())).collect();
        let mut found = BTreeMap::new();
        for keys in keys.chunks(BATCH_MAX) {
            let records = self.call(self.store.get(keys)).await?.into_iter().flatten();
            let namespaces = records.filter_map(Record::into_namespace);
            found.extend(namespaces.map(|it| (it.id.clone(), it)));
        }
        Ok(found)
    }

    /// The usage records of an entity that was deleted and has nothing else. None if it was used again: then a window
    /// starts after the deletion.
    async fn usage_of_deleted(
        &self,
        ns: &NamespaceId,
        entity: &EntityId,
    ) -> Result<Vec<Key>, Error> {
        let scope = Scope::Entity(ns.clone(), entity.clone());
        let (mut usage, mut last) = (Vec::new(), None);
        let mut request = PageRequest::first(crate::PAGE_MAX);
        loop {
            let page = self.call(self.store.list_keys(&scope, &request)).await?;
            for key in page.items {
                let Key::Usage(record) = &key else { return Ok(Vec::new()) };
                last = last.max(Some(record.start));
                usage.push(key);
            }
            match page.next {
                Some(after) => request.after = Some(after),
                None => break,
            }
        }
        let Some(last) = last else { return Ok(Vec::new()) };
        let deleted_at = self.deleted_at(ns, entity).await?;
        let is_orphan = |at: Timestamp| last <= at && is_settled(at, self.now());
        Ok(if deleted_at.is_some_and(is_orphan) { usage } else { Vec::new() })
    }

    /// When an entity was last deleted, by its audit events.
    async fn deleted_at(
        &self,
        ns: &NamespaceId,
        entity: &EntityId,
    ) -> Result<Option<Timestamp>, Error> {
        let query = Query::Audit(ns.clone(), AuditSubject::Entity(entity.clone()));
        let mut request = PageRequest::first(crate::PAGE_MAX);
        loop {
            let page = self.call(self.store.list(&query, &request)).await?;
            let mut events = page.items.into_iter().filter_map(Record::into_audit);
            if let Some(event) = events.find(|it| it.action == AuditAction::EntityDeleted) {
                return Ok(Some(event.at));
            }
            match page.next {
                Some(after) => request.after = Some(after),
                None => return Ok(None),
            }
        }
    }

    /// Removes the record of a name that points to nothing. `false` if that has changed.
    async fn free_name(&self, name: &NamespaceName, id: &NamespaceId) -> Result<bool, Error> {
        let batch = [
            Write::Delete(Key::NamespaceName(name.clone()), Precondition::NameOf(id.clone())),
            Write::Check(Key::Namespace(id.clone()), Precondition::Absent),
        ];
        Ok(self.call(self.store.write(&batch)).await? == Written::Done)
    }

    /// Soft-deletes a namespace that has lost its name. `false` if it has it again.
    async fn soft_delete(&self, namespace: &Namespace) -> Result<bool, Error> {
        let holds_name = match self.holder(&namespace.name).await? {
            Holder::Nobody => Precondition::Absent,
            Holder::Namespace(it) if it.id == namespace.id => return Ok(false),
            Holder::Namespace(Namespace { id, .. }) | Holder::Dangling(id, _) => {
                Precondition::NameOf(id)
            }
        };
        let deleted = Namespace { deleted_at: Some(self.now()), ..namespace.clone() };
        let active = Precondition::Status(NamespaceStatus::Active);
        let batch = [
            Write::Put(Record::Namespace(deleted), active),
            Write::Check(Key::NamespaceName(namespace.name.clone()), holds_name),
        ];
        Ok(self.call(self.store.write(&batch)).await? == Written::Done)
    }
}

fn is_settled(at: Timestamp, now: Timestamp) -> bool {
    Duration::from_millis(now.millis_since(at)) >= SETTLED_AFTER
}

/// The namespace that an item belongs to.
fn namespace_of(key: &Key) -> Option<&NamespaceId> {
    match key {
        Key::Entity(ns, _) | Key::Config(ns, _) | Key::Audit(ns, ..) | Key::Namespace(ns) => {
            Some(ns)
        }
        Key::Usage(usage) => Some(&usage.namespace),
        Key::Bucket(bucket) => Some(&bucket.namespace),
        Key::NamespaceName(_) | Key::Tombstone(_) => None,
    }
}
