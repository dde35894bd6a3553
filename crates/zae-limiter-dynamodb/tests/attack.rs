//! Attacks on what the store promises: each test is a sentence of the contract, put into a corner.
#![allow(clippy::unwrap_used, reason = "a test says what is wrong by panicking")]

mod hooked;
mod one_bucket;

use std::error::Error as _;
use std::future::{Future, IntoFuture as _};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::Duration;

use tokio::runtime::Builder as RuntimeBuilder;
use zae_limiter_core::{
    Admission, Applied, BreakerSettings, BucketKey, EntityId, Entropy, Key, Leg, LegTaken,
    Lifetime, Limit, LimitSet, ManualClock, MemoryStore, Millitokens, PageRequest, Placement, Plan,
    RateLimiter, Settlement, Store, StoreError, StoreErrorKind, StoredBucket, Take, Target,
    Timestamp,
};
use zae_limiter_dynamodb::{DynamoOptions, DynamoStore};
use zae_limiter_schema::{BucketItemKey, Item, SHARD_ZERO, TableError, TableErrorKind, Value};
use zae_limiter_testkit::SimTable;

use hooked::{Called, Hooked, Outcome};
use one_bucket::{at, key, plan, target};

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

fn target_of<const N: usize>(limits: [Limit; N], lifetime: Lifetime) -> Arc<Target> {
    Arc::new(Target::new(key(), Arc::new(LimitSet::new(limits).unwrap()), lifetime))
}

fn key_of(entity: &str) -> BucketKey {
    BucketKey { entity: EntityId::new(entity).unwrap(), ..key() }
}

