//! What a lease does between taking and settling.

use zae_limiter::model::AMOUNT_MAX;
use zae_limiter::{Error, OnDrop};
use zae_limiter_testkit::Call;

use crate::world::{
    child, left, on_every_store, own_limits, per_minute, refusal, secs, soon, spend, without_refill,
};

#[test]
fn what_is_taken_is_in_the_store_before_the_caller_has_the_lease() {
    on_every_store(async |world| {
        let one = world.limiter_with([without_refill("rpm", 10)]).await;
        let other = world.limiter().await;
        let lease = one.acquire("key", "gpt-4").take("rpm", 7).await.unwrap();
        assert_eq!(left(&other, "key", "gpt-4", "rpm").await, 3);
        let refused = other.acquire("key", "gpt-4").take("rpm", 4).await;
        assert!(matches!(refused, Err(Error::Exceeded(_))), "{refused:?}");
        lease.commit().await.unwrap();
        assert_eq!(left(&other, "key", "gpt-4", "rpm").await, 3);
    });
}

#[test]
fn commit_keeps_and_rollback_gives_back() {
    on_every_store(async |world| {
        let limiter = world.limiter_with([without_refill("rpm", 10)]).await;
        let kept = limiter.acquire("key", "gpt-4").take("rpm", 2).await.unwrap();
        let undone = limiter.acquire("key", "gpt-4").take("rpm", 3).await.unwrap();
        kept.commit().await.unwrap();
        undone.rollback().await.unwrap();
        assert_eq!(world.cell(&limiter, "key", "gpt-4", "rpm").await, (8_000, 2_000));
    });
}

#[test]
fn giving_back_never_lifts_a_bucket_above_its_capacity() {
    on_every_store(async |world| {
        let limiter = world.limiter_with([per_minute("rpm", 10)]).await;
        let lease = limiter.acquire("key", "gpt-4").take("rpm", 10).await.unwrap();
        world.advance(secs(60));
        lease.rollback().await.unwrap();
        assert_eq!(world.cell(&limiter, "key", "gpt-4", "rpm").await, (10_000, 0));
    });
}

/// What a lease of 10 and 5 on top leaves behind when it is dropped: the rest is given back.
#[test]
fn a_dropped_lease_keeps_what_is_known_to_be_used() {
    #[derive(Clone, Copy, Debug)]
    enum Step {
        Adjust(i64),
        Settle(u64),
        Flush,
    }
    use Step::{Adjust, Flush, Settle};
    let table: [(&[Step], i64); 10] = [
        (&[], 0),
        (&[Adjust(20)], 0),
        (&[Flush], 0),
        (&[Adjust(20), Flush, Adjust(30)], 35),
        (&[Adjust(-9), Flush], 6),
        (&[Settle(12)], 12),
        (&[Settle(3)], 3),
        (&[Settle(0)], 0),
        (&[Settle(40), Flush, Settle(50)], 50),
        (&[Settle(40), Adjust(5)], 40),
    ];
    on_every_store(async |world| {
        for (keeps, expected) in
            [(false, None), (true, Some([15, 35, 15, 65, 6, 12, 3, 0, 50, 45]))]
        {
            let limiter = world.limiter_with([without_refill("rpm", 100)]).await;
            for (at, (steps, used)) in table.iter().enumerate() {
                let entity = format!("key-{keeps}-{at}");
                let acquire = limiter.acquire(&entity, "gpt-4").take("rpm", 10);
                let on_drop = if keeps { OnDrop::Keep } else { OnDrop::GiveBack };
                let mut lease = acquire.on_drop(on_drop).await.unwrap();
                lease.consume("rpm", 5).await.unwrap();
                for step in *steps {
                    match step {
                        Adjust(difference) => lease.adjust("rpm", *difference).unwrap(),
                        Settle(actual) => lease.settle("rpm", *actual).unwrap(),
                        Flush => lease.flush().await.unwrap(),
                    }
                }
                drop(lease);
                let left_over = 100 - expected.map_or(*used, |expected| expected[at]);
                let what = format!("{steps:?}, on_drop {on_drop:?}: {left_over} are left");
                soon(&what, async || left(&limiter, &entity, "gpt-4", "rpm").await == left_over)
                    .await;
            }
        }
    });
}

