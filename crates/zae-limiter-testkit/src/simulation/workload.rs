//! Runs the clients of a simulation: what they call, when they crash, and what is checked at the
//! end.

mod checks;

use std::collections::BTreeMap;
use std::fmt;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;
use std::time::Duration;

use fastrand::Rng;
use tokio::task::JoinHandle;
use zae_limiter_core::{
    Admission, BoxFuture, Clock, Key, Leg, LimitStatus, Plan, Settlement, Store, StoreError, Take,
    Target, TimeCheck, Timestamp,
};
use zae_limiter_schema::{ItemKey, Table, Value, bucket_partition};

use super::audit::{CallAmount, Ended, Excuses, Kind};
use super::original::Original;
use super::scene::{Scene, draw_amounts, draw_differences, draw_nothing, draw_payment};
use super::watched::{amounts_of, ended_of};
use super::{ClientClock, World, wrong_clocks};
use crate::table::{ClientId, Faults, Totals};

/// One run of a simulation. Its seed decides everything that happens.
#[derive(Clone, Debug)]
pub struct Simulation {
    seed: u64,
    clients: u32,
    calls: u32,
    replay: String,
    companion: Option<Arc<dyn Companion>>,
    originals: u32,
    harsh: Harsh,
    wrong_clocks: bool,
}

/// Faults that not every store can handle. By default they are off.
#[derive(Clone, Copy, Debug, Default)]
pub struct Harsh {
    /// Table calls that never return: the store needs a time limit for each.
    pub hung_calls: bool,
    /// Tasks that are dropped or panic, and runtimes that end.
    pub ended_tasks: bool,
    /// Buckets that are deleted while clients use them.
    pub deletions: bool,
}

/// Another program that uses the table next to the clients, such as the aggregator.
pub trait Companion: fmt::Debug + Send + Sync {
    /// Runs next to the clients. It is aborted when they have ended.
    fn beside(self: Arc<Self>, world: Arc<World>) -> Pin<Box<dyn Future<Output = ()> + Send>>;
    /// Runs after the clients have ended, without faults.
    fn afterwards(self: Arc<Self>, world: Arc<World>) -> Pin<Box<dyn Future<Output = ()> + Send>>;
}

/// The result of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// A hash of the run: the same for the same seed.
    pub digest: u64,
    /// Acquires that were admitted.
    pub admitted: u64,
    /// Acquires that were refused.
    pub refused: u64,
    /// Calls that failed.
    pub failed: u64,
    /// Calls that were dropped before their reply.
    pub cancelled: u64,
    /// Settlements that succeeded.
    pub settled: u64,
    /// Clients that crashed.
    pub crashed: u64,
    /// Tasks of the store that were dropped or panicked, and runtimes that ended.
    pub ended_tasks: u64,
    /// Deletions of buckets.
    pub deleted: u64,
    /// Writes to buckets that the auditor has checked.
    pub steps: u64,
    /// Tokens that clients of the original have made without earning them, in millitokens of all
    /// limits.
    pub made: i128,
    /// How often a client moved a refill time far ahead, and how often one was rewound.
    pub frozen: u64,
    /// See [`frozen`](Self::frozen).
    pub rewound: u64,
    /// How often the auditor could not check something exactly.
    pub excuses: Excuses,
    /// The table's calls and units.
    pub totals: Totals,
    /// The duration of the run in virtual time.
    pub took: Duration,
}

/// A store that can split and merge buckets on request, whether they are hot or not.
pub trait Reshard: Send + Sync {
    /// Splits a bucket if `more`, otherwise merges it.
    fn reshard<'a>(
        &'a self,
        target: &'a Target,
        more: bool,
        now: Timestamp,
    ) -> BoxFuture<'a, Result<(), StoreError>>;
}

/// A client's store, and its ability to split buckets.
type Built = (Arc<dyn Store>, Option<Arc<dyn Reshard>>);

/// Builds a client's store from its handle of the table and its number.
type Build = dyn Fn(Arc<dyn Table>, ClientId) -> Built + Send + Sync;

