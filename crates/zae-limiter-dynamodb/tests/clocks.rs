//! Clocks that are wrong, on a table whose responses have a date.

#![allow(clippy::unwrap_used, reason = "a test says what is wrong by panicking")]

use std::sync::Arc;
use std::time::Duration;

use zae_limiter_core::{
    Admission, BucketKey, Clock, Error, Leg, Lifetime, Limit, LimitSet, ManualClock, Millitokens,
    Plan, RateLimiter, Store, Take, Target, TimeCheck, Timestamp,
};
use zae_limiter_dynamodb::{DynamoOptions, DynamoStore};
use zae_limiter_testkit::SimTable;

const NOW: i64 = 1_794_751_200_000;
const MINUTE: i64 = 60_000;
const HOUR: i64 = 60 * MINUTE;
const YEAR: i64 = 365 * 24 * HOUR;

fn at(millis: i64) -> Timestamp {
    Timestamp::from_millis(NOW + millis)
}

fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// A table with a clock of its own.
struct World {
    table: SimTable,
    clock: Arc<ManualClock>,
}

/// A process with its clock.
struct Process {
    limiter: RateLimiter,
    store: DynamoStore,
    clock: Arc<ManualClock>,
}

impl World {
    fn new() -> Self {
        Self { table: SimTable::default(), clock: Arc::new(ManualClock::new(at(0))) }
    }

    /// A process whose clock is wrong by `error`.
    async fn process(&self, error: i64, options: DynamoOptions) -> Process {
        let now = Timestamp::from_millis(self.clock.now().as_millis() + error);
        let clock = Arc::new(ManualClock::new(now));
        let table = self.table.dated_for(Arc::clone(&self.clock) as _, Arc::clone(&clock) as _);
        let store = DynamoStore::new(Arc::new(table), options.seed(1));
        let limiter = RateLimiter::builder(store.clone())
            .clock(Arc::clone(&clock) as _)
            .default_limits([Limit::per_minute("rpm", 60)])
            .open()
            .await
            .unwrap();
        Process { limiter, store, clock }
    }

    /// Time passes, everywhere.
    fn advance(&self, processes: &[&Process], by: Duration) {
        self.clock.advance(by);
        processes.iter().for_each(|process| process.clock.advance(by));
    }
}

fn checked() -> DynamoOptions {
    DynamoOptions::default()
}

/// As an older release, or the Python client.
fn unchecked() -> DynamoOptions {
    DynamoOptions::default().max_clock_skew(Duration::ZERO)
}

impl Process {
    async fn spend(&self, tokens: u64) {
        let lease = self.limiter.acquire("key", "gpt-4").take("rpm", tokens).await;
        lease.unwrap_or_else(|error| panic!("{tokens}: {error}")).commit().await.unwrap();
    }

    /// The wait of a call that must be refused.
    async fn wait(&self, tokens: u64) -> Duration {
        match self.limiter.acquire("key", "gpt-4").take("rpm", tokens).await {
            Err(Error::Exceeded(refusal)) => refusal.retry_after(),
            other => panic!("must be refused: {other:?}"),
        }
    }

    fn bucket(&self) -> BucketKey {
        BucketKey {
            namespace: self.limiter.namespace_id().clone(),
            entity: "key".parse().unwrap(),
            resource: "gpt-4".parse().unwrap(),
        }
    }
}

/// A date is up to two seconds old, and so is the time of a process that uses it.
fn is_about(wait: Duration, seconds: u64) -> bool {
    (secs(seconds)..=secs(seconds + 4)).contains(&wait)
}

#[tokio::test]
async fn a_call_from_a_wrong_clock_uses_the_tables_time() {
    for error in [3 * MINUTE, HOUR, YEAR, -3 * MINUTE, -HOUR, -YEAR] {
        let world = World::new();
        let (right, wrong) =
            (world.process(0, checked()).await, world.process(error, checked()).await);
        let found = wrong.store.check_time(wrong.clock.now());
        assert!(matches!(found, TimeCheck::Beyond(_)), "{error}: {found:?}");
        wrong.spend(60).await;
        for process in [&right, &wrong] {
            assert!(is_about(process.wait(10).await, 8), "{error}");
        }
        world.advance(&[&right, &wrong], secs(32));
        wrong.spend(15).await;
        right.spend(15).await;
        for process in [&right, &wrong] {
            assert!(process.wait(5).await <= secs(6), "{error}");
        }
    }
}

#[tokio::test]
async fn a_clock_within_the_bound_is_used_as_it_is() {
    let world = World::new();
    for error in [0, MINUTE, -MINUTE, 2 * MINUTE - 2_000] {
        let process = world.process(error, checked()).await;
        assert_eq!(process.store.check_time(process.clock.now()), TimeCheck::Within, "{error}");
    }
}

