//! The file: how it is recognised, created and opened.
//!
//! A file that is not ours, damaged, or from a later release is left as it is.

use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::time::Duration;

use rusqlite::{Connection, OpenFlags};
use zae_limiter_core::StoreErrorKind;

use crate::Durability;
use crate::error::Failure;

/// `zael` in ASCII: marks a file as one of ours.
const APPLICATION_ID: i32 = 0x7a61_656c;

/// The release of the tables below.
const SCHEMA_VERSION: i32 = 2;

/// What the tables of the first release lack.
const FIRST_VERSION: i32 = 1;
const FROM_FIRST: &str = "ALTER TABLE config ADD COLUMN audit_retention_days INTEGER";

/// How long SQLite waits for another program that holds the file, creating it perhaps, and how
/// often that is tried: where two would wait for each other, SQLite does not wait at all.
const OPEN_WAIT: Duration = Duration::from_millis(50);
const OPEN_TRIES_MAX: usize = 100;

/// Most writes change one row, and a whole page goes into the log for it. Small pages make it
/// short.
const PAGE_BYTES: u32 = 1_024;

/// Pages in the log before they are carried over into the file, which costs two syncs and one
/// scattered write for each page: a page that changed often since the last time costs it once. Up
/// to 128 MiB on disk, and only where many buckets are busy.
const LOG_PAGES_MAX: u32 = 131_072;

/// A negative cache size is in KiB.
const WRITER_CACHE_KIB: i32 = 64 << 10;
const READER_CACHE_KIB: i32 = 8 << 10;

const STATEMENTS_MAX: usize = 128;

/// Tables are clustered by their keys, except that of the buckets: a writer that remembers a
/// bucket's number finds its row in a shallow tree of numbers, with no text to compare. Only columns
/// that never change are indexed, so that the frequent change of a bucket touches one page.
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
    name TEXT NOT NULL, created_at INTEGER NOT NULL, deleted_at INTEGER
) WITHOUT ROWID, STRICT;

CREATE TABLE namespace_name (
    name TEXT NOT NULL PRIMARY KEY,
    id TEXT NOT NULL
) WITHOUT ROWID, STRICT;
";

/// Touches every table and column, so that a file that lacks one is found out when it is opened.
const TABLES_CHECK: &[&str] = &[
    "SELECT number, ns, entity, resource, expires_at, state FROM bucket LIMIT 0",
    "SELECT ns, id, name, parent, cascade, metadata, created_at FROM entity LIMIT 0",
    "SELECT ns, level, resource, entity, version, on_unavailable, limits, audit_retention_days \
     FROM config LIMIT 0",
    "SELECT ns, subject, id, at, action, principal, resource, details, expires_at FROM audit \
     LIMIT 0",
    "SELECT ns, entity, window, resource, start, events, consumed, expires_at FROM usage LIMIT 0",
    "SELECT id, name, created_at, deleted_at FROM namespace LIMIT 0",
    "SELECT name, id FROM namespace_name LIMIT 0",
];

/// Opens the file for the writer; creates it where there is none.
pub(crate) fn open_writer(path: &Path, durability: Durability) -> Result<Connection, Failure> {
    patiently(|| try_open_writer(path, durability))
}

/// Opens the file for the reader, after the writer has.
pub(crate) fn open_reader(path: &Path) -> Result<Connection, Failure> {
    patiently(|| {
        let conn = connect(path, OpenFlags::SQLITE_OPEN_READ_WRITE)?;
        conn.execute_batch(&format!(
            "PRAGMA query_only = ON; PRAGMA cache_size = -{READER_CACHE_KIB};"
        ))?;
        Ok(conn)
    })
}

fn patiently(open: impl Fn() -> Result<Connection, Failure>) -> Result<Connection, Failure> {
    for _ in 1..OPEN_TRIES_MAX {
        match open() {
            Err(failure) if failure.is_busy() => std::thread::park_timeout(OPEN_WAIT / 10),
            opened => return opened,
        }
    }
    open()
}

