//! `docs/schema.md` is what the code says: keys, attributes and conditions are read off real writes.
//!
//! `UPDATE_DOCS=1 cargo test -p zae-limiter-schema --test page` writes it again.
#![allow(clippy::unwrap_used, reason = "a test reports what is wrong by panicking")]

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use zae_limiter_core::{
    AuditAction, AuditEvent, AuditSubject, Bucket, BucketKey, Config, ConfigLevel, Entity,
    EntityId, Limit, LimitName, LimitSet, Millitokens, Namespace, NamespaceId, NamespaceName,
    NamespaceStatus, OnUnavailable, Record, ResourceName, Scope, Timestamp, Usage, UsageKey,
    Window,
};
use zae_limiter_schema::bucket::{After, Expiry, Owner, create};
use zae_limiter_schema::records::booking::{Booking, Position, Source};
use zae_limiter_schema::records::checkpoint::{self, Checkpoint, Hold};
use zae_limiter_schema::records::registry::{self, ResourceChanges};
use zae_limiter_schema::records::tombstone;
use zae_limiter_schema::records::{Before, Version, encode, encode_name, has_status};
use zae_limiter_schema::{
    ATTRIBUTES, Action, Attribute, BucketItemKey, Change, Condition, Index, Item, ItemKey,
    SHARD_ZERO, Update, WRITERS,
};

const NAMESPACE: &str = "abcdefghijk";
const ENTITY: &str = "EXAMPLE-ENTITY";
const PARENT: &str = "EXAMPLE-PARENT";
const RESOURCE: &str = "EXAMPLE-RESOURCE";
const NAME: &str = "EXAMPLE-NAME";
const LIMIT: &str = "EXAMPLE-LIMIT";
const ULID: &str = "01ARZ3NDEKTSV4RRFFQ69G5FAV";
const STREAM_SHARD: &str = "EXAMPLE-STREAM-SHARD";
/// The start of an hour; the label of its window is replaced, too.
const AT: Timestamp = Timestamp::from_millis(1_794_751_200_000);

/// The example's names as the placeholders of the page.
fn general(text: &str) -> String {
    let window = Window::Hourly.label(AT);
    let names = [
        (NAMESPACE, "{ns}"),
        (STREAM_SHARD, "{stream_shard}"),
        (ENTITY, "{entity}"),
        (PARENT, "{parent}"),
        (RESOURCE, "{resource}"),
        (NAME, "{name}"),
        (LIMIT, "*"),
        (ULID, "{ulid}"),
        (&window, "{window_start}"),
    ];
    names.into_iter().fold(text.to_owned(), |text, (name, other)| text.replace(name, other))
}

/// A kind of item.
struct Kind {
    title: &'static str,
    /// One or two sentences in Markdown: what it is, and who writes it.
    about: &'static str,
    /// Writes that together show all its attributes and conditions.
    writes: Vec<Update>,
    attributes: &'static [Attribute],
}

const fn row(name: &'static str, unit: &'static str, meaning: &'static str) -> Attribute {
    Attribute { name, unit, meaning }
}

fn ns() -> NamespaceId {
    NamespaceId::new(NAMESPACE).unwrap()
}

fn entity() -> EntityId {
    EntityId::new(ENTITY).unwrap()
}

fn resource() -> ResourceName {
    ResourceName::new(RESOURCE).unwrap()
}

fn limits() -> LimitSet {
    LimitSet::new([Limit::per_minute(LIMIT, 100)]).unwrap()
}

/// A record as it is created, and as it is written over an item that exists.
fn writes_of(record: &Record) -> Vec<Update> {
    let key = ItemKey::of(&record.key());
    let created = encode(record, Before::Absent);
    let item = created.actions.iter().filter_map(|action| match action {
        Action::Set(name, value) => Some((name.clone(), value.clone())),
        _ => None,
    });
    let changed = encode(record, Before::Item(&item.collect::<Item>()));
    let update = |actions, conditions| Update { key: key.clone(), actions, conditions };
    vec![update(created.actions, created.pins), update(changed.actions, changed.pins)]
}

fn config(level: ConfigLevel) -> Vec<Update> {
    let is_system = level == ConfigLevel::System;
    writes_of(&Record::Config(Config {
        namespace: ns(),
        level,
        limits: limits(),
        on_unavailable: is_system.then_some(OnUnavailable::Block),
        audit_retention_days: is_system.then_some(30),
        version: 1,
    }))
}

