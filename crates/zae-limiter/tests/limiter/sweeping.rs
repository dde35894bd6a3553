//! Sweeping finds everything that belongs to nothing, on every store, and touches nothing else.

use std::time::Duration;

use zae_limiter::RateLimiter;
use zae_limiter::model::{
    EntityId, NamespaceId, NamespaceName, Orphans, ResourceName, Usage, UsageKey,
};
use zae_limiter::store::{Precondition, Record, Store as _, Write, Written};
use zae_limiter::{Timestamp, Window};

use crate::world::{
    Kind, NOW, World, left, on_every_store, per_minute, secs, spend, without_refill,
};

async fn put(world: &World, record: Record) {
    let batch = [Write::Put(record, Precondition::Always)];
    assert_eq!(world.store.write(&batch).await.unwrap(), Written::Done);
}

fn usage(ns: &NamespaceId, entity: &str, start: Timestamp) -> Record {
    let key = UsageKey {
        namespace: ns.clone(),
        entity: EntityId::new(entity).unwrap(),
        resource: ResourceName::new("gpt-4").unwrap(),
        window: Window::Hourly,
        start,
    };
    Record::Usage(Usage { key, consumed: Default::default(), events: 1, expires_at: None })
}

async fn find(limiter: &RateLimiter) -> Orphans {
    limiter.namespaces().find_orphans(|_| {}).await.unwrap()
}

/// Removes what is found, and checks that nothing is left to find.
async fn sweep(limiter: &RateLimiter) -> u64 {
    let found = find(limiter).await;
    let removed = limiter.namespaces().remove_orphans(&found, |_| {}).await.unwrap();
    assert!(find(limiter).await.is_empty(), "{:?}", find(limiter).await);
    removed
}

#[test]
fn what_a_running_limiter_left_in_a_purged_namespace_is_swept() {
    on_every_store(async |world| {
        let limiter = world.limiter_with([without_refill("tpm", 10)]).await;
        spend(&limiter, "key", "gpt-4", "tpm", 4).await;
        let registry = limiter.namespaces();
        registry.register("other").await.unwrap();
        let id = registry.register("team").await.unwrap().id;
        let team = world.builder().namespace("team").default_limits([per_minute("tpm", 10)]);
        let team = team.open().await.unwrap();
        for at in 0..1_200 {
            spend(&team, &format!("key-{at}"), "gpt-4", "tpm", 1).await;
        }
        registry.delete("team").await.unwrap();
        assert!(find(&limiter).await.is_empty(), "a deleted namespace can be recovered");
        registry.purge(&id, |_| {}).await.unwrap();
        assert!(find(&limiter).await.is_empty());
        // It has not noticed yet.
        for at in 0..1_100 {
            spend(&team, &format!("key-{at}"), "gpt-4", "tpm", 1).await;
        }
        let found = find(&limiter).await;
        assert_eq!((found.namespaces(), found.items.buckets), (1, 1_100));
        let mut progress = Vec::new();
        let removed = registry.remove_orphans(&found, |so_far| progress.push(so_far)).await;
        assert!(removed.unwrap() >= 1_100);
        assert!(progress.len() >= 2, "more than one page: {progress:?}");
        assert!(find(&limiter).await.is_empty());
        assert!(world.bucket(&team, "key-1", "gpt-4").await.is_none());
        assert_eq!(left(&limiter, "key", "gpt-4", "tpm").await, 6);
        assert_eq!(registry.list().all().await.unwrap().len(), 2);
    });
}

