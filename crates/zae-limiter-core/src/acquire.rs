//! Taking tokens.
//!
//! The fast path, on a store that answers at once, neither allocates nor waits. [`Acquiring`] tries it
//! on its first poll, and boxes the slow path only if it needs it.

use std::future::{Future, IntoFuture};
use std::panic::Location;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures_core::future::BoxFuture;
use smallvec::SmallVec;
use tracing::{Instrument as _, Span};
use zae_limiter_model::{
    EntityId, ExceedsCapacity, Invalid, Limit, LimitSet, LimitStatus, Millitokens,
    RateLimitExceeded, ResourceName, Take, Timestamp, amount, nearest,
};

use crate::deadline::within;
use crate::dropped::OnDrop;
use crate::error::{Error, StoreError};
use crate::lease::{CallSettings, Lease};
use crate::limiter::{Attempts, Inner, LEVELS_MAX, RateLimiter, no_answer};
use crate::plan::{Admission, Leg, LegTaken, Origin, Plan, Source, Takes, Target};
use crate::record::OnUnavailable;
use crate::skew::Checked;
use crate::telemetry::{self, Outcome, Started};

impl RateLimiter {
    /// Takes tokens of an entity on a resource: all amounts, or none.
    ///
    /// ```
    /// # use zae_limiter_core::{Limit, MemoryStore, RateLimiter};
    /// # tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(async {
    /// # let limiter = RateLimiter::builder(MemoryStore::new()).open().await?;
    /// let mut lease = limiter
    ///     .acquire("key-1", "gpt-4")
    ///     .take("rpm", 1)
    ///     .take("tpm", 500)
    ///     .limits([Limit::per_minute("rpm", 100), Limit::per_minute("tpm", 10_000)])
    ///     .await?;
    /// lease.adjust("tpm", 230)?;
    /// lease.commit().await?;
    /// # Ok::<(), zae_limiter_core::Error>(())
    /// # }).unwrap();
    /// ```
    #[inline]
    #[track_caller]
    pub fn acquire<'a>(&'a self, entity: &'a str, resource: &'a str) -> Acquire<'a> {
        Acquire {
            limiter: self,
            inner: &self.inner,
            entity,
            resource,
            takes: SmallVec::new(),
            limits: None,
            on_unavailable: None,
            deadline: None,
            wait: None,
            on_drop: OnDrop::GiveBack,
            site: Location::caller(),
        }
    }
}

/// A call that takes tokens; `await` it. Made by [`RateLimiter::acquire`].
///
/// ```
/// # use std::time::Duration;
/// # use zae_limiter_core::{Limit, MemoryStore, OnUnavailable, RateLimiter};
/// # tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(async {
/// # let limiter = RateLimiter::builder(MemoryStore::new())
/// #     .default_limits([Limit::per_minute("rpm", 100)]).open().await?;
/// let lease = limiter
///     .acquire("key-1", "gpt-4")
///     .take("rpm", 1)
///     .deadline(Duration::from_millis(50))
///     .on_unavailable(OnUnavailable::Allow)
///     .await?;
/// lease.commit().await?;
/// # Ok::<(), zae_limiter_core::Error>(())
/// # }).unwrap();
/// ```
#[must_use = "nothing is taken before it is awaited"]
pub struct Acquire<'a> {
    pub(crate) limiter: &'a RateLimiter,
    pub(crate) inner: &'a Arc<Inner>,
    pub(crate) entity: &'a str,
    pub(crate) resource: &'a str,
    pub(crate) takes: SmallVec<[(&'a str, u64); 2]>,
    pub(crate) limits: Option<Vec<Limit>>,
    pub(crate) on_unavailable: Option<OnUnavailable>,
    pub(crate) deadline: Option<Duration>,
    pub(crate) wait: Option<Duration>,
    pub(crate) on_drop: OnDrop,
    pub(crate) site: &'static Location<'static>,
}

/// The entity id is hashed: it is often an API key.
impl std::fmt::Debug for Acquire<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Acquire")
            .field("entity", &EntityId::new(self.entity).ok())
            .field("resource", &self.resource)
            .field("takes", &self.takes)
            .field("limits", &self.limits)
            .finish_non_exhaustive()
    }
}

