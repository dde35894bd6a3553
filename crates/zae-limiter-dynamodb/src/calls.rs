//! Calls to the table for everything but the hot path: on the store's runtime, each within a time limit.

use std::collections::{BTreeSet, HashMap};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;
use zae_limiter_core::{BucketKey, StoreError};
use zae_limiter_schema::bucket::BucketItem;
use zae_limiter_schema::{
    BucketItemKey, Change, Consistency, Consumed, Item, ItemKey, Query, QueryOutput, TableError,
    TableErrorKind, Transacted, Update, Updated,
};

use crate::driver::{Driver, key_of};
use crate::error::{COLLISIONS_MAX, CallError};

/// How much longer than a call of the hot path such a call may take: the SDK's retries are part of it.
const TIMES_LONGER: u32 = 5;

/// How many items one call reads, and how many it deletes: one request of the SDK each.
const READS_MAX: usize = 100;
const DELETES_MAX: usize = 25;

type Asked<'a, T> = Pin<Box<dyn Future<Output = Result<T, TableError>> + Send + 'a>>;

impl Driver {
    /// Makes a call on the store's runtime. It ends there whatever becomes of the caller.
    async fn ask<T: Send + 'static>(
        self: &Arc<Self>,
        call: impl for<'a> FnOnce(&'a Driver) -> Asked<'a, T> + Send + 'static,
    ) -> Result<T, CallError> {
        let (answer, answering) = oneshot::channel();
        let driver = Arc::clone(self);
        let limit = self.options.call_timeout.saturating_mul(TIMES_LONGER);
        self.spawn(Box::pin(async move {
            let answered = driver.within(limit, call(&driver)).await;
            // The caller may have gone.
            let _ = answer.send(answered);
        }));
        answering.await.unwrap_or_else(|_| {
            let message = "the call was dropped before the table answered; try again";
            let error = TableError::new(TableErrorKind::Unavailable, message);
            Err(error.maybe_applied().into())
        })
    }

    /// Reads items as they are now; absent ones are missing.
    pub(crate) async fn read_items(
        self: &Arc<Self>,
        keys: impl IntoIterator<Item = ItemKey>,
    ) -> Result<HashMap<ItemKey, Item>, CallError> {
        let keys: BTreeSet<ItemKey> = keys.into_iter().collect();
        let keys: Vec<ItemKey> = keys.into_iter().collect();
        let mut found = HashMap::new();
        for keys in keys.chunks(READS_MAX) {
            let keys = keys.to_vec();
            let read = self.ask(move |driver| {
                Box::pin(async move { driver.table.read(&keys, Consistency::Strong).await })
            });
            let read = read.await?;
            self.meter.count(read.consumed);
            found.extend(read.items.into_iter().filter_map(|item| Some((key_of(&item)?, item))));
        }
        Ok(found)
    }

    pub(crate) async fn query(self: &Arc<Self>, query: &Query) -> Result<QueryOutput, CallError> {
        let query = query.clone();
        let answer = self
            .ask(move |driver| Box::pin(async move { driver.table.query(&query).await }))
            .await?;
        self.meter.count(answer.consumed);
        Ok(answer)
    }

    pub(crate) async fn update(self: &Arc<Self>, update: &Update) -> Result<Updated, CallError> {
        let update = update.clone();
        let updated = self
            .ask(move |driver| Box::pin(async move { driver.table.update(&update).await }))
            .await?;
        let (Updated::Done(_, consumed) | Updated::Unmet(_, consumed)) = &updated;
        self.meter.count(*consumed);
        Ok(updated)
    }

    pub(crate) async fn transact(
        self: &Arc<Self>,
        changes: &[Change],
    ) -> Result<Transacted, CallError> {
        let mut sent = 0;
        loop {
            sent += 1;
            let changes = changes.to_vec();
            let call = self
                .ask(move |driver| Box::pin(async move { driver.table.transact(&changes).await }));
            match call.await {
                Ok(transacted) => {
                    let (Transacted::Done(consumed) | Transacted::Unmet(_, consumed)) = &transacted;
                    self.meter.count(*consumed);
                    return Ok(transacted);
                }
                Err(error) if error.is(TableErrorKind::Conflict) && sent < COLLISIONS_MAX => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Waits by the table's clock.
    pub(crate) async fn pause(self: &Arc<Self>, wait: Duration) -> Result<(), CallError> {
        self.ask(move |driver| {
            Box::pin(async move {
                driver.table.pause(wait).await;
                Ok(())
            })
        })
        .await
    }

    /// Deletes items, whether they are there or not.
    pub(crate) async fn remove(self: &Arc<Self>, keys: &[ItemKey]) -> Result<(), CallError> {
        for keys in keys.chunks(DELETES_MAX) {
            let keys = keys.to_vec();
            let consumed: Consumed = self
                .ask(move |driver| Box::pin(async move { driver.table.delete(&keys).await }))
                .await?;
            self.meter.count(consumed);
        }
        Ok(())
    }

    /// Reads shards of buckets, in the order of the keys.
    async fn read_buckets(
        self: &Arc<Self>,
        keys: &[BucketItemKey],
    ) -> Result<Vec<Option<BucketItem>>, StoreError> {
        let items = self.read_items(keys.iter().map(BucketItemKey::item_key)).await?;
        let mut found = Vec::with_capacity(keys.len());
        for key in keys {
            found.push(match items.get(&key.item_key()) {
                Some(item) => Some(BucketItem::decode(key, item).map_err(CallError::from)?),
                None => None,
            });
        }
        Ok(found)
    }

    /// Reads all shards of buckets, as many as any of them says there are.
    pub(crate) async fn read_all_shards(
        self: &Arc<Self>,
        keys: &[BucketKey],
    ) -> Result<Vec<Vec<BucketItem>>, StoreError> {
        let mut shards: Vec<Vec<BucketItem>> = vec![Vec::new(); keys.len()];
        let mut read = vec![0; keys.len()];
        loop {
            let (mut missing, mut places) = (Vec::new(), Vec::new());
            for (place, bucket) in keys.iter().enumerate() {
                let counts = shards[place].iter().map(|item| item.shard_count.next_power_of_two());
                let count = counts.max().unwrap_or(1);
                for shard in read[place]..count {
                    missing.push(BucketItemKey { bucket: bucket.clone(), shard });
                    places.push(place);
                }
                read[place] = count;
            }
            if missing.is_empty() {
                return Ok(shards);
            }
            for (place, item) in places.into_iter().zip(self.read_buckets(&missing).await?) {
                shards[place].extend(item);
            }
        }
    }
}
