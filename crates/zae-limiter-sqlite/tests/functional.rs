//! Every method of the store, on one file.
#![allow(clippy::unwrap_used, reason = "only tests are here")]

mod common;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use common::*;
use zae_limiter_core::{
    Admission, AuditAction, AuditEvent, AuditSubject, BucketQuery, Config, ConfigLevel, Cursor,
    Entity, Key, Leg, Lifetime, Limit, LimitName, LimitSet, Millitokens, Namespace, NamespaceName,
    OnUnavailable, Page, PageRequest, Plan, Precondition, Query, Record, ResourceList, Scope,
    Store, StoreError, StoreErrorKind, Target, Timestamp, Usage, UsageKey, UsageSettings, Window,
    Write, Written,
};
use zae_limiter_sqlite::{SqliteOptions, SqliteStore};

fn open() -> (Folder, SqliteStore) {
    let folder = Folder::new();
    let store = SqliteStore::open(folder.file()).unwrap();
    (folder, store)
}

#[tokio::test]
async fn tokens_that_were_taken_refill_with_time() {
    let (_folder, store) = open();
    let bucket = target("key-1", 60);
    assert!(take(&store, &plan(&bucket, 60)).await);
    match store.acquire(&plan(&bucket, 1)).await.unwrap() {
        Admission::Refused(statuses) => {
            assert_eq!(statuses.len(), 1);
            assert_eq!(statuses[0].retry_after, Duration::from_secs(60));
        }
        taken => panic!("{taken:?}"),
    }
    assert_eq!(tokens(&store, &bucket, NOW).await, Some(0));
    let just_before = Timestamp::from_millis(at(60).as_millis() - 1);
    assert!(!take(&store, &plan_at(just_before, &[(&bucket, 1)])).await);
    assert!(take(&store, &plan_at(at(60), &[(&bucket, 1)])).await);
}

#[tokio::test]
async fn a_chain_takes_from_all_buckets_or_from_none() {
    let (_folder, store) = open();
    let (child, parent) = (target("child", 10), target("parent", 5));
    let both = |tokens| plan_at(NOW, &[(&child, tokens), (&parent, tokens)]);
    assert!(take(&store, &both(5)).await);
    match store.acquire(&both(1)).await.unwrap() {
        Admission::Refused(statuses) => assert_eq!(statuses.len(), 2),
        taken => panic!("{taken:?}"),
    }
    assert_eq!(tokens(&store, &child, NOW).await, Some(5));
    assert_eq!(tokens(&store, &parent, NOW).await, Some(0));
}

#[tokio::test]
async fn a_refused_plan_changes_nothing() {
    let (folder, store) = open();
    let bucket = target("key-1", 10);
    let absent = target("key-2", 10);
    assert!(take(&store, &plan(&bucket, 10)).await);
    let before = peek(&store, &bucket, NOW).await;
    // Other limits, a later time, another hour: each of them would change the row.
    let other = Target::new(
        bucket.key().clone(),
        limits([Limit::per_minute("rpm", 1), Limit::per_day("tpd", 3)]),
        Lifetime::Idle(Duration::from_secs(1)),
    );
    let later = plan_at(at(3_600), &[(&Arc::new(other), 1), (&absent, 11)]);
    assert!(!take(&store, &later).await);
    assert_eq!(peek(&store, &bucket, NOW).await, before);
    assert_eq!(peek(&store, &absent, NOW).await, None);
    drop(store);
    let store = SqliteStore::open(folder.file()).unwrap();
    assert_eq!(peek(&store, &bucket, NOW).await, before);
    assert!(!take(&store, &plan(&bucket, 1)).await);
}

#[tokio::test]
async fn completed_calls_survive_reopening() {
    let (folder, store) = open();
    let bucket = target("key-1", 10);
    assert!(take(&store, &plan(&bucket, 7)).await);
    drop(store);
    let store = SqliteStore::open(folder.file()).unwrap();
    assert_eq!(tokens(&store, &bucket, NOW).await, Some(3));
    assert!(!take(&store, &plan(&bucket, 4)).await);
    drop(store);
    assert!(is_sound(&folder.file()));
    assert!(!folder.path().join("limits.db-wal").exists(), "the last handle removes the log");
}

