//! Attacks on hierarchies and deletion: no order of creations and deletions closes a cycle, and a deletion ends what it
//! deletes.

use std::future::Future;
use std::pin::Pin;

use zae_limiter::model::AuditAction;
use zae_limiter::{Error, RateLimiter, Window};
use zae_limiter_testkit::{Call, Fault, Gate};

use crate::world::{
    World, child, finish, left, on_every_store, poll_once, secs, settle_down, spend, turn,
    without_refill,
};

/// Runs a call to the gate.
async fn up_to<F: Future>(gate: &Gate, mut call: Pin<&mut F>) {
    let mut reached = Box::pin(gate.reached());
    finish(std::future::poll_fn(|context| {
        assert!(call.as_mut().poll(context).is_pending());
        reached.as_mut().poll(context)
    }))
    .await;
}

/// No entity is above itself.
async fn check_no_cycle(limiter: &RateLimiter, ids: &[&str]) {
    for id in ids {
        let (mut seen, mut next) = (vec![(*id).to_owned()], Some((*id).to_owned()));
        while let Some(current) = next {
            let found = limiter.entity(&current).await.unwrap();
            next = found.and_then(|found| Some(found.parent?.as_str().to_owned()));
            if let Some(parent) = &next {
                assert!(!seen.contains(parent), "a cycle: {seen:?}, {parent}");
                seen.push(parent.clone());
            }
        }
    }
}

/// `z` is below `x`, which is gone. While `x` is created below `p`, others delete `p` and create it again below `z`.
#[test]
fn a_parent_that_is_replaced_meanwhile_closes_no_cycle() {
    on_every_store(async |world| {
        let limiter = world.limiter().await;
        limiter.create_entity("x").await.unwrap();
        limiter.create_entity("z").parent("x").cascade().await.unwrap();
        limiter.delete_entity("x").await.unwrap();
        limiter.create_entity("p").await.unwrap();
        let gate = Gate::new();
        world.store.script(Call::Write, Fault::HoldBefore(gate.clone()));
        let mut first = Box::pin(async { limiter.create_entity("x").parent("p").cascade().await });
        up_to(&gate, first.as_mut()).await;
        limiter.delete_entity("p").await.unwrap();
        limiter.create_entity("p").parent("z").cascade().await.unwrap();
        gate.open();
        let created = first.await;
        check_no_cycle(&limiter, &["x", "p", "z"]).await;
        assert!(created.is_err(), "{created:?}");
    });
}

/// The same one level higher: the parent stays, and the one above it is replaced.
#[test]
fn a_grandparent_that_is_replaced_meanwhile_closes_no_cycle() {
    on_every_store(async |world| {
        let limiter = world.limiter().await;
        limiter.create_entity("x").await.unwrap();
        limiter.create_entity("z").parent("x").cascade().await.unwrap();
        limiter.delete_entity("x").await.unwrap();
        limiter.create_entity("q").await.unwrap();
        limiter.create_entity("p").parent("q").cascade().await.unwrap();
        let gate = Gate::new();
        world.store.script(Call::Write, Fault::HoldBefore(gate.clone()));
        let mut first = Box::pin(async { limiter.create_entity("x").parent("p").cascade().await });
        up_to(&gate, first.as_mut()).await;
        limiter.delete_entity("q").await.unwrap();
        limiter.create_entity("q").parent("z").cascade().await.unwrap();
        gate.open();
        let _ = first.await;
        check_no_cycle(&limiter, &["x", "p", "q", "z"]).await;
    });
}

/// Two chains that were checked are joined by a third one.
#[test]
fn chains_joined_meanwhile_do_not_exceed_eight_levels() {
    on_every_store(async |world| {
        let limiter = world.limiter_with([without_refill("tpm", 10)]).await;
        // A chain of four, of which a fifth is to become part.
        limiter.create_entity("a1").await.unwrap();
        for level in 2..=4 {
            child(&limiter, &format!("a{level}"), &format!("a{}", level - 1)).await;
        }
        limiter.create_entity("b1").await.unwrap();
        for level in 2..=7 {
            child(&limiter, &format!("b{level}"), &format!("b{}", level - 1)).await;
        }
        let gate = Gate::new();
        world.store.script(Call::Write, Fault::HoldBefore(gate.clone()));
        let mut first =
            Box::pin(async { limiter.create_entity("a5").parent("a4").cascade().await });
        up_to(&gate, first.as_mut()).await;
        limiter.delete_entity("a1").await.unwrap();
        let joined = limiter.create_entity("a1").parent("b7").cascade().await;
        gate.open();
        let created = first.await;
        // At least an entity whose creation was answered can be used.
        if joined.is_ok() && created.is_ok() {
            let taken = limiter.acquire("a5", "gpt-4").take("tpm", 1).await;
            assert!(!matches!(taken, Err(Error::Cycle { .. })), "{taken:?}");
        }
    });
}

/// Polls a future so many times, and then drops it. Returns whether it ended.
async fn poll_and_drop<F: Future>(polls: usize, future: F) -> Option<F::Output> {
    let mut future = Box::pin(future);
    for _ in 0..polls {
        if let std::task::Poll::Ready(done) = poll_once(future.as_mut()) {
            return Some(done);
        }
        turn().await;
    }
    None
}

