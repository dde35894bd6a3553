//! Calls that do their own transaction beside the writer's thread: who does which, and that none is lost, done twice or
//! overtaken.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Barrier;
use std::task::{Context, Poll, Waker};

use zae_limiter_core::{Applied, BoxFuture, Placement, StoreError};

use super::*;
use crate::cancellation_tests::{NOW, barrier, plan, submit, target, tokens};
use crate::writer::SWEEP_EVERY;

fn poll_once<T>(future: &mut BoxFuture<'_, Result<T, StoreError>>) -> Poll<Result<T, StoreError>> {
    future.as_mut().poll(&mut Context::from_waker(Waker::noop()))
}

fn is_taken(admission: &Admission) -> bool {
    matches!(admission, Admission::Taken(_))
}

fn refund(target: &Arc<Target>, tokens: u64) -> [Settlement; 1] {
    let refund = |take: &Take| Take { cell: take.cell, amount: -take.amount };
    let differences = plan(&[target], tokens).legs[0].takes.iter().map(refund).collect();
    [Settlement { target: Arc::clone(target), placement: Placement::default(), differences }]
}

/// Waits until the writer's thread has nothing to do and holds no lock.
async fn idle(store: &SqliteStore) {
    barrier(store).await;
    barrier(store).await;
    store.shared.write_now.with(|_| ());
}

/// A store that has looked at its file, and has begun its log.
async fn open() -> (tempfile::TempDir, SqliteStore) {
    let (folder, store) = crate::cancellation_tests::open();
    store.acquire(&plan(&[&target("first")], 1)).await.unwrap();
    idle(&store).await;
    (folder, store)
}

#[tokio::test]
async fn a_lone_call_has_its_reply_at_the_first_poll() {
    let (_folder, store) = open().await;
    let target = target("key-1");
    let taken = plan(&[&target], 3);
    let polled = poll_once(&mut store.acquire(&taken));
    assert!(matches!(polled, Poll::Ready(Ok(Admission::Taken(_)))), "{polled:?}");
    let settlements = refund(&target, 1);
    let polled = poll_once(&mut store.settle(&settlements, NOW));
    assert!(matches!(polled, Poll::Ready(Ok(()))), "{polled:?}");
    assert!(store.acquire_now(&taken).is_some_and(|done| is_taken(&done.unwrap())));
    assert_eq!(tokens(&store, &target).await, Some(10 - 3 + 1 - 3));
}

#[tokio::test]
async fn a_task_that_must_yield_to_others_leaves_its_call_to_the_thread() {
    let (_folder, store) = open().await;
    let target = target("key-1");
    let taken = plan(&[&target], 1);
    let mut context = Context::from_waker(Waker::noop());
    tokio::task::yield_now().await;
    assert!(store.acquire_now(&taken).is_some());
    while let Poll::Ready(budget) = coop::poll_proceed(&mut context) {
        budget.made_progress();
    }
    assert!(store.acquire_now(&taken).is_none());
    assert!(is_taken(&store.acquire(&taken).await.unwrap()));
    idle(&store).await;
    tokio::task::yield_now().await;
    assert!(store.acquire_now(&taken).is_some());
    assert_eq!(tokens(&store, &target).await, Some(7));
}

#[tokio::test]
async fn the_thread_does_all_transactions_that_flush_and_all_on_request() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name| SqliteOptions::new(folder.path().join(name));
    let full = file("full.db").durability(Durability::Full).commit_on(CommitOn::Caller);
    for options in [full, file("thread.db").commit_on(CommitOn::Thread)] {
        let store = options.open().unwrap();
        let target = target("key-1");
        let (taken, settlements) = (plan(&[&target], 3), refund(&target, 1));
        assert!(store.acquire_now(&taken).is_none());
        let mut acquire = store.acquire(&taken);
        submit(&mut acquire);
        assert!(is_taken(&acquire.await.unwrap()));
        let mut settle = store.settle(&settlements, NOW);
        submit(&mut settle);
        settle.await.unwrap();
        assert_eq!(tokens(&store, &target).await, Some(8));
    }
}

