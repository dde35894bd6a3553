//! `entity create`

use zae_limiter::model::EntityId;

use crate::context::Context;
use crate::exit::ExitStatus;
use crate::failure::Failure;
use crate::grammar;

use super::show::EntityJson;

const AFTER_HELP: &str = "\
Examples:
  zae-limiter entity create project-1 --display-name 'Search' --metadata team=search
  zae-limiter entity create key-1 --parent project-1             a child of project-1
  zae-limiter entity create key-2 --parent project-1 --cascade   also takes from project-1

If the entity exists already, nothing changes and the exit status is 1.";

/// Arguments of `entity create`.
#[derive(clap::Args, Debug)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct Args {
    /// Id of the new entity: an API key, a project, an organisation
    #[arg(value_name = "ID", value_parser = grammar::entity_id)]
    id: EntityId,

    /// Name to display
    #[arg(long, value_name = "NAME")]
    display_name: Option<String>,

    /// Parent entity, which must exist
    #[arg(long, value_name = "ID", value_parser = grammar::entity_id)]
    parent: Option<EntityId>,

    /// Take from the parent, too, whenever a call takes from this entity
    #[arg(long, requires = "parent")]
    cascade: bool,

    /// Metadata, as in team=search; can be repeated
    #[arg(long, value_name = "KEY=VALUE", value_parser = grammar::key_value)]
    metadata: Vec<(String, String)>,
}

pub(super) async fn run(args: Args, context: &mut Context) -> Result<ExitStatus, Failure> {
    let limiter = context.limiter().await?;
    let mut create = limiter.create_entity(args.id.as_str());
    if let Some(name) = args.display_name {
        create = create.name(name);
    }
    if let Some(parent) = &args.parent {
        create = create.parent(parent.as_str());
    }
    if args.cascade {
        create = create.cascade();
    }
    for (key, value) in args.metadata {
        create = create.metadata(key, value);
    }
    let entity = create.await?;
    let below = match (&entity.parent, entity.cascade) {
        (None, _) => String::new(),
        (Some(parent), false) => format!(" below {parent}"),
        (Some(parent), true) => format!(" below {parent}, with cascade"),
    };
    let words = format!("created {}{below}", entity.id);
    context.printer.done(&EntityJson::from(entity), words);
    Ok(ExitStatus::Done)
}
