//! Every writer of a bucket's item, with what it changes and what it pins.
//!
//! A write that was computed from remembered state must pin all it relied on, and whoever remembers
//! must notice what others change. Both can only be seen with all writers side by side, so a writer
//! that is not on this list, or does something else than the list says, fails a test.

/// A function of [`bucket`](crate::bucket) that makes a write.
///
/// Attributes are named as on the item, with `*` for the name of a limit and `GSI*` for the keys of
/// all indexes.
#[derive(Clone, Copy, Debug)]
pub struct Writer {
    /// The function.
    pub name: &'static str,
    /// The attributes that it may change.
    pub changes: &'static [&'static str],
    /// The attributes that its conditions may name.
    pub pins: &'static [&'static str],
}

/// Everything that a shard consists of.
const ALL: &[&str] = &[
    "GSI*",
    "b_*_bx",
    "b_*_cp",
    "b_*_ra",
    "b_*_rm",
    "b_*_rp",
    "b_*_tc",
    "b_*_tk",
    "b_wcu_cp",
    "b_wcu_ra",
    "b_wcu_rp",
    "b_wcu_tc",
    "b_wcu_tk",
    "cascade",
    "entity_id",
    "gn",
    "limits_at",
    "parent_id",
    "resource",
    "rf",
    "rm_at",
    "shard_count",
    "ttl",
];

/// The same, and what the first shard remembers.
const ALL_AND_LIFE: &[&str] = &[
    "GSI*",
    "b_*_bx",
    "b_*_cp",
    "b_*_ra",
    "b_*_rm",
    "b_*_rp",
    "b_*_tc",
    "b_*_tk",
    "b_wcu_cp",
    "b_wcu_ra",
    "b_wcu_rp",
    "b_wcu_tc",
    "b_wcu_tk",
    "cascade",
    "entity_id",
    "gn",
    "idle_s",
    "limits_at",
    "parent_id",
    "resource",
    "rf",
    "rm_at",
    "shard_count",
    "ttl",
];

