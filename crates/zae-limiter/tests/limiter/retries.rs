//! Lost answers: what is taken may be taken again, what is given back never is.

use zae_limiter::model::BreakerSettings;
use zae_limiter::store::StoreErrorKind;
use zae_limiter::{Error, Lease, RateLimiter};
use zae_limiter_testkit::{Call, Fault};

use crate::world::{World, child, drive, on_every_store, settle_down, soon, spend, without_refill};

const NOT_DONE: Fault = Fault::FailBefore(StoreErrorKind::Unavailable);
const BUSY: Fault = Fault::FailBefore(StoreErrorKind::Busy);
const ANSWER_LOST: Fault = Fault::FailAfter(StoreErrorKind::Unavailable);

/// A thousand tokens, of which 500 are taken, so that a second refund shows.
async fn half_full(world: &World) -> RateLimiter {
    let off = BreakerSettings { failures: 0, ..BreakerSettings::default() };
    let limiter = world.builder().breaker(off).open().await.unwrap();
    let limits = [without_refill("rpm", 1_000), without_refill("tpm", 1_000)];
    limiter.set_system_defaults(limits, None).await.unwrap();
    limiter.create_entity("org").await.unwrap();
    child(&limiter, "key", "org").await;
    spend(&limiter, "key", "gpt-4", "tpm", 500).await;
    spend(&limiter, "key", "gpt-4", "rpm", 500).await;
    limiter
}

async fn take(limiter: &RateLimiter, tokens: u64) -> Lease {
    limiter.acquire("key", "gpt-4").take("tpm", tokens).take("rpm", 1).await.unwrap()
}

/// Whether both levels have consumed so much.
async fn is_consumed(world: &World, limiter: &RateLimiter, tokens: i64) -> bool {
    world.cell(limiter, "key", "gpt-4", "tpm").await.1 == tokens * 1_000
        && world.cell(limiter, "org", "gpt-4", "tpm").await.1 == tokens * 1_000
}

/// Net consumption of `tpm` at both levels, which must be the same.
async fn consumed(world: &World, limiter: &RateLimiter) -> i64 {
    let (left, consumed) = world.cell(limiter, "key", "gpt-4", "tpm").await;
    assert_eq!(world.cell(limiter, "org", "gpt-4", "tpm").await, (left, consumed));
    assert_eq!(left, 1_000_000 - consumed, "tokens and consumption add up");
    consumed / 1_000
}

#[test]
fn an_acquire_whose_answer_is_lost_is_repeated_at_worst_takes_twice() {
    on_every_store(async |world| {
        let limiter = half_full(&world).await;
        world.store.script(Call::Acquire, ANSWER_LOST);
        let before = world.store.calls(Call::Acquire);
        let call = limiter.acquire("key", "gpt-4").take("tpm", 10);
        let (lease, _) = drive(&world, call.into_future()).await;
        let lease = lease.unwrap();
        assert_eq!(world.store.calls(Call::Acquire) - before, 2);
        assert_eq!(consumed(&world, &limiter).await, 520, "the safe side");
        assert_eq!(lease.held("tpm"), Some(10));
        lease.rollback().await.unwrap();
        assert_eq!(consumed(&world, &limiter).await, 510, "only what is held is given back");
    });
}

#[test]
fn a_charge_is_retried_even_if_it_may_have_been_applied() {
    on_every_store(async |world| {
        for (fault, expected) in [(NOT_DONE, 530), (ANSWER_LOST, 550)] {
            let world = World::new_like(&world);
            let limiter = half_full(&world).await;
            let mut lease = take(&limiter, 10).await;
            lease.adjust("tpm", 20).unwrap();
            world.store.script(Call::Settle, fault);
            drive(&world, lease.commit()).await.0.unwrap();
            assert_eq!(world.store.calls(Call::Settle), 2);
            assert_eq!(consumed(&world, &limiter).await, expected);
        }
    });
}

/// What gives tokens back: each starts with 100 held and gives back all or 60 of them.
#[derive(Clone, Copy, Debug)]
enum Credit {
    Rollback,
    Drop,
    Adjust,
    Release,
    Settle,
    Mixed,
}

impl Credit {
    const ALL: [Self; 6] =
        [Self::Rollback, Self::Drop, Self::Adjust, Self::Release, Self::Settle, Self::Mixed];

