//! The effects of batches: what is booked, refilled, split, announced, archived, and delivered
//! again.

#![allow(clippy::unwrap_used, reason = "a test says what is wrong by panicking")]

mod common;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::NOW;
use serde_json::{Value as Json, json};
use zae_limiter_aggregator::{
    Aggregator, Archive, ArchiveError, PendingSplit, Report, Settings, Split, Splitter, read_event,
};
use zae_limiter_core::{
    BoxFuture, Bucket, BucketKey, Clock, EntityId, Limit, LimitSet, ManualClock, Millitokens,
    NamespaceId, ResourceName, Timestamp, UsageSettings,
};
use zae_limiter_schema::bucket::{self, After, BucketItem, Expiry, Owner};
use zae_limiter_schema::{BucketItemKey, Item, ItemKey, Table, TableError, Update, Value};
use zae_limiter_testkit::{Changed, SimTable};

fn bucket_key(shard: u32) -> BucketItemKey {
    let bucket = BucketKey {
        namespace: NamespaceId::new("abcdefghijk").unwrap(),
        entity: EntityId::new("key-1").unwrap(),
        resource: ResourceName::new("gpt-4").unwrap(),
    };
    BucketItemKey { bucket, shard }
}

fn limits() -> Arc<LimitSet> {
    Arc::new(LimitSet::new([Limit::per_minute("rpm", 600), Limit::per_day("tpd", 1_000)]).unwrap())
}

/// A table with one bucket that was refilled at [`NOW`], and the number of its last stream record.
struct Given {
    table: SimTable,
    clock: Arc<ManualClock>,
    number: u64,
}

impl Given {
    fn new() -> Self {
        let table = SimTable::default();
        table.take_changes();
        Self { table, clock: Arc::new(ManualClock::new(NOW)), number: 0 }
    }

    async fn create(&self, shard: u32) {
        let key = bucket_key(shard);
        let bucket = Bucket::full(limits(), NOW);
        let limits = limits();
        let after = After { bucket: &bucket, whole: &limits, shard_count: 1, limits_at: None };
        let update = bucket::create(&key, &after, &Owner { parent: None }, Expiry::Keep);
        self.table.update(&update).await.unwrap();
    }

    /// Changes attributes of the bucket as another client.
    async fn add(&self, shard: u32, numbers: &[(&str, i64)]) {
        let add = |(name, by): &(&str, i64)| {
            zae_limiter_schema::Action::Add((*name).to_owned(), Value::number(*by))
        };
        let actions = numbers.iter().map(add).collect();
        let update = Update { key: bucket_key(shard).item_key(), actions, conditions: Vec::new() };
        self.table.update(&update).await.unwrap();
    }

    /// The stream's records of all changes since the last call, with the current time.
    fn records(&mut self) -> Vec<Json> {
        let mut records = Vec::new();
        for changed in self.table.take_changes() {
            self.number += 1;
            records.push(common::record(&changed, self.number, self.clock.now()));
        }
        records
    }

    fn aggregator(&self) -> Aggregator {
        self.aggregator_with(Settings::default())
    }

    fn aggregator_with(&self, settings: Settings) -> Aggregator {
        let clock = Arc::clone(&self.clock) as Arc<dyn Clock>;
        Aggregator::new(Arc::new(self.table.clone()), clock, settings)
    }

    async fn process(&self, records: &[Json]) -> Report {
        self.aggregator().process(records.iter().map(common::read).collect()).await
    }

    fn usage(&self, label: &str) -> Item {
        let key = ItemKey::new("abcdefghijk/ENTITY#key-1", format!("#USAGE#gpt-4#{label}"));
        self.table.item(&key).unwrap_or_default()
    }

    fn item(&self, shard: u32) -> Item {
        self.table.item(&bucket_key(shard).item_key()).unwrap_or_default()
    }
}

fn number(item: &Item, name: &str) -> i64 {
    item.get(name).and_then(Value::as_i64).unwrap_or_default()
}

