//! Records are read and written whole, in batches that happen or do not.

use std::collections::BTreeMap;
use std::sync::Arc;

use zae_limiter_core::{
    AuditSubject, BATCH_MAX, BucketQuery, ConfigLevel, Entity, Key, Namespace, NamespaceId,
    NamespaceName, NamespaceStatus, Precondition, Record, Store, Window, Write, Written,
};

use crate::calls::{delete, get, list_buckets, peek, put, take, write};
use crate::given::{
    NOW, bucket, config, config_in, entity, entity_id, entity_in, event, forever, leg, limits,
    namespace, on_resource, per_minute, resource, test_namespace, tokens, usage,
};
use crate::poll::ByHand;

pub async fn records_are_read_in_the_order_of_the_keys(store: Arc<dyn Store>) {
    let records = [
        entity("b", None),
        config(ConfigLevel::System, 1),
        entity("a", Some("b")),
        event(AuditSubject::System, 1),
    ];
    put(&*store, records.clone()).await;
    let keys = [
        records[3].key(),
        entity("missing", None).key(),
        records[0].key(),
        records[1].key(),
        config(ConfigLevel::Resource(resource("missing")), 1).key(),
        records[2].key(),
    ];
    let found = store.get(&keys).await.expect("get must answer");
    let [b, system, a, event] = records.map(Some);
    assert_eq!(found, [event, None, b, system, None, a]);
}

pub async fn bucket_keys_give_no_record(store: Arc<dyn Store>) {
    let target = forever(bucket("a", "r"), &limits([per_minute("rpm", 10)]));
    take(&*store, NOW, [leg(&target, [("rpm", tokens(1))])]).await;
    put(&*store, [entity("a", None)]).await;
    let keys = [Key::Bucket(target.key().clone()), entity("a", None).key()];
    let found = store.get(&keys).await.expect("get must answer");
    assert_eq!(found, [None, Some(entity("a", None))]);
}

pub async fn a_put_replaces_the_whole_record(store: Arc<dyn Store>) {
    let full = Record::Entity(Entity {
        namespace: test_namespace(),
        id: entity_id("a"),
        name: Some("A".into()),
        parent: Some(entity_id("b")),
        cascade: true,
        metadata: BTreeMap::from([("k".into(), "v".into()), ("l".into(), "w".into())]),
        created_at: NOW,
    });
    let bare = entity("a", None);
    for record in [&full, &bare, &full] {
        put(&*store, [record.clone()]).await;
        assert_eq!(get(&*store, record.key()).await.as_ref(), Some(record));
    }
    let wide = config(ConfigLevel::System, 1);
    let Record::Config(mut narrow) = wide.clone() else { unreachable!("a config was made") };
    narrow.limits = zae_limiter_core::LimitSet::clone(&limits([]));
    narrow.on_unavailable = Some(zae_limiter_core::OnUnavailable::Allow);
    narrow.version = 2;
    for record in [wide.clone(), Record::Config(narrow), wide] {
        put(&*store, [record.clone()]).await;
        assert_eq!(get(&*store, record.key()).await, Some(record));
    }
}

fn namespace_with(status: NamespaceStatus) -> Record {
    Record::Namespace(Namespace {
        id: test_namespace(),
        name: namespace_name(),
        created_at: NOW,
        deleted_at: (status != NamespaceStatus::Active).then_some(NOW),
        is_purging: status == NamespaceStatus::Purging,
    })
}

fn namespace_name() -> NamespaceName {
    NamespaceName::new("team").expect("a valid name")
}

fn name_of(id: &NamespaceId) -> Record {
    Record::NamespaceName(namespace_name(), id.clone())
}

