//! A stream shard that this daemon follows: what a page, an error or another daemon changes.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::task::AbortHandle;
use zae_limiter_core::Timestamp;
use zae_limiter_schema::ItemKey;
use zae_limiter_schema::records::booking::Position;
use zae_limiter_schema::records::checkpoint::{self, Checkpoint};

use super::kept::Kept;
use super::plan::{End, has_missed};
use super::stream::{Begin, Page};
use crate::archive::AuditLine;
use crate::event::{StreamRecord, Unreadable};

/// After so many quiet pages in a row, an open stream shard counts as read to its present end. DynamoDB returns
/// empty pages before pages with records, too; it does not say how many.
pub(super) const QUIET_PAGES: u32 = 100;
/// The longest wait after a failure.
const RETRY_WAIT_MAX: Duration = Duration::from_secs(30);
/// The wait after the first failure. It doubles with each further one.
const RETRY_WAIT: Duration = Duration::from_millis(500);
/// The wait before a new iterator is requested.
const ITERATOR_WAIT: Duration = Duration::from_millis(50);

/// Times are by the stopwatch, unless they are timestamps.
pub(super) struct Held {
    /// The number of this claim. Results of an earlier claim are ignored.
    pub(super) claim: u64,
    /// How far this daemon has come.
    pub(super) checkpoint: Checkpoint,
    /// The position that the table has.
    pub(super) stored: Option<String>,
    pub(super) end: End,
    iterator: Option<String>,
    /// A page that has to be processed again.
    page: Option<Page>,
    /// Audit events that are not archived yet.
    pub(super) kept: Option<Kept>,
    /// Quiet pages in a row.
    quiet_pages: u32,
    /// When the first of the last quiet pages was read.
    quiet_since: Timestamp,
    /// The page that is being read and processed.
    reading: Option<AbortHandle>,
    /// Whether the checkpoint is being written.
    pub(super) is_writing: bool,
    /// When the checkpoint is written next, unless the stream shard is finished: then at once.
    pub(super) beat_due: Duration,
    /// The checkpoint is not written before then: the last attempt failed.
    pub(super) write_after: Duration,
    /// Failures in a row.
    failures: u32,
    /// No page is read before then.
    pub(super) wait_until: Duration,
}

/// What is needed to read the next page.
pub(super) struct Next {
    pub(super) page: Option<Page>,
    pub(super) iterator: Option<String>,
    pub(super) begin: Begin,
}

/// What another owner, or an earlier one, has left in the table.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// This daemon still owns the stream shard.
    Mine,
    /// Another daemon owns it, or nobody. The flag says whether this daemon has come further.
    Lost { is_behind: bool },
}

impl Held {
    pub(super) fn new(claim: u64, checkpoint: Checkpoint, end: End, beat_due: Duration) -> Self {
        Self {
            claim,
            stored: checkpoint.position.clone(),
            checkpoint,
            end,
            iterator: None,
            page: None,
            kept: None,
            quiet_pages: 0,
            quiet_since: Timestamp::default(),
            reading: None,
            is_writing: false,
            beat_due,
            write_after: Duration::ZERO,
            failures: 0,
            wait_until: Duration::ZERO,
        }
    }

    /// Whether records may have been deleted that nobody has read. Reading begins with the oldest record, and
    /// nothing says whether it is the first. Reports it once.
    pub(super) fn takes_missed(&mut self, now: Timestamp) -> bool {
        let checkpoint = &mut self.checkpoint;
        let is_missed = checkpoint.position.is_none() && has_missed(checkpoint.seen_at, now);
        if is_missed {
            checkpoint.seen_at = Some(now);
        }
        is_missed
    }

    pub(super) fn is_reading(&self) -> bool {
        self.reading.is_some()
    }

    /// Whether everything that the stream shard has now is processed, as far as the archive allows it.
    /// A stream shard that is always in use counts up to the records of `since`.
    pub(super) fn is_idle(&self, since: Timestamp) -> bool {
        let is_read = match self.checkpoint.done {
            true => self.kept.is_some(),
            false => self.checkpoint.read_to > Some(since) || self.is_quiet_at_end(),
        };
        match &self.kept {
            None => self.page.is_none() && is_read,
            // A page waits for room, or there are none.
            Some(kept) => kept.is_stuck() && (self.page.is_some() || is_read),
        }
    }

    fn is_quiet_at_end(&self) -> bool {
        self.is_at_end() && self.quiet_pages >= QUIET_PAGES
    }

