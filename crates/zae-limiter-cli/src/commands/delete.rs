//! `delete`

use serde::Serialize;
use zae_limiter_infra::{Deleted, StackState, TableFigures, Wait, tag};

use crate::context::{Context, Yes};
use crate::exit::ExitStatus;
use crate::failure::Failure;
use crate::printer::count;

use super::stack::{self, ProgressPrinter};

const AFTER_HELP: &str = "\
Examples:
  zae-limiter delete --name my-app          lists what will be deleted, and asks for the name
  zae-limiter delete --name my-app --yes    without asking

The archive of audit events is kept. A table deployed with --retain-table is kept, too.";

/// Arguments of `delete`.
#[derive(clap::Args, Debug)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct Args {
    #[command(flatten)]
    yes: Yes,

    /// Exit once the deletion has started
    #[arg(long)]
    no_wait: bool,
}

#[derive(Serialize)]
struct KeptJson {
    kind: String,
    name: String,
}

#[derive(Serialize)]
struct DeletedJson<'a> {
    deleted: &'a str,
    under_way: bool,
    kept: Vec<KeptJson>,
}

pub(crate) async fn run(args: Args, context: &mut Context) -> Result<ExitStatus, Failure> {
    let address = context.stack()?;
    let account = stack::connect(context, &address).await?;
    context.printer.progress(format!("reading the status of {}", address.table));
    let state = account.deployer.ours(&address.table).await?;
    if !args.yes.yes {
        let table = account.cloud.table(&address.table).await?;
        for line in losses(&state, table.as_ref()) {
            context.printer.say(line);
        }
    }
    context.confirm_name(args.yes, &address.table).await?;
    let wait = if args.no_wait { Wait::No } else { Wait::UntilDone };
    let mut progress = ProgressPrinter::of_stack(&mut context.printer, &address.table);
    let deleted = account.deployer.delete(&state, wait, &mut progress).await?;
    let name = address.table.as_str();
    let (under_way, kept) = match deleted {
        Deleted::Gone { kept } => (false, kept),
        Deleted::Started => (true, Vec::new()),
    };
    let mut words = match under_way {
        true => format!("started to delete stack {name}"),
        false => format!("deleted stack {name}"),
    };
    for (kind, name) in &kept {
        words.push_str(&format!("\nkept {} {name}", kind.rsplit("::").next().unwrap_or(kind)));
    }
    let kept = kept.into_iter().map(|(kind, name)| KeptJson { kind, name }).collect();
    context.printer.done(&DeletedJson { deleted: name, under_way, kept }, words);
    Ok(ExitStatus::Done)
}

/// What will be deleted and what will be kept.
fn losses(state: &StackState, table: Option<&TableFigures>) -> Vec<String> {
    let name = &state.name;
    let mut lines = Vec::new();
    if state.tags.get(tag::RETAIN).is_some_and(|kept| kept == "true") {
        lines.push(format!("table {name} is kept with all its items"));
    } else {
        let items = table.map_or(0, |table| table.items.max(0).unsigned_abs());
        lines.push(format!(
            "table {name} will be deleted, with all limits, balances, usage and audit events in it \
             (about {}, by the last count of AWS)",
            count(items, "item")
        ));
    }
    if state.output("AggregatorName").is_some() {
        lines.push("the aggregator, its logs and its dead letters will be deleted".to_owned());
    }
    if let Some(bucket) = state.output("ArchiveBucketName") {
        lines.push(format!("bucket {bucket} with archived audit events is kept"));
    }
    lines
}
