//! Carries out the effects of a batch, several writes at a time.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;
use zae_limiter_core::{BoxFuture, Clock, UsageKey};
use zae_limiter_schema::{Table, TableError, TableErrorKind, TableTime, Update, Updated};

use crate::archive::{Archive, ArchiveFile, AuditLine};
use crate::change::{BucketChange, Change, change_of};
use crate::effects::{PendingSplit, UsageEffect, effects_of};
use crate::event::{StreamRecord, Unreadable};
use crate::settings::Settings;
use crate::table_clock::TableClock;

/// The most writes that are in flight at once.
const IN_FLIGHT_MAX: usize = 16;
/// How often a write is tried.
const ATTEMPTS_MAX: u32 = 5;
/// The wait before the first retry. It doubles with each further one.
const FIRST_WAIT: Duration = Duration::from_millis(50);
/// The time limit of one try.
const UPDATE_TIMEOUT: Duration = Duration::from_secs(5);
/// The time limit of storing a file of the archive, and of splitting a bucket.
const LONG_TIMEOUT: Duration = Duration::from_secs(30);

/// Why events were not archived by an aggregator without an archive.
const NO_ARCHIVE: &str = "audit events were not archived: this aggregator has no archive, and another one of the table \
                          has; give all of them the same one (--archive)";

/// Splits a bucket into twice as many shards.
pub trait Split: fmt::Debug + Send + Sync + 'static {
    /// Splits the bucket, unless it no longer has `from` shards. Returns whether it did.
    fn split<'a>(&'a self, pending: &'a PendingSplit) -> BoxFuture<'a, Result<bool, TableError>>;
}

/// Splits no buckets: their clients split them when necessary.
#[derive(Clone, Copy, Debug, Default)]
pub struct NeverSplit;

impl Split for NeverSplit {
    fn split<'a>(&'a self, _split: &'a PendingSplit) -> BoxFuture<'a, Result<bool, TableError>> {
        Box::pin(async { Ok(false) })
    }
}

/// The outcome of a batch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Records in the batch.
    pub processed: u64,
    /// Usage records that were written.
    pub snapshots_updated: u64,
    /// Buckets that were refilled.
    pub refills_written: u64,
    /// Buckets that were split.
    pub buckets_split: u64,
    /// Shards of split buckets to which the new shard count was announced.
    pub shards_announced: u64,
    /// Audit events that were archived.
    pub events_archived: u64,
    /// Records about items that are not a limiter's.
    pub foreign: u64,
    /// What failed, one sentence each.
    pub errors: Vec<String>,
    /// The sequence numbers of the records to deliver again, in the order of the batch.
    pub failed: Vec<String>,
    /// Whether a retry of the batch can succeed: a record failed, and the record itself is not the reason. Audit
    /// events do not count.
    pub is_retriable: bool,
    /// Audit events that could not be archived. [`Aggregator::archive_again`] needs no second delivery.
    pub unarchived: Vec<AuditLine>,
}

/// Processes batches of a table's changes.
#[derive(Clone, Debug)]
pub struct Aggregator {
    pub(crate) table: Arc<dyn Table>,
    clock: Arc<dyn Clock>,
    settings: Settings,
    archive: Option<Arc<dyn Archive>>,
    /// Whether expired audit events count as not archived, if there is no archive.
    keeps_events: bool,
    split: Arc<dyn Split>,
}

impl Aggregator {
    /// An aggregator that archives no audit events and splits no buckets.
    pub fn new(table: Arc<dyn Table>, clock: Arc<dyn Clock>, settings: Settings) -> Self {
        let clock = TableClock::shared(Arc::clone(&table), clock);
        let split = Arc::new(NeverSplit);
        Self { table, clock, settings, archive: None, keeps_events: false, split }
    }

    /// Stores expired audit events in that archive.
    #[must_use]
    pub fn archive(mut self, archive: Arc<dyn Archive>) -> Self {
        self.archive = Some(archive);
        self
    }

    pub(crate) fn has_archive(&self) -> bool {
        self.archive.is_some()
    }

    /// Whether another aggregator of the table archives audit events. If this one does not, it reports them as not
    /// archived.
    pub(crate) fn keeping_events(mut self, keeps: bool) -> Self {
        self.keeps_events = keeps;
        self
    }

