//! The aggregator as a daemon that reads the table's stream itself.
//!
//! The table has a checkpoint for each stream shard: how far it is processed, and which daemon owns
//! it. Several daemons share the stream shards evenly (`plan`), and take over those of a daemon
//! that has crashed. Two daemons that follow the same stream shard for a while do no harm: nothing
//! is booked twice.
//!
//! Every call is a task of its own, within a time limit. So heartbeats go on while a page is processed,
//! and a stream shard that is stuck holds up no other.

#[cfg(feature = "aws")]
mod aws;
mod checkpoints;
#[cfg(feature = "aws")]
mod endpoint;
mod held;
mod kept;
mod metrics;
mod notice;
mod plan;
mod stream;
mod tasks;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::{JoinError, JoinSet};
use zae_limiter_core::{Clock, MAX_CLOCK_SKEW, Timestamp};
use zae_limiter_schema::Table;
pub use zae_limiter_schema::records::checkpoint::TAKEOVER_MAX;
use zae_limiter_schema::records::checkpoint::{Checkpoint, Hold};

use crate::execute::{Aggregator, Report};
use crate::table_clock::TableClock;

#[cfg(feature = "aws")]
pub use aws::AwsStream;
#[cfg(feature = "aws")]
pub use endpoint::serve;
pub use metrics::Metrics;
pub use notice::{Missed, Notice, OnNotice, Unarchived};
pub use plan::{End, StreamShard};
pub use stream::{Begin, Page, Stream, StreamError, StreamErrorKind};

use checkpoints::{Checkpoints, Written};
use held::{Found, Held};
use kept::Kept;
use plan::{
    Heartbeats, begun_after, claims, has_read, new_checkpoint, readable, waiting_checkpoint,
    with_unlisted,
};
use tasks::{Event, Listed, Read, Tasks, archive_again, hand_over, list, read, unless_it_panics};

/// How often the daemon lists the stream shards and reads the checkpoints.
const LIST_EVERY: Duration = Duration::from_secs(5);
/// The pause after a quiet page of an open stream shard.
const POLL_EVERY: Duration = Duration::from_secs(1);
/// The pause after a quiet page while there may be records behind it.
const POLL_SOON: Duration = Duration::from_millis(20);
/// The pause after a call on the checkpoints that failed.
const RETRY_AFTER: Duration = Duration::from_secs(1);
/// The time limit of a call, unless the daemon gets another.
const CALL_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a daemon that stops tries to release its stream shards.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(3);

/// When a daemon ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Until {
    /// When its stop signal completes.
    Stopped,
    /// When all records that the stream has are processed.
    Drained,
}

/// Follows a table's stream.
pub struct Daemon {
    stream: Arc<dyn Stream>,
    /// Those that it has followed before. Audit events in them may still have to be archived.
    earlier: Vec<Arc<dyn Stream>>,
    checkpoints: Checkpoints,
    clock: Arc<dyn Clock>,
    aggregator: Aggregator,
    on_notice: OnNotice,
    metrics: Arc<Metrics>,
    heartbeats: Heartbeats,
    /// The stream shards that this daemon follows, by id.
    held: BTreeMap<String, Held>,
    /// Stream shards that another daemon owns now, by claim, each with a page that is still processed. The
    /// new owner gets the position after it.
    leaving: BTreeMap<u64, Held>,
    /// The stream shards that are being claimed.
    claiming: BTreeSet<String>,
    claims: u64,
    list: List,
    /// The readable stream shards that have no live owner.
    unheld: BTreeSet<String>,
    /// Whether a daemon of this table archives audit events. If this one cannot, it keeps them for that one.
    is_archived: bool,
    /// Whether [`Notice::StreamEnded`] was sent.
    has_ended: bool,
    /// When the table first answered. Before, nothing corrects the clock.
    started_at: Option<Timestamp>,
}

/// When the stream shards are listed.
#[derive(Clone, Copy, Debug)]
enum List {
    /// At this reading of the stopwatch. The flag says whether the last list is still valid.
    Due(Duration, bool),
    /// They are being listed.
    Running,
}

impl fmt::Debug for Daemon {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Daemon").field("me", &self.checkpoints.me).finish_non_exhaustive()
    }
}

