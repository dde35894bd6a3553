//! `local`: runs a DynamoDB endpoint on this machine.
//!
//! The endpoint is a separate program, `zae-limiter-local`, so that this one links no database
//! server. A file in the data directory records the running endpoint.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::Subcommand;
use serde::{Deserialize, Serialize};
use zae_limiter::dynamodb::aws::{CreateTable, DynamoAddress};
use zae_limiter::model::StackName;
use zae_limiter::testing::{Clock, SystemClock};

use crate::columns::{Cell, print_fields};
use crate::context::Context;
use crate::exit::ExitStatus;
use crate::failure::Failure;
use crate::grammar;
use crate::printer::Look;

mod engine;

const AFTER_HELP: &str = "\
Examples:
  zae-limiter local up                       start the endpoint, create the table zae-limiter
  eval \"$(zae-limiter local env)\"            use the endpoint in this shell
  zae-limiter demo
  zae-limiter local down";

const UP_AFTER_HELP: &str = "\
Examples:
  zae-limiter local up                       in memory, on a free port
  zae-limiter local up --name my-app         with the table my-app
  zae-limiter local up --port 8000 --folder ./dynamodb
  zae-limiter local up -o json               {\"endpoint\", \"pid\", \"table\"}

The endpoint runs in the background until `local down`.";

/// `down` checks this often whether the endpoint has stopped: for 5 s in all.
const POLLS_MAX: u32 = 100;
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Arguments of `local`.
#[derive(clap::Args, Debug)]
#[command(after_help = AFTER_HELP, arg_required_else_help = true)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Start the endpoint and create a table
    Up(UpArgs),
    /// Stop the endpoint
    Down,
    /// Show the endpoint, if it runs
    Status,
    /// Print the environment variables that select the endpoint, for `eval`
    Env,
}

/// Arguments of `local up`.
#[derive(clap::Args, Debug)]
#[command(after_help = UP_AFTER_HELP)]
struct UpArgs {
    /// Port to listen on [default: any free port]
    #[arg(long)]
    port: Option<u16>,

    /// Folder for the tables [default: in memory, lost when the endpoint stops]
    #[arg(long, value_name = "FOLDER")]
    folder: Option<PathBuf>,

    /// Table to create, as --name [default: zae-limiter]
    #[arg(long, value_name = "NAME", value_parser = grammar::table_name)]
    table: Option<StackName>,

    /// Create the table with a change stream; the longer the stream, the slower each write
    #[arg(long)]
    stream: bool,
}

/// A running endpoint.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(super) struct Running {
    endpoint: String,
    pid: u32,
    table: String,
}

/// The content of the file `local.json`.
#[derive(Debug, Deserialize, Serialize)]
struct StateFile {
    #[serde(flatten)]
    running: Running,
    /// Distinguishes the process from a later one with the same pid.
    #[serde(rename = "born")]
    start_time: Option<String>,
}

impl Running {
    fn address(&self) -> DynamoAddress {
        DynamoAddress {
            table: self.table.clone(),
            region: Some("us-east-1".to_owned()),
            endpoint: Some(self.endpoint.clone()),
        }
    }

    fn store_url(&self) -> String {
        format!("dynamodb:{}?region=us-east-1&endpoint={}", self.table, self.endpoint)
    }
}

pub(crate) async fn run(args: Args, context: &mut Context) -> Result<ExitStatus, Failure> {
    match args.command {
        Command::Up(args) => up(args, context).await,
        Command::Down => down(context).await,
        Command::Status => status(context).await,
        Command::Env => env(context).await,
    }
}

async fn up(args: UpArgs, context: &mut Context) -> Result<ExitStatus, Failure> {
    let args = UpArgs { table: wanted_table(args.table, context)?, ..args };
    if let Some(running) = running(context).await? {
        check_matches(&args, &running)?;
        let pid = running.pid;
        context.printer.say_unless_json(format!("the endpoint already runs as process {pid}"));
        print(context, &running);
        return Ok(ExitStatus::Done);
    }
    let program = engine::program(context).await?;
    let port = args.port.unwrap_or(0);
    let started = engine::start(context, &program, port, args.folder.as_deref()).await?;
    let table = args.table.map_or_else(|| "zae-limiter".to_owned(), |table| table.to_string());
    let running = Running { endpoint: started.endpoint, pid: started.pid, table };
    let created = create_table(&running, args.stream).await;
    if let Err(failure) = created {
        engine::stop(running.pid);
        return Err(failure);
    }
    save(context, &running)?;
    context.printer.say_unless_json("use it from this shell: eval \"$(zae-limiter local env)\"");
    print(context, &running);
    Ok(ExitStatus::Done)
}

/// The table that `--table` or `--name` names.
fn wanted_table(table: Option<StackName>, context: &Context) -> Result<Option<StackName>, Failure> {
    let Some(name) = context.stack_name() else { return Ok(table) };
    if table.as_ref().is_some_and(|table| table != name) {
        let failure = Failure::usage("--name and --table name two tables");
        return Err(failure.hint("give one of them: --name TABLE"));
    }
    // A stack's name may be too short for a table.
    let name = grammar::table_name(name.as_str());
    name.map(Some).map_err(|misread| Failure::usage(format!("invalid --name: {misread}")))
}

