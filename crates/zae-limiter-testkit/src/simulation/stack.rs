//! The whole stack: clients are limiters, on stores that the auditor watches.
//!
//! Beneath the limiters everything is checked as ever, call by call of the store. Above them:
//!
//! - every call ends within its deadline, whatever the table does;
//! - what a commit has confirmed is in the bucket's net consumption;
//! - when the faults stop, every limiter serves again, breakers included.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use fastrand::Rng;
use tokio::task::JoinHandle;
use zae_limiter_core::{
    BucketKey, EntityId, Entropy, Error, Lease, Limit, OnUnavailable, RateLimiter, ResourceName,
    Store,
};
use zae_limiter_schema::{Item, Table, Value, bucket_partition};

use super::scene::{Scene, draw_limit_list};
use super::watched::Watched;
use super::workload::{CALM_MAX, join, locked};
use super::{ClientClock, Excuses, Harsh, World};
use crate::table::{ClientId, Faults, Totals};

const RESOURCE: &str = "gpt-4";
/// How much later than its deadline a call may end: the steps after the timer take no time.
const LATE_MAX_US: u64 = 1_000;

/// One run of limiters.
#[derive(Clone, Debug)]
pub struct Stack {
    seed: u64,
    replay: String,
    harsh: Harsh,
}

/// What a run of limiters came to.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StackReport {
    /// The same for the same seed.
    pub digest: u64,
    /// Acquires that gave a lease that holds something.
    pub admitted: u64,
    /// Acquires that were refused.
    pub refused: u64,
    /// Calls that passed because the store did not answer.
    pub degraded: u64,
    /// Calls that failed because the store did not answer.
    pub unavailable: u64,
    /// Leases whose commit was confirmed.
    pub committed: u64,
    /// Changes of buckets that the auditor looked at.
    pub steps: u64,
    /// How often the auditor could not say exactly what must be.
    pub excuses: Excuses,
    /// What the table was asked.
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
    entities: Vec<Place>,
}

struct Place {
    id: String,
    parent: Option<usize>,
    limits: Vec<Limit>,
}

struct Client {
    id: ClientId,
    limiter: RateLimiter,
    clock: Arc<ClientClock>,
    deadline: Duration,
}

impl Stack {
    /// A run from a seed.
    pub fn new(seed: u64) -> Self {
        let replay = "cargo test --test simulation".to_owned();
        Self { seed, replay, harsh: Harsh::default() }
    }

    /// The command that replays a run, once `ZAEL_SIM_SEED` says which.
    #[must_use]
    pub fn replayed_by(mut self, command: &str) -> Self {
        command.clone_into(&mut self.replay);
        self
    }

    /// What else goes wrong, in some of the runs.
    #[must_use]
    pub fn harsh(mut self, harsh: Harsh) -> Self {
        self.harsh = harsh;
        self
    }

