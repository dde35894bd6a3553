//! The items of everything but buckets: how each record is read from its item and written to it.
//!
//! An item is never replaced. A record is written as updates of the attributes it is made of, and
//! attributes of other clients stay. Where the record's own attributes have names of their own (a
//! limit's, say), those that go must be named: such records are [encoded](encode) against the item
//! as it was, and pin what they relied on.
//!
//! Texts and numbers are those that other clients read and write. What they cannot say, for example
//! the milliseconds of a moment, stands beside them in an attribute whose name ends in `#ms`, and
//! counts only as long as it agrees with them: whoever does not know it changes the other one.

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
mod usage;
mod version;

#[cfg(test)]
mod tests;

use zae_limiter_core::{Key, NamespaceId, Record};

use crate::expression::{Action, Condition};
use crate::keys::{Index, ItemKey};
use crate::value::{Item, Malformed, Value};

pub use config::CONFIG_VERSION;
pub use json::to_object;
pub use namespace::{encode_name, not_purging};
pub use version::Version;

/// What is known of the item that a record is written to.
#[derive(Clone, Copy, Debug)]
pub enum Before<'a> {
    /// Nothing.
    Unknown,
    /// There is none.
    Absent,
    /// This.
    Item(&'a Item),
}

/// How a record is written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Encoded {
    /// What makes the item the record's.
    pub actions: Vec<Action>,
    /// What the actions rely on.
    pub pins: Vec<Condition>,
}

/// Whether the way in which a record is written depends on the item as it is.
pub fn depends_on_before(record: &Record) -> bool {
    matches!(record, Record::Config(_) | Record::Usage(_))
}

/// Writes a record. One that [depends](depends_on_before) on what is there, of which nothing is
/// known, leaves attributes behind that it no longer has.
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

/// Reads the record under a key. `None` for a bucket, and for a record that a later release wrote
/// and this one has no words for.
///
/// # Errors
///
/// [`Malformed`] when an attribute is missing or not what it should be.
pub fn decode(key: &Key, item: &Item) -> Result<Option<Record>, Malformed> {
    let reader = reader::Reader::new(ItemKey::of(key), item);
    Ok(match key {
        Key::Bucket(_) => None,
        Key::Entity(ns, id) => Some(Record::Entity(entity::decode(ns, id, &reader)?)),
        Key::Config(ns, level) => Some(Record::Config(config::decode(ns, level, &reader)?)),
        Key::Audit(ns, subject, id) => audit::decode(ns, subject, id, &reader)?.map(Record::Audit),
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

/// Text, or nothing said explicitly, as the first clients write it.
fn text_or_null(text: Option<&str>) -> Value {
    text.map_or(Value::Null, Value::text)
}

/// Under which an item is found in its namespace: the partition it is in.
fn push_namespace(actions: &mut Vec<Action>, ns: &NamespaceId, partition: &str) {
    set(actions, Index::Namespace.pk(), Value::text(crate::namespace_partition(ns)));
    set(actions, Index::Namespace.sk(), Value::text(partition));
}
