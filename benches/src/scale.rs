//! The cost of an acquire by the number of entities, from one to a million.

use std::sync::Arc;
use std::time::{Duration, Instant};

use zae_limiter_core::{
    Admission, BucketKey, EntityId, Leg, Lifetime, LimitSet, NamespaceId, Plan, ResourceName,
    Store, Take, Target, Timestamp, amount,
};
use zae_limiter_sqlite::{Durability, SqliteOptions, SqliteStore};

use crate::measure::{ROUNDS, Walk, allocated, best_nanos, count_allocations, keys};
use crate::memory::{acquire_and_commit, block_on, limiter as memory_limiter, limits};
use crate::report::{Report, grouped};
use crate::sqlite::{CALLERS, Folder, run_callers, runtime};

pub fn run(report: &mut Report) {
    report.title("Scale: one acquire, two limits, by the number of entities");
    report.line(
        "| entities | memory, ns | memory, bytes per entity | SQLite, 1 caller, µs | \
         SQLite, 64 callers, µs | file, bytes per entity |",
    );
    report.line("| ---: | ---: | ---: | ---: | ---: | ---: |");
    for entities in [1, 1_000, 100_000, 1_000_000] {
        let (nanos, bytes) = memory(&keys(entities));
        let (alone, together, file) = sqlite(entities);
        report.line(format!(
            "| {} | {} | {bytes} | {alone:.1} | {together:.1} | {} |",
            grouped(entities as f64),
            grouped(nanos),
            grouped(file as f64),
        ));
    }
}

/// Nanoseconds per acquire, and bytes per entity: its bucket and its cached limits.
fn memory(keys: &[String]) -> (f64, usize) {
    let limiter = memory_limiter();
    let before = allocated();
    count_allocations(true);
    block_on(async {
        for key in keys.iter() {
            acquire_and_commit(&limiter, key).await;
        }
    });
    count_allocations(false);
    let bytes = (allocated() - before) / keys.len();
    let nanos = best_nanos(1, 400_000, |thread, operations| {
        let mut walk = Walk::new(thread, keys.len());
        block_on(async {
            for _ in 0..operations {
                acquire_and_commit(&limiter, &keys[walk.next_place()]).await;
            }
        });
    });
    (nanos, bytes)
}

/// Runs the SQLite store only, for `perf`.
pub fn profile(entities: usize) {
    let (alone, together, file) = sqlite(entities);
    println!("{alone:.1} µs alone, {together:.1} µs together, {file} bytes per entity");
}

/// The store without a limiter: microseconds per acquire of one caller and of many, and bytes per
/// entity on disk.
fn sqlite(entities: usize) -> (f64, f64, u64) {
    let folder = Folder::new();
    let path = folder.path("limits.db");
    let store = SqliteOptions::new(&path).durability(Durability::Normal).open().expect("a store");
    let targets = Arc::new(targets(entities));
    let runtime = runtime();
    // Creates every bucket.
    let fill = entities.div_ceil(CALLERS);
    run_callers(&runtime, CALLERS, |caller| {
        let (store, targets) = (store.clone(), Arc::clone(&targets));
        async move {
            for target in targets.iter().skip(caller * fill).take(fill) {
                acquire(&store, target).await;
            }
        }
    });
    let alone = best_micros(&runtime, &store, &targets, 1, 20_000);
    let together = best_micros(&runtime, &store, &targets, CALLERS, 200_000);
    drop(store);
    let bytes = std::fs::metadata(&path).expect("the file").len();
    (alone, together, bytes / entities as u64)
}

fn best_micros(
    runtime: &tokio::runtime::Runtime,
    store: &SqliteStore,
    targets: &Arc<Vec<Arc<Target>>>,
    callers: usize,
    operations: usize,
) -> f64 {
    let mut best = Duration::MAX;
    for round in 0..ROUNDS {
        let start = Instant::now();
        run_callers(runtime, callers, |caller| {
            let (store, targets) = (store.clone(), Arc::clone(targets));
            async move {
                let mut walk = Walk::new(caller + round * callers, targets.len());
                for _ in 0..operations / callers {
                    acquire(&store, &targets[walk.next_place()]).await;
                }
            }
        });
        best = best.min(start.elapsed());
    }
    best.as_secs_f64() * 1e6 / operations as f64
}

fn targets(entities: usize) -> Vec<Arc<Target>> {
    let limits = Arc::new(LimitSet::new(limits()).expect("valid"));
    let namespace = NamespaceId::new("benchmarks_").expect("valid");
    let resource = ResourceName::new("gpt-4").expect("valid");
    let target = |id: String| {
        let key = BucketKey {
            namespace: namespace.clone(),
            entity: EntityId::new(id).expect("valid"),
            resource: resource.clone(),
        };
        Arc::new(Target::new(key, Arc::clone(&limits), Lifetime::Forever))
    };
    keys(entities).into_iter().map(target).collect()
}

async fn acquire(store: &SqliteStore, target: &Arc<Target>) {
    let take = |cell, tokens| Take { cell, amount: amount(tokens).expect("small") };
    let leg = Leg { target: Arc::clone(target), takes: [take(0, 1), take(1, 10)].into() };
    // A fixed time, so that nothing refills.
    let plan =
        Plan { max_skew: None, now: Timestamp::from_millis(1_794_752_736_789), legs: [leg].into() };
    let admission = store.acquire(&plan).await.expect("an answer");
    assert!(matches!(admission, Admission::Taken(_)), "the limits are far away");
}
