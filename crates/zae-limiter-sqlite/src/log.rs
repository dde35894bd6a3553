//! Keeps SQLite's log short.
//!
//! SQLite would checkpoint a long log at the end of a `COMMIT`, which copies up to 128 MiB on the thread of whoever
//! commits. So a hook only notes the length, and the writer's thread checkpoints.
//!
//! The first commit to an empty log flushes the log's header, and so does the one that starts a log over that was copied.
//! So the writer's thread does these commits as well.
//!
//! A checkpoint starts the log over only at a moment without readers. Many short readers, or one that never ends, let it
//! grow. This one waits a little for the readers, while it holds new ones off.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::time::Duration;

use rusqlite::Connection;

use crate::error::Failure;

/// How long a checkpoint waits for readers. Callers wait as long.
const READERS_WAIT: Duration = Duration::from_millis(50);

/// The size from which a log is emptied that did not start over at its normal size. What remains to twice that size is
/// room for the batch that goes beyond it.
const fn too_long(normal_bytes: u64) -> u64 {
    normal_bytes.saturating_add(normal_bytes / 2)
}

/// The log of a file.
#[derive(Debug)]
pub(crate) struct Log {
    path: PathBuf,
    /// Pages in the log after the last commit of the watched connection.
    pages: Arc<AtomicI32>,
    /// Whether the next commit may write the log's header: the log is empty or copied, as far as this connection knows.
    starts_over: Arc<AtomicBool>,
    /// The size at which a checkpoint is due. Soon afterwards the log should start over.
    normal_bytes: u64,
    /// The size for the next try. Each try that fails puts it up, so that tries stay rare.
    next_bytes: u64,
}

impl Log {
    /// The log at `path`, which is due for a checkpoint at `normal_bytes`.
    pub(crate) fn new(path: PathBuf, normal_bytes: u64) -> Self {
        let next_bytes = too_long(normal_bytes);
        let starts_over = Arc::new(AtomicBool::new(true));
        Self { path, pages: Arc::default(), starts_over, normal_bytes, next_bytes }
    }

    /// Notes the length of the log at each commit of a connection, which no longer checkpoints by itself.
    pub(crate) fn watch(&self, conn: &mut Connection) -> Result<(), Failure> {
        let (pages, starts_over) = (Arc::clone(&self.pages), Arc::clone(&self.starts_over));
        // Relaxed: whoever reads them holds the connection.
        let note = move |_: &mut rusqlite::hooks::Wal, now| {
            pages.store(now, Ordering::Relaxed);
            starts_over.store(false, Ordering::Relaxed);
            Ok(())
        };
        Ok(conn.wal_hook(Some(note))?)
    }

    #[cfg(test)]
    pub(crate) fn pretend_it_is_long(&self) {
        self.pages.store(i32::MAX, Ordering::Relaxed);
    }

    /// The pages in it after the last commit.
    #[cfg(test)]
    pub(crate) fn length(&self) -> i32 {
        self.pages.load(Ordering::Relaxed)
    }

    #[cfg(test)]
    pub(crate) fn next_bytes(&self) -> u64 {
        self.next_bytes
    }

    /// Whether the log is so long that it should be copied into the file.
    pub(crate) fn is_due(&self) -> bool {
        let pages = u64::try_from(self.pages.load(Ordering::Relaxed)).unwrap_or(0);
        pages * u64::from(crate::schema::PAGE_BYTES) >= self.normal_bytes
    }

    /// Whether the next commit may flush the log's header.
    pub(crate) fn starts_over(&self) -> bool {
        self.starts_over.load(Ordering::Relaxed)
    }

    /// Copies a long log into the file, as far as readers allow. Must run outside of a transaction.
    pub(crate) fn checkpoint_if_due(&self, conn: &Connection) {
        if self.is_due() {
            self.forget_length();
            // If it fails, the next commit shows that the log is still long.
            match conn.query_row("PRAGMA wal_checkpoint(PASSIVE)", [], may_start_over) {
                Ok(true) => self.starts_over.store(true, Ordering::Relaxed),
                Ok(false) => {}
                Err(failure) => {
                    tracing::debug!(%failure, "could not copy SQLite's log into the file");
                }
            }
        }
    }

    /// Nothing is due before the next commit.
    pub(crate) fn forget_length(&self) {
        self.pages.store(0, Ordering::Relaxed);
    }

    /// Empties the log if it is too long. Must run outside of a transaction.
    pub(crate) fn bound(&mut self, conn: &Connection) {
        let Ok(found) = std::fs::metadata(&self.path) else { return };
        let bytes = found.len();
        if bytes < self.next_bytes {
            return;
        }
        match self.empty(conn, READERS_WAIT) {
            Ok(true) => self.next_bytes = too_long(self.normal_bytes),
            emptied => {
                self.next_bytes = bytes.saturating_add(self.normal_bytes);
                let megabytes = bytes >> 20;
                match emptied {
                    Err(failure) => {
                        tracing::warn!(%failure, megabytes, "SQLite's log grows: it cannot be copied to the file");
                    }
                    _ => tracing::warn!(
                        megabytes,
                        "SQLite's log grows, because a program keeps a read transaction open; end that program"
                    ),
                }
            }
        }
    }