fn target_for(entity: &str, limit: Limit) -> Arc<Target> {
    let limits = LimitSet::new([limit]).unwrap();
    Arc::new(Target::new(key_of(entity), Arc::new(limits), Lifetime::Forever))
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

async fn takes(store: &DynamoStore, target: &Arc<Target>, tokens: i64, now: Timestamp) -> bool {
    take(store, target, tokens, now).await.unwrap().is_some()
}

/// A settlement of differences in tokens, by the places of the limits.
fn settlement(target: &Arc<Target>, shard: u32, differences: &[(usize, i64)]) -> Settlement {
    let difference = |(cell, tokens): &(usize, i64)| Take {
        cell: *cell,
        amount: Millitokens::new(tokens * 1_000),
    };
    let differences = differences.iter().map(difference).collect();
    Settlement { target: Arc::clone(target), placement: Placement::new(shard), differences }
}

async fn settle(
    store: &DynamoStore,
    target: &Arc<Target>,
    shard: u32,
    differences: &[(usize, i64)],
    now: Timestamp,
) {
    store.settle(&[settlement(target, shard, differences)], now).await.unwrap();
}

/// All items of a bucket, by their shards.
fn shards_of(table: &SimTable, bucket: &BucketKey) -> Vec<(u32, Item)> {
    let of = |shard: u32| BucketItemKey { bucket: bucket.clone(), shard }.item_key();
    (0..64).filter_map(|shard| Some((shard, table.item(&of(shard))?))).collect()
}

/// What all shards of a bucket together hold of a limit, in millitokens.
fn held(table: &SimTable, bucket: &BucketKey, limit: &str) -> i64 {
    let name = format!("b_{limit}_tk");
    let shards = shards_of(table, bucket);
    shards.iter().filter_map(|(_, item)| item.get(&name).and_then(Value::as_i64)).sum()
}

fn poll_once<F: Future + ?Sized>(work: Pin<&mut F>) -> Poll<F::Output> {
    work.poll(&mut Context::from_waker(Waker::noop()))
}

/// Lets whatever can go on do so.
async fn settle_down() {
    for _ in 0..500 {
        tokio::task::yield_now().await;
    }
}

/// What is asked of each entity, on `gpt-4`.
fn chain(targets: &[(&Arc<Target>, i64)], now: Timestamp) -> Plan {
    let leg = |(target, tokens): &(&Arc<Target>, i64)| {
        let takes = [Take { cell: 0, amount: Millitokens::new(tokens * 1_000) }];
        Leg { target: Arc::clone(target), takes: takes.into_iter().collect() }
    };
    Plan { max_skew: None, now, legs: targets.iter().map(leg).collect() }
}

/// How a table turns a call away that it has not carried out. All pass by themselves.
const TURNED_AWAY: [(TableErrorKind, usize); 3] = [
    (TableErrorKind::Throttled, 1),
    (TableErrorKind::PartitionThrottled, 5),
    (TableErrorKind::Conflict, 16),
];

/// A table that fails some updates of this entity, after a number of them.
fn turning_away(
    table: &SimTable,
    entity: &'static str,
    after: usize,
    (kind, times): (TableErrorKind, usize),
) -> Hooked {
    let count = AtomicUsize::new(0);
    Hooked::new(table.clone(), move |called, keys| {
        let is_its = called == Called::Update && keys[0].pk.contains(entity);
        let nth = if is_its { count.fetch_add(1, Ordering::SeqCst) } else { usize::MAX };
        let is_away = (after..after.saturating_add(times)).contains(&nth);
        Box::pin(async move {
            match is_away {
                true => Outcome::Fail(TableError::new(kind, "not now")),
                false => Outcome::Pass,
            }
        })
    })
}

/// Promise: "Dropping the future of an `acquire` later leaves no tokens taken: the store gives back what
/// it may have taken, if not at once then soon."
#[tokio::test]
async fn a_cancelled_acquire_is_refunded_although_the_first_refund_fails() {
    let mut left = Vec::new();
    for (kind, times) in TURNED_AWAY {
        let table = SimTable::default();
        let count = AtomicUsize::new(0);
        let hooked = Arc::new(Hooked::new(table.clone(), move |called, _| {
            let nth = match called {
                Called::Update => count.fetch_add(1, Ordering::SeqCst),
                _ => usize::MAX,
            };
            Box::pin(async move {
                match nth {
                    // The first two are those of the first take, the third that of the cancelled one.
                    2 => Outcome::Silent,
                    nth if (3..3 + times).contains(&nth) => {
                        Outcome::Fail(TableError::new(kind, "not now"))
                    }
                    _ => Outcome::Pass,
                }
            })
        }));
        let store = DynamoStore::new(Arc::clone(&hooked) as _, options());
        let target = target(without_refill("rpm", 10));
        assert!(takes(&store, &target, 1, at(0)).await);
        let asked = plan(&target, 5_000, at(0));
        let mut cancelled = store.acquire(&asked);
        assert!(poll_once(cancelled.as_mut()).is_pending());
        settle_down().await;
        assert_eq!(held(&table, &key(), "rpm"), 4_000, "it has arrived");
        drop(cancelled);
        hooked.answer_late();
        settle_down().await;
        assert!(hooked.calls() > 3, "the refund was tried");
        left.push((kind, held(&table, &key(), "rpm")));
    }
    assert_eq!(left, TURNED_AWAY.map(|(kind, _)| (kind, 9_000)), "what is left, all but one");
}

/// Promise: "Child and ancestors are admitted together or not at all; what was taken from some is given
/// back when another refuses."
#[tokio::test]
async fn a_refused_chain_is_refunded_although_the_first_refund_fails() {
    let mut left = Vec::new();
    for (kind, times) in TURNED_AWAY {
        let table = SimTable::default();
        // Two updates for the first take, one for that of the chain, and then the refund.
        let hooked = turning_away(&table, "child", 3, (kind, times));
        let store = DynamoStore::new(Arc::new(hooked), options());
        let child = target_for("child", without_refill("rpm", 10));
        let parent = target_for("parent", without_refill("rpm", 10));
        assert!(takes(&store, &child, 1, at(0)).await);
        // Another process drains the parent, so that this one does not know.
        assert!(takes(&store_on(table.clone()), &parent, 10, at(0)).await);
        let admission = store.acquire(&chain(&[(&child, 5), (&parent, 5)], at(0))).await;
        assert!(!matches!(admission, Ok(Admission::Taken(_))), "the parent has nothing");
        settle_down().await;
        left.push((kind, held(&table, &key_of("child"), "rpm")));
    }
    assert_eq!(left, TURNED_AWAY.map(|(kind, _)| (kind, 9_000)), "what the child has left");
}

/// Promise: every call ends, with any options.
#[tokio::test]
async fn the_longest_time_limit_does_not_overflow() {
    let options = options().call_timeout(Duration::MAX).local_refusal(Duration::MAX);
    let options = options.merge_after(Duration::MAX).queue_max(usize::MAX);
    let store = DynamoStore::new(Arc::new(SimTable::default()), options);
    let target = target(without_refill("rpm", 10));
    assert!(takes(&store, &target, 1, at(0)).await);
    assert!(store.peek(&[key()], at(0)).await.unwrap()[0].is_some());
    store.delete(&[Key::Bucket(key())]).await.unwrap();
}

/// Promise: every call ends and is served, with the smallest options.
#[tokio::test]
async fn the_smallest_options_serve() {
    let options = options().queue_max(0).remembered_buckets(0).shards_max(0).worker_threads(0);
    let options = options.local_refusal(Duration::ZERO).merge_after(Duration::ZERO);
    let table = SimTable::default();
    let store = DynamoStore::new(Arc::new(table.clone()), options.clone());
    let alone = DynamoStore::new(Arc::new(table.clone()), options.without_group_commit());
    for nth in 0..200 {
        let target = target_for(&format!("e{nth}"), without_refill("rpm", 10));
        assert!(takes(&store, &target, 4, at(nth)).await);
        assert!(takes(&alone, &target, 6, at(nth)).await);
        assert!(!takes(&store, &target, 1, at(nth)).await);
        settle(&alone, &target, SHARD_ZERO, &[(0, -3)], at(nth)).await;
        assert!(takes(&store, &target, 3, at(nth)).await);
        assert!(!takes(&alone, &target, 1, at(nth)).await);
    }
    // Other processes split it, and it is still served.
    let target = target(without_refill("rpm", 64));
    assert!(takes(&store, &target, 1, at(0)).await);
    let other = store_on(table.clone());
    assert_eq!(other.split_to(&key(), 8, at(0)).await.unwrap(), Some(8));
    let mut admitted = 1;
    for nth in 0..200 {
        admitted += i64::from(takes(&store, &target, 1, at(nth * 100)).await);
        admitted += i64::from(takes(&alone, &target, 1, at(nth * 100)).await);
    }
    assert_eq!(admitted, 64);
}

/// Promise: "Into how many shards a bucket that is written too often is split at most".
#[tokio::test]
async fn split_to_never_exceeds_shards_max() {
    for most in [1, 2, 3, 5, 6, 33, 64] {
        let options = options().shards_max(most);
        let store = DynamoStore::new(Arc::new(SimTable::default()), options);
        assert!(takes(&store, &target(without_refill("rpm", 1_000)), 1, at(0)).await);
        let shards = store.split_to(&key(), 64, at(0)).await.unwrap().unwrap();
        assert!(shards <= most, "{shards} shards of at most {most}");
    }
}

/// Promise: errors say what happened. What lies behind a table's error must reach the caller.
#[tokio::test]
async fn the_cause_of_a_tables_error_reaches_the_caller() {
    for call in [Called::Update, Called::Read] {
        let table = Hooked::new(SimTable::default(), move |called, _| {
            Box::pin(async move {
                if called != call {
                    return Outcome::Pass;
                }
                let mut error = TableError::new(TableErrorKind::Unavailable, "no connection");
                error.source = Some("dns: no such host".into());
                Outcome::Fail(error)
            })
        });
        let store = DynamoStore::new(Arc::new(table), options());
        let error = match call {
            Called::Update => {
                take(&store, &target(without_refill("rpm", 10)), 1, at(0)).await.unwrap_err()
            }
            _ => store.peek(&[key()], at(0)).await.unwrap_err(),
        };
        let source = error.source().map(ToString::to_string);
        assert_eq!(source.as_deref(), Some("dns: no such host"), "of {call:?}: {error:?}");
    }
}

/// Promise: "A charge that is too large for the balance's type is `Rejected`", and charges are never lost:
/// what is answered as settled is charged.
#[tokio::test]
async fn charges_that_are_too_large_together_are_not_lost() {
    const HUGE: i64 = 5_000_000_000_000_000;
    let table = SimTable::default();
    let store = store_on(table.clone());
    let target = target(without_refill("rpm", 10));
    assert!(takes(&store, &target, 1, at(0)).await);
    let one = [settlement(&target, SHARD_ZERO, &[(0, 1)])];
    let huge = [settlement(&target, SHARD_ZERO, &[(0, HUGE)])];
    let mut settling: Vec<_> = [&one, &huge, &huge].map(|each| store.settle(each, at(0))).into();
    settling.iter_mut().for_each(|each| assert!(poll_once(each.as_mut()).is_pending()));
    let mut charged = 2_000_i128;
    for (each, amount) in settling.into_iter().zip([0, HUGE, HUGE]) {
        match each.await {
            Ok(()) => charged += i128::from(amount) * 1_000,
            Err(error) => assert_eq!(error.kind(), StoreErrorKind::Rejected),
        }
    }
    assert_eq!(i128::from(held(&table, &key(), "rpm")), 10_000 - charged);
}

/// Promise: a refund is applied exactly once, also beside the charge of another caller. Two shards,
/// of which one lacks the limit.
#[tokio::test]
async fn a_refund_reaches_its_shard_beside_the_charge_of_another_caller() {
    let without_b = target_of([without_refill("a", 101)], Lifetime::Forever);
    let with_b = target_of([without_refill("a", 101), without_refill("b", 31)], Lifetime::Forever);
    for is_beside in [false, true] {
        let table = SimTable::default();
        let store = store_on(table.clone());
        assert!(takes(&store, &without_b, 1, at(0)).await);
        assert_eq!(store.split_to(&key(), 2, at(0)).await.unwrap(), Some(2));
        let amounts = [(0, 1_000), (1, 9_000)];
        let amounts = amounts.map(|(cell, amount)| Take { cell, amount: Millitokens::new(amount) });
        let leg = Leg { target: Arc::clone(&with_b), takes: amounts.into_iter().collect() };
        let plan = Plan { max_skew: None, now: at(0), legs: [leg].into_iter().collect() };
        let Admission::Taken(taken) = store.acquire(&plan).await.unwrap() else { panic!() };
        let (having, lacking) = (taken[0].placement.get(), 1 - taken[0].placement.get());
        let held_by = |shard: u32| {
            let shards = shards_of(&table, &key());
            let (_, item) = shards.into_iter().find(|(one, _)| *one == shard).unwrap();
            item.get("b_b_tk").and_then(Value::as_i64)
        };
        let before = held_by(having).unwrap();
        assert_eq!(held_by(lacking), None);
        // The first keeps the lane busy, so that the others go together.
        let first = [settlement(&with_b, lacking, &[(0, 1)])];
        let refund = [settlement(&with_b, lacking, &[(1, -9)])];
        let charge = [settlement(&with_b, lacking, &[(1, 1)])];
        let mut settling = vec![store.settle(&first, at(0)), store.settle(&refund, at(0))];
        if is_beside {
            settling.push(store.settle(&charge, at(0)));
        }
        settling.iter_mut().for_each(|each| assert!(poll_once(each.as_mut()).is_pending()));
        for each in settling {
            each.await.unwrap();
        }
        let after = held_by(having).unwrap();
        assert_eq!(after, before + 9_000, "given back, beside a charge: {is_beside}");
    }
}

/// Promise: never over-admit, with limits that change in a rush, overrides, splits, merges and clocks that
/// step by an hour between any two calls of two processes.
#[tokio::test]
async fn nothing_extra_is_admitted_whatever_changes_in_between() {
    for seed in 0..60_u64 {
        let table = SimTable::default();
        let stores = [0, 1]
            .map(|nth| DynamoStore::new(Arc::new(table.clone()), options().seed(seed * 2 + nth)));
        let of = |capacity, read_at: Option<i64>| {
            let limits = Arc::new(LimitSet::new([without_refill("rpm", capacity)]).unwrap());
            let target = Target::new(key(), limits, Lifetime::Forever);
            Arc::new(match read_at {
                Some(read_at) => target.with_limits_read_at(at(read_at)),
                None => target,
            })
        };
        let targets = [of(100, Some(0)), of(40, Some(10)), of(70, Some(20)), of(90, None)];
        let mut drawn = seed;
        let mut draw = |bound: u64| {
            drawn = drawn
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (drawn >> 33) % bound
        };
        let (mut net, mut leases) = (0_i64, Vec::new());
        for nth in 0..120 {
            let store = &stores[usize::try_from(draw(2)).unwrap()];
            let target = &targets[usize::try_from(draw(4)).unwrap()];
            let step = [0, 3_600_000, -3_600_000][usize::try_from(draw(3)).unwrap()];
            let now = at(nth * 10 + step);
            match draw(10) {
                0 => drop(store.split_to(&key(), 1 << draw(4), now).await.unwrap()),
                1 => store.merge(&key(), now).await.unwrap(),
                2 => store.reconfigure(target, now).await.unwrap(),
                3 if !leases.is_empty() => {
                    let (target, shard, tokens): (Arc<Target>, u32, i64) = leases.swap_remove(0);
                    settle(store, &target, shard, &[(0, -tokens)], now).await;
                    net -= tokens;
                }
                4 => {
                    let tokens = i64::try_from(draw(4)).unwrap() + 1;
                    settle(store, target, SHARD_ZERO, &[(0, tokens)], now).await;
                    net += tokens;
                }
                _ => {
                    let tokens = i64::try_from(draw(9)).unwrap() + 1;
                    if let Some(taken) = take(store, target, tokens, now).await.unwrap() {
                        net += tokens;
                        leases.push((Arc::clone(target), taken.placement.get(), tokens));
                        assert!(net <= 100, "seed {seed}, step {nth}: {net} of at most 100");
                    }
                }
            }
            let left = held(&table, &key(), "rpm");
            assert!(
                left <= (100 - net) * 1_000,
                "seed {seed}, step {nth}: {left} left, {net} used"
            );
        }
    }
}

/// Promise: "Cancelling an acquire (dropping its future) at any await leaves no tokens taken", in chains
/// with full queues as well.
#[tokio::test]
async fn a_cancelled_chain_leaves_nothing_taken_with_full_queues() {
    for turns in 0..60 {
        let table = SimTable::default();
        let slow = Hooked::new(table.clone(), |_, _| {
            Box::pin(async {
                for _ in 0..3 {
                    tokio::task::yield_now().await;
                }
                Outcome::Pass
            })
        });
        let store = DynamoStore::new(Arc::new(slow), options().queue_max(1));
        let targets = ["a", "b", "c"].map(|name| target_for(name, without_refill("rpm", 100)));
        let all: Vec<_> = targets.iter().map(|target| (target, 7)).collect();
        for target in &targets {
            assert!(takes(&store, target, 1, at(0)).await);
        }
        let plan = chain(&all, at(0));
        let single = chain(&all[2..], at(0));
        let mut calls: Vec<_> = (0..3).map(|_| store.acquire(&plan)).collect();
        calls.push(store.acquire(&single));
        let mut kept = [0_i64; 3];
        let mut is_over = vec![false; calls.len()];
        for _ in 0..turns {
            for (nth, call) in
                calls.iter_mut().enumerate().filter(|(nth, _)| !is_over[*nth]).collect::<Vec<_>>()
            {
                if let Poll::Ready(done) = poll_once(call.as_mut()) {
                    is_over[nth] = true;
                    if let Ok(Admission::Taken(taken)) = done {
                        kept.iter_mut().skip(3 - taken.len()).for_each(|kept| *kept += 7);
                    }
                }
            }
            tokio::task::yield_now().await;
        }
        drop(calls);
        settle_down().await;
        for (name, kept) in ["a", "b", "c"].iter().zip(kept) {
            let left = held(&table, &key_of(name), "rpm");
            assert_eq!(left, (99 - kept) * 1_000, "{name} after {turns} turns");
        }
    }
}

/// Promise: every call ends, also when the runtime ends while many wait to be gathered from shards.
#[test]
fn a_runtime_that_ends_under_many_gatherings_ends_them_all() {
    let table = SimTable::default();
    let runtime = RuntimeBuilder::new_multi_thread().worker_threads(1).build().unwrap();
    let is_hung = Arc::new(AtomicUsize::new(0));
    let hangs = Arc::clone(&is_hung);
    let hooked = Hooked::new(table, move |called, _| {
        let hangs = hangs.load(Ordering::SeqCst) == 1 && called == Called::Read;
        Box::pin(async move { if hangs { Outcome::Hang } else { Outcome::Pass } })
    });
    let options = options().runtime(runtime.handle().clone()).local_refusal(Duration::ZERO);
    let store = DynamoStore::new(Arc::new(hooked.leaving_tasks()), options);
    let target = target(without_refill("rpm", 1_000_000));
    let calls = runtime.block_on(async {
        assert!(takes(&store, &target, 1, at(0)).await);
        assert_eq!(store.split_to(&key(), 4, at(0)).await.unwrap(), Some(4));
        is_hung.store(1, Ordering::SeqCst);
        // More than a shard has: all of them together have it.
        let asked = plan(&target, 300_000_000, at(0));
        let mut calls = Vec::new();
        for _ in 0..GATHERING {
            let (store, asked) = (store.clone(), asked.clone());
            let mut call: Pin<Box<dyn Future<Output = _> + Send>> =
                Box::pin(async move { store.acquire(&asked).await });
            assert!(poll_once(call.as_mut()).is_pending());
            calls.push(call);
        }
        settle_down().await;
        calls
    });
    drop(runtime);
    for call in calls {
        let mut call = pin!(call);
        let mut looks = 0;
        let done = loop {
            if let Poll::Ready(done) = poll_once(call.as_mut()) {
                break done;
            }
            looks += 1;
            assert!(looks < 100_000, "it ends");
            thread::yield_now();
        };
        let error: StoreError = done.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Unavailable);
    }
}

