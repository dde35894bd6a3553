//! Every field of every record comes back as it was put, at its bounds too.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use zae_limiter_core::{
    AUDIT_RETENTION_DAYS_MAX, AuditAction, AuditEvent, AuditSubject, CAPACITY_MAX, Config,
    ConfigLevel, Entity, EntityId, LIMITS_MAX, Limit, LimitName, LimitSet, Millitokens, Namespace,
    NamespaceName, OnUnavailable, PERIOD_SECONDS_MAX, Query, Rate, Record, ResourceName, Store,
    Timestamp, Usage, UsageKey, Window,
};

use crate::calls::{PAGE_SIZES, get, put, read_all};
use crate::given::{NOW, entity_id, namespace, resource, test_namespace};

const TEXTS: [&str; 6] = ["", " ", "äß€漢字🦀\u{202e}", "a\0b\n\t\"\\'", "%_?#:$SYSTEM", "null"];

fn extremes() -> [Timestamp; 5] {
    [i64::MIN, -1, 0, NOW.as_millis(), i64::MAX].map(Timestamp::from_millis)
}

fn longest_entity() -> EntityId {
    EntityId::new("e".repeat(256)).unwrap()
}

fn longest_resource() -> ResourceName {
    ResourceName::new("r".repeat(64)).unwrap()
}

/// Puts each record, and reads it by its key and, where a list has it, in that list.
async fn check(store: &dyn Store, records: Vec<Record>, query: impl Fn(&Record) -> Option<Query>) {
    for record in records {
        put(store, [record.clone()]).await;
        let found = get(store, record.key()).await;
        assert_eq!(found.as_ref(), Some(&record), "read by its key");
        if let Some(query) = query(&record) {
            let fetch = async |page| store.list(&query, &page).await;
            let listed = read_all(PAGE_SIZES[0], fetch, async |_| {}).await;
            assert!(listed.contains(&record), "{record:?} in {listed:?} of {query:?}");
        }
    }
}

pub async fn entities_come_back_as_they_were_put(store: Arc<dyn Store>) {
    let mut metadata: Vec<BTreeMap<String, String>> = vec![BTreeMap::new()];
    metadata.push(TEXTS.iter().map(|text| ((*text).into(), (*text).into())).collect());
    metadata.push((0..500).map(|n| (format!("key-{n}"), "v".repeat(100))).collect());
    let mut records = Vec::new();
    for (number, created_at) in extremes().into_iter().enumerate() {
        for (cascade, metadata) in [true, false].into_iter().zip(metadata.iter().cycle()) {
            records.push(Record::Entity(Entity {
                namespace: test_namespace(),
                id: if cascade { longest_entity() } else { entity_id("9") },
                name: TEXTS.get(number).filter(|_| cascade).map(|text| (*text).into()),
                parent: cascade.then(longest_entity),
                cascade,
                metadata: metadata.clone(),
                created_at,
            }));
        }
    }
    for metadata in metadata {
        let Some(Record::Entity(entity)) = records.first().cloned() else { unreachable!() };
        records.push(Record::Entity(Entity { metadata, ..entity }));
    }
    check(&*store, records, |record| match record {
        Record::Entity(Entity { parent: Some(parent), .. }) => {
            Some(Query::Children(test_namespace(), parent.clone()))
        }
        _ => None,
    })
    .await;
}

pub async fn configs_come_back_as_they_were_put(store: Arc<dyn Store>) {
    let longest = Duration::from_secs(PERIOD_SECONDS_MAX);
    let most = (0..LIMITS_MAX).map(|number| {
        let name = format!("{}{number:02}", "n".repeat(62));
        Limit::per(name, CAPACITY_MAX, longest)
    });
    let most = LimitSet::new(most).unwrap();
    // Numbers that only another client could have stored.
    let smallest = Rate::new(Millitokens::new(1), Millitokens::new(1), 1).unwrap();
    let odd = LimitSet::from_rates([(LimitName::new("a.b-c_D").unwrap(), smallest)]).unwrap();
    let levels = [
        ConfigLevel::System,
        ConfigLevel::Resource(longest_resource()),
        ConfigLevel::Entity(longest_entity()),
        ConfigLevel::EntityResource(longest_entity(), longest_resource()),
        ConfigLevel::EntityResource(entity_id("a@b:c.d"), resource("a/b:c.d")),
    ];
    let mut records = Vec::new();
    for level in levels {
        for (limits, version) in
            [(&most, 1), (&odd, u64::from(u32::MAX) + 1), (&most, i64::MAX.unsigned_abs())]
        {
            let (namespace, limits, on_unavailable) = (test_namespace(), limits.clone(), None);
            let level = level.clone();
            records.push(Record::Config(Config {
                namespace,
                level,
                limits,
                on_unavailable,
                audit_retention_days: None,
                version,
            }));
        }
    }
    for on_unavailable in [Some(OnUnavailable::Allow), Some(OnUnavailable::Block), None] {
        for audit_retention_days in [None, Some(1), Some(AUDIT_RETENTION_DAYS_MAX)] {
            records.push(Record::Config(Config {
                namespace: test_namespace(),
                level: ConfigLevel::System,
                limits: LimitSet::default(),
                on_unavailable,
                audit_retention_days,
                version: 0,
            }));
        }
    }
    check(&*store, records, |record| match record {
        Record::Config(Config { level: ConfigLevel::Entity(_), .. }) => {
            Some(Query::EntityConfigs(test_namespace(), None))
        }
        Record::Config(Config { level: ConfigLevel::EntityResource(_, on), .. }) => {
            Some(Query::EntityConfigs(test_namespace(), Some(on.clone())))
        }
        _ => None,
    })
    .await;
}

