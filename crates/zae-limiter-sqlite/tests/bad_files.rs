//! Files that cannot be used give a typed error, stay unchanged, and lose no data.
#![allow(clippy::unwrap_used, reason = "only tests are here")]

mod common;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::task::{Context, Poll, Waker};

use common::*;
use rusqlite::Connection;
use zae_limiter_core::{Admission, Store, StoreErrorKind};
use zae_limiter_sqlite::{Durability, SqliteOptions, SqliteStore};

/// Opening the file fails with this kind and text, names the file, and does not change it.
fn check(file: &Path, kind: StoreErrorKind, text: &str) {
    let before = fs::read(file).ok();
    let error = SqliteStore::open(file).unwrap_err();
    assert_eq!(error.kind(), kind, "{error:?}");
    let message = error.to_string();
    assert!(message.contains(text) && message.contains(file.to_str().unwrap()), "{message}");
    assert!(fs::read(file).ok() == before, "the file was changed");
}

/// A file in which `key-1` has 7 of 10 tokens.
async fn a_used_file(folder: &Folder) {
    let store = SqliteStore::open(folder.file()).unwrap();
    assert!(take(&store, &plan(&target("key-1", 10), 3)).await);
}

async fn check_unchanged(folder: &Folder) {
    let store = SqliteStore::open(folder.file()).unwrap();
    assert_eq!(tokens(&store, &target("key-1", 10), NOW).await, Some(7));
    drop(store);
    assert!(is_sound(&folder.file()));
}

#[test]
fn garbage_is_not_a_limiters_file() {
    let folder = Folder::new();
    for garbage in [&b"x"[..], &[0; 100], &[b'z'; 9_000], b"SQLite format 3\0", b"SQLite format 3"]
    {
        fs::write(folder.file(), garbage).unwrap();
        check(&folder.file(), StoreErrorKind::Corrupt, "not a limiter's file");
    }
}

#[tokio::test]
async fn an_empty_file_becomes_a_limiters() {
    let folder = Folder::new();
    fs::write(folder.file(), b"").unwrap();
    a_used_file(&folder).await;
    check_unchanged(&folder).await;
}

#[tokio::test]
async fn a_truncated_file_is_damaged() {
    let folder = Folder::new();
    a_used_file(&folder).await;
    let whole = fs::read(folder.file()).unwrap();
    for length in [100, 512, 1_024, 1_500, whole.len() / 2, whole.len() - 1_024] {
        fs::write(folder.file(), &whole[..length]).unwrap();
        check(&folder.file(), StoreErrorKind::Corrupt, "damaged");
    }
    fs::write(folder.file(), &whole).unwrap();
    check_unchanged(&folder).await;
}

#[tokio::test]
async fn a_file_with_damaged_pages_gives_typed_errors() {
    let folder = Folder::new();
    let store = SqliteStore::open(folder.file()).unwrap();
    for n in 0..50 {
        assert!(take(&store, &plan(&target(&format!("key-{n}"), 10), 3)).await);
    }
    drop(store);
    let whole = fs::read(folder.file()).unwrap();
    let mut damaged = 0;
    for page in 1..whole.len() / 1_024 {
        let mut bytes = whole.clone();
        bytes[page * 1_024..(page + 1) * 1_024].fill(0xa5);
        fs::write(folder.file(), &bytes).unwrap();
        let Ok(store) = SqliteStore::open(folder.file()) else { continue };
        for n in 0..50 {
            match store.acquire(&plan(&target(&format!("key-{n}"), 10), 1)).await {
                Ok(Admission::Taken(_)) => {}
                Ok(refused) => panic!("{refused:?}"),
                Err(error) => {
                    assert_eq!(error.kind(), StoreErrorKind::Corrupt, "{error:?}");
                    damaged += 1;
                }
            }
        }
    }
    assert!(damaged > 0);
}

