//! Attacks on the promises about wrong clocks (`docs/clocks.md`).

use std::sync::Arc;
use std::time::Duration;

use zae_limiter::testing::{Clock as _, ManualClock};
use zae_limiter::{Limit, RateLimiter, Timestamp};

use crate::world::{
    Kind, NOW, World, child, exceeded, left, on_every_store, on_every_store_but, per_minute,
    refusal, secs, spend, without_refill,
};

const MINUTE: i64 = 60_000;
const HOUR: i64 = 60 * MINUTE;
const DAY: i64 = 24 * HOUR;
const YEAR: i64 = 365 * DAY;
const JUMPS: [i64; 6] = [3 * MINUTE, HOUR, YEAR, -3 * MINUTE, -HOUR, -YEAR];

fn by(millis: i64) -> Timestamp {
    Timestamp::from_millis(NOW.as_millis() + millis)
}

/// A limiter of another process, whose clock shows this time.
async fn started_at(world: &World, now: Timestamp) -> (RateLimiter, Arc<ManualClock>) {
    let clock = Arc::new(ManualClock::new(now));
    let limiter = world.builder().clock(Arc::clone(&clock) as _).open().await.unwrap();
    (limiter, clock)
}

/// How many of `turns` alternating calls of two processes are admitted. No time passes.
async fn taking_turns(first: &RateLimiter, second: &RateLimiter, turns: u32) -> u32 {
    let mut admitted = 0;
    for _ in 0..turns {
        for limiter in [first, second] {
            let taken = limiter.acquire("key", "gpt-4").take("rpm", 60).await;
            if let Ok(lease) = taken {
                lease.commit().await.unwrap();
                admitted += 60;
            }
        }
    }
    admitted
}

/// "A process that starts with a clock an hour ahead can take what one hour earns, at most twice the capacity", and
/// "in any interval t a limit admits at most capacity + rate × (t + s)".
#[test]
fn a_process_that_starts_an_hour_ahead_takes_twice_the_capacity_at_most() {
    on_every_store_but(&[Kind::DynamoDb], async |world| {
        let right = world.limiter_with([per_minute("rpm", 60)]).await;
        let (ahead, _) = started_at(&world, by(HOUR)).await;
        let admitted = taking_turns(&right, &ahead, 100).await;
        assert!(admitted <= 180, "{admitted} of a full bucket, an hour's refill and a rewind");
    });
}

/// The same promise. The machine's clock is an hour ahead for a minute. A process starts in that minute, and corrects
/// the time that was set right, for five minutes. The other one never believed the hour.
#[test]
fn a_process_that_started_during_a_short_jump_takes_twice_the_capacity_at_most() {
    on_every_store_but(&[Kind::DynamoDb], async |world| {
        let before = world.limiter_with([per_minute("rpm", 60)]).await;
        let _ = left(&before, "key", "gpt-4", "rpm").await;
        world.clock.correct(by(HOUR));
        let during = world.limiter().await;
        let _ = left(&during, "key", "gpt-4", "rpm").await;
        world.clock.correct(NOW);
        let admitted = taking_turns(&before, &during, 100).await;
        assert!(admitted <= 180, "{admitted} of a full bucket, an hour's refill and a rewind");
    });
}

/// A stated limit: "a clock that stands still is not noticed". It admits too little, never too much, and the calls are
/// served once it goes on.
#[test]
fn a_clock_that_stands_still_admits_nothing_more() {
    on_every_store_but(&[Kind::DynamoDb], async |world| {
        let limiter = world.limiter_with([per_minute("rpm", 60)]).await;
        spend(&limiter, "key", "gpt-4", "rpm", 60).await;
        world.advance(Duration::from_secs(3_600));
        world.clock.correct(NOW);
        let wait = refusal(&limiter, "key", "gpt-4", "rpm", 1).await.retry_after();
        assert!(wait <= secs(1), "{wait:?}");
        world.advance(secs(60));
        spend(&limiter, "key", "gpt-4", "rpm", 60).await;
        assert_eq!(left(&limiter, "key", "gpt-4", "rpm").await, 0);
    });
}