/// Fewer than the default of `queue_max`; 1,000 are enough for the stack of a worker of tokio.
const GATHERING: usize = 9_000;

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

/// Waits for a call of a limiter, in steps of 10 ms of its clock.
async fn finish<F: Future>(clock: &ManualClock, work: F, mut step: impl FnMut()) -> F::Output {
    let mut work = pin!(work);
    for _ in 0..1_000 {
        if let Poll::Ready(done) = poll_once(work.as_mut()) {
            return done;
        }
        step();
        settle_down().await;
        clock.advance(Duration::from_millis(10));
    }
    panic!("not done after 10 s");
}

/// Promise: a refund is applied exactly once. A lease on two buckets is rolled back, or dropped, and the
/// table turns one of the two writes away without carrying it out.
#[tokio::test]
async fn a_lease_of_two_levels_is_refunded_although_one_write_fails() {
    let mut left = Vec::new();
    for is_dropped in [false, true] {
        let table = SimTable::default();
        let hooked = turning_away(&table, "BUCKET#parent", 3, (TableErrorKind::Throttled, 1));
        let store = DynamoStore::new(Arc::new(hooked), options());
        let (limiter, clock) = limiter(store, [without_refill("rpm", 10)]).await;
        limiter.create_entity("parent").await.unwrap();
        limiter.create_entity("child").parent("parent").cascade().await.unwrap();
        let call = || limiter.acquire("child", "gpt-4").take("rpm", 1).into_future();
        finish(&clock, call(), || {}).await.unwrap().commit().await.unwrap();
        let lease = finish(&clock, call(), || {}).await.unwrap();
        match is_dropped {
            true => drop(lease),
            false => drop(finish(&clock, lease.rollback(), || {}).await),
        }
        for _ in 0..200 {
            settle_down().await;
            thread::yield_now();
            clock.advance(Duration::from_millis(10));
        }
        for entity in ["child", "parent"] {
            let left_of = limiter.available(entity, "gpt-4", &[("rpm", 0)]);
            let left_of = finish(&clock, left_of, || {}).await.unwrap();
            left.push((is_dropped, entity, left_of[0].available.whole_tokens()));
        }
    }
    let all_but_one =
        [(false, "child", 9), (false, "parent", 9), (true, "child", 9), (true, "parent", 9)];
    assert_eq!(left, all_but_one);
}

