//! `entity delete`

use serde::Serialize;
use zae_limiter::model::EntityId;

use crate::context::{Context, Yes};
use crate::exit::ExitStatus;
use crate::failure::Failure;
use crate::grammar;
use crate::printer::count;
use crate::stored::DeletedJson;

const AFTER_HELP: &str = "\
Examples:
  zae-limiter entity delete key-1
  zae-limiter entity delete key-1 --yes    without asking

Children of the entity stay and keep their parent id. The audit events stay, too: audit list -e key-1.
Repeat an interrupted deletion to complete it.";

/// Arguments of `entity delete`.
#[derive(clap::Args, Debug)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct Args {
    /// Entity to delete
    #[arg(value_name = "ID", value_parser = grammar::entity_id)]
    id: EntityId,

    #[command(flatten)]
    yes: Yes,
}

#[derive(Serialize)]
struct EntityDeleted {
    entity_id: String,
    items: u64,
}

pub(super) async fn run(args: Args, context: &mut Context) -> Result<ExitStatus, Failure> {
    let limiter = context.limiter().await?;
    let id = args.id.as_str();
    let has_children = limiter.children(id)?.page_size(1).next_page().await?.is_some();
    let children = if has_children { "; its children stay" } else { "" };
    let namespace = limiter.namespace();
    context
        .confirm(
            args.yes,
            &format!(
                "{id} in namespace {namespace} will be deleted with its limits, balances and usage \
             records{children}"
            ),
        )
        .await?;
    context.printer.progress(format!("deleting {id}"));
    let items = limiter.delete_entity(id).await?;
    let deleted = EntityDeleted { entity_id: id.to_owned(), items };
    context
        .printer
        .done(&DeletedJson { deleted }, format!("deleted {id}: {}", count(items, "item")));
    Ok(ExitStatus::Done)
}