#[test]
fn a_database_of_another_program_is_left_alone() {
    for sql in [
        "CREATE TABLE theirs (a); INSERT INTO theirs VALUES (1)",
        "PRAGMA application_id = 77; CREATE TABLE theirs (a)",
        "PRAGMA journal_mode = WAL; PRAGMA application_id = 77; CREATE TABLE theirs (a)",
        "PRAGMA user_version = 4; CREATE TABLE theirs (a)",
    ] {
        let folder = Folder::new();
        Connection::open(folder.file()).unwrap().execute_batch(sql).unwrap();
        check(&folder.file(), StoreErrorKind::Corrupt, "another program");
    }
}

fn beside(file: &Path, suffix: &str) -> PathBuf {
    let mut name = file.as_os_str().to_owned();
    name.push(suffix);
    PathBuf::from(name)
}

/// Copies the file and its log to where a killed program would have left them.
fn leave_behind(from: &Path, to: &Path) {
    for suffix in ["", "-wal"] {
        fs::copy(beside(from, suffix), beside(to, suffix)).unwrap();
    }
    assert!(fs::metadata(beside(to, "-wal")).unwrap().len() > 0);
}

/// Opening the file fails, and changes neither the file nor its log.
fn check_with_log(file: &Path, kind: StoreErrorKind, text: &str) {
    let log = fs::read(beside(file, "-wal")).unwrap();
    for _ in 0..2 {
        check(file, kind, text);
        assert!(fs::read(beside(file, "-wal")).is_ok_and(|it| it == log), "the log was changed");
    }
}

#[test]
fn a_database_that_another_program_left_with_its_log_is_left_alone() {
    for sql in [
        "CREATE TABLE theirs (a)",
        "PRAGMA application_id = 77; CREATE TABLE theirs (a)",
        "PRAGMA user_version = 4; CREATE TABLE theirs (a)",
    ] {
        let folder = Folder::new();
        let theirs = folder.path().join("theirs.db");
        let program = Connection::open(&theirs).unwrap();
        program.execute_batch("PRAGMA journal_mode = WAL").unwrap();
        program.execute_batch(sql).unwrap();
        leave_behind(&theirs, &folder.file());
        check_with_log(&folder.file(), StoreErrorKind::Corrupt, "another program");
        let conn = Connection::open(folder.file()).unwrap();
        conn.prepare("SELECT a FROM theirs").unwrap();
    }
}

#[tokio::test]
async fn a_limiters_file_that_cannot_be_used_keeps_its_log() {
    for (sql, kind, text) in [
        ("PRAGMA user_version = 4", StoreErrorKind::Incompatible, "later release"),
        ("DROP TABLE usage", StoreErrorKind::Corrupt, "damaged"),
    ] {
        let folder = Folder::new();
        a_used_file(&folder).await;
        let left = folder.path().join("left.db");
        let program = Connection::open(folder.file()).unwrap();
        program.execute_batch(sql).unwrap();
        leave_behind(&folder.file(), &left);
        check_with_log(&left, kind, text);
    }
}

#[tokio::test]
async fn a_file_that_cannot_be_used_gets_no_files_beside_it() {
    let folder = Folder::new();
    let file = folder.file();
    let sql = "PRAGMA journal_mode = WAL; CREATE TABLE theirs (a)";
    Connection::open(&file).unwrap().execute_batch(sql).unwrap();
    check(&file, StoreErrorKind::Corrupt, "another program");
    assert!(!beside(&file, "-wal").exists() && !beside(&file, "-shm").exists());
}

/// SQLite would roll the journal back, which changes the file.
#[test]
fn a_database_that_another_program_left_with_its_journal_is_left_alone() {
    let folder = Folder::new();
    let theirs = folder.path().join("theirs.db");
    let program = Connection::open(&theirs).unwrap();
    program.execute_batch("CREATE TABLE theirs (a); INSERT INTO theirs VALUES (1)").unwrap();
    // With so small a cache, SQLite writes to the file before the end of the transaction.
    let sql = "PRAGMA cache_size = 1; BEGIN; \
               WITH RECURSIVE n (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM n WHERE n < 5000) \
               INSERT INTO theirs SELECT n FROM n";
    program.execute_batch(sql).unwrap();
    for suffix in ["", "-journal"] {
        fs::copy(beside(&theirs, suffix), beside(&folder.file(), suffix)).unwrap();
    }
    let journal = fs::read(beside(&folder.file(), "-journal")).unwrap();
    check(&folder.file(), StoreErrorKind::Corrupt, "another program");
    assert!(fs::read(beside(&folder.file(), "-journal")).unwrap() == journal);
    let conn = Connection::open(folder.file()).unwrap();
    let rows = conn.query_row("SELECT count(*) FROM theirs", [], |row| row.get::<_, i64>(0));
    assert_eq!(rows.unwrap(), 1, "the journal was hot");
}