impl<'a> Acquire<'a> {
    /// Takes `tokens` of a limit. 0 takes and checks nothing, but lets the lease adjust the limit
    /// later. Amounts of a limit that is named twice add up.
    #[inline(always)]
    pub fn take(mut self, limit: &'a str, tokens: u64) -> Self {
        match self.takes.iter_mut().find(|(name, _)| *name == limit) {
            Some((_, sum)) => *sum = sum.saturating_add(tokens),
            None => self.takes.push((limit, tokens)),
        }
        self
    }

    /// Uses these limits for this call instead of the entity's stored ones. Ancestors keep theirs.
    pub fn limits(mut self, limits: impl IntoIterator<Item = Limit>) -> Self {
        self.limits = Some(limits.into_iter().collect());
        self
    }

    /// What happens to this call if the store is unavailable.
    pub fn on_unavailable(mut self, policy: OnUnavailable) -> Self {
        self.on_unavailable = Some(policy);
        self
    }

    /// How long one attempt of this call may take: see [`Builder::deadline`](crate::Builder::deadline).
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = Some(deadline);
        self
    }

    /// Waits for tokens, for up to `timeout`, instead of failing at once.
    ///
    /// The call sleeps for exactly the wait of the refusal and tries again. It fails at once when that wait is longer
    /// than the rest of `timeout`, so the last attempt starts before `timeout` has passed.
    ///
    /// Calls of one limiter that wait for the same limit of an entity on a resource are served in the order in which
    /// they began to wait, however little each takes. A call that takes from other limits does not wait for them. Calls
    /// that do not wait, other entities below the same parent, and other processes may take tokens in between. A call
    /// that is dropped leaves the queue and holds nothing.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use zae_limiter_core::{Limit, MemoryStore, RateLimiter};
    /// # tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(async {
    /// # let limiter = RateLimiter::builder(MemoryStore::new()).open().await?;
    /// limiter.set_resource_defaults("gpt-4", [Limit::per_second("rps", 100)]).await?;
    /// limiter.acquire("key-1", "gpt-4").take("rps", 100).await?.commit().await?;
    ///
    /// // The next token arrives after 10 ms.
    /// let call = limiter.acquire("key-1", "gpt-4").take("rps", 1);
    /// call.wait_up_to(Duration::from_secs(5)).await?.commit().await?;
    /// # Ok::<(), zae_limiter_core::Error>(())
    /// # }).unwrap();
    /// ```
    pub fn wait_up_to(mut self, timeout: Duration) -> Self {
        self.wait = Some(timeout);
        self
    }

    /// What happens to the estimate if the lease is dropped before it was committed or rolled back. The
    /// default refunds it.
    pub fn on_drop(mut self, on_drop: OnDrop) -> Self {
        self.on_drop = on_drop;
        self
    }

    /// The span of the call. Its fields are computed only if a subscriber records it.
    #[inline]
    pub(crate) fn span(&self) -> Span {
        tracing::debug_span!(
            "acquire",
            namespace = %self.inner.namespace_name,
            entity = ?EntityId::new(self.entity).ok(),
            resource = self.resource,
        )
    }

    /// Takes the tokens and runs `work` with the lease. Commits the lease if the work succeeds, and rolls
    /// it back if it fails.
    ///
    /// # Errors
    ///
    /// The error of the work, or the limiter's [`Error`] converted to its type.
    pub async fn run<T, E>(self, work: impl AsyncFnOnce(&mut Lease) -> Result<T, E>) -> Result<T, E>
    where
        E: From<Error>,
    {
        let mut lease = self.await?;
        match work(&mut lease).await {
            Ok(done) => {
                lease.commit().await?;
                Ok(done)
            }
            Err(error) => {
                // The caller gets the error of its work, not that of the refund. Without the refund the tokens
                // stay taken, which is the safe side.
                if let Err(failed) = lease.rollback().await {
                    tracing::warn!(%failed, "could not refund a failed call");
                }
                Err(error)
            }
        }
    }

    /// The slow path: reads what is not cached, waits for the store and retries, within the deadline.
    pub(crate) async fn run_to_end(&self, found: Found) -> Result<Lease, Error> {
        let entity = EntityId::new(self.entity)?;
        let resource = ResourceName::new(self.resource)?;
        let limits = self.limits.clone().map(LimitSet::new).transpose()?;
        self.check_takes()?;
        let deadline = self.deadline.unwrap_or(self.inner.settings.deadline);
        let mut attempts = Attempts::default();
        let clock = &*self.inner.clock;
        let started = clock.stopwatch();
        let call = self.attempt_all(&entity, &resource, limits, found, &mut attempts);
        let cause = match within(clock, deadline, call).await {
            Some(Ok(lease)) => return lease,
            Some(Err(cause)) => cause,
            None => {
                if attempts.in_call {
                    self.inner.note_cut_off();
                }
                attempts.last.unwrap_or_else(no_answer)
            }
        };
        let waited = clock.stopwatch().saturating_sub(started);
        self.without_store(&entity, &resource, cause, waited)
    }

    /// Retries until the store answers. The outer error is that of the last attempt.
    async fn attempt_all(
        &self,
        entity: &EntityId,
        resource: &ResourceName,
        limits: Option<LimitSet>,
        mut found: Found,
        attempts: &mut Attempts,
    ) -> Result<Result<Lease, Error>, StoreError> {
        let limits = limits.map(Arc::new);
        loop {
            if let Err(purged) = self.inner.check_purged() {
                return Ok(Err(purged));
            }
            self.inner.gate()?;
            attempts.in_call = true;
            let found = std::mem::take(&mut found);
            let answer = self.attempt(entity, resource, limits.as_ref(), found).await;
            self.inner.note(&answer);
            match answer {
                Ok(answer) => return Ok(answer),
                Err(error) if !error.is_transient() => {
                    let purged = self.inner.check_purged();
                    return Ok(Err(purged.err().unwrap_or(Error::Store(error))));
                }
                Err(error) => attempts.wait(&*self.inner.clock, error).await?,
            }
        }
    }

    /// One attempt. The inner result is the store's answer. The outer error means that there was none.
    async fn attempt(
        &self,
        entity: &EntityId,
        resource: &ResourceName,
        limits: Option<&Arc<LimitSet>>,
        found: Found,
    ) -> Result<Result<Lease, Error>, StoreError> {
        let (levels, at) = match found {
            Found::Plan(plan, above) => return self.admit(plan, &above).await,
            Found::Levels(levels, at) => (levels, at),
            Found::Nothing => (Chain::new(), self.inner.now()),
        };
        let (own, above) = match self.targets(entity, resource, limits, levels, at.now).await? {
            Ok(targets) => targets,
            Err(error) => return Ok(Err(error)),
        };
        match self.plan(own, &above, at) {
            Ok(plan) => self.admit(plan, &above).await,
            Err(error) => Ok(Err(error)),
        }
    }

    async fn admit(&self, plan: Plan, above: &Chain) -> Result<Result<Lease, Error>, StoreError> {
        let admission = self.inner.store.acquire(&plan).await?;
        Ok(self.conclude(plan, admission, above))
    }

    /// The entity's own bucket and those of the ancestors it takes from, with their limits. `levels` are those that
    /// were looked up before.
    pub(crate) async fn targets(
        &self,
        entity: &EntityId,
        resource: &ResourceName,
        limits: Option<&Arc<LimitSet>>,
        levels: Chain,
        now: Timestamp,
    ) -> Result<Result<(Arc<Target>, Chain), Error>, StoreError> {
        let mut chain = match self.inner.chain(entity, resource, levels, now).await? {
            Ok(chain) => chain,
            Err(error) => return Ok(Err(error)),
        };
        let stored = chain.remove(0);
        let own = match limits {
            Some(limits) => {
                let key = self.inner.bucket_key(entity, resource);
                // The next call uses the stored limits again: the bucket must not expire before it is
                // full under them.
                let lifetime = self.inner.idle_lifetime(limits).max(stored.lifetime());
                let origin = Origin { source: Source::Call, ..stored.origin().clone() };
                Arc::new(Target::resolved(key, Arc::clone(limits), lifetime, origin))
            }
            None => stored,
        };
        Ok(Ok((own, chain)))
    }

    pub(crate) fn check_takes(&self) -> Result<(), Invalid> {
        if self.takes.is_empty() { Err(no_amounts()) } else { Ok(()) }
    }

    /// The checked amounts for each bucket of the chain.
    pub(crate) fn plan(&self, own: Arc<Target>, above: &Chain, at: Checked) -> Result<Plan, Error> {
        self.check_takes()?;
        let mut legs = SmallVec::new();
        let takes = takes_of(0, &own, &self.takes)?;
        if takes.len() < self.takes.len() {
            return Err(unknown_limits(&own, self.takes.iter().map(|(name, _)| *name)));
        }
        legs.push(Leg { target: own, takes });
        for (at, target) in above.iter().enumerate() {
            let takes = takes_of(at + 1, target, &self.takes)?;
            if !takes.is_empty() {
                legs.push(Leg { target: Arc::clone(target), takes });
            }
        }
        Ok(Plan { now: at.now, max_skew: at.max_skew, legs })
    }

    /// Turns the store's answer into a lease or a refusal.
    #[inline]
    pub(crate) fn conclude(
        &self,
        plan: Plan,
        admission: Admission,
        above: &Chain,
    ) -> Result<Lease, Error> {
        match admission {
            Admission::Taken(taken) => {
                telemetry::decided(Outcome::Admitted);
                let call = self.settings(&plan.legs, above);
                Ok(Lease::new(self.limiter.handle(), plan.legs, taken, call, self.site))
            }
            Admission::Refused(mut statuses) => {
                for status in &mut statuses {
                    status.level = level_of(&status.entity_id, above);
                }
                let refusal = RateLimitExceeded::new(statuses);
                // A call that waits reports only its last refusal.
                if self.wait.is_none() {
                    note_refusal(&refusal);
                }
                Err(refusal.into())
            }
        }
    }

    /// The settings of the call that its lease needs; `None` if all are defaults.
    #[inline]
    pub(crate) fn settings(&self, legs: &[Leg], above: &Chain) -> Option<Box<CallSettings>> {
        let skips_levels = legs.len() <= above.len();
        let is_plain = self.limits.is_none() && self.on_unavailable.is_none();
        if is_plain && self.on_drop == OnDrop::GiveBack && !skips_levels {
            return None;
        }
        let levels = legs.iter().map(|leg| level_of(&leg.target.key().entity, above)).collect();
        let (limits, on_unavailable) = (self.limits.clone(), self.on_unavailable);
        let on_drop = self.on_drop;
        Some(Box::new(CallSettings { limits, on_unavailable, on_drop, levels }))
    }

    /// Copies the settings of another call.
    pub(crate) fn like(mut self, call: Option<&CallSettings>) -> Self {
        if let Some(call) = call {
            self.limits = call.limits.clone();
            self.on_unavailable = call.on_unavailable;
        }
        self
    }

    /// The result without an answer from the store: a lease that holds nothing, or an error.
    pub(crate) fn without_store(
        &self,
        entity: &EntityId,
        resource: &ResourceName,
        cause: StoreError,
        waited: Duration,
    ) -> Result<Lease, Error> {
        match self.inner.policy(self.on_unavailable) {
            OnUnavailable::Allow => {
                tracing::warn!(?entity, %resource, %cause, "admitted without the store");
                telemetry::decided(Outcome::Degraded);
                Ok(Lease::degraded(self.limiter.handle(), self.site))
            }
            OnUnavailable::Block => {
                telemetry::decided(Outcome::Unavailable);
                Err(Error::Unavailable { waited, cause })
            }
        }
    }
}

