//! Reading the item of one shard.

use std::sync::Arc;

use smallvec::SmallVec;
use zae_limiter_core::{Bucket, Cell, EntityId, LimitName, LimitSet, Millitokens, Rate, Timestamp};

use super::{
    GENERATION, IDLE, LIMITS_AT, PARENT, REFILLED_AT, REMAINDERS_AT, SHARD_COUNT, SHARDS_SEEN, TTL,
    WCU, WCU_CAPACITY, WCU_PAID_OUT_AFTER_MS, attribute,
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
        let fields = item.iter().map(|(name, value)| (name.as_str(), Field::of(value)));
        Self::decode_fields(key, fields)
    }

    /// Reads an item from its attributes in any order, each once.
    ///
    /// # Errors
    ///
    /// As [`decode`](Self::decode).
    pub fn decode_fields<'a>(
        key: &BucketItemKey,
        fields: impl Iterator<Item = (&'a str, Field<'a>)>,
    ) -> Result<Self, Malformed> {
        Fields::of(fields).decode(&Reader { key })
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

/// An attribute's value, as far as a shard needs it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Field<'a> {
    /// A number.
    N(&'a str),
    /// Text.
    S(&'a str),
    /// Another type.
    Other,
}

impl<'a> Field<'a> {
    fn of(value: &'a Value) -> Self {
        match value {
            Value::N(number) => Self::N(number),
            Value::S(text) => Self::S(text),
            _ => Self::Other,
        }
    }
}

/// The attributes of an item, found in one pass.
#[derive(Default)]
struct Fields<'a> {
    refilled_at: Option<Field<'a>>,
    remainders_at: Option<Field<'a>>,
    generation: Option<Field<'a>>,
    shard_count: Option<Field<'a>>,
    shards_seen: Option<Field<'a>>,
    ttl: Option<Field<'a>>,
    idle: Option<Field<'a>>,
    limits_at: Option<Field<'a>>,
    parent: Option<Field<'a>>,
    wcu: LimitFields<'a>,
    /// Sorted by name.
    limits: SmallVec<[(&'a str, LimitFields<'a>); 4]>,
    has_remainders: bool,
    /// It has an attribute that is neither a key nor a balance.
    has_more_than_balances: bool,
}

/// The attributes of one limit.
#[derive(Clone, Copy, Default)]
struct LimitFields<'a> {
    tokens: Option<Field<'a>>,
    consumed: Option<Field<'a>>,
    capacity: Option<Field<'a>>,
    burst: Option<Field<'a>>,
    refill_amount: Option<Field<'a>>,
    period: Option<Field<'a>>,
    remainder: Option<Field<'a>>,
}

impl LimitFields<'_> {
    /// A balance alone is a refund to a limit that was removed.
    fn is_limit(&self) -> bool {
        let has_rate =
            self.capacity.is_some() || self.refill_amount.is_some() || self.period.is_some();
        self.tokens.is_some() && has_rate
    }
}

impl<'a> Fields<'a> {
    fn of(fields: impl Iterator<Item = (&'a str, Field<'a>)>) -> Self {
        let mut found = Self::default();
        for (name, field) in fields {
            found.has_more_than_balances |= !found.put(name, field);
        }
        found
    }

    /// True if the attribute is a key or a balance. Older clients refund without checking that the bucket exists.
    /// That creates an item with nothing else.
    fn put(&mut self, name: &'a str, field: Field<'a>) -> bool {
        let of_item = match name {
            "PK" | "SK" => return true,
            REFILLED_AT => &mut self.refilled_at,
            REMAINDERS_AT => &mut self.remainders_at,
            GENERATION => &mut self.generation,
            SHARD_COUNT => &mut self.shard_count,
            SHARDS_SEEN => &mut self.shards_seen,
            TTL => &mut self.ttl,
            IDLE => &mut self.idle,
            LIMITS_AT => &mut self.limits_at,
            PARENT => &mut self.parent,
            _ => return self.put_limit(name, field),
        };
        *of_item = Some(field);
        false
    }

