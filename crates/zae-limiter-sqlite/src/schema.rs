//! Recognises, creates and opens the file. `docs/sqlite-format.md` describes its contents.
//!
//! A file of another program, a damaged one, or one of a later release is never changed.

use std::fs::OpenOptions;
use std::path::Path;
use std::time::Duration;

use rusqlite::config::DbConfig;
use rusqlite::{Connection, OpenFlags};
use zae_limiter_core::StoreErrorKind;

use crate::Durability;
use crate::error::Failure;
use crate::open_files::beside;

/// `zael` in ASCII, SQLite's `application_id`: marks a file as a limiter's.
const APPLICATION_ID: i32 = 0x7a61_656c;

/// The version of the tables below, kept in SQLite's `user_version`.
const SCHEMA_VERSION: i32 = 3;

/// The statements that upgrade each earlier version to the next one, from version 1 on.
const UPGRADES: [&str; 2] = [
    "ALTER TABLE config ADD COLUMN audit_retention_days INTEGER",
    "ALTER TABLE namespace ADD COLUMN purging INTEGER NOT NULL DEFAULT 0;
     CREATE TABLE sweep (delay INTEGER PRIMARY KEY, seen INTEGER NOT NULL, until INTEGER) STRICT",
];

/// How long SQLite waits for another program's lock, for example while that program creates the
/// file.
const OPEN_WAIT: Duration = Duration::from_millis(50);

/// How often opening is tried. SQLite reports a busy file at once, without waiting, where two
/// programs would wait for each other.
const OPEN_TRIES_MAX: usize = 100;

/// Most writes change one row, but SQLite logs the whole page. Small pages keep the log short.
pub(crate) const PAGE_BYTES: u32 = 1_024;

/// Pages in the log before a checkpoint copies them into the file: at most 128 MiB, and only where
/// many buckets are busy. A checkpoint costs two syncs and one scattered write per changed page.
/// A page that changed often since the last checkpoint is copied once. `log.rs` decides who does it.
const LOG_PAGES_MAX: u32 = 131_072;

/// The size of the log at a checkpoint. After a longer one, SQLite cuts the log to this size.
pub(crate) const LOG_BYTES_MAX: u64 = LOG_PAGES_MAX as u64 * PAGE_BYTES as u64;

/// Page caches. A negative `cache_size` is in KiB. That of the writer has room for the pages of a million buckets, and
/// fills only where that many are busy: reading a page again costs about as much as writing it.
const WRITER_CACHE_KIB: i32 = 192 << 10;
const READER_CACHE_KIB: i32 = 8 << 10;

const STATEMENTS_MAX: usize = 128;

/// All tables but `bucket` are clustered by their keys. The writer caches a bucket's `number` and
/// finds its row by that, without comparing text. Only columns that never change are indexed, so
/// that updating a bucket changes one page.
const TABLES: &str = "
CREATE TABLE bucket (
    number INTEGER PRIMARY KEY,
    ns TEXT NOT NULL, entity TEXT NOT NULL, resource TEXT NOT NULL,
    expires_at INTEGER, state BLOB NOT NULL,
    UNIQUE (ns, entity, resource)
) STRICT;
CREATE INDEX bucket_by_resource ON bucket (ns, resource, entity);

CREATE TABLE entity (
    ns TEXT NOT NULL, id TEXT NOT NULL,
    name TEXT, parent TEXT, cascade INTEGER NOT NULL, metadata TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    PRIMARY KEY (ns, id)
) WITHOUT ROWID, STRICT;
CREATE INDEX entity_by_parent ON entity (ns, parent, id) WHERE parent IS NOT NULL;

CREATE TABLE config (
    ns TEXT NOT NULL, level INTEGER NOT NULL, resource TEXT NOT NULL, entity TEXT NOT NULL,
    version INTEGER NOT NULL, on_unavailable TEXT, limits BLOB NOT NULL,
    audit_retention_days INTEGER,
    PRIMARY KEY (ns, level, resource, entity)
) WITHOUT ROWID, STRICT;
CREATE INDEX config_by_entity ON config (ns, entity, level, resource) WHERE entity <> '';

