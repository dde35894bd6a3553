//! Carries out the effects of a batch, several writes at a time.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;
use zae_limiter_core::{BoxFuture, Clock};
use zae_limiter_schema::{Table, TableError, TableErrorKind, Update, Updated};

use crate::archive::{Archive, ArchiveFile, AuditLine};
use crate::change::{BucketChange, Change, change_of};
use crate::effects::{PendingSplit, UsageEffect, effects_of};
use crate::event::{StreamRecord, Unreadable};
use crate::settings::Settings;

/// The most writes that are in flight at once.
const IN_FLIGHT_MAX: usize = 16;
/// How often a write is tried.
const ATTEMPTS_MAX: u32 = 5;
/// The wait before the first retry. It doubles with each further one.
const FIRST_WAIT: Duration = Duration::from_millis(50);
/// The time limit of one try.
const UPDATE_TIMEOUT: Duration = Duration::from_secs(5);
/// How often a booking is computed again because others have written the same record.
const BOOKINGS_MAX: u32 = 16;

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
    /// Whether a retry can succeed: a record failed, and the record itself is not the reason.
    pub is_retriable: bool,
}

/// Processes batches of a table's changes.
#[derive(Clone, Debug)]
pub struct Aggregator {
    table: Arc<dyn Table>,
    clock: Arc<dyn Clock>,
    settings: Settings,
    archive: Option<Arc<dyn Archive>>,
    split: Arc<dyn Split>,
}

impl Aggregator {
    /// An aggregator that archives no audit events and splits no buckets.
    pub fn new(table: Arc<dyn Table>, clock: Arc<dyn Clock>, settings: Settings) -> Self {
        Self { table, clock, settings, archive: None, split: Arc::new(NeverSplit) }
    }

    /// Stores expired audit events in that archive.
    #[must_use]
    pub fn archive(mut self, archive: Arc<dyn Archive>) -> Self {
        self.archive = Some(archive);
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
        let effects = effects_of(&batch.changes, &self.settings, self.clock.now());
        let changes = Arc::new(std::mem::take(&mut batch.changes));
        let mut writes = Writes { running: JoinSet::new(), batch };
        for usage in effects.usage {
            let (own, changes) = (self.clone(), Arc::clone(&changes));
            writes.start(async move { own.book(&usage, &changes).await }).await;
        }
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
        if let Some(archive) = &self.archive {
            for (file, lines) in files(std::mem::take(&mut writes.batch.expired)) {
                let archive = Arc::clone(archive);
                writes.start(async move { store(&*archive, &file, lines).await }).await;
            }
        }
        writes.finish().await
    }

    /// Books what the record lacks. The condition of the write makes a retry safe, even after a
    /// lost reply.
    async fn book(&self, usage: &UsageEffect, changes: &[BucketChange]) -> Done {
        let mut item = None;
        for _ in 0..BOOKINGS_MAX {
            let Some(booking) = usage.booking(changes, item.as_ref()) else { return Done::Nothing };
            match self.update_with_retries(&booking.update()).await {
                Ok(Updated::Done(..)) => return Done::Booked,
                Ok(Updated::Unmet(found, _)) => item = found,
                Err(error) => {
                    let message = format!("usage was not booked: {error}");
                    return Done::Failed(message, usage.changes.clone(), is_retriable(&error));
                }
            }
        }
        let message =
            format!("usage was not booked: {BOOKINGS_MAX} conflicts with other writers in a row");
        Done::Failed(message, usage.changes.clone(), true)
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
        match self.split.split(pending).await {
            Ok(true) => Done::Split,
            Ok(false) => Done::Nothing,
            Err(error) => Done::Missed(format!("a bucket was not split: {error}")),
        }
    }

    /// Makes an update that is safe to repeat, with retries after transient errors.
    async fn update_with_retries(&self, update: &Update) -> Result<Updated, TableError> {
        let mut wait = FIRST_WAIT;
        for _ in 1..ATTEMPTS_MAX {
            match self.update(update).await {
                Err(error) if is_transient(&error) => self.clock.sleep(wait).await,
                result => return result,
            }
            wait *= 2;
        }
        self.update(update).await
    }

    /// Makes an update, within the time limit.
    async fn update(&self, update: &Update) -> Result<Updated, TableError> {
        tokio::select! {
            result = self.table.update(update) => result,
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
fn is_retriable(error: &TableError) -> bool {
    error.kind != TableErrorKind::Rejected
}

/// The files of a batch's expired events, each with the indexes of its records in the batch.
fn files(expired: Vec<(usize, AuditLine)>) -> Vec<(ArchiveFile, Vec<usize>)> {
    let days: BTreeSet<String> = expired.iter().map(|(_, line)| line.day.clone()).collect();
    let mut files = Vec::new();
    for day in days {
        let (mut lines, mut places) = (Vec::new(), Vec::new());
        for (at, line) in expired.iter().filter(|(_, line)| line.day == day) {
            lines.push(line.clone());
            places.push(*at);
        }
        files.extend(ArchiveFile::of(lines).into_iter().map(|file| (file, places.clone())));
    }
    files
}

async fn store(archive: &dyn Archive, file: &ArchiveFile, places: Vec<usize>) -> Done {
    match archive.put(&file.name, file.bytes()).await {
        Ok(()) => Done::Archived(file.lines.len()),
        Err(error) => Done::NotArchived(format!("audit events were not archived: {error}"), places),
    }
}

/// The outcome of one effect.
enum Done {
    Nothing,
    Booked,
    Announced,
    Refilled,
    Split,
    Archived(usize),
    /// Failed, but does not need a second delivery.
    Missed(String),
    /// Failed: these changes must be delivered again. The flag is for [`Report::is_retriable`].
    Failed(String, Vec<usize>, bool),
    /// Failed: these records must be delivered again.
    NotArchived(String, Vec<usize>),
}

/// A batch whose records are classified.
struct Batch {
    sequence_numbers: Vec<Option<String>>,
    changes: Vec<BucketChange>,
    /// For each change, the index of its record.
    records: Vec<usize>,
    expired: Vec<(usize, AuditLine)>,
    failed: BTreeSet<usize>,
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

    fn note(&mut self, done: Done) {
        let report = &mut self.report;
        match done {
            Done::Nothing => {}
            Done::Booked => report.snapshots_updated += 1,
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
            Done::NotArchived(message, places) => {
                report.errors.push(message);
                report.is_retriable = true;
                self.failed.extend(places);
            }
        }
    }
}

/// The writes of a batch that are in flight. Dropping it aborts them.
struct Writes {
    running: JoinSet<Done>,
    batch: Batch,
}

impl Writes {
    async fn start(&mut self, write: impl Future<Output = Done> + Send + 'static) {
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

    async fn finish(mut self) -> Report {
        while !self.running.is_empty() {
            self.wait_for_one().await;
        }
        let Batch { mut report, failed, mut sequence_numbers, .. } = self.batch;
        // A record without a sequence number cannot be requested again.
        report.failed = failed.into_iter().filter_map(|at| sequence_numbers[at].take()).collect();
        report
    }
}
