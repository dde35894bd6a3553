//! What a change of a bucket's item says, read from the item before and after.

use zae_limiter_core::{LimitName, Timestamp};

use crate::keys::BucketItemKey;
use crate::value::{Item, Malformed, Value};

const REFILLED_AT: &str = "rf";
const SHARD_COUNT: &str = "shard_count";
const GENERATION: &str = "gn";
/// Schedules by which later clients change what a limit refills, on the item and for one limit.
const SCHEDULES: [&str; 3] = ["sched", "rsched", "vu"];
const LIMIT_SCHEDULES: [&str; 4] = ["_sched", "_rsched", "_ws", "_rsa"];

/// By how much the net consumption of each limit differs, in millitokens. A new item counts from
/// nothing; a limit that is gone takes its count with it. The reserved limit is none of the user's.
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
    // The attributes of a map are in order, and those of buckets' limits stand together.
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
            .map_err(|_| malformed(attribute, "not so far from what it was"))?;
        let limit =
            LimitName::new(limit).map_err(|_| malformed(attribute, "named after a legal limit"))?;
        if difference != 0 {
            differences.push((limit, difference));
        }
    }
    Ok(differences)
}

/// Up to when the item's time has been paid out.
pub fn refilled_at(item: &Item) -> Option<Timestamp> {
    item.get(REFILLED_AT).and_then(Value::as_i64).map(Timestamp::from_millis)
}

/// Into how many shards the item says that its bucket is split.
pub fn shard_count(item: &Item) -> u32 {
    let count = item.get(SHARD_COUNT).and_then(Value::as_i64);
    count.and_then(|count| u32::try_from(count).ok()).unwrap_or(1)
}

/// Whether the limits refill by more than their rates: then only those who know how may refill.
pub fn has_schedule(item: &Item) -> bool {
    let of_limit = |name: &String| {
        name.starts_with("b_") && LIMIT_SCHEDULES.iter().any(|suffix| name.ends_with(suffix))
    };
    SCHEDULES.iter().any(|name| item.contains_key(*name)) || item.keys().any(of_limit)
}

/// Whether the change is one of those of which whoever remembers the item must notice. Those who
/// split a bucket shard by shard, each with its share, say so; those who only raise the count do not.
pub fn is_told_to_others(old: &Item, new: &Item) -> bool {
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
        // A new item, a new limit, a limit that is gone, and the reserved one.
        check(None, &[("rpm", "7000"), ("wcu", "1000")], &[("rpm", 7_000)]);
        check(Some(&[("rpm", "5")]), &[("rpm", "5"), ("tpm", "9")], &[("tpm", 9)]);
        check(Some(&[("rpm", "5"), ("tpm", "9")]), &[("rpm", "5")], &[]);
        // Beyond our type the count goes on, and so does the difference.
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
