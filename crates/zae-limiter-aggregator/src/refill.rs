//! Refilling buckets before somebody finds them short.

use std::collections::BTreeMap;

use zae_limiter_core::{LimitName, Timestamp};
use zae_limiter_schema::bucket::{self, Alive, BucketItem, Expiry, Movement};
use zae_limiter_schema::{BucketItemKey, Item, Update, change};

/// Pays out a bucket's time if what was just taken from it, in millitokens, could not be taken once
/// more from what it will hold. All limits are paid, with their remainders: they share one refill
/// time, and whoever is left out forfeits what it has earned.
pub(crate) fn refill_of(
    key: &BucketItemKey,
    item: &Item,
    taken: &BTreeMap<&LimitName, i64>,
    now: Timestamp,
) -> Option<Update> {
    if change::has_schedule(item) {
        return None;
    }
    // An item that cannot be read is for those who will complain about it.
    let item = BucketItem::decode(key, item).ok()?;
    if !item.is_live(now) {
        return None;
    }
    let elapsed_ms = now.millis_since(item.bucket.refilled_at());
    let mut is_short = false;
    // Of a split bucket its shard's share.
    let limits = item.bucket.limits().iter().zip(item.bucket.cells()).zip(item.whole.rates());
    let movements: Vec<Movement> = limits
        .map(|(((name, rate), cell), whole)| {
            let (earned, remainder) = rate.earned(elapsed_ms, cell.remainder);
            let projected = cell.tokens.saturating_add(earned).min(rate.capacity());
            let taken = taken.get(name).copied().unwrap_or_default();
            is_short |= projected > cell.tokens && projected.get() < taken;
            Movement {
                earned: earned.get(),
                remainder,
                ..Movement::none(name.clone(), *rate, *whole)
            }
        })
        .collect();
    let alive = Alive::After(now);
    is_short.then(|| bucket::refill(key, &item, &movements, Expiry::Keep, alive, now))
}
