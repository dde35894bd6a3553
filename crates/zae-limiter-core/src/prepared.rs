//! Prepared calls: the resource and the limits of a call, checked and resolved once.
//!
//! A prepared call decides the usual case itself: one bucket, cached, with tokens, on a store that answers at once. It
//! then touches no reference count, and its lease only remembers what a whole [`Lease`] can be made of. Everything else
//! goes through [`Acquire`], so that both behave alike.

use std::fmt;
use std::future::{Future, IntoFuture};
use std::panic::Location;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};
use std::time::Duration;

use smallvec::SmallVec;
use zae_limiter_model::{
    EntityId, Invalid, LIMITS_MAX, LimitName, LimitSet, MILLI, Millitokens, ResourceName, Take,
    Timestamp,
};

use crate::acquire::{Acquire, Acquiring, no_amounts};
use crate::cache::stripe;
use crate::dropped::OnDrop;
use crate::error::Error;
use crate::limiter::RateLimiter;
use crate::plan::{SingleLeg, Target};
use crate::prepared_lease::{Limits, PreparedLease, Taken};
use crate::record::OnUnavailable;
use crate::telemetry::{self, Outcome};

/// How many limit sets a prepared call remembers the positions of its limits in. Most resources have one.
const RESOLVED_MAX: usize = 4;

impl RateLimiter {
    /// Prepares calls that take from these limits of a resource, like a prepared statement of a database: names are
    /// checked now, and looked up once. Each call then names its entity and the amounts, in the order of the limits.
    ///
    /// A prepared call does what an [`acquire`](Self::acquire) with the same amounts does, in about half of the time if
    /// the store is in memory. It reads the current limits, so it can be kept as long as the limiter.
    ///
    /// ```
    /// # use zae_limiter_core::{Limit, MemoryStore, RateLimiter};
    /// # tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(async {
    /// # let limiter = RateLimiter::builder(MemoryStore::new()).open().await?;
    /// limiter
    ///     .set_resource_defaults("gpt-4", [Limit::per_minute("rpm", 100), Limit::per_minute("tpm", 10_000)])
    ///     .await?;
    /// let prepared = limiter.prepare("gpt-4", ["rpm", "tpm"])?;
    ///
    /// let mut lease = prepared.acquire("key-1", [1, 500]).await?;
    /// lease.settle("tpm", 730)?;
    /// lease.commit().await?;
    /// # Ok::<(), zae_limiter_core::Error>(())
    /// # }).unwrap();
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for a name that breaks a rule, a limit that is named twice, no limit, or more than
    /// [`LIMITS_MAX`]. Whether an entity has the limits is checked by each call.
    pub fn prepare<const N: usize>(
        &self,
        resource: &str,
        limits: [&str; N],
    ) -> Result<Prepared<N>, Error> {
        let resource = self.inner.cache.intern(&ResourceName::new(resource)?);
        if N == 0 {
            return Err(no_amounts().into());
        }
        if N > LIMITS_MAX {
            return Err(Invalid::new("limits", N, "use at most 32 limits").into());
        }
        let mut names = Vec::with_capacity(N);
        for limit in limits {
            let name = LimitName::new(limit)?;
            if names.contains(&name) {
                return Err(Invalid::new("limit name", limit, "give each limit once").into());
            }
            names.push(name);
        }
        let Ok(names) = names.try_into() else { unreachable!("as many as there were") };
        Ok(Prepared {
            limiter: self.clone(),
            resource_hash: self.inner.cache.resource_hash(resource.as_str()),
            resource,
            names,
            resolved: Default::default(),
        })
    }
}

/// Calls that take from the same limits of the same resource. Made by [`RateLimiter::prepare`].
///
/// ```
/// # use zae_limiter_core::{Error, Limit, MemoryStore, RateLimiter};
/// # tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(async {
/// # let limiter = RateLimiter::builder(MemoryStore::new())
/// #     .default_limits([Limit::per_minute("rpm", 100)]).open().await?;
/// let prepared = limiter.prepare("gpt-4", ["rpm"])?;
/// for key in ["key-1", "key-2", "key-1"] {
///     // Without a future, if nothing has to be read first.
///     let lease = match prepared.try_acquire(key, [1]) {
///         Err(Error::WouldWait) => prepared.acquire(key, [1]).await?,
///         decided => decided?,
///     };
///     lease.commit().await?;
/// }
/// # Ok::<(), Error>(())
/// # }).unwrap();
/// ```
pub struct Prepared<const N: usize> {
    pub(crate) limiter: RateLimiter,
    pub(crate) resource: ResourceName,
    resource_hash: u64,
    names: [LimitName; N],
    resolved: [OnceLock<Resolved<N>>; RESOLVED_MAX],
}

/// The positions of a prepared call's limits in a limit set.
#[derive(Clone)]
struct Resolved<const N: usize> {
    limits: Arc<LimitSet>,
    cells: [usize; N],
}