/// Promise: the breaker "opens because the store does not answer", not because of one bucket. One
/// partition is silent; the store answers for all others.
#[tokio::test]
async fn one_silent_bucket_does_not_open_the_breaker_for_the_others() {
    let hooked = Arc::new(Hooked::new(SimTable::default(), |called, keys| {
        let writes = matches!(called, Called::Update | Called::Transact);
        let is_silent = writes && keys.iter().any(|key| key.pk.contains("silent"));
        Box::pin(async move { if is_silent { Outcome::Hang } else { Outcome::Pass } })
    }));
    let options = options().call_timeout(Duration::from_millis(100));
    let store = DynamoStore::new(Arc::clone(&hooked) as _, options);
    let (limiter, clock) = limiter(store, [without_refill("tpm", 1_000)]).await;
    for _ in 0..3 {
        let call = limiter.acquire("silent", "gpt-4").take("tpm", 1).into_future();
        // A call to the table is given up long before the limiter's deadline.
        let mut steps = 0;
        let silent = finish(&clock, call, || {
            steps += 1;
            if steps % 10 == 0 {
                hooked.time_is_up();
            }
        });
        assert!(silent.await.is_err(), "it gets no answer");
        let call = limiter.acquire("other", "gpt-4").take("tpm", 1).into_future();
        let other = finish(&clock, call, || {}).await;
        let lease = other.expect("others are served meanwhile");
        lease.commit().await.unwrap();
    }
}

