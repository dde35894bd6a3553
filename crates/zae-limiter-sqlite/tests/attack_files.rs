//! Promises (docs/sqlite-format.md, docs/choosing-a-store.md): all processes that use one file share one budget, a file
//! that others replace is noticed before the next write, and what others may do to a file does not end a running store.
#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "only tests are here")]

mod common;

use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;

use common::*;
use rusqlite::Connection;
use zae_limiter_core::{Store, StoreErrorKind};
use zae_limiter_sqlite::{Durability, SqliteOptions, SqliteStore};

const FILE: &str = "ZAEL_TEST_ATTACK_FILE";
const WORK: &str = "ZAEL_TEST_ATTACK_WORK";

/// Other tests run this one as a child process: another program that uses the file for a moment.
#[tokio::test]
async fn child_uses_the_file() {
    let Ok(file) = std::env::var(FILE) else { return };
    match std::env::var(WORK).unwrap().as_str() {
        "look" => {
            let store = SqliteStore::open(file).unwrap();
            let _ = peek(&store, &target("key-1", 10), NOW).await;
        }
        "take" => {
            let store = SqliteStore::open(file).unwrap();
            let mut taken = 0;
            while take(&store, &plan(&target("key-1", 10), 1)).await {
                taken += 1;
            }
            println!("\ntaken: {taken}");
        }
        "shrink" => {
            let conn = Connection::open(file).unwrap();
            let checkpoint = "PRAGMA wal_checkpoint(TRUNCATE)";
            conn.query_row(checkpoint, [], |_| Ok(())).unwrap();
            conn.execute_batch("DELETE FROM bucket WHERE entity <> 'key-1'; VACUUM").unwrap();
            conn.query_row(checkpoint, [], |_| Ok(())).unwrap();
        }
        "lock" => {
            let file = fs::OpenOptions::new().read(true).write(true).open(file).unwrap();
            let operation = rustix::fs::FlockOperation::NonBlockingLockExclusive;
            if rustix::fs::fcntl_lock(&file, operation).is_err() {
                println!("\nis locked");
            }
        }
        other => panic!("{other}"),
    }
}

/// What the child has printed.
fn run(file: &Path, work: &str) -> String {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child_uses_the_file", "--nocapture"])
        .env(FILE, file)
        .env(WORK, work)
        .stderr(Stdio::inherit())
        .output()
        .unwrap();
    assert!(output.status.success(), "{work}");
    String::from_utf8(output.stdout).unwrap()
}

fn beside(file: &Path, suffix: &str) -> PathBuf {
    let mut name = file.as_os_str().to_owned();
    name.push(suffix);
    PathBuf::from(name)
}

/// SQLite's lock on the whole file, which each open connection holds: without it, SQLite before 3.51 takes another
/// program for the last one, and removes the log when that program ends.
fn is_locked(file: &Path) -> bool {
    run(file, "lock").contains("is locked")
}

/// A program opens a file twice, for two namespaces.
#[tokio::test]
async fn a_second_store_in_a_process_does_not_give_up_the_locks_of_the_first() {
    let folder = Folder::new();
    let store = SqliteStore::open(folder.file()).unwrap();
    assert!(take(&store, &plan(&target("key-1", 10), 3)).await);
    assert!(is_locked(&folder.file()), "by the first store");
    let second = SqliteStore::open(folder.file()).unwrap();
    assert!(take(&second, &plan(&target("key-1", 10), 1)).await);
    assert!(is_locked(&folder.file()), "the second store has given up the lock of the first");
}

/// The same with a second store that is closed at once.
#[tokio::test]
async fn a_second_store_that_is_closed_again_does_not_give_up_the_locks_of_the_first() {
    let folder = Folder::new();
    let store = SqliteStore::open(folder.file()).unwrap();
    assert!(take(&store, &plan(&target("key-1", 10), 3)).await);
    drop(SqliteStore::open(folder.file()).unwrap());
    assert!(is_locked(&folder.file()), "the second store has given up the lock of the first");
}

