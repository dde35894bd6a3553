//! Changed limits: enforced at once here, within one TTL elsewhere; buckets follow.

use zae_limiter::{Error, Limit, StoreErrorKind};
use zae_limiter_testkit::{Call, Fault};

use crate::world::{
    left, ms, on_every_store, own_limits, per_minute, refusal, secs, spend, without_refill,
};

#[test]
fn a_change_is_enforced_at_once_where_it_is_made_and_elsewhere_within_one_ttl() {
    on_every_store(async |world| {
        let here = world.limiter_with([without_refill("rpm", 100)]).await;
        let there = world.limiter().await;
        for limiter in [&here, &there] {
            spend(limiter, "key", "gpt-4", "rpm", 10).await;
        }
        // Each change allows less than the one before.
        for (change, capacity) in [60, 50, 40, 30].into_iter().enumerate() {
            let lower = [without_refill("rpm", capacity)];
            match change {
                0 => here.set_system_defaults(lower, None).await.map(|_| ()),
                1 => here.set_resource_defaults("gpt-4", lower).await.map(|_| ()),
                2 => here.set_limits("key", None, lower).await.map(|_| ()),
                _ => here.set_limits("key", Some("gpt-4"), lower).await.map(|_| ()),
            }
            .unwrap();
            let too_much = here.acquire("key", "gpt-4").take("rpm", capacity + 1).await;
            assert!(matches!(too_much, Err(Error::ExceedsCapacity(_))), "here: {too_much:?}");

            world.advance(secs(60) - ms(1));
            let trusted = there.effective_limits("key", "gpt-4").await.unwrap();
            assert_eq!(trusted.limits[0].capacity, capacity + if change == 0 { 40 } else { 10 });
            world.advance(ms(1));
            let too_much = there.acquire("key", "gpt-4").take("rpm", capacity + 1).await;
            assert!(matches!(too_much, Err(Error::ExceedsCapacity(_))), "there: {too_much:?}");
        }
    });
}

#[test]
fn a_lower_ceiling_cuts_and_a_higher_one_grants_nothing_at_once() {
    on_every_store(async |world| {
        let limiter = world.limiter().await;
        for on in [None, Some("gpt-4")] {
            limiter.set_limits("key", on, [per_minute("rpm", 60)]).await.unwrap();
            spend(&limiter, "key", "gpt-4", "rpm", 10).await;
            limiter.set_limits("key", on, [per_minute("rpm", 20)]).await.unwrap();
            let (tokens, _) = world.cell(&limiter, "key", "gpt-4", "rpm").await;
            assert_eq!(tokens, 20_000, "the stored bucket is cut at once");
            limiter.set_limits("key", on, [per_minute("rpm", 6_000)]).await.unwrap();
            assert_eq!(left(&limiter, "key", "gpt-4", "rpm").await, 20);
            refusal(&limiter, "key", "gpt-4", "rpm", 21).await;
            world.advance(ms(10));
            spend(&limiter, "key", "gpt-4", "rpm", 21).await;
            limiter.delete_limits("key", on).await.unwrap();
            limiter.delete_entity("key").await.unwrap();
        }
    });
}

#[test]
fn buckets_on_defaults_follow_with_their_next_call() {
    on_every_store(async |world| {
        let limiter = world.limiter_with([per_minute("rpm", 60)]).await;
        spend(&limiter, "key", "gpt-4", "rpm", 10).await;
        limiter.set_system_defaults([per_minute("rpm", 20)], None).await.unwrap();
        assert_eq!(left(&limiter, "key", "gpt-4", "rpm").await, 20);
        spend(&limiter, "key", "gpt-4", "rpm", 1).await;
        limiter.set_resource_defaults("gpt-4", [per_minute("rpm", 6_000)]).await.unwrap();
        assert_eq!(left(&limiter, "key", "gpt-4", "rpm").await, 19);
        spend(&limiter, "key", "gpt-4", "rpm", 0).await;
        world.advance(ms(20));
        assert_eq!(left(&limiter, "key", "gpt-4", "rpm").await, 21);
    });
}

#[test]
fn what_was_earned_before_a_change_is_paid_at_the_old_rate() {
    on_every_store(async |world| {
        let limiter = world.limiter().await;
        own_limits(&limiter, "key", [per_minute("rpm", 600)]).await;
        spend(&limiter, "key", "gpt-4", "rpm", 600).await;
        world.advance(secs(30));
        own_limits(&limiter, "key", [per_minute("rpm", 60).burst(600)]).await;
        world.advance(secs(30));
        assert_eq!(left(&limiter, "key", "gpt-4", "rpm").await, 330);
    });
}

#[test]
fn limits_of_all_resources_reach_the_buckets_that_have_none_of_their_own() {
    on_every_store(async |world| {
        let limiter = world.limiter_with([without_refill("rpm", 100)]).await;
        for on in ["gpt-4", "gpt-5", "claude"] {
            spend(&limiter, "key", on, "rpm", 10).await;
        }
        limiter.set_limits("key", Some("claude"), [without_refill("rpm", 70)]).await.unwrap();
        own_limits(&limiter, "key", [without_refill("rpm", 50)]).await;
        for (on, tokens) in [("gpt-4", 50_000), ("gpt-5", 50_000), ("claude", 70_000)] {
            assert_eq!(world.cell(&limiter, "key", on, "rpm").await.0, tokens, "{on}");
        }
    });
}

