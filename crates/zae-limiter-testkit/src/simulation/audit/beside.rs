//! The auditor's rules for runs with clients of the original.

use zae_limiter_core::BucketKey;
use zae_limiter_schema::bucket_partition;

use super::super::intervals::{LimitHistory, Moments, check_interval};
use super::super::ledger::{self, Ledger};
use super::super::reading::Reading;
use super::{AuditState, Auditor, Excuses, Written, true_ms};
use crate::table::{ClientId, Wrote};

impl Auditor {
    /// Marks a client as one of the original.
    pub(crate) fn expect_original(&self, client: ClientId) {
        self.lock().ledger.get_or_insert_default().expect(client);
    }

    /// What clients of the original have made, in millitokens of all limits.
    pub(crate) fn made(&self) -> i128 {
        self.lock().ledger.as_ref().map_or(0, |ledger| ledger.made)
    }

    /// Whether the shares of a bucket's shards add up to the whole bucket.
    pub(crate) fn is_complete(&self, bucket: &BucketKey) -> bool {
        let base = bucket_partition(bucket, 0);
        self.lock().ledger.as_ref().is_none_or(|ledger| ledger.is_complete(&base))
    }

    /// Whether an item is a stray: another shard still has its share.
    pub(super) fn is_stray(&self, base: &str, shard: u32) -> bool {
        self.lock().ledger.as_ref().is_some_and(|ledger| !ledger.belongs(base, shard))
    }
}

impl AuditState {
    /// Records a write of the original. It is not checked, but what it has made is counted.
    pub(super) fn note_original(
        &mut self,
        base: &str,
        shard: u32,
        wrote: &Wrote<'_>,
        ahead_ms: i64,
    ) -> Result<(), String> {
        // A refund of the original to a deleted item creates an item that is not a bucket.
        let new = wrote.new.and_then(|item| Reading::of(shard, item));
        let (Some(new), Some(ledger)) = (new, &mut self.ledger) else { return Ok(()) };
        let old = wrote.old.and_then(|item| Reading::of(shard, item));
        let true_ms = true_ms(wrote);
        let at_ms = true_ms - ahead_ms - self.age_ms;
        let slack_ms = 2 * ahead_ms + self.age_ms;
        let moments = Moments { base_ms: true_ms, rf: true_ms, slack_ms };
        // An absent bucket counts as full.
        let is_first = !ledger.has_bucket(base);
        let held = |ledger: &Ledger| -> Vec<i128> {
            new.cells.keys().map(|limit| ledger.held(base, limit, at_ms)).collect()
        };
        let before = held(ledger);
        ledger.note(base, &new, true);
        let after = held(ledger);
        let belongs = ledger.belongs(base, shard);
        if new.count > 1 {
            self.resharded.insert(base.to_owned());
        }
        for ((limit, cell), (before, after)) in new.cells.iter().zip(before.into_iter().zip(after))
        {
            let place = (base.to_owned(), limit.clone());
            let consumed = old.as_ref().and_then(|old| old.cells.get(limit));
            let consumed = consumed.map_or(0, |cell| i128::from(cell.consumed));
            let net = if belongs { i128::from(cell.consumed) - consumed } else { 0 };
            let made = match is_first {
                true => 0,
                false => ledger::made(before, after, net, cell.rate.period_ms()),
            };
            ledger.add_made(made);
            // The history of the shard alone starts again: the ledger is about the whole bucket.
            let of_shard = (wrote.key.pk.clone(), limit.clone());
            self.limits.insert(of_shard, LimitHistory::new(cell.rate));
            let debts = self.debts.entry(place.clone()).or_default();
            debts.insert(shard, (-cell.tokens).max(0));
            let debt = debts.values().map(|debt| i128::from(*debt)).sum();
            check_interval(&mut self.wholes, &place, &cell.whole, debt, net - made, moments)
                .map_err(|what| format!("all shards together, by the ledger: {what}"))?;
        }
        Ok(())
    }
}

