//! Usage of deleted entities and purged namespaces stays deleted, however late an aggregator comes.

#![allow(clippy::unwrap_used, reason = "a test says what is wrong by panicking")]

mod common;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::NOW;
use serde_json::Value as Json;
use zae_limiter_aggregator::{Aggregator, Report, Settings};
use zae_limiter_core::{
    BoxFuture, Clock, Entropy, Key, Limit, ManualClock, RateLimiter, Scope, Store, Timestamp,
};
use zae_limiter_dynamodb::{DynamoOptions, DynamoStore};
use zae_limiter_schema::records::tombstone;
use zae_limiter_schema::{
    BatchRead, Change, Consistency, Consumed, Item, ItemKey, ParsedKey, Query, QueryOutput, Table,
    TableError, TableErrorKind, Transacted, Update, Updated, Value, parse_key,
};
use zae_limiter_testkit::SimTable;

/// When another client interferes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Moment {
    BeforeTransact,
    AfterTransact,
}

/// Counts calls, and lets a deletion begin at the worst moment.
#[derive(Debug, Default)]
struct Watched {
    table: SimTable,
    calls: Mutex<Vec<&'static str>>,
    deletion: Mutex<Option<(Moment, Scope, Timestamp)>>,
    /// What becomes of the next transaction that is applied.
    reply: Mutex<Option<Reply>>,
}

/// The reply of a transaction that was applied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reply {
    Lost,
    /// The aggregator is stopped before it comes.
    Never,
}

impl Watched {
    fn note(&self, call: &'static str) {
        self.calls.lock().unwrap().push(call);
    }

    async fn interfere(&self, at: Moment) {
        let due = self.deletion.lock().unwrap().take_if(|(due, ..)| *due == at);
        if let Some((_, scope, moment)) = due {
            self.table.update(&tombstone::write(&scope, moment)).await.unwrap();
        }
    }
}

impl Table for Watched {
    fn update<'a>(&'a self, update: &'a Update) -> BoxFuture<'a, Result<Updated, TableError>> {
        self.note("update");
        self.table.update(update)
    }
    fn transact<'a>(
        &'a self,
        changes: &'a [Change],
    ) -> BoxFuture<'a, Result<Transacted, TableError>> {
        self.note("transact");
        Box::pin(async move {
            self.interfere(Moment::BeforeTransact).await;
            let done = self.table.transact(changes).await;
            self.interfere(Moment::AfterTransact).await;
            let reply = self.reply.lock().unwrap().take();
            match reply {
                None => done,
                Some(Reply::Lost) => {
                    Err(TableError::new(TableErrorKind::Unavailable, "no reply").maybe_applied())
                }
                Some(Reply::Never) => std::future::pending().await,
            }
        })
    }
    fn read<'a>(
        &'a self,
        keys: &'a [ItemKey],
        consistency: Consistency,
    ) -> BoxFuture<'a, Result<BatchRead, TableError>> {
        self.note("read");
        self.table.read(keys, consistency)
    }
    fn query<'a>(&'a self, query: &'a Query) -> BoxFuture<'a, Result<QueryOutput, TableError>> {
        self.table.query(query)
    }
    fn delete<'a>(&'a self, keys: &'a [ItemKey]) -> BoxFuture<'a, Result<Consumed, TableError>> {
        self.note("delete");
        self.table.delete(keys)
    }
    fn pause(&self, wait: Duration) -> BoxFuture<'_, ()> {
        self.table.pause(wait)
    }
    fn timeout(&self, limit: Duration) -> BoxFuture<'_, ()> {
        self.table.timeout(limit)
    }
}

struct Given {
    watched: Arc<Watched>,
    clock: Arc<ManualClock>,
    limiter: RateLimiter,
    number: u64,
}

impl Given {
    async fn new() -> Self {
        let table = SimTable::default().leaving_tasks();
        let store: Arc<dyn Store> = Arc::new(DynamoStore::new(
            Arc::new(table.clone()),
            DynamoOptions::default().seed(1).worker_threads(1),
        ));
        let clock = Arc::new(ManualClock::new(NOW));
        let builder = |seed: u64| {
            let clock = Arc::clone(&clock) as Arc<dyn Clock>;
            RateLimiter::builder(Arc::clone(&store)).clock(clock).entropy(Entropy::seeded(seed))
        };
        let registry = builder(1).open().await.unwrap().namespaces();
        registry.register("team").await.unwrap();
        let limits = [Limit::per_minute("rpm", 600)];
        let limiter = builder(2).namespace("team").default_limits(limits).open().await.unwrap();
        let watched = Arc::new(Watched { table, ..Watched::default() });
        let mut given = Self { watched, clock, limiter, number: 0 };
        given.records();
        given
    }

