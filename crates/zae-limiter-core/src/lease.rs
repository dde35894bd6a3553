//! Leases: the tokens that a call holds until it settles for what it used.

use std::future::Future;
use std::panic::Location;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use smallvec::SmallVec;
use zae_limiter_model::{
    AMOUNT_MAX, Invalid, Limit, LimitStatus, MILLI, Millitokens, Take, amount,
};

use crate::acquire::taken_statuses;
use crate::deadline::within;
use crate::dropped::{self, OnDrop};
use crate::error::{Applied, Error, StoreError};
use crate::limiter::{Attempts, Handle, Inner, RateLimiter, no_answer};
use crate::plan::{Leg, LegTaken, Settlement, Takes};
use crate::record::OnUnavailable;
use crate::telemetry;

/// The tokens of one call, until [`commit`](Self::commit) keeps them or [`rollback`](Self::rollback)
/// refunds them.
///
/// A lease that is dropped before either keeps what was [settled](Self::settle) or [flushed](Self::flush),
/// because that is known to be used, and refunds the rest: in the background, without blocking, inside a
/// runtime or outside. [`Acquire::on_drop`](crate::Acquire::on_drop) can keep the estimate, too.
///
/// ```
/// # use zae_limiter_core::{Limit, MemoryStore, RateLimiter};
/// # tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(async {
/// # let limiter = RateLimiter::builder(MemoryStore::new())
/// #     .default_limits([Limit::per_minute("tpm", 10_000)]).open().await?;
/// let mut lease = limiter.acquire("key-1", "gpt-4").take("tpm", 500).await?;
/// lease.settle("tpm", 730)?; // what the call really used
/// lease.commit().await?;
/// # Ok::<(), zae_limiter_core::Error>(())
/// # }).unwrap();
/// ```
#[derive(Debug)]
#[must_use = "a lease that is dropped refunds its estimate"]
pub struct Lease {
    handle: Arc<Handle>,
    /// The legs of the acquire; the takes are what is held now. Empty in a degraded lease.
    legs: SmallVec<[Leg; 1]>,
    /// Where the store took the tokens, one for each leg.
    taken: SmallVec<[LegTaken; 1]>,
    /// What `consume` took on top.
    further: Vec<(Leg, LegTaken)>,
    /// By the index of the limit in the first leg's takes; empty while no limit was adjusted.
    adjustments: Vec<Adjustment>,
    /// The call site of the acquire.
    site: &'static Location<'static>,
    /// The settings of the acquire; `None` if all are defaults.
    call: Option<Box<CallSettings>>,
    state: State,
    /// Whether some of it was admitted without the store.
    degraded: bool,
}

/// The changes to one limit since the acquire, in millitokens.
#[derive(Clone, Copy, Debug, Default)]
struct Adjustment {
    /// The difference that is not yet written.
    difference: i64,
    /// The amount that is known to be used; `None` while there is only an estimate.
    used: Option<i64>,
}

/// The settings of an acquire that also apply to later calls of its lease.
#[derive(Clone, Debug)]
pub(crate) struct CallSettings {
    pub(crate) limits: Option<Vec<Limit>>,
    pub(crate) on_unavailable: Option<OnUnavailable>,
    pub(crate) on_drop: OnDrop,
    /// The level of each leg.
    pub(crate) levels: Vec<usize>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Open,
    /// `commit` was called, and its future not polled yet.
    Committing,
    /// `rollback` was called, and its future not polled yet.
    RollingBack,
    Closed,
}

/// The settlement of a leg, with one difference per take; `None` if all are zero.
fn settlement(
    leg: &Leg,
    taken: &LegTaken,
    difference: impl Fn(&Take) -> Millitokens,
) -> Option<Settlement> {
    let differences: Takes = leg
        .takes
        .iter()
        .map(|take| Take { cell: take.cell, amount: difference(take) })
        .filter(|take| take.amount != Millitokens::ZERO)
        .collect();
    (!differences.is_empty()).then(|| Settlement {
        target: Arc::clone(&leg.target),
        placement: taken.placement,
        differences,
    })
}

