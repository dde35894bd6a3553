//! Dividing a bucket that is written too often.

use std::fmt;
use std::sync::Arc;

use zae_limiter_core::{BoxFuture, Clock};
use zae_limiter_schema::bucket::{BucketItem, Halves, split};
use zae_limiter_schema::{
    BucketItemKey, Consistency, Item, ItemKey, SHARD_ZERO, Table, TableError, TableErrorKind,
    Transacted,
};

use crate::effects::Doubling;
use crate::execute::Divide;

/// How often it is tried: others write to the bucket all the time, that is why.
const ATTEMPTS_MAX: u32 = 16;

/// Divides the first part of a bucket in two, as its clients do; whoever meets the other parts goes
/// on.
pub struct Divider {
    table: Arc<dyn Table>,
    clock: Arc<dyn Clock>,
}

impl Divider {
    /// Divides buckets of that table.
    pub fn new(table: Arc<dyn Table>, clock: Arc<dyn Clock>) -> Self {
        Self { table, clock }
    }

    async fn try_to(&self, doubling: &Doubling) -> Result<bool, TableError> {
        let part = |shard| BucketItemKey { bucket: doubling.bucket.clone(), shard };
        let from = doubling.from.next_power_of_two();
        let (low_key, high_key) = (part(SHARD_ZERO), part(from));
        for _ in 0..ATTEMPTS_MAX {
            let keys = [low_key.item_key(), high_key.item_key()];
            let read = self.table.read(&keys, Consistency::Strong).await?;
            let find = |key: &BucketItemKey| {
                let item = read.items.iter().find(|item| is_at(item, &key.item_key()))?;
                Some(BucketItem::decode(key, item))
            };
            let (low, high) = (find(&low_key), find(&high_key).transpose());
            let (Some(Ok(low)), Ok(high)) = (low, high) else { return Ok(false) };
            let now = self.clock.now();
            if low.shard_count.next_power_of_two() != from || !low.is_live(now) {
                return Ok(false);
            }
            let halves = Halves { low: &low, high: high.as_ref() };
            match self.table.transact(&split(&low_key, halves, now)).await {
                Ok(Transacted::Done(_)) => return Ok(true),
                Ok(Transacted::Unmet(..)) => {}
                Err(error) if error.kind == TableErrorKind::Conflict => {}
                Err(error) => return Err(error),
            }
        }
        Ok(false)
    }
}

fn is_at(item: &Item, key: &ItemKey) -> bool {
    let text = |name| item.get(name).and_then(|value| value.as_str());
    text("PK") == Some(&key.pk) && text("SK") == Some(&key.sk)
}

impl fmt::Debug for Divider {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Divider").finish_non_exhaustive()
    }
}

impl Divide for Divider {
    fn divide<'a>(&'a self, doubling: &'a Doubling) -> BoxFuture<'a, Result<bool, TableError>> {
        Box::pin(self.try_to(doubling))
    }
}