/// A settled limit stays settled; one that was not settled is refunded.
#[test]
fn a_dropped_lease_keeps_limit_by_limit() {
    on_every_store(async |world| {
        let limits = [without_refill("rpm", 100), without_refill("tpm", 100)];
        let limiter = world.limiter_with(limits).await;
        let acquire = limiter.acquire("key", "gpt-4").take("rpm", 1).take("tpm", 50);
        let mut lease = acquire.await.unwrap();
        lease.settle("tpm", 70).unwrap();
        drop(lease);
        soon("settled", async || left(&limiter, "key", "gpt-4", "tpm").await == 30).await;
        soon("given back", async || left(&limiter, "key", "gpt-4", "rpm").await == 100).await;
    });
}

#[test]
fn adjustments_may_leave_debt_or_give_back() {
    on_every_store(async |world| {
        let limiter = world.limiter_with([without_refill("tpm", 100)]).await;
        for difference in [40, -60, -100, 0, 1_000_000_000_000] {
            let entity = format!("key{difference}");
            let mut lease = limiter.acquire(&entity, "gpt-4").take("tpm", 100).await.unwrap();
            lease.adjust("tpm", difference).unwrap();
            assert_eq!(lease.held("tpm"), Some(100 + difference));
            lease.commit().await.unwrap();
            assert_eq!(left(&limiter, &entity, "gpt-4", "tpm").await, -difference);
        }
    });
}

#[test]
fn differences_are_gathered_and_written_once() {
    on_every_store(async |world| {
        let limits = [without_refill("rpm", 10), without_refill("tpm", 1_000)];
        let limiter = world.limiter_with(limits).await;
        let call = limiter.acquire("key", "gpt-4").take("rpm", 1).take("tpm", 100);
        let mut lease = call.await.unwrap();
        for _ in 0..10 {
            lease.adjust("tpm", 7).unwrap();
            lease.adjust("rpm", 1).unwrap();
            lease.release("tpm", 2).unwrap();
        }
        assert_eq!(world.store.calls(Call::Settle), 0);
        assert_eq!(left(&limiter, "key", "gpt-4", "tpm").await, 900);
        lease.commit().await.unwrap();
        assert_eq!(world.store.calls(Call::Settle), 1);
        assert_eq!(world.cell(&limiter, "key", "gpt-4", "tpm").await, (850_000, 150_000));
        assert_eq!(world.cell(&limiter, "key", "gpt-4", "rpm").await, (-1_000, 11_000));
    });
}

#[test]
fn nothing_is_written_where_there_is_no_difference() {
    on_every_store(async |world| {
        let limiter = world.limiter_with([without_refill("tpm", 100)]).await;
        let mut lease = limiter.acquire("key", "gpt-4").take("tpm", 10).await.unwrap();
        lease.adjust("tpm", 5).unwrap();
        lease.adjust("tpm", -5).unwrap();
        lease.settle("tpm", 10).unwrap();
        lease.flush().await.unwrap();
        lease.commit().await.unwrap();
        let nothing = limiter.acquire("key", "gpt-4").take("tpm", 0).await.unwrap();
        nothing.rollback().await.unwrap();
        assert_eq!(world.store.calls(Call::Settle), 0);
    });
}

#[test]
fn a_flush_writes_what_was_gathered_and_leaves_the_lease_open() {
    on_every_store(async |world| {
        let limiter = world.limiter_with([without_refill("tpm", 100)]).await;
        let mut lease = limiter.acquire("key", "gpt-4").take("tpm", 10).await.unwrap();
        lease.adjust("tpm", 5).unwrap();
        lease.flush().await.unwrap();
        assert_eq!(left(&limiter, "key", "gpt-4", "tpm").await, 85);
        lease.adjust("tpm", -12).unwrap();
        lease.flush().await.unwrap();
        assert_eq!(left(&limiter, "key", "gpt-4", "tpm").await, 97);
        assert_eq!(lease.held("tpm"), Some(3));
        lease.rollback().await.unwrap();
        assert_eq!(world.cell(&limiter, "key", "gpt-4", "tpm").await, (100_000, 0));
    });
}

