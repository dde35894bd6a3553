//! The table's time, and what differs from it by too much.

use std::time::Duration;

use zae_limiter_core::{TimeCheck, Timestamp};
use zae_limiter_schema::TableTime;
use zae_limiter_schema::bucket::BucketItem;

/// The table's time during one event. Every response brings it, so it is at least as new as the snapshots.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Time {
    table: TableTime,
    max_skew: Duration,
}

impl Time {
    /// A bound of zero switches the comparison off.
    pub(crate) fn new(table: TableTime, max_skew: Duration) -> Self {
        let table = if max_skew.is_zero() { TableTime::Never } else { table };
        Self { table, max_skew }
    }

    /// Whether the first response will bring the table's time. Until then nothing is written: a write by a wrong
    /// clock could take what was not earned.
    pub(crate) fn is_awaited(self) -> bool {
        self.table == TableTime::NotYet
    }

    pub(crate) fn check(self, now: Timestamp) -> TimeCheck {
        self.table.check(now, self.max_skew)
    }

    /// The caller's time, or the table's if they differ by too much.
    pub(crate) fn corrected(self, now: Timestamp) -> Timestamp {
        match self.check(now) {
            TimeCheck::Beyond(table) => table,
            TimeCheck::Unknown | TimeCheck::Within => now,
        }
    }

    /// Whether a wrong clock has written the refill time of a live shard. The table's time decides, and never the
    /// caller's: a caller whose clock lags must not rewind what others have refilled.
    pub(crate) fn is_ahead(self, item: &BucketItem) -> bool {
        let TableTime::At(table) = self.table else { return false };
        !item.is_remnant && !item.is_retired() && item.bucket.is_ahead(table, self.max_skew)
    }

    /// The refill time that replaces one that [is ahead](Self::is_ahead): the caller's, but not before the table's. A
    /// call may have waited for minutes since the caller read its clock, and that time was credited already.
    pub(crate) fn rewound_to(self, now: Timestamp) -> Timestamp {
        match self.table {
            TableTime::At(table) => now.max(table),
            TableTime::NotYet | TableTime::Never => now,
        }
    }
}
