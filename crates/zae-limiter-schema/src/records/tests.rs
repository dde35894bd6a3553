use std::collections::BTreeMap;

use proptest::prelude::*;
use serde_json::json;
use zae_limiter_core::{
    AuditAction, AuditEvent, AuditSubject, Config, ConfigLevel, Entity, EntityId, LimitName,
    LimitSet, Millitokens, Namespace, NamespaceName, OnUnavailable, Rate, ResourceName, Timestamp,
    Usage, UsageKey, Window,
};

use super::*;
use crate::expression::render_update;
use crate::keys::{ParsedKey, parse_key};

/// Applies an update to an item.
fn apply(item: &mut Item, actions: &[Action]) {
    for action in actions {
        match action {
            Action::Set(name, value) => drop(item.insert(name.clone(), value.clone())),
            Action::SetIfAbsent(name, value) => {
                item.entry(name.clone()).or_insert_with(|| value.clone());
            }
            Action::Remove(name) => drop(item.remove(name)),
            Action::Add(name, Value::N(_)) => {
                let now = item.get(name).and_then(Value::as_i64).unwrap_or(0);
                let Action::Add(_, by) = action else { unreachable!() };
                item.insert(name.clone(), Value::number(now + by.as_i64().unwrap()));
            }
            other => unreachable!("no record uses {other:?}"),
        }
    }
}

fn item_of(record: &Record) -> Item {
    let mut item = Item::new();
    let key = ItemKey::of(&record.key());
    item.insert("PK".to_owned(), Value::S(key.pk));
    item.insert("SK".to_owned(), Value::S(key.sk));
    apply(&mut item, &encode(record, Before::Absent).actions);
    item
}

fn ns() -> NamespaceId {
    NamespaceId::new("abcdefghijk").unwrap()
}

fn moments() -> impl Strategy<Value = Timestamp> {
    let near = 0_i64..4_000_000_000_000;
    prop_oneof![near, any::<i64>()].prop_map(Timestamp::from_millis)
}

fn entities() -> impl Strategy<Value = EntityId> {
    "[A-Za-z0-9][A-Za-z0-9_.:@-]{0,20}".prop_map(|text| EntityId::new(text).unwrap())
}

fn resources() -> impl Strategy<Value = ResourceName> {
    "[A-Za-z][A-Za-z0-9_./:-]{0,20}".prop_map(|text| ResourceName::new(text).unwrap())
}

fn limit_names() -> impl Strategy<Value = LimitName> {
    // Names that end like attributes do are the ones to get wrong.
    let text = "[a-c](_(cp|ra|rp|bx|b))?(_(cp|ra))?|[A-Za-z][A-Za-z0-9_.-]{0,9}x";
    text.prop_map(|text| LimitName::new(text).unwrap())
}

fn limits() -> impl Strategy<Value = LimitSet> {
    let amount = 1..=1_000_000_000_000_000_i64;
    let rate = (amount.clone(), amount, 1..=1_000_000_000_000_u64).prop_map(|(cp, ra, rp)| {
        Rate::new(Millitokens::new(cp), Millitokens::new(ra), rp).unwrap()
    });
    prop::collection::btree_map(limit_names(), rate, 0..6)
        .prop_map(|limits| LimitSet::from_rates(limits).unwrap())
}

fn an_entity() -> impl Strategy<Value = Record> {
    let metadata = prop::collection::btree_map(r"\\{0,2}|.{0,9}", ".{0,9}", 0..4);
    let id = (entities(), prop::option::of(".{0,9}"), prop::option::of(entities()));
    (id, any::<bool>(), metadata, moments()).prop_map(|(id, cascade, metadata, created_at)| {
        let (id, name, parent) = id;
        let namespace = ns();
        Record::Entity(Entity { namespace, id, name, parent, cascade, metadata, created_at })
    })
}