    fn put_limit(&mut self, name: &'a str, field: Field<'a>) -> bool {
        let Some((limit, suffix)) = name.strip_prefix("b_").and_then(|name| name.rsplit_once('_'))
        else {
            return false;
        };
        if !["tk", "tc", "cp", "bx", "ra", "rp", "rm"].contains(&suffix) {
            return false;
        }
        let fields = self.limit(limit);
        let (of_limit, is_balance) = match suffix {
            "tk" => (&mut fields.tokens, true),
            "tc" => (&mut fields.consumed, true),
            "cp" => (&mut fields.capacity, false),
            "bx" => (&mut fields.burst, false),
            "ra" => (&mut fields.refill_amount, false),
            "rp" => (&mut fields.period, false),
            _ => (&mut fields.remainder, false),
        };
        *of_limit = Some(field);
        self.has_remainders |= suffix == "rm";
        is_balance
    }

    fn limit(&mut self, name: &'a str) -> &mut LimitFields<'a> {
        if name == WCU {
            return &mut self.wcu;
        }
        let at = match self.limits.binary_search_by_key(&name, |(other, _)| *other) {
            Ok(at) => at,
            Err(at) => {
                self.limits.insert(at, (name, LimitFields::default()));
                at
            }
        };
        &mut self.limits[at].1
    }

    fn decode(self, reader: &Reader<'_>) -> Result<BucketItem, Malformed> {
        let is_remnant = !self.has_more_than_balances;
        let refilled_at = match is_remnant {
            true => 0,
            false => reader.number(|| REFILLED_AT.to_owned(), self.refilled_at)?,
        };
        let remainders_at = reader.item(REMAINDERS_AT, self.remainders_at)?;
        let counts_remainders = remainders_at == Some(refilled_at);
        let limits = self.limits.iter().filter(|(_, fields)| fields.is_limit());
        let (mut rates, mut cells) = (Vec::with_capacity(self.limits.len()), Cells::new());
        for (limit, fields) in limits {
            let name = LimitName::new(limit).map_err(|_| {
                reader.malformed(&attribute(limit, "tk"), "named after a legal limit")
            })?;
            let rate = reader.rate(limit, fields)?;
            cells.push(reader.cell(limit, fields, counts_remainders)?);
            rates.push((name, rate));
        }
        let whole = LimitSet::from_rates(rates)
            .map_err(|_| reader.malformed("b_*_tk", "of at most 32 limits"))?;
        let count = reader.item(SHARD_COUNT, self.shard_count)?.unwrap_or(1);
        let shard_count = u32::try_from(count)
            .ok()
            .filter(|count| (1..=COUNT_MAX).contains(count))
            .ok_or_else(|| reader.malformed(SHARD_COUNT, "a count of shards"))?;
        let shards_seen = number_of(self.shards_seen).unwrap_or(1).max(count);
        let whole = Arc::new(whole);
        let shard = reader.key.shard;
        // Both are in the order of the names.
        let refilled_at = Timestamp::from_millis(refilled_at);
        let limits = share_of(&whole, shard, shard_count);
        let wcu = if is_remnant { None } else { self.wcu.tokens };
        let writes = reader.saturated(WCU, "tc", self.wcu.consumed)? / super::ONE_WRITE;
        let ttl = reader.item(TTL, self.ttl)?;
        Ok(BucketItem {
            shard,
            bucket: Bucket::from_parts(limits, cells, refilled_at),
            whole,
            wcu: reader.optional(|| attribute(WCU, "tk"), wcu)?,
            generation: reader.item(GENERATION, self.generation)?.unwrap_or(0),
            writes,
            shard_count,
            shards_seen: u32::try_from(shards_seen).unwrap_or(shard_count),
            parent: match self.parent {
                Some(Field::S(parent)) => EntityId::new(parent).ok(),
                _ => None,
            },
            expires_at: ttl.map(|seconds| Timestamp::from_millis(seconds.saturating_mul(1_000))),
            idle_s: reader
                .item(IDLE, self.idle)?
                .map(|seconds| u32::try_from(seconds).unwrap_or(0)),
            limits_at: reader.item(LIMITS_AT, self.limits_at)?.map(Timestamp::from_millis),
            has_remainders: self.has_remainders,
            is_remnant,
        })
    }
}

type Cells = SmallVec<[Cell; 4]>;

fn number_of(field: Option<Field<'_>>) -> Option<i64> {
    match field {
        Some(Field::N(number)) => number.parse().ok(),
        _ => None,
    }
}

/// Reads numbers, and names the attribute that is none. The names are made only for errors.
struct Reader<'a> {
    key: &'a BucketItemKey,
}

