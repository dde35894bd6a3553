//! Reads a bucket's item by its attributes, without the code under test.

use std::collections::BTreeMap;

use zae_limiter_core::{Millitokens, Rate, share};
use zae_limiter_schema::{Item, Value};

/// One limit of an item.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cell {
    pub(super) tokens: i64,
    pub(super) consumed: i64,
    pub(super) remainder: u64,
    pub(super) rate: Rate,
    /// The rate of the whole bucket. `rate` is the shard's share of it.
    pub(super) whole: Rate,
}

/// The content of a bucket's item.
#[derive(Clone, Debug)]
pub(super) struct Reading {
    pub(super) shard: u32,
    /// The item's shard count.
    pub(super) count: u32,
    pub(super) rf: i64,
    pub(super) ttl: Option<i64>,
    /// When the limits were read, by the clock of the client that read them.
    pub(super) limits_at: Option<i64>,
    pub(super) cells: BTreeMap<String, Cell>,
}

impl Cell {
    /// Whether the cell is what a new bucket would have: full, less the net consumption.
    pub(super) fn is_full_less_net(&self, old: &Reading, limit: &str) -> bool {
        let before = old.cells.get(limit).map_or(0, |cell| i128::from(cell.consumed));
        let net = i128::from(self.consumed) - before;
        i128::from(self.tokens) + net == i128::from(self.rate.capacity().get())
    }
}

impl Reading {
    /// Whether the item is a shard of the bucket, and not a retired one.
    pub(super) fn holds_share(&self) -> bool {
        self.shard < self.count
    }

    pub(super) fn of(shard: u32, item: &Item) -> Option<Self> {
        let count = item.get("shard_count").and_then(Value::as_i64);
        Self::as_one_of(shard, count.and_then(|count| u32::try_from(count).ok()).unwrap_or(1), item)
    }

    /// Reads an item as if its shard count were `count`.
    pub(super) fn as_one_of(shard: u32, count: u32, item: &Item) -> Option<Self> {
        let number = |name: &str| item.get(name).and_then(Value::as_i64);
        let rf = number("rf")?;
        let mut cells = BTreeMap::new();
        for name in item.keys() {
            let limit = name.strip_prefix("b_").and_then(|name| name.strip_suffix("_tk"));
            let Some(limit) = limit.filter(|limit| *limit != "wcu") else { continue };
            let of = |suffix: &str| number(&format!("b_{limit}_{suffix}"));
            let share_of = |whole| share(Millitokens::new(whole), shard % count, count);
            let period = u64::try_from(of("rp")?).ok()?;
            let rate = Rate::new(share_of(of("cp")?), share_of(of("ra")?), period).ok()?;
            let [ceiling, amount] = [of("cp")?, of("ra")?].map(Millitokens::new);
            let whole = Rate::new(ceiling, amount, period).ok()?;
            let remainder = of("rm").filter(|_| number("rm_at") == Some(rf)).unwrap_or(0);
            let cell = Cell {
                tokens: of("tk")?,
                consumed: of("tc").unwrap_or(0),
                remainder: u64::try_from(remainder).ok()?,
                rate,
                whole,
            };
            cells.insert(limit.to_owned(), cell);
        }
        let (ttl, limits_at) = (number("ttl"), number("limits_at"));
        Some(Self { shard, count, rf, ttl, limits_at, cells })
    }
}
