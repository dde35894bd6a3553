//! `usage`: usage records by hour, day or month.

use std::collections::BTreeMap;
use std::time::Duration;

use clap::Subcommand;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use serde::Serialize;
use zae_limiter::model::{EntityId, ResourceName, Usage, UsageQuery, format_time};
use zae_limiter::{RateLimiter, Timestamp, Window};

use crate::columns::{Align, Cell, Columns};
use crate::context::Context;
use crate::exit::ExitStatus;
use crate::failure::Failure;
use crate::grammar::{self, Moment};
use crate::listing::{Item, print_pages};
use crate::printer::count;

mod coverage;
mod plot;

const AFTER_HELP: &str = "\
Examples:
  zae-limiter usage list -e key-1                        hour by hour, the last day
  zae-limiter usage list -r gpt-4 -w daily --start 7d    all entities on gpt-4, the last week
  zae-limiter usage summary -e key-1 -w monthly          added up";

const LIST_AFTER_HELP: &str = "\
Examples:
  zae-limiter usage list -e key-1                        hour by hour, the last day
  zae-limiter usage list -e key-1 -r gpt-4 -w daily      day by day, the last 30 days
  zae-limiter usage list -e key-1 --plot                 a chart
  zae-limiter usage list -r gpt-4 --start 2026-11-01 --end 2026-11-15T12:00 -o json

Windows are hours, days and months of UTC. Without --start the range is the last 24 hours, 30 days
or 12 months, depending on the window.

On a DynamoDB table the aggregator records usage: see zae-limiter aggregate --help. It records the
windows that it is set to. If the requested ones are missing (exit status 4) or incomplete, the
command says so.";

const SUMMARY_AFTER_HELP: &str = "\
Examples:
  zae-limiter usage summary -e key-1                     the last 24 hours
  zae-limiter usage summary -r gpt-4 -w daily --start 7d all entities on gpt-4, the last week
  zae-limiter usage summary -e key-1 -r gpt-4 -w monthly --start 2026-01-01

Windows are hours, days and months of UTC. Without --start the range is the last 24 hours, 30 days
or 12 months, depending on the window.

On a DynamoDB table the aggregator records usage: see zae-limiter aggregate --help. It records the
windows that it is set to. If the requested ones are missing (exit status 4) or incomplete, the
command says so.";

/// Arguments of `usage`.
#[derive(clap::Args, Debug)]
#[command(after_help = AFTER_HELP, arg_required_else_help = true)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// List usage, window by window
    #[command(after_help = LIST_AFTER_HELP)]
    List(ListArgs),
    /// Add up usage
    #[command(after_help = SUMMARY_AFTER_HELP)]
    Summary(Which),
}

/// Arguments of `usage list`.
#[derive(clap::Args, Debug)]
struct ListArgs {
    #[command(flatten)]
    which: Which,

    /// Draw a chart for each limit, as wide as the terminal
    #[arg(long)]
    plot: bool,
}

/// A selection of usage records.
#[derive(clap::Args, Debug)]
struct Which {
    #[command(flatten)]
    whose: Whose,

    /// Length of the windows
    #[arg(short, long, value_name = "WINDOW", default_value = "hourly", value_parser = windows())]
    window: Window,

    /// First window, given by a moment in it: a day (2026-11-15), a time in UTC
    /// (2026-11-15T14:00), or how long ago (24h, 7d)
    #[arg(long, value_name = "MOMENT", value_parser = grammar::moment)]
    start: Option<Moment>,

    /// End of the range: only windows that begin before it [default: now]
    #[arg(long, value_name = "MOMENT", value_parser = grammar::moment)]
    end: Option<Moment>,
}

/// An entity, a resource, or both.
#[derive(clap::Args, Debug)]
#[group(required = true, multiple = true)]
struct Whose {
    /// Entity
    #[arg(short, long, value_name = "ID", value_parser = grammar::entity_id)]
    entity: Option<EntityId>,

    /// Resource
    #[arg(short, long, value_name = "RESOURCE", value_parser = grammar::resource)]
    resource: Option<ResourceName>,
}