/// The guide's own command for backups, beside a program that has opened the file twice.
#[tokio::test]
async fn a_backup_with_the_guides_command_does_not_end_a_running_store() {
    let folder = Folder::new();
    let store = SqliteStore::open(folder.file()).unwrap();
    let second = SqliteStore::open(folder.file()).unwrap();
    assert!(take(&store, &plan(&target("key-1", 10), 3)).await);
    let command = format!(".backup '{}'", folder.path().join("backup.db").display());
    let Ok(status) = Command::new("sqlite3").arg(folder.file()).arg(command).status() else {
        eprintln!("skipped: there is no program sqlite3");
        return;
    };
    assert!(status.success());
    for store in [&store, &second] {
        let taken = store.acquire(&plan(&target("key-1", 10), 1)).await;
        assert!(taken.is_ok(), "{}", taken.unwrap_err());
    }
}

/// Control: without a second store, another process may come and go.
#[tokio::test]
async fn another_process_may_come_and_go() {
    let folder = Folder::new();
    let store = SqliteStore::open(folder.file()).unwrap();
    for _ in 0..3 {
        assert!(take(&store, &plan(&target("key-1", 10), 1)).await);
        run(&folder.file(), "look");
    }
    assert_eq!(tokens(&store, &target("key-1", 10), NOW).await, Some(7));
}

/// A file that another program has made smaller is used on, and its locks are kept.
#[tokio::test]
async fn a_look_at_a_smaller_file_does_not_give_up_its_locks() {
    let folder = Folder::new();
    let store = SqliteStore::open(folder.file()).unwrap();
    for n in 0..300 {
        assert!(take(&store, &plan(&target(&format!("key-{n}"), 10), 3)).await);
    }
    Connection::open(folder.file())
        .unwrap()
        .query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(()))
        .unwrap();
    assert!(take(&store, &plan(&target("key-1", 10), 1)).await);
    let before = fs::metadata(folder.file()).unwrap().len();
    run(&folder.file(), "shrink");
    assert!(fs::metadata(folder.file()).unwrap().len() < before);
    assert!(take(&store, &plan(&target("key-1", 10), 1)).await);
    assert!(is_locked(&folder.file()), "the look has given up the lock");
    run(&folder.file(), "look");
    assert!(take(&store, &plan(&target("key-1", 10), 1)).await);
}

/// Somebody removes the shared memory of an open file, or restores a folder from a backup without it.
#[tokio::test]
async fn removed_shared_memory_never_gives_two_budgets() {
    let folder = Folder::new();
    let store = SqliteStore::open(folder.file()).unwrap();
    assert!(take(&store, &plan(&target("key-1", 10), 1)).await);
    fs::remove_file(beside(&folder.file(), "-shm")).unwrap();
    let printed = run(&folder.file(), "take");
    let others: u64 =
        printed.lines().find_map(|it| it.strip_prefix("taken: ")?.parse().ok()).unwrap();
    let mut own = 1;
    while let Ok(zae_limiter_core::Admission::Taken(_)) =
        store.acquire(&plan(&target("key-1", 10), 1)).await
    {
        own += 1;
    }
    drop(store);
    assert!(own + others <= 10, "{own} here and {others} there, of 10");
    assert!(is_sound(&folder.file()));
    // Closing has not written an old log over what the other process has committed.
    let store = SqliteStore::open(folder.file()).unwrap();
    let left = i64::try_from(10 - own - others).unwrap();
    assert_eq!(tokens(&store, &target("key-1", 10), NOW).await, Some(left));
}

/// The folder is renamed, and a new one takes its place: as a deployment does.
#[tokio::test]
async fn a_renamed_folder_is_noticed_before_the_next_write() {
    for durability in [Durability::Normal, Durability::Full] {
        let folder = Folder::new();
        let inner = folder.path().join("current");
        fs::create_dir(&inner).unwrap();
        let file = inner.join("limits.db");
        let store = SqliteOptions::new(&file).durability(durability).open().unwrap();
        assert!(take(&store, &plan(&target("key-1", 10), 3)).await);
        fs::rename(&inner, folder.path().join("old")).unwrap();
        let error = store.acquire(&plan(&target("key-1", 10), 1)).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Denied);
        fs::create_dir(&inner).unwrap();
        let other = SqliteStore::open(&file).unwrap();
        assert!(take(&other, &plan(&target("key-1", 10), 10)).await);
        let error = store.acquire(&plan(&target("key-1", 10), 1)).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Denied);
    }
}

