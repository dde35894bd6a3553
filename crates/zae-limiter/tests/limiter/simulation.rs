//! Random walks over a hierarchy. An oracle with its own arithmetic checks every step.
//!
//! A failing walk prints its seed; `ZAE_LIMITER_SEED=n cargo test -p zae-limiter --test limiter
//! simulation` replays it alone.

mod overadmission;

use zae_limiter::testing::Clock as _;
use zae_limiter::{Error, Lease, Limit, RateLimiter};

use self::overadmission::{Auditor, ENTITIES, LIMITS, Verdict, tracks};
use crate::world::{Kind, World, ms, on, secs, turn};

const SEEDS: u64 = 200;
const STEPS: usize = 300;

/// A lease and what the oracle says it holds.
struct Open {
    lease: Lease,
    chain: Vec<usize>,
    requested: [bool; LIMITS.len()],
    /// Tokens held at every level of the chain, including unwritten differences.
    held: [i64; LIMITS.len()],
    pending: [i64; LIMITS.len()],
    /// What is known to be used: it stays taken when the lease is dropped.
    used: [Option<i64>; LIMITS.len()],
}

struct Walk {
    world: World,
    limiter: RateLimiter,
    random: fastrand::Rng,
    auditor: Auditor,
    open: Vec<Open>,
    /// The steps so far, for the report of a failure.
    log: Vec<String>,
}

/// Prints the seed and the last steps when a walk fails.
struct ReportOnPanic<'a>(&'a mut Walk, u64);

impl Drop for ReportOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let last = self.0.log.len().saturating_sub(12);
            eprintln!("seed {}, last steps:\n{}", self.1, self.0.log[last..].join("\n"));
        }
    }
}

fn random_limit(random: &mut fastrand::Rng, name: &str) -> Limit {
    let limit = Limit::per(name, random.u64(1..40), secs(random.u64(1..20)));
    if random.bool() { limit.burst(random.u64(1..60)) } else { limit }
}

impl Walk {
    async fn begin(world: World, seed: u64) -> Self {
        let limiter = world.limiter().await;
        let mut walk = Self {
            limiter,
            random: fastrand::Rng::with_seed(seed),
            auditor: Auditor::new(world.clock.now()),
            open: Vec::new(),
            log: Vec::new(),
            world,
        };
        for (at, (id, parent)) in ENTITIES.into_iter().enumerate() {
            let mut create = walk.limiter.create_entity(id);
            if let Some(parent) = parent {
                create = create.parent(ENTITIES[parent].0).cascade();
            }
            create.await.unwrap();
            walk.change_limits(at).await;
        }
        walk
    }

    async fn step(&mut self) {
        let lease = (!self.open.is_empty()).then(|| self.random.usize(0..self.open.len()));
        match (self.random.u8(0..21), lease) {
            (0..=6, _) => self.acquire().await,
            (7, _) => {
                let at = self.random.usize(0..ENTITIES.len());
                self.change_limits(at).await;
            }
            (8..=10, _) | (_, None) => {
                let by = [1, 7, 50, 333, 1_000, 5_000][self.random.usize(0..6)];
                self.log.push(format!("clock moves by {by} ms"));
                self.world.advance(ms(by));
            }
            (11 | 12, Some(at)) => self.adjust(at),
            (13, Some(at)) => self.settle(at),
            (14, Some(at)) => self.consume(at).await,
            (15, Some(at)) => self.flush(at).await,
            (16 | 17, Some(at)) => {
                let mut open = self.open.swap_remove(at);
                self.log.push("commit".to_owned());
                self.write(&mut open);
                open.lease.commit().await.unwrap();
            }
            (18, Some(at)) => {
                let open = self.open.swap_remove(at);
                self.log.push("rollback".to_owned());
                self.undo(&open);
                open.lease.rollback().await.unwrap();
            }
            (_, Some(at)) => {
                let open = self.open.swap_remove(at);
                self.log.push("drop".to_owned());
                self.undo_the_rest(&open);
                drop(open.lease);
            }
        }
        self.check().await;
    }

    async fn change_limits(&mut self, at: usize) {
        let names = (0..LIMITS.len()).filter(|limit| tracks(at, *limit));
        let limits: Vec<Limit> =
            names.map(|limit| random_limit(&mut self.random, LIMITS[limit])).collect();
        self.log.push(format!("{} gets {limits:?}", ENTITIES[at].0));
        self.limiter.set_limits(ENTITIES[at].0, None, limits.clone()).await.unwrap();
        self.auditor.change(at, &limits, self.world.clock.now());
    }

