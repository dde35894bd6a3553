//! The implementation of [`Store`]: acquires and settlements through the driver, everything else through
//! `records`, `lists` and `deletion`.

use std::sync::Arc;

use smallvec::SmallVec;
use zae_limiter_core::{
    Admission, Applied, BoxFuture, Bucket, BucketKey, BucketQuery, Cost, Key, Leg, LegTaken,
    LimitStatus, NamespaceId, Page, PageRequest, Plan, Query, Record, ResourceList, ResourceName,
    Scope, Settlement, Store, StoreError, StoredBucket, Target, TimeCheck, Timestamp,
    UsageRecording, Write, Written,
};

use zae_limiter_schema::bucket::BucketItem;

use crate::DynamoStore;
use crate::bucket::decide::Request;
use crate::bucket::message::{Task, credit};
use crate::bucket::shards::Shards;
use crate::driver::{Driver, Reply, ReplyReceiver, receive_reply};

/// Takes the amounts from all buckets of the chain, or from none.
async fn acquire(driver: &Arc<Driver>, plan: &Plan) -> Result<Admission, StoreError> {
    driver.check()?;
    if let Some(statuses) = refused_locally(driver, plan) {
        return Ok(Admission::Refused(statuses));
    }
    let submit = |leg: &Leg| LegState::Pending(driver.submit(Request::Take(leg.clone()), plan.now));
    let mut legs = Legs { driver, plan, states: plan.legs.iter().map(submit).collect() };
    legs.wait().await
}

/// The statuses of all limits, if the snapshots of all buckets are fresh and one of them refuses.
fn refused_locally(driver: &Driver, plan: &Plan) -> Option<Vec<LimitStatus>> {
    // Most calls are admitted, and need no statuses.
    if !plan.legs.iter().any(|leg| driver.may_refuse(leg, plan.now)) {
        return None;
    }
    let mut is_refused = false;
    let mut statuses = Vec::new();
    for (level, leg) in plan.legs.iter().enumerate() {
        let found = driver.statuses_from_snapshots(level, leg, plan.now)?;
        is_refused |= found.iter().any(|status| status.exceeded);
        statuses.extend(found);
    }
    is_refused.then_some(statuses)
}

/// Applies the differences of settlements.
async fn settle(
    driver: &Arc<Driver>,
    settlements: &[Settlement],
    now: Timestamp,
) -> Result<(), StoreError> {
    driver.check()?;
    let submitted = settlements.iter().filter(|settlement| !settlement.differences.is_empty());
    let replies: Vec<ReplyReceiver> = submitted
        .map(|settlement| driver.submit(Request::Settle(settlement.clone()), now))
        .collect();
    let (mut failed, mut some_done) = (None, false);
    for mut receiver in replies {
        match receive_reply(&mut receiver).await {
            Ok(_) => some_done = true,
            Err(error) => {
                some_done |= error.applied() == Applied::Maybe;
                failed = failed.or(Some(error));
            }
        }
    }
    match failed {
        None => Ok(()),
        // A retry of all of them would apply some twice.
        Some(error) if some_done => Err(error.maybe_applied()),
        Some(error) => Err(error),
    }
}

/// Reads buckets, each with the sum of its shards.
async fn peek(
    driver: &Arc<Driver>,
    keys: &[BucketKey],
    now: Timestamp,
) -> Result<Vec<Option<Bucket>>, StoreError> {
    let shards = driver.read_all_shards(keys).await?;
    let (time, max_skew) = (driver.time(), driver.options.max_clock_skew);
    let now = time.corrected(now);
    // As the next acquire will find it.
    let rewound = |mut item: BucketItem| {
        if time.is_ahead(&item) {
            item.bucket.rewind(now, max_skew);
        }
        item
    };
    let live = |items: Vec<BucketItem>| Shards::live(items.into_iter().map(rewound), now);
    Ok(shards.into_iter().map(|items| live(items).whole(Some(now))).collect())
}

/// The legs of an acquire. If it is dropped before the end, it refunds what was taken.
struct Legs<'a> {
    driver: &'a Arc<Driver>,
    plan: &'a Plan,
    states: SmallVec<[LegState; 1]>,
}

enum LegState {
    Pending(ReplyReceiver),
    Taken(LegTaken),
    Refused(Vec<LimitStatus>),
    Failed(StoreError),
    /// A refund was submitted.
    Done,
}

