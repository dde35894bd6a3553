//! Whether the file is still the one that was opened. A file can be replaced, removed, truncated or upgraded by others while the
//! store has it open. SQLite would go on in the old one, and two files would hold two budgets.

use std::fs::{File, Metadata};
use std::io::Read as _;
use std::path::{Path, PathBuf};

use rusqlite::Connection;
use zae_limiter_core::StoreErrorKind;

use crate::error::Failure;

const REPLACED: Failure = Failure::Unusable(
    StoreErrorKind::Denied,
    "or its log was replaced or removed while it was open; open the store again",
);

const TRUNCATED: Failure = Failure::Unusable(
    StoreErrorKind::Corrupt,
    "was truncated while it was open; stop all programs that use it, and restore it from a backup",
);

/// The file that a connection has opened.
#[derive(Clone, Debug)]
pub(crate) struct OpenedFile {
    path: PathBuf,
    log: PathBuf,
    identities: [Option<Identity>; 2],
    /// The length of the file at the last check. SQLite shortens a file only by `VACUUM`.
    bytes: u64,
    /// For good: whoever had the file in between may have removed the log, and commits with it.
    was_replaced: bool,
    /// SQLite changes this number when another connection has written. `None` until the first check.
    data_version: Option<i64>,
}

/// The device and the number of a file, where the operating system has them.
pub(crate) type Identity = (u64, u64);

#[cfg(unix)]
fn identity_of(found: &Metadata) -> Option<Identity> {
    use std::os::unix::fs::MetadataExt as _;
    Some((found.dev(), found.ino()))
}

#[cfg(not(unix))]
fn identity_of(_: &Metadata) -> Option<Identity> {
    None
}

pub(crate) fn identity(path: &Path) -> Option<Identity> {
    identity_of(&std::fs::metadata(path).ok()?)
}

/// The identity of a file, and its length.
fn look(path: &Path) -> (Option<Identity>, u64) {
    match std::fs::metadata(path) {
        Ok(found) => (identity_of(&found), found.len()),
        Err(_) => (None, 0),
    }
}

/// Whether the file has all pages that its header counts.
fn is_whole(path: &Path, bytes: u64) -> bool {
    let mut header = [0; 32];
    let read = File::open(path).and_then(|mut file| file.read_exact(&mut header));
    let page_bytes = match u16::from_be_bytes([header[16], header[17]]) {
        1 => 65_536,
        bytes => u64::from(bytes),
    };
    let pages = u32::from_be_bytes([header[28], header[29], header[30], header[31]]);
    read.is_ok() && bytes >= u64::from(pages) * page_bytes
}

impl OpenedFile {
    /// The file at `path`, which a connection has just opened.
    pub(crate) fn new(path: PathBuf) -> Self {
        // SQLite puts the log next to the file itself, not next to a link to it.
        let mut log = path.canonicalize().unwrap_or_else(|_| path.clone()).into_os_string();
        log.push("-wal");
        let log = PathBuf::from(log);
        let (file, bytes) = look(&path);
        let identities = [file, identity(&log)];
        Self { path, log, identities, bytes, was_replaced: false, data_version: None }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// SQLite's write-ahead log.
    pub(crate) fn log(&self) -> &Path {
        &self.log
    }

    /// Checks the file at the start of a transaction. Returns whether others have written since the last check, or
    /// whether this is the first one.
    pub(crate) fn check(&mut self, conn: &Connection) -> Result<bool, Failure> {
        let (file, bytes) = look(&self.path);
        let found = [file, identity(&self.log)];
        for (opened, found) in self.identities.iter_mut().zip(found) {
            // One that did not exist at the opening counts from its first sight.
            self.was_replaced |= opened.is_some() && *opened != found;
            *opened = opened.or(found);
        }
        if self.was_replaced {
            return Err(REPLACED);
        }
        if bytes < self.bytes && !is_whole(&self.path, bytes) {
            return Err(TRUNCATED);
        }
        self.bytes = bytes;
        let version = conn
            .prepare_cached("PRAGMA data_version")?
            .query_row([], |row| row.get::<_, i64>(0))?;
        let is_changed = self.data_version != Some(version);
        if is_changed {
            crate::schema::check_version(conn)?;
        }
        // Only now: after a failed check, the next one must look again.
        self.data_version = Some(version);
        Ok(is_changed)
    }
}
