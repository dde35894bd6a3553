//! Attacks on the promises about wrong clocks (`docs/clocks.md`), on a table whose responses have a date.

#![allow(clippy::unwrap_used, reason = "a test says what is wrong by panicking")]

use std::sync::Arc;
use std::time::Duration;

use zae_limiter_core::{
    Builder, Clock, Error, Limit, ManualClock, RateLimiter, Store as _, TimeCheck, Timestamp,
};
use zae_limiter_dynamodb::{DynamoOptions, DynamoStore};
use zae_limiter_testkit::SimTable;

const NOW: i64 = 1_794_751_200_000;
const MINUTE: i64 = 60_000;
const HOUR: i64 = 60 * MINUTE;
const YEAR: i64 = 365 * 24 * HOUR;

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
        self.process_of(error, options, |builder| builder).await
    }

    async fn process_of(
        &self,
        error: i64,
        options: DynamoOptions,
        set: impl FnOnce(Builder) -> Builder,
    ) -> Process {
        let now = Timestamp::from_millis(self.clock.now().as_millis() + error);
        let clock = Arc::new(ManualClock::new(now));
        let table = self.table.dated_for(Arc::clone(&self.clock) as _, Arc::clone(&clock) as _);
        let store = DynamoStore::new(Arc::new(table), options.seed(1));
        let builder = RateLimiter::builder(store.clone())
            .clock(Arc::clone(&clock) as _)
            .default_limits([Limit::per_minute("rpm", 60)]);
        let limiter = set(builder).open().await.unwrap();
        Process { limiter, store, clock }
    }

    /// Time passes, everywhere.
    fn advance(&self, processes: &[&Process], by: Duration) {
        self.clock.advance(by);
        processes.iter().for_each(|process| process.clock.advance(by));
    }
}

impl Process {
    /// The clock jumps, and no time passes.
    fn jump_to(&self, millis: i64) {
        self.clock.correct(Timestamp::from_millis(NOW + millis));
    }

