//! Usage records equal the consumption that the buckets count. Many clients run against a simulated table. Up to four
//! daemons and a function follow its stream, which has every change of the table: of buckets, usage and checkpoints.
//! Daemons crash and stop at any moment, calls are slow, hang, fail and lose their replies, stream shards end and
//! split, iterators expire, clocks differ.
//!
//! `ZAEL_SIM_SEEDS` sets the number of seeds (4), `ZAEL_SIM_BASE` the first one (0), and `ZAEL_SIM_SEED` runs only one.

#![allow(clippy::unwrap_used, reason = "a test says what is wrong by panicking")]

mod common;

use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Duration;

use common::ledger::{HARSH, Sent, booked, ledger, number_of, run_clients};
use common::play::{FakeStream, Play, Stored};
use fastrand::Rng;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use zae_limiter_aggregator::daemon::{Notice, Until};
use zae_limiter_core::UsageKey;
use zae_limiter_testkit::{Companion, Seeds, SimTable, Simulation, World};

const REPLAY: &str =
    "cargo test -p zae-limiter-aggregator --test differential_daemons -- --nocapture";
/// Seeds that have found a defect.
const PINNED: &[u64] = &[1_812_902_655];
const DAEMONS_MAX: usize = 4;
/// How far a daemon's clock may lag. The auditor knows how far ahead the clients' clocks are, and no daemon is further.
const LAG_US: i64 = 120_000_000;

/// An open stream shard. It has the items whose number leaves this rest.
#[derive(Clone, Debug)]
struct Leaf {
    shard: String,
    modulus: u64,
    rest: u64,
}

/// Brings the changes of the table into the stream.
#[derive(Debug, Default)]
struct Router {
    leaves: Vec<Leaf>,
    shards: u32,
    all: Vec<Sent>,
}

impl Router {
    fn add(&mut self, stream: &FakeStream, parent: Option<&str>, modulus: u64, rest: u64) {
        self.shards += 1;
        let shard = format!("{:03}", self.shards);
        stream.split(parent, &shard);
        self.leaves.push(Leaf { shard, modulus, rest });
    }

    fn collect(&mut self, stream: &FakeStream, table: &SimTable) {
        for changed in table.take_changes() {
            let sent = Sent::new(1 + self.all.len() as u64, changed);
            let number = number_of(&sent.changed.key);
            let leaf = self.leaves.iter().find(|leaf| number % leaf.modulus == leaf.rest).unwrap();
            stream.push(&leaf.shard, common::record(&sent.changed, sent.number, sent.at));
            self.all.push(sent);
        }
    }

    /// Ends a stream shard. One or two others continue it.
    fn end(&mut self, stream: &FakeStream, leaf: usize, splits: bool) {
        let Leaf { shard, modulus, rest } = self.leaves.swap_remove(leaf);
        match splits {
            true => {
                self.add(stream, Some(&shard), 2 * modulus, rest);
                self.add(stream, Some(&shard), 2 * modulus, rest + modulus);
            }
            false => self.add(stream, Some(&shard), modulus, rest),
        }
    }
}

#[derive(Debug)]
struct Running {
    client: u32,
    stop: oneshot::Sender<()>,
    task: JoinHandle<()>,
}

/// What happened in a run.
#[derive(Clone, Copy, Debug, Default)]
struct Tally {
    changes: u64,
    usage_records: u64,
    takeovers: u64,
    crashes: u64,
    stops: u64,
    hangs: u64,
    ended: u64,
    invocations: u64,
}

struct Scene {
    play: Play,
    router: Router,
    rng: Rng,
    running: Vec<Running>,
    /// How many records of each stream shard the function has processed.
    delivered: BTreeMap<String, usize>,
    tally: Tally,
}

impl Scene {
    fn collect(&mut self) {
        self.router.collect(&self.play.stream, &self.play.world.table);
    }

