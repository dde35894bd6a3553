//! Records beside those of other clients, and what must keep in step with them.
#![allow(clippy::unwrap_used, reason = "a test says what is wrong by panicking")]

mod common;

use std::sync::Arc;

use common::TestTable;
use zae_limiter_core::{
    AuditEvent, AuditSubject, BucketKey, BucketQuery, Config, ConfigLevel, EntityId, Key, Limit,
    LimitSet, Namespace, NamespaceId, NamespaceName, NamespaceStatus, PageRequest, Precondition,
    Query, Record, ResourceList, ResourceName, Scope, Store, StoreErrorKind, Timestamp, Write,
    Written,
};
use zae_limiter_dynamodb::{DynamoOptions, DynamoStore};
use zae_limiter_schema::{
    Action, BucketItemKey, Item, ItemKey, Table as _, Update, Value, parse_key,
};

fn open() -> (Arc<TestTable>, DynamoStore) {
    let table = Arc::new(TestTable::default());
    let store = DynamoStore::new(Arc::clone(&table) as Arc<_>, DynamoOptions::default());
    (table, store)
}

fn ns() -> NamespaceId {
    NamespaceId::new("abcdefghijk").unwrap()
}

fn entity(id: &str) -> EntityId {
    EntityId::new(id).unwrap()
}

fn resource(name: &str) -> ResourceName {
    ResourceName::new(name).unwrap()
}

fn of(id: &str, on: &str) -> ConfigLevel {
    ConfigLevel::EntityResource(entity(id), resource(on))
}

fn config(level: ConfigLevel, limits: &[&str], version: u64) -> Record {
    let limits = limits.iter().map(|name| Limit::per_minute(*name, 10));
    let limits = LimitSet::new(limits).unwrap();
    Record::Config(Config {
        namespace: ns(),
        level,
        limits,
        on_unavailable: None,
        audit_retention_days: None,
        version,
    })
}

fn key(level: ConfigLevel) -> Key {
    Key::Config(ns(), level)
}

async fn write(store: &DynamoStore, batch: &[Write]) -> Written {
    store.write(batch).await.unwrap()
}

fn counts(table: &TestTable) -> Vec<(String, i64)> {
    let item = table.items().remove(&ItemKey::entity_config_resources(&ns())).unwrap_or_default();
    let numbers = item.into_iter().filter_map(|(name, value)| Some((name, value.as_i64()?)));
    numbers.collect()
}

#[tokio::test]
async fn entities_with_limits_are_counted_once_each() {
    let (table, store) = open();
    let put = |level, precondition| Write::Put(config(level, &["rpm"], 1), precondition);
    let delete = |level, precondition| Write::Delete(key(level), precondition);
    let on = |on: &str| (on.to_owned(), 1);
    for (write_, then) in [
        (put(of("a", "gpt"), Precondition::Absent), vec![("gpt".to_owned(), 1)]),
        (put(of("a", "gpt"), Precondition::Always), vec![("gpt".to_owned(), 1)]),
        (put(of("a", "gpt"), Precondition::Version(1)), vec![("gpt".to_owned(), 1)]),
        (put(of("b", "gpt"), Precondition::Always), vec![("gpt".to_owned(), 2)]),
        (put(ConfigLevel::Entity(entity("a")), Precondition::Always), {
            vec![("_default_".to_owned(), 1), ("gpt".to_owned(), 2)]
        }),
        (
            delete(of("x", "gpt"), Precondition::Always),
            vec![on("_default_"), ("gpt".to_owned(), 2)],
        ),
        (delete(of("a", "gpt"), Precondition::Present), vec![on("_default_"), on("gpt")]),
        (delete(of("b", "gpt"), Precondition::Always), vec![on("_default_")]),
        (put(of("b", "GSI4PK"), Precondition::Absent), vec![on("GSI4PK#"), on("_default_")]),
    ] {
        assert_eq!(write(&store, std::slice::from_ref(&write_)).await, Written::Done, "{write_:?}");
        assert_eq!(counts(&table), then, "after {write_:?}");
    }
    // Neither a conflict nor a deletion of nothing counts.
    assert_eq!(
        write(&store, &[put(of("b", "GSI4PK"), Precondition::Absent)]).await,
        Written::Conflict(0)
    );
    store.delete(&[key(of("a", "gpt")), key(of("x", "y"))]).await.unwrap();
    assert_eq!(counts(&table), [on("GSI4PK#"), on("_default_")]);
    let all = [key(of("b", "GSI4PK")), key(ConfigLevel::Entity(entity("a")))];
    store.delete(&all).await.unwrap();
    assert_eq!(counts(&table), []);
}