#[test]
fn usage_of_a_deleted_entity_is_swept_unless_it_was_used_again() {
    on_every_store(async |world| {
        let limiter = world.limiter_with([per_minute("tpm", 10)]).await;
        let ns = limiter.namespace_id().clone();
        for entity in ["deleted", "used-again", "back", "kept"] {
            limiter.create_entity(entity).await.unwrap();
            spend(&limiter, entity, "gpt-4", "tpm", 1).await;
        }
        for entity in ["deleted", "used-again", "back"] {
            limiter.delete_entity(entity).await.unwrap();
            // As an aggregator of an earlier release did.
            put(&world, usage(&ns, entity, NOW)).await;
        }
        let later = NOW.saturating_add(Duration::from_secs(3_600));
        put(&world, usage(&ns, "used-again", later)).await;
        limiter.create_entity("back").await.unwrap();
        // Never created, and never deleted.
        put(&world, usage(&ns, "unknown", NOW)).await;
        assert!(find(&limiter).await.is_empty(), "it has just happened");
        world.advance(secs(900));
        assert_eq!(find(&limiter).await.deleted_usage, 1);
        assert_eq!(sweep(&limiter).await, 1);
        for (entity, records) in [("deleted", 0), ("used-again", 2), ("back", 1), ("unknown", 1)] {
            let query = limiter.usage().entity(entity).window(Window::Hourly).from(NOW);
            let found = query.until(later.saturating_add(secs(1))).summary().await.unwrap();
            assert_eq!(found.records, records, "{entity}");
        }
    });
}

#[test]
fn bricked_names_are_freed_and_nameless_namespaces_become_recoverable() {
    on_every_store(async |world| {
        let limiter = world.limiter().await;
        let registry = limiter.namespaces();
        let name = |text: &str| NamespaceName::new(text).unwrap();
        // A name that points to nothing.
        let nothing = NamespaceId::new("AAAAAAAAAAA").unwrap();
        put(&world, Record::NamespaceName(name("bricked"), nothing)).await;
        // A name whose namespace has items, but no record: another client's, perhaps.
        let strange = NamespaceId::new("BBBBBBBBBBB").unwrap();
        put(&world, Record::NamespaceName(name("strange"), strange.clone())).await;
        put(&world, usage(&strange, "key", NOW)).await;
        // A namespace without its name.
        let lost = registry.register("lost").await.unwrap().id;
        let key = Record::NamespaceName(name("lost"), lost.clone()).key();
        world.store.delete(&[key]).await.unwrap();
        assert_eq!(find(&limiter).await.nameless(), 0, "its registration may be under way");
        world.advance(secs(900));

        let found = find(&limiter).await;
        assert_eq!((found.names(), found.nameless(), found.broken_names), (1, 1, 1));
        assert_eq!(found.items.total(), 0);
        assert_eq!(sweep(&limiter).await, 2);
        assert_eq!(registry.orphans().all().await.unwrap()[0].id, lost);
        registry.recover(&lost).await.unwrap();
        // Registering the name makes the items orphans.
        registry.register("strange").await.unwrap();
        assert_eq!(find(&limiter).await.items.usage, 1);
        assert_eq!(sweep(&limiter).await, 1);
    });
}

#[test]
fn a_namespace_that_comes_back_before_the_removal_is_left_alone() {
    on_every_store(async |world| {
        let limiter = world.limiter().await;
        let id = NamespaceId::new("AAAAAAAAAAA").unwrap();
        put(&world, usage(&id, "key", NOW)).await;
        let found = find(&limiter).await;
        assert_eq!(found.items.usage, 1);
        // Its record appears: for example, a backup is being restored.
        put(
            &world,
            Record::Namespace(zae_limiter::model::Namespace {
                id: id.clone(),
                name: NamespaceName::new("restored").unwrap(),
                created_at: NOW,
                deleted_at: None,
                is_purging: false,
            }),
        )
        .await;
        let removed = limiter.namespaces().remove_orphans(&found, |_| {}).await.unwrap();
        assert_eq!(removed, 0);
    });
}

#[test]
fn tombstones_go_when_their_time_is_over() {
    on_every_store(async |world| {
        let limiter = world.limiter_with([per_minute("tpm", 10)]).await;
        spend(&limiter, "key", "gpt-4", "tpm", 1).await;
        limiter.delete_entity("key").await.unwrap();
        world.advance(secs(2 * 86_400));
        assert_eq!(find(&limiter).await.tombstones(), 0);
        world.advance(secs(2 * 86_400));
        let expected = u64::from(world.is(Kind::DynamoDb));
        assert_eq!(find(&limiter).await.tombstones(), expected);
        assert_eq!(sweep(&limiter).await, expected);
    });
}
