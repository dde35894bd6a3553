//! The aggregator as an AWS Lambda function on the table's stream.
//!
//! | variable | meaning |
//! | --- | --- |
//! | `TABLE_NAME` | the table; required |
//! | `SNAPSHOT_WINDOWS` | the windows of usage records; default `hourly,daily,monthly` |
//! | `SNAPSHOT_TTL_DAYS` | days that usage records are kept after their window ends; default 90 |
//! | `ENABLE_REFILL` | whether to refill buckets that run short; default `true` |
//! | `ENABLE_ARCHIVAL` | whether to archive expired audit events; default `false` |
//! | `ARCHIVE_BUCKET_NAME` | the S3 bucket of the archive; required with `ENABLE_ARCHIVAL` |
//! | `ARCHIVE_BUCKET_OWNER` | the account that must own the bucket; default any |
//!
//! The response to a batch lists the records to deliver again (`batchItemFailures`). The event
//! source mapping must have `ReportBatchItemFailures`.

#[cfg(test)]
mod dashboard_tests;
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
use crate::event::{read_event, unquoted};
use crate::execute::{Aggregator, Report};
use crate::settings::{Settings, flag};
use crate::split::Splitter;

use log::Log;
use runtime_api::RuntimeApi;

/// The variable in which Lambda passes the address of its Runtime API.
const RUNTIME_API: &str = "AWS_LAMBDA_RUNTIME_API";

/// Whether Lambda has started this process.
pub fn is_called_by_lambda() -> bool {
    std::env::var_os(RUNTIME_API).is_some()
}

/// Handles invocations until Lambda ends the process.
pub fn main() -> ExitCode {
    let env = std::env::vars_os();
    let text = |(name, value): (std::ffi::OsString, std::ffi::OsString)| {
        Some((name.into_string().ok()?, value.into_string().ok()?))
    };
    let env: BTreeMap<String, String> = env.filter_map(text).collect();
    let mut log = Log::new(Box::new(std::io::stdout()), Arc::new(SystemClock));
    // One thread: the function waits for the network, and a small one has no second processor.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let ended = match runtime {
        Ok(runtime) => runtime.block_on(Box::pin(run(&env, &mut log))),
        Err(error) => Err(Stopped(format!("could not start the async runtime: {error}"))),
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
            // The function stops even if Lambda does not receive the error.
            let _ = api.fail_to_start(&message).await;
            return Err(Stopped(message));
        }
    };
    loop {
        let invocation = api.next().await.map_err(Stopped)?;
        let responded = match function.handle(&invocation.event, &invocation.id, log).await {
            Ok(response) => api.respond(&invocation.id, &response).await,
            Err(message) => {
                let about = json!({ "request_id": invocation.id, "error": message });
                log.error("could not parse the event", &about);
                api.fail(&invocation.id, &message).await
            }
        };
        responded.map_err(Stopped)?;
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
        let archives = flag(env, "ENABLE_ARCHIVAL").map_err(|invalid| invalid.to_string())?;
        let clock: Arc<dyn Clock> = Arc::new(SystemClock);
        let address = DynamoAddress { table: table.clone(), region: None, endpoint: None };
        let client = address.client().await;
        let aws_table = Arc::new(AwsTable::new(client, &table, Arc::clone(&clock)));
        let splitter = Splitter::new(Arc::clone(&aws_table) as _, Arc::clone(&clock));
        let mut aggregator =
            Aggregator::new(aws_table, Arc::clone(&clock), settings).split(Arc::new(splitter));
        if archives == Some(true) {
            let bucket = named("ARCHIVE_BUCKET_NAME")
                .ok_or("ENABLE_ARCHIVAL is true, but ARCHIVE_BUCKET_NAME is not set")?;
            aggregator = aggregator.archive(Arc::new(
                Bucket::new(&address.config().await, bucket).owner(named("ARCHIVE_BUCKET_OWNER")),
            ));
        }
        Ok(Self { aggregator, clock, table })
    }

    async fn handle(&self, event: &str, id: &str, log: &mut Log) -> Result<String, String> {
        let began = self.clock.stopwatch();
        let records =
            read_event(event).map_err(|error| format!("no stream event: {}", unquoted(&error)))?;
        let report = self.aggregator.process(records).await;
        let took = self.clock.stopwatch().saturating_sub(began);
        log.report(&self.table, id, &report, took);
        Ok(response_of(&report).to_string())
    }
}

/// The response to a batch: the records to deliver again, and counts for people.
fn response_of(report: &Report) -> Json {
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

/// The output of the log.
type Sink = Box<dyn Write + Send>;