CREATE TABLE audit (
    ns TEXT NOT NULL, subject TEXT NOT NULL, id TEXT NOT NULL,
    at INTEGER NOT NULL, action TEXT NOT NULL, principal TEXT, resource TEXT,
    details TEXT NOT NULL, expires_at INTEGER,
    PRIMARY KEY (ns, subject, id)
) WITHOUT ROWID, STRICT;

CREATE TABLE usage (
    ns TEXT NOT NULL, entity TEXT NOT NULL, window INTEGER NOT NULL, resource TEXT NOT NULL,
    start INTEGER NOT NULL,
    events INTEGER NOT NULL, consumed BLOB NOT NULL, expires_at INTEGER,
    PRIMARY KEY (ns, entity, window, resource, start)
) WITHOUT ROWID, STRICT;
CREATE INDEX usage_by_resource ON usage (ns, resource, window, start, entity);

CREATE TABLE namespace (
    id TEXT NOT NULL PRIMARY KEY,
    name TEXT NOT NULL, created_at INTEGER NOT NULL, deleted_at INTEGER,
    purging INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID, STRICT;

CREATE TABLE namespace_name (
    name TEXT NOT NULL PRIMARY KEY,
    id TEXT NOT NULL
) WITHOUT ROWID, STRICT;

CREATE TABLE sweep (
    delay INTEGER PRIMARY KEY,
    seen INTEGER NOT NULL, until INTEGER
) STRICT;
";

/// Names every table and column, so that opening a file that lacks one fails.
const TABLES_CHECK: &[&str] = &[
    "SELECT number, ns, entity, resource, expires_at, state FROM bucket LIMIT 0",
    "SELECT ns, id, name, parent, cascade, metadata, created_at FROM entity LIMIT 0",
    "SELECT ns, level, resource, entity, version, on_unavailable, limits, audit_retention_days \
     FROM config LIMIT 0",
    "SELECT ns, subject, id, at, action, principal, resource, details, expires_at FROM audit \
     LIMIT 0",
    "SELECT ns, entity, window, resource, start, events, consumed, expires_at FROM usage LIMIT 0",
    "SELECT id, name, created_at, deleted_at, purging FROM namespace LIMIT 0",
    "SELECT name, id FROM namespace_name LIMIT 0",
    "SELECT delay, seen, until FROM sweep LIMIT 0",
];

/// Opens the file for the writer, and creates it if it does not exist.
pub(crate) fn open_writer(path: &Path, durability: Durability) -> Result<Connection, Failure> {
    retry_while_busy(|| try_open_writer(path, durability))
}

/// Opens the file for the reader. The writer must have opened it before.
pub(crate) fn open_reader(path: &Path) -> Result<Connection, Failure> {
    retry_while_busy(|| {
        let conn = connect(path, OpenFlags::SQLITE_OPEN_READ_WRITE)?;
        conn.execute_batch(&format!(
            "PRAGMA query_only = ON; PRAGMA cache_size = -{READER_CACHE_KIB};"
        ))?;
        Ok(conn)
    })
}

fn retry_while_busy(open: impl Fn() -> Result<Connection, Failure>) -> Result<Connection, Failure> {
    for _ in 1..OPEN_TRIES_MAX {
        match open() {
            Err(failure) if failure.is_busy() => std::thread::park_timeout(OPEN_WAIT / 10),
            opened => return opened,
        }
    }
    open()
}

fn try_open_writer(path: &Path, durability: Durability) -> Result<Connection, Failure> {
    let conn = connect(path, OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_CREATE)?;
    // The version of a file that a killed program left, or its tables, can stand only in the log.
    conn.set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, true)?;
    let opened = set_up(&conn, durability);
    let has_log = std::fs::metadata(beside(path, "-wal")).is_ok_and(|log| log.len() > 0);
    if opened.is_ok() || !has_log {
        // SQLite may remove an empty log, which it has made itself.
        conn.set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, false)?;
    }
    opened.map(|()| conn)
}

