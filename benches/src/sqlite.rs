//! The SQLite store under 64 callers, compared with one hand-written statement per transaction.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rusqlite::Connection;
use zae_limiter_core::RateLimiter;
use zae_limiter_sqlite::{Durability, SqliteOptions};

use crate::measure::{ROUNDS, Walk, keys};
use crate::memory::{acquire_and_commit, limits};
use crate::report::{Report, grouped};

pub const CALLERS: usize = 64;

pub fn run(report: &mut Report) {
    report.title("SQLite: acquires per second, two limits each");
    report.line(
        "| durability | entities | baseline | 1 caller | 64 callers | 64 callers : baseline |",
    );
    report.line("| --- | ---: | ---: | ---: | ---: | ---: |");
    for (name, durability, pragma) in
        [("normal", Durability::Normal, "NORMAL"), ("full", Durability::Full, "FULL")]
    {
        let full = durability == Durability::Full;
        let single = baseline(pragma, if full { 2_000 } else { 40_000 });
        for entities in [1, 100_000] {
            let folder = Folder::new();
            let limiter = limiter(&folder.path("limits.db"), durability);
            let keys = Arc::new(keys(entities));
            let runtime = runtime();
            warm(&runtime, &limiter, &keys);
            let alone = per_second(&runtime, &limiter, &keys, 1, if full { 1_000 } else { 20_000 });
            let many =
                per_second(&runtime, &limiter, &keys, CALLERS, if full { 60_000 } else { 400_000 });
            report.line(format!(
                "| {name} | {} | {} | {} | {} | {:.1} |",
                grouped(entities as f64),
                grouped(single),
                grouped(alone),
                grouped(many),
                many / single
            ));
        }
    }
}

/// Transactions per second with one prepared `UPDATE` each, and nothing else.
fn baseline(synchronous: &str, operations: usize) -> f64 {
    let folder = Folder::new();
    let connection = Connection::open(folder.path("baseline.db")).expect("a file");
    connection
        .execute_batch(&format!(
            "PRAGMA journal_mode = WAL; PRAGMA synchronous = {synchronous};
             CREATE TABLE bucket (id TEXT PRIMARY KEY, rpm INTEGER, tpm INTEGER) WITHOUT ROWID;
             INSERT INTO bucket VALUES ('key-0000000', 1000000000, 1000000000);"
        ))
        .expect("a table");
    let sql = "UPDATE bucket SET rpm = rpm - 1, tpm = tpm - 10 \
               WHERE id = ?1 AND rpm >= 1 AND tpm >= 10";
    let mut statement = connection.prepare(sql).expect("a statement");
    let mut best = Duration::MAX;
    for _ in 0..ROUNDS {
        let start = Instant::now();
        for _ in 0..operations {
            assert_eq!(statement.execute(["key-0000000"]).expect("an update"), 1);
        }
        best = best.min(start.elapsed());
    }
    operations as f64 / best.as_secs_f64()
}

pub fn limiter(path: &Path, durability: Durability) -> RateLimiter {
    let store = SqliteOptions::new(path).durability(durability).open().expect("a store");
    crate::memory::block_on(async {
        let builder = RateLimiter::builder(store).cache_capacity(2_000_000);
        let limiter = builder.deadline(Duration::from_secs(60)).open().await.expect("a limiter");
        limiter.set_resource_defaults("gpt-4", limits()).await.expect("limits");
        limiter
    })
}

pub fn runtime() -> tokio::runtime::Runtime {
    let builder = &mut tokio::runtime::Builder::new_multi_thread();
    builder.worker_threads(2).enable_time().build().expect("a runtime")
}

/// Creates every bucket, and fills the limiter's cache.
pub fn warm(runtime: &tokio::runtime::Runtime, limiter: &RateLimiter, keys: &Arc<Vec<String>>) {
    let next = Arc::new(AtomicUsize::new(0));
    run_callers(runtime, CALLERS, |_| {
        let (limiter, keys, next) = (limiter.clone(), Arc::clone(keys), Arc::clone(&next));
        async move {
            while let Some(key) = keys.get(next.fetch_add(1, Ordering::Relaxed)) {
                acquire_and_commit(&limiter, key).await;
            }
        }
    });
}

/// Acquires per second by concurrent callers: the best of several rounds of `operations` in all.
pub fn per_second(
    runtime: &tokio::runtime::Runtime,
    limiter: &RateLimiter,
    keys: &Arc<Vec<String>>,
    callers: usize,
    operations: usize,
) -> f64 {
    let mut best = Duration::MAX;
    for _ in 0..ROUNDS {
        let start = Instant::now();
        run_callers(runtime, callers, |caller| {
            let (limiter, keys) = (limiter.clone(), Arc::clone(keys));
            async move {
                let mut walk = Walk::new(caller, keys.len());
                for _ in 0..operations / callers {
                    acquire_and_commit(&limiter, &keys[walk.next_place()]).await;
                }
            }
        });
        best = best.min(start.elapsed());
    }
    operations as f64 / best.as_secs_f64()
}

pub fn run_callers<F: Future<Output = ()> + Send + 'static>(
    runtime: &tokio::runtime::Runtime,
    callers: usize,
    caller: impl Fn(usize) -> F,
) {
    let tasks: Vec<_> = (0..callers).map(|n| runtime.spawn(caller(n))).collect();
    runtime.block_on(async {
        for task in tasks {
            task.await.expect("no panic");
        }
    });
}

/// A temporary folder, removed on drop.
pub struct Folder(std::path::PathBuf);

impl Folder {
    pub fn new() -> Self {
        static NUMBER: AtomicUsize = AtomicUsize::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("zae-limiter-bench-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir(&path).expect("a new folder");
        Self(path)
    }

    pub fn path(&self, file: &str) -> std::path::PathBuf {
        self.0.join(file)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