/// A stated limit: "a refusal within the five minutes may name a wait as long as the sleep". The call is served once the
/// clock is believed all the same.
#[test]
fn a_refusal_after_a_sleep_is_over_with_the_doubt() {
    on_every_store_but(&[Kind::DynamoDb], async |world| {
        let limiter = world.limiter_with([per_minute("rpm", 60)]).await;
        spend(&limiter, "key", "gpt-4", "rpm", 60).await;
        world.clock.correct(by(HOUR));
        let (started, _) = started_at(&world, by(HOUR)).await;
        spend(&started, "key", "gpt-4", "rpm", 60).await;
        let wait = refusal(&limiter, "key", "gpt-4", "rpm", 1).await.retry_after();
        assert!(wait <= secs(3_601), "{wait:?}");
        for _ in 0..6 {
            world.advance(secs(60));
            let _ = left(&limiter, "key", "gpt-4", "rpm").await;
        }
        spend(&limiter, "key", "gpt-4", "rpm", 60).await;
    });
}

/// A lease whose clock jumps: its settlement and its rollback use the corrected time, and give back exactly.
#[test]
fn a_lease_outlives_a_jump() {
    on_every_store(async |world| {
        for jump in JUMPS {
            let limiter =
                world.limiter_with([per_minute("rpm", 60), without_refill("all", 9)]).await;
            let (key, right) = (format!("key{jump}"), world.clock.now());
            let take = async |n| limiter.acquire(&key, "gpt-4").take("rpm", n).take("all", 1).await;
            let (back, mut more) = (take(20).await.unwrap(), take(40).await.unwrap());
            world.clock.correct(Timestamp::from_millis(right.as_millis() + jump));
            back.rollback().await.unwrap();
            more.settle("rpm", 100).unwrap();
            more.commit().await.unwrap();
            assert_eq!(left(&limiter, &key, "gpt-4", "rpm").await, -40, "{jump}");
            assert_eq!(left(&limiter, &key, "gpt-4", "all").await, 8, "{jump}");
            world.clock.correct(right);
            let refused = refusal(&limiter, &key, "gpt-4", "rpm", 1).await;
            assert_eq!(refused.retry_after(), secs(41), "{jump}");
        }
    });
}

/// A child and its parent, debt, limits that change: nothing is earned by a jump, and nothing is lost.
#[test]
fn a_cascade_with_debt_and_new_limits_outlives_jumps() {
    on_every_store(async |world| {
        for jump in JUMPS {
            let limiter = world.limiter_with([per_minute("rpm", 60)]).await;
            let (org, key, right) = (format!("org{jump}"), format!("key{jump}"), world.clock.now());
            limiter.create_entity(&org).await.unwrap();
            child(&limiter, &key, &org).await;
            let mut lease = limiter.acquire(&key, "gpt-4").take("rpm", 60).await.unwrap();
            lease.settle("rpm", 90).unwrap();
            lease.commit().await.unwrap();
            world.clock.correct(Timestamp::from_millis(right.as_millis() + jump));
            let refused = refusal(&limiter, &key, "gpt-4", "rpm", 1).await;
            assert_eq!(refused.retry_after(), secs(31), "{jump}");
            limiter.set_limits(&key, None, [per_minute("rpm", 120)]).await.unwrap();
            world.advance(secs(30));
            let refused = refusal(&limiter, &key, "gpt-4", "rpm", 1).await;
            assert!(refused.retry_after() <= secs(1), "{jump}: {:?}", refused.retry_after());
            world.advance(secs(30));
            spend(&limiter, &key, "gpt-4", "rpm", 30).await;
            exceeded(limiter.acquire(&key, "gpt-4").take("rpm", 1).await);
            world.clock.correct(Timestamp::from_millis(right.as_millis() + 60_000));
            exceeded(limiter.acquire(&key, "gpt-4").take("rpm", 1).await);
        }
    });
}

/// "Beyond it every call uses the corrected time", repeatedly: no jump fills a bucket, however many there are.
#[test]
fn many_jumps_earn_nothing() {
    on_every_store(async |world| {
        let limiter = world.limiter_with([per_minute("rpm", 60)]).await;
        spend(&limiter, "key", "gpt-4", "rpm", 60).await;
        for round in 1..=20_i64 {
            for jump in JUMPS {
                world.clock.correct(by(jump * round));
                exceeded(limiter.acquire("key", "gpt-4").take("rpm", 1).await);
                world.clock.correct(NOW);
                exceeded(limiter.acquire("key", "gpt-4").take("rpm", 1).await);
            }
        }
        world.advance(secs(30));
        spend(&limiter, "key", "gpt-4", "rpm", 30).await;
    });
}

