//! Up to four daemons and a function on one stream, in a world drawn from a seed: stream shards that split, end and
//! vanish, calls that are slow, fail, hang or lose their replies, daemons that stop or die at any moment, clocks that
//! differ, days without any daemon, and entities that are deleted.
//!
//! Every record must be booked once. One that is not must have left the stream, and a notice must name its time.
//! Usage of a deleted entity never comes back.
//! `ZAEL_SIM_SEEDS` sets the number of seeds (20), `ZAEL_SIM_BASE` the first one (0), and `ZAEL_SIM_SEED` runs only one.

#![allow(clippy::unwrap_used, reason = "a test says what is wrong by panicking")]

mod common;

use std::collections::BTreeMap;
use std::time::Duration;

use common::play::{Play, play_seed};
use fastrand::Rng;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use zae_limiter_aggregator::daemon::{Notice, Until};
use zae_limiter_core::{EntityId, NamespaceId, Scope, Timestamp};
use zae_limiter_schema::records::tombstone;
use zae_limiter_schema::{Item, ItemKey, Table, TableError, Value};
use zae_limiter_testkit::{Faults, Seeds};

const REPLAY: &str = "cargo test -p zae-limiter-aggregator --test daemon_simulation -- --nocapture";
/// Seeds that have found a defect.
const PINNED: &[u64] = &[1_812_902_401, 1_812_902_794, 1_812_903_132];
/// How long the stream keeps a record.
const RETENTION: Duration = Duration::from_secs(86_400);
/// The largest error of a daemon's clock.
const SKEW: Duration = Duration::from_secs(120);
const DAEMONS_MAX: usize = 4;

/// What happened in a run.
#[derive(Clone, Copy, Debug, Default)]
struct Tally {
    records: u64,
    /// Records that left the stream before they were booked.
    missing: u64,
    /// Notices of missed changes.
    notices: u64,
    /// Missing records that had left the stream when there was no checkpoint yet. Nobody can know of them.
    before_the_first: u64,
    /// Missing records whose notice names a stream shard that continues theirs, or that theirs continues.
    by_a_relative: u64,
    /// Notices whose time contains no missing record. They say what may be missing.
    groundless: u64,
    takeovers: u64,
    crashes: u64,
    stops: u64,
    hangs: u64,
    blackouts: u64,
    invocations: u64,
    /// Entities that were deleted.
    deleted: u64,
}

struct Running {
    client: u32,
    stop: oneshot::Sender<()>,
    task: JoinHandle<()>,
}

/// A record: its entity is its own, so that its usage record says whether it was booked.
struct Sent {
    entity: String,
    at: Timestamp,
    shard: String,
    is_deleted: bool,
}

struct Scene {
    play: Play,
    rng: Rng,
    running: Vec<Running>,
    sent: Vec<Sent>,
    /// When a stream shard was closed.
    closed: BTreeMap<String, Timestamp>,
    /// The stream shards that still take records.
    open: Vec<String>,
    /// The parent of each stream shard that has one.
    parents: BTreeMap<String, String>,
    shards: u32,
    /// When the stream first deleted anything after a daemon had written a checkpoint.
    known_from: Option<Timestamp>,
    tally: Tally,
}

impl Scene {
    fn new(seed: u64, play: Play) -> Self {
        let mut scene = Self {
            play,
            rng: Rng::with_seed(seed),
            running: Vec::new(),
            sent: Vec::new(),
            closed: BTreeMap::new(),
            open: Vec::new(),
            parents: BTreeMap::new(),
            shards: 0,
            known_from: None,
            tally: Tally::default(),
        };
        for _ in 0..scene.rng.u32(1..=4) {
            scene.add_shard(None);
        }
        scene.play.stream.inside().names_the_last_record = scene.rng.bool();
        if scene.rng.bool() {
            scene.play.stream.follow(&scene.play.world.table);
        }
        scene
    }

    fn add_shard(&mut self, parent: Option<&str>) {
        self.shards += 1;
        let name = format!("{:03}", self.shards);
        self.play.stream.split(parent, &name);
        if let Some(parent) = parent {
            self.parents.insert(name.clone(), parent.to_owned());
        }
        self.open.push(name);
    }