#[test]
fn a_limit_is_settled_for_what_was_really_used() {
    on_every_store(async |world| {
        let limiter = world.limiter_with([without_refill("tpm", 100)]).await;
        for (actual, more) in [(0, 0), (40, 0), (10, 0), (230, 0), (0, 5), (70, 5)] {
            let entity = format!("key-{actual}-{more}");
            let mut lease = limiter.acquire(&entity, "gpt-4").take("tpm", 10).await.unwrap();
            if more > 0 {
                lease.consume("tpm", more).await.unwrap();
            }
            lease.settle("tpm", 99).unwrap();
            lease.settle("tpm", actual).unwrap();
            assert_eq!(lease.held("tpm"), Some(i64::try_from(actual).unwrap()));
            lease.commit().await.unwrap();
            let left = left(&limiter, &entity, "gpt-4", "tpm").await;
            assert_eq!(left, 100 - i64::try_from(actual).unwrap(), "{entity}");
        }
    });
}

#[test]
fn no_more_can_be_given_back_than_is_held() {
    on_every_store(async |world| {
        let limiter = world.limiter_with([without_refill("tpm", 100)]).await;
        let mut lease = limiter.acquire("key", "gpt-4").take("tpm", 10).await.unwrap();
        lease.release("tpm", 4).unwrap();
        for done in [lease.release("tpm", 7), lease.adjust("tpm", -7)] {
            let Err(Error::NotHeld { limit, held, asked }) = done else { panic!("{done:?}") };
            assert_eq!((limit.as_str(), held, asked), ("tpm", 6, 7));
        }
        lease.consume("tpm", 1).await.unwrap();
        lease.release("tpm", 7).unwrap();
        assert_eq!(lease.held("tpm"), Some(0));
        lease.commit().await.unwrap();
        assert_eq!(world.cell(&limiter, "key", "gpt-4", "tpm").await, (100_000, 0));
    });
}

#[test]
fn only_limits_of_the_acquire_can_be_changed() {
    on_every_store(async |world| {
        let limits = [without_refill("rpm", 10), without_refill("tpm", 10)];
        let limiter = world.limiter_with(limits).await;
        let mut lease = limiter.acquire("key", "gpt-4").take("rpm", 1).await.unwrap();
        let not_in_lease = |done: Result<(), Error>| match done {
            Err(Error::NotInLease(limit)) => assert_eq!(limit, "tpm"),
            other => panic!("{other:?}"),
        };
        not_in_lease(lease.adjust("tpm", 1));
        not_in_lease(lease.adjust("tpm", 0));
        not_in_lease(lease.settle("tpm", 1));
        not_in_lease(lease.release("tpm", 0));
        not_in_lease(lease.consume("tpm", 1).await);
        assert_eq!(lease.held("tpm"), None);
        lease.commit().await.unwrap();
        assert_eq!(left(&limiter, "key", "gpt-4", "tpm").await, 10);
    });
}

#[test]
fn amounts_beyond_the_bounds_are_invalid() {
    on_every_store(async |world| {
        let limiter = world.limiter_with([without_refill("tpm", 10)]).await;
        let mut lease = limiter.acquire("key", "gpt-4").take("tpm", 1).await.unwrap();
        let above = AMOUNT_MAX + 1;
        let done = [
            lease.adjust("tpm", i64::MAX),
            lease.adjust("tpm", i64::MIN),
            lease.adjust("tpm", i64::try_from(above).unwrap()),
            lease.settle("tpm", above),
            lease.release("tpm", u64::MAX),
            lease.consume("tpm", above).await,
        ];
        for (at, done) in done.into_iter().enumerate() {
            assert!(matches!(done, Err(Error::Invalid(_))), "{at}: {done:?}");
        }
        assert_eq!(lease.held("tpm"), Some(1));
        lease.commit().await.unwrap();
    });
}