#[tokio::test]
async fn a_hundred_records_cost_one_write_per_window() {
    let mut given = Given::new();
    given.create(0).await;
    for _ in 0..99 {
        given.add(0, &[("b_rpm_tc", 1_000), ("b_tpd_tc", 5_000), ("b_wcu_tc", 1_000)]).await;
    }
    let records = given.records();
    assert_eq!(records.len(), 100);
    let before = given.table.totals().writing_calls;
    let report = given.process(&records).await;
    assert_eq!((report.processed, report.snapshots_updated), (100, 3));
    // One for each window, and one transaction that creates the three.
    assert_eq!(given.table.totals().writing_calls - before, 4);
    for label in ["2026-11-15T14:00:00Z", "2026-11-15", "2026-11"] {
        let usage = given.usage(label);
        assert_eq!((number(&usage, "rpm"), number(&usage, "tpd")), (99, 495), "{label}");
        // The creation took nothing, so it does not count as an event.
        assert_eq!((number(&usage, "total_events"), number(&usage, "wcu")), (99, 0), "{label}");
    }
}

#[tokio::test]
async fn a_redelivered_batch_adds_only_what_is_missing() {
    let mut given = Given::new();
    given.create(0).await;
    for _ in 0..9 {
        given.add(0, &[("b_rpm_tc", 1_000)]).await;
    }
    let records = given.records();
    let booked = |given: &Given| number(&given.usage("2026-11"), "rpm");
    assert_eq!(given.process(&records[..4]).await.snapshots_updated, 3);
    assert_eq!(booked(&given), 3);
    // Half of it booked, all of it booked, and a record twice in a batch.
    assert_eq!(given.process(&records[2..7]).await.snapshots_updated, 3);
    assert_eq!(booked(&given), 6);
    assert_eq!(given.process(&records[..5]).await.snapshots_updated, 0);
    assert_eq!(booked(&given), 6);
    let twice: Vec<Json> = records.iter().chain(&records).cloned().collect();
    given.process(&twice).await;
    assert_eq!((booked(&given), number(&given.usage("2026-11"), "total_events")), (9, 9));
}

#[tokio::test]
async fn shards_book_to_one_record_independently() {
    let mut given = Given::new();
    for shard in 0..40 {
        given.create(shard).await;
        given.add(shard, &[("b_rpm_tc", 500)]).await;
    }
    let records = given.records();
    // More shards than one write can hold.
    assert_eq!(given.process(&records).await.snapshots_updated, 6);
    assert_eq!(number(&given.usage("2026-11"), "rpm"), 20);
    assert_eq!(given.process(&records[7..]).await.snapshots_updated, 0);
    for shard in 0..3 {
        given.add(shard, &[("b_rpm_tc", 1)]).await;
    }
    let records = given.records();
    given.process(&records[2..]).await;
    given.process(&records[..1]).await;
    given.process(&records).await;
    // Fractions of a token are not rounded.
    assert_eq!(given.usage("2026-11")["rpm"], Value::N("20.003".to_owned()));
}

#[tokio::test]
async fn usage_is_booked_to_the_time_of_the_change() {
    let mut given = Given::new();
    given.create(0).await;
    given.clock.advance(Duration::from_secs(3_599));
    given.add(0, &[("b_rpm_tc", 1_000)]).await;
    let mut records = given.records();
    given.clock.advance(Duration::from_secs(1));
    given.add(0, &[("b_rpm_tc", 5_000)]).await;
    records.extend(given.records());
    given.process(&records).await;
    assert_eq!(number(&given.usage("2026-11-15T14:00:00Z"), "rpm"), 1);
    assert_eq!(number(&given.usage("2026-11-15T15:00:00Z"), "rpm"), 5);
    // 90 days after the window's end.
    let hour = given.usage("2026-11-15T14:00:00Z");
    assert_eq!(number(&hour, "ttl"), NOW.as_millis() / 1_000 + 3_600 + 90 * 86_400);
}

/// The item after a refill, if the aggregator refills a bucket with this consumption and balance.
async fn refilled(taken: i64, left: i64, after: Duration) -> Option<Item> {
    let mut given = Given::new();
    given.create(0).await;
    given.add(0, &[("b_tpd_tk", -500_000)]).await;
    given.records();
    given.add(0, &[("b_rpm_tc", taken), ("b_rpm_tk", left - 600_000)]).await;
    given.clock.advance(after);
    let records = given.records();
    let report = given.process(&records).await;
    assert_eq!((&*report.errors, &*report.failed), (&[][..], &[][..]));
    (report.refills_written > 0).then(|| given.item(0))
}