fn usage() -> Vec<Update> {
    let key = UsageKey {
        namespace: ns(),
        entity: entity(),
        resource: resource(),
        window: Window::Hourly,
        start: AT,
    };
    let limit = || LimitName::new(LIMIT).unwrap();
    let position = || Position::new("2026-11-15T00:00:00.000", "1").unwrap();
    let booking = Booking {
        key: key.clone(),
        consumed: BTreeMap::from([(limit(), 1_000)]),
        events: 1,
        expires_at: AT,
        sources: BTreeMap::from([(0, Source { first: position(), last: position() })]),
        earliest: AT,
    };
    let record = Usage {
        key,
        consumed: BTreeMap::from([(limit(), Millitokens::new(1_000))]),
        events: 1,
        expires_at: Some(AT),
    };
    let mut writes = writes_of(&Record::Usage(record));
    writes.push(booking.add());
    let Change::Update(created) = booking.create(Some(AT)) else { panic!("not an update") };
    writes.push(created);
    writes
}

/// Every change of a namespace requires the status that it starts from.
fn namespace_by_id(namespace: Namespace) -> Vec<Update> {
    let mut writes = writes_of(&Record::Namespace(namespace));
    writes[1].conditions.push(has_status(NamespaceStatus::Deleted));
    writes
}

fn namespace_by_name(name: &NamespaceName) -> Vec<Update> {
    let mut writes = writes_of(&Record::NamespaceName(name.clone(), ns()));
    writes[0].actions = encode_name(name, &ns(), Some(AT));
    writes
}

const TAKEOVER: Duration = Duration::from_secs(20);

fn checkpoints() -> Vec<Update> {
    let seen = Checkpoint {
        shard: STREAM_SHARD.to_owned(),
        stream: "2026-11-15T00:00:00.000".to_owned(),
        owner: Some("worker".to_owned()),
        beat: 1,
        position: Some("1".to_owned()),
        read_to: Some(AT),
        read: true,
        done: false,
        takeover_after: Some(TAKEOVER),
        seen_at: Some(AT),
        archived_at: Some(AT),
    };
    vec![
        checkpoint::register(&seen, AT),
        checkpoint::claim(&seen, None, "worker", TAKEOVER, AT),
        checkpoint::claim(&seen, Some(&seen), "worker", TAKEOVER, AT),
        checkpoint::advance(&seen, Some("1"), "worker", Hold::Release, AT),
        checkpoint::hand_over(&seen, &seen),
    ]
}

const CONFIG: &[Attribute] = &[
    row("l_*_cp", "tokens", "The ceiling of the limit."),
    row("l_*_ra", "tokens", "What the limit earns in one period."),
    row("l_*_rp", "seconds", "The period."),
    row(
        "config_version",
        "number",
        "Rises with every change. Absent is 0. The Python client always writes 1.",
    ),
    row("entity_id", "text", "The entity, at the two entity levels."),
    row("resource", "text", "The resource; `_default_` for an entity's limits on all resources."),
    row(
        "on_unavailable",
        "`allow` or `block`",
        "System level only: what acquires do when the store does not answer.",
    ),
    row("audit_retention_days", "days", "System level only: how long audit events are kept."),
];

const NAMESPACES: &[Attribute] = &[
    row("namespace_id", "text", "The id that item keys start with: 11 characters."),
    row("namespace_name", "text", "The name that users see."),
    row(
        "status",
        "`active`, `deleted` or `purging`",
        "`purging` while a client deletes the items.",
    ),
    row("created_at", "ISO 8601 time", "When the namespace was registered."),
    row(
        "deleted_at",
        "ISO 8601 time",
        "When it was deleted. Its items stay until they are purged. Only on the record by id.",
    ),
];

const ENTITY_ATTRIBUTES: &[Attribute] = &[
    row("entity_id", "text", "The entity's id."),
    row("name", "text", "A name for people."),
    row("parent_id", "text or null", "The parent."),
    row("cascade", "true or false", "Whether an acquire also takes from the parent."),
    row("metadata", "map of texts", "Whatever the user stored."),
    row("created_at", "ISO 8601 time", "When the entity was created."),
];

