//! Simulates the whole stack: each client is a limiter on a store that the auditor watches.
//!
//! The auditor checks all calls of the stores as in a [`Simulation`](super::Simulation). In
//! addition, for the limiters:
//!
//! - every call ends within its deadline, whatever the table does;
//! - a breaker opens only because the store does not reply. A busy store does reply: see [`Signs`];
//! - the net consumption of a bucket contains what commits have confirmed. If the outcome of every
//!   call is known, it contains nothing else: a rollback refunds everything, and a drop refunds all
//!   that was not settled or flushed;
//! - after the faults have stopped and all caches have expired, all limiters use the stored limits,
//!   and so does every shard that they write to;
//! - after the faults have stopped, every limiter serves again, even if its breaker was open.

mod calls;
mod checks;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use fastrand::Rng;
use tokio::task::JoinHandle;
use zae_limiter_core::{
    BucketKey, EntityId, Entropy, Error, Limit, OnUnavailable, RateLimiter, ResourceName, Store,
};
use zae_limiter_schema::Table;

use super::scene::{Scene, draw_limit_list};
use super::watched::{Signs, Watched};
use super::workload::{CALM_MAX, join, locked};
use super::{ClientClock, Excuses, Harsh, World};
use crate::table::{ClientId, Faults, Totals};

const RESOURCE: &str = "gpt-4";
/// How long limiters cache limits, in seconds.
const CACHE_TTLS: [u64; 3] = [0, 2, CACHE_TTL_MAX];
const CACHE_TTL_MAX: u64 = 60;

/// One run with limiters.
#[derive(Clone, Debug)]
pub struct Stack {
    seed: u64,
    replay: String,
    harsh: Harsh,
    wrong_clocks: bool,
}

/// The result of a run with limiters.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StackReport {
    /// A hash of the run: the same for the same seed.
    pub digest: u64,
    /// Acquires that gave a lease that holds something.
    pub admitted: u64,
    /// Acquires that were refused.
    pub refused: u64,
    /// Calls that were allowed because the store was unavailable.
    pub degraded: u64,
    /// Calls that failed because the store was unavailable.
    pub unavailable: u64,
    /// Leases whose commit was confirmed.
    pub committed: u64,
    /// Leases that were dropped.
    pub dropped: u64,
    /// Changes of limits that were confirmed.
    pub reconfigured: u64,
    /// Calls that named a limit that was removed.
    pub unknown: u64,
    /// Limits of entities whose net consumption was checked exactly.
    pub exact: u64,
    /// Limits of entities whose exact consumption is unknown.
    pub unsure: u64,
    /// Writes to buckets that the auditor has checked.
    pub steps: u64,
    /// How often the auditor could not check something exactly.
    pub excuses: Excuses,
    /// The table's calls and units.
    pub totals: Totals,
}

type Build = dyn Fn(Arc<dyn Table>, ClientId) -> Arc<dyn Store> + Send + Sync;

struct Stage {
    world: Arc<World>,
    scene: Scene,
    build: Box<Build>,
    rng: Mutex<Rng>,
    next_client: Mutex<ClientId>,
    is_calm: AtomicBool,
    report: Mutex<StackReport>,
    /// What commits have confirmed, by entity and limit, in tokens.
    kept: Mutex<BTreeMap<(String, String), i64>>,
    /// What dropped leases had settled or flushed, in the same form.
    used: Mutex<BTreeMap<(String, String), i64>>,
    entities: Vec<Place>,
    /// Entities with leases whose outcome is unknown.
    unsure: Mutex<BTreeSet<String>>,
}

struct Place {
    id: String,
    parent: Option<usize>,
    /// The sets of limits that it can have. It starts with the first.
    versions: Vec<Vec<Limit>>,
}

struct Client {
    id: ClientId,
    limiter: RateLimiter,
    clock: Arc<ClientClock>,
    deadline: Duration,
    signs: Arc<Signs>,
}

impl Stack {
    /// A run with that seed.
    pub fn new(seed: u64) -> Self {
        let replay = "cargo test --test simulation".to_owned();
        Self { seed, replay, harsh: Harsh::default(), wrong_clocks: false }
    }

    /// Sets the command that replays a run with `ZAEL_SIM_SEED` set.
    #[must_use]
    pub fn replayed_by(mut self, command: &str) -> Self {
        command.clone_into(&mut self.replay);
        self
    }

