//! The aggregator as a daemon that follows the table's stream by itself.
//!
//! How far each shard of the stream is done stands in the table, held by whoever follows it. Several
//! daemons share the shards out among themselves (`plan`), and take over those of one that is gone.
//! Two that follow the same shard for a while do no harm: nothing is booked twice.

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
    Consistency, PAGE_ITEMS_MAX, Query, Range, Step, Table, TableError, TableErrorKind, Updated,
};

use crate::event::{StreamRecord, Unreadable};
use crate::execute::{Aggregator, Report};

#[cfg(feature = "aws")]
pub use aws::AwsStream;
pub use metrics::{Metrics, serve};
pub use plan::Shard;
pub use stream::{Begin, Page, Stream, StreamError, StreamErrorKind};

use plan::{Beats, claims, readable};

/// How often the shards are looked at, and for how long records of them are kept.
const LOOK_EVERY: Duration = Duration::from_secs(5);
const KEPT_FOR: Duration = Duration::from_secs(3 * 86_400);
/// How long a shard without news is left alone.
const POLL_EVERY: Duration = Duration::from_secs(1);
/// How long the wait after a failure is at most.
const RETRY_WAIT_MAX: Duration = Duration::from_secs(30);
/// So many pages without a record, and a shard counts as read to its present end.
const EMPTY_PAGES: u32 = 3;

/// When a daemon ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Until {
    /// When it is told to.
    Stopped,
    /// When everything that was there is done.
    Drained,
}

/// Something that people may want to know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Notice {
    /// A shard is followed from now on.
    Took(String),
    /// A shard was taken over by somebody else.
    Lost(String),
    /// A shard is closed, and done to its end.
    Finished(String),
    /// Changes were no longer in the stream when they were to be read.
    Trimmed(String),
    /// What became of a batch.
    Batch(Report),
    /// Something failed and is tried again.
    Trouble(String),
}

/// Who is told.
pub type Tell = Arc<dyn Fn(Notice) + Send + Sync>;

/// Follows a table's stream.
pub struct Daemon {
    stream: Arc<dyn Stream>,
    table: Arc<dyn Table>,
    clock: Arc<dyn Clock>,
    aggregator: Aggregator,
    tell: Tell,
    me: String,
    gone_after: Duration,
    metrics: Arc<Metrics>,
    beats: Beats,
    held: BTreeMap<String, Held>,
    looked_at: Option<Duration>,
    /// Shards that could be read, and that nobody is known to follow.
    unheld: usize,
}

impl fmt::Debug for Daemon {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Daemon").field("me", &self.me).finish_non_exhaustive()
    }
}

/// Records, read or not.
type Records = Vec<Result<StreamRecord, Unreadable>>;

/// A shard that this daemon follows.
struct Held {
    checkpoint: Checkpoint,
    iterator: Option<String>,
    /// A page that is not done yet.
    page: Option<Page>,
    empty_pages: u32,
    beat_at: Duration,
    failures: u32,
    /// Not before then.
    wait_until: Duration,
}

impl Daemon {
    /// A daemon, called `me` among others, that follows `stream` and has `aggregator` do what is to
    /// be done. A shard whose owner gives no sign of life for `gone_after` is taken over.
    pub fn new(
        stream: Arc<dyn Stream>,
        table: Arc<dyn Table>,
        clock: Arc<dyn Clock>,
        aggregator: Aggregator,
        gone_after: Duration,
        me: impl Into<String>,
    ) -> Self {
        Self {
            stream,
            table,
            clock,
            aggregator,
            tell: Arc::new(|_| {}),
            me: me.into(),
            gone_after,
            metrics: Arc::default(),
            beats: Beats::new(gone_after),
            held: BTreeMap::new(),
            looked_at: None,
            unheld: 0,
        }
    }

    /// Tells somebody what happens.
    #[must_use]
    pub fn telling(mut self, tell: Tell) -> Self {
        self.tell = tell;
        self
    }

    /// The daemon's figures.
    pub fn metrics(&self) -> Arc<Metrics> {
        Arc::clone(&self.metrics)
    }

