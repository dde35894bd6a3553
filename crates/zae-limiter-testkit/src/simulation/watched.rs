//! A store that reports every call and its reply to the auditor.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use zae_limiter_core::{
    Admission, BoxFuture, Bucket, BucketKey, BucketQuery, Cost, Key, NamespaceId, Page,
    PageRequest, Plan, Query, Record, ResourceList, ResourceName, Scope, Settlement, Store,
    StoreError, StoredBucket, Take, Takes, Target, TimeCheck, Timestamp, UsageRecording, Write,
    Written,
};

use super::audit::{Auditor, CallAmount, Ended, Kind};
use crate::table::ClientId;

/// Wraps a client's store.
#[derive(Debug)]
pub(super) struct Watched {
    store: Arc<dyn Store>,
    auditor: Arc<Auditor>,
    client: ClientId,
    signs: Arc<Signs>,
}

/// Counts the reasons for a client's breaker to open: calls that failed because the store was
/// unavailable, and calls that got no reply in time.
#[derive(Debug, Default)]
pub(super) struct Signs(Mutex<Counts>);

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counts {
    /// Since the last reply of the store.
    pub(super) in_a_row: u32,
    pub(super) ever: u64,
}

impl Signs {
    fn lock(&self) -> MutexGuard<'_, Counts> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn so_far(&self) -> Counts {
        *self.lock()
    }

    /// The store has failed, or its reply was too late.
    pub(super) fn add(&self) {
        let mut counts = self.lock();
        counts.in_a_row += 1;
        counts.ever += 1;
    }

    /// The store has replied to a call that the breaker counts.
    fn clear(&self) {
        self.lock().in_a_row = 0;
    }
}

/// A call of the store. Its end may be a sign of an outage.
struct Awaited<'a> {
    signs: &'a Signs,
    is_sign: bool,
}

impl Drop for Awaited<'_> {
    fn drop(&mut self) {
        if self.is_sign {
            self.signs.add();
        }
    }
}

/// A call that the auditor knows of. It ends when it is dropped, with the outcome in `ended`.
struct Watching<'a> {
    watched: &'a Watched,
    call: u64,
    ended: Ended,
}

impl Drop for Watching<'_> {
    fn drop(&mut self) {
        self.watched.auditor.end(self.watched.client, self.call, self.ended);
    }
}

impl Watched {
    pub(super) fn new(
        store: Arc<dyn Store>,
        auditor: Arc<Auditor>,
        client: ClientId,
        signs: Arc<Signs>,
    ) -> Self {
        Self { store, auditor, client, signs }
    }

    /// Waits for a reply, and counts a sign if there is none or if it is an outage.
    fn awaited<'a, T: Send + 'a>(
        &'a self,
        call: BoxFuture<'a, Result<T, StoreError>>,
    ) -> BoxFuture<'a, Result<T, StoreError>> {
        Box::pin(async move {
            let mut awaited = Awaited { signs: &self.signs, is_sign: true };
            let reply = call.await;
            awaited.is_sign = reply.as_ref().is_err_and(StoreError::is_outage);
            reply
        })
    }

    fn begin(
        &self,
        kind: Kind,
        now: Timestamp,
        targets: &[&Target],
        amounts: &[CallAmount],
    ) -> Watching<'_> {
        let call = self.auditor.begin(self.client, kind, now, targets, amounts);
        Watching { watched: self, call, ended: Ended::Cancelled }
    }
}

/// The amounts of a call, for each limit of a bucket.
pub(super) fn amounts_of(target: &Target, takes: &Takes) -> Vec<CallAmount> {
    let amount = |take: &Take| CallAmount {
        bucket: target.key().clone(),
        limit: target.limits().names()[take.cell].to_string(),
        amount: take.amount.get(),
    };
    takes.iter().map(amount).collect()
}

/// How a call without a result ended. No reply means that the caller did not wait for it.
pub(super) fn ended_of(reply: Option<&Result<(), StoreError>>) -> Ended {
    match reply {
        None => Ended::Cancelled,
        Some(Ok(())) => Ended::Done,
        Some(Err(error)) => Ended::failed(error),
    }
}

impl Store for Watched {
    fn check_time(&self, now: Timestamp) -> TimeCheck {
        self.store.check_time(now)
    }

    fn cost(&self) -> Option<Cost> {
        self.store.cost()
    }

    fn usage_recording(&self) -> UsageRecording {
        self.store.usage_recording()
    }

