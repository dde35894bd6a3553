//! Calls that wait for tokens: exactly as long as needed, in order, and never longer than they want.

use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use zae_limiter::store::StoreErrorKind;
use zae_limiter::testing::Clock as _;
use zae_limiter::{Acquire, Error, Lease, OnUnavailable, RateLimiter};
use zae_limiter_testkit::{Call, Fault};

use crate::world::{
    Kind, World, child, exceeded, left, ms, on, on_every_store, own_limits, per_minute, poll_once,
    secs, spend, turn, without_refill,
};

/// A limiter with one token a second, up to 60, of which none is left.
async fn drained(world: &World) -> RateLimiter {
    let limiter = world.limiter_with([per_minute("rpm", 60)]).await;
    spend(&limiter, "key", "gpt-4", "rpm", 60).await;
    limiter
}

fn take(limiter: &RateLimiter, tokens: u64, patience: Duration) -> Acquire<'_> {
    limiter.acquire("key", "gpt-4").take("rpm", tokens).wait_up_to(patience)
}

type Polled = Poll<Result<Lease, Error>>;

fn is_admitted(polled: Polled) -> bool {
    match polled {
        Poll::Pending => false,
        Poll::Ready(Ok(lease)) => {
            // The tokens stay taken.
            poll_once(pin!(lease.commit())).is_ready()
        }
        Poll::Ready(Err(error)) => panic!("{error}"),
    }
}

#[test]
fn a_call_waits_to_the_millisecond() {
    on(Kind::Memory, async |world| {
        let limiter = drained(&world).await;
        let mut call = pin!(take(&limiter, 3, secs(60)).into_future());
        assert!(poll_once(call.as_mut()).is_pending());
        world.advance(ms(2_999));
        assert!(poll_once(call.as_mut()).is_pending());
        world.advance(ms(1));
        assert!(is_admitted(poll_once(call.as_mut())));
        assert_eq!(left(&limiter, "key", "gpt-4", "rpm").await, 0);
    });
}

#[test]
fn a_call_waits_on_every_store() {
    on_every_store(async |world| {
        let builder = world.builder().deadline(secs(36_000));
        let limiter = builder.open().await.unwrap();
        limiter.set_system_defaults([per_minute("rpm", 60)], None).await.unwrap();
        spend(&limiter, "key", "gpt-4", "rpm", 60).await;
        let mut call = pin!(take(&limiter, 3, secs(60)).into_future());
        let mut moved = 0;
        let lease = loop {
            match poll_once(call.as_mut()) {
                Poll::Ready(done) => break done.unwrap(),
                // Asleep, or the deadline of an attempt is under way: both end by the clock.
                Poll::Pending if world.clock.sleepers() > 0 && moved < 60_000 => {
                    world.advance(ms(1));
                    moved += 1;
                }
                Poll::Pending => {}
            }
            turn().await;
        };
        assert!(moved >= 3_000, "{moved} ms");
        lease.commit().await.unwrap();
    });
}

#[test]
fn a_wait_that_is_longer_than_the_patience_is_refused_at_once() {
    on(Kind::Memory, async |world| {
        let limiter = drained(&world).await;
        for (tokens, patience) in [(3, ms(2_999)), (1, Duration::ZERO), (60, secs(59))] {
            let refusal = exceeded(take(&limiter, tokens, patience).await);
            assert_eq!(refusal.retry_after(), secs(tokens));
        }
        // The clock stood still all the time, and nothing was taken.
        world.advance(secs(1));
        spend(&limiter, "key", "gpt-4", "rpm", 1).await;
        // Without any wait to do, patience does not matter.
        let there = limiter.acquire("other", "gpt-4").take("rpm", 60);
        there.wait_up_to(Duration::ZERO).await.unwrap().commit().await.unwrap();
    });
}

#[test]
fn calls_are_served_in_the_order_in_which_they_came() {
    on(Kind::Memory, async |world| {
        let limiter = drained(&world).await;
        let mut large = pin!(take(&limiter, 5, secs(60)).into_future());
        let mut small = pin!(take(&limiter, 1, secs(60)).into_future());
        let mut last = pin!(take(&limiter, 2, secs(60)).into_future());
        // Polled in another order than they came in after that.
        let mut poll = || {
            [
                is_admitted(poll_once(large.as_mut())),
                is_admitted(poll_once(small.as_mut())),
                is_admitted(poll_once(last.as_mut())),
            ]
        };
        assert_eq!(poll(), [false, false, false]);
        world.advance(secs(4));
        assert_eq!(poll(), [false, false, false], "the small ones do not overtake");
        world.advance(secs(1));
        let mut poll =
            || [is_admitted(poll_once(small.as_mut())), is_admitted(poll_once(last.as_mut()))];
        assert!(is_admitted(poll_once(large.as_mut())));
        assert_eq!(poll(), [false, false]);
        world.advance(secs(1));
        assert_eq!(poll(), [true, false]);
        world.advance(secs(2));
        assert!(is_admitted(poll_once(last.as_mut())));
        assert_eq!(left(&limiter, "key", "gpt-4", "rpm").await, 0);
    });
}