fn limit_name<'a>(leg: &'a Leg, take: &Take) -> &'a str {
    leg.target.limits().names()[take.cell].as_str()
}

impl Lease {
    pub(crate) fn new(
        handle: &Arc<Handle>,
        legs: SmallVec<[Leg; 1]>,
        taken: SmallVec<[LegTaken; 1]>,
        call: Option<Box<CallSettings>>,
        site: &'static Location<'static>,
    ) -> Self {
        Self {
            handle: Arc::clone(handle),
            legs,
            taken,
            further: Vec::new(),
            adjustments: Vec::new(),
            call,
            site,
            state: State::Open,
            degraded: false,
        }
    }

    pub(crate) fn degraded(handle: &Arc<Handle>, site: &'static Location<'static>) -> Self {
        let mut lease = Self::new(handle, SmallVec::new(), SmallVec::new(), None, site);
        lease.degraded = true;
        lease
    }

    /// Whether the call was admitted without the store, which was unavailable. Then some or all of the
    /// tokens were not taken.
    pub fn is_degraded(&self) -> bool {
        self.degraded
    }

    /// The status, right after the acquire, of every limit of the entity and its ancestors that was taken
    /// from. If the store keeps a bucket in several shards, `available` counts all of them. Those that it did not write to
    /// count as it saw them last.
    pub fn statuses(&self) -> Vec<LimitStatus> {
        let levels = self.call.as_ref().map_or(&[][..], |call| &call.levels);
        let legs = self.legs.iter().zip(&self.taken).enumerate();
        let statuses = legs.flat_map(|(at, (leg, taken))| {
            taken_statuses(levels.get(at).copied().unwrap_or(at), leg, taken)
        });
        statuses.collect()
    }

    /// The header fields of a response to the caller, with lower-case names: `ratelimit-policy` and `ratelimit`. They
    /// are about the caller's own limits; see [`http_fields`](zae_limiter_model::http_fields).
    pub fn http_fields(&self) -> Vec<(&'static str, String)> {
        zae_limiter_model::http_fields(&self.statuses())
    }

    /// The header fields of a response to the caller, typed: see [`http_fields`](Self::http_fields).
    #[cfg(feature = "http")]
    pub fn headers(&self) -> http::HeaderMap {
        zae_limiter_model::headers(&self.statuses())
    }

    /// The net tokens held of a limit, including differences that are not yet written. `None` when the
    /// lease was not acquired with it.
    pub fn held(&self, limit: &str) -> Option<i64> {
        let at = self.place_of(limit)?;
        Some(self.net(at) / MILLI)
    }

    /// Adds a signed difference to the tokens held: the actual cost less the estimate.
    /// [`commit`](Self::commit) or [`flush`](Self::flush) writes it. It never fails for lack of tokens: the
    /// bucket may go into debt.
    ///
    /// # Errors
    ///
    /// [`Error::NotInLease`]; [`Error::NotHeld`] below zero; [`Error::Invalid`] for a difference out of
    /// bounds.
    pub fn adjust(&mut self, limit: &str, difference: i64) -> Result<(), Error> {
        if difference.unsigned_abs() > AMOUNT_MAX {
            let rule = "use -1000000000000 to 1000000000000 tokens";
            return Err(Invalid::new("difference", difference, rule).into());
        }
        if self.legs.is_empty() {
            return Ok(());
        }
        let at = self.place_of(limit).ok_or_else(|| Error::NotInLease(limit.to_owned()))?;
        let net = self.net(at);
        let more = difference * MILLI;
        if net.saturating_add(more) < 0 {
            let (held, asked) = (net / MILLI, difference.unsigned_abs());
            return Err(Error::NotHeld { limit: limit.to_owned(), held, asked });
        }
        self.adjustments.resize(self.legs[0].takes.len(), Adjustment::default());
        let adjustment = &mut self.adjustments[at];
        adjustment.difference = adjustment.difference.saturating_add(more);
        Ok(())
    }

