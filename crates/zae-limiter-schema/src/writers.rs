//! Every writer of a bucket's item, with what it changes and what it pins.
//!
//! A write computed from a snapshot must pin everything it relied on, and other writers must not
//! change anything else unnoticed. Both can only be checked with all writers side by side. A writer
//! that is missing here, or does something else than the list says, fails a test. The page
//! `docs/schema.md` is generated from [`WRITERS`] and [`ATTRIBUTES`].

/// A function of [`bucket`](crate::bucket) that makes a write.
///
/// Attributes are named as on the item, with `*` for the name of a limit and `GSI*` for the keys of
/// all indexes.
#[derive(Clone, Copy, Debug)]
pub struct Writer {
    /// The function in [`bucket`](crate::bucket).
    pub name: &'static str,
    /// One sentence for `docs/schema.md`, in Markdown.
    pub purpose: &'static str,
    /// The attributes that it may change, in groups. See [`changes`](Self::changes).
    groups: &'static [&'static [&'static str]],
    /// The attributes that its conditions may name.
    pub pins: &'static [&'static str],
}

impl Writer {
    /// The attributes that it may change.
    pub fn changes(&self) -> impl Iterator<Item = &'static str> {
        self.groups.iter().copied().flatten().copied()
    }
}

/// The attributes of every shard that our clients create.
const SHARD: &[&str] = &[
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
];

/// The burst that older clients store beside the ceiling.
const BURST: &[&str] = &["b_*_bx"];

/// What only the first of several shards has.
const IDLE: &[&str] = &["idle_s"];

/// What a snapshot of one shard is pinned by.
const SNAPSHOT: &[&str] =
    &["b_*_cp", "b_*_ra", "b_*_rp", "b_*_tk", "gn", "rf", "shard_count", "ttl"];

/// The same for two shards of one transaction, one of which may have to be absent.
const SNAPSHOTS: &[&str] =
    &["PK", "b_*_cp", "b_*_ra", "b_*_rp", "b_*_tk", "gn", "rf", "shard_count", "ttl"];

