//! `upgrade`

use serde::Serialize;
use zae_limiter::dynamodb::aws::DynamoAddress;
use zae_limiter_infra::migrate::{self, Counts, MigrateError, Migration, Run};
use zae_limiter_infra::versions::{PROGRAM, Versions};
use zae_limiter_infra::{Deployed, Maker, StackPlan, StackState, records};

use crate::context::Context;
use crate::exit::ExitStatus;
use crate::failure::Failure;
use crate::printer::count;

use super::deploy::{Bootstrap, WindowArg, prepare};
use super::stack::{self, Account, Found, ProgressPrinter};
use super::status::unreadable;

const AFTER_HELP: &str = "\
Examples:
  zae-limiter upgrade --name my-app --dry-run
  zae-limiter upgrade --name my-app
  zae-limiter upgrade --name my-app --bootstrap ./zae-limiter-arm64

upgrade first migrates a table that the Python client created or wrote last. It reads all items and
adds missing index entries. Where the Python aggregator wrote the usage of an hour, a day and a month
into one item, it splits that item. Limits and balances stay as they are. Clients may run meanwhile,
but stop the Python aggregator first. Repeat an interrupted migration to complete it.

Then upgrade updates the template and the aggregator, and keeps all options and tags of the stack.
With -N it only migrates one namespace of the table. It never downgrades a stack or table of a later
release.";

/// Arguments of `upgrade`.
#[derive(clap::Args, Debug)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct Args {
    /// Show what would change, and change nothing
    #[arg(long)]
    dry_run: bool,

    /// Migrate the table only, not the stack
    #[arg(long)]
    table_only: bool,

    /// Usage windows that the Python aggregator was configured with
    #[arg(
        long,
        value_name = "WINDOWS",
        value_enum,
        value_delimiter = ',',
        default_value = "hourly,daily"
    )]
    snapshot_windows: Vec<WindowArg>,

    #[command(flatten)]
    bootstrap: Bootstrap,
}

#[derive(Serialize)]
struct UpgradeJson<'a> {
    stack: &'a str,
    from: Option<String>,
    to: &'static str,
    changed: bool,
    dry_run: bool,
    migration: Option<CountsJson>,
}

#[derive(Serialize)]
struct CountsJson {
    items: u64,
    index_entries: u64,
    usage_records: u64,
    inexact_usage_items: u64,
    busy_usage_items: u64,
    expired_buckets: u64,
    unknown_items: u64,
}

impl From<Counts> for CountsJson {
    fn from(counts: Counts) -> Self {
        Self {
            items: counts.seen,
            index_entries: counts.indexed,
            usage_records: counts.usage,
            inexact_usage_items: counts.inexact,
            busy_usage_items: counts.busy,
            expired_buckets: counts.expired,
            unknown_items: counts.unknown,
        }
    }
}

pub(crate) async fn run(args: Args, context: &mut Context) -> Result<ExitStatus, Failure> {
    let address = context.stack()?;
    let account = stack::connect(context, &address).await?;
    let name = address.table.clone();
    context.printer.progress(format!("reading the versions of {name}"));
    let found = stack::find(&account, &name).await?;
    if stack::figures(&account, &name).await?.is_none() {
        let message = format!("there is no table {name}");
        return Err(stack::no_table(message, &name, &found, "zae-limiter deploy creates one"));
    }
    let counts = migrate_table(&args, context, &address).await?;
    let from = Versions::of(found.stack(), None).stack;
    let one_namespace = context.has_namespace();
    let ours = found.stack().filter(|state| state.maker() == Maker::Us);
    let changed = match ours {
        Some(_) if args.dry_run || args.table_only || one_namespace => false,
        Some(state) => upgrade_stack(&args.bootstrap, context, &account, &address, state).await?,
        None => false,
    };
    let mut lines = migration_lines(&name, args.dry_run, counts.as_ref());
    lines.push(match &found {
        Found::NoCloudFormation(error) => format!("no stack was changed: {error}"),
        _ => stack_line(&name, args.dry_run, changed, from.as_deref(), counts.is_some()),
    });
    let words = lines.join("\n");
    let migration = counts.map(CountsJson::from);
    let document =
        UpgradeJson { stack: &name, from, to: PROGRAM, changed, dry_run: args.dry_run, migration };
    context.printer.done(&document, words);
    Ok(ExitStatus::Done)
}

