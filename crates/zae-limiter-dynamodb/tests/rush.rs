//! Many callers at once while something happens to one bucket: how many of them fail.

#[expect(dead_code, reason = "shared with other tests")]
mod one_bucket;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use zae_limiter_core::{
    Admission, BucketKey, EntityId, Entropy, Error, Limit, OnUnavailable, RateLimiter,
    ResourceName, Store, Target,
};
use zae_limiter_dynamodb::{DynamoOptions, DynamoStore};
use zae_limiter_schema::{ItemKey, bucket_partition};
use zae_limiter_testkit::{ClientClock, Faults, World};

use one_bucket::{plan, target};

const PROCESSES: u32 = 20;
const CALLS_PER_SECOND: u64 = 500;
const SECONDS: u64 = 3;

/// The target as a process sees it that has read the limits at this moment.
fn read_at(limit: Limit, world: &World) -> Arc<Target> {
    let target = target(limit);
    Arc::new((*target).clone().with_limits_read_at(world.time.now()))
}

/// 20 processes with 500 calls a second each. After a second one of them changes the limits; the others read
/// the change one after the other, within two seconds, and disagree until then. Of 30,000 calls 1,798 failed
/// when every process wrote its own limits back.
#[test]
fn limits_changed_in_a_rush_fail_few_calls() {
    let (failed, refused, admitted) = World::play(3, 1, async |world| {
        world.table.set_faults(Faults { delay_us: 500..=8_000, ..Faults::none() });
        let [failed, refused, admitted] = [(); 3].map(|()| Arc::new(AtomicU64::new(0)));
        let old = read_at(Limit::per_second("rps", 20_000), &world);
        let mut tasks = Vec::new();
        for process in 0..PROCESSES {
            let table = Arc::new(world.table.for_client(process + 1));
            let options = DynamoOptions::default().seed(process.into()).shards_max(4);
            let store = Arc::new(DynamoStore::new(table, options));
            // The moment at which this process reads the new limits.
            let reads_us = 1_000_000 + u64::from(process) * 100_000;
            for call in 0..CALLS_PER_SECOND * SECONDS {
                let begin_us = call * 1_000_000 / CALLS_PER_SECOND + u64::from(process) * 97;
                let (world, store, old) = (world.clone(), store.clone(), old.clone());
                let (failed, refused, admitted) =
                    (failed.clone(), refused.clone(), admitted.clone());
                tasks.push(tokio::spawn(async move {
                    world.time.sleep(Duration::from_micros(begin_us)).await;
                    let target = match begin_us < reads_us {
                        true => old,
                        false => read_at(Limit::per_second("rps", 30_000), &world),
                    };
                    if process == 0 && begin_us == reads_us {
                        let changed = store.reconfigure(&target, world.time.now()).await;
                        assert!(changed.is_ok(), "the limits could not be changed: {changed:?}");
                    }
                    let count = match store.acquire(&plan(&target, 1_000, world.time.now())).await {
                        Ok(Admission::Taken(_)) => admitted,
                        Ok(Admission::Refused(_)) => refused,
                        Err(_) => failed,
                    };
                    count.fetch_add(1, Ordering::Relaxed);
                }));
            }
        }
        for task in tasks {
            task.await.expect("nobody panics");
        }
        [failed, refused, admitted].map(|count| count.load(Ordering::Relaxed)).into()
    });
    println!("failed {failed}, refused {refused}, admitted {admitted}");
    assert_eq!(failed + refused + admitted, 30_000);
    assert!(failed < 30, "{failed} of 30,000 failed");
}

/// One partition takes no write for ten seconds, and a breaker that opens after two failures. Meanwhile 100
/// calls on each of 1,000 other buckets: each is checked against its limit, and none fails.
#[test]
#[ignore = "half a minute in a debug build: run with --release -- --ignored"]
fn a_throttled_partition_fails_no_call_on_other_buckets() {
    let (checked, busy) = World::play(5, 1, async |world| {
        let clock = Arc::new(ClientClock::new(Arc::clone(&world.time), 0, 0, 0));
        let store = DynamoStore::new(
            Arc::new(world.table.for_client(1)),
            DynamoOptions::default().seed(1).shards_max(1),
        );
        let breaker = zae_limiter_core::BreakerSettings { failures: 2, ..Default::default() };
        let limiter = RateLimiter::builder(store)
            .clock(clock)
            .entropy(Entropy::seeded(1))
            .default_limits([Limit::per_day("rpd", 1_000)])
            .on_unavailable(OnUnavailable::Allow)
            .breaker(breaker)
            .open()
            .await
            .expect("an empty table");
        // Slow enough that calls overlap, and never so slow that a deadline ends one.
        world.table.set_faults(Faults { delay_us: 500..=8_000, ..Faults::none() });
        let hot = BucketKey {
            namespace: limiter.namespace_id().clone(),
            entity: EntityId::new("hot").expect("a valid id"),
            resource: ResourceName::new("gpt-4").expect("a valid name"),
        };
        world.table.heat(&ItemKey::new(bucket_partition(&hot, 0), "#STATE"), 10_000_000);
        let [checked, busy] = [(); 2].map(|()| Arc::new(AtomicU64::new(0)));
        let mut tasks = Vec::new();
        for call in 0..100_u64 {
            for entity in 0..=1_000_u64 {
                let (world, limiter) = (world.clone(), limiter.clone());
                let (checked, busy) = (checked.clone(), busy.clone());
                tasks.push(tokio::spawn(async move {
                    world.time.sleep(Duration::from_micros(call * 90_000 + entity * 89)).await;
                    let name = if entity == 0 { "hot".to_owned() } else { format!("e{entity}") };
                    let answer = limiter.acquire(&name, "gpt-4").take("rpd", 1).await;
                    match answer {
                        Ok(lease) if entity == 0 => {
                            busy.fetch_add(u64::from(lease.is_degraded()), Ordering::Relaxed);
                            lease.commit().await.expect("nothing to write");
                        }
                        Ok(lease) => {
                            assert!(!lease.is_degraded(), "{name} was let through unchecked");
                            lease.commit().await.expect("nothing to write");
                            checked.fetch_add(1, Ordering::Relaxed);
                        }
                        Err(Error::Exceeded(_)) if entity == 0 => {}
                        Err(error) => panic!("{name}: {error}"),
                    }
                }));
            }
        }
        for task in tasks {
            task.await.expect("no call on another bucket fails");
        }
        (checked.load(Ordering::Relaxed), busy.load(Ordering::Relaxed))
    });
    println!(
        "{checked} calls on other buckets checked; {busy} of 100 on the throttled one were not"
    );
    assert_eq!(checked, 100_000);
    assert!(busy > 50, "the partition was not throttled: {busy}");
}