/// Promise: deleting a sharded bucket leaves nothing and admits nothing extra, whatever other processes
/// that remember its shards do next.
#[tokio::test]
async fn a_deleted_bucket_starts_again_once_for_all_processes_with_snapshots() {
    for seed in 0..40 {
        let table = SimTable::default();
        let stores = [0, 1, 2]
            .map(|nth| DynamoStore::new(Arc::new(table.clone()), options().seed(seed * 3 + nth)));
        let target = target(without_refill("rpm", 64));
        assert!(takes(&stores[0], &target, 1, at(0)).await);
        assert_eq!(stores[0].split_to(&key(), 8, at(0)).await.unwrap(), Some(8));
        let mut leases = Vec::new();
        for nth in 0..12 {
            leases.extend(take(&stores[nth % 3], &target, 3, at(1)).await.unwrap());
        }
        stores[1].delete(&[Key::Bucket(key())]).await.unwrap();
        assert_eq!(shards_of(&table, &key()), []);
        // The refund of what was taken before is ignored: there is no bucket.
        for (nth, lease) in leases.iter().enumerate().take(6) {
            settle(&stores[nth % 3], &target, lease.placement.get(), &[(0, -3)], at(2)).await;
        }
        assert_eq!(shards_of(&table, &key()), []);
        // Those that come late charge the new bucket.
        for (nth, lease) in leases.iter().enumerate().skip(6) {
            settle(&stores[nth % 3], &target, lease.placement.get(), &[(0, 2)], at(3)).await;
        }
        let late = i64::try_from(leases.len()).unwrap() - 6;
        let mut admitted = 2 * late;
        for nth in 0..100 {
            admitted += i64::from(takes(&stores[nth % 3], &target, 1, at(4)).await);
        }
        assert_eq!(admitted, 64, "seed {seed}");
        assert_eq!(shards_of(&table, &key()).len(), 1);
    }
}

/// Promise: every call ends. Many callers find every shard drained and wait to be gathered.
#[tokio::test]
async fn many_gathers_from_drained_shards_all_get_a_reply() {
    for (shards, callers) in [(2, 8), (2, 9), (4, 40), (8, 200)] {
        let table = SimTable::default();
        let target = target(without_refill("rpm", 100));
        let other = store_on(table.clone());
        assert!(takes(&other, &target, 1, at(0)).await);
        assert_eq!(other.split_to(&key(), shards, at(0)).await.unwrap(), Some(shards));
        assert!(takes(&other, &target, 99, at(0)).await);
        let store = store_on(table);
        let asked = plan(&target, 1_000, at(0));
        let mut calls: Vec<_> = (0..callers).map(|_| store.acquire(&asked)).collect();
        let mut left = callers;
        for _ in 0..20 {
            calls.retain_mut(|call| poll_once(call.as_mut()).is_pending());
            left = calls.len();
            settle_down().await;
        }
        assert_eq!(left, 0, "of {callers} callers wait for ever, {shards} shards");
    }
}

/// The same, of those who ask for more than a shard has while all together have it.
#[tokio::test]
async fn many_gathers_from_full_shards_all_get_a_reply() {
    for (shards, callers) in [(2, 9), (4, 40), (8, 200)] {
        let table = SimTable::default();
        let target = target(without_refill("rpm", 1_000));
        let other = store_on(table.clone());
        assert!(takes(&other, &target, 1, at(0)).await);
        assert_eq!(other.split_to(&key(), shards, at(0)).await.unwrap(), Some(shards));
        let store = store_on(table.clone());
        let asked = plan(&target, 600_000, at(0));
        let mut calls: Vec<_> = (0..callers).map(|_| store.acquire(&asked)).collect();
        let (mut left, mut admitted) = (callers, 0);
        for _ in 0..20 {
            calls.retain_mut(|call| match poll_once(call.as_mut()) {
                Poll::Ready(done) => {
                    admitted += i64::from(matches!(done, Ok(Admission::Taken(_))));
                    false
                }
                Poll::Pending => true,
            });
            left = calls.len();
            settle_down().await;
        }
        assert_eq!((left, admitted), (0, 1), "of {callers} callers, {shards} shards");
        assert_eq!(held(&table, &key(), "rpm"), 399_000);
    }
}

