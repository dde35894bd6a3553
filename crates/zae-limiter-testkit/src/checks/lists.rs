//! Lists have exactly what they should, in their order, in pages of any size.

use std::sync::Arc;

use zae_limiter_core::{
    AuditSubject, BucketQuery, ConfigLevel, Namespace, NamespaceName, Query, Record, ResourceList,
    Scope, Store, StoredBucket, Timestamp, Window,
};

use crate::calls::{check_list, check_records, check_resources, delete, peek, put, take};
use crate::given::{
    DAY, HOUR, NOW, bucket, config, entity, entity_id, event, forever, idle, later, leg, limits,
    namespace, on_resource, per_minute, resource, test_namespace, tokens, usage,
};

/// Names in their order, which is that of their bytes. One is a shard of the next, and what follows
/// sorts before and after the characters that stores like to put between names.
const IDS: [&str; 12] = ["A", "Z", "a", "a-b", "a.b", "a0", "a:b", "aB", "a_b", "aa", "aa-b", "b"];

pub async fn children_are_listed_by_id(store: Arc<dyn Store>) {
    let children = IDS.map(|id| entity(id, Some("parent")));
    put(&*store, children.iter().rev().cloned()).await;
    put(&*store, ["parent", "orphan"].map(|id| entity(id, None))).await;
    put(&*store, ["c", "d"].map(|id| entity(id, Some("parent-2")))).await;
    check_records(&*store, Query::Children(test_namespace(), entity_id("parent")), &children).await;
    check_records(&*store, Query::Children(test_namespace(), entity_id("orphan")), &[]).await;
    check_records(&*store, Query::Children(test_namespace(), entity_id("paren")), &[]).await;
}

pub async fn a_child_that_moves_is_listed_under_its_new_parent(store: Arc<dyn Store>) {
    let under = |parent| Query::Children(test_namespace(), entity_id(parent));
    put(&*store, [entity("child", Some("p"))]).await;
    put(&*store, [entity("child", Some("q"))]).await;
    check_records(&*store, under("p"), &[]).await;
    check_records(&*store, under("q"), &[entity("child", Some("q"))]).await;
    put(&*store, [entity("child", None)]).await;
    check_records(&*store, under("q"), &[]).await;
}

pub async fn entity_configs_are_listed_by_entity(store: Arc<dyn Store>) {
    let on = |on: &str| IDS.map(|id| config(on_resource(id, on), 1));
    let by_default = IDS.map(|id| config(ConfigLevel::Entity(entity_id(id)), 1));
    for records in [on("r"), on("r-2"), by_default.clone()] {
        put(&*store, records.into_iter().rev()).await;
    }
    put(&*store, [config(ConfigLevel::System, 1)]).await;
    put(&*store, [config(ConfigLevel::Resource(resource("r")), 1)]).await;
    for name in ["r", "r-2"] {
        let query = Query::EntityConfigs(test_namespace(), Some(resource(name)));
        check_records(&*store, query, &on(name)).await;
    }
    check_records(&*store, Query::EntityConfigs(test_namespace(), None), &by_default).await;
    check_records(&*store, Query::EntityConfigs(test_namespace(), Some(resource("none"))), &[])
        .await;
}

pub async fn audit_events_are_listed_newest_first(store: Arc<dyn Store>) {
    let subjects = [
        AuditSubject::System,
        AuditSubject::Resource(resource("a")),
        AuditSubject::Entity(entity_id("a")),
        AuditSubject::Entity(entity_id("a-b")),
    ];
    for number in [3, 1, 10, 2, 9, 100] {
        put(&*store, subjects.iter().map(|subject| event(subject.clone(), number))).await;
    }
    for subject in subjects {
        let expected = [100, 10, 9, 3, 2, 1].map(|number| event(subject.clone(), number));
        check_records(&*store, Query::Audit(test_namespace(), subject), &expected).await;
    }
    let nobody = AuditSubject::Entity(entity_id("nobody"));
    check_records(&*store, Query::Audit(test_namespace(), nobody), &[]).await;
}

const RESOURCES: [&str; 6] = ["a", "a-b", "a/b", "a:b", "aa", "b"];

