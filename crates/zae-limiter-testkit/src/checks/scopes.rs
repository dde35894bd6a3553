//! What belongs together is found together, and can be removed in pages.

use std::collections::BTreeSet;
use std::sync::Arc;

use zae_limiter_core::{
    AuditSubject, BucketQuery, ConfigLevel, Key, Namespace, NamespaceId, NamespaceName, PAGE_MAX,
    PageRequest, Query, Record, ResourceList, Scope, Store, Timestamp, Window,
};

use crate::calls::{
    PAGE_SIZES, check_list, delete, get, keys_of, list_buckets, put, read_all, take,
};
use crate::given::{
    NOW, bucket_in, config_in, entity_id, entity_in, event_in, forever, leg, limits, namespace,
    on_resource, per_minute, resource, test_namespace, tokens, usage_in,
};

const WINDOWS: [Window; 3] = Window::ALL;

/// What belongs to an entity, without its buckets.
fn belongings(ns: &NamespaceId, id: &str) -> Vec<Record> {
    let mut records = vec![
        entity_in(ns, id, Some("parent")),
        config_in(ns, ConfigLevel::Entity(entity_id(id)), 1),
        config_in(ns, on_resource(id, "r"), 1),
        config_in(ns, on_resource(id, "r-2"), 1),
    ];
    records.extend(WINDOWS.map(|window| usage_in(ns, id, "used", window, NOW)));
    records
}

/// What does not belong to an entity.
fn common(ns: &NamespaceId) -> Vec<Record> {
    vec![
        config_in(ns, ConfigLevel::System, 1),
        config_in(ns, ConfigLevel::Resource(resource("r")), 1),
        event_in(ns, AuditSubject::System, 1),
        event_in(ns, AuditSubject::Resource(resource("r")), 1),
        event_in(ns, AuditSubject::Entity(entity_id("a")), 1),
        event_in(ns, AuditSubject::Entity(entity_id("a")), 2),
    ]
}

fn registration(ns: &NamespaceId) -> [Record; 2] {
    let name = NamespaceName::new(format!("name-of-{ns}")).unwrap();
    let (id, deleted_at) = (ns.clone(), None);
    [
        Record::NamespaceName(name.clone(), ns.clone()),
        Record::Namespace(Namespace { id, name, created_at: NOW, deleted_at, is_purging: false }),
    ]
}

/// Takes from two buckets of the entity; the usage of that is not `used`.
async fn open_buckets(store: &dyn Store, ns: &NamespaceId, id: &str) -> Vec<Key> {
    let mut keys = Vec::new();
    for on in ["r", "other"] {
        let key = bucket_in(ns, id, on);
        let target = forever(key.clone(), &limits([per_minute("rpm", 10)]));
        take(store, NOW, [leg(&target, [("rpm", tokens(1))])]).await;
        keys.push(Key::Bucket(key));
    }
    keys
}

/// Puts all that belongs to an entity and gives the keys.
async fn populate(store: &dyn Store, ns: &NamespaceId, id: &str) -> BTreeSet<Key> {
    let records = belongings(ns, id);
    let mut keys: BTreeSet<Key> = records.iter().map(Record::key).collect();
    put(store, records).await;
    keys.extend(open_buckets(store, ns, id).await);
    keys
}

/// Without the usage that some stores booked for the acquires themselves.
fn without_booked(keys: BTreeSet<Key>) -> BTreeSet<Key> {
    let booked = |key: &Key| matches!(key, Key::Usage(usage) if usage.resource != resource("used"));
    keys.into_iter().filter(|key| !booked(key)).collect()
}

async fn check_scope(store: &dyn Store, scope: &Scope, expected: &BTreeSet<Key>) {
    for size in PAGE_SIZES {
        let found = without_booked(keys_of(store, scope, size).await);
        let missing: Vec<_> = expected.difference(&found).collect();
        let strange: Vec<_> = found.difference(expected).collect();
        let place = format!("{scope:?} in pages of {size}");
        assert!(missing.is_empty(), "{place} lacks {missing:#?}");
        assert!(strange.is_empty(), "{place} has {strange:#?}, which do not belong there");
    }
}

pub async fn the_scope_of_an_entity_is_all_that_belongs_to_it(store: Arc<dyn Store>) {
    let here = test_namespace();
    put(&*store, common(&here)).await;
    put(&*store, registration(&here)).await;
    // A child, entities whose names begin alike, and one of the same name elsewhere.
    for (ns, id) in [(&here, "a-b"), (&here, "a:b"), (&here, "aa"), (&namespace(2), "a")] {
        populate(&*store, ns, id).await;
    }
    put(&*store, [entity_in(&here, "child", Some("a"))]).await;
    let expected = populate(&*store, &here, "a").await;
    check_scope(&*store, &Scope::Entity(here.clone(), entity_id("a")), &expected).await;
    let nobody = Scope::Entity(here, entity_id("nobody"));
    check_scope(&*store, &nobody, &BTreeSet::new()).await;
}

pub async fn the_scope_of_a_namespace_is_all_within_it(store: Arc<dyn Store>) {
    let [here, elsewhere] = [1, 2].map(namespace);
    let mut expected = BTreeSet::new();
    for id in ["a", "a-b", "b"] {
        expected.extend(populate(&*store, &here, id).await);
        populate(&*store, &elsewhere, id).await;
    }
    expected.extend(common(&here).iter().map(Record::key));
    for ns in [&here, &elsewhere] {
        put(&*store, common(ns)).await;
        put(&*store, registration(ns)).await;
    }
    check_scope(&*store, &Scope::Namespace(here), &expected).await;
    check_scope(&*store, &Scope::Namespace(namespace(3)), &BTreeSet::new()).await;
}

