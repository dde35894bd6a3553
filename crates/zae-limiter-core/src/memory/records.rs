use std::collections::BTreeMap;
use std::ops::{Bound, ControlFlow};
use std::sync::Mutex;

use zae_limiter_model::{NamespaceId, ResourceName, Timestamp};

use super::scan::scan;
use super::smallest::{Smallest, place};
use super::usage::UsageTable;
use crate::error::StoreError;
use crate::page::{Page, PageRequest};
use crate::record::{AuditEvent, ConfigLevel, Key, Record};
use crate::store::{Precondition, Query, ResourceList, Scope, Write, Written};

/// All records but usage, in the order of their keys.
#[derive(Debug, Default)]
pub(super) struct Records {
    pub(super) items: BTreeMap<Key, Record>,
    /// The number of records after the last sweep.
    swept_at_len: usize,
}

impl Records {
    pub(super) fn get(&self, key: &Key) -> Option<Record> {
        self.items.get(key).cloned()
    }

    pub(super) fn remove(&mut self, key: &Key) {
        self.items.remove(key);
    }

    pub(super) fn write(&mut self, batch: &[Write], usage: &mut UsageTable) -> Written {
        for (at, write) in batch.iter().enumerate() {
            let (key, precondition) = match write {
                Write::Put(record, precondition) => (record.key(), precondition),
                Write::Delete(key, precondition) | Write::Check(key, precondition) => {
                    (key.clone(), precondition)
                }
            };
            let current = match &key {
                Key::Usage(key) => usage.get(key),
                key => self.get(key),
            };
            if !holds(precondition, current.as_ref()) {
                return Written::Conflict(at);
            }
        }
        for write in batch {
            match write {
                Write::Put(Record::Usage(record), _) => usage.put(record.clone()),
                Write::Put(record, _) => {
                    if let Record::Audit(event) = record {
                        self.remove_expired(event.at);
                    }
                    self.items.insert(record.key(), record.clone());
                }
                Write::Delete(Key::Usage(key), _) => usage.remove(key),
                Write::Delete(key, _) => self.remove(key),
                Write::Check(..) => {}
            }
        }
        Written::Done
    }

    /// Removes expired audit events: only they grow without bound. A store has no clock, so `now` is the
    /// time of the event that is being written.
    fn remove_expired(&mut self, now: Timestamp) {
        if self.items.len() < 2 * self.swept_at_len.max(512) {
            return;
        }
        let expired = |event: &AuditEvent| event.expires_at.is_some_and(|expiry| expiry <= now);
        self.items.retain(|_, record| !matches!(record, Record::Audit(event) if expired(event)));
        self.swept_at_len = self.items.len();
    }
}

/// The list that a query asks for, and how many records were visited for it.
pub(super) fn list(
    records: &Mutex<Records>,
    query: &Query,
    page: &PageRequest,
) -> Result<(Page<Record>, usize), StoreError> {
    let mut found = Smallest::new(page)?;
    let start = found.after().and_then(|after| key_in(query, after));
    let is_further_page = start.is_some();
    let start = start.map_or(Bound::Unbounded, Bound::Excluded);
    let visits = scan(
        records,
        |records| &records.items,
        start,
        |key, record| {
            if let Some(place) = place_in(query, record) {
                found.offer(place, || record.clone());
            }
            // Only audit events come in another order: the newest first.
            let is_full = found.is_complete() && !matches!(query, Query::Audit(..));
            if is_full || is_further_page && !is_among(query, key) {
                return ControlFlow::Break(());
            }
            ControlFlow::Continue(())
        },
    );
    Ok((found.into_page(), visits))
}

/// Visits all keys.
fn for_each_key(records: &Mutex<Records>, mut each: impl FnMut(&Key)) {
    scan(
        records,
        |records| &records.items,
        Bound::Unbounded,
        |key, _| {
            each(key);
            ControlFlow::Continue(())
        },
    );
}