impl Legs<'_> {
    async fn wait(&mut self) -> Result<Admission, StoreError> {
        for state in &mut self.states {
            if let LegState::Pending(receiver) = state {
                *state = match receive_reply(receiver).await {
                    Ok(Reply::Taken(taken)) => LegState::Taken(taken),
                    Ok(Reply::Refused(statuses)) => LegState::Refused(statuses),
                    Ok(_) => unreachable!("a take is taken or refused"),
                    Err(error) => LegState::Failed(error),
                };
            }
        }
        if self.states.iter().all(|state| matches!(state, LegState::Taken(_))) {
            let taken = self.states.drain(..).filter_map(|state| match state {
                LegState::Taken(taken) => Some(taken),
                _ => None,
            });
            return Ok(Admission::Taken(taken.collect()));
        }
        self.undo().await
    }

    /// Refunds the legs that were taken, because another one was not.
    async fn undo(&mut self) -> Result<Admission, StoreError> {
        let legs = self.plan.legs.iter().zip(&mut self.states);
        let credits: Vec<Settlement> = legs
            .filter_map(|(leg, state)| {
                let LegState::Taken(LegTaken { placement, .. }) = state else { return None };
                let credit = credit(leg, placement.get());
                // The settlement completes even if this future is dropped.
                *state = LegState::Done;
                Some(credit)
            })
            .collect();
        let mut some_taken = self.states.iter().any(
            |state| matches!(state, LegState::Failed(error) if error.applied() == Applied::Maybe),
        );
        if let Err(error) = settle(self.driver, &credits, self.plan.now).await {
            tracing::warn!(%error, "could not refund a refused acquire");
            some_taken = true;
        }
        let mut statuses = Vec::new();
        for (level, (leg, state)) in self.plan.legs.iter().zip(self.states.drain(..)).enumerate() {
            match state {
                LegState::Failed(error) if some_taken => return Err(error.maybe_applied()),
                LegState::Failed(error) => return Err(error),
                LegState::Refused(refused) => {
                    statuses.extend(refused.into_iter().map(|one| LimitStatus { level, ..one }));
                }
                _ => statuses.extend(self.driver.last_statuses(level, leg, self.plan.now)),
            }
        }
        Ok(Admission::Refused(statuses))
    }
}

impl Drop for Legs<'_> {
    fn drop(&mut self) {
        for (leg, state) in self.plan.legs.iter().zip(&mut self.states) {
            let taken_from = match state {
                LegState::Taken(taken) => Some(taken.placement.get()),
                LegState::Pending(receiver) => {
                    // After this, the machine sees that the caller was dropped. An earlier reply is still
                    // in the channel.
                    receiver.close();
                    match receiver.try_recv() {
                        Ok(Ok(Reply::Taken(taken))) => Some(taken.placement.get()),
                        Ok(_) => None,
                        Err(_) => {
                            self.driver.abandon(leg.target.key());
                            None
                        }
                    }
                }
                LegState::Refused(_) | LegState::Failed(_) | LegState::Done => None,
            };
            if let Some(shard) = taken_from {
                self.driver.refund(leg, shard, self.plan.now);
            }
        }
    }
}

impl Store for DynamoStore {
    fn check_time(&self, now: Timestamp) -> TimeCheck {
        self.driver.time().check(now)
    }

    fn cost(&self) -> Option<Cost> {
        Some(self.driver.meter.so_far())
    }

    fn usage_recording(&self) -> UsageRecording {
        UsageRecording::Deferred
    }

    fn acquire<'a>(&'a self, plan: &'a Plan) -> BoxFuture<'a, Result<Admission, StoreError>> {
        Box::pin(acquire(&self.driver, plan))
    }

    fn settle<'a>(
        &'a self,
        settlements: &'a [Settlement],
        now: Timestamp,
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        Box::pin(settle(&self.driver, settlements, now))
    }

    fn peek<'a>(
        &'a self,
        keys: &'a [BucketKey],
        now: Timestamp,
    ) -> BoxFuture<'a, Result<Vec<Option<Bucket>>, StoreError>> {
        Box::pin(peek(&self.driver, keys, now))
    }

    fn reconfigure<'a>(
        &'a self,
        target: &'a Target,
        now: Timestamp,
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        let task = Task::Reconfigure(Arc::new(target.clone()));
        Box::pin(async move { self.driver.run(target.key(), task, now).await.map(drop) })
    }

    fn get<'a>(
        &'a self,
        keys: &'a [Key],
    ) -> BoxFuture<'a, Result<Vec<Option<Record>>, StoreError>> {
        Box::pin(self.driver.get(keys))
    }

    fn write<'a>(&'a self, batch: &'a [Write]) -> BoxFuture<'a, Result<Written, StoreError>> {
        Box::pin(self.driver.write(batch))
    }

    fn delete<'a>(&'a self, keys: &'a [Key]) -> BoxFuture<'a, Result<(), StoreError>> {
        Box::pin(self.driver.delete(keys))
    }

    fn note_deletion<'a>(
        &'a self,
        scope: &'a Scope,
        now: Timestamp,
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        Box::pin(self.driver.note_deletion(scope, now))
    }

    fn list<'a>(
        &'a self,
        query: &'a Query,
        page: &'a PageRequest,
    ) -> BoxFuture<'a, Result<Page<Record>, StoreError>> {
        Box::pin(self.driver.list(query, page))
    }

    fn list_buckets<'a>(
        &'a self,
        query: &'a BucketQuery,
        page: &'a PageRequest,
    ) -> BoxFuture<'a, Result<Page<StoredBucket>, StoreError>> {
        Box::pin(self.driver.list_buckets(query, page))
    }

    fn list_keys<'a>(
        &'a self,
        scope: &'a Scope,
        page: &'a PageRequest,
    ) -> BoxFuture<'a, Result<Page<Key>, StoreError>> {
        Box::pin(self.driver.list_keys(scope, page))
    }

    fn list_everything<'a>(
        &'a self,
        now: Timestamp,
        page: &'a PageRequest,
    ) -> BoxFuture<'a, Result<Page<Key>, StoreError>> {
        Box::pin(self.driver.list_everything(now, page))
    }

    fn list_resources<'a>(
        &'a self,
        namespace: &'a NamespaceId,
        which: ResourceList,
        page: &'a PageRequest,
    ) -> BoxFuture<'a, Result<Page<ResourceName>, StoreError>> {
        Box::pin(self.driver.list_resources(namespace, which, page))
    }
}