    /// Whether the stream does not say that there are more records.
    pub(super) fn is_at_end(&self) -> bool {
        match &self.end {
            End::Open => true,
            End::After(last) => Position::new(&self.checkpoint.stream, last) <= self.place(),
            End::Unlisted => false,
        }
    }

    /// The checkpoint for the table: before the events that are not archived.
    pub(super) fn to_store(&self) -> Checkpoint {
        self.kept
            .as_ref()
            .map_or_else(|| self.checkpoint.clone(), |kept| kept.before(&self.checkpoint))
    }

    /// When the checkpoint has to be written. `None` while it is being written.
    pub(super) fn write_due(&self) -> Option<Duration> {
        let is_done = self.checkpoint.done && self.kept.is_none();
        let due = if is_done { Duration::ZERO } else { self.beat_due };
        (!self.is_writing).then_some(due.max(self.write_after))
    }

    /// Keeps the events of a page that could not be archived. Returns whether there is room for them.
    pub(super) fn keep(&mut self, page: &Page, events: Vec<AuditLine>, now: Duration) -> bool {
        let kept = self.kept.get_or_insert_with(|| Kept::new(now));
        let has_room = kept.has_room(events.len());
        if has_room {
            // A page can have records of a whole day. Each event is kept by its own time.
            let records = page.records.iter().flatten();
            let times: BTreeMap<&ItemKey, Timestamp> =
                records.map(|record| (&record.key, record.at)).collect();
            let time = |event: &AuditLine| times.get(&event.key).copied().unwrap_or_default();
            for together in events.chunk_by(|one, other| time(one) == time(other)) {
                kept.add(together.to_vec(), self.checkpoint.clone(), time(&together[0]));
            }
        }
        has_room
    }

    pub(super) fn next(&self) -> Next {
        let begin = match &self.checkpoint.position {
            Some(position) => Begin::After(position.clone()),
            None => Begin::Oldest,
        };
        Next { page: self.page.clone(), iterator: self.iterator.clone(), begin }
    }

    pub(super) fn starts_reading(&mut self, task: AbortHandle) {
        self.reading = Some(task);
    }

    pub(super) fn has_read(&mut self) {
        self.reading = None;
    }

    /// The page is processed.
    pub(super) fn advance(&mut self, page: Page, now: Timestamp) {
        match is_quiet(&page.records) {
            true => self.count_quiet_page(now),
            false => self.quiet_pages = 0,
        }
        if let Some((number, at)) = last_of(&page.records) {
            self.checkpoint.position = number.or(self.checkpoint.position.take());
            self.checkpoint.read_to = self.checkpoint.read_to.max(at);
        }
        if page.next.is_none() {
            self.finish(now);
        }
        (self.iterator, self.page, self.failures) = (page.next, None, 0);
    }

    /// The stream shard has no more records. Its children begin at most now.
    pub(super) fn finish(&mut self, now: Timestamp) {
        (self.checkpoint.done, self.checkpoint.seen_at) = (true, Some(now));
    }

    fn count_quiet_page(&mut self, now: Timestamp) {
        if self.quiet_pages.is_multiple_of(QUIET_PAGES) {
            self.quiet_since = now;
        }
        self.quiet_pages = self.quiet_pages.saturating_add(1);
        if self.quiet_pages.is_multiple_of(QUIET_PAGES) {
            self.checkpoint.seen_at = Some(self.quiet_since);
        }
    }

    /// The page must be processed again.
    pub(super) fn repeat(&mut self, page: Page, now: Duration) {
        self.page = Some(page);
        self.back_off(now);
    }

    /// Waits longer after each failure.
    pub(super) fn back_off(&mut self, now: Duration) {
        self.drop_iterator();
        self.failures = self.failures.saturating_add(1);
        let wait = RETRY_WAIT.saturating_mul(2_u32.saturating_pow(self.failures.min(10) - 1));
        self.wait_until = now + wait.min(RETRY_WAIT_MAX);
    }

    /// Requests a new iterator.
    pub(super) fn begin_again(&mut self, now: Duration) {
        self.drop_iterator();
        self.wait_until = now + ITERATOR_WAIT;
    }

    /// Reading begins again after the position. So do the quiet pages that come before the next record.
    fn drop_iterator(&mut self) {
        (self.iterator, self.quiet_pages) = (None, 0);
    }

