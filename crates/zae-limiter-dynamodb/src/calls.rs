//! Calls to the table for everything but acquires and settlements. Each runs on the store's runtime and has
//! a time limit.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;
use zae_limiter_core::{BoxFuture, BucketKey, StoreError};
use zae_limiter_schema::bucket::BucketItem;
use zae_limiter_schema::{
    BucketItemKey, Change, Consistency, Consumed, Item, ItemKey, Query, QueryOutput, Scanned,
    TableError, TableErrorKind, Transacted, Update, Updated,
};

use crate::driver::{Driver, key_of};
use crate::error::{COLLISIONS_MAX, CallError};

/// The time limit of such a call, as a multiple of `call_timeout`: it includes the SDK's retries.
const TIMEOUT_FACTOR: u32 = 5;

/// The most items that one call reads or deletes: those of one request to DynamoDB.
const READS_MAX: usize = 100;
const DELETES_MAX: usize = 25;

fn dropped() -> TableError {
    let message = "the call was dropped before the table answered; try again";
    TableError::new(TableErrorKind::Unavailable, message)
}

impl Driver {
    /// Makes a call on the store's runtime. It completes there even if the caller is dropped.
    async fn call<T: Send + 'static>(
        self: &Arc<Self>,
        call: impl for<'a> FnOnce(&'a Driver) -> BoxFuture<'a, Result<T, TableError>> + Send + 'static,
    ) -> Result<T, CallError> {
        let (sender, receiver) = oneshot::channel();
        let driver = Arc::clone(self);
        let limit = self.options.call_timeout.saturating_mul(TIMEOUT_FACTOR);
        self.spawn(Box::pin(async move {
            let result = driver.within(limit, call(&driver)).await;
            // The caller may have been dropped.
            let _ = sender.send(result);
        }));
        receiver.await.unwrap_or_else(|_| Err(dropped().maybe_applied().into()))
    }

    /// Reads items with strong consistency, and returns those that exist.
    pub(crate) async fn read_items(
        self: &Arc<Self>,
        keys: impl IntoIterator<Item = ItemKey>,
    ) -> Result<HashMap<ItemKey, Item>, CallError> {
        let keys: BTreeSet<ItemKey> = keys.into_iter().collect();
        let keys: Vec<ItemKey> = keys.into_iter().collect();
        let mut found = HashMap::new();
        for keys in keys.chunks(READS_MAX) {
            let keys = keys.to_vec();
            let read = self.call(move |driver| {
                Box::pin(async move { driver.table.read(&keys, Consistency::Strong).await })
            });
            let read = read.await?;
            self.meter.count(read.consumed);
            found.extend(read.items.into_iter().filter_map(|item| Some((key_of(&item)?, item))));
        }
        Ok(found)
    }

    /// Reads a page of the whole table.
    pub(crate) async fn scan(
        self: &Arc<Self>,
        after: Option<ItemKey>,
        limit: usize,
    ) -> Result<Scanned, CallError> {
        let scan = self.call(move |driver| {
            Box::pin(async move { driver.table.scan(after.as_ref(), limit).await })
        });
        let scanned = scan.await?;
        self.meter.count(scanned.consumed);
        Ok(scanned)
    }

    pub(crate) async fn query(self: &Arc<Self>, query: &Query) -> Result<QueryOutput, CallError> {
        let query = query.clone();
        let output = self
            .call(move |driver| Box::pin(async move { driver.table.query(&query).await }))
            .await?;
        self.meter.count(output.consumed);
        Ok(output)
    }

    pub(crate) async fn update(self: &Arc<Self>, update: &Update) -> Result<Updated, CallError> {
        let update = update.clone();
        let updated = self
            .call(move |driver| Box::pin(async move { driver.table.update(&update).await }))
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
                .call(move |driver| Box::pin(async move { driver.table.transact(&changes).await }));
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

    /// Waits by the table's clock, on the store's runtime. No time limit ends it.
    pub(crate) async fn pause(self: &Arc<Self>, wait: Duration) -> Result<(), CallError> {
        let (sender, receiver) = oneshot::channel();
        let driver = Arc::clone(self);
        self.spawn(Box::pin(async move {
            driver.table.pause(wait).await;
            // The caller may have been dropped.
            let _ = sender.send(());
        }));
        receiver.await.map_err(|_| dropped().into())
    }

    /// Deletes items, whether they exist or not.
    pub(crate) async fn remove(self: &Arc<Self>, keys: &[ItemKey]) -> Result<(), CallError> {
        for keys in keys.chunks(DELETES_MAX) {
            let keys = keys.to_vec();
            let consumed: Consumed = self
                .call(move |driver| Box::pin(async move { driver.table.delete(&keys).await }))
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

    /// Reads all shards of buckets, as many as the highest shard count of each says.
    pub(crate) async fn read_all_shards(
        self: &Arc<Self>,
        keys: &[BucketKey],
    ) -> Result<Vec<Vec<BucketItem>>, StoreError> {
        let mut shards: Vec<Vec<BucketItem>> = vec![Vec::new(); keys.len()];
        let mut read = vec![0; keys.len()];
        loop {
            let (mut unread, mut places) = (Vec::new(), Vec::new());
            for (place, bucket) in keys.iter().enumerate() {
                let counts = shards[place].iter().map(|item| item.shard_count.next_power_of_two());
                let count = counts.max().unwrap_or(1);
                for shard in read[place]..count {
                    unread.push(BucketItemKey { bucket: bucket.clone(), shard });
                    places.push(place);
                }
                read[place] = count;
            }
            if unread.is_empty() {
                return Ok(shards);
            }
            for (place, item) in places.into_iter().zip(self.read_buckets(&unread).await?) {
                shards[place].extend(item);
            }
        }
    }
}
