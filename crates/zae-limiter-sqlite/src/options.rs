//! Options, and opening a store with them.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;

use zae_limiter_core::{StoreError, StoreErrorKind, UsageSettings};

use crate::error::Failure;
use crate::ledger::Ledger;
use crate::opened::OpenedFile;
use crate::queue::Queue;
use crate::writer::Writer;
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
    usage: UsageSettings,
}

impl SqliteOptions {
    /// Options for the file at `path`, with default durability and usage settings.
    pub fn new(path: impl AsRef<Path>) -> Self {
        Self {
            path: path.as_ref().to_owned(),
            durability: Durability::default(),
            usage: UsageSettings::default(),
        }
    }

    /// Sets what survives a power cut.
    #[must_use]
    pub fn durability(mut self, durability: Durability) -> Self {
        self.durability = durability;
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
    /// - `Unavailable` if another program keeps the file locked.
    pub fn open(self) -> Result<SqliteStore, StoreError> {
        // Absolute, so that a later change of the working folder does not matter.
        let file = std::path::absolute(&self.path).map_err(|error| {
            let message = format!("{} is not a path; name a file", self.path.display());
            StoreError::new(StoreErrorKind::Denied, message).caused_by(error)
        })?;
        let store_error = |failure: Failure| Arc::new(failure).to_store_error(&file);
        let conn = schema::open_writer(&file, self.durability).map_err(store_error)?;
        let read_conn = schema::open_reader(&file).map_err(store_error)?;

        let (writer, reader) = (Arc::new(Queue::new()), Arc::new(Queue::new()));
        // From here on, dropping `shared` ends the threads that have started.
        let mut shared = Shared {
            file: file.clone(),
            writer: Arc::clone(&writer),
            reader: Arc::clone(&reader),
            write_thread: None,
            read_thread: None,
            process: std::process::id(),
        };
        let opened = OpenedFile::new(file);
        let work = Writer::new(opened.clone(), writer, Ledger::new(conn, self.usage));
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