pub async fn usage_of_an_entity_is_listed_by_resource_and_start(store: Arc<dyn Store>) {
    let hours = [-5 * HOUR, -HOUR, 0, HOUR, 11 * HOUR];
    let of = |entity: &str, window| {
        let mut records = Vec::new();
        for on in RESOURCES {
            records.extend(hours.map(|hour| usage(entity, on, window, later(hour))));
        }
        records.dedup();
        records
    };
    for entity in ["a", "a-b"] {
        for window in Window::ALL {
            put(&*store, of(entity, window).into_iter().rev()).await;
        }
    }
    let hourly = of("a", Window::Hourly);
    let ask = |on: Option<&str>, window, from, to| {
        Query::UsageOfEntity(
            test_namespace(),
            entity_id("a"),
            on.map(resource),
            window,
            later(from)..later(to),
        )
    };
    check_records(&*store, ask(None, Window::Hourly, -DAY, DAY), &hourly).await;
    check_records(&*store, ask(None, Window::Daily, -2 * DAY, DAY), &of("a", Window::Daily)).await;
    for (at, on) in RESOURCES.into_iter().enumerate() {
        let expected = &hourly[at * hours.len()..][..hours.len()];
        check_records(&*store, ask(Some(on), Window::Hourly, -DAY, DAY), expected).await;
        // The first moment of the range belongs to it, the last does not.
        check_records(&*store, ask(Some(on), Window::Hourly, -HOUR, HOUR), &expected[1..3]).await;
        check_records(&*store, ask(Some(on), Window::Hourly, 1 - HOUR, 1), &expected[2..3]).await;
        check_records(&*store, ask(Some(on), Window::Hourly, 0, 0), &[]).await;
    }
    check_records(&*store, ask(Some("c"), Window::Hourly, -DAY, DAY), &[]).await;
}

pub async fn usage_of_a_resource_is_listed_by_start_and_entity(store: Arc<dyn Store>) {
    let hours = [-HOUR, 0, HOUR];
    let mut expected = Vec::new();
    for hour in hours {
        expected.extend(IDS.map(|id| usage(id, "r", Window::Hourly, later(hour))));
    }
    put(&*store, expected.iter().rev().cloned()).await;
    put(&*store, IDS.map(|id| usage(id, "r-2", Window::Hourly, NOW))).await;
    put(&*store, IDS.map(|id| usage(id, "r", Window::Monthly, NOW))).await;
    let ask = |from, to| {
        let range: std::ops::Range<Timestamp> = later(from)..later(to);
        Query::UsageOfResource(test_namespace(), resource("r"), Window::Hourly, range)
    };
    check_records(&*store, ask(-DAY, DAY), &expected).await;
    check_records(&*store, ask(0, HOUR), &expected[IDS.len()..][..IDS.len()]).await;
    check_records(&*store, ask(2 * HOUR, DAY), &[]).await;
}

pub async fn namespaces_are_listed_by_id(store: Arc<dyn Store>) {
    let record = |number: u32| {
        let name = NamespaceName::new(format!("name-{}", 100 - number)).unwrap();
        let deleted_at = number.is_multiple_of(2).then_some(NOW);
        let id = namespace(number);
        Record::Namespace(Namespace { id, name, created_at: NOW, deleted_at, is_purging: false })
    };
    let all: Vec<Record> = (1..=9).map(record).collect();
    put(&*store, all.iter().rev().cloned()).await;
    let name = NamespaceName::new("name-99").unwrap();
    put(&*store, [Record::NamespaceName(name, namespace(1))]).await;
    check_records(&*store, Query::Namespaces, &all).await;
}

/// The bucket with what belongs to it, as it should be listed.
async fn as_listed(
    store: &dyn Store,
    entity: &str,
    on: &str,
    expires_at: Option<Timestamp>,
) -> StoredBucket {
    let key = bucket(entity, on);
    let bucket = peek(store, &key, NOW).await.expect("it was taken from");
    StoredBucket { key, bucket, expires_at }
}

async fn check_buckets(store: &dyn Store, query: BucketQuery, expected: &[StoredBucket]) {
    let what = format!("{query:?}");
    check_list(&what, expected, async |page| {
        let mut page = store.list_buckets(&query, &page).await?;
        for listed in &mut page.items {
            // What is booked and what is not is the store's business.
            let limits = Arc::clone(listed.bucket.limits());
            let same = expected.iter().find(|expected| expected.key == listed.key);
            if let Some(same) = same.filter(|same| *same.bucket.limits() == limits) {
                assert_eq!(crate::calls::seen(&listed.bucket), crate::calls::seen(&same.bucket));
                listed.bucket = same.bucket.clone();
            }
        }
        Ok(page)
    })
    .await;
}

pub async fn buckets_of_an_entity_are_listed_by_resource(store: Arc<dyn Store>) {
    let set = limits([per_minute("rpm", 100)]);
    let mut expected = Vec::new();
    for (amount, on) in (1..).zip(RESOURCES) {
        for entity in ["a", "a-b"] {
            let target = idle(bucket(entity, on), &set, 120);
            take(&*store, NOW, [leg(&target, [("rpm", tokens(amount))])]).await;
        }
        expected.push(as_listed(&*store, "a", on, Some(later(120_000))).await);
    }
    check_buckets(&*store, BucketQuery::OfEntity(test_namespace(), entity_id("a")), &expected)
        .await;
    check_buckets(&*store, BucketQuery::OfEntity(test_namespace(), entity_id("nobody")), &[]).await;
}