fn windows() -> impl TypedValueParser<Value = Window> {
    PossibleValuesParser::new(Window::ALL.map(Window::as_str)).try_map(|word| word.parse())
}

/// How many days a range goes back.
struct DaysBack {
    /// Without `--start`.
    default: u64,
    /// As suggested where the default finds nothing.
    further: u64,
}

fn days_back(window: Window) -> DaysBack {
    let (default, further) = match window {
        Window::Hourly => (1, 90),
        Window::Daily => (30, 90),
        Window::Monthly => (365, 3 * 365),
    };
    DaysBack { default, further }
}

/// The range of windows, in absolute times.
struct Range {
    start: Timestamp,
    end: Timestamp,
}

impl Which {
    fn range(&self, now: Timestamp) -> Result<Range, Failure> {
        let back = Duration::from_secs(days_back(self.window).default * 86_400);
        let first = self.start.unwrap_or(Moment::Ago(back)).seen_from(now);
        // Includes the current window.
        let just_after_now = Timestamp::from_millis(now.as_millis().saturating_add(1));
        let end = self.end.map_or(just_after_now, |end| end.seen_from(now));
        if first >= end {
            let message = format!(
                "--start ({}) must come before --end ({})",
                format_time(first),
                format_time(end)
            );
            return Err(Failure::usage(message).hint(
                "a window that begins at --end does not count: to include a day, use the next one",
            ));
        }
        Ok(Range { start: self.window.start(first), end })
    }

    /// The query for these records.
    fn query<'a>(&'a self, limiter: &'a RateLimiter, range: &Range) -> UsageQuery<'a> {
        let mut query = limiter.usage().window(self.window).from(range.start).until(range.end);
        if let Some(entity) = &self.whose.entity {
            query = query.entity(entity.as_str());
        }
        if let Some(resource) = &self.whose.resource {
            query = query.resource(resource.as_str());
        }
        query
    }

    /// The message if there are no records, with a hint where they may be.
    fn nothing(&self, range: &Range, context: &Context) -> Result<String, Failure> {
        let whose = match (&self.whose.entity, &self.whose.resource) {
            (Some(entity), Some(resource)) => format!("by {entity} of {resource}"),
            (Some(entity), None) => format!("by {entity}"),
            (None, Some(resource)) => format!("of {resource}"),
            (None, None) => unreachable!("clap asks for one of them"),
        };
        // Only for the default range.
        let back = match self.start {
            None => format!("; look further back: --start {}d", days_back(self.window).further),
            Some(_) => String::new(),
        };
        let recorded = match context.is_on_dynamodb() {
            true => "; on DynamoDB the aggregator records usage: zae-limiter aggregate --once",
            false => "",
        };
        Ok(format!(
            "no {} usage {whose} from {} to {}{back}{recorded}",
            self.window,
            format_time(range.start),
            format_time(range.end)
        ))
    }
}

/// A record in a JSON document, or in a list.
#[derive(Serialize)]
struct UsageJson {
    entity_id: String,
    resource: String,
    window: &'static str,
    window_start: String,
    window_end: String,
    consumed: BTreeMap<String, i64>,
    events: u64,
    /// For the table.
    #[serde(skip)]
    label: String,
}

impl From<Usage> for UsageJson {
    fn from(usage: Usage) -> Self {
        let (window, start) = (usage.key.window, usage.key.start);
        let consumed = usage.consumed.iter();
        Self {
            entity_id: usage.key.entity.to_string(),
            resource: usage.key.resource.to_string(),
            window: window.as_str(),
            window_start: format_time(start),
            window_end: format_time(window.end(start)),
            consumed: consumed.map(|(name, sum)| (name.to_string(), sum.whole_tokens())).collect(),
            events: usage.events,
            label: window.label(start),
        }
    }
}