pub async fn audit_events_come_back_as_they_were_put(store: Arc<dyn Store>) {
    let details = json!({
        "": null,
        "nested": {"list": [1, -1, 1.5, "x", [], {}, [[["deep"]]]], "true": true, "false": false},
        "large": u64::MAX,
        "small": i64::MIN,
        "z": TEXTS,
        "a": "keys in any order",
    });
    let subjects = [
        AuditSubject::System,
        AuditSubject::Resource(longest_resource()),
        AuditSubject::Entity(longest_entity()),
    ];
    let unknown = AuditAction::from_stored("of another client");
    let actions = AuditAction::KNOWN.iter().cloned().chain([unknown]);
    let mut records = Vec::new();
    for (number, action) in actions.enumerate() {
        let some = number % 2 == 0;
        records.push(Record::Audit(AuditEvent {
            namespace: test_namespace(),
            id: format!("01ARZ3NDEKTSV4RRFFQ69G5F{number:02}"),
            subject: subjects[number % subjects.len()].clone(),
            at: extremes()[number % extremes().len()],
            action,
            principal: TEXTS.get(number).map(|text| (*text).into()),
            resource: some.then(longest_resource),
            details: if some { details.as_object().unwrap().clone() } else { Default::default() },
            expires_at: some.then(|| extremes()[number % extremes().len()]),
        }));
    }
    check(&*store, records, |record| match record {
        Record::Audit(event) => Some(Query::Audit(test_namespace(), event.subject.clone())),
        _ => None,
    })
    .await;
}

pub async fn usage_comes_back_as_it_was_put(store: Arc<dyn Store>) {
    let name = |number: usize| LimitName::new(format!("{}{number:02}", "n".repeat(62))).unwrap();
    let amounts = [i64::MIN, -1, 0, 1, i64::MAX].map(Millitokens::new);
    let consumed = (0..LIMITS_MAX).map(|number| (name(number), amounts[number % amounts.len()]));
    let consumed: BTreeMap<_, _> = consumed.collect();
    let mut records = Vec::new();
    for window in Window::ALL {
        for (number, expires_at) in extremes().into_iter().enumerate() {
            let at = [-90 * 86_400_000, 0, NOW.as_millis()][number % 3];
            let key = UsageKey {
                namespace: test_namespace(),
                entity: longest_entity(),
                resource: longest_resource(),
                window,
                start: window.start(Timestamp::from_millis(at)),
            };
            records.push(Record::Usage(Usage {
                key,
                consumed: if number % 2 == 0 { consumed.clone() } else { BTreeMap::new() },
                events: [0, 1, i64::MAX.unsigned_abs()][number % 3],
                expires_at: (number != 1).then_some(expires_at),
            }));
        }
    }
    check(&*store, records, |record| match record {
        Record::Usage(Usage { key, .. }) => {
            let all = Timestamp::from_millis(i64::MIN)..Timestamp::from_millis(i64::MAX);
            Some(Query::UsageOfEntity(test_namespace(), longest_entity(), None, key.window, all))
        }
        _ => None,
    })
    .await;
}

pub async fn namespaces_come_back_as_they_were_put(store: Arc<dyn Store>) {
    let mut records = Vec::new();
    for (number, at) in (0..).zip(extremes()) {
        let name = NamespaceName::new(if number == 0 { "n".repeat(64) } else { "a.b-c_D".into() });
        let (id, name) = (namespace(number), name.unwrap());
        let deleted_at = (number % 2 == 0).then_some(at);
        records.push(Record::NamespaceName(name.clone(), id.clone()));
        let is_purging = number % 4 == 0;
        let namespace = Namespace { id, name, created_at: at, deleted_at, is_purging };
        records.push(Record::Namespace(namespace));
    }
    check(&*store, records, |record| match record {
        Record::Namespace(_) => Some(Query::Namespaces),
        _ => None,
    })
    .await;
}