const RESOURCES: &[Attribute] = &[row("resources", "set of texts", "The names of the resources.")];

const ENTITY_CONFIGS: &[Attribute] = &[row(
    "{resource}",
    "entities",
    "How many entities have limits on this resource; `_default_` counts those on all \
                 resources. A resource named like a key attribute has `#` appended.",
)];

const USAGE: &[Attribute] = &[
    row("entity_id", "text", "The entity."),
    row("resource", "text", "The resource."),
    row("window", "`hourly`, `daily` or `monthly`", "The length of the window."),
    row("window_start", "ISO 8601 time or date", "When the window starts."),
    row("*", "tokens", "Net consumption of the limit with this name."),
    row(
        "total_events",
        "changes",
        "How many changes of the bucket were booked. Every booking raises it.",
    ),
    row(
        "seq#{shard}",
        "text",
        "The stream position just after the last booked change of this shard. It keeps a batch that is delivered twice from counting twice.",
    ),
    row(
        "after#",
        "text, epoch milliseconds",
        "The entity was deleted: changes up to this moment do not count. Absent if it was not.",
    ),
    row("ttl", "epoch seconds", "When DynamoDB may delete the item."),
];

const TOMBSTONE: &[Attribute] = &[
    row("deleted_at", "epoch milliseconds", "When the deletion began, by the clock of its client."),
    row("ttl", "epoch seconds", "When DynamoDB may delete the item: three days later."),
];

const AUDIT: &[Attribute] = &[
    row("entity_id", "text", "What was changed: the `{entity}` of the key."),
    row("event_id", "ULID", "The id of the event; it sorts by time."),
    row("timestamp", "ISO 8601 time", "When the change was made."),
    row("action", "text", "What was done, for example `limits_set`."),
    row("principal", "text or null", "Who did it."),
    row("resource", "text or null", "The resource, if the change concerns one."),
    row("details", "map", "What was set."),
    row(
        "ttl",
        "epoch seconds",
        "When DynamoDB may delete the item. The aggregator archives it first.",
    ),
];

const VERSION: &[Attribute] = &[
    row("schema_version", "release", "The release of the format, now `0.10.0`."),
    row("lambda_version", "release or null", "The release of the deployed aggregator."),
    row("client_min_version", "release", "The oldest client that may use the table."),
    row("updated_at", "ISO 8601 time", "When the record was written."),
    row("updated_by", "text or null", "The program that wrote it."),
];

const CHECKPOINT: &[Attribute] = &[
    row("stream", "text", "The label of the stream."),
    row(
        "owner",
        "text",
        "The worker that processes the stream shard. Absent after it has stopped.",
    ),
    row("beat", "number", "The heartbeat: it rises while the owner is alive."),
    row("position", "text", "The sequence number of the last processed record."),
    row(
        "read_to",
        "epoch milliseconds",
        "The time of the last processed record. It names the time of changes that are lost.",
    ),
    row(
        "seen_at",
        "epoch milliseconds",
        "When it was last known that no change was missed. Counts while there is no position.",
    ),
    row(
        "archived_at",
        "epoch milliseconds",
        "When a worker that archives audit events was last there. Workers without an archive leave such events to it.",
    ),
    row(
        "takeover_ms",
        "milliseconds",
        "How long the owner's heartbeat may stay unchanged before another worker takes over.",
    ),
    row(
        "read",
        "true or false",
        "Whether the stream shard is closed and its changes are processed. Audit events may still wait for the archive.",
    ),
    row("done", "true or false", "Whether the stream shard is closed and processed to its end."),
    row("ttl", "epoch seconds", "When DynamoDB may delete the item."),
];

