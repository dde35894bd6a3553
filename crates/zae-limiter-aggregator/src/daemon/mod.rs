//! The aggregator as a daemon that reads the table's stream itself.
//!
//! The table has a checkpoint for each stream shard: how far it is processed, and which daemon owns
//! it. Several daemons share the stream shards evenly (`plan`), and take over those of a daemon
//! that has crashed. Two daemons that follow the same stream shard for a while do no harm: nothing
//! is booked twice.

#[cfg(feature = "aws")]
mod aws;
mod metrics;
mod plan;
mod stream;

use std::collections::BTreeMap;
use std::fmt;
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;
use zae_limiter_core::Clock;
use zae_limiter_schema::records::checkpoint::{self, Checkpoint, Hold};
use zae_limiter_schema::{
    Consistency, PAGE_ITEMS_MAX, Query, Range, Step, Table, TableError, Updated,
};

use crate::event::{StreamRecord, Unreadable};
use crate::execute::{Aggregator, Report, is_transient};

#[cfg(feature = "aws")]
pub use aws::AwsStream;
pub use metrics::{Metrics, serve};
pub use plan::StreamShard;
pub use stream::{Begin, Page, Stream, StreamError, StreamErrorKind};

use plan::{Heartbeats, claims, readable};

/// How often the daemon lists the stream shards and reads the checkpoints.
const LIST_EVERY: Duration = Duration::from_secs(5);
/// The lifetime of a checkpoint after its last write: three times that of a stream record.
const CHECKPOINT_LIFETIME: Duration = Duration::from_secs(3 * 86_400);
/// The pause after a turn in which no stream shard had a record.
const POLL_EVERY: Duration = Duration::from_secs(1);
/// The longest wait after a failure.
const RETRY_WAIT_MAX: Duration = Duration::from_secs(30);
/// After so many empty pages in a row, a stream shard counts as read to its present end.
const EMPTY_PAGES: u32 = 3;

/// When a daemon ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Until {
    /// When its stop signal completes.
    Stopped,
    /// When all records that the stream has are processed.
    Drained,
}

/// An event in a daemon's life. The strings are ids of stream shards, except in `TransientError`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Notice {
    /// The daemon has claimed a stream shard.
    Claimed(String),
    /// Another daemon has taken over a stream shard.
    Lost(String),
    /// A stream shard is closed, and processed to its end.
    Finished(String),
    /// The stream has deleted records before the daemon could read them.
    Trimmed(String),
    /// A batch was processed.
    Batch(Report),
    /// A transient error, which the daemon retries. The string is its message.
    TransientError(String),
}

/// The callback for notices.
pub type OnNotice = Arc<dyn Fn(Notice) + Send + Sync>;

/// Follows a table's stream.
pub struct Daemon {
    stream: Arc<dyn Stream>,
    table: Arc<dyn Table>,
    clock: Arc<dyn Clock>,
    aggregator: Aggregator,
    on_notice: OnNotice,
    /// The owner that this daemon writes into checkpoints.
    me: String,
    takeover_after: Duration,
    metrics: Arc<Metrics>,
    heartbeats: Heartbeats,
    /// The stream shards that this daemon follows, by id.
    held: BTreeMap<String, Held>,
    /// When the stream shards were last listed, by the stopwatch. `None` forces a new list.
    listed_at: Option<Duration>,
    /// How many readable stream shards have no live owner.
    unheld: usize,
}

impl fmt::Debug for Daemon {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Daemon").field("me", &self.me).finish_non_exhaustive()
    }
}

type Records = Vec<Result<StreamRecord, Unreadable>>;

/// A stream shard that this daemon follows. Times are by the stopwatch.
struct Held {
    checkpoint: Checkpoint,
    iterator: Option<String>,
    /// A page that has to be processed again.
    page: Option<Page>,
    /// Empty pages in a row.
    empty_pages: u32,
    /// When the checkpoint was last written.
    beat_at: Duration,
    /// Failures in a row.
    failures: u32,
    /// No page is read before then.
    wait_until: Duration,
}

