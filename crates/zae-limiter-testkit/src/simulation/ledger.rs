//! Counts the tokens that clients of the original *make*: tokens that no time has earned.
//!
//! At any time a bucket *holds* the balance and the unpaid refill of all its shards, up to their
//! ceilings. An exact write lowers that by the amount that it takes. A write of the original may
//! lower it by less, or raise it. The difference is what it has made:
//!
//! - the tokens that a new shard starts with, and refill for time before the shard existed;
//! - the refill of a full shard that was taken from without moving its refill time: that time is
//!   paid out again;
//! - the refill of older clients beyond the shard's share.
//!
//! With this ledger the rule for the whole bucket is: net consumption in any interval is at most
//! the ceiling, plus what the interval earns, plus what was made in it. Two more things follow from
//! how the original splits:
//!
//! - It changes only the count of a shard. So a write of our clients may still use the larger share
//!   from before. It must be exact by that share, and it shows the client the new count. The
//!   difference in what the bucket holds is in the ledger.
//! - It may create a shard while the shard that this one is split from still has the share. The new
//!   shard is a *stray*: it does not belong to the bucket, and consumption from it is not counted.
//!   It still holds a limited amount, and refills like any other shard.

use std::collections::{BTreeMap, BTreeSet};

use super::reading::Reading;
use crate::table::ClientId;

/// How long after its first reply a client may still have earlier writes in flight.
const UNDER_WAY_US: u64 = 2_000_000;

/// The ledger of a run with clients of the original.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    originals: BTreeSet<ClientId>,
    /// The last content of all shards, by bucket.
    shards: BTreeMap<String, BTreeMap<u32, Reading>>,
    /// Shards whose counts the original has raised.
    raised: BTreeMap<(String, u32), Raised>,
    /// What was made so far, in millitokens of all limits.
    pub(super) made: i128,
}

/// The earlier counts of a shard, and when each client first saw that the count has changed.
#[derive(Debug, Default)]
struct Raised {
    before: BTreeSet<u32>,
    seen_us: BTreeMap<ClientId, u64>,
}

impl Ledger {
    pub(super) fn expect(&mut self, client: ClientId) {
        self.originals.insert(client);
    }

    pub(super) fn is_original(&self, client: Option<ClientId>) -> bool {
        client.is_some_and(|client| self.originals.contains(&client))
    }

    /// Removes a deleted item.
    pub(super) fn forget(&mut self, base: &str, shard: u32) {
        if let Some(shards) = self.shards.get_mut(base) {
            shards.remove(&shard);
        }
    }

    /// Whether the bucket was ever written.
    pub(super) fn has_bucket(&self, base: &str) -> bool {
        self.shards.contains_key(base)
    }

    /// Whether a shard belongs to the bucket, and is not a stray.
    pub(super) fn belongs(&self, base: &str, shard: u32) -> bool {
        self.shards.get(base).is_some_and(|shards| belongs(shards, shard))
    }

    /// Records a write, and whether the original has changed the count.
    pub(super) fn note(&mut self, base: &str, new: &Reading, is_original: bool) {
        let shards = self.shards.entry(base.to_owned()).or_default();
        let old = shards.insert(new.shard, new.clone());
        let place = (base.to_owned(), new.shard);
        match old {
            Some(old) if old.count == new.count => {}
            Some(old) if is_original => {
                let raised = self.raised.entry(place).or_default();
                raised.before.insert(old.count);
                raised.seen_us.clear();
            }
            _ => drop(self.raised.remove(&place)),
        }
    }

    /// The earlier counts that a client may still use in a write at `at_us`.
    pub(super) fn unseen(
        &mut self,
        base: &str,
        shard: u32,
        client: ClientId,
        at_us: u64,
    ) -> Vec<u32> {
        let Some(raised) = self.raised.get_mut(&(base.to_owned(), shard)) else {
            return Vec::new();
        };
        let seen_us = *raised.seen_us.entry(client).or_insert(at_us);
        match at_us <= seen_us + UNDER_WAY_US {
            true => raised.before.iter().copied().collect(),
            false => Vec::new(),
        }
    }

    /// What the shards of a bucket hold of a limit at a time, times the period. Refill for time in
    /// the future is subtracted.
    pub(super) fn held(&self, base: &str, limit: &str, at_ms: i64) -> i128 {
        let Some(shards) = self.shards.get(base) else { return 0 };
        let belonging = shards.values().filter(|shard| belongs(shards, shard.shard));
        belonging.map(|shard| shard.held(limit, at_ms)).sum()
    }

    /// What one shard holds, whether it belongs to the bucket or not.
    pub(super) fn held_by(&self, (base, shard): (&str, u32), limit: &str, at_ms: i64) -> i128 {
        let shard = self.shards.get(base).and_then(|shards| shards.get(&shard));
        shard.map_or(0, |shard| shard.held(limit, at_ms))
    }

    /// Adds to what was made.
    pub(super) fn add_made(&mut self, made: i128) {
        self.made += made;
    }

    /// Whether the shares of a bucket's shards add up to the whole bucket.
    pub(super) fn is_complete(&self, base: &str) -> bool {
        const WHOLE: u64 = 1 << 32;
        let Some(shards) = self.shards.get(base) else { return true };
        let live = shards.values().filter(|shard| belongs(shards, shard.shard));
        live.map(|shard| WHOLE / u64::from(shard.count)).sum::<u64>() == WHOLE
    }
}

/// What a write has made of a limit, in millitokens, from what the bucket or shard held before and
/// after it.
pub(super) fn made(before: i128, after: i128, net: i128, period_ms: u64) -> i128 {
    let period = i128::from(period_ms);
    let made = (after - before + net * period).max(0);
    (made + period - 1) / period
}

impl Reading {
    /// Balance and unpaid refill up to the ceiling, times the period.
    fn held(&self, limit: &str, at_ms: i64) -> i128 {
        let Some(cell) = self.cells.get(limit) else { return 0 };
        let period = i128::from(cell.rate.period_ms());
        let amount = i128::from(cell.rate.refill_amount().get());
        let earned = amount * i128::from(at_ms - self.rf) + i128::from(cell.remainder);
        let ceiling = i128::from(cell.rate.capacity().get()) * period;
        (i128::from(cell.tokens) * period + earned).min(ceiling)
    }
}

/// A shard belongs to the bucket if the count of the shard that it was split from includes it.
fn belongs(shards: &BTreeMap<u32, Reading>, shard: u32) -> bool {
    if !shards.get(&shard).is_some_and(Reading::holds_share) {
        return false;
    }
    let Some(bits) = shard.checked_ilog2() else { return true };
    let distance = 1_u32 << bits;
    let origin = shard - distance;
    belongs(shards, origin) && shards.get(&origin).is_some_and(|origin| origin.count > distance)
}
