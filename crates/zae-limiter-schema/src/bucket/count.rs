//! Into how many parts a bucket is divided, carried from the first part to the others.

use super::SHARD_COUNT;
use crate::expression::{Action, Condition};
use crate::keys::BucketItemKey;
use crate::table::Update;
use crate::value::Value;

/// Tells an existing part of a bucket into how many it is divided now; one that knows of more, and
/// one that is not there, stays as it is. The part's share only gets smaller.
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