/// A link that is swapped to another file, and a folder that is one.
#[tokio::test]
async fn a_swapped_link_is_noticed_before_the_next_write() {
    for of_folder in [false, true] {
        let folder = Folder::new();
        for name in ["a", "b"] {
            fs::create_dir(folder.path().join(name)).unwrap();
            SqliteStore::open(folder.path().join(name).join("limits.db")).unwrap();
        }
        let link = folder.path().join("current");
        let to = |name: &str| match of_folder {
            true => folder.path().join(name),
            false => folder.path().join(name).join("limits.db"),
        };
        std::os::unix::fs::symlink(to("a"), &link).unwrap();
        let file = if of_folder { link.join("limits.db") } else { link.clone() };
        let store = SqliteStore::open(&file).unwrap();
        assert!(take(&store, &plan(&target("key-1", 10), 3)).await);
        let new = folder.path().join("new");
        std::os::unix::fs::symlink(to("b"), &new).unwrap();
        fs::rename(&new, &link).unwrap();
        let error = store.acquire(&plan(&target("key-1", 10), 1)).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Denied);
        let read = store.peek(&[bucket_key("key-1", "gpt-4")], NOW).await;
        assert_eq!(read.unwrap_err().kind(), StoreErrorKind::Denied);
    }
}

/// Two names of one file have a log each: SQLite would lose the commits of one.
#[tokio::test]
async fn two_names_of_one_file_never_give_two_budgets() {
    let folder = Folder::new();
    drop(SqliteStore::open(folder.file()).unwrap());
    let link = folder.path().join("link.db");
    fs::hard_link(folder.file(), &link).unwrap();
    let Ok(store) = SqliteStore::open(folder.file()) else { return };
    let mut own = 0;
    for _ in 0..5 {
        own += u64::from(take(&store, &plan(&target("key-1", 10), 1)).await);
    }
    let other = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child_uses_the_file", "--nocapture"])
        .env(FILE, &link)
        .env(WORK, "take")
        .output()
        .unwrap();
    let printed = String::from_utf8(other.stdout).unwrap();
    let others: u64 =
        printed.lines().find_map(|it| it.strip_prefix("taken: ")?.parse().ok()).unwrap_or(0);
    while let Ok(zae_limiter_core::Admission::Taken(_)) =
        store.acquire(&plan(&target("key-1", 10), 1)).await
    {
        own += 1;
    }
    drop(store);
    assert!(own + others <= 10, "{own} here and {others} there, of 10");
    assert!(is_sound(&folder.file()));
}

/// The same within one process, which has the file open already.
#[tokio::test]
async fn a_second_name_of_a_file_that_is_open_here_is_refused() {
    let folder = Folder::new();
    let store = SqliteStore::open(folder.file()).unwrap();
    assert!(take(&store, &plan(&target("key-1", 10), 3)).await);
    let link = folder.path().join("link.db");
    fs::hard_link(folder.file(), &link).unwrap();
    for name in [&link, &folder.file()] {
        let error = SqliteStore::open(name).expect_err("the file has two names");
        assert_eq!(error.kind(), StoreErrorKind::Denied);
        assert!(error.to_string().contains("has another name (a hard link)"), "{error}");
    }
    assert!(is_locked(&folder.file()), "a look at the file has given up its locks");
    fs::remove_file(&link).unwrap();
    assert!(!link.exists() && !beside(&link, "-wal").exists());
    let again = SqliteStore::open(folder.file()).unwrap();
    assert!(take(&again, &plan(&target("key-1", 10), 3)).await);
    assert!(take(&store, &plan(&target("key-1", 10), 4)).await);
    assert!(!take(&store, &plan(&target("key-1", 10), 1)).await);
}

