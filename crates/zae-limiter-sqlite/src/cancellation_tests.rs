//! A dropped acquire leaves no tokens taken, whenever it is dropped. A gate stops the writer, so
//! that each test drops the future at an exact point.

use std::sync::mpsc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tempfile::TempDir;
use zae_limiter_core::{
    Applied, BoxFuture, Leg, Lifetime, Limit, LimitSet, Placement, StoreError, amount,
};

use super::*;

pub(crate) const NOW: Timestamp = Timestamp::from_millis(1_794_752_736_789);

/// Stops the writer within a transaction.
pub(crate) struct Gate {
    reached: mpsc::Receiver<()>,
    open: mpsc::Sender<()>,
}

impl Gate {
    pub(crate) fn put(store: &SqliteStore) -> Self {
        let (reached_tx, reached) = mpsc::channel();
        let (open, open_rx) = mpsc::channel();
        store.shared.writer.put(Job::Gate(reached_tx, open_rx)).unwrap();
        Self { reached, open }
    }

    pub(crate) fn wait_until_reached(&self) {
        self.reached.recv().unwrap();
    }

    pub(crate) fn open(self) {
        self.open.send(()).unwrap();
    }
}

pub(crate) fn open() -> (TempDir, SqliteStore) {
    let folder = tempfile::tempdir().unwrap();
    let store = SqliteStore::open(folder.path().join("limits.db")).unwrap();
    (folder, store)
}

pub(crate) fn target(id: &str) -> Arc<Target> {
    let key = BucketKey {
        namespace: NamespaceId::new("AbCdEfGhIj_").unwrap(),
        entity: zae_limiter_core::EntityId::new(id).unwrap(),
        resource: ResourceName::new("gpt-4").unwrap(),
    };
    let limits = Arc::new(LimitSet::new([Limit::per_day("rpm", 10)]).unwrap());
    Arc::new(Target::new(key, limits, Lifetime::Idle(Duration::from_secs(86_400))))
}

pub(crate) fn plan(targets: &[&Arc<Target>], tokens: u64) -> Plan {
    let take = Take { cell: 0, amount: amount(tokens).unwrap() };
    let leg = |target: &&Arc<Target>| Leg {
        target: Arc::clone(target),
        takes: [take].into_iter().collect(),
    };
    Plan { max_skew: None, now: NOW, legs: targets.iter().map(leg).collect() }
}

/// Polls once. The reply cannot be there yet: a gate holds the writer, or did when the call was queued.
pub(crate) fn submit<T>(future: &mut BoxFuture<'_, Result<T, StoreError>>) {
    let mut context = Context::from_waker(Waker::noop());
    assert!(matches!(future.as_mut().poll(&mut context), Poll::Pending));
}

/// Waits until all jobs that were submitted before are done.
pub(crate) async fn barrier(store: &SqliteStore) {
    // A job for the thread, after all others and the refunds of those that were dropped.
    let done = store.shared.submit(|caller| Job::Settle(Vec::new(), NOW, Some(caller)));
    done.await.unwrap();
}

pub(crate) async fn tokens(store: &SqliteStore, target: &Target) -> Option<i64> {
    let keys = [target.key().clone()];
    let bucket = store.peek(&keys, NOW).await.unwrap().pop().unwrap();
    bucket.map(|bucket| bucket.cells()[0].tokens.whole_tokens())
}

#[tokio::test]
async fn a_future_that_was_never_polled_has_done_nothing() {
    let (_folder, store) = open();
    let target = target("key-1");
    let plan = plan(&[&target], 3);
    drop(store.acquire(&plan));
    let settlements = [Settlement {
        target: Arc::clone(&target),
        placement: Placement::default(),
        differences: plan.legs[0].takes.clone(),
    }];
    drop(store.settle(&settlements, NOW));
    barrier(&store).await;
    assert_eq!(tokens(&store, &target).await, None);
}

#[tokio::test]
async fn an_acquire_dropped_in_the_queue_is_never_carried_out() {
    let (_folder, store) = open();
    let target = target("key-1");
    let plan = plan(&[&target], 3);
    let gate = Gate::put(&store);
    gate.wait_until_reached();
    let mut acquire = store.acquire(&plan);
    submit(&mut acquire);
    drop(acquire);
    gate.open();
    barrier(&store).await;
    assert_eq!(tokens(&store, &target).await, None, "there is not even a full bucket");
}

#[tokio::test]
async fn an_acquire_dropped_within_its_transaction_is_refunded() {
    let (_folder, store) = open();
    let (child, parent) = (target("child"), target("parent"));
    let plan = plan(&[&child, &parent], 3);
    let first = Gate::put(&store);
    first.wait_until_reached();
    // The acquire and the second gate go into the same transaction.
    let mut acquire = store.acquire(&plan);
    submit(&mut acquire);
    let second = Gate::put(&store);
    first.open();
    second.wait_until_reached();
    drop(acquire);
    second.open();
    barrier(&store).await;
    barrier(&store).await;
    assert_eq!(tokens(&store, &child).await, Some(10));
    assert_eq!(tokens(&store, &parent).await, Some(10));
}