/// A right clock is never corrected: after an idle week, and with a drift of a second an hour for a month.
#[test]
fn a_right_clock_and_a_slow_drift_are_used_as_they_are() {
    on_every_store(async |world| {
        let limiter = world.limiter_with([per_minute("rpm", 60)]).await;
        spend(&limiter, "key", "gpt-4", "rpm", 60).await;
        world.advance(Duration::from_secs(7 * 86_400));
        spend(&limiter, "key", "gpt-4", "rpm", 60).await;
        for hour in 0..720 {
            world.advance(Duration::from_secs(3_600));
            world.clock.correct(Timestamp::from_millis(world.clock.now().as_millis() + 1_000));
            spend(&limiter, "key", "gpt-4", "rpm", 60).await;
            let entity = limiter.create_entity(&format!("e{hour}")).await.unwrap();
            assert_eq!(entity.created_at, world.clock.now());
        }
    });
}

/// "A clock that was set right keeps its new time", and the age of what is cached does not follow the time of day: a
/// change by another process is seen within the minute of the cache.
#[test]
fn a_change_of_limits_is_seen_although_the_clock_was_set_back() {
    on_every_store(async |world| {
        for back in [100_000, 3 * MINUTE, HOUR] {
            let limiter = world.limiter_with([per_minute("rpm", 60)]).await;
            let (other, _) = started_at(&world, world.clock.now()).await;
            let key = format!("key{back}");
            spend(&limiter, &key, "gpt-4", "rpm", 1).await;
            world.clock.correct(Timestamp::from_millis(world.clock.now().as_millis() - back));
            other.set_system_defaults([per_minute("rpm", 10)], None).await.unwrap();
            world.advance(secs(61));
            let refused = limiter.acquire(&key, "gpt-4").take("rpm", 11).await;
            assert!(refused.is_err(), "{back}: the limit is 10 by now");
            limiter.set_system_defaults([per_minute("rpm", 60)], None).await.unwrap();
        }
    });
}

/// No time makes a call panic, and a full bucket serves at any time.
#[test]
fn extreme_times_are_served() {
    on_every_store(async |world| {
        for now in [i64::MIN, i64::MIN + 1, -YEAR, -1, 0, 1, 253_402_300_799_999] {
            let fresh = World::new_like(&world);
            let _setup = fresh.limiter_with([per_minute("rpm", 60)]).await;
            let (limiter, clock) = started_at(&fresh, Timestamp::from_millis(now)).await;
            spend(&limiter, "key", "gpt-4", "rpm", 60).await;
            exceeded(limiter.acquire("key", "gpt-4").take("rpm", 1).await);
            let _ = limiter.create_entity("org").await.unwrap();
            clock.correct(NOW);
            exceeded(limiter.acquire("key", "gpt-4").take("rpm", 1).await);
            clock.advance(secs(301));
            let _ = limiter.acquire("key", "gpt-4").take("rpm", 1).await;
            spend(&fresh.limiter().await, "other", "gpt-4", "rpm", 60).await;
        }
    });
}

/// "Zero switches the check off", and any other bound is one.
#[test]
fn odd_bounds_are_bounds() {
    on_every_store(async |world| {
        for bound in
            [Duration::ZERO, Duration::from_nanos(1), Duration::from_millis(1), Duration::MAX]
        {
            let fresh = World::new_like(&world);
            fresh.limiter_with([per_minute("rpm", 60)]).await;
            let limiter = fresh.builder().max_clock_skew(bound).open().await.unwrap();
            for _ in 0..5 {
                spend(&limiter, "key", "gpt-4", "rpm", 60).await;
                exceeded(limiter.acquire("key", "gpt-4").take("rpm", 1).await);
                fresh.advance(Duration::from_micros(60_000_500));
            }
        }
    });
}

/// Two clocks within the bound: what another process gives back is seen within about a second, although the clock of
/// the one that was refused was set back or forward meanwhile.
#[test]
fn a_refund_is_seen_although_the_clock_was_set() {
    on_every_store(async |world| {
        for jump in [100_000, -100_000, HOUR, -HOUR] {
            let limiter = world.limiter_with([without_refill("rpm", 60)]).await;
            let (other, clock) = started_at(&world, world.clock.now()).await;
            let (key, right) = (format!("key{jump}"), world.clock.now());
            let lease = other.acquire(&key, "gpt-4").take("rpm", 60).await.unwrap();
            exceeded(limiter.acquire(&key, "gpt-4").take("rpm", 1).await);
            world.clock.correct(Timestamp::from_millis(right.as_millis() + jump));
            lease.rollback().await.unwrap();
            world.advance(secs(2));
            clock.advance(secs(2));
            spend(&limiter, &key, "gpt-4", "rpm", 60).await;
            world.clock.correct(Timestamp::from_millis(right.as_millis() + 2_000));
        }
    });
}