#[tokio::test]
async fn a_file_of_a_later_release_is_left_alone() {
    let folder = Folder::new();
    a_used_file(&folder).await;
    let conn = Connection::open(folder.file()).unwrap();
    conn.execute_batch("PRAGMA user_version = 4").unwrap();
    drop(conn);
    check(&folder.file(), StoreErrorKind::Incompatible, "later release");
    let conn = Connection::open(folder.file()).unwrap();
    conn.execute_batch("PRAGMA user_version = 3").unwrap();
    drop(conn);
    check_unchanged(&folder).await;
}

#[tokio::test]
async fn a_file_of_the_first_release_is_upgraded() {
    let folder = Folder::new();
    a_used_file(&folder).await;
    let conn = Connection::open(folder.file()).unwrap();
    let back = "ALTER TABLE config DROP COLUMN audit_retention_days; \
                ALTER TABLE namespace DROP COLUMN purging; DROP TABLE sweep; PRAGMA user_version = 1";
    conn.execute_batch(back).unwrap();
    drop(conn);
    check_unchanged(&folder).await;
    let conn = Connection::open(folder.file()).unwrap();
    let version = conn.query_row("PRAGMA user_version", [], |row| row.get::<_, i32>(0)).unwrap();
    assert_eq!(version, 3);
    for sql in ["SELECT audit_retention_days FROM config", "SELECT seen FROM sweep"] {
        conn.prepare(sql).unwrap();
    }
}

#[tokio::test]
async fn a_file_that_lacks_a_table_is_damaged() {
    let folder = Folder::new();
    a_used_file(&folder).await;
    Connection::open(folder.file()).unwrap().execute_batch("DROP TABLE usage").unwrap();
    check(&folder.file(), StoreErrorKind::Corrupt, "damaged");
}

#[test]
fn paths_that_cannot_be_written_are_denied() {
    let folder = Folder::new();
    check(folder.path(), StoreErrorKind::Denied, "is a folder");
    let missing = folder.path().join("missing").join("limits.db");
    check(&missing, StoreErrorKind::Denied, "does not exist");
    check(Path::new("/proc/limits.db"), StoreErrorKind::Denied, "/proc");
    fs::write(folder.file(), b"").unwrap();
    let inside_a_file = folder.file().join("limits.db");
    check(&inside_a_file, StoreErrorKind::Denied, "does not exist");
}

#[tokio::test]
async fn a_read_only_file_is_denied() {
    let folder = Folder::new();
    a_used_file(&folder).await;
    let mut permissions = fs::metadata(folder.file()).unwrap().permissions();
    permissions.set_readonly(true);
    fs::set_permissions(folder.file(), permissions).unwrap();
    if fs::OpenOptions::new().append(true).open(folder.file()).is_ok() {
        eprintln!("skipped: permissions do not bind this user");
        return;
    }
    check(&folder.file(), StoreErrorKind::Denied, "read-only");
}