    /// Settles a limit for the tokens that were really used, whatever the estimate: it
    /// [adjusts](Self::adjust) the difference. The amount then counts as used, and stays taken when the
    /// lease is dropped.
    ///
    /// # Errors
    ///
    /// As [`adjust`](Self::adjust).
    pub fn settle(&mut self, limit: &str, actual: u64) -> Result<(), Error> {
        let actual = amount(actual)?.whole_tokens();
        let Some(at) = self.place_of(limit) else { return self.adjust(limit, 0) };
        self.adjust(limit, actual.saturating_sub(self.net(at) / MILLI))?;
        self.adjustments[at].used = Some(self.net(at));
        Ok(())
    }

    /// Refunds some of the tokens held. `commit` or `flush` writes it.
    ///
    /// # Errors
    ///
    /// As [`adjust`](Self::adjust).
    pub fn release(&mut self, limit: &str, tokens: u64) -> Result<(), Error> {
        self.adjust(limit, -amount(tokens)?.whole_tokens())
    }

    /// Takes more tokens of a limit. It can be refused, like an acquire.
    ///
    /// # Errors
    ///
    /// As an acquire; [`Error::NotInLease`].
    pub async fn consume(&mut self, limit: &str, tokens: u64) -> Result<(), Error> {
        if self.legs.is_empty() {
            return Ok(());
        }
        self.place_of(limit).ok_or_else(|| Error::NotInLease(limit.to_owned()))?;
        let limiter = RateLimiter::from_inner(&self.handle.inner);
        let key = self.legs[0].target.key().clone();
        let acquire = limiter.acquire(key.entity.as_str(), key.resource.as_str());
        let mut more = acquire.take(limit, tokens).like(self.call.as_deref()).await?;
        more.state = State::Closed;
        let legs = std::mem::take(&mut more.legs);
        self.further.extend(legs.into_iter().zip(std::mem::take(&mut more.taken)));
        self.degraded |= more.degraded;
        Ok(())
    }

    /// Writes the differences so far; the lease stays open. Every limit with a difference is then settled
    /// for the tokens held.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`], unless calls pass while the store is unavailable; [`Error::Store`]. After an
    /// error the differences are dropped: they may have been written, and a refund must not be written
    /// twice.
    pub async fn flush(&mut self) -> Result<(), Error> {
        self.write_adjustments().await
    }

