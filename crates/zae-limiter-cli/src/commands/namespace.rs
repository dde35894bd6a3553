//! `namespace`: namespaces, which separate limiters that share a store.

use clap::Subcommand;
use serde::Serialize;
use zae_limiter::model::{Namespace, format_time};

use crate::columns::{Align, Cell};
use crate::context::Context;
use crate::exit::ExitStatus;
use crate::failure::Failure;
use crate::listing::Item;
use crate::printer::Look;
use crate::scratch;

mod delete;
mod list;
mod purge;
mod register;

const AFTER_HELP: &str = "\
Examples:
  zae-limiter namespace register team-a team-b
  zae-limiter -N team-a resource set-defaults gpt-4 -l rpm:100
  zae-limiter namespace delete team-a    can be undone until `namespace purge`";

/// Arguments of `namespace`.
#[derive(clap::Args, Debug)]
#[command(after_help = AFTER_HELP, arg_required_else_help = true)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Register namespaces
    Register(register::Args),
    /// List the registered namespaces
    List(list::Args),
    /// Show a namespace
    Show(list::ShowArgs),
    /// Delete a namespace; its items stay until they are purged
    Delete(delete::Args),
    /// Restore a deleted namespace
    Recover(delete::RecoverArgs),
    /// List deleted namespaces that are not purged yet
    Orphans(list::OrphansArgs),
    /// Remove a deleted namespace and all its items permanently
    Purge(purge::Args),
}

pub(crate) async fn run(args: Args, context: &mut Context) -> Result<ExitStatus, Failure> {
    match args.command {
        Command::Register(args) => register::run(args, context).await,
        Command::List(args) => list::run(args, context).await,
        Command::Show(args) => list::show(args, context).await,
        Command::Delete(args) => delete::run(args, context).await,
        Command::Recover(args) => delete::recover(args, context).await,
        Command::Orphans(args) => list::orphans(args, context).await,
        Command::Purge(args) => purge::run(args, context).await,
    }
}

/// A namespace in a JSON document, or in a list.
#[derive(Debug, Serialize)]
struct NamespaceJson {
    name: String,
    namespace_id: String,
    created_at: String,
    deleted_at: Option<String>,
    /// The command that made it for one run; `null` for a namespace of a user.
    temporary: Option<&'static str>,
}

impl From<Namespace> for NamespaceJson {
    fn from(namespace: Namespace) -> Self {
        Self {
            temporary: scratch::made_by(&namespace),
            name: namespace.name.to_string(),
            namespace_id: namespace.id.to_string(),
            created_at: format_time(namespace.created_at),
            deleted_at: namespace.deleted_at.map(format_time),
        }
    }
}

impl Item for NamespaceJson {
    const HEADS: &'static [(&'static str, Align)] = &[
        ("NAMESPACE", Align::Left),
        ("ID", Align::Left),
        ("CREATED", Align::Left),
        ("PURPOSE", Align::Left),
    ];

    fn row(&self) -> Vec<Cell> {
        vec![
            Cell::from(&self.name),
            Cell::from(&self.namespace_id),
            Cell::from(&self.created_at),
            self.purpose(),
        ]
    }
}

impl NamespaceJson {
    fn purpose(&self) -> Cell {
        match self.temporary {
            Some(command) => Cell::new(Look::Dim, format!("temporary, of {command}")),
            None => Cell::from("-"),
        }
    }
}