#[tokio::test]
async fn one_batch_adds_a_resource_and_removes_another() {
    let (_, store) = open();
    let level = |name| ConfigLevel::Resource(resource(name));
    let put = |name| Write::Put(config(level(name), &["rpm"], 1), Precondition::Always);
    assert_eq!(write(&store, &[put("a"), put("b")]).await, Written::Done);
    let delete = Write::Delete(key(level("a")), Precondition::Present);
    assert_eq!(write(&store, &[put("c"), delete]).await, Written::Done);
    let page = PageRequest::first(10);
    let listed = store.list_resources(&ns(), ResourceList::WithDefaults, &page).await.unwrap();
    assert_eq!(listed.items, [resource("b"), resource("c")]);
}

#[tokio::test]
async fn attributes_of_other_clients_stay_on_an_item() {
    let (table, store) = open();
    let system = ItemKey::of(&key(ConfigLevel::System));
    let theirs = [("audit_retention_days", Value::text("a while")), ("theirs", Value::number(1))];
    table.put(&system, &theirs).await;
    let found = store.get(&[key(ConfigLevel::System)]).await.unwrap();
    assert_eq!(found, [Some(config(ConfigLevel::System, &[], 0))]);
    // An item without a version is of version 0.
    let first =
        Write::Put(config(ConfigLevel::System, &["rpm", "tpm"], 1), Precondition::Version(0));
    assert_eq!(write(&store, std::slice::from_ref(&first)).await, Written::Done);
    assert_eq!(write(&store, &[first]).await, Written::Conflict(0));
    let second = Write::Put(config(ConfigLevel::System, &["tpm"], 2), Precondition::Version(1));
    assert_eq!(write(&store, &[second]).await, Written::Done);
    let item = &table.items()[&system];
    for (name, value) in theirs {
        assert_eq!(item[name], value);
    }
    let limits: Vec<&String> = item.keys().filter(|name| name.starts_with("l_")).collect();
    assert_eq!(limits, ["l_tpm_cp", "l_tpm_ra", "l_tpm_rp"]);
}

/// The original sets it on an item that may not even be there, and leaves the version as it is.
#[tokio::test]
async fn the_retention_that_python_sets_is_read_and_kept() {
    let (table, store) = open();
    let system = ItemKey::of(&key(ConfigLevel::System));
    table.put(&system, &[("audit_retention_days", Value::number(30))]).await;
    let read = async || {
        let found = store.get(&[key(ConfigLevel::System)]).await.unwrap().remove(0);
        found.and_then(Record::into_config).unwrap()
    };
    let found = read().await;
    assert_eq!((found.audit_retention_days, found.version), (Some(30), 0));
    let Record::Config(mut next) = config(ConfigLevel::System, &["rpm"], 1) else { unreachable!() };
    next.audit_retention_days = found.audit_retention_days;
    let put = Write::Put(Record::Config(next.clone()), Precondition::Version(0));
    assert_eq!(write(&store, &[put]).await, Written::Done);
    assert_eq!(read().await, next);
    let days = Action::Set("audit_retention_days".to_owned(), Value::number(7));
    let update = Update { key: system, actions: vec![days], conditions: Vec::new() };
    table.update(&update).await.unwrap();
    assert_eq!((read().await.audit_retention_days, read().await.version), (Some(7), 1));
}