/// Promise: every call ends, and what is answered is what is written: many callers, and a table that turns
/// calls away in every way in which nothing is carried out.
#[tokio::test]
async fn under_faults_without_effect_every_call_ends_and_every_token_is_accounted_for() {
    for seed in 0..150_u64 {
        let table = SimTable::default();
        let draws = Arc::new(AtomicUsize::new(0));
        let is_calm = Arc::new(AtomicUsize::new(0));
        let (drawn, calm) = (Arc::clone(&draws), Arc::clone(&is_calm));
        let hooked = Hooked::new(table.clone(), move |called, _| {
            let nth = u64::try_from(drawn.fetch_add(1, Ordering::SeqCst)).unwrap();
            let mixed = mix(seed * 1_000_003 + nth);
            let is_calm = calm.load(Ordering::SeqCst) == 1;
            Box::pin(async move {
                for _ in 0..mixed % 3 {
                    tokio::task::yield_now().await;
                }
                let writes = matches!(called, Called::Update | Called::Transact);
                let kind = match (mixed >> 8) % 12 {
                    0 if writes => TableErrorKind::PartitionThrottled,
                    1 if writes => TableErrorKind::Conflict,
                    2 => TableErrorKind::Throttled,
                    3 => TableErrorKind::Unavailable,
                    _ => return Outcome::Pass,
                };
                if is_calm {
                    Outcome::Pass
                } else {
                    Outcome::Fail(TableError::new(kind, "not now"))
                }
            })
        });
        // By memory some are never replied to: that is another test.
        let mut options = options().seed(seed).local_refusal(Duration::ZERO);
        if seed % 3 == 0 {
            options = options.without_group_commit();
        }
        let store = DynamoStore::new(Arc::new(hooked), options);
        let wide =
            target_of([without_refill("rpm", 500), without_refill("tpm", 300)], Lifetime::Forever);
        let narrow = target_of([without_refill("rpm", 500)], Lifetime::Forever);
        let plain = store_on(table.clone());
        assert!(takes(&plain, &narrow, 1, at(0)).await);
        assert!(plain.split_to(&key(), 1 << (seed % 4), at(0)).await.unwrap().is_some());
        let mut used = 1_000_i64;
        let mut asked = Vec::new();
        for nth in 0..60 {
            let mixed = mix(seed * 7_919 + nth + 1);
            let target = if mixed.is_multiple_of(2) { &wide } else { &narrow };
            let tokens = i64::try_from(mixed >> 8 & 0x3f).unwrap() + 1;
            asked.push((
                mixed % 5,
                tokens,
                plan(target, tokens * 1_000, at(0)),
                [settlement(target, 0, &[(0, tokens)])],
            ));
        }
        let mut calls: Vec<CallFuture<'_>> = asked.iter().map(|one| ask(&store, one)).collect();
        let mut maybe = 0;
        for round in 0..30 {
            is_calm.store(usize::from(round > 10), Ordering::SeqCst);
            calls.retain_mut(|call| match poll_once(call.as_mut()) {
                Poll::Ready(Ok(tokens)) => {
                    used += tokens;
                    false
                }
                Poll::Ready(Err(error)) => {
                    maybe += i64::from(error.applied() == Applied::Maybe);
                    false
                }
                Poll::Pending => true,
            });
            if calls.is_empty() {
                break;
            }
            settle_down().await;
        }
        assert_eq!(calls.len(), 0, "seed {seed}: so many wait for ever");
        assert_eq!(maybe, 0, "seed {seed}: nothing was carried out that failed");
        settle_down().await;
        assert_eq!(held(&table, &key(), "rpm"), 500_000 - used, "seed {seed}");
    }
}

type Asked = (u64, i64, Plan, [Settlement; 1]);
type CallFuture<'a> = Pin<Box<dyn Future<Output = Result<i64, StoreError>> + 'a>>;

/// Settles or takes, and says how many millitokens that were.
fn ask<'a>(store: &'a DynamoStore, (kind, tokens, plan, charge): &'a Asked) -> CallFuture<'a> {
    let tokens = *tokens * 1_000;
    match kind {
        0 => Box::pin(async move { store.settle(charge, at(0)).await.map(|()| tokens) }),
        _ => Box::pin(async move {
            let admission = store.acquire(plan).await?;
            Ok(if matches!(admission, Admission::Taken(_)) { tokens } else { 0 })
        }),
    }
}

/// SplitMix64.
fn mix(drawn: u64) -> u64 {
    let mixed = drawn.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    mixed ^ (mixed >> 31)
}

/// Promise: every call ends, whatever panics.
#[tokio::test]
async fn under_panics_every_call_ends() {
    for seed in 0..60_u64 {
        let table = SimTable::default();
        let draws = Arc::new(AtomicUsize::new(0));
        let drawn = Arc::clone(&draws);
        let hooked = Hooked::new(table.clone(), move |_, _| {
            let nth = u64::try_from(drawn.fetch_add(1, Ordering::SeqCst)).unwrap();
            let mixed = mix(seed * 1_000_003 + nth);
            Box::pin(async move {
                for _ in 0..mixed % 3 {
                    tokio::task::yield_now().await;
                }
                if (mixed >> 8).is_multiple_of(4) { Outcome::Panic } else { Outcome::Pass }
            })
        });
        let mut options = options().seed(seed).local_refusal(Duration::ZERO);
        if seed % 3 == 0 {
            options = options.without_group_commit();
        }
        let store = DynamoStore::new(Arc::new(hooked), options);
        let target = target(without_refill("rpm", 500));
        let plain = store_on(table.clone());
        assert!(takes(&plain, &target, 1, at(0)).await);
        assert!(plain.split_to(&key(), 1 << (seed % 4), at(0)).await.unwrap().is_some());
        let plans: Vec<Plan> = (0..60)
            .map(|nth| plan(&target, i64::try_from(mix(seed + nth) % 200).unwrap() * 1_000, at(0)))
            .collect();
        let mut calls: Vec<_> = plans.iter().map(|plan| store.acquire(plan)).collect();
        let mut admitted = 1_000;
        let mut asked =
            plans.iter().map(|plan| plan.legs[0].takes[0].amount.get()).collect::<Vec<_>>();
        for _ in 0..30 {
            let mut at = 0;
            while at < calls.len() {
                match poll_once(calls[at].as_mut()) {
                    Poll::Ready(done) => {
                        drop(calls.swap_remove(at));
                        let amount = asked.swap_remove(at);
                        admitted +=
                            if matches!(done, Ok(Admission::Taken(_))) { amount } else { 0 };
                    }
                    Poll::Pending => at += 1,
                }
            }
            settle_down().await;
        }
        assert_eq!(calls.len(), 0, "seed {seed}: so many wait for ever");
        assert!(held(&table, &key(), "rpm") <= 500_000 - admitted, "seed {seed}");
    }
}

