//! Taking tokens: all amounts, or none.

use zae_limiter::model::AMOUNT_MAX;
use zae_limiter::{Error, Limit};
use zae_limiter_testkit::Call;

use crate::world::{
    child, left, on_every_store, own_limits, per_minute, refusal, spend, without_refill,
};

#[test]
fn a_cold_acquire_and_warm_ones_take_the_same() {
    on_every_store(async |world| {
        let limiter = world.limiter_with([per_minute("rpm", 10)]).await;
        let reads = world.store.calls(Call::Get);
        for taken in 1..=10 {
            spend(&limiter, "key", "gpt-4", "rpm", 1).await;
            assert_eq!(world.store.calls(Call::Get), reads + 1, "only the first one reads");
            assert_eq!(left(&limiter, "key", "gpt-4", "rpm").await, 10 - taken);
        }
        refusal(&limiter, "key", "gpt-4", "rpm", 1).await;
    });
}

#[test]
fn a_limit_that_refuses_leaves_the_others_untouched() {
    on_every_store(async |world| {
        let limits = [per_minute("a", 10), per_minute("b", 5), per_minute("c", 10)];
        let limiter = world.limiter_with(limits).await;
        spend(&limiter, "key", "gpt-4", "b", 5).await;
        for _ in 0..3 {
            let all = limiter.acquire("key", "gpt-4").take("a", 1).take("b", 1).take("c", 1);
            assert!(matches!(all.await, Err(Error::Exceeded(_))));
        }
        assert_eq!(left(&limiter, "key", "gpt-4", "a").await, 10);
        assert_eq!(left(&limiter, "key", "gpt-4", "b").await, 0);
        assert_eq!(left(&limiter, "key", "gpt-4", "c").await, 10);
        let bucket = world.bucket(&limiter, "key", "gpt-4").await.unwrap();
        let consumed: Vec<i64> = bucket.cells().iter().map(|c| c.consumed.get()).collect();
        assert_eq!(consumed, [0, 5_000, 0]);
    });
}

#[test]
fn limits_that_are_not_named_are_neither_checked_nor_taken() {
    on_every_store(async |world| {
        let limits = [per_minute("rpm", 10), per_minute("tpm", 5)];
        let limiter = world.limiter_with(limits).await;
        spend(&limiter, "key", "gpt-4", "tpm", 5).await;
        spend(&limiter, "key", "gpt-4", "rpm", 4).await;
        assert_eq!(left(&limiter, "key", "gpt-4", "rpm").await, 6);
        assert_eq!(left(&limiter, "key", "gpt-4", "tpm").await, 0);
    });
}

#[test]
fn buckets_of_other_entities_and_resources_stand_apart() {
    on_every_store(async |world| {
        let limiter = world.limiter_with([per_minute("rpm", 1)]).await;
        for (entity, resource) in [("key", "gpt-4"), ("key", "gpt-5"), ("kez", "gpt-4")] {
            spend(&limiter, entity, resource, "rpm", 1).await;
        }
        for (entity, resource) in [("key", "gpt-4"), ("key", "gpt-5"), ("kez", "gpt-4")] {
            refusal(&limiter, entity, resource, "rpm", 1).await;
        }
    });
}

#[test]
fn all_unknown_limits_are_named_and_nothing_is_taken() {
    on_every_store(async |world| {
        let limiter = world.limiter().await;
        let unknown = |error| match error {
            Error::UnknownLimits { unknown, configured, entity, resource } => {
                assert_eq!((entity.as_str(), resource.as_str()), ("key", "gpt-4"));
                assert_eq!(
                    configured.iter().any(|name| name.as_str() == "own"),
                    unknown == ["rpm"]
                );
                unknown
            }
            other => panic!("{other:?}"),
        };
        // Nothing is configured at any level.
        let none = limiter.acquire("key", "gpt-4").take("rpm", 1).take("tpm", 1).await;
        assert_eq!(unknown(none.unwrap_err()), ["rpm", "tpm"]);

        limiter.set_system_defaults([per_minute("rpm", 10)], None).await.unwrap();
        for temperature in ["cold", "warm"] {
            let call = limiter.acquire("key", "gpt-4").take("x", 1).take("rpm", 1).take("y", 0);
            assert_eq!(unknown(call.await.unwrap_err()), ["x", "y"], "{temperature}");
        }
        let own = limiter.acquire("key", "gpt-4").take("rpm", 1).take("own", 1);
        let own = own.limits([per_minute("own", 5)]).await;
        assert_eq!(unknown(own.unwrap_err()), ["rpm"]);
        assert!(world.bucket(&limiter, "key", "gpt-4").await.is_none());
    });
}

#[test]
fn more_than_a_limit_can_hold_is_refused_with_its_own_error() {
    on_every_store(async |world| {
        let limiter = world.limiter().await;
        limiter.create_entity("org").await.unwrap();
        child(&limiter, "key", "org").await;
        own_limits(&limiter, "org", [per_minute("rpm", 5)]).await;
        own_limits(&limiter, "key", [per_minute("rpm", 10), per_minute("tpm", 3).burst(7)]).await;
        for (limit, asked, whose, capacity) in
            [("rpm", 11, "key", 10), ("tpm", 8, "key", 7), ("rpm", 6, "org", 5)]
        {
            let call = limiter.acquire("key", "gpt-4").take(limit, asked);
            let Err(Error::ExceedsCapacity(refusal)) = call.await else {
                panic!("{asked} of {limit} can never pass");
            };
            assert_eq!(refusal.entity_id.as_str(), whose);
            assert_eq!(refusal.limit_name.as_str(), limit);
            assert_eq!(refusal.capacity.whole_tokens(), capacity);
            assert_eq!(refusal.requested.whole_tokens(), i64::try_from(asked).unwrap());
        }
        assert!(world.bucket(&limiter, "key", "gpt-4").await.is_none());
        spend(&limiter, "key", "gpt-4", "rpm", 5).await;
        spend(&limiter, "key", "gpt-4", "tpm", 7).await;
    });
}

