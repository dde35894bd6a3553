//! `resource`: the default limits of resources, and their remaining capacity.

use clap::Subcommand;
use zae_limiter::model::{ConfigLevel, ResourceList, ResourceName};
use zae_limiter::{Limit, RateLimiter};

use crate::context::{Context, Yes};
use crate::exit::ExitStatus;
use crate::failure::Failure;
use crate::grammar;
use crate::listing::print_pages;
use crate::replacing::{Change, replace};
use crate::stored::{self, ResourceJson};

mod capacity;

const AFTER_HELP: &str = "\
Examples:
  zae-limiter resource set-defaults gpt-4 -l rpm:100 -l tpm:10000/min:15000
  zae-limiter resource list
  zae-limiter resource capacity gpt-4 tpm    the balance of each entity";

const SET_AFTER_HELP: &str = "\
Examples:
  zae-limiter resource set-defaults gpt-4 -l rpm:100 -l tpm:10000/min:15000
  zae-limiter resource set-defaults uploads -l files:3/5min

Each entity without limits of its own gets these limits for itself. They replace all stored
defaults of the resource. On a terminal the command asks before a limit is dropped.";

const GET_AFTER_HELP: &str = "\
Examples:
  zae-limiter resource get-defaults gpt-4
  zae-limiter entity get-limits key-1 -r gpt-4 --effective   the limits that apply to one entity";

const DELETE_AFTER_HELP: &str = "\
Examples:
  zae-limiter resource delete-defaults gpt-4
  zae-limiter resource delete-defaults gpt-4 --yes    without asking

Afterwards the system's defaults apply, if there are any.";

const LIST_AFTER_HELP: &str = "\
Examples:
  zae-limiter resource list
  zae-limiter entity list-resources    resources on which some entity has limits of its own";

const SYSTEM_APPLIES: &str = "the system's defaults apply: zae-limiter system get-defaults";

/// Arguments of `resource`.
#[derive(clap::Args, Debug)]
#[command(after_help = AFTER_HELP, arg_required_else_help = true)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Set the default limits of a resource
    SetDefaults(SetArgs),
    /// Show the default limits of a resource
    GetDefaults(GetArgs),
    /// Delete the default limits of a resource
    DeleteDefaults(DeleteArgs),
    /// List the resources with default limits
    List(ListArgs),
    /// Show the balance of each entity for one limit, and the total
    Capacity(capacity::Args),
}

/// Arguments of `resource set-defaults`.
#[derive(clap::Args, Debug)]
#[command(after_help = SET_AFTER_HELP)]
pub(crate) struct SetArgs {
    /// Resource, such as a model
    #[arg(value_parser = grammar::resource)]
    resource: ResourceName,

    /// Limit, as in rpm:100 or tpm:10000/min:15000; repeat for each limit
    #[arg(
        short, long = "limit", required = true, value_name = "LIMIT",
        value_parser = grammar::limit,
    )]
    limits: Vec<Limit>,

    #[command(flatten)]
    yes: Yes,
}

/// Arguments of `resource get-defaults`.
#[derive(clap::Args, Debug)]
#[command(after_help = GET_AFTER_HELP)]
pub(crate) struct GetArgs {
    /// Resource
    #[arg(value_parser = grammar::resource)]
    resource: ResourceName,
}

/// Arguments of `resource delete-defaults`.
#[derive(clap::Args, Debug)]
#[command(after_help = DELETE_AFTER_HELP)]
pub(crate) struct DeleteArgs {
    /// Resource
    #[arg(value_parser = grammar::resource)]
    resource: ResourceName,

    #[command(flatten)]
    yes: Yes,
}

/// Arguments of `resource list`.
#[derive(clap::Args, Debug)]
#[command(after_help = LIST_AFTER_HELP)]
pub(crate) struct ListArgs {}

pub(crate) async fn run(args: Args, context: &mut Context) -> Result<ExitStatus, Failure> {
    match args.command {
        Command::SetDefaults(args) => set(args, context).await,
        Command::GetDefaults(args) => get(args, context).await,
        Command::DeleteDefaults(args) => delete(args, context).await,
        Command::List(args) => list(args, context).await,
        Command::Capacity(args) => capacity::run(args, context).await,
    }
}

async fn nothing(resource: &ResourceName, limiter: &RateLimiter) -> Result<Failure, Failure> {
    let message = format!("no limits are stored for resource {resource}");
    let hint = match does_system_apply(limiter).await? {
        true => SYSTEM_APPLIES.to_owned(),
        false => format!("zae-limiter resource set-defaults {resource} -l rpm:100"),
    };
    Ok(Failure::new(ExitStatus::NotFound, message).hint(hint))
}

/// Whether the system has default limits. They apply to a resource without defaults; defaults of the resource would
/// hide them, so no hint suggests some.
async fn does_system_apply(limiter: &RateLimiter) -> Result<bool, Failure> {
    Ok(limiter.system_defaults().await?.is_some_and(|config| !config.limits.is_empty()))
}

async fn set(args: SetArgs, context: &mut Context) -> Result<ExitStatus, Failure> {
    let limiter = context.limiter().await?;
    let change = Change {
        level: ConfigLevel::Resource(args.resource),
        limits: Some(args.limits),
        on_unavailable: None,
        yes: args.yes,
    };
    replace(change, &limiter, context).await?.print_set(context);
    Ok(ExitStatus::Done)
}

async fn get(args: GetArgs, context: &mut Context) -> Result<ExitStatus, Failure> {
    let limiter = context.limiter().await?;
    let stored = limiter.resource_defaults(args.resource.as_str()).await?;
    let Some(config) = stored else { return Err(nothing(&args.resource, &limiter).await?) };
    stored::print_stored(&mut context.printer, &config);
    Ok(ExitStatus::Done)
}

async fn delete(args: DeleteArgs, context: &mut Context) -> Result<ExitStatus, Failure> {
    let limiter = context.limiter().await?;
    let stored = limiter.resource_defaults(args.resource.as_str()).await?;
    let Some(config) = stored else { return Err(nothing(&args.resource, &limiter).await?) };
    context.confirm(args.yes, &stored::deletion(&config)).await?;
    limiter.delete_resource_defaults(args.resource.as_str()).await?;
    stored::print_deleted(&mut context.printer, &config);
    Ok(ExitStatus::Done)
}

async fn list(ListArgs {}: ListArgs, context: &mut Context) -> Result<ExitStatus, Failure> {
    let limiter = context.limiter().await?;
    let pages = limiter.resources(ResourceList::WithDefaults);
    if print_pages(&mut context.printer, pages, ResourceJson::from).await? == 0 {
        let next = match does_system_apply(&limiter).await? {
            true => SYSTEM_APPLIES,
            false => "set some: zae-limiter resource set-defaults RESOURCE -l rpm:100",
        };
        context.printer.say_unless_json(format!("no resource has default limits; {next}"));
    }
    Ok(ExitStatus::Done)
}