impl Simulation {
    /// A run of 20 to 24 clients.
    pub fn new(seed: u64) -> Self {
        let replay = "cargo test --test simulation".to_owned();
        Self {
            seed,
            clients: 20 + u32::try_from(seed % 5).unwrap_or(0),
            calls: 14,
            replay,
            companion: None,
            originals: 0,
            harsh: Harsh::default(),
            wrong_clocks: false,
        }
    }

    /// Makes clocks jump, by minutes or a year, on a table whose responses have a date. A client that does not check
    /// its clock moves refill times far ahead.
    #[must_use]
    pub fn with_wrong_clocks(mut self) -> Self {
        self.wrong_clocks = true;
        self
    }

    /// Sets the command that replays a run with `ZAEL_SIM_SEED` set.
    #[must_use]
    pub fn replayed_by(mut self, command: &str) -> Self {
        command.clone_into(&mut self.replay);
        self
    }

    /// Adds a companion.
    #[must_use]
    pub fn with(mut self, companion: Arc<dyn Companion>) -> Self {
        self.companion = Some(companion);
        self
    }

    /// Allows these faults in some of the runs.
    #[must_use]
    pub fn harsh(mut self, harsh: Harsh) -> Self {
        self.harsh = harsh;
        self
    }

    /// Adds clients with the behaviour of the Python original. Limits then do not change, because
    /// these clients use only the first ones.
    #[must_use]
    pub fn beside_originals(mut self, clients: u32) -> Self {
        self.originals = clients;
        self
    }

    /// Sets how many calls each task of a client makes.
    #[must_use]
    pub fn calls(mut self, calls: u32) -> Self {
        self.calls = calls;
        self
    }

    /// Runs the simulation.
    ///
    /// # Panics
    ///
    /// If an invariant is violated, with the command that replays the run.
    pub fn run(
        &self,
        build: impl Fn(Arc<dyn Table>, ClientId) -> Arc<dyn Store> + Send + Sync + 'static,
    ) -> Report {
        self.play(Box::new(move |table, client| (build(table, client), None)))
    }