    /// Splits buckets that are written too often.
    #[must_use]
    pub fn split(mut self, split: Arc<dyn Split>) -> Self {
        self.split = split;
        self
    }

    /// Processes a batch. It may be delivered again, whole or in part: nothing is booked twice.
    pub async fn process(&self, records: Vec<Result<StreamRecord, Unreadable>>) -> Report {
        let mut batch = Batch::read(records);
        let mut effects = effects_of(&batch.changes, &self.settings, self.clock.now());
        if self.table.time() == TableTime::NotYet {
            // Nothing tells yet whether the clock is right. The next batch refills.
            effects.refills.clear();
        }
        let changes = Arc::new(std::mem::take(&mut batch.changes));
        let mut writes = Writes { running: JoinSet::new(), batch };
        for one in effects.announcements {
            let own = self.clone();
            writes.start(async move { own.announce(&one.update, one.change).await }).await;
        }
        for update in effects.refills {
            let own = self.clone();
            writes.start(async move { own.refill(&update).await }).await;
        }
        for pending in effects.splits {
            let own = self.clone();
            writes.start(async move { own.split_bucket(&pending).await }).await;
        }
        self.book(effects.usage, &changes, &mut writes).await;
        self.start_archiving(&mut writes).await;
        writes.finish().await
    }

    /// Archives events that could not be archived before.
    pub async fn archive_again(&self, events: Vec<AuditLine>) -> Report {
        let mut batch = Batch::read(Vec::new());
        batch.sequence_numbers = vec![None; events.len()];
        batch.expired = events.into_iter().enumerate().collect();
        let mut writes = Writes { running: JoinSet::new(), batch };
        self.start_archiving(&mut writes).await;
        writes.finish().await
    }

    async fn start_archiving(&self, writes: &mut Writes) {
        let expired = std::mem::take(&mut writes.batch.expired);
        let Some(archive) = &self.archive else {
            if self.keeps_events && !expired.is_empty() {
                writes.batch.note(Done::NotArchived(NO_ARCHIVE.to_owned(), expired));
            }
            return;
        };
        for (file, events) in files(expired) {
            let (archive, clock) = (Arc::clone(archive), Arc::clone(&self.clock));
            writes.start(async move { store(&*archive, &*clock, &file, events).await }).await;
        }
    }

    /// Announces a split to a shard. The condition fails if the shard does not exist or has the new
    /// count already: both are fine.
    async fn announce(&self, update: &Update, change: usize) -> Done {
        match self.update_with_retries(update).await {
            Ok(Updated::Done(..)) => Done::Announced,
            Ok(Updated::Unmet(..)) => Done::Nothing,
            Err(error) => {
                let message = format!("a bucket's split was not announced to a shard: {error}");
                Done::Failed(message, vec![change], is_retriable(&error))
            }
        }
    }

    /// Refills a bucket, without retries: the next acquire refills it if necessary.
    async fn refill(&self, update: &Update) -> Done {
        match self.update(update).await {
            Ok(Updated::Done(..)) => Done::Refilled,
            Ok(Updated::Unmet(..)) => Done::Nothing,
            Err(error) => Done::Missed(format!("a bucket was not refilled: {error}")),
        }
    }

    /// Splits a bucket, without retries: if it stays hot, the next batch shows it again.
    async fn split_bucket(&self, pending: &PendingSplit) -> Done {
        let error = tokio::select! {
            split = self.split.split(pending) => match split {
                Ok(true) => return Done::Split,
                Ok(false) => return Done::Nothing,
                Err(error) => error.to_string(),
            },
            () = self.clock.sleep(LONG_TIMEOUT) => {
                format!("the table did not answer within {} s", LONG_TIMEOUT.as_secs())
            }
        };
        Done::Missed(format!("a bucket was not split: {error}"))
    }

    /// Makes an update that is safe to repeat, with retries after transient errors.
    pub(crate) async fn update_with_retries(&self, update: &Update) -> Result<Updated, TableError> {
        self.with_retries(|| self.table.update(update)).await
    }

