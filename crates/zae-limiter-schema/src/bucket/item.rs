//! Reading the item of one shard.

use std::collections::BTreeMap;
use std::sync::Arc;

use zae_limiter_core::{Bucket, Cell, EntityId, LimitName, LimitSet, Millitokens, Rate, Timestamp};

use super::{
    GENERATION, IDLE, LIMITS_AT, REFILLED_AT, REMAINDERS_AT, SHARD_COUNT, SHARDS_SEEN, TTL, WCU,
    WCU_CAPACITY, WCU_PAID_OUT_AFTER_MS, attribute,
};
use crate::keys::BucketItemKey;
use crate::value::{Item, Malformed, Value};

/// One shard of a bucket, as read from the table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BucketItem {
    /// The number of the shard, from 0.
    pub shard: u32,
    /// This shard's share of the limits, and its balances. The reserved limit is not among them.
    pub bucket: Bucket,
    /// The limits of the whole bucket, as the item stores them.
    pub whole: Arc<LimitSet>,
    /// The balance of the reserved limit, in 1/1,000 writes. Items of the first clients have none.
    pub wcu: Option<i64>,
    /// Changes whenever the limits or the shard count change; 0 where another client wrote the item.
    pub generation: i64,
    /// How many writes the shard has seen.
    pub writes: i64,
    /// How many shards the bucket has, as far as this shard knows. Its share follows from it.
    pub shard_count: u32,
    /// On the first shard: the highest shard count there ever was.
    pub shards_seen: u32,
    /// The parent entity, if an acquire also takes from it.
    pub parent: Option<EntityId>,
    /// When the item starts to count as absent, in whole seconds.
    pub expires_at: Option<Timestamp>,
    /// On the first of several shards: how long the bucket had to live when it was split, in seconds.
    pub idle_s: Option<u32>,
    /// When the stored configuration was read that its limits come from.
    pub limits_at: Option<Timestamp>,
    /// Whether it has attributes for remainders, even if they no longer count.
    pub has_remainders: bool,
    /// Not a bucket: only balances, which an older client refunded to a deleted bucket.
    pub is_remnant: bool,
}

impl BucketItem {
    /// Reads an item.
    ///
    /// # Errors
    ///
    /// [`Malformed`] when an attribute is missing or not what it should be.
    pub fn decode(key: &BucketItemKey, item: &Item) -> Result<Self, Malformed> {
        let reader = Reader { key, item };
        let is_remnant = reader.is_remnant();
        let refilled_at = if is_remnant { 0 } else { reader.number(REFILLED_AT)? };
        let refilled_at = Timestamp::from_millis(refilled_at);
        let remainders_count = reader.optional(REMAINDERS_AT)? == Some(refilled_at.as_millis());
        let mut rates = Vec::new();
        let mut cells = BTreeMap::new();
        for limit in reader.limits() {
            let name = LimitName::new(limit).map_err(|_| {
                reader.malformed(&attribute(limit, "tk"), "named after a legal limit")
            })?;
            let rate = reader.rate(limit)?;
            let remainder = match reader.optional(&attribute(limit, "rm"))? {
                Some(remainder) if remainders_count => u64::try_from(remainder).unwrap_or(0),
                _ => 0,
            };
            let tokens = Millitokens::new(reader.number(&attribute(limit, "tk"))?);
            let consumed = Millitokens::new(reader.saturated(&attribute(limit, "tc"))?);
            cells.insert(name.clone(), Cell { tokens, remainder, consumed, ..Cell::default() });
            rates.push((name, rate));
        }
        let limits = LimitSet::from_rates(rates)
            .map_err(|_| reader.malformed("b_*_tk", "of at most 32 limits"))?;
        let shard_count = reader.optional(SHARD_COUNT)?.unwrap_or(1);
        let shard_count = u32::try_from(shard_count)
            .ok()
            .filter(|count| (1..=COUNT_MAX).contains(count))
            .ok_or_else(|| reader.malformed(SHARD_COUNT, "a count of shards"))?;
        let whole = Arc::new(limits);
        let limits = share_of(&whole, key.shard, shard_count);
        let expires_at = reader
            .optional(TTL)?
            .map(|seconds| Timestamp::from_millis(seconds.saturating_mul(1_000)));
        Ok(Self {
            shard: key.shard,
            // Both are in the order of the names.
            bucket: Bucket::from_parts(limits, cells.into_values(), refilled_at),
            whole,
            wcu: if is_remnant { None } else { reader.optional(&attribute(WCU, "tk"))? },
            generation: reader.optional(GENERATION)?.unwrap_or(0),
            writes: reader.saturated(&attribute(WCU, "tc"))? / super::ONE_WRITE,
            shard_count,
            shards_seen: u32::try_from(shards_seen(item)).unwrap_or(shard_count),
            parent: reader.parent(),
            expires_at,
            idle_s: reader.optional(IDLE)?.map(|seconds| u32::try_from(seconds).unwrap_or(0)),
            limits_at: reader.optional(LIMITS_AT)?.map(Timestamp::from_millis),
            has_remainders: item.keys().any(|name| name.starts_with("b_") && name.ends_with("_rm")),
            is_remnant,
        })
    }

    /// Whether the item counts as absent.
    pub fn is_expired(&self, now: Timestamp) -> bool {
        self.is_remnant || self.expires_at.is_some_and(|expiry| expiry <= now)
    }

    /// Whether another shard has taken over its share.
    pub fn is_retired(&self) -> bool {
        self.shard >= self.shard_count.next_power_of_two()
    }

