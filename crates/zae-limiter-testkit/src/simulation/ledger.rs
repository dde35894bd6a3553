//! What clients of the original make out of nothing, and what holds of our promise beside them.
//!
//! A bucket *holds*, at a moment, what its shards do: balance and unpaid time of each, up to its
//! ceiling. An exact write lowers that by what it takes and no more. A write of the original may
//! lower it by less, or raise it: that much was made out of nothing. It is
//!
//! - what a shard is born with, as far as its share goes, and the time that a shard is paid for in
//!   which it was none;
//! - what a full shard was taken from without its refill time being moved: that time is paid again;
//! - what an older one refills beyond the shard's share.
//!
//! With this ledger the promise for the whole bucket is: net taken in any interval is at most the
//! ceiling, what the interval earns, and what was made in it. Two more things follow from how the
//! original splits:
//!
//! - It changes the count of a shard and nothing else, so that a write of ours that goes by the larger
//!   share of before may still happen. It must be exact by that share, and the client has seen the count
//!   in its answer. By how much it lowers what the bucket holds by less than it takes is in the ledger.
//! - A shard may be made while the one that it is split from still has its share. It does not belong to
//!   the bucket then, and what is taken from it is not counted: but it is never more than the shard holds,
//!   and it refills as any other.

use std::collections::{BTreeMap, BTreeSet};

use super::reading::Reading;
use crate::table::ClientId;

/// How long after its first answer a client may still have writes under way that it has sent before.
const UNDER_WAY_US: u64 = 2_000_000;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    originals: BTreeSet<ClientId>,
    /// All shards that were ever written, by their buckets.
    shards: BTreeMap<String, BTreeMap<u32, Reading>>,
    /// Shards whose counts were raised by the original.
    raised: BTreeMap<(String, u32), Raised>,
    /// In millitokens, of all limits.
    pub(super) made: i128,
}

/// What a shard's count was before, and who has seen since that it is another.
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

    /// The table has removed an item.
    pub(super) fn forget(&mut self, base: &str, shard: u32) {
        if let Some(shards) = self.shards.get_mut(base) {
            shards.remove(&shard);
        }
    }

    /// Whether anybody has written to the bucket.
    pub(super) fn knows(&self, base: &str) -> bool {
        self.shards.contains_key(base)
    }

    /// Whether a shard's share is its own.
    pub(super) fn belongs(&self, base: &str, shard: u32) -> bool {
        self.shards.get(base).is_some_and(|shards| belongs(shards, shard))
    }

    /// Takes note of a write. A change of the count that is not ours is remembered.
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

    /// By which other counts a client may go that writes to a shard now.
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

    /// What the shards of a bucket hold of a limit at a moment, times the period. Time that was paid
    /// out before it has come is still owed.
    pub(super) fn held(&self, base: &str, limit: &str, at_ms: i64) -> i128 {
        let Some(shards) = self.shards.get(base) else { return 0 };
        let belonging = shards.values().filter(|shard| belongs(shards, shard.shard));
        belonging.map(|shard| shard.held(limit, at_ms)).sum()
    }

    /// The same of one shard, whether it belongs to the bucket or not.
    pub(super) fn held_by(&self, (base, shard): (&str, u32), limit: &str, at_ms: i64) -> i128 {
        let shard = self.shards.get(base).and_then(|shards| shards.get(&shard));
        shard.map_or(0, |shard| shard.held(limit, at_ms))
    }

    /// Books what was made out of nothing.
    pub(super) fn add_made(&mut self, made: i128) {
        self.made += made;
    }

    /// Whether the shares of a bucket's shards are the whole of it.
    pub(super) fn is_complete(&self, base: &str) -> bool {
        const WHOLE: u64 = 1 << 32;
        let Some(shards) = self.shards.get(base) else { return true };
        let live = shards.values().filter(|shard| belongs(shards, shard.shard));
        live.map(|shard| WHOLE / u64::from(shard.count)).sum::<u64>() == WHOLE
    }
}

/// What a write has made of a limit, in millitokens, of which the bucket, or the shard, held so much
/// before and after.
pub(super) fn made(before: i128, after: i128, net: i128, period_ms: u64) -> i128 {
    let period = i128::from(period_ms);
    let made = (after - before + net * period).max(0);
    (made + period - 1) / period
}

impl Reading {
    /// Balance and unpaid time up to the ceiling, times the period.
    fn held(&self, limit: &str, at_ms: i64) -> i128 {
        let Some(cell) = self.cells.get(limit) else { return 0 };
        let period = i128::from(cell.rate.period_ms());
        let amount = i128::from(cell.rate.refill_amount().get());
        let earned = amount * i128::from(at_ms - self.rf) + i128::from(cell.remainder);
        let ceiling = i128::from(cell.rate.capacity().get()) * period;
        (i128::from(cell.tokens) * period + earned).min(ceiling)
    }
}

/// A shard belongs when the one that it was split from knows that it was.
fn belongs(shards: &BTreeMap<u32, Reading>, shard: u32) -> bool {
    if !shards.get(&shard).is_some_and(Reading::holds_share) {
        return false;
    }
    let Some(bits) = shard.checked_ilog2() else { return true };
    let distance = 1_u32 << bits;
    let origin = shard - distance;
    belongs(shards, origin) && shards.get(&origin).is_some_and(|origin| origin.count > distance)
}