    fn change(&mut self) {
        for _ in 0..self.rng.u32(1..=12) {
            let shard = self.open[self.rng.usize(..self.open.len())].clone();
            let entity = format!("e{}", self.sent.len());
            self.play.change(&shard, &entity, 1);
            // Records have seconds.
            let at = self.play.world.time.now().as_millis().div_euclid(1_000) * 1_000;
            let at = Timestamp::from_millis(at);
            self.sent.push(Sent { entity, at, shard, is_deleted: false });
        }
    }

    /// Closes a stream shard. Its children take the records from then on.
    fn split(&mut self) {
        let parent = self.open.swap_remove(self.rng.usize(..self.open.len()));
        self.closed.insert(parent.clone(), self.play.world.time.now());
        let most = if self.open.len() < 4 { 2 } else { 1 };
        for _ in 0..self.rng.u32(1..=most) {
            self.add_shard(Some(&parent));
        }
    }

    /// Removes what is older than the stream keeps it.
    fn expire(&mut self) {
        let now = self.play.world.time.now();
        let is_checkpoint = |item: &Item| {
            item.get("SK").and_then(Value::as_str).is_some_and(|key| key.starts_with("#STREAM#"))
        };
        if self.known_from.is_none() && self.play.world.table.items().iter().any(is_checkpoint) {
            self.known_from = Some(now);
        }
        let is_old = |at: Timestamp| at.saturating_add(RETENTION) < now;
        let mut inside = self.play.stream.inside();
        inside.add_own_writes();
        for stored in inside.shards.values_mut() {
            stored.trimmed = stored.records.iter().filter(|record| is_old(time_of(record))).count();
        }
        let closed = &self.closed;
        inside.shards.retain(|name, _| !closed.get(name).is_some_and(|at| is_old(*at)));
    }

    fn start(&mut self) {
        if self.running.len() >= DAEMONS_MAX {
            return;
        }
        let skew = i64::try_from(SKEW.as_micros()).unwrap();
        self.play.clock_offset_us = self.rng.i64(-skew..=skew);
        let mut daemon = self.play.daemon();
        let (stop, stopped) = oneshot::channel();
        let task = tokio::spawn(async move {
            daemon.run(Until::Stopped, async { drop(stopped.await) }).await.unwrap();
        });
        self.running.push(Running { client: self.play.clients, stop, task });
    }

    async fn end(&mut self, crashes: bool) {
        if self.running.is_empty() {
            return;
        }
        let one = self.running.swap_remove(self.rng.usize(..self.running.len()));
        if crashes {
            self.play.world.table.crash(one.client);
            one.task.abort();
            self.tally.crashes += 1;
        } else {
            let before = self.play.world.time.now();
            one.stop.send(()).unwrap();
            one.task.await.unwrap();
            let took = self.play.world.time.now().millis_since(before);
            assert!(took <= 10_000, "stopping took {took} ms");
            self.tally.stops += 1;
        }
    }

    fn draw_faults(&mut self) {
        let mut some = |most: f64| if self.rng.bool() { self.rng.f64() * most } else { 0.0 };
        let faults = Faults {
            delay_us: 200..=20_000,
            slow: some(0.2),
            slow_us: 50_000..=3_000_000,
            lost_request: some(0.1),
            lost_answer: some(0.1),
            throttled: some(0.2),
            conflict: some(0.05),
            hung: some(0.1),
            ..Faults::none()
        };
        self.play.world.table.set_faults(faults);
    }

    async fn hang(&mut self) {
        self.tally.hangs += 1;
        if self.rng.bool() {
            self.play.stream.inside().hangs = true;
        } else {
            self.play.world.table.set_faults(Faults { hung: 1.0, ..Faults::delay(500) });
        }
        let seconds = self.rng.u64(1..=60);
        if self.rng.bool() {
            self.play.world.time.sleep(Duration::from_secs(seconds / 2)).await;
            let crashes = self.rng.bool();
            self.end(crashes).await;
        }
        self.play.world.time.sleep(Duration::from_secs(seconds)).await;
        self.play.stream.inside().hangs = false;
        self.draw_faults();
    }