    /// Keeps the tokens, and writes all differences.
    ///
    /// The call commits, not its future: whoever drops the future before its end has committed, too, and the store
    /// writes the differences in the background.
    ///
    /// # Errors
    ///
    /// As [`flush`](Self::flush). The tokens stay taken.
    pub fn commit(mut self) -> impl Future<Output = Result<(), Error>> + Send + 'static {
        let writing = if self.adjustments.is_empty() {
            self.state = State::Closed;
            None
        } else {
            self.state = State::Committing;
            Some(Box::pin(async move {
                self.state = State::Closed;
                self.write_adjustments().await
            }))
        };
        // Nothing to write is the usual case: the lease ends here, and the future is two words.
        async move {
            match writing {
                None => Ok(()),
                Some(writing) => writing.await,
            }
        }
    }

    /// Refunds all tokens held.
    ///
    /// The call rolls back, not its future: whoever drops the future before its end gets everything back, too, in the
    /// background.
    ///
    /// # Errors
    ///
    /// As [`flush`](Self::flush). Tokens that could not be refunded stay taken.
    pub fn rollback(mut self) -> impl Future<Output = Result<(), Error>> + Send + 'static {
        self.state = State::RollingBack;
        async move {
            self.state = State::Closed;
            let refunds = self.refunds();
            let done = self.handle.inner.settle(&refunds).await;
            self.conclude(done)
        }
    }

    /// The index of the limit in the takes of the first leg, which has all limits of the acquire.
    fn place_of(&self, limit: &str) -> Option<usize> {
        let own = self.legs.first()?;
        own.takes.iter().position(|take| limit_name(own, take) == limit)
    }

    /// The net millitokens of the limit at an index, held by the entity itself.
    fn net(&self, at: usize) -> i64 {
        let own = &self.legs[0];
        let limit = limit_name(own, &own.takes[at]);
        let further = self.further.iter().map(|(leg, _)| leg);
        let of_entity = further.filter(|leg| leg.target.key() == own.target.key());
        let takes = of_entity.flat_map(|leg| leg.takes.iter().map(move |take| (leg, take)));
        let further = takes
            .filter(|(leg, take)| limit_name(leg, take) == limit)
            .fold(0_i64, |sum, (_, take)| sum.saturating_add(take.amount.get()));
        let unwritten = self.adjustments.get(at).map_or(0, |one| one.difference);
        own.takes[at].amount.get().saturating_add(further).saturating_add(unwritten)
    }

    async fn write_adjustments(&mut self) -> Result<(), Error> {
        let settlements = self.differences();
        if settlements.is_empty() {
            return Ok(());
        }
        let own = self.legs[0].clone();
        let written: Vec<i64> =
            self.adjustments.iter_mut().map(|one| std::mem::take(&mut one.difference)).collect();
        let of = |limit: &str| {
            let at = own.takes.iter().position(|take| limit_name(&own, take) == limit);
            Millitokens::new(at.map_or(0, |at| written[at]))
        };
        // Refunds are counted here before the store is called, charges only after it has answered. If
        // this future is dropped, or the store does not answer, either may have been written, and a
        // later rollback must not refund tokens that were never taken.
        self.book(|limit| of(limit).min(Millitokens::ZERO));
        self.note_used(&written);
        let done = self.handle.inner.settle(&settlements).await;
        if done.is_ok() {
            self.book(|limit| of(limit).max(Millitokens::ZERO));
            self.note_used(&written);
        }
        self.conclude(done)
    }

    /// Marks the tokens held of limits with a written difference as used.
    fn note_used(&mut self, written: &[i64]) {
        for at in (0..written.len()).filter(|at| written[*at] != 0) {
            self.adjustments[at].used = Some(self.net(at));
        }
    }

    /// The unwritten differences, at every level.
    fn differences(&self) -> Vec<Settlement> {
        let Some(own) = self.legs.first() else { return Vec::new() };
        let of = |limit: &str| {
            let at = own.takes.iter().position(|take| limit_name(own, take) == limit);
            let adjustment = at.and_then(|at| self.adjustments.get(at));
            Millitokens::new(adjustment.map_or(0, |one| one.difference))
        };
        let legs = self.legs.iter().zip(&self.taken);
        legs.filter_map(|(leg, taken)| settlement(leg, taken, |take| of(limit_name(leg, take))))
            .collect()
    }

    /// Adds differences to the tokens held, at every level.
    fn book(&mut self, of: impl Fn(&str) -> Millitokens) {
        for leg in &mut self.legs {
            for take in &mut leg.takes {
                let limit = &leg.target.limits().names()[take.cell];
                take.amount = take.amount.saturating_add(of(limit.as_str()));
            }
        }
    }

    /// The settlements that refund everything held.
    fn refunds(&mut self) -> Vec<Settlement> {
        self.adjustments.clear();
        dropped::refund_unused(&self.take_held(), |_| None)
    }

    /// Moves everything that was taken out of the lease.
    fn take_held(&mut self) -> Vec<(Leg, LegTaken)> {
        let legs = std::mem::take(&mut self.legs).into_iter();
        legs.zip(std::mem::take(&mut self.taken)).chain(self.further.drain(..)).collect()
    }

    /// The settlements that a drop writes.
    fn dropped(&mut self) -> Vec<Settlement> {
        match self.state {
            State::Committing => return self.differences(),
            State::RollingBack => return self.refunds(),
            State::Open | State::Closed => {}
        }
        if self.call.as_ref().is_some_and(|call| call.on_drop == OnDrop::Keep) {
            return self.differences();
        }
        if self.adjustments.iter().all(|one| one.used.is_none()) {
            dropped::warn_once(self.site);
        }
        let own = self.legs[0].clone();
        let adjustments = std::mem::take(&mut self.adjustments);
        let used = |limit: &str| {
            let at = own.takes.iter().position(|take| limit_name(&own, take) == limit)?;
            adjustments.get(at)?.used
        };
        dropped::refund_unused(&self.take_held(), used)
    }

    /// Turns `Unavailable` into a success if the policy admits calls without the store.
    fn conclude(&mut self, done: Result<(), Error>) -> Result<(), Error> {
        let of_call = self.call.as_ref().and_then(|call| call.on_unavailable);
        match done {
            Err(Error::Unavailable { cause, .. })
                if self.handle.inner.policy(of_call) == OnUnavailable::Allow =>
            {
                tracing::warn!(%cause, "the store is unavailable; a lease was not settled");
                telemetry::unsettled();
                self.degraded = true;
                Ok(())
            }
            done => done,
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if self.state == State::Closed || self.legs.is_empty() {
            return;
        }
        let settlements = self.dropped();
        if !settlements.is_empty() {
            carry_on(Arc::clone(&self.handle.inner), settlements);
        }
    }
}

