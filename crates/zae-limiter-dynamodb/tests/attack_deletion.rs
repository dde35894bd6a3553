//! Promises: a deletion deletes the entity's buckets, and a purge removes everything in the namespace. Here the table's
//! indexes lag by up to half a second, as DynamoDB's do, and the call comes right after the use.
#![allow(clippy::unwrap_used, reason = "a test says what is wrong by panicking")]

use std::sync::Arc;
use std::time::Duration;

use zae_limiter_core::{Clock, Entropy, Limit, RateLimiter};
use zae_limiter_dynamodb::{DynamoOptions, DynamoStore};
use zae_limiter_testkit::{ClientClock, Faults, World};

const LAG_US: u64 = 500_000;

async fn limiter(world: &World, client: u32, namespace: &str) -> RateLimiter {
    let table = Arc::new(world.table.for_client(client));
    let store = DynamoStore::new(table, DynamoOptions::default().seed(u64::from(client)));
    let clock: Arc<dyn Clock> = Arc::new(ClientClock::new(Arc::clone(&world.time), 0, 0, 0));
    let builder = RateLimiter::builder(store).clock(clock).namespace(namespace);
    let limits = [Limit::per_hour("rpm", 100)];
    let builder = builder.default_limits(limits).entropy(Entropy::seeded(u64::from(client)));
    builder.open().await.unwrap()
}

fn lag(world: &World) {
    world.table.set_faults(Faults { delay_us: 500..=8_000, lag_us: LAG_US, ..Faults::none() });
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