#[test]
fn the_largest_amount_can_be_taken_and_a_larger_one_is_invalid() {
    on_every_store(async |world| {
        let limiter = world.limiter_with([Limit::per_second("x", AMOUNT_MAX)]).await;
        assert_eq!(AMOUNT_MAX, 1_000_000_000_000);
        for too_much in [AMOUNT_MAX + 1, u64::MAX] {
            let call = limiter.acquire("key", "gpt-4").take("x", too_much).await;
            assert!(matches!(call, Err(Error::Invalid(_))), "{too_much}: {call:?}");
        }
        let sum = limiter.acquire("key", "gpt-4").take("x", u64::MAX).take("x", u64::MAX).await;
        assert!(matches!(sum, Err(Error::Invalid(_))), "{sum:?}");
        let lease = limiter.acquire("key", "gpt-4").take("x", AMOUNT_MAX).await.unwrap();
        assert_eq!(lease.held("x"), Some(1_000_000_000_000));
        assert_eq!(left(&limiter, "key", "gpt-4", "x").await, 0);
        lease.rollback().await.unwrap();
        assert_eq!(left(&limiter, "key", "gpt-4", "x").await, 1_000_000_000_000);
    });
}

#[test]
fn an_acquire_that_names_nothing_is_invalid() {
    on_every_store(async |world| {
        let limiter = world.limiter().await;
        let nothing = limiter.acquire("key", "gpt-4").await;
        assert!(matches!(nothing, Err(Error::Invalid(_))), "unconfigured: {nothing:?}");
        limiter.set_system_defaults([per_minute("rpm", 10)], None).await.unwrap();
        for temperature in ["cold", "warm"] {
            let nothing = limiter.acquire("key", "gpt-4").await;
            assert!(matches!(nothing, Err(Error::Invalid(_))), "{temperature}: {nothing:?}");
            spend(&limiter, "key", "gpt-4", "rpm", 1).await;
        }
        let nothing = limiter.acquire("key", "gpt-4").limits([per_minute("own", 1)]).await;
        assert!(matches!(nothing, Err(Error::Invalid(_))), "own limits: {nothing:?}");
    });
}

#[test]
fn names_that_break_a_rule_are_invalid() {
    on_every_store(async |world| {
        let limiter = world.limiter_with([per_minute("rpm", 10)]).await;
        for (entity, resource) in
            [("", "gpt-4"), ("a b", "gpt-4"), ("key", ""), ("key", "_default_"), ("key", "4")]
        {
            let call = limiter.acquire(entity, resource).take("rpm", 1).await;
            assert!(matches!(call, Err(Error::Invalid(_))), "{entity:?} {resource:?}: {call:?}");
        }
    });
}

#[test]
fn an_amount_of_zero_checks_nothing_even_in_debt_and_can_be_adjusted() {
    on_every_store(async |world| {
        let limiter = world.limiter_with([without_refill("tpm", 10)]).await;
        let mut lease = limiter.acquire("key", "gpt-4").take("tpm", 0).await.unwrap();
        assert_eq!(lease.held("tpm"), Some(0));
        lease.adjust("tpm", 25).unwrap();
        lease.commit().await.unwrap();
        assert_eq!(left(&limiter, "key", "gpt-4", "tpm").await, -15);

        refusal(&limiter, "key", "gpt-4", "tpm", 1).await;
        let mut lease = limiter.acquire("key", "gpt-4").take("tpm", 0).await.unwrap();
        lease.adjust("tpm", 5).unwrap();
        lease.commit().await.unwrap();
        assert_eq!(left(&limiter, "key", "gpt-4", "tpm").await, -20);
    });
}

#[test]
fn a_limit_that_is_named_twice_gives_the_sum() {
    on_every_store(async |world| {
        let limiter = world.limiter_with([per_minute("rpm", 10)]).await;
        let sum = limiter.acquire("key", "gpt-4").take("rpm", 6).take("rpm", 5).await;
        assert!(matches!(sum, Err(Error::ExceedsCapacity(_))), "{sum:?}");
        let twice = limiter.acquire("key", "gpt-4").take("rpm", 3).take("rpm", 4);
        let lease = twice.await.unwrap();
        assert_eq!(lease.held("rpm"), Some(7));
        assert_eq!(lease.statuses().len(), 1);
        lease.commit().await.unwrap();
        assert_eq!(left(&limiter, "key", "gpt-4", "rpm").await, 3);
    });
}

#[test]
fn the_limits_nearest_to_a_misspelt_name_come_first() {
    on_every_store(async |world| {
        let limiter =
            world.limiter_with(["images", "rpm", "tpm"].map(|it| per_minute(it, 1))).await;
        for (typed, names, guess) in [
            ("tmp", "tpm, rpm, images", "did you mean tpm? "),
            ("image", "images, rpm, tpm", "did you mean images? "),
            ("x", "rpm, tpm, images", ""),
        ] {
            let error = limiter.acquire("key", "gpt-4").take(typed, 1).await.unwrap_err();
            let text = error.to_string();
            assert!(text.ends_with(&format!("on gpt-4; {guess}configured: {names}")), "{text}");
        }
    });
}
