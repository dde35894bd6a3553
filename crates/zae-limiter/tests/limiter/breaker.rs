//! A store that keeps failing is left alone, and probed.

use std::pin::pin;
use std::task::Poll;

use zae_limiter::model::BreakerSettings;
use zae_limiter::store::StoreErrorKind;
use zae_limiter::testing::Clock as _;
use zae_limiter::{Error, OnUnavailable, RateLimiter, Timestamp};
use zae_limiter_testkit::{Call, Fault};

use crate::world::{
    Kind, World, drive, finish, ms, on_every_store, poll_once, secs, settle_down, soon, threads,
    turn, without_refill,
};

const DOWN: Fault = Fault::FailBefore(StoreErrorKind::Unavailable);
const BUSY: Fault = Fault::FailBefore(StoreErrorKind::Busy);
const HOUR: i64 = 3_600_000;

async fn with_breaker(world: &World, failures: u32) -> RateLimiter {
    let breaker = BreakerSettings { failures, cooldown: secs(5) };
    let limits = [without_refill("rpm", 100)];
    world.builder().breaker(breaker).default_limits(limits).open().await.unwrap()
}

/// A call of an entity whose limits are not cached.
async fn call(world: &World, limiter: &RateLimiter) -> Result<(), Error> {
    let call = limiter.acquire("key", "gpt-4").take("rpm", 1);
    drive(world, call.into_future()).await.0?.commit().await
}