/// "During these minutes tokens are earned by the time that passes. The time of a sleep is credited afterwards."
#[test]
fn a_bucket_earns_its_rate_before_and_after_a_jump_is_believed() {
    on_every_store_but(&[Kind::DynamoDb], async |world| {
        for jump in [10 * MINUTE, -10 * MINUTE, YEAR, -YEAR] {
            let limiter = world.limiter_with([per_minute("rpm", 60)]).await;
            let key = format!("key{jump}");
            spend(&limiter, &key, "gpt-4", "rpm", 60).await;
            world.clock.correct(Timestamp::from_millis(world.clock.now().as_millis() + jump));
            let mut admitted = 0;
            for _ in 0..1_200 {
                world.advance(secs(1));
                if let Ok(lease) = limiter.acquire(&key, "gpt-4").take("rpm", 1).await {
                    lease.commit().await.unwrap();
                    admitted += 1;
                }
            }
            let most = if jump > 0 { 1_260 } else { 1_200 };
            assert!((1_198..=most).contains(&admitted), "{jump}: {admitted} in 1200 s");
        }
    });
}

/// A process whose clock is an hour behind from its start: it takes nothing twice, and the others lose nothing.
#[test]
fn a_process_that_starts_an_hour_behind_harms_nobody() {
    on_every_store_but(&[Kind::DynamoDb], async |world| {
        let right = world.limiter_with([per_minute("rpm", 60)]).await;
        let (behind, clock) = started_at(&world, by(-HOUR)).await;
        let mut admitted = 0;
        for _ in 0..120 {
            admitted += taking_turns(&right, &behind, 1).await;
            world.advance(secs(1));
            clock.advance(secs(1));
        }
        assert!(admitted <= 60 + 120 + 60, "{admitted} in two minutes");
    });
}

/// A stated limit: readings are compared with "the last reading of this limiter". A second limiter that opens after the
/// jump believes the clock, and the first one does not.
#[test]
fn each_limiter_of_a_process_compares_its_own_readings() {
    on_every_store_but(&[Kind::DynamoDb], async |world| {
        let first = world.limiter_with([per_minute("rpm", 60)]).await;
        let _ = left(&first, "key", "gpt-4", "rpm").await;
        world.clock.correct(by(YEAR));
        let second = world.limiter().await;
        assert_eq!(second.create_entity("org").await.unwrap().created_at, by(YEAR));
        assert_eq!(first.create_entity("team").await.unwrap().created_at, NOW);
    });
}

/// "Within the bound the limiter uses the clock as it is": a bucket that fills in a second expires after seven. A
/// process that lags by more must not let it expire for the others.
#[test]
fn a_clock_that_lags_within_the_bound_lets_no_bucket_expire() {
    on_every_store(async |world| {
        for lag in [1_000, 10_000, 100_000, 119_000] {
            let limits = [Limit::per("rps", 60, secs(1))];
            let right = world.limiter_with(limits).await;
            let (behind, _) = started_at(&world, by(-lag)).await;
            let (key, mut admitted) = (format!("key{lag}"), 0);
            for _ in 0..300 {
                for limiter in [&right, &behind] {
                    if let Ok(lease) = limiter.acquire(&key, "gpt-4").take("rps", 30).await {
                        lease.commit().await.unwrap();
                        admitted += 30;
                    }
                }
            }
            assert!(admitted <= 60 + 60 * lag / 1_000, "{admitted} with a lag of {lag} ms");
        }
    });
}

/// Usage is recorded once, whatever the clocks of those who took it show.
#[test]
fn usage_by_wrong_clocks_is_recorded_once() {
    on_every_store_but(&[Kind::DynamoDb], async |world| {
        let right = world.limiter_with([without_refill("rpm", 1_000)]).await;
        let (ahead, _) = started_at(&world, by(HOUR)).await;
        let (behind, _) = started_at(&world, by(-DAY)).await;
        for _ in 0..10 {
            for limiter in [&right, &ahead, &behind] {
                spend(limiter, "key", "gpt-4", "rpm", 1).await;
            }
            world.clock.correct(by(DAY));
            spend(&right, "key", "gpt-4", "rpm", 1).await;
            world.clock.correct(NOW);
        }
        let records = right.usage().entity("key").pages().unwrap().all().await.unwrap();
        let tokens = records.iter().flat_map(|usage| usage.consumed.values());
        assert_eq!(tokens.map(|used| used.whole_tokens()).sum::<i64>(), 40, "{records:?}");
    });
}
