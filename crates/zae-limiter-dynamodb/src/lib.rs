//! The rate limiter's store for many machines: one DynamoDB table.
//!
//! `hot` takes and settles. Every part of a bucket has a lane (`lane`), in which one write follows
//! the other (`work`); `round` decides what one write does, and is pure. A bucket that is written too
//! often is divided (`dividing`); which part is asked is up to `division`, and `gather` asks all of
//! them together, as `parts` sees them. Everything else is `records`, `lists` and `deletion`. `cold` is the store
//! made of them, and the table is whatever implements [`Table`], called through `calls`.

#[cfg(feature = "aws")]
pub mod aws;
mod calls;
mod cold;
mod cursor;
mod deletion;
mod dividing;
mod division;
mod error;
mod gather;
mod hot;
mod lane;
mod lists;
mod meter;
mod options;
mod parts;
mod records;
mod round;
mod usage;
mod work;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use zae_limiter_core::{BucketKey, StoreError, Timestamp};
use zae_limiter_schema::Table;

pub use meter::DivisionCounts;
pub use options::DynamoOptions;

use crate::lane::Lanes;
use crate::meter::{Divisions, Meter};

/// A [`Store`](zae_limiter_core::Store) in one DynamoDB table. Clones are handles to the same store.
#[derive(Clone)]
pub struct DynamoStore {
    shared: Arc<Shared>,
}

/// What all handles, and the work in the background, share.
struct Shared {
    table: Arc<dyn Table>,
    options: DynamoOptions,
    lanes: Lanes,
    meter: Meter,
    /// How many random numbers were drawn.
    drawn: AtomicU64,
    divisions: Divisions,
}

impl DynamoStore {
    /// A store on a table.
    pub fn new(table: Arc<dyn Table>, options: DynamoOptions) -> Self {
        let lanes = Lanes::new(options.remembered_buckets);
        let (meter, divisions) = (Meter::default(), Divisions::default());
        let drawn = AtomicU64::new(0);
        Self { shared: Arc::new(Shared { table, options, lanes, meter, drawn, divisions }) }
    }

    /// How often this store has divided buckets, put parts together, and taken from several at once.
    pub fn divisions(&self) -> DivisionCounts {
        self.shared.divisions.so_far()
    }

    /// Divides a bucket into twice as many parts, whether it is hot or not; nothing happens to a
    /// bucket that does not exist.
    ///
    /// # Errors
    ///
    /// [`StoreError`] when the table does not answer.
    pub async fn double(&self, bucket: &BucketKey, now: Timestamp) -> Result<(), StoreError> {
        let parts = self.shared.read_parts(bucket, now).await?;
        if parts.iter().next().is_some() {
            let count = self.shared.count(bucket);
            self.shared.double(bucket, count, now).await;
        }
        Ok(())
    }

    /// Divides a bucket ahead of a rush, before the table turns writes away: into so many parts, a power
    /// of two up to 64, and no more than [`DynamoOptions::parts_max`]. Balances and limits are divided
    /// with it and stay what they are together. When this returns all parts are there. Says how many
    /// there are now, which may be more; `None` for a bucket that does not exist: its first acquire
    /// makes it.
    ///
    /// A bucket that stays calm for [`DynamoOptions::merge_after`] is put together again.
    ///
    /// # Errors
    ///
    /// [`StoreError`] when the table does not answer, or others divide it and put it together all the
    /// time. The bucket may then be divided into fewer parts; it is sound, and this can be called again.
    pub async fn divide(
        &self,
        bucket: &BucketKey,
        parts: u32,
        now: Timestamp,
    ) -> Result<Option<u32>, StoreError> {
        self.shared.divide(bucket, parts, now).await
    }

    /// How many items hold the shares of a bucket at this moment; 0 when there is no bucket.
    ///
    /// # Errors
    ///
    /// [`StoreError`] when the table does not answer.
    pub async fn parts(&self, bucket: &BucketKey, now: Timestamp) -> Result<usize, StoreError> {
        Ok(self.shared.read_parts(bucket, now).await?.iter().count())
    }

    /// Makes half as many parts of a bucket's, however hot it is; nothing happens to a bucket in one
    /// part.
    ///
    /// # Errors
    ///
    /// [`StoreError`] when the table does not answer.
    pub async fn halve(&self, bucket: &BucketKey, now: Timestamp) -> Result<(), StoreError> {
        self.shared.read_parts(bucket, now).await?;
        let count = self.shared.count(bucket);
        if count > 1 {
            self.shared.halve(bucket, count, now).await?;
        }
        Ok(())
    }
}

impl fmt::Debug for DynamoStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DynamoStore").field("table", &self.shared.table).finish_non_exhaustive()
    }
}