#[tokio::test]
async fn the_thread_does_the_first_commit_to_an_empty_log() {
    let (_folder, store) = crate::cancellation_tests::open();
    idle(&store).await;
    let target = target("key-1");
    let taken = plan(&[&target], 1);
    assert!(store.acquire_now(&taken).is_none(), "SQLite flushes at this commit");
    assert!(is_taken(&store.acquire(&taken).await.unwrap()));
    idle(&store).await;
    assert!(store.acquire_now(&taken).is_some());
}

#[tokio::test]
async fn the_thread_starts_the_log_over_after_it_has_copied_it() {
    let (_folder, store) = open().await;
    let target = target("key-1");
    let taken = plan(&[&target], 1);
    for _ in 0..3 {
        assert!(store.acquire_now(&taken).is_some());
    }
    let before = store.shared.write_now.with(|writer| {
        let length = writer.log().length();
        writer.log().pretend_it_is_long();
        length
    });
    store.shared.writer.wake();
    idle(&store).await;
    let log = store.shared.write_now.with(|writer| writer.log().length());
    assert!(0 < log && log < before, "{before} pages, then {log}");
    assert!(store.acquire_now(&taken).is_some(), "and the calls go on");
}

#[tokio::test]
async fn the_log_is_bounded_long_before_the_next_step_of_the_sweeper() {
    const NORMAL: u64 = 12 << 10;
    let (folder, store) = open().await;
    let length = || std::fs::metadata(folder.path().join("limits.db-wal")).unwrap().len();
    // A bucket can always have more debt.
    let charge = refund(&target("first"), 1).map(|mut one| {
        one.differences[0].amount = -one.differences[0].amount;
        one
    });
    let reader = rusqlite::Connection::open(folder.path().join("limits.db")).unwrap();
    reader.execute_batch("BEGIN; SELECT count(*) FROM bucket").unwrap();
    store.shared.write_now.with(|writer| writer.shorten_log(NORMAL));
    let next_try = || store.shared.write_now.with(|writer| writer.log().next_bytes());
    let first_try = next_try();
    for _ in 0..SWEEP_EVERY / 2 {
        store.settle(&charge, NOW).await.unwrap();
        // Under a reader the try fails, and the next one is later.
        if next_try() > first_try {
            assert!(length() < 2 * NORMAL, "the log has {} bytes", length());
            return;
        }
    }
    panic!("nobody looks at the log, which has {} bytes", length());
}

#[tokio::test]
async fn a_reader_that_keeps_the_log_long_does_not_keep_the_thread_busy() {
    let (folder, store) = open().await;
    let reader = rusqlite::Connection::open(folder.path().join("limits.db")).unwrap();
    reader.execute_batch("BEGIN; SELECT count(*) FROM bucket").unwrap();
    store.shared.write_now.with(|writer| {
        writer.shorten_log(1);
        writer.log().pretend_it_is_long();
        assert!(writer.has_upkeep());
        assert!(writer.work().is_none());
        assert!(!writer.has_upkeep());
    });
}

#[tokio::test]
async fn calls_that_write_nothing_do_not_keep_the_thread_busy_for_long() {
    let folder = tempfile::tempdir().unwrap();
    let refused = plan(&[&target("key-1")], 11);
    // In a new file the sweeper writes.
    for _ in 0..2 {
        let store = SqliteStore::open(folder.path().join("limits.db")).unwrap();
        for _ in 0..4 * SWEEP_EVERY {
            assert!(!is_taken(&store.acquire(&refused).await.unwrap()));
        }
        idle(&store).await;
        assert!(store.acquire_now(&refused).is_some());
    }
}

#[tokio::test]
async fn a_call_beside_another_transaction_waits_in_the_queue_and_can_be_dropped_there() {
    let (_folder, store) = open().await;
    let target = target("key-1");
    let taken = plan(&[&target], 3);
    let (mut stays, mut leaves) = (store.acquire(&taken), store.acquire(&taken));
    let now = &store.shared.write_now;
    let first = now.try_now(Some(NOW), |ledger| {
        submit(&mut stays);
        submit(&mut leaves);
        drop(leaves);
        ledger.acquire(&taken)
    });
    assert!(is_taken(&first.unwrap().unwrap()));
    assert!(is_taken(&stays.await.unwrap()));
    barrier(&store).await;
    assert_eq!(tokens(&store, &target).await, Some(10 - 3 - 3));
}

