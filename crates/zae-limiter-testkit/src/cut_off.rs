//! A table that fails all writes after a given number.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;
use zae_limiter_core::BoxFuture;
use zae_limiter_schema::{
    BatchRead, Change, Consistency, Consumed, ItemKey, Query, QueryOutput, Table, TableError,
    TableErrorKind, TableTime, Transacted, Update, Updated,
};

/// A table that fails all updates and transactions after a given number of them. Reads and
/// deletions still work.
#[derive(Debug)]
pub struct CutOff<T> {
    table: T,
    writes: AtomicU32,
}

impl<T> CutOff<T> {
    /// Wraps a table that accepts `writes` updates and transactions.
    pub fn after(writes: u32, table: T) -> Self {
        Self { table, writes: AtomicU32::new(writes) }
    }

    fn write(&self) -> Result<(), TableError> {
        let less = |left: u32| left.checked_sub(1);
        let counted = self.writes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
        let cut_off = |_| TableError::new(TableErrorKind::Unavailable, "cut off");
        counted.map(drop).map_err(cut_off)
    }
}

impl<T: Table> Table for CutOff<T> {
    fn update<'a>(&'a self, update: &'a Update) -> BoxFuture<'a, Result<Updated, TableError>> {
        Box::pin(async move {
            self.write()?;
            self.table.update(update).await
        })
    }

    fn transact<'a>(
        &'a self,
        changes: &'a [Change],
    ) -> BoxFuture<'a, Result<Transacted, TableError>> {
        Box::pin(async move {
            self.write()?;
            self.table.transact(changes).await
        })
    }

    fn time(&self) -> TableTime {
        self.table.time()
    }

    fn read<'a>(
        &'a self,
        keys: &'a [ItemKey],
        consistency: Consistency,
    ) -> BoxFuture<'a, Result<BatchRead, TableError>> {
        self.table.read(keys, consistency)
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
}