pub async fn each_precondition_holds_when_it_should(store: Arc<dyn Store>) {
    let level = ConfigLevel::Resource(resource("r"));
    // What is there, the record that is written, and whether each condition holds.
    let cases = [
        (None, config(level.clone(), 9), "TTffffffff"),
        (Some(config(level.clone(), 3)), config(level, 9), "TfTTffffff"),
        (None, entity("e", None), "TTffffffff"),
        // An entity has neither a version nor a status.
        (Some(entity("e", None)), entity("e", Some("p")), "TfTfffffTf"),
        (Some(entity("e", Some("p"))), entity("e", None), "TfTffffffT"),
        (None, namespace_with(NamespaceStatus::Active), "TTffffffff"),
        (
            Some(namespace_with(NamespaceStatus::Active)),
            namespace_with(NamespaceStatus::Deleted),
            "TfTffTffff",
        ),
        (
            Some(namespace_with(NamespaceStatus::Deleted)),
            namespace_with(NamespaceStatus::Active),
            "TfTfffTfff",
        ),
        (
            Some(namespace_with(NamespaceStatus::Purging)),
            namespace_with(NamespaceStatus::Deleted),
            "TfTfffffff",
        ),
        (None, name_of(&namespace(2)), "TTffffffff"),
        (Some(name_of(&test_namespace())), name_of(&namespace(2)), "TfTffffTff"),
        (Some(name_of(&namespace(2))), name_of(&test_namespace()), "TfTfffffff"),
    ];
    let conditions = [
        Precondition::Always,
        Precondition::Absent,
        Precondition::Present,
        Precondition::Version(3),
        Precondition::Version(4),
        Precondition::Status(NamespaceStatus::Active),
        Precondition::Status(NamespaceStatus::Deleted),
        Precondition::NameOf(test_namespace()),
        Precondition::Parent(None),
        Precondition::Parent(Some(entity_id("p"))),
    ];
    for (there, record, expected) in cases {
        for (precondition, letter) in conditions.iter().cloned().zip(expected.chars()) {
            let holds = letter == 'T';
            let key = record.key();
            let writes = [
                Write::Put(record.clone(), precondition.clone()),
                Write::Delete(key.clone(), precondition.clone()),
                Write::Check(key.clone(), precondition),
            ];
            for change in writes {
                delete(&*store, [key.clone()]).await;
                put(&*store, there.clone()).await;
                let expected = match (&change, holds) {
                    (Write::Put(record, _), true) => Some(record.clone()),
                    (Write::Delete(..), true) => None,
                    _ => there.clone(),
                };
                let written = write(&*store, std::slice::from_ref(&change)).await;
                let answer = if holds { Written::Done } else { Written::Conflict(0) };
                assert_eq!(written, answer, "{change:?} where {there:?} is");
                let found = get(&*store, key.clone()).await;
                assert_eq!(found, expected, "after {change:?} where {there:?} was");
            }
        }
    }
}

pub async fn a_conflict_names_its_place_and_changes_nothing(store: Arc<dyn Store>) {
    let there = [entity("kept", None), config(ConfigLevel::System, 5)];
    put(&*store, there.clone()).await;
    let new = [entity("x", None), entity("y", None), event(AuditSubject::System, 1)];
    let mut batch: Vec<Write> =
        new.iter().cloned().map(|record| Write::Put(record, Precondition::Absent)).collect();
    batch.push(Write::Delete(there[0].key(), Precondition::Present));
    let unmet = [
        Write::Put(entity("kept", Some("x")), Precondition::Absent),
        Write::Put(config(ConfigLevel::System, 7), Precondition::Version(6)),
        Write::Delete(entity("missing", None).key(), Precondition::Present),
        Write::Check(config(ConfigLevel::System, 0).key(), Precondition::Version(4)),
        Write::Check(entity("missing", None).key(), Precondition::Present),
    ];
    for unmet in unmet {
        for place in 0..=batch.len() {
            let mut batch = batch.clone();
            batch.insert(place, unmet.clone());
            // No key twice: the entity that is to be deleted is not also put.
            if matches!(&unmet, Write::Put(record, _) if record.key() == there[0].key()) {
                batch.retain(|write| !matches!(write, Write::Delete(..)));
            }
            let place = batch.iter().position(|write| *write == unmet).expect("it is there");
            let written = write(&*store, &batch).await;
            assert_eq!(written, Written::Conflict(place), "{unmet:?} at {place}");
            for record in &new {
                assert_eq!(get(&*store, record.key()).await, None, "{unmet:?} at {place}");
            }
            for record in &there {
                let found = get(&*store, record.key()).await;
                assert_eq!(found.as_ref(), Some(record), "{unmet:?} at {place}");
            }
        }
    }
}

