//! Refill times that a wrong clock has written, and how they are rewound.

use zae_limiter_core::MAX_CLOCK_SKEW;

use super::super::intervals::LimitHistory;
use super::super::reading::Reading;
use super::{AuditState, shard_of};
use crate::table::Wrote;

/// Ten seconds: a write arrives at most that long after the decision to rewind.
const ON_THE_WAY_MS: i64 = 10_000;

impl AuditState {
    /// A client without a check has moved the refill time of a shard far ahead. It must change nothing else.
    pub(super) fn note_frozen(&mut self, wrote: &Wrote<'_>) -> Result<(), String> {
        let Some((base, shard)) = shard_of(wrote.key) else { return Ok(()) };
        let read = |item| Reading::of(shard, item);
        let (old, new) = (wrote.old.and_then(read), wrote.new.and_then(read));
        let (Some(old), Some(new)) = (old, new) else {
            return Err("only a shard that exists can be frozen".to_owned());
        };
        if !is_same(&old, &new) {
            return Err("more than the refill time was changed".to_owned());
        }
        self.frozen += 1;
        if shard == 0 {
            self.expires_s.insert(base, new.ttl);
        }
        self.restart_history(&wrote.key.pk, &new);
        Ok(())
    }

    /// Checks a write that sets the refill time back: exactly from one that is further ahead than the bound to the
    /// present, and without any other change.
    pub(super) fn check_rewound(
        &mut self,
        pk: &str,
        (old, new): (&Reading, &Reading),
        true_ms: i64,
        ahead_ms: i64,
    ) -> Result<(), String> {
        let bound_ms = i64::try_from(MAX_CLOCK_SKEW.as_millis()).unwrap_or(i64::MAX);
        let what = format!("the refill time ran back from {} to {}", old.rf, new.rf);
        if !self.is_dated {
            return Err(what);
        }
        if old.rf <= true_ms + bound_ms - ON_THE_WAY_MS {
            return Err(format!("{what}, but it was only {} ms ahead", old.rf - true_ms));
        }
        if new.rf > true_ms + ahead_ms || new.rf < true_ms - ahead_ms - ON_THE_WAY_MS {
            return Err(format!("{what}, and the true time is {true_ms}"));
        }
        if !is_same(old, new) || new.cells.values().any(|cell| cell.remainder != 0) {
            return Err(format!("{what}, and more was changed"));
        }
        self.rewound += 1;
        self.restart_history(pk, new);
        Ok(())
    }

    /// The history of a shard counts by its refill time, so it starts again. That of the whole bucket counts by the
    /// true time, and goes on.
    pub(super) fn restart_history(&mut self, pk: &str, new: &Reading) {
        for (limit, cell) in &new.cells {
            self.limits.insert((pk.to_owned(), limit.clone()), LimitHistory::new(cell.rate));
        }
    }
}

/// Whether two readings have the same balances under the same limits.
fn is_same(old: &Reading, new: &Reading) -> bool {
    let cells = |reading: &Reading| -> Vec<_> {
        let cells = reading.cells.iter();
        cells.map(|(limit, cell)| (limit.clone(), cell.tokens, cell.consumed, cell.rate)).collect()
    };
    old.count == new.count && old.limits_at == new.limits_at && cells(old) == cells(new)
}
