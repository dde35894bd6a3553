//! `resource`: limits for everybody on one resource, and what is left of them.

use clap::Subcommand;
use zae_limiter::Limit;
use zae_limiter::model::{ResourceList, ResourceName};

use crate::context::{Context, Yes};
use crate::exit::ExitStatus;
use crate::failure::Failure;
use crate::grammar;
use crate::listing::print_pages;
use crate::stored::{self, ResourceJson};

mod capacity;

const AFTER_HELP: &str = "\
Examples:
  zae-limiter resource set-defaults gpt-4 -l rpm:100 -l tpm:10000/min:15000
  zae-limiter resource list
  zae-limiter resource capacity gpt-4 tpm    who has how much left";

const SET_AFTER_HELP: &str = "\
Examples:
  zae-limiter resource set-defaults gpt-4 -l rpm:100 -l tpm:10000/min:15000
  zae-limiter resource set-defaults uploads -l files:3/5min

They hold, for each entity by itself, for all entities without limits of their own. They replace
those that were stored there, all of them.";

const GET_AFTER_HELP: &str = "\
Examples:
  zae-limiter resource get-defaults gpt-4
  zae-limiter entity get-limits key-1 -r gpt-4 --effective   what holds for one entity";

const DELETE_AFTER_HELP: &str = "\
Examples:
  zae-limiter resource delete-defaults gpt-4
  zae-limiter resource delete-defaults gpt-4 --yes    without asking

Afterwards the system's defaults hold, if there are any.";

const LIST_AFTER_HELP: &str = "\
Examples:
  zae-limiter resource list
  zae-limiter entity list-resources    resources for which some entity has limits of its own";

/// Arguments of `resource`.
#[derive(clap::Args, Debug)]
#[command(after_help = AFTER_HELP, arg_required_else_help = true)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Set the limits of a resource for everybody
    SetDefaults(SetArgs),
    /// Show the limits of a resource for everybody
    GetDefaults(GetArgs),
    /// Delete the limits of a resource for everybody
    DeleteDefaults(DeleteArgs),
    /// List the resources that have limits for everybody
    List(ListArgs),
    /// Show what each entity has left of a limit, and all of them together
    Capacity(capacity::Args),
}

/// Arguments of `resource set-defaults`.
#[derive(clap::Args, Debug)]
#[command(after_help = SET_AFTER_HELP)]
pub(crate) struct SetArgs {
    /// The resource, for example a model
    #[arg(value_parser = grammar::resource)]
    resource: ResourceName,

    /// A limit, as in rpm:100 or tpm:10000/min:15000; once for each
    #[arg(
        short, long = "limit", required = true, value_name = "LIMIT",
        value_parser = grammar::limit,
    )]
    limits: Vec<Limit>,
}

/// Arguments of `resource get-defaults`.
#[derive(clap::Args, Debug)]
#[command(after_help = GET_AFTER_HELP)]
pub(crate) struct GetArgs {
    /// The resource
    #[arg(value_parser = grammar::resource)]
    resource: ResourceName,
}

/// Arguments of `resource delete-defaults`.
#[derive(clap::Args, Debug)]
#[command(after_help = DELETE_AFTER_HELP)]
pub(crate) struct DeleteArgs {
    /// The resource
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

fn nothing(resource: &ResourceName) -> Failure {
    Failure::new(ExitStatus::NotFound, format!("no limits are stored for resource {resource}"))
        .hint(format!("zae-limiter resource set-defaults {resource} -l rpm:100"))
}

async fn set(args: SetArgs, context: &mut Context) -> Result<ExitStatus, Failure> {
    let limiter = context.limiter().await?;
    let config = limiter.set_resource_defaults(args.resource.as_str(), args.limits).await?;
    stored::print_set(&mut context.printer, &config);
    Ok(ExitStatus::Done)
}

async fn get(args: GetArgs, context: &mut Context) -> Result<ExitStatus, Failure> {
    let limiter = context.limiter().await?;
    let stored = limiter.resource_defaults(args.resource.as_str()).await?;
    let config = stored.ok_or_else(|| nothing(&args.resource))?;
    stored::print_stored(&mut context.printer, &config);
    Ok(ExitStatus::Done)
}

async fn delete(args: DeleteArgs, context: &mut Context) -> Result<ExitStatus, Failure> {
    let limiter = context.limiter().await?;
    let stored = limiter.resource_defaults(args.resource.as_str()).await?;
    let config = stored.ok_or_else(|| nothing(&args.resource))?;
    context.confirm(args.yes, &stored::deletion(&config))?;
    limiter.delete_resource_defaults(args.resource.as_str()).await?;
    stored::print_deleted(&mut context.printer, &config);
    Ok(ExitStatus::Done)
}

async fn list(ListArgs {}: ListArgs, context: &mut Context) -> Result<ExitStatus, Failure> {
    let limiter = context.limiter().await?;
    let pages = limiter.resources(ResourceList::WithDefaults);
    if print_pages(&mut context.printer, pages, ResourceJson::from).await? == 0 {
        context.printer.say_unless_json(
            "no resource has limits for everybody; \
             set some: zae-limiter resource set-defaults RESOURCE -l rpm:100",
        );
    }
    Ok(ExitStatus::Done)
}