    /// Plays it.
    ///
    /// # Panics
    ///
    /// When something is violated, with the command that replays the run.
    pub fn run(
        &self,
        build: impl Fn(Arc<dyn Table>, ClientId) -> Arc<dyn Store> + Send + Sync + 'static,
    ) -> StackReport {
        let mut rng = Rng::with_seed(self.seed ^ 0x5EED_57AC);
        let mut scene = Scene::draw(&mut rng);
        scene.draw_harsh(&mut rng, self.harsh);
        let place = |(at, bucket): (usize, &super::scene::Place)| Place {
            id: format!("e{at}"),
            parent: bucket.parent,
            limits: draw_limit_list(&mut rng),
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
                entities,
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

    fn accuse(&self, what: impl Into<String>) {
        self.world.auditor.accuse(what);
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

    /// A limiter of its own; `None` when the table did not let it start.
    async fn client(&self, skew_us: i64) -> Option<Arc<Client>> {
        let id = {
            let mut next = locked(&self.next_client);
            *next += 1;
            *next - 1
        };
        let table = Arc::new(self.world.table.for_client(id));
        let store = (self.build)(table, id);
        let watched = Watched::new(store, Arc::clone(&self.world.auditor), id);
        let (offset, seed) = self.draw(|rng| (rng.i64(-skew_us..=skew_us), rng.u64(..)));
        let clock = Arc::new(ClientClock::new(Arc::clone(&self.world.time), skew_us, offset, 0));
        let deadline =
            Duration::from_millis(self.draw(|rng| [100, 1_000, 1_000, 5_000][rng.usize(..4)]));
        let cache_ttl = Duration::from_secs(self.draw(|rng| [0, 2, 60][rng.usize(..3)]));
        let policy = [OnUnavailable::Block, OnUnavailable::Allow][self.draw(|rng| rng.usize(..2))];
        let store: Arc<dyn Store> = Arc::new(watched);
        let builder = RateLimiter::builder(store)
            .clock(Arc::clone(&clock) as Arc<dyn zae_limiter_core::Clock>)
            .entropy(Entropy::seeded(seed))
            .deadline(deadline)
            .cache_ttl(cache_ttl)
            .on_unavailable(policy);
        let limiter = builder.open().await.ok()?;
        Some(Arc::new(Client { id, limiter, clock, deadline }))
    }

    /// Sees to it that a call ends in time.
    async fn in_time<T>(&self, what: &str, most: Duration, work: impl IntoFuture<Output = T>) -> T {
        let began_us = self.world.time.now_us();
        let done = work.into_future().await;
        let took_us = self.world.time.now_us() - began_us;
        let most_us = u64::try_from(most.as_micros()).unwrap_or(u64::MAX / 2) + LATE_MAX_US;
        if took_us > most_us {
            self.accuse(format!("{what} took {took_us} us, its deadline is {most:?}"));
        }
        done
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
    let time = Arc::clone(&stage.world.time);
    let delay = stage.scene.faults.delay_us.clone();
    let calm = Faults { delay_us: delay, ..Faults::none() };
    stage.world.table.set_faults(calm.clone());
    let Some(admin) = stage.client(0).await else { return stage.accuse("no limiter in peace") };
    for place in &stage.entities {
        if let Err(error) = set_up(stage, &admin, place).await {
            return stage.accuse(format!("could not be set up in peace: {error}"));
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
        return stage.accuse(format!("{CALM_MAX:?} after the last call: {unended:#?}"));
    }
    time.sleep(Duration::from_micros(2 * stage.scene.jump_us.unsigned_abs())).await;
    check_kept(stage, &admin);
    for client in clients.iter().chain([&admin]) {
        check_service(stage, client).await;
    }
}

async fn set_up(stage: &Stage, admin: &Client, place: &Place) -> Result<(), Error> {
    let mut create = admin.limiter.create_entity(&place.id);
    if let Some(parent) = place.parent {
        create = create.parent(&stage.entities[parent].id).cascade();
    }
    create.await?;
    admin.limiter.set_limits(&place.id, Some(RESOURCE), place.limits.clone()).await?;
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

impl Client {
    fn disturb_clock(&self, stage: &Stage) {
        if stage.is_calm.load(Ordering::Relaxed) {
            return;
        }
        let (skew_us, jump_us) = (stage.scene.skew_us, stage.scene.jump_us);
        match stage.draw(|rng| rng.u32(..60)) {
            0..=2 => self.clock.set_offset(stage.draw(|rng| rng.i64(-skew_us..=skew_us))),
            3..=12 => self.clock.jump(0),
            13 if jump_us > 0 => {
                self.clock.jump(if stage.draw(Rng::bool) { jump_us } else { -jump_us });
            }
            _ => {}
        }
    }

    async fn call(&self, stage: &Stage) {
        self.disturb_clock(stage);
        let place = &stage.entities[stage.draw(|rng| rng.usize(..stage.entities.len()))];
        if stage.draw(|rng| rng.f64()) < stage.scene.config_changes {
            // It may fail, and is then set or not.
            let _ = self.limiter.set_limits(&place.id, Some(RESOURCE), place.limits.clone()).await;
            return;
        }
        let names: Vec<(&str, u64)> = stage.draw(|rng| {
            let is_post_paid = rng.f64() < stage.scene.post_paid;
            let first = rng.usize(..place.limits.len());
            let mut names = Vec::new();
            for (at, limit) in place.limits.iter().enumerate() {
                if at == first || rng.u32(..4) > 0 {
                    let most = if is_post_paid { 0 } else { (limit.capacity / 4).max(1) };
                    names.push((limit.name.as_str(), rng.u64(0..=most)));
                }
            }
            names
        });
        let mut acquire = self.limiter.acquire(&place.id, RESOURCE);
        for (name, amount) in &names {
            acquire = acquire.take(name, *amount);
        }
        let acquired = stage.in_time("acquire", self.deadline, acquire).await;
        let lease = match acquired {
            Ok(lease) => lease,
            Err(error) => return stage.note_error(&error),
        };
        {
            let mut report = locked(&stage.report);
            *if lease.is_degraded() { &mut report.degraded } else { &mut report.admitted } += 1;
        }
        self.use_lease(stage, &place.id, lease, &names).await;
    }

    async fn use_lease(
        &self,
        stage: &Stage,
        entity: &str,
        mut lease: Lease,
        names: &[(&str, u64)],
    ) {
        if stage.scene.long_leases && stage.draw(|rng| rng.u32(..8)) == 0 {
            let wait = stage.draw(|rng| rng.u64(60..48 * 3_600));
            stage.world.time.sleep(Duration::from_secs(wait)).await;
        } else if stage.draw(Rng::bool) {
            stage.pause().await;
        }
        for (name, amount) in names {
            let (choice, by) = stage.draw(|rng| (rng.u32(..6), rng.u64(..=amount + 3)));
            // Giving back more than is held is an error that changes nothing.
            let _ = match choice {
                0 => lease.settle(name, by),
                1 => lease.release(name, by.min(*amount)),
                2 => lease.adjust(name, i64::try_from(by).unwrap_or(0)),
                3 if by < 3 => {
                    match stage.in_time("consume", self.deadline, lease.consume(name, by)).await {
                        Ok(()) => Ok(()),
                        Err(error) => {
                            stage.note_error(&error);
                            Ok(())
                        }
                    }
                }
                4 => {
                    let flushed = stage.in_time("flush", self.deadline, lease.flush()).await;
                    if let Err(error) = flushed {
                        stage.note_error(&error);
                    }
                    Ok(())
                }
                _ => Ok(()),
            };
        }
        // No lease is dropped: the limiter gives it back on a thread of its own, outside of virtual time.
        match stage.draw(|rng| rng.u32(..5)) {
            0 | 1 => {
                let done = stage.in_time("rollback", self.deadline, lease.rollback()).await;
                if let Err(error) = done {
                    stage.note_error(&error);
                }
            }
            _ => {
                let held: Vec<_> =
                    names.iter().map(|(name, _)| (*name, lease.held(name))).collect();
                match stage.in_time("commit", self.deadline, lease.commit()).await {
                    Ok(()) if !lease.is_degraded() => {
                        locked(&stage.report).committed += 1;
                        let mut kept = locked(&stage.kept);
                        for (name, held) in held {
                            let key = (entity.to_owned(), name.to_owned());
                            *kept.entry(key).or_default() += held.unwrap_or(0);
                        }
                    }
                    Ok(()) => {}
                    Err(error) => stage.note_error(&error),
                }
            }
        }
    }
}

impl Stage {
    fn note_error(&self, error: &Error) {
        match error {
            Error::Exceeded(_) | Error::ExceedsCapacity(_) => locked(&self.report).refused += 1,
            Error::Unavailable { .. } => locked(&self.report).unavailable += 1,
            other => self.accuse(format!("an error that nobody can explain: {other:?}")),
        }
    }
}

/// What commits have confirmed is in the buckets.
fn check_kept(stage: &Stage, admin: &Client) {
    let items = stage.world.table.items();
    let count = |item: &Item, limit: &str| {
        item.get(&format!("b_{limit}_tc")).and_then(Value::as_i64).unwrap_or(0)
    };
    for ((entity, limit), kept) in &*locked(&stage.kept) {
        let bucket = stage.bucket(&admin.limiter, entity);
        let partitions: Vec<String> =
            (0..64).map(|shard| bucket_partition(&bucket, shard)).collect();
        let is_of = |item: &&Item| {
            let pk = item.get("PK").and_then(Value::as_str);
            pk.is_some_and(|pk| partitions.iter().any(|one| one == pk))
        };
        let consumed: i64 = items.iter().filter(is_of).map(|item| count(item, limit)).sum();
        if consumed < kept * 1_000 {
            stage.accuse(format!(
                "{entity} {limit}: commits have confirmed {kept} tokens, the bucket has counted \
                 {consumed} millitokens"
            ));
        }
    }
}

/// A limiter serves again: it admits, or says when it will, and then does.
async fn check_service(stage: &Stage, client: &Client) {
    // A breaker that is open notices with the next calls that the store is back.
    for _ in 0..3 {
        let place = &stage.entities[0];
        let _ = client.limiter.acquire(&place.id, RESOURCE).take(&place.limits[0].name, 0).await;
        stage.world.time.sleep(Duration::from_secs(5)).await;
    }
    let place = &stage.entities[stage.draw(|rng| rng.usize(..stage.entities.len()))];
    let limit = &place.limits[0].name;
    for _ in 0..20 {
        match client.limiter.acquire(&place.id, RESOURCE).take(limit, 1).await {
            Ok(mut lease) if !lease.is_degraded() => {
                let _ = lease.commit().await;
                return;
            }
            Err(Error::Exceeded(refusal)) => {
                stage.world.time.sleep(refusal.retry_after()).await;
            }
            other => {
                let other = other.map(|_| "a degraded lease");
                return stage.accuse(format!("no service in peace: {other:?}"));
            }
        }
    }
    stage.accuse(format!("{} {limit}: refused twenty times in peace", place.id));
}