impl Item for UsageJson {
    const HEADS: &'static [(&'static str, Align)] = &[
        ("WINDOW", Align::Left),
        ("ENTITY", Align::Left),
        ("RESOURCE", Align::Left),
        ("EVENTS", Align::Right),
        ("CONSUMED", Align::Left),
    ];

    fn row(&self) -> Vec<Cell> {
        let consumed: Vec<String> =
            self.consumed.iter().map(|(name, sum)| format!("{name}:{sum}")).collect();
        vec![
            Cell::from(&self.label),
            Cell::from(&self.entity_id),
            Cell::from(&self.resource),
            Cell::from(self.events),
            Cell::from(consumed.join(" ")),
        ]
    }
}

#[derive(Serialize)]
struct SummaryJson<'a> {
    entity_id: Option<&'a str>,
    resource: Option<&'a str>,
    window: &'static str,
    start: String,
    end: String,
    /// The start of the first and the last window with usage.
    first_window_start: Option<String>,
    last_window_start: Option<String>,
    records: u64,
    events: u64,
    consumed: BTreeMap<String, i64>,
    /// Months that are recorded in part.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    incomplete: Vec<coverage::Gap>,
}

pub(crate) async fn run(args: Args, context: &mut Context) -> Result<ExitStatus, Failure> {
    match args.command {
        Command::List(args) => list(args, context).await,
        Command::Summary(which) => summary(which, context).await,
    }
}

async fn list(args: ListArgs, context: &mut Context) -> Result<ExitStatus, Failure> {
    let ListArgs { which, plot } = args;
    if plot && context.printer.is_json() {
        let failure = Failure::usage("--plot draws a chart and cannot be combined with -o json");
        return Err(failure.hint("leave out --plot or -o json"));
    }
    let range = which.range(context.clock.now())?;
    let limiter = context.limiter().await?;
    let query = which.query(&limiter, &range);
    let gaps = coverage::check(&limiter, &query, which.window, &*context.pace).await?;
    let pages = query.pages()?;
    let printer = &mut context.printer;
    coverage::warn(printer, &gaps);
    let records = match plot {
        true => plot::draw(printer, which.window, pages).await?,
        false => print_pages(printer, pages, UsageJson::from).await?,
    };
    if records == 0 {
        let nothing = which.nothing(&range, context)?;
        context.printer.say_unless_json(nothing);
    }
    Ok(ExitStatus::Done)
}

async fn summary(which: Which, context: &mut Context) -> Result<ExitStatus, Failure> {
    let range = which.range(context.clock.now())?;
    let limiter = context.limiter().await?;
    let query = which.query(&limiter, &range);
    let incomplete = coverage::check(&limiter, &query, which.window, &*context.pace).await?;
    let summary = query.summary().await?;
    let printer = &mut context.printer;
    coverage::warn(printer, &incomplete);
    if printer.is_json() {
        printer.json(&SummaryJson {
            entity_id: which.whose.entity.as_ref().map(EntityId::as_str),
            resource: which.whose.resource.as_ref().map(ResourceName::as_str),
            window: which.window.as_str(),
            start: format_time(range.start),
            end: format_time(range.end),
            first_window_start: summary.first.map(format_time),
            last_window_start: summary.last.map(format_time),
            records: summary.records,
            events: summary.events,
            consumed: summary.consumed.iter().map(|(name, sum)| (name.to_string(), *sum)).collect(),
            incomplete,
        });
        return Ok(ExitStatus::Done);
    }
    let (Some(first), Some(last)) = (summary.first, summary.last) else {
        let nothing = which.nothing(&range, context)?;
        context.printer.say(nothing);
        return Ok(ExitStatus::Done);
    };
    let mut table = Columns::new(&[("LIMIT", Align::Left), ("CONSUMED", Align::Right)]);
    let row = |(name, sum)| vec![Cell::from(name), Cell::from(sum)];
    let rows: Vec<Vec<Cell>> = summary.consumed.iter().map(row).collect();
    table.print(printer, &rows);
    let windows = match (which.window.label(first), which.window.label(last)) {
        (first, last) if first == last => first,
        (first, last) => format!("{first} to {last}"),
    };
    printer.say(format!(
        "{}, {windows}, {}",
        count(summary.records, &format!("{} record", which.window)),
        count(summary.events, "event")
    ));
    Ok(ExitStatus::Done)
}
