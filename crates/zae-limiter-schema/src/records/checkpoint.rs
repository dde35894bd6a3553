//! How far the shards of the table's stream were followed, and by whom.
//!
//! Whoever follows a shard holds its record, and lets its beat go on. A beat that stands still for
//! long enough, by the clock of whoever looks, is that of somebody who is gone: no two clocks are
//! compared.

use zae_limiter_core::Timestamp;

use crate::bucket::ttl_of;
use crate::expression::{Action, Condition};
use crate::keys::{ItemKey, REGISTRY, system_partition};
use crate::table::Update;
use crate::value::{Item, Value};

/// How the sort keys of these records start, in the partition of the table's own records.
pub const PREFIX: &str = "#STREAM#";

const STREAM: &str = "stream";
const OWNER: &str = "owner";
const BEAT: &str = "beat";
const POSITION: &str = "position";
const DONE: &str = "done";
const TTL: &str = "ttl";

/// How far one shard of a stream was followed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Checkpoint {
    /// The shard.
    pub shard: String,
    /// The stream's label: a table whose stream is switched off and on again has another.
    pub stream: String,
    /// Who follows it, if anybody does.
    pub owner: Option<String>,
    /// Goes on for as long as the owner lives.
    pub beat: i64,
    /// The sequence number of the last record that is done.
    pub position: Option<String>,
    /// Whether the shard is closed, and done to its end.
    pub done: bool,
}

/// The partition of these records.
pub fn partition() -> String {
    system_partition(REGISTRY)
}

/// Where the record of a shard is kept.
pub fn key(shard: &str) -> ItemKey {
    ItemKey::new(partition(), format!("{PREFIX}{shard}"))
}

/// Reads a record; `None` for an item that is none.
pub fn decode(item: &Item) -> Option<Checkpoint> {
    let text = |name: &str| item.get(name).and_then(Value::as_str).map(str::to_owned);
    Some(Checkpoint {
        shard: text("SK")?.strip_prefix(PREFIX)?.to_owned(),
        stream: text(STREAM)?,
        owner: text(OWNER),
        beat: item.get(BEAT).and_then(Value::as_i64).unwrap_or_default(),
        position: text(POSITION),
        done: item.get(DONE) == Some(&Value::Bool(true)),
    })
}

/// Takes a shard over, unless somebody has touched its record since `seen`.
pub fn claim(
    shard: &str,
    stream: &str,
    seen: Option<&Checkpoint>,
    owner: &str,
    until: Timestamp,
) -> Update {
    let conditions = match seen {
        None => vec![Condition::Absent("PK".to_owned())],
        Some(seen) => {
            let owner = seen.owner.as_ref();
            vec![
                Condition::Equal(BEAT.to_owned(), Value::number(seen.beat)),
                owner.map_or(Condition::Absent(OWNER.to_owned()), |owner| {
                    Condition::Equal(OWNER.to_owned(), Value::text(owner))
                }),
            ]
        }
    };
    let mut actions = vec![
        Action::Set(STREAM.to_owned(), Value::text(stream)),
        Action::Set(OWNER.to_owned(), Value::text(owner)),
        Action::Add(BEAT.to_owned(), Value::number(1)),
        Action::Set(TTL.to_owned(), Value::number(ttl_of(until))),
    ];
    // What was done of another stream says nothing about this one.
    if seen.is_some_and(|seen| seen.stream != stream) {
        actions.push(Action::Remove(POSITION.to_owned()));
        actions.push(Action::Remove(DONE.to_owned()));
    }
    Update { key: key(shard), actions, conditions }
}

/// Whether the owner goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hold {
    /// It does.
    Keep,
    /// Somebody else may.
    Release,
}

/// Writes down how far a shard is done, unless somebody else holds it.
pub fn advance(checkpoint: &Checkpoint, owner: &str, hold: Hold, until: Timestamp) -> Update {
    let mut actions = vec![
        Action::Add(BEAT.to_owned(), Value::number(1)),
        Action::Set(DONE.to_owned(), Value::Bool(checkpoint.done)),
        Action::Set(TTL.to_owned(), Value::number(ttl_of(until))),
    ];
    if let Some(position) = &checkpoint.position {
        actions.push(Action::Set(POSITION.to_owned(), Value::text(position)));
    }
    if hold == Hold::Release {
        actions.push(Action::Remove(OWNER.to_owned()));
    }
    let conditions = vec![Condition::Equal(OWNER.to_owned(), Value::text(owner))];
    Update { key: key(&checkpoint.shard), actions, conditions }
}
