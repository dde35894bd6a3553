//! One test for each fault of the hot path before it became a machine with a driver. Each says what was
//! seen at the commit 0588eae.
#![allow(clippy::unwrap_used, reason = "a test says what is wrong by panicking")]

mod hooked;
mod one_bucket;

use std::collections::BTreeSet;
use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::Duration;

use tokio::runtime::Builder as RuntimeBuilder;
use zae_limiter_core::{
    Admission, Applied, BreakerSettings, Entropy, Error, Key, LegTaken, Lifetime, Limit, LimitSet,
    ManualClock, Millitokens, OnUnavailable, Placement, Plan, RateLimiter, Settlement, Store,
    StoreError, StoreErrorKind, Take, Target, Timestamp,
};
use zae_limiter_dynamodb::{DynamoOptions, DynamoStore};
use zae_limiter_schema::{BucketItemKey, SHARD_ZERO, TableError, TableErrorKind, Value};
use zae_limiter_testkit::SimTable;

use hooked::{Called, Hooked, Outcome};
use one_bucket::{at, key, plan, target};

/// What is not there after so many looks never will be.
const LOOKS_MAX: usize = 100_000;

/// Refills, but too slowly to be seen within a test.
fn without_refill(name: &str, capacity: u64) -> Limit {
    Limit::per(name, 1, Duration::from_secs(1_000_000_000)).burst(capacity)
}

fn options() -> DynamoOptions {
    DynamoOptions::default().seed(1).worker_threads(2)
}

fn store_on(table: SimTable) -> DynamoStore {
    DynamoStore::new(Arc::new(table), options())
}

/// A table whose updates, counted from 0, meet what `outcome` says.
fn each_update(outcome: impl Fn(usize) -> Outcome + Send + Sync + 'static) -> Hooked {
    let count = AtomicUsize::new(0);
    Hooked::new(SimTable::default(), move |called, _| {
        let outcome = match called {
            Called::Update => outcome(count.fetch_add(1, Ordering::SeqCst)),
            _ => Outcome::Pass,
        };
        Box::pin(async move { outcome })
    })
}

/// A table whose calls take a few turns of a tokio runtime, as those of the SDK do. The store runs its
/// tasks on a runtime of its own.
fn after_some_turns() -> Hooked {
    let table = Hooked::new(SimTable::default(), |_, _| {
        Box::pin(async {
            let _runtime = tokio::runtime::Handle::current();
            for _ in 0..3 {
                tokio::task::yield_now().await;
            }
            Outcome::Pass
        })
    });
    table.leaving_tasks()
}

async fn take(
    store: &DynamoStore,
    target: &Arc<Target>,
    tokens: i64,
    now: Timestamp,
) -> Result<Option<LegTaken>, StoreError> {
    match store.acquire(&plan(target, tokens * 1_000, now)).await? {
        Admission::Taken(mut taken) => Ok(taken.pop()),
        Admission::Refused(_) => Ok(None),
    }
}

/// Takes, and says whether it was admitted.
async fn takes(store: &DynamoStore, target: &Arc<Target>, tokens: i64, now: Timestamp) -> bool {
    take(store, target, tokens, now).await.unwrap().is_some()
}

/// Settles differences of tokens, by the places of the limits.
async fn settle(
    store: &DynamoStore,
    target: &Arc<Target>,
    shard: u32,
    differences: &[(usize, i64)],
    now: Timestamp,
) {
    let difference = |(cell, tokens): &(usize, i64)| Take {
        cell: *cell,
        amount: Millitokens::new(tokens * 1_000),
    };
    let differences = differences.iter().map(difference).collect();
    let settlement =
        Settlement { target: Arc::clone(target), placement: Placement::new(shard), differences };
    store.settle(&[settlement], now).await.unwrap();
}

fn target_of<const N: usize>(limits: [Limit; N], lifetime: Lifetime) -> Arc<Target> {
    Arc::new(Target::new(key(), Arc::new(LimitSet::new(limits).unwrap()), lifetime))
}

/// All items of the bucket, by their shards.
fn shards(table: &SimTable) -> Vec<(u32, zae_limiter_schema::Item)> {
    let of = |shard: u32| BucketItemKey { bucket: key(), shard }.item_key();
    (0..64).filter_map(|shard| Some((shard, table.item(&of(shard))?))).collect()
}