fn try_open_writer(path: &Path, durability: Durability) -> Result<Connection, Failure> {
    look_at(path)?;
    let conn = connect(path, OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_CREATE)?;
    if conn.is_readonly("main")? {
        return Err(DENIED);
    }
    if glance(&conn)? != Found::Ours {
        create(&conn)?;
    }
    for sql in TABLES_CHECK {
        conn.prepare(sql)?;
    }
    let mode: String = conn.query_row("PRAGMA journal_mode = WAL", [], |row| row.get(0))?;
    if mode != "wal" {
        let message = "is on a file system without shared memory; put it on a local disk";
        return Err(Failure::Unusable(StoreErrorKind::Denied, message));
    }
    let synchronous = match durability {
        Durability::Normal => "NORMAL",
        Durability::Full => "FULL",
    };
    conn.execute_batch(&format!(
        "PRAGMA synchronous = {synchronous};
         PRAGMA cache_size = -{WRITER_CACHE_KIB};
         PRAGMA wal_autocheckpoint = {LOG_PAGES_MAX};"
    ))?;
    // From here on the writer waits in its own way.
    conn.busy_timeout(Duration::ZERO)?;
    Ok(conn)
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

fn connect(path: &Path, flags: OpenFlags) -> Result<Connection, Failure> {
    // No mutex: each connection belongs to one thread.
    let conn = Connection::open_with_flags(path, flags | OpenFlags::SQLITE_OPEN_NO_MUTEX)?;
    conn.busy_timeout(OPEN_WAIT)?;
    conn.set_prepared_statement_cache_capacity(STATEMENTS_MAX);
    Ok(conn)
}

/// Looks at the first bytes before SQLite does: merely opening somebody else's database may carry
/// over its log.
fn look_at(path: &Path) -> Result<(), Failure> {
    let denied = |message| Err(Failure::Unusable(StoreErrorKind::Denied, message));
    if path.is_dir() {
        return denied("is a folder; name a file in it");
    }
    if path.parent().is_some_and(|folder| !folder.is_dir()) {
        return denied("is in a folder that does not exist; create it first");
    }
    // To open a pipe would be to wait for whoever writes into it, and SQLite would put its own files
    // beside a device.
    if path.metadata().is_ok_and(|found| !found.is_file()) {
        return denied("is not a regular file; name another one");
    }
    let mut file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(_) => return denied("cannot be read; check its permissions"),
    };
    let mut header = Vec::with_capacity(100);
    if file.by_ref().take(100).read_to_end(&mut header).is_err() {
        return denied("cannot be read; name a regular file");
    }
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
        (APPLICATION_ID | 0, _) => Ok(()),
        _ => Err(FOREIGN),
    }
}

#[derive(PartialEq, Eq)]
enum Found {
    Nothing,
    Older,
    Ours,
}

/// Looks at a file that another process may be creating at this moment.
fn glance(conn: &Connection) -> Result<Found, Failure> {
    conn.execute_batch("BEGIN")?;
    let found = recognise(conn);
    // SQLite may have ended the transaction with the error, and that is the one that counts.
    if !conn.is_autocommit() {
        let ended = conn.execute_batch("ROLLBACK");
        found.and_then(|found| Ok(ended.map(|()| found)?))
    } else {
        found
    }
}

/// Within a transaction: all three as of one moment.
fn recognise(conn: &Connection) -> Result<Found, Failure> {
    let number = |sql| conn.query_row(sql, [], |row| row.get::<_, i32>(0));
    let id = number("PRAGMA application_id")?;
    let version = number("PRAGMA user_version")?;
    let tables = number("SELECT count(*) FROM sqlite_schema")?;
    match (id, version, tables) {
        (APPLICATION_ID, SCHEMA_VERSION, _) => Ok(Found::Ours),
        (APPLICATION_ID, FIRST_VERSION, _) => Ok(Found::Older),
        (APPLICATION_ID, version, _) if version > SCHEMA_VERSION => Err(NEWER),
        (0, 0, 0) => Ok(Found::Nothing),
        _ => Err(FOREIGN),
    }
}

/// Makes all tables, or what an older release's lack, in one transaction, unless another process was faster. A
/// new file is not yet in WAL mode, so that its mark is in it from the first moment.
fn create(conn: &Connection) -> Result<(), Failure> {
    conn.execute_batch(&format!("PRAGMA page_size = {PAGE_BYTES}; BEGIN IMMEDIATE"))?;
    let made = recognise(conn).and_then(|found| {
        match found {
            Found::Nothing => {
                conn.execute_batch(TABLES)?;
                conn.pragma_update(None, "application_id", APPLICATION_ID)?;
            }
            Found::Older => conn.execute_batch(FROM_FIRST)?,
            Found::Ours => {}
        }
        if found != Found::Ours {
            conn.pragma_update(None, "user_version", SCHEMA_VERSION)?;
        }
        Ok(conn.execute_batch("COMMIT")?)
    });
    if made.is_err() && !conn.is_autocommit() {
        // What counts is the first error; closing the connection rolls back as well.
        let _ = conn.execute_batch("ROLLBACK");
    }
    made
}
