//! Leases: commit, rollback, drop, and futures that are dropped on the way.

use std::panic::AssertUnwindSafe;
use std::pin::pin;

use fastrand::Rng;
use zae_limiter::store::StoreErrorKind;
use zae_limiter::{Error, OnDrop, RateLimiter};
use zae_limiter_testkit::{Call, Fault, Gate};

use crate::world::{
    Kind, World, child, left, ms, on, on_every_store, own_limits, poll_once, settle_down, soon,
    without_refill,
};

async fn family(world: &World) -> RateLimiter {
    let limiter = world.limiter().await;
    limiter.create_entity("org").await.unwrap();
    own_limits(&limiter, "org", [without_refill("rpm", 1_000_000)]).await;
    limiter
}

async fn key(limiter: &RateLimiter, id: &str) {
    child(limiter, id, "org").await;
    own_limits(limiter, id, [without_refill("rpm", 1_000)]).await;
}

/// Promise: commit keeps what is held, rollback gives all back, a drop keeps what was settled or flushed and, with
/// `Keep`, the estimate with its differences; on every level.
#[test]
fn random_leases_equal_a_simple_model() {
    on_every_store(async |world| {
        let limiter = family(&world).await;
        let mut random = Rng::with_seed(7);
        let mut total = 0;
        for round in 0..120 {
            let id = format!("key-{round}");
            key(&limiter, &id).await;
            let keeps = random.bool();
            let first = random.u64(0..50);
            let call = limiter.acquire(&id, "gpt-4").take("rpm", first);
            let on_drop = if keeps { OnDrop::Keep } else { OnDrop::GiveBack };
            let mut lease = call.on_drop(on_drop).await.unwrap();
            let mut held = i64::try_from(first).unwrap();
            let mut unwritten = 0;
            let mut known = None;
            let mut steps = vec![format!("take {first}")];
            for _ in 0..random.usize(0..7) {
                let some = random.i64(0..40);
                let amount = some.unsigned_abs();
                match random.u8(0..5) {
                    0 => {
                        lease.consume("rpm", amount).await.unwrap();
                        held += some;
                        steps.push(format!("consume {some}"));
                    }
                    1 => {
                        let enough = held >= some;
                        let released = lease.release("rpm", amount);
                        assert_eq!(released.is_ok(), enough, "{steps:?}, release {some}");
                        if enough {
                            held -= some;
                            unwritten -= some;
                            steps.push(format!("release {some}"));
                        }
                    }
                    2 => {
                        let difference = some - 20;
                        let enough = held + difference >= 0;
                        let adjusted = lease.adjust("rpm", difference);
                        assert_eq!(adjusted.is_ok(), enough, "{steps:?}, adjust {difference}");
                        if enough {
                            held += difference;
                            unwritten += difference;
                            steps.push(format!("adjust {difference}"));
                        }
                    }
                    3 => {
                        lease.settle("rpm", amount).unwrap();
                        unwritten += some - held;
                        held = some;
                        known = Some(some);
                        steps.push(format!("settle {some}"));
                    }
                    _ => {
                        lease.flush().await.unwrap();
                        if unwritten != 0 {
                            known = Some(held);
                        }
                        unwritten = 0;
                        steps.push("flush".to_owned());
                    }
                }
                assert_eq!(lease.held("rpm"), Some(held), "{steps:?}");
            }
            let used = match random.u8(0..3) {
                0 => {
                    lease.commit().await.unwrap();
                    steps.push("commit".to_owned());
                    held
                }
                1 => {
                    lease.rollback().await.unwrap();
                    steps.push("rollback".to_owned());
                    0
                }
                _ => {
                    drop(lease);
                    steps.push(format!("drop, {on_drop:?}"));
                    if keeps { held } else { known.unwrap_or(0) }
                }
            };
            total += used;
            let what = format!("{steps:?}: {used} are used");
            soon(&what, async || left(&limiter, &id, "gpt-4", "rpm").await == 1_000 - used).await;
            soon(&what, async || left(&limiter, "org", "gpt-4", "rpm").await == 1_000_000 - total)
                .await;
        }
    });
}