impl Daemon {
    /// A daemon that reads `stream` and passes its batches to `aggregator`. `me` identifies it
    /// among other daemons. It takes over a stream shard whose owner has not written a heartbeat
    /// for `takeover_after`.
    pub fn new(
        stream: Arc<dyn Stream>,
        table: Arc<dyn Table>,
        clock: Arc<dyn Clock>,
        aggregator: Aggregator,
        takeover_after: Duration,
        me: impl Into<String>,
    ) -> Self {
        Self {
            stream,
            table,
            clock,
            aggregator,
            on_notice: Arc::new(|_| {}),
            me: me.into(),
            takeover_after,
            metrics: Arc::default(),
            heartbeats: Heartbeats::new(takeover_after),
            held: BTreeMap::new(),
            listed_at: None,
            unheld: 0,
        }
    }

    /// Sets the callback for notices.
    #[must_use]
    pub fn on_notice(mut self, on_notice: OnNotice) -> Self {
        self.on_notice = on_notice;
        self
    }

    /// The daemon's metrics.
    pub fn metrics(&self) -> Arc<Metrics> {
        Arc::clone(&self.metrics)
    }

    /// Follows the stream. When `stop` completes, the daemon abandons the batches in progress. The
    /// next owner of the stream shard processes them again.
    ///
    /// # Errors
    ///
    /// If the stream or the table has a permanent error.
    pub async fn run(
        &mut self,
        until: Until,
        stop: impl Future<Output = ()>,
    ) -> Result<(), StreamError> {
        let mut stop = pin!(stop);
        let ended = loop {
            let turn = async {
                let worked = self.turn().await?;
                let is_over = until == Until::Drained && self.is_drained();
                if !worked && !is_over {
                    self.clock.sleep(self.pause(until)).await;
                }
                Ok(is_over)
            };
            tokio::select! {
                biased;
                () = &mut stop => break Ok(()),
                turned = turn => match turned {
                    Ok(true) => break Ok(()),
                    Ok(false) => {}
                    Err(error) => break Err(error),
                },
            }
        };
        self.release().await;
        ended
    }

    fn pause(&self, until: Until) -> Duration {
        let quick = until == Until::Drained;
        let poll = if quick { POLL_EVERY / 10 } else { POLL_EVERY };
        poll.min(self.takeover_after / 4)
    }

    fn is_drained(&self) -> bool {
        let is_idle = |held: &Held| held.page.is_none() && held.empty_pages >= EMPTY_PAGES;
        self.listed_at.is_some() && self.unheld == 0 && self.held.values().all(is_idle)
    }

    /// Lists the stream shards if it is time to, and processes a page of each one that this daemon
    /// holds. Returns whether there were any records.
    async fn turn(&mut self) -> Result<bool, StreamError> {
        let now = self.clock.stopwatch();
        let every = LIST_EVERY.min(self.takeover_after / 4);
        if self.listed_at.is_none_or(|at| now.saturating_sub(at) >= every) {
            match self.list_and_claim(now).await {
                Ok(()) => self.listed_at = Some(now),
                Err(error) if error.kind == StreamErrorKind::Transient => {
                    (self.on_notice)(Notice::TransientError(error.message));
                }
                Err(error) => return Err(error),
            }
        }
        let mut reading = JoinSet::new();
        for (shard, held) in &self.held {
            if now < held.wait_until {
                continue;
            }
            let (shard, page, iterator) = (shard.clone(), held.page.clone(), held.iterator.clone());
            let begin = match &held.checkpoint.position {
                Some(position) => Begin::After(position.clone()),
                None => Begin::Oldest,
            };
            let (stream, aggregator) = (Arc::clone(&self.stream), self.aggregator.clone());
            reading.spawn(async move {
                let read = read(&*stream, &aggregator, &shard, page, iterator, begin).await;
                (shard, read)
            });
        }
        let mut worked = false;
        while let Some(joined) = reading.join_next().await {
            match joined {
                Ok((shard, Ok(read))) => worked |= self.advance(&shard, read),
                Ok((shard, Err(error))) => self.fail(&shard, error)?,
                Err(error) => std::panic::resume_unwind(error.into_panic()),
            }
        }
        self.write_checkpoints().await?;
        Ok(worked)
    }