    fn advance(&self, seconds: u64) {
        self.clock.advance(Duration::from_secs(seconds));
    }

    async fn take(&mut self, tokens: u64) -> Vec<Json> {
        let call = self.limiter.acquire("key", "gpt-4").take("rpm", tokens);
        call.await.unwrap().commit().await.unwrap();
        self.records()
    }

    /// The stream's records of all changes since the last call, with the current time.
    fn records(&mut self) -> Vec<Json> {
        let mut records = Vec::new();
        for changed in self.watched.table.take_changes() {
            self.number += 1;
            records.push(common::record(&changed, self.number, self.clock.now()));
        }
        records
    }

    /// Delivers records to an aggregator whose clock is far off.
    async fn deliver(&self, records: &[Json]) -> Report {
        let report = self.process(records).await;
        assert_eq!((&report.errors, report.foreign), (&Vec::new(), 0));
        report
    }

    async fn process(&self, records: &[Json]) -> Report {
        let clock = Arc::new(ManualClock::new(Timestamp::from_millis(0)));
        let table = Arc::clone(&self.watched) as Arc<dyn Table>;
        let own: Arc<dyn Clock> = Arc::clone(&clock) as _;
        let aggregator = Aggregator::new(table, own, Settings::default());
        // It waits before it repeats a call.
        let time = async {
            for _ in 0..100_000 {
                tokio::task::yield_now().await;
                clock.advance(Duration::from_millis(1));
            }
        };
        tokio::select! {
            biased;
            report = aggregator.process(records.iter().map(common::read).collect()) => report,
            () = time => panic!("it does not end"),
        }
    }

    fn usage(&self) -> Vec<Item> {
        let is_usage = |item: &Item| {
            let text = |name: &str| item[name].as_str().unwrap().to_owned();
            let key = ItemKey::new(text("PK"), text("SK"));
            matches!(parse_key(&key), Some(ParsedKey::Record(Key::Usage(_))))
        };
        self.watched.table.items().into_iter().filter(is_usage).collect()
    }

    /// What each record says that was used.
    fn used(&self) -> Vec<i64> {
        let used = |item: Item| item.get("rpm").and_then(Value::as_i64).unwrap_or_default();
        self.usage().into_iter().map(used).collect()
    }

    fn owner(&self) -> Scope {
        let id = zae_limiter_core::EntityId::new("key").unwrap();
        Scope::Entity(self.limiter.namespace_id().clone(), id)
    }

    fn begin_deletion(&self, at: Moment, scope: Scope) {
        *self.watched.deletion.lock().unwrap() = Some((at, scope, self.clock.now()));
    }
}

#[tokio::test]
async fn changes_made_before_a_deletion_create_no_usage_and_later_ones_count() {
    let mut given = Given::new().await;
    let early = given.take(5).await;
    given.advance(7);
    given.limiter.delete_entity("key").await.unwrap();
    let deletion = given.records();
    assert_eq!(given.deliver(&early).await.snapshots_updated, 0);
    given.deliver(&deletion).await;
    assert!(given.usage().is_empty(), "{:?}", given.used());

    given.advance(3);
    let late = given.take(2).await;
    // In one batch with the early ones, and again alone.
    given.deliver(&[early.clone(), late.clone()].concat()).await;
    assert_eq!(given.used(), [2, 2, 2]);
    given.deliver(&early).await;
    given.deliver(&late).await;
    assert_eq!(given.used(), [2, 2, 2]);
}

#[tokio::test]
async fn a_deletion_between_two_bookings_ends_the_record() {
    let mut given = Given::new().await;
    let booked = given.take(5).await;
    given.deliver(&booked).await;
    assert_eq!(given.used(), [5, 5, 5]);
    let pending = given.take(3).await;
    given.limiter.delete_entity("key").await.unwrap();
    assert!(given.usage().is_empty());
    given.deliver(&pending).await;
    assert!(given.usage().is_empty(), "{:?}", given.used());
}

#[tokio::test]
async fn a_purged_namespace_gets_no_usage_however_late_its_changes_are() {
    let mut given = Given::new().await;
    let mut all = given.take(5).await;
    let registry = given.limiter.namespaces();
    let id = registry.delete("team").await.unwrap().id;
    registry.purge(&id, |_| {}).await.unwrap();
    // The limiter has not noticed yet.
    given.advance(20);
    all.extend(given.take(1).await);
    given.deliver(&all).await;
    assert!(given.usage().is_empty(), "{:?}", given.used());
}

#[tokio::test]
async fn a_deletion_that_begins_while_a_record_is_created_prevents_it() {
    let mut given = Given::new().await;
    let records = given.take(5).await;
    given.advance(1);
    given.begin_deletion(Moment::BeforeTransact, given.owner());
    given.deliver(&records).await;
    assert!(given.usage().is_empty(), "{:?}", given.used());
}

