//! Attacks on cancellation: a dropped change leaves no stale cache in the process that began it.

use std::future::Future;
use std::pin::{Pin, pin};

use zae_limiter::RateLimiter;

use crate::world::{
    Kind, World, left, on_every_store, per_minute, poll_once, secs, settle_down, spend, turn,
};

/// Polls a future so many times, and then drops it.
async fn poll_and_drop(polls: usize, future: impl Future) {
    let mut future: Pin<&mut _> = pin!(future);
    for _ in 0..polls {
        if poll_once(future.as_mut()).is_ready() {
            return;
        }
        turn().await;
    }
}

/// Lets a write that was dropped in progress reach the store. SQLite's writes are first come, first served, so behind a
/// later one it has ended. A call to a table has no order: it may take effect at any time.
async fn settle_writes(fresh: &RateLimiter, id: &str) {
    fresh.create_entity(&format!("{id}-later")).await.unwrap();
    settle_down().await;
}

/// Requires that a process that cached the limits of an entity sees what is stored. Returns whether it did at once: a
/// dropped write to a table may take effect after the process has read. Then it sees that after the deadline of a change.
async fn sees_what_is_stored(
    world: &World,
    cached: &RateLimiter,
    fresh: &RateLimiter,
    key: &str,
) -> bool {
    let stored = async || {
        fresh.invalidate_cache();
        left(fresh, key, "gpt-4", "rpm").await
    };
    if left(cached, key, "gpt-4", "rpm").await == stored().await {
        return true;
    }
    world.advance(secs(10));
    settle_down().await;
    assert_eq!(left(cached, key, "gpt-4", "rpm").await, stored().await, "{key}");
    false
}

/// Setting and deleting limits, dropped after any poll: the process sees the limits that are stored.
#[test]
fn a_dropped_change_of_limits_leaves_no_stale_cache() {
    on_every_store(async |world| {
        let limiter = world.limiter_with([per_minute("rpm", 60)]).await;
        let fresh = world.limiter().await;
        let mut late = 0;
        for polls in 0..40 {
            let (set, deleted) = (format!("set{polls}"), format!("deleted{polls}"));
            fresh.set_limits(&deleted, None, [per_minute("rpm", 10)]).await.unwrap();
            assert_eq!(left(&limiter, &set, "gpt-4", "rpm").await, 60);
            assert_eq!(left(&limiter, &deleted, "gpt-4", "rpm").await, 10);
            poll_and_drop(polls, limiter.set_limits(&set, None, [per_minute("rpm", 10)])).await;
            poll_and_drop(polls, limiter.delete_limits(&deleted, None)).await;
            for key in [set, deleted] {
                settle_writes(&fresh, &key).await;
                late += u32::from(!sees_what_is_stored(&world, &limiter, &fresh, &key).await);
            }
        }
        assert!(late == 0 || world.is(Kind::DynamoDb), "{late} changes were seen late");
    });
}

/// Deleting and creating an entity with a parent, dropped after any poll: the process takes from the stored chain.
#[test]
fn a_dropped_change_of_an_entity_leaves_no_stale_chain() {
    on_every_store(async |world| {
        let limiter = world.limiter_with([per_minute("rpm", 60)]).await;
        let fresh = world.limiter().await;
        let mut late = 0;
        for polls in 0..40 {
            let (key, org) = (format!("key{polls}"), format!("org{polls}"));
            limiter.create_entity(&org).await.unwrap();
            // The process knows an entity without a parent.
            spend(&limiter, &key, "gpt-4", "rpm", 1).await;
            let created = limiter.create_entity(&key).parent(&org).cascade();
            poll_and_drop(polls, created.into_future()).await;
            settle_writes(&fresh, &key).await;
            let is_child = async || {
                fresh.invalidate_cache();
                fresh.entity(&key).await.unwrap().is_some()
            };
            let before = is_child().await;
            spend(&limiter, &key, "gpt-4", "rpm", 1).await;
            let taken = 60 - left(&fresh, &org, "gpt-4", "rpm").await;
            let after = is_child().await;
            if before == after {
                assert_eq!(taken, i64::from(before), "{polls} polls");
            } else {
                late += 1;
            }
        }
        assert!(late == 0 || world.is(Kind::DynamoDb), "{late} entities were created late");
    });
}

/// Deleting an entity, and changing the defaults of a resource or of the system, dropped after any poll: the process sees
/// the limits that are stored.
#[test]
fn a_dropped_deletion_or_change_of_defaults_leaves_no_stale_cache() {
    on_every_store(async |world| {
        let limiter = world.limiter_with([per_minute("rpm", 60)]).await;
        let fresh = world.limiter().await;
        let mut late = 0;
        for polls in 0..40 {
            let (key, on) = (format!("gone{polls}"), format!("resource{polls}"));
            fresh.create_entity(&key).await.unwrap();
            fresh.set_limits(&key, None, [per_minute("rpm", 10)]).await.unwrap();
            assert_eq!(left(&limiter, &key, "gpt-4", "rpm").await, 10);
            poll_and_drop(polls, limiter.delete_entity(&key)).await;
            settle_writes(&fresh, &key).await;
            late += u32::from(!sees_what_is_stored(&world, &limiter, &fresh, &key).await);

            let agree = async || {
                let cached = left(&limiter, "key", &on, "rpm").await;
                fresh.invalidate_cache();
                cached == left(&fresh, "key", &on, "rpm").await
            };
            for step in ["resource", "system", "deleted"] {
                assert!(agree().await, "before {step}");
                let limits = [per_minute("rpm", 100 + polls as u64)];
                match step {
                    "resource" => {
                        poll_and_drop(polls, limiter.set_resource_defaults(&on, limits)).await;
                    }
                    "system" => {
                        poll_and_drop(polls, limiter.set_system_defaults(limits, None)).await;
                    }
                    _ => poll_and_drop(polls, limiter.delete_resource_defaults(&on)).await,
                }
                settle_writes(&fresh, &format!("{key}-{step}")).await;
                if !agree().await {
                    late += 1;
                    world.advance(secs(10));
                    settle_down().await;
                    assert!(agree().await, "{step}, {polls} polls");
                }
            }
        }
        assert!(late == 0 || world.is(Kind::DynamoDb), "{late} changes were seen late");
    });
}