/// Recognises the file, creates or upgrades its tables, and sets how the writer uses it.
fn set_up(conn: &Connection, durability: Durability) -> Result<(), Failure> {
    if conn.is_readonly("main")? {
        return Err(DENIED);
    }
    if inspect(conn)? != Found::Current {
        create(conn)?;
    }
    for sql in TABLES_CHECK {
        conn.prepare(sql)?;
    }
    let mode: String = conn.query_row("PRAGMA journal_mode = WAL", [], |row| row.get(0))?;
    if mode != "wal" {
        let message = "is on a file system without shared memory; put it on a local disk";
        return Err(Failure::Unusable(StoreErrorKind::Denied, message));
    }
    let durability = durability.pragmas();
    conn.execute_batch(&format!(
        "{durability}
         PRAGMA cache_size = -{WRITER_CACHE_KIB};
         PRAGMA wal_autocheckpoint = {LOG_PAGES_MAX};
         PRAGMA journal_size_limit = {LOG_BYTES_MAX};"
    ))?;
    // From here on the writer itself waits for locks, so that callers can leave meanwhile.
    Ok(conn.busy_timeout(Duration::ZERO)?)
}

const DENIED: Failure = Failure::Unusable(
    StoreErrorKind::Denied,
    "is read-only; make the file and its folder writable for this program",
);
const FOREIGN: Failure = Failure::Unusable(
    StoreErrorKind::Corrupt,
    "is a database of another program and was left untouched; use another file",
);
const NEWER: Failure = Failure::Unusable(
    StoreErrorKind::Incompatible,
    "was written by a later release and was left untouched; upgrade this program",
);

const OLDER: Failure = Failure::Unusable(
    StoreErrorKind::Incompatible,
    "was replaced by one of an earlier release, such as a backup, while it was open; open the store again",
);

/// Creates an empty file that only its owner can read: balances and entity ids, which are often API keys, concern
/// nobody else. SQLite gives its log files the mode of the file. An existing file keeps its mode.
pub(crate) fn create_private(path: &Path) -> Result<(), Failure> {
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    match options.open(path) {
        Ok(_) => Ok(()),
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {
            // A link to a file that does not exist yet.
            if !path.exists() {
                let _ = options.create_new(false).create(true).open(path);
            }
            Ok(())
        }
        Err(error) if error.kind() == std::io::ErrorKind::StorageFull => Err(Failure::Unusable(
            StoreErrorKind::Full,
            "cannot be created: there is no space left; free some",
        )),
        Err(_) => Err(Failure::Unusable(
            StoreErrorKind::Denied,
            "cannot be created; check the permissions of its folder",
        )),
    }
}

fn connect(path: &Path, flags: OpenFlags) -> Result<Connection, Failure> {
    // No mutex: one thread owns each connection.
    let conn = Connection::open_with_flags(path, flags | OpenFlags::SQLITE_OPEN_NO_MUTEX)?;
    conn.busy_timeout(OPEN_WAIT)?;
    conn.set_prepared_statement_cache_capacity(STATEMENTS_MAX);
    Ok(conn)
}

/// Checks a path before the file is opened.
pub(crate) fn check_path(path: &Path) -> Result<(), Failure> {
    let denied = |message| Err(Failure::Unusable(StoreErrorKind::Denied, message));
    if path.is_dir() {
        return denied("is a folder; name a file in it");
    }
    if path.parent().is_some_and(|folder| !folder.is_dir()) {
        return denied("is in a folder that does not exist; create it first");
    }
    // Opening a pipe would block until somebody writes to it, and SQLite would create its log files
    // next to a device.
    if path.metadata().is_ok_and(|found| !found.is_file()) {
        return denied("is not a regular file; name another one");
    }
    Ok(())
}