impl Inner {
    /// Writes differences, within the deadline. It retries a charge after any transient error, but a
    /// refund only if it certainly was not written: writing it twice would refund too much.
    pub(crate) async fn settle(self: &Arc<Self>, settlements: &[Settlement]) -> Result<(), Error> {
        if settlements.is_empty() {
            return Ok(());
        }
        let deadline = self.settings.deadline;
        let started = self.clock.stopwatch();
        let mut attempts = Attempts::default();
        let unfinished =
            Unfinished { inner: self, settlements, is_between: AtomicBool::new(false) };
        let call = self.retry_settle(settlements, &mut attempts, &unfinished.is_between);
        let done = within(&*self.clock, deadline, call).await;
        unfinished.is_between.store(false, Ordering::Relaxed);
        let cause = match done {
            Some(Ok(())) => return Ok(()),
            Some(Err(error)) if !error.is_transient() => {
                self.check_purged()?;
                return Err(Error::Store(error));
            }
            Some(Err(error)) => error,
            None => {
                if attempts.in_call {
                    self.note_cut_off();
                }
                attempts.last.unwrap_or_else(no_answer)
            }
        };
        let waited = self.clock.stopwatch().saturating_sub(started);
        Err(Error::Unavailable { waited, cause })
    }

    async fn retry_settle(
        self: &Arc<Self>,
        settlements: &[Settlement],
        attempts: &mut Attempts,
        is_between: &AtomicBool,
    ) -> Result<(), StoreError> {
        let mut differences = settlements.iter().flat_map(|each| &each.differences);
        let has_refund = differences.any(|difference| difference.amount < Millitokens::ZERO);
        attempts.in_call = true;
        // A stream may settle for hours without reading limits, which would show that the namespace is gone.
        let now = self.now().now;
        if self.cache.is_namespace_due(now) {
            is_between.store(true, Ordering::Relaxed);
            self.look_for_namespace(now).await?;
            is_between.store(false, Ordering::Relaxed);
        }
        loop {
            attempts.in_call = true;
            let answer = self.store.settle(settlements, self.now().now).await;
            self.note(&answer);
            let Err(error) = answer else { return Ok(()) };
            let may_retry = !has_refund || error.applied() == Applied::No;
            if !error.is_transient() || !may_retry {
                return Err(error);
            }
            is_between.store(true, Ordering::Relaxed);
            attempts.wait(&*self.clock, error).await?;
            is_between.store(false, Ordering::Relaxed);
        }
    }
}

/// Settlements that the store has not accepted yet. The store carries out a call that it has begun. Between two
/// attempts nobody does, so a future that is dropped there leaves the rest to the background.
struct Unfinished<'a> {
    inner: &'a Arc<Inner>,
    settlements: &'a [Settlement],
    /// Whether the last attempt changed nothing, and the next has not begun.
    is_between: AtomicBool,
}

impl Drop for Unfinished<'_> {
    fn drop(&mut self) {
        if self.is_between.load(Ordering::Relaxed) {
            carry_on(Arc::clone(self.inner), self.settlements.to_vec());
        }
    }
}

/// Settles in the background.
fn carry_on(inner: Arc<Inner>, settlements: Vec<Settlement>) {
    let background = inner.background.clone();
    background.carry_out(async move {
        if let Err(error) = inner.settle(&settlements).await {
            tracing::warn!(%error, "could not settle a dropped lease");
            telemetry::unsettled();
        }
    });
}
