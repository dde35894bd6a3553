//! Checkpoints of the table's change stream: how far each stream shard was processed, and by which worker.
//!
//! A worker owns the checkpoint of a stream shard and raises its heartbeat. When the heartbeat has not
//! changed for long enough, by the observer's own clock, another worker takes the shard over. No two
//! clocks are compared.

use std::time::Duration;

use zae_limiter_core::Timestamp;

use crate::bucket::ttl_of;
use crate::expression::{Action, Condition};
use crate::keys::{ItemKey, REGISTRY, system_partition};
use crate::table::Update;
use crate::value::{Item, Value};

/// The prefix of the sort keys, in the partition of the table's own records.
pub const PREFIX: &str = "#STREAM#";

/// The lifetime of a finished checkpoint: three times that of a stream record.
const FINISHED_LIFETIME: Duration = Duration::from_secs(3 * 86_400);
/// The lifetime of any other after its last write. While it exists, a worker that starts again knows which changes
/// were missed.
const LIFETIME: Duration = Duration::from_secs(30 * 86_400);

/// The longest takeover time that a worker may have.
pub const TAKEOVER_MAX: Duration = Duration::from_secs(600);

const STREAM: &str = "stream";
const OWNER: &str = "owner";
const BEAT: &str = "beat";
const POSITION: &str = "position";
const READ_TO: &str = "read_to";
const SEEN_AT: &str = "seen_at";
const ARCHIVED_AT: &str = "archived_at";
const READ: &str = "read";
const DONE: &str = "done";
const TAKEOVER: &str = "takeover_ms";
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
    /// The time of the last processed record. It names the time of changes that are lost.
    pub read_to: Option<Timestamp>,
    /// Whether the stream shard is closed and all its changes are processed. The owner may still archive audit events:
    /// then the position is before them.
    pub read: bool,
    /// Whether the stream shard is closed and processed to its end.
    pub done: bool,
    /// How long the owner's heartbeat may stay unchanged: workers may have different takeover times. Absent if the
    /// owner is of an earlier release.
    pub takeover_after: Option<Duration>,
    /// When it was last known that no change was missed, by a worker's clock. Counts while there is no position.
    pub seen_at: Option<Timestamp>,
    /// When a worker that archives expired audit events was last there, by its clock. One that does not archive leaves
    /// such events to it.
    pub archived_at: Option<Timestamp>,
}

/// The partition of these records.
pub fn partition() -> String {
    system_partition(REGISTRY)
}

/// The key of a stream shard's checkpoint.
pub fn key(shard: &str) -> ItemKey {
    ItemKey::new(partition(), format!("{PREFIX}{shard}"))
}

/// Whether this is the key of a checkpoint.
pub fn is_key(key: &ItemKey) -> bool {
    key.pk == partition() && key.sk.starts_with(PREFIX)
}

/// Decodes a checkpoint; `None` for any other item.
pub fn decode(item: &Item) -> Option<Checkpoint> {
    let text = |name: &str| item.get(name).and_then(Value::as_str).map(str::to_owned);
    let flag = |name: &str| item.get(name) == Some(&Value::Bool(true));
    let time = |name: &str| item.get(name).and_then(Value::as_i64).map(Timestamp::from_millis);
    Some(Checkpoint {
        shard: text("SK")?.strip_prefix(PREFIX)?.to_owned(),
        stream: text(STREAM)?,
        owner: text(OWNER),
        beat: item.get(BEAT).and_then(Value::as_i64).unwrap_or_default(),
        position: text(POSITION),
        read_to: time(READ_TO),
        read: flag(READ),
        done: flag(DONE),
        takeover_after: item.get(TAKEOVER).and_then(Value::as_i64).map(|millis| {
            Duration::from_millis(u64::try_from(millis).unwrap_or(0)).min(TAKEOVER_MAX)
        }),
        seen_at: time(SEEN_AT),
        archived_at: time(ARCHIVED_AT),
    })
}

fn lifetime(done: bool) -> Duration {
    if done { FINISHED_LIFETIME } else { LIFETIME }
}

fn expiry(done: bool, now: Timestamp) -> Action {
    let until = ttl_of(now.saturating_add(lifetime(done)));
    Action::Set(TTL.to_owned(), Value::number(until))
}

/// Creates the checkpoint of a stream shard that no worker has claimed yet, so that its changes are missed if
/// nobody reads them.
pub fn register(new: &Checkpoint, now: Timestamp) -> Update {
    let mut actions = vec![
        Action::Set(STREAM.to_owned(), Value::text(&new.stream)),
        Action::Add(BEAT.to_owned(), Value::number(1)),
        expiry(false, now),
    ];
    actions.extend(progress(new));
    Update { key: key(&new.shard), actions, conditions: vec![Condition::Absent("PK".to_owned())] }
}

