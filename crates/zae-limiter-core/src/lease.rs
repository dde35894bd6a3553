//! What a call holds between taking tokens and settling for what it really used.

use std::future::Future;
use std::panic::Location;
use std::sync::Arc;

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

/// Tokens that were taken, until [`commit`](Self::commit) keeps them or
/// [`rollback`](Self::rollback) gives them back.
///
/// A lease that is dropped before either keeps what was [settled](Self::settle) or [flushed](Self::flush),
/// because that is known to be used, and gives the rest back: in the background, without blocking, inside a
/// runtime or outside. [`Acquire::on_drop`](crate::Acquire::on_drop) keeps the estimate, too.
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
#[must_use = "a lease that is dropped gives its estimate back"]
pub struct Lease {
    handle: Arc<Handle>,
    /// What the acquire took; the takes are what is held now. Empty in a degraded lease.
    legs: SmallVec<[Leg; 1]>,
    /// Where it came from, one for each leg.
    taken: SmallVec<[LegTaken; 1]>,
    /// What `consume` took on top.
    further: Vec<(Leg, LegTaken)>,
    /// By the place of the limit in the first leg's takes; empty while nothing was said of any.
    gathered: Vec<Gathered>,
    /// Where the program acquires it.
    site: &'static Location<'static>,
    /// What the call brought of its own.
    call: Option<Box<CallSettings>>,
    state: State,
    /// Whether some of it was admitted without the store.
    degraded: bool,
}

/// What was said of one limit since the acquire, in millitokens.
#[derive(Clone, Copy, Debug, Default)]
struct Gathered {
    /// The difference that is not yet written.
    difference: i64,
    /// What is known to be used; `None` as long as there is only an estimate.
    used: Option<i64>,
}

/// What a call said that holds for all that its lease does later.
#[derive(Clone, Debug)]
pub(crate) struct CallSettings {
    pub(crate) limits: Option<Vec<Limit>>,
    pub(crate) on_unavailable: Option<OnUnavailable>,
    pub(crate) on_drop: OnDrop,
    /// The level of each leg; empty where the legs are the levels.
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

/// What to write for one difference per take of a leg, nothing where all are zero.
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
            gathered: Vec::new(),
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

    /// Whether the store did not answer and the call was let through without it: then some or all
    /// of what was asked is held nowhere.
    pub fn is_degraded(&self) -> bool {
        self.degraded
    }

    /// Every limit that was taken from, of the entity and its ancestors, as it stood right after.
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

    /// Net tokens held of a limit, what is not yet written included. `None` when the lease was not
    /// acquired with it.
    pub fn held(&self, limit: &str) -> Option<i64> {
        let at = self.place_of(limit)?;
        Some(self.net(at) / MILLI)
    }