impl Inner {
    /// The entity and, as far as each cascades, its ancestors. `levels` are the first of them, if they were looked up
    /// before. The inner error is final; the outer one means that the store did not answer.
    pub(crate) async fn chain(
        &self,
        entity: &EntityId,
        resource: &ResourceName,
        levels: Chain,
        now: Timestamp,
    ) -> Result<Result<Chain, Error>, StoreError> {
        let mut chain = levels;
        let mut next = match chain.last() {
            Some(last) => last.origin().parent.clone(),
            None => Some(entity.clone()),
        };
        while let Some(current) = next {
            if chain.iter().any(|target| target.key().entity == current) {
                return Ok(Err(Error::Cycle { entity: current }));
            }
            if chain.len() == LEVELS_MAX {
                let entity = entity.clone();
                return Ok(Err(Error::TooDeep { entity, max: LEVELS_MAX }));
            }
            let target = self.resolve(&current, resource, now).await?;
            next = target.origin().parent.clone();
            chain.push(target);
        }
        Ok(Ok(chain))
    }
}

/// What the fast path has found before it needs the slow path, whose first attempt continues from there.
#[derive(Default)]
pub(crate) enum Found {
    #[default]
    Nothing,
    /// The first levels of the chain, at this moment.
    Levels(Chain, Checked),
    /// The plan, and the ancestors.
    Plan(Plan, Chain),
}