pub async fn namespaces_do_not_see_each_other(store: Arc<dyn Store>) {
    let [full, empty] = [1, 2].map(namespace);
    populate(&*store, &full, "a").await;
    put(&*store, common(&full)).await;
    let always = || Timestamp::from_millis(i64::MIN)..Timestamp::from_millis(i64::MAX);
    let queries = |ns: &NamespaceId| {
        let ns = || ns.clone();
        [
            Query::Children(ns(), entity_id("parent")),
            Query::EntityConfigs(ns(), Some(resource("r"))),
            Query::EntityConfigs(ns(), None),
            Query::Audit(ns(), AuditSubject::System),
            Query::Audit(ns(), AuditSubject::Resource(resource("r"))),
            Query::Audit(ns(), AuditSubject::Entity(entity_id("a"))),
            Query::UsageOfEntity(ns(), entity_id("a"), None, Window::Daily, always()),
            Query::UsageOfResource(ns(), resource("used"), Window::Daily, always()),
        ]
    };
    let page = PageRequest::first(PAGE_MAX);
    for (there, here) in queries(&full).into_iter().zip(queries(&empty)) {
        let found = store.list(&there, &page).await.expect("a list must answer");
        assert!(!found.items.is_empty(), "{there:?} has items");
        let found = read_all(1, async |page| store.list(&here, &page).await, async |_| {}).await;
        assert_eq!(found, [], "{here:?} is of an empty namespace");
    }
    for (ns, count) in [(&full, 1), (&empty, 0)] {
        let of_entity = BucketQuery::OfEntity(ns.clone(), entity_id("a"));
        assert_eq!(list_buckets(&*store, of_entity).await.len(), 2 * count, "of the entity");
        let on_resource = BucketQuery::OnResource(ns.clone(), resource("r"));
        assert_eq!(list_buckets(&*store, on_resource).await.len(), count, "on the resource");
        for which in [ResourceList::WithDefaults, ResourceList::WithEntityConfigs] {
            let fetch = async |page| store.list_resources(ns, which, &page).await;
            let found = read_all(PAGE_MAX, fetch, async |_| {}).await;
            assert_eq!(found.is_empty(), count == 0, "{which:?}");
        }
        let scope = Scope::Entity(ns.clone(), entity_id("a"));
        assert_eq!(keys_of(&*store, &scope, 7).await.is_empty(), count == 0, "keys");
    }
    for record in common(&empty) {
        assert_eq!(get(&*store, record.key()).await, None, "of an empty namespace");
    }
}

/// Deletes each page before the next one is read.
async fn purge(store: &dyn Store, scope: &Scope, size: usize) -> usize {
    let mut request = PageRequest::first(size);
    let mut deleted = 0;
    loop {
        let page = store.list_keys(scope, &request).await.expect("a list must answer");
        deleted += page.items.len();
        delete(store, page.items).await;
        match page.next {
            None => return deleted,
            after => request.after = after,
        }
    }
}

pub async fn deleting_an_entity_page_by_page_leaves_nothing_of_it(store: Arc<dyn Store>) {
    let here = test_namespace();
    put(&*store, common(&here)).await;
    let other = populate(&*store, &here, "a-b").await;
    for size in PAGE_SIZES {
        populate(&*store, &here, "a").await;
        let scope = Scope::Entity(here.clone(), entity_id("a"));
        purge(&*store, &scope, size).await;
        let left = keys_of(&*store, &scope, PAGE_MAX).await;
        assert_eq!(left, BTreeSet::new(), "left after deleting in pages of {size}");
    }
    check_scope(&*store, &Scope::Entity(here.clone(), entity_id("a-b")), &other).await;
    for record in common(&here) {
        assert!(get(&*store, record.key()).await.is_some(), "{record:?} does not belong to it");
    }
    let query = Query::Audit(here, AuditSubject::Entity(entity_id("a")));
    let events: Vec<Record> = common(&test_namespace()).into_iter().skip(4).rev().collect();
    check_list("its audit", &events, async |page| store.list(&query, &page).await).await;
}

pub async fn five_thousand_items_are_purged_in_pages(store: Arc<dyn Store>) {
    let [here, elsewhere] = [1, 2].map(namespace);
    let make = |ns: &NamespaceId, number: u32| {
        let id = format!("e-{}", number / 4);
        match number % 4 {
            0 => entity_in(ns, &id, Some("parent")),
            1 => config_in(ns, on_resource(&id, "r"), 1),
            2 => event_in(ns, AuditSubject::Entity(entity_id(&id)), number),
            _ => usage_in(ns, &id, "used", Window::Daily, NOW),
        }
    };
    put(&*store, (0..5_000).map(|number| make(&here, number))).await;
    put(&*store, (0..50).map(|number| make(&elsewhere, number))).await;
    open_buckets(&*store, &here, "e-1").await;
    let scope = Scope::Namespace(here);
    let deleted = purge(&*store, &scope, 777).await;
    assert!(deleted >= 5_002, "5,000 records and 2 buckets, but {deleted} were listed");
    assert_eq!(keys_of(&*store, &scope, PAGE_MAX).await, BTreeSet::new(), "everything is deleted");
    let untouched: BTreeSet<Key> = (0..50).map(|number| make(&elsewhere, number).key()).collect();
    check_scope(&*store, &Scope::Namespace(elsewhere), &untouched).await;
}
