//! Refills buckets before callers find them short.

use std::collections::BTreeMap;

use zae_limiter_core::{LimitName, Timestamp};
use zae_limiter_schema::bucket::{self, Alive, BucketItem, Expiry, Movement};
use zae_limiter_schema::{BucketItemKey, Item, Update, change};

/// Refills a shard if its balance after a refill would not cover the amounts that were just
/// `taken`, in millitokens. All limits are refilled, with their remainders: they share one refill
/// time, so a limit that is left out would lose what it has earned.
pub(crate) fn refill_of(
    key: &BucketItemKey,
    item: &Item,
    taken: &BTreeMap<&LimitName, i64>,
    now: Timestamp,
) -> Option<Update> {
    if change::has_schedule(item) {
        return None;
    }
    // A damaged item is left alone: the next acquire from it reports the damage.
    let item = BucketItem::decode(key, item).ok()?;
    if !item.is_live(now) {
        return None;
    }
    let elapsed_ms = now.millis_since(item.bucket.refilled_at());
    let mut is_short = false;
    // The rates are the shard's share of the bucket.
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