#[test]
fn a_bucket_on_defaults_expires_and_one_with_limits_of_its_entity_does_not() {
    on_every_store(async |world| {
        // A minute to fill, seven times that to live.
        let limiter = world.limiter_with([per_minute("rpm", 60)]).await;
        let exists = async |entity| world.bucket(&limiter, entity, "gpt-4").await.is_some();
        own_limits(&limiter, "own", [per_minute("rpm", 60)]).await;
        for entity in ["own", "system"] {
            spend(&limiter, entity, "gpt-4", "rpm", 1).await;
        }
        world.advance(secs(420) - ms(1));
        assert!(exists("system").await);
        // A write renews it.
        spend(&limiter, "system", "gpt-4", "rpm", 1).await;
        world.advance(secs(420) - ms(1));
        assert!(exists("system").await);
        world.advance(ms(1));
        assert!(!exists("system").await);
        assert_eq!(left(&limiter, "system", "gpt-4", "rpm").await, 60);
        spend(&limiter, "system", "gpt-4", "rpm", 60).await;
        let (_, consumed) = world.cell(&limiter, "system", "gpt-4", "rpm").await;
        assert_eq!(consumed, 60_000, "an expired bucket is a new one");
        world.advance(secs(100 * 365 * 86_400));
        assert!(exists("own").await);
    });
}

#[test]
fn changing_between_defaults_and_own_limits_changes_the_expiry() {
    on_every_store(async |world| {
        let limiter = world.limiter_with([per_minute("rpm", 60)]).await;
        let exists = async || world.bucket(&limiter, "key", "gpt-4").await.is_some();
        for on in [None, Some("gpt-4")] {
            spend(&limiter, "key", "gpt-4", "rpm", 1).await;
            limiter.set_limits("key", on, [per_minute("rpm", 60)]).await.unwrap();
            world.advance(secs(1_000_000));
            assert!(exists().await, "own limits, {on:?}");
            limiter.delete_limits("key", on).await.unwrap();
            world.advance(secs(420) - ms(1));
            assert!(exists().await, "back on defaults, {on:?}");
            world.advance(ms(1));
            assert!(!exists().await, "back on defaults, {on:?}");
        }
    });
}

#[test]
fn a_bucket_is_kept_until_its_debt_is_repaid() {
    on_every_store(async |world| {
        let limiter = world.limiter_with([per_minute("tpm", 60)]).await;
        let mut lease = limiter.acquire("key", "gpt-4").take("tpm", 60).await.unwrap();
        lease.adjust("tpm", 3_600).unwrap();
        lease.commit().await.unwrap();
        // 3,660 are missing at one a second; seven minutes would forgive most of it.
        world.advance(secs(3_600));
        assert_eq!(left(&limiter, "key", "gpt-4", "tpm").await, 0);
        world.advance(secs(60) - ms(1));
        assert!(world.bucket(&limiter, "key", "gpt-4").await.is_some());
        refusal(&limiter, "key", "gpt-4", "tpm", 60).await;
    });
}

#[test]
fn the_lifetime_can_be_set() {
    on_every_store(async |world| {
        for (times, seconds) in [(0, None), (1, Some(3_600)), (3, Some(3 * 3_600))] {
            let builder = world.builder().bucket_lifetime(times);
            let limits = [Limit::per_hour("rph", 10), per_minute("rpm", 60)];
            let limiter = builder.default_limits(limits).open().await.unwrap();
            let entity = format!("key-{times}");
            spend(&limiter, &entity, "gpt-4", "rpm", 1).await;
            let exists = async || world.bucket(&limiter, &entity, "gpt-4").await.is_some();
            if let Some(seconds) = seconds {
                world.advance(secs(seconds) - ms(1));
                assert!(exists().await, "{times}");
                world.advance(ms(1));
                assert!(!exists().await, "{times}");
            } else {
                world.advance(secs(100 * 365 * 86_400));
                assert!(exists().await, "{times}");
            }
        }
    });
}

#[test]
fn a_change_whose_answer_is_lost_is_enforced_here_all_the_same() {
    on_every_store(async |world| {
        let limiter = world.limiter_with([without_refill("rpm", 100)]).await;
        spend(&limiter, "key", "gpt-4", "rpm", 1).await;
        let answer_lost = Fault::FailAfter(StoreErrorKind::Unavailable);
        let lost = || world.store.script(Call::Write, answer_lost.clone());
        lost();
        let set = limiter.set_limits("key", None, [without_refill("rpm", 10)]).await;
        assert!(matches!(set, Err(Error::Unavailable { .. })), "{set:?}");
        let too_much = limiter.acquire("key", "gpt-4").take("rpm", 11).await;
        assert!(matches!(too_much, Err(Error::ExceedsCapacity(_))), "{too_much:?}");
        lost();
        let deleted = limiter.delete_limits("key", None).await;
        assert!(matches!(deleted, Err(Error::Unavailable { .. })), "{deleted:?}");
        let limits = limiter.effective_limits("key", "gpt-4").await.unwrap().limits;
        assert_eq!(limits[0].capacity, 100);
    });
}