impl Daemon {
    /// A daemon that reads `stream` and passes its batches to `aggregator`. `me` identifies it
    /// among other daemons. It takes over a stream shard whose owner has not written a heartbeat
    /// for `takeover_after`, or for longer if the owner itself has a longer one.
    pub fn new(
        stream: Arc<dyn Stream>,
        table: Arc<dyn Table>,
        clock: Arc<dyn Clock>,
        aggregator: Aggregator,
        takeover_after: Duration,
        me: impl Into<String>,
    ) -> Self {
        let me = Arc::from(me.into());
        let clock = TableClock::shared(Arc::clone(&table), clock);
        Self {
            stream,
            earlier: Vec::new(),
            heartbeats: Heartbeats::new(takeover_after),
            checkpoints: Checkpoints {
                table,
                clock: Arc::clone(&clock),
                me,
                takeover_after,
                limit: CALL_TIMEOUT,
                archives: aggregator.has_archive(),
            },
            clock,
            aggregator,
            on_notice: Arc::new(|_| {}),
            metrics: Arc::default(),
            held: BTreeMap::new(),
            leaving: BTreeMap::new(),
            claiming: BTreeSet::new(),
            claims: 0,
            list: List::Due(Duration::ZERO, false),
            unheld: BTreeSet::new(),
            is_archived: false,
            has_ended: false,
            started_at: None,
        }
    }

    /// Sets the callback for notices.
    #[must_use]
    pub fn on_notice(mut self, on_notice: OnNotice) -> Self {
        self.on_notice = on_notice;
        self
    }

    /// Sets the time limit of a call (10 s).
    #[must_use]
    pub fn call_timeout(mut self, limit: Duration) -> Self {
        self.checkpoints.limit = limit;
        self
    }

    /// The daemon's metrics.
    pub fn metrics(&self) -> Arc<Metrics> {
        Arc::clone(&self.metrics)
    }

