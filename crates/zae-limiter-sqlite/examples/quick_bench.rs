//! How many acquires a second: `cargo run --release --example quick_bench -- [calls] [mode …]`.
//!
//! Modes: `hot` (one bucket), `100k`, `1m` (that many entities), `full` (one bucket, synced),
//! `full-1` (the same with one caller).
#![expect(clippy::disallowed_methods, reason = "a benchmark reads the real clock")]
#![expect(clippy::unwrap_used, reason = "a benchmark may end with any error")]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use zae_limiter_core::{
    Admission, BucketKey, EntityId, Leg, Lifetime, Limit, LimitSet, NamespaceId, Plan,
    ResourceName, Store, Take, Target, Timestamp, amount,
};
use zae_limiter_sqlite::{Durability, SqliteOptions, SqliteStore};

fn targets(entities: usize) -> Vec<Arc<Target>> {
    let limits = [Limit::per_second("rpm", 1_000_000_000), Limit::per_second("tpm", 1_000_000_000)];
    let limits = Arc::new(LimitSet::new(limits).unwrap());
    let target = |n: usize| {
        // Spread, as real ids are.
        let id = format!("key-{:016x}", (n as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let key = BucketKey {
            namespace: NamespaceId::new("AbCdEfGhIj_").unwrap(),
            entity: EntityId::new(id).unwrap(),
            resource: ResourceName::new("gpt-4").unwrap(),
        };
        let idle = Lifetime::Idle(Duration::from_secs(3_600));
        Arc::new(Target::new(key, Arc::clone(&limits), idle))
    };
    (0..entities).map(target).collect()
}

async fn run(
    store: &SqliteStore,
    targets: &Arc<Vec<Arc<Target>>>,
    tasks: usize,
    calls: usize,
) -> f64 {
    let next = Arc::new(AtomicUsize::new(0));
    let start = Instant::now();
    let base = 1_794_700_000_000;
    let tasks = (0..tasks).map(|_| {
        let (store, targets, next) = (store.clone(), Arc::clone(targets), Arc::clone(&next));
        tokio::spawn(async move {
            loop {
                let n = next.fetch_add(1, Ordering::Relaxed);
                if n >= calls {
                    return;
                }
                // Every entity in turn, but no two neighbours of the file in one batch.
                let target = Arc::clone(&targets[n % targets.len()]);
                let takes = [(0, 1), (1, 500)]
                    .map(|(cell, tokens)| Take { cell, amount: amount(tokens).unwrap() });
                let now = Timestamp::from_millis(
                    base + i64::try_from(start.elapsed().as_millis()).unwrap(),
                );
                let leg = Leg { target, takes: takes.into_iter().collect() };
                let plan = Plan { now, legs: [leg].into_iter().collect() };
                let admission = store.acquire(&plan).await.unwrap();
                assert!(matches!(admission, Admission::Taken(_)));
            }
        })
    });
    for task in tasks.collect::<Vec<_>>() {
        task.await.unwrap();
    }
    calls as f64 / start.elapsed().as_secs_f64()
}

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() {
    let mut args = std::env::args().skip(1);
    let calls: usize = args.next().map_or(300_000, |calls| calls.parse().unwrap());
    let mut modes: Vec<String> = args.collect();
    if modes.is_empty() {
        modes = ["hot", "100k", "1m", "full", "full-1"].map(String::from).to_vec();
    }
    for mode in modes {
        let (entities, tasks, durability, calls) = match mode.as_str() {
            "hot" => (1, 64, Durability::Normal, calls),
            "hot-1" => (1, 1, Durability::Normal, calls / 10),
            "100k" => (100_000, 64, Durability::Normal, calls),
            "1m" => (1_000_000, 64, Durability::Normal, calls),
            "1m-1" => (1_000_000, 1, Durability::Normal, calls / 10),
            "full" => (1, 64, Durability::Full, calls / 5),
            "full-1" => (1, 1, Durability::Full, calls / 100),
            other => panic!("no mode {other}"),
        };
        let folder = tempfile::tempdir().unwrap();
        let options = SqliteOptions::new(folder.path().join("limits.db")).durability(durability);
        let store = options.open().unwrap();
        let targets = Arc::new(targets(entities));
        let filled = run(&store, &targets, 64.min(tasks * entities), entities).await;
        let rate = run(&store, &targets, tasks, calls).await;
        println!(
            "{mode:>8}: {rate:>9.0} acquires/s, {tasks} callers, {entities} entities (filled at {filled:.0}/s)"
        );
    }
}