#[tokio::test]
async fn settling_charges_and_refunds() {
    let (_folder, store) = open();
    let (bucket, absent) = (target("key-1", 10), target("key-2", 10));
    assert!(take(&store, &plan(&bucket, 5)).await);
    store.settle(&[refund(&absent, 1)], NOW).await.unwrap();
    assert_eq!(tokens(&store, &absent, NOW).await, None);
    store.settle(&[charge(&bucket, 20), charge(&absent, 1)], NOW).await.unwrap();
    assert_eq!(tokens(&store, &bucket, NOW).await, Some(-15));
    assert_eq!(tokens(&store, &absent, NOW).await, Some(9));
    let back = [refund(&bucket, 10), refund(&bucket, 10)];
    store.settle(&back, NOW).await.unwrap();
    assert_eq!(tokens(&store, &bucket, NOW).await, Some(5));
    store.settle(&[refund(&bucket, 50)], NOW).await.unwrap();
    assert_eq!(tokens(&store, &bucket, NOW).await, Some(10));
    store.settle(&[], NOW).await.unwrap();
}

#[tokio::test]
async fn a_settlement_that_overflows_is_rejected_as_a_whole() {
    let (_folder, store) = open();
    let (bucket, other) = (target("key-1", 10), target("key-2", 10));
    assert!(take(&store, &plan(&bucket, 1)).await);
    assert!(take(&store, &plan(&other, 1)).await);
    let mut huge = charge(&bucket, 1);
    huge.differences[0].amount = Millitokens::new(i64::MAX);
    let batch = [charge(&other, 3), huge.clone(), huge];
    let error = store.settle(&batch, NOW).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Rejected);
    assert_eq!(tokens(&store, &bucket, NOW).await, Some(9));
    assert_eq!(tokens(&store, &other, NOW).await, Some(9));
}

#[tokio::test]
async fn invalid_calls_are_rejected_and_affect_no_other_call() {
    let (_folder, store) = open();
    let bucket = target("key-1", 10);
    let rejected = |error: StoreError| assert_eq!(error.kind(), StoreErrorKind::Rejected);
    rejected(store.acquire(&plan_at(NOW, &[(&bucket, 1), (&bucket, 1)])).await.unwrap_err());
    let mut no_such_cell = plan(&bucket, 1);
    no_such_cell.legs[0].takes[0].cell = 1;
    rejected(store.acquire(&no_such_cell).await.unwrap_err());
    let mut negative = plan(&bucket, 1);
    negative.legs[0].takes[0].amount = Millitokens::new(-1);
    rejected(store.acquire(&negative).await.unwrap_err());
    let mut lowest = charge(&bucket, 1);
    lowest.differences[0].amount = Millitokens::new(i64::MIN);
    rejected(store.settle(&[lowest], NOW).await.unwrap_err());
    let keys = vec![Key::Namespace(ns()); 26];
    rejected(store.get(&keys).await.unwrap_err());
    let checks =
        keys.into_iter().map(|key| Write::Check(key, Precondition::Always)).collect::<Vec<_>>();
    rejected(store.write(&checks).await.unwrap_err());
    assert!(take(&store, &plan(&bucket, 10)).await);
    assert!(take(&store, &Plan { max_skew: None, now: NOW, legs: Default::default() }).await);
}

#[tokio::test]
async fn an_expired_bucket_counts_as_absent() {
    let (_folder, store) = open();
    let idle = Lifetime::Idle(Duration::from_secs(10));
    let key = bucket_key("key-1", "gpt-4");
    let bucket = Arc::new(Target::new(key, limits([Limit::per_day("rpm", 10)]), idle));
    assert!(take(&store, &plan(&bucket, 10)).await);
    assert_eq!(tokens(&store, &bucket, at(9)).await, Some(0));
    assert_eq!(tokens(&store, &bucket, at(10)).await, None);
    store.settle(&[refund(&bucket, 3)], at(10)).await.unwrap();
    store.reconfigure(&bucket, at(10)).await.unwrap();
    assert_eq!(tokens(&store, &bucket, NOW).await, Some(0));
    assert!(take(&store, &plan_at(at(10), &[(&bucket, 10)])).await);
}

#[tokio::test]
async fn reconfiguring_replaces_limits_and_lifetime() {
    let (_folder, store) = open();
    let bucket = target("key-1", 10);
    let lower = Target::new(
        bucket.key().clone(),
        limits([Limit::per_hour("rpm", 4)]),
        Lifetime::Idle(Duration::from_secs(60)),
    );
    store.reconfigure(&lower, NOW).await.unwrap();
    assert_eq!(peek(&store, &lower, NOW).await, None);
    assert!(take(&store, &plan(&bucket, 1)).await);
    store.reconfigure(&lower, NOW).await.unwrap();
    assert_eq!(tokens(&store, &lower, NOW).await, Some(4));
    assert_eq!(peek(&store, &lower, NOW).await.unwrap().limits(), lower.limits());
    assert_eq!(peek(&store, &lower, at(60)).await, None);
}

