//! Calls that wait for tokens: first come, first served among those that want the same limits of a bucket.
//!
//! A call queues only after a refusal, or behind a call that waits for one of its limits. So calls that find tokens
//! run side by side, and the store can write for several of them at once.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use zae_limiter_model::{
    EntityId, LimitSet, LimitStatus, Millitokens, RateLimitExceeded, ResourceName, amount,
};

use crate::acquire::{Acquire, Chain, Found, note_refusal};
use crate::availability::statuses_of;
use crate::deadline::within;
use crate::error::Error;
use crate::lease::Lease;
use crate::limiter::call_store;

type QueueKey = (EntityId, ResourceName);

/// The queues of a limiter: one for each bucket with waiting calls.
#[derive(Debug, Default)]
pub(crate) struct Queues(Mutex<HashMap<QueueKey, Arc<Queue>>>);

/// The calls that wait for one bucket.
#[derive(Debug, Default)]
struct Queue {
    waiters: Mutex<Waiters>,
    /// Notified when a waiter leaves.
    left: Notify,
}

/// In the order in which they began to wait.
#[derive(Debug, Default)]
struct Waiters {
    list: Vec<Waiter>,
    last_id: u64,
}

#[derive(Debug)]
struct Waiter {
    id: u64,
    /// The limits that it takes from.
    limits: Vec<String>,
    /// The stopwatch reading at which it tries again.
    next_try: Duration,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Queues {
    /// Joins the queue of a bucket, behind all who wait there. With `only_behind` it joins only if one of them waits for
    /// one of these limits.
    fn join(&self, key: &QueueKey, limits: Vec<String>, only_behind: bool) -> Option<Place<'_>> {
        let mut queues = locked(&self.0);
        let has_rival = |queue: &Arc<Queue>| {
            locked(&queue.waiters).list.iter().any(|waiter| shares(&waiter.limits, &limits))
        };
        if only_behind && !queues.get(key).is_some_and(has_rival) {
            return None;
        }
        let queue = Arc::clone(queues.entry(key.clone()).or_default());
        let mut waiters = locked(&queue.waiters);
        waiters.last_id += 1;
        let id = waiters.last_id;
        waiters.list.push(Waiter { id, limits, next_try: Duration::ZERO });
        drop(waiters);
        Some(Place { queues: self, key: key.clone(), queue: Some(queue), id })
    }
}

fn shares(one: &[String], other: &[String]) -> bool {
    one.iter().any(|limit| other.contains(limit))
}

/// A place in a queue.
struct Place<'a> {
    queues: &'a Queues,
    key: QueueKey,
    /// `None` only while it is dropped.
    queue: Option<Arc<Queue>>,
    id: u64,
}

