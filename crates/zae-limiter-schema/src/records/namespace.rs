//! Namespaces, by id and by name. The record by id is authoritative; the one by name says which namespace
//! has the name now.

use zae_limiter_core::{Namespace, NamespaceId, NamespaceName, Timestamp};

use super::reader::Reader;
use super::{moment, set};
use crate::expression::{Action, Condition};
use crate::keys::{Index, REGISTRY, system_partition};
use crate::value::{Malformed, Value};

const STATUS: &str = "status";
const ACTIVE: &str = "active";
const DELETED: &str = "deleted";
/// Another client is deleting the namespace's items.
const PURGING: &str = "purging";

fn push_common(actions: &mut Vec<Action>, name: &NamespaceName, id: &NamespaceId, status: &str) {
    set(actions, "namespace_id", Value::text(id.as_str()));
    set(actions, "namespace_name", Value::text(name.as_str()));
    set(actions, STATUS, Value::text(status));
    set(actions, Index::Namespace.pk(), Value::text(REGISTRY));
    set(actions, Index::Namespace.sk(), Value::S(system_partition(REGISTRY)));
}

pub(super) fn encode(namespace: &Namespace) -> Vec<Action> {
    let mut actions = Vec::new();
    let status = if namespace.deleted_at.is_some() { DELETED } else { ACTIVE };
    push_common(&mut actions, &namespace.name, &namespace.id, status);
    moment::push(&mut actions, "created_at", namespace.created_at);
    match namespace.deleted_at {
        Some(moment) => moment::push(&mut actions, "deleted_at", moment),
        None => moment::push_none(&mut actions, "deleted_at"),
    }
    actions
}

/// Writes the record of a name, with the time of registration if given, which other clients show.
pub fn encode_name(
    name: &NamespaceName,
    id: &NamespaceId,
    created_at: Option<Timestamp>,
) -> Vec<Action> {
    let mut actions = Vec::new();
    push_common(&mut actions, name, id, ACTIVE);
    if let Some(moment) = created_at {
        moment::push(&mut actions, "created_at", moment);
    }
    actions
}

/// Requires that no client is deleting the namespace's items. Until they are deleted it cannot be used.
pub fn not_purging() -> Condition {
    let is = |status: &str| Condition::Equal(STATUS.to_owned(), Value::text(status));
    Condition::Any(vec![Condition::Absent(STATUS.to_owned()), is(ACTIVE), is(DELETED)])
}

pub(super) fn decode(id: &NamespaceId, reader: &Reader<'_>) -> Result<Namespace, Malformed> {
    let created_at = moment::read(reader, "created_at")?;
    let deleted_at = match reader.text_if_any(STATUS)? {
        Some(DELETED | PURGING) => {
            Some(moment::read_if_any(reader, "deleted_at")?.unwrap_or(created_at))
        }
        _ => None,
    };
    Ok(Namespace { id: id.clone(), name: reader.name("namespace_name")?, created_at, deleted_at })
}

/// The namespace that has the name; `None` if it is deleted.
pub(super) fn decode_name(reader: &Reader<'_>) -> Result<Option<NamespaceId>, Malformed> {
    let id = reader.name("namespace_id")?;
    Ok(match reader.text_if_any(STATUS)? {
        Some(DELETED | PURGING) => None,
        _ => Some(id),
    })
}
