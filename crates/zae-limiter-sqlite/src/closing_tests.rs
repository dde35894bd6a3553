//! What the store still does for calls whose callers have left, by itself and when it is closed.

use std::sync::atomic::{AtomicU32, Ordering};

use super::*;
use crate::cancellation_tests::{NOW, charge_of_two, open, submit, tokens};
use crate::writer::BUSY_TRIES_AT_END_MAX;

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
    assert!(tries >= BUSY_TRIES_AT_END_MAX, "{tries} tries");
    assert!(tries < BUSY_TRIES_AT_END_MAX + 10, "{tries} tries: the closing waits again");
    other.execute_batch("ROLLBACK").unwrap();
    let store = SqliteStore::open(folder.path().join("limits.db")).unwrap();
    assert_eq!(tokens(&store, &target).await, Some(7), "the settlement is lost");
}
