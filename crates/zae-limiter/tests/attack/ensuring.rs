//! `ensure_*`: as stated each time a program starts.

use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;

use zae_limiter::model::{AuditAction, AuditSubject};
use zae_limiter::{Error, Limit, OnUnavailable, RateLimiter};
use zae_limiter_testkit::{Call, Fault, Gate};

use crate::world::{
    World, child, exceeded, finish, left, on_every_store, on_every_store_with_threads, own_limits,
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
        assert_eq!(
            actions(&limiter, key).await,
            [AuditAction::LimitsSet, AuditAction::EntityCreated]
        );
        assert_eq!(actions(&limiter, AuditSubject::Resource(resource("gpt-4"))).await.len(), 1);
        assert_eq!(limiter.limits("key", None).await.unwrap().unwrap().version, 1);
    });
}

/// Promise: those who add different metadata at the same moment both have them afterwards.
#[test]
fn metadata_added_at_the_same_moment_are_all_there() {
    on_every_store_with_threads(async |world| {
        let limiter = world.limiter().await;
        limiter.create_entity("key").name("Key").metadata("m0", "kept").await.unwrap();
        let mut tasks = Vec::new();
        for at in 1..5 {
            let limiter = world.limiter().await;
            tasks.push(tokio::spawn(async move {
                limiter.ensure_entity("key").metadata(format!("m{at}"), "new").await
            }));
        }
        for task in tasks {
            task.await.unwrap().unwrap();
        }
        let key = limiter.entity("key").await.unwrap().unwrap();
        let names: Vec<_> = key.metadata.keys().map(String::as_str).collect();
        assert_eq!(names, ["m0", "m1", "m2", "m3", "m4"], "a change was lost");
        assert_eq!(key.name.as_deref(), Some("Key"));
    });
}

/// Promise: the same, deterministically: the second change begins and ends while the first is on its way.
#[test]
fn a_change_made_while_an_ensure_is_on_its_way_is_not_lost() {
    on_every_store(async |world| {
        let limiter = world.limiter().await;
        limiter.create_entity("org").await.unwrap();
        limiter.create_entity("key").await.unwrap();
        let gate = Gate::new();
        world.store.script(Call::Write, Fault::HoldBefore(gate.clone()));
        let mut first = pin!(limiter.ensure_entity("key").metadata("a", "1").into_future());
        let mut reached = pin!(gate.reached());
        while poll_once(reached.as_mut()).is_pending() {
            assert!(poll_once(first.as_mut()).is_pending());
            turn().await;
        }
        limiter.ensure_entity("key").parent("org").cascade().metadata("b", "2").await.unwrap();
        gate.open();
        finish(first.as_mut()).await.unwrap();
        let key = limiter.entity("key").await.unwrap().unwrap();
        assert_eq!(key.parent.as_ref().map(|id| id.as_str()), Some("org"), "the parent was lost");
        assert!(key.cascade, "cascade was lost");
        assert_eq!(key.metadata.len(), 2, "{:?}", key.metadata);
    });
}

/// Promise (semantics 3): a cycle is refused. Two who would make one together must not both succeed.
#[test]
fn two_changes_at_once_do_not_make_a_cycle() {
    on_every_store(async |world| {
        let limiter = world.limiter_with([without_refill("rpm", 100)]).await;
        limiter.create_entity("a").await.unwrap();
        limiter.create_entity("b").await.unwrap();
        let gate = Gate::new();
        world.store.script(Call::Write, Fault::HoldBefore(gate.clone()));
        let mut first = pin!(limiter.ensure_entity("a").parent("b").cascade().into_future());
        let mut reached = pin!(gate.reached());
        while poll_once(reached.as_mut()).is_pending() {
            assert!(poll_once(first.as_mut()).is_pending());
            turn().await;
        }
        let second = limiter.ensure_entity("b").parent("a").cascade().await;
        gate.open();
        let first = finish(first.as_mut()).await;
        // Whatever is stored, a call ends, and ends with an answer.
        let mut call = pin!(limiter.acquire("a", "gpt-4").take("rpm", 1).into_future());
        let mut answer = Poll::Pending;
        for _ in 0..20_000 {
            answer = poll_once(call.as_mut());
            if answer.is_ready() {
                break;
            }
            turn().await;
        }
        let answer = match answer {
            Poll::Ready(done) => done.map(drop),
            Poll::Pending => panic!("an acquire in a cycle does not end"),
        };
        assert!(
            first.is_err() || second.is_err(),
            "a cycle was made; an acquire in it is {answer:?}"
        );
    });
}

