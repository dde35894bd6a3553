//! Promises: a deletion deletes the entity's buckets, and a purge removes everything in the namespace. Here the table's
//! indexes lag by up to half a second, as DynamoDB's do, and the call comes right after the use.
#![allow(clippy::unwrap_used, reason = "a test says what is wrong by panicking")]

use std::sync::Arc;
use std::time::Duration;

use zae_limiter_core::{Builder, Clock, Entropy, Limit, RateLimiter};
use zae_limiter_dynamodb::{DynamoOptions, DynamoStore};
use zae_limiter_testkit::{ClientClock, Faults, World};

const LAG_US: u64 = 500_000;

async fn limiter(world: &World, client: u32, namespace: &str) -> RateLimiter {
    let builder = builder(world, client, DynamoOptions::default());
    builder.namespace(namespace).open().await.unwrap()
}

fn builder(world: &World, client: u32, options: DynamoOptions) -> Builder {
    let table = Arc::new(world.table.for_client(client));
    let store = DynamoStore::new(table, options.seed(u64::from(client)));
    let clock: Arc<dyn Clock> = Arc::new(ClientClock::new(Arc::clone(&world.time), 0, 0, 0));
    let builder = RateLimiter::builder(store).clock(clock);
    let limits = [Limit::per_hour("rpm", 100)];
    builder.default_limits(limits).entropy(Entropy::seeded(u64::from(client)))
}

fn lag(world: &World) {
    lag_by(world, LAG_US);
}

fn lag_by(world: &World, lag_us: u64) {
    world.table.set_faults(Faults { delay_us: 500..=8_000, lag_us, ..Faults::none() });
}

/// The partition keys of items that contain this text.
fn items_with(world: &World, text: &str) -> Vec<String> {
    let key = |item: zae_limiter_schema::Item| item["PK"].as_str().unwrap().to_owned();
    world.table.items().into_iter().map(key).filter(|pk| pk.contains(text)).collect()
}

#[test]
fn a_deletion_right_after_the_use_leaves_no_bucket() {
    for seed in 0..10 {
        World::play(seed, 1, async move |world| {
            let limiter = limiter(&world, 1, "default").await;
            limiter.create_entity("key").await.unwrap();
            lag(&world);
            let lease = limiter.acquire("key", "gpt-4").take("rpm", 5).await.unwrap();
            lease.commit().await.unwrap();
            limiter.delete_entity("key").await.unwrap();
            world.time.sleep(Duration::from_micros(2 * LAG_US)).await;
            let left = items_with(&world, "BUCKET#key#");
            assert!(left.is_empty(), "seed {seed}: {left:?}");
        });
    }
}

#[test]
fn a_purge_right_after_the_use_leaves_nothing() {
    for seed in 0..10 {
        World::play(seed, 1, async move |world| {
            let default = limiter(&world, 1, "default").await;
            let id = default.namespaces().register("team").await.unwrap().id;
            let team = limiter(&world, 2, "team").await;
            lag(&world);
            let lease = team.acquire("key", "gpt-4").take("rpm", 5).await.unwrap();
            lease.commit().await.unwrap();
            drop(team);
            default.namespaces().delete("team").await.unwrap();
            default.namespaces().purge(&id, |_| {}).await.unwrap();
            world.time.sleep(Duration::from_micros(2 * LAG_US)).await;
            let mut left = items_with(&world, id.as_str());
            // The tombstone stays for three days.
            left.retain(|pk| !pk.contains("SYSTEM"));
            assert!(left.is_empty(), "seed {seed}: {left:?}");
        });
    }
}

/// The limits of other calls do not end the waits for an index, also where it lags by more than they wait.
#[test]
fn deletions_and_purges_wait_longer_than_other_calls_may() {
    let slow = || DynamoOptions::default().call_timeout(Duration::from_millis(100));
    for (options, deadline_s) in [(slow(), 30), (DynamoOptions::default(), 1), (slow(), 1)] {
        for lag_us in [LAG_US, 10 * LAG_US] {
            let options = options.clone();
            World::play(1, 1, async move |world| {
                let builder = builder(&world, 1, options);
                let builder = builder.admin_deadline(Duration::from_secs(deadline_s));
                let limiter = builder.open().await.unwrap();
                let namespaces = limiter.namespaces();
                let id = namespaces.register("team").await.unwrap().id;
                limiter.create_entity("key").await.unwrap();
                lag_by(&world, lag_us);
                limiter.delete_entity("key").await.unwrap();
                namespaces.delete("team").await.unwrap();
                namespaces.purge(&id, |_| {}).await.unwrap();
            });
        }
    }
}
