//! An acquire that is dropped at any of its awaits leaves nothing taken and nothing locked.

use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};

use tokio::sync::Notify;
use zae_limiter::{Error, Lease, RateLimiter};
use zae_limiter_testkit::{Call, Fault, Gate};

use crate::world::{
    World, child, finish, left, on_every_store, own_limits, poll_once, soon, spend, without_refill,
};

/// So many polls are more than any acquire needs.
const POLLS_MAX: usize = 100;

/// Three levels of a hundred tokens each, read by a limiter that has cached nothing.
async fn family(world: &World) {
    let limiter = world.limiter().await;
    limiter.create_entity("org").await.unwrap();
    child(&limiter, "team", "org").await;
    child(&limiter, "key", "team").await;
    for who in ["org", "team", "key"] {
        own_limits(&limiter, who, [without_refill("tpm", 100)]).await;
    }
}

async fn all_full(limiter: &RateLimiter) -> bool {
    let mut full = true;
    for who in ["org", "team", "key"] {
        full &= left(limiter, who, "gpt-4", "tpm").await == 100;
    }
    full
}

/// After a cancelled call: all tokens come back, if not at once then soon, and others can go on.
async fn check_untouched(limiter: &RateLimiter, when: &str) {
    soon(when, async || all_full(limiter).await).await;
    soon(when, async || {
        // What the store is still at work on can be taken and given back even now.
        let call = limiter.acquire("key", "gpt-4").take("tpm", 100).into_future();
        match finish(call).await {
            Ok(lease) => {
                finish(lease.rollback()).await.unwrap();
                true
            }
            Err(Error::Exceeded(_)) => false,
            Err(other) => panic!("{when}: {other:?}"),
        }
    })
    .await;
    soon(when, async || all_full(limiter).await).await;
}

/// Rings when a future asks to be polled again.
#[derive(Default)]
struct Bell(Notify);

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.0.notify_one();
    }
}

/// Polls the future so many times, each time after it was woken; the last wake-up is waited for
/// too, so that an answer is ready and nobody reads it.
async fn poll_times<F: Future>(mut future: Pin<&mut F>, times: usize) -> Poll<F::Output> {
    let bell = Arc::new(Bell::default());
    let waker = Waker::from(Arc::clone(&bell));
    for _ in 0..times {
        let done = future.as_mut().poll(&mut Context::from_waker(&waker));
        if done.is_ready() {
            return done;
        }
        bell.0.notified().await;
    }
    Poll::Pending
}

#[test]
fn an_acquire_polled_any_number_of_times_and_dropped_leaves_nothing_taken() {
    on_every_store(async |world| {
        family(&world).await;
        for polls in 0..POLLS_MAX {
            let limiter = world.limiter().await;
            let done = {
                let call = limiter.acquire("key", "gpt-4").take("tpm", 10);
                let mut call = pin!(call.into_future());
                poll_times(call.as_mut(), polls).await
            };
            let ended = done.is_ready();
            drop(done);
            check_untouched(&limiter, &format!("after {polls} polls")).await;
            if ended {
                return;
            }
        }
        panic!("not done after {POLLS_MAX} polls");
    });
}

#[test]
fn an_acquire_dropped_right_after_any_poll_leaves_nothing_taken() {
    on_every_store(async |world| {
        family(&world).await;
        // Without waiting for the wake-up: the store is at work while the caller goes away.
        for polls in 0..30 {
            let limiter = world.limiter().await;
            {
                let call = limiter.acquire("key", "gpt-4").take("tpm", 10);
                let mut call = pin!(call.into_future());
                for _ in 0..polls {
                    if poll_once(call.as_mut()).is_ready() {
                        break;
                    }
                }
            }
            check_untouched(&limiter, &format!("after {polls} polls")).await;
        }
    });
}

/// Drops `call` when it has come to the gate.
async fn drop_at<F: Future>(gate: &Gate, call: F) {
    let mut call = pin!(call);
    let mut reached = pin!(gate.reached());
    soon("at the gate", async || {
        assert!(poll_once(call.as_mut()).is_pending());
        poll_once(reached.as_mut()).is_ready()
    })
    .await;
}

#[test]
fn an_acquire_dropped_at_any_call_of_the_store_leaves_nothing_taken() {
    on_every_store(async |world| {
        family(&world).await;
        // A cold chain of three is three reads and one acquire.
        for (call, nth) in [(Call::Get, 0), (Call::Get, 1), (Call::Get, 2), (Call::Acquire, 0)] {
            for hold in [Fault::HoldBefore, Fault::HoldAfter] {
                let limiter = world.limiter().await;
                let gate = Gate::new();
                let opened = Gate::new();
                opened.open();
                for _ in 0..nth {
                    world.store.script(call, Fault::HoldBefore(opened.clone()));
                }
                world.store.script(call, hold(gate.clone()));
                let acquire = limiter.acquire("key", "gpt-4").take("tpm", 10).into_future();
                drop_at(&gate, acquire).await;
                world.store.heal();
                check_untouched(&limiter, &format!("{call:?} {nth}")).await;
            }
        }
    });
}

#[test]
fn an_acquire_that_runs_into_its_deadline_leaves_nothing_taken() {
    on_every_store(async |world| {
        family(&world).await;
        let limiter = world.limiter().await;
        let gate = Gate::new();
        world.store.script(Call::Acquire, Fault::HoldAfter(gate.clone()));
        let mut call = pin!(limiter.acquire("key", "gpt-4").take("tpm", 10).into_future());
        let mut reached = pin!(gate.reached());
        soon("at the gate", async || {
            assert!(poll_once(call.as_mut()).is_pending());
            poll_once(reached.as_mut()).is_ready()
        })
        .await;
        world.advance(crate::world::secs(1));
        let done = finish(call).await;
        assert!(matches!(done, Err(Error::Unavailable { .. })), "{done:?}");
        check_untouched(&limiter, "after the deadline").await;
    });
}

#[test]
fn a_consume_that_is_dropped_leaves_the_lease_as_it_was() {
    on_every_store(async |world| {
        family(&world).await;
        let limiter = world.limiter().await;
        for hold in [Fault::HoldBefore, Fault::HoldAfter] {
            let mut lease: Lease = limiter.acquire("key", "gpt-4").take("tpm", 10).await.unwrap();
            let gate = Gate::new();
            world.store.script(Call::Acquire, hold(gate.clone()));
            drop_at(&gate, lease.consume("tpm", 20)).await;
            world.store.heal();
            assert_eq!(lease.held("tpm"), Some(10));
            soon("given back", async || left(&limiter, "org", "gpt-4", "tpm").await == 90).await;
            lease.rollback().await.unwrap();
            check_untouched(&limiter, "after the rollback").await;
        }
    });
}

#[test]
fn a_dropped_commit_is_still_a_commit() {
    on_every_store(async |world| {
        family(&world).await;
        let limiter = world.limiter().await;
        let mut lease = limiter.acquire("key", "gpt-4").take("tpm", 10).await.unwrap();
        lease.adjust("tpm", 5).unwrap();
        let gate = Gate::new();
        world.store.script(Call::Settle, Fault::HoldAfter(gate.clone()));
        drop_at(&gate, lease.commit()).await;
        crate::world::settle_down().await;
        assert_eq!(left(&limiter, "key", "gpt-4", "tpm").await, 85);
        spend(&limiter, "key", "gpt-4", "tpm", 85).await;
    });
}