/// Promise (semantics 3): at most 8 levels. What is deeper is refused when it is made or when it is used, never passed
/// without its ancestors' limits.
#[test]
fn a_subtree_moved_too_deep_does_not_escape_the_top() {
    on_every_store(async |world| {
        let limiter = world.limiter().await;
        limiter.create_entity("a0").await.unwrap();
        for at in 1..6 {
            child(&limiter, &format!("a{at}"), &format!("a{}", at - 1)).await;
        }
        limiter.create_entity("b0").await.unwrap();
        for at in 1..6 {
            child(&limiter, &format!("b{at}"), &format!("b{}", at - 1)).await;
        }
        own_limits(&limiter, "a0", [without_refill("rpm", 5)]).await;
        own_limits(&limiter, "b5", [without_refill("rpm", 100)]).await;
        // b5 is then eleven levels below the top.
        let moved = limiter.ensure_entity("b0").parent("a5").cascade().await;
        if moved.is_err() {
            return;
        }
        let done = limiter.acquire("b5", "gpt-4").take("rpm", 6).await;
        assert!(done.is_err(), "the top has 5, and 6 were admitted");
    });
}

/// Promise (semantics 3): too deep a hierarchy is refused where it is made. A move that succeeds must not put those
/// below out of service.
#[test]
fn a_move_that_succeeds_leaves_those_below_in_service() {
    on_every_store(async |world| {
        let limiter = world.limiter_with([without_refill("rpm", 100)]).await;
        for family in ["a", "b"] {
            limiter.create_entity(&format!("{family}0")).await.unwrap();
            for at in 1..6 {
                child(&limiter, &format!("{family}{at}"), &format!("{family}{}", at - 1)).await;
            }
        }
        if limiter.ensure_entity("b0").parent("a5").cascade().await.is_ok() {
            let done = limiter.acquire("b5", "gpt-4").take("rpm", 1).await;
            assert!(done.is_ok(), "{done:?}");
        }
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
        assert!(matches!(cycle, Err(Error::Cycle { .. })), "{cycle:?}");
        limiter.ensure_entity("key").parent("org").cascade().await.unwrap();
        let cycle = limiter.ensure_entity("org").parent("key").await;
        assert!(matches!(cycle, Err(Error::Cycle { .. })), "{cycle:?}");
        assert!(matches!(limiter.ensure_entity("a b").await, Err(Error::Invalid(_))));
        assert!(matches!(limiter.ensure_limits("key", None, []).await, Err(Error::Invalid(_))));
        let twice = [per_minute("rpm", 1), per_minute("rpm", 2)];
        assert!(matches!(limiter.ensure_limits("key", None, twice).await, Err(Error::Invalid(_))));
    });
}

/// Promise (semantics 4): a change is enforced at once in the process that made it, and everywhere within one TTL; also
/// one that `ensure_*` made, also a new parent.
#[test]
fn a_change_reaches_others_within_the_ttl() {
    on_every_store(async |world| {
        let first = world.limiter().await;
        let second = Arc::new(world.builder().cache_ttl(secs(10)).open().await.unwrap());
        first.create_entity("org").await.unwrap();
        own_limits(&first, "org", [without_refill("rpm", 4)]).await;
        own_limits(&first, "key", [without_refill("rpm", 100)]).await;
        first.create_entity("key").await.unwrap();
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