#[test]
fn whoever_loses_patience_in_the_queue_is_refused_and_takes_nothing() {
    on(Kind::Memory, async |world| {
        let limiter = drained(&world).await;
        let mut first = pin!(take(&limiter, 5, secs(60)).into_future());
        let mut second = pin!(take(&limiter, 1, secs(2)).into_future());
        assert!(poll_once(first.as_mut()).is_pending());
        assert!(poll_once(second.as_mut()).is_pending());
        // What takes too long even without the others is refused at once.
        let refusal = exceeded(take(&limiter, 9, secs(2)).await);
        assert_eq!((refusal.retry_after(), refusal.statuses().len()), (secs(9), 1));
        world.advance(secs(2));
        // Two tokens are there, but the first one waits for five.
        let Poll::Ready(done) = poll_once(second.as_mut()) else { panic!("its patience is over") };
        let refusal = exceeded(done);
        assert_eq!(refusal.retry_after(), secs(3));
        assert_eq!(refusal.primary_violation().available.whole_tokens(), 0, "not for this call");
        world.advance(secs(3));
        assert!(is_admitted(poll_once(first.as_mut())));
        assert_eq!(left(&limiter, "key", "gpt-4", "rpm").await, 0);
    });
}

#[test]
fn a_call_that_is_dropped_leaves_the_queue_and_holds_nothing() {
    on(Kind::Memory, async |world| {
        let limiter = drained(&world).await;
        let mut second = pin!(take(&limiter, 1, secs(60)).into_future());
        {
            let mut first = pin!(take(&limiter, 50, secs(60)).into_future());
            assert!(poll_once(first.as_mut()).is_pending());
            assert!(poll_once(second.as_mut()).is_pending());
            world.advance(secs(1));
            assert!(poll_once(second.as_mut()).is_pending());
        }
        assert!(is_admitted(poll_once(second.as_mut())));
        assert_eq!(left(&limiter, "key", "gpt-4", "rpm").await, 0);
    });
}

#[test]
fn other_entities_and_resources_have_queues_of_their_own() {
    on(Kind::Memory, async |world| {
        let limiter = drained(&world).await;
        let mut waits = pin!(take(&limiter, 5, secs(60)).into_future());
        assert!(poll_once(waits.as_mut()).is_pending());
        for (entity, resource) in [("key", "gpt-5"), ("kez", "gpt-4")] {
            let call = limiter.acquire(entity, resource).take("rpm", 60);
            let mut call = pin!(call.wait_up_to(secs(60)).into_future());
            assert!(is_admitted(poll_once(call.as_mut())), "{entity} on {resource}");
        }
    });
}

#[test]
fn a_call_waits_for_its_parent_too() {
    on(Kind::Memory, async |world| {
        let limiter = world.limiter().await;
        limiter.create_entity("org").await.unwrap();
        child(&limiter, "key", "org").await;
        own_limits(&limiter, "key", [without_refill("rpm", 100)]).await;
        own_limits(&limiter, "org", [per_minute("rpm", 60)]).await;
        spend(&limiter, "org", "gpt-4", "rpm", 60).await;
        let mut call = pin!(take(&limiter, 2, secs(60)).into_future());
        assert!(poll_once(call.as_mut()).is_pending());
        world.advance(secs(2));
        assert!(is_admitted(poll_once(call.as_mut())));
        assert_eq!(left(&limiter, "key", "gpt-4", "rpm").await, 98);
    });
}

#[test]
fn what_waiting_cannot_mend_is_an_error_at_once() {
    on_every_store(async |world| {
        let limiter = world.limiter_with([per_minute("rpm", 60)]).await;
        let call = || limiter.acquire("key", "gpt-4").wait_up_to(secs(60));
        assert!(matches!(call().take("x", 1).await, Err(Error::UnknownLimits { .. })));
        assert!(matches!(call().take("rpm", 61).await, Err(Error::ExceedsCapacity(_))));
        assert!(matches!(call().await, Err(Error::Invalid(_))));
        let invalid = limiter.acquire("a b", "gpt-4").take("rpm", 1).wait_up_to(secs(1)).await;
        assert!(matches!(invalid, Err(Error::Invalid(_))));
        world.store.script(Call::Acquire, Fault::FailBefore(StoreErrorKind::Denied));
        let denied = call().take("rpm", 1).await;
        assert!(matches!(denied, Err(Error::Store(_))), "{denied:?}");
    });
}