#[tokio::test]
async fn a_bucket_that_was_frozen_serves_again() {
    for ahead in [5 * MINUTE, HOUR, YEAR] {
        let world = World::new();
        let (right, old) =
            (world.process(0, checked()).await, world.process(ahead, unchecked()).await);
        old.spend(60).await;
        // It is found by a refusal, and by a look.
        let status = right.limiter.available("key", "gpt-4", &[("rpm", 30)]).await.unwrap();
        assert_eq!(status[0].retry_after, secs(30), "{ahead}");
        assert_eq!(right.wait(30).await, secs(30), "{ahead}");
        world.advance(&[&right], secs(30));
        right.spend(30).await;
        assert_eq!(right.wait(1).await, secs(1), "{ahead}");
    }
}

#[tokio::test]
async fn all_shards_of_a_frozen_bucket_serve_again() {
    let world = World::new();
    let right = world.process(0, checked().shards_max(4)).await;
    let old = world.process(YEAR, unchecked().shards_max(4)).await;
    right.spend(20).await;
    right.store.split_to(&right.bucket(), 4, right.clock.now()).await.unwrap();
    for _ in 0..4 {
        old.spend(15).await;
    }
    // Until the snapshots of the split are no longer fresh.
    world.advance(&[&right], secs(2));
    assert!(right.wait(60).await <= secs(60));
    world.advance(&[&right], secs(30));
    right.spend(30).await;
    world.advance(&[&right], secs(60));
    right.spend(60).await;
    assert!(right.wait(60).await <= secs(60));
    right.store.merge(&right.bucket(), right.clock.now()).await.unwrap();
    world.advance(&[&right], secs(60));
    right.spend(60).await;
}

/// The most dangerous process: it wakes up with the time at which it fell asleep.
#[tokio::test]
async fn a_process_that_was_suspended_rewinds_nothing() {
    let world = World::new();
    let (right, asleep) = (world.process(0, checked()).await, world.process(0, checked()).await);
    asleep.spend(60).await;
    world.advance(&[&right], secs(8 * 3_600));
    right.spend(60).await;
    for _ in 0..3 {
        assert!(is_about(asleep.wait(1).await, 1));
        assert_eq!(right.wait(1).await, secs(1));
    }
}

#[tokio::test]
async fn a_lagging_clock_on_a_table_without_dates_rewinds_nothing() {
    let world = World::new();
    let store = |clock: &Arc<ManualClock>| {
        let store = DynamoStore::new(Arc::new(world.table.clone()), checked());
        let limits = [Limit::per_minute("rpm", 60)];
        RateLimiter::builder(store).clock(Arc::clone(clock) as _).default_limits(limits).open()
    };
    let (clock, late) = (&world.clock, Arc::new(ManualClock::new(at(-HOUR))));
    let (right, lagging) = (store(clock).await.unwrap(), store(&late).await.unwrap());
    let take = async |limiter: &RateLimiter, tokens| {
        limiter.acquire("key", "gpt-4").take("rpm", tokens).await.map(|lease| drop(lease.commit()))
    };
    take(&right, 60).await.unwrap();
    take(&lagging, 1).await.unwrap_err();
    take(&right, 1).await.unwrap_err();
}

fn plan(now: Timestamp, tokens: i64) -> Plan {
    let key = BucketKey {
        namespace: "abcdefghijk".parse().unwrap(),
        entity: "key".parse().unwrap(),
        resource: "gpt-4".parse().unwrap(),
    };
    let limits = Arc::new(LimitSet::new([Limit::per_minute("rpm", 60)]).unwrap());
    let target = Arc::new(Target::new(key, limits, Lifetime::Forever));
    let takes = [Take { cell: 0, amount: Millitokens::new(tokens * 1_000) }];
    let leg = Leg { target, takes: takes.into_iter().collect() };
    Plan { now, max_skew: None, legs: [leg].into_iter().collect() }
}

/// A store without a limiter: its first call writes a bucket, and no response has come yet.
#[tokio::test]
async fn the_first_call_of_a_store_writes_nothing_before_it_knows_the_time() {
    for error in [HOUR, -HOUR, YEAR, -YEAR] {
        let world = World::new();
        let store = |options| {
            let table = world.table.dated_by(Arc::clone(&world.clock) as _);
            DynamoStore::new(Arc::new(table), options)
        };
        let right = store(checked());
        let taken = right.acquire(&plan(at(0), 30)).await.unwrap();
        assert!(matches!(taken, Admission::Taken(_)));
        world.clock.advance(secs(60));
        // It is full again: 60 are there, and not 30 and then 60.
        let wrong = store(checked());
        assert_eq!(wrong.check_time(at(error)), TimeCheck::Unknown);
        let taken = wrong.acquire(&plan(at(60_000 + error), 30)).await.unwrap();
        assert!(matches!(taken, Admission::Taken(_)), "{error}");
        assert!(matches!(wrong.check_time(at(error)), TimeCheck::Beyond(_)));
        let refused = right.acquire(&plan(at(60_000), 33)).await.unwrap();
        assert!(matches!(refused, Admission::Refused(_)), "{error}");
        let taken = right.acquire(&plan(at(60_000), 27)).await.unwrap();
        assert!(matches!(taken, Admission::Taken(_)), "{error}");
    }
}
