//! Limits that a call brings with it.

use zae_limiter::{Error, Limit};

use crate::world::{
    child, exceeded, left, on_every_store, own_limits, per_minute, refusal, secs, spend,
    without_refill,
};

#[test]
fn limits_of_the_call_hold_instead_of_the_stored_ones() {
    on_every_store(async |world| {
        let limiter = world.limiter().await;
        // Nothing is stored; then the same limits are; then others, cold and warm.
        for stored in [None, Some(3), Some(10), Some(1)] {
            if let Some(stored) = stored {
                own_limits(&limiter, "key", [per_minute("rpm", stored)]).await;
            }
            let own = || limiter.acquire("key", "gpt-4").limits([per_minute("mine", 3)]);
            for temperature in ["cold", "warm"] {
                let lease = own().take("mine", 3).await.unwrap();
                assert_eq!(exceeded(own().take("mine", 1).await).statuses().len(), 1);
                lease.rollback().await.unwrap();
                let unknown = own().take("rpm", 1).await;
                assert!(
                    matches!(unknown, Err(Error::UnknownLimits { .. })),
                    "{temperature}, {stored:?}: {unknown:?}"
                );
            }
        }
    });
}

#[test]
fn limits_of_the_call_are_checked() {
    on_every_store(async |world| {
        let limiter = world.limiter_with([per_minute("rpm", 10)]).await;
        for wrong in [
            vec![per_minute("rpm", 0)],
            vec![per_minute("ttl", 1)],
            vec![per_minute("rpm", 1), per_minute("rpm", 2)],
        ] {
            let call = limiter.acquire("key", "gpt-4").take("rpm", 1).limits(wrong).await;
            assert!(matches!(call, Err(Error::Invalid(_))), "{call:?}");
        }
    });
}

#[test]
fn stored_limits_remember_what_was_taken_when_they_hold_again() {
    on_every_store(async |world| {
        let limiter = world.limiter_with([without_refill("rpm", 10)]).await;
        spend(&limiter, "key", "gpt-4", "rpm", 7).await;
        for _ in 0..3 {
            let own = limiter.acquire("key", "gpt-4").limits([without_refill("mine", 100)]);
            own.take("mine", 1).await.unwrap().commit().await.unwrap();
        }
        assert_eq!(left(&limiter, "key", "gpt-4", "rpm").await, 3);
        refusal(&limiter, "key", "gpt-4", "rpm", 4).await;
        // What was taken under the call's own limits is kept, too.
        let own = limiter.acquire("key", "gpt-4").limits([without_refill("mine", 100)]);
        let refused = exceeded(own.take("mine", 98).await);
        assert_eq!(refused.statuses()[0].available.whole_tokens(), 97);
    });
}

#[test]
fn calls_that_alternate_between_limits_of_one_name_do_not_over_admit() {
    on_every_store(async |world| {
        let limiter = world.limiter_with([without_refill("rpm", 10)]).await;
        let mut admitted = 0;
        for turn in 0..30 {
            let call = limiter.acquire("key", "gpt-4").take("rpm", 1);
            let call = if turn % 2 == 0 { call.limits([without_refill("rpm", 4)]) } else { call };
            if let Ok(lease) = call.await {
                lease.commit().await.unwrap();
                admitted += 1;
            }
        }
        // The first call cuts the bucket to 4; nothing that follows may grant more.
        assert_eq!(admitted, 4);
    });
}

#[test]
fn ancestors_keep_their_own_limits() {
    on_every_store(async |world| {
        let limiter = world.limiter().await;
        limiter.create_entity("org").await.unwrap();
        child(&limiter, "key", "org").await;
        own_limits(&limiter, "org", [without_refill("rpm", 5)]).await;
        own_limits(&limiter, "key", [without_refill("rpm", 2)]).await;
        let call = || limiter.acquire("key", "gpt-4").limits([without_refill("rpm", 100)]);
        call().take("rpm", 4).await.unwrap().commit().await.unwrap();
        let refused = exceeded(call().take("rpm", 2).await);
        let seen: Vec<(usize, i64, bool)> = refused
            .statuses()
            .iter()
            .map(|status| (status.level, status.available.whole_tokens(), status.exceeded))
            .collect();
        assert_eq!(seen, [(0, 96, false), (1, 1, true)]);
        let too_much = call().take("rpm", 6).await;
        assert!(matches!(too_much, Err(Error::ExceedsCapacity(_))), "{too_much:?}");
    });
}

#[test]
fn a_refused_call_with_limits_of_its_own_changes_nothing() {
    on_every_store(async |world| {
        let limiter = world.limiter_with([without_refill("rpm", 10)]).await;
        spend(&limiter, "key", "gpt-4", "rpm", 1).await;
        let mine = limiter.acquire("key", "gpt-4").limits([without_refill("mine", 1)]);
        mine.take("mine", 1).await.unwrap().commit().await.unwrap();
        let before = world.bucket(&limiter, "key", "gpt-4").await.unwrap();
        for _ in 0..2 {
            let lower = [without_refill("mine", 1), without_refill("rpm", 2)];
            let call = limiter.acquire("key", "gpt-4").limits(lower);
            exceeded(call.take("mine", 1).take("rpm", 1).await);
        }
        assert_eq!(world.bucket(&limiter, "key", "gpt-4").await.unwrap(), before);
        assert_eq!(left(&limiter, "key", "gpt-4", "rpm").await, 9);
    });
}

#[test]
fn an_override_does_not_make_the_stored_limits_forget_sooner() {
    on_every_store(async |world| {
        // A thousand a day, all taken; a call with a limit of its own that fills within a second
        // must not make the bucket expire after a few.
        let daily = Limit::per_day("tpd", 1_000);
        let quick = Limit::per_second("tpd", 10);
        for entity in ["on-defaults", "on-its-own"] {
            let limiter = world.limiter_with([daily.clone()]).await;
            if entity == "on-its-own" {
                own_limits(&limiter, entity, [daily.clone()]).await;
            }
            spend(&limiter, entity, "gpt-4", "tpd", 1_000).await;
            let call = limiter.acquire(entity, "gpt-4").take("tpd", 0).limits([quick.clone()]);
            call.await.unwrap().commit().await.unwrap();
            world.advance(secs(60));
            let now = left(&limiter, entity, "gpt-4", "tpd").await;
            assert!(now <= 10, "{entity} has {now} of 1,000 a day after a minute");
        }
    });
}