    /// Amounts of some of the limits of an entity.
    fn amounts(&mut self, at: usize) -> [Option<u64>; LIMITS.len()] {
        let mut amounts = [None; LIMITS.len()];
        let first = self.random.usize(0..LIMITS.len());
        for (limit, amount) in amounts.iter_mut().enumerate() {
            if tracks(at, limit) && (limit == first || self.random.bool()) {
                *amount = Some(self.random.u64(0..12));
            }
        }
        amounts
    }

    async fn acquire(&mut self) {
        let at = self.random.usize(0..ENTITIES.len());
        let amounts = self.amounts(at);
        if amounts.iter().all(Option::is_none) {
            return;
        }
        self.log.push(format!("{} takes {amounts:?}", ENTITIES[at].0));
        let chain = Auditor::chain(at);
        let mut call = self.limiter.acquire(ENTITIES[at].0, "gpt-4");
        for (limit, amount) in amounts.into_iter().enumerate() {
            if let Some(amount) = amount {
                call = call.take(LIMITS[limit], amount);
            }
        }
        let expected = self.auditor.take(&chain, amounts, self.world.clock.now());
        if let Some(lease) = check_verdict(call.await, &expected) {
            let tokens = |amount: Option<u64>| i64::try_from(amount.unwrap_or(0)).unwrap();
            self.open.push(Open {
                lease,
                chain,
                requested: amounts.map(|amount| amount.is_some()),
                held: amounts.map(tokens),
                pending: [0; LIMITS.len()],
                used: [None; LIMITS.len()],
            });
        }
    }

    fn adjust(&mut self, at: usize) {
        let open = &mut self.open[at];
        let requested: Vec<usize> =
            (0..LIMITS.len()).filter(|limit| open.requested[*limit]).collect();
        let limit = requested[self.random.usize(0..requested.len())];
        let difference = self.random.i64(-15..16);
        self.log.push(format!("adjust {} by {difference}", LIMITS[limit]));
        let done = open.lease.adjust(LIMITS[limit], difference);
        if open.held[limit] + difference < 0 {
            assert!(matches!(done, Err(Error::NotHeld { .. })), "{done:?}");
        } else {
            done.unwrap();
            open.held[limit] += difference;
            open.pending[limit] += difference;
        }
        assert_eq!(open.lease.held(LIMITS[limit]), Some(open.held[limit]));
    }

    fn settle(&mut self, at: usize) {
        let open = &mut self.open[at];
        let requested: Vec<usize> =
            (0..LIMITS.len()).filter(|limit| open.requested[*limit]).collect();
        let limit = requested[self.random.usize(0..requested.len())];
        let actual = self.random.i64(0..25);
        self.log.push(format!("settle {} for {actual}", LIMITS[limit]));
        open.lease.settle(LIMITS[limit], actual.unsigned_abs()).unwrap();
        open.pending[limit] += actual - open.held[limit];
        open.held[limit] = actual;
        open.used[limit] = Some(actual);
        assert_eq!(open.lease.held(LIMITS[limit]), Some(actual));
    }

    async fn consume(&mut self, at: usize) {
        let open = &mut self.open[at];
        let requested: Vec<usize> =
            (0..LIMITS.len()).filter(|limit| open.requested[*limit]).collect();
        let limit = requested[self.random.usize(0..requested.len())];
        let amount = self.random.u64(0..10);
        self.log.push(format!("consume {amount} of {}", LIMITS[limit]));
        let mut amounts = [None; LIMITS.len()];
        amounts[limit] = Some(amount);
        let expected = self.auditor.take(&open.chain, amounts, self.world.clock.now());
        let done = open.lease.consume(LIMITS[limit], amount).await;
        if check_verdict(done, &expected).is_some() {
            open.held[limit] += i64::try_from(amount).unwrap();
        }
    }

    async fn flush(&mut self, at: usize) {
        let mut open = self.open.swap_remove(at);
        self.log.push("flush".to_owned());
        open.lease.flush().await.unwrap();
        self.write(&mut open);
        self.open.push(open);
    }

    /// Counts the differences that were just written. The tokens held then count as used.
    fn write(&mut self, open: &mut Open) {
        let pending = std::mem::take(&mut open.pending);
        for limit in (0..LIMITS.len()).filter(|limit| pending[*limit] != 0) {
            open.used[limit] = Some(open.held[limit]);
        }
        self.auditor.settle(&open.chain, pending, self.world.clock.now());
    }

    /// Counts a refund of everything that was written.
    fn undo(&mut self, open: &Open) {
        let mut credit = [0; LIMITS.len()];
        for (limit, credit) in credit.iter_mut().enumerate() {
            *credit = open.pending[limit] - open.held[limit];
        }
        self.auditor.settle(&open.chain, credit, self.world.clock.now());
    }