    /// Whether it holds a share of the bucket.
    pub fn is_live(&self, now: Timestamp) -> bool {
        !self.is_retired() && !self.is_expired(now)
    }

    /// The shard's share of these limits.
    pub fn share_of(&self, limits: &Arc<LimitSet>) -> Arc<LimitSet> {
        share_of(limits, self.shard, self.shard_count)
    }

    /// How many writes the shard can still take at `now`.
    pub fn writes_left(&self, now: Timestamp) -> i64 {
        let elapsed = i64::try_from(now.millis_since(self.bucket.refilled_at()));
        let earned = elapsed.unwrap_or(i64::MAX).saturating_mul(WCU_CAPACITY / 1_000);
        let left = self.wcu.map_or(WCU_CAPACITY, |writes| writes.saturating_add(earned));
        left.min(WCU_CAPACITY) / super::ONE_WRITE
    }

    /// Whether the reserved limit looks low only because no write has refilled it. Other clients would
    /// split the bucket then.
    pub fn has_writes_to_pay_out(&self, now: Timestamp) -> bool {
        let is_short = self.wcu.is_some_and(|writes| writes < WCU_CAPACITY / 2);
        is_short && now.millis_since(self.bucket.refilled_at()) >= WCU_PAID_OUT_AFTER_MS
    }
}

/// More shards than a bucket ever has.
const COUNT_MAX: u32 = 1 << 16;

/// A shard's share of limits. A count that is not a power of two, which no client writes, is rounded
/// up: shares are then too small, never too large.
pub fn share_of(limits: &Arc<LimitSet>, shard: u32, count: u32) -> Arc<LimitSet> {
    match count.next_power_of_two() {
        1 => Arc::clone(limits),
        count => Arc::new(limits.share(shard % count, count)),
    }
}

/// The highest shard count there ever was, as the first shard says.
pub fn shards_seen(first: &Item) -> i64 {
    let number = |name: &str| first.get(name).and_then(Value::as_i64).unwrap_or(1);
    number(SHARD_COUNT).max(number(SHARDS_SEEN))
}

struct Reader<'a> {
    key: &'a BucketItemKey,
    item: &'a Item,
}

impl<'a> Reader<'a> {
    fn malformed(&self, attribute: &str, wanted: &'static str) -> Malformed {
        let item = self.key.item_key().to_string();
        Malformed { item, attribute: attribute.to_owned(), wanted }
    }

    fn optional(&self, attribute: &str) -> Result<Option<i64>, Malformed> {
        match self.item.get(attribute) {
            None => Ok(None),
            Some(value) => match value.as_i64() {
                Some(number) => Ok(Some(number)),
                None => Err(self.malformed(attribute, "a whole number")),
            },
        }
    }

    /// A sum that DynamoDB may count beyond the range of `i64`.
    fn saturated(&self, attribute: &str) -> Result<i64, Malformed> {
        match self.item.get(attribute) {
            None => Ok(0),
            Some(Value::N(number)) => match number.parse::<i128>() {
                Ok(number) => Ok(i64::try_from(number).unwrap_or(if number < 0 {
                    i64::MIN
                } else {
                    i64::MAX
                })),
                Err(_) => Err(self.malformed(attribute, "a whole number")),
            },
            Some(_) => Err(self.malformed(attribute, "a whole number")),
        }
    }

    fn parent(&self) -> Option<EntityId> {
        EntityId::new(self.item.get("parent_id")?.as_str()?).ok()
    }

    fn number(&self, attribute: &str) -> Result<i64, Malformed> {
        self.optional(attribute)?.ok_or_else(|| self.malformed(attribute, "present"))
    }

    /// Older clients refund without checking that the bucket exists. That creates an item with nothing
    /// but balances.
    fn is_remnant(&self) -> bool {
        let is_balance = |name: &String| {
            let of_limit = name.strip_prefix("b_");
            of_limit.is_some_and(|name| name.ends_with("_tk") || name.ends_with("_tc"))
        };
        self.item.keys().all(|name| name == "PK" || name == "SK" || is_balance(name))
    }

    /// The limits that the item has. A balance alone is a refund to a limit that was removed.
    fn limits(&self) -> impl Iterator<Item = &'a str> {
        let names = self.item.keys();
        let limits = names
            .filter_map(|name| name.strip_prefix("b_").and_then(|name| name.strip_suffix("_tk")));
        let has_rate = |limit: &&str| {
            ["cp", "ra", "rp"].iter().any(|of| self.item.contains_key(&attribute(limit, of)))
        };
        limits.filter(|limit| *limit != WCU).filter(has_rate)
    }

    fn rate(&self, limit: &str) -> Result<Rate, Malformed> {
        let capacity = self.number(&attribute(limit, "cp"))?;
        // Older clients store the burst in an attribute of its own.
        let burst = self.optional(&attribute(limit, "bx"))?.unwrap_or(0);
        let refill_amount = self.number(&attribute(limit, "ra"))?;
        let period = attribute(limit, "rp");
        let period_ms = u64::try_from(self.number(&period)?)
            .map_err(|_| self.malformed(&period, "a period in milliseconds"))?;
        let capacity = Millitokens::new(capacity.max(burst));
        Rate::new(capacity, Millitokens::new(refill_amount), period_ms)
            .map_err(|_| self.malformed(&attribute(limit, "cp"), "the ceiling of a legal limit"))
    }
}
