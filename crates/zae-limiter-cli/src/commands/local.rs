//! `local`: a DynamoDB endpoint on this machine.
//!
//! The engine is a program of its own, `zae-limiter-local`, so that ours links no database server.
//! What runs is written down in a file in the data directory.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::Subcommand;
use serde::{Deserialize, Serialize};
use zae_limiter::dynamodb::aws::{CreateTable, DynamoAddress};
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
  zae-limiter local up                       start it, and create the table zae-limiter
  eval \"$(zae-limiter local env)\"            use it from here on, in this shell
  zae-limiter demo
  zae-limiter local down";

const UP_AFTER_HELP: &str = "\
Examples:
  zae-limiter local up                       in memory, on a free port
  zae-limiter local up --port 8000 --folder ./dynamodb
  zae-limiter local up -o json               {\"endpoint\", \"pid\", \"table\"}

It goes on in the background until `local down`.";

/// How often the endpoint is asked whether it is there before it is given up, and how long in
/// between.
const LOOKS_MAX: u32 = 100;
const BETWEEN_LOOKS: Duration = Duration::from_millis(50);

/// Arguments of `local`.
#[derive(clap::Args, Debug)]
#[command(after_help = AFTER_HELP, arg_required_else_help = true)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Start the endpoint, with a table on it
    Up(UpArgs),
    /// Stop the endpoint
    Down,
    /// Show whether it runs
    Status,
    /// Print the variables by which other commands use it, for `eval`
    Env,
}

/// Arguments of `local up`.
#[derive(clap::Args, Debug)]
#[command(after_help = UP_AFTER_HELP)]
struct UpArgs {
    /// The port to listen on [default: any that is free]
    #[arg(long)]
    port: Option<u16>,

    /// The folder to keep the tables in; without it they are gone with the endpoint
    #[arg(long, value_name = "FOLDER")]
    folder: Option<PathBuf>,

    /// The table to create [default: zae-limiter]
    #[arg(long, value_name = "NAME", value_parser = grammar::table_name)]
    table: Option<zae_limiter::model::StackName>,

    /// With a stream of the table's changes; each write there gets slower the longer it is
    #[arg(long)]
    stream: bool,
}

/// What runs.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(super) struct Running {
    endpoint: String,
    pid: u32,
    table: String,
}

/// As it is written down, with what tells its process from a later one of the same number.
#[derive(Debug, Deserialize, Serialize)]
struct Written {
    #[serde(flatten)]
    running: Running,
    born: Option<String>,
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
    if let Some(running) = running(context).await? {
        check_is_alike(&args, &running)?;
        context.printer.say_unless_json(format!("it runs already, as process {}", running.pid));
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
    write_down(context, &running)?;
    context.printer.say_unless_json("use it from this shell: eval \"$(zae-limiter local env)\"");
    print(context, &running);
    Ok(ExitStatus::Done)
}

/// Whoever asks for a table or a port should not be told of others as if all were well.
fn check_is_alike(args: &UpArgs, running: &Running) -> Result<(), Failure> {
    let table = args.table.as_ref().is_none_or(|table| table.as_str() == running.table);
    let port = args.port.unwrap_or(0);
    if table && (port == 0 || running.endpoint.ends_with(&format!(":{port}"))) {
        return Ok(());
    }
    let Running { endpoint, pid, table } = running;
    let message = format!("another runs already: process {pid}, {endpoint}, with table {table}");
    let failure = Failure::new(ExitStatus::Error, message);
    Err(failure.hint("use that one, or stop it first: zae-limiter local down"))
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
        let message = format!("the table {} could not be created", running.table);
        Failure::new(ExitStatus::Error, message).caused_by(&error)
    })
}

async fn down(context: &mut Context) -> Result<ExitStatus, Failure> {
    let Some(running) = running(context).await? else { return Err(not_running()) };
    engine::stop(running.pid);
    for _ in 0..LOOKS_MAX {
        if !engine::answers(&running.endpoint).await {
            let _ = std::fs::remove_file(context.data_file("local.json")?);
            context.printer.done(&serde_json::json!({ "stopped": running }), "stopped");
            return Ok(ExitStatus::Done);
        }
        context.wait(BETWEEN_LOOKS).await;
    }
    let message = format!("process {} does not stop", running.pid);
    Err(Failure::new(ExitStatus::Error, message).hint(format!("kill -9 {}", running.pid)))
}

async fn status(context: &mut Context) -> Result<ExitStatus, Failure> {
    let Some(running) = running(context).await? else { return Err(not_running()) };
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
    let Some(running) = running(context).await? else { return Err(not_running()) };
    let variables = [
        ("ZAEL_STORE", running.store_url()),
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
    let failure = Failure::new(ExitStatus::NotFound, "no local endpoint runs");
    failure.hint("zae-limiter local up")
}

/// What was written down, if it still answers and its process is still that one: whoever has got its
/// number or its port since is not ours to stop. Else it is forgotten.
async fn running(context: &Context) -> Result<Option<Running>, Failure> {
    let file = context.data_file("local.json")?;
    let Ok(text) = std::fs::read_to_string(&file) else { return Ok(None) };
    let Ok(Written { running, born }) = serde_json::from_str(&text) else { return Ok(None) };
    let is_ours = engine::born(running.pid) == born;
    Ok((is_ours && engine::answers(&running.endpoint).await).then_some(running))
}

fn write_down(context: &Context, running: &Running) -> Result<(), Failure> {
    let file = context.data_file("local.json")?;
    let written = Written { running: running.clone(), born: engine::born(running.pid) };
    let written = std::fs::write(&file, crate::printer::to_json(&written));
    written.map_err(|error| {
        engine::stop(running.pid);
        let message = format!("{} cannot be written", file.display());
        Failure::new(ExitStatus::Error, message).caused_by(&error)
    })
}
