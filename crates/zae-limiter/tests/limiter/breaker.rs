//! A store that keeps failing is left alone, and probed.

use zae_limiter::{BreakerSettings, Error, OnUnavailable, RateLimiter, StoreErrorKind};
use zae_limiter_testkit::{Call, Fault};

use crate::world::{
    Kind, World, drive, ms, on_every_store, secs, settle_down, soon, threads, turn, without_refill,
};

const DOWN: Fault = Fault::FailBefore(StoreErrorKind::Unavailable);

async fn with_breaker(world: &World, failures: u32) -> RateLimiter {
    let breaker = BreakerSettings { failures, cooldown: secs(5) };
    let limits = [without_refill("rpm", 100)];
    world.builder().breaker(breaker).default_limits(limits).open().await.unwrap()
}

/// A call for somebody whose limits are not cached.
async fn call(world: &World, limiter: &RateLimiter) -> Result<(), Error> {
    let call = limiter.acquire("key", "gpt-4").take("rpm", 1);
    drive(world, call.into_future()).await.0?.commit().await
}

fn is_away(done: &Result<(), Error>) -> bool {
    matches!(done, Err(Error::Unavailable { .. }))
}

#[test]
fn it_opens_after_failures_in_a_row_and_then_answers_without_the_store() {
    on_every_store(async |world| {
        let limiter = with_breaker(&world, 6).await;
        world.store.break_down(DOWN);
        let before = world.store.all_calls();
        // Four attempts, then two, then the breaker.
        for _ in 0..2 {
            assert!(is_away(&call(&world, &limiter).await));
        }
        assert_eq!(world.store.all_calls() - before, 6);
        let now = world.clock.sleepers();
        for _ in 0..100 {
            let done = limiter.acquire("key", "gpt-4").take("rpm", 1).await;
            let Err(Error::Unavailable { waited, cause }) = done else { panic!("{done:?}") };
            assert!(waited.is_zero());
            assert!(cause.to_string().contains("failed 6 times"), "{cause}");
        }
        let allowed = limiter.acquire("key", "gpt-4").take("rpm", 1);
        let lease = allowed.on_unavailable(OnUnavailable::Allow).await.unwrap();
        assert!(lease.is_degraded());
        assert_eq!(world.store.all_calls() - before, 6, "the store is left alone");
        assert_eq!(world.clock.sleepers(), now);
    });
}

#[test]
fn an_answer_in_between_starts_the_count_anew() {
    on_every_store(async |world| {
        let limiter = with_breaker(&world, 3).await;
        for _ in 0..5 {
            world.store.script(Call::Get, DOWN);
            world.store.script(Call::Get, DOWN);
            limiter.invalidate_cache();
            call(&world, &limiter).await.unwrap();
        }
    });
}

#[test]
fn it_probes_once_per_cooldown_and_closes_again() {
    on_every_store(async |world| {
        let limiter = with_breaker(&world, 4).await;
        world.store.break_down(DOWN);
        assert!(is_away(&call(&world, &limiter).await));
        let calls = world.store.all_calls();
        world.advance(secs(5) - ms(1));
        assert!(is_away(&call(&world, &limiter).await));
        settle_down().await;
        assert_eq!(world.store.all_calls(), calls, "too early for a probe");
        world.advance(ms(1));
        for probes in 1..=3 {
            for _ in 0..10 {
                assert!(is_away(&call(&world, &limiter).await));
                settle_down().await;
            }
            assert_eq!(world.store.all_calls(), calls + probes, "one probe for each cooldown");
            world.advance(secs(5));
        }
        world.store.heal();
        let first = call(&world, &limiter).await;
        soon("closed", async || call(&world, &limiter).await.is_ok()).await;
        drop(first);
        let calls = world.store.calls(Call::Acquire);
        call(&world, &limiter).await.unwrap();
        assert_eq!(world.store.calls(Call::Acquire), calls + 1);
    });
}

#[test]
fn an_error_that_is_an_answer_closes_it() {
    on_every_store(async |world| {
        let limiter = with_breaker(&world, 4).await;
        world.store.break_down(DOWN);
        assert!(is_away(&call(&world, &limiter).await));
        world.store.break_down(Fault::FailBefore(StoreErrorKind::Denied));
        world.advance(secs(5));
        soon("told what is wrong", async || {
            matches!(call(&world, &limiter).await, Err(Error::Store(_)))
        })
        .await;
    });
}

#[test]
fn a_probe_that_hangs_ends_with_the_deadline_and_is_followed_by_another() {
    on_every_store(async |world| {
        let limiter = with_breaker(&world, 4).await;
        world.store.break_down(DOWN);
        assert!(is_away(&call(&world, &limiter).await));
        world.store.break_down(Fault::Hang);
        world.advance(secs(5));
        let calls = world.store.all_calls();
        for _ in 0..5 {
            assert!(is_away(&call(&world, &limiter).await));
            turn().await;
        }
        assert_eq!(world.store.all_calls(), calls + 1, "one probe at a time");
        world.advance(secs(1));
        settle_down().await;
        world.store.heal();
        world.advance(secs(5));
        soon("closed", async || call(&world, &limiter).await.is_ok()).await;
    });
}

#[test]
fn a_probe_that_ends_with_its_runtime_is_followed_by_another() {
    for kind in Kind::ALL {
        let world = World::new(*kind);
        let runtime = threads();
        let limiter = runtime.block_on(async {
            let limiter = with_breaker(&world, 4).await;
            world.store.break_down(DOWN);
            assert!(is_away(&call(&world, &limiter).await));
            world.store.break_down(Fault::Hang);
            world.advance(secs(5));
            assert!(is_away(&call(&world, &limiter).await));
            limiter
        });
        drop(runtime);
        world.store.heal();
        world.advance(secs(5));
        let closed = async || call(&world, &limiter).await.is_ok();
        threads().block_on(soon("closed", closed));
    }
}

#[test]
fn it_can_be_switched_off() {
    on_every_store(async |world| {
        let limiter = with_breaker(&world, 0).await;
        world.store.break_down(DOWN);
        for calls in 1..=10 {
            let before = world.store.all_calls();
            assert!(is_away(&call(&world, &limiter).await));
            assert_eq!(world.store.all_calls() - before, 4, "call {calls}");
        }
        world.store.heal();
        call(&world, &limiter).await.unwrap();
    });
}