fn a_config() -> impl Strategy<Value = Record> {
    let level = prop_oneof![
        Just(ConfigLevel::System),
        resources().prop_map(ConfigLevel::Resource),
        entities().prop_map(ConfigLevel::Entity),
        (entities(), resources()).prop_map(|(id, on)| ConfigLevel::EntityResource(id, on)),
    ];
    let choices = [None, Some(OnUnavailable::Allow), Some(OnUnavailable::Block)];
    let version = 0..=i64::MAX.unsigned_abs();
    let retention = prop::option::of(1..=zae_limiter_core::AUDIT_RETENTION_DAYS_MAX);
    (level, limits(), prop::sample::select(choices.to_vec()), retention, version).prop_map(
        |(level, limits, choice, days, version)| {
            let on_unavailable = choice.filter(|_| level == ConfigLevel::System);
            let audit_retention_days = days.filter(|_| level == ConfigLevel::System);
            let namespace = ns();
            Record::Config(Config {
                namespace,
                level,
                limits,
                on_unavailable,
                audit_retention_days,
                version,
            })
        },
    )
}

fn some_json() -> impl Strategy<Value = serde_json::Value> {
    let leaf = prop_oneof![
        Just(json!(null)),
        any::<bool>().prop_map(|flag| json!(flag)),
        any::<i64>().prop_map(|number| json!(number)),
        any::<u64>().prop_map(|number| json!(number)),
        // Halves: a whole number comes back without its point.
        any::<i32>().prop_map(|number| json!(f64::from(number) + 0.5)),
        ".{0,9}".prop_map(|text| json!(text)),
    ];
    leaf.prop_recursive(3, 12, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(|list| json!(list)),
            prop::collection::btree_map(r"\\{0,2}|.{0,5}", inner, 0..4).prop_map(|map| json!(map)),
        ]
    })
}

fn an_event() -> impl Strategy<Value = Record> {
    let subject = prop_oneof![
        entities().prop_map(AuditSubject::Entity),
        resources().prop_map(AuditSubject::Resource),
        Just(AuditSubject::System),
    ];
    let details = prop::collection::btree_map(".{0,5}", some_json(), 0..4);
    let who = (prop::option::of(".{0,9}"), prop::option::of(resources()));
    let when = (moments(), prop::option::of(moments()));
    ("[0-9A-HJKMNP-TV-Z]{26}", subject, who, details, when).prop_map(
        |(id, subject, (principal, resource), details, (at, expires_at))| {
            Record::Audit(AuditEvent {
                namespace: ns(),
                id,
                subject,
                at,
                action: AuditAction::LimitsSet,
                principal,
                resource,
                details: details.into_iter().collect(),
                expires_at,
            })
        },
    )
}

fn a_usage() -> impl Strategy<Value = Record> {
    let window = prop::sample::select(&Window::ALL[..]);
    let key = (entities(), resources(), window, 0_i64..4_000_000_000_000);
    let consumed = prop::collection::btree_map(limit_names(), any::<i64>(), 0..6);
    let rest = (0..=i64::MAX.unsigned_abs(), prop::option::of(moments()));
    (key, consumed, rest).prop_map(|((entity, resource, window, at), consumed, rest)| {
        let start = window.start(Timestamp::from_millis(at));
        let consumed = consumed.into_iter().map(|(name, by)| (name, Millitokens::new(by)));
        Record::Usage(Usage {
            key: UsageKey { namespace: ns(), entity, resource, window, start },
            consumed: consumed.collect(),
            events: rest.0,
            expires_at: rest.1,
        })
    })
}

fn a_namespace() -> impl Strategy<Value = Record> {
    let name = "[A-Za-z][A-Za-z0-9_.-]{0,20}".prop_map(|text| NamespaceName::new(text).unwrap());
    (name, moments(), prop::option::of(moments()), any::<bool>()).prop_map(
        |(name, created_at, deleted_at, by_name)| {
            if by_name {
                return Record::NamespaceName(name, ns());
            }
            let is_purging = deleted_at.is_some_and(|at| at.as_millis() % 2 == 0);
            Record::Namespace(Namespace { id: ns(), name, created_at, deleted_at, is_purging })
        },
    )
}