    /// Follows the stream. Whatever is under way when `stop` ends is left: it is done by whoever
    /// follows the shard next.
    ///
    /// # Errors
    ///
    /// When the stream, or the table, will not answer until somebody changes something.
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
        poll.min(self.gone_after / 4)
    }

    fn is_drained(&self) -> bool {
        let is_idle = |held: &Held| held.page.is_none() && held.empty_pages >= EMPTY_PAGES;
        self.looked_at.is_some() && self.unheld == 0 && self.held.values().all(is_idle)
    }

    /// Looks at the shards if it is time to, and reads a page of each that is held. Says whether
    /// there was anything to do.
    async fn turn(&mut self) -> Result<bool, StreamError> {
        let now = self.clock.stopwatch();
        let every = LOOK_EVERY.min(self.gone_after / 4);
        if self.looked_at.is_none_or(|at| now.saturating_sub(at) >= every) {
            match self.look(now).await {
                Ok(()) => self.looked_at = Some(now),
                Err(error) if error.kind == StreamErrorKind::Passing => {
                    (self.tell)(Notice::Trouble(error.message));
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
                Ok((shard, Ok(read))) => worked |= self.note(&shard, read),
                Ok((shard, Err(error))) => self.fail(&shard, error)?,
                Err(error) => std::panic::resume_unwind(error.into_panic()),
            }
        }
        self.beat().await?;
        Ok(worked)
    }

    /// Which shards are there, how far they are done, and which of them to take.
    async fn look(&mut self, now: Duration) -> Result<(), StreamError> {
        let shards = self.stream.shards().await?;
        let checkpoints = self.checkpoints().await.map_err(of_table)?;
        self.beats.see(&checkpoints, now);
        let readable = readable(&shards, &checkpoints);
        self.held.retain(|shard, _| shards.iter().any(|one| one.id == *shard));
        let wanted = claims(&readable, &checkpoints, &self.beats, &self.me, now);
        for shard in &wanted {
            if !self.held.contains_key(&shard.id) {
                self.claim(&shard.id, checkpoints.get(&shard.id)).await?;
            }
        }
        let is_unheld = |shard: &&&Shard| {
            !self.held.contains_key(&shard.id) && !self.beats.is_alive(&shard.id, now)
        };
        self.unheld = readable.iter().filter(is_unheld).count();
        self.metrics.set_shards(self.held.len());
        Ok(())
    }

    /// The records of this stream's shards; those of an earlier one say nothing.
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
            let answer = self.table.query(&query).await?;
            for one in answer.items.iter().filter_map(checkpoint::decode) {
                found.insert(one.shard.clone(), one);
            }
            match answer.next {
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
        let until = self.clock.now().saturating_add(KEPT_FOR);
        let label = self.stream.label();
        let update = checkpoint::claim(shard, label, seen, &self.me, until);
        let item = match self.table.update(&update).await {
            Ok(Updated::Done(item, _)) => item,
            // Somebody was faster.
            Ok(Updated::Unmet(..)) => return Ok(()),
            Err(error) => return Err(of_table(error)),
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
        (self.tell)(Notice::Took(shard.to_owned()));
        Ok(())
    }

    /// Takes note of what was read. Says whether it was anything.
    fn note(&mut self, shard: &str, read: Read) -> bool {
        let now = self.clock.stopwatch();
        let Some(held) = self.held.get_mut(shard) else { return false };
        let Read { page, report } = read;
        if page.records.is_empty() {
            held.empty_pages += 1;
        } else {
            held.empty_pages = 0;
        }
        let worked = !page.records.is_empty();
        if report.is_worth_retrying {
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
            (self.tell)(Notice::Batch(report));
        }
        worked
    }

    /// A shard that could not be read.
    fn fail(&mut self, shard: &str, error: StreamError) -> Result<(), StreamError> {
        let now = self.clock.stopwatch();
        let Some(held) = self.held.get_mut(shard) else { return Ok(()) };
        held.iterator = None;
        match error.kind {
            StreamErrorKind::Expired => {}
            StreamErrorKind::Trimmed => {
                held.checkpoint.position = None;
                (self.tell)(Notice::Trimmed(shard.to_owned()));
            }
            // Its children can be read.
            StreamErrorKind::Gone => held.checkpoint.done = true,
            StreamErrorKind::Passing => {
                held.failures += 1;
                held.wait_until = now + retry_wait(held.failures);
                (self.tell)(Notice::Trouble(error.message));
            }
            StreamErrorKind::Lasting => return Err(error),
        }
        Ok(())
    }

    /// Gives a sign of life for each shard where it is time to, and writes down how far it is.
    async fn beat(&mut self) -> Result<(), StreamError> {
        let now = self.clock.stopwatch();
        let is_due = |held: &Held| {
            held.checkpoint.done || now.saturating_sub(held.beat_at) >= self.gone_after / 4
        };
        let due: Vec<String> = self
            .held
            .iter()
            .filter(|(_, held)| is_due(held))
            .map(|(shard, _)| shard.clone())
            .collect();
        for shard in due {
            let Some(held) = self.held.get_mut(&shard) else { continue };
            let until = self.clock.now().saturating_add(KEPT_FOR);
            let update = checkpoint::advance(&held.checkpoint, &self.me, Hold::Keep, until);
            match self.table.update(&update).await {
                Ok(Updated::Done(..)) if held.checkpoint.done => {
                    self.held.remove(&shard);
                    // Its children can be read now.
                    self.looked_at = None;
                    (self.tell)(Notice::Finished(shard));
                }
                Ok(Updated::Done(..)) => held.beat_at = now,
                Ok(Updated::Unmet(..)) => {
                    self.held.remove(&shard);
                    (self.tell)(Notice::Lost(shard));
                }
                Err(error) => match of_table(error) {
                    error if error.kind == StreamErrorKind::Passing => {
                        (self.tell)(Notice::Trouble(error.message));
                    }
                    error => return Err(error),
                },
            }
        }
        Ok(())
    }

    /// Writes down how far every shard is done, and leaves them to others.
    async fn release(&mut self) {
        for (_, held) in std::mem::take(&mut self.held) {
            let until = self.clock.now().saturating_add(KEPT_FOR);
            let update = checkpoint::advance(&held.checkpoint, &self.me, Hold::Release, until);
            // Otherwise others find out by themselves that nobody is there.
            let _ = self.table.update(&update).await;
        }
    }
}

/// A page, and what became of it.
struct Read {
    page: Page,
    report: Report,
}

/// Reads a page, unless there is one, and does what is to be done about it.
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

/// Doubles with each failure.
fn retry_wait(failures: u32) -> Duration {
    (POLL_EVERY / 4 * 2_u32.saturating_pow(failures.min(10))).min(RETRY_WAIT_MAX)
}

fn of_table(error: TableError) -> StreamError {
    let kind = match error.kind {
        TableErrorKind::Unavailable
        | TableErrorKind::Throttled
        | TableErrorKind::PartitionThrottled
        | TableErrorKind::Conflict => StreamErrorKind::Passing,
        TableErrorKind::Denied
        | TableErrorKind::NoTable
        | TableErrorKind::Incompatible
        | TableErrorKind::Rejected => StreamErrorKind::Lasting,
    };
    StreamError { kind, message: format!("the checkpoints cannot be kept: {error}") }
}