/// A deletion dropped after any poll can be repeated. Afterwards there is nothing of the entity, but one audit event at
/// least, and a full bucket.
#[test]
fn a_dropped_deletion_can_be_repeated() {
    on_every_store(async |world| {
        for is_created in [true, false] {
            for polls in 0..60 {
                let limiter = world.limiter_with([without_refill("tpm", 10)]).await;
                let key = format!("key-{is_created}-{polls}");
                if is_created {
                    limiter.create_entity(&key).await.unwrap();
                }
                limiter.set_limits(&key, None, [without_refill("tpm", 20)]).await.unwrap();
                for on in ["a", "b", "c"] {
                    spend(&limiter, &key, on, "tpm", 5).await;
                }
                let done = poll_and_drop(polls, limiter.delete_entity(&key)).await;
                settle_down().await;
                match limiter.delete_entity(&key).await {
                    Ok(_) | Err(Error::NotFound(_)) => {}
                    Err(other) => panic!("{other:?}"),
                }
                // What the dropped call had begun may end now.
                settle_down().await;
                let again = limiter.delete_entity(&key).await;
                assert!(matches!(again, Err(Error::NotFound(_))), "{polls} polls: {again:?}");
                for on in ["a", "b", "c"] {
                    let full = left(&limiter, &key, on, "tpm").await;
                    assert_eq!(full, 10, "{polls} polls, ended: {}", done.is_some());
                }
                let events = limiter.audit_events(&key).unwrap().all().await.unwrap();
                let deleted = events.iter().filter(|it| it.action == AuditAction::EntityDeleted);
                assert!(deleted.count() >= 1, "{polls} polls: no audit event of the deletion");
            }
        }
    });
}

/// Net usage of an entity, in whole tokens.
async fn used(limiter: &RateLimiter, key: &str) -> i64 {
    let query = limiter.usage().entity(key).window(Window::Daily);
    let records = query.pages().unwrap().all().await.unwrap();
    records.iter().flat_map(|it| it.consumed.values()).map(|it| it.whole_tokens()).sum()
}

/// A lease outlives its entity, whose id is used again: the new entity pays nothing for the old one, and gets nothing.
#[test]
#[ignore = "known, and documented at delete_entity: a bucket does not know which entity of its id took from it"]
fn a_lease_of_a_deleted_entity_does_not_count_in_the_next_one() {
    on_every_store(async |world: World| {
        for (end, how) in ["rolled back", "dropped"].into_iter().enumerate() {
            let limiter = world.limiter_with([without_refill("tpm", 10)]).await;
            let key = format!("key-{end}");
            limiter.create_entity(&key).await.unwrap();
            let old = limiter.acquire(&key, "gpt-4").take("tpm", 8).await.unwrap();
            limiter.delete_entity(&key).await.unwrap();
            world.advance(secs(10));
            limiter.create_entity(&key).await.unwrap();
            spend(&limiter, &key, "gpt-4", "tpm", 10).await;
            match end {
                0 => old.rollback().await.unwrap(),
                _ => drop(old),
            }
            settle_down().await;
            let left = left(&limiter, &key, "gpt-4", "tpm").await;
            assert_eq!(left, 0, "the new entity got the tokens of the old one ({how})");
            let used = used(&limiter, &key).await;
            assert!(used == 10 || used == 0, "{used} used of the new entity ({how})");
        }
    });
}

/// Two clients delete the same entity, and one of them creates it again below its parent before the other one has ended:
/// then it exists as it was created, or nothing of it exists.
#[test]
#[ignore = "known, and documented at delete_entity: two clients delete an entity while one creates it again"]
fn a_deletion_that_is_overtaken_does_not_take_the_next_entity_apart() {
    for call in [Call::NoteDeletion, Call::ListKeys, Call::Delete, Call::Write] {
        on_every_store(async |world| {
            let limiter = world.limiter_with([without_refill("tpm", 100)]).await;
            let other = world.limiter().await;
            limiter.create_entity("org").await.unwrap();
            limiter.set_limits("org", None, [without_refill("tpm", 10)]).await.unwrap();
            child(&limiter, "key", "org").await;
            spend(&limiter, "key", "other", "tpm", 1).await;
            let gate = Gate::new();
            world.store.script(call, Fault::HoldBefore(gate.clone()));
            let mut first = Box::pin(limiter.delete_entity("key"));
            up_to(&gate, first.as_mut()).await;
            other.delete_entity("key").await.unwrap();
            child(&other, "key", "org").await;
            other.set_limits("key", None, [without_refill("tpm", 50)]).await.unwrap();
            gate.open();
            let deleted = first.await;
            let found = other.entity("key").await.unwrap();
            let has_limits = other.limits("key", None).await.unwrap().is_some();
            assert_eq!(
                found.is_some(),
                has_limits,
                "a half: the entity, and its limits; {call:?}; the first deletion: {deleted:?}"
            );
        });
    }
}
