//! Calls that state what should hold: they change what differs, and nothing else.

use zae_limiter::model::AuditAction;
use zae_limiter::{Error, OnUnavailable, RateLimiter};
use zae_limiter_testkit::Call;

use crate::world::{Kind, World, entity_id, on, on_every_store, per_minute};

async fn actions(limiter: &RateLimiter, entity: &str) -> Vec<AuditAction> {
    let events = limiter.audit_events(entity).unwrap().all().await.unwrap();
    events.into_iter().map(|event| event.action).collect()
}

/// Runs it twice: the second time writes nothing.
async fn check_once(world: &World, what: &str, ensure: impl AsyncFn()) {
    ensure().await;
    let before = world.store.calls(Call::Write);
    ensure().await;
    assert_eq!(world.store.calls(Call::Write), before, "{what} writes although nothing changes");
}

#[test]
fn what_holds_already_is_not_written_again() {
    on_every_store(async |world| {
        let limiter = world.limiter().await;
        let limits = || [per_minute("tpm", 20), per_minute("rpm", 10)];
        check_once(&world, "a parent", async || {
            limiter.ensure_entity("org").name("Org").await.unwrap();
        })
        .await;
        check_once(&world, "a child", async || {
            let key = limiter.ensure_entity("key").parent("org").cascade().metadata("tier", "gold");
            key.await.unwrap();
        })
        .await;
        check_once(&world, "limits of an entity", async || {
            limiter.ensure_limits("key", None, limits()).await.unwrap();
        })
        .await;
        check_once(&world, "limits on a resource", async || {
            limiter.ensure_limits("key", Some("gpt-4"), limits()).await.unwrap();
        })
        .await;
        check_once(&world, "resource defaults", async || {
            limiter.ensure_resource_defaults("gpt-4", limits()).await.unwrap();
        })
        .await;
        check_once(&world, "system defaults", async || {
            let policy = Some(OnUnavailable::Allow);
            limiter.ensure_system_defaults(limits(), policy).await.unwrap();
        })
        .await;
        check_once(&world, "system defaults without a policy", async || {
            let stored = limiter.ensure_system_defaults(limits(), None).await.unwrap();
            assert_eq!(stored.on_unavailable, Some(OnUnavailable::Allow), "it stays as it is");
        })
        .await;
        let expected = [AuditAction::LimitsSet, AuditAction::LimitsSet, AuditAction::EntityCreated];
        assert_eq!(actions(&limiter, "key").await, expected);
    });
}

#[test]
fn what_differs_is_changed_and_audited() {
    on_every_store(async |world| {
        let limiter = world.limiter().await;
        let first = limiter.ensure_limits("key", None, [per_minute("rpm", 10)]).await.unwrap();
        let second = limiter.ensure_limits("key", None, [per_minute("rpm", 11)]).await.unwrap();
        assert_eq!((first.version, second.version), (1, 2));
        for id in ["org", "other"] {
            limiter.ensure_entity(id).await.unwrap();
        }
        limiter.ensure_entity("key").name("Key").metadata("a", "1").await.unwrap();
        limiter.ensure_entity("key").parent("org").cascade().await.unwrap();
        let key = limiter.ensure_entity("key").parent("other").metadata("b", "2").await.unwrap();
        assert_eq!(limiter.entity("key").await.unwrap().as_ref(), Some(&key));
        assert_eq!(key.parent, Some(entity_id("other")));
        assert_eq!((key.name.as_deref(), key.cascade), (Some("Key"), true), "asked for earlier");
        assert_eq!(key.metadata.len(), 2);
        let children = async |parent| limiter.children(parent).unwrap().all().await.unwrap().len();
        assert_eq!((children("org").await, children("other").await), (0, 1));
        use AuditAction::{EntityCreated, EntityUpdated, LimitsSet};
        let expected = [EntityUpdated, EntityUpdated, EntityCreated, LimitsSet, LimitsSet];
        assert_eq!(actions(&limiter, "key").await, expected);
    });
}

#[test]
fn an_update_keeps_the_rules_of_a_creation() {
    on_every_store(async |world| {
        let limiter = world.limiter().await;
        limiter.ensure_entity("org").await.unwrap();
        limiter.ensure_entity("key").parent("org").await.unwrap();
        let missing = limiter.ensure_entity("key").parent("nobody").await;
        assert!(matches!(missing, Err(Error::MissingParent { .. })), "{missing:?}");
        let cycle = limiter.ensure_entity("org").parent("key").await;
        assert!(matches!(cycle, Err(Error::Cycle { .. })), "{cycle:?}");
        let itself = limiter.ensure_entity("org").parent("org").await;
        assert!(matches!(itself, Err(Error::Cycle { .. })), "{itself:?}");
        let nothing = limiter.ensure_limits("key", None, []).await;
        assert!(matches!(nothing, Err(Error::Invalid(_))), "{nothing:?}");
        let nothing = limiter.ensure_system_defaults([], None).await;
        assert!(matches!(nothing, Err(Error::Invalid(_))), "{nothing:?}");
        assert_eq!(limiter.entity("key").await.unwrap().unwrap().parent, Some(entity_id("org")));
    });
}

#[test]
fn a_new_parent_is_charged_by_the_next_call() {
    on_every_store(async |world| {
        let limiter = world.limiter_with([per_minute("rpm", 60)]).await;
        for id in ["org", "other"] {
            limiter.ensure_entity(id).await.unwrap();
        }
        limiter.ensure_entity("key").parent("org").cascade().await.unwrap();
        crate::world::spend(&limiter, "key", "gpt-4", "rpm", 5).await;
        limiter.ensure_entity("key").parent("other").await.unwrap();
        crate::world::spend(&limiter, "key", "gpt-4", "rpm", 7).await;
        let left = async |id| crate::world::left(&limiter, id, "gpt-4", "rpm").await;
        assert_eq!((left("key").await, left("org").await, left("other").await), (48, 55, 53));
    });
}

#[test]
fn two_who_create_the_same_entity_both_succeed() {
    on(Kind::Memory, async |world| {
        let limiter = world.limiter().await;
        let (one, other) =
            tokio::join!(limiter.ensure_entity("key").name("A"), limiter.ensure_entity("key"));
        assert!(one.is_ok() && other.is_ok(), "{one:?} {other:?}");
        assert_eq!(limiter.entity("key").await.unwrap().unwrap().name.as_deref(), Some("A"));
    });
}