    fn acquire<'a>(&'a self, plan: &'a Plan) -> BoxFuture<'a, Result<Admission, StoreError>> {
        Box::pin(async move {
            let amounts = plan.legs.iter().flat_map(|leg| amounts_of(&leg.target, &leg.takes));
            let amounts: Vec<CallAmount> = amounts.collect();
            let targets: Vec<&Target> = plan.legs.iter().map(|leg| &*leg.target).collect();
            let kind = Kind::Acquire { legs: plan.legs.len() };
            let mut watching = self.begin(kind, plan.now, &targets, &amounts);
            let reply = self.awaited(self.store.acquire(plan)).await;
            if reply.is_ok() {
                self.signs.clear();
            }
            watching.ended = match &reply {
                Ok(Admission::Taken(_)) => Ended::Done,
                Ok(Admission::Refused(_)) => Ended::Refused,
                Err(error) => Ended::failed(error),
            };
            reply
        })
    }

    fn settle<'a>(
        &'a self,
        settlements: &'a [Settlement],
        now: Timestamp,
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        Box::pin(async move {
            let amounts =
                settlements.iter().flat_map(|one| amounts_of(&one.target, &one.differences));
            let amounts: Vec<CallAmount> = amounts.collect();
            let targets: Vec<&Target> = settlements.iter().map(|one| &*one.target).collect();
            let mut watching = self.begin(Kind::Settle, now, &targets, &amounts);
            let reply = self.awaited(self.store.settle(settlements, now)).await;
            if reply.is_ok() {
                self.signs.clear();
            }
            watching.ended = ended_of(Some(&reply));
            reply
        })
    }

    fn peek<'a>(
        &'a self,
        keys: &'a [BucketKey],
        now: Timestamp,
    ) -> BoxFuture<'a, Result<Vec<Option<Bucket>>, StoreError>> {
        self.awaited(self.store.peek(keys, now))
    }

    fn reconfigure<'a>(
        &'a self,
        target: &'a Target,
        now: Timestamp,
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        Box::pin(async move {
            let mut watching = self.begin(Kind::Reconfigure, now, &[target], &[]);
            let reply = self.awaited(self.store.reconfigure(target, now)).await;
            watching.ended = ended_of(Some(&reply));
            reply
        })
    }

    fn get<'a>(
        &'a self,
        keys: &'a [Key],
    ) -> BoxFuture<'a, Result<Vec<Option<Record>>, StoreError>> {
        self.awaited(self.store.get(keys))
    }

    fn write<'a>(&'a self, batch: &'a [Write]) -> BoxFuture<'a, Result<Written, StoreError>> {
        self.awaited(self.store.write(batch))
    }

    fn delete<'a>(&'a self, keys: &'a [Key]) -> BoxFuture<'a, Result<(), StoreError>> {
        self.awaited(self.store.delete(keys))
    }

    fn list<'a>(
        &'a self,
        query: &'a Query,
        page: &'a PageRequest,
    ) -> BoxFuture<'a, Result<Page<Record>, StoreError>> {
        self.awaited(self.store.list(query, page))
    }

    fn list_buckets<'a>(
        &'a self,
        query: &'a BucketQuery,
        page: &'a PageRequest,
    ) -> BoxFuture<'a, Result<Page<StoredBucket>, StoreError>> {
        self.awaited(self.store.list_buckets(query, page))
    }

    fn list_keys<'a>(
        &'a self,
        scope: &'a Scope,
        page: &'a PageRequest,
    ) -> BoxFuture<'a, Result<Page<Key>, StoreError>> {
        self.awaited(self.store.list_keys(scope, page))
    }

    fn note_deletion<'a>(
        &'a self,
        scope: &'a Scope,
        now: Timestamp,
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        self.awaited(self.store.note_deletion(scope, now))
    }

    fn list_everything<'a>(
        &'a self,
        now: Timestamp,
        page: &'a PageRequest,
    ) -> BoxFuture<'a, Result<Page<Key>, StoreError>> {
        self.awaited(self.store.list_everything(now, page))
    }

    fn list_resources<'a>(
        &'a self,
        namespace: &'a NamespaceId,
        which: ResourceList,
        page: &'a PageRequest,
    ) -> BoxFuture<'a, Result<Page<ResourceName>, StoreError>> {
        self.awaited(self.store.list_resources(namespace, which, page))
    }
}
