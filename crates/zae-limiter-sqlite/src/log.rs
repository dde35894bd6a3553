//! Keeps SQLite's log short.
//!
//! SQLite checkpoints the log by itself, but starts it over only at a moment without readers. Many short readers, or one
//! that never ends, let it grow. This one waits a little for the readers, while it holds new ones off.

use std::path::PathBuf;
use std::time::Duration;

use rusqlite::Connection;

use crate::error::Failure;

/// How long a checkpoint waits for readers. Callers wait as long.
const READERS_WAIT: Duration = Duration::from_millis(50);

/// The log of a file.
#[derive(Debug)]
pub(crate) struct Log {
    path: PathBuf,
    /// The size at which SQLite's own checkpoints should have started it over.
    normal_bytes: u64,
    /// The size for the next try. Each try that fails puts it up, so that tries stay rare.
    next_bytes: u64,
}

impl Log {
    /// The log at `path`, which SQLite checkpoints at `normal_bytes`.
    pub(crate) fn new(path: PathBuf, normal_bytes: u64) -> Self {
        Self { path, normal_bytes, next_bytes: normal_bytes.saturating_mul(2) }
    }

    /// Empties the log if it is too long. Must run outside of a transaction.
    pub(crate) fn bound(&mut self, conn: &Connection) {
        let Ok(found) = std::fs::metadata(&self.path) else { return };
        let bytes = found.len();
        if bytes < self.next_bytes {
            return;
        }
        match empty(conn) {
            Ok(true) => self.next_bytes = self.normal_bytes.saturating_mul(2),
            emptied => {
                self.next_bytes = bytes.saturating_add(self.normal_bytes);
                tracing::warn!(
                    failure = emptied.err().map(tracing::field::display),
                    megabytes = bytes >> 20,
                    "SQLite's log grows, because a program keeps a read transaction open; end that program"
                );
            }
        }
    }
}

/// Returns whether the log is empty now.
fn empty(conn: &Connection) -> Result<bool, Failure> {
    conn.busy_timeout(READERS_WAIT)?;
    let is_busy =
        conn.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |row| row.get::<_, bool>(0));
    conn.busy_timeout(Duration::ZERO)?;
    Ok(!is_busy?)
}

#[cfg(test)]
mod tests {
    use rusqlite::params;

    use super::*;
    use crate::{Durability, schema};

    const NORMAL: u64 = 64 << 10;

    fn length(log: &Log) -> u64 {
        std::fs::metadata(&log.path).unwrap().len()
    }

    /// Writes until the log is longer than `bytes`.
    fn write_beyond(bytes: u64, conn: &Connection, log: &Log) {
        let sql = "INSERT OR REPLACE INTO namespace_name (name, id) VALUES (?1, ?2)";
        for n in 0..10_000 {
            conn.execute(sql, params![n.to_string(), "x".repeat(500)]).unwrap();
            if length(log) > bytes {
                return;
            }
        }
        panic!("the log stays at {} bytes", length(log));
    }

    #[test]
    fn a_long_log_is_emptied_as_soon_as_its_reader_ends() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("limits.db");
        let conn = schema::open_writer(&file, Durability::Normal).unwrap();
        let reader = schema::open_reader(&file).unwrap();
        let mut log = Log::new(folder.path().join("limits.db-wal"), NORMAL);

        write_beyond(NORMAL, &conn, &log);
        log.bound(&conn);
        assert!(length(&log) > NORMAL, "a normal log is left to SQLite");

        reader.execute_batch("BEGIN; SELECT count(*) FROM namespace_name").unwrap();
        write_beyond(2 * NORMAL, &conn, &log);
        log.bound(&conn);
        let starved = length(&log);
        assert!(starved > 2 * NORMAL, "it cannot be emptied under a reader");
        assert_eq!(log.next_bytes, starved + NORMAL, "the next try waits for more");

        reader.execute_batch("ROLLBACK").unwrap();
        write_beyond(starved + NORMAL, &conn, &log);
        log.bound(&conn);
        assert_eq!(length(&log), 0);
        assert_eq!(log.next_bytes, 2 * NORMAL);
    }
}
