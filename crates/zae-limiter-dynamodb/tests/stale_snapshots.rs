//! A process relies on its snapshot of a bucket. It must notice what other processes have done meanwhile
//! before anything is written by it.

mod one_bucket;

use std::sync::Arc;
use std::time::Duration;

use zae_limiter_core::{
    Admission, Key, Limit, Millitokens, Placement, Settlement, Store, Take, Target, Timestamp,
};
use zae_limiter_dynamodb::{DynamoOptions, DynamoStore};
use zae_limiter_schema::{BucketItemKey, SHARD_ZERO, Value};
use zae_limiter_testkit::SimTable;

use one_bucket::{at, key, plan, target};

/// Every refill but one in thirteen milliseconds leaves a remainder.
fn odd() -> Arc<Target> {
    target(Limit::per("odd", 7, Duration::from_secs(13)).burst(9))
}

fn process(table: &SimTable) -> DynamoStore {
    DynamoStore::new(Arc::new(table.clone()), DynamoOptions::default())
}

async fn take(store: &DynamoStore, target: &Arc<Target>, millitokens: i64, now: Timestamp) -> bool {
    let answer = store.acquire(&plan(target, millitokens, now)).await.expect("an answer");
    matches!(answer, Admission::Taken(_))
}

async fn give_back(store: &DynamoStore, target: &Arc<Target>, millitokens: i64, now: Timestamp) {
    let amount = Millitokens::new(-millitokens);
    let settlement = Settlement {
        target: Arc::clone(target),
        placement: Placement::default(),
        differences: [Take { cell: 0, amount }].into_iter().collect(),
    };
    store.settle(&[settlement], now).await.expect("settled");
}

fn number(table: &SimTable, name: &str) -> Option<i64> {
    let item = table.item(&BucketItemKey { bucket: key(), shard: SHARD_ZERO }.item_key());
    item.expect("a bucket").get(name).and_then(Value::as_i64)
}

/// Under other limits, too: a write that fits the old ones would take from a full bucket without
/// paying out its time, which would be paid out again.
#[tokio::test]
async fn a_bucket_that_was_deleted_and_created_again_fails_older_snapshots() {
    let table = SimTable::default();
    let (first, second) = (process(&table), process(&table));
    let (wide, narrow) =
        (target(Limit::per_minute("rpm", 100)), target(Limit::per_minute("rpm", 10)));
    assert!(take(&first, &wide, 95_000, at(0)).await);
    second.delete(&[Key::Bucket(key())]).await.expect("deleted");
    assert!(take(&second, &narrow, 1_000, at(1_000)).await);
    // Full again, with its ten; the first process has a snapshot of five of a hundred.
    assert!(take(&first, &wide, 5_000, at(31_000)).await);
    let mut admitted = 0;
    while take(&second, &narrow, 1_000, at(31_000)).await {
        admitted += 1;
    }
    assert_eq!(admitted, 5);
}

#[tokio::test]
async fn a_full_bucket_drops_its_remainder() {
    let table = SimTable::default();
    let (store, odd) = (process(&table), odd());
    assert!(take(&store, &odd, 9_000, at(0)).await);
    // 1,076 are earned, and 12/13 of another.
    assert!(take(&store, &odd, 1_000, at(2_000)).await);
    assert_eq!(number(&table, "b_odd_rm"), Some(12_000));
    // In the same millisecond: the refill time stays, the remainder does not.
    give_back(&store, &odd, 9_000, at(2_000)).await;
    assert_eq!(number(&table, "b_odd_tk"), Some(9_000));
    assert!(take(&store, &odd, 9_000, at(2_000)).await);
    assert!(!take(&process(&table), &odd, 1, at(2_001)).await, "7/13 of a millitoken are earned");
    assert!(take(&process(&table), &odd, 1, at(2_002)).await);
}

#[tokio::test]
async fn a_remainder_that_another_process_dropped_does_not_count() {
    let table = SimTable::default();
    let (first, second, odd) = (process(&table), process(&table), odd());
    assert!(take(&first, &odd, 9_000, at(0)).await);
    assert!(take(&first, &odd, 1_000, at(2_000)).await);
    give_back(&second, &odd, 9_000, at(2_000)).await;
    assert!(take(&second, &odd, 8_000, at(2_000)).await);
    // The first process has a snapshot of 76, and a remainder with which a millisecond earns one more.
    assert!(take(&first, &odd, 77, at(2_001)).await);
    assert_eq!(number(&table, "b_odd_tk"), Some(1_000 - 77));
}