/// Checks the first 100 bytes before SQLite opens the file. Merely opening another program's database could checkpoint
/// its log, or roll back its journal. A new file is empty. A file without an application id can only become a limiter's
/// if it has no tables, and one with a journal had some, or is about to have.
pub(crate) fn check_start(header: &[u8], has_journal: bool) -> Result<(), Failure> {
    if header.is_empty() {
        return Ok(());
    }
    if header.len() < 100 || !header.starts_with(b"SQLite format 3\0") {
        let message = "is not a limiter's file and was left untouched; use another file";
        return Err(Failure::Unusable(StoreErrorKind::Corrupt, message));
    }
    let number = |at: usize| {
        i32::from_be_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]])
    };
    match (number(68), number(60)) {
        (APPLICATION_ID, version) if version > SCHEMA_VERSION => Err(NEWER),
        (APPLICATION_ID, _) => Ok(()),
        (0, _) if !has_journal => Ok(()),
        _ => Err(FOREIGN),
    }
}

/// Writes a page without changing anything, within a transaction that has [checked](check_version) the version.
pub(crate) fn touch(conn: &Connection) -> Result<(), Failure> {
    Ok(conn.pragma_update(None, "user_version", SCHEMA_VERSION)?)
}

/// Fails if another program has changed the version of the tables since the file was opened.
pub(crate) fn check_version(conn: &Connection) -> Result<(), Failure> {
    match recognise(conn)? {
        Found::Current => Ok(()),
        Found::Older(_) => Err(OLDER),
        Found::Empty => Err(FOREIGN),
    }
}

#[derive(PartialEq, Eq)]
enum Found {
    Empty,
    /// The statements that are missing.
    Older(&'static [&'static str]),
    Current,
}

/// Recognises a file that another process may be creating at this moment.
fn inspect(conn: &Connection) -> Result<Found, Failure> {
    conn.execute_batch("BEGIN")?;
    let found = recognise(conn);
    // After some errors SQLite ends the transaction itself. The first error is the one to report.
    if !conn.is_autocommit() {
        let ended = conn.execute_batch("ROLLBACK");
        found.and_then(|found| Ok(ended.map(|()| found)?))
    } else {
        found
    }
}

/// Must run within a transaction, so that it reads all three as of one moment.
fn recognise(conn: &Connection) -> Result<Found, Failure> {
    let number = |sql| conn.query_row(sql, [], |row| row.get::<_, i32>(0));
    let id = number("PRAGMA application_id")?;
    let version = number("PRAGMA user_version")?;
    let tables = number("SELECT count(*) FROM sqlite_schema")?;
    match (id, version, tables) {
        (APPLICATION_ID, SCHEMA_VERSION, _) => Ok(Found::Current),
        (APPLICATION_ID, version, _) if version > SCHEMA_VERSION => Err(NEWER),
        (APPLICATION_ID, version @ 1.., _) => {
            let done = usize::try_from(version - 1).expect("it is at least 1");
            Ok(Found::Older(&UPGRADES[done..]))
        }
        (0, 0, 0) => Ok(Found::Empty),
        _ => Err(FOREIGN),
    }
}

/// Creates or upgrades the tables in one transaction, unless another process did so first. A new
/// file is not in WAL mode yet, so that its header carries the application id from the start.
fn create(conn: &Connection) -> Result<(), Failure> {
    conn.execute_batch(&format!("PRAGMA page_size = {PAGE_BYTES}; BEGIN IMMEDIATE"))?;
    let created = recognise(conn).and_then(|found| {
        match found {
            Found::Empty => {
                conn.execute_batch(TABLES)?;
                conn.pragma_update(None, "application_id", APPLICATION_ID)?;
            }
            Found::Older(missing) => conn.execute_batch(&missing.join(";"))?,
            Found::Current => {}
        }
        if found != Found::Current {
            conn.pragma_update(None, "user_version", SCHEMA_VERSION)?;
        }
        Ok(conn.execute_batch("COMMIT")?)
    });
    if created.is_err() && !conn.is_autocommit() {
        // The first error is the one to report. Closing the connection rolls back as well.
        let _ = conn.execute_batch("ROLLBACK");
    }
    created
}
