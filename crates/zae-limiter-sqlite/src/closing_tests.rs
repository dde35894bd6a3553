//! What the store still does for calls whose callers have left, by itself and when it is closed.

use std::sync::atomic::{AtomicU32, Ordering};

use zae_limiter_core::Placement;

use super::*;
use crate::cancellation_tests::{
    NOW, charge_of_two, open, plan, submit, submit_to_fail, target, tokens,
};
use crate::writer::{WAIT_AT_END_MAX, busy_wait};

fn charge(target: &Arc<Target>) -> Settlement {
    let differences = plan(&[target], 1).legs[0].takes.clone();
    Settlement { target: Arc::clone(target), placement: Placement::default(), differences }
}

#[tokio::test]
async fn a_drop_tries_only_so_often_to_lock_the_file() {
    static TRIES: AtomicU32 = AtomicU32::new(0);
    let (folder, store) = open();
    let (target, settlements) = charge_of_two(&store).await;
    let other = rusqlite::Connection::open(folder.path().join("limits.db")).unwrap();
    other.execute_batch("BEGIN IMMEDIATE").unwrap();
    let mut settle = store.settle(&settlements, NOW);
    store.shared.write_now.with(|writer| {
        let count = |_| {
            TRIES.fetch_add(1, Ordering::Relaxed);
            false
        };
        writer.conn().busy_handler(Some(count)).unwrap();
        submit(&mut settle);
        store.shared.writer.close();
    });
    drop(settle);
    drop(store);
    let tries = TRIES.load(Ordering::Relaxed);
    // Those that wait so long in all, and the last try for the settlement.
    let waited = |tries: u32| (0..tries).map(busy_wait).sum::<std::time::Duration>();
    assert!(waited(tries) > WAIT_AT_END_MAX, "{tries} tries");
    assert!(waited(tries - 10) < WAIT_AT_END_MAX, "{tries} tries: the closing waits again");
    other.execute_batch("ROLLBACK").unwrap();
    let store = SqliteStore::open(folder.path().join("limits.db")).unwrap();
    assert_eq!(tokens(&store, &target).await, Some(7), "the settlement is lost");
}

#[tokio::test]
async fn a_settlement_whose_caller_left_needs_no_other_call() {
    let (_folder, store) = open();
    let (target, settlements) = charge_of_two(&store).await;
    let (settle, gate) = submit_to_fail(&store, &settlements);
    drop(settle);
    gate.open();
    let mut looks = 0;
    // A read does not wake the writer's thread.
    while tokens(&store, &target).await != Some(5) {
        looks += 1;
        assert!(looks < 100_000, "nobody carries out the settlement");
    }
}

#[tokio::test]
async fn closing_carries_out_all_settlements_that_were_kept() {
    const KEPT: usize = 3_000;
    let (folder, store) = open();
    let (target, settlements) = charge_of_two(&store).await;
    let other = rusqlite::Connection::open(folder.path().join("limits.db")).unwrap();
    other.execute_batch("BEGIN IMMEDIATE").unwrap();
    store.shared.write_now.with(|writer| {
        for _ in 0..KEPT {
            store.shared.submit_detached(Job::Settle(settlements.to_vec(), NOW, None));
        }
        assert!(writer.work().is_none());
        assert_eq!(writer.left(), KEPT, "the file is locked");
        other.execute_batch("ROLLBACK").unwrap();
        writer.retry_at_end();
        assert_eq!(writer.left(), 0);
    });
    assert_eq!(tokens(&store, &target).await, Some(7 - 2 * 3_000));
}

#[tokio::test]
async fn a_kept_settlement_that_finds_no_room_fails_no_other_call() {
    let (_folder, store) = open();
    let old = target("old");
    assert!(matches!(store.acquire(&plan(&[&old], 1)).await, Ok(Admission::Taken(_))));
    let new: Vec<_> = (0..100).map(|n| target(&format!("new-{n}"))).collect();
    let charges = new.iter().map(charge).collect::<Vec<_>>();
    store.shared.writer.put(Job::PagesMax(1)).unwrap();
    store.shared.submit_detached(Job::Settle(charges, NOW, None));
    // This one may be in the batch that fails.
    let _ = store.acquire(&plan(&[&old], 1)).await;
    for _ in 0..3 {
        assert!(matches!(store.acquire(&plan(&[&old], 1)).await, Ok(Admission::Taken(_))));
    }
    assert_eq!(tokens(&store, &new[0]).await, None);
    store.shared.writer.put(Job::PagesMax(0xffff_fffe)).unwrap();
    let mut looks = 0;
    while tokens(&store, &new[0]).await != Some(9) {
        looks += 1;
        assert!(looks < 100_000, "nobody carries out the settlement");
    }
}
