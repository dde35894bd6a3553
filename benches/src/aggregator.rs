//! The aggregator without its writes: from Lambda's JSON to the writes to make, on one core. If
//! `ZAEL_PYTHON` names a Python with the Python client 0.17.0, its handler gets the same events, with a
//! table that does nothing.

use std::fmt::Write as _;
use std::io::Write as _;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use zae_limiter_aggregator::{Change, Settings, change_of, effects_of, read_event};
use zae_limiter_core::Timestamp;

use crate::measure::ROUNDS;
use crate::report::{Report, grouped};

const BATCHES: usize = 200;
const BATCH: usize = 100;
const ENTITIES: usize = 20;
const SECONDS: i64 = 1_794_751_200;

/// A bucket's item with two limits, as the store writes it.
fn image(entity: usize, count: usize) -> String {
    let mut text = String::new();
    let _ = write!(
        text,
        r##"{{"PK":{{"S":"abcdefghijk/BUCKET#key-{entity}#gpt-4#0"}},"SK":{{"S":"#STATE"}},"entity_id":{{"S":"key-{entity}"}},"resource":{{"S":"gpt-4"}},"cascade":{{"BOOL":false}},"parent_id":{{"NULL":true}},"rf":{{"N":"{SECONDS}000"}},"rm_at":{{"N":"{SECONDS}000"}},"shard_count":{{"N":"1"}},"ttl":{{"N":"{}"}}"##,
        SECONDS + 7_000
    );
    for (limit, taken) in [("rpm", 1_000), ("tpm", 250_000)] {
        let consumed = count * taken;
        let _ = write!(
            text,
            r#","b_{limit}_tk":{{"N":"{}"}},"b_{limit}_cp":{{"N":"1000000000"}},"b_{limit}_ra":{{"N":"1000000000"}},"b_{limit}_rp":{{"N":"60000"}},"b_{limit}_tc":{{"N":"{consumed}"}}"#,
            1_000_000_000 - consumed
        );
    }
    let _ = write!(
        text,
        r##","b_wcu_tk":{{"N":"999000"}},"b_wcu_cp":{{"N":"1000000"}},"b_wcu_ra":{{"N":"1000000"}},"b_wcu_rp":{{"N":"1000"}},"b_wcu_tc":{{"N":"{}"}},"GSI2PK":{{"S":"abcdefghijk/RESOURCE#gpt-4"}},"GSI2SK":{{"S":"BUCKET#key-{entity}#0"}},"GSI3PK":{{"S":"abcdefghijk/ENTITY#key-{entity}"}},"GSI3SK":{{"S":"BUCKET#gpt-4#0"}},"GSI4PK":{{"S":"abcdefghijk"}},"GSI4SK":{{"S":"BUCKET#key-{entity}#gpt-4#0"}}}}"##,
        count * 1_000
    );
    text
}

/// Batches as Lambda delivers them: changes of 20 buckets, in turn.
fn events() -> Vec<String> {
    let mut number = 0;
    let mut event = || {
        let mut text = r#"{"Records":["#.to_owned();
        for place in 0..BATCH {
            let (entity, count) = (number % ENTITIES, number / ENTITIES + 1);
            let comma = if place == 0 { "" } else { "," };
            let _ = write!(
                text,
                r##"{comma}{{"eventID":"{number:032x}","eventName":"MODIFY","eventVersion":"1.1","eventSource":"aws:dynamodb","awsRegion":"us-east-1","dynamodb":{{"ApproximateCreationDateTime":{SECONDS}.0,"Keys":{{"PK":{{"S":"abcdefghijk/BUCKET#key-{entity}#gpt-4#0"}},"SK":{{"S":"#STATE"}}}},"NewImage":{},"OldImage":{},"SequenceNumber":"{}","SizeBytes":1600,"StreamViewType":"NEW_AND_OLD_IMAGES"}},"eventSourceARN":"arn:aws:dynamodb:us-east-1:123456789012:table/limiter/stream/2026-11-01T00:00:00.000"}}"##,
                image(entity, count),
                image(entity, count - 1),
                100_000_000_000_000_000_000_u128 + number as u128
            );
            number += 1;
        }
        text.push_str("]}");
        text
    };
    (0..BATCHES).map(|_| event()).collect()
}

