//! Usage booked from the changes of buckets: every change once, however often it is delivered.
//!
//! The shards of a bucket all book to the same record. For each of them the record keeps a mark
//! behind the last change that is in it, and a booking happens only if its own changes all lie
//! behind the marks. A mark is a text, and no limit can be called as its attribute is: other clients
//! take every number on the item for a limit's and pass over everything else.

use std::collections::BTreeMap;
use std::fmt;

use zae_limiter_core::{LimitName, Timestamp, UsageKey};

use super::number::thousandths;
use super::usage::EVENTS;
use crate::bucket::ttl_of;
use crate::expression::{Action, Condition};
use crate::keys::{Index, ItemKey, entity_partition, namespace_partition, resource_partition};
use crate::table::Update;
use crate::value::{Item, Value};

/// The most shards in one booking: an expression has 4 KB.
pub const SOURCES_MAX: usize = 32;

/// The most digits of a sequence number.
const DIGITS_MAX: usize = 99;

/// Where a change stands among all changes of its item. Texts compare as positions do.
///
/// A sequence number alone does not say: the stream of a restored table starts anew, and the records
/// of the old one are still there. Streams are named by the moment of their making.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Position(String);

impl Position {
    /// The position of a sequence number in the stream that was made at `label`. `None` for what is
    /// no sequence number.
    pub fn new(label: &str, sequence_number: &str) -> Option<Self> {
        let is_number = !sequence_number.is_empty()
            && sequence_number.bytes().all(|byte| byte.is_ascii_digit());
        let digits = sequence_number.trim_start_matches('0');
        if !is_number || digits.len() > DIGITS_MAX {
            return None;
        }
        let stream: String = label.chars().filter(char::is_ascii_digit).collect();
        // More digits are a larger number.
        Some(Self(format!("{stream}.{:02}{digits}", digits.len())))
    }

    /// Greater than this position, and less than every later one.
    fn mark(&self) -> Mark {
        Mark(format!("{}+", self.0))
    }
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Lies behind the last change that is in a record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mark(String);

impl Mark {
    /// The mark for a shard, if anything of it is in the record.
    pub fn of(item: &Item, shard: u32) -> Option<Self> {
        item.get(&attribute(shard)).and_then(Value::as_str).map(|text| Self(text.to_owned()))
    }

    /// Whether the change is in the record already.
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
    /// The first.
    pub first: Position,
    /// The last.
    pub last: Position,
}

/// What is added to a usage record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Booking {
    /// Which record.
    pub key: UsageKey,
    /// Net consumption for each limit, in millitokens.
    pub consumed: BTreeMap<LimitName, i64>,
    /// How many changes of the bucket it comes from.
    pub events: u64,
    /// When a new record may be forgotten.
    pub expires_at: Timestamp,
    /// By shard, at most [`SOURCES_MAX`].
    pub sources: BTreeMap<u32, Source>,
}

impl Booking {
    /// The one write that makes it.
    pub fn update(&self) -> Update {
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
    fn a_later_stream_starts_behind_an_earlier_one() {
        let earlier = Position::new("2026-01-01T00:00:00.000", "999").expect("a number");
        let later = Position::new("2026-02-01T00:00:00.000", "1").expect("a number");
        assert!(earlier < later);
        assert!(!earlier.mark().is_behind(&later));
    }

    #[test]
    fn what_is_no_number_has_no_position() {
        for text in ["", "x", "-1", "1.5", "1 "] {
            assert_eq!(Position::new("", text), None, "{text}");
        }
    }
}
