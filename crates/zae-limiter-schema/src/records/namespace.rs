//! Namespaces, by id and by name. The record by id is authoritative; the one by name says which namespace
//! has the name now.

use zae_limiter_core::{Namespace, NamespaceId, NamespaceName, NamespaceStatus, Timestamp};

use super::reader::Reader;
use super::{moment, set};
use crate::expression::{Action, Condition};
use crate::keys::{Index, REGISTRY, system_partition};
use crate::value::{Malformed, Value};

const NAMESPACE_ID: &str = "namespace_id";
const STATUS: &str = "status";
const ACTIVE: &str = "active";
const DELETED: &str = "deleted";
/// A client is deleting the namespace's items.
const PURGING: &str = "purging";

fn push_common(actions: &mut Vec<Action>, name: &NamespaceName, id: &NamespaceId, status: &str) {
    set(actions, NAMESPACE_ID, Value::text(id.as_str()));
    set(actions, "namespace_name", Value::text(name.as_str()));
    set(actions, STATUS, Value::text(status));
    set(actions, Index::Namespace.pk(), Value::text(REGISTRY));
    set(actions, Index::Namespace.sk(), Value::S(system_partition(REGISTRY)));
}

pub(super) fn encode(namespace: &Namespace) -> Vec<Action> {
    let mut actions = Vec::new();
    let status = status_text(namespace.status());
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

fn status_text(status: NamespaceStatus) -> &'static str {
    match status {
        NamespaceStatus::Active => ACTIVE,
        NamespaceStatus::Deleted => DELETED,
        NamespaceStatus::Purging => PURGING,
    }
}

fn has(status: &str) -> Condition {
    Condition::Equal(STATUS.to_owned(), Value::text(status))
}

/// Requires that the record of a namespace has this status. One without a status is active.
pub fn has_status(status: NamespaceStatus) -> Condition {
    match status {
        NamespaceStatus::Active => {
            Condition::Any(vec![Condition::Absent(STATUS.to_owned()), has(ACTIVE)])
        }
        other => has(status_text(other)),
    }
}

/// Requires that a name points to this namespace.
pub fn is_name_of(id: &NamespaceId) -> Condition {
    Condition::Equal(NAMESPACE_ID.to_owned(), Value::text(id.as_str()))
}

/// Requires that a name is free: it has no record, or the record of a deleted namespace.
pub fn is_free() -> Condition {
    Condition::Any(vec![Condition::Absent("PK".to_owned()), has(DELETED), has(PURGING)])
}

pub(super) fn decode(id: &NamespaceId, reader: &Reader<'_>) -> Result<Namespace, Malformed> {
    let created_at = moment::read(reader, "created_at")?;
    let status = reader.text_if_any(STATUS)?;
    let is_purging = status == Some(PURGING);
    let deleted_at = match status {
        Some(DELETED | PURGING) => {
            Some(moment::read_if_any(reader, "deleted_at")?.unwrap_or(created_at))
        }
        _ => None,
    };
    let name = reader.name("namespace_name")?;
    Ok(Namespace { id: id.clone(), name, created_at, deleted_at, is_purging })
}

/// The namespace that has the name; `None` if it is deleted.
pub(super) fn decode_name(reader: &Reader<'_>) -> Result<Option<NamespaceId>, Malformed> {
    let id = reader.name(NAMESPACE_ID)?;
    Ok(match reader.text_if_any(STATUS)? {
        Some(DELETED | PURGING) => None,
        _ => Some(id),
    })
}
