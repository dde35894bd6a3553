//! The records of a table's stream as the event that Lambda passes to a function.

use aws_sdk_dynamodbstreams::Client;
use aws_sdk_dynamodbstreams::config::{BehaviorVersion, Credentials, Region};
use aws_sdk_dynamodbstreams::types::{AttributeValue, Record, ShardIteratorType};
use serde_json::{Value as Json, json};

/// An event with all records of the table's stream.
pub(crate) async fn event(endpoint: &str, table: &str) -> String {
    let config = aws_sdk_dynamodbstreams::Config::builder()
        .behavior_version(BehaviorVersion::latest())
        .region(Region::new("us-east-1"))
        .credentials_provider(Credentials::new("local", "local", None, None, "test"))
        .endpoint_url(endpoint)
        .http_client(aws_smithy_http_client::Builder::new().build_http())
        .build();
    let client = Client::from_conf(config);
    let listed = client.list_streams().table_name(table).send().await.unwrap();
    let arn = listed.streams()[0].stream_arn().unwrap().to_owned();
    let described = client.describe_stream().stream_arn(&arn).send().await.unwrap();
    let mut records = Vec::new();
    for shard in described.stream_description().unwrap().shards() {
        let request = client.get_shard_iterator().stream_arn(&arn);
        let request = request.shard_id(shard.shard_id().unwrap());
        let oldest = request.shard_iterator_type(ShardIteratorType::TrimHorizon).send().await;
        let iterator = oldest.unwrap().shard_iterator.unwrap();
        let page = client.get_records().shard_iterator(iterator).send().await.unwrap();
        records.extend(page.records().iter().map(|one| record(one, &arn)));
    }
    json!({ "Records": records }).to_string()
}

fn record(record: &Record, arn: &str) -> Json {
    let change = record.dynamodb().unwrap();
    let mut dynamodb = json!({
        "Keys": item(change.keys().unwrap()),
        "SequenceNumber": change.sequence_number(),
        "ApproximateCreationDateTime": change.approximate_creation_date_time().unwrap().secs(),
    });
    for (name, image) in [("OldImage", change.old_image()), ("NewImage", change.new_image())] {
        if let Some(image) = image.filter(|image| !image.is_empty()) {
            dynamodb[name] = item(image);
        }
    }
    let name = record.event_name().unwrap().as_str();
    json!({ "eventName": name, "eventSourceARN": arn, "dynamodb": dynamodb })
}

fn item(attributes: &std::collections::HashMap<String, AttributeValue>) -> Json {
    Json::Object(attributes.iter().map(|(name, one)| (name.clone(), value(one))).collect())
}

fn value(value: &AttributeValue) -> Json {
    match value {
        AttributeValue::S(text) => json!({ "S": text }),
        AttributeValue::N(number) => json!({ "N": number }),
        AttributeValue::Bool(flag) => json!({ "BOOL": flag }),
        AttributeValue::M(members) => json!({ "M": item(members) }),
        AttributeValue::L(members) => {
            json!({ "L": members.iter().map(self::value).collect::<Vec<_>>() })
        }
        AttributeValue::Ss(texts) => json!({ "SS": texts }),
        _ => json!({ "NULL": true }),
    }
}