fn an_entity(id: &str, parent: Option<&str>) -> Record {
    Record::Entity(Entity {
        namespace: ns(),
        id: entity(id),
        name: Some("Ann \u{1f600}".into()),
        parent: parent.map(entity),
        cascade: true,
        metadata: BTreeMap::from([("tier".into(), "go|ld%".into())]),
        created_at: NOW,
    })
}

fn a_config(level: ConfigLevel, version: u64) -> Record {
    let limits = LimitSet::new([Limit::per_minute("rpm", 10).burst(20)]).unwrap();
    let on_unavailable = (level == ConfigLevel::System).then_some(OnUnavailable::Allow);
    let (namespace, audit_retention_days) = (ns(), None);
    Record::Config(Config {
        namespace,
        level,
        limits,
        on_unavailable,
        audit_retention_days,
        version,
    })
}

fn an_event(id: &str, subject: AuditSubject) -> Record {
    let details = [("limits".to_owned(), serde_json::json!(["rpm", 1, null]))];
    Record::Audit(AuditEvent {
        namespace: ns(),
        id: id.to_owned(),
        subject,
        at: NOW,
        action: AuditAction::LimitsSet,
        principal: Some("ann".into()),
        resource: Some(resource("gpt-4")),
        details: details.into_iter().collect(),
        expires_at: Some(at(1)),
    })
}

fn a_usage(id: &str, on: &str, window: Window, start: Timestamp) -> Record {
    let consumed = [(LimitName::new("rpm").unwrap(), Millitokens::new(-5))];
    Record::Usage(Usage {
        key: UsageKey {
            namespace: ns(),
            entity: entity(id),
            resource: resource(on),
            window,
            start,
        },
        consumed: consumed.into_iter().collect(),
        events: 3,
        expires_at: None,
    })
}

fn a_namespace(id: &str, deleted_at: Option<Timestamp>) -> Record {
    let name = NamespaceName::new("team-a").unwrap();
    let id = zae_limiter_core::NamespaceId::new(id).unwrap();
    Record::Namespace(Namespace { id, name, created_at: NOW, deleted_at, is_purging: false })
}

#[tokio::test]
async fn every_kind_of_record_reads_back_as_written() {
    let (_folder, store) = open();
    let records = vec![
        an_entity("root", None),
        an_entity("leaf", Some("root")),
        a_config(ConfigLevel::System, 1),
        a_config(ConfigLevel::Resource(resource("gpt-4")), u64::MAX),
        a_config(ConfigLevel::Entity(entity("leaf")), 3),
        a_config(ConfigLevel::EntityResource(entity("leaf"), resource("gpt-4")), 4),
        an_event("01J", AuditSubject::System),
        an_event("01J", AuditSubject::Resource(resource("gpt-4"))),
        an_event("01J", AuditSubject::Entity(entity("leaf"))),
        a_usage("leaf", "gpt-4", Window::Daily, NOW),
        a_namespace("AbCdEfGhIj_", Some(at(1))),
        Record::NamespaceName(NamespaceName::new("team-a").unwrap(), ns()),
    ];
    let puts: Vec<_> =
        records.iter().map(|r| Write::Put(r.clone(), Precondition::Absent)).collect();
    assert_eq!(store.write(&puts).await.unwrap(), Written::Done);
    assert_eq!(store.write(&puts).await.unwrap(), Written::Conflict(0));
    let mut keys: Vec<_> = records.iter().map(Record::key).collect();
    keys.push(Key::Bucket(bucket_key("leaf", "gpt-4")));
    keys.push(Key::Entity(ns(), entity("nobody")));
    let mut expected: Vec<_> = records.iter().cloned().map(Some).collect();
    expected.extend([None, None]);
    assert_eq!(store.get(&keys).await.unwrap(), expected);
    store.delete(&keys).await.unwrap();
    assert!(store.get(&keys).await.unwrap().iter().all(Option::is_none));
}