#[tokio::test]
async fn a_purge_that_begins_while_records_are_created_removes_them() {
    let mut given = Given::new().await;
    let records = given.take(5).await;
    let namespace = Scope::Namespace(given.limiter.namespace_id().clone());
    given.begin_deletion(Moment::AfterTransact, namespace);
    given.deliver(&records).await;
    assert!(given.usage().is_empty(), "{:?}", given.used());
}

/// The purge begins while the records are created, and has listed the items before. The aggregator does not get the
/// reply, or is stopped before it comes and gets the batch again, perhaps with later changes of clients that have not
/// noticed the purge.
#[tokio::test]
async fn a_purge_removes_records_whose_creation_had_no_reply() {
    for (reply, late) in [(Reply::Lost, 0), (Reply::Never, 0), (Reply::Never, 2)] {
        let mut given = Given::new().await;
        let mut records = given.take(5).await;
        let namespace = Scope::Namespace(given.limiter.namespace_id().clone());
        given.begin_deletion(Moment::AfterTransact, namespace);
        *given.watched.reply.lock().unwrap() = Some(reply);
        if reply == Reply::Never {
            let is_applied = async {
                while given.watched.reply.lock().unwrap().is_some() {
                    tokio::task::yield_now().await;
                }
            };
            tokio::select! {
                _ = given.process(&records) => panic!("it is stopped before"),
                () = is_applied => {}
            }
            assert_eq!(given.used(), [5, 5, 5]);
        }
        for _ in 0..late {
            records.extend(given.take(1).await);
        }
        given.deliver(&records).await;
        assert!(given.usage().is_empty(), "{reply:?}, {late} later: {:?}", given.used());
        // What comes after creates none, either.
        given.deliver(&records).await;
        assert!(given.usage().is_empty(), "{reply:?}, {late} later: {:?}", given.used());
    }
}

/// Changes of another shard may be delivered after the entity was used again.
#[tokio::test]
async fn early_changes_do_not_count_in_a_record_of_later_ones() {
    let mut given = Given::new().await;
    let early = given.take(5).await;
    given.limiter.delete_entity("key").await.unwrap();
    given.records();
    given.advance(3);
    let late = given.take(2).await;
    given.deliver(&late).await;
    let shard = |record: &Json| {
        let text = record.to_string().replace("BUCKET#key#gpt-4#0", "BUCKET#key#gpt-4#1");
        serde_json::from_str::<Json>(&text).unwrap()
    };
    let of_another_shard: Vec<Json> = early.iter().map(shard).collect();
    given.deliver(&of_another_shard).await;
    assert_eq!(given.used(), [2, 2, 2]);
    let late_of_another: Vec<Json> = late.iter().map(shard).collect();
    given.deliver(&late_of_another).await;
    assert_eq!(given.used(), [4, 4, 4]);
}

#[tokio::test]
async fn a_client_whose_clock_is_a_second_behind_deletes_everything_before() {
    let mut given = Given::new().await;
    given.advance(60);
    let early = given.take(5).await;
    let margin = i64::try_from(tombstone::CLOCK_MARGIN.as_millis()).unwrap();
    let behind = Timestamp::from_millis(given.clock.now().as_millis() - margin);
    given.limiter.store().note_deletion(&given.owner(), behind).await.unwrap();
    given.deliver(&early).await;
    assert!(given.usage().is_empty(), "{:?}", given.used());
}

#[tokio::test]
async fn adding_to_a_record_is_one_update_and_nothing_else() {
    let mut given = Given::new().await;
    let first = given.take(5).await;
    given.deliver(&first).await;
    let second = given.take(1).await;
    given.watched.calls.lock().unwrap().clear();
    given.deliver(&second).await;
    assert_eq!(given.used(), [6, 6, 6]);
    let calls = given.watched.calls.lock().unwrap().clone();
    assert_eq!(calls, ["update"; 3], "one for each window");
}

/// A tombstone is kept longer than the stream keeps changes, and then expires.
#[tokio::test]
async fn a_tombstone_expires_after_three_days() {
    let given = Given::new().await;
    given.limiter.store().note_deletion(&given.owner(), NOW).await.unwrap();
    let earlier = Timestamp::from_millis(NOW.as_millis() - 5_000);
    given.limiter.store().note_deletion(&given.owner(), earlier).await.unwrap();
    let item = given.watched.table.item(&tombstone::key(&given.owner())).unwrap();
    assert_eq!(tombstone::deleted_at(&item), Some(NOW), "it never moves back");
    let seconds = NOW.as_millis() / 1_000 + 3 * 86_400;
    assert_eq!(item["ttl"], Value::number(seconds));
}
