//! Usage records equal the consumption that the buckets count. Many clients run against a simulated
//! table, and an aggregator next to them. The aggregator crashes, and gets every batch up to three
//! times, in pieces, and out of step between the stream shards.
//!
//! `ZAEL_SIM_SEEDS` sets the number of seeds (6), `ZAEL_SIM_BASE` the first one (0), and
//! `ZAEL_SIM_SEED` runs only one. Even seeds run with buckets of one shard, odd ones with buckets
//! that are split and merged all the time.

#![allow(
    clippy::cast_possible_truncation,
    clippy::unwrap_used,
    reason = "a test says what is wrong by panicking"
)]

mod common;

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::ledger::{HARSH, Sent, booked, ledger, number_of, run_clients};
use fastrand::Rng;
use zae_limiter_aggregator::{Aggregator, Report, Settings};
use zae_limiter_core::BoxFuture;
use zae_limiter_schema::{
    BatchRead, Change, Consistency, Consumed, ItemKey, ParsedKey, Query, QueryOutput, Table,
    TableError, TableErrorKind, Task, Transacted, Update, Updated, parse_key,
};
use zae_limiter_testkit::{ClientClock, ClientId, Companion, Seeds, SimTable, Simulation, World};

const REPLAY: &str = "cargo test -p zae-limiter-aggregator --test differential -- --nocapture";
const STREAM_SHARDS: usize = 3;

/// A table that throttles all updates of some items, as DynamoDB does on a hot partition.
#[derive(Debug)]
struct PartlyThrottled {
    table: SimTable,
    refuses: Option<u64>,
}

impl Table for PartlyThrottled {
    fn update<'a>(&'a self, update: &'a Update) -> BoxFuture<'a, Result<Updated, TableError>> {
        if self.refuses.is_some_and(|refused| number_of(&update.key) % 3 == refused) {
            let error = TableError::new(TableErrorKind::PartitionThrottled, "throttled");
            return Box::pin(async { Err(error) });
        }
        self.table.update(update)
    }

    fn transact<'a>(
        &'a self,
        changes: &'a [Change],
    ) -> BoxFuture<'a, Result<Transacted, TableError>> {
        self.table.transact(changes)
    }

    fn read<'a>(
        &'a self,
        keys: &'a [ItemKey],
        consistency: Consistency,
    ) -> BoxFuture<'a, Result<BatchRead, TableError>> {
        self.table.read(keys, consistency)
    }

    fn query<'a>(&'a self, query: &'a Query) -> BoxFuture<'a, Result<QueryOutput, TableError>> {
        self.table.query(query)
    }

    fn delete<'a>(&'a self, keys: &'a [ItemKey]) -> BoxFuture<'a, Result<Consumed, TableError>> {
        self.table.delete(keys)
    }

    fn pause(&self, wait: Duration) -> BoxFuture<'_, ()> {
        self.table.pause(wait)
    }

    fn timeout(&self, limit: Duration) -> BoxFuture<'_, ()> {
        self.table.timeout(limit)
    }

    fn spawn(&self, task: Task) -> Result<(), Task> {
        self.table.spawn(task)
    }
}

#[derive(Debug, Default)]
struct Stream {
    queues: [VecDeque<Sent>; STREAM_SHARDS],
    delivered: Vec<Vec<Sent>>,
    all: Vec<Sent>,
    tally: Tally,
}

#[derive(Clone, Copy, Debug, Default)]
struct Tally {
    booked: u64,
    refilled: u64,
    again: u64,
    crashed: u64,
    failed: u64,
    /// Changes of shards other than shard 0.
    shards: u64,
}

impl Stream {
    fn collect(&mut self, table: &SimTable) {
        for changed in table.take_changes() {
            let number = 1 + self.all.len() as u64;
            let sent = Sent::stretched(number, changed);
            let queue = number_of(&sent.changed.key) % STREAM_SHARDS as u64;
            self.queues[queue as usize].push_back(sent.clone());
            self.all.push(sent);
        }
    }
}

#[derive(Debug)]
struct Pump {
    stream: Mutex<Stream>,
    next_client: Mutex<ClientId>,
    rng: Mutex<Rng>,
}

impl Pump {
    fn new(seed: u64) -> Self {
        Self {
            stream: Mutex::default(),
            next_client: Mutex::new(10_000),
            rng: Mutex::new(Rng::with_seed(seed)),
        }
    }

    fn draw<T>(&self, from: impl FnOnce(&mut Rng) -> T) -> T {
        from(&mut self.rng.lock().unwrap())
    }

    /// Starts an aggregator as a new client of the table.
    fn start(&self, world: &World, calm: bool) -> (ClientId, Aggregator) {
        let id = {
            let mut next = self.next_client.lock().unwrap();
            *next += 1;
            *next
        };
        let clock = ClientClock::new(Arc::clone(&world.time), 0, 0, 0);
        let refuses = self.draw(|rng| (!calm && rng.u32(..6) == 0).then(|| rng.u64(..3)));
        let table = Arc::new(PartlyThrottled { table: world.table.for_client(id), refuses });
        (id, Aggregator::new(table, Arc::new(clock), Settings::default()))
    }

    /// Delivers a batch, unless the process crashes in the middle of it.
    async fn deliver(
        &self,
        world: &World,
        batch: &[Sent],
        crash: Option<Duration>,
        calm: bool,
    ) -> Option<Report> {
        let (id, aggregator) = self.start(world, calm);
        let record =
            |sent: &Sent| common::read(&common::record(&sent.changed, sent.number, sent.at));
        let records: Vec<_> = batch.iter().map(record).collect();
        assert!(records.iter().all(Result::is_ok), "{records:?}");
        let report = match crash {
            None => Some(aggregator.process(records).await),
            Some(after) => tokio::select! {
                biased;
                report = aggregator.process(records) => Some(report),
                () = world.time.sleep(after) => None,
            },
        };
        let tally = &mut self.stream.lock().unwrap().tally;
        match &report {
            Some(report) => {
                tally.booked += report.snapshots_updated;
                tally.refilled += report.refills_written;
                tally.failed += report.failed.len() as u64;
            }
            None => {
                world.table.crash(id);
                tally.crashed += 1;
            }
        }
        report
    }