#[tokio::test]
async fn an_acquire_dropped_with_its_reply_unread_is_refunded() {
    let (_folder, store) = open();
    let target = target("key-1");
    let plan = plan(&[&target], 3);
    let gate = Gate::put(&store);
    gate.wait_until_reached();
    let mut acquire = store.acquire(&plan);
    submit(&mut acquire);
    gate.open();
    barrier(&store).await;
    assert_eq!(tokens(&store, &target).await, Some(7));
    drop(acquire);
    barrier(&store).await;
    assert_eq!(tokens(&store, &target).await, Some(10));
}

#[tokio::test]
async fn an_acquire_whose_reply_was_read_stays_taken() {
    let (_folder, store) = open();
    let target = target("key-1");
    let plan = plan(&[&target], 3);
    let mut acquire = store.acquire(&plan);
    assert!(matches!(acquire.as_mut().await, Ok(Admission::Taken(_))));
    drop(acquire);
    barrier(&store).await;
    assert_eq!(tokens(&store, &target).await, Some(7));
}

#[tokio::test]
async fn a_refused_acquire_that_was_dropped_refunds_nothing() {
    let (_folder, store) = open();
    let target = target("key-1");
    store.acquire(&plan(&[&target], 8)).await.unwrap();
    let plan = plan(&[&target], 3);
    let gate = Gate::put(&store);
    gate.wait_until_reached();
    let mut acquire = store.acquire(&plan);
    submit(&mut acquire);
    gate.open();
    barrier(&store).await;
    drop(acquire);
    barrier(&store).await;
    assert_eq!(tokens(&store, &target).await, Some(2));
}

#[tokio::test]
async fn a_settle_that_was_polled_is_carried_out() {
    let (folder, store) = open();
    let target = target("key-1");
    let taken = plan(&[&target], 3);
    store.acquire(&taken).await.unwrap();
    let differences = plan(&[&target], 2).legs[0].takes.clone();
    let settlements =
        [Settlement { target: Arc::clone(&target), placement: Placement::default(), differences }];
    let gate = Gate::put(&store);
    gate.wait_until_reached();
    let mut settle = store.settle(&settlements, NOW);
    submit(&mut settle);
    drop(settle);
    gate.open();
    // Closing the store does not lose it.
    drop(store);
    let store = SqliteStore::open(folder.path().join("limits.db")).unwrap();
    assert_eq!(tokens(&store, &target).await, Some(5));
}

#[tokio::test]
async fn refunds_are_written_before_the_store_closes() {
    let (folder, store) = open();
    let target = target("key-1");
    let plan = plan(&[&target], 3);
    let gate = Gate::put(&store);
    gate.wait_until_reached();
    let mut acquire = store.acquire(&plan);
    submit(&mut acquire);
    gate.open();
    barrier(&store).await;
    drop(acquire);
    drop(store);
    let store = SqliteStore::open(folder.path().join("limits.db")).unwrap();
    assert_eq!(tokens(&store, &target).await, Some(10));
}

#[tokio::test]
async fn the_threads_end_with_the_last_handle() {
    let (_folder, store) = open();
    let (writer, reader) =
        (Arc::downgrade(&store.shared.writer), Arc::downgrade(&store.shared.reader));
    let clone = store.clone();
    drop(store);
    barrier(&clone).await;
    drop(clone);
    // Each thread holds its queue until it ends.
    assert!(writer.upgrade().is_none() && reader.upgrade().is_none());
}

#[tokio::test]
async fn a_batch_takes_all_calls_queued_during_the_last_one() {
    let (_folder, store) = open();
    let target = target("key-1");
    let plan = plan(&[&target], 1);
    let gate = Gate::put(&store);
    gate.wait_until_reached();
    let mut waiting: Vec<_> = (0..20).map(|_| store.acquire(&plan)).collect();
    waiting.iter_mut().for_each(submit);
    gate.open();
    let mut admissions = Vec::new();
    for acquire in waiting {
        admissions.push(matches!(acquire.await.unwrap(), Admission::Taken(_)));
    }
    // First come, first served.
    assert_eq!(admissions, [[true; 10], [false; 10]].concat());
    assert_eq!(tokens(&store, &target).await, Some(0));
}

/// Three of ten are taken, and a settlement charges two more.
pub(crate) async fn charge_of_two(store: &SqliteStore) -> (Arc<Target>, [Settlement; 1]) {
    let target = target("key-1");
    store.acquire(&plan(&[&target], 3)).await.unwrap();
    let differences = plan(&[&target], 2).legs[0].takes.clone();
    let settlement =
        Settlement { target: Arc::clone(&target), placement: Placement::default(), differences };
    (target, [settlement])
}

