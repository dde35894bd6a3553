//! Excuses: where the auditor cannot check exactly, and how often that happens.

use std::collections::BTreeMap;

/// Why the auditor accepted something that would otherwise be a violation, or skipped a check. An
/// unknown outcome counts only if the writes differ from what the replies say.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Excuse {
    /// Unknown outcome: the client crashed.
    Crashed,
    /// Unknown outcome: a call that never ended, of a client that crashed.
    Unended,
    /// Unknown outcome: the reply says that the change may have been applied.
    MaybeApplied,
    /// Unknown outcome: the caller did not wait for the reply, and a table call failed.
    CancelledAndFaulted,
    /// Unknown outcome: a chain was refused, and a table call failed.
    RefusedAndFaulted,
    /// Unknown outcome: a settlement refunded to a limit that may have been removed.
    RefundPassedOver,
    /// Unknown outcome: an acquire refunded to a limit that may have been removed.
    TakePassedOver,
    /// Conservation on a sharded bucket: the difference is within the bounds, but not a sum of
    /// amounts.
    WithinBounds,
    /// An expired item started anew.
    Anew,
    /// A write is exact only by a shard count that the original has changed since.
    Outdated,
    /// New limits: only bounds of the balance are checked.
    NewLimits,
    /// Older limits replaced newer ones that were read by a clock far ahead.
    LimitsAhead,
    /// Older limits replaced newer ones, perhaps after a call with its own limits in the same
    /// write.
    LimitsAfterOwn,
    /// Calls under different limits went in one write, and the lowest ceiling cut the balance.
    LowestCeiling,
    /// A batch created the bucket under a higher ceiling and took from it. Then a call of the same write lowered the
    /// ceiling.
    HigherCeiling,
    /// Less was refilled than earned, because a refund filled the bucket first.
    FullInBetween,
    /// The remainder was dropped, because a refund filled the bucket first.
    RemainderDropped,
    /// Liveness: not tried a millisecond early, because the bucket may expire by a wrong clock.
    LivenessSkewed,
    /// Liveness: not tried a millisecond early, because the bucket is or was sharded.
    LivenessSharded,
    /// Deletion: a retired shard remains, because its bucket had expired and started anew.
    RetiredLeft,
    /// Liveness: admitted only after another wait, because the bucket is or was sharded.
    LivenessAgain,
    /// Liveness: admitted only after the limits were set again, because a change of them had failed
    /// before it reached the bucket.
    LivenessOutdated,
}

/// How often each excuse was used.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Excuses(BTreeMap<Excuse, u64>);

impl Excuses {
    pub(crate) fn count(&mut self, excuse: Excuse) {
        *self.0.entry(excuse).or_default() += 1;
    }

    /// Adds the counts of another run.
    pub fn add(&mut self, others: &Self) {
        for (excuse, count) in &others.0 {
            *self.0.entry(*excuse).or_default() += count;
        }
    }

    /// All excuses that were used, with their counts.
    pub fn iter(&self) -> impl Iterator<Item = (Excuse, u64)> {
        self.0.iter().map(|(excuse, count)| (*excuse, *count))
    }
}