impl Place<'_> {
    fn queue(&self) -> &Queue {
        self.queue.as_ref().expect("kept until the drop")
    }

    /// The first waiter before this one that waits for one of its limits: that limit, and when the waiter tries again.
    fn rival(&self) -> Option<(String, Duration)> {
        let waiters = locked(&self.queue().waiters);
        let at = waiters.list.iter().position(|waiter| waiter.id == self.id)?;
        let mine = &waiters.list[at].limits;
        waiters.list[..at].iter().find_map(|waiter| {
            let limit = waiter.limits.iter().find(|limit| mine.contains(limit))?;
            Some((limit.clone(), waiter.next_try))
        })
    }

    fn set_next_try(&self, at: Duration) {
        let mut waiters = locked(&self.queue().waiters);
        let mine = waiters.list.iter_mut().find(|waiter| waiter.id == self.id);
        mine.expect("in the queue until the drop").next_try = at;
    }

    /// Waits until no rival is before it.
    async fn turn(&self) {
        loop {
            let left = self.queue().left.notified();
            let mut left = std::pin::pin!(left);
            // Before the look, so that nobody leaves unnoticed after it.
            left.as_mut().enable();
            if self.rival().is_none() {
                return;
            }
            left.await;
        }
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let mut queues = locked(&self.queues.0);
        let Some(queue) = self.queue.take() else { return };
        locked(&queue.waiters).list.retain(|waiter| waiter.id != self.id);
        queue.left.notify_waiters();
        drop(queue);
        // Others join under the same lock: a queue that only the map holds is empty.
        if queues.get(&self.key).is_some_and(|queue| Arc::strong_count(queue) == 1) {
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
        let key = (EntityId::new(self.entity)?, ResourceName::new(self.resource)?);
        let clock = &*self.inner.clock;
        let started = clock.stopwatch();
        let left = || timeout.saturating_sub(clock.stopwatch().saturating_sub(started));
        let takes = self.takes.iter().filter(|(_, tokens)| *tokens > 0);
        let limits: Vec<String> = takes.map(|(name, _)| (*name).to_owned()).collect();
        let mut place = self.inner.queues.join(&key, limits.clone(), true);
        if place.is_some() {
            self.check_in_time(&key, left()).await?;
        }
        // How long the last refusal said to wait; void once others came first.
        let mut wait = None;
        loop {
            if let Some(place) = &place {
                if place.rival().is_some() {
                    wait = None;
                    if within(clock, left(), place.turn()).await.is_none() {
                        return self.refuse_in_queue(&key, place).await;
                    }
                }
                if let Some(wait) = wait {
                    place.set_next_try(clock.stopwatch().saturating_add(wait));
                    clock.sleep(wait).await;
                }
            }
            let refusal = match self.run_to_end(Found::Nothing).await {
                Err(Error::Exceeded(refusal)) => refusal,
                done => return done,
            };
            if refusal.retry_after() > left() {
                note_refusal(&refusal);
                return Err(Error::Exceeded(refusal));
            }
            wait = Some(refusal.retry_after());
            if place.is_none() {
                place = self.inner.queues.join(&key, limits.clone(), false);
            }
        }
    }

    /// Refuses a call that cannot pass within `left`, however long it queues. If the store does not say so in time, the
    /// attempt will.
    async fn check_in_time(&self, key: &QueueKey, left: Duration) -> Result<(), Error> {
        let deadline = self.deadline.unwrap_or(self.inner.settings.deadline).min(left);
        let statuses = self.current_statuses(&key.0, &key.1);
        match within(&*self.inner.clock, deadline, statuses).await {
            Some(Ok(statuses)) if statuses.iter().any(|status| status.retry_after > left) => {
                Err(refuse(statuses))
            }
            None | Some(Ok(_) | Err(Error::Unavailable { .. } | Error::Store(_))) => Ok(()),
            Some(Err(error)) => Err(error),
        }
    }

    /// What becomes of a call that timed out in the queue: a refusal, which takes nothing.
    async fn refuse_in_queue(&self, key: &QueueKey, place: &Place<'_>) -> Result<Lease, Error> {
        let rival = place.rival();
        let mut statuses = match self.current_statuses(&key.0, &key.1).await {
            Ok(statuses) => statuses,
            Err(Error::Unavailable { cause, waited }) => {
                return self.without_store(&key.0, &key.1, cause, waited);
            }
            Err(error) => return Err(error),
        };
        // The balance covers the call, but a call before it waits for the same limit.
        if !statuses.iter().any(|status| status.exceeded) {
            let (limit, next_try) = match rival {
                Some(rival) => rival,
                // It has left in this very moment.
                None => return self.run_to_end(Found::Nothing).await,
            };
            let wait = next_try.saturating_sub(self.inner.clock.stopwatch());
            let claimed = statuses.iter_mut().find(|one| one.limit_name.as_str() == limit);
            let claimed = claimed.expect("a limit that both take from");
            claimed.exceeded = true;
            // What is there is claimed by the call before.
            claimed.available = Millitokens::ZERO;
            claimed.retry_after = wait.max(Duration::from_millis(1));
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
        let (clock, at) = (&*self.inner.clock, self.inner.now());
        let now = at.now;
        let deadline = self.deadline.unwrap_or(self.inner.settings.deadline);
        let targets = self.targets(entity, resource, limits.as_ref(), Chain::new(), now);
        let (own, above) = call_store(clock, deadline, targets).await??;
        // Checks the names and amounts.
        self.plan(Arc::clone(&own), &above, at)?;
        let chain: Vec<_> = std::iter::once(&own).chain(&above).collect();
        let keys: Vec<_> = chain.iter().map(|target| target.key().clone()).collect();
        let buckets = call_store(clock, deadline, self.inner.store.peek(&keys, now)).await?;
        let mut amounts = Vec::with_capacity(self.takes.len());
        for (name, tokens) in &self.takes {
            amounts.push((*name, amount(*tokens)?));
        }
        let mut statuses = Vec::new();
        for ((level, target), bucket) in chain.into_iter().enumerate().zip(buckets) {
            let all = statuses_of(level, target, bucket, &amounts, at)?;
            let is_asked = |status: &LimitStatus| {
                amounts.iter().any(|(name, _)| *name == status.limit_name.as_str())
            };
            statuses.extend(all.into_iter().filter(is_asked));
        }
        Ok(statuses)
    }
}