    /// Adds a signed difference to what was taken: the actual cost less the estimate. It is
    /// remembered here and written by [`commit`](Self::commit) or [`flush`](Self::flush), and it
    /// never fails for lack of tokens: the bucket may go into debt.
    ///
    /// # Errors
    ///
    /// [`Error::NotInLease`], [`Error::NotHeld`] below zero, [`Error::Invalid`] for a difference beyond the
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
        self.gathered.resize(self.legs[0].takes.len(), Gathered::default());
        let gathered = &mut self.gathered[at];
        gathered.difference = gathered.difference.saturating_add(more);
        Ok(())
    }

    /// Settles a limit for what was really used, whatever was estimated: the difference is
    /// [adjusted](Self::adjust). From here on so much is known to be used, and stays taken when the lease
    /// is dropped.
    ///
    /// # Errors
    ///
    /// As [`adjust`](Self::adjust).
    pub fn settle(&mut self, limit: &str, actual: u64) -> Result<(), Error> {
        let actual = amount(actual)?.whole_tokens();
        let Some(at) = self.place_of(limit) else { return self.adjust(limit, 0) };
        self.adjust(limit, actual.saturating_sub(self.net(at) / MILLI))?;
        self.gathered[at].used = Some(self.net(at));
        Ok(())
    }

    /// Gives back some of what is held. Like an adjustment it is written by `commit` or `flush`.
    ///
    /// # Errors
    ///
    /// As [`adjust`](Self::adjust).
    pub fn release(&mut self, limit: &str, tokens: u64) -> Result<(), Error> {
        self.adjust(limit, -amount(tokens)?.whole_tokens())
    }

    /// Takes more of a limit, which can be refused like an acquire.
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

    /// Writes the differences gathered so far; the lease stays open. A limit of which a difference was written
    /// is settled for what is held of it then.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`] unless calls pass while the store is away;
    /// [`Error::Store`]. After an error the gathered differences are gone: whether they were
    /// written is not known, and a credit must not be written twice.
    pub async fn flush(&mut self) -> Result<(), Error> {
        self.write_gathered().await
    }

    /// Keeps what was taken, with all differences.
    ///
    /// The call commits, not its future: whoever drops the future before its end has committed, too, and the store
    /// writes the differences in the background.
    ///
    /// # Errors
    ///
    /// As [`flush`](Self::flush). The tokens stay taken.
    pub fn commit(mut self) -> impl Future<Output = Result<(), Error>> + Send + 'static {
        let writing = if self.gathered.is_empty() {
            self.state = State::Closed;
            None
        } else {
            self.state = State::Committing;
            Some(Box::pin(async move {
                self.state = State::Closed;
                self.write_gathered().await
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

    /// Gives back all that is held.
    ///
    /// The call rolls back, not its future: whoever drops the future before its end gets everything back, too, in the
    /// background.
    ///
    /// # Errors
    ///
    /// As [`flush`](Self::flush). What could not be given back stays taken.
    pub fn rollback(mut self) -> impl Future<Output = Result<(), Error>> + Send + 'static {
        self.state = State::RollingBack;
        async move {
            self.state = State::Closed;
            let credits = self.credits();
            let done = self.handle.inner.settle(&credits).await;
            self.conclude(done)
        }
    }

    /// Where the limit stands in the takes of the first leg, which has all that were named.
    fn place_of(&self, limit: &str) -> Option<usize> {
        let own = self.legs.first()?;
        own.takes.iter().position(|take| limit_name(own, take) == limit)
    }

    /// Net millitokens of the limit at that place, held by the entity itself.
    fn net(&self, at: usize) -> i64 {
        let own = &self.legs[0];
        let limit = limit_name(own, &own.takes[at]);
        let further = self.further.iter().map(|(leg, _)| leg);
        let of_entity = further.filter(|leg| leg.target.key() == own.target.key());
        let takes = of_entity.flat_map(|leg| leg.takes.iter().map(move |take| (leg, take)));
        let further = takes
            .filter(|(leg, take)| limit_name(leg, take) == limit)
            .fold(0_i64, |sum, (_, take)| sum.saturating_add(take.amount.get()));
        let gathered = self.gathered.get(at).map_or(0, |gathered| gathered.difference);
        own.takes[at].amount.get().saturating_add(further).saturating_add(gathered)
    }

    async fn write_gathered(&mut self) -> Result<(), Error> {
        let settlements = self.differences();
        if settlements.is_empty() {
            return Ok(());
        }
        let own = self.legs[0].clone();
        let written: Vec<i64> =
            self.gathered.iter_mut().map(|one| std::mem::take(&mut one.difference)).collect();
        let of = |limit: &str| {
            let at = own.takes.iter().position(|take| limit_name(&own, take) == limit);
            Millitokens::new(at.map_or(0, |at| written[at]))
        };
        // What is given back is booked here before the store is asked, what is taken only when it
        // has answered: if this future is dropped, or the store does not answer, nobody knows which
        // of them was carried out, and a later rollback must not give back what was never taken.
        self.book(|limit| of(limit).min(Millitokens::ZERO));
        self.note_used(&written);
        let done = self.handle.inner.settle(&settlements).await;
        if done.is_ok() {
            self.book(|limit| of(limit).max(Millitokens::ZERO));
            self.note_used(&written);
        }
        self.conclude(done)
    }

    /// What is held of limits of which a difference was written is known to be used.
    fn note_used(&mut self, written: &[i64]) {
        for at in (0..written.len()).filter(|at| written[*at] != 0) {
            self.gathered[at].used = Some(self.net(at));
        }
    }

    /// The gathered differences, at every level.
    fn differences(&self) -> Vec<Settlement> {
        let Some(own) = self.legs.first() else { return Vec::new() };
        let of = |limit: &str| {
            let at = own.takes.iter().position(|take| limit_name(own, take) == limit);
            let gathered = at.and_then(|at| self.gathered.get(at));
            Millitokens::new(gathered.map_or(0, |gathered| gathered.difference))
        };
        let legs = self.legs.iter().zip(&self.taken);
        legs.filter_map(|(leg, taken)| settlement(leg, taken, |take| of(limit_name(leg, take))))
            .collect()
    }

    /// Counts differences to what is held, at every level.
    fn book(&mut self, of: impl Fn(&str) -> Millitokens) {
        for leg in &mut self.legs {
            for take in &mut leg.takes {
                let limit = &leg.target.limits().names()[take.cell];
                take.amount = take.amount.saturating_add(of(limit.as_str()));
            }
        }
    }

    /// Everything held, as differences that give it back.
    fn credits(&mut self) -> Vec<Settlement> {
        self.gathered.clear();
        dropped::give_back_the_rest(&self.take_held(), |_| None)
    }

    /// All that was taken, which the lease no longer holds then.
    fn take_held(&mut self) -> Vec<(Leg, LegTaken)> {
        let legs = std::mem::take(&mut self.legs).into_iter();
        legs.zip(std::mem::take(&mut self.taken)).chain(self.further.drain(..)).collect()
    }

    /// What a drop writes.
    fn dropped(&mut self) -> Vec<Settlement> {
        match self.state {
            State::Committing => return self.differences(),
            State::RollingBack => return self.credits(),
            State::Open | State::Closed => {}
        }
        if self.call.as_ref().is_some_and(|call| call.on_drop == OnDrop::Keep) {
            return self.differences();
        }
        if self.gathered.iter().all(|gathered| gathered.used.is_none()) {
            dropped::warn_once(self.site);
        }
        let own = self.legs[0].clone();
        let gathered = std::mem::take(&mut self.gathered);
        let used = |limit: &str| {
            let at = own.takes.iter().position(|take| limit_name(&own, take) == limit)?;
            gathered.get(at)?.used
        };
        dropped::give_back_the_rest(&self.take_held(), used)
    }

    /// A store that is away does not fail a call that is to pass without it.
    fn conclude(&mut self, done: Result<(), Error>) -> Result<(), Error> {
        let of_call = self.call.as_ref().and_then(|call| call.on_unavailable);
        match done {
            Err(Error::Unavailable { cause, .. })
                if self.handle.inner.policy(of_call) == OnUnavailable::Allow =>
            {
                tracing::warn!(%cause, "the store is away; a lease was not settled");
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
        if settlements.is_empty() {
            return;
        }
        let handle = Arc::clone(&self.handle);
        self.handle.inner.background.carry_out(async move {
            if let Err(error) = handle.inner.settle(&settlements).await {
                tracing::warn!(%error, "could not settle a lease that was dropped");
                telemetry::unsettled();
            }
        });
    }
}

impl Inner {
    /// Writes differences, within the deadline. A debit is tried again whatever happened to it; a
    /// credit only when it certainly was not written, because twice would be too much.
    pub(crate) async fn settle(self: &Arc<Self>, settlements: &[Settlement]) -> Result<(), Error> {
        if settlements.is_empty() {
            return Ok(());
        }
        let deadline = self.settings.deadline;
        let started = self.clock.stopwatch();
        let mut attempts = Attempts::default();
        let asking = self.ask_to_settle(settlements, &mut attempts);
        let cause = match within(&*self.clock, deadline, asking).await {
            Some(Ok(())) => return Ok(()),
            Some(Err(error)) if !error.is_transient() => return Err(Error::Store(error)),
            Some(Err(error)) => error,
            None => {
                if attempts.is_asking {
                    self.note_cut_off();
                }
                attempts.last.unwrap_or_else(no_answer)
            }
        };
        let waited = self.clock.stopwatch().saturating_sub(started);
        Err(Error::Unavailable { waited, cause })
    }

    async fn ask_to_settle(
        self: &Arc<Self>,
        settlements: &[Settlement],
        attempts: &mut Attempts,
    ) -> Result<(), StoreError> {
        let mut differences = settlements.iter().flat_map(|each| &each.differences);
        let is_credit = differences.any(|difference| difference.amount < Millitokens::ZERO);
        loop {
            attempts.is_asking = true;
            let answer = self.store.settle(settlements, self.clock.now()).await;
            self.note(&answer);
            let Err(error) = answer else { return Ok(()) };
            let may_repeat = !is_credit || error.applied() == Applied::No;
            if !error.is_transient() || !may_repeat {
                return Err(error);
            }
            attempts.wait(&*self.clock, error).await?;
        }
    }
}
