//! The store's calls, and what they share.

use zae_limiter_core::{
    Admission, Answer, Bucket, BucketKey, BucketQuery, Cost, Key, NamespaceId, Page, PageRequest,
    Plan, Query, Record, ResourceList, ResourceName, Scope, Settlement, Store, StoreError,
    StoredBucket, Target, Timestamp, Write, Written,
};
use zae_limiter_schema::BucketItemKey;
use zae_limiter_schema::bucket::BucketItem;

use crate::error::Trouble;
use crate::{DynamoStore, Shared};

impl Shared {
    /// Reads parts of buckets, in the order of the keys.
    pub(crate) async fn read_buckets(
        &self,
        keys: &[BucketItemKey],
    ) -> Result<Vec<Option<BucketItem>>, StoreError> {
        let items = self.read_items(keys.iter().map(BucketItemKey::item_key)).await?;
        let mut found = Vec::with_capacity(keys.len());
        for key in keys {
            found.push(match items.get(&key.item_key()) {
                Some(item) => Some(BucketItem::decode(key, item).map_err(Trouble::from)?),
                None => None,
            });
        }
        Ok(found)
    }
}

impl Store for DynamoStore {
    fn cost(&self) -> Option<Cost> {
        Some(self.shared.meter.so_far())
    }

    fn books_usage(&self) -> bool {
        false
    }

    fn acquire<'a>(&'a self, plan: &'a Plan) -> Answer<'a, Admission> {
        Box::pin(self.shared.acquire(plan))
    }

    fn settle<'a>(&'a self, settlements: &'a [Settlement], now: Timestamp) -> Answer<'a, ()> {
        Box::pin(self.shared.settle(settlements, now))
    }

    fn peek<'a>(
        &'a self,
        keys: &'a [BucketKey],
        now: Timestamp,
    ) -> Answer<'a, Vec<Option<Bucket>>> {
        Box::pin(self.shared.peek(keys, now))
    }

    fn reconfigure<'a>(&'a self, target: &'a Target, now: Timestamp) -> Answer<'a, ()> {
        Box::pin(self.shared.reconfigure(target, now))
    }

    fn get<'a>(&'a self, keys: &'a [Key]) -> Answer<'a, Vec<Option<Record>>> {
        Box::pin(self.shared.get(keys))
    }

    fn write<'a>(&'a self, batch: &'a [Write]) -> Answer<'a, Written> {
        Box::pin(self.shared.write(batch))
    }

    fn delete<'a>(&'a self, keys: &'a [Key]) -> Answer<'a, ()> {
        Box::pin(self.shared.delete(keys))
    }

    fn list<'a>(&'a self, query: &'a Query, page: &'a PageRequest) -> Answer<'a, Page<Record>> {
        Box::pin(self.shared.list(query, page))
    }

    fn list_buckets<'a>(
        &'a self,
        query: &'a BucketQuery,
        page: &'a PageRequest,
    ) -> Answer<'a, Page<StoredBucket>> {
        Box::pin(self.shared.list_buckets(query, page))
    }

    fn list_keys<'a>(&'a self, scope: &'a Scope, page: &'a PageRequest) -> Answer<'a, Page<Key>> {
        Box::pin(self.shared.list_keys(scope, page))
    }

    fn list_resources<'a>(
        &'a self,
        namespace: &'a NamespaceId,
        which: ResourceList,
        page: &'a PageRequest,
    ) -> Answer<'a, Page<ResourceName>> {
        Box::pin(self.shared.list_resources(namespace, which, page))
    }
}
