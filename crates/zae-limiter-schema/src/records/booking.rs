//! Usage booked from the changes of buckets: every change once, however often it is delivered.
//!
//! All shards of a bucket book to the same record. For each shard the record stores a mark just after the
//! last change that it contains. A booking requires that all its changes come after the marks. A mark is
//! a text under a name that no limit can have: other clients read every number on the item as the usage
//! of a limit, and ignore everything else.
//!
//! Adding to a record is one update. Creating one is a transaction with a check of the entity's [`tombstone`]: changes
//! made before the entity was deleted create nothing.

use std::collections::BTreeMap;
use std::fmt;

use zae_limiter_core::{LimitName, Timestamp, UsageKey};

use super::number::thousandths;
use super::tombstone;
use super::usage::EVENTS;
use crate::bucket::ttl_of;
use crate::expression::{Action, Condition};
use crate::keys::{Index, ItemKey, entity_partition, namespace_partition, resource_partition};
use crate::table::{Change, Update};
use crate::value::{Item, Value};

/// The most shards in one booking: an expression has at most 4 KiB.
pub const SOURCES_MAX: usize = 32;

/// The most digits of a sequence number.
const DIGITS_MAX: usize = 99;

/// The position of a change among all changes of its item. Positions sort as their texts do.
///
/// A sequence number alone is not enough: a restored table has a new stream, but still the records that
/// were booked from the old one. A stream's label is the time of its creation.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Position(String);

impl Position {
    /// The position of a sequence number in the stream with this label: see [`stream_label`]. `None` if it
    /// is not a sequence number.
    pub fn new(label: &str, sequence_number: &str) -> Option<Self> {
        let is_number = !sequence_number.is_empty()
            && sequence_number.bytes().all(|byte| byte.is_ascii_digit());
        let digits = sequence_number.trim_start_matches('0');
        if !is_number || digits.len() > DIGITS_MAX {
            return None;
        }
        let stream: String = label.chars().filter(char::is_ascii_digit).collect();
        // The number of digits comes first, so that longer numbers sort later.
        Some(Self(format!("{stream}.{:02}{digits}", digits.len())))
    }

    /// A mark greater than this position and less than every later one.
    fn mark(&self) -> Mark {
        Mark(format!("{}+", self.0))
    }
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The label of a stream, from its ARN: `…:table/NAME/stream/LABEL`. `None` if the ARN names no stream.
///
/// Every reader of a stream takes the label from here. Lambda passes only the ARN to a function, and an
/// endpoint may list its streams under another label. A change that two readers book under two labels would
/// count twice.
pub fn stream_label(arn: &str) -> Option<&str> {
    let (_, label) = arn.rsplit_once("/stream/")?;
    (!label.is_empty()).then_some(label)
}

/// Just after the last change that a record contains.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mark(String);

impl Mark {
    /// The mark of a shard, if the record contains any of its changes.
    pub fn of(item: &Item, shard: u32) -> Option<Self> {
        item.get(&attribute(shard)).and_then(Value::as_str).map(|text| Self(text.to_owned()))
    }

    /// Whether the record already contains the change.
    pub fn is_behind(&self, position: &Position) -> bool {
        self.0 > position.0
    }
}

fn attribute(shard: u32) -> String {
    format!("seq#{shard}")
}

/// The first and the last change of a shard in a booking.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    /// The first change.
    pub first: Position,
    /// The last change.
    pub last: Position,
}

/// An addition to a usage record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Booking {
    /// The record.
    pub key: UsageKey,
    /// Net consumption of each limit, in millitokens.
    pub consumed: BTreeMap<LimitName, i64>,
    /// The number of bucket changes that it contains.
    pub events: u64,
    /// When a new record expires.
    pub expires_at: Timestamp,
    /// The changes of each shard, at most [`SOURCES_MAX`] shards.
    pub sources: BTreeMap<u32, Source>,
    /// The time of the earliest change.
    pub earliest: Timestamp,
}

/// The last moment whose changes a record must not contain: its entity was deleted then. `None` for the record of
/// an entity that was not.
pub fn not_before(item: &Item) -> Option<Timestamp> {
    let text = item.get(NOT_BEFORE)?.as_str()?;
    text.parse().ok().map(Timestamp::from_millis)
}

/// A text under a name that no limit can have, as the marks are.
const NOT_BEFORE: &str = "after#";

/// Times sort as these texts do, from 1970 on.
fn time_text(moment: Timestamp) -> Value {
    Value::S(format!("{:015}", moment.as_millis().max(0)))
}

