//! A store with two sets of permissions.

use std::sync::Arc;

use zae_limiter_core::{
    Admission, BoxFuture, Bucket, BucketKey, BucketQuery, Cost, Key, Millitokens, NamespaceId,
    Page, PageRequest, Plan, Query, Record, ResourceList, ResourceName, Scope, Settlement,
    SingleLeg, Store, StoreError, StoredBucket, Target, TimeCheck, Timestamp, UsageRecording,
    Write, Written,
};

/// Two stores on the same data: one with the permissions of a caller, one of an administrator.
#[derive(Debug)]
pub struct Split {
    /// Used for `acquire`, `settle`, `peek` and `reconfigure`.
    pub acquiring: Arc<dyn Store>,
    /// Used for all other calls.
    pub administering: Arc<dyn Store>,
}

#[deny(clippy::missing_trait_methods)]
impl Store for Split {
    fn acquire_now(&self, plan: &Plan) -> Option<Result<Admission, StoreError>> {
        self.acquiring.acquire_now(plan)
    }

    fn take_now(&self, leg: &SingleLeg<'_>, left: &mut [Millitokens]) -> bool {
        self.acquiring.take_now(leg, left)
    }

    fn check_time(&self, now: Timestamp) -> TimeCheck {
        self.acquiring.check_time(now)
    }

    fn cost(&self) -> Option<Cost> {
        self.acquiring.cost()
    }

    fn usage_recording(&self) -> UsageRecording {
        self.acquiring.usage_recording()
    }

    fn acquire<'a>(&'a self, plan: &'a Plan) -> BoxFuture<'a, Result<Admission, StoreError>> {
        self.acquiring.acquire(plan)
    }

    fn settle<'a>(
        &'a self,
        settlements: &'a [Settlement],
        now: Timestamp,
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        self.acquiring.settle(settlements, now)
    }

    fn peek<'a>(
        &'a self,
        keys: &'a [BucketKey],
        now: Timestamp,
    ) -> BoxFuture<'a, Result<Vec<Option<Bucket>>, StoreError>> {
        self.acquiring.peek(keys, now)
    }

    fn reconfigure<'a>(
        &'a self,
        target: &'a Target,
        now: Timestamp,
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        self.acquiring.reconfigure(target, now)
    }

    fn get<'a>(
        &'a self,
        keys: &'a [Key],
    ) -> BoxFuture<'a, Result<Vec<Option<Record>>, StoreError>> {
        self.administering.get(keys)
    }

    fn write<'a>(&'a self, batch: &'a [Write]) -> BoxFuture<'a, Result<Written, StoreError>> {
        self.administering.write(batch)
    }

    fn delete<'a>(&'a self, keys: &'a [Key]) -> BoxFuture<'a, Result<(), StoreError>> {
        self.administering.delete(keys)
    }

    fn list<'a>(
        &'a self,
        query: &'a Query,
        page: &'a PageRequest,
    ) -> BoxFuture<'a, Result<Page<Record>, StoreError>> {
        self.administering.list(query, page)
    }

    fn list_buckets<'a>(
        &'a self,
        query: &'a BucketQuery,
        page: &'a PageRequest,
    ) -> BoxFuture<'a, Result<Page<StoredBucket>, StoreError>> {
        self.administering.list_buckets(query, page)
    }

    fn list_keys<'a>(
        &'a self,
        scope: &'a Scope,
        page: &'a PageRequest,
    ) -> BoxFuture<'a, Result<Page<Key>, StoreError>> {
        self.administering.list_keys(scope, page)
    }

    fn note_deletion<'a>(
        &'a self,
        scope: &'a Scope,
        now: Timestamp,
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        self.administering.note_deletion(scope, now)
    }

    fn list_everything<'a>(
        &'a self,
        now: Timestamp,
        page: &'a PageRequest,
    ) -> BoxFuture<'a, Result<Page<Key>, StoreError>> {
        self.administering.list_everything(now, page)
    }

    fn list_resources<'a>(
        &'a self,
        namespace: &'a NamespaceId,
        which: ResourceList,
        page: &'a PageRequest,
    ) -> BoxFuture<'a, Result<Page<ResourceName>, StoreError>> {
        self.administering.list_resources(namespace, which, page)
    }
}
