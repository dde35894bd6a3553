//! Usage records equal what callers have consumed: with acquires, adjustments, rollbacks, expiry
//! and many hours, all through the public limiter.

#![allow(
    clippy::cast_possible_wrap,
    clippy::unwrap_used,
    reason = "a test says what is wrong by panicking"
)]

mod common;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use common::NOW;
use fastrand::Rng;
use zae_limiter_aggregator::{Aggregator, Settings};
use zae_limiter_core::{
    Clock, Entropy, Error, Limit, ManualClock, RateLimiter, Timestamp, Window, format_time,
};
use zae_limiter_dynamodb::{DynamoOptions, DynamoStore};
use zae_limiter_testkit::SimTable;

/// Tokens by entity, limit and hour.
type Ledger = BTreeMap<(String, String, String), i64>;

struct Play {
    table: SimTable,
    clock: Arc<ManualClock>,
    limiter: RateLimiter,
    aggregator: Aggregator,
    stream: Vec<serde_json::Value>,
    ledger: Ledger,
    rng: Rng,
}

impl Play {
    async fn new(seed: u64) -> Self {
        let table = SimTable::default();
        table.take_changes();
        let clock = Arc::new(ManualClock::new(NOW));
        let store = DynamoStore::new(Arc::new(table.clone()), DynamoOptions::default());
        let limits = [Limit::per_minute("rpm", 30).burst(40), Limit::per_hour("tokens.v2", 5_000)];
        let limiter = RateLimiter::builder(store)
            .clock(Arc::clone(&clock) as Arc<dyn Clock>)
            .entropy(Entropy::seeded(seed))
            .default_limits(limits)
            .open()
            .await
            .unwrap();
        let aggregator = Aggregator::new(
            Arc::new(table.clone()),
            Arc::clone(&clock) as Arc<dyn Clock>,
            Settings::default(),
        );
        let (stream, ledger) = (Vec::new(), Ledger::new());
        Self { table, clock, limiter, aggregator, stream, ledger, rng: Rng::with_seed(seed) }
    }

    /// Moves the table's changes into the stream, with the current time.
    fn collect(&mut self) {
        for changed in self.table.take_changes() {
            let number = 1 + self.stream.len() as u64;
            self.stream.push(common::record(&changed, number, self.clock.now()));
        }
    }

    fn book(&mut self, entity: &str, limit: &str, tokens: i64) {
        let hour = format_time(Window::Hourly.start(self.clock.now()));
        *self.ledger.entry((entity.to_owned(), limit.to_owned(), hour)).or_default() += tokens;
    }

    async fn call(&mut self) {
        let entity = format!("key-{}", self.rng.u32(..3));
        let (requests, tokens) = (self.rng.u64(..=3), self.rng.u64(..=400));
        let lease = self.limiter.acquire(&entity, "gpt-4");
        let lease = lease.take("rpm", requests).take("tokens.v2", tokens).await;
        let mut lease = match lease {
            Ok(lease) => lease,
            Err(Error::Exceeded(_)) => return,
            Err(error) => panic!("{error}"),
        };
        self.book(&entity, "rpm", requests as i64);
        self.book(&entity, "tokens.v2", tokens as i64);
        self.collect();
        let later = Duration::from_millis(self.rng.u64(..90_000));
        self.clock.advance(later);
        if self.rng.u32(..4) == 0 {
            lease.rollback().await.unwrap();
            self.book(&entity, "rpm", -(requests as i64));
            self.book(&entity, "tokens.v2", -(tokens as i64));
        } else {
            let difference = self.rng.i64(-(tokens as i64)..=600);
            lease.adjust("tokens.v2", difference).unwrap();
            lease.commit().await.unwrap();
            self.book(&entity, "tokens.v2", difference);
        }
        self.collect();
    }

    async fn deliver(&self, from: usize, to: usize) {
        let records = self.stream[from..to].iter().map(common::read).collect();
        let report = self.aggregator.process(records).await;
        assert_eq!((&*report.errors, &*report.failed), (&[][..], &[][..]));
    }

    /// The usage that the limiter reports.
    async fn usage(&self) -> Ledger {
        let mut found = Ledger::new();
        for entity in ["key-0", "key-1", "key-2"] {
            let mut pages = self.limiter.usage().entity(entity).pages().unwrap();
            while let Some(records) = pages.next_page().await.unwrap() {
                for usage in records {
                    let hour = format_time(usage.key.start);
                    for (limit, sum) in usage.consumed {
                        assert_eq!(sum.get() % 1_000, 0, "only whole tokens were taken");
                        let place = (entity.to_owned(), limit.to_string(), hour.clone());
                        found.insert(place, sum.whole_tokens());
                    }
                }
            }
        }
        found.retain(|_, sum| *sum != 0);
        found
    }
}

async fn play(seed: u64) -> (Ledger, usize) {
    let mut play = Play::new(seed).await;
    let mut delivered = 0;
    for _ in 0..150 {
        play.call().await;
        let pause = match play.rng.u32(..12) {
            0 => play.rng.u64(..60_000),
            _ => play.rng.u64(..120),
        };
        play.clock.advance(Duration::from_secs(pause));
        if play.rng.u32(..10) == 0 {
            play.table.sweep(play.clock.now().as_millis() / 1_000);
            play.collect();
        }
        if play.rng.u32(..5) == 0 {
            play.deliver(delivered, play.stream.len()).await;
            delivered = play.stream.len();
            play.collect();
        }
    }
    play.deliver(delivered, play.stream.len()).await;
    play.ledger.retain(|_, sum| *sum != 0);
    assert_eq!(play.usage().await, play.ledger, "seed {seed}");
    let expired = play.stream.iter().filter(|record| record.get("userIdentity").is_some());
    (play.ledger.clone(), expired.count())
}

#[tokio::test]
async fn usage_records_equal_what_callers_consumed() {
    let (mut hours, mut expired) = (0, 0);
    for seed in 0..8 {
        let (ledger, expirations) = play(seed).await;
        let labels: std::collections::BTreeSet<_> =
            ledger.keys().map(|(_, _, hour)| hour).collect();
        hours += labels.len();
        expired += expirations;
    }
    assert!(hours > 40 && expired > 10, "{hours} hours, {expired} expired");
}

/// The stream's times are cut to the second, and windows start at whole seconds.
#[test]
fn a_second_belongs_to_one_window() {
    for window in Window::ALL {
        let start = window.start(Timestamp::from_millis(NOW.as_millis() + 3_599_999));
        assert_eq!(start.as_millis() % 1_000, 0);
    }
}
