//! Attacks on the promises about wrong clocks (`docs/clocks.md`), on a table whose responses have a date.

#![allow(clippy::unwrap_used, reason = "a test says what is wrong by panicking")]

use std::sync::Arc;
use std::time::Duration;

use zae_limiter_core::{
    Clock, Error, Limit, ManualClock, RateLimiter, Store as _, TimeCheck, Timestamp,
};
use zae_limiter_dynamodb::{DynamoOptions, DynamoStore};
use zae_limiter_testkit::SimTable;

const NOW: i64 = 1_794_751_200_000;
const MINUTE: i64 = 60_000;
const HOUR: i64 = 60 * MINUTE;

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
        let now = Timestamp::from_millis(NOW);
        Self { table: SimTable::default(), clock: Arc::new(ManualClock::new(now)) }
    }

    /// A process whose clock is wrong by `error`.
    async fn process(&self, error: i64) -> Process {
        self.process_with(error, DynamoOptions::default()).await
    }

    async fn process_with(&self, error: i64, options: DynamoOptions) -> Process {
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

impl Process {
    async fn takes(&self, tokens: u64) -> u64 {
        match self.limiter.acquire("key", "gpt-4").take("rpm", tokens).await {
            Ok(lease) => {
                lease.commit().await.unwrap();
                tokens
            }
            Err(Error::Exceeded(_)) => 0,
            Err(other) => panic!("{other}"),
        }
    }
}

/// "In any interval t a limit admits at most capacity + rate × (t + s). With the table's dates, s is at most the bound
/// of two minutes." A date has whole seconds, so two processes know the table's time to within a second: a clock that is
/// ahead by the bound for one of them is beyond it for the other.
#[tokio::test]
async fn a_clock_at_the_bound_admits_no_more_than_the_bound_allows() {
    let world = World::new();
    let ahead = world.process(2 * MINUTE - 1_000).await;
    assert_eq!(ahead.store.check_time(ahead.clock.now()), TimeCheck::Within);
    world.advance(&[&ahead], Duration::from_millis(900));
    let right = world.process(0).await;
    let (mut admitted, mut passed) = (0, 0);
    for _ in 0..100 {
        admitted += ahead.takes(60).await;
        admitted += right.takes(60).await;
        // A snapshot is fresh for a second.
        world.advance(&[&ahead, &right], secs(2));
        passed += 2;
    }
    let most = 60 + passed + 2 * 120;
    assert!(admitted <= most, "{admitted} in {passed} s, and {most} are allowed");
}

/// The same, for all errors around the bound and two processes that are as wrong in the other direction.
#[tokio::test]
async fn two_clocks_around_the_bound_admit_no_more_than_the_bound_allows() {
    for error in
        [100_000, 118_000, 119_000, 119_500, 119_900, 120_000, 120_100, 120_900, 121_500, 130_000]
    {
        for other in [0, -118_000, -119_900, -120_900] {
            for phase in [0, 100, 500, 900] {
                let world = World::new();
                let ahead = world.process(error).await;
                world.advance(&[&ahead], Duration::from_millis(phase));
                let second = world.process(other).await;
                let mut admitted = 0;
                for _ in 0..50 {
                    admitted += ahead.takes(60).await;
                    admitted += second.takes(60).await;
                    world.advance(&[&ahead, &second], Duration::from_millis(1_100));
                }
                let most = 60 + 55 + 240;
                assert!(admitted <= most, "{error} {other} {phase}: {admitted} of {most}");
            }
        }
    }
}

/// "The first response after that corrects both": a machine that was suspended, also if its time of day stood as well,
/// and one whose stopwatch went on while its time of day stood.
#[tokio::test]
async fn a_suspended_machine_neither_waits_nor_takes_too_much() {
    for goes_on in [true, false] {
        let world = World::new();
        let (right, asleep) = (world.process(0).await, world.process(0).await);
        assert_eq!(asleep.takes(60).await, 60);
        world.advance(&[&right], secs(3_600));
        if goes_on {
            asleep.clock.correct(Timestamp::from_millis(NOW + HOUR));
        }
        // One call may be refused by what is known from before.
        let first = asleep.takes(30).await;
        asleep.clock.advance(secs(2));
        world.advance(&[&right], secs(2));
        assert_eq!(first + asleep.takes(60 - first).await, 60, "{goes_on}");
        assert_eq!(right.takes(5).await, 0, "{goes_on}");
    }
}

/// "In any interval t a limit admits at most capacity + rate × (t + s), where s is the largest error of a clock whose
/// time was used", beside a Python client or an older release, which have no check. Before there was a check, such a
/// client took the hour once, and then everybody waited for it.
#[tokio::test]
async fn a_client_without_a_check_takes_the_error_of_its_clock_once() {
    let world = World::new();
    let unchecked = DynamoOptions::default().max_clock_skew(Duration::ZERO);
    let (right, ahead) = (world.process(0).await, world.process_with(HOUR, unchecked).await);
    let mut admitted = 0;
    for _ in 0..200 {
        admitted += ahead.takes(60).await;
        admitted += right.takes(60).await;
        world.advance(&[&right, &ahead], Duration::from_millis(1_100));
    }
    let most = 60 + 220 + 3_600;
    assert!(admitted <= most, "{admitted} in 220 s, and {most} are allowed");
}

/// "With the table's dates, s is at most the bound of two minutes": also for the first call of a process that was
/// suspended for hours, with its stopwatch, on a bucket that it knows or not. Its time of day is right, or stood as well.
#[tokio::test]
async fn the_first_call_after_a_sleep_is_counted_for_the_others() {
    for goes_on in [true, false] {
        for (hours, first) in [(1_u64, 0), (8, 0), (48, 0), (1, 1), (5, 1), (8, 1), (48, 1)] {
            if !goes_on && first > 0 {
                // Nothing tells that time has passed before the response to the write: docs/clocks.md says so.
                continue;
            }
            let world = World::new();
            let (right, asleep) = (world.process(0).await, world.process(0).await);
            for process in [&right, &asleep] {
                process
                    .limiter
                    .set_system_defaults([Limit::per_hour("rpm", 60)], None)
                    .await
                    .unwrap();
                process.limiter.invalidate_cache();
            }
            let _ = asleep.limiter.acquire("other", "gpt-4").take("rpm", 1).await.unwrap();
            if first > 0 {
                assert_eq!(asleep.takes(first).await, first);
            }
            world.advance(&[&right], secs(hours * 3_600));
            if goes_on {
                let now = world.clock.now();
                asleep.clock.correct(now);
            }
            let mut admitted = asleep.takes(60 - first).await;
            admitted += right.takes(60 - first).await;
            assert!(admitted <= 62, "{goes_on}, {hours} h, {first}: {admitted} of 60 at once");
        }
    }
}