    /// Lists the stream shards, reads their checkpoints, and claims this daemon's share.
    async fn list_and_claim(&mut self, now: Duration) -> Result<(), StreamError> {
        let shards = self.stream.shards().await?;
        let checkpoints = self.checkpoints().await.map_err(checkpoint_error)?;
        self.heartbeats.observe(&checkpoints, now);
        let readable = readable(&shards, &checkpoints);
        self.held.retain(|shard, _| shards.iter().any(|one| one.id == *shard));
        let wanted = claims(&readable, &checkpoints, &self.heartbeats, &self.me, now);
        for shard in &wanted {
            if !self.held.contains_key(&shard.id) {
                self.claim(&shard.id, checkpoints.get(&shard.id)).await?;
            }
        }
        let is_unheld = |shard: &&&StreamShard| {
            !self.held.contains_key(&shard.id) && !self.heartbeats.is_alive(&shard.id, now)
        };
        self.unheld = readable.iter().filter(is_unheld).count();
        self.metrics.set_stream_shards(self.held.len());
        Ok(())
    }

    /// The checkpoints by stream shard. Positions in an earlier stream of the table do not count.
    async fn checkpoints(&self) -> Result<BTreeMap<String, Checkpoint>, TableError> {
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
            let page = self.table.query(&query).await?;
            for one in page.items.iter().filter_map(checkpoint::decode) {
                found.insert(one.shard.clone(), one);
            }
            match page.next {
                Some(after) => query.after = Some(after),
                None => break,
            }
        }
        let label = self.stream.label();
        for one in found.values_mut().filter(|one| one.stream != label) {
            (one.done, one.position) = (false, None);
        }
        Ok(found)
    }

    async fn claim(&mut self, shard: &str, seen: Option<&Checkpoint>) -> Result<(), StreamError> {
        let until = self.clock.now().saturating_add(CHECKPOINT_LIFETIME);
        let label = self.stream.label();
        let update = checkpoint::claim(shard, label, seen, &self.me, until);
        let item = match self.table.update(&update).await {
            Ok(Updated::Done(item, _)) => item,
            // Another daemon has claimed it first.
            Ok(Updated::Unmet(..)) => return Ok(()),
            Err(error) => return Err(checkpoint_error(error)),
        };
        let checkpoint = checkpoint::decode(&item).unwrap_or_default();
        let held = Held {
            checkpoint,
            iterator: None,
            page: None,
            empty_pages: 0,
            beat_at: self.clock.stopwatch(),
            failures: 0,
            wait_until: Duration::ZERO,
        };
        self.held.insert(shard.to_owned(), held);
        (self.on_notice)(Notice::Claimed(shard.to_owned()));
        Ok(())
    }

    /// Advances a stream shard past a processed page, or schedules a retry of the page. Returns
    /// whether the page had records.
    fn advance(&mut self, shard: &str, read: Read) -> bool {
        let now = self.clock.stopwatch();
        let Some(held) = self.held.get_mut(shard) else { return false };
        let Read { page, report } = read;
        if page.records.is_empty() {
            held.empty_pages += 1;
        } else {
            held.empty_pages = 0;
        }
        let worked = !page.records.is_empty();
        if report.is_retriable {
            held.page = Some(page);
            held.failures += 1;
            held.wait_until = now + retry_wait(held.failures);
            self.metrics.retry();
        } else {
            if let Some(last) = last_number(&page.records) {
                held.checkpoint.position = Some(last);
            }
            held.checkpoint.done = page.next.is_none();
            (held.iterator, held.page, held.failures) = (page.next, None, 0);
            self.metrics.add(&report);
        }
        if worked {
            (self.on_notice)(Notice::Batch(report));
        }
        worked
    }

    /// Handles an error of a stream shard.
    fn fail(&mut self, shard: &str, error: StreamError) -> Result<(), StreamError> {
        let now = self.clock.stopwatch();
        let Some(held) = self.held.get_mut(shard) else { return Ok(()) };
        held.iterator = None;
        match error.kind {
            StreamErrorKind::Expired => {}
            StreamErrorKind::Trimmed => {
                held.checkpoint.position = None;
                (self.on_notice)(Notice::Trimmed(shard.to_owned()));
            }
            // Done, so that its children can be read.
            StreamErrorKind::NotFound => held.checkpoint.done = true,
            StreamErrorKind::Transient => {
                held.failures += 1;
                held.wait_until = now + retry_wait(held.failures);
                (self.on_notice)(Notice::TransientError(error.message));
            }
            StreamErrorKind::Permanent => return Err(error),
        }
        Ok(())
    }

    /// Writes the checkpoints that are due, with a heartbeat and the position.
    async fn write_checkpoints(&mut self) -> Result<(), StreamError> {
        let now = self.clock.stopwatch();
        let is_due = |held: &Held| {
            held.checkpoint.done || now.saturating_sub(held.beat_at) >= self.takeover_after / 4
        };
        let due: Vec<String> = self
            .held
            .iter()
            .filter(|(_, held)| is_due(held))
            .map(|(shard, _)| shard.clone())
            .collect();
        for shard in due {
            let Some(held) = self.held.get_mut(&shard) else { continue };
            let until = self.clock.now().saturating_add(CHECKPOINT_LIFETIME);
            let update = checkpoint::advance(&held.checkpoint, &self.me, Hold::Keep, until);
            match self.table.update(&update).await {
                Ok(Updated::Done(..)) if held.checkpoint.done => {
                    self.held.remove(&shard);
                    // Its children can be read now.
                    self.listed_at = None;
                    (self.on_notice)(Notice::Finished(shard));
                }
                Ok(Updated::Done(..)) => held.beat_at = now,
                Ok(Updated::Unmet(..)) => {
                    self.held.remove(&shard);
                    (self.on_notice)(Notice::Lost(shard));
                }
                Err(error) => match checkpoint_error(error) {
                    error if error.kind == StreamErrorKind::Transient => {
                        (self.on_notice)(Notice::TransientError(error.message));
                    }
                    error => return Err(error),
                },
            }
        }
        Ok(())
    }

    /// Writes all checkpoints and gives up their ownership.
    async fn release(&mut self) {
        for (_, held) in std::mem::take(&mut self.held) {
            let until = self.clock.now().saturating_add(CHECKPOINT_LIFETIME);
            let update = checkpoint::advance(&held.checkpoint, &self.me, Hold::Release, until);
            // If this fails, other daemons take over once the heartbeat times out.
            let _ = self.table.update(&update).await;
        }
    }
}