/// All writers of a bucket.
///
/// An absent bucket counts as a full one, so `delete_together` pins only the counts of shards. Every other
/// writer but `create` and `restore` pins something that an absent item does not have. `restore` pins the
/// shard that the new one was split from.
pub const WRITERS: &[Writer] = &[
    Writer {
        name: "add",
        purpose: "Takes, charges and refunds without moving `rf`.",
        groups: &[&["b_*_tc", "b_*_tk", "b_wcu_tc", "b_wcu_tk", "ttl"]],
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
    Writer {
        name: "restore",
        purpose: "Creates a shard that is missing, with no tokens.",
        groups: &[SHARD, BURST],
        pins: &["PK", "gn", "rf", "shard_count"],
    },
    Writer {
        name: "carry_shard_count",
        purpose: "Raises the count of an existing shard. Only the aggregator does this.",
        groups: &[&["shard_count"]],
        pins: &["PK", "shard_count"],
    },
    Writer {
        name: "create",
        purpose: "Creates the first shard of a bucket: full, less what the request takes.",
        groups: &[SHARD],
        pins: &["PK"],
    },
    Writer {
        name: "delete_together",
        purpose: "Deletes all shards of a bucket in one transaction.",
        // Deleting an item changes no attribute.
        groups: &[],
        pins: &["PK", "shard_count", "shards_seen"],
    },
    Writer {
        name: "refill",
        purpose: "Moves `rf` to now and adds what every limit has earned; takes, charges and refunds.",
        groups: &[&[
            "b_*_rm", "b_*_tc", "b_*_tk", "b_wcu_tc", "b_wcu_tk", "gn", "rf", "rm_at", "ttl",
        ]],
        pins: SNAPSHOT,
    },
    Writer {
        name: "rewind",
        purpose: "Sets an `rf` that a wrong clock has written, far in the future, to now. It grants nothing.",
        groups: &[&["b_*_rm", "b_wcu_tc", "b_wcu_tk", "gn", "rf", "rm_at"]],
        pins: &["gn", "rf"],
    },
    Writer {
        name: "rewrite",
        purpose: "Gives a shard other limits, or starts an expired bucket again.",
        groups: &[SHARD, BURST, IDLE],
        pins: SNAPSHOT,
    },
    Writer {
        name: "split",
        purpose: "Splits one shard in two, in one transaction.",
        groups: &[SHARD, BURST, IDLE],
        pins: SNAPSHOTS,
    },
    Writer {
        name: "merge",
        purpose: "Merges two shards into one, in one transaction.",
        groups: &[SHARD, IDLE, &["shards_seen"]],
        pins: SNAPSHOTS,
    },
];

/// An attribute of a bucket's item, as `docs/schema.md` explains it.
#[derive(Clone, Copy, Debug)]
pub struct Attribute {
    /// Its name, with `*` for the name of a limit and `GSI*` for the keys of all indexes.
    pub name: &'static str,
    /// The unit of a number; the type of anything else.
    pub unit: &'static str,
    /// What it means, in Markdown.
    pub meaning: &'static str,
}

const fn attribute(name: &'static str, unit: &'static str, meaning: &'static str) -> Attribute {
    Attribute { name, unit, meaning }
}

/// Every attribute that [`WRITERS`] name.
pub const ATTRIBUTES: &[Attribute] = &[
    attribute("PK", "text", "The partition key. A condition on it asks whether the item exists."),
    attribute("GSI*", "text", "The keys of the indexes GSI2, GSI3 and GSI4. They never change."),
    attribute(
        "b_*_tk",
        "millitokens",
        "The shard's balance of the limit. It is negative while the shard owes tokens.",
    ),
    attribute(
        "b_*_cp",
        "millitokens",
        "The ceiling of the whole bucket. The shard's share follows from its number and `shard_count`.",
    ),
    attribute(
        "b_*_ra",
        "millitokens",
        "What the whole bucket earns in one period. The shard earns its share.",
    ),
    attribute("b_*_rp", "milliseconds", "The period in which the bucket earns `b_*_ra`."),
    attribute(
        "b_*_tc",
        "millitokens",
        "Net consumption: taken and charged, less refunded. It is never reset. The aggregator books \
         usage from its differences.",
    ),
    attribute(
        "b_*_rm",
        "millitokens × milliseconds",
        "The refill remainder: what was earned beyond the last whole millitoken. Absent is 0. It \
         counts only while `rm_at` equals `rf`.",
    ),
    attribute(
        "b_*_bx",
        "millitokens",
        "The burst of older clients. The ceiling is the larger of `b_*_cp` and this. Our writers \
         only remove it.",
    ),
    attribute(
        "b_wcu_tk",
        "1/1,000 writes",
        "How many writes the shard can still take, of 1,000 a second. The store splits a bucket when \
         this runs low. The limit `wcu` is reserved and invisible to users.",
    ),
    attribute("b_wcu_cp", "1/1,000 writes", "The ceiling of `wcu`: always 1,000,000."),
    attribute("b_wcu_ra", "1/1,000 writes", "What `wcu` earns in one period: always 1,000,000."),
    attribute("b_wcu_rp", "milliseconds", "The period of `wcu`: always 1,000."),
    attribute("b_wcu_tc", "1/1,000 writes", "How many writes the shard has seen."),
    attribute("entity_id", "text", "A copy of the entity's id."),
    attribute("resource", "text", "A copy of the resource's name."),
    attribute(
        "cascade",
        "true or false",
        "Whether an acquire on this entity also takes from its parent.",
    ),
    attribute(
        "parent_id",
        "text or null",
        "The parent that an acquire also takes from. Null without `cascade`.",
    ),
    attribute(
        "rf",
        "epoch milliseconds",
        "The refill time that all limits share: what was earned until then is in the balances. It is \
         also the optimistic lock of a refill.",
    ),
    attribute(
        "rm_at",
        "epoch milliseconds",
        "The `rf` that the remainders belong to. Other clients move `rf` and leave the remainders \
         behind; those are then worth nothing.",
    ),
    attribute(
        "gn",
        "number",
        "The generation. It changes with the limits and with `shard_count`, so one condition pins \
         all of them. Absent is 0; other clients do not write it.",
    ),
    attribute(
        "limits_at",
        "epoch milliseconds",
        "When the client read the stored limits that are on this item. A process with an older \
         copy does not undo them. Absent where a call passed its own limits.",
    ),
    attribute(
        "shard_count",
        "shards",
        "How many shards the bucket has, as far as this shard knows. Shard 0 has the highest count. \
         Absent is 1. A shard whose number is not below its count is retired and holds nothing.",
    ),
    attribute(
        "shards_seen",
        "shards",
        "On shard 0: the highest `shard_count` that the bucket ever had. Deleting the bucket deletes \
         so many shards.",
    ),
    attribute(
        "idle_s",
        "seconds",
        "On shard 0 of several: the idle time after which the bucket expired before its split. Shards do not \
         expire; the merged bucket expires after this time again.",
    ),
    attribute(
        "ttl",
        "epoch seconds",
        "When the item counts as absent, and DynamoDB may delete it. Only buckets on default limits \
         have it, and retired shards (one day). A bucket never expires before it is full.",
    ),
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
        After, Alive, Balances, BucketItem, Expiry, Movement, Owner, ShardPair, Since, add,
        carry_shard_count, create, delete_together, merge, refill, restore, rewind, rewrite, split,
    };
    use crate::{
        Action, BucketItemKey, Change, Condition, Item, SHARD_ZERO, Update, Value, render_update,
    };

    /// The source files below a folder, with their text.
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
            let output = signature.split("->").nth(1).unwrap_or_default();
            output.contains("Update") || output.contains("Change")
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

    /// An update of a bucket that is made elsewhere would be missing from the list.
    #[test]
    fn no_other_module_writes_a_bucket() {
        let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the folder of crates");
        for (path, source) in sources(crates) {
            let is_program = path.iter().any(|part| part == "src");
            let is_testkit = path.iter().any(|part| part == "zae-limiter-testkit");
            if !is_program || is_testkit || is_of_buckets(&path) {
                continue;
            }
            let source = source.split("#[cfg(test)]").next().unwrap_or_default();
            // Such an update needs the bucket's key or the names of its attributes.
            let makes_updates = source.contains("Update {") && source.contains("actions");
            let knows_buckets = source.contains(".item_key()") || source.contains("\"b_");
            assert!(
                !(makes_updates && knows_buckets),
                "{} makes an update of a bucket; make it in bucket.rs, and add it to WRITERS",
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

    fn snapshot(generation: i64, wcu: Option<i64>, expires_at: Option<Timestamp>) -> BucketItem {
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

    /// Movements that fill every limit up to its ceiling.
    fn fill_up(item: &BucketItem) -> Vec<Movement> {
        let full = |movement: Movement| Movement { earned: 2_000_000, ..movement };
        movements(item).into_iter().map(full).collect()
    }

    fn after_of(bucket: &Bucket, shard_count: u32) -> After<'_> {
        let limits_at = Some(Timestamp::from_millis(1));
        After { bucket, whole: bucket.limits(), shard_count, limits_at }
    }

    /// The same item as one of several shards.
    fn shard_of(item: &BucketItem, shard: u32, shard_count: u32) -> BucketItem {
        BucketItem { shard, shard_count, ..item.clone() }
    }

    fn updates(changes: impl IntoIterator<Item = Vec<Change>>) -> Vec<Update> {
        let update = |change| match change {
            Change::Update(update) => update,
            other => panic!("not an update: {other:?}"),
        };
        changes.into_iter().flatten().map(update).collect()
    }

    /// Writes of this writer that together change and pin everything it can.
    fn samples(writer: &str) -> Vec<Update> {
        let parent = EntityId::new("team").expect("an id");
        let (alone, below) = (Owner { parent: None }, Owner { parent: Some(&parent) });
        let (first, later) = (snapshot(0, None, None), snapshot(2, Some(5_000), Some(at(99_000))));
        let whole = BucketItem { has_remainders: false, ..snapshot(2, Some(5_000), None) };
        let other = bucket([Limit::per_minute("rpm", 50), Limit::per_minute("new", 5)]);
        let (forever, after) = (Alive::Forever, Alive::After(at(1_500)));
        let until = Alive::Until(at(1_500));
        let expiring = Expiry::At(at(120_000));
        match writer {
            "add" => {
                let moved = movements(&first);
                let guessed = Since::Guessed(at(900));
                let snapshot = Since::Snapshot(at(1_000), 2);
                vec![
                    add(&key(), &moved, guessed, Expiry::Keep, true, 1, forever),
                    add(&key(), &moved, snapshot, expiring, false, 2, after),
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
                let (retired, origin) = (shard_of(&first, 1, 1), shard_of(&later, 0, 2));
                let after = after_of(&other, 2);
                let made = [None, Some(&retired)].map(|left| {
                    let mut changes = restore(&key(), left, &origin, &after, &below);
                    // The shard it was split from is only checked.
                    let checked = changes.pop();
                    assert!(matches!(checked, Some(Change::Check(_, pins)) if !pins.is_empty()));
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
            "rewind" => vec![rewind(&key(), &first, at(500)), rewind(&key(), &later, at(500))],
            "rewrite" => vec![
                rewrite(
                    &key(),
                    &first,
                    &after_of(&other, 1),
                    &alone,
                    Expiry::Never,
                    Balances::Exact,
                ),
                // One shard again, after it expired in several.
                rewrite(
                    &key(),
                    &shard_of(&later, 0, 4),
                    &after_of(&other, 1),
                    &below,
                    expiring,
                    Balances::Exact,
                ),
                // One of several shards, which do not expire.
                rewrite(
                    &key(),
                    &shard_of(&later, 0, 4),
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
                // The other shard is retired and has other limits.
                let retired = BucketItem {
                    whole: Arc::clone(other.limits()),
                    bucket: other.clone(),
                    ..shard_of(&first, 1, 1)
                };
                let alone = ShardPair { low: &first, high: None };
                let beside = ShardPair { low: &later, high: Some(&retired) };
                let now = at(1_500);
                updates([split(&key(), alone, now), split(&key(), beside, now)])
            }
            "merge" => {
                let (low, high) = (shard_of(&later, 0, 2), shard_of(&later, 1, 2));
                let whole = merge(&key(), ShardPair { low: &low, high: Some(&high) }, at(9_000));
                let alone = merge(&key(), ShardPair { low: &low, high: None }, at(9_000));
                updates(whole.into_iter().chain(alone))
            }
            _ => panic!("{writer} has no samples; add writes that show all it can do"),
        }
    }

    /// The name as on the list: without the names of limits and of indexes.
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
            let changes: BTreeSet<String> = writer.changes().map(str::to_owned).collect();
            let pins: BTreeSet<String> =
                writer.pins.iter().map(|name| (*name).to_owned()).collect();
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