    async fn set_limits(&self, is_own: bool) {
        let limits = [Limit::per_hour("rpm", 60)];
        match is_own {
            true => self.limiter.set_limits("key", Some("gpt-4"), limits).await.unwrap(),
            false => self.limiter.set_system_defaults(limits, None).await.unwrap(),
        };
    }

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

/// "Jumps while the process runs: corrected at once", and "reads before it writes": also at a settlement, which asks for
/// no limits, so that no response comes before it. The bucket has limits of its own, or expires with its defaults.
#[tokio::test]
async fn a_settlement_after_a_jump_neither_fills_nor_freezes_the_bucket() {
    for jump in [4 * MINUTE, HOUR, YEAR, -4 * MINUTE, -HOUR, -YEAR] {
        for is_own in [true, false] {
            let world = World::new();
            let process = world.process(0).await;
            process.set_limits(is_own).await;
            let mut lease = process.limiter.acquire("key", "gpt-4").take("rpm", 60).await.unwrap();
            lease.adjust("rpm", 1).unwrap();
            process.jump_to(jump);
            lease.commit().await.unwrap();
            assert_eq!(process.takes(3).await, 0, "{jump} {is_own}");
            world.advance(&[&process], secs(3_600));
            assert_eq!(process.takes(58).await, 58, "{jump} {is_own}");
            assert_eq!(process.takes(2).await, 0, "{jump} {is_own}");
        }
    }
}

/// The same for an acquire by limits that are cached for long.
#[tokio::test]
async fn an_acquire_after_a_jump_by_cached_limits_earns_nothing() {
    for jump in [4 * MINUTE, 9 * MINUTE, HOUR, -4 * MINUTE] {
        let world = World::new();
        let set = |builder: Builder| builder.cache_ttl(secs(600));
        let process = world.process_of(0, DynamoOptions::default(), set).await;
        process.set_limits(true).await;
        assert_eq!(process.takes(60).await, 60);
        process.jump_to(jump);
        assert_eq!(process.takes(3).await, 0, "{jump}");
        // By the table's date, which is up to two seconds old.
        world.advance(&[&process], secs(3_602));
        assert_eq!(process.takes(60).await, 60, "{jump}");
    }
}

/// "Beyond it every call uses the corrected time: for buckets, for records, for audit events", from the first one on.
#[tokio::test]
async fn records_after_a_jump_have_the_corrected_time() {
    for jump in [HOUR, YEAR, -HOUR, -YEAR] {
        let process = World::new().process(0).await;
        let namespaces = process.limiter.namespaces();
        process.jump_to(jump);
        let team = namespaces.register("team").await.unwrap();
        process.jump_to(0);
        namespaces.get("team").await.unwrap();
        process.jump_to(jump);
        let entity = process.limiter.create_entity("key").await.unwrap();
        let events = process.limiter.audit_events("key").unwrap().all().await.unwrap();
        let times = [team.created_at, entity.created_at, events[0].at];
        let is_now = |at: Timestamp| (at.as_millis() - NOW).abs() <= 2_000;
        assert!(times.into_iter().all(is_now), "{jump}: {times:?}");
        // The clock is set right.
        process.jump_to(0);
        let entity = process.limiter.create_entity("other").await.unwrap();
        assert_eq!(entity.created_at.as_millis(), NOW, "{jump}");
    }
}

/// The same after a sleep during which the monotonic clock stood: the time of day is right, and only a response says so.
#[tokio::test]
async fn records_after_a_sleep_have_the_time_of_the_table() {
    let world = World::new();
    let (one, other) = (world.process(0).await, world.process(0).await);
    world.advance(&[], secs(3_600));
    let is_now = |at: Timestamp| (at.as_millis() - NOW - HOUR).abs() <= 2_000;
    for process in [&one, &other] {
        process.jump_to(HOUR);
    }
    let entity = one.limiter.create_entity("key").await.unwrap();
    let team = other.limiter.namespaces().register("team").await.unwrap();
    let events = one.limiter.audit_events("key").unwrap().all().await.unwrap();
    let times = [entity.created_at, team.created_at, events[0].at];
    assert!(times.into_iter().all(is_now), "{times:?}");
}

/// A jump may be a sleep during which the monotonic clock stood: what was cached is older than it looks.
#[tokio::test]
async fn the_first_call_after_a_sleep_reads_its_limits_anew() {
    let world = World::new();
    let (right, asleep) = (world.process(0).await, world.process(0).await);
    asleep.set_limits(true).await;
    assert_eq!(asleep.takes(1).await, 1);
    world.advance(&[&right], secs(3_600));
    right.limiter.set_limits("key", Some("gpt-4"), [Limit::per_hour("rpm", 5)]).await.unwrap();
    asleep.jump_to(HOUR);
    let limits = asleep.limiter.effective_limits("key", "gpt-4").await.unwrap().limits;
    assert_eq!(limits[0].capacity, 5);
}

/// A clock that is set back within the bound makes what was cached look younger than it is.
#[tokio::test]
async fn a_change_is_seen_within_one_ttl_if_the_clock_is_set_back() {
    let world = World::new();
    let (right, other) = (world.process(0).await, world.process(0).await);
    other.set_limits(true).await;
    assert_eq!(other.takes(1).await, 1);
    right.limiter.set_limits("key", Some("gpt-4"), [Limit::per_hour("rpm", 5)]).await.unwrap();
    world.advance(&[&right, &other], secs(58));
    assert_eq!(other.takes(1).await, 1);
    other.jump_to(1_000);
    world.advance(&[&right, &other], secs(2));
    let limits = other.limiter.effective_limits("key", "gpt-4").await.unwrap().limits;
    assert_eq!(limits[0].capacity, 5);
}

/// "And for expiry": a list reads the clock before its first call.
#[tokio::test]
async fn events_do_not_expire_by_a_jump() {
    let world = World::new();
    let process = world.process(0).await;
    process.limiter.create_entity("key").await.unwrap();
    process.jump_to(YEAR);
    let events = process.limiter.audit_events("key").unwrap().all().await.unwrap();
    assert_eq!(events.len(), 1);
}
