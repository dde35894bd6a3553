//! Doing what is to be done, several writes at a time.

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

/// How many writes are under way at once.
const IN_FLIGHT_MAX: usize = 16;
/// How often a write is tried, and how long the first wait in between is.
const ATTEMPTS_MAX: u32 = 5;
const FIRST_WAIT: Duration = Duration::from_millis(50);
/// How long an answer is waited for.
const PATIENCE: Duration = Duration::from_secs(5);
/// How often a booking is merged anew because others book to the same record.
const BOOKINGS_MAX: u32 = 16;

/// Splits a bucket into twice as many shards.
pub trait Split: fmt::Debug + Send + Sync + 'static {
    /// Splits it, unless it is split otherwise than into `from` shards by now. Says whether it did.
    fn split<'a>(&'a self, pending: &'a PendingSplit) -> BoxFuture<'a, Result<bool, TableError>>;
}

/// Leaves buckets as they are: their clients split them when they have to.
#[derive(Clone, Copy, Debug, Default)]
pub struct LeaveWhole;

impl Split for LeaveWhole {
    fn split<'a>(&'a self, _split: &'a PendingSplit) -> BoxFuture<'a, Result<bool, TableError>> {
        Box::pin(async { Ok(false) })
    }
}

/// What became of a batch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Records of the batch.
    pub processed: u64,
    /// Usage records that were written.
    pub snapshots_updated: u64,
    /// Buckets that were refilled.
    pub refills_written: u64,
    /// Buckets that were split.
    pub buckets_split: u64,
    /// Shards of split buckets that were told so.
    pub shards_told: u64,
    /// Audit events that were kept.
    pub events_archived: u64,
    /// Records that are none of the limiter's.
    pub foreign: u64,
    /// What went wrong, one sentence each.
    pub errors: Vec<String>,
    /// The sequence numbers of the records that have to come again, in the order of the batch.
    pub failed: Vec<String>,
    /// Whether records failed for reasons that do not lie in the records.
    pub is_worth_retrying: bool,
}

/// Takes batches of a table's changes, and does what is to be done about them.
#[derive(Clone, Debug)]
pub struct Aggregator {
    table: Arc<dyn Table>,
    clock: Arc<dyn Clock>,
    settings: Settings,
    archive: Option<Arc<dyn Archive>>,
    split: Arc<dyn Split>,
}

impl Aggregator {
    /// An aggregator that keeps no audit events and splits no buckets.
    pub fn new(table: Arc<dyn Table>, clock: Arc<dyn Clock>, settings: Settings) -> Self {
        Self { table, clock, settings, archive: None, split: Arc::new(LeaveWhole) }
    }

    /// Keeps expired audit events there.
    #[must_use]
    pub fn archive(mut self, archive: Arc<dyn Archive>) -> Self {
        self.archive = Some(archive);
        self
    }

    /// Has buckets that are written too often split.
    #[must_use]
    pub fn split(mut self, split: Arc<dyn Split>) -> Self {
        self.split = split;
        self
    }

    /// Does what is to be done about a batch. It may be delivered again, whole or in shards: nothing
    /// is booked twice.
    pub async fn process(&self, records: Vec<Result<StreamRecord, Unreadable>>) -> Report {
        let mut batch = Batch::read(records);
        let effects = effects_of(&batch.changes, &self.settings, self.clock.now());
        let changes = Arc::new(std::mem::take(&mut batch.changes));
        let mut writes = Writes { running: JoinSet::new(), batch };
        for usage in effects.usage {
            let (own, changes) = (self.clone(), Arc::clone(&changes));
            writes.start(async move { own.book(&usage, &changes).await }).await;
        }
        for told in effects.shard_counts {
            let own = self.clone();
            writes.start(async move { own.tell(&told.update, told.change).await }).await;
        }
        for update in effects.refills {
            let own = self.clone();
            writes.start(async move { own.refill(&update).await }).await;
        }
        for pending in effects.splits {
            let own = self.clone();
            writes.start(async move { own.double(&pending).await }).await;
        }
        if let Some(archive) = &self.archive {
            for (file, lines) in files(std::mem::take(&mut writes.batch.expired)) {
                let archive = Arc::clone(archive);
                writes.start(async move { keep(&*archive, &file, lines).await }).await;
            }
        }
        writes.finish().await
    }

    /// Books what is not yet in the record. The condition of the write makes it safe to try again
    /// after any answer, or none.
    async fn book(&self, usage: &UsageEffect, changes: &[BucketChange]) -> Done {
        let mut item = None;
        for _ in 0..BOOKINGS_MAX {
            let Some(booking) = usage.booking(changes, item.as_ref()) else { return Done::Nothing };
            match self.patiently(&booking.update()).await {
                Ok(Updated::Done(..)) => return Done::Booked,
                Ok(Updated::Unmet(found, _)) => item = found,
                Err(error) => {
                    let message = format!("usage was not booked: {error}");
                    return Done::Failed(message, usage.changes.clone(), is_worth_retrying(&error));
                }
            }
        }
        let message =
            format!("usage was not booked: others wrote it {BOOKINGS_MAX} times in a row");
        Done::Failed(message, usage.changes.clone(), true)
    }