#[tokio::test]
async fn a_batch_is_written_completely_or_not_at_all() {
    let (_folder, store) = open();
    let system = |version| a_config(ConfigLevel::System, version);
    let key = system(1).key();
    let put = |record, precondition| Write::Put(record, precondition);
    let absent = Key::Entity(ns(), entity("nobody"));
    for (batch, written) in [
        (vec![put(system(1), Precondition::Present)], Written::Conflict(0)),
        (vec![put(system(1), Precondition::Version(0))], Written::Conflict(0)),
        (vec![put(system(1), Precondition::Absent)], Written::Done),
        (
            vec![
                put(an_entity("a", None), Precondition::Always),
                put(system(3), Precondition::Version(2)),
            ],
            Written::Conflict(1),
        ),
        (
            vec![
                put(system(2), Precondition::Version(1)),
                Write::Check(absent.clone(), Precondition::Present),
            ],
            Written::Conflict(1),
        ),
        (
            vec![
                Write::Check(absent.clone(), Precondition::Absent),
                put(system(2), Precondition::Version(1)),
            ],
            Written::Done,
        ),
        (vec![Write::Check(absent, Precondition::Version(0))], Written::Conflict(0)),
        (vec![Write::Delete(key.clone(), Precondition::Version(1))], Written::Conflict(0)),
        (vec![Write::Delete(key.clone(), Precondition::Version(2))], Written::Done),
        (vec![Write::Delete(key.clone(), Precondition::Always)], Written::Done),
        (vec![], Written::Done),
    ] {
        assert_eq!(store.write(&batch).await.unwrap(), written, "{batch:?}");
    }
    let left = store.get(&[key, Key::Entity(ns(), entity("a"))]).await.unwrap();
    assert_eq!(left, [None, None]);
}

#[tokio::test]
async fn a_deleted_bucket_is_full_again() {
    let (_folder, store) = open();
    let bucket = target("key-1", 10);
    let key = Key::Bucket(bucket.key().clone());
    assert!(take(&store, &plan(&bucket, 10)).await);
    let check = |precondition| Write::Check(key.clone(), precondition);
    assert_eq!(store.write(&[check(Precondition::Present)]).await.unwrap(), Written::Done);
    store.delete(std::slice::from_ref(&key)).await.unwrap();
    assert_eq!(peek(&store, &bucket, NOW).await, None);
    assert_eq!(store.write(&[check(Precondition::Absent)]).await.unwrap(), Written::Done);
    assert!(take(&store, &plan(&bucket, 10)).await);
    let delete = [Write::Delete(key.clone(), Precondition::Present)];
    assert_eq!(store.write(&delete).await.unwrap(), Written::Done);
    assert_eq!(store.write(&delete).await.unwrap(), Written::Conflict(0));
    assert!(take(&store, &plan(&bucket, 10)).await);
}

/// Walks through a list in pages of every small size; each gives the same.
async fn all<T: Clone + PartialEq + std::fmt::Debug>(
    mut list: impl AsyncFnMut(&PageRequest) -> Result<Page<T>, StoreError>,
) -> Vec<T> {
    let mut walks: Vec<Vec<T>> = Vec::new();
    for size in [1, 2, 3, 1_000] {
        let mut request = PageRequest::first(size);
        let mut items = Vec::new();
        loop {
            let page = list(&request).await.unwrap();
            assert!(page.items.len() <= size);
            items.extend(page.items);
            let Some(next) = page.next else { break };
            request.after = Some(next);
        }
        walks.push(items);
    }
    assert!(walks.windows(2).all(|pair| pair[0] == pair[1]), "{walks:?}");
    for garbage in ["", "x", "children|i1", "usages|", "buckets|ix|ty", "t|t|t|t|t"] {
        let after = Some(Cursor::new(garbage));
        let refused = list(&PageRequest { size: 1, after }).await.unwrap_err();
        assert_eq!(refused.kind(), StoreErrorKind::Rejected, "{garbage}");
    }
    walks.remove(0)
}

