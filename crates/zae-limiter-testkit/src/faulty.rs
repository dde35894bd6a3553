//! A store with scripted faults: calls that fail, hang or wait.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Waker};

use tokio::sync::Semaphore;
use zae_limiter_core::{
    Admission, BoxFuture, Bucket, BucketKey, BucketQuery, Cost, Key, Millitokens, NamespaceId,
    Page, PageRequest, Plan, Query, Record, ResourceList, ResourceName, Scope, Settlement,
    SingleLeg, Store, StoreError, StoreErrorKind, StoredBucket, Take, Target, TimeCheck, Timestamp,
    UsageRecording, Write, Written,
};

/// A method of [`Store`]. `acquire`, `acquire_now` and `take_now` count as one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Call {
    /// [`Store::acquire`], and [`Store::acquire_now`] or [`Store::take_now`] if these give a reply.
    Acquire,
    /// [`Store::settle`].
    Settle,
    /// [`Store::peek`].
    Peek,
    /// [`Store::reconfigure`].
    Reconfigure,
    /// [`Store::get`].
    Get,
    /// [`Store::write`].
    Write,
    /// [`Store::delete`].
    Delete,
    /// [`Store::note_deletion`].
    NoteDeletion,
    /// [`Store::list`].
    List,
    /// [`Store::list_buckets`].
    ListBuckets,
    /// [`Store::list_keys`].
    ListKeys,
    /// [`Store::list_everything`].
    ListEverything,
    /// [`Store::list_resources`].
    ListResources,
}

/// A fault of a call.
#[derive(Clone, Debug)]
pub enum Fault {
    /// The call fails without an effect ([`Applied::No`](zae_limiter_core::Applied::No)).
    FailBefore(StoreErrorKind),
    /// The call takes effect, but its reply is lost
    /// ([`Applied::Maybe`](zae_limiter_core::Applied::Maybe)).
    FailAfter(StoreErrorKind),
    /// The call has no effect and never ends.
    Hang,
    /// The call waits until the gate is opened, and takes effect then.
    HoldBefore(Gate),
    /// The call takes effect, and its reply waits until the gate is opened. An acquire that is
    /// dropped meanwhile refunds what it took, as the contract requires.
    HoldAfter(Gate),
}

/// Holds calls until a test opens it. Clones are handles to the same gate.
#[derive(Clone)]
pub struct Gate {
    /// Closed when the gate is open: then no call waits for a permit.
    barrier: Arc<Semaphore>,
    /// One permit for each call that has reached the gate.
    arrivals: Arc<Semaphore>,
}

impl Default for Gate {
    fn default() -> Self {
        Self { barrier: Arc::new(Semaphore::new(0)), arrivals: Arc::new(Semaphore::new(0)) }
    }
}

impl Gate {
    /// A closed gate.
    pub fn new() -> Self {
        Self::default()
    }

    /// Lets all calls pass from now on.
    pub fn open(&self) {
        self.barrier.close();
    }

    /// Waits until a call has reached the gate. Each call of `reached` waits for another one.
    pub async fn reached(&self) {
        self.arrivals.acquire().await.expect("never closed").forget();
    }

    async fn pass(&self) {
        self.arrivals.add_permits(1);
        // There are no permits, so this ends when the gate is opened.
        let _ = self.barrier.acquire().await;
    }
}

impl fmt::Debug for Gate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gate").field("open", &self.barrier.is_closed()).finish()
    }
}

/// Wraps a store, counts its calls, and applies scripted faults.
///
/// ```
/// # use std::sync::Arc;
/// # use zae_limiter_core::{Store, StoreErrorKind};
/// use zae_limiter_testkit::{Call, Fault, Faulty};
///
/// # async fn example(store: Arc<dyn Store>) {
/// let faulty = Faulty::new(store);
/// faulty.script(Call::Get, Fault::FailBefore(StoreErrorKind::Unavailable));
/// assert!(faulty.get(&[]).await.is_err());
/// assert!(faulty.get(&[]).await.is_ok());
/// assert_eq!(faulty.calls(Call::Get), 2);
/// # }
/// ```
pub struct Faulty<S: ?Sized> {
    inner: Arc<S>,
    // A std mutex: it is never held across an await.
    script: Mutex<Script>,
}

#[derive(Debug, Default)]
struct Script {
    /// The faults of the next calls of each method, in order.
    next: BTreeMap<Call, VecDeque<Fault>>,
    /// The fault of every other call.
    outage: Option<Fault>,
    /// How often each method was called.
    calls: BTreeMap<Call, usize>,
    /// When the limits of the last call of each method were read.
    limits_read_at: BTreeMap<Call, Option<Timestamp>>,
}

impl<S: Store + ?Sized> Faulty<S> {
    /// Wraps a store, without faults.
    pub fn new(inner: Arc<S>) -> Self {
        Self { inner, script: Mutex::default() }
    }