impl AuditState {
    /// Records that the table has deleted an expired item. If the original took from it without
    /// extending its lifetime, it was not full: what it lacked counts as made.
    pub(super) fn note_removal(
        &mut self,
        base: &str,
        shard: u32,
        wrote: &Wrote<'_>,
        ahead_ms: i64,
    ) -> Result<(), String> {
        let Some(ledger) = &mut self.ledger else { return Ok(()) };
        let true_ms = true_ms(wrote);
        let at_ms = true_ms - ahead_ms - self.age_ms;
        let slack_ms = 2 * ahead_ms + self.age_ms;
        let moments = Moments { base_ms: true_ms, rf: true_ms, slack_ms };
        let old = wrote.old.and_then(|item| Reading::of(shard, item)).filter(Reading::holds_share);
        for (limit, cell) in old.iter().flat_map(|old| &old.cells) {
            let period_ms = cell.rate.period_ms();
            let full = i128::from(cell.rate.capacity().get()) * i128::from(period_ms);
            let made =
                ledger::made(ledger.held_by((base, shard), limit, at_ms), full, 0, period_ms);
            ledger.add_made(made);
            let place = (base.to_owned(), limit.clone());
            check_interval(&mut self.wholes, &place, &cell.whole, 0, -made, moments)?;
        }
        ledger.forget(base, shard);
        Ok(())
    }
}

/// Checks a retired shard that is restored because the original counts it. It must start empty, and
/// its share must be free.
pub(super) fn check_restored(
    ledger: &mut Ledger,
    base: &str,
    old: &Reading,
    new: &Reading,
) -> Result<(), String> {
    if new.rf < old.rf {
        return Err(format!("the refill time ran back from {} to {}", old.rf, new.rf));
    }
    for (limit, cell) in &new.cells {
        let consumed = old.cells.get(limit).map_or(0, |cell| cell.consumed);
        if (cell.tokens, cell.consumed, cell.remainder) != (0, consumed, 0) {
            return Err(format!("{limit}: a restored shard must start empty: {cell:?}"));
        }
    }
    ledger.note(base, new, false);
    match ledger.belongs(base, new.shard) {
        true => Ok(()),
        false => Err("restored while another shard has its share".to_owned()),
    }
}

impl Written<'_> {
    /// Checks a write of our own client. Returns what it has made of each limit, and whether it
    /// used a shard count that the original has changed since. Only such a write may make anything.
    pub(super) fn check_beside(
        &self,
        ledger: &mut Ledger,
        wrote: &Wrote<'_>,
        ahead_ms: i64,
        at_ms: i64,
        excuses: &mut Excuses,
    ) -> Result<(Vec<i128>, bool), String> {
        let (base, shard) = (self.base, self.new.shard);
        let unseen = wrote
            .client
            .map_or_else(Vec::new, |client| ledger.unseen(base, shard, client, wrote.at_us));
        let nets = self.nets();
        let place = (base, shard);
        let held = |ledger: &Ledger| -> Vec<i128> {
            nets.iter().map(|(limit, _)| ledger.held_by(place, limit, at_ms)).collect()
        };
        // An absent or expired bucket counts as full. The original takes from an item without
        // extending its lifetime: what it lacks when it expires was made by the original. Items of
        // our clients are full when they expire.
        let is_first = !ledger.has_bucket(base) || (self.anew && self.old.is_none());
        let before = held(ledger);
        ledger.note(base, self.new, false);
        let after = held(ledger);
        let mut made = vec![0; nets.len()];
        if !is_first {
            for (at, (limit, net)) in nets.iter().enumerate() {
                let period_ms = self.new.cells[limit].rate.period_ms();
                made[at] = ledger::made(before[at], after[at], *net, period_ms);
            }
        }
        if ledger.belongs(base, shard) {
            ledger.add_made(made.iter().sum());
        }
        let checked = self.check(ahead_ms, excuses).and_then(|()| match made.iter().sum() {
            0 => Ok(()),
            _ if self.anew => Ok(()),
            sum => Err(format!("the write made {sum} millitokens that no time has earned")),
        });
        let Err(what) = checked else { return Ok((made, false)) };
        match unseen.iter().any(|count| self.is_exact_by(*count, wrote, ahead_ms)) {
            true => Ok((made, true)),
            false => Err(what),
        }
    }

    /// Whether a write is exact by another shard count.
    fn is_exact_by(&self, count: u32, wrote: &Wrote<'_>, ahead_ms: i64) -> bool {
        let shard = self.new.shard;
        let reading = |item| Reading::as_one_of(shard, count, item);
        let (old, new) = (wrote.old.and_then(reading), wrote.new.and_then(reading));
        let Some(new) = new.filter(Reading::holds_share) else { return false };
        let written = Written { old: old.as_ref(), new: &new, is_outdated: true, ..*self };
        written.check(ahead_ms, &mut Excuses::default()).is_ok()
    }
}