    /// Follows the stream. When `stop` completes, the daemon abandons the batches in progress. The
    /// next owner of the stream shard processes them again. It ends within 3 s then, even if no call
    /// is answered.
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
        self.started_at = None;
        // Dropped at the end, which aborts what is in progress.
        let mut tasks = Tasks::new();
        let ended = loop {
            self.start(&mut tasks);
            if until == Until::Drained && self.is_drained() {
                break self.all_archived();
            }
            let pause = self.until_next();
            let event = tokio::select! {
                biased;
                () = &mut stop => break Ok(()),
                Some(joined) = tasks.join_next() => joined,
                () = self.clock.sleep(pause) => continue,
            };
            let handled = match event {
                Ok(event) => self.handle(event, until, &mut tasks),
                Err(error) => ended_task(error),
            };
            if let Err(error) = handled {
                break Err(error);
            }
        };
        drop(tasks);
        self.release().await;
        ended
    }

    fn is_drained(&self) -> bool {
        matches!(self.list, List::Due(_, true))
            && self.claiming.is_empty()
            && self.leaving.is_empty()
            && self.unheld.is_empty()
            && self.held.values().all(|held| held.is_idle(self.drains_to()))
    }

    /// A drain of a table in use ends with the records of this time. The bound on clocks makes sure that everything
    /// from before the start is processed.
    fn drains_to(&self) -> Timestamp {
        self.started_at.unwrap_or_else(|| self.clock.now()).saturating_add(MAX_CLOCK_SKEW)
    }

    /// An error if events are not archived. The table's position is before them, so that the next run finds them.
    fn all_archived(&self) -> Result<(), StreamError> {
        let events: usize =
            self.held.values().filter_map(|one| Some(one.kept.as_ref()?.count())).sum();
        let message = match self.checkpoints.archives {
            _ if events == 0 => return Ok(()),
            true => format!(
                "the archive did not take {events} expired audit events; \
                 the stream keeps them for a day: run this again when the archive can be written"
            ),
            false => format!(
                "{events} expired audit events are not archived: others archive those of this table; \
                 the stream keeps them for a day: run this again with the same --archive"
            ),
        };
        Err(StreamError { kind: StreamErrorKind::Transient, message })
    }

    /// How long nothing has to be started.
    fn until_next(&self) -> Duration {
        let list = match self.list {
            List::Due(at, _) => Some(at),
            List::Running => None,
        };
        let shards = self.held.values().flat_map(|held| {
            let read = (!held.is_reading() && !held.checkpoint.done).then_some(held.wait_until);
            let archive = held.kept.as_ref().and_then(Kept::due);
            [read, held.write_due(), archive]
        });
        let due = list.into_iter().chain(shards.flatten()).min();
        let now = self.clock.stopwatch();
        due.map_or(LIST_EVERY, |due| due.saturating_sub(now).max(Duration::from_millis(1)))
    }

    /// Starts everything that is due.
    fn start(&mut self, tasks: &mut Tasks) {
        let now = self.clock.stopwatch();
        if let List::Due(at, _) = self.list
            && at <= now
        {
            let (stream, checkpoints) = (Arc::clone(&self.stream), self.checkpoints.clone());
            let is_read = |(_, held): &(&String, &Held)| held.checkpoint.done;
            let read = self.held.iter().filter(is_read).map(|(id, _)| id.clone()).collect();
            tasks.spawn(async move { Event::Listed(list(&stream, &checkpoints, &read).await) });
            self.list = List::Running;
        }
        for (shard, held) in &mut self.held {
            if !held.is_reading() && !held.checkpoint.done && held.wait_until <= now {
                let stream = stream_of(&self.stream, &self.earlier, &held.checkpoint.stream);
                let aggregator = self.aggregator.clone().keeping_events(self.is_archived);
                let (clock, limit) = (Arc::clone(&self.clock), self.checkpoints.limit);
                let (id, claim, next) = (shard.clone(), held.claim, held.next());
                held.starts_reading(tasks.spawn(async move {
                    let shard = id.clone();
                    let reading =
                        async move { read(&*stream, &aggregator, &*clock, limit, &id, next).await };
                    Event::Read(shard, claim, unless_it_panics(reading).await)
                }));
            }
            let is_due = |kept: &&mut Kept| kept.due().is_some_and(|due| due <= now);
            if let Some(kept) = held.kept.as_mut().filter(is_due) {
                // Without an archive, they wait for another daemon until they are too old.
                let aggregator = self.aggregator.clone().keeping_events(true);
                let events = kept.begin();
                let (shard, claim) = (shard.clone(), held.claim);
                tasks.spawn(async move {
                    Event::Archived(shard, claim, archive_again(aggregator, events).await)
                });
            }
            if held.write_due().is_some_and(|due| due <= now) {
                let (checkpoints, claim) = (self.checkpoints.clone(), held.claim);
                let (sent, stored) = (held.to_store(), held.stored.clone());
                held.is_writing = true;
                tasks.spawn(async move {
                    let written = checkpoints.advance(&sent, stored.as_deref(), Hold::Keep).await;
                    Event::Written(claim, sent, written)
                });
            }
        }
    }

    /// Handles the result of a task.
    fn handle(&mut self, event: Event, until: Until, tasks: &mut Tasks) -> Result<(), StreamError> {
        match event {
            Event::Listed(Ok(listed)) => self.listed(listed, tasks),
            Event::Listed(Err(error)) => {
                self.list = List::Due(self.clock.stopwatch() + RETRY_AFTER, false);
                self.transient(error)?;
            }
            Event::Claimed(shard, end, claimed) => {
                self.claiming.remove(&shard);
                match claimed {
                    Ok(Some(checkpoint)) => self.claimed(shard, checkpoint, end),
                    // Another daemon was first, so there is something to see.
                    Ok(None) => self.list_after(POLL_SOON),
                    Err(error) => {
                        self.list_after(RETRY_AFTER);
                        self.transient(error)?;
                    }
                }
            }
            Event::Read(shard, claim, read) => {
                let Some(held) = self.held.get_mut(&shard).filter(|held| held.claim == claim)
                else {
                    self.leave(claim, read, tasks);
                    return Ok(());
                };
                held.has_read();
                match read {
                    Ok(read) => self.advance(&shard, read, until),
                    Err(error) => self.fail(&shard, error)?,
                }
            }
            Event::Archived(shard, claim, report) => self.archived(&shard, claim, report),
            Event::Written(claim, sent, written) => self.written(claim, &sent, written, tasks)?,
            Event::Noted => {}
        }
        Ok(())
    }

    /// Lists the stream shards again after this pause, or sooner.
    fn list_after(&mut self, pause: Duration) {
        if let List::Due(at, _) = self.list {
            self.list = List::Due(at.min(self.clock.stopwatch() + pause), false);
        }
    }

    /// Claims this daemon's share of what was listed.
    fn listed(&mut self, listed: Listed, tasks: &mut Tasks) {
        let Listed { shards, checkpoints, successor } = listed;
        self.started_at.get_or_insert_with(|| self.clock.now());
        let now = self.clock.stopwatch();
        let every = LIST_EVERY.min(self.checkpoints.takeover_after / 4);
        self.list = List::Due(now + every, true);
        self.heartbeats.observe(&checkpoints, now);
        self.is_archived = plan::is_archived(&checkpoints, self.clock.now());
        let label = self.stream.label();
        let all = with_unlisted(shards, &checkpoints, label);
        let is_read = |id: &str| self.held.get(id).is_some_and(|held| held.checkpoint.done);
        let readable = readable(&all, &checkpoints, label, is_read);
        if let Some(next) = successor.filter(|_| self.has_read_all(&readable, &checkpoints)) {
            (self.on_notice)(Notice::NextStream(next.label().to_owned()));
            self.earlier.push(std::mem::replace(&mut self.stream, next));
            self.has_ended = false;
            self.list = List::Due(now, false);
            return;
        }
        for (id, held) in &mut self.held {
            let listed = all.iter().find(|shard| shard.id == *id);
            held.end = listed.map_or(End::Unlisted, |shard| shard.end.clone());
        }
        let is_mine = |id: &str| self.held.contains_key(id) || self.claiming.contains(id);
        let me = &self.checkpoints.me;
        let mut wanted = claims(&readable, &checkpoints, &self.heartbeats, me, is_mine, now);
        wanted.retain(|shard| !is_mine(&shard.id));
        for shard in wanted {
            self.claiming.insert(shard.id.clone());
            let (own, seen) = (self.checkpoints.clone(), checkpoints.get(&shard.id).cloned());
            let last = seen.as_ref().filter(|_| shard.end == End::Unlisted);
            let at = last.map_or(label, |last| &last.stream);
            let stream = stream_of(&self.stream, &self.earlier, at);
            let new = new_checkpoint(shard, &all, &checkpoints, stream.label(), self.clock.now());
            let (end, begun) = (shard.end.clone(), begun_after(shard, &checkpoints));
            tasks.spawn(async move {
                let claimed = own.claim(&new, seen.as_ref()).await;
                let claimed = claimed.map(|one| one.map(|one| not_before(one, begun)));
                Event::Claimed(new.shard, end, claimed)
            });
        }
        let is_unknown = |shard: &&StreamShard| {
            !checkpoints.contains_key(&shard.id) && !self.claiming.contains(&shard.id)
        };
        for shard in all.iter().filter(is_unknown) {
            let own = self.checkpoints.clone();
            let new = waiting_checkpoint(shard, &all, &checkpoints, label, self.clock.now());
            // Repeated with the next list, if it fails.
            tasks.spawn(async move {
                let _ = own.register(&new).await;
                Event::Noted
            });
        }
        let is_unheld = |shard: &&&StreamShard| {
            !self.held.contains_key(&shard.id) && !self.heartbeats.is_alive(&shard.id, now)
        };
        self.unheld = readable.iter().filter(is_unheld).map(|shard| shard.id.clone()).collect();
        self.metrics.set_stream_shards(self.held.len());
        if readable.is_empty() && self.held.is_empty() && !all.is_empty() && !self.has_ended {
            self.has_ended = true;
            (self.on_notice)(Notice::StreamEnded);
        }
    }

    /// Whether all changes of the stream are processed. Those that read them still archive their audit events: this
    /// daemon, or another one that is alive. The events of one that has crashed have to be read again.
    fn has_read_all(
        &self,
        readable: &[&StreamShard],
        checkpoints: &BTreeMap<String, Checkpoint>,
    ) -> bool {
        let (now, label) = (self.clock.stopwatch(), self.stream.label());
        let is_mine = |shard: &StreamShard| self.held.contains_key(&shard.id);
        let is_kept = |shard: &StreamShard| {
            has_read(checkpoints, shard, label) && self.heartbeats.is_alive(&shard.id, now)
        };
        self.held.values().all(|held| held.checkpoint.done)
            && readable.iter().all(|shard| is_mine(shard) || is_kept(shard))
    }

    fn claimed(&mut self, shard: String, checkpoint: Checkpoint, end: End) {
        self.claims += 1;
        let beat_due = self.clock.stopwatch() + self.checkpoints.takeover_after / 4;
        self.unheld.remove(&shard);
        self.held.insert(shard.clone(), Held::new(self.claims, checkpoint, end, beat_due));
        self.metrics.set_stream_shards(self.held.len());
        (self.on_notice)(Notice::Claimed(shard));
    }

    /// Advances a stream shard past a processed page, or schedules a retry of the page.
    fn advance(&mut self, shard: &str, read: Read, until: Until) {
        let (now, drains_to) = (self.clock.stopwatch(), self.drains_to());
        let Some(held) = self.held.get_mut(shard) else { return };
        let Read { page, mut report } = read;
        if held.takes_missed(self.clock.now()) {
            let after = held.checkpoint.read_to;
            self.miss(shard.to_owned(), after);
        }
        let Some(held) = self.held.get_mut(shard) else { return };
        let (is_empty, is_quiet) = (page.records.is_empty(), held::is_quiet(&page.records));
        let events = std::mem::take(&mut report.unarchived);
        // With a retry of the whole page the events come again.
        let can_go_on =
            !report.is_retriable && (events.is_empty() || held.keep(&page, events, now));
        if !can_go_on {
            held.repeat(page, now);
            self.metrics.retry();
        } else {
            held.advance(page, self.clock.now());
            if is_quiet {
                let is_drained = until != Until::Drained || held.is_idle(drains_to);
                let is_soon = !held.is_at_end() || !is_drained;
                held.wait_until = now + if is_soon { POLL_SOON } else { POLL_EVERY };
            }
            self.metrics.add(&report);
        }
        if !is_empty {
            (self.on_notice)(Notice::Batch(report));
        }
    }

    /// Handles the outcome of archiving events again.
    fn archived(&mut self, shard: &str, claim: u64, mut report: Report) {
        let now = self.clock.stopwatch();
        let held = self.held.get_mut(shard).filter(|held| held.claim == claim);
        let Some(held) = held else { return };
        let Some(kept) = &mut held.kept else { return };
        if !kept.is_done_without(&std::mem::take(&mut report.unarchived), now) {
            self.metrics.retry();
        }
        if let Some((events, since)) = kept.take_too_old(self.clock.now()) {
            self.metrics.missed();
            let shard = shard.to_owned();
            (self.on_notice)(Notice::Unarchived(Unarchived { shard, events, since }));
        }
        if kept.is_empty() {
            held.kept = None;
        }
        self.metrics.add(&report);
        (self.on_notice)(Notice::Batch(report));
    }

    /// Handles an error of a stream shard.
    fn fail(&mut self, shard: &str, error: StreamError) -> Result<(), StreamError> {
        let now = self.clock.stopwatch();
        let Some(held) = self.held.get_mut(shard) else { return Ok(()) };
        let read_to = held.checkpoint.read_to;
        match error.kind {
            StreamErrorKind::Expired => held.begin_again(now),
            StreamErrorKind::Trimmed => {
                held.skip_to_oldest(now, self.clock.now());
                self.miss(shard.to_owned(), read_to);
            }
            StreamErrorKind::NotFound => {
                // Done, so that its children can be read.
                held.finish(self.clock.now());
                self.miss(shard.to_owned(), read_to);
            }
            StreamErrorKind::Transient | StreamErrorKind::Permanent => {
                held.back_off(now);
                self.transient(error)?;
            }
        }
        Ok(())
    }

    fn miss(&self, shard: String, after: Option<Timestamp>) {
        self.metrics.missed();
        (self.on_notice)(Notice::Missed(Missed { shard, after, before: self.clock.now() }));
    }

    /// Reports a transient error. Returns any other.
    fn transient(&self, error: StreamError) -> Result<(), StreamError> {
        if error.kind != StreamErrorKind::Transient {
            return Err(error);
        }
        self.metrics.error();
        (self.on_notice)(Notice::TransientError(error.message));
        Ok(())
    }

    /// Handles the outcome of writing a checkpoint.
    fn written(
        &mut self,
        claim: u64,
        sent: &Checkpoint,
        written: Result<Written, StreamError>,
        tasks: &mut Tasks,
    ) -> Result<(), StreamError> {
        let now = self.clock.stopwatch();
        let Some(held) = self.held.get_mut(&sent.shard).filter(|held| held.claim == claim) else {
            return Ok(());
        };
        held.is_writing = false;
        match written {
            Ok(Written::Done) if sent.done => {
                self.held.remove(&sent.shard);
                // Its children can be read now.
                self.list_after(POLL_SOON);
                (self.on_notice)(Notice::Finished(sent.shard.clone()));
            }
            Ok(Written::Done) => {
                held.stored.clone_from(&sent.position);
                held.beat_due = now + self.checkpoints.takeover_after / 4;
            }
            Ok(Written::Changed(found)) => {
                match held.compare(found.clone(), &self.checkpoints.me) {
                    Found::Mine => held.beat_due = now,
                    Found::Lost { is_behind } => self.lose(&sent.shard, found, is_behind, tasks),
                }
            }
            Err(error) => {
                held.write_after = now + RETRY_AFTER.min(self.checkpoints.takeover_after / 8);
                self.transient(error)?;
            }
        }
        Ok(())
    }

    /// Another daemon owns the stream shard. This one finishes its page, then hands over its position.
    fn lose(&mut self, shard: &str, found: Option<Checkpoint>, is_behind: bool, tasks: &mut Tasks) {
        let Some(held) = self.held.remove(shard) else { return };
        // The new owner reads again what is not archived.
        let can_hand_over = is_behind && held.kept.is_none();
        if held.is_reading() {
            self.leaving.insert(held.claim, held);
        } else if let Some(found) = found.filter(|_| can_hand_over) {
            hand_over(&self.checkpoints, held, Some(found), tasks);
        }
        self.list_after(POLL_SOON);
        (self.on_notice)(Notice::Lost(shard.to_owned()));
    }

    /// Hands over the position after a page that was in progress when the stream shard was lost.
    fn leave(&mut self, claim: u64, read: Result<Read, StreamError>, tasks: &mut Tasks) {
        let Some(mut held) = self.leaving.remove(&claim) else { return };
        let Ok(Read { page, report }) = read else { return };
        let is_archived = held.kept.is_none() && report.unarchived.is_empty();
        if is_archived && !report.is_retriable && !page.records.is_empty() {
            // With a position, the new owner would not notice.
            if held.takes_missed(self.clock.now()) {
                self.miss(held.checkpoint.shard.clone(), held.checkpoint.read_to);
            }
            held.advance(page, self.clock.now());
            self.metrics.add(&report);
            (self.on_notice)(Notice::Batch(report));
            hand_over(&self.checkpoints, held, None, tasks);
        }
    }

    /// Writes all checkpoints and gives up their ownership.
    async fn release(&mut self) {
        (self.leaving, self.claiming) = (BTreeMap::new(), BTreeSet::new());
        self.list = List::Due(Duration::ZERO, false);
        let mut releasing = JoinSet::new();
        for (_, mut held) in std::mem::take(&mut self.held) {
            held.stop_reading();
            let own = self.checkpoints.clone();
            // If this fails, other daemons take over once the heartbeat times out.
            releasing.spawn(async move {
                let stored = held.stored.as_deref();
                let Ok(Written::Changed(found)) =
                    own.advance(&held.to_store(), stored, Hold::Release).await
                else {
                    return;
                };
                // An earlier owner has left its position, or a heartbeat was written without a reply.
                if held.compare(found, &own.me) == Found::Mine {
                    let stored = held.stored.as_deref();
                    let _ = own.advance(&held.to_store(), stored, Hold::Release).await;
                }
            });
        }
        tokio::select! {
            biased;
            () = async { while releasing.join_next().await.is_some() {} } => {}
            () = self.clock.sleep(RELEASE_TIMEOUT) => {}
        }
    }
}

/// The checkpoint of a stream shard that has begun after this time. It counts while there is no position.
fn not_before(checkpoint: Checkpoint, begun: Option<Timestamp>) -> Checkpoint {
    Checkpoint { seen_at: checkpoint.seen_at.max(begun), ..checkpoint }
}

/// The stream of this label. One that the daemon has not followed is taken for the current one.
fn stream_of(
    current: &Arc<dyn Stream>,
    earlier: &[Arc<dyn Stream>],
    label: &str,
) -> Arc<dyn Stream> {
    Arc::clone(earlier.iter().find(|one| one.label() == label).unwrap_or(current))
}

/// A task that was aborted is over. Only a fault of the daemon itself can panic here: those of pages are caught.
fn ended_task(error: JoinError) -> Result<(), StreamError> {
    match error.try_into_panic() {
        Ok(panic) => std::panic::resume_unwind(panic),
        Err(_aborted) => Ok(()),
    }
}