    /// Delivers a batch from the head of a stream shard. Its records stay until they are processed.
    async fn step(&self, world: &World, shard: usize, calm: bool) {
        let most = self.draw(|rng| rng.usize(1..=40));
        let batch: Vec<Sent> = {
            let stream = self.stream.lock().unwrap();
            stream.queues[shard].iter().take(most).cloned().collect()
        };
        if batch.is_empty() {
            return;
        }
        let crash = self.draw(|rng| {
            (!calm && rng.u32(..4) == 0).then(|| Duration::from_micros(rng.u64(..60_000)))
        });
        let Some(report) = self.deliver(world, &batch, crash, calm).await else { return };
        // Lambda delivers everything again from the first failed record on.
        let has_failed =
            |sent: &Sent| report.failed.contains(&common::sequence_number(sent.number));
        let failed = batch.iter().position(has_failed);
        {
            let mut stream = self.stream.lock().unwrap();
            let done = failed.unwrap_or(batch.len());
            stream.queues[shard].drain(..done);
            if done > 0 {
                stream.delivered.push(batch[..done].to_vec());
            }
        }
        for _ in 0..self.draw(|rng| rng.u32(..3)) {
            self.again(world, calm).await;
        }
    }

    /// Delivers a piece of an earlier batch again.
    async fn again(&self, world: &World, calm: bool) {
        let batch = {
            let mut stream = self.stream.lock().unwrap();
            stream.tally.again += 1;
            if stream.delivered.is_empty() {
                return;
            }
            let batch = self.draw(|rng| rng.usize(..stream.delivered.len()));
            stream.delivered[batch].clone()
        };
        let (from, to) = self.draw(|rng| {
            let from = rng.usize(..batch.len());
            (from, rng.usize(from + 1..=batch.len()))
        });
        let crash =
            self.draw(|rng| (!calm && rng.bool()).then(|| Duration::from_millis(rng.u64(..40))));
        self.deliver(world, &batch[from..to], crash, calm).await;
    }

    async fn follow(&self, world: &World, shard: usize) {
        loop {
            let pause = self.draw(|rng| rng.u64(..9_000_000));
            world.time.sleep(Duration::from_micros(pause)).await;
            self.stream.lock().unwrap().collect(&world.table);
            self.step(world, shard, false).await;
        }
    }
}

impl Companion for Pump {
    fn beside(self: Arc<Self>, world: Arc<World>) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        // From here on the table records its changes.
        world.table.take_changes();
        Box::pin(async move {
            tokio::join!(self.follow(&world, 0), self.follow(&world, 1), self.follow(&world, 2));
        })
    }

    fn afterwards(self: Arc<Self>, world: Arc<World>) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        Box::pin(async move {
            // Refills and bookings are changes as well, but consume nothing.
            self.stream.lock().unwrap().collect(&world.table);
            for shard in 0..STREAM_SHARDS {
                while !self.stream.lock().unwrap().queues[shard].is_empty() {
                    self.step(&world, shard, true).await;
                }
            }
            for _ in 0..5 {
                self.again(&world, true).await;
            }
            let stream = self.stream.lock().unwrap();
            assert_eq!(booked(&world.table), ledger(&stream.all));
        })
    }
}

fn play(seed: u64) -> (Tally, usize) {
    let pump = Arc::new(Pump::new(seed));
    let simulation = Simulation::new(seed).harsh(HARSH).replayed_by(REPLAY);
    let simulation = simulation.with(Arc::clone(&pump) as Arc<dyn Companion>);
    run_clients(simulation, seed);
    let stream = pump.stream.lock().unwrap();
    let is_further =
        |sent: &&Sent| matches!(parse_key(&sent.changed.key), Some(ParsedKey::Shard(_)));
    let shards = stream.all.iter().filter(is_further).count() as u64;
    (Tally { shards, ..stream.tally }, ledger(&stream.all).len())
}

/// Runs the even or the odd seeds, so that two tests share the seeds and run in parallel.
fn play_every_second(odd: bool) -> Option<Tally> {
    let seeds = Seeds::from_env(6, REPLAY).every_second(odd);
    let played = seeds.play(play);
    let mut sum = Tally::default();
    let mut records = 0;
    for (tally, usage) in &played {
        sum.booked += tally.booked;
        sum.refilled += tally.refilled;
        sum.again += tally.again;
        sum.crashed += tally.crashed;
        sum.failed += tally.failed;
        sum.shards += tally.shards;
        records += usage;
    }
    println!("{sum:?}, {records} usage records");
    if seeds.is_alone() || played.is_empty() {
        return None;
    }
    // Runs without any of these events would prove nothing.
    for (what, count) in [
        ("booked", sum.booked),
        ("refilled", sum.refilled),
        ("delivered again", sum.again),
        ("crashed", sum.crashed),
        ("failed", sum.failed),
    ] {
        assert!(count > 0, "nothing {what} in {} runs", played.len());
    }
    Some(sum)
}

#[test]
fn usage_records_equal_what_whole_buckets_count() {
    assert!(play_every_second(false).is_none_or(|sum| sum.shards == 0));
}

#[test]
fn usage_records_equal_what_split_buckets_count() {
    assert!(play_every_second(true).is_none_or(|sum| sum.shards > 0), "no bucket was split");
}