/// A file that is renamed while it is open keeps its log under the old name.
#[tokio::test]
async fn a_new_name_of_a_file_that_is_open_here_is_refused() {
    let folder = Folder::new();
    let store = SqliteStore::open(folder.file()).unwrap();
    assert!(take(&store, &plan(&target("key-1", 10), 3)).await);
    let renamed = folder.path().join("renamed.db");
    fs::rename(folder.file(), &renamed).unwrap();
    let error = SqliteStore::open(&renamed).expect_err("it has a log under the old name");
    assert_eq!(error.kind(), StoreErrorKind::Denied);
    assert!(error.to_string().contains("is open in this process under another name"), "{error}");
    assert!(!beside(&renamed, "-wal").exists());
}

/// Other paths to the same name: links to the file and to its folder, and a folder that was renamed.
#[tokio::test]
async fn other_paths_to_a_file_that_is_open_here_share_its_log() {
    let folder = Folder::new();
    let inner = folder.path().join("inner");
    fs::create_dir(&inner).unwrap();
    let store = SqliteStore::open(inner.join("limits.db")).unwrap();
    assert!(take(&store, &plan(&target("key-1", 10), 3)).await);
    let (link, linked) = (folder.path().join("link.db"), folder.path().join("linked"));
    std::os::unix::fs::symlink(inner.join("limits.db"), &link).unwrap();
    std::os::unix::fs::symlink(&inner, &linked).unwrap();
    for path in [link, linked.join("limits.db"), inner.join("../inner/limits.db")] {
        let other = SqliteStore::open(path).unwrap();
        assert!(take(&other, &plan(&target("key-1", 10), 1)).await);
    }
    assert_eq!(tokens(&store, &target("key-1", 10), NOW).await, Some(4));
    let moved = folder.path().join("moved");
    fs::rename(&inner, &moved).unwrap();
    let other = SqliteStore::open(moved.join("limits.db")).unwrap();
    assert_eq!(tokens(&other, &target("key-1", 10), NOW).await, Some(4));
}

/// Backups are restored by `cp` as well: into the file, which stays the same one.
#[tokio::test]
async fn a_backup_copied_into_an_open_file_gives_an_error_or_a_sound_file() {
    let folder = Folder::new();
    let backup = folder.path().join("backup.db");
    let store = SqliteStore::open(folder.file()).unwrap();
    for n in 0..200 {
        assert!(take(&store, &plan(&target(&format!("old-{n}"), 10), 3)).await);
    }
    drop(store);
    fs::copy(folder.file(), &backup).unwrap();
    let store = SqliteStore::open(folder.file()).unwrap();
    for n in 0..400 {
        assert!(take(&store, &plan(&target(&format!("new-{n}"), 10), 3)).await);
    }
    let shrinks = fs::metadata(folder.file()).unwrap().len() > fs::metadata(&backup).unwrap().len();
    fs::write(folder.file(), fs::read(&backup).unwrap()).unwrap();
    let mut failed = false;
    for n in 0..400 {
        failed |= store.acquire(&plan(&target(&format!("more-{n}"), 10), 1)).await.is_err();
    }
    drop(store);
    assert!(failed || is_sound(&folder.file()), "damaged without an error; smaller: {shrinks}");
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().mode() & 0o777
}

#[tokio::test]
async fn all_three_files_are_private() {
    let folder = Folder::new();
    let link = folder.path().join("link.db");
    // A link to a file that does not exist yet.
    std::os::unix::fs::symlink(folder.file(), &link).unwrap();
    let store = SqliteStore::open(&link).unwrap();
    assert!(take(&store, &plan(&target("key-1", 10), 3)).await);
    for suffix in ["", "-wal", "-shm"] {
        let found = beside(&folder.file(), suffix);
        assert_eq!(mode(&found), 0o600, "{}", found.display());
    }
    drop(store);
    fs::set_permissions(folder.file(), fs::Permissions::from_mode(0o640)).unwrap();
    let store = SqliteStore::open(&link).unwrap();
    assert!(take(&store, &plan(&target("key-1", 10), 3)).await);
    for suffix in ["", "-wal", "-shm"] {
        let found = beside(&folder.file(), suffix);
        assert_eq!(mode(&found), 0o640, "{}", found.display());
    }
}