/// All of them. Besides, a bucket is deleted as a whole, which pins nothing but the count of its shards: an
/// absent bucket is a full one, and every other writer but `create` and `restore` pins something that an
/// absent item does not have. `restore` pins the shard that the new one was split from.
pub const WRITERS: &[Writer] = &[
    Writer {
        name: "add",
        changes: &["b_*_tc", "b_*_tk", "b_wcu_tc", "b_wcu_tk", "ttl"],
        pins: &[
            "b_*_cp",
            "b_*_ra",
            "b_*_rp",
            "b_*_tk",
            "b_wcu_tk",
            "gn",
            "rf",
            "shard_count",
            "ttl",
        ],
    },
    Writer { name: "restore", changes: ALL, pins: &["PK", "gn", "rf", "shard_count"] },
    Writer { name: "carry_shard_count", changes: &["shard_count"], pins: &["PK", "shard_count"] },
    Writer {
        name: "create",
        changes: &[
            "GSI*",
            "b_*_cp",
            "b_*_ra",
            "b_*_rm",
            "b_*_rp",
            "b_*_tc",
            "b_*_tk",
            "b_wcu_cp",
            "b_wcu_ra",
            "b_wcu_rp",
            "b_wcu_tc",
            "b_wcu_tk",
            "cascade",
            "entity_id",
            "gn",
            "limits_at",
            "parent_id",
            "resource",
            "rf",
            "rm_at",
            "shard_count",
            "ttl",
        ],
        pins: &["PK"],
    },
    // Deletes all of it, which is no change of an attribute.
    Writer { name: "delete_together", changes: &[], pins: &["PK", "shard_count", "shards_seen"] },
    Writer {
        name: "refill",
        changes: &[
            "b_*_rm", "b_*_tc", "b_*_tk", "b_wcu_tc", "b_wcu_tk", "gn", "rf", "rm_at", "ttl",
        ],
        pins: &["b_*_cp", "b_*_ra", "b_*_rp", "b_*_tk", "gn", "rf", "shard_count", "ttl"],
    },
    Writer {
        name: "rewrite",
        changes: ALL_AND_LIFE,
        pins: &["b_*_cp", "b_*_ra", "b_*_rp", "b_*_tk", "gn", "rf", "shard_count", "ttl"],
    },
    Writer {
        name: "split",
        changes: ALL_AND_LIFE,
        pins: &["PK", "b_*_cp", "b_*_ra", "b_*_rp", "b_*_tk", "gn", "rf", "shard_count", "ttl"],
    },
    Writer {
        name: "merge",
        changes: &[
            "GSI*",
            "b_*_cp",
            "b_*_ra",
            "b_*_rm",
            "b_*_rp",
            "b_*_tc",
            "b_*_tk",
            "b_wcu_cp",
            "b_wcu_ra",
            "b_wcu_rp",
            "b_wcu_tc",
            "b_wcu_tk",
            "cascade",
            "entity_id",
            "gn",
            "idle_s",
            "limits_at",
            "parent_id",
            "resource",
            "rf",
            "rm_at",
            "shard_count",
            "shards_seen",
            "ttl",
        ],
        pins: &["PK", "b_*_cp", "b_*_ra", "b_*_rp", "b_*_tk", "gn", "rf", "shard_count", "ttl"],
    },
];

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::{Path, PathBuf};
    use std::sync::Arc;

    use zae_limiter_core::{
        Bucket, BucketKey, Cell, EntityId, Limit, LimitSet, Millitokens, NamespaceId, ResourceName,
        Timestamp,
    };

    use super::*;
    use crate::bucket::{
        After, Alive, Balances, BucketItem, Expiry, Halves, Movement, Owner, Since, add,
        carry_shard_count, create, delete_together, merge, refill, restore, rewrite, split,
    };
    use crate::{
        Action, BucketItemKey, Change, Condition, Item, SHARD_ZERO, Update, Value, render_update,
    };

    /// The source files below a folder, with what they say.
    fn sources(folder: &Path) -> Vec<(PathBuf, String)> {
        let mut found = Vec::new();
        for entry in std::fs::read_dir(folder).expect("a folder of sources") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                found.extend(sources(&path));
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = std::fs::read_to_string(&path).expect("a source");
                found.push((path, text));
            }
        }
        found
    }

    /// The functions of a source that make updates.
    fn makers(source: &str) -> BTreeSet<String> {
        let functions = source.split("\npub fn ").skip(1);
        let makes = |function: &&str| {
            let signature = function.split('{').next().unwrap_or_default();
            let answer = signature.split("->").nth(1).unwrap_or_default();
            answer.contains("Update") || answer.contains("Change")
        };
        let name =
            |function: &str| function.split(['(', '<']).next().unwrap_or_default().to_owned();
        functions.filter(makes).map(name).collect()
    }

    fn is_of_buckets(path: &Path) -> bool {
        path.iter().any(|part| part.to_string_lossy().starts_with("bucket"))
    }

    #[test]
    fn every_function_that_writes_a_bucket_is_on_the_list() {
        let own = sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"));
        let files = own.iter().filter(|(path, _)| is_of_buckets(path));
        let written: BTreeSet<String> = files.flat_map(|(_, source)| makers(source)).collect();
        let listed: BTreeSet<String> =
            WRITERS.iter().map(|writer| writer.name.to_owned()).collect();
        assert_eq!(written, listed);
    }

    /// Who makes an update of a bucket elsewhere escapes the list.
    #[test]
    fn no_bucket_is_written_behind_the_list() {
        let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the folder of crates");
        for (path, source) in sources(crates) {
            let is_program = path.iter().any(|part| part == "src");
            let is_testkit = path.iter().any(|part| part == "zae-limiter-testkit");
            if !is_program || is_testkit || is_of_buckets(&path) {
                continue;
            }
            let source = source.split("#[cfg(test)]").next().unwrap_or_default();
            // Its key, or the names of its attributes, are what such an update cannot do without.
            let makes_updates = source.contains("Update {") && source.contains("actions");
            let knows_buckets = source.contains(".item_key()") || source.contains("\"b_");
            assert!(
                !(makes_updates && knows_buckets),
                "{} makes an update of a bucket; make it in bucket.rs, and put it on the list",
                path.display()
            );
        }
    }

    fn at(millis: i64) -> Timestamp {
        Timestamp::from_millis(millis)
    }

    fn key() -> BucketItemKey {
        let bucket = BucketKey {
            namespace: NamespaceId::new("abcdefghijk").expect("an id"),
            entity: EntityId::new("key-1").expect("an id"),
            resource: ResourceName::new("gpt-4").expect("a name"),
        };
        BucketItemKey { bucket, shard: SHARD_ZERO }
    }

    /// A bucket of two limits, one of them all but full, with remainders.
    fn bucket(limits: [Limit; 2]) -> Bucket {
        let limits = LimitSet::new(limits).expect("limits");
        let cells = limits.rates().iter().enumerate().map(|(place, rate)| Cell {
            tokens: Millitokens::new(if place == 0 { rate.capacity().get() - 1 } else { 5_000 }),
            remainder: 7,
            ..Cell::default()
        });
        let cells: Vec<Cell> = cells.collect();
        Bucket::from_parts(Arc::new(limits), cells, at(1_000))
    }

    fn known(generation: i64, wcu: Option<i64>, expires_at: Option<Timestamp>) -> BucketItem {
        let bucket = bucket([Limit::per_minute("rpm", 100), Limit::per_day("tpm", 1_000)]);
        BucketItem {
            shard: 0,
            whole: Arc::clone(bucket.limits()),
            bucket,
            wcu,
            generation,
            writes: 0,
            shard_count: 1,
            shards_seen: 1,
            parent: None,
            expires_at,
            idle_s: expires_at.map(|_| 60),
            limits_at: expires_at.map(|_| at(500)),
            has_remainders: true,
            is_remnant: false,
        }
    }

    fn movements(item: &BucketItem) -> Vec<Movement> {
        let limits = item.bucket.limits().iter();
        let moved = limits.map(|(name, rate)| Movement {
            taken: 2_000,
            credited: 1_000,
            earned: 100,
            remainder: 3,
            least_left: Some(500),
            ..Movement::none(name.clone(), *rate, *rate)
        });
        moved.collect()
    }

    /// So that nothing is left over beyond the ceilings.
    fn fill_up(item: &BucketItem) -> Vec<Movement> {
        let full = |movement: Movement| Movement { earned: 2_000_000, ..movement };
        movements(item).into_iter().map(full).collect()
    }

    fn after_of(bucket: &Bucket, shard_count: u32) -> After<'_> {
        let limits_at = Some(Timestamp::from_millis(1));
        After { bucket, whole: bucket.limits(), shard_count, limits_at }
    }

    /// The same item as one of several shards.
    fn parted(item: &BucketItem, shard: u32, shard_count: u32) -> BucketItem {
        BucketItem { shard, shard_count, ..item.clone() }
    }

    fn updates(changes: impl IntoIterator<Item = Vec<Change>>) -> Vec<Update> {
        let update = |change| match change {
            Change::Update(update) => update,
            other => panic!("not an update: {other:?}"),
        };
        changes.into_iter().flatten().map(update).collect()
    }

    /// Writes of that kind which together show all that it can do.
    fn samples(writer: &str) -> Vec<Update> {
        let parent = EntityId::new("team").expect("an id");
        let (alone, below) = (Owner { parent: None }, Owner { parent: Some(&parent) });
        let (first, later) = (known(0, None, None), known(2, Some(5_000), Some(at(99_000))));
        let whole = BucketItem { has_remainders: false, ..known(2, Some(5_000), None) };
        let other = bucket([Limit::per_minute("rpm", 50), Limit::per_minute("new", 5)]);
        let (forever, after) = (Alive::Forever, Alive::After(at(1_500)));
        let until = Alive::Until(at(1_500));
        let expiring = Expiry::At(at(120_000));
        match writer {
            "add" => {
                let moved = movements(&first);
                let guessed = Since::Guessed(at(900));
                let known = Since::Known(at(1_000), 2);
                vec![
                    add(&key(), &moved, guessed, Expiry::Keep, true, 1, forever),
                    add(&key(), &moved, known, expiring, false, 2, after),
                ]
                .into_iter()
                .flatten()
                .collect()
            }
            "create" => vec![
                create(&key(), &after_of(&first.bucket, 1), &alone, Expiry::Never),
                create(&key(), &after_of(&first.bucket, 1), &below, expiring),
            ],
            "refill" => vec![
                refill(&key(), &first, &movements(&first), Expiry::Keep, forever, at(2_000)),
                // At the same moment, so that a remainder is dropped without the time being moved.
                refill(&key(), &later, &movements(&later), expiring, after, at(1_000)),
                // Full before and after, as most buckets are.
                refill(&key(), &whole, &fill_up(&whole), expiring, until, at(2_000)),
            ],
            "restore" => {
                let (retired, origin) = (parted(&first, 1, 1), parted(&later, 0, 2));
                let after = after_of(&other, 2);
                let made = [None, Some(&retired)].map(|left| {
                    let mut changes = restore(&key(), left, &origin, &after, &below);
                    // The other one is only looked at.
                    let looked_at = changes.pop();
                    assert!(matches!(looked_at, Some(Change::Check(_, pins)) if !pins.is_empty()));
                    changes
                });
                updates(made)
            }
            "carry_shard_count" => vec![carry_shard_count(&key(), 4)],
            "delete_together" => {
                let item = |count| Item::from([("shard_count".to_owned(), Value::number(count))]);
                let further = [BucketItemKey { shard: 1, ..key() }.item_key()];
                let firsts = [None, Some(Item::new()), Some(item(2))];
                let deleted = firsts
                    .iter()
                    .flat_map(|first| delete_together(&key().bucket, first.as_ref(), &further));
                let pinned = deleted.map(|change| Update {
                    key: change.key().clone(),
                    actions: Vec::new(),
                    conditions: change.conditions().to_vec(),
                });
                pinned.collect()
            }
            "rewrite" => vec![
                rewrite(
                    &key(),
                    &first,
                    &after_of(&other, 1),
                    &alone,
                    Expiry::Never,
                    Balances::Exact,
                ),
                // Whole again after it had expired in several shards.
                rewrite(
                    &key(),
                    &parted(&later, 0, 4),
                    &after_of(&other, 1),
                    &below,
                    expiring,
                    Balances::Exact,
                ),
                // One of several shards, which do not expire.
                rewrite(
                    &key(),
                    &parted(&later, 0, 4),
                    &after_of(&later.bucket, 4),
                    &alone,
                    expiring,
                    Balances::Within(&movements(&later), after),
                ),
                // Alive: the balance that no ceiling cuts is not pinned.
                rewrite(
                    &key(),
                    &later,
                    &after_of(&later.bucket, 1),
                    &alone,
                    expiring,
                    Balances::Within(&movements(&later), until),
                ),
            ],
            "split" => {
                // Beside a shard that was merged with this one, under other limits.
                let retired = BucketItem {
                    whole: Arc::clone(other.limits()),
                    bucket: other.clone(),
                    ..parted(&first, 1, 1)
                };
                let alone = Halves { low: &first, high: None };
                let beside = Halves { low: &later, high: Some(&retired) };
                let now = at(1_500);
                updates([split(&key(), alone, now), split(&key(), beside, now)])
            }
            "merge" => {
                let (low, high) = (parted(&later, 0, 2), parted(&later, 1, 2));
                let whole = merge(&key(), Halves { low: &low, high: Some(&high) }, at(9_000));
                let alone = merge(&key(), Halves { low: &low, high: None }, at(9_000));
                updates(whole.into_iter().chain(alone))
            }
            _ => panic!("{writer} has no samples: show here all that it can do"),
        }
    }

    /// As on the list: without the names of limits and of indexes.
    fn general(name: &str) -> String {
        let of_limit = name.strip_prefix("b_").and_then(|name| name.rsplit_once('_'));
        match of_limit {
            Some(("wcu", _)) | None if name.starts_with("GSI") => "GSI*".to_owned(),
            Some(("wcu", _)) | None => name.to_owned(),
            Some((_, suffix)) => format!("b_*_{suffix}"),
        }
    }

    fn named(condition: &Condition) -> Vec<&str> {
        match condition {
            Condition::Exists(name)
            | Condition::Absent(name)
            | Condition::Equal(name, _)
            | Condition::AtLeast(name, _)
            | Condition::AtMost(name, _) => vec![name],
            Condition::Any(conditions) => conditions.iter().flat_map(named).collect(),
        }
    }

    #[test]
    fn writers_change_and_pin_what_the_list_says() {
        for writer in WRITERS {
            let samples = samples(writer.name);
            let changed = samples.iter().flat_map(|update| &update.actions).map(Action::attribute);
            let pinned = samples.iter().flat_map(|update| &update.conditions).flat_map(named);
            let changed: BTreeSet<String> = changed.map(general).collect();
            let pinned: BTreeSet<String> = pinned.map(general).collect();
            let listed = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
            let (changes, pins): (BTreeSet<String>, BTreeSet<String>) =
                (listed(writer.changes), listed(writer.pins));
            assert_eq!(changed, changes, "what {} changes", writer.name);
            assert_eq!(pinned, pins, "what {} pins", writer.name);
        }
    }

    #[test]
    fn what_is_sent() {
        for writer in WRITERS {
            let rendered: Vec<String> = samples(writer.name)
                .iter()
                .map(|update| {
                    let rendered = render_update(&update.actions, &update.conditions);
                    format!(
                        "{}\n  IF {}\n  {:?}",
                        rendered.update, rendered.condition, rendered.names
                    )
                })
                .collect();
            insta::assert_snapshot!(writer.name, rendered.join("\n\n"));
        }
    }
}