/// What all shards together hold of a limit, in millitokens.
fn held(table: &SimTable, limit: &str) -> i64 {
    let name = format!("b_{limit}_tk");
    shards(table).iter().filter_map(|(_, item)| item.get(&name).and_then(Value::as_i64)).sum()
}

/// Wakes a thread.
struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Waits without any runtime.
fn block_on<F: Future>(work: F) -> F::Output {
    let mut work = pin!(work);
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    loop {
        match work.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(done) => return done,
            Poll::Pending => thread::park(),
        }
    }
}

/// Waits without any runtime, but not for ever.
fn finish<F: Future>(work: F) -> F::Output {
    let mut work = pin!(work);
    for _ in 0..LOOKS_MAX {
        if let Poll::Ready(done) = poll_once(work.as_mut()) {
            return done;
        }
        thread::yield_now();
    }
    panic!("not done after {LOOKS_MAX} looks");
}

fn poll_once<F: Future + ?Sized>(work: Pin<&mut F>) -> Poll<F::Output> {
    work.poll(&mut Context::from_waker(Waker::noop()))
}

/// Lets whatever can go on do so.
async fn settle_down() {
    for _ in 0..200 {
        tokio::task::yield_now().await;
    }
}

/// A limiter with these limits and a clock that stands until it is moved.
async fn limiter<const N: usize>(
    store: DynamoStore,
    limits: [Limit; N],
) -> (RateLimiter, Arc<ManualClock>) {
    let clock = Arc::new(ManualClock::new(at(0)));
    let store: Arc<dyn Store> = Arc::new(store);
    let builder = RateLimiter::builder(store).clock(Arc::clone(&clock) as _);
    let breaker = BreakerSettings { failures: 2, ..BreakerSettings::default() };
    let builder = builder.entropy(Entropy::seeded(1)).default_limits(limits).breaker(breaker);
    (builder.open().await.unwrap(), clock)
}

/// F1. Seen: the last acquire was admitted. The store passed over a charge on a bucket or a limit that was
/// not there, so 125 of 10 tokens were free.
#[tokio::test]
async fn a_program_that_charges_late_is_limited() {
    let tpm = || Limit::per_minute("tpm", 10);
    let idle = Lifetime::Idle(Duration::from_secs(420));
    let (paid, other) = (target_of([tpm()], idle), target_of([Limit::per_minute("rpm", 10)], idle));
    for (before, now) in [(None, at(0)), (Some(&paid), at(500_000)), (Some(&other), at(0))] {
        let store = store_on(SimTable::default());
        if let Some(before) = before {
            assert!(takes(&store, before, 1, at(0)).await);
        }
        for _ in 0..25 {
            // The shard of an empty take is the first one.
            let admitted = takes(&store, &paid, 0, now).await;
            assert!(admitted, "nothing is asked");
            settle(&store, &paid, SHARD_ZERO, &[(0, 5)], now).await;
        }
        assert!(!takes(&store, &paid, 1, now).await, "125 of 10 are used");
        let bucket = store.peek(&[key()], now).await.unwrap().remove(0).unwrap();
        assert_eq!(bucket.cell("tpm").unwrap().0.tokens.get(), -115_000);
    }
}

/// F2. Seen: the threads hung. The write of a bucket ran on the runtime of its first caller. When that
/// runtime ended in the middle of the write, all other callers waited for ever.
#[test]
fn callers_on_short_lived_runtimes_are_all_answered() {
    let store = DynamoStore::new(Arc::new(after_some_turns()), options());
    let (limiter, _clock) = block_on(limiter(store, [without_refill("tpm", 1_000)]));
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                for _ in 0..20 {
                    let runtime = RuntimeBuilder::new_current_thread().build().unwrap();
                    runtime.block_on(async {
                        let call = limiter.acquire("org", "gpt-4").take("tpm", 1);
                        call.await.unwrap().commit().await.unwrap();
                    });
                }
            });
        }
    });
    let left = block_on(limiter.available("org", "gpt-4", &[("tpm", 0)])).unwrap();
    assert_eq!(left[0].available.get(), 840_000);
}