    /// What is consumed when it was given back once.
    fn after(self) -> i64 {
        match self {
            Self::Rollback | Self::Drop => 500,
            _ => 540,
        }
    }

    async fn give(self, world: &World, mut lease: Lease) -> Option<Result<(), Error>> {
        match self {
            Self::Rollback => return Some(drive(world, lease.rollback()).await.0),
            Self::Drop => {
                drop(lease);
                return None;
            }
            Self::Adjust => lease.adjust("tpm", -60).unwrap(),
            Self::Release => lease.release("tpm", 60).unwrap(),
            Self::Settle => lease.settle("tpm", 40).unwrap(),
            Self::Mixed => {
                lease.adjust("tpm", -60).unwrap();
                lease.adjust("rpm", 5).unwrap();
            }
        }
        Some(drive(world, lease.commit()).await.0)
    }
}

#[test]
fn a_credit_whose_answer_is_lost_is_applied_exactly_once() {
    on_every_store(async |world| {
        for credit in Credit::ALL {
            let world = World::new_like(&world);
            let limiter = half_full(&world).await;
            let lease = take(&limiter, 100).await;
            world.store.script(Call::Settle, ANSWER_LOST);
            if let Some(done) = credit.give(&world, lease).await {
                assert!(matches!(done, Err(Error::Unavailable { .. })), "{credit:?}: {done:?}");
            }
            soon("given back", async || is_consumed(&world, &limiter, credit.after()).await).await;
            settle_down().await;
            assert_eq!(world.store.calls(Call::Settle), 1, "{credit:?}");
            assert_eq!(consumed(&world, &limiter).await, credit.after(), "{credit:?}");
        }
    });
}

#[test]
fn a_credit_that_was_certainly_not_applied_is_repeated() {
    on_every_store(async |world| {
        for credit in Credit::ALL {
            let world = World::new_like(&world);
            let limiter = half_full(&world).await;
            let lease = take(&limiter, 100).await;
            world.store.script(Call::Settle, NOT_DONE);
            world.store.script(Call::Settle, NOT_DONE);
            if let Some(done) = credit.give(&world, lease).await {
                done.unwrap();
            }
            soon("given back", async || {
                // The waits between the attempts of a dropped lease.
                if world.clock.sleepers() > 1 {
                    world.advance(crate::world::ms(1));
                }
                is_consumed(&world, &limiter, credit.after()).await
            })
            .await;
            assert_eq!(world.store.calls(Call::Settle), 3, "{credit:?}");
        }
    });
}

#[test]
fn a_credit_that_does_not_come_through_stays_taken() {
    on_every_store(async |world| {
        let limiter = half_full(&world).await;
        let lease = take(&limiter, 100).await;
        world.store.break_down(NOT_DONE);
        let (done, _) = drive(&world, lease.rollback()).await;
        assert!(matches!(done, Err(Error::Unavailable { .. })), "{done:?}");
        assert_eq!(world.store.calls(Call::Settle), 4);
        world.store.heal();
        settle_down().await;
        assert_eq!(consumed(&world, &limiter).await, 600);
    });
}

/// 0, 10, 30, 70, 150 ms and then every 100 ms: the attempts on a busy bucket within a second.
const ATTEMPTS_WHILE_BUSY: usize = 13;

#[test]
fn a_settlement_of_a_busy_bucket_is_repeated_until_its_deadline() {
    on_every_store(async |world| {
        for credit in Credit::ALL {
            let world = World::new_like(&world);
            let limiter = half_full(&world).await;
            let lease = take(&limiter, 100).await;
            // Four attempts within 70 ms would have given up long before.
            for _ in 1..ATTEMPTS_WHILE_BUSY {
                world.store.script(Call::Settle, BUSY);
            }
            if let Some(done) = credit.give(&world, lease).await {
                done.unwrap();
            }
            soon("given back", async || {
                if world.clock.sleepers() > 1 {
                    world.advance(crate::world::ms(1));
                }
                is_consumed(&world, &limiter, credit.after()).await
            })
            .await;
            assert_eq!(world.store.calls(Call::Settle), ATTEMPTS_WHILE_BUSY, "{credit:?}");
        }
        // With its deadline it ends all the same.
        let limiter = half_full(&world).await;
        let lease = take(&limiter, 100).await;
        world.store.break_down(BUSY);
        let (done, waited) = drive(&world, lease.rollback()).await;
        let Err(Error::Unavailable { cause, .. }) = done else { panic!("{done:?}") };
        assert_eq!((cause.kind(), waited), (StoreErrorKind::Busy, crate::world::secs(1)));
    });
}

