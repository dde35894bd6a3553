//! The two registries of a namespace: which resources have limits for everybody, and for how many
//! entities each resource has limits of their own. They change in one step with the limits.

use std::collections::{BTreeMap, BTreeSet};

use zae_limiter_core::{ConfigLevel, DEFAULT_RESOURCE, NamespaceId, ResourceName};

use super::reader::Reader;
use crate::expression::{Action, Condition};
use crate::keys::{Index, ItemKey, namespace_partition, system_partition};
use crate::table::Update;
use crate::value::{Item, Malformed, Value};

const RESOURCES: &str = "resources";

/// What becomes of the set of resources.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ResourceChanges {
    /// These have limits from now on.
    pub added: BTreeSet<String>,
    /// These have none any more.
    pub removed: BTreeSet<String>,
}

impl ResourceChanges {
    /// Whether one update cannot do it without knowing the item: a set is added to or taken from.
    pub fn depends_on_before(&self) -> bool {
        !self.added.is_empty() && !self.removed.is_empty()
    }

    /// The update; `None` when nothing changes. `before` is needed where it [depends] on it.
    ///
    /// [depends]: Self::depends_on_before
    pub fn update(&self, ns: &NamespaceId, before: Option<&Item>) -> Option<Update> {
        let set = |texts: &BTreeSet<String>| Value::Ss(texts.clone());
        let name = || RESOURCES.to_owned();
        let mut conditions = Vec::new();
        let mut actions = found_by_namespace(ns);
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

/// Reads the set of resources that have limits for everybody.
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

/// Under what the entities with limits at a level are counted; `None` where no entity is meant.
pub fn counter(level: &ConfigLevel) -> Option<String> {
    match level {
        ConfigLevel::System | ConfigLevel::Resource(_) => None,
        ConfigLevel::Entity(_) => Some(DEFAULT_RESOURCE.to_owned()),
        // The item has keys of its own: a resource that is called like one steps aside.
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

/// Counts entities with limits of their own up and down; `None` when no count changes.
pub fn count_entities(ns: &NamespaceId, differences: &BTreeMap<String, i64>) -> Option<Update> {
    let mut actions = found_by_namespace(ns);
    let changed = differences.iter().filter(|(_, difference)| **difference != 0);
    let before = actions.len();
    actions.extend(changed.map(|(name, by)| Action::Add(name.clone(), Value::number(*by))));
    let key = ItemKey::entity_config_resources(ns);
    (actions.len() > before).then_some(Update { key, actions, conditions: Vec::new() })
}

/// Drops a counter that has come down to nothing; it happens only if it has.
pub fn forget_counter(ns: &NamespaceId, counter: &str) -> Update {
    Update {
        key: ItemKey::entity_config_resources(ns),
        actions: vec![Action::Remove(counter.to_owned())],
        conditions: vec![Condition::AtMost(counter.to_owned(), Value::number(0))],
    }
}

/// Reads which resources some entity has limits of its own for. That of all resources is not one.
pub fn resources_of_entities(item: &Item) -> BTreeSet<ResourceName> {
    let counted = item.iter().filter(|(_, value)| value.as_i64().is_some_and(|count| count > 0));
    let names = counted.map(|(name, _)| name.strip_suffix('#').unwrap_or(name));
    names.filter_map(|name| ResourceName::new(name).ok()).collect()
}

fn found_by_namespace(ns: &NamespaceId) -> Vec<Action> {
    let set = |name: &str, text| Action::SetIfAbsent(name.to_owned(), Value::S(text));
    vec![
        set(Index::Namespace.pk(), namespace_partition(ns)),
        set(Index::Namespace.sk(), system_partition(ns.as_str())),
    ]
}