fn records() -> impl Strategy<Value = Record> {
    prop_oneof![an_entity(), a_config(), an_event(), a_usage(), a_namespace()]
}

/// Two records with the same key.
fn successions() -> impl Strategy<Value = (Record, Record)> {
    let pairs = prop_oneof![
        (an_entity(), an_entity()),
        (a_config(), a_config()),
        (an_event(), an_event()),
        (a_usage(), a_usage()),
        (a_namespace(), a_namespace()),
    ];
    pairs.prop_filter_map("two kinds", |(before, after)| Some((under(&after, before)?, after)))
}

/// The record with the key of another.
fn under(place: &Record, record: Record) -> Option<Record> {
    Some(match (place, record) {
        (Record::Entity(place), Record::Entity(mut it)) => {
            it.id = place.id.clone();
            Record::Entity(it)
        }
        (Record::Config(place), Record::Config(mut it)) => {
            it.level = place.level.clone();
            it.on_unavailable = it.on_unavailable.filter(|_| it.level == ConfigLevel::System);
            Record::Config(it)
        }
        (Record::Audit(place), Record::Audit(mut it)) => {
            (it.id, it.subject) = (place.id.clone(), place.subject.clone());
            Record::Audit(it)
        }
        (Record::Usage(place), Record::Usage(mut it)) => {
            it.key = place.key.clone();
            Record::Usage(it)
        }
        (Record::Namespace(_), it @ Record::Namespace(_)) => it,
        (Record::NamespaceName(name, _), Record::NamespaceName(_, id)) => {
            Record::NamespaceName(name.clone(), id)
        }
        _ => return None,
    })
}

proptest! {
    #[test]
    fn a_record_is_read_as_it_was_written(record in records()) {
        let key = record.key();
        let read = decode(&key, &item_of(&record));
        prop_assert_eq!(read, Ok(Some(record)));
    }

    #[test]
    fn a_record_takes_the_place_of_another(
        (before, after) in successions(), foreign in "[a-z]{3}#",
    ) {
        let mut item = item_of(&before);
        item.insert(foreign.clone(), Value::text("kept"));
        let encoded = encode(&after, Before::Item(&item));
        let plain = item_of(&after);
        apply(&mut item, &encoded.actions);
        prop_assert_eq!(decode(&after.key(), &item), Ok(Some(after)));
        // Only the attribute of another client is left.
        prop_assert_eq!(item.remove(&foreign), Some(Value::text("kept")));
        prop_assert_eq!(item, plain);
    }

    #[test]
    fn a_record_without_one_of_its_attributes_is_read_or_refused(
        record in records(), at: prop::sample::Index, other in any::<bool>(),
    ) {
        let mut item = item_of(&record);
        let names: Vec<String> = item.keys().cloned().collect();
        let name = at.get(&names).clone();
        if other {
            item.insert(name.clone(), Value::L(Vec::new()));
        } else {
            item.remove(&name);
        }
        if let Err(malformed) = decode(&record.key(), &item) {
            prop_assert!(malformed.item == ItemKey::of(&record.key()).to_string());
            let stem = name.trim_end_matches(|c: char| c != '_');
            let is_named = malformed.attribute == name || malformed.attribute.starts_with(stem);
            prop_assert!(is_named, "{} for {}", malformed, name);
        }
    }
}

const AT: Timestamp = Timestamp::from_millis(1_794_752_736_789);

fn id(text: &str) -> EntityId {
    EntityId::new(text).unwrap()
}

fn gpt() -> ResourceName {
    ResourceName::new("gpt-4").unwrap()
}

