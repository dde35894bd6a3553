//! Splitting buckets ahead of a rush: all shards exist, and no token is gained or lost.
//!
//! `ZAEL_SIM_SEEDS` says how many seeds are played (3).

mod one_bucket;

use std::sync::Arc;
use std::time::Duration;

use zae_limiter_core::{Admission, Limit, Store, Target};
use zae_limiter_dynamodb::{DynamoOptions, DynamoStore};
use zae_limiter_schema::{BucketItemKey, Value};
use zae_limiter_testkit::{Faults, SimTable, World};

use one_bucket::{at, key, plan, target};

fn store(table: &SimTable, options: DynamoOptions) -> DynamoStore {
    DynamoStore::new(Arc::new(table.clone()), options.seed(1))
}

/// The count that each shard knows, those that are there.
fn counts(table: &SimTable) -> Vec<i64> {
    let shard = |shard| table.item(&BucketItemKey { bucket: key(), shard }.item_key());
    let shards = (0..128).filter_map(shard);
    shards.filter_map(|item| item.get("shard_count").and_then(Value::as_i64)).collect()
}

async fn take(store: &DynamoStore, target: &Arc<Target>, tokens: i64) -> bool {
    let answer = store.acquire(&plan(target, tokens * 1_000, at(0))).await;
    matches!(answer.expect("an answer"), Admission::Taken(_))
}

#[tokio::test]
async fn all_shards_exist_and_hold_what_the_bucket_held() {
    let table = SimTable::default();
    let store = store(&table, DynamoOptions::default());
    let target = target(Limit::per_minute("rpm", 100));
    assert!(take(&store, &target, 37).await);
    for (asked, shards) in [(1, 1), (8, 8), (4, 8), (9, 16), (64, 64), (u32::MAX, 64)] {
        let split = store.split_to(&key(), asked, at(0)).await.expect("an answer");
        assert_eq!(split, Some(shards), "{asked} were asked for");
        let shards = usize::try_from(shards).expect("few");
        assert_eq!(counts(&table), vec![i64::try_from(shards).expect("few"); shards]);
        assert_eq!(store.shard_count(&key(), at(0)).await.expect("an answer"), shards);
        let whole = store.peek(&[key()], at(0)).await.expect("an answer");
        let (cell, rate) = whole[0].as_ref().and_then(|all| all.cell("rpm")).expect("the limit");
        assert_eq!((cell.tokens.get(), rate.capacity().get()), (63_000, 100_000));
    }
    assert_eq!(store.reshard_counts().splits, 6);
    // Another process, which believes that there is one shard.
    let other = DynamoStore::new(Arc::new(table.clone()), DynamoOptions::default());
    let mut admitted = 0;
    while take(&other, &target, 1).await {
        admitted += 1;
    }
    assert_eq!(admitted, 63);
}

#[tokio::test]
async fn at_most_as_many_shards_as_the_options_allow_and_none_of_an_absent_bucket() {
    let table = SimTable::default();
    let store = store(&table, DynamoOptions::default().shards_max(4));
    assert_eq!(store.split_to(&key(), 8, at(0)).await.expect("an answer"), None);
    assert_eq!(store.shard_count(&key(), at(0)).await.expect("an answer"), 0);
    assert_eq!(table.items().len(), 0);
    assert!(take(&store, &target(Limit::per_minute("rpm", 100)), 1).await);
    assert_eq!(store.split_to(&key(), 8, at(0)).await.expect("an answer"), Some(4));
    assert_eq!(counts(&table), [4; 4]);
}

/// A process that splits shard after shard, and does not come to the end of it.
#[tokio::test]
async fn a_split_that_another_process_left_unfinished_is_finished() {
    let table = SimTable::default();
    let first = store(&table, DynamoOptions::default());
    let target = target(Limit::per_minute("rpm", 100));
    assert!(take(&first, &target, 37).await);
    // What goes on in the background has no turn before the next line.
    for _ in 0..3 {
        first.split(&key(), at(0)).await.expect("an answer");
    }
    let other = DynamoStore::new(Arc::new(table.clone()), DynamoOptions::default());
    assert_ne!(counts(&table), [8; 8], "the last shards are still to be split");
    assert_eq!(other.split_to(&key(), 8, at(0)).await.expect("an answer"), Some(8));
    assert_eq!(counts(&table), [8; 8]);
    let whole = other.peek(&[key()], at(0)).await.expect("an answer");
    let (cell, _) = whole[0].as_ref().and_then(|all| all.cell("rpm")).expect("the limit");
    assert_eq!(cell.tokens.get(), 63_000);
}

/// Eight processes take all there is while two others split the bucket.
#[test]
fn takes_during_a_split_get_at_most_what_the_bucket_holds() {
    let seeds = std::env::var("ZAEL_SIM_SEEDS").ok();
    let seeds = seeds.map_or(3, |number| number.parse().expect("ZAEL_SIM_SEEDS is a number"));
    for seed in 0..seeds {
        let (admitted, counts) = World::play(seed, 1, async move |world| {
            world.table.set_faults(Faults { delay_us: 500..=6_000, ..Faults::none() });
            // Less than one token comes back while this goes on.
            let target = target(Limit::per_day("rpd", 300));
            let process = |number: u32| {
                let table = Arc::new(world.table.for_client(number));
                DynamoStore::new(table, DynamoOptions::default().seed(number.into()))
            };
            let first = process(1);
            let plan_now = || plan(&target, 1_000, world.time.now());
            first.acquire(&plan_now()).await.expect("an answer");
            let mut tasks = Vec::new();
            for number in 2..10 {
                let (world, target, store) =
                    (Arc::clone(&world), Arc::clone(&target), process(number));
                tasks.push(tokio::spawn(async move {
                    let mut admitted = 0;
                    for _ in 0..50 {
                        let plan = plan(&target, 1_000, world.time.now());
                        let answer = store.acquire(&plan).await.expect("an answer");
                        admitted += u32::from(matches!(answer, Admission::Taken(_)));
                        world.time.sleep(Duration::from_micros(200)).await;
                    }
                    admitted
                }));
            }
            let other = process(10);
            let now = world.time.now();
            let bucket = key();
            let (one, two) =
                tokio::join!(first.split_to(&bucket, 32, now), other.split_to(&bucket, 16, now));
            assert_eq!(one.expect("an answer"), Some(32));
            assert!(two.expect("an answer") >= Some(16));
            let mut admitted = 1;
            for task in tasks {
                admitted += task.await.expect("nobody panics");
            }
            (admitted, counts(&world.table))
        });
        assert_eq!((admitted, counts), (300, vec![32; 32]), "seed {seed}");
    }
}
