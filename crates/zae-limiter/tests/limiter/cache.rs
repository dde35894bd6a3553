//! Stored limits are read once and cached.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use zae_limiter::store::{BoxFuture, StoreErrorKind};
use zae_limiter::testing::{Clock, ManualClock};
use zae_limiter::{Error, RateLimiter, Timestamp};
use zae_limiter_testkit::{Call, Fault, Gate};

use crate::world::{
    NOW, World, child, drive, finish, left, ms, on_every_store, own_limits, per_minute, refusal,
    secs, settle_down, spend, turn, without_refill,
};

async fn reads(world: &World, during: impl AsyncFnOnce()) -> usize {
    let before = world.store.calls(Call::Get);
    during().await;
    world.store.calls(Call::Get) - before
}

#[test]
fn a_miss_is_one_read_and_a_hit_is_none() {
    on_every_store(async |world| {
        let limiter = world.limiter_with([without_refill("rpm", 100)]).await;
        let one = async || spend(&limiter, "key", "gpt-4", "rpm", 1).await;
        assert_eq!(reads(&world, one).await, 1);
        for _ in 0..10 {
            assert_eq!(reads(&world, one).await, 0);
        }
        world.advance(secs(60) - ms(1));
        assert_eq!(reads(&world, one).await, 0, "just before the time is over");
        world.advance(ms(1));
        assert_eq!(reads(&world, one).await, 1, "when the time is over");
        assert_eq!(reads(&world, one).await, 0);
    });
}

/// A clock that counts how often a moment was read: once for each plan.
#[derive(Debug)]
struct CountingClock {
    clock: Arc<ManualClock>,
    reads: AtomicUsize,
}

impl Clock for CountingClock {
    fn now(&self) -> Timestamp {
        self.reads.fetch_add(1, Ordering::Relaxed);
        self.clock.now()
    }

    fn sleep(&self, wait: Duration) -> BoxFuture<'_, ()> {
        self.clock.sleep(wait)
    }

    fn stopwatch(&self) -> Duration {
        self.clock.stopwatch()
    }
}

#[test]
fn a_call_looks_each_level_up_once_and_makes_one_plan() {
    on_every_store(async |world| {
        let clock = Arc::clone(&world.clock);
        let clock = Arc::new(CountingClock { clock, reads: AtomicUsize::new(0) });
        let builder = world.builder().clock(Arc::clone(&clock) as Arc<dyn Clock>);
        let limiter = builder.open().await.unwrap();
        limiter.set_system_defaults([without_refill("rpm", 100)], None).await.unwrap();
        limiter.create_entity("org").await.unwrap();
        child(&limiter, "team", "org").await;
        child(&limiter, "key", "team").await;
        // Hits, misses, and plans.
        let counted = async |entity: &str| {
            let (before, reads) = (limiter.cache_stats(), clock.reads.load(Ordering::Relaxed));
            let lease = limiter.acquire(entity, "gpt-4").take("rpm", 1).await.unwrap();
            let (after, now) = (limiter.cache_stats(), clock.reads.load(Ordering::Relaxed));
            lease.commit().await.unwrap();
            (after.hits - before.hits, after.misses - before.misses, now - reads)
        };
        assert_eq!(counted("org").await, (0, 1, 1), "nothing is cached");
        assert_eq!(counted("org").await, (1, 0, 1));
        assert_eq!(counted("key").await, (1, 2, 1), "one ancestor is cached");
        assert_eq!(counted("key").await, (3, 0, 1));
        world.advance(secs(60));
        assert_eq!(counted("team").await, (0, 2, 1));
        assert_eq!(counted("key").await, (2, 1, 1));
    });
}

/// A retry is another attempt: it reads the clock and the cache again.
#[test]
fn a_retry_makes_a_plan_of_its_own() {
    on_every_store(async |world| {
        let limiter = world.limiter_with([without_refill("rpm", 100)]).await;
        spend(&limiter, "key", "gpt-4", "rpm", 1).await;
        let before = limiter.cache_stats().hits;
        world.store.script(Call::Acquire, Fault::FailBefore(StoreErrorKind::Unavailable));
        let call = async { spend(&limiter, "key", "gpt-4", "rpm", 1).await };
        drive(&world, call).await;
        assert_eq!(limiter.cache_stats().hits - before, 2);
    });
}

#[test]
fn that_nothing_is_stored_is_remembered_too() {
    on_every_store(async |world| {
        let limiter = world.limiter().await;
        let unknown = async || {
            let call = limiter.acquire("key", "gpt-4").take("rpm", 1).await;
            assert!(matches!(call, Err(Error::UnknownLimits { .. })), "{call:?}");
        };
        assert_eq!(reads(&world, unknown).await, 1);
        assert_eq!(reads(&world, unknown).await, 0);
        limiter.set_limits("key", None, [per_minute("rpm", 1)]).await.unwrap();
        spend(&limiter, "key", "gpt-4", "rpm", 1).await;
    });
}

