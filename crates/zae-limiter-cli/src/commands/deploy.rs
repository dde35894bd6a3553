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

use super::stack::{self, Telling};

mod options;

pub(crate) use options::{Bootstrap, WindowArg};

const AFTER_HELP: &str = "\
Examples:
  zae-limiter deploy --name my-app --region eu-west-1
  zae-limiter deploy --name my-app --create-iam-roles --alarm-sns-topic arn:aws:sns:…
  zae-limiter deploy --name my-app --no-aggregator --no-alarms    the table and its policies alone

What is not asked for is the default, also when the stack has something else now. Deploying again with
the same options changes nothing; `upgrade` brings a stack to this release and leaves its options alone.";

/// Arguments of `deploy`.
#[derive(clap::Args, Debug)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct Args {
    #[command(flatten)]
    options: options::OptionArgs,

    #[command(flatten)]
    bootstrap: Bootstrap,

    /// End when the change is under way; `status` shows how it goes on
    #[arg(long, help_heading = "Command options")]
    no_wait: bool,
}

pub(crate) async fn run(args: Args, context: &mut Context) -> Result<ExitStatus, Failure> {
    let address = context.stack()?;
    let mut options = args.options.stack_options(&address.table)?;
    // Everything is checked before anything is sent.
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
    let mut telling = Telling::new(&mut context.printer);
    let deployed = deployer.deploy(&plan, package.as_ref(), &mut telling).await?;
    if !matches!(deployed, Deployed::Started { .. }) {
        prepare(context, &address, Some(retention)).await?;
    }
    print(context, &address.table, deployed);
    Ok(ExitStatus::Done)
}

/// What the table needs before programs that may only acquire use it: its version, and the namespace
/// `default`. And for how many days audit events are kept, where that is known.
pub(super) async fn prepare(
    context: &mut Context,
    address: &DynamoAddress,
    retention: Option<u32>,
) -> Result<(), Failure> {
    let table = stack::table(context, address).await;
    let version = records::ensure_version(&table, context.clock.now()).await;
    version.map_err(|error| {
        let message = format!("the stack is there, but table {} is not ready", address.table);
        Failure::new(ExitStatus::Unavailable, message).caused_by(&error).hint("deploy again")
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
            context.printer.say(format!("nothing to do: stack {name} is as it should be"));
        }
        Deployed::Started { unfinished } => {
            context.printer.say(format!("the change of stack {name} is under way"));
            if unfinished {
                let words = "the aggregator is still missing: deploy again when it is done";
                context.printer.warn(words);
            }
        }
    }
    let fields = SHOWN.iter().filter_map(|(output, words)| {
        outputs.get(output).filter(|value| !value.is_empty()).map(|v| (*words, Cell::from(v)))
    });
    print_fields(&mut context.printer, fields.collect());
}

/// What a person needs of the outputs, in words.
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

/// Where the aggregator comes from.
impl Bootstrap {
    fn package(&self, context: &Context) -> Result<zae_limiter_infra::Package, Failure> {
        stack::package(context, self.file(), self.architecture())
    }

    fn file(&self) -> Option<&std::path::Path> {
        self.bootstrap.as_deref()
    }
}