    fn start(&mut self) {
        if self.running.len() >= DAEMONS_MAX {
            return;
        }
        self.play.clock_offset_us = self.rng.i64(-LAG_US..=0);
        let mut daemon = self.play.daemon();
        let (stop, stopped) = oneshot::channel();
        let task = tokio::spawn(async move {
            daemon.run(Until::Stopped, async { drop(stopped.await) }).await.unwrap();
        });
        self.running.push(Running { client: self.play.clients, stop, task });
    }

    fn take_one(&mut self) -> Option<Running> {
        let count = self.running.len();
        (count > 0).then(|| self.running.swap_remove(self.rng.usize(..count)))
    }

    fn crash(&mut self) {
        if let Some(one) = self.take_one() {
            self.play.world.table.crash(one.client);
            one.task.abort();
            self.tally.crashes += 1;
        }
    }

    fn end_stream_shard(&mut self) {
        let (leaf, splits) = (self.rng.usize(..self.router.leaves.len()), self.rng.bool());
        self.router.end(&self.play.stream, leaf, splits && self.router.leaves.len() < 6);
        self.tally.ended += 1;
    }

    /// The next batch of the function: some of what it has had already, and what follows. Lambda delivers each stream
    /// shard in order, and a parent before its children.
    fn next_batch(&mut self) -> Option<(String, usize, Vec<serde_json::Value>)> {
        let inside = self.play.stream.inside();
        let delivered = |name: &String| self.delivered.get(name).copied().unwrap_or_default();
        let is_next = |(_, shard): &(&String, &Stored)| {
            let mut parents = std::iter::successors(shard.parent.as_ref(), |parent| {
                inside.shards[*parent].parent.as_ref()
            });
            let is_over = |parent| delivered(parent) == inside.shards[parent].records.len();
            !shard.records.is_empty() && parents.all(is_over)
        };
        let next: Vec<_> = inside.shards.iter().filter(is_next).collect();
        if next.is_empty() {
            return None;
        }
        let (name, shard) = next[self.rng.usize(..next.len())];
        let from = self.rng.usize(..=delivered(name)).min(shard.records.len() - 1);
        let to = self.rng.usize(from + 1..=shard.records.len().min(from + 40));
        Some((name.clone(), to, shard.records[from..to].to_vec()))
    }
}

/// Daemons and a function beside the clients.
struct Crowd {
    seed: u64,
    scene: OnceLock<Mutex<Scene>>,
}

impl std::fmt::Debug for Crowd {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Crowd").field("seed", &self.seed).finish_non_exhaustive()
    }
}