impl<const N: usize> Prepared<N> {
    /// Takes tokens of an entity: all amounts, or none. The amounts are in the order of the limits.
    ///
    /// The call and its lease borrow the entity's id; see [`PreparedLease::into_lease`].
    #[inline]
    #[track_caller]
    pub fn acquire<'a>(&'a self, entity: &'a str, amounts: [u64; N]) -> PreparedAcquire<'a, N> {
        PreparedAcquire {
            prepared: self,
            entity,
            amounts,
            times: None,
            on_unavailable: None,
            on_drop: OnDrop::GiveBack,
            site: Location::caller(),
        }
    }

    /// Takes tokens without waiting, for callers without a future: [`acquire`](Self::acquire) followed by
    /// [`try_now`](PreparedAcquire::try_now).
    ///
    /// # Errors
    ///
    /// As [`try_now`](PreparedAcquire::try_now): above all [`Error::WouldWait`].
    #[inline]
    #[track_caller]
    pub fn try_acquire<'a>(
        &'a self,
        entity: &'a str,
        amounts: [u64; N],
    ) -> Result<PreparedLease<'a, N>, Error> {
        self.acquire(entity, amounts).try_now()
    }

    /// The resource.
    pub fn resource(&self) -> &ResourceName {
        &self.resource
    }

    /// The limits, in the order of the amounts.
    pub fn limits(&self) -> &[LimitName; N] {
        &self.names
    }

    /// The positions of the limits in a set, and the set; `None` if it lacks one of them.
    #[inline]
    fn resolve<'a>(&'a self, limits: &Arc<LimitSet>) -> Option<(Limits<'a>, [usize; N])> {
        // The sets that were seen first come first.
        for known in self.resolved.iter().map_while(OnceLock::get) {
            if Arc::ptr_eq(&known.limits, limits) {
                return Some((Limits::Kept(&known.limits), known.cells));
            }
        }
        self.resolve_anew(limits)
    }

    #[cold]
    fn resolve_anew<'a>(&'a self, limits: &Arc<LimitSet>) -> Option<(Limits<'a>, [usize; N])> {
        let cells = self.cells_in(limits)?;
        let resolved = Resolved { limits: Arc::clone(limits), cells };
        // Another thread may set a place in the meantime: then the set stands twice, or nowhere.
        if let Some(free) = self.resolved.iter().find(|place| place.get().is_none()) {
            let _ = free.set(resolved);
        }
        Some((Limits::Shared(Arc::clone(limits)), cells))
    }

    pub(crate) fn cells_in(&self, limits: &LimitSet) -> Option<[usize; N]> {
        let mut cells = [0; N];
        for (cell, name) in cells.iter_mut().zip(&self.names) {
            *cell = limits.position(name.as_str())?;
        }
        Some(cells)
    }
}

impl<const N: usize> Clone for Prepared<N> {
    fn clone(&self) -> Self {
        Self {
            limiter: self.limiter.clone(),
            resource: self.resource.clone(),
            resource_hash: self.resource_hash,
            names: self.names.clone(),
            resolved: self.resolved.clone(),
        }
    }
}

impl<const N: usize> fmt::Debug for Prepared<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Prepared")
            .field("resource", &self.resource)
            .field("limits", &self.names)
            .finish_non_exhaustive()
    }
}

/// A prepared call for an entity; `await` it, or [try it now](Self::try_now). Made by [`Prepared::acquire`].
#[must_use = "nothing is taken before it is awaited"]
pub struct PreparedAcquire<'a, const N: usize> {
    prepared: &'a Prepared<N>,
    entity: &'a str,
    amounts: [u64; N],
    /// `None` if neither is set, which keeps the call small.
    times: Option<Box<Times>>,
    on_unavailable: Option<OnUnavailable>,
    on_drop: OnDrop,
    site: &'static Location<'static>,
}

#[derive(Clone, Copy, Default)]
struct Times {
    deadline: Option<Duration>,
    wait: Option<Duration>,
}

/// The entity id is hashed: it is often an API key.
impl<const N: usize> fmt::Debug for PreparedAcquire<'_, N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PreparedAcquire")
            .field("entity", &EntityId::new(self.entity).ok())
            .field("prepared", &self.prepared)
            .field("amounts", &self.amounts)
            .finish_non_exhaustive()
    }
}

impl<'a, const N: usize> PreparedAcquire<'a, N> {
    /// See [`Acquire::on_unavailable`].
    pub fn on_unavailable(mut self, policy: OnUnavailable) -> Self {
        self.on_unavailable = Some(policy);
        self
    }

