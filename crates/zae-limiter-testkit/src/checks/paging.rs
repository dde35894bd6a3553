//! A list names what is there from its first page to its last exactly once.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::Arc;

use zae_limiter_core::{
    AuditSubject, BucketQuery, ConfigLevel, Cursor, Key, Page, PageRequest, Query, Record,
    ResourceList, Scope, Store, StoreError, StoredBucket, Timestamp, Window,
};

use crate::calls::{delete, put, read_all, take};
use crate::given::{
    NOW, bucket, config, entity, entity_id, event, forever, leg, limits, on_resource, per_minute,
    resource, test_namespace, tokens, usage,
};

/// How many items stay, and how many come and go.
const ITEMS: usize = 24;

/// The name of an item that stays. Those that come and go sort before, between and after.
fn stays(number: usize) -> String {
    format!("e{number:03}")
}

fn comes_and_goes(number: usize) -> String {
    match number % 3 {
        0 => format!("a{number:03}"),
        1 => format!("e{number:03}-x"),
        _ => format!("z{number:03}"),
    }
}

/// Reads a list while others are added to it and removed from it between pages.
async fn check<T, N: Ord + Debug + Clone>(
    what: &str,
    staying: &[N],
    name: impl Fn(&T) -> N,
    mut fetch: impl AsyncFnMut(PageRequest) -> Result<Page<T>, StoreError>,
    mut add: impl AsyncFnMut(String),
    mut remove: impl AsyncFnMut(String),
) {
    for size in [1, 2, 7] {
        for number in (0..ITEMS).step_by(2) {
            add(comes_and_goes(number)).await;
        }
        let listed = read_all(size, &mut fetch, async |page| {
            for number in [page % ITEMS, (page * 7) % ITEMS] {
                if number % 2 == 0 {
                    remove(comes_and_goes(number)).await;
                } else {
                    add(comes_and_goes(number)).await;
                }
            }
        })
        .await;
        let mut times: BTreeMap<N, usize> = BTreeMap::new();
        for item in &listed {
            *times.entry(name(item)).or_default() += 1;
        }
        for item in staying {
            let found = times.get(item).copied().unwrap_or_default();
            assert_eq!(found, 1, "{what}: how often {item:?} is listed in pages of {size}");
        }
    }
}

pub async fn records_that_stay_are_listed_once_while_others_come_and_go(store: Arc<dyn Store>) {
    type Make = fn(&str) -> Record;
    let always = || Timestamp::from_millis(i64::MIN)..Timestamp::from_millis(i64::MAX);
    let cases: [(Query, Make); 5] = [
        (Query::Children(test_namespace(), entity_id("p")), |name| entity(name, Some("p"))),
        (Query::EntityConfigs(test_namespace(), Some(resource("r"))), |name| {
            config(on_resource(name, "r"), 1)
        }),
        (Query::EntityConfigs(test_namespace(), None), |name| {
            config(ConfigLevel::Entity(entity_id(name)), 1)
        }),
        (Query::Audit(test_namespace(), AuditSubject::System), |name| {
            let Record::Audit(mut event) = event(AuditSubject::System, 0) else { unreachable!() };
            event.id = format!("{name:0>26}");
            Record::Audit(event)
        }),
        (
            Query::UsageOfResource(test_namespace(), resource("r"), Window::Hourly, always()),
            |name| usage(name, "r", Window::Hourly, NOW),
        ),
    ];
    for (query, make) in cases {
        let staying: Vec<Record> = (0..ITEMS).map(|number| make(&stays(number))).collect();
        put(&*store, staying.clone()).await;
        let keys: Vec<Key> = staying.iter().map(Record::key).collect();
        check(
            &format!("{query:?}"),
            &keys,
            Record::key,
            async |page| store.list(&query, &page).await,
            async |name| put(&*store, [make(&name)]).await,
            async |name| delete(&*store, [make(&name).key()]).await,
        )
        .await;
    }
}

async fn open_bucket(store: &dyn Store, entity: &str, on: &str) {
    let target = forever(bucket(entity, on), &limits([per_minute("rpm", 1_000)]));
    take(store, NOW, [leg(&target, [("rpm", tokens(1))])]).await;
}