/// The endpoint that runs, and has the table that `--name` names.
async fn running_here(context: &Context) -> Result<Running, Failure> {
    let running = running(context).await?.ok_or_else(not_running)?;
    match context.stack_name() {
        Some(name) if name.as_str() != running.table => {
            let Running { endpoint, table, .. } = &running;
            let message =
                format!("no local endpoint with table {name} is running; {endpoint} has {table}");
            Err(Failure::new(ExitStatus::NotFound, message).hint("leave out --name"))
        }
        _ => Ok(running),
    }
}

/// Fails if the running endpoint has another table or port than requested.
fn check_matches(args: &UpArgs, running: &Running) -> Result<(), Failure> {
    let table = args.table.as_ref().is_none_or(|table| table.as_str() == running.table);
    let port = args.port.unwrap_or(0);
    if table && (port == 0 || running.endpoint.ends_with(&format!(":{port}"))) {
        return Ok(());
    }
    let Running { endpoint, pid, table } = running;
    let message =
        format!("another endpoint already runs: process {pid}, {endpoint}, with table {table}");
    let failure = Failure::new(ExitStatus::Error, message);
    Err(failure.hint("use it, or stop it first: zae-limiter local down"))
}

fn print(context: &mut Context, running: &Running) {
    if context.printer.is_json() {
        context.printer.json(running);
    } else {
        context.printer.line(&running.endpoint);
    }
}

async fn create_table(running: &Running, stream: bool) -> Result<(), Failure> {
    let mut table = CreateTable::new(&running.table);
    if stream {
        table = table.with_stream();
    }
    let client = running.address().client().await;
    let clock: Arc<dyn Clock> = Arc::new(SystemClock);
    table.create(&client, &clock).await.map_err(|error| {
        let message = format!("could not create table {}", running.table);
        Failure::new(super::stack::status_of(error.kind), message).caused_by(&error)
    })
}

async fn down(context: &mut Context) -> Result<ExitStatus, Failure> {
    let running = running_here(context).await?;
    engine::stop(running.pid);
    for _ in 0..POLLS_MAX {
        if !engine::answers(context, &running.endpoint).await {
            let _ = std::fs::remove_file(context.data_file("local.json")?);
            context.printer.done(&serde_json::json!({ "stopped": running }), "stopped");
            return Ok(ExitStatus::Done);
        }
        context.wait(POLL_INTERVAL).await;
    }
    let message = format!("process {} does not stop", running.pid);
    Err(Failure::new(ExitStatus::Error, message).hint(format!("kill -9 {}", running.pid)))
}

async fn status(context: &mut Context) -> Result<ExitStatus, Failure> {
    let running = running_here(context).await?;
    if context.printer.is_json() {
        context.printer.json(&running);
        return Ok(ExitStatus::Done);
    }
    let fields = vec![
        ("endpoint", Cell::new(Look::Good, &running.endpoint)),
        ("process", Cell::from(running.pid)),
        ("table", Cell::from(&running.table)),
        ("store", Cell::from(running.store_url())),
    ];
    print_fields(&mut context.printer, fields);
    Ok(ExitStatus::Done)
}

async fn env(context: &mut Context) -> Result<ExitStatus, Failure> {
    let running = running_here(context).await?;
    let variables = [
        ("ZAEL_STORE", running.store_url()),
        // All services: no command in this shell calls a real account by accident.
        ("AWS_ENDPOINT_URL", running.endpoint.clone()),
        ("AWS_ENDPOINT_URL_DYNAMODB", running.endpoint),
        ("AWS_REGION", "us-east-1".to_owned()),
        ("AWS_ACCESS_KEY_ID", "local".to_owned()),
        ("AWS_SECRET_ACCESS_KEY", "local".to_owned()),
    ];
    if context.printer.is_json() {
        let document: std::collections::BTreeMap<_, _> = variables.into_iter().collect();
        context.printer.json(&document);
    } else {
        for (name, value) in variables {
            context.printer.line(format!("export {name}='{value}'"));
        }
    }
    Ok(ExitStatus::Done)
}

fn not_running() -> Failure {
    let failure = Failure::new(ExitStatus::NotFound, "no local endpoint is running");
    failure.hint("zae-limiter local up")
}

/// The recorded endpoint, if it still answers and its process is still the same. Another process
/// with its pid or port is not ours to stop.
async fn running(context: &Context) -> Result<Option<Running>, Failure> {
    let file = context.data_file("local.json")?;
    let Ok(text) = std::fs::read_to_string(&file) else { return Ok(None) };
    let Ok(StateFile { running, start_time }) = serde_json::from_str(&text) else {
        return Ok(None);
    };
    let is_ours = engine::start_time(running.pid) == start_time;
    Ok((is_ours && engine::answers(context, &running.endpoint).await).then_some(running))
}

fn save(context: &Context, running: &Running) -> Result<(), Failure> {
    let file = context.data_file("local.json")?;
    let state = StateFile { running: running.clone(), start_time: engine::start_time(running.pid) };
    let written = std::fs::write(&file, crate::printer::to_json(&state));
    written.map_err(|error| {
        engine::stop(running.pid);
        let message = format!("could not write {}", file.display());
        Failure::new(ExitStatus::Error, message).caused_by(&error)
    })
}
