//! Leases that are dropped, and `run`, which settles by itself.

use std::pin::pin;

use zae_limiter::store::StoreErrorKind;
use zae_limiter::{Error, Lease, RateLimiter};
use zae_limiter_testkit::{Call, Fault, Gate};

use crate::world::{
    Kind, World, left, ms, on_every_store, poll_once, soon, threads, without_refill,
};

async fn take(limiter: &RateLimiter, tokens: u64) -> Lease {
    limiter.acquire("key", "gpt-4").take("tpm", tokens).await.unwrap()
}

async fn is_full(limiter: &RateLimiter) -> bool {
    left(limiter, "key", "gpt-4", "tpm").await == 100
}

/// A world without a runtime of its own, and a limiter in it.
fn outside(kind: Kind) -> (World, RateLimiter, tokio::runtime::Runtime) {
    let world = World::new(kind);
    let runtime = threads();
    let limiter = runtime.block_on(world.limiter_with([without_refill("tpm", 100)]));
    (world, limiter, runtime)
}

#[test]
fn a_lease_dropped_outside_any_runtime_gives_back() {
    for kind in Kind::ALL {
        let (_world, limiter, runtime) = outside(*kind);
        let lease = runtime.block_on(take(&limiter, 40));
        assert_eq!(runtime.block_on(left(&limiter, "key", "gpt-4", "tpm")), 60, "{kind:?}");
        std::thread::spawn(move || drop(lease)).join().expect("a drop does not panic");
        runtime.block_on(soon("given back", async || is_full(&limiter).await));
    }
}

#[test]
fn a_lease_dropped_after_its_runtime_has_ended_gives_back() {
    for kind in Kind::ALL {
        let (_world, limiter, runtime) = outside(*kind);
        let lease = runtime.block_on(take(&limiter, 40));
        drop(runtime);
        drop(lease);
        threads().block_on(soon("given back", async || is_full(&limiter).await));
    }
}

#[test]
fn a_lease_dropped_with_its_runtime_gives_back() {
    for kind in Kind::ALL {
        let (_world, limiter, runtime) = outside(*kind);
        let (holds, held) = tokio::sync::oneshot::channel();
        let in_task = limiter.clone();
        runtime.spawn(async move {
            let _lease = take(&in_task, 40).await;
            holds.send(()).unwrap();
            std::future::pending::<()>().await;
        });
        runtime.block_on(held).unwrap();
        assert_eq!(runtime.block_on(left(&limiter, "key", "gpt-4", "tpm")), 60, "{kind:?}");
        drop(runtime);
        threads().block_on(soon("given back", async || is_full(&limiter).await));
    }
}

#[test]
fn a_lease_dropped_just_before_its_runtime_ends_gives_back() {
    for kind in Kind::ALL {
        for fault in ["slow", "failing"] {
            let (world, limiter, runtime) = outside(*kind);
            let gate = Gate::new();
            let down = Fault::FailBefore(StoreErrorKind::Unavailable);
            let lease = runtime.block_on(take(&limiter, 40));
            world.store.script(
                Call::Settle,
                if fault == "slow" { Fault::HoldBefore(gate.clone()) } else { down },
            );
            runtime.block_on(async { drop(lease) });
            assert_eq!(world.store.calls(Call::Settle), 1, "settled at once");
            drop(runtime);
            gate.open();
            // The wait before another attempt, by a clock that does not know runtimes.
            world.advance(ms(10));
            threads().block_on(soon("given back", async || is_full(&limiter).await));
        }
    }
}

#[test]
fn a_lease_dropped_in_a_panic_gives_back() {
    for kind in Kind::ALL {
        let (_world, limiter, runtime) = outside(*kind);
        let lease = runtime.block_on(take(&limiter, 40));
        let panicked = std::thread::spawn(move || {
            let _lease = lease;
            std::panic::resume_unwind(Box::new("the work has failed"));
        });
        assert!(panicked.join().is_err());
        runtime.block_on(soon("given back", async || is_full(&limiter).await));
    }
}

