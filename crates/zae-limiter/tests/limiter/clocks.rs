//! Clocks that are wrong, and clocks that are set: what is compared with what, and what follows.

use std::sync::Arc;
use std::time::Duration;

use zae_limiter::store::Store;
use zae_limiter::testing::{Clock as _, ManualClock};
use zae_limiter::{RateLimiter, Timestamp};

use crate::world::{
    Kind, NOW, World, exceeded, left, on, on_every_store, on_every_store_but, per_minute, refusal,
    secs, spend, status, without_refill,
};

const MINUTE: i64 = 60_000;
const HOUR: i64 = 60 * MINUTE;
const YEAR: i64 = 365 * 24 * HOUR;

fn by(millis: i64) -> Timestamp {
    Timestamp::from_millis(NOW.as_millis() + millis)
}

/// A limiter of another process, whose clock differs from that of the world.
async fn elsewhere(world: &World, millis: i64) -> (RateLimiter, Arc<ManualClock>) {
    let clock = Arc::new(ManualClock::new(by(millis)));
    let limiter = world.builder().clock(Arc::clone(&clock) as _).open().await.unwrap();
    (limiter, clock)
}

#[test]
fn a_clock_that_jumps_in_a_process_neither_fills_nor_freezes_a_bucket() {
    on_every_store(async |world| {
        for jump in [3 * MINUTE, HOUR, YEAR, -3 * MINUTE, -HOUR, -YEAR] {
            let limiter = world.limiter_with([per_minute("rpm", 60)]).await;
            let entity = format!("key{jump}");
            let right = world.clock.now();
            spend(&limiter, &entity, "gpt-4", "rpm", 60).await;
            let jumped = Timestamp::from_millis(right.as_millis() + jump);
            world.clock.correct(jumped);
            assert_eq!(limiter.now(), right, "{jump}");
            let refused = refusal(&limiter, &entity, "gpt-4", "rpm", 1).await;
            assert_eq!(refused.retry_after(), secs(1), "{jump}");
            world.advance(secs(30));
            spend(&limiter, &entity, "gpt-4", "rpm", 30).await;
            let refused = refusal(&limiter, &entity, "gpt-4", "rpm", 1).await;
            assert_eq!(refused.retry_after(), secs(1), "{jump}");
            // It is set right again, half a minute later.
            world.clock.correct(Timestamp::from_millis(right.as_millis() + 30_000));
            world.advance(secs(30));
            spend(&limiter, &entity, "gpt-4", "rpm", 30).await;
            refusal(&limiter, &entity, "gpt-4", "rpm", 1).await;
        }
    });
}

#[test]
fn one_call_from_a_clock_that_is_ahead_freezes_no_bucket_of_an_embedded_store() {
    // DynamoDB needs the table's date for that: see `dynamodb/tests/clocks.rs`.
    on_every_store_but(&[Kind::DynamoDb], async |world| {
        let limiter = world.limiter_with([per_minute("rpm", 60)]).await;
        for ahead in [5 * MINUTE, HOUR, YEAR] {
            let entity = format!("key{ahead}");
            let (ahead, _) = elsewhere(&world, ahead).await;
            spend(&ahead, &entity, "gpt-4", "rpm", 60).await;
            assert_eq!(status(&limiter, &entity, "gpt-4", "rpm").await.full_after, secs(60));
            let refused = refusal(&limiter, &entity, "gpt-4", "rpm", 30).await;
            assert_eq!(refused.retry_after(), secs(30));
        }
        world.advance(secs(30));
        for ahead in [5 * MINUTE, HOUR, YEAR] {
            let entity = format!("key{ahead}");
            spend(&limiter, &entity, "gpt-4", "rpm", 30).await;
            refusal(&limiter, &entity, "gpt-4", "rpm", 1).await;
        }
    });
}

#[test]
fn a_refill_time_within_the_bound_stays() {
    on_every_store_but(&[Kind::DynamoDb], async |world| {
        let limiter = world.limiter_with([per_minute("rpm", 60)]).await;
        let (ahead, _) = elsewhere(&world, 2 * MINUTE).await;
        spend(&ahead, "key", "gpt-4", "rpm", 60).await;
        let refused = refusal(&limiter, "key", "gpt-4", "rpm", 1).await;
        assert_eq!(refused.retry_after(), secs(121), "two minutes, and a second for the token");
    });
}