#[tokio::test]
async fn audit_events_of_other_clients_are_listed_whatever_their_action() {
    let (table, store) = open();
    let subject = AuditSubject::Entity(entity("a"));
    // Newest first. Python 0.17 writes the first three.
    let actions = ["bucket_topped_up", "bucket_reset", "entity_parent_changed", "limits_frozen"];
    for (at, action) in actions.iter().rev().enumerate() {
        let id = format!("01ARZ3NDEKTSV4RRFFQ69G5FA{at}");
        let key = ItemKey::of(&Key::Audit(ns(), subject.clone(), id.clone()));
        let amounts = Item::from([("rpm".to_owned(), Value::number(7))]);
        let details = Item::from([("amounts".to_owned(), Value::M(amounts))]);
        let attributes = [
            ("entity_id", Value::text("a")),
            ("event_id", Value::S(id)),
            ("timestamp", Value::text("2026-11-15T14:25:36Z")),
            ("action", Value::text(*action)),
            ("principal", Value::Null),
            ("resource", Value::text("gpt-4")),
            ("details", Value::M(details)),
        ];
        table.put(&key, &attributes).await;
    }
    let list = Query::Audit(ns(), subject);
    let listed = store.list(&list, &PageRequest::first(10)).await.unwrap().items;
    let events: Vec<AuditEvent> = listed.into_iter().filter_map(Record::into_audit).collect();
    assert_eq!(events.iter().map(|event| event.action.as_str()).collect::<Vec<_>>(), actions);
    assert!(events.iter().all(|event| event.details["amounts"]["rpm"] == 7));
}

#[tokio::test]
async fn a_conflicting_transaction_is_sent_again() {
    let (table, store) = open();
    let put = [Write::Put(config(of("a", "r"), &["rpm"], 1), Precondition::Absent)];
    *table.collisions.lock().unwrap() = 4;
    assert_eq!(write(&store, &put).await, Written::Done);
    *table.collisions.lock().unwrap() = 100;
    let error = store.delete(&[key(of("a", "r"))]).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Busy);
    assert_eq!(counts(&table), [("r".to_owned(), 1)], "nothing was done");
}

#[tokio::test]
async fn a_batch_names_a_record_once() {
    let (_, store) = open();
    let put = Write::Put(config(of("a", "r"), &["rpm"], 1), Precondition::Always);
    let error = store.write(&[put.clone(), put]).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Rejected);
}

fn bucket() -> BucketKey {
    BucketKey { namespace: ns(), entity: entity("a"), resource: resource("r") }
}

/// Puts shards of a bucket, with so many tokens each.
async fn put_shards(table: &TestTable, shards: impl IntoIterator<Item = u32>, count: i64) {
    for shard in shards {
        let key = BucketItemKey { bucket: bucket(), shard }.item_key();
        let n = Value::number;
        let text = |text: String| Value::S(text);
        table
            .put(
                &key,
                &[
                    ("b_rpm_tk", n(10_000)),
                    ("b_rpm_cp", n(100_000)),
                    ("b_rpm_ra", n(100_000)),
                    ("b_rpm_rp", n(60_000)),
                    ("b_rpm_tc", n(1_000)),
                    ("rf", n(1_000 + i64::from(shard))),
                    ("shard_count", n(count)),
                    ("GSI2PK", text("abcdefghijk/RESOURCE#r".to_owned())),
                    ("GSI2SK", text(format!("BUCKET#a#{shard}"))),
                    ("GSI3PK", text("abcdefghijk/ENTITY#a".to_owned())),
                    ("GSI3SK", text(format!("BUCKET#r#{shard}"))),
                    ("GSI4PK", text("abcdefghijk".to_owned())),
                    ("GSI4SK", text(format!("BUCKET#a#r#{shard}"))),
                ],
            )
            .await;
    }
}