#[test]
fn a_thousand_callers_that_miss_together_read_once() {
    on_every_store(async |world| {
        let limiter = world.limiter_with([without_refill("rpm", 1_000)]).await;
        let gate = Gate::new();
        world.store.script(Call::Get, Fault::HoldBefore(gate.clone()));
        let before = world.store.calls(Call::Get);
        let callers: Vec<_> = (0..1_000)
            .map(|_| {
                let limiter = limiter.clone();
                tokio::spawn(async move { spend(&limiter, "key", "gpt-4", "rpm", 1).await })
            })
            .collect();
        gate.reached().await;
        settle_down().await;
        assert_eq!(world.store.calls(Call::Get), before + 1);
        gate.open();
        for caller in callers {
            caller.await.unwrap();
        }
        assert_eq!(world.store.calls(Call::Get), before + 1);
        let stats = limiter.cache_stats();
        assert_eq!((stats.misses, stats.loads), (1_000, 1));
        refusal(&limiter, "key", "gpt-4", "rpm", 1).await;
    });
}

#[test]
fn a_caller_that_gives_up_hands_the_read_on_to_the_next() {
    on_every_store(async |world| {
        let limiter = world.limiter_with([without_refill("rpm", 10)]).await;
        let gate = Gate::new();
        world.store.script(Call::Get, Fault::HoldBefore(gate.clone()));
        let call = |limiter: RateLimiter| {
            tokio::spawn(async move { spend(&limiter, "key", "gpt-4", "rpm", 1).await })
        };
        let first = call(limiter.clone());
        gate.reached().await;
        let second = call(limiter.clone());
        settle_down().await;
        first.abort();
        finish(second).await.unwrap();
        assert_eq!(left(&limiter, "key", "gpt-4", "rpm").await, 9);
    });
}

#[test]
fn without_a_time_to_live_every_call_reads() {
    on_every_store(async |world| {
        let builder = world.builder().cache_ttl(Duration::ZERO);
        let limiter = builder.open().await.unwrap();
        limiter.set_system_defaults([without_refill("rpm", 100)], None).await.unwrap();
        let one = async || spend(&limiter, "key", "gpt-4", "rpm", 1).await;
        for _ in 0..3 {
            assert_eq!(reads(&world, one).await, 1);
        }
        assert_eq!(limiter.cache_stats().entries, 0);
        let other = world.limiter().await;
        other.set_system_defaults([without_refill("rpm", 50)], None).await.unwrap();
        let too_much = limiter.acquire("key", "gpt-4").take("rpm", 51).await;
        assert!(matches!(too_much, Err(Error::ExceedsCapacity(_))), "{too_much:?}");
    });
}

#[test]
fn a_clock_that_ran_back_does_not_make_an_entry_last() {
    on_every_store(async |world| {
        let limiter = world.limiter_with([without_refill("rpm", 100)]).await;
        let one = async || spend(&limiter, "key", "gpt-4", "rpm", 1).await;
        one().await;
        // Threads that read the clock at about the same time may see it so; then it went back.
        let before = |millis| Timestamp::from_millis(NOW.as_millis() - millis);
        world.clock.correct(before(1_000));
        assert_eq!(reads(&world, one).await, 0);
        world.clock.correct(before(1_001));
        assert_eq!(reads(&world, one).await, 1);
        assert_eq!(reads(&world, one).await, 0);
    });
}

#[test]
fn a_change_is_seen_within_one_ttl_however_far_the_clock_is_set_back() {
    on_every_store(async |world| {
        let hours = |hours: u64| secs(hours * 3_600);
        for (ttl, back) in [(secs(60), secs(30)), (secs(60), hours(1)), (hours(3), hours(1))] {
            let here = world.limiter_with([without_refill("rpm", 100)]).await;
            let there = world.builder().cache_ttl(ttl).open().await.unwrap();
            spend(&there, "key", "gpt-4", "rpm", 1).await;
            let now = world.clock.now().as_millis();
            let back = i64::try_from(back.as_millis()).unwrap();
            world.clock.correct(Timestamp::from_millis(now - back));
            spend(&there, "key", "gpt-4", "rpm", 1).await;
            here.set_system_defaults([without_refill("rpm", 50)], None).await.unwrap();
            world.advance(ttl);
            let limits = there.effective_limits("key", "gpt-4").await.unwrap().limits;
            assert_eq!(limits[0].capacity, 50, "a TTL of {ttl:?}, set back by {back} ms");
        }
    });
}

#[test]
fn a_change_is_seen_within_one_ttl_if_the_clock_is_set_back_after_it() {
    on_every_store(async |world| {
        for back in [5, 57, 119] {
            let here = world.limiter_with([without_refill("rpm", 100)]).await;
            let there = world.builder().open().await.unwrap();
            here.set_system_defaults([without_refill("rpm", 100)], None).await.unwrap();
            spend(&there, "key", "gpt-4", "rpm", 1).await;
            world.advance(secs(1));
            here.set_system_defaults([without_refill("rpm", 50)], None).await.unwrap();
            world.advance(secs(57));
            spend(&there, "key", "gpt-4", "rpm", 1).await;
            let now = world.clock.now().as_millis();
            world.clock.correct(Timestamp::from_millis(now - back * 1_000));
            world.advance(secs(2));
            let limits = there.effective_limits("key", "gpt-4").await.unwrap().limits;
            assert_eq!(limits[0].capacity, 50, "set back by {back} s");
        }
    });
}