/// Promise: giving back is never done twice; a rollback that is dropped gives back once or, where nobody knows, not at
/// all. On a store that keeps its contract.
#[test]
fn a_rollback_dropped_after_any_poll_gives_back_once() {
    on_every_store(async |world| {
        let limiter = world.limiter_with([without_refill("rpm", 100)]).await;
        for polls in 1..6 {
            for fault in [None, Some(Fault::HoldAfter(Gate::new()))] {
                let held_after = fault.is_some();
                let id = format!("key-{polls}-{held_after}");
                let base = limiter.acquire(&id, "gpt-4").take("rpm", 50).await.unwrap();
                base.commit().await.unwrap();
                let lease = limiter.acquire(&id, "gpt-4").take("rpm", 10).await.unwrap();
                if let Some(fault) = fault {
                    world.store.script(Call::Settle, fault);
                }
                {
                    let mut rollback = pin!(lease.rollback());
                    for _ in 0..polls {
                        if poll_once(rollback.as_mut()).is_ready() {
                            break;
                        }
                        settle_down().await;
                    }
                }
                world.store.heal();
                let what = format!("{polls} polls: 10 are given back");
                soon(&what, async || left(&limiter, &id, "gpt-4", "rpm").await == 50).await;
                settle_down().await;
                assert_eq!(left(&limiter, &id, "gpt-4", "rpm").await, 50, "given back twice");
            }
        }
    });
}

/// Promise: a rollback gives back; a store that is busy at first is asked again, and whoever drops the future while it
/// waits has still a lease that is dropped uncommitted: what certainly was not written is given back.
#[test]
fn a_rollback_dropped_while_it_waits_to_try_again_is_not_lost() {
    on(Kind::Memory, async |world| {
        let limiter = world.limiter_with([without_refill("rpm", 100)]).await;
        let lease = limiter.acquire("key", "gpt-4").take("rpm", 10).await.unwrap();
        world.store.script(Call::Settle, Fault::FailBefore(StoreErrorKind::Busy));
        {
            let mut rollback = pin!(lease.rollback());
            assert!(poll_once(rollback.as_mut()).is_pending(), "it waits before it tries again");
            assert!(world.clock.sleepers() > 0);
        }
        for _ in 0..200 {
            settle_down().await;
            world.advance(ms(10));
            if left(&limiter, "key", "gpt-4", "rpm").await == 100 {
                return;
            }
        }
        panic!("{} are left of 100", left(&limiter, "key", "gpt-4", "rpm").await);
    });
}

/// Promise: "Once the future is polled, the lease is committed: dropping the future does not give anything back."
#[test]
fn a_commit_dropped_after_any_poll_gives_nothing_back() {
    on_every_store(async |world| {
        let limiter = world.limiter_with([without_refill("rpm", 100)]).await;
        for (at, fault) in [
            None,
            Some(Fault::FailBefore(StoreErrorKind::Busy)),
            Some(Fault::FailAfter(StoreErrorKind::Unavailable)),
            Some(Fault::HoldAfter(Gate::new())),
            Some(Fault::Hang),
        ]
        .into_iter()
        .enumerate()
        {
            for polls in 1..4 {
                for difference in [0, 5] {
                    let id = format!("key-{at}-{polls}-{difference}");
                    let mut lease = limiter.acquire(&id, "gpt-4").take("rpm", 10).await.unwrap();
                    lease.adjust("rpm", difference).unwrap();
                    if let Some(fault) = &fault {
                        world.store.script(Call::Settle, fault.clone());
                    }
                    {
                        let mut commit = pin!(lease.commit());
                        for _ in 0..polls {
                            if poll_once(commit.as_mut()).is_ready() {
                                break;
                            }
                            settle_down().await;
                        }
                    }
                    world.store.heal();
                    settle_down().await;
                    let there = left(&limiter, &id, "gpt-4", "rpm").await;
                    assert!(there <= 90, "{fault:?}, {polls} polls: {there} are left");
                }
            }
        }
    });
}

/// Promise: what was flushed is known to be used, and a credit is never applied twice, however a flush ended.
#[test]
fn a_flush_that_is_dropped_or_fails_gives_back_no_more_than_was_taken() {
    on_every_store(async |world| {
        let limiter = world.limiter_with([without_refill("rpm", 100)]).await;
        for (at, fault) in [
            Fault::FailBefore(StoreErrorKind::Denied),
            Fault::FailAfter(StoreErrorKind::Unavailable),
            Fault::HoldAfter(Gate::new()),
            Fault::Hang,
        ]
        .into_iter()
        .enumerate()
        {
            for difference in [-4_i64, 4] {
                let id = format!("key-{at}-{difference}");
                // Somebody else's tokens, so that too much would be seen.
                let base = limiter.acquire(&id, "gpt-4").take("rpm", 50).await.unwrap();
                base.commit().await.unwrap();
                let mut lease = limiter.acquire(&id, "gpt-4").take("rpm", 10).await.unwrap();
                lease.adjust("rpm", difference).unwrap();
                world.store.script(Call::Settle, fault.clone());
                {
                    let mut flush = pin!(lease.flush());
                    for _ in 0..3 {
                        if poll_once(flush.as_mut()).is_ready() {
                            break;
                        }
                        settle_down().await;
                    }
                }
                world.store.heal();
                drop(lease);
                settle_down().await;
                settle_down().await;
                let there = left(&limiter, &id, "gpt-4", "rpm").await;
                assert!(there <= 50, "{fault:?}, {difference}: {there} are left, 50 at most");
            }
        }
    });
}