fn kinds() -> Vec<Kind> {
    let name = NamespaceName::new(NAME).unwrap();
    let resources = BTreeSet::from([RESOURCE.to_owned()]);
    let added = ResourceChanges { added: resources.clone(), ..ResourceChanges::default() };
    let replaced = ResourceChanges { added: resources.clone(), removed: ["x".to_owned()].into() };
    let removed = ResourceChanges { removed: resources, ..ResourceChanges::default() };
    let namespace = Namespace {
        id: ns(),
        name: name.clone(),
        created_at: AT,
        deleted_at: Some(AT),
        is_purging: false,
    };
    vec![
        Kind {
            title: "Entity",
            about: "One for each entity that was created. The store writes it when an entity is created or \
                    changed.",
            writes: writes_of(&Record::Entity(Entity {
                namespace: ns(),
                id: entity(),
                name: Some("name".to_owned()),
                parent: Some(EntityId::new(PARENT).unwrap()),
                cascade: true,
                metadata: BTreeMap::new(),
                created_at: AT,
            })),
            attributes: ENTITY_ATTRIBUTES,
        },
        Kind {
            title: "Limits of the system",
            about: "The system defaults, for entities and resources without other limits, and the namespace's \
                    settings. The store writes it when limits are set.",
            writes: config(ConfigLevel::System),
            attributes: CONFIG,
        },
        Kind {
            title: "Limits of a resource",
            about: "The store writes it when limits are set, in one transaction with the registry of \
                    resources.",
            writes: config(ConfigLevel::Resource(resource())),
            attributes: CONFIG,
        },
        Kind {
            title: "Limits of an entity on all resources",
            about: "The store writes it when limits are set, in one transaction with the registry of \
                    entity limits.",
            writes: config(ConfigLevel::Entity(entity())),
            attributes: CONFIG,
        },
        Kind {
            title: "Limits of an entity on a resource",
            about: "The store writes it when limits are set, in one transaction with the registry of \
                    entity limits.",
            writes: config(ConfigLevel::EntityResource(entity(), resource())),
            attributes: CONFIG,
        },
        Kind {
            title: "Registry of resources",
            about: "The resources that have limits. The store updates it in one transaction with \
                    their limits.",
            writes: [
                added.update(&ns(), None),
                removed.update(&ns(), None),
                replaced.update(&ns(), None),
            ]
            .into_iter()
            .flatten()
            .collect(),
            attributes: RESOURCES,
        },
        Kind {
            title: "Registry of entity limits",
            about: "How many entities have limits of their own. The store updates it in one \
                    transaction with their limits.",
            writes: vec![
                registry::count_entities(&ns(), &BTreeMap::from([(RESOURCE.to_owned(), 1)]))
                    .unwrap(),
                registry::forget_counter(&ns(), RESOURCE),
            ],
            attributes: ENTITY_CONFIGS,
        },
        Kind {
            title: "Usage",
            about: "What an entity used of a resource in one window. The aggregator adds to it, one \
                    write for each batch of stream records; a migration writes whole \
                    records.",
            writes: usage(),
            attributes: USAGE,
        },
        Kind {
            title: "Tombstone of an entity",
            about: "The entity was deleted. The store writes it first. The aggregator checks it when it \
                    creates a usage record: changes made before create none.",
            writes: vec![tombstone::write(&Scope::Entity(ns(), entity()), AT)],
            attributes: TOMBSTONE,
        },
        Kind {
            title: "Tombstone of a namespace",
            about: "The namespace was purged, or is being purged. The aggregator creates no usage in it.",
            writes: vec![tombstone::write(&Scope::Namespace(ns()), AT)],
            attributes: TOMBSTONE,
        },
        Kind {
            title: "Audit event",
            about: "One for each change of entities, limits and namespaces. The store writes it in one \
                    transaction with the change and never changes it. `{entity}` is `$SYSTEM` or \
                    `$RESOURCE:{resource}` for the limits of these levels.",
            writes: writes_of(&Record::Audit(AuditEvent {
                namespace: ns(),
                id: ULID.to_owned(),
                subject: AuditSubject::Entity(entity()),
                at: AT,
                action: AuditAction::LimitsSet,
                principal: Some("me".to_owned()),
                resource: Some(resource()),
                details: serde_json::Map::new(),
                expires_at: Some(AT),
            })),
            attributes: AUDIT,
        },
        Kind {
            title: "Namespace by id",
            about: "The authoritative record of a namespace. The store writes it when a namespace is \
                    registered, deleted or recovered.",
            writes: namespace_by_id(namespace),
            attributes: NAMESPACES,
        },
        Kind {
            title: "Namespace by name",
            about: "Which namespace has a name now. The store writes it together with the record by id.",
            writes: namespace_by_name(&name),
            attributes: NAMESPACES,
        },
        Kind {
            title: "Version",
            about: "The release of the table's format. The program that creates, deploys or upgrades the \
                    table writes it. A client refuses a table of a later release.",
            writes: vec![
                Version {
                    schema: Version::SCHEMA.to_owned(),
                    aggregator: Some("0.1.0".to_owned()),
                    client_min: "0.0.0".to_owned(),
                    updated_at: Some(AT),
                    updated_by: Some("me".to_owned()),
                }
                .update(),
            ],
            attributes: VERSION,
        },
        Kind {
            title: "Checkpoint of a stream shard",
            about: "How far a shard of the change stream was processed. Only aggregators that run as a \
                    daemon write it.",
            writes: checkpoints(),
            attributes: CHECKPOINT,
        },
    ]
}

