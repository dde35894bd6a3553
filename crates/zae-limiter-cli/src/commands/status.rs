//! `status`

use serde::Serialize;
use zae_limiter::dynamodb::aws::DynamoAddress;
use zae_limiter_infra::versions::{PROGRAM, Versions};
use zae_limiter_infra::{StackState, TableError, TableFigures, records};

use crate::columns::{Cell, print_fields};
use crate::context::Context;
use crate::exit::ExitStatus;
use crate::failure::Failure;
use crate::printer::{Look, count};

use super::list::{look, time};
use super::stack::{self, Account, Found};

const AFTER_HELP: &str = "\
Examples:
  zae-limiter status --name my-app
  zae-limiter status --name my-app -o json | jq .dead_letters

Exit status: 0 found, 4 neither a stack nor a table has that name.";

/// Arguments of `status`.
#[derive(clap::Args, Debug)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct Args {}

/// The status of a stack. What could not be read is null.
#[derive(Serialize)]
struct Report {
    name: String,
    /// The time of one read of the table.
    round_trip_ms: Option<u64>,
    stack: Option<StackJson>,
    table: Option<TableJson>,
    versions: VersionsJson,
    stream_lag_ms: Option<f64>,
    dead_letters: Option<u64>,
}

#[derive(Serialize)]
struct StackJson {
    status: String,
    reason: Option<String>,
    created_at: Option<String>,
    updated_at: Option<String>,
    aggregator: Option<String>,
    archive: Option<String>,
}

#[derive(Serialize)]
struct TableJson {
    status: String,
    items: i64,
    bytes: i64,
    stream: bool,
    deletion_protection: bool,
    indexes: Vec<IndexJson>,
}

#[derive(Serialize)]
struct IndexJson {
    name: String,
    status: String,
    projection: String,
}

#[derive(Serialize)]
pub(super) struct VersionsJson {
    program: &'static str,
    stack: Option<String>,
    aggregator: Option<String>,
    schema: Option<String>,
    verdict: String,
    compatible: bool,
}

impl From<&Versions> for VersionsJson {
    fn from(versions: &Versions) -> Self {
        let verdict = versions.verdict();
        Self {
            program: PROGRAM,
            stack: versions.stack.clone(),
            aggregator: versions.aggregator.clone(),
            schema: versions.schema.clone(),
            verdict: verdict.to_string(),
            compatible: verdict.is_compatible(),
        }
    }
}

pub(crate) async fn run(Args {}: Args, context: &mut Context) -> Result<ExitStatus, Failure> {
    let address = context.stack()?;
    let account = stack::connect(context, &address).await?;
    context.printer.progress(format!("reading the status of {}", address.table));
    let found = stack::find(&account, &address.table).await?;
    let table = stack::figures(&account, &address.table).await?;
    if found.stack().is_none() && table.is_none() {
        let message = format!("there is neither a stack nor a table {}", address.table);
        let hint = "zae-limiter list shows the stacks of this account and region";
        return Err(stack::no_table(message, &address.table, &found, hint));
    }
    let report = read_report(context, &account, &address, found.stack(), table).await?;
    if context.printer.is_json() {
        context.printer.json(&report);
    } else {
        print(context, &report, &found);
    }
    Ok(ExitStatus::Done)
}

async fn read_report(
    context: &Context,
    account: &Account,
    address: &DynamoAddress,
    state: Option<&StackState>,
    table: Option<TableFigures>,
) -> Result<Report, Failure> {
    let mut round_trip_ms = None;
    let mut record = None;
    if table.is_some() {
        let table = stack::table(context, address).await?;
        let unreadable = |error| unreadable(address, &error);
        // The first call opens the connection, so the second one is measured.
        records::read_version(&table).await.map_err(unreadable)?;
        let started = context.pace.stopwatch();
        record = records::read_version(&table).await.map_err(unreadable)?;
        let took = context.pace.stopwatch().saturating_sub(started);
        round_trip_ms = u64::try_from(took.as_millis()).ok();
    }
    let versions = Versions::of(state, record.as_ref());
    let output = |name: &str| state.and_then(|state| state.output(name));
    // Optional: without permission to read these two, the rest is still shown.
    let now_ms = context.clock.now().as_millis();
    let stream_lag_ms = match output("AggregatorName") {
        Some(function) => account.cloud.stream_lag(function, now_ms).await.unwrap_or(None),
        None => None,
    };
    let dead_letters = match output("DeadLettersUrl") {
        Some(url) => account.cloud.queue_length(url).await.ok(),
        None => None,
    };
    Ok(Report {
        name: address.table.clone(),
        round_trip_ms,
        stack: state.map(stack_json),
        table: table.map(table_json),
        versions: VersionsJson::from(&versions),
        stream_lag_ms,
        dead_letters,
    })
}

