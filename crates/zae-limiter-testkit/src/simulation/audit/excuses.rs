//! Where the auditor cannot say exactly what must be, and how often it made use of that.

use std::collections::BTreeMap;

/// Why the auditor accepted something that it would otherwise call a violation, or did not look. An
/// unknown outcome counts only where what was written differs from what the replies say.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Excuse {
    /// Unknown outcome: the client crashed.
    Crashed,
    /// Unknown outcome: a call that never ended, of a client that crashed.
    Unended,
    /// Unknown outcome: the reply says that the change may have been applied.
    MaybeApplied,
    /// Unknown outcome: nobody waited for the reply, and a table call failed.
    CancelledAndFaulted,
    /// Unknown outcome: a chain was refused, and a table call failed.
    RefusedAndFaulted,
    /// Unknown outcome: a settlement gave something back to a limit that may have vanished.
    RefundPassedOver,
    /// Unknown outcome: an acquire gave back what it took from a limit that may have vanished.
    TakePassedOver,
    /// Conservation on a sharded bucket: the rest lies between the bounds, but is no sum of amounts.
    WithinBounds,
    /// An expired item started anew.
    Anew,
    /// A write that is exact only by a shard count from before the original changed it.
    Outdated,
    /// New limits: only bounds of the balance are checked.
    NewLimits,
    /// Older limits replaced newer ones, whose moment is from a clock that is far ahead.
    LimitsAhead,
    /// Older limits replaced newer ones, perhaps after a call in the same write that brought its own.
    LimitsAfterOwn,
    /// Calls under different limits went in one write; the lowest ceiling cut the balance.
    LowestCeiling,
    /// Less was refilled than earned, because something that was given back filled the bucket first.
    FullInBetween,
    /// The remainder was dropped, because something that was given back filled the bucket first.
    RemainderDropped,
    /// Liveness: not tried a millisecond early, because the bucket may expire by a wrong clock.
    LivenessSkewed,
    /// Liveness: not tried a millisecond early, because the bucket is or was sharded.
    LivenessSharded,
    /// Deletion: a retired shard is left, because its bucket had expired and started anew.
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

    /// Adds those of another run.
    pub fn add(&mut self, others: &Self) {
        for (excuse, count) in &others.0 {
            *self.0.entry(*excuse).or_default() += count;
        }
    }

    /// All that were used, with their counts.
    pub fn iter(&self) -> impl Iterator<Item = (Excuse, u64)> {
        self.0.iter().map(|(excuse, count)| (*excuse, *count))
    }
}
