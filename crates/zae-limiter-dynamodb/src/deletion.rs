//! Deleting any number of items, and what belongs to them: the further shards of a bucket, the
//! registries' share of limits, and with a namespace's own record what no key names.

use std::collections::BTreeSet;
use std::sync::Arc;

use zae_limiter_core::{BucketKey, ConfigLevel, Key, NamespaceId, StoreError, StoreErrorKind};
use zae_limiter_schema::bucket::shards_seen;
use zae_limiter_schema::records::registry::{self, ResourceChanges};
use zae_limiter_schema::{
    BucketItemKey, Change, Condition, Consistency, Index, Item, ItemKey, PAGE_ITEMS_MAX, Query,
    Range, SHARD_ZERO, Step, Transacted, entity_partition, namespace_partition, system_partition,
};

use crate::driver::{Driver, key_of};
use crate::records::{Counts, count, count_changes, record_key};

/// How many limits go in one transaction, with room for the registries of as many namespaces.
const CONFIGS_MAX: usize = 25;

/// How often a transaction is put together again because others deleted the same limits.
const ATTEMPTS_MAX: u32 = 16;

/// More shards than a bucket is ever divided into.
const SHARDS_MAX: i64 = 4_096;

/// The items of a bucket beyond the first, as the first one counts them. Whatever else may be wrong
/// with that item, it can be deleted.
pub(crate) fn further_shards(bucket: &BucketKey, first: &Item) -> Vec<ItemKey> {
    let count = shards_seen(first);
    let count = u32::try_from(count.clamp(1, SHARDS_MAX)).unwrap_or(1);
    let key = |shard| BucketItemKey { bucket: bucket.clone(), shard }.item_key();
    (SHARD_ZERO + 1..count).map(key).collect()
}

impl Driver {
    /// Removes items; those that are not there are passed over.
    pub(crate) async fn delete(self: &Arc<Self>, keys: &[Key]) -> Result<(), StoreError> {
        let keys: BTreeSet<&Key> = keys.iter().collect();
        let (mut plain, mut buckets) = (Vec::new(), Vec::new());
        let (mut configs, mut namespaces) = (Vec::new(), Vec::new());
        for key in keys {
            match key {
                Key::Bucket(bucket) => buckets.push(bucket),
                Key::Config(_, ConfigLevel::System) => plain.push(ItemKey::of(key)),
                Key::Config(ns, level) => configs.push((ns, level)),
                Key::Namespace(ns) => namespaces.push(ns),
                _ => plain.push(ItemKey::of(key)),
            }
        }
        self.remove(&plain).await?;
        self.delete_buckets(&buckets).await?;
        for configs in configs.chunks(CONFIGS_MAX) {
            self.delete_configs(configs).await?;
        }
        for ns in namespaces {
            self.delete_namespace(ns).await?;
        }
        Ok(())
    }

    /// The first shard goes last: it says how many there are, should the deletion be cut short.
    async fn delete_buckets(self: &Arc<Self>, buckets: &[&BucketKey]) -> Result<(), StoreError> {
        let first = |bucket: &BucketKey| ItemKey::of(&Key::Bucket(bucket.clone()));
        let items = self.read_items(buckets.iter().map(|bucket| first(bucket))).await?;
        let (mut firsts, mut further) = (Vec::new(), Vec::new());
        for bucket in buckets {
            match items.get(&first(bucket)) {
                Some(item) => {
                    further.extend(further_shards(bucket, item));
                    firsts.push(first(bucket));
                }
                None => further.extend(self.find_shards(bucket).await?),
            }
        }
        self.remove(&further).await?;
        self.remove(&firsts).await?;
        buckets.iter().for_each(|bucket| self.forget(bucket));
        Ok(())
    }

    /// The shards of a bucket that has lost its first one.
    async fn find_shards(self: &Arc<Self>, bucket: &BucketKey) -> Result<Vec<ItemKey>, StoreError> {
        let partition = entity_partition(&bucket.namespace, &bucket.entity);
        let range = Range::StartsWith(format!("BUCKET#{}#", bucket.resource));
        self.find_keys(Some(Index::Entity), partition, range).await
    }

    async fn find_keys(
        self: &Arc<Self>,
        index: Option<Index>,
        partition: String,
        range: Range,
    ) -> Result<Vec<ItemKey>, StoreError> {
        let consistency = Consistency::freshest(index);
        let (step, limit, after) = (Step::Forward, PAGE_ITEMS_MAX, None);
        let mut query = Query { index, partition, range, step, limit, after, consistency };
        let mut keys = Vec::new();
        loop {
            let answer = self.query(&query).await?;
            keys.extend(answer.items.iter().filter_map(key_of));
            match answer.next {
                Some(after) => query.after = Some(after),
                None => return Ok(keys),
            }
        }
    }

    /// Deletes limits of resources and entities, in one step with what the registries say of them.
    async fn delete_configs(
        self: &Arc<Self>,
        configs: &[(&NamespaceId, &ConfigLevel)],
    ) -> Result<(), StoreError> {
        let key = |ns: &NamespaceId, level: &ConfigLevel| {
            ItemKey::of(&Key::Config(ns.clone(), level.clone()))
        };
        for _ in 0..ATTEMPTS_MAX {
            let there = self.read_items(configs.iter().map(|(ns, level)| key(ns, level))).await?;
            let mut changes = Vec::new();
            let mut counts = Counts::new();
            let mut resources = std::collections::BTreeMap::<&NamespaceId, ResourceChanges>::new();
            for (ns, level) in configs {
                let key = key(ns, level);
                if !there.contains_key(&key) {
                    continue;
                }
                match registry::counter(level) {
                    Some(counter) => count(&mut counts, ns, counter, -1),
                    None => {
                        let ConfigLevel::Resource(resource) = level else { continue };
                        resources.entry(ns).or_default().removed.insert(resource.to_string());
                    }
                }
                changes.push(Change::Delete(key, vec![Condition::Exists("PK".to_owned())]));
            }
            if changes.is_empty() {
                return Ok(());
            }
            let updates = resources.iter().filter_map(|(ns, changes)| changes.update(ns, None));
            changes.extend(updates.map(Change::Update));
            changes.extend(count_changes(&counts));
            if let Transacted::Done(_) = self.transact(&changes).await? {
                self.forget_counters(&counts).await;
                return Ok(());
            }
        }
        let message = format!("others changed the limits {ATTEMPTS_MAX} times in a row; try again");
        Err(StoreError::new(StoreErrorKind::Unavailable, message))
    }

    /// Deletes the record of a namespace, and what is left in it that is no record: its registries,
    /// and items that only other clients know. The record goes last, so that a deletion cut short
    /// can be repeated.
    async fn delete_namespace(self: &Arc<Self>, ns: &NamespaceId) -> Result<(), StoreError> {
        let system = system_partition(ns.as_str());
        let mut left = self.find_keys(None, system, Range::All).await?;
        let indexed = Some(Index::Namespace);
        left.extend(self.find_keys(indexed, namespace_partition(ns), Range::All).await?);
        let left: BTreeSet<ItemKey> =
            left.into_iter().filter(|key| record_key(key).is_none()).collect();
        let left: Vec<ItemKey> = left.into_iter().collect();
        self.remove(&left).await?;
        self.remove(&[ItemKey::of(&Key::Namespace(ns.clone()))]).await?;
        Ok(())
    }
}
