//! The temporary folder of a demo without a chosen store. A demo that is killed leaves it behind, and the next one
//! removes it: a running demo holds a lock in its folder.

use std::fs::File;
use std::io;
use std::path::Path;

use tempfile::TempDir;

const PREFIX: &str = "zae-limiter-demo-";
const LOCK: &str = "lock";

/// A folder that is removed on [`close`](Self::close) and on drop.
pub(super) struct Folder {
    folder: TempDir,
    /// Open for as long as the demo runs.
    _lock: File,
}

impl Folder {
    /// Creates a folder in `parent`, and removes those of demos that were killed.
    pub(super) fn create(parent: &Path) -> io::Result<Self> {
        remove_dead(parent);
        let folder = tempfile::Builder::new().prefix(PREFIX).tempdir_in(parent)?;
        let (unlocked, locked) = (folder.path().join("unlocked"), folder.path().join(LOCK));
        let lock = File::create(&unlocked)?;
        lock.lock()?;
        // Under its name the file is locked from the start.
        std::fs::rename(unlocked, locked)?;
        Ok(Self { folder, _lock: lock })
    }

    pub(super) fn path(&self) -> &Path {
        self.folder.path()
    }

    pub(super) fn close(self) -> io::Result<()> {
        self.folder.close()
    }
}

/// Errors do not matter: the folder may belong to another user, or another demo may be removing it.
fn remove_dead(parent: &Path) {
    let Ok(entries) = std::fs::read_dir(parent) else { return };
    for entry in entries.flatten() {
        let is_folder = entry.file_type().is_ok_and(|kind| kind.is_dir());
        if !is_folder || !entry.file_name().to_string_lossy().starts_with(PREFIX) {
            continue;
        }
        let Ok(lock) = File::open(entry.path().join(LOCK)) else { continue };
        if lock.try_lock().is_ok() {
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}
