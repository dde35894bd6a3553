//! `ensure_*`: as stated each time a program starts.

use std::pin::pin;
use std::sync::Arc;

use zae_limiter::model::{AuditAction, AuditSubject};
use zae_limiter::{Error, Limit, OnUnavailable, RateLimiter};
use zae_limiter_testkit::{Call, Fault, Gate};

use crate::world::{
    World, exceeded, finish, left, on_every_store, on_every_store_with_threads, own_limits,
    per_minute, poll_once, resource, secs, spend, turn, without_refill,
};

async fn actions(limiter: &RateLimiter, subject: AuditSubject) -> Vec<AuditAction> {
    let events = limiter.audit_events_of(subject).all().await.unwrap();
    events.into_iter().map(|event| event.action).collect()
}

fn changes(world: &World) -> usize {
    [Call::Acquire, Call::Settle, Call::Reconfigure, Call::Write, Call::Delete]
        .into_iter()
        .map(|call| world.store.calls(call))
        .sum()
}

/// Promise: no error, no write and no audit event where nothing changes; from another process, too.
#[test]
fn nothing_is_written_where_nothing_changes() {
    on_every_store(async |world| {
        let first = world.limiter().await;
        let second = world.limiter().await;
        let limits = || [per_minute("tpm", 20), Limit::per_day("rpm", 10).burst(3)];
        let swapped = || [Limit::per("rpm", 10, secs(86_400)).burst(3), per_minute("tpm", 20)];
        let ensure = async |limiter: &RateLimiter, limits: [Limit; 2]| {
            limiter.ensure_entity("org").name("Org").metadata("a", "1").await.unwrap();
            limiter.ensure_entity("key").parent("org").cascade().await.unwrap();
            limiter.ensure_limits("key", None, limits.clone()).await.unwrap();
            limiter.ensure_limits("key", Some("gpt-4"), limits.clone()).await.unwrap();
            limiter.ensure_resource_defaults("gpt-4", limits.clone()).await.unwrap();
            let policy = Some(OnUnavailable::Block);
            limiter.ensure_system_defaults(limits, policy).await.unwrap();
        };
        ensure(&first, limits()).await;
        spend(&first, "key", "gpt-4", "rpm", 1).await;
        let before = changes(&world);
        ensure(&first, swapped()).await;
        ensure(&second, limits()).await;
        second.ensure_entity("org").await.unwrap();
        second.ensure_entity("key").await.unwrap();
        second.ensure_entity("key").parent("org").await.unwrap();
        second.ensure_system_defaults(limits(), None).await.unwrap();
        assert_eq!(changes(&world), before);
        assert_eq!(actions(&first, AuditSubject::Resource(resource("gpt-4"))).await.len(), 1);
        assert_eq!(
            actions(&first, AuditSubject::Entity(crate::world::entity_id("key"))).await.len(),
            3
        );
        let entity = first.entity("key").await.unwrap().unwrap();
        assert!(entity.cascade, "what is not asked for stays as it is");
        assert_eq!(first.entity("org").await.unwrap().unwrap().name.as_deref(), Some("Org"));
    });
}

/// Promise: as above for many that start at the same moment: one change, one event, no error.
#[test]
fn many_who_ensure_the_same_at_once_make_one_change() {
    on_every_store_with_threads(async |world| {
        let limiter = world.limiter().await;
        limiter.create_entity("org").await.unwrap();
        let mut tasks = Vec::new();
        for _ in 0..12 {
            let limiter = world.limiter().await;
            tasks.push(tokio::spawn(async move {
                limiter.ensure_entity("key").parent("org").metadata("tier", "gold").await?;
                limiter.ensure_limits("key", None, [per_minute("rpm", 10)]).await?;
                limiter.ensure_resource_defaults("gpt-4", [per_minute("rpm", 10)]).await?;
                limiter.ensure_system_defaults([per_minute("rpm", 10)], None).await
            }));
        }
        for task in tasks {
            let stored = task.await.unwrap();
            assert_eq!(stored.expect("no error").version, 1);
        }
        let key = AuditSubject::Entity(crate::world::entity_id("key"));
        // Two limiters may have made them in the same millisecond, in any order.
        let found = actions(&limiter, key).await;
        assert!(
            found.contains(&AuditAction::LimitsSet) && found.contains(&AuditAction::EntityCreated)
        );
        assert_eq!(found.len(), 2);
        assert_eq!(actions(&limiter, AuditSubject::Resource(resource("gpt-4"))).await.len(), 1);
        assert_eq!(limiter.limits("key", None).await.unwrap().unwrap().version, 1);
    });
}

