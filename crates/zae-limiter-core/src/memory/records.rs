use std::collections::BTreeMap;

use zae_limiter_model::{NamespaceId, ResourceName, Timestamp};

use super::smallest::{Smallest, place};
use super::usage::UsageTable;
use crate::error::StoreError;
use crate::page::{Page, PageRequest};
use crate::record::{AuditEvent, ConfigLevel, Key, Record};
use crate::store::{Precondition, Query, ResourceList, Scope, Write, Written};

/// All records but usage, in the order of their keys.
#[derive(Debug, Default)]
pub(super) struct Records {
    items: BTreeMap<Key, Record>,
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
                Write::Put(record, precondition) => (record.key(), *precondition),
                Write::Delete(key, precondition) | Write::Check(key, precondition) => {
                    (key.clone(), *precondition)
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

    pub(super) fn list(
        &self,
        query: &Query,
        page: &PageRequest,
    ) -> Result<Page<Record>, StoreError> {
        let mut found = Smallest::new(page)?;
        for record in self.items.values() {
            if let Some(place) = place_in(query, record) {
                found.offer(place, || record.clone());
            }
        }
        Ok(found.into_page())
    }

    pub(super) fn list_resources(
        &self,
        namespace: &NamespaceId,
        which: ResourceList,
        page: &PageRequest,
    ) -> Result<Page<ResourceName>, StoreError> {
        let mut found = Smallest::new(page)?;
        for key in self.items.keys() {
            let Key::Config(of, level) = key else { continue };
            let resource = match (which, level) {
                (ResourceList::WithDefaults, ConfigLevel::Resource(resource)) => resource,
                (ResourceList::WithEntityConfigs, ConfigLevel::EntityResource(_, resource)) => {
                    resource
                }
                _ => continue,
            };
            // A resource that is offered twice is listed once: its place is its name.
            if of == namespace {
                found.offer(resource.to_string(), || resource.clone());
            }
        }
        Ok(found.into_page())
    }

    pub(super) fn offer_keys(&self, scope: &Scope, found: &mut Smallest<Key>) {
        for key in self.items.keys() {
            if belongs(scope, key) {
                let kind_and_name = match key {
                    Key::Entity(_, id) => place(["entity", id.as_str()]),
                    Key::Config(_, level) => {
                        let (entity, resource) = level_names(level);
                        place(["config", entity, resource])
                    }
                    Key::Audit(_, subject, id) => place(["audit", &subject.to_string(), id]),
                    _ => continue,
                };
                found.offer(kind_and_name, || key.clone());
            }
        }
    }
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

fn holds(precondition: Precondition, current: Option<&Record>) -> bool {
    match precondition {
        Precondition::Always => true,
        Precondition::Absent => current.is_none(),
        Precondition::Present => current.is_some(),
        Precondition::Version(version) => {
            matches!(current, Some(Record::Config(config)) if config.version == version)
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

/// A place that sorts in reverse: newest first.
fn reversed(id: &str) -> String {
    id.bytes().map(|byte| char::from(127 - byte.min(126))).collect()
}