    /// The wrapped store, to call it without faults.
    pub fn inner(&self) -> &Arc<S> {
        &self.inner
    }

    /// Adds a fault for the next call of this method, after those already scripted.
    pub fn script(&self, call: Call, fault: Fault) {
        self.lock().next.entry(call).or_default().push_back(fault);
    }

    /// Applies the fault to every call of any method, until [`heal`](Self::heal). Faults scripted
    /// for a method come first.
    pub fn break_down(&self, fault: Fault) {
        self.lock().outage = Some(fault);
    }

    /// Removes all faults.
    pub fn heal(&self) {
        let mut script = self.lock();
        script.outage = None;
        script.next.clear();
    }

    /// How often the method was called. A call counts when its future is first polled.
    pub fn calls(&self, call: Call) -> usize {
        self.lock().calls.get(&call).copied().unwrap_or_default()
    }

    /// How often any method was called.
    pub fn all_calls(&self) -> usize {
        self.lock().calls.values().sum()
    }

    /// When the limits of the last `acquire`, `settle` or `reconfigure` were read, for the first of
    /// its buckets: [`Target::limits_read_at`].
    pub fn limits_read_at(&self, call: Call) -> Option<Timestamp> {
        self.lock().limits_read_at.get(&call).copied().flatten()
    }

    fn note(&self, call: Call, target: Option<&Target>) {
        if let Some(target) = target {
            self.lock().limits_read_at.insert(call, target.limits_read_at());
        }
    }

    fn lock(&self) -> MutexGuard<'_, Script> {
        self.script.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn has_fault_for(&self, call: Call) -> bool {
        let script = self.lock();
        script.outage.is_some() || script.next.get(&call).is_some_and(|queue| !queue.is_empty())
    }

    fn count(&self, call: Call) {
        *self.lock().calls.entry(call).or_default() += 1;
    }

    /// Counts the call, and returns its fault.
    fn begin(&self, call: Call) -> Option<Fault> {
        self.count(call);
        let mut script = self.lock();
        let scripted = script.next.get_mut(&call).and_then(VecDeque::pop_front);
        scripted.or_else(|| script.outage.clone())
    }

    fn meet<'a, T: Send + 'a>(
        &'a self,
        call: Call,
        carry_out: BoxFuture<'a, Result<T, StoreError>>,
    ) -> BoxFuture<'a, Result<T, StoreError>> {
        self.meet_or_undo(call, carry_out, |_| {})
    }

    /// Calls `undo` with a reply that is dropped at the gate.
    fn meet_or_undo<'a, T: Send + 'a>(
        &'a self,
        call: Call,
        carry_out: BoxFuture<'a, Result<T, StoreError>>,
        undo: impl FnMut(T) + Send + 'a,
    ) -> BoxFuture<'a, Result<T, StoreError>> {
        let failed = move |kind| StoreError::new(kind, format!("scripted failure of {call:?}"));
        Box::pin(async move {
            match self.begin(call) {
                None => carry_out.await,
                Some(Fault::FailBefore(kind)) => Err(failed(kind)),
                Some(Fault::FailAfter(kind)) => {
                    carry_out.await?;
                    Err(failed(kind).maybe_applied())
                }
                Some(Fault::Hang) => std::future::pending().await,
                Some(Fault::HoldBefore(gate)) => {
                    gate.pass().await;
                    carry_out.await
                }
                Some(Fault::HoldAfter(gate)) => {
                    let mut held = Held { answer: Some(carry_out.await?), undo };
                    gate.pass().await;
                    Ok(held.answer.take().expect("only taken here"))
                }
            }
        })
    }

    /// Refunds what an acquire took.
    fn give_back(&self, plan: &Plan, admission: Admission) {
        let Admission::Taken(taken) = admission else {
            return;
        };
        let legs = plan.legs.iter().zip(&taken);
        let settlements: Vec<Settlement> = legs
            .map(|(leg, taken)| Settlement {
                target: Arc::clone(&leg.target),
                placement: taken.placement,
                differences: leg
                    .takes
                    .iter()
                    .map(|take| Take { amount: -take.amount, ..*take })
                    .collect(),
            })
            .collect();
        // A settlement is carried out once it was polled, and a drop can do no more than that.
        let mut settle = pin!(self.inner.settle(&settlements, plan.now));
        let _ = settle.as_mut().poll(&mut Context::from_waker(Waker::noop()));
    }
}

/// A reply that waits at a gate.
struct Held<T, U: FnMut(T)> {
    answer: Option<T>,
    undo: U,
}

impl<T, U: FnMut(T)> Drop for Held<T, U> {
    fn drop(&mut self) {
        if let Some(answer) = self.answer.take() {
            (self.undo)(answer);
        }
    }
}

