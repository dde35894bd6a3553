//! Files that were open when the process was forked.
//!
//! SQLite keeps a list of the locks of its process, and a forked child inherits it. But the child has none of these locks.
//! If it opened the same file, SQLite would not lock it there: when the parent closed the file, it would be the last
//! one, and would remove the log that the child uses.

use std::path::Path;
use std::sync::{Mutex, PoisonError};

use zae_limiter_core::StoreErrorKind;

use crate::error::Failure;
use crate::opened::{Identity, identity};

const INHERITED: Failure = Failure::Unusable(
    StoreErrorKind::Rejected,
    "was open when this process was forked, and SQLite's locks do not survive that; fork first, then open the store",
);

/// The open files, each with the process that opened it. One of another process was inherited.
static OPEN: Mutex<Vec<(u32, Identity)>> = Mutex::new(Vec::new());

/// Fails for a file that an ancestor had open when it forked this process.
pub(crate) fn check(path: &Path) -> Result<(), Failure> {
    let Some(found) = identity(path) else { return Ok(()) };
    let open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
    let is_inherited =
        |(process, other): &(u32, Identity)| *other == found && *process != std::process::id();
    if open.iter().any(is_inherited) { Err(INHERITED) } else { Ok(()) }
}

/// A file that is open until this is dropped in the process that opened it.
#[derive(Debug)]
pub(crate) struct OpenHere {
    process: u32,
    file: Option<Identity>,
}

impl OpenHere {
    pub(crate) fn new(path: &Path) -> Self {
        Self::by(std::process::id(), path)
    }

    fn by(process: u32, path: &Path) -> Self {
        let file = identity(path);
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        open.extend(file.map(|file| (process, file)));
        drop(open);
        Self { process, file }
    }
}

impl Drop for OpenHere {
    fn drop(&mut self) {
        let Some(file) = self.file.filter(|_| self.process == std::process::id()) else { return };
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(at) = open.iter().position(|entry| *entry == (self.process, file)) {
            open.swap_remove(at);
        }
    }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use crate::SqliteStore;

    #[test]
    fn a_file_that_was_open_at_the_fork_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name| folder.path().join(name);
        let entries = |path: &Path| {
            let file = identity(path).unwrap();
            let open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
            open.iter().filter(|(_, other)| *other == file).count()
        };
        // Twice in one process is fine.
        let (one, two) = (SqliteStore::open(file("a")).unwrap(), SqliteStore::open(file("a")));
        assert_eq!(entries(&file("a")), 2);
        drop((one, two));
        assert_eq!(entries(&file("a")), 0);
        // Pretends that the parent process has it open.
        let parents = OpenHere::by(std::process::id() + 1, &file("a"));
        let error = SqliteStore::open(file("a")).unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Rejected);
        assert!(error.to_string().contains("fork first, then open the store"), "{error}");
        SqliteStore::open(file("b")).unwrap();
        // The child's copy of the parent's handle says nothing about the locks.
        drop(parents);
        assert!(SqliteStore::open(file("a")).is_err());
    }
}
