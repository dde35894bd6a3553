//! The auditor: sees every change of every bucket and every call of every client, and checks each
//! step.
//!
//! What it knows of a write is the item before and after; who wrote it; and which calls of that
//! client were under way. For each limit the difference of `tc` is what was taken net, so the
//! difference of `tk` tells what was refilled. From this follow, step by step:
//!
//! - *refill*: exactly what the time between the two `rf` earns, remainder included, or less where
//!   the balance reaches the ceiling; never for time that has not come;
//! - *no debt by taking*: below zero only as far as settlements under way explain it;
//! - *never over-admitted*: net taken in any interval is at most the ceiling and what the interval
//!   earns, debt aside. With `N` the net so far, `N - rate * t` must never rise by more than the
//!   ceiling above its lowest value: one number to remember for each limit;
//! - *conservation, and all or nothing*: when a client has nothing under way, what its writes have
//!   taken is what its calls were told. A call that failed or crashed may have taken or not; nothing
//!   is ever given back twice.
//!
//! Beside clients of the original, which keep none of this, all of it still holds of what our clients
//! write, and a bucket is over-admitted by no more than the others have made out of nothing: see
//! [`ledger`](super::ledger).

mod beside;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use zae_limiter_core::{Applied, BucketKey, Millitokens, Target, Timestamp, share};
use zae_limiter_schema::{Item, ItemKey, ParsedKey, bucket_partition, parse_key};

use super::VirtualTime;
use super::dividing::{self, Change};
use super::intervals::{LimitBook, Moments, Place, check_interval};
use super::ledger::Ledger;
use super::reading::{Cell, Reading};
use crate::given::NOW;
use crate::table::{ClientId, Watch, Wrote};

/// A call that changes buckets, by what it asks of them: positive takes, negative gives back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Acquire { legs: usize },
    Settle,
    Reconfigure,
}

/// What a call was told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    /// Everything was taken, or settled.
    Done,
    Refused,
    Failed(Applied),
    /// Nobody waited for the answer.
    Cancelled,
}

/// What is asked of one limit.
#[derive(Clone, Debug)]
pub(crate) struct Part {
    pub(crate) bucket: BucketKey,
    pub(crate) limit: String,
    pub(crate) amount: i64,
}

#[derive(Debug)]
struct Call {
    kind: Kind,
    now: Timestamp,
    began_us: u64,
    buckets: BTreeSet<String>,
    /// The ceilings under which it was made.
    ceilings: BTreeMap<Place, i64>,
    parts: Vec<(Place, i64)>,
    ended: Option<Ended>,
    /// What it was to settle with may have gone away.
    may_pass_over: bool,
}

#[derive(Debug, Default)]
struct ClientBook {
    in_flight: usize,
    /// A call to the table failed since the client last had nothing under way.
    faulted: bool,
    crashed: bool,
    calls: BTreeMap<u64, Call>,
    /// Net taken by its writes since then.
    net: BTreeMap<Place, i128>,
}