#[tokio::test]
async fn callers_wait_for_a_locked_file_and_those_who_leave_take_nothing() {
    let folder = Folder::new();
    let store = SqliteStore::open(folder.file()).unwrap();
    let bucket = target("key-1", 10);
    assert!(take(&store, &plan(&bucket, 3)).await);
    let other = Connection::open(folder.file()).unwrap();
    other.execute_batch("BEGIN EXCLUSIVE").unwrap();

    let mut context = Context::from_waker(Waker::noop());
    let (leaves, stays) = (plan(&bucket, 2), plan(&bucket, 1));
    let mut leaving = store.acquire(&leaves);
    let mut staying = store.acquire(&stays);
    let refunds = [refund(&bucket, 1)];
    let mut settling = store.settle(&refunds, NOW);
    assert!(matches!(leaving.as_mut().poll(&mut context), Poll::Pending));
    assert!(matches!(staying.as_mut().poll(&mut context), Poll::Pending));
    assert!(matches!(settling.as_mut().poll(&mut context), Poll::Pending));
    // Reads go on meanwhile.
    assert_eq!(tokens(&store, &bucket, NOW).await, Some(7));
    assert!(matches!(leaving.as_mut().poll(&mut context), Poll::Pending));
    drop(leaving);
    drop(settling);
    other.execute_batch("COMMIT").unwrap();
    assert!(matches!(staying.await.unwrap(), Admission::Taken(_)));
    store.settle(&[], NOW).await.unwrap();
    assert_eq!(tokens(&store, &bucket, NOW).await, Some(7));
    drop(store);
    check_unchanged(&folder).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn many_openings_of_a_new_file_at_once_all_succeed() {
    for _ in 0..5 {
        let folder = Folder::new();
        let file = folder.file();
        let threads: Vec<_> = (0..8)
            .map(|_| {
                let file = file.clone();
                std::thread::spawn(move || SqliteStore::open(file).unwrap())
            })
            .collect();
        let stores: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        let bucket = target("key-1", 8);
        for store in &stores {
            assert!(take(store, &plan(&bucket, 1)).await);
        }
        assert!(!take(&stores[0], &plan(&bucket, 1)).await);
    }
}

const FULL_DISK: &str = "ZAEL_TEST_FULL_DISK";

/// Other tests run this one as a child process with a small file size limit. It writes until
/// nothing more fits.
#[tokio::test]
async fn child_writes_until_the_disk_is_full() {
    let Ok(file) = std::env::var(FULL_DISK) else { return };
    for durability in [Durability::Full, Durability::Normal] {
        let store = match SqliteOptions::new(&file).durability(durability).open() {
            Ok(store) => store,
            Err(error) => {
                println!("ended with {:?}", error.kind());
                continue;
            }
        };
        for n in 0..20_000 {
            let bucket = target(&format!("key-{durability:?}-{n}"), 10);
            match store.acquire(&plan(&bucket, 3)).await {
                Ok(Admission::Taken(_)) => println!("took {}", bucket.key().entity),
                Ok(refused) => panic!("{refused:?}"),
                Err(error) => {
                    println!("ended with {:?}", error.kind());
                    break;
                }
            }
        }
        // Reads still work.
        store.peek(&[bucket_key("key-1", "gpt-4")], NOW).await.unwrap();
    }
}

#[tokio::test]
async fn a_file_that_cannot_be_opened_for_lack_of_room_is_not_reported_as_damaged() {
    let folder = Folder::new();
    a_used_file(&folder).await;
    let test = std::env::current_exe().unwrap();
    for blocks in [0, 1, 8] {
        let script = format!(
            "trap '' XFSZ; ulimit -f {blocks}; \
             exec {} --exact child_writes_until_the_disk_is_full --nocapture | cat",
            test.display()
        );
        let mut command = Command::new("sh");
        command.args(["-c", &script]).env(FULL_DISK, folder.file()).stderr(Stdio::inherit());
        let printed = String::from_utf8(command.output().unwrap().stdout).unwrap();
        // Which of the two depends on the file that SQLite could not write first.
        let [full, busy] = ["Full", "Unavailable"].map(|kind| printed.matches(kind).count());
        assert_eq!(full + busy, 2, "{blocks} blocks: {printed}");
    }
    check_unchanged(&folder).await;
}

#[tokio::test]
async fn closing_the_store_leaves_only_the_file() {
    for _ in 0..20 {
        let folder = Folder::new();
        a_used_file(&folder).await;
        let names: Vec<_> = fs::read_dir(folder.file().parent().unwrap())
            .unwrap()
            .map(|entry| entry.unwrap().file_name())
            .collect();
        assert_eq!(names.len(), 1, "{names:?}");
    }
}

#[test]
fn a_database_in_memory_is_no_file() {
    let error = SqliteStore::open(":memory:").unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Rejected);
    assert!(error.to_string().contains("use a MemoryStore"), "{error}");
    assert!(!Path::new(":memory:").exists());
}