/// A processed page.
struct Read {
    page: Page,
    report: Report,
}

/// Reads a page, unless one is left from before, and processes it.
async fn read(
    stream: &dyn Stream,
    aggregator: &Aggregator,
    shard: &str,
    page: Option<Page>,
    iterator: Option<String>,
    begin: Begin,
) -> Result<Read, StreamError> {
    let page = match (page, iterator) {
        (Some(page), _) => page,
        (None, Some(iterator)) => stream.page(&iterator).await?,
        (None, None) => {
            let iterator = stream.iterator(shard, &begin).await?;
            stream.page(&iterator).await?
        }
    };
    let report = match page.records.is_empty() {
        true => Report::default(),
        false => aggregator.process(page.records.clone()).await,
    };
    Ok(Read { page, report })
}

fn last_number(records: &Records) -> Option<String> {
    let number = |record: &Result<StreamRecord, Unreadable>| match record {
        Ok(record) => Some(record.sequence_number.clone()),
        Err(unreadable) => unreadable.sequence_number.clone(),
    };
    records.iter().rev().find_map(number)
}

/// The wait after so many failures in a row. It doubles with each one.
fn retry_wait(failures: u32) -> Duration {
    (POLL_EVERY / 4 * 2_u32.saturating_pow(failures.min(10))).min(RETRY_WAIT_MAX)
}

fn checkpoint_error(error: TableError) -> StreamError {
    let kind = match is_transient(&error) {
        true => StreamErrorKind::Transient,
        false => StreamErrorKind::Permanent,
    };
    StreamError { kind, message: format!("could not read or write the checkpoints: {error}") }
}
