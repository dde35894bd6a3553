//! The stream of a DynamoDB table, over the AWS SDK.

use std::sync::Arc;
use std::time::Duration;

use aws_config::SdkConfig;
use aws_config::retry::RetryConfig;
use aws_config::timeout::TimeoutConfig;
use aws_sdk_dynamodbstreams::Client;
use aws_sdk_dynamodbstreams::error::{ProvideErrorMetadata, SdkError};
use aws_sdk_dynamodbstreams::types::{
    AttributeValue, OperationType, Record, ShardIteratorType, StreamRecord as SdkChange,
};
use zae_limiter_core::{BoxFuture, Timestamp};
use zae_limiter_dynamodb::aws::{Call, FailedKind, Places};
use zae_limiter_schema::records::booking::{Position, stream_label};
use zae_limiter_schema::{Item, ItemKey, Value};

use super::plan::{End, StreamShard};
use super::stream::{Begin, Page, Stream, StreamError, StreamErrorKind};
use crate::event::{EXPIRY_PRINCIPAL, EventKind, StreamRecord, Unreadable};

/// The time limit of one call, retries and credentials included, unless the configuration has one.
const TIMEOUT: Duration = Duration::from_secs(10);

/// The stream of a table.
#[derive(Debug)]
pub struct AwsStream {
    calls: Calls,
    table: String,
    arn: String,
    label: String,
}

/// The client, and how errors describe its calls.
#[derive(Clone, Debug)]
struct Calls {
    client: Client,
    /// For example `at http://127.0.0.1:8000`.
    place: String,
    limit: Duration,
}

const SERVICE: &str = "DynamoDB Streams";
/// The call that opens a stream.
const LIST_STREAMS: &str = "ListStreams";

impl Calls {
    fn new(config: &SdkConfig) -> Self {
        let limit = config.timeout_config().and_then(TimeoutConfig::operation_timeout);
        let limit = limit.unwrap_or(TIMEOUT);
        let place = Places::of(config).of_service(SERVICE);
        let config = aws_sdk_dynamodbstreams::config::Builder::from(config)
            .retry_config(RetryConfig::standard().with_max_attempts(4))
            .timeout_config(TimeoutConfig::builder().operation_timeout(limit).build());
        Self { client: Client::from_conf(config.build()), place, limit }
    }

    /// The error of an operation that was to read `what`.
    fn error<E>(&self, what: &str, operation: &'static str, error: &SdkError<E>) -> StreamError
    where
        E: ProvideErrorMetadata + std::error::Error + 'static,
    {
        let (place, limit) = (self.place.clone(), self.limit);
        stream_error(what, &Call { service: SERVICE, operation, place, limit }, error)
    }
}

impl AwsStream {
    /// Opens the oldest stream of a table that can still be read. The daemon continues with the later ones.
    ///
    /// # Errors
    ///
    /// If the table has no stream, or DynamoDB does not answer.
    pub async fn open(config: &SdkConfig, table: &str) -> Result<Self, StreamError> {
        let calls = Calls::new(config);
        let streams = Self::list(&calls, table).await?;
        streams.into_iter().next().ok_or_else(|| StreamError {
            kind: StreamErrorKind::NotFound,
            message: format!("table {table} has no stream; enable one with new and old images"),
        })
    }

    /// The streams of a table, the oldest first. A disabled one stays for a day.
    async fn list(calls: &Calls, table: &str) -> Result<Vec<Self>, StreamError> {
        let mut found: Vec<Self> = Vec::new();
        let mut after: Option<String> = None;
        loop {
            let request = calls.client.list_streams().table_name(table);
            let listed = request.set_exclusive_start_stream_arn(after).send().await;
            let listed =
                listed.map_err(|error| calls.error("the table's streams", LIST_STREAMS, &error))?;
            let arns = listed.streams.unwrap_or_default().into_iter().filter_map(|s| s.stream_arn);
            found.extend(arns.filter_map(|arn| Self::new(calls, table, arn)));
            after = listed.last_evaluated_stream_arn;
            if after.is_none() {
                break;
            }
        }
        found.sort_by(|one, other| one.label.cmp(&other.label));
        Ok(found)
    }

    /// The stream of this ARN. `None` if the ARN names no stream.
    fn new(calls: &Calls, table: &str, arn: String) -> Option<Self> {
        let label = stream_label(&arn)?.to_owned();
        Some(Self { calls: calls.clone(), table: table.to_owned(), arn, label })
    }
}

impl Stream for AwsStream {
    fn label(&self) -> &str {
        &self.label
    }

