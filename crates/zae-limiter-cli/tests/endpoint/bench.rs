//! `bench --shards`: compares its report with the change stream of the table.

use std::collections::{BTreeMap, BTreeSet};
use std::process::{Command, Output, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value as Json;
use zae_limiter::dynamodb::aws::DynamoAddress;
use zae_limiter::store::Key;
use zae_limiter_aggregator::StreamRecord;
use zae_limiter_aggregator::daemon::{AwsStream, Begin, Stream as _};
use zae_limiter_schema::{ParsedKey, Value, parse_key};

use crate::endpoint;

/// A table with a stream, and the program on it.
struct Play {
    address: DynamoAddress,
    home: tempfile::TempDir,
}

impl Play {
    async fn new(table: &str) -> Self {
        endpoint::table(table).await;
        let address = DynamoAddress {
            table: table.to_owned(),
            region: Some("us-east-1".to_owned()),
            endpoint: Some(endpoint::address().to_owned()),
        };
        Self { address, home: tempfile::tempdir().unwrap() }
    }

    fn command(&self, line: &str) -> Command {
        let store = format!(
            "dynamodb:{}?region=us-east-1&endpoint={}",
            self.address.table,
            endpoint::address()
        );
        let mut command = Command::new(env!("CARGO_BIN_EXE_zae-limiter"));
        command
            .env_clear()
            .env("HOME", self.home.path())
            .env("AWS_ACCESS_KEY_ID", "local")
            .env("AWS_SECRET_ACCESS_KEY", "local")
            .args(["--store", &store])
            .args(line.split(' '))
            .stdin(Stdio::null());
        command
    }

    fn run(&self, line: &str) -> Output {
        self.command(line).output().unwrap()
    }

    fn json(&self, line: &str) -> Json {
        let output = self.run(&format!("{line} -o json"));
        assert!(output.status.success(), "{output:?}");
        assert!(output.stderr.is_empty(), "{output:?}");
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// All changes of the table so far.
    async fn changes(&self) -> Vec<StreamRecord> {
        let stream = AwsStream::open(&self.address.config().await, &self.address.table).await;
        let stream = stream.unwrap();
        let mut changes = Vec::new();
        for shard in stream.shards().await.unwrap() {
            let mut next = Some(stream.iterator(&shard.id, &Begin::Oldest).await.unwrap());
            while let Some(iterator) = next {
                let page = stream.page(&iterator).await.unwrap();
                // An open stream shard never ends.
                next = page.next.filter(|_| !page.records.is_empty());
                changes.extend(page.records.into_iter().map(Result::unwrap));
            }
        }
        changes
    }

    /// All buckets that ever existed, by entity.
    async fn buckets(&self) -> BTreeMap<String, Bucket> {
        let mut buckets: BTreeMap<String, Bucket> = BTreeMap::new();
        for change in self.changes().await {
            let (entity, shard) = match parse_key(&change.key) {
                Some(ParsedKey::Record(Key::Bucket(bucket))) => (bucket.entity, 0),
                Some(ParsedKey::Shard(key)) => (key.bucket.entity, key.shard),
                _ => continue,
            };
            let bucket = buckets.entry(entity.to_string()).or_default();
            let Some(item) = change.new else {
                bucket.deleted.insert(shard);
                continue;
            };
            let number = |name: &str| item.get(name).and_then(Value::as_i64).unwrap_or(0);
            bucket.shards.insert(shard, number("shard_count"));
            bucket.consumed.insert(shard, number("b_rpm_tc"));
        }
        buckets
    }
}

/// The history of a bucket.
#[derive(Debug, Default)]
struct Bucket {
    /// The last `shard_count` of each shard.
    shards: BTreeMap<u32, i64>,
    /// Net consumption of each shard, in millitokens.
    consumed: BTreeMap<u32, i64>,
    deleted: BTreeSet<u32>,
}

impl Bucket {
    #[track_caller]
    fn has(&self, shards: u32) {
        let expected: BTreeMap<u32, i64> =
            (0..shards).map(|shard| (shard, shards.into())).collect();
        assert_eq!(self.shards, expected);
        let deleted: Vec<u32> = self.deleted.iter().copied().collect();
        assert_eq!(deleted, (0..shards).collect::<Vec<u32>>(), "nothing is left of it");
    }
}

#[track_caller]
fn number(row: &Json, name: &str) -> f64 {
    row[name].as_f64().unwrap_or_else(|| panic!("no {name} in {row}"))
}

#[tokio::test]
async fn one_bucket_with_one_and_with_eight_shards() {
    let play = Play::new("bench-shards").await;
    let report = play.json("bench --shards 1,8 --concurrency 32 --each 20");
    assert_eq!((&report["processes"], &report["over_admitted"]), (&8.into(), &0.into()));
    let rows = report["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 2);
    for (row, shards) in rows.iter().zip([1, 8]) {
        assert_eq!(
            (&row["shards"], &row["shards_at_end"]),
            (&shards.into(), &shards.into()),
            "{row}"
        );
        let whole = ["acquires", "admitted", "refused", "failed", "entities", "concurrency"];
        let whole = whole.map(|name| row[name].as_u64());
        assert_eq!(whole, [640, 640, 0, 0, 1, 32].map(Some), "{row}");
        // Callers of a process share writes, so an acquire may cost less than one write. A write
        // that conflicts with another process is repeated.
        let units = number(row, "write_units_per_acquire");
        assert!((0.05..=2.0).contains(&units), "{row}");
        let trips = number(row, "round_trips_per_acquire");
        assert!((0.05..=2.0).contains(&trips), "{row}");
        assert!(number(row, "acquires_per_second") > 0.0, "{row}");
        for quantile in ["p50", "p99", "max"] {
            assert!(row["latency_ms"][quantile].as_f64().unwrap() > 0.0, "{row}");
        }
    }
    assert_eq!(rows[0]["ratio"], 1.0);
    assert!(number(&rows[1], "ratio") > 0.0);
    let buckets = play.buckets().await;
    assert_eq!(buckets.len(), 2, "{buckets:?}");
    buckets["row-1-shards-1"].has(1);
    buckets["row-2-shards-8"].has(8);
    for bucket in buckets.values() {
        assert_eq!(bucket.consumed.values().sum::<i64>(), 640_000, "{bucket:?}");
    }
    // The processes are not all on one shard.
    let used = buckets["row-2-shards-8"].consumed.values().filter(|consumed| **consumed > 0);
    assert!(used.count() > 2, "{buckets:?}");
}

#[tokio::test]
async fn limits_hold_to_the_token_however_many_shards_there_are() {
    let play = Play::new("bench-shards-limits").await;
    // One token refills in ten minutes.
    let line = "bench --shards 4,1,16 --processes 3 --concurrency 12 --each 20 -l rpm:150/day";
    let report = play.json(line);
    assert_eq!(report["processes"], 3);
    assert_eq!(report["over_admitted"], 0, "{report}");
    for row in report["rows"].as_array().unwrap() {
        let admitted = row["admitted"].as_u64().unwrap();
        assert!((150..=151).contains(&admitted), "all of it and no more: {row}");
        assert_eq!(row["refused"].as_u64().unwrap(), 240 - admitted, "{row}");
        assert_eq!(row["limits"][0], "rpm:150/86400s:150");
    }
    let buckets = play.buckets().await;
    for (entity, shards) in [("row-1-shards-4", 4), ("row-2-shards-1", 1), ("row-3-shards-16", 16)]
    {
        buckets[entity].has(shards);
    }
}

#[tokio::test]
async fn ctrl_c_ends_it_with_the_rows_so_far() {
    let play = Play::new("bench-shards-ended").await;
    let mut bench = play.command("bench --shards 2,8 --concurrency 2 --duration 10min -o json");
    let bench = bench.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let is_on = |bucket: &Bucket| bucket.consumed.values().sum::<i64>() >= 20_000;
    while !play.buckets().await.get("row-1-shards-2").is_some_and(is_on) {}
    let pid = Pid::from_raw(i32::try_from(bench.id()).unwrap()).unwrap();
    kill_process(pid, Signal::INT).unwrap();
    let output = bench.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{output:?}");
    let report: Json = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["rows"].as_array().map(Vec::len), Some(1), "{report}");
    assert_eq!(report["rows"][0]["shards"], 2, "{report}");
    let buckets = play.buckets().await;
    assert_eq!(buckets.len(), 1, "{buckets:?}");
    buckets["row-1-shards-2"].has(2);
}

#[tokio::test]
async fn the_table_for_people() {
    let play = Play::new("bench-shards-table").await;
    let output = play.run("bench --shards 2 --concurrency 2 --each 5 -c rpm:3");
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines[1], "load      1 bucket for each row, 2 callers in 2 processes");
    assert_eq!(lines[2], "taken     rpm:3");
    let heads: Vec<&str> = lines[4].split_whitespace().collect();
    assert_eq!(heads[..3], ["SHARDS", "ACQUIRES/S", "RATIO"], "{text}");
    let cells: Vec<&str> = lines[5].split_whitespace().collect();
    assert_eq!((cells[0], cells[2]), ("2", "1.00"), "{text}");
    assert!(text.contains("row-1-shards-2  rpm          30"), "{text}");
    // A call above the capacity is an error, and the temporary namespace is removed.
    let output = play.run("bench --shards 2 -l rpm:10 -c rpm:11");
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("11 tokens of rpm can never be admitted"), "{said}");
    let namespaces = play.json("namespace list");
    assert_eq!(namespaces.as_array().unwrap().len(), 1, "{namespaces}");
}