    /// Copies the log into the file and empties it. Waits so long for readers. Returns whether the log is empty now.
    pub(crate) fn empty(&self, conn: &Connection, wait: Duration) -> Result<bool, Failure> {
        self.starts_over.store(true, Ordering::Relaxed);
        conn.busy_timeout(wait)?;
        let is_busy =
            conn.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |row| row.get::<_, bool>(0));
        conn.busy_timeout(Duration::ZERO)?;
        Ok(!is_busy?)
    }
}

/// Whether a checkpoint has copied the whole log. If another process is at it, that may do so.
fn may_start_over(row: &rusqlite::Row<'_>) -> rusqlite::Result<bool> {
    let [is_busy, pages, copied] = [row.get::<_, i64>(0)?, row.get(1)?, row.get(2)?];
    Ok(is_busy != 0 || pages == copied)
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
        assert_eq!(log.next_bytes, NORMAL + NORMAL / 2);
    }

    #[test]
    fn a_long_log_is_copied_by_a_checkpoint_and_not_by_a_commit() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("limits.db");
        let mut conn = schema::open_writer(&file, Durability::Normal).unwrap();
        conn.execute_batch("PRAGMA wal_autocheckpoint = 16").unwrap();
        let log = Log::new(folder.path().join("limits.db-wal"), NORMAL);
        log.watch(&mut conn).unwrap();
        let written = std::fs::metadata(&file).unwrap().len();
        write_beyond(4 * NORMAL, &conn, &log);
        assert_eq!(std::fs::metadata(&file).unwrap().len(), written, "commits copy nothing");
        assert!(log.is_due());
        log.checkpoint_if_due(&conn);
        assert!(std::fs::metadata(&file).unwrap().len() > written && !log.is_due());
        let sql = "INSERT INTO namespace_name (name, id) VALUES ('one more', 'x')";
        conn.execute(sql, []).unwrap();
        assert!((1..10).contains(&log.pages.load(Ordering::Relaxed)), "the log starts over");
        assert!(!log.is_due());
    }

    const FILE: &str = "ZAEL_TEST_LOG_FILE";
    const WRITTEN: &str = "rows written: ";

    fn rows(conn: &Connection) -> i64 {
        let sql = "SELECT count(*) FROM namespace_name";
        conn.query_row(sql, [], |row| row.get(0)).unwrap()
    }

    /// The next test runs this one as a child process, and kills it.
    #[test]
    fn child_writes_until_it_is_killed() {
        let Some(file) = std::env::var_os(FILE).map(PathBuf::from) else { return };
        let conn = schema::open_writer(&file, Durability::Normal).unwrap();
        let mut log = Log::new(file.with_extension("db-wal"), NORMAL);
        write_beyond(4 * NORMAL, &conn, &log);
        log.bound(&conn);
        println!("\n{}{}", WRITTEN, rows(&conn));
        // Until the parent kills it, or ends.
        let _ = std::io::stdin().read_line(&mut String::new());
    }

    #[test]
    fn a_log_that_a_killed_process_left_is_emptied_by_the_next_one() {
        use std::io::BufRead as _;
        use std::process::{Command, Stdio};
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("limits.db");
        drop(schema::open_writer(&file, Durability::Normal).unwrap());
        let reader = schema::open_reader(&file).unwrap();
        reader.execute_batch("BEGIN").unwrap();
        assert_eq!(rows(&reader), 0);
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "log::tests::child_writes_until_it_is_killed", "--nocapture"])
            .env(FILE, &file)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = std::io::BufReader::new(child.stdout.take().unwrap()).lines();
        let written = lines.find_map(|line| line.unwrap().strip_prefix(WRITTEN)?.parse().ok());
        let written: i64 = written.unwrap();
        child.kill().unwrap();
        child.wait().unwrap();

        // The next process, while the reader still reads.
        let conn = schema::open_writer(&file, Durability::Normal).unwrap();
        let mut log = Log::new(folder.path().join("limits.db-wal"), NORMAL);
        let left = length(&log);
        assert!(left > 4 * NORMAL);
        log.bound(&conn);
        assert_eq!((length(&log), log.next_bytes), (left, left + NORMAL), "the reader needs it");
        assert_eq!(rows(&reader), 0, "the reader reads what it began with");
        reader.execute_batch("ROLLBACK").unwrap();
        assert_eq!(rows(&reader), written, "the killed process lost nothing");
        write_beyond(left + NORMAL, &conn, &log);
        log.bound(&conn);
        assert_eq!(length(&log), 0);
        assert!(rows(&reader) >= written);
    }

    /// What SQLite does by itself once the last reader has gone.
    #[test]
    fn sqlite_cuts_a_log_that_was_too_long() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("limits.db");
        let conn = schema::open_writer(&file, Durability::Normal).unwrap();
        let sql = format!("PRAGMA journal_size_limit = {NORMAL}; PRAGMA wal_autocheckpoint = 64");
        conn.execute_batch(&sql).unwrap();
        let log = Log::new(folder.path().join("limits.db-wal"), NORMAL);
        let reader = schema::open_reader(&file).unwrap();
        reader.execute_batch("BEGIN; SELECT count(*) FROM namespace_name").unwrap();
        write_beyond(4 * NORMAL, &conn, &log);
        reader.execute_batch("ROLLBACK").unwrap();
        for n in 0..3 {
            let sql = "INSERT INTO namespace_name (name, id) VALUES (?1, 'x')";
            conn.execute(sql, [format!("more-{n}")]).unwrap();
        }
        assert!(length(&log) <= NORMAL, "{} bytes", length(&log));
    }
}