#[cfg(unix)]
#[test]
fn only_a_regular_file_can_be_opened() {
    let folder = Folder::new();
    let pipe = folder.file();
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    for file in [&*pipe, Path::new("/dev/null")] {
        let error = SqliteStore::open(file).unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Denied);
        assert!(error.to_string().contains("not a regular file"), "{error}");
    }
}

#[tokio::test]
async fn a_full_disk_is_reported_and_loses_no_completed_call() {
    let folder = Folder::new();
    a_used_file(&folder).await;
    let test = std::env::current_exe().unwrap();
    let script = format!(
        "trap '' XFSZ; ulimit -f 400; exec {} --exact child_writes_until_the_disk_is_full --nocapture",
        test.display()
    );
    let output = Command::new("sh")
        .args(["-c", &script])
        .env(FULL_DISK, folder.file())
        .stderr(Stdio::inherit())
        .output()
        .unwrap();
    let printed = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{printed}");
    assert_eq!(printed.matches("ended with Full").count(), 2, "{printed}");
    let store = SqliteStore::open(folder.file()).unwrap();
    let taken: Vec<_> = printed.lines().filter_map(|line| line.split_once("took ")).collect();
    assert!(taken.len() > 50, "{printed}");
    for (_, id) in taken {
        let bucket = target(id.trim(), 10);
        assert_eq!(tokens(&store, &bucket, NOW).await, Some(7), "{id}");
    }
    // There is room again, and writes succeed.
    assert!(take(&store, &plan(&target("key-2", 10), 3)).await);
    drop(store);
    check_unchanged(&folder).await;
}

/// Others replace, remove or upgrade the file while the store has it open.
mod while_open {
    use super::*;

    async fn error_of_take(store: &SqliteStore) -> zae_limiter_core::StoreError {
        store.acquire(&plan(&target("key-1", 10), 1)).await.unwrap_err()
    }

    #[cfg(unix)]
    #[tokio::test]
    async fn a_replaced_file_is_noticed_before_the_next_write() {
        let folder = Folder::new();
        let store = SqliteStore::open(folder.file()).unwrap();
        assert!(take(&store, &plan(&target("key-1", 10), 3)).await);
        let aside = folder.file().with_extension("old");
        fs::rename(folder.file(), &aside).unwrap();

        for kept in ["removed", "replaced"] {
            let error = error_of_take(&store).await;
            assert_eq!(error.kind(), StoreErrorKind::Denied, "{kept}");
            assert!(error.to_string().contains("was replaced or removed"), "{error}");
            let settled = store.settle(&[charge(&target("key-1", 10), 1)], NOW).await;
            assert_eq!(settled.unwrap_err().kind(), StoreErrorKind::Denied);
            let read = store.peek(&[bucket_key("key-1", "gpt-4")], NOW).await;
            assert_eq!(
                read.unwrap_err().kind(),
                StoreErrorKind::Denied,
                "nor does it read stale data"
            );
            if kept == "removed" {
                // A second store makes a file of its own.
                let other = SqliteStore::open(folder.file()).unwrap();
                assert!(take(&other, &plan(&target("key-1", 10), 10)).await);
            }
        }
        fs::rename(&aside, folder.file()).unwrap();
        let error = error_of_take(&store).await;
        assert_eq!(error.kind(), StoreErrorKind::Denied, "its log is gone, and commits with it");
    }

    #[cfg(unix)]
    #[tokio::test]
    async fn a_removed_log_is_noticed_before_the_next_write() {
        let folder = Folder::new();
        // Through a link: the log is next to the file itself.
        let link = folder.file().with_extension("link");
        std::os::unix::fs::symlink(folder.file(), &link).unwrap();
        let store = SqliteStore::open(&link).unwrap();
        assert!(take(&store, &plan(&target("key-1", 10), 3)).await);
        fs::remove_file(folder.file().with_extension("db-wal")).unwrap();
        assert_eq!(error_of_take(&store).await.kind(), StoreErrorKind::Denied);
    }