/// An error of the caller's own.
#[derive(Debug)]
enum Failed {
    Work,
    Limiter(Error),
}

impl From<Error> for Failed {
    fn from(error: Error) -> Self {
        Self::Limiter(error)
    }
}

#[test]
fn work_that_went_well_keeps_what_was_taken_with_its_differences() {
    on_every_store(async |world| {
        let limiter = world.limiter_with([without_refill("tpm", 100)]).await;
        let call = limiter.acquire("key", "gpt-4").take("tpm", 10);
        let done = call.run(async |lease: &mut Lease| {
            lease.adjust("tpm", 25)?;
            Ok::<_, Failed>("done")
        });
        assert_eq!(done.await.unwrap(), "done");
        assert_eq!(world.cell(&limiter, "key", "gpt-4", "tpm").await, (65_000, 35_000));
    });
}

#[test]
fn failed_work_is_refunded_and_its_error_returned() {
    on_every_store(async |world| {
        let limiter = world.limiter_with([without_refill("tpm", 100)]).await;
        let call = limiter.acquire("key", "gpt-4").take("tpm", 10);
        let done = call.run(async |lease: &mut Lease| {
            lease.adjust("tpm", 25)?;
            lease.flush().await?;
            lease.consume("tpm", 5).await?;
            Err::<(), _>(Failed::Work)
        });
        assert!(matches!(done.await, Err(Failed::Work)));
        assert_eq!(world.cell(&limiter, "key", "gpt-4", "tpm").await, (100_000, 0));
    });
}

#[test]
fn work_is_not_begun_when_the_call_is_refused() {
    on_every_store(async |world| {
        let limiter = world.limiter_with([without_refill("tpm", 100)]).await;
        let _all = take(&limiter, 100).await;
        let call = limiter.acquire("key", "gpt-4").take("tpm", 1);
        let done = call.run(async |_: &mut Lease| -> Result<(), Failed> { unreachable!() });
        assert!(matches!(done.await, Err(Failed::Limiter(Error::Exceeded(_)))));
    });
}

#[test]
fn work_that_is_cancelled_gives_back() {
    on_every_store(async |world| {
        let limiter = world.limiter_with([without_refill("tpm", 100)]).await;
        {
            let began = std::cell::Cell::new(false);
            let call = limiter.acquire("key", "gpt-4").take("tpm", 10);
            let mut running = pin!(call.run(async |_: &mut Lease| {
                began.set(true);
                std::future::pending::<Result<(), Failed>>().await
            }));
            soon("the work has begun", async || {
                assert!(poll_once(running.as_mut()).is_pending());
                began.get()
            })
            .await;
            assert_eq!(left(&limiter, "key", "gpt-4", "tpm").await, 90);
        }
        soon("given back", async || is_full(&limiter).await).await;
    });
}

#[test]
fn work_may_flush_its_lease_and_a_failure_gives_all_of_it_back() {
    on_every_store(async |world| {
        let limiter = world.limiter_with([without_refill("tpm", 100)]).await;
        let call = || limiter.acquire("key", "gpt-4").take("tpm", 10);
        let done = call().run(async |lease: &mut Lease| {
            lease.settle("tpm", 15)?;
            lease.flush().await?;
            Ok::<_, Failed>(())
        });
        done.await.unwrap();
        assert_eq!(left(&limiter, "key", "gpt-4", "tpm").await, 85);
        let failed_late = call().run(async |lease: &mut Lease| {
            lease.settle("tpm", 15)?;
            lease.flush().await?;
            Err::<(), _>(Failed::Work)
        });
        assert!(matches!(failed_late.await, Err(Failed::Work)));
        assert_eq!(left(&limiter, "key", "gpt-4", "tpm").await, 85);
    });
}
