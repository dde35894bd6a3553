//! Deleting records, and what belongs to them: all shards of a bucket, the registry entries of limits, and the
//! items of a namespace that are no records.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use zae_limiter_core::{
    BucketKey, ConfigLevel, DELETION_WAIT_MAX, Key, NamespaceId, Scope, StoreError, StoreErrorKind,
    Timestamp,
};
use zae_limiter_schema::bucket::{delete_together, further_shards};
use zae_limiter_schema::records::registry::{self, ResourceChanges};
use zae_limiter_schema::records::tombstone;
use zae_limiter_schema::{
    BucketItemKey, Change, Condition, Consistency, Index, ItemKey, PAGE_ITEMS_MAX, Query, Range,
    SHARD_ZERO, Step, TableTime, Transacted, entity_partition, namespace_partition,
    system_partition,
};

use crate::driver::{Driver, key_of};
use crate::error::contended;
use crate::records::{Counts, count, count_changes, record_key};

/// The most limits in one transaction, which also updates the registries of as many namespaces.
const CONFIGS_MAX: usize = 25;

/// The most buckets in one transaction. A conflict on one of them fails all.
const BUCKETS_MAX: usize = 25;

/// How often a transaction is prepared again because other processes deleted the same limits.
const ATTEMPTS_MAX: u32 = 16;

/// How often deleting a sharded bucket is tried, and the wait in between: other processes write to it.
const DELETIONS_MAX: u32 = 64;
const BETWEEN_DELETIONS: Duration = Duration::from_millis(10);

/// How long a deletion waits for the indexes that it lists, and how often: up to 4 s in all. An index usually lags by
/// some milliseconds.
const INDEX_LAG: Duration = Duration::from_secs(1);
const INDEX_POLLS_MAX: u32 = 4;
const _: () =
    assert!(INDEX_LAG.as_millis() * (1 + INDEX_POLLS_MAX as u128) <= DELETION_WAIT_MAX.as_millis());

impl Driver {
    /// Leaves a tombstone, so that no aggregator creates the usage again.
    pub(crate) async fn note_deletion(
        self: &Arc<Self>,
        scope: &Scope,
        now: Timestamp,
    ) -> Result<(), StoreError> {
        let at = match self.table.time() {
            // Changes have the table's time. It is up to a second later than a date tells.
            TableTime::At(date) => date.saturating_add_millis(1_000),
            TableTime::NotYet | TableTime::Never => now,
        };
        // If it is unmet, there is one of a later deletion.
        self.update(&tombstone::write(scope, at)).await?;
        self.wait_for_index(scope).await
    }

    /// Waits until the index shows the tombstone, but at least [`INDEX_LAG`]: each write reaches an index by itself, some
    /// later than others. An index that takes longer than [`INDEX_POLLS_MAX`] polls holds nothing up.
    async fn wait_for_index(self: &Arc<Self>, scope: &Scope) -> Result<(), StoreError> {
        let own = tombstone::key(scope);
        let (index, partition, sort_key) = tombstone::place_in_index(scope);
        self.pause(INDEX_LAG).await?;
        for _ in 0..INDEX_POLLS_MAX {
            let range = Range::StartsWith(sort_key.clone());
            let found = self.find_keys(Some(index), partition.clone(), range).await?;
            if found.contains(&own) {
                return Ok(());
            }
            self.pause(INDEX_LAG).await?;
        }
        tracing::warn!(
            "an index of the table lags by seconds: `zae-limiter sweep` removes what the deletion does not see"
        );
        Ok(())
    }

    /// Deletes records. Those that do not exist are ignored.
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

