//! Reading a change of a bucket's item: the item before, and after.

use zae_limiter_core::{LimitName, Timestamp};

use crate::keys::BucketItemKey;
use crate::value::{Item, Malformed, Value};

const REFILLED_AT: &str = "rf";
const SHARD_COUNT: &str = "shard_count";
const GENERATION: &str = "gn";
/// Attributes of refill schedules, which later clients write: of the item, and of one limit.
const SCHEDULES: [&str; 3] = ["sched", "rsched", "vu"];
const LIMIT_SCHEDULES: [&str; 4] = ["_sched", "_rsched", "_ws", "_rsa"];

/// Whether the functions below read the attribute from the item before the change.
pub fn is_compared(attribute: &str) -> bool {
    let is_count = |name: &str| name.starts_with("b_") && name.ends_with("_tc");
    matches!(attribute, REFILLED_AT | SHARD_COUNT | GENERATION) || is_count(attribute)
}

/// Whether the attribute is a key of the table or of an index. Nothing is derived from these.
pub fn is_key(attribute: &str) -> bool {
    matches!(attribute, "PK" | "SK") || attribute.starts_with("GSI")
}

/// By how much the net consumption of each limit differs, in millitokens. A new item counts from 0. A
/// limit that was removed is left out, and so is the reserved limit.
///
/// # Errors
///
/// [`Malformed`] when a count is not a whole number.
pub fn consumption(
    key: &BucketItemKey,
    old: Option<&Item>,
    new: &Item,
) -> Result<Vec<(LimitName, i64)>, Malformed> {
    let malformed = |attribute: &str, wanted| {
        let item = key.item_key().to_string();
        Malformed { item, attribute: attribute.to_owned(), wanted }
    };
    let count = |attribute: &str, value: &Value| {
        match value {
            Value::N(number) => number.parse::<i128>().ok(),
            _ => None,
        }
        .ok_or_else(|| malformed(attribute, "a whole number"))
    };
    let mut differences = Vec::new();
    // The map is sorted, so all attributes of limits are in one range.
    let of_limits = new.range("b_".to_owned()..).take_while(|(name, _)| name.starts_with("b_"));
    for (attribute, value) in of_limits {
        let limit = attribute.strip_prefix("b_").and_then(|name| name.strip_suffix("_tc"));
        let Some(limit) = limit.filter(|limit| *limit != "wcu") else { continue };
        let before = old.and_then(|old| old.get(attribute));
        if before == Some(value) {
            continue;
        }
        let before = before.map_or(Ok(0), |before| count(attribute, before))?;
        let difference = i64::try_from(count(attribute, value)? - before)
            .map_err(|_| malformed(attribute, "closer to its value before"))?;
        let limit =
            LimitName::new(limit).map_err(|_| malformed(attribute, "named after a legal limit"))?;
        if difference != 0 {
            differences.push((limit, difference));
        }
    }
    Ok(differences)
}

/// The item's refill time.
pub fn refilled_at(item: &Item) -> Option<Timestamp> {
    item.get(REFILLED_AT).and_then(Value::as_i64).map(Timestamp::from_millis)
}

/// The item's shard count.
pub fn shard_count(item: &Item) -> u32 {
    let count = item.get(SHARD_COUNT).and_then(Value::as_i64);
    count.and_then(|count| u32::try_from(count).ok()).unwrap_or(1)
}

/// Whether the item has refill schedules. A client that does not support them must not refill it.
pub fn has_schedule(item: &Item) -> bool {
    let of_limit = |name: &String| {
        name.starts_with("b_") && LIMIT_SCHEDULES.iter().any(|suffix| name.ends_with(suffix))
    };
    SCHEDULES.iter().any(|name| item.contains_key(*name)) || item.keys().any(of_limit)
}

/// Whether the change has a new generation. Our clients change it when they split a bucket; other
/// clients only raise the shard count.
pub fn changes_generation(old: &Item, new: &Item) -> bool {
    old.get(GENERATION) != new.get(GENERATION)
}

#[cfg(test)]
mod tests {
    use zae_limiter_core::{BucketKey, EntityId, NamespaceId, ResourceName};

    use super::*;

    fn key() -> BucketItemKey {
        let bucket = BucketKey {
            namespace: NamespaceId::new("abcdefghijk").expect("legal"),
            entity: EntityId::new("key-1").expect("legal"),
            resource: ResourceName::new("gpt-4").expect("legal"),
        };
        BucketItemKey { bucket, shard: 0 }
    }

    fn item(counts: &[(&str, &str)]) -> Item {
        let count = |(name, number): &(&str, &str)| {
            (format!("b_{name}_tc"), Value::N((*number).to_owned()))
        };
        counts.iter().map(count).collect()
    }

    fn check(old: Option<&[(&str, &str)]>, new: &[(&str, &str)], wanted: &[(&str, i64)]) {
        let found = consumption(&key(), old.map(item).as_ref(), &item(new)).expect("whole numbers");
        let found: Vec<(&str, i64)> = found.iter().map(|(name, n)| (name.as_str(), *n)).collect();
        assert_eq!(found, wanted);
    }

    #[test]
    fn consumption_is_the_difference_of_counts() {
        check(Some(&[("rpm", "1000")]), &[("rpm", "4000")], &[("rpm", 3_000)]);
        check(Some(&[("rpm", "4000")]), &[("rpm", "1500")], &[("rpm", -2_500)]);
        // A new item, a new limit, a removed limit, and the reserved one.
        check(None, &[("rpm", "7000"), ("wcu", "1000")], &[("rpm", 7_000)]);
        check(Some(&[("rpm", "5")]), &[("rpm", "5"), ("tpm", "9")], &[("tpm", 9)]);
        check(Some(&[("rpm", "5"), ("tpm", "9")]), &[("rpm", "5")], &[]);
        // A count beyond the range of i64 still has a difference.
        let huge = "92233720368547758070000";
        check(Some(&[("rpm", huge)]), &[("rpm", "92233720368547758070001")], &[("rpm", 1)]);
        for bad in ["x", "1.5", ""] {
            assert!(consumption(&key(), None, &item(&[("rpm", bad)])).is_err(), "{bad}");
        }
        assert!(consumption(&key(), None, &item(&[("rpm", huge)])).is_err());
        assert!(consumption(&key(), None, &item(&[("9lives", "1")])).is_err());
    }

    #[test]
    fn schedules_of_later_clients_are_seen() {
        let with = |name: &str| Item::from([(name.to_owned(), Value::number(1))]);
        for name in ["sched", "vu", "b_rpm_ws", "b_rpm_rsched"] {
            assert!(has_schedule(&with(name)), "{name}");
        }
        assert!(!has_schedule(&with("b_sched_tk")));
    }
}