/// Takes a stream shard over, unless its checkpoint has changed since `seen`. `new` is the checkpoint to begin with
/// if there is none of this stream. The heartbeat of the owner may stay unchanged for `takeover_after`.
pub fn claim(
    new: &Checkpoint,
    seen: Option<&Checkpoint>,
    owner: &str,
    takeover_after: Duration,
    now: Timestamp,
) -> Update {
    let takeover_ms = i64::try_from(takeover_after.as_millis()).unwrap_or(i64::MAX);
    let mut actions = vec![
        Action::Set(STREAM.to_owned(), Value::text(&new.stream)),
        Action::Set(OWNER.to_owned(), Value::text(owner)),
        Action::Set(TAKEOVER.to_owned(), Value::number(takeover_ms)),
        Action::Add(BEAT.to_owned(), Value::number(1)),
        expiry(false, now),
    ];
    actions.extend(archived(new));
    let Some(seen) = seen else {
        actions.extend(progress(new));
        let conditions = vec![Condition::Absent("PK".to_owned())];
        return Update { key: key(&new.shard), actions, conditions };
    };
    // The position in another stream means nothing in this one.
    if seen.stream != new.stream {
        let time = |at: Timestamp| Value::number(at.as_millis());
        actions.extend(new.seen_at.map(|at| Action::Set(SEEN_AT.to_owned(), time(at))));
        actions.push(Action::Remove(POSITION.to_owned()));
        actions.push(Action::Remove(READ.to_owned()));
        actions.push(Action::Remove(DONE.to_owned()));
    }
    let owner = seen.owner.as_ref();
    let owner = owner.map_or(Condition::Absent(OWNER.to_owned()), |owner| {
        Condition::Equal(OWNER.to_owned(), Value::text(owner))
    });
    let beat = Condition::Equal(BEAT.to_owned(), Value::number(seen.beat));
    Update { key: key(&new.shard), actions, conditions: vec![beat, owner] }
}

/// Whether the owner keeps the stream shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hold {
    /// It goes on.
    Keep,
    /// Another worker may take it over.
    Release,
}

/// Stores how far a stream shard is processed and raises the heartbeat, unless another worker owns the stream
/// shard, or its position is no longer `stored`: an earlier owner may have [handed over](hand_over) a later one.
pub fn advance(
    checkpoint: &Checkpoint,
    stored: Option<&str>,
    owner: &str,
    hold: Hold,
    now: Timestamp,
) -> Update {
    let mut actions = vec![
        Action::Add(BEAT.to_owned(), Value::number(1)),
        Action::Set(DONE.to_owned(), Value::Bool(checkpoint.done)),
        expiry(checkpoint.done, now),
    ];
    actions.extend(progress(checkpoint));
    actions.extend(archived(checkpoint));
    if checkpoint.read {
        actions.push(Action::Set(READ.to_owned(), Value::Bool(true)));
    }
    // The records after the stored position are gone. The next owner must not begin there.
    if checkpoint.position.is_none() && stored.is_some() {
        actions.push(Action::Remove(POSITION.to_owned()));
    }
    if hold == Hold::Release {
        actions.push(Action::Remove(OWNER.to_owned()));
    }
    let owned = Condition::Equal(OWNER.to_owned(), Value::text(owner));
    Update { key: key(&checkpoint.shard), actions, conditions: vec![owned, is_stored(stored)] }
}

/// Stores the progress of a worker that no longer owns the stream shard, unless the position or the stream in
/// `found` has changed. The owner continues from there.
pub fn hand_over(checkpoint: &Checkpoint, found: &Checkpoint) -> Update {
    let same_stream = Condition::Equal(STREAM.to_owned(), Value::text(&checkpoint.stream));
    Update {
        key: key(&checkpoint.shard),
        actions: progress(checkpoint),
        conditions: vec![same_stream, is_stored(found.position.as_deref())],
    }
}

fn progress(checkpoint: &Checkpoint) -> Vec<Action> {
    let number = |at: Timestamp| Value::number(at.as_millis());
    [
        (POSITION, checkpoint.position.as_ref().map(Value::text)),
        (READ_TO, checkpoint.read_to.map(number)),
        (SEEN_AT, checkpoint.seen_at.map(number)),
    ]
    .into_iter()
    .filter_map(|(name, value)| Some(Action::Set(name.to_owned(), value?)))
    .collect()
}

/// An earlier owner that hands over does not write this: its time may be an old one.
fn archived(checkpoint: &Checkpoint) -> Option<Action> {
    let at = checkpoint.archived_at?;
    Some(Action::Set(ARCHIVED_AT.to_owned(), Value::number(at.as_millis())))
}

fn is_stored(position: Option<&str>) -> Condition {
    match position {
        Some(position) => Condition::Equal(POSITION.to_owned(), Value::text(position)),
        None => Condition::Absent(POSITION.to_owned()),
    }
}