impl Crowd {
    fn scene(&self, world: &Arc<World>) -> MutexGuard<'_, Scene> {
        let scene = self.scene.get_or_init(|| {
            world.table.take_changes();
            let mut rng = Rng::with_seed(self.seed);
            let play = Play::beside(Arc::clone(world), 10_000);
            {
                let mut inside = play.stream.inside();
                inside.page = rng.usize(1..=60);
                inside.names_the_last_record = rng.bool();
            }
            let mut router = Router::default();
            let roots = rng.u64(1..=3);
            (0..roots).for_each(|rest| router.add(&play.stream, None, roots, rest));
            let (running, delivered) = (Vec::new(), BTreeMap::new());
            let tally = Tally::default();
            Mutex::new(Scene { play, router, rng, running, delivered, tally })
        });
        scene.lock().unwrap()
    }

    async fn act(&self, world: &Arc<World>) {
        let drawn = {
            let mut scene = self.scene(world);
            scene.collect();
            scene.rng.u32(..100)
        };
        match drawn {
            0..=34 => self.scene(world).start(),
            35..=49 => self.scene(world).crash(),
            50..=59 => {
                let one = self.scene(world).take_one();
                if let Some(one) = one {
                    one.stop.send(()).unwrap();
                    one.task.await.unwrap();
                    self.scene(world).tally.stops += 1;
                }
            }
            60..=74 => self.scene(world).end_stream_shard(),
            75..=79 => {
                let seconds = {
                    let mut scene = self.scene(world);
                    scene.tally.hangs += 1;
                    scene.play.stream.inside().hangs = true;
                    scene.rng.u64(1..=30)
                };
                world.time.sleep(Duration::from_secs(seconds)).await;
                self.scene(world).play.stream.inside().hangs = false;
            }
            80..=92 => {
                let (function, batch) = {
                    let mut scene = self.scene(world);
                    (scene.play.function(), scene.next_batch())
                };
                let Some((shard, to, records)) = batch else { return };
                let report = function.process(records.iter().map(common::read).collect()).await;
                let mut scene = self.scene(world);
                scene.tally.invocations += 1;
                if report.failed.is_empty() {
                    let delivered = scene.delivered.entry(shard).or_default();
                    *delivered = to.max(*delivered);
                }
            }
            _ => {
                let scene = self.scene(world);
                let inside = &mut *scene.play.stream.inside();
                inside.oldest_iterator = inside.iterators + 1;
            }
        }
    }

    /// Everything that is left in the stream is booked, without faults.
    async fn finish(&self, world: &Arc<World>) {
        let mut daemon = {
            let mut scene = self.scene(world);
            scene.play.stream.inside().hangs = false;
            while !scene.running.is_empty() {
                scene.crash();
            }
            scene.collect();
            scene.play.clock_offset_us = 0;
            scene.play.daemon()
        };
        daemon.run(Until::Drained, std::future::pending()).await.unwrap();
        let mut scene = self.scene(world);
        let notices = std::mem::take(&mut *scene.play.notices.lock().unwrap());
        assert!(!notices.iter().any(|(_, notice)| matches!(notice, Notice::Missed(_))));
        let lost = notices.iter().filter(|(_, notice)| matches!(notice, Notice::Lost(_)));
        scene.tally.takeovers = lost.count() as u64;
        let (found, wanted) = (booked(&world.table), ledger(&scene.router.all));
        let is_wrong = |key: &&UsageKey| found.get(key) != wanted.get(key);
        for key in found.keys().chain(wanted.keys()).filter(is_wrong) {
            println!("{key:?}: {:?}, wanted {:?}", found.get(key), wanted.get(key));
        }
        assert!(found == wanted, "usage records differ from what the buckets count");
        scene.tally.changes = scene.router.all.len() as u64;
        scene.tally.usage_records = wanted.len() as u64;
    }
}

impl Companion for Crowd {
    fn beside(self: Arc<Self>, world: Arc<World>) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        drop(self.scene(&world));
        Box::pin(async move {
            loop {
                let pause = self.scene(&world).rng.u64(..6_000_000);
                world.time.sleep(Duration::from_micros(pause)).await;
                self.act(&world).await;
            }
        })
    }

    fn afterwards(self: Arc<Self>, world: Arc<World>) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        Box::pin(async move { self.finish(&world).await })
    }
}

fn play(seed: u64) -> Tally {
    let crowd = Arc::new(Crowd { seed, scene: OnceLock::new() });
    let simulation = Simulation::new(seed).harsh(HARSH).replayed_by(REPLAY);
    run_clients(simulation.with(Arc::clone(&crowd) as Arc<dyn Companion>), seed);
    let scene = crowd.scene.get().unwrap().lock().unwrap();
    scene.tally
}

#[test]
fn usage_records_equal_what_the_buckets_count_with_daemons_and_a_function() {
    let seeds = Seeds::from_env(4, REPLAY).with_pinned(PINNED);
    let mut sum = Tally::default();
    for one in seeds.play(play) {
        sum = Tally {
            changes: sum.changes + one.changes,
            usage_records: sum.usage_records + one.usage_records,
            takeovers: sum.takeovers + one.takeovers,
            crashes: sum.crashes + one.crashes,
            stops: sum.stops + one.stops,
            hangs: sum.hangs + one.hangs,
            ended: sum.ended + one.ended,
            invocations: sum.invocations + one.invocations,
        };
    }
    println!("{sum:?}");
    if !seeds.is_alone() {
        let Tally { usage_records, crashes, stops, ended, invocations, .. } = sum;
        let counts = [usage_records, sum.takeovers, crashes, stops, sum.hangs, ended, invocations];
        assert!(counts.iter().all(|count| *count > 0), "runs without these prove nothing: {sum:?}");
    }
}
