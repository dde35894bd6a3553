//! A disk without room: callers hear that nothing was changed, the file and the memory agree, and service returns with
//! the room. Each case runs in a child process, because a file size limit holds for a whole process.
#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "only tests are here")]

mod common;

use std::path::PathBuf;
use std::pin::pin;
use std::process::Command;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use common::*;
use rustix::process::{Resource, getrlimit, setrlimit};
use zae_limiter_core::{
    Admission, Applied, BoxFuture, BreakerSettings, Error, Limit, ManualClock, RateLimiter, Store,
    StoreError, StoreErrorKind,
};
use zae_limiter_sqlite::{Durability, SqliteOptions, SqliteStore};

const FILE: &str = "ZAEL_TEST_FULL_DISK_FILE";

/// The file of a child process. In the parent, runs the test of this name in a child that survives `SIGXFSZ`, with a
/// fresh folder.
fn in_child(name: &str) -> Option<PathBuf> {
    if let Ok(file) = std::env::var(FILE) {
        return Some(file.into());
    }
    let folder = Folder::new();
    let script = r#"trap '' XFSZ; exec "$0" --exact "$1" --nocapture"#;
    let mut command = Command::new("sh");
    command.args(["-c", script]).arg(std::env::current_exe().unwrap()).arg(name);
    let output = command.env(FILE, folder.file()).output().unwrap();
    let printed = [output.stdout, output.stderr].concat();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&printed));
    assert!(is_sound(&folder.file()));
    None
}

/// No file of this process can be written beyond these bytes.
fn set_room(bytes: Option<u64>) {
    let limit = rustix::process::Rlimit { current: bytes, ..getrlimit(Resource::Fsize) };
    setrlimit(Resource::Fsize, limit).unwrap();
}

const NO_ROOM: Option<u64> = Some(1);

fn submit<T>(future: &mut BoxFuture<'_, Result<T, StoreError>>) {
    let mut context = Context::from_waker(Waker::noop());
    assert!(matches!(future.as_mut().poll(&mut context), Poll::Pending));
}

fn check_full<T: std::fmt::Debug>(done: Result<T, StoreError>) {
    let error = done.expect_err("there is no room");
    assert_eq!((error.kind(), error.applied()), (StoreErrorKind::Full, Applied::No), "{error:?}");
    assert!(error.is_transient() && error.to_string().contains("free some space"), "{error}");
}

#[tokio::test]
async fn a_disk_full_at_the_commit_undoes_the_batch_in_the_file_and_in_memory() {
    let name = "a_disk_full_at_the_commit_undoes_the_batch_in_the_file_and_in_memory";
    let Some(file) = in_child(name) else { return };
    for durability in [Durability::Normal, Durability::Full] {
        let store = SqliteOptions::new(&file).durability(durability).open().unwrap();
        let (old, new) = (target(&format!("old-{durability:?}"), 10), target("new", 10));
        assert!(take(&store, &plan(&old, 4)).await);
        let other = SqliteStore::open(&file).unwrap();
        for _ in 0..3 {
            set_room(NO_ROOM);
            let refunds = [refund(&old, 2)];
            let plans = [plan(&old, 6), plan_at(NOW, &[(&new, 1), (&old, 1)])];
            let mut acquires: Vec<_> = plans.iter().map(|plan| store.acquire(plan)).collect();
            acquires.iter_mut().for_each(submit);
            let mut refunding = store.settle(&refunds, NOW);
            submit(&mut refunding);
            for acquire in acquires {
                match acquire.await {
                    // Not in the same batch as the refund: nothing was left to take.
                    Ok(Admission::Refused(_)) => panic!("the first was not undone"),
                    done => check_full(done),
                }
            }
            check_full(refunding.await);
            // Its caller leaves with the error unread: the store carries it out once there is room.
            let mut leaving = store.settle(&refunds, NOW);
            submit(&mut leaving);
            drop(leaving);
            check_full(store.acquire(&plan(&old, 1)).await);
            assert_eq!(tokens(&other, &old, NOW).await, Some(6), "for the other processes");
            set_room(None);

            // The refund of the caller that left, and this call.
            assert!(take(&store, &plan(&old, 2)).await, "there is room again");
            assert_eq!(tokens(&store, &old, NOW).await, Some(6), "the refund came once");
            assert_eq!(tokens(&store, &new, NOW).await, None);
        }
    }
}