/// Two processes that disagree must not take turns: one rewinds, the other refills what it was rewound by.
#[test]
fn a_process_that_corrects_its_clock_rewinds_nothing() {
    on_every_store_but(&[Kind::DynamoDb], async |world| {
        let limiter = world.limiter_with([per_minute("rpm", 60)]).await;
        spend(&limiter, "key", "gpt-4", "rpm", 60).await;
        // The machine was suspended for an hour. The first process cannot know, the second has just begun.
        world.clock.correct(by(HOUR));
        let (started, clock) = elsewhere(&world, HOUR).await;
        spend(&started, "key", "gpt-4", "rpm", 60).await;
        for _ in 0..10 {
            exceeded(limiter.acquire("key", "gpt-4").take("rpm", 1).await);
            exceeded(started.acquire("key", "gpt-4").take("rpm", 1).await);
        }
        // After five minutes the first process believes the clock.
        for _ in 0..5 {
            world.advance(secs(60));
            clock.advance(secs(60));
            spend(&started, "key", "gpt-4", "rpm", 60).await;
            exceeded(limiter.acquire("key", "gpt-4").take("rpm", 1).await);
        }
        world.advance(secs(60));
        spend(&limiter, "key", "gpt-4", "rpm", 60).await;
    });
}

#[test]
fn the_bound_can_be_set_and_switched_off() {
    on_every_store_but(&[Kind::DynamoDb], async |world| {
        let limits = [per_minute("rpm", 60)];
        let limiter = world.limiter_with(limits).await;
        let (ahead, _) = elsewhere(&world, HOUR).await;
        spend(&ahead, "key", "gpt-4", "rpm", 60).await;
        for (bound, wait) in [(Duration::ZERO, 3_601), (secs(1_800), 3_601), (secs(1_799), 1)] {
            let other = world.builder().max_clock_skew(bound).open().await.unwrap();
            let refused = refusal(&other, "key", "gpt-4", "rpm", 1).await;
            assert_eq!(refused.retry_after(), secs(wait), "{bound:?}");
        }
        drop(limiter);
    });
}

#[test]
fn calls_that_wait_are_not_disturbed_by_a_clock_that_jumps() {
    // The other stores answer at a moment that the test cannot see.
    on(Kind::Memory, async |world| {
        for jump in [HOUR, -HOUR] {
            let limiter = world.limiter_with([per_minute("rpm", 60)]).await;
            let entity = format!("key{jump}");
            let right = world.clock.now();
            spend(&limiter, &entity, "gpt-4", "rpm", 60).await;
            let work = limiter.acquire(&entity, "gpt-4").take("rpm", 3).wait_up_to(secs(10));
            let mut work = std::pin::pin!(work.into_future());
            assert!(crate::world::poll_once(work.as_mut()).is_pending());
            world.clock.correct(Timestamp::from_millis(right.as_millis() + jump));
            world.advance(secs(3));
            crate::world::finish(work).await.unwrap().commit().await.unwrap();
            world.clock.correct(Timestamp::from_millis(right.as_millis() + 3_000));
        }
    });
}

#[test]
fn records_and_audit_events_have_the_corrected_time() {
    on_every_store(async |world| {
        let limiter = world.limiter_with([without_refill("rpm", 5)]).await;
        let _ = left(&limiter, "key", "gpt-4", "rpm").await;
        world.clock.correct(by(YEAR));
        let entity = limiter.create_entity("org").await.unwrap();
        assert_eq!(entity.created_at, NOW);
        let registered = limiter.namespaces().register("team").await.unwrap();
        assert_eq!(registered.created_at, NOW);
        let events = limiter.audit_events("org").unwrap().all().await.unwrap();
        assert!(events.iter().all(|event| event.at == NOW), "{events:?}");
        let _: &Arc<dyn Store> = limiter.store();
    });
}