    fn shards(&self) -> BoxFuture<'_, Result<Vec<StreamShard>, StreamError>> {
        Box::pin(async {
            let (mut shards, mut after): (Vec<StreamShard>, Option<String>) = (Vec::new(), None);
            loop {
                let request = self.calls.client.describe_stream().stream_arn(&self.arn);
                let described = request.set_exclusive_start_shard_id(after).send().await;
                let described = described
                    .map_err(|error| self.calls.error("the stream", "DescribeStream", &error))?;
                let Some(stream) = described.stream_description else { return Ok(shards) };
                for shard in stream.shards.unwrap_or_default() {
                    let Some(id) = shard.shard_id else { continue };
                    let range = shard.sequence_number_range;
                    let last = range.and_then(|range| range.ending_sequence_number);
                    let (parent, end) = (shard.parent_shard_id, last.map_or(End::Open, End::After));
                    shards.push(StreamShard { id, parent, end });
                }
                after = stream.last_evaluated_shard_id;
                if after.is_none() {
                    return Ok(shards);
                }
            }
        })
    }

    fn iterator<'a>(
        &'a self,
        stream_shard: &'a str,
        begin: &'a Begin,
    ) -> BoxFuture<'a, Result<String, StreamError>> {
        Box::pin(async move {
            let request = self.calls.client.get_shard_iterator().stream_arn(&self.arn);
            let request = request.shard_id(stream_shard);
            let request = match begin {
                Begin::Oldest => request.shard_iterator_type(ShardIteratorType::TrimHorizon),
                Begin::After(number) => request
                    .shard_iterator_type(ShardIteratorType::AfterSequenceNumber)
                    .sequence_number(number),
            };
            let sent = request.send().await;
            let output =
                sent.map_err(|error| self.calls.error(STREAM_SHARD, "GetShardIterator", &error))?;
            output.shard_iterator.ok_or_else(|| StreamError {
                kind: StreamErrorKind::NotFound,
                message: format!("could not read stream shard {stream_shard}"),
            })
        })
    }

    fn page<'a>(&'a self, iterator: &'a str) -> BoxFuture<'a, Result<Page, StreamError>> {
        Box::pin(async move {
            let sent = self.calls.client.get_records().shard_iterator(iterator).send().await;
            let output =
                sent.map_err(|error| self.calls.error(STREAM_SHARD, "GetRecords", &error))?;
            let records = output.records.unwrap_or_default();
            let records = records.into_iter().map(|record| self.read(record)).collect();
            Ok(Page { records, next: output.next_shard_iterator })
        })
    }

    fn successor(&self) -> BoxFuture<'_, Result<Option<Arc<dyn Stream>>, StreamError>> {
        Box::pin(async {
            let streams = Self::list(&self.calls, &self.table).await?;
            let next = streams.into_iter().find(|stream| self.label < stream.label);
            Ok(next.map(|stream| Arc::new(stream) as Arc<dyn Stream>))
        })
    }
}

impl AwsStream {
    fn read(&self, record: Record) -> Result<StreamRecord, Unreadable> {
        let change = record.dynamodb;
        let number = change.as_ref().and_then(|change| change.sequence_number.clone());
        let principal = record.user_identity.and_then(|identity| identity.principal_id);
        let expired = principal.as_deref() == Some(EXPIRY_PRINCIPAL);
        let kind = match record.event_name {
            Some(OperationType::Insert) => Ok(EventKind::Insert),
            Some(OperationType::Modify) => Ok(EventKind::Modify),
            Some(OperationType::Remove) if expired => Ok(EventKind::Expire),
            Some(OperationType::Remove) => Ok(EventKind::Remove),
            other => Err(format!("eventName is {other:?}, not INSERT, MODIFY or REMOVE")),
        };
        let read = kind.and_then(|kind| self.convert(kind, change.ok_or("it is empty")?));
        read.map_err(|message| Unreadable { sequence_number: number, message })
    }

    fn convert(&self, kind: EventKind, change: SdkChange) -> Result<StreamRecord, String> {
        let sequence_number = change.sequence_number.ok_or("it has no SequenceNumber")?;
        let position = Position::new(&self.label, &sequence_number)
            .ok_or_else(|| format!("SequenceNumber is not a number: {sequence_number}"))?;
        let keys = change.keys.map(item).unwrap_or_default();
        let text = |name: &str| {
            let text = keys.get(name).and_then(Value::as_str);
            text.map(str::to_owned).ok_or_else(|| format!("its key has no string {name}"))
        };
        let at = change.approximate_creation_date_time.and_then(|at| at.to_millis().ok());
        Ok(StreamRecord {
            kind,
            key: ItemKey::new(text("PK")?, text("SK")?),
            old: change.old_image.map(item),
            new: change.new_image.map(item),
            at: Timestamp::from_millis(at.ok_or("it has no ApproximateCreationDateTime")?),
            position,
            sequence_number,
        })
    }
}

fn item(attributes: std::collections::HashMap<String, AttributeValue>) -> Item {
    attributes.into_iter().map(|(name, attribute)| (name, value(attribute))).collect()
}

