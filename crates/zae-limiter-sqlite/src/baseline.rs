//! The baseline of benchmarks: plain SQLite writes on the same disk, without a limiter.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rusqlite::Connection;
use zae_limiter_core::StoreError;

use crate::error::Failure;
use crate::schema::create_private;
use crate::{Durability, SqliteStore};

/// How many runs there are. The fastest counts.
const RUNS: usize = 3;

/// A run ends after so many operations, or after so much time.
const OPERATIONS_MAX: u32 = 10_000;
const RUN_MAX: Duration = Duration::from_millis(300);

/// Operations between two looks at the stopwatch.
const LOOK_EVERY: u32 = 32;

const UPDATE: &str =
    "UPDATE bucket SET rpm = rpm - 1, tpm = tpm - 10 WHERE id = ?1 AND rpm >= 1 AND tpm >= 10";

impl SqliteStore {
    /// Measures how many prepared `UPDATE`s per second one connection commits, each in its own
    /// transaction, on a temporary file next to `path`. `None` if `stopwatch` does not advance.
    ///
    /// # Errors
    ///
    /// If there is no room, or no permission, for another file in that folder.
    #[doc(hidden)]
    pub fn baseline_per_second(
        path: &Path,
        durability: Durability,
        stopwatch: &dyn Fn() -> Duration,
    ) -> Result<Option<f64>, StoreError> {
        let file = path.with_file_name(format!("zae-limiter-baseline-{}.db", std::process::id()));
        let scratch = Scratch(file);
        measure(&scratch.0, durability, stopwatch)
            .map_err(|failure| Arc::new(failure).to_store_error(&scratch.0))
    }
}

/// A file that is deleted on drop, together with SQLite's log files.
struct Scratch(PathBuf);

impl Drop for Scratch {
    fn drop(&mut self) {
        for suffix in ["", "-wal", "-shm"] {
            let mut file = self.0.clone().into_os_string();
            file.push(suffix);
            // SQLite has usually removed the two log files already.
            let _ = std::fs::remove_file(file);
        }
    }
}

fn measure(
    file: &Path,
    durability: Durability,
    stopwatch: &dyn Fn() -> Duration,
) -> Result<Option<f64>, Failure> {
    create_private(file)?;
    let connection = Connection::open(file)?;
    let durability = durability.pragmas();
    connection.execute_batch(&format!(
        "PRAGMA journal_mode = WAL; {durability}
         CREATE TABLE bucket (id TEXT PRIMARY KEY, rpm INTEGER, tpm INTEGER) WITHOUT ROWID;
         INSERT INTO bucket VALUES ('key', 1000000000, 1000000000);"
    ))?;
    let mut statement = connection.prepare(UPDATE)?;
    let mut best: Option<f64> = None;
    for _ in 0..RUNS {
        let started = stopwatch();
        let mut operations = 0;
        while operations < OPERATIONS_MAX {
            statement.execute(["key"])?;
            operations += 1;
            if operations % LOOK_EVERY == 0 && stopwatch().saturating_sub(started) >= RUN_MAX {
                break;
            }
        }
        let elapsed = stopwatch().saturating_sub(started).as_secs_f64();
        if elapsed > 0.0 {
            let rate = f64::from(operations) / elapsed;
            best = Some(best.map_or(rate, |best| best.max(rate)));
        }
    }
    Ok(best)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_baseline_leaves_no_files_behind() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("limits.db");
        // A second passes with every look, so that a run ends at the first one.
        let looks = std::cell::Cell::new(0);
        let stopwatch = || Duration::from_secs(looks.replace(looks.get() + 1));
        for durability in [Durability::Normal, Durability::Full] {
            let rate = SqliteStore::baseline_per_second(&path, durability, &stopwatch).unwrap();
            assert!(rate.is_some_and(|rate| rate > 0.0));
        }
        let still = || Duration::ZERO;
        let rate = SqliteStore::baseline_per_second(&path, Durability::Normal, &still).unwrap();
        assert_eq!(rate, None);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_missing_folder_is_an_error() {
        let missing = Path::new("/nowhere/at/all/limits.db");
        let still = || Duration::ZERO;
        assert!(SqliteStore::baseline_per_second(missing, Durability::Normal, &still).is_err());
    }
}