#[tokio::test]
async fn lists_are_in_order_and_name_every_record_once() {
    let (_folder, store) = open();
    let mut records = vec![a_namespace("AbCdEfGhIj_", None), a_namespace("_bCdEfGhIj_", Some(NOW))];
    for id in ["b", "a", "c"] {
        records.push(an_entity(id, Some("root")));
        records.push(a_config(ConfigLevel::Entity(entity(id)), 1));
        records.push(an_event(&format!("01{id}"), AuditSubject::System));
        for on in ["gpt-4", "gpt-3"] {
            records.push(a_config(ConfigLevel::EntityResource(entity(id), resource(on)), 1));
            for hour in [0, 3_600, 7_200] {
                records.push(a_usage(id, on, Window::Hourly, at(hour)));
            }
        }
    }
    records.push(a_config(ConfigLevel::System, 1));
    records.push(a_config(ConfigLevel::Resource(resource("gpt-5")), 1));
    records.push(a_config(ConfigLevel::Resource(resource("gpt-4")), 1));
    for record in &records {
        store.write(&[Write::Put(record.clone(), Precondition::Absent)]).await.unwrap();
    }
    let query = async |query: Query| -> Vec<Key> {
        let found = all(async |page: &PageRequest| store.list(&query, page).await).await;
        assert!(found.iter().all(|record| records.contains(record)));
        found.iter().map(Record::key).collect()
    };

    let ids = ["a", "b", "c"].map(entity);
    let entities = ids.clone().map(|id| Key::Entity(ns(), id));
    assert_eq!(query(Query::Children(ns(), entity("root"))).await, entities);
    assert_eq!(query(Query::Children(ns(), entity("a"))).await, []);
    let defaults = ids.clone().map(|id| Key::Config(ns(), ConfigLevel::Entity(id)));
    assert_eq!(query(Query::EntityConfigs(ns(), None)).await, defaults);
    let on = |on| move |id| Key::Config(ns(), ConfigLevel::EntityResource(id, resource(on)));
    let configs = ids.clone().map(on("gpt-4"));
    assert_eq!(query(Query::EntityConfigs(ns(), Some(resource("gpt-4")))).await, configs);
    let events = ["01c", "01b", "01a"].map(|id| Key::Audit(ns(), AuditSubject::System, id.into()));
    assert_eq!(query(Query::Audit(ns(), AuditSubject::System)).await, events);
    let namespaces = ["AbCdEfGhIj_", "_bCdEfGhIj_"].map(|id| a_namespace(id, None).key());
    assert_eq!(query(Query::Namespaces).await, namespaces);

    let usage = |id: &str, on: &str, hour| a_usage(id, on, Window::Hourly, at(hour)).key();
    let range = || NOW..at(7_200);
    let of_one =
        Query::UsageOfEntity(ns(), entity("b"), Some(resource("gpt-4")), Window::Hourly, range());
    assert_eq!(query(of_one).await, [usage("b", "gpt-4", 0), usage("b", "gpt-4", 3_600)]);
    let of_all = Query::UsageOfEntity(ns(), entity("b"), None, Window::Hourly, range());
    let expected = ["gpt-3", "gpt-4"].map(|on| [usage("b", on, 0), usage("b", on, 3_600)]);
    assert_eq!(query(of_all).await, expected.concat());
    let of_resource =
        Query::UsageOfResource(ns(), resource("gpt-3"), Window::Hourly, at(3_600)..at(7_201));
    let expected = [3_600, 7_200].map(|hour| ["a", "b", "c"].map(|id| usage(id, "gpt-3", hour)));
    assert_eq!(query(of_resource).await, expected.concat());

    let resources = async |which| {
        let list = async |page: &PageRequest| store.list_resources(&ns(), which, page).await;
        all(list).await
    };
    let names = resources(ResourceList::WithDefaults).await;
    assert_eq!(names, ["gpt-4", "gpt-5"].map(resource));
    let names = resources(ResourceList::WithEntityConfigs).await;
    assert_eq!(names, ["gpt-3", "gpt-4"].map(resource));
}

#[tokio::test]
async fn buckets_are_listed_by_entity_and_by_resource() {
    let (_folder, store) = open();
    for id in ["b", "a", "c"] {
        for on in ["gpt-4", "gpt-3"] {
            let limits = limits([Limit::per_hour("rpm", 10)]);
            let target = Target::new(bucket_key(id, on), limits, Lifetime::Forever);
            assert!(take(&store, &plan(&Arc::new(target), 1)).await);
        }
    }
    let list = async |query: BucketQuery| {
        let buckets = all(async |page: &PageRequest| store.list_buckets(&query, page).await).await;
        buckets.into_iter().map(|stored| stored.key).collect::<Vec<_>>()
    };
    let of_entity = list(BucketQuery::OfEntity(ns(), entity("a"))).await;
    assert_eq!(of_entity, ["gpt-3", "gpt-4"].map(|on| bucket_key("a", on)));
    let on_resource = list(BucketQuery::OnResource(ns(), resource("gpt-3"))).await;
    assert_eq!(on_resource, ["a", "b", "c"].map(|id| bucket_key(id, "gpt-3")));
}

