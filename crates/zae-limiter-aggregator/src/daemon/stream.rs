//! A table's stream, as the daemon reads it.

use std::fmt;
use zae_limiter_core::BoxFuture;

use super::plan::Shard;
use crate::event::{StreamRecord, Unreadable};

/// Where to begin in a shard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Begin {
    /// With the oldest record that is still there.
    Oldest,
    /// Behind the record of this sequence number.
    After(String),
}

/// Some records of a shard.
#[derive(Clone, Debug, PartialEq)]
pub struct Page {
    /// The records, in their order.
    pub records: Vec<Result<StreamRecord, Unreadable>>,
    /// Where the shard goes on; nowhere, once it is closed and read to its end.
    pub next: Option<String>,
}

/// What to do about a stream that does not answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamErrorKind {
    /// The iterator is too old: ask for another.
    Expired,
    /// The records that were asked for are no longer there.
    Trimmed,
    /// The shard, or the whole stream, is no longer there.
    Gone,
    /// It may answer another time.
    Passing,
    /// It will not answer until somebody changes something.
    Lasting,
}

/// A stream that does not answer.
#[derive(Debug)]
pub struct StreamError {
    /// What to do about it.
    pub kind: StreamErrorKind,
    /// One sentence.
    pub message: String,
}

impl fmt::Display for StreamError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for StreamError {}

/// The changes of a table, in shards.
pub trait Stream: fmt::Debug + Send + Sync + 'static {
    /// What it is called: a later stream of the same table has a later name.
    fn label(&self) -> &str;
    /// All shards that are there.
    fn shards(&self) -> BoxFuture<'_, Result<Vec<Shard>, StreamError>>;
    /// A place in a shard from which records can be read.
    fn iterator<'a>(
        &'a self,
        shard: &'a str,
        begin: &'a Begin,
    ) -> BoxFuture<'a, Result<String, StreamError>>;
    /// The records behind that place. There may be none although there are some further on.
    fn page<'a>(&'a self, iterator: &'a str) -> BoxFuture<'a, Result<Page, StreamError>>;
}