/// A file is upgraded while many calls wait: each call either has been done in full, or is told why not.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn an_upgrade_amid_a_group_commit_fails_calls_in_full() {
    for (seed, durability) in (0..6).zip([Durability::Normal, Durability::Full].iter().cycle()) {
        let folder = Folder::new();
        let store = SqliteOptions::new(folder.file()).durability(*durability).open().unwrap();
        let bucket = target("key-1", 100_000);
        assert!(take(&store, &plan(&bucket, 1)).await);
        let tasks = (0..16).map(|_| {
            let (store, bucket) = (store.clone(), Arc::clone(&bucket));
            tokio::spawn(async move {
                let mut taken = 0;
                for _ in 0..5_000 {
                    match store.acquire(&plan(&bucket, 1)).await {
                        Ok(_) => taken += 1,
                        Err(error) => {
                            assert_eq!(error.kind(), StoreErrorKind::Incompatible, "{error:?}");
                            return (taken, true);
                        }
                    }
                }
                (taken, false)
            })
        });
        let tasks: Vec<_> = tasks.collect();
        let later = Connection::open(folder.file()).unwrap();
        later.busy_timeout(std::time::Duration::from_secs(20)).unwrap();
        for _ in 0..seed {
            later.execute_batch("BEGIN IMMEDIATE; COMMIT").unwrap();
        }
        later
            .execute_batch("BEGIN IMMEDIATE; ALTER TABLE bucket ADD COLUMN x TEXT; PRAGMA user_version = 4; COMMIT")
            .unwrap();
        let mut taken: i64 = 1;
        for task in tasks {
            let (done, _) = task.await.unwrap();
            taken += i64::from(done);
        }
        later.execute_batch("PRAGMA user_version = 3").unwrap();
        assert_eq!(tokens(&store, &bucket, NOW).await, Some(100_000 - taken), "seed {seed}");
    }
}

/// The file is replaced while many calls wait, by a rename: what was answered is in the old file, and nothing else is.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_replacement_amid_a_group_commit_loses_no_answered_call() {
    for durability in [Durability::Normal, Durability::Full, Durability::Normal] {
        let folder = Folder::new();
        let store = SqliteOptions::new(folder.file()).durability(durability).open().unwrap();
        let bucket = target("key-1", 100_000);
        assert!(take(&store, &plan(&bucket, 1)).await);
        let tasks: Vec<_> = (0..16)
            .map(|_| {
                let (store, bucket) = (store.clone(), Arc::clone(&bucket));
                tokio::spawn(async move {
                    let mut taken: i64 = 0;
                    for _ in 0..5_000 {
                        match store.acquire(&plan(&bucket, 1)).await {
                            Ok(_) => taken += 1,
                            Err(error) => {
                                assert_eq!(error.kind(), StoreErrorKind::Denied, "{error:?}");
                                return taken;
                            }
                        }
                    }
                    taken
                })
            })
            .collect();
        let aside = folder.path().join("aside.db");
        for suffix in ["", "-wal", "-shm"] {
            fs::rename(beside(&folder.file(), suffix), beside(&aside, suffix)).unwrap();
        }
        let mut taken = 1;
        for task in tasks {
            taken += task.await.unwrap();
        }
        drop(store);
        let moved = SqliteStore::open(&aside).unwrap();
        assert_eq!(tokens(&moved, &bucket, NOW).await, Some(100_000 - taken));
    }
}

/// The file as the first release made it.
fn downgrade(file: &Path) {
    let back = "ALTER TABLE config DROP COLUMN audit_retention_days; \
                ALTER TABLE namespace DROP COLUMN purging; DROP TABLE sweep; PRAGMA user_version = 1";
    Connection::open(file).unwrap().execute_batch(back).unwrap();
}

