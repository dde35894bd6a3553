//! Checks one write, limit by limit: it must follow exactly from the old item, the time and the
//! calls.

use zae_limiter_core::{Millitokens, share};

use super::super::intervals::Place;
use super::super::reading::{Cell, Reading};
use super::calls::ClientRecord;
use super::excuses::{Excuse, Excuses};

/// One write to one shard.
pub(super) struct Written<'a> {
    pub(super) base: &'a str,
    pub(super) old: Option<&'a Reading>,
    pub(super) new: &'a Reading,
    pub(super) anew: bool,
    pub(super) record: &'a ClientRecord,
    pub(super) oldest_ms: Option<i64>,
    /// Whether the write is checked by a shard count that has changed since. A shard that is full
    /// by the new count drops its remainder, and a client with a snapshot of it cannot notice that.
    pub(super) is_outdated: bool,
}

impl Written<'_> {
    /// The net consumption of a limit.
    fn net(&self, limit: &str, cell: &Cell) -> i128 {
        let before = self.old.and_then(|old| old.cells.get(limit));
        i128::from(cell.consumed) - before.map_or(0, |before| i128::from(before.consumed))
    }

    pub(super) fn nets(&self) -> Vec<(String, i128)> {
        let cells = self.new.cells.iter();
        cells.map(|(limit, cell)| (limit.clone(), self.net(limit, cell))).collect()
    }

    pub(super) fn check(&self, ahead_ms: i64, excuses: &mut Excuses) -> Result<(), String> {
        for (limit, cell) in &self.new.cells {
            let place = (self.base.to_owned(), limit.clone());
            let step = Step {
                place: &place,
                old: self.old.and_then(|old| Some((old, *old.cells.get(limit)?))),
                new: (self.new, *cell),
                anew: self.anew,
                record: self.record,
                oldest_ms: self.oldest_ms,
                is_outdated: self.is_outdated,
            };
            let net = self.net(limit, cell);
            step.check(net, excuses).map_err(|what| format!("{limit}: {what}"))?;
            step.check_expiry(net, ahead_ms).map_err(|what| format!("{limit}: {what}"))?;
        }
        Ok(())
    }
}

