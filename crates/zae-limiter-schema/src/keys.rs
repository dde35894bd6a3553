//! Item keys: making and parsing them.

use std::fmt;

use zae_limiter_core::{
    AuditSubject, BucketKey, ConfigLevel, DEFAULT_RESOURCE, EntityId, Key, NamespaceId,
    NamespaceName, ResourceName, Scope, Timestamp, UsageKey, Window,
};

use crate::records::tombstone;

/// The namespace of the table's own records: the version, the namespaces and the stream checkpoints.
pub const REGISTRY: &str = "_";

/// The first shard of a bucket. It exists if any other does.
pub const SHARD_ZERO: u32 = 0;

/// The primary key of an item.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ItemKey {
    /// The partition key.
    pub pk: String,
    /// The sort key.
    pub sk: String,
}

impl ItemKey {
    /// A key from partition key and sort key.
    pub fn new(pk: impl Into<String>, sk: impl Into<String>) -> Self {
        Self { pk: pk.into(), sk: sk.into() }
    }

    /// The item of a record. A bucket's is that of its first shard.
    pub fn of(key: &Key) -> Self {
        match key {
            Key::Entity(ns, id) => Self::new(entity_partition(ns, id), "#META"),
            Key::Config(ns, level) => Self::of_config(ns, level),
            Key::Audit(ns, subject, id) => Self::of_audit(ns, subject, id),
            Key::Usage(usage) => Self::of_usage(usage),
            Key::Bucket(bucket) => {
                BucketItemKey { bucket: bucket.clone(), shard: SHARD_ZERO }.item_key()
            }
            Key::Tombstone(scope) => tombstone::key(scope),
            Key::Namespace(id) => Self::new(system_partition(REGISTRY), format!("#NSID#{id}")),
            Key::NamespaceName(name) => {
                Self::new(system_partition(REGISTRY), format!("#NAMESPACE#{name}"))
            }
        }
    }

    fn of_config(ns: &NamespaceId, level: &ConfigLevel) -> Self {
        match level {
            ConfigLevel::System => Self::new(system_partition(ns.as_str()), "#CONFIG"),
            ConfigLevel::Resource(resource) => {
                Self::new(format!("{ns}/RESOURCE#{resource}"), "#CONFIG")
            }
            ConfigLevel::Entity(id) => {
                Self::new(entity_partition(ns, id), format!("#CONFIG#{DEFAULT_RESOURCE}"))
            }
            ConfigLevel::EntityResource(id, resource) => {
                Self::new(entity_partition(ns, id), format!("#CONFIG#{resource}"))
            }
        }
    }

    fn of_audit(ns: &NamespaceId, subject: &AuditSubject, id: &str) -> Self {
        Self::new(format!("{ns}/AUDIT#{subject}"), format!("#AUDIT#{id}"))
    }

    fn of_usage(usage: &UsageKey) -> Self {
        let start = usage.window.label(usage.start);
        let sk = format!("#USAGE#{}#{start}", usage.resource);
        Self::new(entity_partition(&usage.namespace, &usage.entity), sk)
    }

    /// The version record of the table.
    pub fn version() -> Self {
        Self::new(system_partition(REGISTRY), "#VERSION")
    }

    /// The registry of resources that have limits of their own.
    pub fn resources(ns: &NamespaceId) -> Self {
        Self::new(system_partition(ns.as_str()), "#RESOURCES")
    }

    /// The registry that counts, for each resource, the entities with limits of their own.
    pub fn entity_config_resources(ns: &NamespaceId) -> Self {
        Self::new(system_partition(ns.as_str()), "#ENTITY_CONFIG_RESOURCES")
    }
}

impl fmt::Display for ItemKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.pk, self.sk)
    }
}

/// The key of one shard of a bucket.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BucketItemKey {
    /// The bucket.
    pub bucket: BucketKey,
    /// The number of the shard, from 0.
    pub shard: u32,
}

impl BucketItemKey {
    /// The item's key.
    pub fn item_key(&self) -> ItemKey {
        ItemKey::new(bucket_partition(&self.bucket, self.shard), "#STATE")
    }
}

/// The partition of one shard of a bucket.
pub fn bucket_partition(key: &BucketKey, shard: u32) -> String {
    format!("{}/BUCKET#{}#{}#{shard}", key.namespace, key.entity, key.resource)
}

