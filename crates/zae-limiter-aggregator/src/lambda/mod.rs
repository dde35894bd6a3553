//! The aggregator as an AWS Lambda function on the table's stream.
//!
//! | variable | meaning |
//! | --- | --- |
//! | `TABLE_NAME` | the table; must be there |
//! | `SNAPSHOT_WINDOWS` | the windows of usage records: `hourly,daily,monthly` |
//! | `SNAPSHOT_TTL_DAYS` | how long usage records are kept after their windows' ends: 90 |
//! | `ENABLE_REFILL` | whether buckets that run short are refilled: `true` |
//! | `ENABLE_ARCHIVAL` | whether expired audit events are kept: `false` |
//! | `ARCHIVE_BUCKET_NAME` | the S3 bucket to keep them in; must be there if they are |
//!
//! The answer to a batch names the records that have to come again (`batchItemFailures`); the event
//! source mapping must have `ReportBatchItemFailures`.

mod log;
mod runtime_api;

use std::collections::BTreeMap;
use std::fmt;
use std::io::Write;
use std::process::ExitCode;
use std::sync::Arc;

use serde_json::{Value as Json, json};
use zae_limiter_core::{Clock, SystemClock};
use zae_limiter_dynamodb::aws::{AwsTable, DynamoAddress};

use crate::archive_s3::Bucket;
use crate::event::read_event;
use crate::execute::{Aggregator, Report};
use crate::settings::{Settings, flag};
use crate::split::Splitter;

use log::Log;
use runtime_api::RuntimeApi;

/// The variable by which Lambda tells where it is.
const RUNTIME_API: &str = "AWS_LAMBDA_RUNTIME_API";

/// Whether Lambda has started this process.
pub fn is_called_by_lambda() -> bool {
    std::env::var_os(RUNTIME_API).is_some()
}

/// Answers invocations for as long as Lambda lets the process live.
pub fn main() -> ExitCode {
    let env = std::env::vars_os();
    let text = |(name, value): (std::ffi::OsString, std::ffi::OsString)| {
        Some((name.into_string().ok()?, value.into_string().ok()?))
    };
    let env: BTreeMap<String, String> = env.filter_map(text).collect();
    let mut log = Log::new(Box::new(std::io::stdout()), Arc::new(SystemClock));
    // One thread: it waits for the network, and a small function has no second processor.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let ended = match runtime {
        Ok(runtime) => runtime.block_on(Box::pin(run(&env, &mut log))),
        Err(error) => Err(Stopped(format!("the runtime cannot be started: {error}"))),
    };
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(stopped) => {
            log.error("the function stops", &json!({ "error": stopped.0 }));
            ExitCode::FAILURE
        }
    }
}

/// Why the function cannot go on.
struct Stopped(String);

impl fmt::Display for Stopped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

async fn run(env: &BTreeMap<String, String>, log: &mut Log) -> Result<(), Stopped> {
    let address =
        env.get(RUNTIME_API).ok_or_else(|| Stopped(format!("{RUNTIME_API} is not set")))?;
    let mut api = RuntimeApi::new(address);
    let function = match Function::start(env).await {
        Ok(function) => function,
        Err(message) => {
            // Whether it is heard or not, the function stops.
            let _ = api.fail_to_start(&message).await;
            return Err(Stopped(message));
        }
    };
    loop {
        let invocation = api.next().await.map_err(Stopped)?;
        let answered = match function.answer(&invocation.event, &invocation.id, log).await {
            Ok(answer) => api.answer(&invocation.id, &answer).await,
            Err(message) => {
                let about = json!({ "request_id": invocation.id, "error": message });
                log.error("the event cannot be read", &about);
                api.fail(&invocation.id, &message).await
            }
        };
        answered.map_err(Stopped)?;
    }
}

/// The function, ready for invocations.
struct Function {
    aggregator: Aggregator,
    clock: Arc<dyn Clock>,
    table: String,
}

impl Function {
    async fn start(env: &BTreeMap<String, String>) -> Result<Self, String> {
        let named = |name: &str| env.get(name).filter(|value| !value.is_empty()).cloned();
        let table = named("TABLE_NAME").ok_or("TABLE_NAME is not set; name the limiter's table")?;
        let settings = Settings::of_env(env).map_err(|invalid| invalid.to_string())?;
        let keeps = flag(env, "ENABLE_ARCHIVAL").map_err(|invalid| invalid.to_string())?;
        let clock: Arc<dyn Clock> = Arc::new(SystemClock);
        let address = DynamoAddress { table: table.clone(), region: None, endpoint: None };
        let client = address.client().await;
        let aws_table = Arc::new(AwsTable::new(client, &table, Arc::clone(&clock)));
        let splitter = Splitter::new(Arc::clone(&aws_table) as _, Arc::clone(&clock));
        let mut aggregator =
            Aggregator::new(aws_table, Arc::clone(&clock), settings).split(Arc::new(splitter));
        if keeps == Some(true) {
            let bucket = named("ARCHIVE_BUCKET_NAME")
                .ok_or("ENABLE_ARCHIVAL is true, but ARCHIVE_BUCKET_NAME is not set")?;
            aggregator = aggregator.archive(Arc::new(Bucket::open(bucket).await));
        }
        Ok(Self { aggregator, clock, table })
    }

    async fn answer(&self, event: &str, id: &str, log: &mut Log) -> Result<String, String> {
        let began = self.clock.stopwatch();
        let records = read_event(event).map_err(|error| format!("no stream event: {error}"))?;
        let report = self.aggregator.process(records).await;
        let took = self.clock.stopwatch().saturating_sub(began);
        log.report(&self.table, id, &report, took);
        Ok(answer_of(&report).to_string())
    }
}

/// The answer to a batch: which records have to come again, and figures for people.
fn answer_of(report: &Report) -> Json {
    let failure = |number: &String| json!({ "itemIdentifier": number });
    json!({
        "batchItemFailures": report.failed.iter().map(failure).collect::<Vec<_>>(),
        "statusCode": 200,
        "body": {
            "processed": report.processed,
            "snapshots_updated": report.snapshots_updated,
            "refills_written": report.refills_written,
            "events_archived": report.events_archived,
            "errors": report.errors,
        },
    })
}

/// Anything that takes lines.
type Sink = Box<dyn Write + Send>;
