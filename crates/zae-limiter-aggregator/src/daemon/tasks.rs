//! The tasks of a daemon: each makes some calls and ends with an event.

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;
use zae_limiter_core::Clock;
use zae_limiter_schema::records::checkpoint::Checkpoint;

use super::checkpoints::{Checkpoints, Written, within};
use super::held::{Found, Held, Next};
use super::plan::{End, StreamShard, has_read, readable, with_unlisted};
use super::stream::{Page, Stream, StreamError, StreamErrorKind};
use crate::archive::AuditLine;
use crate::execute::{Aggregator, Report};

/// How often a position is handed over, while the new owner writes another one.
const HAND_OVER_ATTEMPTS: u32 = 3;

/// The stream shards and checkpoints as they were read.
pub(super) struct Listed {
    pub(super) shards: Vec<StreamShard>,
    pub(super) checkpoints: BTreeMap<String, Checkpoint>,
    /// The stream to follow next, if everything in this one is processed.
    pub(super) successor: Option<Arc<dyn Stream>>,
}

/// A processed page.
pub(super) struct Read {
    pub(super) page: Page,
    pub(super) report: Report,
}

/// The result of a task. The numbers are those of claims.
pub(super) enum Event {
    Listed(Result<Listed, StreamError>),
    Claimed(String, End, Result<Option<Checkpoint>, StreamError>),
    Read(String, u64, Result<Read, StreamError>),
    /// Events that were kept went to the archive, or not.
    Archived(String, u64, Report),
    /// The checkpoint as it was to be written.
    Written(u64, Checkpoint, Result<Written, StreamError>),
    /// Something was written that this daemon does not depend on.
    Noted,
}

pub(super) type Tasks = JoinSet<Event>;

/// Leaves the position to the daemon that owns the stream shard now. `found` is its checkpoint, if it is known.
pub(super) fn hand_over(
    own: &Checkpoints,
    mut held: Held,
    mut found: Option<Checkpoint>,
    tasks: &mut Tasks,
) {
    let own = own.clone();
    tasks.spawn(async move {
        // The first attempt may find a newer checkpoint. If all fail, the other daemon reads again what
        // this one has processed.
        for _ in 0..HAND_OVER_ATTEMPTS {
            let position = held.stored.clone();
            let stored = || Checkpoint { position, ..held.checkpoint.clone() };
            let seen = found.take().unwrap_or_else(stored);
            let Ok(Written::Changed(changed)) = own.hand_over(&held.checkpoint, &seen).await else {
                break;
            };
            found = changed;
            if held.compare(found.clone(), &own.me) != (Found::Lost { is_behind: true }) {
                break;
            }
        }
        Event::Noted
    });
}

/// Runs a future as a task of its own. A panic becomes a transient error: others may work.
pub(super) async fn unless_it_panics<T: Send + 'static>(
    future: impl Future<Output = Result<T, StreamError>> + Send + 'static,
) -> Result<T, StreamError> {
    // Dropping it aborts the task.
    let mut task = JoinSet::new();
    task.spawn(future);
    match task.join_next().await {
        Some(Ok(done)) => done,
        _ => Err(StreamError {
            kind: StreamErrorKind::Transient,
            message: "processing a page or its audit events panicked".to_owned(),
        }),
    }
}

/// Archives events. After a panic, none of them counts as archived.
pub(super) async fn archive_again(aggregator: Aggregator, events: Vec<AuditLine>) -> Report {
    let again = events.clone();
    let archiving = async move { Ok(aggregator.archive_again(again).await) };
    unless_it_panics(archiving).await.unwrap_or_else(|error| Report {
        errors: vec![error.message],
        unarchived: events,
        ..Report::default()
    })
}

/// Lists the stream shards and reads the checkpoints. `read` has those that this daemon has read to their end, though
/// their audit events are not archived yet.
pub(super) async fn list(
    stream: &Arc<dyn Stream>,
    checkpoints: &Checkpoints,
    read: &BTreeSet<String>,
) -> Result<Listed, StreamError> {
    let (clock, limit) = (&*checkpoints.clock, checkpoints.limit);
    // Before the stream shards: of a stream shard that begins in between, another daemon may already have a checkpoint.
    // It would look like one that the stream no longer lists, which waits for no parent.
    let known = checkpoints.all().await?;
    let shards = match within(clock, limit, "the stream", stream.shards()).await {
        Ok(shards) => shards,
        // The stream is gone. What was unfinished in it is missed.
        Err(error) if error.kind == StreamErrorKind::NotFound => Vec::new(),
        Err(error) => return Err(error),
    };
    let all = with_unlisted(shards.clone(), &known, stream.label());
    let readable = readable(&all, &known, stream.label(), |id| read.contains(id));
    let is_read =
        |shard: &&StreamShard| read.contains(&shard.id) || has_read(&known, shard, stream.label());
    let successor = match readable.iter().all(is_read) {
        true => within(clock, limit, "the stream", stream.successor()).await?,
        false => None,
    };
    Ok(Listed { shards, checkpoints: known, successor })
}

/// Reads a page, unless one is left from before, and processes it.
pub(super) async fn read(
    stream: &dyn Stream,
    aggregator: &Aggregator,
    clock: &dyn Clock,
    limit: Duration,
    shard: &str,
    next: Next,
) -> Result<Read, StreamError> {
    let Next { page, iterator, begin } = next;
    let page = match page {
        Some(page) => page,
        None => {
            let iterator = match iterator {
                Some(iterator) => iterator,
                None => within(clock, limit, "the stream", stream.iterator(shard, &begin)).await?,
            };
            within(clock, limit, "the stream", stream.page(&iterator)).await?
        }
    };
    let report = match page.records.is_empty() {
        true => Report::default(),
        false => aggregator.process(page.records.clone()).await,
    };
    Ok(Read { page, report })
}