#[tokio::test]
async fn a_bucket_that_runs_short_is_refilled_with_all_its_limits() {
    // 10 a second of rpm, 0.0115 a second of tpd: half a second earns 5.787 millitokens.
    let item = refilled(50_000, 1_000, Duration::from_millis(500)).await.expect("a refill");
    assert_eq!((number(&item, "b_rpm_tk"), number(&item, "b_tpd_tk")), (6_000, 500_005));
    assert_eq!(number(&item, "rf"), NOW.as_millis() + 500);
    // 500 ms at 1,000,000 millitokens a day leave 68,000,000 millitoken-milliseconds of a day.
    assert_eq!(number(&item, "b_tpd_rm"), 500 * 1_000_000 - 5 * 86_400_000);
    // The balance suffices; nothing was earned; nothing was taken.
    assert_eq!(refilled(50_000, 60_000, Duration::from_millis(500)).await, None);
    assert_eq!(refilled(50_000, 1_000, Duration::ZERO).await, None);
    assert_eq!(refilled(0, 1_000, Duration::from_millis(500)).await, None);
}

/// A day of changes to a busy limit, with many refills. The other limit of the bucket must end with
/// the balance that it would have without them.
#[tokio::test]
async fn refills_for_a_busy_limit_cost_the_other_limit_nothing() {
    let mut given = Given::new();
    given.create(0).await;
    // In debt, so that a day does not fill it.
    given.add(0, &[("b_tpd_tk", -1_500_000)]).await;
    given.add(0, &[("b_rpm_tk", -599_000)]).await;
    let lazy = BucketItem::decode(&bucket_key(0), &given.item(0)).unwrap();
    given.records();
    let mut refills = 0;
    let usage = UsageSettings { windows: Vec::new(), ..UsageSettings::default() };
    let without_usage = given.aggregator_with(Settings { usage, ..Settings::default() });
    for _ in 0..2_880 {
        given.clock.advance(Duration::from_secs(30));
        // Takes all tokens of the busy limit.
        let tokens = number(&given.item(0), "b_rpm_tk");
        given.add(0, &[("b_rpm_tk", -tokens), ("b_rpm_tc", tokens + 400_000)]).await;
        let records = given.records().iter().map(common::read).collect();
        refills += without_usage.process(records).await.refills_written;
    }
    assert_eq!(refills, 2_880);
    let item = BucketItem::decode(&bucket_key(0), &given.item(0)).unwrap();
    let mut without = lazy.bucket;
    without.refill(given.clock.now());
    let cell = |bucket: &Bucket| *bucket.cell("tpd").unwrap().0;
    assert_eq!(cell(&item.bucket), cell(&without));
    assert_eq!(cell(&without).tokens, Millitokens::new(500_000));
}

#[tokio::test]
async fn scheduled_and_expired_buckets_are_not_refilled() {
    for (name, value) in [("sched", Value::text("x")), ("ttl", Value::number(1_000))] {
        let mut given = Given::new();
        given.create(0).await;
        let actions = vec![zae_limiter_schema::Action::Set(name.to_owned(), value)];
        let key = bucket_key(0).item_key();
        let update = Update { key, actions, conditions: Vec::new() };
        given.table.update(&update).await.unwrap();
        given.add(0, &[("b_rpm_tc", 500_000), ("b_rpm_tk", -600_000)]).await;
        given.clock.advance(Duration::from_secs(1));
        let records = given.records();
        let report = given.process(&records).await;
        assert_eq!((report.refills_written, report.snapshots_updated), (0, 3), "{name}");
    }
}

#[derive(Debug, Default)]
struct SplitLog(Mutex<Vec<u32>>);

impl Split for SplitLog {
    fn split<'a>(&'a self, pending: &'a PendingSplit) -> BoxFuture<'a, Result<bool, TableError>> {
        self.0.lock().unwrap().push(pending.from);
        Box::pin(async { Ok(true) })
    }
}

/// Writes to a shard `writes` times, every `refill_each`th with a refill. Returns the shard counts
/// of the splits that the aggregator requests.
async fn heat(shard: u32, writes: u32, every: Duration, refill_each: u32) -> Vec<u32> {
    let mut given = Given::new();
    given.create(shard).await;
    given.records();
    let mut records = Vec::new();
    for write in 0..writes {
        given.clock.advance(every);
        given.add(shard, &[("b_rpm_tc", 1_000)]).await;
        if write % refill_each == 0 {
            let since = i64::try_from((every * write).as_millis()).unwrap();
            let rf = number(&given.item(shard), "rf");
            given.table.take_changes().into_iter().for_each(drop);
            given.add(shard, &[("rf", NOW.as_millis() + since - rf)]).await;
        }
        records.extend(given.records());
    }
    let split = Arc::new(SplitLog::default());
    let aggregator = given.aggregator().split(Arc::clone(&split) as Arc<dyn Split>);
    let report = aggregator.process(records.iter().map(common::read).collect()).await;
    let split = split.0.lock().unwrap().clone();
    assert_eq!(report.buckets_split, split.len() as u64);
    split
}