/// Promise: as above for a flush that was carried out, dropped before its answer, and then committed or rolled back.
#[test]
fn a_flush_dropped_before_its_answer_is_not_written_again() {
    on_every_store(async |world| {
        let limiter = world.limiter_with([without_refill("rpm", 100)]).await;
        for (at, difference) in [-4_i64, 4].into_iter().enumerate() {
            for commits in [true, false] {
                let id = format!("key-{at}-{commits}");
                let base = limiter.acquire(&id, "gpt-4").take("rpm", 50).await.unwrap();
                base.commit().await.unwrap();
                let mut lease = limiter.acquire(&id, "gpt-4").take("rpm", 10).await.unwrap();
                lease.adjust("rpm", difference).unwrap();
                let gate = Gate::new();
                world.store.script(Call::Settle, Fault::HoldAfter(gate.clone()));
                {
                    let mut flush = pin!(lease.flush());
                    let mut reached = pin!(gate.reached());
                    while poll_once(reached.as_mut()).is_pending() {
                        assert!(poll_once(flush.as_mut()).is_pending());
                        settle_down().await;
                    }
                }
                if commits {
                    lease.commit().await.unwrap();
                } else {
                    lease.rollback().await.unwrap();
                }
                let there = left(&limiter, &id, "gpt-4", "rpm").await;
                let expected = if commits { 50 - 10 - difference } else { 50 };
                // What is not known may stay taken, never the other way round.
                assert!(there <= expected, "{difference}, {commits}: {there}, not {expected}");
            }
        }
    });
}

/// Promise: an error of the closure gives everything back; a panic is a drop, and a drop keeps what was settled.
#[test]
fn work_that_fails_panics_or_is_cancelled() {
    on_every_store(async |world| {
        let limiter = world.limiter_with([without_refill("rpm", 100)]).await;
        let work = |id| limiter.acquire(id, "gpt-4").take("rpm", 10);
        let failed = work("fails")
            .on_drop(OnDrop::Keep)
            .run(async |lease| {
                lease.settle("rpm", 7)?;
                lease.flush().await?;
                Err::<(), _>(Error::NotInLease("mine".to_owned()))
            })
            .await;
        assert!(matches!(failed, Err(Error::NotInLease(_))));
        assert_eq!(left(&limiter, "fails", "gpt-4", "rpm").await, 100);
        let cancelled = async |id: &'static str, settles: bool| {
            let begun = std::cell::Cell::new(false);
            let mut work = pin!(work(id).run(async |lease| {
                if settles {
                    lease.settle("rpm", 7)?;
                }
                begun.set(true);
                std::future::pending::<Result<(), Error>>().await
            }));
            while !begun.get() {
                assert!(poll_once(work.as_mut()).is_pending());
                settle_down().await;
            }
        };
        cancelled("cancelled", false).await;
        cancelled("cancelled-settled", true).await;
        soon("all", async || left(&limiter, "cancelled", "gpt-4", "rpm").await == 100).await;
        soon("the rest", async || left(&limiter, "cancelled-settled", "gpt-4", "rpm").await == 93)
            .await;
        let other = limiter.clone();
        let task = tokio::spawn(async move {
            let work = other.acquire("panics", "gpt-4").take("rpm", 10);
            work.run(async |lease| {
                lease.settle("rpm", 7).unwrap();
                if true {
                    panic!("on purpose");
                }
                Ok::<(), Error>(())
            })
            .await
        });
        assert!(task.await.unwrap_err().is_panic());
        soon("the rest", async || left(&limiter, "panics", "gpt-4", "rpm").await == 93).await;
    });
}

/// Promise: a drop never panics or blocks, also with a store that is gone, outside a runtime, while panicking.
#[test]
fn a_drop_never_panics() {
    let world = World::new(Kind::Memory);
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let (first, second) = runtime.block_on(async {
        let limiter = world.limiter_with([without_refill("rpm", 100)]).await;
        let call = || limiter.acquire("key", "gpt-4").take("rpm", 10);
        (call().await.unwrap(), call().await.unwrap())
    });
    drop(runtime);
    world.store.break_down(Fault::Hang);
    drop(first);
    let caught = std::panic::catch_unwind(AssertUnwindSafe(move || {
        let _lease = second;
        panic!("on purpose");
    }));
    assert!(caught.is_err());
}

