//! Calls that wait for tokens: first come, first served for each bucket.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use zae_limiter_model::{
    EntityId, LimitSet, LimitStatus, Millitokens, RateLimitExceeded, ResourceName, amount,
};

use crate::acquire::{Acquire, note_refusal};
use crate::availability::statuses_of;
use crate::deadline::within;
use crate::error::Error;
use crate::lease::Lease;
use crate::limiter::call_store;

/// The queues of a limiter: one for each bucket that calls wait for.
#[derive(Debug, Default)]
pub(crate) struct Queues(Mutex<HashMap<(EntityId, ResourceName), Arc<Queue>>>);

/// The calls that wait for one bucket. Tokio's mutex is fair: first come, first served.
#[derive(Debug, Default)]
struct Queue {
    turn: tokio::sync::Mutex<()>,
    /// The stopwatch reading at which the first call in the queue retries.
    next_try: Mutex<Duration>,
}

impl Queues {
    fn lock(&self) -> MutexGuard<'_, HashMap<(EntityId, ResourceName), Arc<Queue>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn join(&self, entity: &EntityId, resource: &ResourceName) -> Place<'_> {
        let key = (entity.clone(), resource.clone());
        let queue = Arc::clone(self.lock().entry(key.clone()).or_default());
        Place { queues: self, key, queue }
    }
}

/// A place in a queue. The last one to be dropped removes the queue.
struct Place<'a> {
    queues: &'a Queues,
    key: (EntityId, ResourceName),
    queue: Arc<Queue>,
}

impl Place<'_> {
    fn next_try(&self) -> MutexGuard<'_, Duration> {
        self.queue.next_try.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let mut queues = self.queues.lock();
        // One reference is the map's, one is ours. Others join under the same lock.
        if Arc::strong_count(&self.queue) == 2 {
            queues.remove(&self.key);
        }
    }
}

fn refuse(statuses: Vec<LimitStatus>) -> Error {
    let refusal = RateLimitExceeded::new(statuses);
    note_refusal(&refusal);
    refusal.into()
}

impl Acquire<'_> {
    /// Waits for its turn, and then for tokens, for up to `timeout` in all.
    pub(crate) async fn wait_for_tokens(&self, timeout: Duration) -> Result<Lease, Error> {
        let entity = EntityId::new(self.entity)?;
        let resource = ResourceName::new(self.resource)?;
        self.check_takes()?;
        // Nothing to wait for.
        if self.takes.iter().all(|(_, tokens)| *tokens == 0) {
            return self.run_to_end().await;
        }
        let clock = &*self.inner.clock;
        let started = clock.stopwatch();
        let left = || timeout.saturating_sub(clock.stopwatch().saturating_sub(started));
        let place = self.inner.queues.join(&entity, &resource);
        let _turn = match place.queue.turn.try_lock() {
            Ok(turn) => turn,
            Err(_) => {
                // A call that cannot pass in time does not queue. If the store cannot say so, the attempt will.
                match self.current_statuses(&entity, &resource).await {
                    Ok(statuses) if statuses.iter().any(|status| status.retry_after > left()) => {
                        return Err(refuse(statuses));
                    }
                    Ok(_) | Err(Error::Unavailable { .. } | Error::Store(_)) => {}
                    Err(error) => return Err(error),
                }
                match within(clock, left(), place.queue.turn.lock()).await {
                    Some(turn) => turn,
                    None => {
                        let next_try = *place.next_try();
                        return self.refuse_in_queue(&entity, &resource, next_try).await;
                    }
                }
            }
        };
        loop {
            let refusal = match self.run_to_end().await {
                Err(Error::Exceeded(refusal)) => refusal,
                done => return done,
            };
            let wait = refusal.retry_after();
            if wait > left() {
                note_refusal(&refusal);
                return Err(Error::Exceeded(refusal));
            }
            *place.next_try() = clock.stopwatch().saturating_add(wait);
            clock.sleep(wait).await;
        }
    }

    /// What becomes of a call that timed out in the queue: a refusal, which takes nothing.
    async fn refuse_in_queue(
        &self,
        entity: &EntityId,
        resource: &ResourceName,
        next_try: Duration,
    ) -> Result<Lease, Error> {
        let mut statuses = match self.current_statuses(entity, resource).await {
            Ok(statuses) => statuses,
            Err(Error::Unavailable { cause, waited }) => {
                return self.without_store(entity, resource, cause, waited);
            }
            Err(error) => return Err(error),
        };
        // The balance covers the call, but calls before it in the queue come first.
        if !statuses.iter().any(|status| status.exceeded) {
            let wait = next_try.saturating_sub(self.inner.clock.stopwatch());
            // The first limit that the call takes from; what is there is not there for this call.
            let taken = statuses.iter_mut().find(|status| status.requested > Millitokens::ZERO);
            let first = taken.expect("a call that takes nothing does not queue");
            first.exceeded = true;
            first.available = Millitokens::ZERO;
            first.retry_after = wait.max(Duration::from_millis(1));
        }
        Err(refuse(statuses))
    }

    /// The current status of every limit of the call.
    async fn current_statuses(
        &self,
        entity: &EntityId,
        resource: &ResourceName,
    ) -> Result<Vec<LimitStatus>, Error> {
        self.check_takes()?;
        let limits = self.limits.clone().map(LimitSet::new).transpose()?.map(Arc::new);
        let (clock, now) = (&*self.inner.clock, self.inner.clock.now());
        let deadline = self.deadline.unwrap_or(self.inner.settings.deadline);
        let targets = self.targets(entity, resource, limits.as_ref(), now);
        let (own, above) = call_store(clock, deadline, targets).await??;
        // Checks the names and amounts.
        self.plan(Arc::clone(&own), &above, now)?;
        let chain: Vec<_> = std::iter::once(&own).chain(&above).collect();
        let keys: Vec<_> = chain.iter().map(|target| target.key().clone()).collect();
        let buckets = call_store(clock, deadline, self.inner.store.peek(&keys, now)).await?;
        let mut amounts = Vec::with_capacity(self.takes.len());
        for (name, tokens) in &self.takes {
            amounts.push((*name, amount(*tokens)?));
        }
        let mut statuses = Vec::new();
        for ((level, target), bucket) in chain.into_iter().enumerate().zip(buckets) {
            let all = statuses_of(level, target, bucket, &amounts, now)?;
            let is_asked = |status: &LimitStatus| {
                amounts.iter().any(|(name, _)| *name == status.limit_name.as_str())
            };
            statuses.extend(all.into_iter().filter(is_asked));
        }
        Ok(statuses)
    }
}