#[tokio::test]
async fn a_call_never_overtakes_one_in_the_queue() {
    let (_folder, store) = open().await;
    for n in 0..300 {
        let target = target(&format!("key-{n}"));
        let taken = plan(&[&target], 8);
        let mut first = store.acquire(&taken);
        store.shared.write_now.with(|_| submit(&mut first));
        // The thread wakes up, but may not have the job yet.
        let second = store.acquire(&taken).await.unwrap();
        assert!(is_taken(&first.await.unwrap()) && !is_taken(&second), "round {n}");
    }
}

#[tokio::test]
async fn a_panic_in_a_callers_transaction_undoes_it_and_nothing_else() {
    let (folder, store) = open().await;
    let target = target("key-1");
    let taken = plan(&[&target], 3);
    assert!(is_taken(&store.acquire(&taken).await.unwrap()));
    let mut waits = store.acquire(&taken);
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        store.shared.write_now.try_now::<()>(Some(NOW), |ledger| {
            assert!(is_taken(&ledger.acquire(&taken).unwrap()));
            ledger.store().unwrap();
            submit(&mut waits);
            panic!("on purpose");
        })
    }));
    assert!(panicked.is_err());
    // Nobody keeps the file locked.
    let other = SqliteStore::open(folder.path().join("limits.db")).unwrap();
    assert!(is_taken(&other.acquire(&plan(&[&target], 1)).await.unwrap()));
    assert!(is_taken(&waits.await.unwrap()));
    idle(&store).await;
    assert_eq!(tokens(&store, &target).await, Some(10 - 3 - 1 - 3));
    let polled = poll_once(&mut store.acquire(&taken));
    assert!(matches!(polled, Poll::Ready(Ok(Admission::Taken(_)))), "{polled:?}");
}

#[tokio::test]
async fn a_caller_does_not_wait_for_another_programs_lock() {
    let (folder, store) = open().await;
    let target = target("key-1");
    let taken = plan(&[&target], 3);
    assert!(is_taken(&store.acquire(&taken).await.unwrap()));
    let other = rusqlite::Connection::open(folder.path().join("limits.db")).unwrap();
    other.execute_batch("BEGIN IMMEDIATE").unwrap();
    assert!(store.acquire_now(&taken).is_none());
    let mut acquire = store.acquire(&taken);
    submit(&mut acquire);
    other.execute_batch("ROLLBACK").unwrap();
    assert!(is_taken(&acquire.await.unwrap()));
    assert_eq!(tokens(&store, &target).await, Some(4));
}

#[tokio::test]
async fn a_caller_leaves_the_others_a_pause_after_they_have_written() {
    let (folder, store) = open().await;
    let other = SqliteStore::open(folder.path().join("limits.db")).unwrap();
    let target = target("key-1");
    let taken = plan(&[&target], 1);
    assert!(is_taken(&store.acquire(&taken).await.unwrap()));
    for n in 0..4 {
        idle(&store).await;
        other.settle(&refund(&target, 1), NOW).await.unwrap();
        let sees_the_refund = store.acquire_now(&taken).expect("the file is not locked");
        assert!(is_taken(&sees_the_refund.unwrap()));
        assert!(store.acquire_now(&taken).is_none(), "the thread makes the pause");
        assert_eq!(tokens(&store, &target).await, Some(9), "round {n}");
    }
    idle(&store).await;
    assert!(store.acquire_now(&taken).is_some());
}

#[tokio::test]
async fn a_commit_with_an_unknown_end_is_not_repeated() {
    let (_folder, store) = open().await;
    let target = target("key-1");
    let taken = plan(&[&target], 3);
    assert!(is_taken(&store.acquire(&taken).await.unwrap()));
    let mut fails = true;
    let fails_once = move || std::mem::take(&mut fails);
    store.shared.write_now.with(|writer| writer.conn().commit_hook(Some(fails_once)).unwrap());
    let error = store.acquire(&taken).await.unwrap_err();
    assert_eq!(error.applied(), Applied::Maybe, "{error:?}");
    assert_eq!(tokens(&store, &target).await, Some(7));
    assert!(is_taken(&store.acquire(&taken).await.unwrap()), "the file decides");
    assert_eq!(tokens(&store, &target).await, Some(4));
}

