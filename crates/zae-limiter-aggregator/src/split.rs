//! Splits buckets that are written too often.

use std::fmt;
use std::sync::Arc;

use zae_limiter_core::{BoxFuture, Clock};
use zae_limiter_schema::bucket::{BucketItem, ShardPair, split};
use zae_limiter_schema::{
    BucketItemKey, Consistency, Item, ItemKey, SHARD_ZERO, Table, TableError, TableErrorKind,
    Transacted,
};

use crate::effects::PendingSplit;
use crate::execute::Split;
use crate::table_clock::TableClock;

/// How often a split is tried. Other clients write to a hot bucket all the time: conflicts follow.
const ATTEMPTS_MAX: u32 = 16;

/// Splits the first shard of a bucket in two, as its clients do. Clients that read the other shards
/// split those.
pub struct Splitter {
    table: Arc<dyn Table>,
    clock: Arc<dyn Clock>,
}

impl Splitter {
    /// A splitter for the buckets of that table.
    pub fn new(table: Arc<dyn Table>, clock: Arc<dyn Clock>) -> Self {
        let clock = TableClock::shared(Arc::clone(&table), clock);
        Self { table, clock }
    }

    async fn try_to(&self, pending: &PendingSplit) -> Result<bool, TableError> {
        let key_of = |shard| BucketItemKey { bucket: pending.bucket.clone(), shard };
        let from = pending.from.next_power_of_two();
        let (low_key, high_key) = (key_of(SHARD_ZERO), key_of(from));
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
            let pair = ShardPair { low: &low, high: high.as_ref() };
            match self.table.transact(&split(&low_key, pair, now)).await {
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

impl fmt::Debug for Splitter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Splitter").finish_non_exhaustive()
    }
}

impl Split for Splitter {
    fn split<'a>(&'a self, pending: &'a PendingSplit) -> BoxFuture<'a, Result<bool, TableError>> {
        Box::pin(self.try_to(pending))
    }
}