fn is_unavailable(done: &Result<(), Error>) -> bool {
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
            assert!(is_unavailable(&call(&world, &limiter).await));
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
        assert!(is_unavailable(&call(&world, &limiter).await));
        let calls = world.store.all_calls();
        world.advance(secs(5) - ms(1));
        assert!(is_unavailable(&call(&world, &limiter).await));
        settle_down().await;
        assert_eq!(world.store.all_calls(), calls, "too early for a probe");
        world.advance(ms(1));
        for probes in 1..=3 {
            for _ in 0..10 {
                assert!(is_unavailable(&call(&world, &limiter).await));
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
        assert!(is_unavailable(&call(&world, &limiter).await));
        world.store.break_down(Fault::FailBefore(StoreErrorKind::Denied));
        world.advance(secs(5));
        soon("the store's error is returned", async || {
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
        assert!(is_unavailable(&call(&world, &limiter).await));
        world.store.break_down(Fault::Hang);
        world.advance(secs(5));
        let calls = world.store.all_calls();
        for _ in 0..5 {
            assert!(is_unavailable(&call(&world, &limiter).await));
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
            assert!(is_unavailable(&call(&world, &limiter).await));
            world.store.break_down(Fault::Hang);
            world.advance(secs(5));
            assert!(is_unavailable(&call(&world, &limiter).await));
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
            assert!(is_unavailable(&call(&world, &limiter).await));
            assert_eq!(world.store.all_calls() - before, 4, "call {calls}");
        }
        world.store.heal();
        call(&world, &limiter).await.unwrap();
    });
}

#[test]
fn a_busy_bucket_never_opens_it() {
    on_every_store(async |world| {
        let limiter = with_breaker(&world, 2).await;
        let other = async || {
            let call = limiter.acquire("other", "gpt-4").take("rpm", 1);
            let lease = call.on_unavailable(OnUnavailable::Allow).await.unwrap();
            assert!(!lease.is_degraded(), "others are checked meanwhile");
        };
        other().await;
        // Its limits are in the cache then: no time passes while a store reads them.
        limiter.available("key", "gpt-4", &[("rpm", 0)]).await.unwrap();
        for _ in 0..2 {
            let mut busy = pin!(limiter.acquire("key", "gpt-4").take("rpm", 1).into_future());
            let mut attempts = 0;
            let done = loop {
                // The next attempt is the busy call's, at once or after its wait.
                let before = world.store.calls(Call::Acquire);
                world.store.script(Call::Acquire, BUSY);
                let mut done = None;
                soon("an attempt, or the end", async || {
                    if let Poll::Ready(ready) = poll_once(busy.as_mut()) {
                        done = Some(ready);
                    } else if world.store.calls(Call::Acquire) == before {
                        world.advance(ms(1));
                    }
                    done.is_some() || world.store.calls(Call::Acquire) > before
                })
                .await;
                if let Some(done) = done {
                    break done;
                }
                attempts += 1;
                other().await;
            };
            world.store.heal();
            assert_eq!(attempts, 13, "after 10, 20, 40, 80 and then every 100 ms for a second");
            let Err(error) = done else { panic!("{done:?}") };
            assert!(error.to_string().contains("the bucket is busy (1.000 s waited)"), "{error}");
            let Error::Unavailable { cause, .. } = error else { panic!("{error:?}") };
            assert_eq!(cause.kind(), StoreErrorKind::Busy);
        }
        other().await;
        call(&world, &limiter).await.unwrap();
    });
}

#[test]
fn a_short_deadline_does_not_open_it() {
    on_every_store(async |world| {
        let limiter = with_breaker(&world, 2).await;
        call(&world, &limiter).await.unwrap();
        for _ in 0..10 {
            world.store.script(Call::Acquire, Fault::Hang);
            let hasty = limiter.acquire("key", "gpt-4").take("rpm", 1).deadline(ms(1));
            let mut hasty = pin!(hasty.into_future());
            assert!(poll_once(hasty.as_mut()).is_pending());
            world.advance(ms(1));
            let done = finish(hasty).await;
            assert!(matches!(done, Err(Error::Unavailable { .. })), "{done:?}");
        }
        soon("probed", async || world.store.calls(Call::Get) > 1).await;
        settle_down().await;
        call(&world, &limiter).await.unwrap();
    });
}

#[test]
fn calls_cut_off_while_a_probe_hangs_open_it() {
    on_every_store(async |world| {
        let limiter = with_breaker(&world, 3).await;
        call(&world, &limiter).await.unwrap();
        world.store.break_down(Fault::Hang);
        let before = world.store.calls(Call::Get);
        // One is cut off by a deadline of its own, two by the limiter's.
        let acquire = || limiter.acquire("key", "gpt-4").take("rpm", 1);
        let mut hasty = pin!(acquire().deadline(ms(500)).into_future());
        let mut first = pin!(acquire().into_future());
        let mut second = pin!(acquire().into_future());
        assert!(poll_once(hasty.as_mut()).is_pending());
        assert!(poll_once(first.as_mut()).is_pending());
        assert!(poll_once(second.as_mut()).is_pending());
        world.advance(ms(500));
        finish(hasty).await.unwrap_err();
        world.advance(ms(500));
        finish(first).await.unwrap_err();
        finish(second).await.unwrap_err();
        settle_down().await;
        assert_eq!(world.store.calls(Call::Get) - before, 1, "one probe for all of them");
        let mut early = pin!(acquire().into_future());
        assert!(poll_once(early.as_mut()).is_pending(), "nothing is decided before the probe is");
        // The probe has a second, from the first cut-off on.
        world.advance(ms(500));
        soon("open", async || match poll_once(pin!(acquire().into_future())) {
            Poll::Ready(Err(Error::Unavailable { cause, .. })) => {
                assert!(cause.to_string().contains("failed 3 times"), "{cause}");
                true
            }
            _ => false,
        })
        .await;
    });
}

#[test]
fn a_clock_that_is_corrected_does_not_move_it() {
    on_every_store(async |world| {
        let at = |millis: i64| Timestamp::from_millis(world.clock.now().as_millis() + millis);
        for correction in [-HOUR, HOUR] {
            let limiter = with_breaker(&world, 4).await;
            world.store.break_down(DOWN);
            assert!(is_unavailable(&call(&world, &limiter).await));
            world.clock.correct(at(correction));
            let calls = world.store.all_calls();
            assert!(is_unavailable(&call(&world, &limiter).await));
            settle_down().await;
            assert_eq!(world.store.all_calls(), calls, "no time has passed");
            world.store.heal();
            world.advance(secs(5) - ms(1));
            assert!(is_unavailable(&call(&world, &limiter).await), "too early, {correction}");
            world.advance(ms(1));
            soon("closed", async || call(&world, &limiter).await.is_ok()).await;
        }
    });
}