/// Migrates the table if that is needed.
async fn migrate_table(
    args: &Args,
    context: &mut Context,
    address: &DynamoAddress,
) -> Result<Option<Counts>, Failure> {
    let table = stack::table(context, address).await?;
    let version = records::read_version(&table).await;
    let version = version.map_err(|error| unreadable(address, &error))?;
    if !migrate::is_needed(version.as_ref()) {
        return Ok(None);
    }
    let run = if args.dry_run { Run::Dry } else { Run::Real };
    let windows = args.snapshot_windows.iter().map(|one| one.window());
    let mut migration = Migration::new(context.clock.now()).run(run).windows(windows);
    if context.has_namespace() {
        let limiter = context.limiter().await?;
        migration = migration.namespace(limiter.namespace_id().clone());
    }
    let printer = &mut context.printer;
    printer.progress(format!("reading table {}", address.table));
    let mut progress = |so_far: &Counts| {
        printer.progress(format!(
            "{} read, {} added",
            count(so_far.seen, "item"),
            so_far.indexed + so_far.usage
        ));
    };
    let counts = migration.migrate(&table, &table, &mut progress).await;
    Ok(Some(counts.map_err(migration_failure)?))
}

fn migration_failure(error: MigrateError) -> Failure {
    let status = match &error {
        MigrateError::Table(error) => stack::status_of(error.kind),
        MigrateError::TooOld(_) | MigrateError::TooNew(_) => ExitStatus::Error,
    };
    let failure = Failure::new(status, error.to_string()).hint(error.hint());
    match std::error::Error::source(&error) {
        Some(source) => failure.caused_by(source),
        None => failure,
    }
}

/// Updates the template and the aggregator. Returns whether anything changed.
async fn upgrade_stack(
    bootstrap: &Bootstrap,
    context: &mut Context,
    account: &Account,
    address: &DynamoAddress,
    state: &StackState,
) -> Result<bool, Failure> {
    let stack_name = address.table.parse().map_err(zae_limiter::Error::Invalid)?;
    let mut plan = StackPlan::upgrade_of(state, stack_name);
    let package = match plan.has_aggregator {
        true => Some(bootstrap.package(context)?),
        false => None,
    };
    if let Some(package) = &package {
        let architecture = package.architecture().as_str().to_owned();
        plan.parameters.insert(StackPlan::ARCHITECTURE.to_owned(), architecture);
    }
    let mut progress = ProgressPrinter::of_stack(&mut context.printer, &address.table);
    let deployed = account.deployer.deploy(&plan, package.as_ref(), &mut progress).await?;
    let retention = plan.parameters.get("AuditRetentionDays");
    prepare(context, address, retention.and_then(|days| days.parse().ok())).await?;
    Ok(!matches!(deployed, Deployed::Unchanged(_)))
}

fn migration_lines(name: &str, dry_run: bool, counts: Option<&Counts>) -> Vec<String> {
    let mut lines = Vec::new();
    if let Some(counts) = counts {
        let verb = if dry_run { "would add" } else { "added" };
        lines.push(format!(
            "table {name}: {} read; {verb} index entries to {}, and {}",
            count(counts.seen, "item"),
            count(counts.indexed, "item"),
            count(counts.usage, "usage record"),
        ));
        if counts.inexact > 0 {
            let items = count(counts.inexact, "usage item");
            lines.push(format!("{items} did not split into whole tokens; the hour keeps the rest"));
        }
        if counts.busy > 0 {
            let items = count(counts.busy, "usage item");
            lines.push(format!(
                "{items} changed meanwhile: stop the Python aggregator and run upgrade again"
            ));
        }
        if counts.expired > 0 {
            lines.push(format!("{} skipped", count(counts.expired, "expired bucket")));
        }
    }
    lines
}

fn stack_line(
    name: &str,
    dry_run: bool,
    changed: bool,
    from: Option<&str>,
    migrated: bool,
) -> String {
    match (changed, from) {
        (true, Some(from)) if from != PROGRAM => {
            format!("upgraded stack {name} from {from} to {PROGRAM}")
        }
        (true, _) => format!("upgraded stack {name} to this build of release {PROGRAM}"),
        (false, Some(_)) if dry_run => format!("stack {name} was not changed"),
        (false, Some(PROGRAM)) if !migrated => {
            format!("nothing to do: stack {name} has release {PROGRAM}")
        }
        (false, _) => format!("stack {name} was not changed"),
    }
}