fn config(level: ConfigLevel) -> Record {
    let limits = LimitSet::new([
        zae_limiter_core::Limit::per_minute("rpm", 100),
        zae_limiter_core::Limit::per_hour("tpm", 10_000).burst(15_000),
    ]);
    let on_unavailable = (level == ConfigLevel::System).then_some(OnUnavailable::Block);
    let audit_retention_days = (level == ConfigLevel::System).then_some(30);
    Record::Config(Config {
        namespace: ns(),
        level,
        limits: limits.unwrap(),
        on_unavailable,
        audit_retention_days,
        version: 3,
    })
}

fn examples() -> Vec<(&'static str, Record)> {
    let name = NamespaceName::new("prod").unwrap();
    let key = UsageKey {
        namespace: ns(),
        entity: id("key-1"),
        resource: gpt(),
        window: Window::Hourly,
        start: Window::Hourly.start(AT),
    };
    let limit = |name: &str| LimitName::new(name).unwrap();
    vec![
        (
            "entity",
            Record::Entity(Entity {
                namespace: ns(),
                id: id("key-1"),
                name: Some("Key One".to_owned()),
                parent: Some(id("project-1")),
                cascade: true,
                metadata: BTreeMap::from([("team".to_owned(), "a".to_owned())]),
                created_at: AT,
            }),
        ),
        ("config_system", config(ConfigLevel::System)),
        ("config_resource", config(ConfigLevel::Resource(gpt()))),
        ("config_entity", config(ConfigLevel::Entity(id("key-1")))),
        ("config_entity_resource", config(ConfigLevel::EntityResource(id("key-1"), gpt()))),
        (
            "audit",
            Record::Audit(AuditEvent {
                namespace: ns(),
                id: "01ARZ3NDEKTSV4RRFFQ69G5FAV".to_owned(),
                subject: AuditSubject::Resource(gpt()),
                at: AT,
                action: AuditAction::LimitsSet,
                principal: None,
                resource: Some(gpt()),
                details: json!({"limits": [{"name": "rpm", "capacity": 100}], "on": null})
                    .as_object()
                    .unwrap()
                    .clone(),
                expires_at: Some(Timestamp::from_millis(1_802_528_736_789)),
            }),
        ),
        (
            "usage",
            Record::Usage(Usage {
                key,
                consumed: BTreeMap::from([
                    (limit("rpm"), Millitokens::new(7_000)),
                    (limit("tpm"), Millitokens::new(1_500)),
                ]),
                events: 7,
                expires_at: Some(Timestamp::from_millis(1_802_530_800_000)),
            }),
        ),
        (
            "namespace",
            Record::Namespace(Namespace {
                id: ns(),
                name: name.clone(),
                created_at: AT,
                deleted_at: Some(AT),
                is_purging: false,
            }),
        ),
        ("namespace_name", Record::NamespaceName(name, ns())),
    ]
}

/// One line per attribute.
fn shown(item: &Item) -> String {
    let lines = item.iter().map(|(name, value)| format!("{name} = {value:?}"));
    lines.collect::<Vec<_>>().join("\n")
}

#[test]
fn items_are_as_other_clients_expect_them() {
    for (name, record) in examples() {
        assert_eq!(decode(&record.key(), &item_of(&record)), Ok(Some(record.clone())));
        insta::assert_snapshot!(format!("item_{name}"), shown(&item_of(&record)));
        let encoded = encode(&record, Before::Item(&item_of(&record)));
        let rendered = render_update(&encoded.actions, &encoded.pins);
        insta::assert_debug_snapshot!(format!("update_{name}"), rendered);
    }
}

