//! `aggregate`: the aggregator as a daemon on the table's stream.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use zae_limiter::Window;
use zae_limiter::dynamodb::aws::{DynamoAddress, LazyTable};
use zae_limiter::model::{UsageSettings, format_time};
use zae_limiter_aggregator::daemon::{
    AwsStream, Daemon, Metrics, Missed, Notice, StreamError, StreamErrorKind, TAKEOVER_MAX, Until,
    serve,
};
use zae_limiter_aggregator::{Aggregator, Archive, Bucket, Folder, Report, Settings, Splitter};
use zae_limiter_infra::aws::{AwsCloud, SdkConfig, load_config};
use zae_limiter_infra::{Cloud as _, CloudErrorKind, records};

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

Without --windows, the command asks CloudFormation for the stack with the name of the table. If the stack
has a function, the command records the same windows for the same time: records of other windows would
contain only the changes that this command reads. Without a function it records all three.

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
    /// Windows of the usage records [default: those of the deployed function, or hourly,daily,monthly]
    #[arg(long, value_name = "WINDOW", value_delimiter = ',', value_parser = windows())]
    windows: Option<Vec<Window>>,

    /// Time to keep usage records after the end of their window [default: that of the deployed function, or
    /// 90d]
    #[arg(long, value_name = "DURATION", value_parser = grammar::duration)]
    retention: Option<Duration>,

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
    let range = Duration::from_secs(1)..=TAKEOVER_MAX;
    range.contains(&duration).then_some(duration).ok_or_else(|| "use 1s to 10min".to_owned())
}

pub(crate) async fn run(args: Args, context: &mut Context) -> Result<ExitStatus, Failure> {
    let mut interrupts = context.interrupts.clone();
    context.end_after_an_interrupt();
    let (daemon, notices) = tokio::select! {
        biased;
        interrupt = interrupts.next() => return Ok(interrupt.status()),
        opened = open(&args, context) => opened?,
    };
    follow(daemon, notices, args.once, context).await
}

type Notices = mpsc::UnboundedReceiver<Notice>;

async fn open(args: &Args, context: &mut Context) -> Result<(Daemon, Notices), Failure> {
    let address = address(context)?;
    let timeout = context.aws_timeout()?;
    let config = load_config(&address, timeout).await?;
    context.printer.progress(format!("opening the stream of {}", address.table));
    let stream = match AwsStream::open(&config, &address.table).await {
        Ok(stream) => Arc::new(stream),
        Err(error) => return Err(no_stream(context, &address, error).await?),
    };
    let table = Arc::new(LazyTable::new(address.clone()));
    let clock = Arc::clone(&context.clock);
    let usage = usage_settings(args, &address, &config, context).await?;
    let settings = Settings { usage, refill: !args.no_refill };
    let splitter = Splitter::new(Arc::clone(&table) as _, Arc::clone(&clock));
    let aggregator = Aggregator::new(Arc::clone(&table) as _, Arc::clone(&clock), settings);
    let mut aggregator = aggregator.split(Arc::new(splitter));
    if let Some(place) = &args.archive {
        aggregator = aggregator.archive(archive(place, &config));
    }
    let me = context.entropy().event_id(clock.now());
    let (sender, notices) = mpsc::unbounded_channel();
    let daemon = Daemon::new(stream, table, clock, aggregator, args.takeover_after, me);
    let daemon = daemon.on_notice(Arc::new(move |notice| drop(sender.send(notice))));
    publish(args, daemon.metrics(), context).await?;
    context.printer.say_unless_json(format!("following the stream of {}", address.table));
    Ok((daemon, notices))
}

fn address(context: &Context) -> Result<DynamoAddress, Failure> {
    context.table_at(&context.store_url()?)?.ok_or_else(|| {
        Failure::usage("aggregate needs a DynamoDB table, which has a change stream")
            .hint("name one with --store dynamodb:TABLE; other stores record usage themselves")
    })
}

/// What to record. A function that is deployed beside this command decides, unless the user does.
async fn usage_settings(
    args: &Args,
    address: &DynamoAddress,
    config: &SdkConfig,
    context: &mut Context,
) -> Result<UsageSettings, Failure> {
    let mut settings = match &args.windows {
        Some(windows) => UsageSettings { windows: windows.clone(), ..UsageSettings::default() },
        None => {
            let limit = context.aws_timeout()?;
            let deployed = deployed_settings(address, config, limit).await?;
            if let Some(settings) = &deployed {
                let windows: Vec<&str> = settings.windows.iter().map(|one| one.as_str()).collect();
                let words =
                    format!("recording {} usage, as the deployed function", windows.join(" and "));
                context.printer.say_unless_json(words);
            }
            deployed.unwrap_or_default()
        }
    };
    settings.retention = args.retention.unwrap_or(settings.retention);
    Ok(settings)
}