#[tokio::test]
async fn a_bucket_is_split_at_eight_hundred_writes_a_second() {
    // A batch of a hundred shows the rate by its refills, a large one by the stream's seconds.
    assert_eq!(heat(0, 100, Duration::from_millis(1), 10).await, [1]);
    assert_eq!(heat(0, 1_500, Duration::from_millis(1), 5_000).await, [1]);
    // Too slow; too few; not the first shard.
    assert!(heat(0, 100, Duration::from_millis(2), 10).await.is_empty());
    assert!(heat(0, 50, Duration::from_millis(1), 10).await.is_empty());
    assert!(heat(1, 100, Duration::from_millis(1), 10).await.is_empty());
}

#[tokio::test]
async fn a_hot_bucket_is_split_once_and_keeps_all_its_tokens() {
    let mut given = Given::new();
    given.create(0).await;
    given.records();
    for _ in 0..900 {
        given.add(0, &[("b_rpm_tc", 1_000), ("b_rpm_tk", -1_000)]).await;
    }
    let records = given.records();
    let (table, clock) = (Arc::new(given.table.clone()), Arc::clone(&given.clock));
    let splitter = Arc::new(Splitter::new(table, clock as Arc<dyn Clock>));
    let aggregator = given.aggregator().split(splitter);
    for split in [1, 0] {
        let report = aggregator.process(records.iter().map(common::read).collect()).await;
        assert_eq!((report.buckets_split, &*report.errors), (split, &[][..]));
    }
    let shards = [0, 1].map(|shard| {
        let key = bucket_key(shard);
        BucketItem::decode(&key, &given.item(shard)).unwrap()
    });
    assert_eq!(shards.each_ref().map(|shard| shard.shard_count), [2, 2]);
    let tokens = |shard: &BucketItem| shard.bucket.cell("tpd").unwrap().0.tokens.get();
    assert_eq!(shards.iter().map(tokens).sum::<i64>(), 1_000_000);
}

#[tokio::test]
async fn a_split_is_announced_to_existing_shards_and_creates_none() {
    let mut given = Given::new();
    for shard in [0, 1, 3] {
        given.create(shard).await;
    }
    given.add(3, &[("shard_count", 7)]).await;
    given.records();
    given.add(0, &[("shard_count", 3)]).await;
    let records = given.records();
    let report = given.process(&records).await;
    assert_eq!((report.shards_announced, &*report.failed), (1, &[][..]));
    let counts = [0, 1, 2, 3].map(|shard| number(&given.item(shard), "shard_count"));
    assert_eq!(counts, [4, 4, 0, 8]);
    assert!(given.item(2).is_empty());
    assert_eq!(given.process(&records).await.shards_announced, 0);
    // A client that splits shard by shard raises the generation, and needs no announcement.
    given.add(0, &[("shard_count", 4), ("gn", 1)]).await;
    let records = given.records();
    assert_eq!(given.process(&records).await.shards_announced, 0);
    assert_eq!(number(&given.item(1), "shard_count"), 4);
}

#[derive(Debug, Default)]
struct FakeArchive {
    files: Mutex<Vec<String>>,
    is_down: bool,
}

impl Archive for FakeArchive {
    fn put<'a>(
        &'a self,
        name: &'a str,
        _bytes: Vec<u8>,
    ) -> BoxFuture<'a, Result<(), ArchiveError>> {
        Box::pin(async move {
            if self.is_down {
                return Err(ArchiveError { message: "no bucket".to_owned(), source: None });
            }
            self.files.lock().unwrap().push(name.to_owned());
            Ok(())
        })
    }
}

fn audit(id: &str, by_table: bool) -> Changed {
    // With a subject of a later release.
    let key = ItemKey::new("abcdefghijk/AUDIT#$LATER:x", format!("#AUDIT#{id}"));
    let item = Item::from([
        ("action".to_owned(), Value::text("limits_set")),
        ("timestamp".to_owned(), Value::text("2026-08-15T00:00:00Z")),
    ]);
    Changed { at_us: 0, key, old: Some(item), new: None, by_table }
}