#[tokio::test]
async fn a_log_that_cannot_grow_is_started_over() {
    let Some(file) = in_child("a_log_that_cannot_grow_is_started_over") else { return };
    let store = SqliteStore::open(&file).unwrap();
    let bucket = target("key-1", 1_000_000);
    let mut taken = 0;
    // Room for the file, and for some transactions in the log.
    set_room(Some(200 << 10));
    let mut full = 0;
    for _ in 0..2_000 {
        match store.acquire(&plan(&bucket, 1)).await {
            Ok(admission) => {
                assert!(matches!(admission, Admission::Taken(_)));
                taken += 1;
            }
            done => {
                check_full(done);
                full += 1;
            }
        }
    }
    assert!(full >= 5, "{full} calls found no room");
    assert!(taken >= 1_900, "one checkpoint makes room for many calls");
    assert_eq!(tokens(&store, &bucket, NOW).await, Some(1_000_000 - taken));
}

#[tokio::test]
async fn a_file_that_cannot_be_created_for_lack_of_room_can_be_created_later() {
    let name = "a_file_that_cannot_be_created_for_lack_of_room_can_be_created_later";
    let Some(file) = in_child(name) else { return };
    let mut failed = 0;
    for room in [1, 512, 1 << 10, 4 << 10, 16 << 10, 20 << 10, 24 << 10, 30 << 10] {
        set_room(Some(room));
        if let Err(error) = SqliteStore::open(&file) {
            let kind = error.kind();
            assert!(error.is_transient(), "{room} bytes: {error:?}");
            // Without room for the shared memory, SQLite calls the file unreadable.
            assert!(kind == StoreErrorKind::Full || room >= 16 << 10, "{room} bytes: {error:?}");
            failed += 1;
        }
    }
    assert!(failed > 3);
    set_room(None);
    let store = SqliteStore::open(&file).unwrap();
    assert!(take(&store, &plan(&target("key-1", 10), 1)).await);
}

/// Runs a call to its end, and moves the clock while it waits to retry. Its deadline is the first sleeper.
async fn drive<F: Future>(clock: &ManualClock, call: F) -> F::Output {
    let mut call = pin!(call);
    std::future::poll_fn(|context| {
        let polled = call.as_mut().poll(context);
        if polled.is_pending() && clock.sleepers() > 1 {
            clock.advance(Duration::from_millis(1));
            context.waker().wake_by_ref();
        }
        polled
    })
    .await
}

#[tokio::test]
async fn the_breaker_closes_when_there_is_room_again() {
    let Some(file) = in_child("the_breaker_closes_when_there_is_room_again") else { return };
    let store = Arc::new(SqliteStore::open(&file).unwrap());
    let clock = Arc::new(ManualClock::new(NOW));
    let breaker = BreakerSettings { failures: 2, cooldown: Duration::from_secs(1) };
    let limiter = RateLimiter::builder(Arc::clone(&store) as Arc<dyn Store>)
        .clock(Arc::clone(&clock) as _)
        .breaker(breaker)
        .default_limits([Limit::per_day("rpm", 10)])
        .open()
        .await;
    let limiter = limiter.unwrap();
    let call = async || {
        let acquire = limiter.acquire("key-1", "gpt-4").take("rpm", 1).into_future();
        drive(&clock, acquire).await?.commit().await
    };
    call().await.unwrap();
    set_room(NO_ROOM);
    let mut opened = false;
    for _ in 0..10 {
        let done = call().await;
        let Err(Error::Unavailable { cause, .. }) = done else { panic!("{done:?}") };
        opened |= cause.to_string().contains("in a row");
    }
    assert!(opened, "the breaker opens");
    set_room(None);
    clock.advance(Duration::from_secs(2));
    // The probe runs on this thread while the store's threads work.
    let mut looks = 0;
    while call().await.is_err() {
        tokio::task::yield_now().await;
        looks += 1;
        assert!(looks < 1_000_000, "the breaker stays open");
    }
    let left = limiter.available("key-1", "gpt-4", &[]).await.unwrap();
    assert_eq!(left[0].available.whole_tokens(), 8, "the calls that failed took nothing");
}