/// The buckets and limits of an entity and its ancestors, the entity first.
pub(crate) type Chain = SmallVec<[Arc<Target>; 1]>;

/// The error of a call that takes nothing.
pub(crate) fn no_amounts() -> Invalid {
    Invalid::new("amounts", "", "name at least one limit and how much of it to take")
}

/// The level of an entity: 0 for the caller. Legs are not levels: ancestors without limits have no leg.
fn level_of(entity: &EntityId, above: &Chain) -> usize {
    let is_its = |target: &Arc<Target>| target.key().entity == *entity;
    above.iter().position(is_its).map_or(0, |at| at + 1)
}

/// The amounts for those requested limits that a bucket has.
#[inline]
pub(crate) fn takes_of(
    level: usize,
    target: &Target,
    asked: &[(&str, u64)],
) -> Result<Takes, Error> {
    let mut takes = Takes::new();
    for (name, tokens) in asked {
        let requested = amount(*tokens)?;
        let Some(cell) = target.limits().position(name) else { continue };
        let capacity = target.limits().rates()[cell].capacity();
        if requested > capacity {
            let owner = (target.key().entity.clone(), level);
            let limit = target.limits().names()[cell].clone();
            return Err(ExceedsCapacity::new(owner, limit, requested, capacity).into());
        }
        takes.push(Take { cell, amount: requested });
    }
    Ok(takes)
}