#[tokio::test]
async fn keys_of_a_scope_can_be_deleted_while_they_are_listed() {
    let (_folder, store) = open();
    let other = zae_limiter_core::NamespaceId::new("Other______").unwrap();
    let mut records = vec![
        a_config(ConfigLevel::System, 1),
        a_config(ConfigLevel::Resource(resource("gpt-4")), 1),
        an_event("01J", AuditSubject::System),
        a_namespace("AbCdEfGhIj_", None),
    ];
    for id in ["a", "b"] {
        records.push(an_entity(id, None));
        records.push(a_config(ConfigLevel::Entity(entity(id)), 1));
        records.push(a_config(ConfigLevel::EntityResource(entity(id), resource("gpt-4")), 1));
        records.push(an_event("01J", AuditSubject::Entity(entity(id))));
        records.push(a_usage(id, "gpt-4", Window::Hourly, NOW));
        records.push(a_usage(id, "gpt-4", Window::Monthly, NOW));
        assert!(take(&store, &plan(&target(id, 5), 1)).await);
    }
    let puts: Vec<_> =
        records.iter().map(|r| Write::Put(r.clone(), Precondition::Absent)).collect();
    store.write(&puts).await.unwrap();
    let keys = async |scope: Scope| {
        all(async |page: &PageRequest| store.list_keys(&scope, page).await).await
    };

    let of_entity = keys(Scope::Entity(ns(), entity("a"))).await;
    assert_eq!(of_entity.len(), 6, "{of_entity:?}");
    assert!(!of_entity.iter().any(|key| matches!(key, Key::Audit(..))));
    let of_namespace = keys(Scope::Namespace(ns())).await;
    assert_eq!(of_namespace.len(), records.len() - 1 + 2);
    assert!(!of_namespace.contains(&Key::Namespace(ns())));
    assert_eq!(keys(Scope::Namespace(other)).await, []);

    for size in [1, 3] {
        let scope =
            if size == 1 { Scope::Entity(ns(), entity("a")) } else { Scope::Namespace(ns()) };
        let mut request = PageRequest::first(size);
        loop {
            let page = store.list_keys(&scope, &request).await.unwrap();
            store.delete(&page.items).await.unwrap();
            let Some(next) = page.next else { break };
            request.after = Some(next);
        }
        assert_eq!(keys(scope).await, []);
    }
    assert!(store.get(&[Key::Namespace(ns())]).await.unwrap()[0].is_some());
}

#[tokio::test]
async fn usage_includes_all_calls_that_completed_before() {
    let folder = Folder::new();
    let settings = UsageSettings {
        windows: vec![Window::Hourly, Window::Daily],
        retention: Duration::from_secs(60),
    };
    let store = SqliteOptions::new(folder.file()).usage(settings).open().unwrap();
    let bucket = target("key-1", 100);
    for (second, tokens) in [(0, 1), (1, 2), (3_600, 4)] {
        assert!(take(&store, &plan_at(at(second), &[(&bucket, tokens)])).await);
    }
    store.settle(&[refund(&bucket, 1)], at(3_601)).await.unwrap();
    let usage = async |window: Window| {
        let query = Query::UsageOfEntity(
            ns(),
            entity("key-1"),
            None,
            window,
            Timestamp::from_millis(0)..at(99_999),
        );
        let page = store.list(&query, &PageRequest::first(10)).await.unwrap();
        let usage = page.items.into_iter().map(|record| record.into_usage().unwrap());
        usage
            .map(|u| (u.consumed.values().next().unwrap().whole_tokens(), u.events))
            .collect::<Vec<_>>()
    };
    assert_eq!(usage(Window::Hourly).await, [(3, 2), (3, 2)]);
    assert_eq!(usage(Window::Daily).await, [(6, 4)]);
    assert_eq!(usage(Window::Monthly).await, []);
    assert!(take(&store, &plan_at(at(3_602), &[(&bucket, 1)])).await);
    let query = Query::UsageOfResource(
        ns(),
        resource("gpt-4"),
        Window::Daily,
        Timestamp::from_millis(0)..at(1),
    );
    let page = store.list(&query, &PageRequest::first(10)).await.unwrap();
    let record = page.items[0].clone().into_usage().unwrap();
    assert_eq!(record.events, 5);
    assert_eq!(
        record.expires_at,
        Some(Window::Daily.end(NOW).saturating_add(Duration::from_secs(60)))
    );
    assert_eq!(usage(Window::Daily).await, [(7, 5)]);
    assert_eq!(tokens(&store, &bucket, NOW).await, Some(100 - 4));
}

#[tokio::test]
async fn usage_of_many_buckets_is_booked_in_steps() {
    let (_folder, store) = open();
    for n in 0..600 {
        assert!(take(&store, &plan(&target(&format!("key-{n:03}"), 5), 1)).await);
    }
    let range = Timestamp::from_millis(0)..at(1);
    let query = Query::UsageOfResource(ns(), resource("gpt-4"), Window::Hourly, range);
    let page = store.list(&query, &PageRequest::first(1_000)).await.unwrap();
    assert_eq!((page.items.len(), page.next), (600, None));
}