    /// Counts a refund of everything that is not known to be used.
    fn undo_the_rest(&mut self, open: &Open) {
        let mut difference = [0; LIMITS.len()];
        for (limit, difference) in difference.iter_mut().enumerate() {
            let written = open.held[limit] - open.pending[limit];
            *difference = open.used[limit].unwrap_or(0) - written;
        }
        self.auditor.settle(&open.chain, difference, self.world.clock.now());
    }

    /// Every bucket is what the oracle says, to the millitoken.
    async fn check(&mut self) {
        let now = self.world.clock.now();
        for (at, (id, _)) in ENTITIES.into_iter().enumerate() {
            let expected = self.auditor.balances(at, now);
            for looks in 0.. {
                let bucket = self.world.bucket(&self.limiter, id, "gpt-4").await;
                let found: Option<Vec<(i64, i64)>> = bucket.map(|bucket| {
                    let cells = bucket.cells().iter();
                    cells.map(|cell| (cell.tokens.get(), cell.consumed.get())).collect()
                });
                if found == expected {
                    break;
                }
                // A dropped lease is refunded in the background, at once or soon after.
                assert!(looks < 2_000, "{id} has {found:?}, the oracle says {expected:?}");
                turn().await;
            }
        }
    }
}

fn check_verdict<T>(done: Result<T, Error>, expected: &Verdict) -> Option<T> {
    match (done, expected) {
        (Ok(done), Verdict::Taken) => return Some(done),
        (Err(Error::Exceeded(refusal)), Verdict::Refused { wait }) => {
            assert_eq!(refusal.retry_after(), ms(*wait));
        }
        (Err(Error::ExceedsCapacity(refusal)), Verdict::Impossible { whose }) => {
            assert_eq!(refusal.entity_id.as_str(), *whose);
        }
        (Ok(_), expected) => panic!("was admitted, the oracle says {expected:?}"),
        (Err(error), expected) => panic!("{error}; the oracle says {expected:?}"),
    }
    None
}

/// Walks, and returns how many calls were admitted.
async fn walk(world: World, seed: u64, steps: usize) -> usize {
    let mut walk = Walk::begin(world, seed).await;
    let report = ReportOnPanic(&mut walk, seed);
    for _ in 0..steps {
        report.0.step().await;
    }
    report.0.auditor.admitted()
}

/// Walks on fresh stores, one for each seed. Enough calls must be admitted for the walks to prove anything.
fn walks(kind: Kind, seeds: &[u64]) {
    let admitted = std::cell::Cell::new(0);
    for seed in seeds {
        on(kind, async |world| {
            admitted.set(admitted.get() + walk(world, *seed, STEPS).await);
        });
    }
    let steps = seeds.len() * STEPS;
    assert!(admitted.get() > steps / 10, "{} calls admitted in {steps} steps", admitted.get());
}

/// The seed to replay, if the environment has one.
fn seeds(count: u64) -> Vec<u64> {
    match std::env::var("ZAE_LIMITER_SEED") {
        Ok(seed) => vec![seed.parse().expect("a number")],
        Err(_) => (0..count).collect(),
    }
}

#[test]
fn random_walks_in_memory_keep_every_promise_at_every_step() {
    walks(Kind::Memory, &seeds(SEEDS));
}

#[cfg(feature = "sqlite")]
#[test]
fn random_walks_on_sqlite_keep_every_promise_at_every_step() {
    walks(Kind::Sqlite, &seeds(8));
}

#[test]
fn the_oracle_agrees_with_a_bucket_computed_by_hand() {
    // An oracle that is wrong in the same way as the limiter would prove nothing.
    let start = crate::world::NOW;
    let mut auditor = Auditor::new(start);
    auditor.change(
        0,
        &[Limit::per("rpm", 1, secs(3)).burst(2), Limit::per("tpm", 9, secs(1))],
        start,
    );
    let later = |millis| start.saturating_add(ms(millis));
    assert_eq!(auditor.balances(0, start), None);
    assert!(matches!(auditor.take(&[0], [Some(2), None], start), Verdict::Taken));
    assert_eq!(auditor.balances(0, later(1)), Some(vec![(0, 2_000), (9_000, 0)]));
    assert_eq!(auditor.balances(0, later(1_000)), Some(vec![(333, 2_000), (9_000, 0)]));
    let Verdict::Refused { wait } = auditor.take(&[0], [Some(1), None], later(1_000)) else {
        panic!()
    };
    assert_eq!(wait, 2_000);
    assert!(matches!(auditor.take(&[0], [Some(1), None], later(3_000)), Verdict::Taken));
    auditor.settle(&[0], [-3, 100], later(3_000));
    assert_eq!(auditor.balances(0, later(3_000)), Some(vec![(2_000, 0), (-91_000, 100_000)]));
}