#[test]
fn the_version_is_read_as_it_was_written() {
    let whole = Version {
        schema: Version::SCHEMA.to_owned(),
        aggregator: Some("0.1.0".to_owned()),
        client_min: "0.0.0".to_owned(),
        updated_at: Some(AT),
        updated_by: Some("client:0.1.0".to_owned()),
    };
    let bare = Version { aggregator: None, updated_at: None, updated_by: None, ..whole.clone() };
    for version in [&whole, &bare] {
        let mut item = Item::new();
        apply(&mut item, &version.update().actions);
        assert_eq!(Version::decode(&item).as_ref(), Ok(version));
    }
    let mut item = Item::new();
    apply(&mut item, &whole.update().actions);
    insta::assert_snapshot!("item_version", shown(&item));
    let missing = Version::decode(&Item::new()).unwrap_err();
    assert_eq!(
        missing.to_string(),
        "item _/SYSTEM# #VERSION: attribute schema_version should be present"
    );
}

#[test]
fn registries_are_added_to_and_taken_from() {
    let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
    let both = registry::ResourceChanges { added: names(&["a", "b"]), removed: names(&["c"]) };
    let add = registry::ResourceChanges { added: names(&["a"]), ..Default::default() };
    let remove = registry::ResourceChanges { removed: names(&["a"]), ..Default::default() };
    let before = Item::from([("resources".to_owned(), Value::Ss(names(&["c", "d"])))]);
    let mut counts = BTreeMap::from([("gpt-4".to_owned(), 2), ("same".to_owned(), 0)]);
    let updates = [
        add.update(&ns(), None),
        remove.update(&ns(), None),
        both.update(&ns(), Some(&before)),
        both.update(&ns(), None),
        registry::count_entities(&ns(), &counts),
        Some(registry::forget_counter(&ns(), "gpt-4")),
    ];
    let rendered = updates.map(|update| {
        let update = update.expect("something changes");
        (update.key.to_string(), render_update(&update.actions, &update.conditions))
    });
    insta::assert_debug_snapshot!("updates_of_registries", rendered);
    assert_eq!(registry::ResourceChanges::default().update(&ns(), None), None);
    counts.remove("gpt-4");
    assert_eq!(registry::count_entities(&ns(), &counts), None);
}

#[test]
fn registries_name_resources() {
    let item =
        Item::from([("resources".to_owned(), Value::Ss(["b", "a"].map(str::to_owned).into()))]);
    let named: Vec<String> =
        registry::resources(&ns(), &item).unwrap().iter().map(ToString::to_string).collect();
    assert_eq!(named, ["a", "b"]);
    assert!(registry::resources(&ns(), &Item::new()).unwrap().is_empty());
    let wrong = Item::from([("resources".to_owned(), Value::number(1))]);
    assert_eq!(registry::resources(&ns(), &wrong).unwrap_err().attribute, "resources");

    let mut item = Item::from([("GSI4PK".to_owned(), Value::text("abcdefghijk"))]);
    for resource in ["GSI4PK", "PK", "gpt-4"] {
        let resource = ResourceName::new(resource).unwrap();
        let level = ConfigLevel::EntityResource(id("a"), resource);
        let counts = BTreeMap::from([(registry::counter(&level).unwrap(), 1)]);
        apply(&mut item, &registry::count_entities(&ns(), &counts).unwrap().actions);
    }
    item.insert("_default_".to_owned(), Value::number(1));
    item.insert("none".to_owned(), Value::number(0));
    let named: Vec<String> =
        registry::resources_of_entities(&item).iter().map(ToString::to_string).collect();
    assert_eq!(named, ["GSI4PK", "PK", "gpt-4"]);
}