impl<S: Store + ?Sized> fmt::Debug for Faulty<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Faulty").field("inner", &self.inner).field("script", &*self.lock()).finish()
    }
}

#[deny(clippy::missing_trait_methods)]
impl<S: Store + ?Sized> Store for Faulty<S> {
    fn check_time(&self, now: Timestamp) -> TimeCheck {
        self.inner.check_time(now)
    }

    fn cost(&self) -> Option<Cost> {
        self.inner.cost()
    }

    fn usage_recording(&self) -> UsageRecording {
        self.inner.usage_recording()
    }

    fn acquire_now(&self, plan: &Plan) -> Option<Result<Admission, StoreError>> {
        // A call without a future could neither hang nor wait.
        if self.has_fault_for(Call::Acquire) {
            return None;
        }
        let answer = self.inner.acquire_now(plan)?;
        self.count(Call::Acquire);
        self.note(Call::Acquire, plan.legs.first().map(|leg| &*leg.target));
        Some(answer)
    }

    fn take_now(&self, leg: &SingleLeg<'_>, left: &mut [Millitokens]) -> bool {
        if self.has_fault_for(Call::Acquire) || !self.inner.take_now(leg, left) {
            return false;
        }
        self.count(Call::Acquire);
        self.note(Call::Acquire, Some(leg.target));
        true
    }

    fn acquire<'a>(&'a self, plan: &'a Plan) -> BoxFuture<'a, Result<Admission, StoreError>> {
        self.note(Call::Acquire, plan.legs.first().map(|leg| &*leg.target));
        let undo = |admission| self.give_back(plan, admission);
        self.meet_or_undo(Call::Acquire, self.inner.acquire(plan), undo)
    }

    fn settle<'a>(
        &'a self,
        settlements: &'a [Settlement],
        now: Timestamp,
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        self.note(Call::Settle, settlements.first().map(|each| &*each.target));
        self.meet(Call::Settle, self.inner.settle(settlements, now))
    }

    fn peek<'a>(
        &'a self,
        keys: &'a [BucketKey],
        now: Timestamp,
    ) -> BoxFuture<'a, Result<Vec<Option<Bucket>>, StoreError>> {
        self.meet(Call::Peek, self.inner.peek(keys, now))
    }

    fn reconfigure<'a>(
        &'a self,
        target: &'a Target,
        now: Timestamp,
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        self.note(Call::Reconfigure, Some(target));
        self.meet(Call::Reconfigure, self.inner.reconfigure(target, now))
    }

    fn get<'a>(
        &'a self,
        keys: &'a [Key],
    ) -> BoxFuture<'a, Result<Vec<Option<Record>>, StoreError>> {
        self.meet(Call::Get, self.inner.get(keys))
    }

    fn write<'a>(&'a self, batch: &'a [Write]) -> BoxFuture<'a, Result<Written, StoreError>> {
        self.meet(Call::Write, self.inner.write(batch))
    }

    fn delete<'a>(&'a self, keys: &'a [Key]) -> BoxFuture<'a, Result<(), StoreError>> {
        self.meet(Call::Delete, self.inner.delete(keys))
    }

    fn note_deletion<'a>(
        &'a self,
        scope: &'a Scope,
        now: Timestamp,
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        self.meet(Call::NoteDeletion, self.inner.note_deletion(scope, now))
    }

    fn list<'a>(
        &'a self,
        query: &'a Query,
        page: &'a PageRequest,
    ) -> BoxFuture<'a, Result<Page<Record>, StoreError>> {
        self.meet(Call::List, self.inner.list(query, page))
    }

    fn list_buckets<'a>(
        &'a self,
        query: &'a BucketQuery,
        page: &'a PageRequest,
    ) -> BoxFuture<'a, Result<Page<StoredBucket>, StoreError>> {
        self.meet(Call::ListBuckets, self.inner.list_buckets(query, page))
    }

    fn list_keys<'a>(
        &'a self,
        scope: &'a Scope,
        page: &'a PageRequest,
    ) -> BoxFuture<'a, Result<Page<Key>, StoreError>> {
        self.meet(Call::ListKeys, self.inner.list_keys(scope, page))
    }

    fn list_everything<'a>(
        &'a self,
        now: Timestamp,
        page: &'a PageRequest,
    ) -> BoxFuture<'a, Result<Page<Key>, StoreError>> {
        self.meet(Call::ListEverything, self.inner.list_everything(now, page))
    }

    fn list_resources<'a>(
        &'a self,
        namespace: &'a NamespaceId,
        which: ResourceList,
        page: &'a PageRequest,
    ) -> BoxFuture<'a, Result<Page<ResourceName>, StoreError>> {
        self.meet(Call::ListResources, self.inner.list_resources(namespace, which, page))
    }
}
