//! Changed limits: enforced at once here, within one TTL elsewhere; buckets follow.

use std::pin::pin;

use zae_limiter::model::ConfigLevel;
use zae_limiter::store::StoreErrorKind;
use zae_limiter::testing::Clock as _;
use zae_limiter::{Error, Limit, RateLimiter};
use zae_limiter_testkit::{Call, Fault, Gate};

use crate::world::{
    Kind, NOW, finish, left, ms, on_every_store, own_limits, per_minute, poll_once, refusal, secs,
    soon, spend, without_refill,
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
        // DynamoDB bills writes, so a call that takes nothing writes nothing there.
        let taken = i64::from(world.is(Kind::DynamoDb));
        spend(&limiter, "key", "gpt-4", "rpm", taken.unsigned_abs()).await;
        world.advance(ms(20));
        assert_eq!(left(&limiter, "key", "gpt-4", "rpm").await, 21 - taken);
    });
}

#[test]
fn time_before_a_change_is_credited_at_the_old_rate() {
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
        // DynamoDB expires items by whole seconds.
        world.advance(secs(419));
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
        // The aggregator needs differences of the count, so on DynamoDB the count continues.
        let before = if world.is(Kind::DynamoDb) { 2_000 } else { 0 };
        assert_eq!(consumed, before + 60_000, "an expired bucket is a new one");
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

#[test]
fn a_store_gets_the_time_when_the_limits_were_read() {
    on_every_store(async |world| {
        let limiter = world.limiter().await;
        let read_at = |call| world.store.limits_read_at(call);
        let at = |seconds: u64| Some(NOW.saturating_add(secs(seconds)));
        for (change, second) in [0, 100, 200, 300].into_iter().enumerate() {
            let limits = [per_minute("rpm", 60)];
            match change {
                // The limiter's own defaults count as read: the read found no stored limits.
                0 => {
                    let builder = world.builder().default_limits(limits.clone());
                    let other = builder.open().await.unwrap();
                    spend(&other, "somebody", "gpt-4", "rpm", 1).await;
                    assert_eq!(read_at(Call::Acquire), at(0));
                    limiter.set_system_defaults(limits, None).await.map(|_| ())
                }
                1 => limiter.set_resource_defaults("gpt-4", limits).await.map(|_| ()),
                2 => limiter.set_limits("key", None, limits).await.map(|_| ()),
                _ => limiter.set_limits("key", Some("gpt-4"), limits).await.map(|_| ()),
            }
            .unwrap();
            // Cached limits keep the time when they were read.
            for _ in 0..2 {
                spend(&limiter, "key", "gpt-4", "rpm", 1).await;
                assert_eq!(read_at(Call::Acquire), at(second), "change {change}");
                world.advance(secs(1));
            }
            world.advance(secs(98));
        }
        let own = [per_minute("rpm", 60)];
        let call = limiter.acquire("key", "gpt-4").take("rpm", 1).limits(own);
        call.await.unwrap().rollback().await.unwrap();
        assert_eq!(read_at(Call::Acquire), None, "limits of the call itself");
        assert_eq!(read_at(Call::Settle), None);
    });
}

#[test]
fn a_change_reconfigures_with_limits_read_after_it() {
    on_every_store(async |world| {
        let limiter = world.limiter_with([per_minute("rpm", 60)]).await;
        spend(&limiter, "key", "gpt-4", "rpm", 1).await;
        let read_at = || world.store.limits_read_at(Call::Reconfigure);
        for (resource, deletes) in [(None, false), (Some("gpt-4"), false), (None, true)] {
            world.advance(secs(10));
            match deletes {
                false => {
                    limiter.set_limits("key", resource, [per_minute("rpm", 9)]).await.map(drop)
                }
                true => limiter.delete_limits("key", resource).await,
            }
            .unwrap();
            assert_eq!(read_at(), Some(world.clock.now()), "{resource:?}, {deletes}");
        }
        // Two calls begin before the change. The second waits for the read of the first, reads after the
        // change, and fills the cache before the buckets are reconfigured.
        world.advance(secs(100));
        let (get, list) = (Gate::new(), Gate::new());
        world.store.script(Call::Get, Fault::HoldBefore(get.clone()));
        world.store.script(Call::ListBuckets, Fault::HoldBefore(list.clone()));
        let call = || limiter.acquire("key", "gpt-4").take("rpm", 1).deadline(secs(60));
        let (mut first, mut second) = (pin!(call().into_future()), pin!(call().into_future()));
        assert!(poll_once(first.as_mut()).is_pending());
        assert!(poll_once(second.as_mut()).is_pending());
        world.advance(secs(10));
        let mut change = pin!(limiter.set_limits("key", None, [per_minute("rpm", 8)]));
        let mut listing = pin!(list.reached());
        soon("the change is written", async || {
            assert!(poll_once(change.as_mut()).is_pending());
            poll_once(listing.as_mut()).is_ready()
        })
        .await;
        get.open();
        finish(first).await.unwrap().commit().await.unwrap();
        finish(second).await.unwrap().commit().await.unwrap();
        list.open();
        finish(change).await.unwrap();
        assert_eq!(read_at(), Some(world.clock.now()), "not the early caller's moment");
    });
}

#[test]
fn limits_are_replaced_only_if_they_are_still_those_that_were_read() {
    on_every_store(async |world| {
        let limiter = world.limiter().await;
        let resource =
            ConfigLevel::Resource(zae_limiter::model::ResourceName::new("gpt-4").unwrap());
        for level in [ConfigLevel::System, resource] {
            let replace = async |expected: Option<&zae_limiter::Config>, rate| {
                let limits = [per_minute("rpm", rate)];
                limiter.replace_limits(&level, expected, limits, None).await.unwrap()
            };
            let first = replace(None, 1).await.unwrap();
            assert_eq!(replace(None, 2).await, None, "something is stored by now");
            let second = replace(Some(&first), 2).await.unwrap();
            assert_eq!(replace(Some(&first), 3).await, None);
            assert_eq!(limiter.stored_limits(&level).await.unwrap(), Some(second));
        }
        let nothing = limiter.replace_limits(&ConfigLevel::System, None, [], None).await;
        assert!(matches!(nothing, Err(Error::Invalid(_))), "{nothing:?}");
    });
}

async fn capacity(limiter: &RateLimiter, entity: &str) -> u64 {
    limiter.effective_limits(entity, "gpt-4").await.unwrap().limits[0].capacity
}

/// The caller of `set_limits` goes away while the store writes.
#[test]
fn a_change_of_limits_that_is_dropped_is_enforced_here_once_it_is_written() {
    on_every_store(async |world| {
        for is_written in [true, false] {
            let limiter = world.limiter_with([without_refill("tpm", 100)]).await;
            let entity = if is_written { "before" } else { "after" };
            spend(&limiter, entity, "gpt-4", "tpm", 1).await;
            let gate = Gate::new();
            let hold = if is_written { Fault::HoldAfter } else { Fault::HoldBefore };
            world.store.script(Call::Write, hold(gate.clone()));
            {
                let limits = [without_refill("tpm", 7)];
                let mut change = Box::pin(limiter.set_limits(entity, None, limits));
                let mut at_work = Box::pin(gate.reached());
                finish(std::future::poll_fn(|context| {
                    assert!(change.as_mut().poll(context).is_pending());
                    at_work.as_mut().poll(context)
                }))
                .await;
            }
            gate.open();
            if !is_written {
                spend(&limiter, entity, "gpt-4", "tpm", 1).await;
                // The store writes after the caller has gone. Nothing tells this limiter of it.
                let other = world.limiter().await;
                own_limits(&other, entity, [without_refill("tpm", 7)]).await;
                assert_eq!(capacity(&limiter, entity).await, 100, "it is cached");
                world.advance(secs(30));
            }
            soon("the change is enforced", async || capacity(&limiter, entity).await == 7).await;
        }
    });
}