#[test]
fn a_settlement_that_a_busy_bucket_may_have_made_is_not_made_over_and_over() {
    on_every_store(async |world| {
        for (difference, attempts) in [(-10, 1), (10, 4)] {
            let world = World::new_like(&world);
            let limiter = half_full(&world).await;
            let mut lease = take(&limiter, 100).await;
            lease.adjust("tpm", difference).unwrap();
            world.store.break_down(Fault::FailAfter(StoreErrorKind::Busy));
            let (done, _) = drive(&world, lease.commit()).await;
            assert!(matches!(done, Err(Error::Unavailable { .. })), "{done:?}");
            assert_eq!(world.store.calls(Call::Settle), attempts, "{difference}");
        }
    });
}

#[test]
fn a_settlement_ends_with_the_deadline() {
    on_every_store(async |world| {
        let limiter = half_full(&world).await;
        for credit in [false, true] {
            let mut lease = take(&limiter, 100).await;
            lease.adjust("tpm", if credit { -1 } else { 1 }).unwrap();
            world.store.break_down(Fault::Hang);
            let mut commit = std::pin::pin!(lease.commit());
            assert!(crate::world::poll_once(commit.as_mut()).is_pending());
            world.advance(crate::world::ms(999));
            assert!(crate::world::poll_once(commit.as_mut()).is_pending());
            world.advance(crate::world::ms(1));
            let done = crate::world::finish(commit).await;
            assert!(matches!(done, Err(Error::Unavailable { .. })), "{done:?}");
            world.store.heal();
        }
    });
}

#[test]
fn a_rollback_gives_back_no_more_than_was_certainly_taken() {
    on_every_store(async |world| {
        // The flush of a debit fails, before or after it was carried out; then all is undone.
        for (fault, expected) in [(NOT_DONE, 500), (ANSWER_LOST, 4 * 50 + 500)] {
            let world = World::new_like(&world);
            let limiter = half_full(&world).await;
            let mut lease = take(&limiter, 100).await;
            lease.adjust("tpm", 50).unwrap();
            world.store.break_down(fault);
            let (done, _) = drive(&world, lease.flush()).await;
            assert!(matches!(done, Err(Error::Unavailable { .. })), "{done:?}");
            world.store.heal();
            assert_eq!(lease.held("tpm"), Some(100));
            lease.rollback().await.unwrap();
            assert_eq!(consumed(&world, &limiter).await, expected);
        }
        // The flush of a credit fails: what it may have given back is not given back again.
        for (fault, expected) in [(NOT_DONE, 550), (ANSWER_LOST, 500)] {
            let world = World::new_like(&world);
            let limiter = half_full(&world).await;
            let mut lease = take(&limiter, 100).await;
            lease.adjust("tpm", -50).unwrap();
            world.store.break_down(fault);
            drive(&world, lease.flush()).await.0.unwrap_err();
            world.store.heal();
            assert_eq!(lease.held("tpm"), Some(50));
            lease.rollback().await.unwrap();
            assert_eq!(consumed(&world, &limiter).await, expected);
        }
    });
}

#[test]
fn a_flush_that_is_dropped_leads_to_no_credit_too_many() {
    on_every_store(async |world| {
        for difference in [50, -50] {
            for carried_out in [false, true] {
                let world = World::new_like(&world);
                let limiter = half_full(&world).await;
                let mut lease = take(&limiter, 100).await;
                lease.adjust("tpm", difference).unwrap();
                let gate = zae_limiter_testkit::Gate::new();
                world.store.script(
                    Call::Settle,
                    match carried_out {
                        false => Fault::HoldBefore(gate.clone()),
                        true => Fault::HoldAfter(gate.clone()),
                    },
                );
                {
                    let mut flush = std::pin::pin!(lease.flush());
                    let mut reached = std::pin::pin!(gate.reached());
                    soon("at the gate", async || {
                        assert!(crate::world::poll_once(flush.as_mut()).is_pending());
                        crate::world::poll_once(reached.as_mut()).is_ready()
                    })
                    .await;
                }
                lease.rollback().await.unwrap();
                let consumed = consumed(&world, &limiter).await;
                assert!(consumed >= 500, "{difference}, {carried_out}: {consumed}");
            }
        }
    });
}
