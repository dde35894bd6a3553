//! The rate limiter's store for many machines: one DynamoDB table.
//!
//! `bucket` is the state machine of one bucket. It does no IO: it takes events and returns commands.
//! `driver` owns the machines, runs their commands against the table on the store's own `runtime`, and
//! feeds the results back. `records`, `lists`, `usage` and `deletion` do everything else, through `calls`.
//! `store` implements [`Store`](zae_limiter_core::Store) with them. The table is any [`Table`].

#[cfg(feature = "aws")]
pub mod aws;
mod bucket;
mod buckets;
mod calls;
mod cursor;
mod deletion;
mod driver;
mod error;
mod everything;
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
///
#[cfg_attr(feature = "aws", doc = "```no_run")]
#[cfg_attr(not(feature = "aws"), doc = "```ignore")]
/// # async fn example() -> Result<(), zae_limiter_core::Error> {
/// use std::sync::Arc;
/// use zae_limiter_core::RateLimiter;
/// use zae_limiter_dynamodb::aws::{DynamoAddress, LazyTable};
/// use zae_limiter_dynamodb::{DynamoOptions, DynamoStore};
///
/// let region = Some("eu-west-1".to_owned());
/// let address = DynamoAddress { table: "my-app".to_owned(), region, endpoint: None };
/// let table = Arc::new(LazyTable::new(address));
/// let store = DynamoStore::new(table, DynamoOptions::default());
/// let limiter = RateLimiter::builder(store).open().await?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct DynamoStore {
    driver: Arc<Driver>,
}

impl DynamoStore {
    /// A store on a table. See [`from_client`](Self::from_client) for an SDK client.
    pub fn new(table: Arc<dyn Table>, options: DynamoOptions) -> Self {
        Self { driver: Arc::new(Driver::new(table, options)) }
    }

    /// A store on a DynamoDB table, through an SDK client that the program has built: with its own
    /// credentials, endpoint, interceptors or HTTP client.
    ///
    /// The first call checks the table as opening it by URL does: its keys, its indexes, and
    /// the release of its format. The store works with every client setting except retries. It sends each
    /// update once, also through a client with retries: after a lost answer, a retry could refund twice. It
    /// retries reads, deletions and transactions with its own settings. A client without timeouts gets a read
    /// timeout of 2 s for every attempt, and [`DynamoOptions::call_timeout`] limits each call as a whole.
    ///
    /// For other options, use [`new`](Self::new) with [`LazyTable::from_client`](aws::LazyTable::from_client).
    ///
    /// ```no_run
    /// use aws_sdk_dynamodb::Client;
    /// use aws_sdk_dynamodb::config::{BehaviorVersion, Config, Credentials, Region};
    /// use zae_limiter_dynamodb::DynamoStore;
    ///
    /// let config = Config::builder()
    ///     .behavior_version(BehaviorVersion::latest())
    ///     .region(Region::new("eu-west-1"))
    ///     .credentials_provider(Credentials::new("key", "secret", None, None, "vault"))
    ///     .build();
    /// let store = DynamoStore::from_client(Client::from_conf(config), "my-app");
    /// ```
    #[cfg(feature = "aws")]
    pub fn from_client(client: aws_sdk_dynamodb::Client, table: impl Into<String>) -> Self {
        let table = Arc::new(aws::LazyTable::from_client(client, table));
        Self::new(table, DynamoOptions::default())
    }

    /// How often this store has split and merged buckets, and gathered requests from several shards.
    pub fn reshard_counts(&self) -> ReshardCounts {
        self.driver.resharding.so_far()
    }

    /// Splits a bucket into twice as many shards, whether it is hot or not. A bucket that does not exist
    /// stays absent.
    ///
    /// # Errors
    ///
    /// [`StoreError`] when the table does not answer.
    pub async fn split(&self, bucket: &BucketKey, now: Timestamp) -> Result<(), StoreError> {
        self.driver.run(bucket, Task::Split, now).await.map(drop)
    }

    /// Splits a bucket ahead of a rush, before DynamoDB throttles it: into `shards` shards, a power of two up
    /// to 64 and at most [`DynamoOptions::shards_max`]. The sums of balances and limits stay the same. All
    /// shards exist when this returns. Returns the number of shards, which may be higher than asked; `None`
    /// for a bucket that does not exist: the first acquire creates it.
    ///
    /// The store merges the bucket again after [`DynamoOptions::merge_after`] with few writes.
    ///
    /// # Errors
    ///
    /// [`StoreError`] when the table does not answer, or other processes split and merge the bucket all the
    /// time. The bucket may then have fewer shards. It stays consistent, and the call can be retried.
    pub async fn split_to(
        &self,
        bucket: &BucketKey,
        shards: u32,
        now: Timestamp,
    ) -> Result<Option<u32>, StoreError> {
        self.driver.run(bucket, Task::SplitTo(shards), now).await
    }

    /// How many live shards a bucket has; 0 if it does not exist.
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

    /// Merges a bucket into half as many shards, however hot it is. A bucket with one shard stays as it is.
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