#[derive(Debug, Default)]
struct Books {
    /// Of each part of a bucket.
    limits: BTreeMap<Place, LimitBook>,
    /// Of each bucket as a whole, under the name of its first part.
    wholes: BTreeMap<Place, LimitBook>,
    /// The debt of each limit in each part.
    debts: BTreeMap<Place, BTreeMap<u32, i64>>,
    /// The oldest moment that a write has carried, behind the true one.
    age_ms: i64,
    /// When a bucket last lost a limit or started anew, and whether it may have expired.
    vanished_us: BTreeMap<String, u64>,
    expires_s: BTreeMap<String, Option<i64>>,
    /// How far behind the refill time a writer's moment may have been.
    lag_ms: BTreeMap<String, i64>,
    clients: BTreeMap<ClientId, ClientBook>,
    /// Buckets that were ever divided.
    divided: BTreeSet<String>,
    /// Limits that some part of such a bucket has lacked: not all parts learn of a change at once.
    mixed: BTreeSet<Place>,
    /// Where there are clients of the original.
    ledger: Option<Ledger>,
    calls: u64,
    steps: u64,
    violation: Option<String>,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Auditor {
    time: Arc<VirtualTime>,
    /// How far a clock is ahead at most.
    ahead_ms: i64,
    books: Mutex<Books>,
}

impl Auditor {
    pub(crate) fn new(time: Arc<VirtualTime>, ahead_ms: i64) -> Self {
        Self { time, ahead_ms, books: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, Books> {
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The first violation, if there is one.
    pub(crate) fn violation(&self) -> Option<String> {
        self.lock().violation.clone()
    }

    /// How many changes it has looked at.
    pub(crate) fn steps(&self) -> u64 {
        self.lock().steps
    }

    /// Takes note of a violation that somebody else has seen.
    pub(crate) fn accuse(&self, what: impl Into<String>) {
        let mut books = self.lock();
        let what = format!("at {} us: {}", self.time.now_us(), what.into());
        books.violation.get_or_insert(what);
    }

    /// A call begins.
    pub(crate) fn begin(
        &self,
        client: ClientId,
        kind: Kind,
        now: Timestamp,
        targets: &[&Target],
        parts: &[Part],
    ) -> u64 {
        let pk = |key: &BucketKey| bucket_partition(key, 0);
        let mut call = Call {
            kind,
            now,
            began_us: self.time.now_us(),
            buckets: targets.iter().map(|target| pk(target.key())).collect(),
            ceilings: targets
                .iter()
                .flat_map(|target| {
                    let limits = target.limits().iter();
                    limits.map(|(name, rate)| {
                        ((pk(target.key()), name.to_string()), rate.capacity().get())
                    })
                })
                .collect(),
            parts: parts
                .iter()
                .map(|part| ((pk(&part.bucket), part.limit.clone()), part.amount))
                .collect(),
            ended: None,
            may_pass_over: false,
        };
        let mut books = self.lock();
        call.may_pass_over = call.parts.iter().any(|(place, _)| !books.limits.contains_key(place));
        books.calls += 1;
        let id = books.calls;
        books.clients.entry(client).or_default().calls.insert(id, call);
        id
    }

    /// A call has ended.
    pub(crate) fn end(&self, client: ClientId, call: u64, ended: Ended) {
        let mut books = self.lock();
        let book = books.clients.get_mut(&client).expect("a client that called");
        book.calls.get_mut(&call).expect("a call that began").ended = Some(ended);
    }

    /// A client is no more.
    pub(crate) fn crashed(&self, client: ClientId) {
        self.lock().clients.entry(client).or_default().crashed = true;
    }

    /// Nobody has anything to do at this moment: whoever has nothing under way must be even.
    pub(crate) fn at_rest(&self) {
        let now_us = self.time.now_us();
        let latest_s = (self.time.now().as_millis() + self.ahead_ms) / 1_000;
        let mut books = self.lock();
        let Books { clients, violation, limits, vanished_us, expires_s, divided, mixed, .. } =
            &mut *books;
        for (client, book) in clients.iter_mut() {
            let busy = book.calls.values().any(|call| call.ended.is_none());
            if book.in_flight > 0 || (busy && !book.crashed) {
                continue;
            }
            for call in book.calls.values_mut() {
                call.may_pass_over |= call.parts.iter().any(|(place, _)| {
                    let vanished = vanished_us.get(&place.0).is_some_and(|at| *at >= call.began_us);
                    let expires = expires_s.get(&place.0).copied().flatten();
                    let expired = expires.is_some_and(|expires| expires <= latest_s);
                    vanished || expired || mixed.contains(place) || !limits.contains_key(place)
                });
            }
            if let Err(what) = book.balance(divided) {
                violation.get_or_insert(format!("at {now_us} us: client {client}: {what}"));
            }
            book.calls.clear();
            book.net.clear();
            book.faulted = false;
        }
    }

    /// Whether every client has nothing under way.
    pub(crate) fn is_quiet(&self) -> bool {
        self.lock().clients.values().all(|book| book.in_flight == 0)
    }
}

impl Call {
    /// What it has done, as far as can be said.
    fn outcome(&self, book: &ClientBook) -> Outcome {
        let chain = matches!(self.kind, Kind::Acquire { legs } if legs > 1);
        match (self.kind, self.ended) {
            _ if book.crashed => Outcome::Unknown,
            (_, None) => Outcome::Unknown,
            (Kind::Settle, Some(Ended::Done)) if self.may_pass_over => Outcome::Unknown,
            (_, Some(Ended::Done)) => Outcome::Whole,
            (Kind::Settle, Some(Ended::Cancelled)) => match book.faulted || self.may_pass_over {
                true => Outcome::Unknown,
                false => Outcome::Whole,
            },
            (_, Some(Ended::Failed(Applied::Maybe))) => Outcome::Unknown,
            // What was taken could not be given back: it is lost, on the safe side.
            (Kind::Acquire { .. }, Some(Ended::Refused))
                if chain && (book.faulted || self.may_pass_over) =>
            {
                Outcome::Unknown
            }
            (Kind::Acquire { .. }, Some(Ended::Failed(_))) if chain && self.may_pass_over => {
                Outcome::Unknown
            }
            (Kind::Acquire { .. }, Some(Ended::Cancelled))
                if book.faulted || self.may_pass_over =>
            {
                Outcome::Unknown
            }
            _ => Outcome::Nothing,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    Whole,
    Nothing,
    Unknown,
}

impl ClientBook {
    /// Whether what was written is what was told.
    fn balance(&self, divided: &BTreeSet<String>) -> Result<(), String> {
        let mut places: BTreeSet<&Place> = self.net.keys().collect();
        places.extend(self.calls.values().flat_map(|call| call.parts.iter().map(|(at, _)| at)));
        for place in places {
            let written = self.net.get(place).copied().unwrap_or(0);
            let (mut told, mut unknown) = (0_i128, Vec::new());
            for call in self.calls.values() {
                let amounts = call.parts.iter().filter(|(at, _)| at == place);
                for amount in amounts.map(|(_, amount)| i128::from(*amount)) {
                    match call.outcome(self) {
                        Outcome::Whole => told += amount,
                        Outcome::Nothing => {}
                        Outcome::Unknown => unknown.push(amount),
                    }
                }
            }
            let rest = written - told;
            // What is given back to several parts may reach some of them.
            let is_explained = match divided.contains(&place.0) {
                true => is_within(rest, &unknown),
                false => is_sum_of_some(rest, &unknown),
            };
            if !is_explained {
                return Err(format!(
                    "{} {}: its writes took {written} net, its calls were told {told} and perhaps \
                     some of {unknown:?} (faulted: {}, crashed: {})\n{:#?}",
                    place.0, place.1, self.faulted, self.crashed, self.calls
                ));
            }
        }
        Ok(())
    }

    /// What its calls under way, and those just ended, may give back to, or charge, a limit.
    fn may(&self, place: &Place, wanted: impl Fn(&Call, i64) -> i64) -> i128 {
        let parts = self.calls.values().flat_map(|call| {
            call.parts.iter().filter(|(at, _)| at == place).map(move |(_, amount)| (call, *amount))
        });
        parts.map(|(call, amount)| i128::from(wanted(call, amount))).sum()
    }

    fn may_credit(&self, place: &Place) -> i128 {
        self.may(place, |call, amount| match (call.kind, call.ended) {
            (Kind::Settle, _) => (-amount).max(0),
            // What one leg has taken is given back when another refuses, or nobody waits.
            (Kind::Acquire { legs: 1 }, Some(Ended::Done | Ended::Refused)) => 0,
            _ => amount.max(0),
        })
    }

    fn may_charge(&self, place: &Place) -> i128 {
        self.may(place, |call, amount| if call.kind == Kind::Settle { amount.max(0) } else { 0 })
    }

    fn lowest_ceiling(&self, place: &Place) -> Option<i64> {
        self.calls.values().filter_map(|call| call.ceilings.get(place)).copied().min()
    }

    /// The earliest moment that a write to this bucket may carry.
    fn oldest_ms(&self, pk: &str) -> Option<i64> {
        let calls = self.calls.values().filter(|call| call.buckets.contains(pk));
        calls.map(|call| call.now.as_millis()).min()
    }
}

/// Whether some of the amounts, or none, or all, add up to the sum.
fn is_sum_of_some(sum: i128, amounts: &[i128]) -> bool {
    /// With more sums than this only the bounds are looked at.
    const SUMS_MAX: usize = 1 << 16;
    let mut sums = BTreeSet::from([0_i128]);
    for amount in amounts {
        let more: Vec<i128> = sums.iter().map(|sum| sum + amount).collect();
        sums.extend(more);
        if sums.len() > SUMS_MAX {
            return is_within(sum, amounts);
        }
    }
    sums.contains(&sum)
}

/// Whether parts of the amounts can add up to the sum.
fn is_within(sum: i128, amounts: &[i128]) -> bool {
    let least: i128 = amounts.iter().filter(|amount| **amount < 0).sum();
    let most: i128 = amounts.iter().filter(|amount| **amount > 0).sum();
    (least..=most).contains(&sum)
}

impl Watch for Auditor {
    fn sent(&self, client: ClientId) {
        self.lock().clients.entry(client).or_default().in_flight += 1;
    }

    fn wrote(&self, wrote: &Wrote<'_>) {
        let Some((base, shard)) = part_of(wrote.key) else { return };
        let mut books = self.lock();
        books.steps += 1;
        if books.violation.is_some() {
            return;
        }
        let is_original =
            books.ledger.as_ref().is_some_and(|ledger| ledger.is_original(wrote.client));
        let audited = match is_original {
            true => books.note_original(&base, shard, wrote, self.ahead_ms),
            false => books.audit(&base, shard, wrote, self.ahead_ms),
        };
        if let Err(what) = audited {
            let client = wrote.client;
            let shown = |item: Option<&Item>| item.map(|item| Reading::of(shard, item));
            let open = client.and_then(|client| books.clients.get(&client));
            let told = format!(
                "at {} us: client {client:?} on {}: {what}\nbefore: {:#?}\nafter: {:#?}\nits calls: {:#?}",
                wrote.at_us,
                wrote.key,
                shown(wrote.old),
                shown(wrote.new),
                open.map(|book| &book.calls),
            );
            books.violation = Some(told);
        }
    }

    fn wrote_together(&self, wrote: &[Wrote<'_>]) {
        let readings: Vec<_> = wrote.iter().filter_map(Readings::of).collect();
        let changes: Vec<Change<'_>> = readings.iter().map(Readings::change).collect();
        if readings.len() != wrote.len() || !dividing::is_division(&changes) {
            wrote.iter().for_each(|wrote| self.wrote(wrote));
            return;
        }
        let is_stray = |reading: &Readings| self.is_stray(&reading.base, reading.new.shard);
        let onto_stray = readings.iter().any(is_stray);
        if let Err(what) = dividing::check(&changes, onto_stray) {
            let told = format!("{what}\n{readings:#?}");
            drop(changes);
            self.accuse(told);
        }
        let mut books = self.lock();
        books.steps += 1;
        for reading in &readings {
            books.note_part(reading);
            if let Some(ledger) = &mut books.ledger {
                ledger.note(&reading.base, &reading.new, false);
            }
        }
    }

    fn done(&self, client: ClientId, faulted: bool) {
        let mut books = self.lock();
        let book = books.clients.get_mut(&client).expect("a client that sent");
        book.in_flight -= 1;
        book.faulted |= faulted;
    }
}

/// Which bucket an item is a part of, by the name of its first part, and which part.
fn part_of(key: &ItemKey) -> Option<(String, u32)> {
    match parse_key(key)? {
        ParsedKey::Record(zae_limiter_core::Key::Bucket(_)) => Some((key.pk.clone(), 0)),
        ParsedKey::Shard(part) => Some((bucket_partition(&part.bucket, 0), part.shard)),
        _ => None,
    }
}

/// A part of a bucket before and after a write.
#[derive(Debug)]
struct Readings {
    base: String,
    pk: String,
    old: Option<Reading>,
    new: Reading,
}

impl Readings {
    fn of(wrote: &Wrote<'_>) -> Option<Self> {
        let (base, shard) = part_of(wrote.key)?;
        let old = wrote.old.and_then(|item| Reading::of(shard, item));
        let new = Reading::of(shard, wrote.new?)?;
        Some(Self { base, pk: wrote.key.pk.clone(), old, new })
    }

    fn change(&self) -> Change<'_> {
        Change { old: self.old.as_ref(), new: &self.new }
    }
}

/// One write to one limit.
struct Step<'a> {
    /// Of the bucket as a whole: what calls are about.
    place: &'a Place,
    old: Option<(&'a Reading, Cell)>,
    new: (&'a Reading, Cell),
    /// The bucket had expired, or was not there.
    anew: bool,
    book: &'a ClientBook,
    oldest_ms: Option<i64>,
    is_outdated: bool,
}

impl Books {
    /// After a division: what the parts owe, and when the first expires.
    fn note_part(&mut self, reading: &Readings) {
        let Readings { base, pk, new, .. } = reading;
        self.divided.insert(base.clone());
        for (limit, cell) in &new.cells {
            let debts = self.debts.entry((base.clone(), limit.clone())).or_default();
            debts.insert(new.shard, (-cell.tokens).max(0));
        }
        if new.shard == 0 {
            self.expires_s.insert(base.clone(), new.ttl);
        }
        // It has another share from here on.
        self.limits.retain(|(at, _), _| at != pk);
        if new.shard == 0 {
            for (limit, cell) in &new.cells {
                self.limits.insert((pk.clone(), limit.clone()), LimitBook::new(cell.rate));
            }
        }
    }

    fn audit(
        &mut self,
        base: &str,
        shard: u32,
        wrote: &Wrote<'_>,
        ahead_ms: i64,
    ) -> Result<(), String> {
        let pk = &wrote.key.pk;
        let old = wrote.old.and_then(|item| Reading::of(shard, item));
        let Some(client) = wrote.client else {
            if old.is_none_or(|old| old.is_part()) {
                self.vanished_us.insert(base.to_owned(), wrote.at_us);
            }
            if shard == 0 {
                self.expires_s.remove(pk);
            }
            if let Some(ledger) = &mut self.ledger {
                ledger.forget(base, shard);
            }
            return Ok(());
        };
        let new = wrote.new.ok_or("a client deleted the bucket")?;
        let new = Reading::of(shard, new).ok_or("the item is no bucket any more")?;
        let true_ms = NOW.as_millis() + i64::try_from(wrote.at_us / 1_000).unwrap_or(i64::MAX / 2);
        if !new.is_part() {
            return Err("written, and it is no part of its bucket".to_owned());
        }
        if let (Some(old), Some(ledger)) = (&old, &mut self.ledger)
            && !old.is_part()
        {
            return beside::check_brought_back(ledger, base, old, &new);
        }
        if shard == 0 {
            self.expires_s.insert(pk.clone(), new.ttl);
            // For a clock that is ahead it has expired already, or had until this write.
            let lives = [old.as_ref().and_then(|old| old.ttl), new.ttl];
            if lives.into_iter().flatten().any(|ttl| ttl * 1_000 <= true_ms + ahead_ms) {
                self.vanished_us.insert(base.to_owned(), wrote.at_us);
            }
        }
        if let Some(old) = &old {
            if old.count != new.count && new.count != 1 {
                return Err(format!("of {} parts it became one of {}", old.count, new.count));
            }
            if new.rf < old.rf {
                return Err(format!("time ran back from {} to {}", old.rf, new.rf));
            }
            if old.cells.keys().any(|limit| !new.cells.contains_key(limit)) {
                self.vanished_us.insert(base.to_owned(), wrote.at_us);
            }
        }
        if self.divided.contains(base) {
            let named = self.wholes.keys().filter(|(at, _)| at == base);
            let lacking = named.filter(|(_, limit)| !new.cells.contains_key(limit));
            self.mixed.extend(lacking.cloned());
        }
        if new.rf > true_ms + ahead_ms {
            return Err(format!("{} ms were paid out before their time", new.rf - true_ms));
        }
        // An item that some clock takes for expired may start anew.
        let anew = old.as_ref().is_none_or(|old| {
            let may_be_expired = old.ttl.is_some_and(|ttl| ttl * 1_000 <= true_ms + ahead_ms);
            may_be_expired
                && new.cells.iter().all(|(limit, cell)| cell.is_full_less_net(old, limit))
        });
        if anew {
            self.vanished_us.insert(base.to_owned(), wrote.at_us);
        }
        // Which clock that was is not known: up to twice the error, between it and the last one,
        // and its life may have been measured from a moment before the refill time.
        let lag_ms = self.lag_ms.entry(pk.clone()).or_default();
        let slack_ms = if anew && old.is_some() { 2 * ahead_ms + *lag_ms } else { 0 };
        let book = self.clients.entry(client).or_default();
        let oldest_ms = book.oldest_ms(base);
        self.age_ms = self.age_ms.max(oldest_ms.map_or(0, |oldest| true_ms - oldest));
        *lag_ms = oldest_ms.map_or(0, |oldest| new.rf - oldest).max(*lag_ms);
        let written = Written {
            base,
            old: old.as_ref(),
            new: &new,
            anew,
            book,
            oldest_ms,
            is_outdated: false,
        };
        let nets = written.nets();
        let at_ms = true_ms - ahead_ms - self.age_ms;
        let (made, is_outdated) = match &mut self.ledger {
            None => written.check(ahead_ms).map(|()| (vec![0; nets.len()], false))?,
            Some(ledger) => written.check_beside(ledger, wrote, ahead_ms, at_ms)?,
        };
        let belongs = self.ledger.as_ref().is_none_or(|ledger| ledger.belongs(base, shard));
        let book = self.clients.entry(client).or_default();
        for ((limit, net), made) in nets.into_iter().zip(made) {
            let place = (base.to_owned(), limit.clone());
            let is_new = old.as_ref().is_none_or(|old| !old.cells.contains_key(&limit));
            if is_new && (shard == 0 || old.is_some()) {
                // A new limit, which starts full.
                self.wholes.remove(&place);
            }
            *book.net.entry(place.clone()).or_default() += net;
            // A write that leaves a limit as it is says nothing about its moment.
            let base_ms = oldest_ms.filter(|_| net != 0).map_or(new.rf, |at| at.max(new.rf));
            let cell = new.cells[&place.1];
            let moments = Moments { base_ms, rf: new.rf, slack_ms };
            let part = (pk.clone(), place.1.clone());
            let debt = i128::from((-cell.tokens).max(0));
            // The interval by the part alone starts when it is within its share again.
            let before = old.as_ref().and_then(|old| old.cells.get(&limit));
            let was_over = before.is_some_and(|cell| cell.tokens > cell.rate.capacity().get());
            if is_outdated || was_over {
                self.limits.insert(part, LimitBook::new(cell.rate));
            } else {
                check_interval(&mut self.limits, &part, &cell.rate, debt, net, moments)?;
            }
            // And of all parts together, by the true time: each has its own refill time.
            let debts = self.debts.entry(place.clone()).or_default();
            debts.insert(shard, (-cell.tokens).max(0));
            let debt = debts.values().map(|debt| i128::from(*debt)).sum();
            let slack_ms = slack_ms.max(2 * ahead_ms + self.age_ms);
            let moments = Moments { base_ms: true_ms, rf: true_ms, slack_ms };
            if belongs {
                check_interval(&mut self.wholes, &place, &cell.whole, debt, net - made, moments)
                    .map_err(|what| format!("all parts together: {what}"))?;
            }
        }
        self.limits.retain(|(at, limit), _| at != pk || new.cells.contains_key(limit));
        Ok(())
    }
}

/// One write to one part.
struct Written<'a> {
    base: &'a str,
    old: Option<&'a Reading>,
    new: &'a Reading,
    anew: bool,
    book: &'a ClientBook,
    oldest_ms: Option<i64>,
    /// It is looked at as one by a count that has changed since. A part that is full by the new count
    /// drops its remainder, less than a millitoken, and whoever remembers it cannot notice.
    is_outdated: bool,
}

impl Written<'_> {
    /// What was taken of a limit.
    fn net(&self, limit: &str, cell: &Cell) -> i128 {
        let before = self.old.and_then(|old| old.cells.get(limit));
        i128::from(cell.consumed) - before.map_or(0, |before| i128::from(before.consumed))
    }

    fn nets(&self) -> Vec<(String, i128)> {
        let cells = self.new.cells.iter();
        cells.map(|(limit, cell)| (limit.clone(), self.net(limit, cell))).collect()
    }

    fn check(&self, ahead_ms: i64) -> Result<(), String> {
        for (limit, cell) in &self.new.cells {
            let place = (self.base.to_owned(), limit.clone());
            let step = Step {
                place: &place,
                old: self.old.and_then(|old| Some((old, *old.cells.get(limit)?))),
                new: (self.new, *cell),
                anew: self.anew,
                book: self.book,
                oldest_ms: self.oldest_ms,
                is_outdated: self.is_outdated,
            };
            step.check(self.net(limit, cell)).map_err(|what| format!("{limit}: {what}"))?;
            step.check_expiry(ahead_ms).map_err(|what| format!("{limit}: {what}"))?;
        }
        Ok(())
    }
}

impl Step<'_> {
    fn check(&self, net: i128) -> Result<(), String> {
        let (reading, cell) = self.new;
        let (tokens, ceiling) = (i128::from(cell.tokens), i128::from(cell.rate.capacity().get()));
        // Whoever has put it above its ceiling was seen doing that.
        let is_untouched = self.old.is_some_and(|(before, old)| {
            net == 0 && old.tokens == cell.tokens && before.rf == reading.rf
        });
        if tokens > ceiling && !is_untouched {
            return Err(format!("{tokens} is above the ceiling of {ceiling}"));
        }
        if cell.remainder >= cell.rate.period_ms() {
            return Err(format!("a remainder of {} is a millitoken or more", cell.remainder));
        }
        // A division may leave a part so: what it held was less than a millitoken short of full.
        let was_so = |(_, old): (&Reading, Cell)| {
            (old.tokens, old.remainder) == (cell.tokens, cell.remainder)
        };
        if tokens == ceiling && cell.remainder > 0 && !self.old.is_some_and(was_so) {
            return Err(format!("it is full, and carries over a remainder of {}", cell.remainder));
        }
        let Some((before, old)) = self.old.filter(|_| !self.anew) else {
            if reading.shard > 0 && self.old.is_none() && self.anew {
                return self.same(tokens + net, 0, "a part that was missing starts with nothing");
            }
            // A limit that was not there is full.
            return self.same(tokens + net, ceiling, "a new limit is full less what is taken");
        };
        let elapsed = u64::try_from(reading.rf - before.rf).unwrap_or(0);
        let (earned, remainder) = old.rate.earned(elapsed, old.remainder);
        let (earned, held) = (i128::from(earned.get()), i128::from(old.tokens));
        let refilled = tokens + net - held;
        self.check_debt(net, tokens, held + refilled)?;
        if old.rate != cell.rate {
            let whole = (held + earned).min(old.rate.capacity().get().into());
            let least = whole.min(ceiling) - self.book.may_credit(self.place);
            let left = tokens + net;
            return match left {
                _ if left > whole => Err(format!("{left} under new limits, it held {whole}")),
                _ if left < least => Err(format!("{left} under new limits, {least} must be left")),
                _ => Ok(()),
            };
        }
        if refilled > earned + i128::from(self.is_outdated) {
            return Err(format!("{refilled} were refilled, {elapsed} ms earn {earned}"));
        }
        let may_credit = self.book.may_credit(self.place);
        let may_be_full = held + earned + may_credit >= ceiling;
        // Calls under different limits can go together in one write: the lowest ceiling cuts.
        let lowest = self.book.lowest_ceiling(self.place).map_or(ceiling, |whole| {
            share(Millitokens::new(whole), reading.shard, reading.count).get().into()
        });
        if refilled < earned && lowest < ceiling && tokens + net + may_credit >= lowest {
            return Ok(());
        }
        if refilled < earned {
            // At the ceiling what was earned, or given back, is lost.
            let credited = ceiling - held - refilled;
            if !(0..=may_credit).contains(&credited) || !may_be_full {
                return Err(format!(
                    "{refilled} were refilled, {elapsed} ms earn {earned}, and it is not full"
                ));
            }
        } else if cell.remainder != remainder
            && !(may_be_full && cell.remainder == 0)
            && !self.is_outdated
        {
            return Err(format!("the remainder is {}, must be {remainder}", cell.remainder));
        }
        self.check_unmoved(net, elapsed, held, &old)
    }

    /// An item that expires is full by then: starting anew it is the same. The clock by which its
    /// life was measured may be behind the one that moved the refill time, or have been read before.
    fn check_expiry(&self, ahead_ms: i64) -> Result<(), String> {
        let (reading, cell) = self.new;
        let Some(ttl) = reading.ttl else { return Ok(()) };
        let age_ms = self.oldest_ms.map_or(0, |oldest| (reading.rf - oldest).max(0));
        let left_ms = ttl * 1_000 + 2 * ahead_ms + age_ms - reading.rf;
        let left_ms = u64::try_from(left_ms).unwrap_or(0);
        let (earned, _) = cell.rate.earned(left_ms, cell.remainder);
        let ceiling = i128::from(cell.rate.capacity().get());
        if i128::from(cell.tokens) + i128::from(earned.get()) < ceiling {
            return Err(format!("it expires in {left_ms} ms and is not full by then"));
        }
        Ok(())
    }

    /// A full bucket that is taken from without moving the refill time is paid twice.
    fn check_unmoved(&self, net: i128, elapsed: u64, held: i128, old: &Cell) -> Result<(), String> {
        let Some(oldest_ms) = self.oldest_ms.filter(|_| elapsed == 0 && net != 0) else {
            return Ok(());
        };
        let waited = u64::try_from(oldest_ms - self.new.0.rf).unwrap_or(0);
        let (earned, _) = old.rate.earned(waited, old.remainder);
        let ceiling = i128::from(old.rate.capacity().get());
        if waited > 0 && held + i128::from(earned.get()) > ceiling {
            return Err(format!(
                "it was full after {waited} ms, and was taken from without paying them out"
            ));
        }
        Ok(())
    }

    fn check_debt(&self, net: i128, tokens: i128, had: i128) -> Result<(), String> {
        let may_charge = self.book.may_charge(self.place);
        if net > 0 && tokens < 0 && had.min(0) - tokens > may_charge {
            return Err(format!("{net} were taken of {had}, only {may_charge} may become debt"));
        }
        Ok(())
    }

    fn same(&self, left: i128, right: i128, what: &str) -> Result<(), String> {
        if left == right { Ok(()) } else { Err(format!("{what}: {left} is not {right}")) }
    }
}
