//! An unavailable store: deadlines, policies, leases that hold nothing.

use std::error::Error as _;
use std::pin::pin;
use std::time::Duration;

use zae_limiter::model::BreakerSettings;
use zae_limiter::store::StoreErrorKind;
use zae_limiter::{Error, OnUnavailable, RateLimiter};
use zae_limiter_testkit::{Call, Fault};

use crate::world::{
    World, child, drive, finish, left, ms, on_every_store, own_limits, per_minute, poll_once, secs,
    settle_down, spend, without_refill,
};

const DOWN: Fault = Fault::FailBefore(StoreErrorKind::Unavailable);

/// A limiter without a breaker, which would answer first.
async fn patient(world: &World) -> RateLimiter {
    let off = BreakerSettings { failures: 0, ..BreakerSettings::default() };
    let limiter = world.builder().breaker(off).open().await.unwrap();
    limiter.set_system_defaults([without_refill("rpm", 10)], None).await.unwrap();
    limiter
}

/// Checks that the call ends when the clock has moved by exactly so much.
async fn ends_after<F: Future>(world: &World, wait: Duration, call: F) -> F::Output {
    let mut call = pin!(call);
    assert!(poll_once(call.as_mut()).is_pending());
    world.advance(wait - ms(1));
    for _ in 0..20 {
        assert!(poll_once(call.as_mut()).is_pending(), "ended a millisecond early");
        crate::world::turn().await;
    }
    world.advance(ms(1));
    finish(call).await
}

#[test]
fn an_acquire_ends_exactly_with_its_deadline() {
    on_every_store(async |world| {
        let limiter = patient(&world).await;
        for temperature in ["cold", "warm"] {
            world.store.break_down(Fault::Hang);
            let acquire = || limiter.acquire("key", "gpt-4").take("rpm", 1);
            let own = limiter.acquire("key", "gpt-4").take("own", 1).limits([per_minute("own", 1)]);
            for (wait, call) in [
                (secs(1), acquire()),
                (ms(30), acquire().deadline(ms(30))),
                (secs(60), acquire().deadline(secs(60))),
                (secs(1), own),
            ] {
                let done = ends_after(&world, wait, call.into_future()).await;
                let Err(Error::Unavailable { waited, cause }) = done else { panic!("{done:?}") };
                assert_eq!(waited, wait, "{temperature}");
                assert_eq!(cause.kind(), StoreErrorKind::Unavailable);
            }
            world.store.heal();
            spend(&limiter, "key", "gpt-4", "rpm", 1).await;
        }
        let builder = world
            .builder()
            .deadline(ms(5))
            .breaker(BreakerSettings { failures: 0, cooldown: secs(1) });
        let hasty = builder.open().await.unwrap();
        world.store.break_down(Fault::Hang);
        let call = hasty.acquire("key", "gpt-4").take("rpm", 1);
        ends_after(&world, ms(5), call.into_future()).await.unwrap_err();
    });
}

#[test]
fn calls_to_a_failing_store_are_retried_within_the_deadline() {
    on_every_store(async |world| {
        let limiter = patient(&world).await;
        for (deadline, attempts, took) in [(secs(1), 4, 70), (ms(70), 4, 70), (ms(25), 2, 25)] {
            world.store.break_down(DOWN);
            let before = world.store.all_calls();
            let call = limiter.acquire("key", "gpt-4").take("rpm", 1).deadline(deadline);
            let (done, waited) = drive(&world, call.into_future()).await;
            let Err(Error::Unavailable { cause, .. }) = &done else { panic!("{done:?}") };
            assert!(cause.to_string().starts_with("scripted failure"), "{cause}");
            assert!(done.as_ref().unwrap_err().source().is_some(), "the error has a cause");
            assert_eq!(world.store.all_calls() - before, attempts);
            assert_eq!(waited, ms(took));
            world.store.heal();
        }
        // One failure is not seen by the caller.
        world.store.script(Call::Get, DOWN);
        let (done, _) =
            drive(&world, limiter.acquire("key", "gpt-4").take("rpm", 1).into_future()).await;
        done.unwrap().commit().await.unwrap();
    });
}

#[test]
fn a_busy_bucket_is_retried_until_the_deadline_and_then_the_policy_decides() {
    on_every_store(async |world| {
        let limiter = patient(&world).await;
        spend(&limiter, "key", "gpt-4", "rpm", 1).await;
        let acquire = || limiter.acquire("key", "gpt-4").take("rpm", 1);
        let busy = |times: usize| {
            world.store.heal();
            let fault = || Fault::FailBefore(StoreErrorKind::Busy);
            (0..times).for_each(|_| world.store.script(Call::Acquire, fault()));
        };
        busy(12);
        let (done, waited) = drive(&world, acquire().into_future()).await;
        assert!(!done.unwrap().is_degraded());
        assert_eq!(waited, ms(950), "12 waits: 10, 20, 40, 80 and eight of 100 ms");
        busy(100);
        let allowed = acquire().on_unavailable(OnUnavailable::Allow);
        let (done, waited) = drive(&world, allowed.into_future()).await;
        assert!(done.unwrap().is_degraded());
        assert_eq!(waited, secs(1));
        let (done, _) = drive(&world, acquire().deadline(ms(25)).into_future()).await;
        let Err(Error::Unavailable { waited, cause }) = done else { panic!("{done:?}") };
        assert_eq!((waited, cause.kind()), (ms(25), StoreErrorKind::Busy));
    });
}