    /// The records after the position are gone, which is reported: continues with the oldest one.
    pub(super) fn skip_to_oldest(&mut self, now: Duration, at: Timestamp) {
        (self.checkpoint.position, self.checkpoint.seen_at) = (None, Some(at));
        self.begin_again(now);
    }

    /// Takes over a position that an earlier owner has left, and finds out who owns the stream shard.
    pub(super) fn compare(&mut self, found: Option<Checkpoint>, me: &str) -> Found {
        let mine = self.place();
        let Some(found) = found.filter(|found| found.stream == self.checkpoint.stream) else {
            return Found::Lost { is_behind: false };
        };
        let theirs = place(&found);
        if found.owner.as_deref() != Some(me) {
            return Found::Lost { is_behind: theirs < mine };
        }
        self.stored.clone_from(&found.position);
        if mine < theirs {
            self.stop_reading();
            self.drop_iterator();
            self.page = None;
            self.checkpoint.position = found.position;
            self.checkpoint.read_to = self.checkpoint.read_to.max(found.read_to);
        }
        Found::Mine
    }

    fn place(&self) -> Option<Position> {
        place(&self.checkpoint)
    }

    /// Abandons the page in progress.
    pub(super) fn stop_reading(&mut self) {
        if let Some(reading) = self.reading.take() {
            reading.abort();
        }
    }
}

fn place(checkpoint: &Checkpoint) -> Option<Position> {
    checkpoint.position.as_ref().and_then(|number| Position::new(&checkpoint.stream, number))
}

/// Whether a page has nothing to process: it is empty, or has only the daemons' own heartbeats, which never end.
pub(super) fn is_quiet(records: &[Result<StreamRecord, Unreadable>]) -> bool {
    let is_checkpoint = |record: &StreamRecord| checkpoint::is_key(&record.key);
    records.iter().all(|record| record.as_ref().is_ok_and(is_checkpoint))
}

/// The last sequence number of a page, and the time of its last record. `None` for an empty page.
fn last_of(
    records: &[Result<StreamRecord, Unreadable>],
) -> Option<(Option<String>, Option<Timestamp>)> {
    let number = |record: &Result<StreamRecord, Unreadable>| match record {
        Ok(record) => Some(record.sequence_number.clone()),
        Err(unreadable) => unreadable.sequence_number.clone(),
    };
    let last = records.iter().rev().find_map(number);
    let at = records.iter().rev().find_map(|record| record.as_ref().ok().map(|record| record.at));
    (!records.is_empty()).then_some((last, at))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held(position: &str) -> Held {
        let position = Some(position.to_owned());
        let checkpoint = Checkpoint { position, ..Checkpoint::default() };
        Held::new(1, checkpoint, End::Open, Duration::ZERO)
    }

    fn found(owner: &str, position: &str) -> Option<Checkpoint> {
        let (owner, position) = (Some(owner.to_owned()), Some(position.to_owned()));
        Some(Checkpoint { owner, position, ..Checkpoint::default() })
    }

    #[test]
    fn the_further_position_wins_by_its_number_not_by_its_text() {
        let mut one = held("900");
        assert_eq!(one.compare(found("you", "1000"), "me"), Found::Lost { is_behind: false });
        assert_eq!(one.compare(found("you", "899"), "me"), Found::Lost { is_behind: true });
        assert_eq!(one.compare(None, "me"), Found::Lost { is_behind: false });
        assert_eq!(one.compare(found("me", "1000"), "me"), Found::Mine);
        assert_eq!(one.checkpoint.position.as_deref(), Some("1000"));
        assert_eq!(one.compare(found("me", "20"), "me"), Found::Mine);
        let positions = (one.checkpoint.position.as_deref(), one.stored.as_deref());
        assert_eq!(positions, (Some("1000"), Some("20")));
    }

    #[test]
    fn only_many_quiet_pages_show_that_a_stream_shard_is_read_to_its_end() {
        let (mut one, at) = (held("1"), Timestamp::default());
        let empty = || Page { records: Vec::new(), next: Some("next".to_owned()) };
        for _ in 0..QUIET_PAGES {
            assert!(!one.is_idle(at));
            one.advance(empty(), Timestamp::default());
        }
        assert!(one.is_idle(at));
        one.end = End::After("2".to_owned());
        assert!(!one.is_idle(at), "its last record is not read yet");
        one.end = End::After("1".to_owned());
        assert!(one.is_idle(at), "an emulator may say so of an open one");
    }
}