    /// One that is not there, or knows already, is fine.
    async fn tell(&self, update: &Update, change: usize) -> Done {
        match self.patiently(update).await {
            Ok(Updated::Done(..)) => Done::Told,
            Ok(Updated::Unmet(..)) => Done::Nothing,
            Err(error) => {
                let message = format!("a shard was not told of its bucket's split: {error}");
                Done::Failed(message, vec![change], is_worth_retrying(&error))
            }
        }
    }

    /// Not tried again: somebody else refills the bucket when it is needed.
    async fn refill(&self, update: &Update) -> Done {
        match self.update(update).await {
            Ok(Updated::Done(..)) => Done::Refilled,
            Ok(Updated::Unmet(..)) => Done::Nothing,
            Err(error) => Done::Missed(format!("a bucket was not refilled: {error}")),
        }
    }

    /// Not tried again: a bucket that stays hot says so in the next batch.
    async fn double(&self, pending: &PendingSplit) -> Done {
        match self.split.split(pending).await {
            Ok(true) => Done::Split,
            Ok(false) => Done::Nothing,
            Err(error) => Done::Missed(format!("a bucket was not split: {error}")),
        }
    }

    /// An update that may be made again without harm, tried until it is answered.
    async fn patiently(&self, update: &Update) -> Result<Updated, TableError> {
        let mut wait = FIRST_WAIT;
        for _ in 1..ATTEMPTS_MAX {
            match self.update(update).await {
                Err(error) if is_passing(&error) => self.clock.sleep(wait).await,
                answer => return answer,
            }
            wait *= 2;
        }
        self.update(update).await
    }

    /// An update that is answered before long.
    async fn update(&self, update: &Update) -> Result<Updated, TableError> {
        tokio::select! {
            answer = self.table.update(update) => answer,
            () = self.clock.sleep(PATIENCE) => {
                let message = format!("the table did not answer within {} s", PATIENCE.as_secs());
                Err(TableError::new(TableErrorKind::Unavailable, message).maybe_applied())
            }
        }
    }
}

/// Whether it may go better another time.
fn is_passing(error: &TableError) -> bool {
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

/// Whether it may go better once somebody has done something about it, without the record being
/// another.
fn is_worth_retrying(error: &TableError) -> bool {
    error.kind != TableErrorKind::Rejected
}

/// The files of a batch's expired events, each with the places of its events in the batch.
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

async fn keep(archive: &dyn Archive, file: &ArchiveFile, places: Vec<usize>) -> Done {
    match archive.keep(&file.name, file.bytes()).await {
        Ok(()) => Done::Kept(file.lines.len()),
        Err(error) => Done::NotKept(format!("audit events were not kept: {error}"), places),
    }
}

/// What became of one thing that was to be done.
enum Done {
    Nothing,
    Booked,
    Told,
    Refilled,
    Split,
    Kept(usize),
    /// What is not worth a second delivery.
    Missed(String),
    /// The changes have to come again; and whether it may go better then.
    Failed(String, Vec<usize>, bool),
    /// The records have to come again.
    NotKept(String, Vec<usize>),
}

/// The records of a batch, read.
struct Batch {
    sequence_numbers: Vec<Option<String>>,
    changes: Vec<BucketChange>,
    /// For each change, the place of its record.
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
                    let named = number.as_deref().unwrap_or("without a number");
                    batch.report.errors.push(format!("record {named}: {message}"));
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
            Done::Told => report.shards_told += 1,
            Done::Refilled => report.refills_written += 1,
            Done::Split => report.buckets_split += 1,
            Done::Kept(events) => {
                report.events_archived += u64::try_from(events).unwrap_or(u64::MAX);
            }
            Done::Missed(message) => report.errors.push(message),
            Done::Failed(message, changes, is_worth_retrying) => {
                report.errors.push(message);
                report.is_worth_retrying |= is_worth_retrying;
                self.failed.extend(changes.into_iter().map(|change| self.records[change]));
            }
            Done::NotKept(message, places) => {
                report.errors.push(message);
                report.is_worth_retrying = true;
                self.failed.extend(places);
            }
        }
    }
}

/// What is under way for a batch. When it is dropped, all of it stops.
struct Writes {
    running: JoinSet<Done>,
    batch: Batch,
}

impl Writes {
    async fn start(&mut self, write: impl Future<Output = Done> + Send + 'static) {
        while self.running.len() >= IN_FLIGHT_MAX {
            self.one_ends().await;
        }
        self.running.spawn(write);
    }

    async fn one_ends(&mut self) {
        match self.running.join_next().await {
            Some(Ok(done)) => self.batch.note(done),
            // Nobody aborts them.
            Some(Err(error)) => std::panic::resume_unwind(error.into_panic()),
            None => {}
        }
    }

    async fn finish(mut self) -> Report {
        while !self.running.is_empty() {
            self.one_ends().await;
        }
        let Batch { mut report, failed, mut sequence_numbers, .. } = self.batch;
        // One without a number cannot be asked for again.
        report.failed = failed.into_iter().filter_map(|at| sequence_numbers[at].take()).collect();
        report
    }
}