/// One write to one limit.
struct Step<'a> {
    /// The limit of the whole bucket.
    place: &'a Place,
    old: Option<(&'a Reading, Cell)>,
    new: (&'a Reading, Cell),
    /// Whether the bucket had expired or was absent.
    anew: bool,
    record: &'a ClientRecord,
    oldest_ms: Option<i64>,
    is_outdated: bool,
}

impl Step<'_> {
    fn check(&self, net: i128, excuses: &mut Excuses) -> Result<(), String> {
        let (reading, cell) = self.new;
        let (tokens, ceiling) = (i128::from(cell.tokens), i128::from(cell.rate.capacity().get()));
        // The write that raised it above the ceiling was checked before.
        let is_untouched = self.old.is_some_and(|(before, old)| {
            net == 0 && old.tokens == cell.tokens && before.rf == reading.rf
        });
        if tokens > ceiling && !is_untouched {
            return Err(format!("{tokens} is above the ceiling of {ceiling}"));
        }
        if cell.remainder >= cell.rate.period_ms() {
            return Err(format!("the remainder {} is a millitoken or more", cell.remainder));
        }
        // A split may leave a shard like this: it lacked less than a millitoken.
        let was_so = |(_, old): (&Reading, Cell)| {
            (old.tokens, old.remainder) == (cell.tokens, cell.remainder)
        };
        if tokens == ceiling && cell.remainder > 0 && !self.old.is_some_and(was_so) {
            return Err(format!("it is full, and has a remainder of {}", cell.remainder));
        }
        let Some((before, old)) = self.old.filter(|_| !self.anew) else {
            if reading.shard > 0 && self.old.is_none() && self.anew {
                return self.same(tokens + net, 0, "a missing shard must start empty");
            }
            // An absent limit counts as full, also for charges, which may leave a debt. A refund to
            // it is lost at the ceiling, but reduces the consumption.
            self.check_debt(net, tokens, ceiling)?;
            let credited = ceiling - tokens - net;
            if (1..=self.record.may_credit(self.place)).contains(&credited) {
                excuses.count(Excuse::FullInBetween);
                return Ok(());
            }
            // The first call of a batch may have created it with a lower ceiling. A higher ceiling
            // then grants nothing.
            if credited > 0
                && tokens + net + self.record.may_credit(self.place) >= self.lowest(ceiling)
            {
                excuses.count(Excuse::LowestCeiling);
                return Ok(());
            }
            // Or with a higher one, which a later call lowered. What was taken before that stays taken.
            if (1..=self.taken_under_more(ceiling)).contains(&-credited) {
                excuses.count(Excuse::HigherCeiling);
                return Ok(());
            }
            return self.same(
                tokens + net,
                ceiling,
                "a new limit must be full less what was taken",
            );
        };
        let elapsed = u64::try_from(reading.rf - before.rf).unwrap_or(0);
        let (earned, remainder) = old.rate.earned(elapsed, old.remainder);
        let (earned, held) = (i128::from(earned.get()), i128::from(old.tokens));
        let refilled = tokens + net - held;
        self.check_debt(net, tokens, held + refilled)?;
        if old.rate != cell.rate {
            excuses.count(Excuse::NewLimits);
            let whole = (held + earned).min(old.rate.capacity().get().into());
            let least = whole.min(ceiling) - self.record.may_credit(self.place);
            let left = tokens + net;
            return match left {
                _ if left > whole => Err(format!("{left} under new limits, it held {whole}")),
                _ if left < least => Err(format!("{left} under new limits, {least} must be left")),
                _ => Ok(()),
            };
        }
        if refilled > earned + i128::from(self.is_outdated) {
            return Err(format!("{refilled} were refilled, but {elapsed} ms earn {earned}"));
        }
        let may_credit = self.record.may_credit(self.place);
        let may_be_full = held + earned + may_credit >= ceiling;
        // Calls under different limits can go in one write: the lowest ceiling cuts the balance.
        let lowest = self.lowest(ceiling);
        if refilled < earned && lowest < ceiling && tokens + net + may_credit >= lowest {
            excuses.count(Excuse::LowestCeiling);
            return Ok(());
        }
        if refilled < earned {
            // Refill and refunds above the ceiling are lost.
            let credited = ceiling - held - refilled;
            if !(0..=may_credit).contains(&credited) || !may_be_full {
                return Err(format!(
                    "{refilled} were refilled, {elapsed} ms earn {earned}, but it is not full"
                ));
            }
            if credited > 0 {
                excuses.count(Excuse::FullInBetween);
            }
        } else if cell.remainder != remainder {
            if !(self.is_outdated || may_be_full && cell.remainder == 0) {
                return Err(format!("the remainder is {}, must be {remainder}", cell.remainder));
            }
            if held + earned < ceiling {
                excuses.count(Excuse::RemainderDropped);
            }
        }
        self.check_unmoved(net, elapsed, held, &old)
    }

    /// The lowest ceiling under which one of the client's calls was made.
    fn lowest(&self, ceiling: i128) -> i128 {
        self.record.lowest_ceiling(self.place).map_or(ceiling, |whole| self.share_of(whole))
    }

    /// The most that the client's calls can have taken from above a ceiling, because they were made under a higher
    /// one: at most the difference of the ceilings.
    fn taken_under_more(&self, ceiling: i128) -> i128 {
        let highest =
            self.record.highest_ceiling(self.place).map_or(0, |whole| self.share_of(whole));
        let taken = self.record.may_take_under(self.place, |whole| self.share_of(whole) > ceiling);
        taken.min(highest - ceiling)
    }

    /// The shard's share of an amount of the whole bucket.
    fn share_of(&self, whole: i64) -> i128 {
        let reading = self.new.0;
        share(Millitokens::new(whole), reading.shard, reading.count).get().into()
    }

    /// An item with an expiry must be full by then, because an absent bucket counts as full. The
    /// clock that set the expiry may be behind the one that moved the refill time.
    fn check_expiry(&self, net: i128, ahead_ms: i64) -> Result<(), String> {
        let (reading, cell) = self.new;
        let Some(ttl) = reading.ttl else { return Ok(()) };
        // A mere refill changes neither when it is full nor when it expires.
        let is_refill = |(before, old): (&Reading, Cell)| {
            net == 0 && before.ttl == reading.ttl && old.rate == cell.rate
        };
        if self.old.is_some_and(is_refill) {
            return Ok(());
        }
        let age_ms = self.oldest_ms.map_or(0, |oldest| (reading.rf - oldest).max(0));
        let left_ms = ttl * 1_000 + 2 * ahead_ms + age_ms - reading.rf;
        let left_ms = u64::try_from(left_ms).unwrap_or(0);
        let (earned, _) = cell.rate.earned(left_ms, cell.remainder);
        let ceiling = i128::from(cell.rate.capacity().get());
        if i128::from(cell.tokens) + i128::from(earned.get()) < ceiling {
            return Err(format!("expires in {left_ms} ms and is not full by then"));
        }
        Ok(())
    }

    /// A take from a full bucket must move the refill time. Otherwise the same time refills twice.
    fn check_unmoved(&self, net: i128, elapsed: u64, held: i128, old: &Cell) -> Result<(), String> {
        let Some(oldest_ms) = self.oldest_ms.filter(|_| elapsed == 0 && net != 0) else {
            return Ok(());
        };
        let waited = u64::try_from(oldest_ms - self.new.0.rf).unwrap_or(0);
        let (earned, _) = old.rate.earned(waited, old.remainder);
        let ceiling = i128::from(old.rate.capacity().get());
        if waited > 0 && held + i128::from(earned.get()) > ceiling {
            return Err(format!(
                "it was full after {waited} ms, and the take did not move its refill time"
            ));
        }
        Ok(())
    }

    fn check_debt(&self, net: i128, tokens: i128, had: i128) -> Result<(), String> {
        let may_charge = self.record.may_charge(self.place);
        if net > 0 && tokens < 0 && had.min(0) - tokens > may_charge {
            return Err(format!("{net} were taken from {had}, but only {may_charge} may be debt"));
        }
        Ok(())
    }

    fn same(&self, left: i128, right: i128, what: &str) -> Result<(), String> {
        if left == right { Ok(()) } else { Err(format!("{what}: {left} is not {right}")) }
    }
}
