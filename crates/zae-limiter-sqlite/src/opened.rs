//! Whether the file is still the one that was opened. A file can be replaced, removed or upgraded by others while the
//! store has it open. SQLite would go on in the old one, and two files would hold two budgets.

use std::path::{Path, PathBuf};

use rusqlite::Connection;
use zae_limiter_core::StoreErrorKind;

use crate::error::Failure;

const REPLACED: Failure = Failure::Unusable(
    StoreErrorKind::Denied,
    "or its log was replaced or removed while it was open; open the store again",
);

/// The file that a connection has opened.
#[derive(Clone, Debug)]
pub(crate) struct OpenedFile {
    path: PathBuf,
    log: PathBuf,
    identities: [Option<Identity>; 2],
    /// For good: whoever had the file in between may have removed the log, and commits with it.
    was_replaced: bool,
    /// SQLite changes this number when another connection has written. `None` until the first check.
    data_version: Option<i64>,
}

/// The device and the number of a file, where the operating system has them.
type Identity = (u64, u64);

#[cfg(unix)]
fn identity(path: &Path) -> Option<Identity> {
    use std::os::unix::fs::MetadataExt as _;
    let found = std::fs::metadata(path).ok()?;
    Some((found.dev(), found.ino()))
}

#[cfg(not(unix))]
fn identity(_: &Path) -> Option<Identity> {
    None
}

impl OpenedFile {
    /// The file at `path`, which a connection has just opened.
    pub(crate) fn new(path: PathBuf) -> Self {
        // SQLite puts the log next to the file itself, not next to a link to it.
        let mut log = path.canonicalize().unwrap_or_else(|_| path.clone()).into_os_string();
        log.push("-wal");
        let log = PathBuf::from(log);
        let identities = [identity(&path), identity(&log)];
        Self { path, log, identities, was_replaced: false, data_version: None }
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
        let found = [identity(&self.path), identity(&self.log)];
        self.was_replaced |= found != self.identities;
        if self.was_replaced {
            return Err(REPLACED);
        }
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