    /// All daemons end, and the stream forgets what happens before one starts again.
    async fn black_out(&mut self) {
        self.tally.blackouts += 1;
        while !self.running.is_empty() {
            let crashes = self.rng.bool();
            self.end(crashes).await;
        }
        for _ in 0..self.rng.u32(1..=12) {
            let hours = self.rng.u64(..8);
            self.play.world.time.sleep(Duration::from_secs(hours * 3_600)).await;
            self.change();
            if self.rng.bool() {
                self.split();
            }
        }
        self.expire();
    }

    /// The function gets a piece of a stream shard, in any order with the daemons.
    async fn invoke(&mut self) {
        let drawn = {
            let inside = self.play.stream.inside();
            let named: Vec<_> =
                inside.shards.iter().filter(|(_, one)| one.trimmed < one.records.len()).collect();
            if named.is_empty() {
                return;
            }
            let (name, stored) = named[self.rng.usize(..named.len())];
            let from = self.rng.usize(stored.trimmed..stored.records.len());
            (name.clone(), from..self.rng.usize(from + 1..=stored.records.len()))
        };
        self.tally.invocations += 1;
        self.play.deliver(&drawn.0, drawn.1).await;
    }

    /// Deletes an entity as the store does: first its tombstone, then its usage.
    async fn delete(&mut self) {
        if self.sent.is_empty() {
            return;
        }
        // The last ones are those that the aggregators are busy with.
        let back = self.rng.usize(..self.sent.len().min(40));
        let at = self.sent.len() - 1 - back;
        let entity = EntityId::new(&self.sent[at].entity).unwrap();
        let scope = Scope::Entity(NamespaceId::new("abcdefghijk").unwrap(), entity.clone());
        let written = tombstone::write(&scope, self.play.world.time.now());
        self.insist(async |table| table.update(&written).await.map(drop)).await;
        let pk = tombstone::key(&scope).pk;
        let text = |item: &Item, name: &str| item[name].as_str().unwrap().to_owned();
        let items = self.play.world.table.items();
        let usage: Vec<ItemKey> = items
            .iter()
            .filter(|item| text(item, "PK") == pk && text(item, "SK").starts_with("#USAGE#"))
            .map(|item| ItemKey::new(&pk, text(item, "SK")))
            .collect();
        self.insist(async |table| table.delete(&usage).await.map(drop)).await;
        self.sent[at].is_deleted = true;
        self.tally.deleted += 1;
    }

    /// Makes a call until it has succeeded.
    async fn insist(&self, call: impl AsyncFn(&dyn Table) -> Result<(), TableError>) {
        let world = &self.play.world;
        loop {
            tokio::select! {
                biased;
                done = call(&world.table) => if done.is_ok() { return },
                () = world.time.sleep(Duration::from_secs(5)) => {}
            }
        }
    }

    async fn act(&mut self) {
        match self.rng.u32(..100) {
            0..=39 => self.change(),
            40..=49 => self.split(),
            50..=62 => self.start(),
            63..=68 => self.end(true).await,
            69..=73 => self.end(false).await,
            74..=80 => self.draw_faults(),
            81..=86 => self.hang().await,
            87..=88 => self.black_out().await,
            89..=91 => self.invoke().await,
            92..=94 => self.delete().await,
            _ => {
                let inside = &mut *self.play.stream.inside();
                inside.oldest_iterator = inside.iterators + 1;
            }
        }
        let pause = self.rng.u64(..20_000_000);
        self.play.world.time.sleep(Duration::from_micros(pause)).await;
        self.expire();
    }

    /// Without faults, everything that is left in the stream is booked.
    async fn finish(mut self) -> Tally {
        self.play.world.table.set_faults(Faults::delay(500));
        while !self.running.is_empty() {
            let crashes = self.rng.bool();
            self.end(crashes).await;
        }
        self.play.clock_offset_us = 0;
        self.play.drain().await;
        self.check()
    }

