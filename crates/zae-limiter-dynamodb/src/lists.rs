//! Lists, one page at a time. A page starts after the key with which the last one ended, so that deletions and
//! insertions in between shift nothing.
//!
//! An index may project only keys: the items are read from the table and keep the order of the index. `#` sorts
//! before every character of a name, so `{name}#{more}` sorts as the names do.

use std::sync::Arc;

use zae_limiter_core::{
    BucketKey, BucketQuery, Key, NamespaceId, Page, PageRequest, Query, Record, ResourceList,
    ResourceName, Scope, StoreError, StoredBucket, Timestamp,
};
use zae_limiter_schema::records::{self, registry};
use zae_limiter_schema::{
    Index, Item, ItemKey, ParsedKey, REGISTRY, Range, Step, children_partition,
    entity_configs_partition, entity_partition, namespace_partition, parse_key, resource_partition,
    system_partition,
};

use crate::bucket::shards::Shards;
use crate::cursor;
use crate::driver::{Driver, key_of};
use crate::error::CallError;
use crate::records::record_key;
use crate::usage::OfEntity;
use crate::walk::{Walk, labels, size};

impl Driver {
    /// Lists records.
    pub(crate) async fn list(
        self: &Arc<Self>,
        query: &Query,
        page: &PageRequest,
    ) -> Result<Page<Record>, StoreError> {
        if let Some(page) = self.list_usage(query, page).await? {
            return Ok(page);
        }
        let walk = walk_of(query);
        let after = walk.start(page)?;
        let belongs = |item: &Item| {
            let key = record_key(&key_of(item)?)?;
            belongs_to(query, &key).then_some(key)
        };
        // The other indexes may project only keys.
        if let None | Some(Index::Parent) = walk.index {
            return self
                .walk(&walk, after, size(page), |item| match belongs(item) {
                    Some(key) => Ok(records::decode(&key, item).map_err(CallError::from)?),
                    None => Ok(None),
                })
                .await;
        }
        let found = self.walk(&walk, after, size(page), |item| Ok(belongs(item))).await?;
        let items = self.get(&found.items).await?;
        Ok(Page { items: items.into_iter().flatten().collect(), next: found.next })
    }

    /// Lists usage without walking through windows of other lengths. `None` for other queries.
    async fn list_usage(
        self: &Arc<Self>,
        query: &Query,
        page: &PageRequest,
    ) -> Result<Option<Page<Record>>, StoreError> {
        match query {
            Query::UsageOfEntity(.., span) | Query::UsageOfResource(.., span)
                if span.start >= span.end =>
            {
                cursor::read(page, &["usage", "usage-of"])?;
                Ok(Some(Page { items: Vec::new(), next: None }))
            }
            Query::UsageOfEntity(ns, entity, resource, window, span) => {
                let of = OfEntity { ns, entity, window: *window, span };
                self.list_usage_of_entity(&of, resource.as_ref(), page).await.map(Some)
            }
            Query::UsageOfResource(ns, resource, window, span) => {
                self.list_usage_of_resource((ns, resource), (*window, span), page).await
            }
            _ => Ok(None),
        }
    }

    /// Lists buckets, each once, however many shards it has.
    pub(crate) async fn list_buckets(
        self: &Arc<Self>,
        query: &BucketQuery,
        page: &PageRequest,
    ) -> Result<Page<StoredBucket>, StoreError> {
        let (index, partition) = match query {
            BucketQuery::OfEntity(ns, entity) => (Index::Entity, entity_partition(ns, entity)),
            BucketQuery::OnResource(ns, resource) => {
                (Index::Resource, resource_partition(ns, resource))
            }
        };
        let range = Range::StartsWith("BUCKET#".to_owned());
        let walk = Walk::new("buckets", Some(index), partition, range);
        let after = walk.start(page)?;
        // A bucket is listed at its first shard.
        let first = |item: &Item| match record_key(&key_of(item)?)? {
            Key::Bucket(bucket) => Some(bucket),
            _ => None,
        };
        let found = self.walk(&walk, after, size(page), |item| Ok(first(item))).await?;
        Ok(Page { items: self.stored_buckets(found.items).await?, next: found.next })
    }

    async fn stored_buckets(
        self: &Arc<Self>,
        buckets: Vec<BucketKey>,
    ) -> Result<Vec<StoredBucket>, StoreError> {
        let shards = self.read_all_shards(&buckets).await?;
        let mut stored = Vec::new();
        for (key, items) in buckets.into_iter().zip(shards) {
            // It was deleted after the index was read.
            let Some(first) = items.first() else { continue };
            // The caller decides whether it has expired.
            let (expires_at, before) = (first.expires_at, Timestamp::from_millis(i64::MIN));
            let Some(bucket) = Shards::live(items, before).whole(None) else { continue };
            stored.push(StoredBucket { key, bucket, expires_at });
        }
        Ok(stored)
    }

    /// Lists the keys of everything in a scope.
    pub(crate) async fn list_keys(
        self: &Arc<Self>,
        scope: &Scope,
        page: &PageRequest,
    ) -> Result<Page<Key>, StoreError> {
        let walks = walks_of(scope);
        let (mut at, mut after) = match cursor::read(page, &[walks[0].list, walks[1].list])? {
            None => (0, None),
            Some((at, texts)) => (at, cursor::start(texts, walks[at].index, &walks[at].partition)?),
        };
        let size = size(page);
        let mut items = Vec::new();
        loop {
            let walk = &walks[at];
            let mut last = after.as_ref().and_then(key_of).and_then(|key| bucket_of(&key));
            let accept =
                |item: &Item| Ok(key_of(item).and_then(|key| named(scope, walk, &key, &mut last)));
            let found = self.walk(walk, after.take(), size - items.len(), accept).await?;
            items.extend(found.items);
            if found.next.is_some() {
                return Ok(Page { items, next: found.next });
            }
            at += 1;
            if at == walks.len() {
                return Ok(Page { items, next: None });
            }
            if items.len() == size {
                return Ok(Page { items, next: Some(cursor::write(walks[at].list, [])) });
            }
        }
    }

