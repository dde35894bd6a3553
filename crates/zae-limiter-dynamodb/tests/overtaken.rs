//! A read whose answer comes late: the process has written to the bucket meanwhile.

mod one_bucket;

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;
use zae_limiter_core::{Admission, BoxFuture, Limit, Store};
use zae_limiter_dynamodb::{DynamoOptions, DynamoStore};
use zae_limiter_schema::{
    BatchRead, Change, Consistency, Consumed, ItemKey, Query, QueryOutput, Table, TableError, Task,
    Transacted, Update, Updated,
};
use zae_limiter_testkit::SimTable;

use one_bucket::{at, key, plan, target};

/// A table whose answers to reads wait for a permit.
#[derive(Debug)]
struct Late {
    table: SimTable,
    permits: Arc<Semaphore>,
}

impl Table for Late {
    fn update<'a>(&'a self, update: &'a Update) -> BoxFuture<'a, Result<Updated, TableError>> {
        self.table.update(update)
    }

    fn transact<'a>(
        &'a self,
        changes: &'a [Change],
    ) -> BoxFuture<'a, Result<Transacted, TableError>> {
        self.table.transact(changes)
    }

    fn read<'a>(
        &'a self,
        keys: &'a [ItemKey],
        consistency: Consistency,
    ) -> BoxFuture<'a, Result<BatchRead, TableError>> {
        Box::pin(async move {
            let read = self.table.read(keys, consistency).await;
            self.permits.acquire().await.expect("it is never closed").forget();
            read
        })
    }

    fn query<'a>(&'a self, query: &'a Query) -> BoxFuture<'a, Result<QueryOutput, TableError>> {
        self.table.query(query)
    }

    fn delete<'a>(&'a self, keys: &'a [ItemKey]) -> BoxFuture<'a, Result<Consumed, TableError>> {
        self.table.delete(keys)
    }

    fn pause(&self, wait: Duration) -> BoxFuture<'_, ()> {
        self.table.pause(wait)
    }

    fn timeout(&self, limit: Duration) -> BoxFuture<'_, ()> {
        self.table.timeout(limit)
    }

    fn spawn(&self, task: Task) -> Result<(), Task> {
        self.table.spawn(task)
    }
}

#[tokio::test]
async fn a_read_that_a_write_overtook_replaces_no_snapshot() {
    let permits = Arc::new(Semaphore::new(0));
    let table = Late { table: SimTable::default(), permits: Arc::clone(&permits) };
    let store = DynamoStore::new(Arc::new(table), DynamoOptions::default());
    let target = target(Limit::per_minute("rpm", 100));
    let take = async |tokens: i64| {
        store.acquire(&plan(&target, tokens * 1_000, at(0))).await.expect("an answer")
    };
    assert!(matches!(take(10).await, Admission::Taken(_)));
    let reading = tokio::spawn({
        let store = store.clone();
        async move { store.shard_count(&key(), at(0)).await }
    });
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    assert!(matches!(take(80).await, Admission::Taken(_)));
    permits.add_permits(1);
    assert_eq!(reading.await.expect("nobody panics").expect("an answer"), 1);
    // Refused by the snapshot: 10 are left, not the 90 that were read.
    let Admission::Refused(statuses) = take(95).await else { panic!("there are not so many") };
    assert_eq!(statuses[0].available.get(), 10_000);
}
