//! Books usage: adds to records that exist with one update each, and creates the others.
//!
//! A record is created in a transaction that checks the entity's tombstone, together with all other new records of the
//! entity. So it is not created from changes that were made before the entity was deleted, even if the deletion begins
//! at this moment: either the deletion finds the record, or the transaction finds the tombstone.
//!
//! The tombstone of the namespace is read before and after, and not checked in the transaction: transactions of the
//! whole namespace would be in each other's way. A record that was created while a purge began is removed again. Whoever
//! created it may not know, or be stopped before. So a record that has some of the changes already is looked at, too:
//! the batch is delivered again.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use zae_limiter_core::{EntityId, Key, NamespaceId, Scope, Timestamp, UsageKey};
use zae_limiter_schema::records::tombstone;
use zae_limiter_schema::{
    Consistency, Item, ItemKey, ParsedKey, TableError, Transacted, Updated, Value, parse_key,
};

use crate::change::BucketChange;
use crate::effects::UsageEffect;
use crate::execute::{Aggregator, Done, Writes, is_retriable};

/// How often a booking is computed again because others have written the same record.
const BOOKINGS_MAX: u32 = 16;

/// The most records in one transaction.
const CREATED_MAX: usize = 24;

type Owner = (NamespaceId, EntityId);

/// The deletions that concern some entities.
#[derive(Debug, Default)]
struct Deletions {
    entities: BTreeMap<Owner, Timestamp>,
    namespaces: BTreeSet<NamespaceId>,
}

impl Aggregator {
    /// Books usage to records that may or may not exist.
    pub(crate) async fn book(
        &self,
        mut usage: Vec<UsageEffect>,
        changes: &Arc<Vec<BucketChange>>,
        writes: &mut Writes,
    ) {
        for _ in 0..BOOKINGS_MAX {
            for one in usage.drain(..) {
                let (own, changes) = (self.clone(), Arc::clone(changes));
                writes.start(async move { own.add(one, &changes).await }).await;
            }
            writes.wait_for_all().await;
            let absent = std::mem::take(&mut writes.batch.absent);
            if absent.is_empty() {
                return self.remove_purged(writes).await;
            }
            let deletions = match self.deletions(&absent).await {
                Ok(deletions) => Arc::new(deletions),
                Err(error) => {
                    writes.batch.note(failed(&absent, &error));
                    return self.remove_purged(writes).await;
                }
            };
            for group in by_entity(absent) {
                let (own, changes) = (self.clone(), Arc::clone(changes));
                let deletions = Arc::clone(&deletions);
                writes.start(async move { own.create(group, &changes, &deletions).await }).await;
            }
            writes.wait_for_all().await;
            usage = std::mem::take(&mut writes.batch.contested);
        }
        for one in usage {
            writes.batch.note(conflicts(&one));
        }
        self.remove_purged(writes).await;
    }

    /// Adds what the record lacks. The condition of the write makes a retry safe, even after a lost reply.
    async fn add(&self, usage: UsageEffect, changes: &[BucketChange]) -> Done {
        let mut item = None;
        for _ in 0..BOOKINGS_MAX {
            let Some(booking) = usage.booking(changes, item.as_ref(), None) else {
                return if item.is_some() { Done::Again(usage.key, 0) } else { Done::Nothing };
            };
            match self.update_with_retries(&booking.add()).await {
                Ok(Updated::Done(..)) if item.is_some() => return Done::Again(usage.key, 1),
                Ok(Updated::Done(..)) => return Done::Booked,
                Ok(Updated::Unmet(None, _)) => return Done::Absent(usage),
                Ok(Updated::Unmet(found, _)) => item = found,
                Err(error) => return failed(&[usage], &error),
            }
        }
        conflicts(&usage)
    }

    /// Creates records of one entity, with all changes but those made before it was deleted.
    async fn create(
        &self,
        group: Vec<UsageEffect>,
        changes: &[BucketChange],
        deletions: &Deletions,
    ) -> Done {
        let owner = (group[0].key.namespace.clone(), group[0].key.entity.clone());
        if deletions.namespaces.contains(&owner.0) {
            return Done::Nothing;
        }
        let deleted_at = deletions.entities.get(&owner).copied();
        let not_before = deleted_at.map(tombstone::last_before);
        let (mut writes, mut keys, mut rest) = (Vec::new(), BTreeSet::new(), Vec::new());
        for usage in &group {
            let Some(booking) = usage.booking(changes, None, not_before) else { continue };
            if keys.insert(usage.key.clone()) {
                writes.push(booking.create(deleted_at));
            } else {
                // Another piece of the same record is added when this one has created it.
                rest.push(usage.clone());
            }
        }
        if keys.is_empty() {
            return Done::Nothing;
        }
        writes.push(tombstone::check(&Scope::Entity(owner.0, owner.1), deleted_at));
        match self.with_retries(|| self.table.transact(&writes)).await {
            Ok(Transacted::Done(_)) => Done::Created(keys, rest),
            // Another client has created one of them, or deleted the entity.
            Ok(Transacted::Unmet(..)) => Done::Created(BTreeSet::new(), group),
            Err(error) => failed(&group, &error),
        }
    }

