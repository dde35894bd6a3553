//! An entity.

use zae_limiter_core::{Entity, EntityId, NamespaceId};

use super::reader::Reader;
use super::{json, moment, push_namespace, remove, set, text_or_null};
use crate::expression::{Action, Condition};
use crate::keys::{Index, children_partition, entity_partition};
use crate::value::{Malformed, Value};

const PARENT: &str = "parent_id";

pub(super) fn encode(entity: &Entity) -> Vec<Action> {
    let mut actions = Vec::new();
    let Entity { namespace, id, name, parent, cascade, metadata, created_at } = entity;
    set(&mut actions, "entity_id", Value::text(id.as_str()));
    match name {
        Some(name) => set(&mut actions, "name", Value::text(name)),
        None => remove(&mut actions, "name"),
    }
    set(&mut actions, PARENT, text_or_null(parent.as_ref().map(EntityId::as_str)));
    set(&mut actions, "cascade", Value::Bool(*cascade));
    let metadata = metadata.iter().map(|(key, value)| (json::to_key(key), Value::text(value)));
    set(&mut actions, "metadata", Value::M(metadata.collect()));
    moment::push(&mut actions, "created_at", *created_at);
    match parent {
        Some(parent) => {
            let partition = children_partition(namespace, parent);
            set(&mut actions, Index::Parent.pk(), Value::S(partition));
            set(&mut actions, Index::Parent.sk(), Value::S(format!("CHILD#{id}")));
        }
        None => {
            remove(&mut actions, Index::Parent.pk());
            remove(&mut actions, Index::Parent.sk());
        }
    }
    push_namespace(&mut actions, namespace, &entity_partition(namespace, id));
    actions
}

/// Requires that an entity has this parent, or none.
pub fn has_parent(parent: Option<&EntityId>) -> Condition {
    let is = Condition::Equal(PARENT.to_owned(), text_or_null(parent.map(EntityId::as_str)));
    match parent {
        Some(_) => is,
        None => Condition::Any(vec![Condition::Absent(PARENT.to_owned()), is]),
    }
}

pub(super) fn decode(
    ns: &NamespaceId,
    id: &EntityId,
    reader: &Reader<'_>,
) -> Result<Entity, Malformed> {
    let metadata = reader.map("metadata")?.into_iter().flatten();
    // Other clients accept values other than text.
    let metadata = metadata.map(|(key, value)| match value {
        Value::S(text) => (json::from_key(key), text.clone()),
        other => (json::from_key(key), json::from_value(other).to_string()),
    });
    Ok(Entity {
        namespace: ns.clone(),
        id: id.clone(),
        name: reader.text_if_any("name")?.map(str::to_owned),
        parent: reader.name_if_any(PARENT)?,
        cascade: reader.flag("cascade")?,
        metadata: metadata.collect(),
        created_at: moment::read(reader, "created_at")?,
    })
}