pub(super) fn list_resources(
    records: &Mutex<Records>,
    namespace: &NamespaceId,
    which: ResourceList,
    page: &PageRequest,
) -> Result<Page<ResourceName>, StoreError> {
    let mut found = Smallest::new(page)?;
    for_each_key(records, |key| {
        let Key::Config(of, level) = key else { return };
        let resource = match (which, level) {
            (ResourceList::WithDefaults, ConfigLevel::Resource(resource)) => resource,
            (ResourceList::WithEntityConfigs, ConfigLevel::EntityResource(_, resource)) => resource,
            _ => return,
        };
        // A resource that is offered twice is listed once: its place is its name.
        if of == namespace {
            found.offer(resource.to_string(), || resource.clone());
        }
    });
    Ok(found.into_page())
}

pub(super) fn offer_keys(records: &Mutex<Records>, scope: &Scope, found: &mut Smallest<Key>) {
    for_each_key(records, |key| {
        if belongs(scope, key) {
            let kind_and_name = match key {
                Key::Entity(_, id) => place(["entity", id.as_str()]),
                Key::Config(_, level) => {
                    let (entity, resource) = level_names(level);
                    place(["config", entity, resource])
                }
                Key::Audit(_, subject, id) => place(["audit", &subject.to_string(), id]),
                _ => return,
            };
            found.offer(kind_and_name, || key.clone());
        }
    });
}

pub(super) fn offer_everything(records: &Mutex<Records>, found: &mut Smallest<Key>) {
    for_each_key(records, |key| {
        let place = match key {
            Key::Entity(ns, id) => place([ns.as_str(), "entity", id.as_str()]),
            Key::Config(ns, level) => {
                let (entity, resource) = level_names(level);
                place([ns.as_str(), "config", entity, resource])
            }
            Key::Audit(ns, subject, id) => place([ns.as_str(), "audit", &subject.to_string(), id]),
            Key::Namespace(id) => place(["", "namespace", id.as_str()]),
            Key::NamespaceName(name) => place(["", "name", name.as_str()]),
            Key::Usage(_) | Key::Bucket(_) | Key::Tombstone(_) => return,
        };
        found.offer(place, || key.clone());
    });
}

fn level_names(level: &ConfigLevel) -> (&str, &str) {
    match level {
        ConfigLevel::System => ("", ""),
        ConfigLevel::Resource(resource) => ("", resource.as_str()),
        ConfigLevel::Entity(entity) => (entity.as_str(), ""),
        ConfigLevel::EntityResource(entity, resource) => (entity.as_str(), resource.as_str()),
    }
}

fn belongs(scope: &Scope, key: &Key) -> bool {
    match (scope, key) {
        (Scope::Entity(namespace, entity), Key::Entity(of, id)) => of == namespace && id == entity,
        (Scope::Entity(namespace, entity), Key::Config(of, level)) => {
            of == namespace && level_names(level).0 == entity.as_str()
        }
        (
            Scope::Namespace(namespace),
            Key::Entity(of, _) | Key::Config(of, _) | Key::Audit(of, _, _),
        ) => of == namespace,
        _ => false,
    }
}

fn holds(precondition: &Precondition, current: Option<&Record>) -> bool {
    match precondition {
        Precondition::Always => true,
        Precondition::Absent => current.is_none(),
        Precondition::Present => current.is_some(),
        Precondition::Version(version) => {
            matches!(current, Some(Record::Config(config)) if config.version == *version)
        }
        Precondition::Status(status) => {
            matches!(current, Some(Record::Namespace(it)) if it.status() == *status)
        }
        Precondition::NameOf(id) => {
            matches!(current, Some(Record::NamespaceName(_, of)) if of == id)
        }
        Precondition::Parent(parent) => {
            matches!(current, Some(Record::Entity(entity)) if entity.parent == *parent)
        }
    }
}

