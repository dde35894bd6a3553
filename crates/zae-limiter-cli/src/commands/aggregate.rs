//! `aggregate`: the aggregator as a daemon on the table's stream.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use zae_limiter::Window;
use zae_limiter::dynamodb::aws::{DynamoAddress, LazyTable};
use zae_limiter::model::UsageSettings;
use zae_limiter_aggregator::daemon::{
    AwsStream, Daemon, Metrics, Notice, StreamError, StreamErrorKind, Until, serve,
};
use zae_limiter_aggregator::{Aggregator, Archive, Bucket, Folder, Report, Settings, Splitter};
use zae_limiter_infra::aws::load_config;
use zae_limiter_infra::records;

use crate::context::Context;
use crate::exit::ExitStatus;
use crate::failure::Failure;
use crate::grammar;
use crate::printer::{Printer, count};

use super::stack;

const AFTER_HELP: &str = "\
The aggregator reads the table's change stream. It records usage by hour, day and month, refills
buckets that run short, and archives audit events that expire. Several aggregators share the stream,
and one takes over when another stops. Each change counts once, even after a crash or a restart.

Examples:
  zae-limiter aggregate --store dynamodb:my-app          run until Ctrl-C or SIGTERM
  zae-limiter aggregate -n my-app --archive ./audit      archive audit events in a folder
  zae-limiter aggregate -n my-app --archive s3://bucket/limits
  zae-limiter aggregate -n my-app --once                 process the current changes, then exit

Prometheus metrics are at http://127.0.0.1:9464/metrics.";

/// The default address of the Prometheus metrics.
const METRICS: SocketAddr =
    SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 9_464);

/// Errors printed for one batch.
const ERRORS_MAX: usize = 5;

/// Arguments of `aggregate`.
#[derive(clap::Args, Debug)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct Args {
    /// Windows of the usage records
    #[arg(
        long, value_name = "WINDOW", value_delimiter = ',', value_parser = windows(),
        default_value = "hourly,daily,monthly",
    )]
    windows: Vec<Window>,

    /// Time to keep usage records after the end of their window
    #[arg(long, value_name = "DURATION", default_value = "90d", value_parser = grammar::duration)]
    retention: Duration,

    /// Archive of expired audit events: a folder, or s3://BUCKET/FOLDER
    #[arg(long, value_name = "PLACE")]
    archive: Option<String>,

    /// Do not refill buckets; acquires still do
    #[arg(long)]
    no_refill: bool,

    /// Process the changes that the stream holds now, then exit
    #[arg(long)]
    once: bool,

    /// Address of the Prometheus metrics [default: 127.0.0.1:9464; with --once none]
    #[arg(long, value_name = "ADDRESS", conflicts_with = "no_metrics")]
    metrics: Option<SocketAddr>,

    /// Do not serve Prometheus metrics
    #[arg(long)]
    no_metrics: bool,

    /// Time without a heartbeat after which another aggregator counts as stopped
    #[arg(long, value_name = "DURATION", default_value = "20s", value_parser = takeover)]
    takeover_after: Duration,
}

fn windows() -> impl TypedValueParser<Value = Window> {
    PossibleValuesParser::new(Window::ALL.map(Window::as_str)).try_map(|word| word.parse())
}

fn takeover(input: &str) -> Result<Duration, String> {
    let duration = grammar::duration(input).map_err(|misread| misread.to_string())?;
    let range = Duration::from_secs(1)..=Duration::from_secs(600);
    range.contains(&duration).then_some(duration).ok_or_else(|| "use 1s to 10min".to_owned())
}

pub(crate) async fn run(args: Args, context: &mut Context) -> Result<ExitStatus, Failure> {
    let address = address(context)?;
    let config = load_config(&address, context.aws_timeout()?).await?;
    context.printer.progress(format!("opening the stream of {}", address.table));
    let stream = match AwsStream::open(&config, &address.table).await {
        Ok(stream) => Arc::new(stream),
        Err(error) => return Err(no_stream(context, &address, error).await?),
    };
    let table = Arc::new(LazyTable::new(address.clone()));
    let (clock, retention) = (Arc::clone(&context.clock), args.retention);
    let usage = UsageSettings { windows: args.windows.clone(), retention };
    let settings = Settings { usage, refill: !args.no_refill };
    let splitter = Splitter::new(Arc::clone(&table) as _, Arc::clone(&clock));
    let aggregator = Aggregator::new(Arc::clone(&table) as _, Arc::clone(&clock), settings);
    let mut aggregator = aggregator.split(Arc::new(splitter));
    if let Some(place) = &args.archive {
        aggregator = aggregator.archive(archive(place).await);
    }
    let me = context.entropy().event_id(clock.now());
    let (sender, notices) = mpsc::unbounded_channel();
    let daemon = Daemon::new(stream, table, clock, aggregator, args.takeover_after, me);
    let daemon = daemon.on_notice(Arc::new(move |notice| drop(sender.send(notice))));
    publish(&args, daemon.metrics(), &mut context.printer).await?;
    context.printer.say_unless_json(format!("following the stream of {}", address.table));
    follow(daemon, notices, args.once, context).await
}