#[test]
fn a_store_that_is_away_is_not_waited_for_beyond_the_deadline() {
    on(Kind::Memory, async |world| {
        let limiter = world.limiter_with([per_minute("rpm", 60)]).await;
        world.store.break_down(Fault::FailBefore(StoreErrorKind::Unavailable));
        let call = || limiter.acquire("key", "gpt-4").take("rpm", 1).wait_up_to(secs(600));
        let (blocked, took) = crate::world::drive(&world, call().into_future()).await;
        assert!(matches!(blocked, Err(Error::Unavailable { .. })), "{blocked:?}");
        assert!(took <= secs(1), "{took:?}");
        let passes = call().on_unavailable(OnUnavailable::Allow).into_future();
        let (passed, took) = crate::world::drive(&world, passes).await;
        assert!(passed.unwrap().is_degraded());
        assert!(took <= secs(1), "{took:?}");
    });
}

#[test]
fn calls_that_find_tokens_do_not_wait_for_each_other() {
    on_every_store(async |world| {
        let builder = world.builder().deadline(secs(36_000));
        let limiter = builder.open().await.unwrap();
        limiter.set_system_defaults([without_refill("rpm", 100)], None).await.unwrap();
        // Two calls under way at once, on a bucket with plenty, and no patience at all.
        let mut calls: Vec<_> =
            (0..10).map(|_| Box::pin(take(&limiter, 1, Duration::ZERO).into_future())).collect();
        let mut admitted = 0;
        while admitted < 10 {
            for at in (0..calls.len()).rev() {
                if let Poll::Ready(done) = poll_once(calls[at].as_mut()) {
                    done.expect("there are 100").commit().await.unwrap();
                    drop(calls.swap_remove(at));
                    admitted += 1;
                }
            }
            turn().await;
        }
        assert_eq!(left(&limiter, "key", "gpt-4", "rpm").await, 90);
    });
}

#[test]
fn a_call_does_not_wait_behind_those_that_want_other_limits() {
    on(Kind::Memory, async |world| {
        let limits = [without_refill("rpd", 10), per_minute("tpm", 60), per_minute("rpm", 60)];
        let limiter = world.limiter_with(limits).await;
        spend(&limiter, "key", "gpt-4", "rpm", 60).await;
        let call =
            |limit, patience| limiter.acquire("key", "gpt-4").take(limit, 1).wait_up_to(patience);
        let mut waits = pin!(call("rpm", secs(60)).take("rpd", 1).into_future());
        assert!(poll_once(waits.as_mut()).is_pending());
        assert!(is_admitted(poll_once(pin!(call("tpm", secs(5)).into_future()).as_mut())));
        // One that shares a limit does, even if its other limit is there.
        let mut behind = pin!(call("rpd", secs(60)).into_future());
        assert!(poll_once(behind.as_mut()).is_pending());
        world.advance(secs(1));
        assert!(poll_once(behind.as_mut()).is_pending(), "the first one has the first claim");
        assert!(is_admitted(poll_once(waits.as_mut())));
        assert!(is_admitted(poll_once(behind.as_mut())));
        assert_eq!(left(&limiter, "key", "gpt-4", "rpd").await, 8);
    });
}

#[test]
fn a_store_that_hangs_ends_a_call_in_the_queue_within_the_deadline() {
    on(Kind::Memory, async |world| {
        let limiter = drained(&world).await;
        let mut first = pin!(take(&limiter, 5, secs(60)).into_future());
        assert!(poll_once(first.as_mut()).is_pending());
        let gate = zae_limiter_testkit::Gate::new();
        world.store.script(Call::Peek, Fault::HoldBefore(gate.clone()));
        world.store.script(Call::Peek, Fault::HoldBefore(gate.clone()));
        let mut second = pin!(take(&limiter, 1, ms(100)).into_future());
        let began = world.clock.now();
        let done = loop {
            match poll_once(second.as_mut()) {
                Poll::Ready(done) => break done,
                Poll::Pending => world.advance(ms(10)),
            }
            turn().await;
        };
        assert!(matches!(done, Err(Error::Unavailable { .. })), "{done:?}");
        assert!(world.clock.now().millis_since(began) <= 1_100, "{:?}", world.clock.now());
        gate.open();
    });
}
