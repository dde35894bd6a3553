//! Classifies the records of the stream.

use zae_limiter_core::{Key, LimitName, Timestamp};
use zae_limiter_schema::records::booking::Position;
use zae_limiter_schema::records::checkpoint;
use zae_limiter_schema::{BucketItemKey, Item, ItemKey, ParsedKey, SHARD_ZERO, change, parse_key};

use crate::archive::AuditLine;
use crate::event::{EventKind, StreamRecord};

/// A change of one shard of a bucket.
#[derive(Clone, Debug, PartialEq)]
pub struct BucketChange {
    /// The key of the shard.
    pub key: BucketItemKey,
    /// The time of the change, to the second.
    pub at: Timestamp,
    /// The position of the change in the stream.
    pub position: Position,
    /// Net consumption in millitokens, limit by limit.
    pub consumed: Vec<(LimitName, i64)>,
    /// The refill time, if this change has moved it.
    pub refilled_at: Option<Timestamp>,
    /// Whether this change has split the bucket into more shards.
    pub is_split: bool,
    /// Whether the aggregator must announce the new shard count to the other shards. A client that
    /// writes every shard itself makes that unnecessary.
    pub must_announce: bool,
    /// The item after the change.
    pub item: Item,
}

/// The meaning of a record.
#[derive(Clone, Debug, PartialEq)]
pub enum Change {
    /// A shard of a bucket has changed.
    Bucket(BucketChange),
    /// An audit event has expired.
    Expired(AuditLine),
    /// A change of a limiter's item that has no effects.
    Other,
    /// The key is not one of a limiter's item.
    Foreign,
}

/// Classifies a record.
///
/// # Errors
///
/// One sentence about what is wrong with the record.
pub fn change_of(record: StreamRecord) -> Result<Change, String> {
    // With any subject: a later release may add kinds of subjects.
    if record.kind == EventKind::Expire
        && let Some((namespace, id)) = audit_key(&record.key)
    {
        let Some(item) = record.old else { return Err(without_image("OldImage")) };
        return Ok(Change::Expired(AuditLine::new(&record.key, namespace, id, &item, record.at)));
    }
    let bucket = match parse_key(&record.key) {
        None if checkpoint::is_key(&record.key) => return Ok(Change::Other),
        None => return Ok(Change::Foreign),
        Some(ParsedKey::Record(Key::Bucket(bucket))) => BucketItemKey { bucket, shard: SHARD_ZERO },
        Some(ParsedKey::Shard(shard)) => shard,
        Some(_) => return Ok(Change::Other),
    };
    let (old, new) = match record.kind {
        // Its consumption is booked already.
        EventKind::Remove | EventKind::Expire => return Ok(Change::Other),
        EventKind::Insert => (None, record.new),
        // Without the old image, all consumption of the past would count again.
        EventKind::Modify if record.old.is_none() => {
            return Err(without_image("OldImage"));
        }
        EventKind::Modify => (record.old, record.new),
    };
    let Some(new) = new else { return Err(without_image("NewImage")) };
    let consumed = change::consumption(&bucket, old.as_ref(), &new);
    // Without the item's key: entity ids are often API keys, and this message is logged.
    let consumed = consumed
        .map_err(|bad| format!("its attribute {} should be {}", bad.attribute, bad.wanted))?;
    let is_split =
        old.as_ref().is_some_and(|old| change::shard_count(old) < change::shard_count(&new));
    let is_announced = old.as_ref().is_some_and(|old| change::changes_generation(old, &new));
    let refilled_at = change::refilled_at(&new);
    Ok(Change::Bucket(BucketChange {
        consumed,
        refilled_at: refilled_at
            .filter(|_| old.as_ref().and_then(change::refilled_at) != refilled_at),
        is_split,
        must_announce: is_split && !is_announced,
        key: bucket,
        at: record.at,
        position: record.position,
        item: new,
    }))
}

/// The namespace and the id of an audit event.
fn audit_key(key: &ItemKey) -> Option<(&str, &str)> {
    let (namespace, rest) = key.pk.split_once('/')?;
    Some((namespace, key.sk.strip_prefix("#AUDIT#").filter(|_| rest.starts_with("AUDIT#"))?))
}

fn without_image(image: &str) -> String {
    format!("it has no {image}; the table's stream must have the view type NEW_AND_OLD_IMAGES")
}
