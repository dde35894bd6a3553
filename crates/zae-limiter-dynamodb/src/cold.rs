//! Everything but buckets: records, lists, deletion.

use zae_limiter_core::{
    Admission, Answer, Bucket, BucketKey, BucketQuery, Cost, Key, NamespaceId, Page, PageRequest,
    Plan, Query, Record, ResourceList, ResourceName, Scope, Settlement, Store, StoreError,
    StoredBucket, Target, Timestamp, Write, Written,
};
use zae_limiter_schema::bucket::BucketItem;
use zae_limiter_schema::{BucketItemKey, Consistency};

use crate::error::Trouble;
use crate::{DynamoStore, Shared};

impl Shared {
    /// Reads parts of buckets, in the order of the keys.
    pub(crate) async fn read_buckets(
        &self,
        keys: &[BucketItemKey],
    ) -> Result<Vec<Option<BucketItem>>, StoreError> {
        let item_keys: Vec<_> = keys.iter().map(BucketItemKey::item_key).collect();
        let read = self.table.read(&item_keys, Consistency::Strong).await.map_err(Trouble::from)?;
        self.meter.count(read.consumed);
        let mut found: Vec<Option<BucketItem>> = vec![None; keys.len()];
        for item in &read.items {
            let pk = item.get("PK").and_then(|value| value.as_str()).unwrap_or_default();
            let Some(at) = item_keys.iter().position(|key| key.pk == pk) else { continue };
            found[at] = Some(BucketItem::decode(&keys[at], item).map_err(Trouble::from)?);
        }
        Ok(found)
    }
}

impl Store for DynamoStore {
    fn cost(&self) -> Option<Cost> {
        Some(self.shared.meter.so_far())
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
        let _ = keys;
        todo!()
    }

    fn write<'a>(&'a self, batch: &'a [Write]) -> Answer<'a, Written> {
        let _ = batch;
        todo!()
    }

    fn delete<'a>(&'a self, keys: &'a [Key]) -> Answer<'a, ()> {
        let _ = keys;
        todo!()
    }

    fn list<'a>(&'a self, query: &'a Query, page: &'a PageRequest) -> Answer<'a, Page<Record>> {
        let _ = (query, page);
        todo!()
    }

    fn list_buckets<'a>(
        &'a self,
        query: &'a BucketQuery,
        page: &'a PageRequest,
    ) -> Answer<'a, Page<StoredBucket>> {
        let _ = (query, page);
        todo!()
    }

    fn list_keys<'a>(&'a self, scope: &'a Scope, page: &'a PageRequest) -> Answer<'a, Page<Key>> {
        let _ = (scope, page);
        todo!()
    }

    fn list_resources<'a>(
        &'a self,
        namespace: &'a NamespaceId,
        which: ResourceList,
        page: &'a PageRequest,
    ) -> Answer<'a, Page<ResourceName>> {
        let _ = (namespace, which, page);
        todo!()
    }
}
