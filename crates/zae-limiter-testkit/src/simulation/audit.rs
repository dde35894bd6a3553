//! The auditor: sees every write to every bucket and every call of every client, and checks each
//! write.
//!
//! For a write the auditor has the item before and after, the client, and the client's calls in
//! progress. For each limit the difference of `tc` is the net consumption. With that, the
//! difference of `tk` gives the refill. For every write the auditor checks:
//!
//! - *refill*: exactly what the time between the two `rf` earns, with the remainder, or less where
//!   the balance reaches the ceiling; never for time in the future;
//! - *no debt by taking*: a balance below zero needs settlements in progress that explain it;
//! - *no over-admission*: net consumption in any interval is at most the ceiling plus what the
//!   interval earns, debt aside. With `N` the net consumption so far, `N - rate * t` must never
//!   rise by more than the ceiling above its lowest value: one number per limit is enough;
//! - *conservation, and all or nothing*: when a client has no calls in progress, its writes have
//!   taken what the replies say. A call that failed or crashed may have taken its amount or not.
//!   Nothing is ever refunded twice;
//! - *older limits never replace newer ones*: see [`limits`];
//! - *no false outage*: a call fails with an outage only if the table left a call unanswered.
//!
//! Clients of the original follow none of these rules. Next to them the rules still hold for the
//! writes of our clients, and a bucket is over-admitted by at most what the original has made: see
//! [`ledger`](super::ledger).

mod beside;
mod calls;
mod excuses;
mod limits;
mod rewound;
mod step;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use zae_limiter_core::{BucketKey, MAX_CLOCK_SKEW, Target, Timestamp};
use zae_limiter_schema::{Item, ItemKey, ParsedKey, bucket_partition, parse_key};

use super::VirtualTime;
use super::intervals::{LimitHistory, Moments, Place, check_interval};
use super::ledger::Ledger;
use super::reading::Reading;
use super::resharding::{self, Change};
use super::wrong_clocks::DATE_LAG_MS;
use crate::given::NOW;
use crate::table::{ClientId, Watch, Wrote};
use calls::{Call, ClientRecord};
use limits::{CallLimits, Following};
use step::Written;

pub(crate) use calls::{CallAmount, Ended, Kind};
pub use excuses::{Excuse, Excuses};

#[derive(Debug, Default)]
struct AuditState {
    /// The history of each shard.
    limits: BTreeMap<Place, LimitHistory>,
    /// The history of each whole bucket, under the partition key of its first shard.
    wholes: BTreeMap<Place, LimitHistory>,
    /// The debt of each limit in each shard.
    debts: BTreeMap<Place, BTreeMap<u32, i64>>,
    /// The largest age of a call's time when it was written.
    age_ms: i64,
    /// When a bucket last lost a limit or started anew.
    vanished_us: BTreeMap<String, u64>,
    /// The expiry of each bucket.
    expires_s: BTreeMap<String, Option<i64>>,
    /// How far a writer's time may have been behind the refill time.
    lag_ms: BTreeMap<String, i64>,
    clients: BTreeMap<ClientId, ClientRecord>,
    /// Buckets that were ever split.
    resharded: BTreeSet<String>,
    /// Limits that some shard of such a bucket has lacked: a change reaches the shards one by one.
    mixed: BTreeSet<Place>,
    /// Buckets whose exact consumption is unknown.
    unsure: BTreeSet<String>,
    /// Set if there are clients of the original.
    ledger: Option<Ledger>,
    /// The responses of the table have a date.
    is_dated: bool,
    /// The client whose clock is ahead and who does not check it.
    freezer: Option<ClientId>,
    /// How often it has moved a refill time, and how often one was rewound.
    frozen: u64,
    rewound: u64,
    excuses: Excuses,
    calls: u64,
    steps: u64,
    violation: Option<String>,
}

/// The auditor of a run.
#[derive(Debug)]
pub(crate) struct Auditor {
    time: Arc<VirtualTime>,
    /// How far a clock can be ahead of the true time.
    ahead_ms: i64,
    state: Mutex<AuditState>,
}

