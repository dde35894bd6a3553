//! Promise (docs/aggregator.md): what was deleted stays deleted, and use after a deletion counts. An entity is deleted
//! and used again many times while an aggregator lags behind, gets batches twice, in pieces, and its bucket shards in
//! any order.

#![allow(clippy::unwrap_used, reason = "a test says what is wrong by panicking")]

mod common;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use common::NOW;
use serde_json::Value as Json;
use zae_limiter_aggregator::{Aggregator, Settings};
use zae_limiter_core::{Clock, Entropy, Key, Limit, ManualClock, RateLimiter, Store, Window};
use zae_limiter_dynamodb::{DynamoOptions, DynamoStore};
use zae_limiter_schema::{ItemKey, ParsedKey, Table, Value, parse_key};
use zae_limiter_testkit::SimTable;

/// A small generator, the same for the same seed.
struct Dice(u64);

impl Dice {
    fn below(&mut self, below: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % below
    }

    fn pick(&mut self, below: u64) -> usize {
        usize::try_from(self.below(below)).unwrap()
    }
}

struct Given {
    table: SimTable,
    clock: Arc<ManualClock>,
    limiter: RateLimiter,
    number: u64,
    /// The records of each shard of the bucket, and how many are delivered.
    shards: [(Vec<Json>, usize); 2],
}

impl Given {
    async fn new() -> Self {
        let table = SimTable::default().leaving_tasks();
        let store: Arc<dyn Store> = Arc::new(DynamoStore::new(
            Arc::new(table.clone()),
            DynamoOptions::default().seed(1).worker_threads(1),
        ));
        let clock = Arc::new(ManualClock::new(NOW));
        let builder = RateLimiter::builder(store).clock(Arc::clone(&clock) as Arc<dyn Clock>);
        let limits = [Limit::per_minute("rpm", 600)];
        let limiter = builder.entropy(Entropy::seeded(1)).default_limits(limits).open().await;
        table.take_changes();
        let shards = Default::default();
        Self { table, clock, limiter: limiter.unwrap(), number: 0, shards }
    }

    /// Moves the table's changes to the stream. A second shard of the bucket has the same ones.
    fn stream(&mut self) {
        for changed in self.table.take_changes() {
            self.number += 1;
            let record = common::record(&changed, self.number, self.clock.now());
            let text = record.to_string().replace("BUCKET#key#gpt-4#0", "BUCKET#key#gpt-4#1");
            self.shards[0].0.push(record);
            self.shards[1].0.push(serde_json::from_str(&text).unwrap());
        }
    }

    async fn take(&mut self, tokens: u64) {
        let call = self.limiter.acquire("key", "gpt-4").take("rpm", tokens);
        call.await.unwrap().commit().await.unwrap();
        self.stream();
    }

    /// Delivers up to `count` records of a shard, after `again` that were delivered before.
    async fn deliver(&mut self, shard: usize, count: usize, again: usize) {
        let (records, done) = &mut self.shards[shard];
        let (from, to) = (done.saturating_sub(again), (*done + count).min(records.len()));
        let is_bucket = |record: &&Json| record.to_string().contains("BUCKET#key");
        let batch: Vec<_> = records[from..to].iter().filter(is_bucket).map(common::read).collect();
        *done = to;
        let table = Arc::new(self.table.clone()) as Arc<dyn Table>;
        let clock = Arc::clone(&self.clock) as Arc<dyn Clock>;
        let report = Aggregator::new(table, clock, Settings::default()).process(batch).await;
        assert_eq!(report.errors, Vec::<String>::new());
        // Its own writes are in the stream, too, but are none of a bucket.
        let refills = self.table.take_changes();
        let is_bucket = |key: &ItemKey| key.pk.contains("BUCKET#");
        assert!(!refills.iter().any(|changed| is_bucket(&changed.key)), "no refill is due");
    }

    /// The sum of what the records of each window say.
    fn used(&self) -> BTreeMap<Window, i64> {
        let mut used = BTreeMap::new();
        for item in self.table.items() {
            let text = |name: &str| item[name].as_str().unwrap().to_owned();
            let key = parse_key(&ItemKey::new(text("PK"), text("SK")));
            if let Some(ParsedKey::Record(Key::Usage(usage))) = key {
                let rpm = item.get("rpm").and_then(Value::as_i64).unwrap_or_default();
                *used.entry(usage.window).or_default() += rpm;
            }
        }
        used.retain(|_, rpm| *rpm != 0);
        used
    }
}

async fn play(seed: u64) {
    let mut dice = Dice(seed);
    let mut given = Given::new().await;
    let mut used = 0;
    let mut log = Vec::new();
    for _ in 0..40 {
        match dice.below(6) {
            0 | 1 => {
                let tokens = 1 + dice.below(5);
                log.push(format!("take {tokens}"));
                given.take(tokens).await;
                used += 2 * tokens as i64;
            }
            2 if dice.below(2) == 0 => {
                log.push("delete".to_owned());
                given.clock.advance(Duration::from_secs(1));
                // An error if there is nothing of it.
                if given.limiter.delete_entity("key").await.is_ok() {
                    used = 0;
                }
                given.stream();
                // Use within three seconds may not count.
                given.clock.advance(Duration::from_secs(4));
            }
            3 => {
                let wait = [1, 10, 70, 1_000, 4_000, 30_000][dice.pick(6)];
                log.push(format!("wait {wait}"));
                given.clock.advance(Duration::from_secs(wait));
            }
            _ => {
                let shard = dice.pick(2);
                let (count, again) = (dice.pick(8), dice.pick(6));
                log.push(format!("deliver {count} of {shard}, {again} again"));
                given.deliver(shard, count, again).await;
            }
        }
    }
    for shard in [1, 0] {
        given.deliver(shard, 1_000, 5).await;
        given.deliver(shard, 0, 1_000).await;
    }
    let wanted: BTreeMap<Window, i64> = match used {
        0 => BTreeMap::new(),
        _ => [Window::Hourly, Window::Daily, Window::Monthly].map(|it| (it, used)).into(),
    };
    assert_eq!(given.used(), wanted, "seed {seed}: {log:#?}");
}

#[tokio::test]
async fn an_entity_that_is_deleted_and_used_again_has_the_usage_of_its_last_life() {
    for seed in 0..60 {
        play(seed).await;
    }
}
