//! The items of everything but buckets: how each record is read from its item and written to it.
//!
//! An item is never replaced. A write updates the record's own attributes and keeps those of other
//! clients. Some records have attributes named after limits, and the write must name those to remove.
//! Such records are [encoded](encode) against the item as it was read, and pin what they relied on.
//!
//! Texts and numbers have the form that other clients read and write. Timestamps have whole seconds
//! there. Their milliseconds are in a second attribute, whose name ends in `#ms`. It counts only while it
//! agrees with the first one: another client changes only that.

mod audit;
pub mod booking;
pub mod checkpoint;
mod config;
mod entity;
mod json;
mod moment;
mod namespace;
mod number;
mod reader;
pub mod registry;
pub mod tombstone;
mod usage;
mod version;

#[cfg(test)]
mod tests;

use zae_limiter_core::{Key, NamespaceId, Record};

use crate::expression::{Action, Condition};
use crate::keys::{Index, ItemKey};
use crate::value::{Item, Malformed, Value};

pub use config::CONFIG_VERSION;
pub use entity::has_parent;
pub use json::to_object;
pub use namespace::{encode_name, has_status, is_free, is_name_of};
pub use version::Version;

/// The item that a record is written to, as far as it was read.
#[derive(Clone, Copy, Debug)]
pub enum Before<'a> {
    /// It was not read.
    Unknown,
    /// It does not exist.
    Absent,
    /// It exists.
    Item(&'a Item),
}

/// The write of a record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Encoded {
    /// The changes of the item.
    pub actions: Vec<Action>,
    /// The conditions that the actions rely on.
    pub pins: Vec<Condition>,
}

/// Whether a record must be encoded against the item as it is.
pub fn depends_on_before(record: &Record) -> bool {
    matches!(record, Record::Config(_) | Record::Usage(_))
}

/// Encodes a record. With [`Before::Unknown`], one that [depends](depends_on_before) on the item leaves
/// attributes of removed limits behind.
pub fn encode(record: &Record, before: Before<'_>) -> Encoded {
    let (actions, pins) = match record {
        Record::Entity(entity) => (entity::encode(entity), Vec::new()),
        Record::Config(config) => config::encode(config, before),
        Record::Audit(event) => (audit::encode(event), Vec::new()),
        Record::Usage(usage) => usage::encode(usage, before),
        Record::Namespace(namespace) => (namespace::encode(namespace), Vec::new()),
        Record::NamespaceName(name, id) => (encode_name(name, id, None), Vec::new()),
    };
    Encoded { actions, pins }
}

/// Decodes the record under a key. `None` for a bucket, and for a record of a later release that this
/// one cannot represent.
///
/// # Errors
///
/// [`Malformed`] when an attribute is missing or not what it should be.
pub fn decode(key: &Key, item: &Item) -> Result<Option<Record>, Malformed> {
    let reader = reader::Reader::new(ItemKey::of(key), item);
    Ok(match key {
        Key::Bucket(_) | Key::Tombstone(_) => None,
        Key::Entity(ns, id) => Some(Record::Entity(entity::decode(ns, id, &reader)?)),
        Key::Config(ns, level) => Some(Record::Config(config::decode(ns, level, &reader)?)),
        Key::Audit(ns, subject, id) => {
            Some(Record::Audit(audit::decode(ns, subject, id, &reader)?))
        }
        Key::Usage(usage) => Some(Record::Usage(usage::decode(usage, &reader)?)),
        Key::Namespace(id) => Some(Record::Namespace(namespace::decode(id, &reader)?)),
        Key::NamespaceName(name) => {
            let id = namespace::decode_name(&reader)?;
            id.map(|id| Record::NamespaceName(name.clone(), id))
        }
    })
}

fn set(actions: &mut Vec<Action>, name: &str, value: Value) {
    actions.push(Action::Set(name.to_owned(), value));
}

fn remove(actions: &mut Vec<Action>, name: &str) {
    actions.push(Action::Remove(name.to_owned()));
}

/// Text, or the explicit null that the first clients write.
fn text_or_null(text: Option<&str>) -> Value {
    text.map_or(Value::Null, Value::text)
}

/// Sets the keys of GSI4: the namespace, and the item's partition.
fn push_namespace(actions: &mut Vec<Action>, ns: &NamespaceId, partition: &str) {
    set(actions, Index::Namespace.pk(), Value::text(crate::namespace_partition(ns)));
    set(actions, Index::Namespace.sk(), Value::text(partition));
}