/// The partition of an entity, its limits and its usage. It has the same one in [`Index::Entity`].
pub fn entity_partition(ns: &NamespaceId, id: &EntityId) -> String {
    format!("{ns}/ENTITY#{id}")
}

/// The partition of a namespace's own records.
pub fn system_partition(ns: &str) -> String {
    format!("{ns}/SYSTEM#")
}

/// The partition of an entity's children in [`Index::Parent`].
pub fn children_partition(ns: &NamespaceId, parent: &EntityId) -> String {
    format!("{ns}/PARENT#{parent}")
}

/// The partition of a resource's buckets and usage in [`Index::Resource`].
pub fn resource_partition(ns: &NamespaceId, resource: &ResourceName) -> String {
    format!("{ns}/RESOURCE#{resource}")
}

/// The partition in [`Index::Entity`] of the entities with limits of their own for a resource, or, with
/// `None`, for all resources.
pub fn entity_configs_partition(ns: &NamespaceId, resource: Option<&ResourceName>) -> String {
    format!("{ns}/ENTITY_CONFIG#{}", resource.map_or(DEFAULT_RESOURCE, ResourceName::as_str))
}

/// The partition of a whole namespace in [`Index::Namespace`].
pub fn namespace_partition(ns: &NamespaceId) -> String {
    ns.to_string()
}

/// The table's indexes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Index {
    /// GSI1: from a parent to its children. Projects all attributes.
    Parent,
    /// GSI2: from a resource to its buckets and usage. Projects keys only in tables that we create.
    Resource,
    /// GSI3: from an entity to its buckets, and from a resource to the entities with limits of their
    /// own for it. Projects keys only.
    Entity,
    /// GSI4: everything in a namespace. Projects keys only.
    Namespace,
}

impl Index {
    /// All indexes, GSI1 first.
    pub const ALL: [Self; 4] = [Self::Parent, Self::Resource, Self::Entity, Self::Namespace];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Parent => "GSI1",
            Self::Resource => "GSI2",
            Self::Entity => "GSI3",
            Self::Namespace => "GSI4",
        }
    }

    /// The attribute with the partition key.
    pub fn pk(self) -> &'static str {
        match self {
            Self::Parent => "GSI1PK",
            Self::Resource => "GSI2PK",
            Self::Entity => "GSI3PK",
            Self::Namespace => "GSI4PK",
        }
    }

    /// The attribute with the sort key.
    pub fn sk(self) -> &'static str {
        match self {
            Self::Parent => "GSI1SK",
            Self::Resource => "GSI2SK",
            Self::Entity => "GSI3SK",
            Self::Namespace => "GSI4SK",
        }
    }
}

/// A parsed [`ItemKey`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ParsedKey {
    /// A record, or the first shard of a bucket.
    Record(Key),
    /// A further shard of a bucket.
    Shard(BucketItemKey),
    /// The registry of resources with limits.
    Resources(NamespaceId),
    /// The registry that counts entities with limits of their own.
    EntityConfigResources(NamespaceId),
    /// The version record.
    Version,
    /// The tombstone of an entity or a namespace.
    Tombstone(Scope),
}

/// Parses a key. `None` for a key that no supported release of the format writes.
pub fn parse_key(key: &ItemKey) -> Option<ParsedKey> {
    let (ns, rest) = key.pk.split_once('/')?;
    let (kind, name) = rest.split_once('#')?;
    if ns == REGISTRY {
        return parse_registry(kind, name, &key.sk);
    }
    let ns = NamespaceId::new(ns).ok()?;
    if let Some(scope) = parse_tombstone(&ns, kind, name, &key.sk) {
        return Some(ParsedKey::Tombstone(scope));
    }
    let record = match (kind, key.sk.as_str()) {
        ("ENTITY", sk) => parse_entity(ns, EntityId::new(name).ok()?, sk)?,
        ("BUCKET", "#STATE") => {
            let parsed = parse_bucket(ns, name)?;
            if parsed.shard != SHARD_ZERO {
                return Some(ParsedKey::Shard(parsed));
            }
            Key::Bucket(parsed.bucket)
        }
        ("RESOURCE", "#CONFIG") => {
            Key::Config(ns, ConfigLevel::Resource(ResourceName::new(name).ok()?))
        }
        ("SYSTEM", "#CONFIG") if name.is_empty() => Key::Config(ns, ConfigLevel::System),
        ("SYSTEM", "#RESOURCES") if name.is_empty() => return Some(ParsedKey::Resources(ns)),
        ("SYSTEM", "#ENTITY_CONFIG_RESOURCES") if name.is_empty() => {
            return Some(ParsedKey::EntityConfigResources(ns));
        }
        ("AUDIT", sk) => {
            let subject: AuditSubject = name.parse().ok()?;
            Key::Audit(ns, subject, sk.strip_prefix("#AUDIT#")?.to_owned())
        }
        _ => return None,
    };
    Some(ParsedKey::Record(record))
}

