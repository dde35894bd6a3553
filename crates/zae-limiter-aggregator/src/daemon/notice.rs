//! What a daemon reports.

use std::sync::Arc;

use zae_limiter_core::Timestamp;

use crate::execute::Report;

/// An event in a daemon's life. The strings are ids of stream shards, unless stated otherwise.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Notice {
    /// The daemon has claimed a stream shard.
    Claimed(String),
    /// Another daemon has taken over a stream shard.
    Lost(String),
    /// A stream shard is closed, and processed to its end.
    Finished(String),
    /// The stream has deleted records before a daemon could read them.
    Missed(Missed),
    /// Audit events could not be archived before the stream deleted them. They are in no archive.
    Unarchived(Unarchived),
    /// A batch was processed.
    Batch(Report),
    /// A transient error, which the daemon retries. The string is its message.
    TransientError(String),
    /// The stream was disabled, and everything in it is processed.
    StreamEnded,
    /// The daemon follows another stream of the table, with this label. Changes that were made while the table
    /// had no stream are in none.
    NextStream(String),
}

/// Records that a stream has deleted before a daemon could read them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Missed {
    /// The stream shard that had them, or those that it continues or that continue it.
    pub shard: String,
    /// They were written after this time. `None` if no daemon has read anything of the stream shard.
    pub after: Option<Timestamp>,
    /// They were written before this time.
    pub before: Timestamp,
}

/// Audit events that could not be archived for as long as the stream had them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unarchived {
    /// The stream shard that had them.
    pub shard: String,
    /// How many they are.
    pub events: usize,
    /// They expired after this time.
    pub since: Timestamp,
}

/// The callback for notices.
pub type OnNotice = Arc<dyn Fn(Notice) + Send + Sync>;