/// Promise: cancelled at any await, an acquire leaves no tokens taken: many callers on shards that are
/// split and merged meanwhile by another process, of whom some lose patience.
#[tokio::test]
async fn cancelled_callers_on_shards_leave_nothing_taken() {
    for seed in 0..150_u64 {
        let table = SimTable::default();
        let draws = Arc::new(AtomicUsize::new(0));
        let slow = || {
            let drawn = Arc::clone(&draws);
            Hooked::new(table.clone(), move |_, _| {
                let nth = u64::try_from(drawn.fetch_add(1, Ordering::SeqCst)).unwrap();
                let mixed = mix(seed * 1_000_003 + nth);
                Box::pin(async move {
                    for _ in 0..mixed % 5 {
                        tokio::task::yield_now().await;
                    }
                    Outcome::Pass
                })
            })
        };
        let mut options = options().seed(seed).local_refusal(Duration::ZERO);
        options = if seed % 2 == 0 { options.queue_max(4) } else { options };
        if seed % 3 == 0 {
            options = options.without_group_commit();
        }
        let store = DynamoStore::new(Arc::new(slow()), options);
        let other = DynamoStore::new(Arc::new(slow()), self::options().seed(seed + 1));
        let targets = ["a", "b"].map(|name| target_for(name, without_refill("rpm", 500)));
        for target in &targets {
            assert!(takes(&other, target, 1, at(0)).await);
            assert!(other.split_to(target.key(), 1 << (seed % 4), at(0)).await.unwrap().is_some());
        }
        let plans: Vec<Plan> = (0..40)
            .map(|nth| {
                let tokens = i64::try_from(mix(seed + nth) % 200).unwrap();
                chain(&[(&targets[0], tokens), (&targets[1], tokens)], at(0))
            })
            .collect();
        let mut calls: Vec<_> = plans.iter().map(|plan| Some(store.acquire(plan))).collect();
        let mut kept = 1_000;
        let mut resharding: Vec<Pin<Box<dyn Future<Output = ()>>>> = Vec::new();
        for round in 0..400_u64 {
            if round % 50 == 10 {
                let other = other.clone();
                let key = targets[usize::try_from(round / 50 % 2).unwrap()].key().clone();
                let merges = mix(seed + round).is_multiple_of(2);
                let mut work: Pin<Box<dyn Future<Output = ()>>> = Box::pin(async move {
                    match merges {
                        true => other.merge(&key, at(0)).await.unwrap(),
                        false => other.split(&key, at(0)).await.unwrap(),
                    }
                });
                if poll_once(work.as_mut()).is_pending() {
                    resharding.push(work);
                }
            }
            resharding.retain_mut(|work| poll_once(work.as_mut()).is_pending());
            for (nth, call) in calls.iter_mut().enumerate() {
                let Some(polled) = call else { continue };
                let patience = mix(seed * 31 + u64::try_from(nth).unwrap()) % 300;
                match poll_once(polled.as_mut()) {
                    Poll::Ready(done) => {
                        let amount = plans[nth].legs[0].takes[0].amount.get();
                        kept += if matches!(done, Ok(Admission::Taken(_))) { amount } else { 0 };
                        *call = None;
                    }
                    Poll::Pending if round > patience && nth % 2 == 0 => *call = None,
                    Poll::Pending => {}
                }
            }
            tokio::task::yield_now().await;
        }
        settle_down().await;
        let left = calls.iter_mut().flatten().map(|call| match poll_once(call.as_mut()) {
            Poll::Ready(done) => done,
            Poll::Pending => panic!("seed {seed}: it ends"),
        });
        assert_eq!(left.count(), 0, "seed {seed}: they were all done by then");
        settle_down().await;
        for target in &targets {
            assert_eq!(held(&table, target.key(), "rpm"), 500_000 - kept, "seed {seed}");
        }
    }
}

/// Promise: charges are never lost, in chains with limits that are paid afterwards, on every store alike:
/// not when the buckets were never made, nor after they have expired, nor after the entity was deleted.
#[tokio::test]
async fn late_charges_count_at_every_level_on_every_store() {
    for nth in 0..2 {
        for (deleted, waits_s) in [(false, 0), (false, 1_000), (true, 0), (true, 1_000)] {
            let store: Arc<dyn Store> = match nth {
                0 => Arc::new(MemoryStore::new()),
                _ => Arc::new(store_on(SimTable::default())),
            };
            let clock = Arc::new(ManualClock::new(at(0)));
            let limits = [Limit::per_minute("rpm", 10), Limit::per_minute("tpm", 10)];
            let builder = RateLimiter::builder(Arc::clone(&store)).clock(Arc::clone(&clock) as _);
            let limiter = builder.entropy(Entropy::seeded(1)).default_limits(limits).open().await;
            let limiter = limiter.unwrap();
            limiter.create_entity("parent").await.unwrap();
            limiter.create_entity("child").parent("parent").cascade().await.unwrap();
            let call = limiter.acquire("child", "gpt-4").take("rpm", 4).take("tpm", 0);
            let mut lease = call.await.unwrap();
            clock.advance(Duration::from_secs(waits_s));
            if deleted {
                limiter.delete_entity("child").await.unwrap();
            }
            // Some of it is refunded, and some is charged, in one settlement.
            lease.release("rpm", 2).unwrap();
            lease.adjust("tpm", 50).unwrap();
            lease.commit().await.unwrap();
            for entity in ["child", "parent"] {
                let left = limiter.available(entity, "gpt-4", &[("tpm", 0), ("rpm", 0)]).await;
                let left: Vec<i64> = left
                    .unwrap()
                    .iter()
                    .filter(|one| one.entity_id.as_str() == entity)
                    .map(|one| one.available.whole_tokens())
                    .collect();
                let is_new = waits_s > 0 || (deleted && entity == "child");
                let rpm = if is_new { 10 } else { 8 };
                let names = format!("store {nth}, {entity}, deleted {deleted}, {waits_s} s");
                assert_eq!(left, [rpm, -40], "{names}");
                let refused = limiter.acquire(entity, "gpt-4").take("tpm", 1).await;
                assert!(refused.unwrap_err().as_exceeded().is_some(), "{names}");
            }
            // 50 tokens at 10 a minute.
            clock.advance(Duration::from_secs(300));
            let scope = zae_limiter_core::BucketQuery::OfEntity(
                limiter.namespace_id().clone(),
                EntityId::new("child").unwrap(),
            );
            let page = store.list_buckets(&scope, &PageRequest::first(10)).await.unwrap();
            if deleted {
                let now = at(i64::try_from(waits_s).unwrap() * 1_000 + 300_000);
                let stays = |one: &StoredBucket| one.expires_at.is_none_or(|expiry| expiry > now);
                assert!(!page.items.iter().any(stays), "store {nth}: nothing stays: {page:?}");
            }
        }
    }
}