    /// Deletes buckets, each in one transaction. Buckets with one shard share transactions; if one of them
    /// fails, each is deleted by itself.
    async fn delete_buckets(self: &Arc<Self>, buckets: &[&BucketKey]) -> Result<(), StoreError> {
        let first_key = |bucket: &BucketKey| {
            BucketItemKey { bucket: bucket.clone(), shard: SHARD_ZERO }.item_key()
        };
        let items = self.read_items(buckets.iter().map(|bucket| first_key(bucket))).await?;
        let first = |bucket: &BucketKey| items.get(&first_key(bucket));
        let is_single = |bucket: &BucketKey| {
            first(bucket).is_some_and(|first| further_shards(bucket, first).is_empty())
        };
        let (single, mut others): (Vec<&BucketKey>, Vec<&BucketKey>) =
            buckets.iter().copied().partition(|bucket| is_single(bucket));
        for chunk in single.chunks(BUCKETS_MAX) {
            let delete = |bucket: &&BucketKey| delete_together(bucket, first(bucket), &[]);
            let changes: Vec<Change> = chunk.iter().flat_map(delete).collect();
            match self.transact(&changes).await {
                Ok(Transacted::Done(_)) => {}
                Ok(Transacted::Unmet(..)) => others.extend(chunk),
                Err(error) if error.is_transient() => others.extend(chunk),
                Err(error) => return Err(error.into()),
            }
        }
        for bucket in others {
            self.delete_sharded(bucket).await?;
        }
        buckets.iter().for_each(|bucket| self.forget(bucket));
        Ok(())
    }

    /// Deletes a bucket with all its shards in one transaction, even if it is split meanwhile.
    async fn delete_sharded(self: &Arc<Self>, bucket: &BucketKey) -> Result<(), StoreError> {
        let first_key = BucketItemKey { bucket: bucket.clone(), shard: SHARD_ZERO }.item_key();
        for _ in 0..DELETIONS_MAX {
            let first = self.read_items([first_key.clone()]).await?.remove(&first_key);
            let mut further = match &first {
                Some(first) => further_shards(bucket, first),
                None => self.find_shards(bucket).await?,
            };
            further.retain(|key| *key != first_key);
            if first.is_none() && further.is_empty() {
                return Ok(());
            }
            let changes = delete_together(bucket, first.as_ref(), &further);
            match self.transact(&changes).await {
                Ok(Transacted::Done(_)) if changes.len() > further.len() => return Ok(()),
                // More shards than one transaction holds, or another process changed the bucket: try again.
                Ok(_) => {}
                Err(error) if error.is_transient() => self.pause(BETWEEN_DELETIONS).await?,
                Err(error) => return Err(error.into()),
            }
        }
        Err(contended(DELETIONS_MAX))
    }

    /// The shards of a bucket without a first one.
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
            let page = self.query(&query).await?;
            keys.extend(page.items.iter().filter_map(key_of));
            match page.next {
                Some(after) => query.after = Some(after),
                None => return Ok(keys),
            }
        }
    }

    /// Deletes limits of resources and entities, in one transaction with their registry entries.
    async fn delete_configs(
        self: &Arc<Self>,
        configs: &[(&NamespaceId, &ConfigLevel)],
    ) -> Result<(), StoreError> {
        let key = |ns: &NamespaceId, level: &ConfigLevel| {
            ItemKey::of(&Key::Config(ns.clone(), level.clone()))
        };
        for _ in 0..ATTEMPTS_MAX {
            let stored = self.read_items(configs.iter().map(|(ns, level)| key(ns, level))).await?;
            let mut changes = Vec::new();
            let mut counts = Counts::new();
            let mut resources = std::collections::BTreeMap::<&NamespaceId, ResourceChanges>::new();
            for (ns, level) in configs {
                let key = key(ns, level);
                if !stored.contains_key(&key) {
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
        let message =
            format!("other processes changed the limits {ATTEMPTS_MAX} times in a row; try again");
        Err(StoreError::new(StoreErrorKind::Unavailable, message))
    }

    /// Deletes the record of a namespace, and its items that are no records: registries, and items of other
    /// clients. Its tombstone stays. The record goes last, so that an interrupted deletion can be repeated.
    async fn delete_namespace(self: &Arc<Self>, ns: &NamespaceId) -> Result<(), StoreError> {
        let system = system_partition(ns.as_str());
        let mut left = self.find_keys(None, system, Range::All).await?;
        let indexed = Some(Index::Namespace);
        left.extend(self.find_keys(indexed, namespace_partition(ns), Range::All).await?);
        let own = tombstone::key(&Scope::Namespace(ns.clone()));
        left.retain(|key| record_key(key).is_none() && *key != own);
        let left: BTreeSet<ItemKey> = left.into_iter().collect();
        let left: Vec<ItemKey> = left.into_iter().collect();
        self.remove(&left).await?;
        self.remove(&[ItemKey::of(&Key::Namespace(ns.clone()))]).await?;
        Ok(())
    }
}
