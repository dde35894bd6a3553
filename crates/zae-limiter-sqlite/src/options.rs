//! Options, and opening a store with them.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;

use zae_limiter_core::{StoreError, StoreErrorKind, UsageSettings};

use crate::error::Failure;
use crate::ledger::Ledger;
use crate::open_files::OpenHere;
use crate::opened::OpenedFile;
use crate::queue::Queue;
use crate::writer::Writer;
use crate::writer_lock::WriterLock;
use crate::{Shared, SqliteStore, reader, schema};

/// What survives a power cut. In both modes the file stays consistent, and a process that crashes
/// or is killed loses no completed call.
///
/// ```
/// use zae_limiter_sqlite::{Durability, SqliteOptions};
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("limits.db");
/// let store = SqliteOptions::new(&path).durability(Durability::Full).open()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Durability {
    /// A power cut may lose the last calls: the operating system decides when to write to the disk.
    #[default]
    Normal,
    /// A power cut loses no completed call: every commit waits for the disk.
    Full,
}

impl Durability {
    /// The settings of a connection that writes. On macOS, a plain sync leaves the data in the disk's own cache, which a
    /// power cut empties, and which may write in another order: `fullfsync` flushes that cache, too. Checkpoints need
    /// that in both modes, or else the file might not stay consistent. Other systems ignore the setting.
    pub(crate) fn pragmas(self) -> &'static str {
        match self {
            Self::Normal => {
                "PRAGMA synchronous = NORMAL; PRAGMA fullfsync = OFF; PRAGMA checkpoint_fullfsync = ON;"
            }
            Self::Full => {
                "PRAGMA synchronous = FULL; PRAGMA fullfsync = ON; PRAGMA checkpoint_fullfsync = ON;"
            }
        }
    }
}

/// Which thread does the transaction of an acquire or a settlement.
///
/// ```
/// use zae_limiter_sqlite::{CommitOn, SqliteOptions};
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("limits.db");
/// let store = SqliteOptions::new(&path).commit_on(CommitOn::Thread).open()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CommitOn {
    /// The caller's thread while no other call waits, else the store's thread. The caller never waits for a lock, a
    /// disk flush or a checkpoint there, only for one transaction: about ten system calls that write one page or two to
    /// the operating system's cache. It waits for the disk if the bucket's page is in no cache, or if the operating
    /// system holds writers up. With [`Durability::Full`] it is always the store's thread.
    #[default]
    Caller,
    /// Always the store's thread: for a slow disk under an async runtime with few threads. A single caller gets its
    /// reply later by the time of two thread switches.
    Thread,
}

/// Options of a [`SqliteStore`].
///
/// ```
/// use zae_limiter_core::{UsageSettings, Window};
/// use zae_limiter_sqlite::SqliteOptions;
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("limits.db");
/// let usage = UsageSettings { windows: vec![Window::Daily], ..UsageSettings::default() };
/// let store = SqliteOptions::new(&path).usage(usage).open()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct SqliteOptions {
    path: PathBuf,
    durability: Durability,
    commit_on: CommitOn,
    usage: UsageSettings,
}

impl SqliteOptions {
    /// Options for the file at `path`, with default durability and usage settings.
    pub fn new(path: impl AsRef<Path>) -> Self {
        Self {
            path: path.as_ref().to_owned(),
            durability: Durability::default(),
            commit_on: CommitOn::default(),
            usage: UsageSettings::default(),
        }
    }

    /// Sets what survives a power cut.
    #[must_use]
    pub fn durability(mut self, durability: Durability) -> Self {
        self.durability = durability;
        self
    }

    /// Sets which thread does the transaction of a call.
    #[must_use]
    pub fn commit_on(mut self, commit_on: CommitOn) -> Self {
        self.commit_on = commit_on;
        self
    }

    /// Sets which usage records the store keeps, and for how long.
    #[must_use]
    pub fn usage(mut self, usage: UsageSettings) -> Self {
        self.usage = usage;
        self
    }

    /// Opens the file, and creates it if it does not exist. A file of another program is never
    /// changed.
    ///
    /// # Errors
    ///
    /// - `Denied` if the path cannot be written;
    /// - `Corrupt` if the file is damaged, or belongs to another program;
    /// - `Incompatible` if a later release has written the file;
    /// - `Unavailable` if another program keeps the file locked;
    /// - `Rejected` if the file was open when this process was forked, or the path is `:memory:`.
    pub fn open(self) -> Result<SqliteStore, StoreError> {
        if self.path.as_os_str() == ":memory:" {
            let message = ":memory: is no file, and a store in SQLite is one; use a MemoryStore";
            return Err(StoreError::new(StoreErrorKind::Rejected, message));
        }
        // Absolute, so that a later change of the working folder does not matter.
        let file = std::path::absolute(&self.path).map_err(|error| {
            let message = format!("{} is not a path; name a file", self.path.display());
            StoreError::new(StoreErrorKind::Denied, message).caused_by(error)
        })?;
        let store_error = |failure: Failure| Arc::new(failure).to_store_error(&file);
        let open = OpenHere::new(&file).map_err(store_error)?;
        let conn = schema::open_writer(&file, self.durability).map_err(store_error)?;
        let read_conn = schema::open_reader(&file).map_err(store_error)?;

        let (writer, reader) = (Arc::new(Queue::new()), Arc::new(Queue::new()));
        let opened = OpenedFile::new(file.clone(), open.handle());
        let work = Writer::new(opened.clone(), Arc::clone(&writer), Ledger::new(conn, self.usage));
        let commit_on = match self.durability {
            Durability::Normal => self.commit_on,
            // A flush would block the caller.
            Durability::Full => CommitOn::Thread,
        };
        let work = work.map_err(store_error)?;
        let work = WriterLock::new(work, Arc::clone(&writer), file.clone(), commit_on);
        let work = Arc::new(work);
        // From here on, dropping `shared` ends the threads that have started.
        let mut shared = Shared {
            file: file.clone(),
            writer,
            write_now: Arc::clone(&work),
            reader: Arc::clone(&reader),
            write_thread: None,
            read_thread: None,
            process: std::process::id(),
            _open: open,
        };
        shared.write_thread = Some(spawn("zael-write", move || work.run())?);
        let read = move || reader::run(opened, reader, read_conn);
        shared.read_thread = Some(spawn("zael-read", read)?);
        Ok(SqliteStore { shared: Arc::new(shared) })
    }
}

fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, StoreError> {
    let thread = std::thread::Builder::new().name(name.to_owned()).spawn(work);
    thread.map_err(|error| {
        let message = "cannot start a thread; raise the limit on processes and threads";
        StoreError::new(StoreErrorKind::Unavailable, message).caused_by(error)
    })
}