/// The place of a record in the result of a query; `None` if it does not match.
fn place_in(query: &Query, record: &Record) -> Option<String> {
    match (query, record) {
        (Query::Children(namespace, parent), Record::Entity(entity))
            if entity.namespace == *namespace && entity.parent.as_ref() == Some(parent) =>
        {
            Some(entity.id.to_string())
        }
        (Query::EntityConfigs(namespace, resource), Record::Config(config))
            if config.namespace == *namespace =>
        {
            match (&config.level, resource) {
                (ConfigLevel::EntityResource(entity, of), Some(resource)) if of == resource => {
                    Some(entity.to_string())
                }
                (ConfigLevel::Entity(entity), None) => Some(entity.to_string()),
                _ => None,
            }
        }
        (Query::Audit(namespace, subject), Record::Audit(event))
            if event.namespace == *namespace && event.subject == *subject =>
        {
            Some(reversed(&event.id))
        }
        (Query::Namespaces, Record::Namespace(namespace)) => Some(namespace.id.to_string()),
        _ => None,
    }
}

/// The key of the record at a place, where the keys of a query's records have the order of their places.
fn key_in(query: &Query, place: &str) -> Option<Key> {
    match query {
        Query::Children(namespace, _) => Some(Key::Entity(namespace.clone(), place.parse().ok()?)),
        Query::EntityConfigs(namespace, resource) => {
            let entity = place.parse().ok()?;
            let level = match resource {
                Some(resource) => ConfigLevel::EntityResource(entity, resource.clone()),
                None => ConfigLevel::Entity(entity),
            };
            Some(Key::Config(namespace.clone(), level))
        }
        Query::Namespaces => Some(Key::Namespace(place.parse().ok()?)),
        _ => None,
    }
}

/// Whether the key is among those of a query's records and the ones between them.
fn is_among(query: &Query, key: &Key) -> bool {
    match (query, key) {
        (Query::Children(namespace, _), Key::Entity(of, _))
        | (Query::EntityConfigs(namespace, _), Key::Config(of, _)) => of == namespace,
        (Query::Namespaces, Key::Namespace(_)) => true,
        _ => false,
    }
}

/// A place that sorts in reverse: newest first.
fn reversed(id: &str) -> String {
    id.bytes().map(|byte| char::from(127 - byte.min(126))).collect()
}

#[cfg(test)]
mod tests {
    use zae_limiter_model::EntityId;

    use super::*;
    use crate::record::Entity;

    const ITEMS: usize = 100_000;
    const PAGE: usize = 500;

    fn entity(namespace: &NamespaceId, id: &str, parent: Option<&EntityId>) -> (Key, Record) {
        let record = Record::Entity(Entity {
            namespace: namespace.clone(),
            id: id.parse().expect("an id"),
            name: None,
            parent: parent.cloned(),
            cascade: false,
            metadata: BTreeMap::new(),
            created_at: Timestamp::default(),
        });
        (record.key(), record)
    }

    #[test]
    fn a_page_of_a_long_list_costs_a_page() {
        let namespace: NamespaceId = "AbCdEfGhIj_".parse().expect("an id");
        let parent: EntityId = "org".parse().expect("an id");
        let items = (0..ITEMS).map(|at| entity(&namespace, &format!("e-{at:06}"), Some(&parent)));
        let mut items: BTreeMap<Key, Record> = items.collect();
        let others: NamespaceId = "Other______".parse().expect("an id");
        items.extend((0..ITEMS).map(|at| entity(&others, &format!("e-{at:06}"), Some(&parent))));
        let records = Mutex::new(Records { items, swept_at_len: 0 });
        let query = Query::Children(namespace.clone(), parent);
        let mut request = PageRequest::first(PAGE);
        let mut listed = 0;
        loop {
            let (page, visits) = list(&records, &query, &request).expect("a page");
            // One more shows that there is another page.
            assert!(visits <= PAGE + 1, "{visits} visits for a page");
            for item in &page.items {
                assert_eq!(item.key(), entity(&namespace, &format!("e-{listed:06}"), None).0);
                listed += 1;
            }
            let Some(next) = page.next else { break };
            request.after = Some(next);
        }
        assert_eq!(listed, ITEMS);
    }
}