#[tokio::test]
async fn shards_are_one_bucket_in_every_list() {
    let (table, store) = open();
    put_shards(&table, 0..16, 16).await;
    for query in
        [BucketQuery::OfEntity(ns(), entity("a")), BucketQuery::OnResource(ns(), resource("r"))]
    {
        let listed = store.list_buckets(&query, &PageRequest::first(100)).await.unwrap().items;
        assert_eq!(listed.len(), 1);
        let (cell, rate) = listed[0].bucket.cell("rpm").unwrap();
        // Each holds more than its share, which does not count.
        assert_eq!((cell.tokens.get(), rate.capacity().get()), (100_000, 100_000));
        assert_eq!(cell.consumed.get(), 16_000);
    }
    for scope in [Scope::Namespace(ns()), Scope::Entity(ns(), entity("a"))] {
        for size in [1, 2, 5, 100] {
            let mut request = PageRequest::first(size);
            let mut keys = Vec::new();
            loop {
                let page = store.list_keys(&scope, &request).await.unwrap();
                keys.extend(page.items);
                request.after = page.next;
                if request.after.is_none() {
                    break;
                }
            }
            assert_eq!(keys, [Key::Bucket(bucket())], "{scope:?} in pages of {size}");
        }
    }
}

#[tokio::test]
async fn all_shards_of_a_bucket_are_deleted() {
    let bucket = || Key::Bucket(bucket());
    let cases: [(std::ops::Range<u32>, i64); 3] = [(0..1, 1), (0..8, 8), (1..8, 8)];
    for (shards, count) in cases {
        let (table, store) = open();
        put_shards(&table, shards.clone(), count).await;
        store.delete(&[bucket()]).await.unwrap();
        assert_eq!(table.items().len(), 0, "shards {shards:?}");
    }
    let (table, store) = open();
    put_shards(&table, 0..4, 4).await;
    assert_eq!(
        write(&store, &[Write::Delete(bucket(), Precondition::Present)]).await,
        Written::Done
    );
    assert_eq!(table.items().len(), 0);
}

fn namespace(deleted_at: Option<Timestamp>) -> Record {
    let name = NamespaceName::new("prod").unwrap();
    let created_at = Timestamp::from_millis(5_000);
    Record::Namespace(Namespace { id: ns(), name, created_at, deleted_at, is_purging: false })
}

#[tokio::test]
async fn deleting_a_namespace_deletes_items_that_are_no_records() {
    let (table, store) = open();
    let batch = [
        Write::Put(namespace(None), Precondition::Absent),
        Write::Put(config(of("a", "r"), &["rpm"], 1), Precondition::Absent),
        Write::Put(config(ConfigLevel::Resource(resource("r")), &["rpm"], 1), Precondition::Absent),
        Write::Put(config(ConfigLevel::System, &["rpm"], 1), Precondition::Absent),
    ];
    assert_eq!(write(&store, &batch).await, Written::Done);
    let system = "abcdefghijk/SYSTEM#";
    // Items of other clients: one that no index has, and one that is no record.
    table
        .put(&ItemKey::new(system, "#PROVISIONER"), &[("GSI4PK", Value::text("abcdefghijk"))])
        .await;
    let operation = ItemKey::new("abcdefghijk/BUCKET#a#r#0", "#OP#1");
    let indexed = [("GSI4PK", Value::text("abcdefghijk")), ("GSI4SK", Value::text("x"))];
    table.put(&operation, &indexed).await;
    let all = store.list_keys(&Scope::Namespace(ns()), &PageRequest::first(100)).await.unwrap();
    assert_eq!(all.items.len(), 3);
    store.delete(&all.items).await.unwrap();
    let left: Vec<ItemKey> = table.items().into_keys().collect();
    assert_eq!(left.len(), 5, "the registries, two foreign items and the namespace: {left:?}");
    store.delete(&[Key::Namespace(ns())]).await.unwrap();
    assert_eq!(table.items().len(), 0);
}

