//! A disk that is full at an insert: the whole batch is undone, in the file and in memory, and no caller hears otherwise.
//! `tests/full_disk.rs` has the disk that is full at the commit.

use std::time::Duration;

use zae_limiter_core::bucket_state::Booking;
use zae_limiter_core::{Applied, Placement, UsageSettings};

use super::*;
use crate::cancellation_tests::{Gate, NOW, barrier, open, plan, submit, target, tokens};
use crate::ledger::Ledger;

/// SQLite's largest `max_page_count`.
const ROOM: u32 = 0xffff_fffe;

/// The new buckets of one batch: more than fit into the free room of the pages that exist.
const NEW: usize = 100;

fn refund(target: &Arc<Target>, tokens: u64) -> [Settlement; 1] {
    let take = |take: &Take| Take { cell: take.cell, amount: -take.amount };
    let differences = plan(&[target], tokens).legs[0].takes.iter().map(take).collect();
    [Settlement { target: Arc::clone(target), placement: Placement::default(), differences }]
}

#[tokio::test]
async fn a_batch_that_does_not_fit_is_undone_for_all_its_callers() {
    let (_folder, store) = open();
    let old = target("old");
    store.acquire(&plan(&[&old], 4)).await.unwrap();
    let new: Vec<_> = (0..NEW).map(|n| target(&format!("new-{n}"))).collect();
    let one = plan(&[&old], 1);
    let chain = plan(&[&new[0], &old], 1);
    let others: Vec<_> = new[1..].iter().map(|new| plan(&[new], 1)).collect();
    let refunds = refund(&old, 2);

    let gate = Gate::put(&store);
    gate.wait_until_reached();
    store.shared.writer.put(Job::PagesMax(1)).unwrap();
    let mut acquires: Vec<_> =
        [&one, &chain].into_iter().chain(&others).map(|it| store.acquire(it)).collect();
    acquires.iter_mut().for_each(submit);
    let (mut waits, mut leaves) = (store.settle(&refunds, NOW), store.settle(&refunds, NOW));
    submit(&mut waits);
    submit(&mut leaves);
    drop(leaves);
    gate.open();

    for acquire in acquires {
        let error = acquire.await.expect_err("it was undone with the others");
        assert_eq!((error.kind(), error.applied()), (StoreErrorKind::Full, Applied::No));
        assert!(error.is_transient() && error.is_outage());
        let text = error.to_string();
        assert!(
            text.contains("limits.db cannot grow") && text.contains("free some space"),
            "{text}"
        );
    }
    assert_eq!(waits.await.unwrap_err().applied(), Applied::No);
    assert_eq!(tokens(&store, &new[0]).await, None);

    // Calls that need no more room are served, from what the file holds. The settlement whose caller left goes first.
    let taken = store.acquire(&one).await.unwrap();
    assert!(matches!(taken, Admission::Taken(_)));
    assert_eq!(tokens(&store, &old).await, Some(6 + 2 - 1), "what was undone is not in memory");

    // There is room again.
    store.shared.writer.put(Job::PagesMax(ROOM)).unwrap();
    assert!(matches!(store.acquire(&chain).await.unwrap(), Admission::Taken(_)));
    store.settle(&refunds, NOW).await.unwrap();
    assert_eq!(tokens(&store, &old).await, Some(8), "each refund once");
    assert_eq!(tokens(&store, &new[0]).await, Some(9));
    barrier(&store).await;
}

/// After some errors SQLite ends the transaction itself. Whatever is written then would stay, although its callers hear
/// that it was undone.
#[test]
fn nothing_is_written_outside_of_a_transaction() {
    let folder = tempfile::tempdir().unwrap();
    let conn = schema::open_writer(&folder.path().join("limits.db"), Durability::Normal).unwrap();
    let mut ledger = Ledger::new(conn, UsageSettings::default());
    let target = target("key-1");
    ledger.acquire(&plan(&[&target], 1)).unwrap();
    let of = BucketQuery::OfEntity(target.key().namespace.clone(), target.key().entity.clone());
    assert!(ledger.store().is_err());
    assert!(ledger.write(&[]).is_err());
    assert!(ledger.delete(&[]).is_err());
    assert!(ledger.book_next(&of, None).is_err());
    let booking = Booking { hour: 0, events: 1, consumed: Default::default() };
    assert!(ledger.book(target.key(), &booking).is_err());
    let rows = "SELECT (SELECT count(*) FROM bucket) + (SELECT count(*) FROM usage)";
    assert_eq!(ledger.conn.query_row(rows, [], |row| row.get::<_, i64>(0)).unwrap(), 0);
}

/// A rewind that was undone with its transaction is done again. One that was committed before counts.
#[tokio::test]
async fn a_rewind_that_was_undone_is_done_again() {
    let (_folder, store) = open();
    let day = Duration::from_secs(86_400);
    let ahead = |target: &Arc<Target>| Plan { now: NOW.saturating_add(day), ..plan(&[target], 10) };
    let checked = |target: &Arc<Target>| Plan {
        max_skew: Some(zae_limiter_core::MAX_CLOCK_SKEW),
        ..plan(&[target], 1)
    };
    let (kept, undone) = (target("kept"), target("undone"));
    for target in [&kept, &undone] {
        assert!(matches!(store.acquire(&ahead(target)).await.unwrap(), Admission::Taken(_)));
    }
    let wait = async |target: &Arc<Target>| match store.acquire(&checked(target)).await.unwrap() {
        Admission::Refused(statuses) => statuses[0].retry_after,
        Admission::Taken(_) => panic!("the bucket is empty"),
    };
    let rewound = wait(&kept).await;
    assert!(rewound < day, "{rewound:?}");

    let gate = Gate::put(&store);
    gate.wait_until_reached();
    let undo = checked(&undone);
    let mut acquire = store.acquire(&undo);
    submit(&mut acquire);
    store.shared.writer.put(Job::Fail(StoreErrorKind::Full)).unwrap();
    gate.open();
    assert_eq!(acquire.await.unwrap_err().applied(), Applied::No);
    assert_eq!(wait(&undone).await, rewound);

    // The clock that is ahead goes on: the bucket that was rewound is not rewound at once again.
    let again = Plan { now: NOW.saturating_add(2 * day), ..plan(&[&kept], 10) };
    assert!(matches!(store.acquire(&again).await.unwrap(), Admission::Taken(_)));
    assert!(wait(&kept).await > day);
}