/// Processes a batch and returns the number of writes to make.
fn process(event: &str, settings: &Settings) -> usize {
    let records = read_event(event).expect("an event");
    let changes = records.into_iter().map(|record| change_of(record.expect("a record")));
    let changes: Vec<_> = changes
        .filter_map(|change| match change.expect("a change") {
            Change::Bucket(change) => Some(change),
            _ => None,
        })
        .collect();
    let now = Timestamp::from_millis(SECONDS * 1_000 + 500);
    let effects = effects_of(&changes, settings, now);
    let bookings = effects.usage.iter().filter_map(|usage| usage.booking(&changes, None, None));
    let updates: Vec<_> = bookings.map(|booking| booking.add()).collect();
    std::hint::black_box(&updates);
    updates.len() + effects.refills.len()
}

pub fn run(report: &mut Report) {
    report.title("Aggregator: stream records per second on one core, without the writes");
    let events = events();
    let settings = Settings::default();
    let mut best = Duration::MAX;
    let mut writes = 0;
    for _ in 0..ROUNDS {
        let start = Instant::now();
        writes = events.iter().map(|event| process(event, &settings)).sum();
        best = best.min(start.elapsed());
    }
    let records = (BATCHES * BATCH) as f64;
    let ours = records / best.as_secs_f64();
    report.line("| aggregator | records per second | writes to make |");
    report.line("| --- | ---: | ---: |");
    report.line(format!("| zae-limiter | {} | {} |", grouped(ours), grouped(writes as f64)));
    match python(&events) {
        Some((theirs, calls)) => {
            let (rate, calls) = (grouped(theirs), grouped(calls as f64));
            report.line(format!("| Python 0.17.0 | {rate} | {calls} |"));
            report.line("");
            report.line(format!("Ratio of the rates: {:.1}.", ours / theirs));
        }
        None => report.line("| Python 0.17.0 | not measured: `ZAEL_PYTHON` is not set | |"),
    }
}

const SCRIPT: &str = r#"
import json, os, sys, time
os.environ.setdefault("AWS_DEFAULT_REGION", "us-east-1")
from zae_limiter_aggregator import processor
calls = 0
class Table:
    def update_item(self, **_):
        global calls
        calls += 1
        return {}
class Resource:
    class meta: client = None
    def Table(self, _): return Table()
processor.boto3.resource = lambda *_: Resource()
events = [line for line in sys.stdin]
out, sys.stdout = sys.stdout, open(os.devnull, "w")
best = None
for _ in range(3):
    calls, start = 0, time.perf_counter()
    for event in events:
        result = processor.process_stream_records(
            json.loads(event)["Records"], "limiter", ["hourly", "daily", "monthly"])
        assert not result.errors, result.errors[0]
    took = time.perf_counter() - start
    best = took if best is None else min(best, took)
print(best, calls, file=out)
"#;

/// Records per second and writes to make of the Python aggregator; `None` without `ZAEL_PYTHON`.
fn python(events: &[String]) -> Option<(f64, usize)> {
    let python = std::env::var_os("ZAEL_PYTHON")?;
    let mut child = Command::new(python)
        .args(["-c", SCRIPT])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("ZAEL_PYTHON is a Python");
    let mut stdin = child.stdin.take().expect("it is piped");
    // Each event is one line.
    stdin.write_all(events.join("\n").as_bytes()).expect("it reads");
    drop(stdin);
    let output = child.wait_with_output().expect("it ends");
    let text = String::from_utf8_lossy(&output.stdout);
    let mut numbers = text.split_whitespace();
    let seconds: f64 = numbers.next().expect("it measures").parse().expect("a number");
    let calls = numbers.next().expect("it counts").parse().expect("a number");
    Some(((BATCHES * BATCH) as f64 / seconds, calls))
}