/// Promise: every call ends, whatever the limiter is set to.
#[tokio::test]
async fn a_limiter_at_its_extremes_serves() {
    for nth in 0..4 {
        let store: Arc<dyn Store> = Arc::new(store_on(SimTable::default()));
        let clock = Arc::new(ManualClock::new(at(0)));
        let builder = RateLimiter::builder(store).clock(Arc::clone(&clock) as _);
        let builder = builder.default_limits([Limit::per_minute("rpm", 10)]);
        let builder = match nth {
            0 => builder.deadline(Duration::MAX).admin_deadline(Duration::MAX),
            1 => builder
                .cache_ttl(Duration::MAX)
                .audit_retention(Duration::MAX)
                .bucket_lifetime(u32::MAX),
            2 => builder.cache_ttl(Duration::ZERO).bucket_lifetime(0),
            _ => builder.breaker(BreakerSettings { failures: 1, cooldown: Duration::MAX }),
        };
        let limiter = builder.entropy(Entropy::seeded(1)).open().await.unwrap();
        for _ in 0..3 {
            let call = limiter.acquire("org", "gpt-4").take("rpm", 3).into_future();
            let mut lease = finish(&clock, call, || {}).await.unwrap();
            lease.adjust("rpm", -1).unwrap();
            finish(&clock, lease.commit(), || {}).await.unwrap();
        }
        let call = limiter.acquire("org", "gpt-4").take("rpm", 9).into_future();
        assert!(finish(&clock, call, || {}).await.unwrap_err().as_exceeded().is_some());
    }
}

/// Promise: `queue_max` is "how many callers may wait for one bucket". Dropped callers do not count.
#[tokio::test]
async fn dropped_callers_do_not_fill_a_small_queue() {
    let mut refused = Vec::new();
    for most in [1, 2, 10, 64, 70, 100, 1_000] {
        let table = Hooked::new(SimTable::default(), |_, _| Box::pin(async { Outcome::Hang }));
        let store = DynamoStore::new(Arc::new(table), options().queue_max(most));
        let asked = plan(&target(without_refill("rpm", 1_000_000)), 1_000, at(0));
        let mut hung = store.acquire(&asked);
        assert!(poll_once(hung.as_mut()).is_pending());
        // Each is dropped before the next one comes.
        let is_let_in = |_: &usize| poll_once(store.acquire(&asked).as_mut()).is_pending();
        refused.extend((0..3 * most).find(|gone| !is_let_in(gone)).map(|gone| (most, gone)));
    }
    assert_eq!(
        refused,
        [],
        "the most, and how many had gone when nobody waited and one was refused"
    );
}

/// Promise: every call ends, also those that wait for a bucket when the store is dropped, and what was
/// settled is carried out.
#[tokio::test]
async fn a_dropped_store_finishes_submitted_requests() {
    let table = SimTable::default();
    let slow = Hooked::new(table.clone(), |_, _| {
        Box::pin(async {
            for _ in 0..5 {
                tokio::task::yield_now().await;
            }
            Outcome::Pass
        })
    });
    let store = DynamoStore::new(Arc::new(slow), options());
    let target = target(without_refill("rpm", 100));
    assert!(takes(&store, &target, 50, at(0)).await);
    for nth in 0..20 {
        let store = store.clone();
        let refund = [settlement(&target, SHARD_ZERO, &[(0, -1)])];
        // Polled once, and dropped with its store.
        let mut settling = Box::pin(async move { store.settle(&refund, at(0)).await });
        assert!(poll_once(settling.as_mut()).is_pending(), "{nth}");
    }
    let last = store;
    let asked = plan(&target, 1_000, at(0));
    let mut cancelled = Box::pin(async move { last.acquire(&asked).await });
    assert!(poll_once(cancelled.as_mut()).is_pending());
    drop(cancelled);
    settle_down().await;
    assert_eq!(held(&table, &key(), "rpm"), 70_000);
}

/// Promise: "A change is enforced at once in the process that made it, and everywhere within one TTL", and
/// "service returns when the clock does": a process whose clock was an hour ahead for a moment must not
/// keep a change away from the bucket for that hour.
#[tokio::test]
async fn a_clock_an_hour_ahead_does_not_block_a_change_of_limits() {
    const HOUR: i64 = 3_600_000;
    let table = SimTable::default();
    let store = store_on(table.clone());
    let of = |capacity, read_at| {
        let limits = Arc::new(LimitSet::new([without_refill("rpm", capacity)]).unwrap());
        Arc::new(Target::new(key(), limits, Lifetime::Forever).with_limits_read_at(read_at))
    };
    assert!(takes(&store, &of(100, at(0)), 1, at(0)).await);
    // Another process, ahead by an hour, has other limits for a moment: so it writes them.
    assert!(takes(&store_on(table.clone()), &of(90, at(HOUR)), 1, at(HOUR)).await);
    // Ten minutes later, by all clocks, the limit is lowered.
    let lowered = of(10, at(600_000));
    store.reconfigure(&lowered, at(600_000)).await.unwrap();
    let admitted = takes(&store, &lowered, 11, at(600_001)).await;
    assert!(!admitted, "{:?}", shards_of(&table, &key())[0].1.get("b_rpm_cp"));
}