fn address(context: &Context) -> Result<DynamoAddress, Failure> {
    context.table_at(&context.store_url()?)?.ok_or_else(|| {
        Failure::usage("aggregate needs a DynamoDB table, which has a change stream")
            .hint("name one with --store dynamodb:TABLE; other stores record usage themselves")
    })
}

/// Why a stream could not be opened. DynamoDB lists no streams of a table that does not exist, without an
/// error.
async fn no_stream(
    context: &Context,
    address: &DynamoAddress,
    error: StreamError,
) -> Result<Failure, Failure> {
    if error.kind == StreamErrorKind::NotFound {
        let table = stack::table(context, address).await?;
        if let Err(error) = records::read_version(&table).await {
            return Ok(stack::table_failure("open the stream", address, &error));
        }
    }
    Ok(failure(error))
}

async fn archive(place: &str) -> Arc<dyn Archive> {
    match place.strip_prefix("s3://") {
        Some(rest) => {
            let (bucket, folder) = rest.split_once('/').unwrap_or((rest, ""));
            Arc::new(Bucket::open(bucket).await.folder(folder))
        }
        None => Arc::new(Folder::new(PathBuf::from(place))),
    }
}

/// Serves the metrics. Only an address that the user named must be free.
async fn publish(args: &Args, metrics: Arc<Metrics>, printer: &mut Printer) -> Result<(), Failure> {
    if args.no_metrics || (args.once && args.metrics.is_none()) {
        return Ok(());
    }
    let address = args.metrics.unwrap_or(METRICS);
    match TcpListener::bind(address).await {
        Ok(listener) => {
            let bound = listener.local_addr().unwrap_or(address);
            tokio::spawn(async move { drop(serve(listener, metrics).await) });
            printer.say_unless_json(format!("metrics are at http://{bound}/metrics"));
        }
        Err(error) if args.metrics.is_none() => {
            printer.warn(format!("no metrics: could not listen on {address} ({error})"));
        }
        Err(error) => {
            let message = format!("could not listen on {address}");
            return Err(Failure::new(ExitStatus::Error, message).caused_by(&error));
        }
    }
    Ok(())
}

async fn follow(
    mut daemon: Daemon,
    mut notices: mpsc::UnboundedReceiver<Notice>,
    once: bool,
    context: &mut Context,
) -> Result<ExitStatus, Failure> {
    let metrics = daemon.metrics();
    let mut interrupts = context.interrupts.clone();
    let until = if once { Until::Drained } else { Until::Stopped };
    let stop = async {
        let _ = interrupts.next().await;
    };
    let ended = {
        let mut running = std::pin::pin!(daemon.run(until, stop));
        loop {
            tokio::select! {
                ended = &mut running => break ended,
                Some(notice) = notices.recv() => print(&mut context.printer, &metrics, &notice),
            }
        }
    };
    while let Ok(notice) = notices.try_recv() {
        print(&mut context.printer, &metrics, &notice);
    }
    context.printer.wipe_progress();
    ended.map_err(failure)?;
    let words = format!("{} processed", count(metrics.records(), "record"));
    context.printer.done(&metrics.figures(), words);
    Ok(ExitStatus::Done)
}

fn print(printer: &mut Printer, metrics: &Metrics, notice: &Notice) {
    match notice {
        Notice::Claimed(shard) => printer.detail(format!("reading stream shard {shard}")),
        Notice::Lost(shard) => {
            printer.detail(format!("another aggregator reads stream shard {shard} now"));
        }
        Notice::Finished(shard) => printer.detail(format!("stream shard {shard} has ended")),
        Notice::Trimmed(shard) => printer.warn(format!(
            "changes in stream shard {shard} expired after a day; usage records lack them"
        )),
        Notice::TransientError(message) => printer.warn(format!("{message}; retrying")),
        Notice::Batch(report) => {
            print_errors(printer, report);
            if printer.shows_progress() {
                printer.progress(count(metrics.records(), "record"));
            }
        }
    }
}

fn print_errors(printer: &mut Printer, report: &Report) {
    for error in report.errors.iter().take(ERRORS_MAX) {
        printer.warn(error);
    }
    let more = report.errors.len().saturating_sub(ERRORS_MAX);
    if more > 0 {
        printer.warn(format!("and {more} more"));
    }
}

fn failure(error: StreamError) -> Failure {
    let status = match error.kind {
        StreamErrorKind::Transient => ExitStatus::Unavailable,
        _ => ExitStatus::Error,
    };
    Failure::new(status, error.message)
}