fn bucket() -> Update {
    let limits = Arc::new(limits());
    let state = Bucket::full(Arc::clone(&limits), AT);
    let after = After { bucket: &state, whole: &limits, shard_count: 1, limits_at: Some(AT) };
    let bucket = BucketKey { namespace: ns(), entity: entity(), resource: resource() };
    let key = BucketItemKey { bucket, shard: SHARD_ZERO };
    create(&key, &after, &Owner { parent: None }, Expiry::At(AT))
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

/// The name of an attribute as the page has it; `None` for keys and for the milliseconds of a time.
fn shown(name: &str) -> Option<String> {
    if name.starts_with("GSI") || name.ends_with("#ms") {
        return None;
    }
    Some(if name.starts_with("seq#") { "seq#{shard}".to_owned() } else { general(name) })
}

fn code<S: AsRef<str>>(names: impl IntoIterator<Item = S>) -> String {
    let names = names.into_iter().map(|name| format!("`{}`", name.as_ref()));
    names.collect::<Vec<_>>().join(", ")
}

/// The table of an item's keys. `{shard}` is the number at the end of a bucket's keys.
fn keys(update: &Update, general: impl Fn(&str) -> String) -> String {
    let mut page = String::from("| key | value |\n| --- | --- |\n");
    let mut line = |name: &str, value: &str| {
        writeln!(page, "| `{name}` | `{}` |", general(value)).unwrap();
    };
    line("PK", &update.key.pk);
    line("SK", &update.key.sk);
    for name in Index::ALL.into_iter().flat_map(|index| [index.pk(), index.sk()]) {
        let set = update.actions.iter().find_map(|action| match action {
            Action::Set(set, value) | Action::SetIfAbsent(set, value) if set == name => {
                value.as_str()
            }
            _ => None,
        });
        if let Some(value) = set {
            line(name, value);
        }
    }
    page
}

/// One kind of item. Panics where its writes and its explanations do not agree.
fn section(kind: &Kind) -> String {
    let Kind { title, about, writes, attributes } = kind;
    let actions = writes.iter().flat_map(|update| &update.actions);
    let written: BTreeSet<String> = actions.map(Action::attribute).filter_map(shown).collect();
    let explained: BTreeSet<String> = attributes.iter().map(|one| one.name.to_owned()).collect();
    let lacking: Vec<&String> = written.difference(&explained).collect();
    assert!(lacking.is_empty(), "{title}: explain {lacking:?} in tests/page.rs");
    let conditions = writes.iter().flat_map(|update| &update.conditions).flat_map(named);
    let pinned: BTreeSet<String> = conditions.filter_map(shown).collect();
    let mut page = format!("### {title}\n\n{about}\n\n{}\n", keys(&writes[0], general));
    page.push_str("| attribute | unit or type | meaning | pinned |\n| --- | --- | --- | --- |\n");
    // Kinds that share explanations have only some of the attributes.
    for Attribute { name, unit, meaning } in
        attributes.iter().filter(|one| written.contains(one.name))
    {
        let mark = if pinned.contains(*name) { "yes" } else { "" };
        writeln!(page, "| `{name}` | {unit} | {meaning} | {mark} |").unwrap();
    }
    if pinned.contains("PK") {
        page.push_str(
            "\nA write also fails if another client created or deleted the item since it was read.\n",
        );
    }
    page
}

const HEAD: &str = "\
# The DynamoDB table

<!-- Generated from the code by `UPDATE_DOCS=1 cargo test -p zae-limiter-schema --test page`. -->

One table holds everything. Clients of several languages and releases share it, so three rules hold:

- A client never replaces an item. It updates its own attributes and keeps those it does not know.
- Other clients can ignore every attribute that only we write.
- Our clients accept an item without the attributes that only they write.

Keys are `PK` (text) and `SK` (text). TTL is on for `ttl`. The stream has new and old images.

| index | finds | projects |
| --- | --- | --- |
| GSI1 | the children of a parent | all attributes |
| GSI2 | the buckets and usage of a resource | keys; all attributes in tables of the Python client |
| GSI3 | the buckets of an entity; the entities with limits on a resource | keys |
| GSI4 | everything in a namespace | keys |

`{ns}` is the id of a namespace, 11 characters. `_` is the namespace of the table's own records. `*` in the name of
an attribute is the name of a limit. A time in whole seconds has its milliseconds in a second attribute,
`{attribute}#ms`, which only our clients write. \"Pinned\" attributes are named in the conditions of writes: a write
fails if another client has changed them since they were read.

## Buckets

A bucket holds the balances of one entity on one resource. It has one item for each shard: one at first, and
twice as many each time it is split.

";

const RECORDS: &str = "
## Records

Besides the pinned attributes, a caller of the store may require that a record exists, that it does not, or that
stored limits have a `config_version`.
";

/// The page.
fn render() -> String {
    let mut page = HEAD.to_owned();
    let with_shard = |value: &str| {
        let value = general(value);
        value.strip_suffix("#0").map_or(value.clone(), |start| format!("{start}#{{shard}}"))
    };
    page.push_str(&keys(&bucket(), with_shard));
    page.push_str("\n### Writers\n\nThese are all the writes of a bucket. Each is one conditional update, or one transaction.\n\n");
    page.push_str("| writer | what it does | pins |\n| --- | --- | --- |\n");
    for writer in WRITERS {
        let (name, purpose, pins) = (writer.name, writer.purpose, code(writer.pins));
        writeln!(page, "| `{name}` | {purpose} | {pins} |").unwrap();
    }
    page.push_str("\n### Attributes\n\n");
    page.push_str("| attribute | unit or type | meaning | written by | pinned by |\n");
    page.push_str("| --- | --- | --- | --- | --- |\n");
    for Attribute { name, unit, meaning } in ATTRIBUTES {
        let writers = WRITERS.iter().filter(|writer| writer.changes().any(|one| one == *name));
        let pinned_by = WRITERS.iter().filter(|writer| writer.pins.contains(name));
        let (writers, pinned_by) =
            (code(writers.map(|one| one.name)), code(pinned_by.map(|one| one.name)));
        writeln!(page, "| `{name}` | {unit} | {meaning} | {writers} | {pinned_by} |").unwrap();
    }
    page.push_str(RECORDS);
    for kind in kinds() {
        write!(page, "\n{}", section(&kind)).unwrap();
    }
    page
}

#[test]
fn every_attribute_of_a_bucket_is_explained_once() {
    let pins = WRITERS.iter().flat_map(|writer| writer.pins.iter().copied());
    let changes = WRITERS.iter().flat_map(|writer| writer.changes());
    let named: BTreeSet<&str> = pins.chain(changes).collect();
    let explained: BTreeSet<&str> = ATTRIBUTES.iter().map(|one| one.name).collect();
    assert_eq!(
        explained, named,
        "WRITERS and ATTRIBUTES in src/writers.rs name the same attributes"
    );
    assert_eq!(explained.len(), ATTRIBUTES.len(), "an attribute is explained twice");
}

#[test]
fn no_explanation_is_left_over() {
    let kinds = kinds();
    let actions = kinds.iter().flat_map(|kind| &kind.writes).flat_map(|update| &update.actions);
    let written: BTreeSet<String> = actions.map(Action::attribute).filter_map(shown).collect();
    for explained in kinds.iter().flat_map(|kind| kind.attributes) {
        assert!(written.contains(explained.name), "no write has {}", explained.name);
    }
}

#[test]
fn the_page_is_up_to_date() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/schema.md");
    let page = render();
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&path, &page).unwrap();
    }
    let committed = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        committed == page,
        "docs/schema.md is not what the code says; run \
         UPDATE_DOCS=1 cargo test -p zae-limiter-schema --test page to write it again"
    );
}