/// F2. Seen: no call on the bucket was ever answered again.
#[test]
fn a_call_that_panics_fails_and_the_next_one_is_served() {
    let table = each_update(|nth| if nth == 2 { Outcome::Panic } else { Outcome::Pass });
    let store = DynamoStore::new(Arc::new(table.leaving_tasks()), options());
    let target = target(without_refill("rpm", 10));
    assert!(finish(takes(&store, &target, 1, at(0))));
    let error = finish(take(&store, &target, 1, at(0))).unwrap_err();
    assert_eq!((error.kind(), error.applied()), (StoreErrorKind::Unavailable, Applied::Maybe));
    let taken = finish(take(&store, &target, 1, at(0))).unwrap().expect("it is served");
    assert_eq!(taken.left[0].get(), 8_000);
}

/// F2. A program that ends the runtime it has given to the store gets errors. Seen: its calls hung. That
/// commit had no such option; the store always used the caller's runtime.
#[test]
fn on_a_runtime_that_has_ended_calls_fail_and_do_not_hang() {
    let runtime = RuntimeBuilder::new_multi_thread().worker_threads(1).build().unwrap();
    let table = each_update(|nth| if nth == 2 { Outcome::Hang } else { Outcome::Pass });
    let options = options().runtime(runtime.handle().clone());
    let store = DynamoStore::new(Arc::new(table.leaving_tasks()), options);
    let target = target(without_refill("rpm", 10));
    assert!(finish(takes(&store, &target, 1, at(0))));
    let mut under_way = pin!(take(&store, &target, 1, at(0)));
    let mut behind_it = pin!(take(&store, &target, 1, at(0)));
    assert!(poll_once(under_way.as_mut()).is_pending());
    assert!(poll_once(behind_it.as_mut()).is_pending());
    drop(runtime);
    let error = finish(under_way).unwrap_err();
    assert_eq!((error.kind(), error.applied()), (StoreErrorKind::Unavailable, Applied::Maybe));
    assert_eq!(finish(behind_it).unwrap_err().kind(), StoreErrorKind::Unavailable);
    for _ in 0..3 {
        let error = finish(take(&store, &target, 1, at(0))).unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Unavailable);
    }
    assert!(finish(store.peek(&[key()], at(0))).is_err());
    assert!(finish(store.split_to(&key(), 2, at(0))).is_err());
}

/// F3. Seen: both calls hung. No call to the table had a time limit, so one silent connection stopped its
/// bucket.
#[tokio::test]
async fn a_call_without_an_answer_times_out_and_the_bucket_serves_again() {
    for is_applied in [false, true] {
        let table = each_update(move |nth| match nth {
            1 if is_applied => Outcome::Silent,
            1 => Outcome::Hang,
            _ => Outcome::Pass,
        });
        let table = Arc::new(table);
        let store = DynamoStore::new(Arc::clone(&table) as _, options());
        let target = target(without_refill("rpm", 10));
        let mut silent = pin!(take(&store, &target, 1, at(0)));
        let mut behind = pin!(take(&store, &target, 2, at(0)));
        assert!(poll_once(silent.as_mut()).is_pending());
        assert!(poll_once(behind.as_mut()).is_pending());
        settle_down().await;
        assert_eq!(table.calls(), 2, "one that brings the item, and one that gets no answer");
        assert!(poll_once(silent.as_mut()).is_pending());
        table.time_is_up();
        let error = silent.await.unwrap_err();
        assert_eq!((error.kind(), error.applied()), (StoreErrorKind::Unavailable, Applied::Maybe));
        assert!(error.to_string().contains("did not answer within 1s"), "{error}");
        let left = 8_000 - i64::from(is_applied) * 1_000;
        assert_eq!(behind.await.unwrap().expect("it is served").left[0].get(), left);
        // The late answer is ignored.
        table.answer_late();
        settle_down().await;
        let taken = take(&store, &target, 1, at(0)).await.unwrap().expect("it is served");
        assert_eq!(taken.left[0].get(), left - 1_000);
    }
}

/// Calls of which the first never comes back, and what follows waits for its bucket.
fn behind_a_hung_call() -> (DynamoStore, Arc<Target>) {
    let options = options().queue_max(100);
    let store = DynamoStore::new(Arc::new(each_update(|_| Outcome::Hang)), options);
    (store, target(without_refill("rpm", 1_000_000)))
}