/// The error for a call that names limits that its own bucket lacks.
pub(crate) fn unknown_limits<'a>(own: &Target, names: impl Iterator<Item = &'a str>) -> Error {
    let is_unknown = |name: &&str| own.limits().position(name).is_none();
    let unknown: Vec<String> = names.filter(is_unknown).map(str::to_owned).collect();
    let first = unknown.first().map_or("", String::as_str);
    Error::UnknownLimits {
        configured: nearest(first, own.limits().names().to_vec()),
        unknown,
        entity: own.key().entity.clone(),
        resource: own.key().resource.clone(),
    }
}

/// Counts and logs a refusal that the caller gets.
pub(crate) fn note_refusal(refusal: &RateLimitExceeded) {
    telemetry::decided(Outcome::Refused);
    refusal.violations().for_each(|status| telemetry::refused(&status.limit_name));
    let primary = refusal.primary_violation();
    tracing::debug!(
        entity = ?primary.entity_id,
        resource = %primary.resource,
        limit = %primary.limit_name,
        retry_after = ?primary.retry_after,
        "refused"
    );
}

/// The statuses of limits that were just taken from.
pub(crate) fn taken_statuses(
    level: usize,
    leg: &Leg,
    taken: &LegTaken,
) -> impl Iterator<Item = LimitStatus> {
    leg.takes.iter().zip(&taken.left).map(move |(take, left)| {
        let target = &leg.target;
        let rate = target.limits().rates()[take.cell];
        let missing = rate.capacity().get().saturating_sub(left.get());
        LimitStatus {
            entity_id: target.key().entity.clone(),
            level,
            resource: target.key().resource.clone(),
            limit_name: target.limits().names()[take.cell].clone(),
            rate,
            available: *left,
            requested: take.amount,
            exceeded: false,
            retry_after: Duration::ZERO,
            full_after: rate.time_to_earn(Millitokens::new(missing)),
        }
    })
}