fn value(attribute: AttributeValue) -> Value {
    match attribute {
        AttributeValue::S(text) => Value::S(text),
        AttributeValue::N(number) => Value::N(number),
        AttributeValue::Bool(flag) => Value::Bool(flag),
        AttributeValue::Null(_) => Value::Null,
        AttributeValue::M(members) => Value::M(item(members)),
        AttributeValue::L(members) => Value::L(members.into_iter().map(value).collect()),
        AttributeValue::Ss(texts) => Value::Ss(texts.into_iter().collect()),
        _ => Value::Other(0),
    }
}

/// What a call was about, for [`stream_error`].
const STREAM_SHARD: &str = "a stream shard";

/// Classifies an error of the SDK. `what` is what the call was to read.
fn stream_error<E>(what: &str, call: &Call, error: &SdkError<E>) -> StreamError
where
    E: ProvideErrorMetadata + std::error::Error + 'static,
{
    let failed = call.failed(error);
    let code = error.as_service_error().and_then(ProvideErrorMetadata::code);
    let kind = match (code, failed.kind) {
        (Some("ExpiredIteratorException"), _) => StreamErrorKind::Expired,
        (Some("TrimmedDataAccessException"), _) => StreamErrorKind::Trimmed,
        (Some("ResourceNotFoundException"), _) => StreamErrorKind::NotFound,
        (Some("ValidationException"), _) => StreamErrorKind::Permanent,
        // The source of the credentials may recover while the daemon runs.
        (None, FailedKind::Denied) if call.operation != LIST_STREAMS => StreamErrorKind::Transient,
        (_, FailedKind::Denied | FailedKind::NoService) => StreamErrorKind::Permanent,
        // No request could be built, or the endpoint is not one of DynamoDB.
        (None, FailedKind::Rejected) => StreamErrorKind::Permanent,
        _ => StreamErrorKind::Transient,
    };
    StreamError { kind, message: format!("could not read {what}: {}", failed.message) }
}

#[cfg(test)]
mod tests {
    use aws_config::{BehaviorVersion, Region};
    use aws_sdk_dynamodbstreams::config::{Credentials, SharedCredentialsProvider};
    use aws_sdk_dynamodbstreams::primitives::DateTime;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;

    use super::*;
    use crate::event::read_record;

    const ARN: &str =
        "arn:aws:dynamodb:us-east-1:123456789012:table/limiter/stream/2026-11-01T00:00:00.000";

    /// The stream at an endpoint that lists it under another label than its ARN has.
    async fn stream() -> AwsStream {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let endpoint = format!("http://{}", listener.local_addr().expect("it is bound"));
        let list = serde_json::json!({ "Streams": [
            { "StreamArn": ARN, "StreamLabel": "2026-11-09T09:09:09.999", "TableName": "limiter" },
        ] });
        tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.expect("a client");
            let mut request = [0; 4_096];
            let _ = stream.read(&mut request).await.expect("a request");
            let body = list.to_string();
            let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", body.len());
            stream.write_all(format!("{head}{body}").as_bytes()).await.expect("it listens");
        });
        let credentials = Credentials::new("local", "local", None, None, "test");
        let config = SdkConfig::builder()
            .behavior_version(BehaviorVersion::latest())
            .region(Region::new("us-east-1"))
            .credentials_provider(SharedCredentialsProvider::new(credentials))
            .http_client(aws_smithy_http_client::Builder::new().build_http())
            .endpoint_url(endpoint)
            .build();
        AwsStream::open(&config, "limiter").await.expect("it is listed")
    }

    /// A record as the daemon gets it.
    fn from_stream(stream: &AwsStream, number: &str) -> StreamRecord {
        let text = |text: &str| AttributeValue::S(text.to_owned());
        let change = SdkChange::builder()
            .keys("PK", text("abcdefghijk/BUCKET#key-1#gpt-4#0"))
            .keys("SK", text("#STATE"))
            .sequence_number(number)
            .approximate_creation_date_time(DateTime::from_secs(1_794_751_200));
        let record = Record::builder().event_name(OperationType::Modify).dynamodb(change.build());
        stream.read(record.build()).expect("legal")
    }

    /// The same record as Lambda passes it to the function.
    fn from_lambda(number: &str) -> StreamRecord {
        let record = serde_json::json!({
            "eventName": "MODIFY",
            "eventSourceARN": ARN,
            "dynamodb": {
                "Keys": {
                    "PK": { "S": "abcdefghijk/BUCKET#key-1#gpt-4#0" },
                    "SK": { "S": "#STATE" },
                },
                "SequenceNumber": number,
                "ApproximateCreationDateTime": 1_794_751_200,
            },
        });
        read_record(&record.to_string()).expect("legal")
    }

    #[tokio::test]
    async fn function_and_daemon_give_a_change_the_same_position() {
        let stream = stream().await;
        let timeouts = stream.calls.client.config().timeout_config().expect("it is set");
        assert_eq!(timeouts.operation_timeout(), Some(TIMEOUT));
        for number in ["1", "100000000000000000001", "00042"] {
            assert_eq!(from_stream(&stream, number), from_lambda(number));
        }
    }
}
