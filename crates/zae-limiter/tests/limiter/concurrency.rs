//! Many callers at once.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use zae_limiter::{Error, RateLimiter};

use crate::world::{
    World, child, on_every_store_with_threads, own_limits, secs, soon, without_refill,
};

const TASKS: u64 = 64;

/// A root with a thousand tokens, four teams under it, four keys under each.
async fn family(world: &World) -> RateLimiter {
    let limiter = world.limiter().await;
    limiter.create_entity("root").await.unwrap();
    own_limits(&limiter, "root", [without_refill("tpm", 1_000)]).await;
    for team in 0..4 {
        let team_id = format!("team-{team}");
        child(&limiter, &team_id, "root").await;
        for key in 0..4 {
            child(&limiter, &format!("key-{team}-{key}"), &team_id).await;
        }
    }
    limiter.set_system_defaults([without_refill("tpm", 5_000)], None).await.unwrap();
    limiter
}

fn key_of(task: u64) -> String {
    format!("key-{}-{}", task % 4, task / 4 % 4)
}

/// Net consumption of everybody, level by level.
async fn consumed(world: &World, limiter: &RateLimiter) -> (i64, i64, i64) {
    let (mut root, mut teams, mut keys) = (0, 0, 0);
    let of = async |who: &str| match world.bucket(limiter, who, "gpt-4").await {
        Some(bucket) => {
            let (cell, rate) = bucket.cell("tpm").unwrap();
            assert_eq!(cell.tokens.get(), rate.capacity().get() - cell.consumed.get(), "{who}");
            cell.consumed.get() / 1_000
        }
        None => 0,
    };
    root += of("root").await;
    for team in 0..4 {
        teams += of(&format!("team-{team}")).await;
        for key in 0..4 {
            keys += of(&format!("key-{team}-{key}")).await;
        }
    }
    (root, teams, keys)
}

#[test]
fn exactly_what_the_root_holds_is_admitted_to_many_tasks() {
    on_every_store_with_threads(async |world| {
        let limiter = family(&world).await;
        let tasks = (0..TASKS).map(|task| {
            // Every other one is a limiter of its own on the same store.
            let builder = world.builder();
            let shared = limiter.clone();
            tokio::spawn(async move {
                let limiter = if task % 2 == 0 { shared } else { builder.open().await.unwrap() };
                for admitted in 0..2_000 {
                    match limiter.acquire(&key_of(task), "gpt-4").take("tpm", 1).await {
                        Ok(lease) => lease.commit().await.unwrap(),
                        Err(Error::Exceeded(refusal)) => {
                            assert_eq!(refusal.primary_violation().entity_id.as_str(), "root");
                            return admitted;
                        }
                        Err(other) => panic!("{other:?}"),
                    }
                }
                panic!("one task alone was admitted twice what there is");
            })
        });
        let mut admitted = 0;
        for task in tasks.collect::<Vec<_>>() {
            admitted += task.await.unwrap();
        }
        assert_eq!(admitted, 1_000);
        assert_eq!(consumed(&world, &limiter).await, (1_000, 1_000, 1_000));
    });
}

