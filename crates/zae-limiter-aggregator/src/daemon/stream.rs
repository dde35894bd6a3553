//! The interface to a table's stream.

use std::fmt;
use std::sync::Arc;

use zae_limiter_core::BoxFuture;

use super::plan::StreamShard;
use crate::event::{StreamRecord, Unreadable};

/// Where to begin reading a stream shard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Begin {
    /// With the oldest record that the stream still has.
    Oldest,
    /// After the record with this sequence number.
    After(String),
}

/// A page of a stream shard.
#[derive(Clone, Debug, PartialEq)]
pub struct Page {
    /// The records, in order.
    pub records: Vec<Result<StreamRecord, Unreadable>>,
    /// The iterator of the next page. `None` at the end of a closed stream shard.
    pub next: Option<String>,
}

/// The kinds of errors of a stream, by what to do about them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamErrorKind {
    /// The iterator has expired: request a new one.
    Expired,
    /// The stream has deleted the requested records.
    Trimmed,
    /// The stream shard, or the whole stream, no longer exists.
    NotFound,
    /// A retry may succeed.
    Transient,
    /// Retries fail until an operator changes something.
    Permanent,
}

/// Why a stream could not be read.
#[derive(Debug)]
pub struct StreamError {
    /// What to do about it.
    pub kind: StreamErrorKind,
    /// What failed, as one sentence.
    pub message: String,
}

impl fmt::Display for StreamError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for StreamError {}

/// The change stream of a table.
pub trait Stream: fmt::Debug + Send + Sync + 'static {
    /// The label of the stream. A later stream of the same table has a label that sorts after it.
    fn label(&self) -> &str;
    /// All stream shards that exist.
    fn shards(&self) -> BoxFuture<'_, Result<Vec<StreamShard>, StreamError>>;
    /// An iterator for reading a stream shard.
    fn iterator<'a>(
        &'a self,
        stream_shard: &'a str,
        begin: &'a Begin,
    ) -> BoxFuture<'a, Result<String, StreamError>>;
    /// The records at an iterator. A page may be empty although later pages are not.
    fn page<'a>(&'a self, iterator: &'a str) -> BoxFuture<'a, Result<Page, StreamError>>;
    /// The next stream of the same table, if this one was disabled and another one enabled.
    fn successor(&self) -> BoxFuture<'_, Result<Option<Arc<dyn Stream>>, StreamError>>;
}
