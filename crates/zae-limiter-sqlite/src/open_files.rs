//! The files that this process has open.
//!
//! SQLite locks a file while it is open, so that the last program to close it knows that it is the last one, and removes
//! the log. Two things would take these locks away without SQLite's notice:
//!
//! - POSIX drops all locks that a process has on a file as soon as the process closes any handle of that file. So there
//!   is one handle of each file beside SQLite's. It is opened before SQLite opens the file, everything that is read past
//!   SQLite is read through it, and it is closed when no store of the process has the file open.
//! - A forked child inherits SQLite's list of locks, but not the locks. A file that was open at the fork is refused there.

use std::ffi::OsString;
use std::fs::{File, Metadata};
use std::io::{self, ErrorKind, Read as _, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use zae_limiter_core::StoreErrorKind;

use crate::error::Failure;
use crate::schema::{check_path, check_start, create_private};

const INHERITED: Failure = Failure::Unusable(
    StoreErrorKind::Rejected,
    "was open when this process was forked, and SQLite's locks do not survive that; fork first, then open the store",
);

/// SQLite names the log after the file, so two names would have two logs, and each would lose the other's commits.
const LINKED: Failure = Failure::Unusable(
    StoreErrorKind::Denied,
    "has another name (a hard link), and each name would have a log of its own; remove the other name, or copy the file",
);

/// A file that is renamed while it is open keeps its log under the old name.
const RENAMED: Failure = Failure::Unusable(
    StoreErrorKind::Denied,
    "is open in this process under another name, and its log has that name; close that store first",
);

/// The bytes of a file's header.
const HEADER_BYTES: usize = 100;

/// The device and the number of a file, where the operating system has them.
pub(crate) type Identity = (u64, u64);

#[cfg(unix)]
pub(crate) fn identity_of(found: &Metadata) -> Option<Identity> {
    use std::os::unix::fs::MetadataExt as _;
    Some((found.dev(), found.ino()))
}

#[cfg(not(unix))]
pub(crate) fn identity_of(_: &Metadata) -> Option<Identity> {
    None
}

pub(crate) fn identity(path: &Path) -> Option<Identity> {
    identity_of(&std::fs::metadata(path).ok()?)
}

/// The folder of a file, and its name there: SQLite puts the log next to it. Links to it have the same place.
type Place = (Identity, OsString);

fn place(path: &Path) -> Option<Place> {
    let itself = path.canonicalize().ok()?;
    Some((identity(itself.parent()?)?, itself.file_name()?.to_owned()))
}

/// The path of one of SQLite's files beside the file. SQLite puts them next to the file itself, not next to a link to it.
pub(crate) fn beside(path: &Path, suffix: &str) -> PathBuf {
    let itself = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let mut name = itself.into_os_string();
    name.push(suffix);
    PathBuf::from(name)
}

/// The handle of an open file that is not SQLite's.
#[derive(Debug)]
pub(crate) struct Handle(Mutex<File>);

impl Handle {
    /// The first bytes of the file; fewer if it is shorter.
    pub(crate) fn start(&self) -> io::Result<Vec<u8>> {
        let mut file = locked(&self.0);
        file.seek(SeekFrom::Start(0))?;
        let mut start = Vec::with_capacity(HEADER_BYTES);
        (&mut *file).take(HEADER_BYTES as u64).read_to_end(&mut start)?;
        Ok(start)
    }
}

/// A file that is open, and the process that opened it. One of another process was inherited.
#[derive(Debug)]
struct Entry {
    process: u32,
    file: Identity,
    place: Option<Place>,
    handle: Arc<Handle>,
    /// A second handle, if the path named another file while it was opened.
    spare: Vec<Arc<Handle>>,
    /// How many stores of the process have it open.
    stores: usize,
}

impl Entry {
    /// Opens the file once more, if it has one name only and `path` leads to it.
    fn open_again(&mut self, path: &Path, found: &Metadata) -> Result<OpenHere, Failure> {
        if has_other_names(found) {
            return Err(LINKED);
        }
        if self.place != place(path) {
            return Err(RENAMED);
        }
        self.stores += 1;
        let handle = Arc::clone(&self.handle);
        Ok(OpenHere { process: self.process, file: Some(self.file), handle })
    }
}

static OPEN: Mutex<Vec<Entry>> = Mutex::new(Vec::new());

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A file that is open until this is dropped in the process that opened it.
#[derive(Debug)]
pub(crate) struct OpenHere {
    process: u32,
    file: Option<Identity>,
    handle: Arc<Handle>,
}

impl OpenHere {
    /// Opens the file before SQLite does, and checks that it is a limiter's. Creates an empty one if there is none.
    pub(crate) fn new(path: &Path) -> Result<Self, Failure> {
        Self::by(std::process::id(), path)
    }

    fn by(process: u32, path: &Path) -> Result<Self, Failure> {
        // Held to the end: meanwhile no other thread opens the file.
        let mut open = locked(&OPEN);
        if let Ok(found) = std::fs::metadata(path)
            && let Some(file) = identity_of(&found)
        {
            let is_inherited = |entry: &&Entry| entry.file == file && entry.process != process;
            if open.iter().any(|entry| is_inherited(&entry)) {
                return Err(INHERITED);
            }
            if let Some(entry) = open.iter_mut().find(|entry| entry.file == file) {
                return entry.open_again(path, &found);
            }
        }
        check_path(path)?;
        let denied = |_| {
            let message = "cannot be read; check its permissions";
            Failure::Unusable(StoreErrorKind::Denied, message)
        };
        let opened = match File::open(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                create_private(path)?;
                File::open(path)
            }
            opened => opened,
        };
        let opened = opened.map_err(denied)?;
        let found = opened.metadata().map_err(denied)?;
        let (file, handle) = (identity_of(&found), Arc::new(Handle(Mutex::new(opened))));
        let known =
            open.iter_mut().find(|entry| Some(entry.file) == file && entry.process == process);
        if let Some(entry) = known {
            // The path was changed just now. Closing the handle would drop the locks.
            entry.spare.push(handle);
            return entry.open_again(path, &found);
        }
        if has_other_names(&found) {
            return Err(LINKED);
        }
        let has_journal = beside(path, "-journal").exists();
        check_start(&handle.start().map_err(denied)?, has_journal)?;
        open.extend(file.map(|file| Entry {
            process,
            file,
            place: place(path),
            handle: Arc::clone(&handle),
            spare: Vec::new(),
            stores: 1,
        }));
        Ok(Self { process, file, handle })
    }

    pub(crate) fn handle(&self) -> Arc<Handle> {
        Arc::clone(&self.handle)
    }
}