/// F4. The queue must not keep dropped callers. That commit had no bound that this test could meet.
#[tokio::test]
async fn dropped_callers_do_not_fill_the_queue() {
    for staying in [0, 50, 60, 99] {
        let (store, target) = behind_a_hung_call();
        let plan = plan(&target, 1_000, at(0));
        let mut hung = store.acquire(&plan);
        assert!(poll_once(hung.as_mut()).is_pending());
        let mut live: Vec<_> = (0..staying).map(|_| store.acquire(&plan)).collect();
        live.iter_mut().for_each(|one| assert!(poll_once(one.as_mut()).is_pending()));
        for nth in 0..10_000 {
            let mut gone = store.acquire(&plan);
            assert!(poll_once(gone.as_mut()).is_pending(), "call {nth} after {staying} that stay");
        }
        for nth in staying..100 {
            let mut one = store.acquire(&plan);
            assert!(poll_once(one.as_mut()).is_pending(), "call {nth} of those that stay");
            live.push(one);
        }
    }
}

/// F4. Seen: the queue had no bound, and no caller was refused.
#[tokio::test]
async fn a_full_queue_refuses_at_once_and_says_so() {
    let (store, target) = behind_a_hung_call();
    let plan = plan(&target, 1_000, at(0));
    let mut live: Vec<_> = (0..101).map(|_| store.acquire(&plan)).collect();
    live.iter_mut().for_each(|one| assert!(poll_once(one.as_mut()).is_pending()));
    let Poll::Ready(Err(error)) = poll_once(store.acquire(&plan).as_mut()) else {
        panic!("refused at once")
    };
    assert_eq!((error.kind(), error.applied()), (StoreErrorKind::Busy, Applied::No));
    assert!(error.to_string().contains("100 callers already wait for this bucket"), "{error}");
    // A dropped caller makes room.
    drop(live.pop());
    assert!(poll_once(store.acquire(&plan).as_mut()).is_pending());
}

/// F5. Seen: the first call panicked in the table, because the caller's thread had no tokio runtime.
#[test]
fn a_program_without_a_runtime_is_served_and_its_dropped_leases_are_refunded() {
    let store = DynamoStore::new(Arc::new(after_some_turns()), options());
    let (limiter, _clock) = block_on(limiter(store, [without_refill("tpm", 100)]));
    let left = || {
        let left = block_on(limiter.available("org", "gpt-4", &[("tpm", 0)])).unwrap();
        left[0].available.whole_tokens()
    };
    let lease = block_on(limiter.acquire("org", "gpt-4").take("tpm", 40).into_future()).unwrap();
    assert_eq!(left(), 60);
    drop(lease);
    let is_back = (0..LOOKS_MAX).any(|_| {
        thread::yield_now();
        left() == 100
    });
    assert!(is_back, "given back");
}

/// F6. Seen: two calls on the throttled bucket opened the breaker. It then refused calls on other buckets:
/// "the store failed 2 times in a row".
#[tokio::test]
async fn a_throttled_bucket_does_not_stop_the_others() {
    let table = Hooked::new(SimTable::default(), |called, keys| {
        let writes = matches!(called, Called::Update | Called::Transact);
        let is_hot = writes && keys.iter().any(|key| key.pk.contains("hot"));
        Box::pin(async move {
            let throttled = || TableError::new(TableErrorKind::PartitionThrottled, "too hot");
            if is_hot { Outcome::Fail(throttled()) } else { Outcome::Pass }
        })
    });
    let store = DynamoStore::new(Arc::new(table), options());
    let (limiter, clock) = limiter(store, [without_refill("tpm", 1_000)]).await;
    let other = async |policy| {
        let call = limiter.acquire("other", "gpt-4").take("tpm", 1).on_unavailable(policy);
        let lease = call.await.expect("others are served meanwhile");
        assert!(!lease.is_degraded(), "others are checked meanwhile");
        lease.commit().await.unwrap();
    };
    let mut admitted = 0;
    for policy in [OnUnavailable::Block, OnUnavailable::Allow] {
        // The first three have the store to themselves: nobody else shows that it answers.
        for is_alone in [true, true, true, false] {
            let call = limiter.acquire("hot", "gpt-4").take("tpm", 1).on_unavailable(policy);
            let mut hot = pin!(call.into_future());
            // It is tried again until its deadline.
            let hot = loop {
                if let Poll::Ready(done) = poll_once(hot.as_mut()) {
                    break done;
                }
                settle_down().await;
                clock.advance(Duration::from_millis(10));
                if !is_alone {
                    other(policy).await;
                    admitted += 1;
                }
            };
            match (policy, hot) {
                (OnUnavailable::Block, Err(Error::Unavailable { cause, .. })) => {
                    assert_eq!(cause.kind(), StoreErrorKind::Busy);
                }
                (OnUnavailable::Allow, Ok(lease)) => assert!(lease.is_degraded()),
                (policy, other) => panic!("{policy:?}: {other:?}"),
            }
        }
        other(policy).await;
        admitted += 1;
    }
    assert!(admitted > 100, "{admitted} calls while another was tried again");
    let left = limiter.available("other", "gpt-4", &[("tpm", 0)]).await.unwrap();
    assert_eq!(left[0].available.whole_tokens(), 1_000 - admitted);
}

