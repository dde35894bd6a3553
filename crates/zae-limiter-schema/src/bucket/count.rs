//! The shard count of a bucket: copied from the first shard to the others, and used to delete them all.

use zae_limiter_core::BucketKey;

use super::{SHARD_COUNT, SHARDS_SEEN, shards_seen};
use crate::expression::{Action, Condition};
use crate::keys::{BucketItemKey, ItemKey};
use crate::table::{Change, Update};
use crate::value::{Item, Value};

/// More shards than a bucket ever has.
const SHARDS_MAX: i64 = 4_096;

/// The most items in one transaction.
const CHANGES_MAX: usize = 100;

/// The keys of all shards but the first, by the count on the first one. It reads nothing else of that
/// item, so that a malformed bucket can be deleted.
pub fn further_shards(bucket: &BucketKey, first: &Item) -> Vec<ItemKey> {
    let count = shards_seen(first);
    let count = u32::try_from(count.clamp(1, SHARDS_MAX)).unwrap_or(1);
    let key = |shard| BucketItemKey { bucket: bucket.clone(), shard }.item_key();
    (1..count).map(key).collect()
}

/// Deletes a bucket with all its shards in one transaction, if the count is still the same. A shard left
/// behind would go on admitting beside the full bucket that an absent one counts as. Without a first
/// shard, `further` are deleted unless another process creates it meanwhile.
pub fn delete_together(
    bucket: &BucketKey,
    first: Option<&Item>,
    further: &[ItemKey],
) -> Vec<Change> {
    let first_key = BucketItemKey { bucket: bucket.clone(), shard: 0 }.item_key();
    let first = match first {
        None => Change::Check(first_key, vec![Condition::Absent("PK".to_owned())]),
        // Both counts: a bucket that was split and merged meanwhile has more items than before.
        Some(first) => {
            let pin = |name: &str| match first.get(name) {
                None => Condition::Absent(name.to_owned()),
                Some(count) => Condition::Equal(name.to_owned(), count.clone()),
            };
            Change::Delete(first_key, vec![pin(SHARD_COUNT), pin(SHARDS_SEEN)])
        }
    };
    let further = further.iter().take(CHANGES_MAX - 1);
    let further = further.map(|key| Change::Delete(key.clone(), Vec::new()));
    [first].into_iter().chain(further).collect()
}

/// Raises the shard count of an existing shard. A shard with a higher count, and one that does not
/// exist, stays as it is. The shard's share only gets smaller.
pub fn carry_shard_count(key: &BucketItemKey, count: u32) -> Update {
    let count = i64::from(count);
    Update {
        key: key.item_key(),
        actions: vec![Action::Set(SHARD_COUNT.to_owned(), Value::number(count))],
        conditions: vec![
            Condition::Exists("PK".to_owned()),
            Condition::AtMost(SHARD_COUNT.to_owned(), Value::number(count - 1)),
        ],
    }
}