/// The future of an [`Acquire`], for code that must name its type.
#[must_use = "nothing is taken before it is awaited"]
pub struct Acquiring<'a>(State<'a>);

enum State<'a> {
    /// Not polled yet.
    Start(Acquire<'a>),
    /// While it changes from `Start` to `Boxed`.
    Moving,
    /// On the slow path.
    Boxed(BoxFuture<'a, Result<Lease, Error>>),
}

impl std::fmt::Debug for Acquiring<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Acquiring")
    }
}

impl<'a> IntoFuture for Acquire<'a> {
    type Output = Result<Lease, Error>;
    type IntoFuture = Acquiring<'a>;

    #[inline]
    fn into_future(self) -> Acquiring<'a> {
        Acquiring(State::Start(self))
    }
}

impl Future for Acquiring<'_> {
    type Output = Result<Lease, Error>;

    #[inline]
    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let State::Start(acquire) = &self.0 else { return self.0.poll_slow_path(context) };
        let clock = &*acquire.inner.clock;
        let started = telemetry::start(clock);
        let (done, span) = if telemetry::may_be_traced() {
            let span = acquire.span();
            (span.in_scope(|| acquire.take_now()), span)
        } else {
            match acquire.take_one() {
                Ok(taken) => {
                    telemetry::finish(clock, started);
                    return Poll::Ready(Ok(acquire.lease(taken)));
                }
                Err(missed) => (acquire.take_chain(missed), Span::none()),
            }
        };
        let found = match done {
            Ok(done) => {
                telemetry::finish(clock, started);
                return Poll::Ready(done);
            }
            Err(found) => found,
        };
        self.0.begin_slow_path(found, span, started);
        self.0.poll_slow_path(context)
    }
}

impl<'a> State<'a> {
    #[cold]
    fn begin_slow_path(&mut self, found: Found, span: Span, started: Started) {
        let Self::Start(acquire) = std::mem::replace(self, Self::Moving) else {
            unreachable!("the slow path begins once");
        };
        let slow_path = async move {
            let done = match acquire.wait {
                Some(timeout) => acquire.wait_for_tokens(timeout).await,
                None => acquire.run_to_end(found).await,
            };
            telemetry::finish(&*acquire.inner.clock, started);
            done
        };
        *self = Self::Boxed(Box::pin(slow_path.instrument(span)));
    }

    fn poll_slow_path(&mut self, context: &mut Context<'_>) -> Poll<Result<Lease, Error>> {
        match self {
            Self::Boxed(slow_path) => slow_path.as_mut().poll(context),
            Self::Start(_) | Self::Moving => unreachable!("only called on the slow path"),
        }
    }
}
