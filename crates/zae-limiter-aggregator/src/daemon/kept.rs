//! Audit events of one stream shard that could not be archived. The daemon keeps them and tries again, while it goes
//! on with the usage of later pages.
//!
//! The table's position stays before them, so that the next owner of the stream shard reads them again after a crash.
//! What is booked already is not booked twice.

use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

use zae_limiter_core::Timestamp;
use zae_limiter_schema::ItemKey;
use zae_limiter_schema::records::checkpoint::Checkpoint;

use super::plan::has_missed;
use crate::archive::AuditLine;

/// The most events that are kept for one stream shard, some 10 MB. With more, the stream shard waits for the archive.
pub(super) const KEPT_MAX: usize = 10_000;
/// The wait after the first failure, and the longest one. It doubles with each failure.
const RETRY_WAIT: Duration = Duration::from_secs(1);
const RETRY_WAIT_MAX: Duration = Duration::from_secs(60);
/// After so many failures a daemon that drains its stream gives up, and leaves the events in the stream.
const STUCK_AFTER: u32 = 3;

/// Events that are not archived yet, page by page.
#[derive(Debug)]
pub(super) struct Kept {
    pages: VecDeque<KeptPage>,
    /// Whether the first pages are being archived, and how many.
    archiving: Option<usize>,
    /// When they are archived next, by the stopwatch.
    due: Duration,
    failures: u32,
}

/// Events of one page that expired at the same time.
#[derive(Debug)]
struct KeptPage {
    lines: Vec<AuditLine>,
    /// The checkpoint before them.
    before: Checkpoint,
    /// The time of their expiry.
    since: Timestamp,
}

impl Kept {
    /// Keeps nothing yet.
    pub(super) fn new(now: Duration) -> Self {
        Self { pages: VecDeque::new(), archiving: None, due: now + RETRY_WAIT, failures: 0 }
    }

    /// Keeps events of a page. `before` is the checkpoint before them, `since` the time of their expiry.
    pub(super) fn add(&mut self, lines: Vec<AuditLine>, before: Checkpoint, since: Timestamp) {
        self.pages.push_back(KeptPage { lines, before, since });
    }

    /// Whether so many more can be kept.
    pub(super) fn has_room(&self, more: usize) -> bool {
        self.count() + more <= KEPT_MAX
    }

    /// The checkpoint that the table gets.
    pub(super) fn before(&self, now: &Checkpoint) -> Checkpoint {
        let first = self.pages.front().map_or_else(|| now.clone(), |page| page.before.clone());
        let Checkpoint { position, read_to, .. } = first;
        Checkpoint { position, read_to, read: now.read || now.done, done: false, ..now.clone() }
    }

    /// When the events have to be archived again.
    pub(super) fn due(&self) -> Option<Duration> {
        self.archiving.is_none().then_some(self.due)
    }

    /// The events to archive.
    pub(super) fn begin(&mut self) -> Vec<AuditLine> {
        self.archiving = Some(self.pages.len());
        self.pages.iter().flat_map(|page| page.lines.iter().cloned()).collect()
    }

    /// Notes which of the events that [`begin`](Self::begin) returned are still not archived. Returns whether nothing
    /// is left.
    pub(super) fn is_done_without(&mut self, left: &[AuditLine], now: Duration) -> bool {
        let archived = self.archiving.take().unwrap_or_default();
        let left_keys: BTreeSet<&ItemKey> = left.iter().map(|line| &line.key).collect();
        for page in self.pages.iter_mut().take(archived) {
            page.lines.retain(|line| left_keys.contains(&line.key));
        }
        self.pages.retain(|page| !page.lines.is_empty());
        self.failures = if left.is_empty() { 0 } else { self.failures.saturating_add(1) };
        let wait = RETRY_WAIT.saturating_mul(2_u32.saturating_pow(self.failures.min(10)));
        // Events that came meanwhile are archived at once, unless the archive is down.
        self.due = if left.is_empty() { now } else { now + wait.min(RETRY_WAIT_MAX) };
        self.pages.is_empty()
    }

    /// Whether several attempts in a row have failed: the archive is down.
    pub(super) fn is_stuck(&self) -> bool {
        self.archiving.is_none() && self.failures >= STUCK_AFTER
    }

    /// Drops the events that the stream has deleted: a restart would not find them. Returns how many they are, and the
    /// time of the first one.
    pub(super) fn take_too_old(&mut self, now: Timestamp) -> Option<(usize, Timestamp)> {
        let is_old = |page: &KeptPage| has_missed(Some(page.since), now);
        let since = self.pages.front().filter(|page| is_old(page))?.since;
        let count = self.count();
        self.pages.retain(|page| !is_old(page));
        Some((count - self.count(), since))
    }

    pub(super) fn is_empty(&self) -> bool {
        self.pages.is_empty()
    }

    pub(super) fn count(&self) -> usize {
        self.pages.iter().map(|page| page.lines.len()).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_wait_grows_and_events_that_come_meanwhile_stay() {
        let line = |id: &str| {
            let key = ItemKey::new("a", id);
            AuditLine { day: String::new(), id: String::new(), key, json: String::new() }
        };
        let at = Timestamp::default();
        let mut kept = Kept::new(Duration::ZERO);
        kept.add(vec![line("1")], Checkpoint::default(), at);
        let mut now = Duration::ZERO;
        for wait in [2, 4, 8, 16, 32, 60, 60] {
            now = kept.due().expect("nothing is in progress");
            let taken = kept.begin();
            assert_eq!((taken.len(), kept.due()), (1, None));
            assert!(!kept.is_done_without(&taken, now));
            assert_eq!(kept.due(), Some(now + Duration::from_secs(wait)));
        }
        kept.begin();
        kept.add(vec![line("2")], Checkpoint::default(), at);
        assert_eq!(kept.count(), 2, "those in progress count");
        assert!(!kept.is_done_without(&[], now), "one more has come");
        assert_eq!((kept.due(), kept.count()), (Some(now), 1));
        kept.begin();
        assert!(kept.is_done_without(&[], now));
        assert!(kept.has_room(KEPT_MAX) && !kept.has_room(KEPT_MAX + 1));
    }
}