fn parse_tombstone(ns: &NamespaceId, kind: &str, name: &str, sk: &str) -> Option<Scope> {
    match (kind, sk) {
        ("ENTITY", tombstone::ENTITY_SORT_KEY) => {
            Some(Scope::Entity(ns.clone(), EntityId::new(name).ok()?))
        }
        ("SYSTEM", tombstone::NAMESPACE_SORT_KEY) if name.is_empty() => {
            Some(Scope::Namespace(ns.clone()))
        }
        _ => None,
    }
}

fn parse_registry(kind: &str, name: &str, sk: &str) -> Option<ParsedKey> {
    if kind != "SYSTEM" || !name.is_empty() {
        return None;
    }
    let record = if sk == "#VERSION" {
        return Some(ParsedKey::Version);
    } else if let Some(id) = sk.strip_prefix("#NSID#") {
        Key::Namespace(NamespaceId::new(id).ok()?)
    } else {
        Key::NamespaceName(NamespaceName::new(sk.strip_prefix("#NAMESPACE#")?).ok()?)
    };
    Some(ParsedKey::Record(record))
}

fn parse_entity(ns: NamespaceId, id: EntityId, sk: &str) -> Option<Key> {
    if sk == "#META" {
        return Some(Key::Entity(ns, id));
    }
    if let Some(resource) = sk.strip_prefix("#CONFIG#") {
        let level = match resource {
            DEFAULT_RESOURCE => ConfigLevel::Entity(id),
            resource => ConfigLevel::EntityResource(id, ResourceName::new(resource).ok()?),
        };
        return Some(Key::Config(ns, level));
    }
    // Neither a resource nor the start of a window contains `#`.
    let (resource, start) = sk.strip_prefix("#USAGE#")?.split_once('#')?;
    let (window, start) = parse_window(start)?;
    let resource = ResourceName::new(resource).ok()?;
    Some(Key::Usage(UsageKey { namespace: ns, entity: id, resource, window, start }))
}

/// The entity ends at the first `#`, the shard starts after the last one. No name contains `#`.
fn parse_bucket(ns: NamespaceId, name: &str) -> Option<BucketItemKey> {
    let (entity, rest) = name.split_once('#')?;
    let (resource, shard) = rest.rsplit_once('#')?;
    let key = BucketKey {
        namespace: ns,
        entity: EntityId::new(entity).ok()?,
        resource: ResourceName::new(resource).ok()?,
    };
    let parsed = BucketItemKey { bucket: key, shard: shard.parse().ok()? };
    // `+1` and `01` parse as numbers too, but no client writes them.
    (parsed.shard.to_string() == shard).then_some(parsed)
}

