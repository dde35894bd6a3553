//! A store that is used with two sets of permissions.

use std::sync::Arc;

use zae_limiter_core::{
    Admission, Answer, Bucket, BucketKey, BucketQuery, Cost, Key, NamespaceId, Page, PageRequest,
    Plan, Query, Record, ResourceList, ResourceName, Scope, Settlement, Store, StoreError,
    StoredBucket, Target, Timestamp, Write, Written,
};

/// Two stores on the same data: whoever acquires has the one, whoever administers the other.
#[derive(Debug)]
pub struct Split {
    /// Takes, settles, looks at buckets and gives them other limits.
    pub acquiring: Arc<dyn Store>,
    /// Reads, writes, lists and deletes.
    pub administering: Arc<dyn Store>,
}

#[deny(clippy::missing_trait_methods)]
impl Store for Split {
    fn acquire_now(&self, plan: &Plan) -> Option<Result<Admission, StoreError>> {
        self.acquiring.acquire_now(plan)
    }

    fn cost(&self) -> Option<Cost> {
        self.acquiring.cost()
    }

    fn books_usage(&self) -> bool {
        self.acquiring.books_usage()
    }

    fn acquire<'a>(&'a self, plan: &'a Plan) -> Answer<'a, Admission> {
        self.acquiring.acquire(plan)
    }

    fn settle<'a>(&'a self, settlements: &'a [Settlement], now: Timestamp) -> Answer<'a, ()> {
        self.acquiring.settle(settlements, now)
    }

    fn peek<'a>(
        &'a self,
        keys: &'a [BucketKey],
        now: Timestamp,
    ) -> Answer<'a, Vec<Option<Bucket>>> {
        self.acquiring.peek(keys, now)
    }

    fn reconfigure<'a>(&'a self, target: &'a Target, now: Timestamp) -> Answer<'a, ()> {
        self.acquiring.reconfigure(target, now)
    }

    fn get<'a>(&'a self, keys: &'a [Key]) -> Answer<'a, Vec<Option<Record>>> {
        self.administering.get(keys)
    }

    fn write<'a>(&'a self, batch: &'a [Write]) -> Answer<'a, Written> {
        self.administering.write(batch)
    }

    fn delete<'a>(&'a self, keys: &'a [Key]) -> Answer<'a, ()> {
        self.administering.delete(keys)
    }

    fn list<'a>(&'a self, query: &'a Query, page: &'a PageRequest) -> Answer<'a, Page<Record>> {
        self.administering.list(query, page)
    }

    fn list_buckets<'a>(
        &'a self,
        query: &'a BucketQuery,
        page: &'a PageRequest,
    ) -> Answer<'a, Page<StoredBucket>> {
        self.administering.list_buckets(query, page)
    }

    fn list_keys<'a>(&'a self, scope: &'a Scope, page: &'a PageRequest) -> Answer<'a, Page<Key>> {
        self.administering.list_keys(scope, page)
    }

    fn list_resources<'a>(
        &'a self,
        namespace: &'a NamespaceId,
        which: ResourceList,
        page: &'a PageRequest,
    ) -> Answer<'a, Page<ResourceName>> {
        self.administering.list_resources(namespace, which, page)
    }
}