/// Promise: "It never changes an entity that exists": an ensure that asks for something else fails, and loses nothing,
/// whatever others do at the same moment.
#[test]
fn an_entity_that_exists_is_never_changed() {
    on_every_store_with_threads(async |world| {
        let limiter = world.limiter().await;
        limiter.create_entity("org").await.unwrap();
        let create = limiter.create_entity("key").name("Key").parent("org").cascade();
        let created = create.metadata("m0", "kept").await.unwrap();
        let mut tasks = Vec::new();
        for at in 0..5 {
            let limiter = world.limiter().await;
            tasks.push(tokio::spawn(async move {
                limiter.ensure_entity("key").metadata(format!("m{at}"), "new").await
            }));
        }
        for task in tasks {
            let done = task.await.unwrap();
            assert!(matches!(done, Err(Error::Differs(_))), "{done:?}");
        }
        for other in [
            limiter.ensure_entity("key").parent("key").await,
            limiter.ensure_entity("key").name("Other").await,
            limiter.ensure_entity("org").cascade().await,
            limiter.ensure_entity("org").parent("key").await,
        ] {
            assert!(matches!(other, Err(Error::Differs(_))), "{other:?}");
        }
        assert_eq!(limiter.entity("key").await.unwrap(), Some(created));
        let key = AuditSubject::Entity(crate::world::entity_id("key"));
        assert_eq!(actions(&limiter, key).await.len(), 1);
    });
}

/// Promise: "Where nothing changes, nothing is written": those who lose the race find that nothing is left to change.
#[test]
fn whoever_loses_the_race_to_the_same_limits_writes_nothing() {
    on_every_store(async |world| {
        let limiter = world.limiter().await;
        let gate = Gate::new();
        world.store.script(Call::Write, Fault::HoldBefore(gate.clone()));
        let mut first = pin!(limiter.ensure_limits("key", None, [per_minute("rpm", 10)]));
        let mut reached = pin!(gate.reached());
        while poll_once(reached.as_mut()).is_pending() {
            assert!(poll_once(first.as_mut()).is_pending());
            turn().await;
        }
        limiter.ensure_limits("key", None, [per_minute("rpm", 10)]).await.unwrap();
        gate.open();
        let stored = finish(first.as_mut()).await.unwrap();
        let key = AuditSubject::Entity(crate::world::entity_id("key"));
        assert_eq!((stored.version, actions(&limiter, key).await.len()), (1, 1));
    });
}

/// Promise: the parent must exist, also for an entity that names it already.
#[test]
fn an_entity_keeps_the_rules_when_it_is_ensured() {
    on_every_store(async |world| {
        let limiter = world.limiter().await;
        let missing = limiter.ensure_entity("key").parent("org").await;
        assert!(matches!(missing, Err(Error::MissingParent { .. })), "{missing:?}");
        assert!(limiter.entity("key").await.unwrap().is_none());
        let own = limiter.ensure_entity("key").parent("key").await;
        assert!(matches!(own, Err(Error::Cycle { .. } | Error::MissingParent { .. })), "{own:?}");
        limiter.create_entity("org").await.unwrap();
        limiter.ensure_entity("key").parent("org").await.unwrap();
        let cycle = limiter.ensure_entity("org").parent("key").await;
        assert!(matches!(cycle, Err(Error::Differs(_))), "{cycle:?}");
        let cascade = limiter.ensure_entity("key").parent("org").cascade().await;
        assert!(matches!(cascade, Err(Error::Differs(_))), "{cascade:?}");
        assert!(matches!(limiter.ensure_entity("a b").await, Err(Error::Invalid(_))));
        assert!(matches!(limiter.ensure_limits("key", None, []).await, Err(Error::Invalid(_))));
        let twice = [per_minute("rpm", 1), per_minute("rpm", 2)];
        assert!(matches!(limiter.ensure_limits("key", None, twice).await, Err(Error::Invalid(_))));
    });
}

/// Promise (semantics 4): a change is enforced at once in the process that made it, and everywhere within one TTL; also
/// one that `ensure_*` made.
#[test]
fn a_change_reaches_others_within_the_ttl() {
    on_every_store(async |world| {
        let first = world.limiter().await;
        let second = Arc::new(world.builder().cache_ttl(secs(10)).open().await.unwrap());
        first.create_entity("org").await.unwrap();
        own_limits(&first, "org", [without_refill("rpm", 4)]).await;
        own_limits(&first, "key", [without_refill("rpm", 100)]).await;
        spend(&second, "key", "gpt-4", "rpm", 10).await;
        first.ensure_entity("key").parent("org").cascade().await.unwrap();
        exceeded_or_capacity(first.acquire("key", "gpt-4").take("rpm", 5).await);
        world.advance(secs(10));
        exceeded_or_capacity(second.acquire("key", "gpt-4").take("rpm", 5).await);
        first.ensure_limits("key", None, [without_refill("rpm", 3)]).await.unwrap();
        exceeded_or_capacity(first.acquire("key", "gpt-4").take("rpm", 4).await);
        world.advance(secs(10));
        exceeded_or_capacity(second.acquire("key", "gpt-4").take("rpm", 4).await);
        assert_eq!(left(&second, "key", "gpt-4", "rpm").await, 3);
    });
}

fn exceeded_or_capacity(done: Result<zae_limiter::Lease, Error>) {
    match done {
        Err(Error::ExceedsCapacity(_)) => {}
        other => drop(exceeded(other)),
    }
}
