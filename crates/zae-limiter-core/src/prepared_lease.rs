//! The lease of a prepared call: a few words, of which a whole [`Lease`] is made when one is needed.

use std::fmt;
use std::future::Future;
use std::ops::{Deref, DerefMut};
use std::panic::Location;
use std::sync::{Arc, OnceLock};

use smallvec::{SmallVec, smallvec};
use zae_limiter_model::{EntityId, LimitSet, Millitokens, Take, Timestamp, amount};

use crate::dropped::OnDrop;
use crate::error::Error;
use crate::lease::{CallSettings, Lease};
use crate::plan::{Leg, LegTaken, Placement, Takes, Target};
use crate::prepared::Prepared;
use crate::record::OnUnavailable;

/// The tokens of a prepared call: a [`Lease`] in all it does, made by [`Prepared::acquire`].
///
/// It has all methods of a [`Lease`]. As long as a call only takes tokens and commits, it stays on the stack; whatever
/// needs more makes a whole lease of it. It borrows the prepared call and the entity's id:
/// [`into_lease`](Self::into_lease) returns a lease that borrows nothing.
///
/// ```
/// # use zae_limiter_core::{Limit, MemoryStore, RateLimiter};
/// # tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(async {
/// # let limiter = RateLimiter::builder(MemoryStore::new())
/// #     .default_limits([Limit::per_minute("tpm", 10_000)]).open().await?;
/// let prepared = limiter.prepare("gpt-4", ["tpm"])?;
/// let lease = prepared.acquire("key-1", [500]).await?;
/// assert_eq!(lease.held("tpm"), Some(500));
///
/// let mut lease = lease.into_lease(); // to move it to another task
/// lease.settle("tpm", 730)?;
/// lease.commit().await?;
/// # Ok::<(), zae_limiter_core::Error>(())
/// # }).unwrap();
/// ```
#[must_use = "a lease that is dropped refunds its estimate"]
pub struct PreparedLease<'a, const N: usize> {
    prepared: &'a Prepared<N>,
    /// `None` once the lease is closed, and for calls that had a whole lease from the start.
    taken: Option<Taken<'a, N>>,
    /// The whole lease, if it was needed. It then replaces what is in `taken`.
    whole: OnceLock<Box<Lease>>,
}

/// What the usual call took: from one bucket, in one place.
pub(crate) struct Taken<'a, const N: usize> {
    pub(crate) entity: &'a str,
    pub(crate) limits: Limits<'a>,
    pub(crate) amounts: [u64; N],
    /// The balances after taking.
    pub(crate) left: [Millitokens; N],
    /// When the limits were read.
    pub(crate) read_at: Timestamp,
    /// The lifetime of the bucket.
    pub(crate) idle_ms: u64,
    pub(crate) on_unavailable: Option<OnUnavailable>,
    pub(crate) on_drop: OnDrop,
    /// The call site of the acquire.
    pub(crate) site: &'static Location<'static>,
}

/// The limits that a call took from.
pub(crate) enum Limits<'a> {
    /// The prepared call keeps them.
    Kept(&'a Arc<LimitSet>),
    Shared(Arc<LimitSet>),
}

impl<'a, const N: usize> PreparedLease<'a, N> {
    #[inline]
    pub(crate) fn taken(prepared: &'a Prepared<N>, taken: Taken<'a, N>) -> Self {
        Self { prepared, taken: Some(taken), whole: OnceLock::new() }
    }

    pub(crate) fn whole(prepared: &'a Prepared<N>, lease: Lease) -> Self {
        Self { prepared, taken: None, whole: OnceLock::from(Box::new(lease)) }
    }

    /// Keeps the tokens, and writes all differences: see [`Lease::commit`]. The call commits, not its future.
    ///
    /// # Errors
    ///
    /// As [`Lease::flush`]. The tokens stay taken.
    // Out of line, it would copy the lease.
    #[inline(always)]
    pub fn commit(mut self) -> impl Future<Output = Result<(), Error>> + Send + 'static + use<N> {
        self.taken = None;
        let writing = self.whole.take().map(|lease| Box::pin(lease.commit()));
        async move {
            match writing {
                None => Ok(()),
                Some(writing) => writing.await,
            }
        }
    }

    /// Refunds all tokens held: see [`Lease::rollback`]. The call rolls back, not its future.
    ///
    /// # Errors
    ///
    /// As [`Lease::flush`]. Tokens that could not be refunded stay taken.
    pub fn rollback(self) -> impl Future<Output = Result<(), Error>> + Send + 'static + use<N> {
        self.into_lease().rollback()
    }

    /// A lease that borrows nothing.
    pub fn into_lease(mut self) -> Lease {
        self.make_whole();
        self.taken = None;
        let Some(lease) = self.whole.take() else { unreachable!("made above") };
        *lease
    }

    #[cold]
    fn make_whole(&self) -> &Lease {
        self.whole.get_or_init(|| {
            let taken = self.taken.as_ref().expect("a lease that is open has one of the two");
            Box::new(taken.to_lease(self.prepared))
        })
    }
}

impl<const N: usize> Taken<'_, N> {
    /// The lease that the generic call would have returned.
    fn to_lease(&self, prepared: &Prepared<N>) -> Lease {
        let limits = match &self.limits {
            Limits::Kept(limits) => Arc::clone(limits),
            Limits::Shared(limits) => Arc::clone(limits),
        };
        let cells = prepared.cells_in(&limits).expect("taken from these limits");
        let take = |(cell, tokens)| Take { cell, amount: amount(tokens).expect("was taken") };
        let takes: Takes = cells.into_iter().zip(self.amounts).map(take).collect();
        let entity = EntityId::new(self.entity).expect("the id of a bucket");
        let key = prepared.limiter.inner.bucket_key(&entity, &prepared.resource);
        let target = Target::remembered(key, limits, self.read_at, self.idle_ms);
        let left = SmallVec::from_slice(&self.left);
        let taken = LegTaken { placement: Placement::default(), left };
        let is_plain = self.on_unavailable.is_none() && self.on_drop == OnDrop::GiveBack;
        let call = (!is_plain).then(|| {
            Box::new(CallSettings {
                limits: None,
                on_unavailable: self.on_unavailable,
                on_drop: self.on_drop,
                levels: vec![0],
            })
        });
        let legs = smallvec![Leg { target: Arc::new(target), takes }];
        Lease::new(prepared.limiter.handle(), legs, smallvec![taken], call, self.site)
    }
}

impl<const N: usize> Deref for PreparedLease<'_, N> {
    type Target = Lease;

    fn deref(&self) -> &Lease {
        self.make_whole()
    }
}

impl<const N: usize> DerefMut for PreparedLease<'_, N> {
    fn deref_mut(&mut self) -> &mut Lease {
        self.make_whole();
        self.whole.get_mut().expect("made above")
    }
}

impl<const N: usize> Drop for PreparedLease<'_, N> {
    #[inline(always)]
    fn drop(&mut self) {
        if self.taken.is_some() {
            // Dropping the whole lease refunds what it holds.
            self.make_whole();
        }
    }
}

/// Like that of [`Lease`].
impl<const N: usize> fmt::Debug for PreparedLease<'_, N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("PreparedLease").field(self.make_whole()).finish()
    }
}