/// The settings of the function in the stack of the table, if there is one.
async fn deployed_settings(
    address: &DynamoAddress,
    config: &SdkConfig,
    limit: Duration,
) -> Result<Option<UsageSettings>, Failure> {
    match AwsCloud::new(config, limit).stack(&address.table).await {
        Ok(stack) => Ok(stack.and_then(|stack| stack.usage_settings())),
        Err(error) if error.kind == CloudErrorKind::NoService => Ok(None),
        // Emulators of DynamoDB alone refuse other services in many ways.
        Err(error) if address.endpoint.is_some() && error.kind != CloudErrorKind::Unavailable => {
            Ok(None)
        }
        Err(error) => Err(Failure::from(error)
            .hint("name the windows that the deployed function records: --windows hourly,daily")),
    }
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

fn archive(place: &str, config: &SdkConfig) -> Arc<dyn Archive> {
    match place.strip_prefix("s3://") {
        Some(rest) => {
            let (bucket, folder) = rest.split_once('/').unwrap_or((rest, ""));
            Arc::new(Bucket::new(config, bucket).folder(folder))
        }
        None => Arc::new(Folder::new(PathBuf::from(place))),
    }
}

/// Serves the metrics. Only an address that the user named must be free.
async fn publish(args: &Args, metrics: Arc<Metrics>, context: &mut Context) -> Result<(), Failure> {
    let printer = &mut context.printer;
    if args.no_metrics || (args.once && args.metrics.is_none()) {
        return Ok(());
    }
    let address = args.metrics.unwrap_or(METRICS);
    match TcpListener::bind(address).await {
        Ok(listener) => {
            let bound = listener.local_addr().unwrap_or(address);
            tokio::spawn(serve(listener, metrics, Arc::clone(&context.clock)));
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
    mut notices: Notices,
    once: bool,
    context: &mut Context,
) -> Result<ExitStatus, Failure> {
    let metrics = daemon.metrics();
    let mut interrupts = context.interrupts.clone();
    let until = if once { Until::Drained } else { Until::Stopped };
    // In a task of its own, so that heartbeats go on while a message is written to a slow terminal or pipe.
    let mut running = JoinSet::new();
    running.spawn(async move {
        let stop = async {
            let _ = interrupts.next().await;
        };
        daemon.run(until, stop).await
    });
    let ended = loop {
        tokio::select! {
            Some(ended) = running.join_next() => break ended,
            Some(notice) = notices.recv() => print(&mut context.printer, &metrics, &notice),
        }
    };
    let ended = ended.unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic()));
    while let Ok(notice) = notices.try_recv() {
        print(&mut context.printer, &metrics, &notice);
    }
    context.printer.wipe_progress();
    ended.map_err(failure)?;
    let words = format!("{} processed", count(metrics.records(), "record"));
    context.printer.done(&metrics.figures(), words);
    match once && metrics.times_missed() > 0 {
        // The warnings say what is missing.
        true => Ok(ExitStatus::Error),
        false => Ok(ExitStatus::Done),
    }
}

fn print(printer: &mut Printer, metrics: &Metrics, notice: &Notice) {
    match notice {
        Notice::Claimed(shard) => printer.detail(format!("reading stream shard {shard}")),
        Notice::Lost(shard) => {
            printer.detail(format!("another aggregator reads stream shard {shard} now"));
        }
        Notice::Finished(shard) => printer.detail(format!("stream shard {shard} has ended")),
        Notice::Missed(missed) => printer.warn(missed_words(missed)),
        Notice::Unarchived(lost) => printer.warn(format!(
            "{} could not be archived within a day and left the stream (stream shard {}): those that \
             expired after {} are in no archive",
            count(u64::try_from(lost.events).unwrap_or(u64::MAX), "audit event"),
            lost.shard,
            format_time(lost.since)
        )),
        Notice::StreamEnded => printer.warn(
            "the table's stream is disabled and read to its end; enable it again to record more usage",
        ),
        Notice::NextStream(label) => printer.warn(format!(
            "the table has a new stream since {label}; usage records lack what was used between the two"
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

fn missed_words(missed: &Missed) -> String {
    let (shard, before) = (&missed.shard, format_time(missed.before));
    let time = match missed.after {
        Some(after) => format!("between {} and {before}", format_time(after)),
        None => format!("before {before}"),
    };
    format!(
        "changes {time} left the stream before an aggregate command read them (from stream shard {shard} on); \
         usage records lack them, unless a function has read them"
    )
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
