//! `aggregate`: the aggregator as a daemon on the table's stream.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use zae_limiter::dynamodb::aws::{DynamoAddress, LazyTable};
use zae_limiter::{Error, StoreUrl, UsageSettings, Window};
use zae_limiter_aggregator::daemon::{
    AwsStream, Daemon, Metrics, Notice, StreamError, StreamErrorKind, Until, serve,
};
use zae_limiter_aggregator::{Aggregator, Archive, Bucket, Folder, Report, Settings, Splitter};

use crate::context::Context;
use crate::exit::ExitStatus;
use crate::failure::Failure;
use crate::grammar;
use crate::printer::{Printer, count};

const AFTER_HELP: &str = "\
It follows the stream of the table: usage by hour, day and month, refills of buckets that run short,
and the archive of audit events that expire. Several of it share the work, and take over from one
that is gone. What is booked is booked once, however often it is stopped, killed and started again.

Examples:
  zae-limiter aggregate --store dynamodb:my-app          until Ctrl-C or SIGTERM
  zae-limiter aggregate -n my-app --archive ./audit      with an archive in a folder
  zae-limiter aggregate -n my-app --archive s3://bucket/limits
  zae-limiter aggregate -n my-app --once                 what the stream holds now, and end

Figures for Prometheus are at http://127.0.0.1:9464/metrics.";

/// Where the figures are, if nothing else is said.
const METRICS: SocketAddr =
    SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 9_464);

/// The most errors of one batch that are printed.
const ERRORS_MAX: usize = 5;

/// Arguments of `aggregate`.
#[derive(clap::Args, Debug)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct Args {
    /// To which windows usage is booked
    #[arg(
        long, value_name = "WINDOW", value_delimiter = ',', value_parser = windows(),
        default_value = "hourly,daily,monthly",
    )]
    windows: Vec<Window>,

    /// How long usage records are kept after their windows' ends
    #[arg(long, value_name = "DURATION", default_value = "90d", value_parser = grammar::duration)]
    retention: Duration,

    /// Where expired audit events are kept: a folder, or s3://BUCKET/FOLDER
    #[arg(long, value_name = "PLACE")]
    archive: Option<String>,

    /// Leave the refill of buckets to those who take from them
    #[arg(long)]
    no_refill: bool,

    /// Do what the stream holds now, and end
    #[arg(long)]
    once: bool,

    /// The address of the figures for Prometheus [default: 127.0.0.1:9464; with --once none]
    #[arg(long, value_name = "ADDRESS", conflicts_with = "no_metrics")]
    metrics: Option<SocketAddr>,

    /// No figures for Prometheus
    #[arg(long)]
    no_metrics: bool,

    /// After how long without a sign of life another daemon counts as gone
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
    let config = address.config().await;
    let stream = Arc::new(AwsStream::open(&config, &address.table).await.map_err(failure)?);
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
    let (tell, told) = mpsc::unbounded_channel();
    let daemon = Daemon::new(stream, table, clock, aggregator, args.takeover_after, me);
    let daemon = daemon.on_notice(Arc::new(move |notice| drop(tell.send(notice))));
    publish(&args, daemon.metrics(), &mut context.printer).await?;
    context.printer.say_unless_json(format!("following the stream of {}", address.table));
    follow(daemon, told, args.once, context).await
}

fn address(context: &Context) -> Result<DynamoAddress, Failure> {
    let url = context.store_url()?;
    match url.parse().map_err(Error::Invalid)? {
        StoreUrl::Dynamodb(address) => Ok(address),
        _ => Err(Failure::usage("only a table in DynamoDB has a stream to follow")
            .hint("name one with --store dynamodb:TABLE; other stores keep usage by themselves")),
    }
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

/// Answers whoever asks for figures. A port that was not asked for may be somebody else's.
async fn publish(args: &Args, metrics: Arc<Metrics>, printer: &mut Printer) -> Result<(), Failure> {
    if args.no_metrics || (args.once && args.metrics.is_none()) {
        return Ok(());
    }
    let address = args.metrics.unwrap_or(METRICS);
    match TcpListener::bind(address).await {
        Ok(listener) => {
            let bound = listener.local_addr().unwrap_or(address);
            tokio::spawn(async move { drop(serve(listener, metrics).await) });
            printer.say_unless_json(format!("figures are at http://{bound}/metrics"));
        }
        Err(error) if args.metrics.is_none() => {
            printer.warn(format!("there will be no figures: {address} cannot be used ({error})"));
        }
        Err(error) => {
            let message = format!("{address} cannot be used");
            return Err(Failure::new(ExitStatus::Error, message).caused_by(&error));
        }
    }
    Ok(())
}

async fn follow(
    mut daemon: Daemon,
    mut told: mpsc::UnboundedReceiver<Notice>,
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
                Some(notice) = told.recv() => print(&mut context.printer, &metrics, &notice),
            }
        }
    };
    while let Ok(notice) = told.try_recv() {
        print(&mut context.printer, &metrics, &notice);
    }
    context.printer.wipe_progress();
    ended.map_err(failure)?;
    let words = format!("{} done", count(metrics.records(), "record"));
    context.printer.done(&metrics.figures(), words);
    Ok(ExitStatus::Done)
}

fn print(printer: &mut Printer, metrics: &Metrics, notice: &Notice) {
    match notice {
        Notice::Claimed(shard) => printer.detail(format!("follows {shard}")),
        Notice::Lost(shard) => printer.detail(format!("{shard} is followed by another daemon")),
        Notice::Finished(shard) => printer.detail(format!("{shard} is done to its end")),
        Notice::Trimmed(shard) => printer.warn(format!(
            "changes of {shard} were older than a day and gone; usage lacks what they took"
        )),
        Notice::TransientError(message) => printer.warn(format!("{message}; trying again")),
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