#[cfg(unix)]
fn has_other_names(found: &Metadata) -> bool {
    std::os::unix::fs::MetadataExt::nlink(found) > 1
}

#[cfg(not(unix))]
fn has_other_names(_: &Metadata) -> bool {
    false
}

impl Drop for OpenHere {
    fn drop(&mut self) {
        let Some(file) = self.file.filter(|_| self.process == std::process::id()) else { return };
        let mut open = locked(&OPEN);
        let is_it = |entry: &Entry| (entry.process, entry.file) == (self.process, file);
        if let Some(at) = open.iter().position(is_it) {
            open[at].stores -= 1;
            if open[at].stores == 0 {
                open.swap_remove(at);
            }
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
            let open = locked(&OPEN);
            open.iter().filter(|entry| entry.file == file).map(|entry| entry.stores).sum::<usize>()
        };
        // Twice in one process is fine.
        let (one, two) = (SqliteStore::open(file("a")).unwrap(), SqliteStore::open(file("a")));
        assert_eq!(entries(&file("a")), 2);
        drop((one, two));
        assert_eq!(entries(&file("a")), 0);
        // Pretends that the parent process has it open.
        let parents = OpenHere::by(std::process::id() + 1, &file("a")).unwrap();
        let error = SqliteStore::open(file("a")).unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Rejected);
        assert!(error.to_string().contains("fork first, then open the store"), "{error}");
        SqliteStore::open(file("b")).unwrap();
        // The child's copy of the parent's handle says nothing about the locks.
        drop(parents);
        assert!(SqliteStore::open(file("a")).is_err());
    }
}