    /// See [`Acquire::deadline`].
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.times.get_or_insert_default().deadline = Some(deadline);
        self
    }

    /// See [`Acquire::wait_up_to`].
    pub fn wait_up_to(mut self, timeout: Duration) -> Self {
        self.times.get_or_insert_default().wait = Some(timeout);
        self
    }

    /// See [`Acquire::on_drop`].
    pub fn on_drop(mut self, on_drop: OnDrop) -> Self {
        self.on_drop = on_drop;
        self
    }

    /// Takes the tokens without waiting: see [`Acquire::try_now`].
    ///
    /// The lease has a future to [commit](PreparedLease::commit) it. A caller without one drops that future: the call
    /// itself commits.
    ///
    /// # Errors
    ///
    /// [`Error::WouldWait`] if the call must be awaited; otherwise as an awaited call.
    #[inline]
    pub fn try_now(self) -> Result<PreparedLease<'a, N>, Error> {
        match self.take_warm() {
            Some(lease) => Ok(lease),
            None => {
                self.generic().try_now().map(|lease| PreparedLease::whole(self.prepared, lease))
            }
        }
    }

    /// The same call without preparation.
    #[cold]
    fn generic(&self) -> Acquire<'a> {
        let prepared = self.prepared;
        let names = prepared.names.iter().map(LimitName::as_str);
        let takes: SmallVec<[(&str, u64); 2]> = names.zip(self.amounts).collect();
        let Times { deadline, wait } = self.times.as_deref().copied().unwrap_or_default();
        Acquire {
            limiter: &prepared.limiter,
            inner: &prepared.limiter.inner,
            entity: self.entity,
            resource: prepared.resource.as_str(),
            takes,
            limits: None,
            on_unavailable: self.on_unavailable,
            deadline,
            wait,
            on_drop: self.on_drop,
            site: self.site,
        }
    }

    /// The usual call. `None` if it is another one: then nothing was taken.
    #[inline]
    fn take_warm(&self) -> Option<PreparedLease<'a, N>> {
        let waits = self.times.as_ref().is_some_and(|times| times.wait.is_some());
        // A span costs more than the rest, so the generic call makes it.
        if waits || telemetry::may_be_traced() {
            return None;
        }
        let prepared = self.prepared;
        let inner = &prepared.limiter.inner;
        let started = telemetry::start(&*inner.clock);
        let now = inner.now().now;
        let resource = prepared.resource.as_str();
        let take = |target: &Arc<Target>| self.take_from(target, now);
        let taken =
            inner.cache.with(prepared.resource_hash, self.entity, resource, now, take)??;
        inner.cache.count_hit(stripe());
        telemetry::decided(Outcome::Admitted);
        telemetry::finish(&*inner.clock, started);
        Some(PreparedLease::taken(prepared, taken))
    }

    #[inline(always)]
    fn take_from(&self, target: &Arc<Target>, now: Timestamp) -> Option<Taken<'a, N>> {
        let prepared = self.prepared;
        // A child takes from its parents, too.
        if target.parent().is_some() {
            return None;
        }
        let (limits, cells) = prepared.resolve(target.limits())?;
        let rates = target.limits().rates();
        let mut takes = [Take { cell: 0, amount: Millitokens::ZERO }; N];
        for ((take, cell), tokens) in takes.iter_mut().zip(cells).zip(self.amounts) {
            // No amount above a capacity is valid.
            let amount = Millitokens::new(i64::try_from(tokens).ok()?.checked_mul(MILLI)?);
            if amount > rates[cell].capacity() {
                return None;
            }
            *take = Take { cell, amount };
        }
        let mut left = [Millitokens::ZERO; N];
        let leg = SingleLeg { now, target, takes: &takes };
        prepared.limiter.inner.store.take_now(&leg, &mut left).then(|| Taken {
            entity: self.entity,
            limits,
            amounts: self.amounts,
            left,
            read_at: target.origin().read_at,
            idle_ms: target.idle_ms(),
            on_unavailable: self.on_unavailable,
            on_drop: self.on_drop,
            site: self.site,
        })
    }
}

/// The future of a [`PreparedAcquire`].
#[must_use = "nothing is taken before it is awaited"]
pub struct PreparedAcquiring<'a, const N: usize>(State<'a, N>);

enum State<'a, const N: usize> {
    /// Not polled yet.
    Start(PreparedAcquire<'a, N>),
    /// Another call than the usual one.
    Generic(&'a Prepared<N>, Pin<Box<Acquiring<'a>>>),
}

impl<const N: usize> fmt::Debug for PreparedAcquiring<'_, N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PreparedAcquiring")
    }
}

impl<'a, const N: usize> IntoFuture for PreparedAcquire<'a, N> {
    type Output = Result<PreparedLease<'a, N>, Error>;
    type IntoFuture = PreparedAcquiring<'a, N>;

    #[inline]
    fn into_future(self) -> PreparedAcquiring<'a, N> {
        PreparedAcquiring(State::Start(self))
    }
}

impl<'a, const N: usize> Future for PreparedAcquiring<'a, N> {
    type Output = Result<PreparedLease<'a, N>, Error>;

    #[inline]
    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        if let State::Start(acquire) = &self.0 {
            if let Some(lease) = acquire.take_warm() {
                return Poll::Ready(Ok(lease));
            }
            let generic = Box::pin(acquire.generic().into_future());
            self.0 = State::Generic(acquire.prepared, generic);
        }
        self.0.poll_generic(context)
    }
}

impl<'a, const N: usize> State<'a, N> {
    #[cold]
    fn poll_generic(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Result<PreparedLease<'a, N>, Error>> {
        let Self::Generic(prepared, generic) = self else {
            unreachable!("begun before it is polled")
        };
        generic.as_mut().poll(context).map_ok(|lease| PreparedLease::whole(prepared, lease))
    }
}
