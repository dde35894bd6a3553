//! The rate limiter's store for many machines: one DynamoDB table.
//!
//! `bucket` is what one bucket is made of, and does no IO: a machine that takes events and returns
//! commands. `driver` owns the machines, carries out their commands on the table, on a `runtime` of the
//! store's own, and feeds the answers back. `records`, `lists`, `usage` and `deletion` are everything
//! else, over `calls`. `store` is the store made of them, and the table is whatever implements [`Table`].

#[cfg(feature = "aws")]
pub mod aws;
mod bucket;
mod buckets;
mod calls;
mod cursor;
mod deletion;
mod driver;
mod error;
mod lists;
mod meter;
mod options;
mod records;
mod runtime;
mod store;
mod usage;
mod walk;

use std::fmt;
use std::sync::Arc;

use zae_limiter_core::{BucketKey, StoreError, Timestamp};
use zae_limiter_schema::Table;

pub use meter::ReshardCounts;
pub use options::DynamoOptions;

use crate::bucket::message::Task;
use crate::bucket::shards::Shards;
use crate::driver::Driver;

/// A [`Store`](zae_limiter_core::Store) in one DynamoDB table. Clones are handles to the same store.
#[derive(Clone)]
pub struct DynamoStore {
    driver: Arc<Driver>,
}

impl DynamoStore {
    /// A store on a table.
    pub fn new(table: Arc<dyn Table>, options: DynamoOptions) -> Self {
        Self { driver: Arc::new(Driver::new(table, options)) }
    }

    /// How often this store has split buckets, put shards together, and taken from several at once.
    pub fn reshard_counts(&self) -> ReshardCounts {
        self.driver.resharding.so_far()
    }

    /// Splits a bucket into twice as many shards, whether it is hot or not; nothing happens to a
    /// bucket that does not exist.
    ///
    /// # Errors
    ///
    /// [`StoreError`] when the table does not answer.
    pub async fn split(&self, bucket: &BucketKey, now: Timestamp) -> Result<(), StoreError> {
        self.driver.run(bucket, Task::Split, now).await.map(drop)
    }

    /// Splits a bucket ahead of a rush, before the table turns writes away: into so many shards, a power
    /// of two up to 64, and no more than [`DynamoOptions::parts_max`]. Balances and limits are split
    /// with it and stay what they are together. When this returns all shards are there. Says how many
    /// there are now, which may be more; `None` for a bucket that does not exist: its first acquire
    /// makes it.
    ///
    /// A bucket that stays calm for [`DynamoOptions::merge_after`] is merged again.
    ///
    /// # Errors
    ///
    /// [`StoreError`] when the table does not answer, or others split it and merge it all the
    /// time. The bucket may then be split into fewer shards; it is sound, and this can be called again.
    pub async fn split_to(
        &self,
        bucket: &BucketKey,
        shards: u32,
        now: Timestamp,
    ) -> Result<Option<u32>, StoreError> {
        self.driver.run(bucket, Task::SplitTo(shards), now).await
    }

    /// How many items hold the shares of a bucket at this moment; 0 when there is no bucket.
    ///
    /// # Errors
    ///
    /// [`StoreError`] when the table does not answer.
    pub async fn shard_count(
        &self,
        bucket: &BucketKey,
        now: Timestamp,
    ) -> Result<usize, StoreError> {
        let shards = self.driver.read_all_shards(std::slice::from_ref(bucket)).await?;
        let live = shards.into_iter().map(|items| Shards::live(items, now).iter().count());
        Ok(live.sum())
    }

    /// Makes half as many shards of a bucket's, however hot it is; nothing happens to a bucket in one
    /// shard.
    ///
    /// # Errors
    ///
    /// [`StoreError`] when the table does not answer.
    pub async fn merge(&self, bucket: &BucketKey, now: Timestamp) -> Result<(), StoreError> {
        self.driver.run(bucket, Task::Merge, now).await.map(drop)
    }
}

impl fmt::Debug for DynamoStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DynamoStore").field("table", &self.driver.table).finish_non_exhaustive()
    }
}
