//! `entity`: entities, their hierarchy and their limits.

use clap::Subcommand;

use crate::context::Context;
use crate::exit::ExitStatus;
use crate::failure::Failure;

mod create;
mod delete;
mod limits;
mod list;
mod show;

const AFTER_HELP: &str = "\
Examples:
  zae-limiter entity create project-1 --display-name 'Search'
  zae-limiter entity create key-1 --parent project-1 --cascade
  zae-limiter entity set-limits key-1 -r gpt-4 -l rpm:100 -l tpm:10000/min:15000
  zae-limiter entity get-limits key-1 -r gpt-4 --effective

Limits also apply to entities that were never created. Create an entity to give it a parent, a name
or metadata.";

/// Arguments of `entity`.
#[derive(clap::Args, Debug)]
#[command(after_help = AFTER_HELP, arg_required_else_help = true)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Create an entity with a parent, a name or metadata
    Create(create::Args),
    /// Show an entity
    Show(show::Args),
    /// Delete an entity with its limits, balances and usage
    Delete(delete::Args),
    /// List the children of an entity
    Children(list::ChildrenArgs),
    /// Set the limits of an entity
    SetLimits(limits::SetArgs),
    /// Show the stored or the effective limits of an entity
    GetLimits(limits::GetArgs),
    /// Delete the limits stored for an entity
    DeleteLimits(limits::DeleteArgs),
    /// List the entities that have limits of their own
    List(list::Args),
    /// List the resources for which some entity has limits of its own
    ListResources(list::ResourcesArgs),
}

pub(crate) async fn run(args: Args, context: &mut Context) -> Result<ExitStatus, Failure> {
    match args.command {
        Command::Create(args) => create::run(args, context).await,
        Command::Show(args) => show::run(args, context).await,
        Command::Delete(args) => delete::run(args, context).await,
        Command::Children(args) => list::children(args, context).await,
        Command::SetLimits(args) => limits::set(args, context).await,
        Command::GetLimits(args) => limits::get(args, context).await,
        Command::DeleteLimits(args) => limits::delete(args, context).await,
        Command::List(args) => list::with_custom_limits(args, context).await,
        Command::ListResources(args) => list::resources(args, context).await,
    }
}