    #[tokio::test]
    async fn a_truncated_file_is_noticed_before_the_next_write() {
        let folder = Folder::new();
        a_used_file(&folder).await;
        let whole = fs::read(folder.file()).unwrap();
        let lengths = [0, 10, 1_024, u64::try_from(whole.len()).unwrap() - 1_024];
        for (length, is_in_log) in lengths.into_iter().flat_map(|it| [(it, false), (it, true)]) {
            fs::write(folder.file(), &whole).unwrap();
            let store = SqliteStore::open(folder.file()).unwrap();
            if is_in_log {
                // Now the log has the first page: SQLite itself notices nothing any more.
                assert!(take(&store, &plan(&target("key-2", 10), 3)).await);
            }
            let file = fs::OpenOptions::new().write(true).open(folder.file()).unwrap();
            file.set_len(length).unwrap();
            for _ in 0..2 {
                let error = error_of_take(&store).await;
                assert_eq!(error.kind(), StoreErrorKind::Corrupt, "{length} bytes: {error:?}");
                let text = error.to_string();
                let is_noticed = text.contains("was truncated while it was open");
                assert!(is_noticed || !is_in_log && text.contains("damaged"), "{length}: {error}");
                let read = store.peek(&[bucket_key("key-1", "gpt-4")], NOW).await;
                assert_eq!(read.unwrap_err().kind(), StoreErrorKind::Corrupt);
            }
            // The same file, with its bytes back.
            fs::write(folder.file(), &whole).unwrap();
            assert!(take(&store, &plan(&target("key-3", 10), 3)).await, "{length} bytes");
        }
    }

    #[tokio::test]
    async fn a_file_that_another_program_has_made_smaller_is_used_on() {
        let folder = Folder::new();
        let store = SqliteStore::open(folder.file()).unwrap();
        for n in 0..300 {
            assert!(take(&store, &plan(&target(&format!("key-{n}"), 10), 3)).await);
        }
        let length = || fs::metadata(folder.file()).unwrap().len();
        let other = Connection::open(folder.file()).unwrap();
        let checkpoint =
            || other.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(())).unwrap();
        checkpoint();
        assert!(take(&store, &plan(&target("key-1", 10), 1)).await);
        let before = length();
        other.execute_batch("DELETE FROM bucket WHERE entity <> 'key-1'; VACUUM").unwrap();
        checkpoint();
        assert!(length() < before);
        assert!(take(&store, &plan(&target("key-1", 10), 1)).await);
        assert_eq!(tokens(&store, &target("key-1", 10), NOW).await, Some(5));
    }

    #[tokio::test]
    async fn a_file_of_a_later_release_is_not_called_damaged() {
        let folder = Folder::new();
        let store = SqliteStore::open(folder.file()).unwrap();
        assert!(take(&store, &plan(&target("key-1", 10), 3)).await);
        let later = Connection::open(folder.file()).unwrap();
        let sql = "ALTER TABLE bucket ADD COLUMN more TEXT; ALTER TABLE audit ADD COLUMN more TEXT; \
                   PRAGMA user_version = 99";
        later.execute_batch(sql).unwrap();
        for _ in 0..2 {
            let error = error_of_take(&store).await;
            assert_eq!(error.kind(), StoreErrorKind::Incompatible);
            assert!(error.to_string().contains("later release"), "{error}");
            let read = store.peek(&[bucket_key("key-1", "gpt-4")], NOW).await;
            assert_eq!(read.unwrap_err().kind(), StoreErrorKind::Incompatible);
        }
        later.execute_batch("PRAGMA user_version = 3").unwrap();
        let target = target("key-1", 10);
        assert!(
            take(&store, &plan(&target, 1)).await,
            "columns that it does not know do not disturb it"
        );
        let namespace = zae_limiter_core::Record::NamespaceName("a".parse().unwrap(), ns());
        let put = zae_limiter_core::Write::Put(namespace, zae_limiter_core::Precondition::Always);
        store.write(&[put]).await.unwrap();
    }
}
