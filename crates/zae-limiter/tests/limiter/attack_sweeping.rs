//! Promise (docs/namespaces.md): a sweep removes nothing that is live, also while others work.

use zae_limiter::model::{EntityId, NamespaceId, ResourceName, Usage, UsageKey};
use zae_limiter::store::{Precondition, Record, Store as _, Write, Written};
use zae_limiter::{Timestamp, Window};

use crate::world::{Kind, NOW, World, on_every_store, per_minute, secs, spend};

async fn put(world: &World, ns: &NamespaceId, entity: &str, window: Window, start: Timestamp) {
    let key = UsageKey {
        namespace: ns.clone(),
        entity: EntityId::new(entity).unwrap(),
        resource: ResourceName::new("gpt-4").unwrap(),
        window,
        start,
    };
    let usage = Usage { key, consumed: Default::default(), events: 1, expires_at: None };
    let batch = [Write::Put(Record::Usage(usage), Precondition::Always)];
    assert_eq!(world.store.write(&batch).await.unwrap(), Written::Done);
}

/// Promise: what was deleted stays deleted, also if a sweep waits for its question to be answered meanwhile: the
/// tombstone was past its time when the sweep found it, and is a new one now.
#[test]
fn a_sweep_leaves_the_tombstone_of_a_new_deletion() {
    on_every_store(async |world| {
        if !world.is(Kind::DynamoDb) {
            return;
        }
        let limiter = world.limiter_with([per_minute("tpm", 10)]).await;
        spend(&limiter, "key", "gpt-4", "tpm", 1).await;
        limiter.delete_entity("key").await.unwrap();
        world.advance(secs(4 * 86_400));
        let found = limiter.namespaces().find_orphans(|_| {}).await.unwrap();
        assert_eq!(found.tombstones(), 1);
        spend(&limiter, "key", "gpt-4", "tpm", 1).await;
        limiter.delete_entity("key").await.unwrap();
        limiter.namespaces().remove_orphans(&found, |_| {}).await.unwrap();
        // The new tombstone becomes an orphan in its turn.
        world.advance(secs(4 * 86_400));
        let found = limiter.namespaces().find_orphans(|_| {}).await.unwrap();
        assert_eq!(
            found.tombstones(),
            1,
            "the sweep has removed the tombstone of the second deletion"
        );
    });
}

/// Promise: an entity that is deleted and created again between the search and the removal keeps its new usage.
#[test]
fn an_entity_that_comes_back_before_the_removal_keeps_its_usage() {
    on_every_store(async |world| {
        let limiter = world.limiter_with([per_minute("tpm", 10)]).await;
        let ns = limiter.namespace_id().clone();
        limiter.create_entity("key").await.unwrap();
        limiter.delete_entity("key").await.unwrap();
        put(&world, &ns, "key", Window::Hourly, NOW).await;
        world.advance(secs(900));
        let found = limiter.namespaces().find_orphans(|_| {}).await.unwrap();
        assert_eq!(found.deleted_usage, 1);
        spend(&limiter, "key", "gpt-4", "tpm", 1).await;
        assert_eq!(limiter.namespaces().remove_orphans(&found, |_| {}).await.unwrap(), 0);
    });
}