/// Promise: a refused consume leaves the lease as it was, with all levels; `Exceeded` names the ancestor's level.
#[test]
fn a_consume_refused_by_the_parent_takes_nothing_anywhere() {
    on_every_store(async |world| {
        let limiter = world.limiter().await;
        limiter.create_entity("org").await.unwrap();
        child(&limiter, "key", "org").await;
        own_limits(&limiter, "key", [without_refill("rpm", 100)]).await;
        own_limits(&limiter, "org", [without_refill("rpm", 20)]).await;
        let mut lease = limiter.acquire("key", "gpt-4").take("rpm", 10).await.unwrap();
        let refused = lease.consume("rpm", 11).await.unwrap_err();
        assert_eq!(refused.as_exceeded().unwrap().primary_violation().level, 1);
        assert_eq!(lease.held("rpm"), Some(10));
        assert_eq!(left(&limiter, "key", "gpt-4", "rpm").await, 90);
        assert!(matches!(lease.consume("rpm", 21).await, Err(Error::ExceedsCapacity(_))));
        assert!(matches!(lease.consume("tpm", 1).await, Err(Error::NotInLease(_))));
        lease.rollback().await.unwrap();
        assert_eq!(left(&limiter, "key", "gpt-4", "rpm").await, 100);
        assert_eq!(left(&limiter, "org", "gpt-4", "rpm").await, 20);
    });
}

/// What is used of 100 in the end, with the store busy at first and time going by.
async fn used_in_the_end(world: &World, limiter: &RateLimiter) -> i64 {
    for _ in 0..100 {
        settle_down().await;
        world.advance(ms(10));
    }
    100 - left(limiter, "key", "gpt-4", "rpm").await
}

/// Promise (issue, 4; semantics 2): "What was settled or flushed is known to be used: a drop keeps it." A client that
/// hangs up while a flush waits to try again streams for nothing otherwise. A debit may be retried blindly.
#[test]
fn a_flush_dropped_while_it_waits_to_try_again_does_not_forget_what_was_settled() {
    on(Kind::Memory, async |world| {
        let limiter = world.limiter_with([without_refill("rpm", 100)]).await;
        let mut lease = limiter.acquire("key", "gpt-4").take("rpm", 10).await.unwrap();
        lease.settle("rpm", 40).unwrap();
        world.store.script(Call::Settle, Fault::FailBefore(StoreErrorKind::Busy));
        assert!(poll_once(pin!(lease.flush())).is_pending(), "it waits before it tries again");
        drop(lease);
        assert_eq!(used_in_the_end(&world, &limiter).await, 40);
    });
}

/// Promise: "Keeps what was taken, with all differences." and a settled amount stays. As above for `commit`.
#[test]
fn a_commit_dropped_while_it_waits_to_try_again_does_not_forget_what_was_settled() {
    on(Kind::Memory, async |world| {
        let limiter = world.limiter_with([without_refill("rpm", 100)]).await;
        let mut lease = limiter.acquire("key", "gpt-4").take("rpm", 10).await.unwrap();
        lease.settle("rpm", 40).unwrap();
        world.store.script(Call::Settle, Fault::FailBefore(StoreErrorKind::Busy));
        assert!(poll_once(pin!(lease.commit())).is_pending(), "it waits before it tries again");
        assert_eq!(used_in_the_end(&world, &limiter).await, 40);
    });
}

/// Promise: the same, on a store that answers: a commit or flush that was polled once is carried out.
#[test]
fn a_commit_or_flush_polled_once_charges_what_was_settled() {
    on_every_store(async |world| {
        let limiter = world.limiter_with([without_refill("rpm", 100)]).await;
        for (id, commits) in [("commits", true), ("flushes", false)] {
            let mut lease = limiter.acquire(id, "gpt-4").take("rpm", 10).await.unwrap();
            lease.settle("rpm", 40).unwrap();
            if commits {
                let _ = poll_once(pin!(lease.commit()));
            } else {
                let _ = poll_once(pin!(lease.flush()));
                drop(lease);
            }
            soon("40 are used", async || left(&limiter, id, "gpt-4", "rpm").await == 60).await;
        }
    });
}

/// Promise: the header fields of a lease that holds nothing are valid: none, or not empty.
#[test]
fn a_degraded_lease_has_valid_header_fields() {
    on(Kind::Memory, async |world| {
        let limiter = world.limiter_with([without_refill("rpm", 100)]).await;
        world.store.break_down(Fault::FailBefore(StoreErrorKind::Unavailable));
        let call = limiter.acquire("key", "gpt-4").take("rpm", 1);
        let call = call.on_unavailable(zae_limiter::OnUnavailable::Allow).into_future();
        let (lease, _) = crate::world::drive(&world, call).await;
        let mut lease = lease.unwrap();
        assert!(lease.is_degraded());
        assert!(
            lease.http_fields().iter().all(|(_, value)| !value.is_empty()),
            "{:?}",
            lease.http_fields()
        );
        assert_eq!(lease.headers().len(), lease.http_fields().len());
        // It can be used like any other.
        lease.settle("rpm", 5).unwrap();
        lease.release("rpm", 1).unwrap();
        world.store.heal();
        lease.commit().await.unwrap();
    });
}
