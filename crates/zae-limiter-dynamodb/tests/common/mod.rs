//! The simulated table without faults and delays, except that everybody gets a turn between two calls,
//! and that transactions can be made to meet.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::Duration;
use zae_limiter_core::BoxFuture;
use zae_limiter_schema::{
    Action, BatchRead, Change, Consistency, Consumed, Item, ItemKey, Query, QueryOutput, Table,
    TableError, TableErrorKind, Task, Transacted, Update, Updated, Value,
};
use zae_limiter_testkit::SimTable;

#[derive(Debug, Default)]
pub(crate) struct TestTable {
    table: SimTable,
    /// So many transactions still meet another one.
    pub(crate) collisions: Mutex<u32>,
}

impl TestTable {
    pub(crate) fn items(&self) -> BTreeMap<ItemKey, Item> {
        let text = |item: &Item, name: &str| item[name].as_str().unwrap().to_owned();
        let keyed = |item: Item| (ItemKey::new(text(&item, "PK"), text(&item, "SK")), item);
        self.table.items().into_iter().map(keyed).collect()
    }

    /// Puts an item as another client would.
    pub(crate) async fn put(&self, key: &ItemKey, attributes: &[(&str, Value)]) {
        self.table.delete(std::slice::from_ref(key)).await.unwrap();
        let set = |(name, value): &(&str, Value)| Action::Set((*name).to_owned(), value.clone());
        let is_key = |name: &str| ["PK", "SK"].contains(&name);
        let actions = attributes.iter().filter(|(name, _)| !is_key(name)).map(set).collect();
        let update = Update { key: key.clone(), actions, conditions: Vec::new() };
        self.table.update(&update).await.unwrap();
    }

    fn collides(&self) -> bool {
        let mut left = self.collisions.lock().unwrap();
        let collides = *left > 0;
        *left -= u32::from(collides);
        collides
    }
}

impl Table for TestTable {
    fn update<'a>(&'a self, update: &'a Update) -> BoxFuture<'a, Result<Updated, TableError>> {
        Box::pin(async move {
            tokio::task::yield_now().await;
            self.table.update(update).await
        })
    }

    fn transact<'a>(
        &'a self,
        changes: &'a [Change],
    ) -> BoxFuture<'a, Result<Transacted, TableError>> {
        Box::pin(async move {
            tokio::task::yield_now().await;
            if self.collides() {
                return Err(TableError::new(TableErrorKind::Conflict, "another transaction"));
            }
            self.table.transact(changes).await
        })
    }

    fn read<'a>(
        &'a self,
        keys: &'a [ItemKey],
        consistency: Consistency,
    ) -> BoxFuture<'a, Result<BatchRead, TableError>> {
        Box::pin(async move {
            tokio::task::yield_now().await;
            self.table.read(keys, consistency).await
        })
    }

    fn query<'a>(&'a self, query: &'a Query) -> BoxFuture<'a, Result<QueryOutput, TableError>> {
        Box::pin(async move {
            tokio::task::yield_now().await;
            self.table.query(query).await
        })
    }

    fn delete<'a>(&'a self, keys: &'a [ItemKey]) -> BoxFuture<'a, Result<Consumed, TableError>> {
        Box::pin(async move {
            tokio::task::yield_now().await;
            self.table.delete(keys).await
        })
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
