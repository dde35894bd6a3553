//! Whether the file is still the one that was opened. A file can be replaced, removed, truncated or upgraded by others while the
//! store has it open. SQLite would go on in the old one, and two files would hold two budgets.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rusqlite::Connection;
use rusqlite::config::DbConfig;
use zae_limiter_core::StoreErrorKind;

use crate::error::Failure;
use crate::open_files::{Handle, Identity, beside, identity, identity_of};

const REPLACED: Failure = Failure::Unusable(
    StoreErrorKind::Denied,
    "or a file of SQLite beside it was replaced or removed while it was open; open the store again",
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
    shared_memory: PathBuf,
    handle: Arc<Handle>,
    /// Of the file, its log and its shared memory.
    identities: [Option<Identity>; 3],
    /// The length of the file at the last check. SQLite shortens a file only by `VACUUM`.
    bytes: u64,
    /// For good: whoever had the file in between may have removed the log, and commits with it.
    was_replaced: bool,
    /// SQLite changes this number when another connection has written. `None` until the first check.
    data_version: Option<i64>,
}

/// The identity of a file, and its length.
fn look(path: &Path) -> (Option<Identity>, u64) {
    match std::fs::metadata(path) {
        Ok(found) => (identity_of(&found), found.len()),
        Err(_) => (None, 0),
    }
}

/// Whether the file has all pages that its header counts.
fn is_whole(handle: &Handle, bytes: u64) -> bool {
    let Ok(header) = handle.start() else { return false };
    let Some(header) = header.first_chunk::<32>() else { return false };
    let page_bytes = match u16::from_be_bytes([header[16], header[17]]) {
        1 => 65_536,
        bytes => u64::from(bytes),
    };
    let pages = u32::from_be_bytes([header[28], header[29], header[30], header[31]]);
    bytes >= u64::from(pages) * page_bytes
}

impl OpenedFile {
    /// The file at `path`, which a connection has just opened.
    pub(crate) fn new(path: PathBuf, handle: Arc<Handle>) -> Self {
        let (log, shared_memory) = (beside(&path, "-wal"), beside(&path, "-shm"));
        let (file, bytes) = look(&path);
        let identities = [file, identity(&log), identity(&shared_memory)];
        Self {
            path,
            log,
            shared_memory,
            handle,
            identities,
            bytes,
            was_replaced: false,
            data_version: None,
        }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// SQLite's write-ahead log.
    pub(crate) fn log(&self) -> &Path {
        &self.log
    }

    /// Whether the file, its log or its shared memory are not the ones that were opened. Then the connection must not
    /// write its log into the file when it closes.
    pub(crate) fn is_replaced(&mut self, conn: &Connection) -> bool {
        self.look_again(conn).is_none()
    }

    /// The length of the file. `None` if it was replaced.
    fn look_again(&mut self, conn: &Connection) -> Option<u64> {
        let (file, bytes) = look(&self.path);
        let found = [file, identity(&self.log), identity(&self.shared_memory)];
        let was_replaced = self.was_replaced;
        for (opened, found) in self.identities.iter_mut().zip(found) {
            // One that did not exist at the opening counts from its first sight.
            self.was_replaced |= opened.is_some() && *opened != found;
            *opened = opened.or(found);
        }
        if self.was_replaced && !was_replaced {
            let set = conn.set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, true);
            set.inspect_err(|error| tracing::warn!(%error, "the log of a replaced file stays"))
                .ok();
        }
        (!self.was_replaced).then_some(bytes)
    }

    /// Checks the file at the start of a transaction. Returns whether others have written since the last check, or
    /// whether this is the first one.
    pub(crate) fn check(&mut self, conn: &Connection) -> Result<bool, Failure> {
        let bytes = self.look_again(conn).ok_or(REPLACED)?;
        if bytes < self.bytes && !is_whole(&self.handle, bytes) {
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