pub async fn buckets_that_stay_are_listed_once_while_others_come_and_go(store: Arc<dyn Store>) {
    for number in 0..ITEMS {
        open_bucket(&*store, &stays(number), "r").await;
        open_bucket(&*store, "e", &stays(number)).await;
    }
    let on = |name: &str| bucket(name, "r");
    let of = |name: &str| bucket("e", name);
    let on_resource = BucketQuery::OnResource(test_namespace(), resource("r"));
    let of_entity = BucketQuery::OfEntity(test_namespace(), entity_id("e"));
    let staying: Vec<_> = (0..ITEMS).map(|number| on(&stays(number))).collect();
    check(
        "buckets on a resource",
        &staying,
        |stored: &StoredBucket| stored.key.clone(),
        async |page| store.list_buckets(&on_resource, &page).await,
        async |name| open_bucket(&*store, &name, "r").await,
        async |name| delete(&*store, [Key::Bucket(on(&name))]).await,
    )
    .await;
    let staying: Vec<_> = (0..ITEMS).map(|number| of(&stays(number))).collect();
    check(
        "buckets of an entity",
        &staying,
        |stored: &StoredBucket| stored.key.clone(),
        async |page| store.list_buckets(&of_entity, &page).await,
        async |name| open_bucket(&*store, "e", &name).await,
        async |name| delete(&*store, [Key::Bucket(of(&name))]).await,
    )
    .await;
}

pub async fn keys_that_stay_are_listed_once_while_others_come_and_go(store: Arc<dyn Store>) {
    let make = |number: usize, name: &str| match number % 4 {
        0 => config(on_resource("e", name), 1),
        1 => usage("e", name, Window::Hourly, NOW),
        2 => usage("e", name, Window::Monthly, NOW),
        _ => usage("e", name, Window::Daily, NOW),
    };
    let mut staying = Vec::new();
    for number in 0..ITEMS {
        let record = make(number, &stays(number));
        staying.push(record.key());
        put(&*store, [record]).await;
        open_bucket(&*store, "e", &stays(number)).await;
        staying.push(Key::Bucket(bucket("e", &stays(number))));
    }
    for scope in
        [Scope::Entity(test_namespace(), entity_id("e")), Scope::Namespace(test_namespace())]
    {
        check(
            &format!("{scope:?}"),
            &staying,
            Key::clone,
            async |page| store.list_keys(&scope, &page).await,
            async |name| put(&*store, [make(name.len(), &name)]).await,
            async |name| delete(&*store, [make(name.len(), &name).key()]).await,
        )
        .await;
    }
}

pub async fn resources_that_stay_are_listed_once_while_others_come_and_go(store: Arc<dyn Store>) {
    type Make = fn(&str) -> Record;
    let cases: [(ResourceList, Make); 2] = [
        (ResourceList::WithDefaults, |name| config(ConfigLevel::Resource(resource(name)), 1)),
        (ResourceList::WithEntityConfigs, |name| config(on_resource("a", name), 1)),
    ];
    let namespace = test_namespace();
    let staying: Vec<_> = (0..ITEMS).map(|number| resource(&stays(number))).collect();
    for (which, make) in cases {
        put(&*store, (0..ITEMS).map(|number| make(&stays(number)))).await;
        check(
            &format!("{which:?}"),
            &staying,
            Clone::clone,
            async |page| store.list_resources(&namespace, which, &page).await,
            async |name| put(&*store, [make(&name)]).await,
            async |name| delete(&*store, [make(&name).key()]).await,
        )
        .await;
    }
}

pub async fn a_garbled_cursor_is_an_error(store: Arc<dyn Store>) {
    let always = || Timestamp::from_millis(i64::MIN)..Timestamp::from_millis(i64::MAX);
    let long = "x".repeat(10_000);
    for garbage in ["", " ", "not a cursor", "-1", "{\"", "\0", "🦀", "%00", long.as_str()] {
        let page = PageRequest { size: 10, after: Some(Cursor::new(garbage)) };
        let shown: String = garbage.chars().take(20).collect();
        for query in [
            Query::Children(test_namespace(), entity_id("p")),
            Query::EntityConfigs(test_namespace(), Some(resource("r"))),
            Query::EntityConfigs(test_namespace(), None),
            Query::Audit(test_namespace(), AuditSubject::System),
            Query::UsageOfEntity(test_namespace(), entity_id("e"), None, Window::Hourly, always()),
            Query::UsageOfResource(test_namespace(), resource("r"), Window::Hourly, always()),
            Query::Namespaces,
        ] {
            assert!(store.list(&query, &page).await.is_err(), "{shown:?} in {query:?}");
        }
        for query in [
            BucketQuery::OfEntity(test_namespace(), entity_id("e")),
            BucketQuery::OnResource(test_namespace(), resource("r")),
        ] {
            assert!(store.list_buckets(&query, &page).await.is_err(), "{shown:?} in {query:?}");
        }
        for scope in
            [Scope::Entity(test_namespace(), entity_id("e")), Scope::Namespace(test_namespace())]
        {
            assert!(store.list_keys(&scope, &page).await.is_err(), "{shown:?} in {scope:?}");
        }
        for which in [ResourceList::WithDefaults, ResourceList::WithEntityConfigs] {
            let listed = store.list_resources(&test_namespace(), which, &page).await;
            assert!(listed.is_err(), "{shown:?} in {which:?}");
        }
    }
}
