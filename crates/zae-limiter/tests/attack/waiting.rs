//! `wait_up_to`: exact, fair, cancel-safe, nothing left behind.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::{Pin, pin};
use std::task::Poll;
use std::time::Duration;

use fastrand::Rng;
use zae_limiter::model::{Acquiring, Millitokens};
use zae_limiter::store::StoreErrorKind;
use zae_limiter::testing::Clock as _;
use zae_limiter::{
    Acquire, Error, Lease, Limit, MemoryStore, OnUnavailable, RateLimiter, Timestamp,
};
use zae_limiter_testkit::{Call, Fault, Gate};

use crate::world::{
    Kind, NOW, World, child, exceeded, finish, left, ms, on, on_every_store, own_limits,
    per_minute, poll_once, secs, settle_down, soon, spend, turn, without_refill,
};

async fn drained(world: &World) -> RateLimiter {
    let limiter = world.limiter_with([per_minute("rpm", 60)]).await;
    spend(&limiter, "key", "gpt-4", "rpm", 60).await;
    limiter
}

fn take(limiter: &RateLimiter, tokens: u64, patience: Duration) -> Acquire<'_> {
    limiter.acquire("key", "gpt-4").take("rpm", tokens).wait_up_to(patience)
}

fn keep(lease: Lease) {
    assert!(poll_once(pin!(lease.commit())).is_ready());
}

fn poll_boxed(call: &mut Pin<Box<Acquiring<'_>>>) -> Poll<Result<Lease, Error>> {
    poll_once(call.as_mut())
}

/// No queue is left in the limiter.
fn assert_no_queues(limiter: &RateLimiter) {
    let shown = format!("{limiter:?}");
    assert!(shown.contains("Queues("), "the debug form no longer shows the queues");
    assert!(shown.contains("Queues(Mutex { data: {}"), "a queue is left behind");
}

/// Polls until it is done or `looks` looks are over, without moving the clock.
async fn look<F: Future>(mut call: Pin<&mut F>, looks: usize) -> Poll<F::Output> {
    for _ in 0..looks {
        if let Poll::Ready(done) = poll_once(call.as_mut()) {
            return Poll::Ready(done);
        }
        turn().await;
    }
    Poll::Pending
}