/// F7. Seen: the last acquire was admitted. A bucket of a limit per second lives for 7 s, and the store
/// passed over what a call of 8 s settled.
#[tokio::test]
async fn the_settlement_of_a_long_call_counts() {
    let store = store_on(SimTable::default());
    let (limiter, clock) = limiter(store, [Limit::per_second("tps", 10)]).await;
    let mut lease = limiter.acquire("org", "gpt-4").take("tps", 1).await.unwrap();
    clock.advance(Duration::from_secs(8));
    lease.adjust("tps", 50).unwrap();
    lease.commit().await.unwrap();
    let refused = limiter.acquire("org", "gpt-4").take("tps", 1).await;
    let Err(Error::Exceeded(refusal)) = refused else { panic!("{refused:?}") };
    assert_eq!(refusal.statuses()[0].available.whole_tokens(), -40);
    assert_eq!(refusal.retry_after(), Duration::from_millis(4_100));
}

/// F8. Seen: shards 1 to 3 stayed in the table. The store deleted the shards one after the other, and a
/// call in between restored them.
#[tokio::test]
async fn a_deletion_leaves_nothing_of_a_sharded_bucket_while_others_call() {
    for between in 1..=4 {
        let table = SimTable::default();
        let target = target(without_refill("rpm", 100));
        // The other process asks the table each time.
        let other = options().local_refusal(Duration::ZERO);
        let other = DynamoStore::new(Arc::new(table.clone()), other);
        assert!(takes(&other, &target, 20, at(0)).await);
        assert_eq!(other.split_to(&key(), 4, at(0)).await.unwrap(), Some(4));
        assert!(takes(&other, &target, 5, at(0)).await);
        let (acquiring, asked) = (other.clone(), Arc::clone(&target));
        let interrupted = Hooked::new(table.clone(), move |called, _| {
            let (other, target) = (acquiring.clone(), Arc::clone(&asked));
            let writes = matches!(called, Called::Transact | Called::Delete);
            Box::pin(async move {
                for _ in 0..if writes { between } else { 0 } {
                    take(&other, &target, 3, at(0)).await.unwrap();
                }
                Outcome::Pass
            })
        });
        let deleting = DynamoStore::new(Arc::new(interrupted), options());
        deleting.delete(&[Key::Bucket(key())]).await.unwrap();
        let mut admitted = 0;
        for store in [&other, &deleting, &other] {
            while admitted <= 200 && takes(store, &target, 1, at(1_000)).await {
                admitted += 1;
            }
        }
        assert!(admitted <= 100, "{admitted} of 100 after the deletion");
        let live = other.shard_count(&key(), at(1_000)).await.unwrap();
        let left: Vec<u32> = shards(&table).into_iter().map(|(shard, _)| shard).collect();
        assert_eq!(live, left.len(), "items are left behind: {left:?}");
    }
}

/// F9. Seen: the acquire was refused by an old snapshot. The store trusted its snapshot until the clock had come
/// back to where it was, an hour later.
#[tokio::test]
async fn after_the_clock_was_set_back_the_table_is_asked_within_a_second() {
    let table = SimTable::default();
    let (first, second) = (store_on(table.clone()), store_on(table.clone()));
    let target = target(without_refill("rpm", 10));
    for (set_back, millis_later) in [(3_600_000, 0), (3_600_000, 1_000), (500, 1_500)] {
        assert!(takes(&first, &target, 10, at(0)).await);
        assert!(!takes(&first, &target, 10, at(0)).await);
        settle(&second, &target, SHARD_ZERO, &[(0, -10)], at(0)).await;
        let now = at(millis_later - set_back);
        assert!(takes(&first, &target, 10, now).await, "set back by {set_back} ms");
        settle(&first, &target, SHARD_ZERO, &[(0, -10)], at(0)).await;
    }
}

