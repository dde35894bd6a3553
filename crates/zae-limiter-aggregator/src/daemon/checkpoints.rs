//! Reads and writes the checkpoints in the table, each call within a time limit.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use zae_limiter_core::Clock;
use zae_limiter_schema::records::checkpoint::{self, Checkpoint, Hold};
use zae_limiter_schema::{
    Consistency, PAGE_ITEMS_MAX, Query, Range, Step, Table, TableError, Update, Updated,
};

use super::stream::{StreamError, StreamErrorKind};
use crate::execute::is_transient;

/// The checkpoints, as one daemon writes them.
#[derive(Clone, Debug)]
pub(super) struct Checkpoints {
    pub(super) table: Arc<dyn Table>,
    pub(super) clock: Arc<dyn Clock>,
    /// The owner that this daemon writes.
    pub(super) me: Arc<str>,
    /// How long its heartbeats may stay unchanged.
    pub(super) takeover_after: Duration,
    /// The time limit of a call.
    pub(super) limit: Duration,
    /// Whether this daemon archives audit events.
    pub(super) archives: bool,
}

/// The outcome of writing a checkpoint.
#[derive(Debug)]
pub(super) enum Written {
    Done,
    /// The owner or the position has changed. The checkpoint as it is, unless it is deleted.
    Changed(Option<Checkpoint>),
}

impl Checkpoints {
    /// All checkpoints, by stream shard.
    pub(super) async fn all(&self) -> Result<BTreeMap<String, Checkpoint>, StreamError> {
        let mut query = Query {
            index: None,
            partition: checkpoint::partition(),
            range: Range::StartsWith(checkpoint::PREFIX.to_owned()),
            step: Step::Forward,
            limit: PAGE_ITEMS_MAX,
            after: None,
            consistency: Consistency::Strong,
        };
        let mut found = BTreeMap::new();
        loop {
            let page = self.within(self.table.query(&query)).await?;
            let items = page.items.iter().filter_map(checkpoint::decode);
            found.extend(items.map(|one| (one.shard.clone(), one)));
            match page.next {
                Some(after) => query.after = Some(after),
                None => return Ok(found),
            }
        }
    }

    /// Records that a stream shard exists.
    pub(super) async fn register(&self, new: &Checkpoint) -> Result<Written, StreamError> {
        self.write(&checkpoint::register(new, self.clock.now())).await
    }

    /// Claims a stream shard. `None` if another daemon was first.
    pub(super) async fn claim(
        &self,
        new: &Checkpoint,
        seen: Option<&Checkpoint>,
    ) -> Result<Option<Checkpoint>, StreamError> {
        let now = self.clock.now();
        let new = Checkpoint { archived_at: self.archives.then_some(now), ..new.clone() };
        let update = checkpoint::claim(&new, seen, &self.me, self.takeover_after, now);
        match self.within(self.table.update(&update)).await? {
            Updated::Done(item, _) => Ok(Some(checkpoint::decode(&item).unwrap_or_default())),
            Updated::Unmet(..) => Ok(None),
        }
    }

    /// Writes a heartbeat with the position. `stored` is the position that the table has.
    pub(super) async fn advance(
        &self,
        checkpoint: &Checkpoint,
        stored: Option<&str>,
        hold: Hold,
    ) -> Result<Written, StreamError> {
        let now = self.clock.now();
        // With a position, the records after it are missed if the stream has deleted them. Then the time says when
        // a daemon was there.
        let seen_at = checkpoint.position.as_ref().map(|_| now).or(checkpoint.seen_at);
        let archived_at = self.archives.then_some(now);
        let checkpoint = Checkpoint { seen_at, archived_at, ..checkpoint.clone() };
        self.write(&checkpoint::advance(&checkpoint, stored, &self.me, hold, now)).await
    }

    /// Leaves the position to the daemon that owns the stream shard now.
    pub(super) async fn hand_over(
        &self,
        mine: &Checkpoint,
        found: &Checkpoint,
    ) -> Result<Written, StreamError> {
        self.write(&checkpoint::hand_over(mine, found)).await
    }

    async fn write(&self, update: &Update) -> Result<Written, StreamError> {
        Ok(match self.within(self.table.update(update)).await? {
            Updated::Done(..) => Written::Done,
            Updated::Unmet(item, _) => Written::Changed(item.as_ref().and_then(checkpoint::decode)),
        })
    }

    async fn within<T>(
        &self,
        call: impl Future<Output = Result<T, TableError>>,
    ) -> Result<T, StreamError> {
        let call = async { call.await.map_err(checkpoint_error) };
        within(&*self.clock, self.limit, "the table of the checkpoints", call).await
    }
}

/// Bounds a call. A call that does not answer is a transient error.
pub(super) async fn within<T>(
    clock: &dyn Clock,
    limit: Duration,
    whom: &str,
    call: impl Future<Output = Result<T, StreamError>>,
) -> Result<T, StreamError> {
    tokio::select! {
        biased;
        done = call => done,
        () = clock.sleep(limit) => Err(StreamError {
            kind: StreamErrorKind::Transient,
            message: format!("{whom} did not answer within {} s", limit.as_secs_f64()),
        }),
    }
}

fn checkpoint_error(error: TableError) -> StreamError {
    let kind = match is_transient(&error) {
        true => StreamErrorKind::Transient,
        false => StreamErrorKind::Permanent,
    };
    StreamError { kind, message: format!("could not read or write the checkpoints: {error}") }
}