/// Promise: served in order, exactly when the tokens are there, whoever is cancelled; nothing is lost.
#[test]
fn a_random_queue_equals_a_simple_model() {
    for seed in 0..200 {
        on(Kind::Memory, async |world| {
            let limiter = drained(&world).await;
            let mut random = Rng::with_seed(seed);
            let mut calls: VecDeque<(u64, Pin<Box<Acquiring<'_>>>)> = VecDeque::new();
            // Millitokens that the model has; one is earned each millisecond.
            let mut tokens: u64 = 0;
            let mut served = 0_u64;
            for _ in 0..150 {
                match random.u8(0..10) {
                    0..4 => {
                        let amount = random.u64(1..=20);
                        let mut call =
                            Box::pin(take(&limiter, amount, secs(1_000_000)).into_future());
                        let first = poll_boxed(&mut call);
                        if calls.is_empty() && tokens >= amount * 1_000 {
                            let Poll::Ready(Ok(lease)) = first else {
                                panic!("seed {seed}: {first:?}")
                            };
                            keep(lease);
                            tokens -= amount * 1_000;
                            served += amount;
                        } else {
                            assert!(first.is_pending(), "seed {seed}: overtook {first:?}");
                            calls.push_back((amount, call));
                        }
                    }
                    4 => {
                        if !calls.is_empty() {
                            let at = random.usize(0..calls.len());
                            drop(calls.remove(at));
                        }
                    }
                    _ => {
                        let by = random.u64(1..8_000);
                        world.advance(ms(by));
                        tokens = (tokens + by).min(60_000);
                    }
                }
                // Whoever is first in the model is admitted, and nobody else.
                let mut due = 0;
                let mut rest = tokens;
                for (amount, _) in &calls {
                    if rest < amount * 1_000 {
                        break;
                    }
                    rest -= amount * 1_000;
                    due += 1;
                }
                for at in 0..due {
                    let (amount, mut call) = calls.pop_front().unwrap();
                    match poll_boxed(&mut call) {
                        Poll::Ready(Ok(lease)) => keep(lease),
                        other => panic!("seed {seed}: number {at} of {due} is due, but {other:?}"),
                    }
                    served += amount;
                }
                tokens = rest;
                // In any order: the others wait.
                let mut order: Vec<usize> = (0..calls.len()).collect();
                random.shuffle(&mut order);
                for at in order {
                    let polled = poll_boxed(&mut calls[at].1);
                    assert!(
                        polled.is_pending(),
                        "seed {seed}: number {at} is not due, but {polled:?}"
                    );
                }
            }
            let (there, consumed) = world.cell(&limiter, "key", "gpt-4", "rpm").await;
            assert_eq!(u64::try_from(there).unwrap(), tokens, "seed {seed}");
            assert_eq!(u64::try_from(consumed).unwrap(), (served + 60) * 1_000, "seed {seed}");
            drop(calls);
            assert_no_queues(&limiter);
            assert_eq!(world.clock.sleepers(), 0, "seed {seed}: a sleeper is left behind");
        });
    }
}

/// Promise: `patience` is any duration.
#[test]
fn the_longest_patience_waits_for_the_longest_wait() {
    on(Kind::Memory, async |world| {
        let limiter = world.limiter_with([without_refill("rpm", 2)]).await;
        spend(&limiter, "key", "gpt-4", "rpm", 2).await;
        let mut first = pin!(take(&limiter, 1, Duration::MAX).into_future());
        let mut second = pin!(take(&limiter, 1, Duration::MAX).into_future());
        assert!(poll_once(first.as_mut()).is_pending());
        assert!(poll_once(second.as_mut()).is_pending());
        world.advance(secs(1_000_000_000) - ms(1));
        assert!(poll_once(first.as_mut()).is_pending());
        world.advance(ms(1));
        let Poll::Ready(Ok(lease)) = poll_once(first.as_mut()) else { panic!("it is time") };
        keep(lease);
        assert!(poll_once(second.as_mut()).is_pending());
        world.advance(secs(1_000_000_000));
        let Poll::Ready(Ok(lease)) = poll_once(second.as_mut()) else { panic!("it is time") };
        keep(lease);
    });
}

/// Promise: as above, by the machine's clock, inside a runtime and outside. Polled, not waited for.
#[test]
fn the_longest_patience_does_no_harm_on_the_machines_clock() {
    let work = async || {
        let limiter = RateLimiter::builder(MemoryStore::new())
            .default_limits([without_refill("rpm", 1)])
            .open()
            .await
            .unwrap();
        spend(&limiter, "key", "gpt-4", "rpm", 1).await;
        let mut first = pin!(take(&limiter, 1, Duration::MAX).into_future());
        let mut second = pin!(take(&limiter, 1, Duration::MAX).into_future());
        for _ in 0..3 {
            assert!(poll_once(first.as_mut()).is_pending());
            assert!(poll_once(second.as_mut()).is_pending());
        }
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    runtime.block_on(work());
    let mut outside = pin!(work());
    assert!((0..100).any(|_| poll_once(outside.as_mut()).is_ready()));
}

/// Promise: a call that is dropped leaves the queue and holds nothing, wherever it is dropped.
#[test]
fn a_waiter_dropped_after_any_poll_holds_nothing_and_the_next_is_served() {
    on_every_store(async |world| {
        let builder = world.builder().deadline(secs(36_000));
        let limiter = builder.open().await.unwrap();
        for polls in 0..14 {
            let entity = format!("key-{polls}");
            let gpt = || limiter.acquire(&entity, "gpt-4").limits([per_minute("rpm", 60)]);
            gpt().take("rpm", 60).await.unwrap().commit().await.unwrap();
            let mut second = pin!(gpt().take("rpm", 2).wait_up_to(secs(3_600)).into_future());
            {
                let mut first = pin!(gpt().take("rpm", 1).wait_up_to(secs(3_600)).into_future());
                for at in 0..polls {
                    if poll_once(first.as_mut()).is_ready() {
                        break; // The lease is dropped: given back, too.
                    }
                    if at == 0 {
                        assert!(poll_once(second.as_mut()).is_pending());
                    }
                    settle_down().await;
                    world.advance(ms(250));
                }
            }
            let lease = drive_to_end(&world, second.as_mut()).await.unwrap();
            lease.commit().await.unwrap();
            let what = format!("{polls} polls: 62 were taken and nothing else");
            soon(&what, async || world.cell(&limiter, &entity, "gpt-4", "rpm").await.1 == 62_000)
                .await;
        }
        assert_no_queues(&limiter);
    });
}

/// Polls to the end, moving the clock where everybody sleeps.
async fn drive_to_end<F: Future>(world: &World, mut call: Pin<&mut F>) -> F::Output {
    for _ in 0..200_000 {
        if let Poll::Ready(done) = poll_once(call.as_mut()) {
            return done;
        }
        turn().await;
        if world.clock.sleepers() > 0 {
            world.advance(ms(5));
        }
    }
    panic!("it never ends");
}

/// Promise: a call that can never pass is an error of its own; the next one is served.
#[test]
fn limits_that_change_while_waiting_hold_for_the_next_attempt() {
    on(Kind::Memory, async |world| {
        let limiter = drained(&world).await;
        let mut first = pin!(take(&limiter, 30, secs(600)).into_future());
        let mut second = pin!(take(&limiter, 5, secs(600)).into_future());
        assert!(poll_once(first.as_mut()).is_pending());
        assert!(poll_once(second.as_mut()).is_pending());
        limiter.set_system_defaults([per_minute("rpm", 6)], None).await.unwrap();
        world.advance(secs(30));
        let Poll::Ready(done) = poll_once(first.as_mut()) else {
            panic!("it cannot pass any more")
        };
        assert!(matches!(done, Err(Error::ExceedsCapacity(_))), "{done:?}");
        let lease = drive_to_end(&world, second.as_mut()).await.unwrap();
        keep(lease);
        assert_no_queues(&limiter);
    });
}

#[test]
fn an_entity_deleted_while_waiting_starts_anew() {
    on_every_store(async |world| {
        let limiter = world.builder().deadline(secs(36_000)).open().await.unwrap();
        limiter.create_entity("key").await.unwrap();
        own_limits(&limiter, "key", [per_minute("rpm", 60)]).await;
        spend(&limiter, "key", "gpt-4", "rpm", 60).await;
        {
            let mut call = pin!(take(&limiter, 3, secs(600)).into_future());
            assert!(look(call.as_mut(), 300).await.is_pending());
            limiter.delete_entity("key").await.unwrap();
            let gone = drive_to_end(&world, call.as_mut()).await;
            assert!(matches!(gone, Err(Error::UnknownLimits { .. })), "{gone:?}");
        }
        own_limits(&limiter, "key", [per_minute("rpm", 60)]).await;
        let lease = drive_to_end(&world, pin!(take(&limiter, 60, secs(1)).into_future())).await;
        lease.unwrap().commit().await.unwrap();
    });
}

/// Promise: nothing is admitted twice when a clock is set back, and service returns; waits stay exact.
#[test]
fn a_clock_that_is_set_back_while_waiting_costs_just_that_time() {
    on(Kind::Memory, async |world| {
        let limiter = drained(&world).await;
        let mut call = pin!(take(&limiter, 3, secs(60)).into_future());
        assert!(poll_once(call.as_mut()).is_pending());
        world.clock.correct(Timestamp::from_millis(NOW.as_millis() - 10_000));
        world.advance(secs(3));
        assert!(poll_once(call.as_mut()).is_pending());
        world.advance(ms(9_999));
        assert!(poll_once(call.as_mut()).is_pending());
        world.advance(ms(1));
        let Poll::Ready(Ok(lease)) = poll_once(call.as_mut()) else { panic!("13 s have passed") };
        keep(lease);
        // By more than the bound: the process corrects its time, and the wait is as if nothing had happened.
        world.clock.correct(Timestamp::from_millis(NOW.as_millis() - 3_600_000));
        let mut call = pin!(take(&limiter, 1, secs(60)).into_future());
        assert!(poll_once(call.as_mut()).is_pending());
        world.advance(ms(999));
        assert!(poll_once(call.as_mut()).is_pending());
        world.advance(ms(1));
        let Poll::Ready(Ok(lease)) = poll_once(call.as_mut()) else { panic!("1 s has passed") };
        keep(lease);
        assert_no_queues(&limiter);
    });
}

/// Promise: each waits to the millisecond, of several limits the longest, by overrides and by ancestors.
#[test]
fn the_wait_is_that_of_the_slowest_limit_of_the_chain() {
    on(Kind::Memory, async |world| {
        let limiter = world.limiter().await;
        limiter.create_entity("org").await.unwrap();
        child(&limiter, "key", "org").await;
        own_limits(&limiter, "org", [per_minute("tpm", 60)]).await;
        let call = |rpm, tpm| {
            let own = [per_minute("rpm", 7), Limit::per_hour("tpm", 3_600).burst(100)];
            limiter.acquire("key", "gpt-4").take("rpm", rpm).take("tpm", tpm).limits(own)
        };
        keep(call(7, 60).await.unwrap());
        // rpm: 1 in 8,572 ms (60/7 s); tpm of the key: there; of the parent: 3 in 3,000 ms.
        for (rpm, tpm, wait) in [(1, 3, 8_572), (0, 50, 50_000)] {
            let mut waits = pin!(call(rpm, tpm).wait_up_to(ms(wait)).into_future());
            assert!(poll_once(waits.as_mut()).is_pending());
            world.advance(ms(wait - 1));
            assert!(poll_once(waits.as_mut()).is_pending());
            world.advance(ms(1));
            let Poll::Ready(Ok(lease)) = poll_once(waits.as_mut()) else {
                panic!("after {wait} ms")
            };
            keep(lease);
            world.advance(secs(600));
            keep(call(7, 60).await.unwrap());
        }
    });
}

/// Promise: clones share one queue, also one that acts as somebody else.
#[test]
fn clones_of_a_limiter_wait_in_one_queue() {
    on(Kind::Memory, async |world| {
        let limiter = drained(&world).await;
        let clone = limiter.clone();
        let other = limiter.acting_as("somebody");
        let mut first = pin!(take(&limiter, 3, secs(60)).into_future());
        let mut second = pin!(take(&clone, 1, secs(60)).into_future());
        let mut third = pin!(take(&other, 1, secs(60)).into_future());
        assert!(poll_once(first.as_mut()).is_pending());
        assert!(poll_once(second.as_mut()).is_pending());
        assert!(poll_once(third.as_mut()).is_pending());
        world.advance(secs(2));
        assert!(poll_once(third.as_mut()).is_pending(), "somebody else overtook");
        assert!(poll_once(second.as_mut()).is_pending(), "a clone overtook");
    });
}

/// Promise: other processes may take in between, but nothing is taken twice and nobody is forgotten.
#[test]
fn two_limiters_on_one_store_wait_without_taking_too_much() {
    on(Kind::Memory, async |world| {
        let limiter = drained(&world).await;
        let other = world.limiter().await;
        let mut calls: Vec<_> = (0..20)
            .map(|at| {
                let on = if at % 2 == 0 { &limiter } else { &other };
                Box::pin(take(on, 1 + at % 3, secs(3_600)).into_future())
            })
            .collect();
        let mut served = 0;
        for second in 1..=200 {
            calls.retain_mut(|call| match poll_once(call.as_mut()) {
                Poll::Pending => true,
                Poll::Ready(done) => {
                    let lease = done.unwrap();
                    served += lease.held("rpm").unwrap();
                    keep(lease);
                    false
                }
            });
            assert!(served < second, "{served} in {second} s");
            world.advance(secs(1));
        }
        assert!(calls.is_empty(), "{} were forgotten", calls.len());
        assert_no_queues(&limiter);
        assert_no_queues(&other);
    });
}

/// Promise: `run` waits, too; cancelled while waiting it has done nothing.
#[test]
fn run_waits_and_can_be_cancelled_while_waiting() {
    on(Kind::Memory, async |world| {
        let limiter = drained(&world).await;
        {
            let mut work =
                pin!(take(&limiter, 2, secs(60)).run(async |_| Err::<(), _>(panic_error())));
            assert!(poll_once(work.as_mut()).is_pending());
            world.advance(ms(1_999));
            assert!(poll_once(work.as_mut()).is_pending());
        }
        world.advance(ms(1));
        let mut work = pin!(take(&limiter, 3, secs(60)).run(async |lease| {
            lease.settle("rpm", 1)?;
            Ok::<_, Error>(7)
        }));
        assert!(poll_once(work.as_mut()).is_pending());
        world.advance(secs(1));
        let Poll::Ready(Ok(7)) = poll_once(work.as_mut()) else { panic!("it is time") };
        assert_eq!(left(&limiter, "key", "gpt-4", "rpm").await, 2);
    });
}

fn panic_error() -> Error {
    panic!("the work must not begin")
}

/// Promise: patience zero is an acquire that is refused where it would be refused without.
#[test]
fn zero_patience_behind_others_is_refused_at_once_with_a_wait() {
    on(Kind::Memory, async |world| {
        let limiter = drained(&world).await;
        let mut first = pin!(take(&limiter, 10, secs(60)).into_future());
        assert!(poll_once(first.as_mut()).is_pending());
        world.advance(secs(5));
        for tokens in [1, 7] {
            let mut second = pin!(take(&limiter, tokens, Duration::ZERO).into_future());
            let Poll::Ready(done) = poll_once(second.as_mut()) else {
                panic!("it has no patience")
            };
            let refusal = exceeded(done);
            assert!(refusal.retry_after() > Duration::ZERO);
            assert_eq!(refusal.violations().count() + refusal.passed().count(), 1);
        }
        world.advance(secs(5));
        let Poll::Ready(Ok(lease)) = poll_once(first.as_mut()) else { panic!("it is time") };
        keep(lease);
    });
}

/// Promise (semantics 2): an amount of 0 takes and checks nothing, so it cannot be refused.
#[test]
fn an_amount_of_zero_is_not_refused_because_others_wait() {
    on(Kind::Memory, async |world| {
        let limiter = drained(&world).await;
        let mut first = pin!(take(&limiter, 10, secs(60)).into_future());
        assert!(poll_once(first.as_mut()).is_pending());
        // Without waiting it passes.
        keep(limiter.acquire("key", "gpt-4").take("rpm", 0).await.unwrap());
        let mut second = pin!(take(&limiter, 0, secs(1)).into_future());
        let polled = poll_once(second.as_mut());
        world.advance(secs(1));
        let polled = if polled.is_pending() { poll_once(second.as_mut()) } else { polled };
        let Poll::Ready(done) = polled else { panic!("its patience is over") };
        assert!(done.is_ok(), "{done:?}");
    });
}

/// Promise (`LimitStatus::level`, `label`): a grandparent is two levels up, whether or not the parent has limits.
#[test]
fn a_refusal_in_the_queue_counts_levels_over_ancestors_without_limits() {
    on(Kind::Memory, async |world| {
        let limiter = world.limiter().await;
        limiter.create_entity("top").await.unwrap();
        child(&limiter, "middle", "top").await;
        child(&limiter, "key", "middle").await;
        own_limits(&limiter, "top", [per_minute("rpm", 60)]).await;
        own_limits(&limiter, "key", [without_refill("rpm", 1_000)]).await;
        spend(&limiter, "top", "gpt-4", "rpm", 60).await;
        let labels = |refusal: &zae_limiter::RateLimitExceeded| {
            refusal.statuses().iter().map(zae_limiter::LimitStatus::label).collect::<Vec<_>>()
        };
        let at_once = exceeded(limiter.acquire("key", "gpt-4").take("rpm", 1).await);
        assert_eq!(labels(&at_once), ["rpm", "rpm@parent-2"]);
        let mut first = pin!(take(&limiter, 10, secs(60)).into_future());
        assert!(poll_once(first.as_mut()).is_pending());
        let mut second = pin!(take(&limiter, 1, Duration::ZERO).into_future());
        let Poll::Ready(done) = poll_once(second.as_mut()) else { panic!("it has no patience") };
        let in_queue = exceeded(done);
        assert_eq!(labels(&in_queue), ["rpm", "rpm@parent-2"]);
        // And what is there now, without taking.
        let statuses = limiter.available("key", "gpt-4", &[("rpm", 1)]).await.unwrap();
        let shown: Vec<_> = statuses.iter().map(zae_limiter::LimitStatus::label).collect();
        assert_eq!(shown, ["rpm", "rpm@parent-2"]);
    });
}

/// Promise (`on_unavailable`): what happens to this call if the store does not answer. `allow` passes it.
#[test]
fn a_call_that_is_allowed_without_the_store_passes_in_the_queue_too() {
    on(Kind::Memory, async |world| {
        let limiter = drained(&world).await;
        let mut first = pin!(take(&limiter, 10, secs(60)).into_future());
        assert!(poll_once(first.as_mut()).is_pending());
        let call = take(&limiter, 1, secs(2)).on_unavailable(OnUnavailable::Allow);
        let mut second = pin!(call.into_future());
        assert!(poll_once(second.as_mut()).is_pending());
        world.store.break_down(Fault::FailBefore(StoreErrorKind::Unavailable));
        world.advance(secs(2));
        let done = drive_to_end(&world, second.as_mut()).await;
        assert!(done.as_ref().is_ok_and(Lease::is_degraded), "{done:?}");
    });
}

/// Promise: with `block` the same is `Unavailable`, and the store's silence ends with the deadline.
#[test]
fn a_store_that_hangs_does_not_hold_a_call_whose_patience_ended_in_the_queue() {
    on(Kind::Memory, async |world| {
        let limiter = drained(&world).await;
        let mut first = pin!(take(&limiter, 10, secs(60)).into_future());
        assert!(poll_once(first.as_mut()).is_pending());
        let mut second = pin!(take(&limiter, 1, secs(2)).into_future());
        assert!(poll_once(second.as_mut()).is_pending());
        world.store.break_down(Fault::Hang);
        world.advance(secs(2));
        assert!(poll_once(second.as_mut()).is_pending());
        world.advance(secs(1));
        let Poll::Ready(done) = poll_once(second.as_mut()) else { panic!("the deadline is over") };
        assert!(matches!(done, Err(Error::Unavailable { .. })), "{done:?}");
    });
}

/// Promise: the refusal's wait is never too early: after it, and with nobody else calling, the call passes.
#[test]
fn the_wait_of_a_refusal_in_the_queue_is_enough_once_the_others_are_gone() {
    on(Kind::Memory, async |world| {
        let limiter = drained(&world).await;
        for (first_wants, second_wants, after) in [(10, 1, 5), (10, 7, 5), (3, 1, 2), (60, 60, 1)] {
            let refusal = {
                let mut first = pin!(take(&limiter, first_wants, secs(600)).into_future());
                assert!(poll_once(first.as_mut()).is_pending());
                world.advance(secs(after));
                let mut second = pin!(take(&limiter, second_wants, Duration::ZERO).into_future());
                let Poll::Ready(done) = poll_once(second.as_mut()) else { panic!("no patience") };
                exceeded(done)
            };
            world.advance(refusal.retry_after());
            keep(limiter.acquire("key", "gpt-4").take("rpm", second_wants).await.unwrap());
            world.advance(secs(60));
            keep(limiter.acquire("key", "gpt-4").take("rpm", 60).await.unwrap());
        }
    });
}

/// Promise: "refused at once when that wait is longer than what is left", and "no wait would make it pass".
#[test]
fn what_can_never_pass_does_not_wait_behind_others() {
    on(Kind::Memory, async |world| {
        let limiter = drained(&world).await;
        let mut first = pin!(take(&limiter, 10, secs(60)).into_future());
        assert!(poll_once(first.as_mut()).is_pending());
        for (what, call) in [
            ("above the ceiling", take(&limiter, 61, secs(30))),
            ("an unknown limit", take(&limiter, 1, secs(30)).take("x", 1)),
            ("an invalid amount", take(&limiter, u64::MAX, secs(30))),
        ] {
            let mut call = pin!(call.into_future());
            let polled = poll_once(call.as_mut());
            assert!(polled.is_ready(), "{what}: is refused only when it is its turn");
        }
    });
}

/// Promise: refused at once when the wait is longer than what is left of `patience`.
#[test]
fn a_wait_that_is_too_long_is_refused_at_once_behind_others_too() {
    on(Kind::Memory, async |world| {
        let limiter = drained(&world).await;
        let mut first = pin!(take(&limiter, 10, secs(60)).into_future());
        assert!(poll_once(first.as_mut()).is_pending());
        let mut second = pin!(take(&limiter, 50, secs(20)).into_future());
        let polled = poll_once(second.as_mut());
        assert!(polled.is_ready(), "50 tokens need 50 s, and the patience is 20 s");
    });
}

/// Promise: cancel-safe at every call of the store, held before and after it takes effect.
#[test]
fn a_waiter_dropped_at_a_gate_of_the_store_takes_nothing() {
    on_every_store(async |world| {
        let limiter = world.builder().deadline(secs(36_000)).open().await.unwrap();
        limiter.set_system_defaults([without_refill("rpm", 10)], None).await.unwrap();
        for (at, after) in [false, true].into_iter().enumerate() {
            let entity = format!("key-{at}");
            let call = || limiter.acquire(&entity, "gpt-4").take("rpm", 4).wait_up_to(secs(60));
            finish(call().into_future()).await.unwrap().commit().await.unwrap();
            let gate = Gate::new();
            let fault = if after { Fault::HoldAfter } else { Fault::HoldBefore };
            world.store.script(Call::Acquire, fault(gate.clone()));
            let mut second = pin!(call().into_future());
            let mut early = None;
            {
                let mut first = pin!(call().into_future());
                let mut reached = pin!(gate.reached());
                loop {
                    assert!(poll_once(first.as_mut()).is_pending());
                    if poll_once(reached.as_mut()).is_ready() {
                        break;
                    }
                    turn().await;
                }
                // While the first one holds its tokens, the second may be refused at once.
                if let Poll::Ready(done) = poll_once(second.as_mut()) {
                    early = Some(done);
                }
            }
            let lease = match early {
                Some(done) => done,
                None => finish(second.as_mut()).await,
            };
            // The refund of the first may still be on its way: then there are only 2.
            if let Ok(lease) = lease {
                lease.commit().await.unwrap();
                soon("8 were taken", async || {
                    world.cell(&limiter, &entity, "gpt-4", "rpm").await.1 == 8_000
                })
                .await;
            } else {
                exceeded(lease);
                soon("4 were taken", async || {
                    world.cell(&limiter, &entity, "gpt-4", "rpm").await.1 == 4_000
                })
                .await;
            }
            gate.open();
        }
        assert_no_queues(&limiter);
    });
}

/// Promise: a lease that the waiter ahead drops is given back, and the next one can have it.
#[test]
fn what_the_waiter_ahead_gives_back_serves_the_next() {
    on(Kind::Memory, async |world| {
        let limiter = drained(&world).await;
        let mut first = pin!(take(&limiter, 10, secs(60)).into_future());
        let mut second = pin!(take(&limiter, 10, secs(60)).into_future());
        assert!(poll_once(first.as_mut()).is_pending());
        assert!(poll_once(second.as_mut()).is_pending());
        world.advance(secs(10));
        let Poll::Ready(Ok(lease)) = poll_once(first.as_mut()) else { panic!("it is time") };
        lease.rollback().await.unwrap();
        let Poll::Ready(Ok(lease)) = poll_once(second.as_mut()) else { panic!("10 are there") };
        keep(lease);
        assert_eq!(world.cell(&limiter, "key", "gpt-4", "rpm").await.0, 0);
    });
}

/// Promise: nothing is left behind, whatever the end of the call was.
#[test]
fn ten_thousand_queues_leave_nothing_behind() {
    on(Kind::Memory, async |world| {
        let limiter = world.limiter_with([per_minute("rpm", 60)]).await;
        for at in 0..10_000 {
            let entity = format!("key-{at}");
            let call = |tokens| limiter.acquire(&entity, "gpt-4").take("rpm", tokens);
            keep(call(60).wait_up_to(secs(1)).await.unwrap());
            let mut waits = pin!(call(1).wait_up_to(secs(60)).into_future());
            assert!(poll_once(waits.as_mut()).is_pending());
            assert!(call(30).wait_up_to(Duration::ZERO).await.is_err());
            assert!(call(61).wait_up_to(Duration::ZERO).await.is_err());
        }
        assert_no_queues(&limiter);
        assert_eq!(world.clock.sleepers(), 0);
    });
}

/// Promise: waiters on a runtime that ends are gone, and others are served.
#[test]
fn waiters_of_a_runtime_that_ended_do_not_block_the_queue() {
    let world = World::new(Kind::Memory);
    let runtime = || tokio::runtime::Builder::new_current_thread().build().unwrap();
    let first = runtime();
    let limiter = first.block_on(drained(&world));
    for _ in 0..5 {
        let limiter = limiter.clone();
        first.spawn(async move { drop(take(&limiter, 50, secs(600)).await) });
    }
    first.block_on(settle_down());
    drop(first);
    runtime().block_on(async {
        assert_no_queues(&limiter);
        let mut call = pin!(take(&limiter, 1, secs(600)).into_future());
        assert!(poll_once(call.as_mut()).is_pending());
        world.advance(secs(1));
        let Poll::Ready(Ok(lease)) = poll_once(call.as_mut()) else { panic!("it is time") };
        keep(lease);
    });
}

/// Promise: real tasks with wakers, no polling by hand: everybody is woken, in order.
#[test]
fn tasks_are_woken_in_order() {
    // On memory a call that is polled has begun to wait, so the order of arrival is known.
    on(Kind::Memory, async |world| {
        let limiter = world.builder().deadline(secs(36_000)).open().await.unwrap();
        limiter.set_system_defaults([per_minute("rpm", 60)], None).await.unwrap();
        spend(&limiter, "key", "gpt-4", "rpm", 60).await;
        let order = std::sync::Arc::new(std::sync::Mutex::new(Vec::new()));
        let mut tasks = Vec::new();
        for at in 0..8_u64 {
            let (limiter, order) = (limiter.clone(), std::sync::Arc::clone(&order));
            tasks.push(tokio::spawn(async move {
                let lease = take(&limiter, 1 + at % 3, secs(3_600)).await.unwrap();
                order.lock().unwrap().push(at);
                lease.commit().await.unwrap();
            }));
            settle_down().await;
        }
        for _ in 0..200_000 {
            if tasks.iter().all(tokio::task::JoinHandle::is_finished) {
                break;
            }
            turn().await;
            if world.clock.sleepers() > 0 {
                world.advance(ms(5));
            }
        }
        for task in tasks {
            assert!(task.is_finished(), "a task was never woken");
            task.await.unwrap();
        }
        assert_eq!(*order.lock().unwrap(), [0, 1, 2, 3, 4, 5, 6, 7]);
        let (_, consumed) = world.cell(&limiter, "key", "gpt-4", "rpm").await;
        assert_eq!(consumed, 60_000 + (1 + 2 + 3 + 1 + 2 + 3 + 1 + 2) * 1_000);
        assert_eq!(Millitokens::new(consumed).whole_tokens(), 75);
        let _ = world.clock.now();
    });
}

/// Promise (`LimitStatus`, README): a violation has less than was requested; its `retry_after` is "how long until the
/// requested amount is there; zero when it was"; the message says so.
#[test]
fn a_refusal_in_the_queue_is_true() {
    on(Kind::Memory, async |world| {
        let limiter = drained(&world).await;
        let mut first = pin!(take(&limiter, 10, secs(60)).into_future());
        assert!(poll_once(first.as_mut()).is_pending());
        world.advance(secs(5));
        let mut second = pin!(take(&limiter, 1, Duration::ZERO).into_future());
        let Poll::Ready(done) = poll_once(second.as_mut()) else { panic!("it has no patience") };
        let refusal = exceeded(done);
        for status in refusal.violations() {
            assert!(status.available < status.requested, "{refusal}");
        }
    });
}

/// Promise: "The call sleeps for exactly the wait of the refusal": on every store, not a millisecond early or late.
#[test]
fn a_call_waits_to_the_millisecond_on_every_store() {
    on_every_store(async |world| {
        let limiter = world.builder().deadline(secs(36_000)).open().await.unwrap();
        limiter.set_system_defaults([per_minute("rpm", 60)], None).await.unwrap();
        spend(&limiter, "key", "gpt-4", "rpm", 60).await;
        let mut call = pin!(take(&limiter, 3, secs(60)).into_future());
        assert!(look(call.as_mut(), 3_000).await.is_pending());
        world.advance(ms(2_999));
        assert!(look(call.as_mut(), 3_000).await.is_pending());
        world.advance(ms(1));
        finish(call.as_mut()).await.unwrap().commit().await.unwrap();
    });
}

/// Promise: "the last attempt starts before `patience` has passed", and a call never waits longer, whoever is ahead.
#[test]
fn nobody_waits_longer_than_its_patience() {
    on(Kind::Memory, async |world| {
        let limiter = drained(&world).await;
        let mut calls: Vec<_> = (1..=20_u64)
            .map(|at| (at, Box::pin(take(&limiter, 7, ms(at * 1_500)).into_future())))
            .collect();
        for step in 0..=320_u64 {
            let passed = step * 100;
            calls.retain_mut(|(at, call)| match poll_once(call.as_mut()) {
                Poll::Pending => {
                    assert!(passed < *at * 1_500, "number {at} still waits after {passed} ms");
                    true
                }
                Poll::Ready(done) => {
                    if let Ok(lease) = done {
                        keep(lease);
                    }
                    false
                }
            });
            world.advance(ms(100));
        }
        assert!(calls.is_empty());
        assert_no_queues(&limiter);
    });
}