    /// Makes clocks jump, by minutes or a year, on a table whose responses have a date.
    #[must_use]
    pub fn with_wrong_clocks(mut self) -> Self {
        self.wrong_clocks = true;
        self
    }

    /// Allows these faults in some of the runs.
    #[must_use]
    pub fn harsh(mut self, harsh: Harsh) -> Self {
        self.harsh = harsh;
        self
    }

    /// Runs the simulation.
    ///
    /// # Panics
    ///
    /// If a rule is violated, with the command that replays the run.
    pub fn run(
        &self,
        build: impl Fn(Arc<dyn Table>, ClientId) -> Arc<dyn Store> + Send + Sync + 'static,
    ) -> StackReport {
        let mut rng = Rng::with_seed(self.seed ^ 0x5EED_57AC);
        let mut scene = Scene::draw(&mut rng);
        scene.draw_harsh(&mut rng, self.harsh);
        if self.wrong_clocks {
            scene.use_dates(self.seed);
        }
        // In some runs no call fails, so that the consumption can be checked exactly.
        if rng.u32(..4) == 0 {
            scene.spare_calls();
        }
        let place = |(at, bucket): (usize, &super::scene::Place)| Place {
            id: format!("e{at}"),
            parent: bucket.parent,
            versions: (0..3).map(|_| draw_limit_list(&mut rng)).collect(),
        };
        let entities: Vec<Place> = scene.buckets.iter().enumerate().map(place).collect();
        let (seed, ahead_ms) = (rng.u64(..), scene.ahead_ms());
        let (report, violation) = World::play(seed, ahead_ms, async move |world| {
            let stage = Arc::new(Stage {
                world,
                scene,
                build: Box::new(build),
                rng: Mutex::new(rng),
                next_client: Mutex::new(1),
                is_calm: AtomicBool::new(false),
                report: Mutex::default(),
                kept: Mutex::default(),
                used: Mutex::default(),
                entities,
                unsure: Mutex::default(),
            });
            Box::pin(play(&stage)).await;
            let report = StackReport {
                digest: stage.world.table.digest(),
                steps: stage.world.auditor.steps(),
                excuses: stage.world.auditor.excuses(),
                totals: stage.world.table.totals(),
                ..locked(&stage.report).clone()
            };
            (report, stage.world.violation())
        });
        if let Some(violation) = violation {
            panic!(
                "seed {}: {violation}\n\nreplay: ZAEL_SIM_SEED={} {}",
                self.seed, self.seed, self.replay
            );
        }
        report
    }
}

impl Stage {
    fn draw<T>(&self, from: impl FnOnce(&mut Rng) -> T) -> T {
        from(&mut locked(&self.rng))
    }

    fn report_violation(&self, what: impl Into<String>) {
        self.world.auditor.report_violation(what);
    }

    async fn pause(&self) {
        let wait = self.draw(|rng| match rng.u32(..20) {
            _ if self.scene.rush => rng.u64(..200_000),
            0..=10 => rng.u64(..60_000),
            11..=17 => rng.u64(..2_000_000),
            _ => rng.u64(..20_000_000),
        });
        self.world.time.sleep(Duration::from_micros(wait)).await;
    }

    /// Starts a client with its own limiter. `None` if the faults of the table prevent that.
    async fn client(&self, skew_us: i64) -> Option<Arc<Client>> {
        let id = {
            let mut next = locked(&self.next_client);
            *next += 1;
            *next - 1
        };
        let table = self.scene.dated(self.world.table.for_client(id), &self.world.time);
        let table = Arc::new(table);
        let store = (self.build)(table, id);
        let signs: Arc<Signs> = Arc::default();
        let auditor = Arc::clone(&self.world.auditor);
        let watched = Watched::new(store, auditor, id, Arc::clone(&signs));
        let (offset, seed) = self.draw(|rng| (rng.i64(-skew_us..=skew_us), rng.u64(..)));
        let clock = Arc::new(ClientClock::new(Arc::clone(&self.world.time), skew_us, offset, 0));
        let deadline =
            Duration::from_millis(self.draw(|rng| [100, 1_000, 1_000, 5_000][rng.usize(..4)]));
        let cache_ttl = Duration::from_secs(self.draw(|rng| CACHE_TTLS[rng.usize(..3)]));
        let policy = [OnUnavailable::Block, OnUnavailable::Allow][self.draw(|rng| rng.usize(..2))];
        let store: Arc<dyn Store> = Arc::new(watched);
        let builder = RateLimiter::builder(store)
            .clock(Arc::clone(&clock) as Arc<dyn zae_limiter_core::Clock>)
            .entropy(Entropy::seeded(seed))
            .deadline(deadline)
            .cache_ttl(cache_ttl)
            .background(|work| drop(tokio::spawn(work)))
            .on_unavailable(policy);
        let limiter = builder.open().await.ok()?;
        Some(Arc::new(Client { id, limiter, clock, deadline, signs }))
    }