impl Auditor {
    pub(crate) fn new(time: Arc<VirtualTime>, ahead_ms: i64) -> Self {
        Self { time, ahead_ms, state: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, AuditState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The first violation, if there is one.
    pub(crate) fn violation(&self) -> Option<String> {
        self.lock().violation.clone()
    }

    /// Counts something that could not be checked exactly.
    pub(crate) fn excuse(&self, excuse: Excuse) {
        self.lock().excuses.count(excuse);
    }

    /// How often each excuse was used.
    pub(crate) fn excuses(&self) -> Excuses {
        self.lock().excuses.clone()
    }

    /// The responses of the table have a date. This client freezes buckets.
    pub(crate) fn expect_dates(&self, freezer: Option<ClientId>) {
        let mut state = self.lock();
        (state.is_dated, state.freezer) = (true, freezer);
    }

    /// How often a refill time was moved far ahead, and how often one was rewound.
    pub(crate) fn frozen_and_rewound(&self) -> (u64, u64) {
        let state = self.lock();
        (state.frozen, state.rewound)
    }

    /// The number of writes that were checked.
    pub(crate) fn steps(&self) -> u64 {
        self.lock().steps
    }

    /// Records a violation. The first one is kept.
    pub(crate) fn report_violation(&self, what: impl Into<String>) {
        let mut state = self.lock();
        let what = format!("at {} us: {}", self.time.now_us(), what.into());
        state.violation.get_or_insert(what);
    }

    /// A call begins.
    pub(crate) fn begin(
        &self,
        client: ClientId,
        kind: Kind,
        now: Timestamp,
        targets: &[&Target],
        amounts: &[CallAmount],
    ) -> u64 {
        let pk = |key: &BucketKey| bucket_partition(key, 0);
        let mut call = Call {
            kind,
            now,
            began_us: self.time.now_us(),
            buckets: targets.iter().map(|target| pk(target.key())).collect(),
            limits: targets.iter().map(|target| CallLimits::of(target)).collect(),
            amounts: amounts
                .iter()
                .map(|amount| ((pk(&amount.bucket), amount.limit.clone()), amount.amount))
                .collect(),
            ended: None,
            unanswered: 0,
            may_vanish: BTreeSet::new(),
        };
        let mut state = self.lock();
        let true_ms = self.time.now().as_millis();
        let apart = Duration::from_millis(now.as_millis().abs_diff(true_ms));
        if state.is_dated && apart > MAX_CLOCK_SKEW {
            // The store uses the table's time instead.
            call.now = Timestamp::from_millis(true_ms - DATE_LAG_MS);
        }
        call.unanswered = state.clients.entry(client).or_default().unanswered;
        let lacking = call.amounts.iter().filter(|(place, _)| !state.limits.contains_key(place));
        call.may_vanish = lacking.map(|(place, _)| place.clone()).collect();
        state.calls += 1;
        let id = state.calls;
        state.clients.entry(client).or_default().calls.insert(id, call);
        id
    }

    /// A call has ended.
    pub(crate) fn end(&self, client: ClientId, call: u64, ended: Ended) {
        let mut state = self.lock();
        let AuditState { clients, unsure, violation, .. } = &mut *state;
        let record = clients.get_mut(&client).expect("a client that called");
        match record.calls.get_mut(&call) {
            Some(call) => {
                call.ended = Some(ended);
                // The limiter above the store may treat the settlement as done or not.
                if call.kind == Kind::Settle && ended != Ended::Done {
                    unsure.extend(call.buckets.iter().cloned());
                }
                // Such an error opens breakers.
                let is_outage = matches!(ended, Ended::Failed { is_outage: true, .. });
                if is_outage && !record.crashed && call.unanswered == record.unanswered {
                    let what =
                        format!("an outage, although the table replied to every call: {call:#?}");
                    let what = format!("at {} us: client {client}: {what}", self.time.now_us());
                    violation.get_or_insert(what);
                }
            }
            // The tasks of a crashed client are dropped after its calls were cleared.
            None => assert!(record.crashed, "a call has ended that did not begin"),
        }
    }

    /// A client has crashed.
    pub(crate) fn crashed(&self, client: ClientId) {
        self.lock().clients.entry(client).or_default().crashed = true;
    }

    /// Whether the exact consumption of a bucket is unknown.
    pub(crate) fn is_unsure(&self, base: &str) -> bool {
        self.lock().unsure.contains(base)
    }

    /// Called when all tasks wait: checks the conservation of all clients without calls in
    /// progress.
    pub(crate) fn at_rest(&self) {
        let now_us = self.time.now_us();
        let latest_s = (self.time.now().as_millis() + self.ahead_ms) / 1_000;
        let mut state = self.lock();
        let AuditState {
            clients,
            violation,
            limits,
            vanished_us,
            expires_s,
            resharded,
            mixed,
            excuses,
            unsure,
            ..
        } = &mut *state;
        for (client, record) in clients.iter_mut() {
            let busy = record.calls.values().any(|call| call.ended.is_none());
            if record.in_flight > 0 || (busy && !record.crashed) {
                continue;
            }
            for call in record.calls.values_mut() {
                let may_vanish = call.amounts.iter().filter(|(place, _)| {
                    let vanished = vanished_us.get(&place.0).is_some_and(|at| *at >= call.began_us);
                    let expires = expires_s.get(&place.0).copied().flatten();
                    let expired = expires.is_some_and(|expires| expires <= latest_s);
                    vanished || expired || mixed.contains(place) || !limits.contains_key(place)
                });
                call.may_vanish.extend(may_vanish.map(|(place, _)| place.clone()));
            }
            if let Err(what) = record.balance(resharded, unsure, excuses) {
                violation.get_or_insert(format!("at {now_us} us: client {client}: {what}"));
            }
            record.calls.clear();
            record.net.clear();
            record.faulted = false;
        }
    }

    /// Calls that began before `before_us` and have not ended, of clients that have not crashed.
    pub(crate) fn unended(&self, before_us: u64) -> Vec<String> {
        let state = self.lock();
        let alive = state.clients.iter().filter(|(_, record)| !record.crashed);
        let calls =
            alive.flat_map(|(client, record)| record.calls.values().map(move |c| (client, c)));
        let unended = calls.filter(|(_, call)| call.ended.is_none() && call.began_us < before_us);
        unended
            .map(|(client, call)| {
                let Call { kind, began_us, amounts, .. } = call;
                format!("client {client}: {kind:?} of {amounts:?} since {began_us} us")
            })
            .collect()
    }

    /// Whether no client has a table call in flight.
    pub(crate) fn is_quiet(&self) -> bool {
        self.lock().clients.values().all(|record| record.in_flight == 0)
    }
}

impl Watch for Auditor {
    fn sent(&self, client: ClientId) {
        self.lock().clients.entry(client).or_default().in_flight += 1;
    }

    fn wrote(&self, wrote: &Wrote<'_>) {
        let Some((base, shard)) = shard_of(wrote.key) else { return };
        let mut state = self.lock();
        state.steps += 1;
        if state.violation.is_some() {
            return;
        }
        let is_original =
            state.ledger.as_ref().is_some_and(|ledger| ledger.is_original(wrote.client));
        let is_freezer = wrote.client.is_some() && wrote.client == state.freezer;
        let audited = match is_original {
            _ if is_freezer => state.note_frozen(wrote),
            true => state.note_original(&base, shard, wrote, self.ahead_ms),
            false => state.audit(&base, shard, wrote, self.ahead_ms),
        };
        if let Err(what) = audited {
            let client = wrote.client;
            let shown = |item: Option<&Item>| item.map(|item| Reading::of(shard, item));
            let open = client.and_then(|client| state.clients.get(&client));
            let message = format!(
                "at {} us: client {client:?} on {}: {what}\nbefore: {:#?}\nafter: {:#?}\nits calls: {:#?}",
                wrote.at_us,
                wrote.key,
                shown(wrote.old),
                shown(wrote.new),
                open.map(|record| &record.calls),
            );
            state.violation = Some(message);
        }
    }

    fn wrote_together(&self, wrote: &[Wrote<'_>]) {
        let readings: Vec<_> = wrote.iter().filter_map(Readings::of).collect();
        let changes: Vec<Change<'_>> = readings.iter().map(Readings::change).collect();
        if readings.len() != wrote.len() || !resharding::is_reshard(&changes) {
            wrote.iter().for_each(|wrote| self.wrote(wrote));
            return;
        }
        let is_stray = |reading: &Readings| self.is_stray(&reading.base, reading.new.shard);
        let onto_stray = readings.iter().any(is_stray);
        if let Err(what) = resharding::check(&changes, onto_stray) {
            let message = format!("{what}\n{readings:#?}");
            drop(changes);
            self.report_violation(message);
        }
        let mut state = self.lock();
        state.steps += 1;
        for reading in &readings {
            state.note_shard(reading);
            if let Some(ledger) = &mut state.ledger {
                ledger.note(&reading.base, &reading.new, false);
            }
        }
    }

    fn task_panicked(&self, client: ClientId, message: &str) {
        self.report_violation(format!("a task of client {client} panicked: {message}"));
    }

    fn done(&self, client: ClientId, faulted: bool) {
        let mut state = self.lock();
        let record = state.clients.get_mut(&client).expect("a client that sent");
        record.in_flight -= 1;
        record.faulted |= faulted;
    }

    fn unanswered(&self, client: ClientId) {
        self.lock().clients.entry(client).or_default().unanswered += 1;
    }
}

/// The bucket of an item, as the partition key of its first shard, and the item's shard number.
fn shard_of(key: &ItemKey) -> Option<(String, u32)> {
    match parse_key(key)? {
        ParsedKey::Record(zae_limiter_core::Key::Bucket(_)) => Some((key.pk.clone(), 0)),
        ParsedKey::Shard(key) => Some((bucket_partition(&key.bucket, 0), key.shard)),
        _ => None,
    }
}

/// The true time of a write.
fn true_ms(wrote: &Wrote<'_>) -> i64 {
    NOW.as_millis() + i64::try_from(wrote.at_us / 1_000).unwrap_or(i64::MAX / 2)
}

/// A shard of a bucket before and after a write.
#[derive(Debug)]
struct Readings {
    base: String,
    pk: String,
    old: Option<Reading>,
    new: Reading,
}

impl Readings {
    fn of(wrote: &Wrote<'_>) -> Option<Self> {
        let (base, shard) = shard_of(wrote.key)?;
        let old = wrote.old.and_then(|item| Reading::of(shard, item));
        let new = Reading::of(shard, wrote.new?)?;
        Some(Self { base, pk: wrote.key.pk.clone(), old, new })
    }

    fn change(&self) -> Change<'_> {
        Change { old: self.old.as_ref(), new: &self.new }
    }
}

impl AuditState {
    /// Records the debts, the expiry and the new share of a shard after a split or merge.
    fn note_shard(&mut self, reading: &Readings) {
        let Readings { base, pk, new, .. } = reading;
        self.resharded.insert(base.clone());
        for (limit, cell) in &new.cells {
            let debts = self.debts.entry((base.clone(), limit.clone())).or_default();
            debts.insert(new.shard, (-cell.tokens).max(0));
        }
        if new.shard == 0 {
            self.expires_s.insert(base.clone(), new.ttl);
        }
        // The shard has another share from here on, so its history starts again.
        self.limits.retain(|(at, _), _| at != pk);
        if new.shard == 0 {
            for (limit, cell) in &new.cells {
                self.limits.insert((pk.clone(), limit.clone()), LimitHistory::new(cell.rate));
            }
        }
    }

    /// Records that a client has deleted an item. A later bucket starts full.
    fn note_deletion(
        &mut self,
        base: &str,
        shard: u32,
        wrote: &Wrote<'_>,
        client: ClientId,
    ) -> Result<(), String> {
        if !self.clients.entry(client).or_default().may_delete(base) {
            return Err("a client deleted the bucket, but no call asked for that".to_owned());
        }
        self.vanished_us.insert(base.to_owned(), wrote.at_us);
        self.limits.retain(|(at, _), _| *at != wrote.key.pk);
        for (_, debts) in self.debts.iter_mut().filter(|((at, _), _)| at == base) {
            debts.remove(&shard);
        }
        if shard == 0 {
            self.expires_s.remove(base);
            self.wholes.retain(|(at, _), _| at != base);
        }
        if let Some(ledger) = &mut self.ledger {
            ledger.forget(base, shard);
        }
        Ok(())
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
            if old.as_ref().is_none_or(Reading::holds_share) {
                self.vanished_us.insert(base.to_owned(), wrote.at_us);
            }
            if shard == 0 {
                self.expires_s.remove(pk);
                // Later refunds find no bucket.
                self.limits.retain(|(at, _), _| at != pk);
            }
            return self.note_removal(base, shard, wrote, ahead_ms);
        };
        let Some(new) = wrote.new else {
            return self.note_deletion(base, shard, wrote, client);
        };
        let new = Reading::of(shard, new).ok_or("the item is no longer a bucket")?;
        let true_ms = true_ms(wrote);
        if !new.holds_share() {
            return Err("written, although it is not a shard of its bucket".to_owned());
        }
        if let (Some(old), Some(ledger)) = (&old, &mut self.ledger)
            && !old.holds_share()
        {
            return beside::check_restored(ledger, base, old, &new);
        }
        if shard == 0 {
            self.expires_s.insert(pk.clone(), new.ttl);
            // By a clock that is ahead it has expired, or had expired before this write.
            let lives = [old.as_ref().and_then(|old| old.ttl), new.ttl];
            if lives.into_iter().flatten().any(|ttl| ttl * 1_000 <= true_ms + ahead_ms) {
                self.vanished_us.insert(base.to_owned(), wrote.at_us);
            }
        }
        if let Some(old) = &old {
            if old.count != new.count && new.count != 1 {
                return Err(format!("the shard count went from {} to {}", old.count, new.count));
            }
            if new.rf < old.rf {
                return self.check_rewound(pk, (old, &new), true_ms, ahead_ms);
            }
            if old.cells.keys().any(|limit| !new.cells.contains_key(limit)) {
                self.vanished_us.insert(base.to_owned(), wrote.at_us);
            }
        }
        if self.resharded.contains(base) {
            let named = self.wholes.keys().filter(|(at, _)| at == base);
            let lacking = named.filter(|(_, limit)| !new.cells.contains_key(limit));
            self.mixed.extend(lacking.cloned());
        }
        // A wrong clock has written it before, and it waits to be rewound.
        let is_frozen = self.is_dated
            && new.rf > true_ms + ahead_ms
            && old.as_ref().is_some_and(|old| old.rf == new.rf);
        if new.rf > true_ms + ahead_ms && !is_frozen {
            return Err(format!("refilled for {} ms in the future", new.rf - true_ms));
        }
        // An item that has expired by some clock may start anew.
        let anew = old.as_ref().is_none_or(|old| {
            let may_be_expired = old.ttl.is_some_and(|ttl| ttl * 1_000 <= true_ms + ahead_ms);
            may_be_expired
                && new.cells.iter().all(|(limit, cell)| cell.is_full_less_net(old, limit))
        });
        if anew {
            self.vanished_us.insert(base.to_owned(), wrote.at_us);
        }
        if anew && old.is_some() {
            self.excuses.count(Excuse::Anew);
            // Refunds to an expired bucket are ignored.
            self.unsure.insert(base.to_owned());
        }
        // The clock is unknown, so the slack is twice the error: of this clock and of the last one.
        // And the lifetime may count from a time before the refill time.
        let lag_ms = self.lag_ms.entry(pk.clone()).or_default();
        let slack_ms = if anew && old.is_some() { 2 * ahead_ms + *lag_ms } else { 0 };
        let record = self.clients.entry(client).or_default();
        let before = old.as_ref().filter(|old| old.holds_share());
        let following = Following { bucket: base, old: before, new: &new, anew, record };
        following.check(&mut self.excuses)?;
        let oldest_ms = record.oldest_ms(base);
        self.age_ms = self.age_ms.max(oldest_ms.map_or(0, |oldest| true_ms - oldest));
        if !is_frozen {
            *lag_ms = oldest_ms.map_or(0, |oldest| new.rf - oldest).max(*lag_ms);
        }
        let written = Written {
            base,
            old: old.as_ref(),
            new: &new,
            anew,
            record,
            oldest_ms,
            is_outdated: false,
        };
        let nets = written.nets();
        let at_ms = true_ms - ahead_ms - self.age_ms;
        let excuses = &mut self.excuses;
        let (made, is_outdated) = match &mut self.ledger {
            None => written.check(ahead_ms, excuses).map(|()| (vec![0; nets.len()], false))?,
            Some(ledger) => written.check_beside(ledger, wrote, ahead_ms, at_ms, excuses)?,
        };
        if is_outdated {
            excuses.count(Excuse::Outdated);
        }
        let belongs = self.ledger.as_ref().is_none_or(|ledger| ledger.belongs(base, shard));
        let record = self.clients.entry(client).or_default();
        for ((limit, net), made) in nets.into_iter().zip(made) {
            let place = (base.to_owned(), limit.clone());
            let is_new = old.as_ref().is_none_or(|old| !old.cells.contains_key(&limit));
            if is_new && (shard == 0 || old.is_some()) {
                // A new limit, which starts full.
                self.wholes.remove(&place);
            }
            *record.net.entry(place.clone()).or_default() += net;
            // A write that takes nothing of a limit has no time for it.
            let base_ms = oldest_ms.filter(|_| net != 0).map_or(new.rf, |at| at.max(new.rf));
            let cell = new.cells[&place.1];
            let moments = Moments { base_ms, rf: new.rf, slack_ms };
            let of_shard = (pk.clone(), place.1.clone());
            let debt = i128::from((-cell.tokens).max(0));
            // The interval of the shard alone starts when its balance is within its share again.
            let before = old.as_ref().and_then(|old| old.cells.get(&limit));
            let was_over = before.is_some_and(|cell| cell.tokens > cell.rate.capacity().get());
            // A batch may have taken under the old limits before it applied the new ones. Under the
            // new ones it has taken at most what is missing from the ceiling.
            let missing = i128::from(cell.rate.capacity().get()) - i128::from(cell.tokens);
            let is_new_rate = before.is_none_or(|before| before.rate != cell.rate);
            let net = if is_new_rate { net.min(missing) } else { net };
            if is_outdated || was_over || is_frozen {
                self.limits.insert(of_shard, LimitHistory::new(cell.rate));
            } else {
                check_interval(&mut self.limits, &of_shard, &cell.rate, debt, net, moments)?;
            }
            // And of all shards together, by the true time, because each has its own refill time.
            let debts = self.debts.entry(place.clone()).or_default();
            debts.insert(shard, (-cell.tokens).max(0));
            let debt = debts.values().map(|debt| i128::from(*debt)).sum();
            let slack_ms = slack_ms.max(2 * ahead_ms + self.age_ms);
            let moments = Moments { base_ms: true_ms, rf: true_ms, slack_ms };
            if belongs {
                check_interval(&mut self.wholes, &place, &cell.whole, debt, net - made, moments)
                    .map_err(|what| format!("all shards together: {what}"))?;
            }
        }
        self.limits.retain(|(at, limit), _| at != pk || new.cells.contains_key(limit));
        Ok(())
    }
}
