//! Computes the index entries of items.

use zae_limiter_core::{BucketKey, ConfigLevel, Key, ResourceName};
use zae_limiter_schema::{
    BucketItemKey, Index, Item, ItemKey, ParsedKey, SHARD_ZERO, Value, children_partition,
    entity_configs_partition, entity_partition, namespace_partition, resource_partition,
};

/// An entry: the index, and the keys in it.
type Entry = (Index, String, String);

pub(super) fn is_bucket(parsed: &ParsedKey) -> bool {
    matches!(parsed, ParsedKey::Record(Key::Bucket(_)) | ParsedKey::Shard(_))
}

/// The entries that an item lacks.
pub(super) fn missing(parsed: &ParsedKey, key: &ItemKey, item: &Item) -> Vec<Entry> {
    let all = match parsed {
        ParsedKey::Record(Key::Bucket(bucket)) => of_bucket(bucket, SHARD_ZERO),
        ParsedKey::Shard(BucketItemKey { bucket, shard }) => of_bucket(bucket, *shard),
        ParsedKey::Record(record) => of_record(record, key, item),
        ParsedKey::Resources(_)
        | ParsedKey::EntityConfigResources(_)
        | ParsedKey::Version
        | ParsedKey::Tombstone(_) => Vec::new(),
    };
    all.into_iter().filter(|(index, ..)| !item.contains_key(index.pk())).collect()
}

fn of_bucket(key: &BucketKey, shard: u32) -> Vec<Entry> {
    let BucketKey { namespace, entity, resource } = key;
    vec![
        (
            Index::Resource,
            resource_partition(namespace, resource),
            format!("BUCKET#{entity}#{shard}"),
        ),
        (Index::Entity, entity_partition(namespace, entity), format!("BUCKET#{resource}#{shard}")),
        (
            Index::Namespace,
            namespace_partition(namespace),
            format!("BUCKET#{entity}#{resource}#{shard}"),
        ),
    ]
}

fn of_record(record: &Key, key: &ItemKey, item: &Item) -> Vec<Entry> {
    let mut entries = Vec::new();
    let namespace = match record {
        Key::Entity(ns, id) => {
            let parent = item.get("parent_id").and_then(Value::as_str);
            if let Some(parent) = parent.and_then(|text| text.parse().ok()) {
                let child = format!("CHILD#{id}");
                entries.push((Index::Parent, children_partition(ns, &parent), child));
            }
            ns
        }
        Key::Config(ns, level) => {
            let of_entity = match level {
                ConfigLevel::System | ConfigLevel::Resource(_) => None,
                ConfigLevel::Entity(id) => Some((id, None::<&ResourceName>)),
                ConfigLevel::EntityResource(id, resource) => Some((id, Some(resource))),
            };
            if let Some((id, resource)) = of_entity {
                let partition = entity_configs_partition(ns, resource);
                entries.push((Index::Entity, partition, id.to_string()));
            }
            ns
        }
        Key::Audit(ns, ..) => ns,
        Key::Usage(usage) => {
            let label = usage.window.label(usage.start);
            let partition = resource_partition(&usage.namespace, &usage.resource);
            let place = format!("USAGE#{label}#{}", usage.entity);
            entries.push((Index::Resource, partition, place));
            &usage.namespace
        }
        // The namespace registry needs no index: its records are read by key.
        Key::Bucket(_) | Key::Namespace(_) | Key::NamespaceName(_) | Key::Tombstone(_) => {
            return entries;
        }
    };
    entries.push((Index::Namespace, namespace_partition(namespace), key.pk.clone()));
    entries
}