/// Makes enough calls for the sweeper to pass all tables.
async fn sweep_at(store: &SqliteStore, now: Timestamp) {
    let busy = target("busy", 1_000_000);
    for _ in 0..1_000 {
        assert!(take(store, &plan_at(now, &[(&busy, 1)])).await);
    }
}

#[tokio::test]
async fn rows_that_expired_an_hour_ago_are_deleted_and_their_usage_is_booked() {
    let (folder, store) = open();
    let idle = |id: &str| {
        let limits = limits([Limit::per_day("rpm", 10)]);
        let lifetime = Lifetime::Idle(Duration::from_secs(1));
        Arc::new(Target::new(bucket_key(id, "gpt-4"), limits, lifetime))
    };
    for n in 0..150 {
        assert!(take(&store, &plan(&idle(&format!("key-{n}")), 2)).await);
    }
    store
        .write(&[Write::Put(an_event("01J", AuditSubject::System), Precondition::Always)])
        .await
        .unwrap();
    // Enough transactions for the sweeper to pass all tables, when the clock has kept its time for a day.
    for hours in [2, 25, 49] {
        sweep_at(&store, at(hours * 3_600)).await;
    }
    let buckets = BucketQuery::OnResource(ns(), resource("gpt-4"));
    let left = store.list_buckets(&buckets, &PageRequest::first(10)).await.unwrap();
    assert_eq!(left.items.len(), 1);
    let audit = Query::Audit(ns(), AuditSubject::System);
    assert_eq!(store.list(&audit, &PageRequest::first(1)).await.unwrap().items, []);
    let range = Timestamp::from_millis(0)..at(1);
    let query = Query::UsageOfResource(ns(), resource("gpt-4"), Window::Hourly, range);
    let usage = store.list(&query, &PageRequest::first(1_000)).await.unwrap();
    assert_eq!(usage.items.len(), 150);
    drop(store);
    assert!(is_sound(&folder.file()));
}

#[tokio::test]
async fn a_clock_that_is_ahead_deletes_nothing() {
    let (folder, store) = open();
    let day = 24 * 3_600_u64;
    let put = |n: u64| {
        let mut event = an_event(&format!("{n:02}"), AuditSubject::System);
        if let Record::Audit(event) = &mut event {
            event.expires_at = Some(at(n * day));
        }
        Write::Put(event, Precondition::Always)
    };
    for events in (1..=40).map(put).collect::<Vec<_>>().chunks(20) {
        store.write(events).await.unwrap();
    }
    let audit = Query::Audit(ns(), AuditSubject::System);
    let left = async |store: &SqliteStore| {
        store.list(&audit, &PageRequest::first(100)).await.unwrap().items.len()
    };
    sweep_at(&store, at(0)).await;
    drop(store);
    // 100 days ahead, for most of a day, in two processes.
    for hours in [0, 1, 23] {
        let store = SqliteStore::open(folder.file()).unwrap();
        sweep_at(&store, at(100 * day + hours * 3_600)).await;
        assert_eq!(left(&store).await, 40);
    }
    // Set right again: what has expired is deleted a day later.
    let store = SqliteStore::open(folder.file()).unwrap();
    for (days, expected) in [(1, 40), (2, 39), (3, 38), (4, 37)] {
        sweep_at(&store, at(days * day)).await;
        assert_eq!(left(&store).await, expected, "day {days}");
    }
    // After months without a call, the file catches up.
    for (days, expected) in [(80, 36), (81, 0)] {
        sweep_at(&store, at(days * day)).await;
        assert_eq!(left(&store).await, expected, "day {days}");
    }
}

#[tokio::test]
async fn an_audit_event_of_a_later_release_is_listed() {
    let (folder, store) = open();
    let events = ["1", "2"].map(|id| an_event(id, AuditSubject::System));
    let puts = events.map(|event| Write::Put(event, Precondition::Always));
    store.write(&puts).await.unwrap();
    let conn = rusqlite::Connection::open(folder.file()).unwrap();
    conn.execute("UPDATE audit SET action = 'limits_frozen' WHERE id = '1'", []).unwrap();
    let audit = Query::Audit(ns(), AuditSubject::System);
    let listed = store.list(&audit, &PageRequest::first(10)).await.unwrap().items;
    let actions = listed.into_iter().filter_map(Record::into_audit);
    let actions: Vec<String> = actions.map(|event| event.action.as_str().to_owned()).collect();
    assert_eq!(actions, ["limits_set", "limits_frozen"]);
}