/// F10. Seen: each take of the older process rewrote the limits and each take of the newer one rewrote them
/// back.
#[tokio::test]
async fn older_limits_never_replace_newer_ones() {
    let table = SimTable::default();
    let (new_store, old_store) = (store_on(table.clone()), store_on(table.clone()));
    let of = |capacity, read_at| {
        let limits = Arc::new(LimitSet::new([without_refill("rpm", capacity)]).unwrap());
        Arc::new(Target::new(key(), limits, Lifetime::Forever).with_limits_read_at(read_at))
    };
    let (old, new) = (of(100, at(0)), of(200, at(10)));
    assert!(takes(&old_store, &old, 1, at(20)).await);
    assert!(takes(&new_store, &new, 1, at(20)).await);
    let seen = || {
        let [(_, item)] = &shards(&table)[..] else { panic!("one shard") };
        (item["gn"].clone(), item["b_rpm_cp"].as_i64())
    };
    let before = seen();
    assert_eq!(before.1, Some(200_000));
    for nth in 0..20 {
        let now = at(30 + nth);
        assert!(takes(&old_store, &old, 1, now).await);
        assert_eq!(seen(), before, "no rewrite by the older");
        assert!(takes(&new_store, &new, 1, now).await);
        assert_eq!(seen(), before, "nothing to rewrite for the newer");
    }
    old_store.reconfigure(&old, at(100)).await.unwrap();
    assert_eq!(seen().1, Some(200_000), "a late change is an old one");
    assert_eq!(held(&table, "rpm"), (100 - 42) * 1_000);
    let newest = of(50, at(200));
    old_store.reconfigure(&newest, at(200)).await.unwrap();
    assert_eq!(seen().1, Some(50_000));
}

/// F12. Seen: the refund of 9 tokens of `b` was lost, because the shard lacked the limit.
#[tokio::test]
async fn refunds_reach_the_shard_that_has_the_limit_and_room_for_it() {
    let without_b = target_of([without_refill("a", 101)], Lifetime::Forever);
    let with_b = target_of([without_refill("a", 101), without_refill("b", 31)], Lifetime::Forever);
    for seed in 0..8 {
        let table = SimTable::default();
        let store = DynamoStore::new(Arc::new(table.clone()), options().seed(seed));
        assert!(takes(&store, &without_b, 1, at(0)).await);
        assert_eq!(store.split_to(&key(), 2, at(0)).await.unwrap(), Some(2));
        let takes = [(0, 7_000), (1, 9_000)];
        let takes = takes.map(|(cell, amount)| Take { cell, amount: Millitokens::new(amount) });
        let leg = zae_limiter_core::Leg {
            target: Arc::clone(&with_b),
            takes: takes.into_iter().collect(),
        };
        let plan = Plan { max_skew: None, now: at(0), legs: [leg].into_iter().collect() };
        let Admission::Taken(taken) = store.acquire(&plan).await.unwrap() else { panic!() };
        let having: BTreeSet<u32> = shards(&table)
            .iter()
            .filter(|(_, item)| item.contains_key("b_b_tk"))
            .map(|(shard, _)| *shard)
            .collect();
        assert_eq!(having, BTreeSet::from([taken[0].placement.get()]), "one shard has the limit");
        let before = (held(&table, "a"), held(&table, "b"));
        assert_eq!(before.0, 93_000);
        // The whole of `a` has room for 8, the shard that lacks `b` for hardly any of them.
        let lacking = 1 - taken[0].placement.get();
        settle(&store, &with_b, lacking, &[(0, -8), (1, -9)], at(0)).await;
        assert_eq!((held(&table, "a"), held(&table, "b")), (101_000, before.1 + 9_000));
        // Full is full.
        settle(&store, &with_b, lacking, &[(0, -1), (1, -1)], at(0)).await;
        assert_eq!((held(&table, "a"), held(&table, "b")), (101_000, before.1 + 9_000));
    }
}