/// Queues a settlement and a failure behind a gate, so that both go into one transaction.
pub(crate) fn submit_to_fail<'a>(
    store: &'a SqliteStore,
    settlements: &'a [Settlement],
) -> (BoxFuture<'a, Result<(), StoreError>>, Gate) {
    let gate = Gate::put(store);
    gate.wait_until_reached();
    let mut settle = store.settle(settlements, NOW);
    submit(&mut settle);
    store.shared.writer.put(Job::Fail(StoreErrorKind::Unavailable)).unwrap();
    (settle, gate)
}

/// Waits until the failing transaction is over. This call may be part of it and fail as well.
async fn failed(store: &SqliteStore) {
    let _ = store.settle(&[], NOW).await;
}

#[tokio::test]
async fn a_settle_whose_caller_left_survives_a_failed_transaction() {
    let (_folder, store) = open();
    let (target, settlements) = charge_of_two(&store).await;
    let (settle, gate) = submit_to_fail(&store, &settlements);
    drop(settle);
    gate.open();
    failed(&store).await;
    barrier(&store).await;
    assert_eq!(tokens(&store, &target).await, Some(5), "once, in a later transaction");
}

#[tokio::test]
async fn a_settle_dropped_with_its_failure_unread_is_carried_out() {
    let (_folder, store) = open();
    let (target, settlements) = charge_of_two(&store).await;
    let (settle, gate) = submit_to_fail(&store, &settlements);
    gate.open();
    failed(&store).await;
    drop(settle);
    barrier(&store).await;
    assert_eq!(tokens(&store, &target).await, Some(5));
}

#[tokio::test]
async fn a_settle_whose_caller_got_the_error_is_not_retried() {
    let (_folder, store) = open();
    let (target, settlements) = charge_of_two(&store).await;
    let (settle, gate) = submit_to_fail(&store, &settlements);
    gate.open();
    let error = settle.await.unwrap_err();
    assert_eq!((error.kind(), error.applied()), (StoreErrorKind::Unavailable, Applied::No));
    barrier(&store).await;
    assert_eq!(tokens(&store, &target).await, Some(7));
}

#[tokio::test]
async fn calls_in_a_forked_child_are_rejected() {
    let (_folder, mut store) = open();
    let (target, settlements) = charge_of_two(&store).await;
    let (writer, reader) = (Arc::clone(&store.shared.writer), Arc::clone(&store.shared.reader));
    // Pretends that another process opened the store.
    Arc::get_mut(&mut store.shared).expect("the only handle").process += 1;
    let errors = [
        store.acquire(&plan(&[&target], 1)).await.map(drop),
        store.settle(&settlements, NOW).await,
        store.reconfigure(&target, NOW).await,
        store.peek(&[target.key().clone()], NOW).await.map(drop),
        store.get(&[]).await.map(drop),
        store.write(&[]).await.map(drop),
        store.delete(&[Key::Bucket(target.key().clone())]).await,
    ];
    for (call, error) in errors.into_iter().enumerate() {
        let error = error.expect_err("no thread would reply");
        assert_eq!(error.kind(), StoreErrorKind::Rejected, "call {call}");
        assert!(error.to_string().contains("fork first, then open the store"), "{error}");
    }
    // The drop waits for no thread, because the child has none.
    drop(store);
    assert!(!writer.is_closed() && !reader.is_closed(), "the queues are the parent's");
    writer.close();
    reader.close();
}

#[tokio::test]
async fn a_file_that_stays_locked_is_named_and_nothing_is_changed() {
    let (folder, store) = open();
    let bucket = target("key-1");
    let other = rusqlite::Connection::open(folder.path().join("limits.db")).unwrap();
    other.execute_batch("BEGIN IMMEDIATE").unwrap();
    let error = store.reconfigure(&bucket, NOW).await.unwrap_err();
    assert_eq!((error.kind(), error.applied()), (StoreErrorKind::Unavailable, Applied::No));
    assert!(error.to_string().contains("limits.db is locked by another program"), "{error}");
    other.execute_batch("ROLLBACK").unwrap();
    let taken = store.acquire(&plan(&[&bucket], 1)).await.unwrap();
    assert!(matches!(taken, Admission::Taken(_)));
}

/// The writer repeats the jobs of a failed batch, each in a transaction of its own. A caller may leave in between.
#[tokio::test]
async fn an_acquire_that_was_undone_and_then_abandoned_gets_no_refund() {
    let (_folder, store) = open();
    let target = target("key-1");
    let plan = plan(&[&target], 3);
    let taken = store.acquire(&plan).await.unwrap();
    assert!(matches!(taken, Admission::Taken(_)));
    let (mut caller, reply) = Caller::new();
    caller.decide(Ok(taken));
    let mut job = Job::Acquire(plan, caller);
    // Its transaction was rolled back, the caller leaves, and the transaction that skips it is committed.
    job.reset();
    drop(reply);
    assert!(job.is_abandoned());
    assert!(job.reply(job::Commit::Done, std::path::Path::new("limits.db")).is_none());
}