impl Reader<'_> {
    fn malformed(&self, attribute: &str, wanted: &'static str) -> Malformed {
        let item = self.key.item_key().to_string();
        Malformed { item, attribute: attribute.to_owned(), wanted }
    }

    fn optional(
        &self,
        name: impl Fn() -> String,
        field: Option<Field<'_>>,
    ) -> Result<Option<i64>, Malformed> {
        let number = number_of(field);
        match (field, number) {
            (Some(_), None) => Err(self.malformed(&name(), "a whole number")),
            _ => Ok(number),
        }
    }

    fn item(&self, name: &str, field: Option<Field<'_>>) -> Result<Option<i64>, Malformed> {
        self.optional(|| name.to_owned(), field)
    }

    fn number(
        &self,
        name: impl Fn() -> String,
        field: Option<Field<'_>>,
    ) -> Result<i64, Malformed> {
        self.optional(&name, field)?.ok_or_else(|| self.malformed(&name(), "present"))
    }

    /// A sum that DynamoDB may count beyond the range of `i64`.
    fn saturated(
        &self,
        limit: &str,
        suffix: &str,
        field: Option<Field<'_>>,
    ) -> Result<i64, Malformed> {
        if let Some(number) = number_of(field) {
            return Ok(number);
        }
        let number = match field {
            None => return Ok(0),
            Some(Field::N(number)) => number.parse::<i128>().ok(),
            Some(_) => None,
        };
        let ends = |number: i128| if number < 0 { i64::MIN } else { i64::MAX };
        let malformed = || self.malformed(&attribute(limit, suffix), "a whole number");
        number.map(ends).ok_or_else(malformed)
    }

    fn cell(
        &self,
        limit: &str,
        fields: &LimitFields<'_>,
        counts_remainders: bool,
    ) -> Result<Cell, Malformed> {
        let remainder = match self.optional(|| attribute(limit, "rm"), fields.remainder)? {
            Some(remainder) if counts_remainders => u64::try_from(remainder).unwrap_or(0),
            _ => 0,
        };
        let tokens = self.number(|| attribute(limit, "tk"), fields.tokens)?;
        let consumed = self.saturated(limit, "tc", fields.consumed)?;
        let (tokens, consumed) = (Millitokens::new(tokens), Millitokens::new(consumed));
        Ok(Cell { tokens, remainder, consumed, ..Cell::default() })
    }

    fn rate(&self, limit: &str, fields: &LimitFields<'_>) -> Result<Rate, Malformed> {
        let capacity = self.number(|| attribute(limit, "cp"), fields.capacity)?;
        // Older clients store the burst in an attribute of its own.
        let burst = self.optional(|| attribute(limit, "bx"), fields.burst)?.unwrap_or(0);
        let refill_amount = self.number(|| attribute(limit, "ra"), fields.refill_amount)?;
        let period = || attribute(limit, "rp");
        let period_ms = u64::try_from(self.number(period, fields.period)?)
            .map_err(|_| self.malformed(&period(), "a period in milliseconds"))?;
        let capacity = Millitokens::new(capacity.max(burst));
        Rate::new(capacity, Millitokens::new(refill_amount), period_ms)
            .map_err(|_| self.malformed(&attribute(limit, "cp"), "the ceiling of a legal limit"))
    }
}

