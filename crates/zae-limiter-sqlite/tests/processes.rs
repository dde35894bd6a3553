//! Many processes share one file and one budget, also when some of them are killed.
#![allow(clippy::unwrap_used, reason = "only tests are here")]

mod common;

use std::io::{BufRead, BufReader, Write as _};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use common::*;
use zae_limiter_sqlite::SqliteStore;

const FILE: &str = "ZAEL_TEST_PROCESS_FILE";
const CAPACITY: u64 = 1_000;
const TASKS: usize = 64;
const RUNS: u64 = 50;

/// The other tests run this one as a child process. It takes one token at a time until none is
/// left, and prints a line for each.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn child_takes_all_it_can() {
    let Ok(file) = std::env::var(FILE) else { return };
    let store = SqliteStore::open(file).unwrap();
    let bucket = target("shared", CAPACITY);
    let tasks = (0..TASKS).map(|_| {
        let (store, bucket) = (store.clone(), Arc::clone(&bucket));
        tokio::spawn(async move {
            while take(&store, &plan(&bucket, 1)).await {
                let mut out = std::io::stdout().lock();
                // A broken pipe means that the parent has stopped reading.
                if out.write_all(b"admitted\n").and_then(|()| out.flush()).is_err() {
                    return;
                }
            }
        })
    });
    for task in tasks.collect::<Vec<_>>() {
        task.await.unwrap();
    }
}

fn start(file: &Path) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child_takes_all_it_can", "--nocapture"])
        .env(FILE, file)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Counts the admissions that the child prints. Kills the child after `kill_after` of them.
fn watch(mut child: Child, kill_after: Option<usize>) -> usize {
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut admitted = 0;
    let mut killed = false;
    while let Some(Ok(line)) = lines.next() {
        admitted += usize::from(line.ends_with("admitted"));
        if kill_after.is_some_and(|count| admitted >= count) {
            child.kill().unwrap();
            killed = true;
            break;
        }
    }
    // Lines that the child printed before it was killed count.
    admitted += lines.map_while(Result::ok).filter(|line| line.ends_with("admitted")).count();
    let status = child.wait().unwrap();
    assert!(killed || status.success());
    admitted
}

fn run(file: &Path, kills: [Option<usize>; 4]) -> [usize; 4] {
    let threads = kills.map(|kill| {
        let child = start(file);
        std::thread::spawn(move || watch(child, kill))
    });
    threads.map(|thread| thread.join().unwrap())
}

#[tokio::test]
async fn four_processes_together_take_exactly_the_capacity() {
    let folder = Folder::new();
    let admitted = run(&folder.file(), [None; 4]);
    eprintln!("admitted by each process: {admitted:?}");
    assert_eq!(admitted.iter().sum::<usize>(), 1_000);
    let store = SqliteStore::open(folder.file()).unwrap();
    assert_eq!(tokens(&store, &target("shared", CAPACITY), NOW).await, Some(0));
    drop(store);
    assert!(is_sound(&folder.file()));
}

#[tokio::test]
async fn killed_processes_leave_a_sound_file_and_never_over_admit() {
    for seed in 0..RUNS {
        let mut random = fastrand::Rng::with_seed(seed);
        let folder = Folder::new();
        let kills = std::array::from_fn(|_| Some(random.usize(1..400)));
        let admitted = run(&folder.file(), kills);
        assert!(is_sound(&folder.file()), "seed {seed}");
        let store = SqliteStore::open(folder.file()).unwrap();
        let bucket = peek(&store, &target("shared", CAPACITY), NOW).await.unwrap();
        let (left, consumed) = (bucket.cells()[0].tokens, bucket.cells()[0].consumed);
        let capacity = i64::try_from(CAPACITY).unwrap();
        assert_eq!(left.whole_tokens() + consumed.whole_tokens(), capacity, "seed {seed}");
        let printed = i64::try_from(admitted.iter().sum::<usize>()).unwrap();
        assert!(printed <= consumed.whole_tokens(), "seed {seed}: {printed} of {consumed:?}");
        // The next process can take the rest, and no more.
        let rest = u64::try_from(left.whole_tokens()).unwrap();
        assert!(rest == 0 || take(&store, &plan(&target("shared", CAPACITY), rest)).await);
        assert!(!take(&store, &plan(&target("shared", CAPACITY), 1)).await);
    }
}