#[tokio::test]
async fn the_thread_does_what_is_due_beside_calls_without_another_call() {
    let (_folder, store) = open().await;
    let target = target("key-1");
    let refused = plan(&[&target], 11);
    for _ in 0..SWEEP_EVERY {
        let _ = store.acquire_now(&refused);
        tokio::task::yield_now().await;
    }
    let mut looks = 0;
    while store.shared.write_now.with(|writer| writer.has_upkeep()) {
        std::thread::yield_now();
        looks += 1;
        assert!(looks < 10_000_000, "nobody does it");
    }
}

/// What one worker of the next test has taken for good, by bucket.
type Taken = [i64; 3];

/// Random calls on random buckets. Some futures are dropped after their first poll.
async fn worker(stores: [SqliteStore; 2], targets: Arc<Vec<Arc<Target>>>, seed: u64) -> Taken {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut taken = [0; 3];
    for _ in 0..150 {
        let store = &stores[random.usize(..2)];
        let (one, two) = (random.usize(..3), random.usize(..3));
        let legs = [&targets[one], &targets[two]];
        let plan = plan(if one == two { &legs[..1] } else { &legs }, random.u64(1..3));
        let amount = plan.legs[0].takes[0].amount.whole_tokens();
        let mut acquire = store.acquire(&plan);
        let done = match random.u8(..4) {
            // If the reply is not there, whatever the plan takes comes back.
            0 => match poll_once(&mut acquire) {
                Poll::Ready(done) => Some(done.unwrap()),
                Poll::Pending => None,
            },
            _ => Some(acquire.await.unwrap()),
        };
        let Some(Admission::Taken(_)) = done else { continue };
        let refunded = random.bool();
        for (at, other) in targets.iter().enumerate() {
            if !plan.legs.iter().any(|leg| leg.target.key() == other.key()) {
                continue;
            }
            taken[at] += amount;
            if refunded {
                taken[at] -= amount;
                let refunds = refund(other, amount.unsigned_abs());
                let mut settle = store.settle(&refunds, NOW);
                // A settlement that was polled is carried out.
                if random.bool() || poll_once(&mut settle).is_pending() && random.bool() {
                    settle.await.unwrap();
                }
            }
        }
    }
    taken
}

#[test]
fn threads_and_tasks_of_two_stores_together_lose_no_call_and_no_token() {
    for seed in 0..3 {
        let (folder, store) = crate::cancellation_tests::open();
        let stores = [store, SqliteStore::open(folder.path().join("limits.db")).unwrap()];
        let targets = Arc::new(["a", "b", "c"].map(target).to_vec());
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).build().unwrap();
        let start = Barrier::new(4);
        let work = |n: u64| worker(stores.clone(), Arc::clone(&targets), seed * 100 + n);
        let taken: Vec<Taken> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..3)
                .map(|n| {
                    let (start, work) = (&start, work(n));
                    scope.spawn(move || {
                        let runtime = tokio::runtime::Builder::new_current_thread().build();
                        start.wait();
                        runtime.unwrap().block_on(work)
                    })
                })
                .collect();
            start.wait();
            let tasks: Vec<_> = (3..9).map(|n| runtime.spawn(work(n))).collect();
            let tasks = tasks.into_iter().map(|task| runtime.block_on(task).unwrap());
            let tasks: Vec<Taken> = tasks.collect();
            let threads = threads.into_iter().map(|thread| thread.join().unwrap());
            threads.chain(tasks).collect()
        });
        runtime.block_on(async {
            for store in stores.iter().chain(&stores) {
                barrier(store).await;
            }
            for (at, target) in targets.iter().enumerate() {
                let taken: i64 = taken.iter().map(|one| one[at]).sum();
                assert!((0..=10).contains(&taken), "seed {seed}: {taken}");
                let left = tokens(&stores[0], target).await;
                assert_eq!(left, Some(10 - taken), "seed {seed}, bucket {at}");
            }
        });
    }
}