#[tokio::test]
async fn a_namespace_that_is_being_purged_is_not_recovered() {
    let (table, store) = open();
    let deleted = namespace(Some(Timestamp::from_millis(7_000)));
    assert_eq!(
        write(&store, &[Write::Put(deleted.clone(), Precondition::Absent)]).await,
        Written::Done
    );
    let by_id = ItemKey::of(&Key::Namespace(ns()));
    let mut item: Item = table.items()[&by_id].clone();
    item.insert("status".to_owned(), Value::text("purging"));
    let attributes: Vec<(&str, Value)> =
        item.iter().map(|(name, value)| (name.as_str(), value.clone())).collect();
    table.put(&by_id, &attributes).await;
    let found = store.get(&[Key::Namespace(ns())]).await.unwrap().remove(0);
    let found = found.and_then(Record::into_namespace).unwrap();
    assert_eq!(found.status(), NamespaceStatus::Purging);
    assert_eq!(Record::Namespace(Namespace { is_purging: false, ..found }), deleted);
    let is_deleted = Precondition::Status(NamespaceStatus::Deleted);
    let recover = Write::Put(namespace(None), is_deleted);
    assert_eq!(write(&store, &[recover]).await, Written::Conflict(0));
}

/// Other clients may keep the record of a name and mark it as deleted.
#[tokio::test]
async fn the_name_of_a_deleted_namespace_is_free() {
    for status in ["deleted", "purging"] {
        let (table, store) = open();
        let name = NamespaceName::new("prod").unwrap();
        let record = Record::NamespaceName(name.clone(), ns());
        let left = [
            ("namespace_id", Value::text("AAAAAAAAAAA")),
            ("namespace_name", Value::text("prod")),
            ("status", Value::text(status)),
        ];
        table.put(&ItemKey::of(&record.key()), &left).await;
        assert_eq!(store.get(&[record.key()]).await.unwrap(), [None]);
        let put = Write::Put(record.clone(), Precondition::Absent);
        assert_eq!(write(&store, std::slice::from_ref(&put)).await, Written::Done, "{status}");
        assert_eq!(store.get(&[record.key()]).await.unwrap(), [Some(record)]);
        assert_eq!(write(&store, &[put]).await, Written::Conflict(0));
    }
}

#[tokio::test]
async fn a_name_is_written_as_other_clients_show_it() {
    let (table, store) = open();
    let name = NamespaceName::new("prod").unwrap();
    let batch = [
        Write::Put(Record::NamespaceName(name.clone(), ns()), Precondition::Absent),
        Write::Put(namespace(None), Precondition::Absent),
    ];
    assert_eq!(write(&store, &batch).await, Written::Done);
    let item = &table.items()[&ItemKey::of(&Key::NamespaceName(name))];
    assert_eq!(item["status"], Value::text("active"));
    assert_eq!(item["created_at"], Value::text("1970-01-01T00:00:05Z"));
    for key in table.items().keys() {
        assert!(parse_key(key).is_some());
    }
}

/// The first clients refund to a bucket, or to a limit of it, without checking that it exists.
#[tokio::test]
async fn a_refund_to_a_deleted_bucket_blocks_nothing() {
    let (table, store) = open();
    let key = BucketItemKey { bucket: bucket(), shard: 0 }.item_key();
    let given_back = [("b_rpm_tk", Value::number(5_000)), ("b_rpm_tc", Value::number(-5_000))];
    table.put(&key, &given_back).await;
    let now = Timestamp::from_millis(2_000);
    assert_eq!(store.peek(&[bucket()], now).await.unwrap(), [None]);

    let n = Value::number;
    let whole = [
        ("b_rpm_tk", n(10_000)),
        ("b_rpm_cp", n(100_000)),
        ("b_rpm_ra", n(100_000)),
        ("b_rpm_rp", n(60_000)),
        ("b_gone_tk", n(5_000)),
        ("b_gone_tc", n(-5_000)),
        ("rf", n(1_000)),
    ];
    table.put(&key, &whole).await;
    let found = store.peek(&[bucket()], now).await.unwrap().remove(0).unwrap();
    assert_eq!(
        found.limits().names().iter().map(|name| name.as_str()).collect::<Vec<_>>(),
        ["rpm"]
    );

    // Any other item that lacks an attribute is malformed, not absent.
    table.put(&key, &whole[..6]).await;
    let error = store.peek(&[bucket()], now).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Corrupt);
}
