//! `deploy`

use std::collections::BTreeMap;

use serde::Serialize;
use zae_limiter::dynamodb::aws::DynamoAddress;
use zae_limiter_infra::{Deployed, Wait, records};

use crate::columns::{Cell, print_fields};
use crate::context::Context;
use crate::exit::ExitStatus;
use crate::failure::Failure;
use crate::printer::count;

use super::stack::{self, ProgressPrinter};

mod bootstrap;
mod options;

pub(crate) use bootstrap::Bootstrap;
pub(crate) use options::WindowArg;

const AFTER_HELP: &str = "\
Examples:
  zae-limiter deploy --name my-app --region eu-west-1
  zae-limiter deploy --name my-app --create-iam-roles --alarm-sns-topic arn:aws:sns:…
  zae-limiter deploy --name my-app --no-aggregator --no-alarms    only the table and its policies
  zae-limiter deploy --name my-app --bootstrap FILE.zip --checksums SHA256SUMS

An option that is not given gets its default, even if the stack has another value now. Deploying
again with the same options changes nothing. `upgrade` keeps the options of the stack.

Lambda runs Linux programs. From macOS or Windows, deploy the zip file of the release; the error names
the file to download.";

/// Arguments of `deploy`.
#[derive(clap::Args, Debug)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct Args {
    #[command(flatten)]
    options: options::OptionArgs,

    #[command(flatten)]
    bootstrap: Bootstrap,

    /// Exit once the change has started; `status` shows its progress
    #[arg(long, overrides_with = "wait", help_heading = "Command options")]
    no_wait: bool,
}

pub(crate) async fn run(args: Args, context: &mut Context) -> Result<ExitStatus, Failure> {
    let address = context.stack()?;
    let mut options = args.options.stack_options(&address.table)?;
    // Check all options before the first call to AWS.
    options.plan()?;
    let package = match options.has_aggregator() {
        true => Some(args.bootstrap.package(context)?),
        false => None,
    };
    if let Some(package) = &package {
        options = options.architecture(package.architecture());
    }
    let (plan, retention) = (options.plan()?, options.audit_retention());
    let account = stack::connect(context, &address).await?;
    let wait = if args.no_wait { Wait::No } else { Wait::UntilDone };
    let deployer = account.deployer.wait(wait);
    let mut progress = ProgressPrinter::of_stack(&mut context.printer, &address.table);
    let deployed = deployer.deploy(&plan, package.as_ref(), &mut progress).await?;
    if !matches!(deployed, Deployed::Started { .. }) {
        prepare(context, &address, Some(retention)).await?;
    }
    print(context, &address.table, deployed);
    Ok(ExitStatus::Done)
}

/// Writes what the table needs before programs that may only acquire use it: its version and the
/// namespace `default`. Also stores the retention of audit events, in days, if given.
pub(super) async fn prepare(
    context: &mut Context,
    address: &DynamoAddress,
    retention: Option<u32>,
) -> Result<(), Failure> {
    let table = stack::table(context, address).await?;
    context.printer.progress(format!("preparing table {}", address.table));
    let version = records::ensure_version(&table, context.clock.now()).await;
    version.map_err(|error| {
        let message = format!("the stack exists, but table {} is not ready", address.table);
        Failure::new(stack::status_of(error.kind), message).caused_by(&error).hint("deploy again")
    })?;
    let limiter = context.default_limiter().await?;
    if let Some(days) = retention {
        let printer = &mut context.printer;
        let mut progress = |so_far| {
            printer.progress(format!("audit retention set in {}", count(so_far, "namespace")));
        };
        limiter.namespaces().set_audit_retention(days, &mut progress).await?;
    }
    Ok(())
}

#[derive(Serialize)]
struct DeployJson<'a> {
    stack: &'a str,
    result: &'a str,
    status: Option<&'a str>,
    outputs: BTreeMap<&'a str, &'a str>,
}

fn print(context: &mut Context, name: &str, deployed: Deployed) {
    let (result, state) = match &deployed {
        Deployed::Created(state) => ("created", Some(state)),
        Deployed::Updated(state) => ("updated", Some(state)),
        Deployed::Unchanged(state) => ("unchanged", Some(state)),
        Deployed::Started { .. } => ("started", None),
    };
    let outputs = state.map(|state| &state.outputs).into_iter().flatten();
    let outputs: BTreeMap<&str, &str> = outputs.map(|(k, v)| (k.as_str(), v.as_str())).collect();
    if context.printer.is_json() {
        let status = state.map(|state| state.status.as_str());
        context.printer.json(&DeployJson { stack: name, result, status, outputs });
        return;
    }
    match deployed {
        Deployed::Created(_) => context.printer.say(format!("created stack {name}")),
        Deployed::Updated(_) => context.printer.say(format!("changed stack {name}")),
        Deployed::Unchanged(_) => {
            context.printer.say(format!("nothing to do: stack {name} is up to date"));
        }
        Deployed::Started { unfinished } => {
            context.printer.say(format!("started to change stack {name}"));
            if unfinished {
                let words = "the aggregator is still missing: deploy again when this is done";
                context.printer.warn(words);
            }
        }
    }
    let fields = SHOWN.iter().filter_map(|(output, words)| {
        outputs.get(output).filter(|value| !value.is_empty()).map(|v| (*words, Cell::from(v)))
    });
    print_fields(&mut context.printer, fields.collect());
}

/// The stack outputs to print, with their labels.
const SHOWN: [(&str, &str); 10] = [
    ("TableName", "table"),
    ("AggregatorName", "aggregator"),
    ("DeadLettersUrl", "dead letters"),
    ("ArchiveBucketName", "archive"),
    ("AcquirePolicyArn", "policy to acquire"),
    ("ReadPolicyArn", "policy to read"),
    ("FullPolicyArn", "policy for everything"),
    ("AppRoleArn", "role to acquire"),
    ("ReadRoleArn", "role to read"),
    ("AdminRoleArn", "role for everything"),
];