pub async fn a_batch_of_all_kinds_of_writes_is_made_together(store: Arc<dyn Store>) {
    put(&*store, [entity("old", None), entity("parent", None), config(ConfigLevel::System, 1)])
        .await;
    let batch = [
        Write::Check(entity("parent", None).key(), Precondition::Present),
        Write::Put(entity("new", Some("parent")), Precondition::Absent),
        Write::Delete(entity("old", None).key(), Precondition::Present),
        Write::Check(entity("stranger", None).key(), Precondition::Absent),
        Write::Put(config(ConfigLevel::System, 2), Precondition::Version(1)),
        Write::Put(event(AuditSubject::System, 1), Precondition::Always),
        Write::Delete(entity("missing", None).key(), Precondition::Always),
    ];
    assert_eq!(write(&*store, &batch).await, Written::Done);
    for (record, there) in [
        (entity("parent", None), true),
        (entity("new", Some("parent")), true),
        (entity("old", None), false),
        (entity("stranger", None), false),
        (config(ConfigLevel::System, 2), true),
        (event(AuditSubject::System, 1), true),
    ] {
        let found = get(&*store, record.key()).await;
        assert_eq!(found, there.then_some(record), "after the batch");
    }
    assert_eq!(write(&*store, &batch).await, Written::Conflict(1), "it was made once");
}

pub async fn a_full_batch_is_written_and_read(store: Arc<dyn Store>) {
    let records: Vec<Record> =
        (0..BATCH_MAX).map(|n| entity(&format!("e-{n}"), Some("parent"))).collect();
    let batch: Vec<Write> =
        records.iter().cloned().map(|record| Write::Put(record, Precondition::Absent)).collect();
    assert_eq!(write(&*store, &batch).await, Written::Done);
    let keys: Vec<Key> = records.iter().map(Record::key).collect();
    let found = store.get(&keys).await.expect("get must answer");
    assert_eq!(found, records.into_iter().map(Some).collect::<Vec<_>>());
    let checks: Vec<Write> =
        keys.into_iter().map(|key| Write::Delete(key, Precondition::Present)).collect();
    assert_eq!(write(&*store, &checks).await, Written::Done);
    assert_eq!(write(&*store, &checks[..1]).await, Written::Conflict(0), "all are deleted");
}

pub async fn an_empty_batch_is_no_error(store: Arc<dyn Store>) {
    assert_eq!(write(&*store, &[]).await, Written::Done);
    assert_eq!(store.get(&[]).await.expect("get must answer"), []);
    delete(&*store, []).await;
}

pub async fn deleting_ignores_missing_keys(store: Arc<dyn Store>) {
    let target = forever(bucket("a", "r"), &limits([per_minute("rpm", 10)]));
    take(&*store, NOW, [leg(&target, [("rpm", tokens(1))])]).await;
    let there: Vec<Record> = (0..60).map(|n| entity(&format!("e-{n}"), None)).collect();
    put(&*store, there.clone()).await;
    put(&*store, [entity("kept", None)]).await;
    let mut keys = vec![
        entity("missing", None).key(),
        Key::Bucket(target.key().clone()),
        Key::Bucket(bucket("missing", "r")),
        config(ConfigLevel::System, 1).key(),
        usage("missing", "r", Window::Daily, NOW).key(),
    ];
    keys.extend(there.iter().map(Record::key));
    for time in ["first", "second"] {
        delete(&*store, keys.clone()).await;
        for record in &there {
            assert_eq!(get(&*store, record.key()).await, None, "the {time} time");
        }
        assert_eq!(peek(&*store, target.key(), NOW).await, None, "the {time} time");
        assert!(get(&*store, entity("kept", None).key()).await.is_some(), "the {time} time");
    }
}

