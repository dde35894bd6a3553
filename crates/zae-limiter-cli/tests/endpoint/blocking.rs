//! The blocking API on a DynamoDB table, in a program without any async runtime.

use zae_limiter::dynamodb::aws::{DynamoAddress, LazyTable};
use zae_limiter::{Error, Limit, RateLimiter, blocking};

use crate::endpoint;

/// Polls of the table until the background refund arrives.
const LOOKS_MAX: usize = 10_000;

/// Creates the table on a runtime that ends before the rest begins.
fn open(table: &str) -> RateLimiter {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(endpoint::table(table));
    drop(runtime);
    let url = format!("dynamodb:{table}?region=us-east-1&endpoint={}", endpoint::address());
    let limiter = blocking::open(zae_limiter::builder(&url).unwrap()).unwrap();
    let limits = limiter.set_limits("key-1", Some("gpt-4"), [Limit::per_day("runs", 100)]);
    blocking::wait(limits).unwrap();
    limiter
}

fn left(limiter: &RateLimiter) -> i64 {
    let statuses = blocking::wait(limiter.available("key-1", "gpt-4", &[])).unwrap();
    statuses[0].available.whole_tokens()
}

#[test]
fn tokens_are_taken_settled_and_refunded_without_a_runtime() {
    let limiter = open("blocking");
    let take = |tokens| blocking::wait(limiter.acquire("key-1", "gpt-4").take("runs", tokens));
    let mut kept = take(10).unwrap();
    kept.settle("runs", 15).unwrap();
    blocking::wait(kept.commit()).unwrap();
    assert_eq!(left(&limiter), 85);
    assert!(matches!(take(86), Err(Error::Exceeded(_))));
    let undone = take(85).unwrap();
    blocking::wait(undone.rollback()).unwrap();
    assert_eq!(left(&limiter), 85);
    let done: Result<(), Error> =
        blocking::run(limiter.acquire("key-1", "gpt-4").take("runs", 5), |_| Ok(()));
    done.unwrap();
    assert_eq!(left(&limiter), 80);
    drop(take(20).unwrap());
    let refunded = (0..LOOKS_MAX).any(|_| left(&limiter) == 80);
    assert!(refunded, "a dropped lease gives its tokens back: {} are left", left(&limiter));
}

#[test]
fn threads_without_a_runtime_share_one_table() {
    let limiter = open("blocking-threads");
    let threads: Vec<_> = (0..4)
        .map(|_| {
            let limiter = limiter.clone();
            std::thread::spawn(move || {
                for admitted in 0..100 {
                    let call = limiter.acquire("key-1", "gpt-4").take("runs", 5);
                    match blocking::wait(call) {
                        Ok(lease) => blocking::wait(lease.commit()).unwrap(),
                        Err(Error::Exceeded(_)) => return admitted,
                        Err(error) => panic!("{error:?}"),
                    }
                }
                panic!("one thread alone was admitted five times what there is");
            })
        })
        .collect();
    let admitted: i32 = threads.into_iter().map(|thread| thread.join().unwrap()).sum();
    assert_eq!(admitted, 20);
}

/// Each command is a new process, which has seen nothing of the other shards.
#[test]
fn acquire_and_available_agree_on_a_bucket_of_several_shards() {
    let limiter = open("agreeing");
    let url = format!("dynamodb:agreeing?region=us-east-1&endpoint={}", endpoint::address());
    let run = |args: &[&str]| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_zae-limiter"));
        command.args(["--store", &url, "-o", "json"]).args(args);
        let output = command.output().unwrap();
        let document: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        document["limits"][0]["available"].clone()
    };
    let call = limiter.acquire("key-1", "gpt-4").take("runs", 1);
    blocking::wait(blocking::wait(call).unwrap().commit()).unwrap();
    split(&limiter, "agreeing", 4);
    for tokens in ["runs:1", "runs:30", "runs:1"] {
        let after = run(&["acquire", "key-1", "gpt-4", "-c", tokens]);
        assert_eq!(after, run(&["available", "key-1", "gpt-4"]), "after {tokens}");
    }
}

fn split(limiter: &RateLimiter, table: &str, shards: u32) {
    use zae_limiter::testing::{Clock as _, SystemClock};
    let bucket = zae_limiter::store::BucketKey {
        namespace: limiter.namespace_id().clone(),
        entity: "key-1".parse().unwrap(),
        resource: "gpt-4".parse().unwrap(),
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let address = DynamoAddress {
            table: table.to_owned(),
            region: Some("us-east-1".to_owned()),
            endpoint: Some(endpoint::address().to_owned()),
        };
        let table = std::sync::Arc::new(LazyTable::new(address));
        let store = zae_limiter::DynamoStore::new(table, zae_limiter::DynamoOptions::default());
        store.split_to(&bucket, shards, SystemClock.now()).await.unwrap();
    });
}