impl Booking {
    /// The write that adds it to a record that exists.
    pub fn add(&self) -> Update {
        let mut update = self.update();
        update.conditions.push(Condition::Exists("PK".to_owned()));
        // Another shard's changes may come late, after the entity was deleted and used again.
        update.conditions.push(Condition::Any(vec![
            Condition::Absent(NOT_BEFORE.to_owned()),
            Condition::AtMost(
                NOT_BEFORE.to_owned(),
                time_text(Timestamp::from_millis(self.earliest.as_millis() - 1)),
            ),
        ]));
        update
    }

    /// The change that creates a record with it, for a transaction with the [check](tombstone::check) of this tombstone.
    pub fn create(&self, deleted_at: Option<Timestamp>) -> Change {
        let mut update = self.update();
        update.conditions = vec![Condition::Absent("PK".to_owned())];
        if let Some(deleted_at) = deleted_at {
            let last = time_text(tombstone::last_before(deleted_at));
            update.actions.push(Action::Set(NOT_BEFORE.to_owned(), last));
        }
        Change::Update(update)
    }

    /// The write that applies it, whether the record exists or not.
    fn update(&self) -> Update {
        let UsageKey { namespace, entity, resource, window, start } = &self.key;
        let label = window.label(*start);
        let mut actions = Vec::new();
        for (name, value) in [
            ("entity_id", Value::text(entity.as_str())),
            ("resource", Value::text(resource.as_str())),
            ("window", Value::text(window.as_str())),
            ("window_start", Value::text(&label)),
            ("ttl", Value::number(ttl_of(self.expires_at))),
            (Index::Resource.pk(), Value::S(resource_partition(namespace, resource))),
            (Index::Resource.sk(), Value::S(format!("USAGE#{label}#{entity}"))),
            (Index::Namespace.pk(), Value::S(namespace_partition(namespace))),
            (Index::Namespace.sk(), Value::S(entity_partition(namespace, entity))),
        ] {
            actions.push(Action::SetIfAbsent(name.to_owned(), value));
        }
        let events = i64::try_from(self.events).unwrap_or(i64::MAX);
        actions.push(Action::Add(EVENTS.to_owned(), Value::number(events)));
        for (limit, amount) in self.consumed.iter().filter(|(_, amount)| **amount != 0) {
            actions.push(Action::Add(limit.to_string(), thousandths(*amount)));
        }
        let mut conditions = Vec::new();
        for (shard, source) in &self.sources {
            let name = attribute(*shard);
            conditions.push(Condition::Any(vec![
                Condition::Absent(name.clone()),
                Condition::AtMost(name.clone(), Value::text(&source.first.0)),
            ]));
            actions.push(Action::Set(name, Value::S(source.last.mark().0)));
        }
        let key = ItemKey::of(&zae_limiter_core::Key::Usage(self.key.clone()));
        Update { key, actions, conditions }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn position(number: &str) -> Position {
        Position::new("2026-01-01T00:00:00.000", number).expect("a number")
    }

    proptest! {
        #[test]
        fn positions_compare_as_their_numbers_do(a: u128, b: u128) {
            prop_assert_eq!(
                position(&a.to_string()).cmp(&position(&format!("000{b}"))),
                a.cmp(&b)
            );
            let mark = position(&a.to_string()).mark();
            prop_assert_eq!(mark.is_behind(&position(&b.to_string())), b <= a);
        }
    }

    #[test]
    fn a_later_stream_sorts_after_an_earlier_one() {
        let earlier = Position::new("2026-01-01T00:00:00.000", "999").expect("a number");
        let later = Position::new("2026-02-01T00:00:00.000", "1").expect("a number");
        assert!(earlier < later);
        assert!(!earlier.mark().is_behind(&later));
    }

    #[test]
    fn a_label_is_the_end_of_the_streams_arn() {
        let table = "arn:aws:dynamodb:us-east-1:123456789012:table/limiter";
        let stream = format!("{table}/stream/2026-11-01T00:00:00.000");
        assert_eq!(stream_label(&stream), Some("2026-11-01T00:00:00.000"));
        for arn in ["", table, &format!("{table}/stream/"), "2026-11-01T00:00:00.000"] {
            assert_eq!(stream_label(arn), None, "{arn}");
        }
    }

    #[test]
    fn only_a_number_has_a_position() {
        for text in ["", "x", "-1", "1.5", "1 "] {
            assert_eq!(Position::new("", text), None, "{text}");
        }
    }
}
