//! Calls that are dropped after any number of polls, beside others, on several stores of one file: what was answered
//! counts, and nothing else does.
#![allow(clippy::unwrap_used, reason = "only tests are here")]

mod common;

use std::future::Future;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use common::*;
use zae_limiter_core::{Admission, Store};
use zae_limiter_sqlite::{CommitOn, Durability, SqliteOptions, SqliteStore};

const CAPACITY: i64 = 1_000_000;

/// Polls a call at most so many times. `None` if it was dropped.
async fn at_most<F: Future>(polls: usize, call: F) -> Option<F::Output> {
    let mut call = Box::pin(call);
    for _ in 0..polls {
        let polled = call.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        if let Poll::Ready(done) = polled {
            return Some(done);
        }
        tokio::task::yield_now().await;
        std::thread::yield_now();
    }
    None
}

/// Takes, settles and drops at random. Returns the net amounts that were taken from the two buckets for certain.
async fn caller(store: SqliteStore, seed: u64) -> [i64; 2] {
    let mut random = fastrand::Rng::with_seed(seed);
    let buckets = [target("one", CAPACITY as u64), target("two", CAPACITY as u64)];
    let mut taken = [0; 2];
    for _ in 0..150 {
        let amount = random.u64(1..20);
        let both = random.bool();
        let legs: Vec<_> = match both {
            true => buckets.iter().map(|bucket| (bucket, amount)).collect(),
            false => vec![(&buckets[0], amount)],
        };
        let plan = plan_at(NOW, &legs);
        let patience = random.usize(0..6) * random.usize(0..200);
        let answered = at_most(patience, store.acquire(&plan)).await;
        let Some(admission) = answered else { continue };
        assert!(matches!(admission.unwrap(), Admission::Taken(_)));
        for (sum, _) in taken.iter_mut().zip(&legs) {
            *sum += amount as i64;
        }
        // A settlement that was polled is carried out, whether its future is dropped or not.
        let back = random.u64(0..=amount);
        if back > 0 {
            let refunds = [refund(&buckets[0], back)];
            let patience = random.usize(1..50);
            if let Some(settled) = at_most(patience, store.settle(&refunds, NOW)).await {
                settled.unwrap();
            }
            taken[0] -= back as i64;
        }
    }
    taken
}

fn pick(number: u64, of: u64) -> usize {
    usize::try_from(number % of).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn dropped_calls_beside_others_leave_exact_balances() {
    for seed in 0..12 {
        let folder = Folder::new();
        let open = |number: u64| {
            let durability = [Durability::Normal, Durability::Full][pick(seed + number, 2)];
            let commit_on = [CommitOn::Caller, CommitOn::Thread][pick(seed / 2 + number, 2)];
            let options = SqliteOptions::new(folder.file()).durability(durability);
            options.commit_on(commit_on).open().unwrap()
        };
        let stores: Vec<SqliteStore> = (0..3).map(open).collect();
        let tasks: Vec<_> = (0..12)
            .map(|task| tokio::spawn(caller(stores[pick(task, 3)].clone(), seed * 100 + task)))
            .collect();
        let mut taken = [0; 2];
        for task in tasks {
            let more = task.await.unwrap();
            taken.iter_mut().zip(more).for_each(|(sum, more)| *sum += more);
        }
        // Closing carries out what is accepted.
        drop(stores);
        let store = Arc::new(SqliteStore::open(folder.file()).unwrap());
        for (name, taken) in ["one", "two"].into_iter().zip(taken) {
            let bucket = target(name, CAPACITY as u64);
            let left = tokens(&*store, &bucket, NOW).await.unwrap();
            assert_eq!(left, CAPACITY - taken, "seed {seed}, bucket {name}");
        }
        drop(store);
        assert!(is_sound(&folder.file()));
    }
}