#[tokio::test]
async fn expired_audit_events_are_archived_or_delivered_again() {
    let given = Given::new();
    let record = |number, id, by_table| common::record(&audit(id, by_table), number, NOW);
    let records = [record(1, "01A", true), record(2, "01B", false), record(3, "01C", true)];
    let read = || records.iter().map(common::read).collect();
    let archive = Arc::new(FakeArchive::default());
    let aggregator = given.aggregator().archive(Arc::clone(&archive) as Arc<dyn Archive>);
    for _ in 0..2 {
        assert_eq!(aggregator.process(read()).await.events_archived, 2);
    }
    // Events that a client deleted are not archived. A redelivered batch gets the same file name.
    let files = archive.files.lock().unwrap().clone();
    assert!(files[0].starts_with("audit/year=2026/month=08/day=15/01A-"), "{files:?}");
    assert_eq!((files.len(), &files[0]), (2, &files[1]));
    let down = Arc::new(FakeArchive { is_down: true, ..FakeArchive::default() });
    let report = given.aggregator().archive(down).process(read()).await;
    let numbers = [1, 3].map(|number| format!("{number}00000000000000000000"));
    assert_eq!((report.events_archived, &report.failed[..]), (0, &numbers[..]));
    // Nothing else of the batch has to be repeated.
    assert!(!report.is_retriable);
    let again = aggregator.archive_again(report.unarchived).await;
    assert_eq!((again.events_archived, again.unarchived.len(), again.processed), (2, 0, 0));
    assert_eq!(archive.files.lock().unwrap()[2], files[0]);
}

#[tokio::test]
async fn invalid_records_do_not_affect_the_others() {
    let mut given = Given::new();
    given.create(0).await;
    given.add(0, &[("b_rpm_tc", 1_000)]).await;
    let good = given.records();
    let with = |path: &str, value: Json| {
        let mut record = good[1].clone();
        *record.pointer_mut(path).unwrap() = value;
        record
    };
    let mut without_old = good[1].clone();
    without_old["dynamodb"].as_object_mut().unwrap().remove("OldImage");
    without_old["dynamodb"]["SequenceNumber"] = json!("77");
    let event = json!({ "Records": [
        good[0], // booked
        with("/dynamodb/SequenceNumber", json!("none")), // cannot be requested again
        without_old, // would count all consumption again
        with("/dynamodb/NewImage/b_rpm_tc", json!({ "S": "many" })),
        with("/eventName", json!("TRUNCATE")), // of a later release
        with("/dynamodb/Keys/PK/S", json!("somebody-else")), // foreign
        with("/dynamodb/Keys/SK/S", json!("#STATE2")), // foreign
        "not a record of key-1",
        good[1], // booked
    ]});
    let records = read_event(&event.to_string()).unwrap();
    let report = given.aggregator().process(records).await;
    assert_eq!(number(&given.usage("2026-11"), "rpm"), 1);
    assert_eq!((report.processed, report.foreign, report.errors.len()), (9, 2, 5), "{report:?}");
    let number = "200000000000000000000";
    assert_eq!(report.failed, ["none", "77", number, number]);
    assert!(!report.is_retriable);
    // Entity ids are often API keys.
    assert!(!report.errors.join(" ").contains("key-1"), "{:?}", report.errors);
    assert!(read_event("5").is_err());
    assert_eq!(read_event("{}").unwrap(), []);
}

#[test]
fn errors_never_quote_a_record() {
    let mut record = common::record(&audit("01A", false), 1, NOW);
    // Each of these fields should be an object.
    for path in ["/dynamodb/Keys/PK", "/dynamodb/Keys", "/dynamodb"] {
        *record.pointer_mut(path).unwrap() = json!("abcdefghijk/ENTITY#secret");
        let message = common::read(&record).unwrap_err().message;
        assert!(!message.contains("secret") && message.contains("column"), "{message}");
    }
}

#[test]
fn times_are_seconds_since_1970() {
    let changed = audit("01A", false);
    let mut record = common::record(&changed, 1, NOW);
    assert_eq!(common::read(&record).unwrap().at, NOW);
    record["dynamodb"]["ApproximateCreationDateTime"] = json!(1_794_751_200.25);
    let at = Timestamp::from_millis(NOW.as_millis() + 250);
    assert_eq!(common::read(&record).unwrap().at, at);
    for bad in [json!(-1), json!(1e300), json!("soon")] {
        record["dynamodb"]["ApproximateCreationDateTime"] = bad;
        assert!(common::read(&record).is_err());
    }
}