    /// Reads the tombstones of the owners of records.
    async fn deletions(&self, absent: &[UsageEffect]) -> Result<Deletions, TableError> {
        let mut keys = BTreeSet::new();
        for UsageKey { namespace, entity, .. } in absent.iter().map(|usage| &usage.key) {
            keys.insert(tombstone::key(&Scope::Entity(namespace.clone(), entity.clone())));
            keys.insert(tombstone::key(&Scope::Namespace(namespace.clone())));
        }
        self.read_tombstones(&keys.into_iter().collect::<Vec<_>>()).await
    }

    async fn read_tombstones(&self, keys: &[ItemKey]) -> Result<Deletions, TableError> {
        let read = || self.table.read(keys, Consistency::Strong);
        let mut found = Deletions::default();
        for item in self.with_retries(read).await?.items {
            let Some(ParsedKey::Tombstone(scope)) = key_of(&item).and_then(|key| parse_key(&key))
            else {
                continue;
            };
            match (scope, tombstone::deleted_at(&item)) {
                (Scope::Namespace(ns), _) => drop(found.namespaces.insert(ns)),
                (Scope::Entity(ns, id), Some(at)) => drop(found.entities.insert((ns, id), at)),
                (Scope::Entity(..), None) => {}
            }
        }
        Ok(found)
    }

    /// Removes records that were created in a namespace while its purge began: it may have listed the items before.
    async fn remove_purged(&self, writes: &mut Writes) {
        let created = std::mem::take(&mut writes.batch.created);
        let namespaces: BTreeSet<&NamespaceId> = created.iter().map(|key| &key.namespace).collect();
        let tombstone = |ns: &NamespaceId| tombstone::key(&Scope::Namespace(ns.clone()));
        let keys: Vec<ItemKey> = namespaces.into_iter().map(tombstone).collect();
        if keys.is_empty() {
            return;
        }
        let removed = async {
            let found = self.read_tombstones(&keys).await?;
            let is_purged = |key: &&UsageKey| found.namespaces.contains(&key.namespace);
            let item_key = |key: &UsageKey| ItemKey::of(&Key::Usage(key.clone()));
            let purged: Vec<ItemKey> = created.iter().filter(is_purged).map(item_key).collect();
            if !purged.is_empty() {
                self.with_retries(|| self.table.delete(&purged)).await?;
            }
            Ok::<(), TableError>(())
        };
        if let Err(error) = removed.await {
            let message = format!("usage of a purged namespace may be left: {error}");
            writes.batch.note(Done::Missed(message));
        }
    }
}

fn key_of(item: &Item) -> Option<ItemKey> {
    let text = |name: &str| item.get(name).and_then(Value::as_str);
    Some(ItemKey::new(text("PK")?, text("SK")?))
}

/// Groups records by their entity, no more in a group than one transaction holds.
fn by_entity(absent: Vec<UsageEffect>) -> Vec<Vec<UsageEffect>> {
    let mut groups: BTreeMap<Owner, Vec<UsageEffect>> = BTreeMap::new();
    for usage in absent {
        let owner = (usage.key.namespace.clone(), usage.key.entity.clone());
        groups.entry(owner).or_default().push(usage);
    }
    let chunks = |group: Vec<UsageEffect>| {
        group.chunks(CREATED_MAX).map(<[UsageEffect]>::to_vec).collect::<Vec<_>>()
    };
    groups.into_values().flat_map(chunks).collect()
}

fn failed(usage: &[UsageEffect], error: &TableError) -> Done {
    let changes = usage.iter().flat_map(|usage| usage.changes.clone()).collect();
    Done::Failed(format!("usage was not booked: {error}"), changes, is_retriable(error))
}

fn conflicts(usage: &UsageEffect) -> Done {
    let message =
        format!("usage was not booked: {BOOKINGS_MAX} conflicts with other writers in a row");
    Done::Failed(message, usage.changes.clone(), true)
}
