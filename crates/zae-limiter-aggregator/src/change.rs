//! What a record of the stream means to the aggregator.

use zae_limiter_core::{Key, LimitName, Timestamp};
use zae_limiter_schema::records::booking::Position;
use zae_limiter_schema::{BucketItemKey, Item, ItemKey, ParsedKey, SHARD_ZERO, change, parse_key};

use crate::archive::AuditLine;
use crate::event::{EventKind, StreamRecord};

/// A change of one shard of a bucket.
#[derive(Clone, Debug, PartialEq)]
pub struct BucketChange {
    /// Which shard.
    pub key: BucketItemKey,
    /// When, to the second.
    pub at: Timestamp,
    /// Where it stands in the stream.
    pub position: Position,
    /// What was taken net, in millitokens.
    pub consumed: Vec<(LimitName, i64)>,
    /// The refill time, if this change has moved it.
    pub refilled_at: Option<Timestamp>,
    /// Whether the bucket is split into more shards than before.
    pub is_split: bool,
    /// Whether the other shards have to be told: whoever splits them one by one has them know.
    pub is_to_be_carried: bool,
    /// The item after the change.
    pub item: Item,
}

/// What a record means.
#[derive(Clone, Debug, PartialEq)]
pub enum Change {
    /// A shard of a bucket has changed.
    Bucket(BucketChange),
    /// An audit event has expired.
    Expired(AuditLine),
    /// Something else of the limiter's has changed.
    Other,
    /// No release of the format known here writes such a key.
    Foreign,
}

/// Reads a record.
///
/// # Errors
///
/// One sentence about what is wrong with it.
pub fn change_of(record: StreamRecord) -> Result<Change, String> {
    // Whatever it is about: a later release may know other things to be about.
    if record.kind == EventKind::Expire
        && let Some((namespace, id)) = audit_key(&record.key)
    {
        let Some(item) = record.old else { return Err(without_image("OldImage")) };
        return Ok(Change::Expired(AuditLine::new(namespace, id, &item, record.at)));
    }
    let bucket = match parse_key(&record.key) {
        None => return Ok(Change::Foreign),
        Some(ParsedKey::Record(Key::Bucket(bucket))) => BucketItemKey { bucket, shard: SHARD_ZERO },
        Some(ParsedKey::Shard(shard)) => shard,
        Some(_) => return Ok(Change::Other),
    };
    let (old, new) = match record.kind {
        // What it had consumed is booked.
        EventKind::Remove | EventKind::Expire => return Ok(Change::Other),
        EventKind::Insert => (None, record.new),
        // Without it everything that was ever consumed would count as new.
        EventKind::Modify if record.old.is_none() => {
            return Err(without_image("OldImage"));
        }
        EventKind::Modify => (record.old, record.new),
    };
    let Some(new) = new else { return Err(without_image("NewImage")) };
    let consumed = change::consumption(&bucket, old.as_ref(), &new);
    // The item's key stays out of it: entity ids are often API keys, and this ends up in logs.
    let consumed = consumed
        .map_err(|bad| format!("its attribute {} should be {}", bad.attribute, bad.wanted))?;
    let is_split =
        old.as_ref().is_some_and(|old| change::shard_count(old) < change::shard_count(&new));
    let is_told = old.as_ref().is_some_and(|old| change::is_told_to_others(old, &new));
    let refilled_at = change::refilled_at(&new);
    Ok(Change::Bucket(BucketChange {
        consumed,
        refilled_at: refilled_at
            .filter(|_| old.as_ref().and_then(change::refilled_at) != refilled_at),
        is_split,
        is_to_be_carried: is_split && !is_told,
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
    format!(
        "it comes without {image}; the table's stream must be of the view type NEW_AND_OLD_IMAGES"
    )
}
