//! The warm path: everything that a call needs is cached, and the store answers at once. It neither allocates nor waits.

use std::sync::Arc;

use smallvec::{SmallVec, smallvec};
use zae_limiter_model::Millitokens;

use crate::acquire::{Acquire, Chain, Found, takes_of};
use crate::cache::stripe;
use crate::error::Error;
use crate::lease::Lease;
use crate::limiter::LEVELS_MAX;
use crate::plan::{Leg, LegTaken, Placement, SingleLeg, Takes, Target};
use crate::skew::Checked;
use crate::telemetry::{self, Outcome};

/// What the usual call took.
pub(crate) struct Taken {
    target: Arc<Target>,
    takes: Takes,
    /// The balances after taking.
    left: SmallVec<[Millitokens; 2]>,
    /// Of this thread.
    stripe: usize,
}

/// What was found before the call turned out not to be the usual one. Nothing was taken.
pub(crate) struct Missed {
    /// The bucket, if it was looked up and cached.
    own: Option<Arc<Target>>,
    /// The moment, if the clock was read.
    at: Option<Checked>,
}

impl Acquire<'_> {
    /// Takes the tokens without waiting, for callers without a future. It is decided as an awaited call is.
    ///
    /// # Errors
    ///
    /// [`Error::WouldWait`] if the call needs something that is not cached, has [limits](Self::limits) of its own, or
    /// the store does not answer at once: await the call instead. DynamoDB never does; SQLite does while no other call
    /// uses the file. A call that [waits for tokens](Self::wait_up_to) also asks to be awaited. Otherwise as an awaited
    /// call.
    ///
    /// ```
    /// # use zae_limiter_core::{Error, Lease, Limit, MemoryStore, RateLimiter};
    /// # tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(async {
    /// # let limiter = RateLimiter::builder(MemoryStore::new())
    /// #     .default_limits([Limit::per_minute("rpm", 100)]).open().await?;
    /// let lease = match limiter.acquire("key-1", "gpt-4").take("rpm", 1).try_now() {
    ///     // The limits of key-1 are not cached yet.
    ///     Err(Error::WouldWait) => limiter.acquire("key-1", "gpt-4").take("rpm", 1).await?,
    ///     decided => decided?,
    /// };
    /// lease.commit().await?;
    /// assert!(limiter.acquire("key-1", "gpt-4").take("rpm", 1).try_now().is_ok());
    /// # Ok::<(), Error>(())
    /// # }).unwrap();
    /// ```
    pub fn try_now(self) -> Result<Lease, Error> {
        let span = self.span();
        let started = telemetry::start(&*self.inner.clock);
        let done = span.in_scope(|| self.take_now()).map_err(|_| Error::WouldWait)?;
        telemetry::finish(&*self.inner.clock, started);
        done
    }

    /// The warm path. If it ends before a decision, the slow path continues with what was found.
    pub(crate) fn take_now(&self) -> Result<Result<Lease, Error>, Found> {
        match self.take_one() {
            Ok(taken) => Ok(Ok(self.lease(taken))),
            Err(missed) => self.take_chain(missed),
        }
    }

    /// The usual call: from one bucket that is cached and has the tokens.
    // A lease is made of the result where it is needed: it is large, and would be copied on the way.
    #[inline]
    pub(crate) fn take_one(&self) -> Result<Taken, Missed> {
        if self.limits.is_some() || self.wait.is_some() {
            return Err(Missed { own: None, at: None });
        }
        let at = self.inner.now();
        let cache = &self.inner.cache;
        let hash = cache.resource_hash(self.resource);
        let take = |target: &Arc<Target>| self.take_from(target, at);
        let found = cache.with(hash, self.entity, self.resource, at.now, take);
        let stripe = stripe();
        if found.is_some() {
            cache.count_hit(stripe);
        }
        match found {
            Some(Ok(taken)) => {
                telemetry::decided(Outcome::Admitted);
                Ok(Taken { stripe, ..taken })
            }
            Some(Err(own)) => Err(Missed { own: Some(own), at: Some(at) }),
            None => Err(Missed { own: None, at: Some(at) }),
        }
    }

    #[inline(always)]
    fn take_from(&self, target: &Arc<Target>, at: Checked) -> Result<Taken, Arc<Target>> {
        // A wrong amount or name: the plan returns the error. A child takes from its parents, too.
        let takes = match takes_of(0, target, &self.takes) {
            Ok(takes) if takes.len() == self.takes.len() => takes,
            _ => return Err(Arc::clone(target)),
        };
        if takes.is_empty() || target.parent().is_some() {
            return Err(Arc::clone(target));
        }
        let mut left: SmallVec<[Millitokens; 2]> = match takes.len() {
            len @ 0..=2 => SmallVec::from_buf_and_len([Millitokens::ZERO; 2], len),
            len => smallvec![Millitokens::ZERO; len],
        };
        let leg = SingleLeg { now: at.now, target, takes: &takes };
        if !self.inner.store.take_now(&leg, &mut left) {
            return Err(Arc::clone(target));
        }
        Ok(Taken { target: Arc::clone(target), takes, left, stripe: 0 })
    }

    #[inline]
    pub(crate) fn lease(&self, taken: Taken) -> Lease {
        let Taken { target, takes, left, stripe } = taken;
        let legs = SmallVec::from_buf([Leg { target, takes }]);
        let taken = SmallVec::from_buf([LegTaken { placement: Placement::default(), left }]);
        let call = self.settings(&legs, &Chain::new());
        Lease::new(self.limiter.handle_of(stripe), legs, taken, call, self.site)
    }

    /// Every other call: from several buckets, refused, or with an error.
    #[cold]
    pub(crate) fn take_chain(&self, missed: Missed) -> Result<Result<Lease, Error>, Found> {
        let Some(at) = missed.at else { return Err(Found::Nothing) };
        let Some(own) = missed.own else { return Err(Found::Levels(Chain::new(), at)) };
        let mut above = Chain::new();
        let mut parent = own.origin().parent.clone();
        while let Some(id) = parent {
            // Too deep, or a cycle: the slow path returns the error.
            let is_too_deep = above.len() == LEVELS_MAX - 1;
            let look_up = || self.inner.cache.get(id.as_str(), self.resource, at.now);
            let Some(target) = (if is_too_deep { None } else { look_up() }) else {
                above.insert(0, own);
                return Err(Found::Levels(above, at));
            };
            parent = target.origin().parent.clone();
            above.push(target);
        }
        let plan = match self.plan(own, &above, at) {
            Ok(plan) => plan,
            Err(error) => return Ok(Err(error)),
        };
        match self.inner.store.acquire_now(&plan) {
            Some(Ok(admission)) => Ok(self.conclude(plan, admission, &above)),
            Some(Err(error)) if !error.is_transient() => Ok(Err(Error::Store(error))),
            // The slow path waits for the store, or retries.
            None | Some(Err(_)) => Err(Found::Plan(plan, above)),
        }
    }
}