/// `2026-11-15T14:00:00Z`, `2026-11-15`, `2026-11`.
fn parse_window(label: &str) -> Option<(Window, Timestamp)> {
    let window = match label.len() {
        20 => Window::Hourly,
        10 => Window::Daily,
        7 => Window::Monthly,
        _ => return None,
    };
    let start = window.start_of(label)?;
    Some((window, start))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn namespaces() -> impl Strategy<Value = NamespaceId> {
        "[A-Za-z0-9_][A-Za-z0-9_-]{10}".prop_map(|text| NamespaceId::new(text).expect("legal"))
    }

    fn entities() -> impl Strategy<Value = EntityId> {
        "[A-Za-z0-9][A-Za-z0-9_.:@-]{0,40}".prop_map(|text| EntityId::new(text).expect("legal"))
    }

    fn resources() -> impl Strategy<Value = ResourceName> {
        "[A-Za-z][A-Za-z0-9_./:-]{0,40}".prop_map(|text| ResourceName::new(text).expect("legal"))
    }

    fn subjects() -> impl Strategy<Value = AuditSubject> {
        prop_oneof![
            entities().prop_map(AuditSubject::Entity),
            resources().prop_map(AuditSubject::Resource),
            Just(AuditSubject::System),
        ]
    }

    fn levels() -> impl Strategy<Value = ConfigLevel> {
        prop_oneof![
            Just(ConfigLevel::System),
            resources().prop_map(ConfigLevel::Resource),
            entities().prop_map(ConfigLevel::Entity),
            (entities(), resources())
                .prop_map(|(entity, resource)| ConfigLevel::EntityResource(entity, resource)),
        ]
    }

    fn usages() -> impl Strategy<Value = UsageKey> {
        let window = prop::sample::select(&Window::ALL[..]);
        let at = 0_i64..4_000_000_000_000;
        (namespaces(), entities(), resources(), window, at).prop_map(|all| {
            let (namespace, entity, resource, window, at) = all;
            let start = window.start(Timestamp::from_millis(at));
            UsageKey { namespace, entity, resource, window, start }
        })
    }

    fn keys() -> impl Strategy<Value = Key> {
        let bucket =
            (namespaces(), entities(), resources()).prop_map(|(namespace, entity, resource)| {
                Key::Bucket(BucketKey { namespace, entity, resource })
            });
        prop_oneof![
            (namespaces(), entities()).prop_map(|(ns, id)| Key::Entity(ns, id)),
            (namespaces(), levels()).prop_map(|(ns, level)| Key::Config(ns, level)),
            (namespaces(), subjects(), "[0-9A-HJKMNP-TV-Z]{26}")
                .prop_map(|(ns, subject, id)| Key::Audit(ns, subject, id)),
            usages().prop_map(Key::Usage),
            bucket,
            namespaces().prop_map(Key::Namespace),
            "[A-Za-z][A-Za-z0-9_.-]{0,40}"
                .prop_map(|name| Key::NamespaceName(NamespaceName::new(name).expect("legal"))),
        ]
    }

    proptest! {
        #[test]
        fn a_key_is_read_as_it_was_written(key in keys()) {
            prop_assert_eq!(parse_key(&ItemKey::of(&key)), Some(ParsedKey::Record(key)));
        }

        #[test]
        fn a_shard_is_read_as_it_was_written(
            namespace in namespaces(), entity in entities(), resource in resources(), shard in 1_u32..,
        ) {
            let key = BucketItemKey { bucket: BucketKey { namespace, entity, resource }, shard };
            prop_assert_eq!(parse_key(&key.item_key()), Some(ParsedKey::Shard(key)));
        }

        #[test]
        fn any_text_is_read_or_refused(pk in ".{0,60}", sk in ".{0,60}") {
            let _ = parse_key(&ItemKey::new(pk, sk));
        }
    }

    #[test]
    fn items_that_are_no_records_parse_and_other_keys_do_not() {
        let ns = NamespaceId::new("abcdefghijk").expect("legal");
        assert_eq!(parse_key(&ItemKey::version()), Some(ParsedKey::Version));
        assert_eq!(parse_key(&ItemKey::resources(&ns)), Some(ParsedKey::Resources(ns.clone())));
        let counts = ItemKey::entity_config_resources(&ns);
        assert_eq!(parse_key(&counts), Some(ParsedKey::EntityConfigResources(ns)));
        for (pk, sk) in [
            ("ENTITY#a", "#META"),
            ("abcdefghijk/BUCKET#a#b#01", "#STATE"),
            ("abcdefghijk/BUCKET#a#b#+1", "#STATE"),
            ("abcdefghijk/BUCKET#a#b", "#STATE"),
            ("abcdefghijk/ENTITY#a", "#USAGE#r#2026-11-15T14:30:00"),
            ("abcdefghijk/SYSTEM#x", "#CONFIG"),
            ("_/SYSTEM#", "#OTHER"),
        ] {
            assert_eq!(parse_key(&ItemKey::new(pk, sk)), None, "{pk} {sk}");
        }
    }
}