#[test]
fn consuming_more_can_be_refused_and_is_given_back_by_a_rollback() {
    on_every_store(async |world| {
        let limiter = world.limiter().await;
        limiter.create_entity("org").await.unwrap();
        child(&limiter, "key", "org").await;
        own_limits(&limiter, "key", [without_refill("tpm", 100)]).await;
        own_limits(&limiter, "org", [without_refill("tpm", 20)]).await;
        let mut lease = limiter.acquire("key", "gpt-4").take("tpm", 5).await.unwrap();
        lease.consume("tpm", 10).await.unwrap();
        assert_eq!(lease.held("tpm"), Some(15));
        let refused = lease.consume("tpm", 6).await;
        let Err(Error::Exceeded(refused)) = refused else { panic!("{refused:?}") };
        assert_eq!(refused.primary_violation().level, 1);
        assert_eq!(lease.held("tpm"), Some(15), "a refusal takes nothing");
        lease.consume("tpm", 5).await.unwrap();
        assert_eq!(left(&limiter, "org", "gpt-4", "tpm").await, 0);
        lease.rollback().await.unwrap();
        assert_eq!(world.cell(&limiter, "key", "gpt-4", "tpm").await, (100_000, 0));
        assert_eq!(world.cell(&limiter, "org", "gpt-4", "tpm").await, (20_000, 0));
    });
}

#[test]
fn consuming_goes_by_the_limits_that_the_call_brought() {
    on_every_store(async |world| {
        let limiter = world.limiter_with([without_refill("rpm", 1)]).await;
        let own = limiter.acquire("key", "gpt-4").limits([without_refill("mine", 10)]);
        let mut lease = own.take("mine", 4).await.unwrap();
        lease.consume("mine", 6).await.unwrap();
        let refused = lease.consume("mine", 1).await;
        assert!(matches!(refused, Err(Error::Exceeded(_))), "{refused:?}");
        lease.commit().await.unwrap();
        assert_eq!(world.cell(&limiter, "key", "gpt-4", "mine").await, (0, 10_000));
    });
}

#[test]
fn whoever_calls_commit_or_rollback_and_drops_the_future_has_done_so() {
    on_every_store(async |world| {
        let limiter = world.limiter_with([without_refill("tpm", 10)]).await;
        for commit in [true, false] {
            let mut lease = limiter.acquire("key", "gpt-4").take("tpm", 3).await.unwrap();
            lease.settle("tpm", 4).unwrap();
            match commit {
                true => drop(lease.commit()),
                false => drop(lease.rollback()),
            }
            let plain = limiter.acquire("key", "gpt-4").take("tpm", 1).await.unwrap();
            drop(plain.commit());
        }
        // Four and twice one are committed, and what was rolled back is there again.
        soon("settled", async || {
            world.cell(&limiter, "key", "gpt-4", "tpm").await == (4_000, 6_000)
        })
        .await;
    });
}

#[test]
fn a_lease_settles_with_the_limits_that_the_bucket_has_by_then() {
    on_every_store(async |world| {
        let limiter = world.limiter().await;
        let old = [without_refill("rpm", 10), without_refill("tpm", 10)];
        own_limits(&limiter, "key", old).await;
        let call = limiter.acquire("key", "gpt-4").take("rpm", 5).take("tpm", 5);
        let mut lease = call.await.unwrap();
        own_limits(&limiter, "key", [without_refill("new", 9), without_refill("tpm", 20)]).await;
        spend(&limiter, "key", "gpt-4", "new", 1).await;
        lease.adjust("rpm", 1).unwrap();
        lease.adjust("tpm", 1).unwrap();
        lease.commit().await.unwrap();
        let bucket = world.bucket(&limiter, "key", "gpt-4").await.unwrap();
        let (rpm, _) = bucket.cell("rpm").expect("the limit that was charged");
        assert_eq!(rpm.tokens.whole_tokens(), 9, "a limit that was dropped counts as full");
        assert_eq!(left(&limiter, "key", "gpt-4", "tpm").await, 4);
        assert_eq!(left(&limiter, "key", "gpt-4", "new").await, 8);
    });
}

#[test]
fn calls_that_only_settle_are_limited() {
    on_every_store(async |world| {
        let limiter = world.limiter_with([without_refill("tpm", 100)]).await;
        for call in 0..4 {
            let mut lease = limiter.acquire("key", "gpt-4").take("tpm", 0).await.unwrap();
            // Deletion or expiry of the bucket forgives its debt, but not this call.
            if call == 1 {
                limiter.delete_entity("key").await.unwrap();
            }
            lease.settle("tpm", 40).unwrap();
            lease.commit().await.unwrap();
        }
        let refused = refusal(&limiter, "key", "gpt-4", "tpm", 1).await;
        assert_eq!(refused.statuses()[0].available.whole_tokens(), -20);
    });
}