    /// Lists resources by name. A registry is one item, and a page is some of its entries.
    pub(crate) async fn list_resources(
        self: &Arc<Self>,
        ns: &NamespaceId,
        which: ResourceList,
        page: &PageRequest,
    ) -> Result<Page<ResourceName>, StoreError> {
        const LIST: &str = "resources";
        let after = match cursor::read(page, &[LIST])? {
            None => None,
            Some((_, texts)) => Some(cursor::only(texts)?),
        };
        let key = match which {
            ResourceList::WithDefaults => ItemKey::resources(ns),
            ResourceList::WithEntityConfigs => ItemKey::entity_config_resources(ns),
        };
        let item = self.read_items([key.clone()]).await?.remove(&key).unwrap_or_default();
        let names = match which {
            ResourceList::WithDefaults => {
                registry::resources(ns, &item).map_err(CallError::from)?
            }
            ResourceList::WithEntityConfigs => registry::resources_of_entities(&item),
        };
        let is_left =
            |name: &ResourceName| after.as_deref().is_none_or(|last| name.as_str() > last);
        let mut left = names.into_iter().filter(is_left).peekable();
        let items: Vec<ResourceName> = left.by_ref().take(size(page)).collect();
        let next = left.peek().and(items.last());
        let next = next.map(|last| cursor::write(LIST, [last.as_str()]));
        Ok(Page { items, next })
    }
}

/// The partition and range of a list.
fn walk_of(query: &Query) -> Walk {
    let starts = |text: &str| Range::StartsWith(text.to_owned());
    match query {
        Query::Children(ns, parent) => {
            let partition = children_partition(ns, parent);
            Walk::new("children", Some(Index::Parent), partition, Range::All)
        }
        Query::EntityConfigs(ns, resource) => {
            let partition = entity_configs_partition(ns, resource.as_ref());
            Walk::new("configs", Some(Index::Entity), partition, Range::All)
        }
        Query::Audit(ns, subject) => {
            let partition = format!("{ns}/AUDIT#{subject}");
            let walk = Walk::new("audit", None, partition, starts("#AUDIT#"));
            Walk { step: Step::Backward, ..walk }
        }
        Query::UsageOfEntity(..) => unreachable!("list_usage answers it"),
        Query::UsageOfResource(ns, resource, window, span) => {
            let [from, to] = labels(*window, span);
            // `$` follows `#`: the range includes all entities of the last window.
            let range = Range::Between(format!("USAGE#{from}#"), format!("USAGE#{to}$"));
            let partition = resource_partition(ns, resource);
            Walk::new("usage-of", Some(Index::Resource), partition, range).selective()
        }
        Query::Namespaces => {
            Walk::new("namespaces", None, system_partition(REGISTRY), starts("#NSID#"))
        }
    }
}

/// Whether a record in a list's range belongs to it. The range has windows of every length.
fn belongs_to(query: &Query, key: &Key) -> bool {
    match (query, key) {
        (Query::UsageOfResource(.., window, span), Key::Usage(usage)) => {
            usage.window == *window && span.contains(&usage.start)
        }
        (Query::Children(..), Key::Entity(..))
        | (Query::EntityConfigs(..), Key::Config(..))
        | (Query::Audit(..), Key::Audit(..))
        | (Query::Namespaces, Key::Namespace(_)) => true,
        _ => false,
    }
}

/// The partitions and ranges of a scope.
fn walks_of(scope: &Scope) -> [Walk; 2] {
    match scope {
        Scope::Entity(ns, id) => {
            let partition = entity_partition(ns, id);
            let buckets = Range::StartsWith("BUCKET#".to_owned());
            [
                Walk::new("of-entity", None, partition.clone(), Range::All),
                Walk::new("buckets-of-entity", Some(Index::Entity), partition, buckets),
            ]
        }
        Scope::Namespace(ns) => {
            let index = Some(Index::Namespace);
            [
                Walk::new("of-namespace", index, namespace_partition(ns), Range::All),
                // Some of these items have no index keys.
                Walk::new("of-system", None, system_partition(ns.as_str()), Range::All),
            ]
        }
    }
}

fn bucket_of(key: &ItemKey) -> Option<BucketKey> {
    match parse_key(key)? {
        ParsedKey::Record(Key::Bucket(bucket)) => Some(bucket),
        ParsedKey::Shard(shard) => Some(shard.bucket),
        _ => None,
    }
}

/// The key of the record that an item belongs to, unless it was listed before. Shards of a bucket are next to
/// each other and are listed once. Items that are no records are deleted with the namespace's own record.
fn named(scope: &Scope, walk: &Walk, key: &ItemKey, last: &mut Option<BucketKey>) -> Option<Key> {
    if let Some(bucket) = bucket_of(key) {
        let is_new = last.as_ref() != Some(&bucket);
        *last = Some(bucket.clone());
        return is_new.then_some(Key::Bucket(bucket));
    }
    if let Scope::Namespace(ns) = scope
        && walk.index.is_some()
        && key.pk == system_partition(ns.as_str())
    {
        return None;
    }
    record_key(key)
}