/// Many programs of this release open a file of the first one at the same time, each more than once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_file_that_many_upgrade_at_once_is_upgraded_once() {
    for _ in 0..10 {
        let folder = Folder::new();
        let store = SqliteStore::open(folder.file()).unwrap();
        assert!(take(&store, &plan(&target("key-1", 10), 1)).await);
        drop(store);
        downgrade(&folder.file());
        let threads: Vec<_> = (0..8)
            .map(|_| {
                let file = folder.file();
                std::thread::spawn(move || SqliteStore::open(file).unwrap())
            })
            .collect();
        let stores: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        for store in &stores {
            assert!(take(store, &plan(&target("key-1", 10), 1)).await);
        }
        assert_eq!(tokens(&stores[0], &target("key-1", 10), NOW).await, Some(1));
        drop(stores);
        assert!(is_sound(&folder.file()));
    }
}

/// A backup of an earlier release is restored into an open file: it is the limiter's own, and the error says what to do.
#[tokio::test]
async fn an_older_backup_restored_under_an_open_store_is_not_called_another_programs() {
    let folder = Folder::new();
    let store = SqliteStore::open(folder.file()).unwrap();
    assert!(take(&store, &plan(&target("key-1", 10), 1)).await);
    downgrade(&folder.file());
    let error = store.acquire(&plan(&target("key-1", 10), 1)).await.unwrap_err();
    let message = error.to_string();
    assert!(!message.contains("another program"), "{message}");
    // Opening it again is what helps.
    let again = SqliteStore::open(folder.file()).unwrap();
    assert!(take(&again, &plan(&target("key-1", 10), 1)).await);
    assert!(take(&store, &plan(&target("key-1", 10), 1)).await, "it was upgraded by another");
}

/// A backup of this release is restored into an open file by SQLite itself: the store goes on with the balances of the
/// backup, not with those that it remembers.
#[tokio::test]
async fn a_backup_restored_by_sqlite_under_an_open_store_is_used_at_once() {
    let folder = Folder::new();
    let store = SqliteStore::open(folder.file()).unwrap();
    assert!(take(&store, &plan(&target("key-1", 10), 1)).await);
    let backup = folder.path().join("backup.db");
    let sqlite = |command: String| {
        Command::new("sqlite3")
            .arg(folder.file())
            .arg(command)
            .status()
            .is_ok_and(|it| it.success())
    };
    if !sqlite(format!(".backup '{}'", backup.display())) {
        eprintln!("skipped: there is no program sqlite3");
        return;
    }
    assert!(take(&store, &plan(&target("key-1", 10), 8)).await);
    assert!(take(&store, &plan(&target("key-2", 10), 8)).await);
    assert!(sqlite(format!(".restore '{}'", backup.display())));
    assert!(take(&store, &plan(&target("key-1", 10), 9)).await, "as in the backup");
    assert!(take(&store, &plan(&target("key-2", 10), 10)).await, "absent in the backup");
    assert!(!take(&store, &plan(&target("key-1", 10), 1)).await);
    drop(store);
    assert!(is_sound(&folder.file()));
}

/// Other programs change rows: the store remembers neither their numbers nor their balances.
#[tokio::test]
async fn rows_that_others_change_are_read_again() {
    let folder = Folder::new();
    let store = SqliteStore::open(folder.file()).unwrap();
    for (id, tokens) in [("key-1", 1), ("key-2", 9)] {
        assert!(take(&store, &plan(&target(id, 10), tokens)).await);
    }
    let other = Connection::open(folder.file()).unwrap();
    let swap = "UPDATE bucket SET entity = 'key-3' WHERE entity = 'key-1'; \
                UPDATE bucket SET entity = 'key-1' WHERE entity = 'key-2'; \
                UPDATE bucket SET entity = 'key-2' WHERE entity = 'key-3'";
    other.execute_batch(swap).unwrap();
    assert!(!take(&store, &plan(&target("key-1", 10), 2)).await);
    assert!(take(&store, &plan(&target("key-2", 10), 9)).await);
    other.execute_batch("DELETE FROM bucket; VACUUM").unwrap();
    for id in ["key-1", "key-2"] {
        assert!(take(&store, &plan(&target(id, 10), 10)).await);
        assert!(!take(&store, &plan(&target(id, 10), 1)).await);
    }
}