#[test]
fn what_is_left_is_what_was_there_less_what_was_kept() {
    on_every_store_with_threads(async |world| {
        let limiter = family(&world).await;
        let kept = Arc::new(AtomicU64::new(0));
        let tasks = (0..TASKS).map(|task| {
            let (limiter, kept) = (limiter.clone(), Arc::clone(&kept));
            tokio::spawn(async move {
                let mut random = fastrand::Rng::with_seed(task);
                for _ in 0..40 {
                    let tokens = random.u64(0..5);
                    let taken = limiter.acquire(&key_of(task), "gpt-4").take("tpm", tokens).await;
                    let mut lease = match taken {
                        Ok(lease) => lease,
                        Err(Error::Exceeded(_)) => continue,
                        Err(other) => panic!("{other:?}"),
                    };
                    match random.u8(0..4) {
                        0 => lease.rollback().await.unwrap(),
                        1 => drop(lease),
                        2 => {
                            let actual = random.u64(0..6);
                            lease.settle("tpm", actual).unwrap();
                            lease.commit().await.unwrap();
                            kept.fetch_add(actual, Ordering::Relaxed);
                        }
                        _ => {
                            lease.commit().await.unwrap();
                            kept.fetch_add(tokens, Ordering::Relaxed);
                        }
                    }
                }
            })
        });
        for task in tasks.collect::<Vec<_>>() {
            task.await.unwrap();
        }
        let kept = i64::try_from(kept.load(Ordering::Relaxed)).unwrap();
        assert!(kept > 500, "{kept}");
        soon("all that was dropped is given back", async || {
            consumed(&world, &limiter).await == (kept, kept, kept)
        })
        .await;
    });
}

#[test]
fn tokens_add_up_while_limiters_come_and_go_and_their_caches_expire() {
    on_every_store_with_threads(async |world| {
        let limiter = family(&world).await;
        let world = Arc::new(world);
        let tasks = (0..16).map(|task| {
            let world = Arc::clone(&world);
            tokio::spawn(async move {
                let mut random = fastrand::Rng::with_seed(task);
                let mut kept = 0;
                for _ in 0..10 {
                    // The clock runs fast here; nothing must run into its deadline.
                    let builder = world.builder().cache_ttl(secs(5)).deadline(secs(1_000_000));
                    let limiter = builder.admin_deadline(secs(1_000_000)).open().await.unwrap();
                    for _ in 0..10 {
                        world.advance(secs(random.u64(0..3)));
                        // Alone, or with those above it.
                        let key = key_of(random.u64(0..16));
                        let who = ["root", "team-1", &key][random.usize(0..3)];
                        let tokens = random.u64(0..3);
                        let taken = limiter.acquire(who, "gpt-4").take("tpm", tokens).await;
                        let lease = match taken {
                            Ok(lease) => lease,
                            Err(Error::Exceeded(_)) => continue,
                            Err(other) => panic!("{other:?}"),
                        };
                        if random.bool() {
                            lease.commit().await.unwrap();
                            kept += i64::try_from(tokens).unwrap();
                        }
                    }
                }
                kept
            })
        });
        let mut kept = 0;
        for task in tasks.collect::<Vec<_>>() {
            kept += task.await.unwrap();
        }
        assert!(kept > 200, "{kept}");
        soon("the root has given what was kept", async || {
            consumed(&world, &limiter).await.0 == kept
        })
        .await;
    });
}

#[test]
fn no_call_hangs_while_limits_change() {
    on_every_store_with_threads(async |world| {
        let limiter = family(&world).await;
        let callers = (0..16).map(|task| {
            let limiter = limiter.clone();
            tokio::spawn(async move {
                for _ in 0..50 {
                    let key = key_of(task);
                    match limiter.acquire(&key, "gpt-4").take("tpm", 1).await {
                        Ok(lease) => lease.commit().await.unwrap(),
                        Err(Error::Exceeded(_) | Error::ExceedsCapacity(_)) => {}
                        Err(other) => panic!("{other:?}"),
                    }
                }
            })
        });
        let callers: Vec<_> = callers.collect();
        for capacity in 1..20 {
            own_limits(&limiter, "root", [without_refill("tpm", 1_000 - capacity)]).await;
        }
        for caller in callers {
            caller.await.unwrap();
        }
        let root = world.bucket(&limiter, "root", "gpt-4").await.unwrap();
        let (cell, rate) = root.cell("tpm").unwrap();
        assert_eq!(rate.capacity().whole_tokens(), 981);
        assert!(
            cell.consumed.whole_tokens() <= 800
                && cell.tokens >= zae_limiter::model::Millitokens::ZERO
        );
    });
}
