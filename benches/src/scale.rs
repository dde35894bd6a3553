//! Whether an acquire costs the same with one entity and with a million.

use std::sync::Arc;

use zae_limiter_sqlite::Durability;

use crate::measure::{Walk, allocated, best_nanos, count_allocations, keys};
use crate::memory::{acquire_and_commit, block_on, limiter as memory_limiter};
use crate::sqlite::{CALLERS, Folder, limiter as sqlite_limiter, per_second, runtime, warm};

pub fn run() {
    println!("\n## Scale: one acquire and commit, two limits, by the number of entities\n");
    println!("| entities | memory, ns | memory, bytes per entity | SQLite, 64 callers, µs | file, bytes per entity |");
    println!("| ---: | ---: | ---: | ---: | ---: |");
    for entities in [1, 1_000, 100_000, 1_000_000] {
        let keys = Arc::new(keys(entities));
        let (nanos, bytes) = memory(&keys);
        let (micros, file) = sqlite(&keys);
        println!("| {entities} | {nanos:.0} | {bytes} | {micros:.1} | {file} |");
    }
}

/// Time, and bytes: the bucket, and what the limiter remembers of its limits.
fn memory(keys: &Arc<Vec<String>>) -> (f64, usize) {
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

fn sqlite(keys: &Arc<Vec<String>>) -> (f64, u64) {
    let folder = Folder::new();
    let path = folder.path("limits.db");
    let limiter = sqlite_limiter(&path, Durability::Normal);
    let runtime = runtime();
    warm(&runtime, &limiter, keys);
    let rate = per_second(&runtime, &limiter, keys, CALLERS, 400_000);
    drop(limiter);
    let bytes = std::fs::metadata(&path).expect("the file").len();
    (1e6 / rate, bytes / keys.len() as u64)
}