    /// Runs the simulation with clients that split and merge buckets all the time.
    ///
    /// # Panics
    ///
    /// As [`run`](Self::run) does.
    pub fn run_resharding<S: Store, D: Reshard + 'static>(
        &self,
        build: impl Fn(Arc<dyn Table>, ClientId) -> (S, D) + Send + Sync + 'static,
    ) -> Report {
        self.play(Box::new(move |table, client| {
            let (store, reshard) = build(table, client);
            (Arc::new(store), Some(Arc::new(reshard)))
        }))
    }

    fn play(&self, build: Box<Build>) -> Report {
        let mut rng = Rng::with_seed(self.seed);
        let mut scene = Scene::draw(&mut rng);
        scene.draw_harsh(&mut rng, self.harsh);
        if self.companion.is_some() {
            // A companion polls every few seconds: days of virtual time would take too long.
            scene.long_leases = false;
            scene.jump_us = 0;
        }
        if self.originals > 0 {
            scene.keep_limits();
        }
        if self.wrong_clocks {
            scene.use_dates(self.seed);
        }
        let (settings, ahead_ms) = (self.clone(), scene.ahead_ms());
        let (report, violation) = World::play(rng.u64(..), ahead_ms, async move |world| {
            let stage = Arc::new(Stage {
                world,
                scene,
                build,
                tally: Mutex::default(),
                rng: Mutex::new(rng),
                next_client: Mutex::new(1),
                is_calm: AtomicBool::new(false),
            });
            Box::pin(play(&stage, &settings)).await
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

#[derive(Debug, Default)]
struct Tally {
    admitted: u64,
    refused: u64,
    failed: u64,
    cancelled: u64,
    settled: u64,
    crashed: u64,
    deleted: u64,
}

/// State that all clients of a run share.
pub(super) struct Stage {
    pub(super) world: Arc<World>,
    pub(super) scene: Scene,
    build: Box<Build>,
    tally: Mutex<Tally>,
    rng: Mutex<Rng>,
    next_client: Mutex<ClientId>,
    /// Faults have stopped.
    pub(super) is_calm: AtomicBool,
}

pub(super) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Stage {
    pub(super) fn draw<T>(&self, from: impl FnOnce(&mut Rng) -> T) -> T {
        from(&mut locked(&self.rng))
    }

    fn next_id(&self) -> ClientId {
        let mut next = locked(&self.next_client);
        *next += 1;
        *next - 1
    }

    fn client(&self, skew_us: i64) -> Arc<Client> {
        let id = self.next_id();
        let table = self.scene.dated(self.world.table.for_client(id), &self.world.time);
        let table = Arc::new(table);
        let (offset, drift) = self.draw(|rng| {
            let drift = if skew_us == 0 { 0 } else { rng.i64(-200..=200) };
            (rng.i64(-skew_us..=skew_us), drift)
        });
        let clock = ClientClock::new(Arc::clone(&self.world.time), skew_us, offset, drift);
        let (store, reshard) = (self.build)(table, id);
        let (seen, jumped) = (Mutex::default(), Mutex::default());
        Arc::new(Client { id, store, reshard, clock, seen, jumped })
    }

    /// Whether a bucket has several shards.
    fn is_split(&self, target: &Target) -> bool {
        let first = ItemKey::new(bucket_partition(target.key(), 0), "#STATE");
        let count = self.world.table.item(&first);
        let count = count.and_then(|item| item.get("shard_count").and_then(Value::as_i64));
        count.is_some_and(|count| count > 1)
    }

    pub(super) async fn pause(&self) {
        let wait = self.draw(|rng| match rng.u32(..20) {
            _ if self.scene.rush => rng.u64(..200_000),
            0..=10 => rng.u64(..40_000),
            11..=17 => rng.u64(..1_500_000),
            18 => rng.u64(..15_000_000),
            _ => rng.u64(..120_000_000),
        });
        self.world.time.sleep(Duration::from_micros(wait)).await;
    }
}

/// A client: one process with its own store and clock.
struct Client {
    id: ClientId,
    store: Arc<dyn Store>,
    reshard: Option<Arc<dyn Reshard>>,
    clock: ClientClock,
    /// Its cache of the limits, by bucket.
    seen: Mutex<BTreeMap<usize, Seen>>,
    /// For how many more calls its clock is an hour off.
    jumped: Mutex<u32>,
}

/// The limits that a client has read.
#[derive(Clone, Copy, Debug)]
struct Seen {
    version: usize,
    /// When it read them: the true time, and the time by its own clock.
    at_us: u64,
    read_at: Timestamp,
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client").field("id", &self.id).finish_non_exhaustive()
    }
}

async fn play(stage: &Arc<Stage>, settings: &Simulation) -> (Report, Option<String>) {
    let time = Arc::clone(&stage.world.time);
    stage.world.table.set_faults(stage.scene.faults.clone());
    let world = || Arc::clone(&stage.world);
    let companion = settings.companion.clone();
    let beside = companion.clone().map(|companion| tokio::spawn(companion.beside(world())));
    let mut running: Vec<(Arc<Client>, Vec<JoinHandle<()>>)> = Vec::new();
    for _ in 0..settings.clients {
        running.push(start(stage, settings.calls));
    }
    if stage.scene.is_dated {
        let id = stage.next_id();
        stage.world.auditor.expect_dates(Some(id));
        let table = stage.world.table.for_client(id);
        tokio::spawn(wrong_clocks::freeze(Arc::clone(stage), table));
    }
    let originals: Vec<JoinHandle<()>> =
        (0..settings.originals).map(|_| start_original(stage, settings.calls)).collect();
    for at in 0..stage.scene.crashes.max(stage.scene.runtimes_end) {
        stage.pause().await;
        if stage.scene.sweeps {
            let late_s = stage.draw(|rng| rng.i64(0..stage.scene.sweep_late_s));
            stage.world.table.sweep(time.now().as_millis() / 1_000 - 2 - late_s);
        }
        if at < stage.scene.runtimes_end {
            let whose = stage.draw(|rng| rng.usize(..running.len()));
            stage.world.table.end_runtime(running[whose].0.id);
        }
        if at < stage.scene.crashes {
            let at = stage.draw(|rng| rng.usize(..running.len()));
            let (client, tasks) = std::mem::replace(&mut running[at], start(stage, settings.calls));
            crash(stage, &client, tasks);
        }
    }
    let clients: Vec<Arc<Client>> = running.iter().map(|(client, _)| Arc::clone(client)).collect();
    let mut tasks: Vec<_> = running.into_iter().flat_map(|(_, tasks)| tasks).collect();
    // The faults stop when half of the tasks are done. Then all calls in progress must end soon.
    let others = tasks.split_off(tasks.len() / 2);
    join(tasks).await;
    let delay = stage.scene.faults.delay_us.clone();
    stage.world.table.set_faults(Faults { delay_us: delay, ..Faults::none() });
    stage.is_calm.store(true, Ordering::Relaxed);
    clients.iter().for_each(|client| client.clock.correct());
    let calm_us = time.now_us();
    time.sleep(CALM_MAX).await;
    let unended = stage.world.auditor.unended(calm_us);
    if !unended.is_empty() {
        let what = format!("{CALM_MAX:?} after the last fault, calls still wait: {unended:#?}");
        stage.world.auditor.report_violation(what);
        return (report(stage), stage.world.violation());
    }
    join(others.into_iter().chain(originals)).await;
    if let (Some(beside), Some(companion)) = (beside, companion) {
        beside.abort();
        // It was aborted above, or it has panicked.
        if let Err(error) = beside.await
            && error.is_panic()
        {
            std::panic::resume_unwind(error.into_panic());
        }
        companion.afterwards(world()).await;
    }
    let done_us = time.now_us();
    while !stage.world.auditor.is_quiet() || stage.world.table.running_tasks() > 0 {
        time.sleep(Duration::from_millis(10)).await;
        if time.now_us() - done_us > u64::try_from(CALM_MAX.as_micros()).unwrap_or(u64::MAX) {
            let tasks = stage.world.table.running_tasks();
            let what = format!("{CALM_MAX:?} after the last call, {tasks} tasks still run");
            stage.world.auditor.report_violation(what);
            return (report(stage), stage.world.violation());
        }
    }
    // Waits until the times of clocks that were far ahead have passed: refill times, and times at
    // which limits were read.
    time.sleep(Duration::from_micros(2 * stage.scene.uncorrected_us())).await;
    // Sets the limits of all buckets again. A change of limits may have failed before it reached
    // its bucket. Such a bucket refills by its old limits, so the waits of refused calls are wrong.
    let last = stage.client(0);
    for bucket in 0..stage.scene.buckets.len() {
        let version = *locked(&stage.scene.buckets[bucket].current);
        last.reconfigure(stage, bucket, version).await;
    }
    for bucket in 0..stage.scene.buckets.len() {
        checks::check_liveness(stage, bucket).await;
        if settings.originals > 0 {
            checks::check_whole(stage, bucket).await;
        }
    }
    if stage.scene.deletions > 0.0 {
        for bucket in 0..stage.scene.buckets.len() {
            last.delete(stage, bucket).await;
        }
        checks::check_nothing_left(stage);
    }
    (report(stage), stage.world.violation())
}

/// The longest time that calls in progress may take after the faults have stopped.
pub(super) const CALM_MAX: Duration = Duration::from_secs(30);

pub(super) async fn join(tasks: impl IntoIterator<Item = JoinHandle<()>>) {
    for task in tasks {
        if let Err(error) = task.await
            && error.is_panic()
        {
            std::panic::resume_unwind(error.into_panic());
        }
    }
}

fn report(stage: &Stage) -> Report {
    let tally = locked(&stage.tally);
    let (frozen, rewound) = stage.world.auditor.frozen_and_rewound();
    Report {
        frozen,
        rewound,
        digest: stage.world.table.digest(),
        admitted: tally.admitted,
        refused: tally.refused,
        failed: tally.failed,
        cancelled: tally.cancelled,
        settled: tally.settled,
        crashed: tally.crashed,
        ended_tasks: stage.world.table.ended_tasks(),
        deleted: tally.deleted,
        steps: stage.world.auditor.steps(),
        made: stage.world.auditor.made(),
        excuses: stage.world.auditor.excuses(),
        totals: stage.world.table.totals(),
        took: Duration::from_micros(stage.world.time.now_us()),
    }
}

fn start(stage: &Arc<Stage>, calls: u32) -> (Arc<Client>, Vec<JoinHandle<()>>) {
    let client = stage.client(stage.scene.skew_us);
    let tasks = stage.draw(|rng| rng.u32(1..=3));
    let task = |_| {
        let (stage, client) = (Arc::clone(stage), Arc::clone(&client));
        tokio::spawn(async move {
            for _ in 0..calls {
                stage.pause().await;
                client.call(&stage).await;
            }
        })
    };
    let tasks = (0..tasks).map(task).collect();
    (client, tasks)
}

fn start_original(stage: &Arc<Stage>, calls: u32) -> JoinHandle<()> {
    let id = stage.next_id();
    stage.world.auditor.expect_original(id);
    let (stage, client) = (Arc::clone(stage), Original::new(stage, id));
    tokio::spawn(async move {
        for _ in 0..calls {
            stage.pause().await;
            client.call(&stage).await;
        }
    })
}

fn crash(stage: &Stage, client: &Client, tasks: Vec<JoinHandle<()>>) {
    // The table first: calls that the client makes while its tasks are dropped must have no effect.
    stage.world.table.crash(client.id);
    stage.world.auditor.crashed(client.id);
    tasks.iter().for_each(JoinHandle::abort);
    locked(&stage.tally).crashed += 1;
}

impl Client {
    /// The client's time, corrected as a limiter does it.
    fn now(&self) -> Timestamp {
        let now = self.clock.now();
        match self.store.check_time(now) {
            TimeCheck::Beyond(time) => time,
            TimeCheck::Unknown | TimeCheck::Within => now,
        }
    }

    async fn call(&self, stage: &Stage) {
        self.disturb_clock(stage);
        let bucket = stage.draw(|rng| rng.usize(..stage.scene.buckets.len()));
        if let Some(reshard) = &self.reshard
            && stage.draw(|rng| rng.u32(..4)) == 0
        {
            return self.reshard(stage, reshard.as_ref(), bucket).await;
        }
        let choice = stage.draw(|rng| rng.f64());
        if choice < stage.scene.config_changes {
            let version = stage.draw(|rng| rng.usize(..3));
            self.reconfigure(stage, bucket, version).await;
        } else if choice < stage.scene.config_changes + stage.scene.deletions {
            self.delete(stage, bucket).await;
        } else if choice > 0.97 {
            let keys = [stage.scene.buckets[bucket].key.clone()];
            let _ = self.store.peek(&keys, self.now()).await;
        } else {
            self.acquire(stage, bucket).await;
        }
    }

    /// Changes the client's clock now and then. It may be an hour off for a few calls.
    fn disturb_clock(&self, stage: &Stage) {
        if stage.is_calm.load(Ordering::Relaxed) {
            return;
        }
        let skew_us = stage.scene.skew_us;
        if stage.draw(|rng| rng.u32(..20)) == 0 {
            self.clock.set_offset(stage.draw(|rng| rng.i64(-skew_us..=skew_us)));
        }
        let jump_us = stage.scene.jump_us;
        let mut jumped = locked(&self.jumped);
        if *jumped > 0 {
            *jumped -= 1;
            if *jumped == 0 {
                self.clock.jump(0);
            }
        } else if jump_us > 0 && stage.draw(|rng| rng.u32(..40)) == 0 {
            *jumped = stage.draw(|rng| rng.u32(1..6));
            self.clock.jump(if stage.draw(Rng::bool) { jump_us } else { -jump_us });
        }
    }

    /// A bucket with the limits that this client has read, or reads now.
    fn target(&self, stage: &Stage, bucket: usize) -> Arc<Target> {
        const SEEN_FOR_US: u64 = 2_000_000;
        let now_us = stage.world.time.now_us();
        let cached = locked(&self.seen).get(&bucket).copied();
        let seen = match cached.filter(|seen| seen.at_us + SEEN_FOR_US >= now_us) {
            Some(seen) => seen,
            None => self.read_limits(stage, bucket),
        };
        let is_own = !stage.is_calm.load(Ordering::Relaxed)
            && stage.draw(|rng| rng.f64()) < stage.scene.own_limits;
        stage.scene.target(bucket, seen.version, (!is_own).then_some(seen.read_at))
    }

    /// Reads the present limits of a bucket.
    fn read_limits(&self, stage: &Stage, bucket: usize) -> Seen {
        let version = *locked(&stage.scene.buckets[bucket].current);
        let (at_us, read_at) = (stage.world.time.now_us(), self.now());
        let seen = Seen { version, at_us, read_at };
        locked(&self.seen).insert(bucket, seen);
        seen
    }

    fn plan(&self, stage: &Stage, bucket: usize, is_post_paid: bool) -> Plan {
        let levels = stage.draw(|rng| rng.usize(1..=3));
        let chain = stage.scene.chain(bucket, levels);
        let targets: Vec<_> = chain.iter().map(|at| self.target(stage, *at)).collect();
        let amounts = match is_post_paid {
            true => draw_nothing(&targets),
            false => stage.draw(|rng| draw_amounts(rng, &targets)),
        };
        let leg = |target: Arc<Target>| {
            let takes = amounts.iter().filter_map(|(limit, amount)| {
                let cell = target.limits().position(limit)?;
                Some(Take { cell, amount: *amount })
            });
            Leg { takes: takes.collect(), target: Arc::clone(&target) }
        };
        Plan { max_skew: None, now: self.now(), legs: targets.into_iter().map(leg).collect() }
    }

    async fn acquire(&self, stage: &Stage, bucket: usize) {
        let is_post_paid = stage.draw(|rng| rng.f64() < stage.scene.post_paid);
        let plan = self.plan(stage, bucket, is_post_paid);
        let patience = stage.draw(|rng| {
            (rng.f64() < stage.scene.cancels).then(|| Duration::from_micros(rng.u64(..30_000)))
        });
        let reply = self.call_acquire(stage, &plan, patience).await;
        let Some(Ok(Admission::Taken(taken))) = reply else { return };
        if !is_post_paid && stage.draw(|rng| rng.bool()) {
            return;
        }
        if stage.scene.long_leases && stage.draw(|rng| rng.u32(..8)) == 0 {
            let wait = stage.draw(|rng| rng.u64(60..48 * 3_600));
            stage.world.time.sleep(Duration::from_secs(wait)).await;
        }
        stage.pause().await;
        let settlements: Vec<Settlement> = plan
            .legs
            .iter()
            .zip(&taken)
            .map(|(leg, taken)| Settlement {
                target: Arc::clone(&leg.target),
                placement: taken.placement,
                differences: stage.draw(|rng| match is_post_paid {
                    true => draw_payment(rng, &leg.target, &leg.takes),
                    false => draw_differences(rng, &leg.takes),
                }),
            })
            .collect();
        self.settle(stage, &settlements).await;
    }

    async fn call_acquire(
        &self,
        stage: &Stage,
        plan: &Plan,
        patience: Option<Duration>,
    ) -> Option<Result<Admission, StoreError>> {
        let amounts = plan.legs.iter().flat_map(|leg| amounts_of(&leg.target, &leg.takes));
        let amounts: Vec<CallAmount> = amounts.collect();
        let buckets: Vec<&Target> = plan.legs.iter().map(|leg| &*leg.target).collect();
        let kind = Kind::Acquire { legs: plan.legs.len() };
        let auditor = &stage.world.auditor;
        let call = auditor.begin(self.id, kind, plan.now, &buckets, &amounts);
        let reply = within(stage, patience, self.store.acquire(plan)).await;
        let mut tally = locked(&stage.tally);
        let ended = match &reply {
            None => {
                tally.cancelled += 1;
                Ended::Cancelled
            }
            Some(Ok(Admission::Taken(_))) => {
                tally.admitted += 1;
                Ended::Done
            }
            Some(Ok(Admission::Refused(statuses))) => {
                tally.refused += 1;
                check_statuses(stage, plan, statuses);
                Ended::Refused
            }
            Some(Err(error)) => {
                tally.failed += 1;
                Ended::failed(error)
            }
        };
        auditor.end(self.id, call, ended);
        reply
    }

    async fn settle(&self, stage: &Stage, settlements: &[Settlement]) {
        let now = self.now();
        let amounts: Vec<CallAmount> =
            settlements.iter().flat_map(|one| amounts_of(&one.target, &one.differences)).collect();
        let buckets: Vec<&Target> = settlements.iter().map(|one| &*one.target).collect();
        let auditor = &stage.world.auditor;
        let call = auditor.begin(self.id, Kind::Settle, now, &buckets, &amounts);
        let patience = stage.draw(|rng| {
            (rng.f64() < stage.scene.cancels).then(|| Duration::from_micros(rng.u64(..30_000)))
        });
        let reply = within(stage, patience, self.store.settle(settlements, now)).await;
        let mut tally = locked(&stage.tally);
        tally.settled += u64::from(matches!(reply, Some(Ok(()))));
        auditor.end(self.id, call, ended_of(reply.as_ref()));
    }

    /// Mostly splits in the first half of a run, and mostly merges in the second.
    async fn reshard(&self, stage: &Stage, reshard: &dyn Reshard, bucket: usize) {
        let is_late = stage.world.time.now_us() > 30_000_000;
        let more = stage.draw(|rng| rng.u32(..4) > 0) != is_late;
        let target = self.target(stage, bucket);
        let now = self.now();
        let auditor = &stage.world.auditor;
        let call = auditor.begin(self.id, Kind::Reshard, now, &[&target], &[]);
        let reply = reshard.reshard(&target, more, now).await;
        auditor.end(self.id, call, ended_of(Some(&reply)));
    }

    async fn delete(&self, stage: &Stage, bucket: usize) {
        let target = self.target(stage, bucket);
        let auditor = &stage.world.auditor;
        let call = auditor.begin(self.id, Kind::Delete, self.now(), &[&target], &[]);
        let keys = [Key::Bucket(target.key().clone())];
        let reply = self.store.delete(&keys).await;
        locked(&stage.tally).deleted += u64::from(reply.is_ok());
        auditor.end(self.id, call, ended_of(Some(&reply)));
    }

    async fn reconfigure(&self, stage: &Stage, bucket: usize, version: usize) {
        *locked(&stage.scene.buckets[bucket].current) = version;
        self.read_limits(stage, bucket);
        let target = self.target(stage, bucket);
        let now = self.now();
        let auditor = &stage.world.auditor;
        let call = auditor.begin(self.id, Kind::Reconfigure, now, &[&target], &[]);
        let reply = self.store.reconfigure(&target, now).await;
        auditor.end(self.id, call, ended_of(Some(&reply)));
    }
}

/// A refusal has a status for every requested limit, and at least one of them is exceeded.
fn check_statuses(stage: &Stage, plan: &Plan, statuses: &[LimitStatus]) {
    let requested: usize = plan.legs.iter().map(|leg| leg.takes.len()).sum();
    let auditor = &stage.world.auditor;
    if statuses.len() != requested {
        let count = statuses.len();
        auditor.report_violation(format!(
            "{count} statuses for {requested} requested limits: {plan:#?}"
        ));
    }
    if !statuses.iter().any(|status| status.exceeded) {
        auditor.report_violation(format!("refused, but no limit is exceeded: {statuses:#?}"));
    }
    if statuses.iter().any(|status| status.exceeded == status.retry_after.is_zero()) {
        auditor.report_violation(format!(
            "a wait for a limit that is not exceeded, or the reverse: {statuses:#?}"
        ));
    }
}

/// The reply, or `None` if the caller drops the call after its `patience`.
pub(super) async fn within<T>(
    stage: &Stage,
    patience: Option<Duration>,
    call: impl Future<Output = T>,
) -> Option<T> {
    let mut call = pin!(call);
    let Some(patience) = patience else { return Some(call.await) };
    let mut over = stage.world.time.sleep(patience);
    poll_fn(move |context| match call.as_mut().poll(context) {
        Poll::Ready(value) => Poll::Ready(Some(value)),
        Poll::Pending => over.as_mut().poll(context).map(|()| None),
    })
    .await
}