#[test]
fn the_number_of_entries_has_a_bound() {
    on_every_store(async |world| {
        for capacity in [0, 1, 2, 100, 200] {
            let builder = world.builder().cache_capacity(capacity);
            let limits = [without_refill("rpm", 1_000)];
            let limiter = builder.default_limits(limits).open().await.unwrap();
            for at in 0..500 {
                spend(&limiter, &format!("key-{at}"), "gpt-4", "rpm", 1).await;
            }
            let entries = limiter.cache_stats().entries;
            assert!(entries <= capacity.max(1), "{entries} where {capacity} are allowed");
            for _ in 0..3 {
                spend(&limiter, "key-0", "gpt-4", "rpm", 1).await;
            }
        }
    });
}

#[test]
fn the_cache_can_be_cleared() {
    on_every_store(async |world| {
        let limiter = world.limiter_with([without_refill("rpm", 100)]).await;
        let one = async || spend(&limiter, "key", "gpt-4", "rpm", 1).await;
        one().await;
        one().await;
        let before = limiter.cache_stats();
        assert!(before.hits >= 1);
        assert_eq!((before.misses, before.loads, before.entries), (1, 1, 1));
        limiter.clone().invalidate_cache();
        assert_eq!(limiter.cache_stats().entries, 0);
        assert_eq!(reads(&world, one).await, 1);
        let after = limiter.cache_stats();
        assert_eq!((after.misses, after.loads, after.entries), (2, 2, 1));
        assert_eq!(after.hits, before.hits);
    });
}

#[test]
fn a_change_of_an_entity_drops_its_entries_on_all_resources() {
    on_every_store(async |world| {
        let limiter = world.limiter_with([without_refill("rpm", 100)]).await;
        for count in [1, 64, 70] {
            for at in 0..count {
                spend(&limiter, "key", &format!("model-{at}"), "rpm", 1).await;
            }
            own_limits(&limiter, "key", [without_refill("rpm", 50)]).await;
            for at in 0..count {
                let on = format!("model-{at}");
                let too_much = limiter.acquire("key", &on).take("rpm", 51).await;
                assert!(matches!(too_much, Err(Error::ExceedsCapacity(_))), "{on}: {too_much:?}");
            }
            limiter.delete_limits("key", None).await.unwrap();
        }
    });
}

/// Holds a read that has the old limits already, makes the change, and lets the read go on.
async fn race(world: &World, change: impl AsyncFn(&RateLimiter)) {
    let limiter = world.limiter_with([without_refill("rpm", 100)]).await;
    let gate = Gate::new();
    world.store.script(Call::Get, Fault::HoldAfter(gate.clone()));
    let late = {
        let limiter = limiter.clone();
        tokio::spawn(async move { limiter.acquire("key", "gpt-4").take("rpm", 1).await.map(drop) })
    };
    gate.reached().await;
    finish(change(&limiter)).await;
    let new_limits_hold = async |when| {
        let too_much = limiter.acquire("key", "gpt-4").take("rpm", 11).await;
        assert!(matches!(too_much, Err(Error::ExceedsCapacity(_))), "{when}: {too_much:?}");
    };
    finish(new_limits_hold("while the old read is under way")).await;
    gate.open();
    late.await.unwrap().unwrap();
    for _ in 0..10 {
        turn().await;
        new_limits_hold("after the old read").await;
    }
}

#[test]
fn a_read_that_is_overtaken_by_a_change_leaves_nothing_stale() {
    on_every_store(async |world| {
        let lower = || [without_refill("rpm", 10)];
        race(&world, async |limiter| {
            limiter.set_limits("key", Some("gpt-4"), lower()).await.unwrap();
        })
        .await;
        race(&world, async |limiter| {
            limiter.delete_limits("key", Some("gpt-4")).await.unwrap();
            limiter.set_limits("key", None, lower()).await.unwrap();
        })
        .await;
        race(&world, async |limiter| {
            limiter.delete_limits("key", None).await.unwrap();
            limiter.set_resource_defaults("gpt-4", lower()).await.unwrap();
        })
        .await;
        race(&world, async |limiter| {
            limiter.delete_resource_defaults("gpt-4").await.unwrap();
            limiter.set_system_defaults(lower(), None).await.unwrap();
        })
        .await;
        race(&world, async |limiter| {
            limiter.create_entity("org").await.unwrap();
            own_limits(limiter, "org", lower()).await;
            child(limiter, "key", "org").await;
        })
        .await;
    });
}
