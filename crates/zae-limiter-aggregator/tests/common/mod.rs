//! Turns changes of a simulated table into records of a stream.

#![allow(
    dead_code,
    clippy::unwrap_used,
    reason = "not every test needs all of it; a test says what is wrong by panicking"
)]

pub(crate) mod ledger;
pub(crate) mod play;

use serde_json::{Map, Value as Json, json};
use zae_limiter_aggregator::{StreamRecord, Unreadable, read_record};
use zae_limiter_core::Timestamp;
use zae_limiter_schema::{Item, Value};
use zae_limiter_testkit::Changed;

/// 2026-11-15T14:00:00Z, the start of all simulations.
pub(crate) const NOW: Timestamp = Timestamp::from_millis(1_794_751_200_000);

const STREAM: &str =
    "arn:aws:dynamodb:us-east-1:123456789012:table/limiter/stream/2026-11-01T00:00:00.000";

fn attribute(value: &Value) -> Json {
    match value {
        Value::S(text) => json!({ "S": text }),
        Value::N(number) => json!({ "N": number }),
        Value::Bool(flag) => json!({ "BOOL": flag }),
        Value::Null => json!({ "NULL": true }),
        Value::M(members) => json!({ "M": attributes(members) }),
        Value::L(members) => json!({ "L": members.iter().map(attribute).collect::<Vec<_>>() }),
        Value::Ss(texts) => json!({ "SS": texts }),
        Value::Other(_) => json!({ "B": "AAAA" }),
    }
}

pub(crate) fn attributes(item: &Item) -> Json {
    Json::Object(item.iter().map(|(name, value)| (name.clone(), attribute(value))).collect())
}

/// The sequence number of the stream's record of this number.
pub(crate) fn sequence_number(number: u64) -> String {
    format!("{number}00000000000000000000")
}

/// A record of the stream, in the JSON that Lambda gets.
pub(crate) fn record(changed: &Changed, number: u64, at: Timestamp) -> Json {
    let mut dynamodb = Map::new();
    let keys = json!({ "PK": { "S": changed.key.pk }, "SK": { "S": changed.key.sk } });
    dynamodb.insert("Keys".to_owned(), keys);
    for (name, image) in [("OldImage", &changed.old), ("NewImage", &changed.new)] {
        if let Some(image) = image {
            dynamodb.insert(name.to_owned(), attributes(image));
        }
    }
    // To the second, as in DynamoDB.
    let seconds = at.as_millis().div_euclid(1_000);
    dynamodb.insert("ApproximateCreationDateTime".to_owned(), seconds.into());
    dynamodb.insert("SequenceNumber".to_owned(), sequence_number(number).into());
    let name = match (&changed.old, &changed.new) {
        (None, _) => "INSERT",
        (Some(_), Some(_)) => "MODIFY",
        (Some(_), None) => "REMOVE",
    };
    let mut record = json!({
        "eventName": name,
        "eventSource": "aws:dynamodb",
        "eventSourceARN": STREAM,
        "dynamodb": dynamodb,
    });
    if changed.by_table {
        record["userIdentity"] =
            json!({ "type": "Service", "principalId": "dynamodb.amazonaws.com" });
    }
    record
}

pub(crate) fn read(record: &Json) -> Result<StreamRecord, Unreadable> {
    read_record(&record.to_string())
}