pub(super) fn unreadable(address: &DynamoAddress, error: &TableError) -> Failure {
    stack::table_failure("read the version", address, error)
}

fn stack_json(state: &StackState) -> StackJson {
    StackJson {
        status: state.status.to_string(),
        reason: state.reason.clone(),
        created_at: time(state.created_at),
        updated_at: time(state.updated_at),
        aggregator: state.output("AggregatorName").map(str::to_owned),
        archive: state.output("ArchiveBucketName").map(str::to_owned),
    }
}

fn table_json(table: TableFigures) -> TableJson {
    let index = |(name, status, projection)| IndexJson { name, status, projection };
    TableJson {
        status: table.status,
        items: table.items,
        bytes: table.bytes,
        stream: table.stream,
        deletion_protection: table.deletion_protection,
        indexes: table.indexes.into_iter().map(index).collect(),
    }
}

fn print(context: &mut Context, report: &Report, found: &Found) {
    let none = || Cell::new(Look::Dim, "none");
    let mut fields = vec![("name", Cell::from(&report.name))];
    match (&report.stack, found) {
        (Some(json), Found::Stack(state)) => {
            fields.push(("stack", Cell::new(look(state), &json.status)));
            if let Some(reason) = &json.reason {
                fields.push(("", Cell::new(Look::Dim, reason)));
            }
            let changed = json.updated_at.as_ref().or(json.created_at.as_ref());
            fields.push(("last change", changed.map_or_else(none, Cell::from)));
        }
        (_, Found::NoCloudFormation(error)) => {
            fields.push(stack::missing_field(error));
        }
        _ => fields.push(("stack", Cell::new(Look::Warn, "none: there is only a table"))),
    }
    match &report.table {
        Some(table) => fields.extend(table_fields(table, report.round_trip_ms)),
        None => fields.push(("table", Cell::new(Look::Bad, "none"))),
    }
    fields.extend(version_fields(&report.versions));
    if report.stack.as_ref().is_some_and(|stack| stack.aggregator.is_some()) {
        fields.push(("stream lag", lag(report.stream_lag_ms)));
        fields.push(("dead letters", letters(report.dead_letters)));
    }
    if let Some(archive) = report.stack.as_ref().and_then(|stack| stack.archive.as_ref()) {
        fields.push(("archive", Cell::from(archive)));
    }
    print_fields(&mut context.printer, fields);
}

fn table_fields(table: &TableJson, round_trip_ms: Option<u64>) -> Vec<(&'static str, Cell)> {
    let active = if table.status == "ACTIVE" { Look::Good } else { Look::Warn };
    let items = count(table.items.max(0).unsigned_abs(), "item");
    let mut fields = vec![
        ("table", Cell::new(active, &table.status)),
        (
            "size",
            Cell::from(format!(
                "about {items}, {} bytes (counted by AWS every six hours)",
                table.bytes
            )),
        ),
    ];
    if let Some(ms) = round_trip_ms {
        fields.push(("one read took", Cell::from(format!("{ms} ms"))));
    }
    let odd = table.indexes.iter().filter(|index| !["ACTIVE", ""].contains(&&*index.status));
    for index in odd {
        let text = format!("{} is {}", index.name, index.status);
        fields.push(("index", Cell::new(Look::Warn, text)));
    }
    if table.deletion_protection {
        fields.push(("deletion", Cell::from("protected")));
    }
    fields
}

pub(super) fn version_fields(versions: &VersionsJson) -> Vec<(&'static str, Cell)> {
    let text = |version: &Option<String>| match version {
        Some(version) => Cell::from(version),
        None => Cell::new(Look::Dim, "none"),
    };
    let good = if versions.compatible { Look::Good } else { Look::Bad };
    vec![
        ("program", Cell::from(versions.program)),
        ("stack version", text(&versions.stack)),
        ("aggregator", text(&versions.aggregator)),
        ("table format", text(&versions.schema)),
        ("versions", Cell::new(good, &versions.verdict)),
    ]
}

fn lag(millis: Option<f64>) -> Cell {
    match millis {
        None => Cell::new(Look::Dim, "no changes in the last ten minutes"),
        Some(millis) if millis > 60_000.0 => {
            Cell::new(Look::Bad, format!("{:.0} s behind", millis / 1_000.0))
        }
        Some(millis) => Cell::new(Look::Good, format!("{:.1} s at most", millis / 1_000.0)),
    }
}

fn letters(count: Option<u64>) -> Cell {
    match count {
        None => Cell::new(Look::Dim, "unknown"),
        Some(0) => Cell::new(Look::Good, "none"),
        Some(count) => Cell::new(Look::Bad, count),
    }
}