#[test]
fn everything_else_has_a_deadline_too() {
    on_every_store(async |world| {
        let limiter = patient(&world).await;
        world.store.break_down(Fault::Hang);
        let is_unavailable = |done: Result<(), Error>| match done {
            Err(Error::Unavailable { waited, .. }) => assert_eq!(waited, secs(10)),
            other => panic!("{other:?}"),
        };
        is_unavailable(ends_after(&world, secs(10), limiter.ping()).await);
        let limits = limiter.set_limits("key", None, [per_minute("rpm", 1)]);
        is_unavailable(ends_after(&world, secs(10), limits).await.map(drop));
        let entity = limiter.create_entity("key");
        is_unavailable(ends_after(&world, secs(10), entity.into_future()).await.map(drop));
        let opened = ends_after(&world, secs(10), world.builder().open()).await;
        is_unavailable(opened.map(drop));
        let available = limiter.available("key", "gpt-4", &[]);
        is_unavailable(ends_after(&world, secs(10), available).await.map(drop));
        let mut events = limiter.audit_events("key").unwrap();
        is_unavailable(ends_after(&world, secs(10), events.next_page()).await.map(drop));
        world.store.heal();
        limiter.ping().await.unwrap();
        events.next_page().await.unwrap();
    });
}

#[test]
fn the_call_decides_before_the_limiter_and_the_limiter_before_what_is_stored() {
    use OnUnavailable::{Allow, Block};
    on_every_store(async |world| {
        for of_call in [None, Some(Allow), Some(Block)] {
            for of_limiter in [None, Some(Allow), Some(Block)] {
                for stored in [None, Some(Allow), Some(Block)] {
                    let mut builder = world.builder();
                    if let Some(policy) = of_limiter {
                        builder = builder.on_unavailable(policy);
                    }
                    let limiter = builder.open().await.unwrap();
                    let _ = limiter.delete_system_defaults().await;
                    limiter.set_system_defaults([per_minute("rpm", 10)], stored).await.unwrap();
                    spend(&limiter, "key", "gpt-4", "rpm", 0).await;
                    world.store.break_down(Fault::Hang);
                    let mut call = limiter.acquire("key", "gpt-4").take("rpm", 1);
                    if let Some(policy) = of_call {
                        call = call.on_unavailable(policy);
                    }
                    let done = ends_after(&world, secs(1), call.into_future()).await;
                    world.store.heal();
                    let expected = of_call.or(of_limiter).or(stored).unwrap_or(Block);
                    let given = if done.is_ok() { Allow } else { Block };
                    assert_eq!(given, expected, "{of_call:?} {of_limiter:?} {stored:?}");
                }
            }
        }
    });
}

#[test]
fn the_stored_policy_applies_while_the_store_is_unavailable() {
    on_every_store(async |world| {
        let limiter = patient(&world).await;
        let passes = async |when| {
            world.store.break_down(DOWN);
            let call = limiter.acquire("somebody-new", "gpt-4").take("rpm", 1);
            let (done, _) = drive(&world, call.into_future()).await;
            world.store.heal();
            match done {
                Ok(lease) => assert!(lease.is_degraded(), "{when}"),
                Err(Error::Unavailable { .. }) => return false,
                Err(other) => panic!("{when}: {other:?}"),
            }
            true
        };
        assert!(!passes("no policy was ever stored").await);
        limiter
            .set_system_defaults([per_minute("rpm", 1)], Some(OnUnavailable::Allow))
            .await
            .unwrap();
        assert!(passes("right after it was set").await);
        limiter.set_system_defaults([per_minute("rpm", 1)], None).await.unwrap();
        assert!(passes("after another change").await);
        let other = world.limiter().await;
        other
            .set_system_defaults([per_minute("rpm", 1)], Some(OnUnavailable::Block))
            .await
            .unwrap();
        world.advance(secs(60));
        spend(&limiter, "key", "gpt-4", "rpm", 0).await;
        assert!(!passes("after another client changed it and it was read").await);
        limiter
            .set_system_defaults([per_minute("rpm", 1)], Some(OnUnavailable::Allow))
            .await
            .unwrap();
        limiter.delete_system_defaults().await.unwrap();
        assert!(!passes("after it was deleted").await);
    });
}