pub async fn a_deleted_bucket_is_full_again(store: Arc<dyn Store>) {
    let target = forever(bucket("a", "r"), &limits([per_minute("rpm", 10)]));
    take(&*store, NOW, [leg(&target, [("rpm", tokens(10))])]).await;
    delete(&*store, [Key::Bucket(target.key().clone())]).await;
    assert_eq!(peek(&*store, target.key(), NOW).await, None);
    let query = BucketQuery::OfEntity(test_namespace(), entity_id("a"));
    assert_eq!(list_buckets(&*store, query).await, []);
    let taken = take(&*store, NOW, [leg(&target, [("rpm", tokens(10))])]).await;
    assert_eq!(taken[0].left[..], [tokens(0)]);
}

pub async fn keys_of_different_kinds_never_collide(store: Arc<dyn Store>) {
    let elsewhere = namespace(2);
    let name = NamespaceName::new("x").unwrap();
    let records = [
        entity("x", None),
        entity("X", None),
        entity_in(&elsewhere, "x", Some("p")),
        config(ConfigLevel::System, 1),
        config_in(&elsewhere, ConfigLevel::System, 2),
        config(ConfigLevel::Resource(resource("x")), 3),
        config(ConfigLevel::Entity(entity_id("x")), 4),
        config(on_resource("x", "x"), 5),
        config(on_resource("x", "x:x"), 6),
        config(on_resource("x:x", "x"), 7),
        event(AuditSubject::System, 1),
        event(AuditSubject::Resource(resource("x")), 1),
        event(AuditSubject::Entity(entity_id("x")), 1),
        usage("x", "x", Window::Daily, NOW),
        usage("x", "x:x", Window::Daily, NOW),
        usage("x:x", "x", Window::Daily, NOW),
        usage("x", "x", Window::Monthly, NOW),
        Record::NamespaceName(name.clone(), test_namespace()),
        Record::Namespace(Namespace {
            id: test_namespace(),
            name,
            created_at: NOW,
            deleted_at: None,
            is_purging: false,
        }),
    ];
    put(&*store, records.clone()).await;
    for record in &records {
        assert_eq!(get(&*store, record.key()).await.as_ref(), Some(record));
    }
    // Each goes alone.
    for deleted in 0..records.len() {
        delete(&*store, [records[deleted].key()]).await;
        for (number, record) in records.iter().enumerate() {
            let found = get(&*store, record.key()).await.is_some();
            assert_eq!(found, number > deleted, "{record:?} after {:?} went", records[deleted]);
        }
    }
}

pub async fn a_dropped_batch_is_written_whole_or_not_at_all(store: Arc<dyn Store>) {
    for run in 0..20 {
        let records: Vec<_> = (0..10).map(|n| entity(&format!("e-{run}-{n}"), None)).collect();
        let batch: Vec<Write> = records
            .iter()
            .cloned()
            .map(|record| Write::Put(record, Precondition::Absent))
            .collect();
        let mut call = ByHand::new(store.write(&batch));
        let _ = call.poll();
        drop(call);
        let keys: Vec<Key> = records.iter().map(Record::key).collect();
        for _ in 0..20 {
            let found = store.get(&keys).await.expect("get must answer");
            let there = found.iter().flatten().count();
            assert!(there == 0 || there == 10, "{there} of 10 records of a batch were written");
            tokio::task::yield_now().await;
        }
    }
}