    fn bucket(&self, limiter: &RateLimiter, entity: &str) -> BucketKey {
        BucketKey {
            namespace: limiter.namespace_id().clone(),
            entity: EntityId::new(entity).expect("a valid name"),
            resource: ResourceName::new(RESOURCE).expect("a valid name"),
        }
    }
}

async fn play(stage: &Arc<Stage>) {
    if stage.scene.is_dated {
        stage.world.auditor.expect_dates(None);
    }
    let time = Arc::clone(&stage.world.time);
    let delay = stage.scene.faults.delay_us.clone();
    let calm = Faults { delay_us: delay, ..Faults::none() };
    stage.world.table.set_faults(calm.clone());
    let Some(admin) = stage.client(0).await else {
        return stage.report_violation("no limiter without faults");
    };
    for place in &stage.entities {
        if let Err(error) = set_up(stage, &admin, place).await {
            return stage.report_violation(format!("could not be set up without faults: {error}"));
        }
    }
    let mut running = Vec::new();
    for _ in 0..12 {
        running.extend(start(stage).await);
    }
    stage.world.table.set_faults(stage.scene.faults.clone());
    for at in 0..stage.scene.crashes.max(stage.scene.runtimes_end) {
        stage.pause().await;
        let whose = stage.draw(|rng| rng.usize(..running.len()));
        if at < stage.scene.runtimes_end {
            let (client, _): &(Arc<Client>, Vec<JoinHandle<()>>) = &running[whose];
            stage.world.table.end_runtime(client.id);
        } else if let Some(next) = start(stage).await {
            let (client, tasks) = std::mem::replace(&mut running[whose], next);
            stage.world.table.crash(client.id);
            stage.world.auditor.crashed(client.id);
            tasks.iter().for_each(JoinHandle::abort);
        }
    }
    let clients: Vec<_> = running.iter().map(|(client, _)| Arc::clone(client)).collect();
    let mut tasks: Vec<_> = running.into_iter().flat_map(|(_, tasks)| tasks).collect();
    let others = tasks.split_off(tasks.len() / 2);
    join(tasks).await;
    stage.world.table.set_faults(calm);
    stage.is_calm.store(true, Ordering::Relaxed);
    clients.iter().for_each(|client| client.clock.correct());
    join(others).await;
    time.sleep(CALM_MAX).await;
    let unended = stage.world.auditor.unended(u64::MAX);
    if !unended.is_empty() || !stage.world.auditor.is_quiet() {
        return stage.report_violation(format!(
            "{CALM_MAX:?} after the last call, calls still wait: {unended:#?}"
        ));
    }
    time.sleep(Duration::from_micros(2 * stage.scene.uncorrected_us())).await;
    checks::check_kept(stage, &admin);
    // Waits until every limiter's cache has expired.
    time.sleep(Duration::from_secs(CACHE_TTL_MAX)).await;
    let everybody: Vec<_> = clients.into_iter().chain([admin]).collect();
    checks::check_limits(stage, &everybody).await;
}

async fn set_up(stage: &Stage, admin: &Client, place: &Place) -> Result<(), Error> {
    let mut create = admin.limiter.create_entity(&place.id);
    if let Some(parent) = place.parent {
        create = create.parent(&stage.entities[parent].id).cascade();
    }
    create.await?;
    admin.limiter.set_limits(&place.id, Some(RESOURCE), place.versions[0].clone()).await?;
    Ok(())
}

async fn start(stage: &Arc<Stage>) -> Option<(Arc<Client>, Vec<JoinHandle<()>>)> {
    let client = stage.client(stage.scene.skew_us).await?;
    let tasks = stage.draw(|rng| rng.u32(1..=3));
    let task = |_| {
        let (stage, client) = (Arc::clone(stage), Arc::clone(&client));
        tokio::spawn(async move {
            for _ in 0..14 {
                stage.pause().await;
                client.call(&stage).await;
            }
        })
    };
    let tasks = (0..tasks).map(task).collect();
    Some((client, tasks))
}