/// Items that the Python client writes, and ours never does.
#[test]
fn items_of_other_clients_are_complete() {
    let text = Value::text;
    let item = |pairs: &[(&str, Value)]| -> Item {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect()
    };
    // A setting that is no limit of ours, without a version.
    let system = Key::Config(ns(), ConfigLevel::System);
    let read = decode(&system, &item(&[("audit_retention_days", Value::number(30))]));
    let Ok(Some(Record::Config(config))) = read else { panic!("{read:?}") };
    assert_eq!((config.version, config.limits.is_empty()), (0, true));
    assert_eq!(config.audit_retention_days, Some(30));
    for nonsense in [Value::number(0), Value::number(-1), Value::number(36_501), text("30")] {
        let read = decode(&system, &item(&[("audit_retention_days", nonsense)]));
        let Ok(Some(Record::Config(config))) = read else { panic!("{read:?}") };
        assert_eq!(config.audit_retention_days, None);
    }
    // A burst of its own, and a limit of a later release.
    let n = |number: &str| Value::N(number.to_owned());
    let old = item(&[
        ("l_rpm_cp", n("10")),
        ("l_rpm_bx", n("15")),
        ("l_rpm_ra", n("10")),
        ("l_rpm_rp", n("60")),
        ("w_session_cp", n("5")),
        ("config_version", n("1")),
    ]);
    let Ok(Some(Record::Config(config))) = decode(&system, &old) else { panic!("a config") };
    assert_eq!(config.limits.rates()[0].capacity().get(), 15_000);
    let actions = encode(&Record::Config(config), Before::Item(&old)).actions;
    assert!(actions.contains(&Action::Remove("l_rpm_bx".to_owned())));
    // Limits on all resources.
    let event = item(&[
        ("action", text("limits_set")),
        ("timestamp", text("2026-11-15T14:25:36Z")),
        ("resource", text("_default_")),
        ("principal", Value::Null),
        ("details", Value::M(item(&[("n", n("1.5"))]))),
    ]);
    let key = Key::Audit(ns(), AuditSubject::System, "x".to_owned());
    let Ok(Some(Record::Audit(read))) = decode(&key, &event) else { panic!("an event") };
    assert_eq!((read.resource, read.at.as_millis()), (None, 1_794_752_736_000));
    assert_eq!(read.details["n"], json!(1.5));
    // Actions of Python 0.17, and of a later release.
    for (name, known) in [
        ("bucket_reset", Some(AuditAction::BucketReset)),
        ("bucket_topped_up", Some(AuditAction::BucketToppedUp)),
        ("entity_parent_changed", Some(AuditAction::EntityParentChanged)),
        ("limits_frozen", None),
    ] {
        let mut theirs = event.clone();
        theirs.insert("action".to_owned(), text(name));
        let Ok(Some(Record::Audit(read))) = decode(&key, &theirs) else { panic!("an event") };
        assert_eq!(read.action.as_str(), name);
        assert_eq!(matches!(read.action, AuditAction::Other(_)), known.is_none());
        assert!(known.is_none_or(|known| known == read.action));
    }
    // Another client has changed the time: the milliseconds are of the old one.
    let mut moved = item_of(&examples()[0].1);
    moved.insert("created_at".to_owned(), text("2027-01-01T00:00:00Z"));
    let key = examples()[0].1.key();
    let Ok(Some(Record::Entity(read))) = decode(&key, &moved) else { panic!("an entity") };
    assert_eq!(read.created_at.as_millis(), 1_798_761_600_000);
    // A namespace whose items are being deleted.
    let mut purged = item_of(&examples()[7].1);
    purged.insert("status".to_owned(), text("purging"));
    let Ok(Some(Record::Namespace(read))) = decode(&Key::Namespace(ns()), &purged) else {
        panic!("a namespace")
    };
    assert!(read.deleted_at.is_some());
    // A counter of a later release beside a limit of a usage item.
    let mut usage = item_of(&examples()[6].1);
    usage.insert("rpm#od".to_owned(), n("3"));
    assert_eq!(decode(&examples()[6].1.key(), &usage), Ok(Some(examples()[6].1.clone())));
}

#[test]
fn every_example_is_found_by_its_key() {
    for (name, record) in examples() {
        let found = parse_key(&ItemKey::of(&record.key()));
        assert_eq!(found, Some(ParsedKey::Record(record.key())), "{name}");
    }
}
