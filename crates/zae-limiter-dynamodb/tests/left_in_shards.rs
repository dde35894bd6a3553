//! What an admitted acquire reports as available on a bucket of several shards: what a read of all shards would
//! say, from snapshots and without that read.

#[expect(dead_code, reason = "shared with other tests")]
mod one_bucket;

use std::sync::Arc;

use fastrand::Rng;
use zae_limiter_core::{
    Admission, Bucket, Leg, Lifetime, Limit, LimitSet, Millitokens, Placement, Plan, Settlement,
    Store, Take, Target, Timestamp,
};
use zae_limiter_dynamodb::{DynamoOptions, DynamoStore};
use zae_limiter_testkit::SimTable;

use one_bucket::{at, key};

const RPM: i64 = 400;
const TPM: i64 = 10_007;

fn target() -> Arc<Target> {
    let limits = [Limit::per_minute("rpm", 400), Limit::per_minute("tpm", 10_007)];
    let limits = LimitSet::new(limits).expect("valid limits");
    Arc::new(Target::new(key(), Arc::new(limits), Lifetime::Forever))
}

fn process(table: &SimTable, seed: u64) -> DynamoStore {
    let options = DynamoOptions::default().seed(seed).shards_max(16);
    DynamoStore::new(Arc::new(table.clone()), options)
}

fn amounts(tokens: [i64; 2]) -> zae_limiter_core::Takes {
    let amounts = tokens.into_iter().enumerate();
    amounts.map(|(cell, tokens)| Take { cell, amount: Millitokens::new(tokens * 1_000) }).collect()
}

/// The shard, and what the reply says is left of both limits; `None` if it was refused.
async fn take(store: &DynamoStore, tokens: [i64; 2], now: Timestamp) -> Option<(u32, [i64; 2])> {
    let leg = Leg { target: target(), takes: amounts(tokens) };
    let plan = Plan { max_skew: None, now, legs: [leg].into_iter().collect() };
    match store.acquire(&plan).await.expect("an answer") {
        Admission::Taken(taken) => {
            let left = [taken[0].left[0].get(), taken[0].left[1].get()];
            Some((taken[0].placement.get(), left))
        }
        Admission::Refused(_) => None,
    }
}

/// What a read of all shards says.
async fn available(store: &DynamoStore, now: Timestamp) -> [i64; 2] {
    let buckets = store.peek(&[key()], now).await.expect("an answer");
    let full = || Bucket::full(Arc::clone(target().limits()), now);
    let mut bucket = buckets[0].clone().unwrap_or_else(full);
    bucket.refill(now);
    ["rpm", "tpm"].map(|limit| bucket.cell(limit).expect("the limit").0.tokens.get())
}

/// Splits and merges go on in the background.
async fn settle_down() {
    for _ in 0..50 {
        tokio::task::yield_now().await;
    }
}

/// A process that is alone on a bucket: takes, gathers, refunds, charges, splits and merges.
async fn alone(seed: u64) -> (u32, u32) {
    let mut rng = Rng::with_seed(seed);
    let table = SimTable::default();
    let store = process(&table, seed);
    let (mut now, mut checked, mut gathered) = (0, 0, 0);
    for step in 0..200 {
        now += rng.i64(0..2_000);
        match rng.u32(0..12) {
            0 => store.split(&key(), at(now)).await.expect("an answer"),
            1 if rng.bool() => store.merge(&key(), at(now)).await.expect("an answer"),
            2 => {
                // Some are larger than a shard's share, and some than its balance.
                let differences = amounts([rng.i64(-90..30), rng.i64(-900..3_000)]);
                let placement = Placement::new(rng.u32(0..16));
                let settlement = Settlement { target: target(), placement, differences };
                store.settle(&[settlement], at(now)).await.expect("settled");
            }
            _ => {
                let tokens = match rng.u32(0..8) {
                    0 => [rng.i64(0..RPM), rng.i64(0..TPM)],
                    1 => [0, 0],
                    _ => [rng.i64(0..20), rng.i64(0..500)],
                };
                let before = store.reshard_counts().gathered;
                if let Some((_, left)) = take(&store, tokens, at(now)).await {
                    let expected = available(&store, at(now)).await;
                    assert_eq!(left, expected, "seed {seed}, step {step}: took {tokens:?}");
                    checked += 1;
                    gathered += u32::from(store.reshard_counts().gathered > before);
                }
            }
        }
        settle_down().await;
    }
    (checked, gathered)
}

#[tokio::test]
async fn a_process_that_is_alone_reports_what_is_left_to_the_millitoken() {
    let (mut checked, mut gathered) = (0, 0);
    for seed in 0..6 {
        let (more, more_gathered) = alone(seed).await;
        (checked, gathered) = (checked + more, gathered + more_gathered);
    }
    assert!(checked > 300 && gathered > 10, "{checked} checked, {gathered} gathered");
}

/// A process that knows only the shard it has just written to.
#[tokio::test]
async fn a_new_process_takes_the_other_shards_to_be_as_full_as_its_own() {
    let table = SimTable::default();
    let first = process(&table, 1);
    take(&first, [100, 7], at(0)).await.expect("admitted");
    for _ in 0..2 {
        first.split(&key(), at(0)).await.expect("an answer");
        settle_down().await;
    }
    // Right after a split all shards are equally full.
    let (shard, left) = take(&process(&table, 2), [10, 0], at(0)).await.expect("admitted");
    assert_eq!((shard, left[0]), (0, 290_000));
    assert_eq!(left, available(&first, at(0)).await);
    // Two minutes later they are full.
    let second = process(&table, 3);
    let (_, left) = take(&second, [10, 1], at(120_000)).await.expect("admitted");
    assert_eq!(left, [390_000, 10_006_000]);
    // It remembers that they were, although its own no longer is.
    let (_, left) = take(&second, [10, 1], at(120_000)).await.expect("admitted");
    assert_eq!(left, [380_000, 10_005_000]);
}

/// Many processes, each with old snapshots of what the others do.
#[tokio::test]
async fn beside_other_processes_no_reply_claims_more_than_the_capacity() {
    for seed in 0..4 {
        let mut rng = Rng::with_seed(seed);
        let table = SimTable::default();
        let stores: Vec<DynamoStore> = (0..6).map(|at| process(&table, seed + at)).collect();
        let mut now = 0;
        for _ in 0..200 {
            now += rng.i64(0..500);
            let store = &stores[rng.usize(..stores.len())];
            match rng.u32(0..16) {
                0 => store.split(&key(), at(now)).await.expect("an answer"),
                1 => store.merge(&key(), at(now)).await.expect("an answer"),
                _ => {
                    let tokens = [rng.i64(0..40), rng.i64(0..1_000)];
                    let taken = take(store, tokens, at(now)).await;
                    for (left, capacity, taken) in taken.into_iter().flat_map(|(_, left)| {
                        [(left[0], RPM, tokens[0]), (left[1], TPM, tokens[1])]
                    }) {
                        assert!((0..=(capacity - taken) * 1_000).contains(&left), "{left}");
                    }
                }
            }
            settle_down().await;
        }
    }
}