pub async fn buckets_on_a_resource_are_listed_by_entity(store: Arc<dyn Store>) {
    let set = limits([per_minute("rpm", 100)]);
    let mut expected = Vec::new();
    for (amount, id) in (1..).zip(IDS) {
        for on in ["r", "r-2"] {
            let target = forever(bucket(id, on), &set);
            take(&*store, NOW, [leg(&target, [("rpm", tokens(amount))])]).await;
        }
        expected.push(as_listed(&*store, id, "r", None).await);
    }
    check_buckets(&*store, BucketQuery::OnResource(test_namespace(), resource("r")), &expected)
        .await;
    check_buckets(&*store, BucketQuery::OnResource(test_namespace(), resource("none")), &[]).await;
}

pub async fn resources_are_listed_by_name_and_once(store: Arc<dyn Store>) {
    let names = RESOURCES.into_iter().rev();
    put(&*store, names.clone().map(|on| config(ConfigLevel::Resource(resource(on)), 1))).await;
    for id in IDS {
        put(&*store, names.clone().skip(1).map(|on| config(on_resource(id, on), 1))).await;
        put(&*store, [config(ConfigLevel::Entity(entity_id(id)), 1)]).await;
    }
    put(&*store, [config(ConfigLevel::System, 1), config(on_resource("a", "z"), 1)]).await;
    check_resources(&*store, ResourceList::WithDefaults, &RESOURCES).await;
    let mut with_entities = RESOURCES[..5].to_vec();
    with_entities.push("z");
    check_resources(&*store, ResourceList::WithEntityConfigs, &with_entities).await;
    // A resource is listed as long as one entity has limits for it.
    let rest = IDS[1..].iter().map(|id| config(on_resource(id, "a"), 1).key());
    delete(&*store, rest).await;
    check_resources(&*store, ResourceList::WithEntityConfigs, &with_entities).await;
    delete(&*store, [config(on_resource("A", "a"), 1).key()]).await;
    check_resources(&*store, ResourceList::WithEntityConfigs, &with_entities[1..]).await;
    delete(&*store, [config(ConfigLevel::Resource(resource("b")), 1).key()]).await;
    check_resources(&*store, ResourceList::WithDefaults, &RESOURCES[..5]).await;
}

pub async fn what_is_deleted_is_no_longer_listed(store: Arc<dyn Store>) {
    let records = [
        entity("child", Some("parent")),
        config(on_resource("e", "r"), 1),
        config(ConfigLevel::Entity(entity_id("e")), 1),
        event(AuditSubject::System, 1),
        usage("e", "r", Window::Hourly, NOW),
    ];
    put(&*store, records.clone()).await;
    delete(&*store, records.iter().map(Record::key)).await;
    check_nothing_is_listed(&*store).await;
}

pub async fn an_empty_store_lists_nothing(store: Arc<dyn Store>) {
    check_nothing_is_listed(&*store).await;
    check_records(&*store, Query::Namespaces, &[]).await;
}

async fn check_nothing_is_listed(store: &dyn Store) {
    let always = Timestamp::from_millis(i64::MIN)..Timestamp::from_millis(i64::MAX);
    for query in [
        Query::Children(test_namespace(), entity_id("parent")),
        Query::EntityConfigs(test_namespace(), Some(resource("r"))),
        Query::EntityConfigs(test_namespace(), None),
        Query::Audit(test_namespace(), AuditSubject::System),
        Query::UsageOfEntity(
            test_namespace(),
            entity_id("e"),
            None,
            Window::Hourly,
            always.clone(),
        ),
        Query::UsageOfResource(test_namespace(), resource("r"), Window::Hourly, always),
    ] {
        check_records(store, query, &[]).await;
    }
    check_buckets(store, BucketQuery::OfEntity(test_namespace(), entity_id("e")), &[]).await;
    check_buckets(store, BucketQuery::OnResource(test_namespace(), resource("r")), &[]).await;
    check_resources(store, ResourceList::WithDefaults, &[]).await;
    check_resources(store, ResourceList::WithEntityConfigs, &[]).await;
    for scope in
        [Scope::Namespace(test_namespace()), Scope::Entity(test_namespace(), entity_id("e"))]
    {
        check_list("keys", &[], async |page| store.list_keys(&scope, &page).await).await;
    }
}