    /// Whether a stream shard is another one, or its child, or its child's child, and so on.
    fn continues(&self, shard: &str, other: &str) -> bool {
        let parent = |one: &&str| self.parents.get(*one).map(String::as_str);
        std::iter::successors(Some(shard), parent).any(|one| one == other)
    }

    fn check(self) -> Tally {
        let mut tally = self.tally;
        let is_rare =
            |notice: &Notice| !matches!(notice, Notice::Batch(_) | Notice::TransientError(_));
        let mut notices = self.play.notices.lock().unwrap();
        notices.retain(|(_, notice)| is_rare(notice));
        let mut times = Vec::new();
        for (_, notice) in &*notices {
            match notice {
                Notice::Missed(missed) => {
                    let before = missed.before.saturating_add(SKEW);
                    let after = missed.after.unwrap_or_default();
                    times.push((missed.shard.clone(), after..=before, false));
                }
                Notice::Lost(_) => tally.takeovers += 1,
                _ => {}
            }
        }
        for sent in &self.sent {
            tally.records += 1;
            let booked = self.play.booked(&sent.entity);
            assert!(booked == 0 || booked == 1, "a record was booked {booked} times");
            assert!(booked == 0 || !sent.is_deleted, "usage of a deleted entity has come back");
            if booked == 1 || sent.is_deleted {
                continue;
            }
            tally.missing += 1;
            if self.known_from.is_none_or(|at| sent.at.saturating_add(RETENTION) < at) {
                tally.before_the_first += 1;
                continue;
            }
            let mut named_by = None;
            for (shard, _, has_cause) in times.iter_mut().filter(|one| one.1.contains(&sent.at)) {
                if self.continues(shard, &sent.shard) || self.continues(&sent.shard, shard) {
                    *has_cause = true;
                    let is_itself = *shard == sent.shard;
                    named_by = named_by.max(Some(is_itself));
                }
            }
            tally.by_a_relative += u64::from(named_by == Some(false));
            assert!(
                named_by.is_some(),
                "nothing says that a record of {} at {:?} is missing: {notices:?}",
                sent.shard,
                sent.at
            );
        }
        tally.notices = times.len() as u64;
        tally.groundless = times.iter().filter(|(.., has_cause)| !*has_cause).count() as u64;
        tally
    }
}

fn time_of(record: &serde_json::Value) -> Timestamp {
    let seconds = record["dynamodb"]["ApproximateCreationDateTime"].as_i64().unwrap();
    Timestamp::from_millis(seconds * 1_000)
}

fn run(seed: u64) -> Tally {
    play_seed(seed, async move |play| {
        let mut scene = Scene::new(seed, play);
        scene.draw_faults();
        scene.start();
        for _ in 0..60 {
            scene.act().await;
        }
        scene.finish().await
    })
}

#[test]
fn every_record_is_booked_once_or_named_as_missing() {
    let seeds = Seeds::from_env(20, REPLAY).with_pinned(PINNED);
    let mut sum = Tally::default();
    for tally in seeds.play(run) {
        for (sum, one) in [
            (&mut sum.records, tally.records),
            (&mut sum.missing, tally.missing),
            (&mut sum.notices, tally.notices),
            (&mut sum.before_the_first, tally.before_the_first),
            (&mut sum.by_a_relative, tally.by_a_relative),
            (&mut sum.groundless, tally.groundless),
            (&mut sum.takeovers, tally.takeovers),
            (&mut sum.crashes, tally.crashes),
            (&mut sum.stops, tally.stops),
            (&mut sum.hangs, tally.hangs),
            (&mut sum.blackouts, tally.blackouts),
            (&mut sum.invocations, tally.invocations),
            (&mut sum.deleted, tally.deleted),
        ] {
            *sum += one;
        }
    }
    println!("{sum:?}");
    if !seeds.is_alone() {
        let counts = [
            sum.missing,
            sum.takeovers,
            sum.crashes,
            sum.stops,
            sum.hangs,
            sum.blackouts,
            sum.invocations,
            sum.deleted,
        ];
        assert!(counts.iter().all(|count| *count > 0), "runs without these prove nothing: {sum:?}");
    }
}
