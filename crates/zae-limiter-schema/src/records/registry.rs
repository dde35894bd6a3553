//! The two registries of a namespace: the resources that have limits, and for each resource the number of
//! entities with limits of their own. They change in one transaction with the limits.

use std::collections::{BTreeMap, BTreeSet};

use zae_limiter_core::{ConfigLevel, DEFAULT_RESOURCE, NamespaceId, ResourceName};

use super::reader::Reader;
use crate::expression::{Action, Condition};
use crate::keys::{Index, ItemKey, namespace_partition, system_partition};
use crate::table::Update;
use crate::value::{Item, Malformed, Value};

const RESOURCES: &str = "resources";

/// A change of the set of resources.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ResourceChanges {
    /// Resources that have limits from now on.
    pub added: BTreeSet<String>,
    /// Resources that no longer have any.
    pub removed: BTreeSet<String>,
}

impl ResourceChanges {
    /// Whether the update needs the item: one update cannot both add to a set and remove from it.
    pub fn depends_on_before(&self) -> bool {
        !self.added.is_empty() && !self.removed.is_empty()
    }

    /// The update; `None` when nothing changes. `before` is needed if it [depends] on it.
    ///
    /// [depends]: Self::depends_on_before
    pub fn update(&self, ns: &NamespaceId, before: Option<&Item>) -> Option<Update> {
        let set = |texts: &BTreeSet<String>| Value::Ss(texts.clone());
        let name = || RESOURCES.to_owned();
        let mut conditions = Vec::new();
        let mut actions = namespace_keys(ns);
        if self.depends_on_before() {
            let there = before.and_then(|item| item.get(RESOURCES));
            conditions.push(match there {
                Some(value) => Condition::Equal(name(), value.clone()),
                None => Condition::Absent(name()),
            });
            let mut texts = match there {
                Some(Value::Ss(texts)) => texts.clone(),
                _ => BTreeSet::new(),
            };
            texts.retain(|text| !self.removed.contains(text));
            texts.extend(self.added.iter().cloned());
            actions.push(Action::Set(name(), Value::Ss(texts)));
        } else if !self.added.is_empty() {
            actions.push(Action::Add(name(), set(&self.added)));
        } else if !self.removed.is_empty() {
            actions.push(Action::Delete(name(), set(&self.removed)));
        } else {
            return None;
        }
        Some(Update { key: ItemKey::resources(ns), actions, conditions })
    }
}

/// Reads the set of resources that have limits.
///
/// # Errors
///
/// [`Malformed`] when it is not a set of resources.
pub fn resources(ns: &NamespaceId, item: &Item) -> Result<BTreeSet<ResourceName>, Malformed> {
    let reader = Reader::new(ItemKey::resources(ns), item);
    let malformed = || reader.malformed(RESOURCES, "a set of resources");
    match reader.value(RESOURCES) {
        None => Ok(BTreeSet::new()),
        Some(Value::Ss(texts)) => {
            let names = texts.iter().map(|text| ResourceName::new(text).map_err(|_| malformed()));
            names.collect()
        }
        Some(_) => Err(malformed()),
    }
}

/// The attribute that counts the entities with limits at a level; `None` for levels without an entity.
pub fn counter(level: &ConfigLevel) -> Option<String> {
    match level {
        ConfigLevel::System | ConfigLevel::Resource(_) => None,
        ConfigLevel::Entity(_) => Some(DEFAULT_RESOURCE.to_owned()),
        // A resource with the name of a key attribute gets a suffix.
        ConfigLevel::EntityResource(_, resource) if is_key(resource.as_str()) => {
            Some(format!("{resource}#"))
        }
        ConfigLevel::EntityResource(_, resource) => Some(resource.to_string()),
    }
}

fn is_key(name: &str) -> bool {
    let of_indexes = Index::ALL.into_iter().flat_map(|index| [index.pk(), index.sk()]);
    ["PK", "SK"].into_iter().chain(of_indexes).any(|key| key == name)
}

/// Adds to the counts of entities with limits of their own; `None` when no count changes.
pub fn count_entities(ns: &NamespaceId, differences: &BTreeMap<String, i64>) -> Option<Update> {
    let mut actions = namespace_keys(ns);
    let changed = differences.iter().filter(|(_, difference)| **difference != 0);
    let before = actions.len();
    actions.extend(changed.map(|(name, by)| Action::Add(name.clone(), Value::number(*by))));
    let key = ItemKey::entity_config_resources(ns);
    (actions.len() > before).then_some(Update { key, actions, conditions: Vec::new() })
}

/// Removes a counter, if it is 0.
pub fn forget_counter(ns: &NamespaceId, counter: &str) -> Update {
    Update {
        key: ItemKey::entity_config_resources(ns),
        actions: vec![Action::Remove(counter.to_owned())],
        conditions: vec![Condition::AtMost(counter.to_owned(), Value::number(0))],
    }
}

/// Reads the resources for which some entity has limits of its own. `_default_` is not one of them.
pub fn resources_of_entities(item: &Item) -> BTreeSet<ResourceName> {
    let counted = item.iter().filter(|(_, value)| value.as_i64().is_some_and(|count| count > 0));
    let names = counted.map(|(name, _)| name.strip_suffix('#').unwrap_or(name));
    names.filter_map(|name| ResourceName::new(name).ok()).collect()
}

fn namespace_keys(ns: &NamespaceId) -> Vec<Action> {
    let set = |name: &str, text| Action::SetIfAbsent(name.to_owned(), Value::S(text));
    vec![
        set(Index::Namespace.pk(), namespace_partition(ns)),
        set(Index::Namespace.sk(), system_partition(ns.as_str())),
    ]
}
