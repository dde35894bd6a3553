//! The archive in a folder.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio::sync::Semaphore;
use tokio::task::JoinError;
use zae_limiter_core::BoxFuture;

use crate::archive::{Archive, ArchiveError};

/// The most files that are written at once. A disk that hangs holds up so many threads and no more.
const WRITES_MAX: usize = 4;
/// How many names are tried for an unfinished file. Crashed programs leave such files.
const NAMES_MAX: u32 = 1_000;

/// An archive in a folder.
#[derive(Clone, Debug)]
pub struct Folder {
    path: PathBuf,
    writes: Arc<Semaphore>,
}

impl Folder {
    /// An archive in that folder. The folder is created with the first file.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into(), writes: Arc::new(Semaphore::new(WRITES_MAX)) }
    }
}

impl Archive for Folder {
    fn put<'a>(&'a self, name: &'a str, bytes: Vec<u8>) -> BoxFuture<'a, Result<(), ArchiveError>> {
        Box::pin(async move {
            let path = self.path.join(name);
            let permit = Arc::clone(&self.writes).acquire_owned().await;
            let permit = permit.expect("nobody closes the semaphore");
            let to = path.clone();
            // The thread keeps the permit, even if nobody waits for it any more.
            let write = move || {
                let written = write_whole(&to, &bytes);
                drop(permit);
                written
            };
            let written = tokio::task::spawn_blocking(write).await;
            written.unwrap_or_else(no_thread).map_err(|error| ArchiveError {
                message: format!("could not write {}", path.display()),
                source: Some(error.into()),
            })
        })
    }
}

fn no_thread(error: JoinError) -> io::Result<()> {
    Err(io::Error::other(error))
}

/// Writes to a file of its own, which gets its name once it is complete and on the disk.
fn write_whole(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
    create_folder(folder)?;
    let (mut file, unfinished) = create_unfinished(path)?;
    let written = file
        .write_all(bytes)
        .and_then(|()| file.sync_all())
        .and_then(|()| fs::rename(&unfinished, path));
    if written.is_err() {
        // What matters is the first error.
        let _ = fs::remove_file(&unfinished);
    }
    written?;
    sync_folder(folder)
}

/// Creates a file that no other writer has, next to the final one: a rename works within one disk.
fn create_unfinished(path: &Path) -> io::Result<(File, PathBuf)> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let process = std::process::id();
    for number in 0..NAMES_MAX {
        let unfinished = path.with_file_name(format!(".{name}.{process}-{number}.part"));
        match OpenOptions::new().write(true).create_new(true).open(&unfinished) {
            Ok(file) => return Ok((file, unfinished)),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
    let message = format!("{NAMES_MAX} unfinished files are in the way; delete those named .part");
    Err(io::Error::new(ErrorKind::AlreadyExists, message))
}

/// Creates a folder and those above it, so that they survive a power failure.
fn create_folder(folder: &Path) -> io::Result<()> {
    let is_missing = |folder: &&Path| !folder.as_os_str().is_empty() && !folder.exists();
    let missing: Vec<&Path> = folder.ancestors().take_while(is_missing).collect();
    fs::create_dir_all(folder)?;
    missing.into_iter().filter_map(Path::parent).try_for_each(sync_folder)
}

/// Writes the names in a folder to the disk.
#[cfg(unix)]
fn sync_folder(folder: &Path) -> io::Result<()> {
    let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    File::open(folder)?.sync_all()
}

/// Other systems cannot open a folder.
#[cfg(not(unix))]
fn sync_folder(_folder: &Path) -> io::Result<()> {
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::task::{Context, Waker};

    use super::*;

    const NAME: &str = "audit/year=2026/month=08/day=15/01A-00.jsonl.gz";

    fn folder() -> tempfile::TempDir {
        tempfile::tempdir().expect("a folder")
    }

    /// The names in the folder of the day.
    fn names(root: &Path) -> Vec<String> {
        let day = root.join(NAME);
        let files = fs::read_dir(day.parent().expect("a folder")).expect("it exists");
        let name = |file: fs::DirEntry| file.file_name().to_string_lossy().into_owned();
        files.map(|file| name(file.expect("readable"))).collect()
    }

    #[test]
    fn a_write_does_not_block_the_thread_of_its_caller() {
        let root = folder();
        let runtime = tokio::runtime::Builder::new_current_thread().max_blocking_threads(1).build();
        runtime.expect("a runtime").block_on(async {
            let (release, released) = mpsc::channel::<()>();
            // The only thread for such work is busy.
            let busy = tokio::task::spawn_blocking(move || released.recv());
            let archive = Folder::new(root.path());
            let mut put = archive.put(NAME, b"events".to_vec());
            let mut context = Context::from_waker(Waker::noop());
            assert!(put.as_mut().poll(&mut context).is_pending());
            assert!(!root.path().join(NAME).exists());
            release.send(()).expect("it waits");
            put.await.expect("it can be written");
            busy.await.expect("no panic").expect("it was released");
        });
        assert_eq!(fs::read(root.path().join(NAME)).expect("a file"), b"events");
    }

    #[tokio::test]
    async fn writers_of_the_same_name_never_see_each_others_unfinished_files() {
        let root = folder();
        // As two daemons would. Each file is complete, whoever was last.
        let (one, other) = (Folder::new(root.path()), Folder::new(root.path()));
        let mut writing = tokio::task::JoinSet::new();
        for (archive, byte) in [one, other].into_iter().zip([b'a', b'b']) {
            for _ in 0..40 {
                let archive = archive.clone();
                writing.spawn(async move { archive.put(NAME, vec![byte; 50_000]).await });
            }
        }
        while let Some(written) = writing.join_next().await {
            written.expect("no panic").expect("it can be written");
            let found = fs::read(root.path().join(NAME)).expect("a file");
            assert!(found.len() == 50_000 && found.iter().all(|byte| *byte == found[0]));
        }
        assert_eq!(names(root.path()), ["01A-00.jsonl.gz"]);
    }

    #[tokio::test]
    async fn what_crashed_programs_left_is_not_in_the_way() {
        let root = folder();
        let path = root.path().join(NAME);
        create_folder(path.parent().expect("a folder")).expect("it can be created");
        let (_, left) = create_unfinished(&path).expect("it can be created");
        Folder::new(root.path()).put(NAME, b"events".to_vec()).await.expect("written");
        assert_eq!(fs::read(&path).expect("a file"), b"events");
        assert!(left.exists());
    }

    #[tokio::test]
    async fn a_file_that_cannot_be_written_leaves_nothing() {
        let root = folder();
        // A folder has the name of the file.
        fs::create_dir_all(root.path().join(NAME)).expect("a folder");
        let error = Folder::new(root.path()).put(NAME, b"events".to_vec()).await;
        let error = error.expect_err("a folder is in the way");
        assert!(error.message.starts_with("could not write "), "{error}");
        assert_eq!(names(root.path()), ["01A-00.jsonl.gz"]);
    }
}