#[test]
fn a_degraded_lease_holds_nothing_and_does_nothing() {
    on_every_store(async |world| {
        let limiter = patient(&world).await;
        limiter.create_entity("org").await.unwrap();
        child(&limiter, "key", "org").await;
        spend(&limiter, "key", "gpt-4", "rpm", 1).await;
        let degraded = async || {
            world.store.break_down(DOWN);
            let call = limiter.acquire("key", "gpt-4").take("rpm", 3);
            let call = call.on_unavailable(OnUnavailable::Allow);
            let (lease, _) = drive(&world, call.into_future()).await;
            let lease = lease.unwrap();
            assert!(lease.is_degraded());
            assert!(lease.statuses().is_empty());
            assert_eq!(lease.held("rpm"), None);
            world.store.heal();
            lease
        };
        let mut lease = degraded().await;
        let before = world.store.all_calls();
        lease.adjust("rpm", 5).unwrap();
        lease.adjust("rpm", -5).unwrap();
        lease.settle("rpm", 9).unwrap();
        lease.release("rpm", 2).unwrap();
        lease.consume("rpm", 2).await.unwrap();
        lease.flush().await.unwrap();
        lease.commit().await.unwrap();
        assert_eq!(world.store.all_calls(), before);
        let undone = degraded().await;
        let dropped = degraded().await;
        let before = world.store.all_calls();
        undone.rollback().await.unwrap();
        drop(dropped);
        settle_down().await;
        assert_eq!(world.store.all_calls(), before);
        assert_eq!(left(&limiter, "key", "gpt-4", "rpm").await, 9);
        assert_eq!(left(&limiter, "org", "gpt-4", "rpm").await, 9);
    });
}

#[test]
fn a_lease_settles_by_the_policy_of_its_call() {
    on_every_store(async |world| {
        let limiter = patient(&world).await;
        for policy in [OnUnavailable::Allow, OnUnavailable::Block] {
            let take = async |tokens| {
                let call = limiter.acquire("key", "gpt-4").take("rpm", tokens);
                call.on_unavailable(policy).await.unwrap()
            };
            let [mut kept, undone, mut more] = [take(1).await, take(1).await, take(0).await];
            let mut flushed = take(1).await;
            kept.adjust("rpm", 1).unwrap();
            flushed.adjust("rpm", 1).unwrap();
            world.store.break_down(DOWN);
            let (committed, _) = drive(&world, kept.commit()).await;
            let (rolled_back, _) = drive(&world, undone.rollback()).await;
            let (flush, _) = drive(&world, flushed.flush()).await;
            let (consumed, _) = drive(&world, more.consume("rpm", 1)).await;
            world.store.heal();
            for (what, done, lease) in [
                ("commit", committed, None),
                ("rollback", rolled_back, None),
                ("flush", flush, Some(&flushed)),
                ("consume", consumed, Some(&more)),
            ] {
                match policy {
                    OnUnavailable::Allow => {
                        done.unwrap();
                        assert!(lease.is_none_or(|lease| lease.is_degraded()), "{what}");
                    }
                    OnUnavailable::Block => {
                        assert!(matches!(done, Err(Error::Unavailable { .. })), "{what}: {done:?}");
                    }
                }
            }
        }
    });
}

#[test]
fn a_permanent_error_fails_the_call_whatever_the_policy() {
    use StoreErrorKind::{Corrupt, Denied, Incompatible, Rejected};
    on_every_store(async |world| {
        let limiter = world.builder().on_unavailable(OnUnavailable::Allow).open().await.unwrap();
        limiter.set_system_defaults([without_refill("rpm", 10)], None).await.unwrap();
        for kind in [Denied, Corrupt, Incompatible, Rejected] {
            for fails in [Call::Get, Call::Acquire] {
                limiter.invalidate_cache();
                world.store.script(fails, Fault::FailBefore(kind));
                let before = world.store.calls(fails);
                let call = limiter.acquire("key", "gpt-4").take("rpm", 1);
                let (done, _) = drive(&world, call.into_future()).await;
                let Err(Error::Store(error)) = done else { panic!("{kind:?}: {done:?}") };
                assert_eq!(error.kind(), kind);
                assert_eq!(world.store.calls(fails), before + 1, "it is not retried");
            }
            let mut lease = limiter.acquire("key", "gpt-4").take("rpm", 0).await.unwrap();
            lease.adjust("rpm", 1).unwrap();
            world.store.script(Call::Settle, Fault::FailBefore(kind));
            let (done, _) = drive(&world, lease.commit()).await;
            assert!(matches!(done, Err(Error::Store(_))), "{kind:?}: {done:?}");
        }
        // No room for another write is an outage.
        world.store.break_down(Fault::FailBefore(StoreErrorKind::Full));
        let call = limiter.acquire("key", "gpt-4").take("rpm", 1);
        let (done, _) = drive(&world, call.into_future()).await;
        assert!(done.unwrap().is_degraded());
    });
}

#[test]
fn a_refusal_is_an_answer_even_when_calls_pass_without_the_store() {
    on_every_store(async |world| {
        let limiter = world.builder().on_unavailable(OnUnavailable::Allow).open().await.unwrap();
        own_limits(&limiter, "key", [without_refill("rpm", 1)]).await;
        spend(&limiter, "key", "gpt-4", "rpm", 1).await;
        crate::world::refusal(&limiter, "key", "gpt-4", "rpm", 1).await;
        let unknown = limiter.acquire("key", "gpt-4").take("x", 1).await;
        assert!(matches!(unknown, Err(Error::UnknownLimits { .. })), "{unknown:?}");
    });
}
