//! `delete`

use serde::Serialize;
use zae_limiter_infra::{Deleted, StackState, TableFigures, Wait, tag};

use crate::context::{Context, Yes};
use crate::exit::ExitStatus;
use crate::failure::Failure;
use crate::printer::count;

use super::stack::{self, Telling};

const AFTER_HELP: &str = "\
Examples:
  zae-limiter delete --name my-app          says what will be lost, and asks for the name
  zae-limiter delete --name my-app --yes

The archive of audit events is kept, and so is a table that was deployed with --retain-table.";

/// Arguments of `delete`.
#[derive(clap::Args, Debug)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct Args {
    #[command(flatten)]
    yes: Yes,

    /// End when the deletion is under way
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
    let state = account.deployer.ours(&address.table).await?;
    if !args.yes.yes {
        let table = account.cloud.table(&address.table).await?;
        for line in losses(&state, table.as_ref()) {
            context.printer.say(line);
        }
    }
    context.confirm_name(args.yes, &address.table)?;
    let wait = if args.no_wait { Wait::No } else { Wait::UntilDone };
    let mut telling = Telling::new(&mut context.printer);
    let deleted = account.deployer.delete(&state, wait, &mut telling).await?;
    let name = address.table.as_str();
    let (under_way, kept) = match deleted {
        Deleted::Gone { kept } => (false, kept),
        Deleted::Started => (true, Vec::new()),
    };
    let mut words = match under_way {
        true => format!("the deletion of stack {name} is under way"),
        false => format!("deleted stack {name}"),
    };
    for (kind, name) in &kept {
        words.push_str(&format!("\nkept {} {name}", kind.rsplit("::").next().unwrap_or(kind)));
    }
    let kept = kept.into_iter().map(|(kind, name)| KeptJson { kind, name }).collect();
    context.printer.done(&DeletedJson { deleted: name, under_way, kept }, words);
    Ok(ExitStatus::Done)
}

/// What goes, and what stays.
fn losses(state: &StackState, table: Option<&TableFigures>) -> Vec<String> {
    let name = &state.name;
    let mut lines = Vec::new();
    if state.tags.get(tag::RETAIN).is_some_and(|kept| kept == "true") {
        lines.push(format!("table {name} is kept, and everything in it"));
    } else {
        let items = table.map_or(0, |table| table.items.max(0).unsigned_abs());
        lines.push(format!(
            "table {name} will be deleted, with all limits, balances, usage and audit events in it \
             (about {}, as AWS counted last)",
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
