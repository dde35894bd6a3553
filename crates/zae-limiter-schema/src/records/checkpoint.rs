//! Checkpoints of the table's change stream: how far each stream shard was processed, and by which worker.
//!
//! A worker owns the checkpoint of a stream shard and raises its heartbeat. When the heartbeat has not
//! changed for long enough, by the observer's own clock, another worker takes the shard over. No two
//! clocks are compared.

use zae_limiter_core::Timestamp;

use crate::bucket::ttl_of;
use crate::expression::{Action, Condition};
use crate::keys::{ItemKey, REGISTRY, system_partition};
use crate::table::Update;
use crate::value::{Item, Value};

/// The prefix of the sort keys, in the partition of the table's own records.
pub const PREFIX: &str = "#STREAM#";

const STREAM: &str = "stream";
const OWNER: &str = "owner";
const BEAT: &str = "beat";
const POSITION: &str = "position";
const DONE: &str = "done";
const TTL: &str = "ttl";

/// How far one stream shard was processed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Checkpoint {
    /// The id of the stream shard.
    pub shard: String,
    /// The stream's label. A stream that was disabled and enabled again has another one.
    pub stream: String,
    /// The worker that processes it, if any.
    pub owner: Option<String>,
    /// The heartbeat. It rises while the owner is alive.
    pub beat: i64,
    /// The sequence number of the last processed record.
    pub position: Option<String>,
    /// Whether the stream shard is closed and processed to its end.
    pub done: bool,
}

/// The partition of these records.
pub fn partition() -> String {
    system_partition(REGISTRY)
}

/// The key of a stream shard's checkpoint.
pub fn key(shard: &str) -> ItemKey {
    ItemKey::new(partition(), format!("{PREFIX}{shard}"))
}

/// Decodes a checkpoint; `None` for any other item.
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

/// Takes a stream shard over, unless its checkpoint has changed since `seen`.
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
    // The position in another stream means nothing in this one.
    if seen.is_some_and(|seen| seen.stream != stream) {
        actions.push(Action::Remove(POSITION.to_owned()));
        actions.push(Action::Remove(DONE.to_owned()));
    }
    Update { key: key(shard), actions, conditions }
}

/// Whether the owner keeps the stream shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hold {
    /// It goes on.
    Keep,
    /// Another worker may take it over.
    Release,
}

/// Stores how far a stream shard is processed, unless another worker owns it.
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
