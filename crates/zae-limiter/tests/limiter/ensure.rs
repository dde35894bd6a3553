//! Calls that state what should hold: they change what differs, and nothing else.

use zae_limiter::model::AuditAction;
use zae_limiter::{Error, OnUnavailable, RateLimiter};
use zae_limiter_testkit::Call;

use crate::world::{Kind, World, on, on_every_store, per_minute};

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
fn limits_that_differ_are_changed_and_entities_are_not() {
    on_every_store(async |world| {
        let limiter = world.limiter().await;
        let first = limiter.ensure_limits("key", None, [per_minute("rpm", 10)]).await.unwrap();
        let second = limiter.ensure_limits("key", None, [per_minute("rpm", 11)]).await.unwrap();
        assert_eq!((first.version, second.version), (1, 2));
        for id in ["org", "other"] {
            limiter.ensure_entity(id).await.unwrap();
        }
        let key = limiter.ensure_entity("key").name("Key").parent("org").metadata("a", "1");
        let key = key.await.unwrap();
        // What the call does not set may be anything.
        assert_eq!(limiter.ensure_entity("key").await.unwrap(), key);
        assert_eq!(limiter.ensure_entity("key").parent("org").await.unwrap(), key);
        for differs in [
            limiter.ensure_entity("key").parent("other").await,
            limiter.ensure_entity("key").parent("nobody").await,
            limiter.ensure_entity("key").name("Another").await,
            limiter.ensure_entity("key").cascade().await,
            limiter.ensure_entity("key").metadata("a", "2").await,
            limiter.ensure_entity("key").metadata("b", "1").await,
        ] {
            assert!(matches!(differs, Err(Error::Differs(_))), "{differs:?}");
        }
        assert_eq!(limiter.entity("key").await.unwrap(), Some(key));
        use AuditAction::{EntityCreated, LimitsSet};
        assert_eq!(actions(&limiter, "key").await, [EntityCreated, LimitsSet, LimitsSet]);
    });
}

#[test]
fn a_creation_by_ensure_keeps_the_rules() {
    on_every_store(async |world| {
        let limiter = world.limiter().await;
        let missing = limiter.ensure_entity("key").parent("nobody").await;
        assert!(matches!(missing, Err(Error::MissingParent { .. })), "{missing:?}");
        let itself = limiter.ensure_entity("key").parent("key").await;
        assert!(matches!(itself, Err(Error::Cycle { .. })), "{itself:?}");
        let nothing = limiter.ensure_limits("key", None, []).await;
        assert!(matches!(nothing, Err(Error::Invalid(_))), "{nothing:?}");
        let nothing = limiter.ensure_system_defaults([], None).await;
        assert!(matches!(nothing, Err(Error::Invalid(_))), "{nothing:?}");
        assert_eq!(limiter.entity("key").await.unwrap(), None);
    });
}

#[test]
fn two_who_create_the_same_entity_both_succeed() {
    on(Kind::Memory, async |world| {
        let limiter = world.limiter().await;
        let ensure = || limiter.ensure_entity("key").name("A");
        let (one, other) = tokio::join!(ensure(), ensure());
        assert_eq!(one.unwrap(), other.unwrap());
        assert_eq!(actions(&limiter, "key").await, [AuditAction::EntityCreated]);
    });
}