#[cfg(test)]
mod tests {
    use zae_limiter_core::{BucketKey, NamespaceId, ResourceName};

    use super::*;

    fn key() -> BucketItemKey {
        let bucket = BucketKey {
            namespace: NamespaceId::new("abcdefghijk").unwrap(),
            entity: EntityId::new("key-1").unwrap(),
            resource: ResourceName::new("gpt-4").unwrap(),
        };
        BucketItemKey { bucket, shard: 0 }
    }

    /// One limit's name is the start of the other's, so their attributes are mixed when sorted.
    fn fields() -> Vec<(&'static str, Field<'static>)> {
        let limit = ["b_a_tk", "b_a_cp", "b_a_ra", "b_a_rp", "b_a_tc", "b_a_rm"];
        let other = ["b_a_b_tk", "b_a_b_cp", "b_a_b_ra", "b_a_b_rp", "b_a_b_tc", "b_a_b_bx"];
        let numbers = ["7", "10", "5", "1000", "-3", "400"];
        let others = ["9", "10", "6", "2000", "92233720368547758070000", "20"];
        let limits = limit.into_iter().zip(numbers).chain(other.into_iter().zip(others));
        let item = [("rf", "5"), ("rm_at", "5"), ("gn", "3"), ("shard_count", "1"), ("ttl", "8")];
        let mut fields: Vec<_> =
            limits.chain(item).map(|(name, number)| (name, Field::N(number))).collect();
        // A balance alone, and attributes that say nothing about the bucket.
        fields.extend([("b_gone_tk", Field::N("1")), ("b_wcu_tk", Field::N("2000"))]);
        fields.extend([("PK", Field::S("x")), ("parent_id", Field::S("org")), ("z", Field::Other)]);
        fields
    }

    #[test]
    fn the_order_of_attributes_does_not_matter() {
        let mut fields = fields();
        let item = BucketItem::decode_fields(&key(), fields.iter().copied()).unwrap();
        let cells: Vec<(i64, u64, i64)> = item
            .bucket
            .cells()
            .iter()
            .map(|cell| (cell.tokens.get(), cell.remainder, cell.consumed.get()))
            .collect();
        assert_eq!(cells, [(7, 400, -3), (9, 0, i64::MAX)]);
        let ceilings: Vec<i64> =
            item.whole.rates().iter().map(|rate| rate.capacity().get()).collect();
        assert_eq!(ceilings, [10, 20]);
        assert_eq!((item.wcu, item.generation, item.has_remainders), (Some(2_000), 3, true));
        assert_eq!(item.parent.as_ref().map(EntityId::as_str), Some("org"));
        for _ in 0..fields.len() {
            fields.rotate_left(1);
            let other = BucketItem::decode_fields(&key(), fields.iter().copied());
            assert_eq!(other.as_ref(), Ok(&item));
        }
    }

    #[test]
    fn an_error_names_the_attribute() {
        for (name, field, wanted) in [
            ("b_a_tk", Field::Other, "a whole number"),
            ("b_a_rp", Field::N("-1"), "a period in milliseconds"),
            ("b_a_b_tc", Field::N("1.5"), "a whole number"),
            ("shard_count", Field::N("0"), "a count of shards"),
            ("rf", Field::S("5"), "a whole number"),
        ] {
            let mut fields = fields();
            fields.retain(|(other, _)| *other != name);
            fields.push((name, field));
            let error = BucketItem::decode_fields(&key(), fields.into_iter()).unwrap_err();
            assert_eq!((error.attribute.as_str(), error.wanted), (name, wanted));
        }
        let fields = fields().into_iter().filter(|(name, _)| *name != "b_a_b_ra");
        let error = BucketItem::decode_fields(&key(), fields).unwrap_err();
        assert_eq!((error.attribute.as_str(), error.wanted), ("b_a_b_ra", "present"));
    }
}
