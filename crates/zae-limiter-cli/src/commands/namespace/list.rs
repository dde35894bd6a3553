//! `namespace list`, `show` and `orphans`

use serde::Serialize;
use zae_limiter::Error;
use zae_limiter::model::{Namespace, NamespaceName};

use crate::columns::{Align, Cell, print_fields};
use crate::context::Context;
use crate::exit::ExitStatus;
use crate::failure::Failure;
use crate::grammar;
use crate::listing::{Item, print_pages};

use super::NamespaceJson;

const AFTER_HELP: &str = "\
Examples:
  zae-limiter namespace list
  zae-limiter namespace list -o json | jq -r '.[].name'

A temporary namespace belongs to a run of bench or demo. If the run was killed, the next one on the
store removes the namespace once it is a day old.";

const SHOW_AFTER_HELP: &str = "\
Examples:
  zae-limiter namespace show team-a";

const ORPHANS_AFTER_HELP: &str = "\
Examples:
  zae-limiter namespace orphans
  zae-limiter namespace recover ID    undoes the deletion
  zae-limiter namespace purge ID      removes the items permanently";

/// Arguments of `namespace list`.
#[derive(clap::Args, Debug)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct Args {}

/// Arguments of `namespace show`.
#[derive(clap::Args, Debug)]
#[command(after_help = SHOW_AFTER_HELP)]
pub(crate) struct ShowArgs {
    /// Namespace to show
    #[arg(value_name = "NAME", value_parser = grammar::namespace_name)]
    name: NamespaceName,
}

/// Arguments of `namespace orphans`.
#[derive(clap::Args, Debug)]
#[command(after_help = ORPHANS_AFTER_HELP)]
pub(crate) struct OrphansArgs {}

/// A deleted namespace in a list.
#[derive(Serialize)]
#[serde(transparent)]
struct Orphan(NamespaceJson);

impl From<Namespace> for Orphan {
    fn from(namespace: Namespace) -> Self {
        Self(namespace.into())
    }
}

impl Item for Orphan {
    const HEADS: &'static [(&'static str, Align)] = &[
        ("NAMESPACE", Align::Left),
        ("ID", Align::Left),
        ("CREATED", Align::Left),
        ("PURPOSE", Align::Left),
        ("DELETED", Align::Left),
    ];

    fn row(&self) -> Vec<Cell> {
        let mut row = self.0.row();
        row.push(Cell::from(self.0.deleted_at.as_deref().unwrap_or("-")));
        row
    }
}

pub(super) async fn run(Args {}: Args, context: &mut Context) -> Result<ExitStatus, Failure> {
    // Never empty: the namespace default always exists.
    let pages = context.default_limiter().await?.namespaces().list();
    print_pages(&mut context.printer, pages, NamespaceJson::from).await?;
    Ok(ExitStatus::Done)
}

pub(super) async fn show(args: ShowArgs, context: &mut Context) -> Result<ExitStatus, Failure> {
    let namespaces = context.default_limiter().await?.namespaces();
    let found = namespaces.get(args.name.as_str()).await?;
    let namespace = found.ok_or(Error::UnknownNamespace { name: args.name })?;
    let namespace = NamespaceJson::from(namespace);
    if context.printer.is_json() {
        context.printer.json(&namespace);
    } else {
        let fields = vec![
            ("NAMESPACE", Cell::from(&namespace.name)),
            ("ID", Cell::from(&namespace.namespace_id)),
            ("CREATED", Cell::from(&namespace.created_at)),
            ("PURPOSE", namespace.purpose()),
        ];
        print_fields(&mut context.printer, fields);
    }
    Ok(ExitStatus::Done)
}

pub(super) async fn orphans(
    OrphansArgs {}: OrphansArgs,
    context: &mut Context,
) -> Result<ExitStatus, Failure> {
    let pages = context.default_limiter().await?.namespaces().orphans();
    if print_pages(&mut context.printer, pages, Orphan::from).await? == 0 {
        context.printer.say_unless_json("no deleted namespaces to recover or purge");
    }
    Ok(ExitStatus::Done)
}