    /// Makes a call that is safe to repeat, with retries after transient errors.
    pub(crate) async fn with_retries<'a, T>(
        &self,
        call: impl Fn() -> BoxFuture<'a, Result<T, TableError>>,
    ) -> Result<T, TableError> {
        let mut wait = FIRST_WAIT;
        for _ in 1..ATTEMPTS_MAX {
            match self.within_limit(call()).await {
                Err(error) if is_transient(&error) => self.clock.sleep(wait).await,
                result => return result,
            }
            wait *= 2;
        }
        self.within_limit(call()).await
    }

    /// Makes an update, within the time limit.
    async fn update(&self, update: &Update) -> Result<Updated, TableError> {
        self.within_limit(self.table.update(update)).await
    }

    async fn within_limit<T>(
        &self,
        call: BoxFuture<'_, Result<T, TableError>>,
    ) -> Result<T, TableError> {
        tokio::select! {
            result = call => result,
            () = self.clock.sleep(UPDATE_TIMEOUT) => {
                let seconds = UPDATE_TIMEOUT.as_secs();
                let message = format!("the table did not answer within {seconds} s");
                Err(TableError::new(TableErrorKind::Unavailable, message).maybe_applied())
            }
        }
    }
}

/// Whether the same write may succeed soon, with nobody changing anything.
pub(crate) fn is_transient(error: &TableError) -> bool {
    match error.kind {
        TableErrorKind::Unavailable
        | TableErrorKind::Throttled
        | TableErrorKind::PartitionThrottled
        | TableErrorKind::Conflict => true,
        TableErrorKind::Denied
        | TableErrorKind::NoTable
        | TableErrorKind::Incompatible
        | TableErrorKind::Rejected => false,
    }
}

/// Whether the same record can succeed later, perhaps after an operator has fixed something.
pub(crate) fn is_retriable(error: &TableError) -> bool {
    error.kind != TableErrorKind::Rejected
}

/// Expired events, each with the index of its record in the batch.
type Expired = Vec<(usize, AuditLine)>;

/// The files of a batch's expired events, each with its events.
fn files(expired: Expired) -> Vec<(ArchiveFile, Expired)> {
    let mut days: BTreeMap<String, Expired> = BTreeMap::new();
    for (at, line) in expired {
        days.entry(line.day.clone()).or_default().push((at, line));
    }
    let file = |events: Expired| {
        let lines = events.iter().map(|(_, line)| line.clone());
        ArchiveFile::of(lines).into_iter().next().map(|file| (file, events))
    };
    days.into_values().filter_map(file).collect()
}

async fn store(
    archive: &dyn Archive,
    clock: &dyn Clock,
    file: &ArchiveFile,
    events: Expired,
) -> Done {
    let error = tokio::select! {
        stored = archive.put(&file.name, file.bytes()) => match stored {
            Ok(()) => return Done::Archived(file.lines.len()),
            Err(error) => error.to_string(),
        },
        () = clock.sleep(LONG_TIMEOUT) => {
            format!("the archive did not answer within {} s", LONG_TIMEOUT.as_secs())
        }
    };
    Done::NotArchived(format!("audit events were not archived: {error}"), events)
}

/// The outcome of one effect.
pub(crate) enum Done {
    Nothing,
    Booked,
    /// The usage record does not exist.
    Absent(UsageEffect),
    /// The usage record has some of the changes already. The number is that of writes that added others.
    Again(UsageKey, u64),
    /// These usage records were created. The others must be tried again.
    Created(BTreeSet<UsageKey>, Vec<UsageEffect>),
    Announced,
    Refilled,
    Split,
    Archived(usize),
    /// Failed, but does not need a second delivery.
    Missed(String),
    /// Failed: these changes must be delivered again. The flag is for [`Report::is_retriable`].
    Failed(String, Vec<usize>, bool),
    /// Failed: these events must be archived again.
    NotArchived(String, Expired),
}