#[tokio::test]
async fn two_stores_on_one_file_see_each_others_writes_at_once() {
    let (folder, store) = open();
    let other = SqliteStore::open(folder.file()).unwrap();
    let bucket = target("key-1", 10);
    for n in 0..10 {
        let store = if n % 2 == 0 { &store } else { &other };
        assert!(take(store, &plan(&bucket, 1)).await);
    }
    assert!(!take(&store, &plan(&bucket, 1)).await);
    assert!(!take(&other, &plan(&bucket, 1)).await);
    other.settle(&[refund(&bucket, 1)], NOW).await.unwrap();
    assert!(take(&store, &plan(&bucket, 1)).await);
    other.delete(&[Key::Bucket(bucket.key().clone())]).await.unwrap();
    assert!(take(&store, &plan(&bucket, 10)).await);
    assert!(!take(&other, &plan(&bucket, 1)).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn many_tasks_together_take_exactly_the_capacity() {
    let (_folder, store) = open();
    let (hot, parent) = (target("hot", 500), target("parent", 300));
    let tasks = (0..64).map(|n: u64| {
        let (store, hot, parent) = (store.clone(), Arc::clone(&hot), Arc::clone(&parent));
        tokio::spawn(async move {
            let mut admitted = 0;
            let own = target(&format!("own-{n}"), 100);
            for _ in 0..20 {
                let legs = [(&own, 1), (&parent, 1)];
                admitted += u64::from(take(&store, &plan_at(NOW, &legs)).await);
                let _ = take(&store, &plan(&hot, 1)).await;
            }
            let left = tokens(&store, &own, NOW).await.unwrap_or(100);
            assert_eq!(left, 100 - i64::try_from(admitted).unwrap());
            admitted
        })
    });
    let mut admitted = 0;
    for task in tasks.collect::<Vec<_>>() {
        admitted += task.await.unwrap();
    }
    assert_eq!(admitted, 300);
    assert_eq!(tokens(&store, &hot, NOW).await, Some(0));
}

#[tokio::test]
async fn a_damaged_row_fails_only_calls_that_read_it() {
    let (folder, store) = open();
    let (good, bad) = (target("good", 10), target("bad", 10));
    assert!(take(&store, &plan(&bad, 1)).await);
    let conn = rusqlite::Connection::open(folder.file()).unwrap();
    conn.execute("UPDATE bucket SET state = x'01ffff' WHERE entity = 'bad'", []).unwrap();
    let (bad_plan, good_plan) = (plan(&bad, 1), plan(&good, 1));
    let chain = plan_at(NOW, &[(&good, 1), (&bad, 1)]);
    let (one, two, three, four) = tokio::join!(
        store.acquire(&bad_plan),
        store.acquire(&good_plan),
        store.acquire(&chain),
        store.peek(&[], NOW),
    );
    assert_eq!(one.unwrap_err().kind(), StoreErrorKind::Corrupt);
    assert!(matches!(two.unwrap(), Admission::Taken(_)));
    assert_eq!(three.unwrap_err().kind(), StoreErrorKind::Corrupt);
    four.unwrap();
    let keys = [bad.key().clone()];
    assert_eq!(store.peek(&keys, NOW).await.unwrap_err().kind(), StoreErrorKind::Corrupt);
    assert_eq!(tokens(&store, &good, NOW).await, Some(9));
    // Deleting the row repairs the bucket at once.
    store.delete(&[Key::Bucket(bad.key().clone())]).await.unwrap();
    assert!(take(&store, &plan(&bad, 10)).await);
}

#[tokio::test]
async fn a_write_that_a_table_refuses_fails_no_other_call() {
    let (folder, store) = open();
    let conn = rusqlite::Connection::open(folder.file()).unwrap();
    let sql = "CREATE TRIGGER no BEFORE INSERT ON entity WHEN new.id = 'bad'
               BEGIN SELECT raise(FAIL, 'no'); END";
    conn.execute_batch(sql).unwrap();
    let bucket = target("good", 10);
    let good_plan = plan(&bucket, 1);
    let put = |id| [Write::Put(an_entity(id, None), Precondition::Always)];
    let (bad, good) = (put("bad"), put("good"));
    let (one, two, three) =
        tokio::join!(store.write(&bad), store.acquire(&good_plan), store.write(&good));
    assert!(one.is_err());
    assert!(matches!(two.unwrap(), Admission::Taken(_)));
    assert_eq!(three.unwrap(), Written::Done);
    assert_eq!(tokens(&store, &bucket, NOW).await, Some(9));
}

#[test]
fn a_leg_is_small_enough_to_be_copied_for_every_call() {
    assert!(size_of::<Leg>() <= 64, "{}", size_of::<Leg>());
}