/// A batch whose records are classified.
pub(crate) struct Batch {
    sequence_numbers: Vec<Option<String>>,
    changes: Vec<BucketChange>,
    /// For each change, the index of its record.
    records: Vec<usize>,
    expired: Expired,
    failed: BTreeSet<usize>,
    /// Usage whose records do not exist.
    pub(crate) absent: Vec<UsageEffect>,
    /// Usage records that were created, perhaps when the batch was delivered before.
    pub(crate) created: BTreeSet<UsageKey>,
    /// Usage that must be tried again.
    pub(crate) contested: Vec<UsageEffect>,
    report: Report,
}

impl Batch {
    fn read(records: Vec<Result<StreamRecord, Unreadable>>) -> Self {
        let mut batch = Self {
            sequence_numbers: Vec::with_capacity(records.len()),
            changes: Vec::with_capacity(records.len()),
            records: Vec::with_capacity(records.len()),
            expired: Vec::new(),
            failed: BTreeSet::new(),
            absent: Vec::new(),
            created: BTreeSet::new(),
            contested: Vec::new(),
            report: Report::default(),
        };
        for (at, record) in records.into_iter().enumerate() {
            batch.report.processed += 1;
            let (number, change) = match record {
                Ok(record) => (Some(record.sequence_number.clone()), change_of(record)),
                Err(unreadable) => (unreadable.sequence_number, Err(unreadable.message)),
            };
            match change {
                Ok(Change::Bucket(change)) => {
                    batch.changes.push(change);
                    batch.records.push(at);
                }
                Ok(Change::Expired(line)) => batch.expired.push((at, line)),
                Ok(Change::Other) => {}
                Ok(Change::Foreign) => batch.report.foreign += 1,
                Err(message) => {
                    let name = number.as_deref().unwrap_or("without a sequence number");
                    batch.report.errors.push(format!("record {name}: {message}"));
                    batch.failed.insert(at);
                }
            }
            batch.sequence_numbers.push(number);
        }
        batch
    }

    pub(crate) fn note(&mut self, done: Done) {
        let report = &mut self.report;
        match done {
            Done::Nothing => {}
            Done::Booked => report.snapshots_updated += 1,
            Done::Again(key, writes) => {
                report.snapshots_updated += writes;
                self.created.insert(key);
            }
            Done::Absent(usage) => self.absent.push(usage),
            Done::Created(mut keys, rest) => {
                report.snapshots_updated += keys.len() as u64;
                self.created.append(&mut keys);
                self.contested.extend(rest);
            }
            Done::Announced => report.shards_announced += 1,
            Done::Refilled => report.refills_written += 1,
            Done::Split => report.buckets_split += 1,
            Done::Archived(events) => {
                report.events_archived += u64::try_from(events).unwrap_or(u64::MAX);
            }
            Done::Missed(message) => report.errors.push(message),
            Done::Failed(message, changes, is_retriable) => {
                report.errors.push(message);
                report.is_retriable |= is_retriable;
                self.failed.extend(changes.into_iter().map(|change| self.records[change]));
            }
            Done::NotArchived(message, events) => {
                report.errors.push(message);
                for (at, line) in events {
                    self.failed.insert(at);
                    report.unarchived.push(line);
                }
            }
        }
    }
}

/// The writes of a batch that are in flight. Dropping it aborts them.
pub(crate) struct Writes {
    running: JoinSet<Done>,
    pub(crate) batch: Batch,
}

impl Writes {
    pub(crate) async fn start(&mut self, write: impl Future<Output = Done> + Send + 'static) {
        while self.running.len() >= IN_FLIGHT_MAX {
            self.wait_for_one().await;
        }
        self.running.spawn(write);
    }

    async fn wait_for_one(&mut self) {
        match self.running.join_next().await {
            Some(Ok(done)) => self.batch.note(done),
            // Only a panic can fail a task: nothing aborts one.
            Some(Err(error)) => std::panic::resume_unwind(error.into_panic()),
            None => {}
        }
    }

    pub(crate) async fn wait_for_all(&mut self) {
        while !self.running.is_empty() {
            self.wait_for_one().await;
        }
    }

    async fn finish(mut self) -> Report {
        self.wait_for_all().await;
        let Batch { mut report, failed, mut sequence_numbers, .. } = self.batch;
        // A record without a sequence number cannot be requested again.
        report.failed = failed.into_iter().filter_map(|at| sequence_numbers[at].take()).collect();
        report
    }
}
