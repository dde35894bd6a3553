//! `entity list`, `children` and `list-resources`

use zae_limiter::model::{EntityId, ResourceList};

use crate::context::Context;
use crate::exit::ExitStatus;
use crate::failure::Failure;
use crate::grammar::{self, Resources};
use crate::listing::print_pages;
use crate::stored::{ConfigJson, ResourceJson};

use super::show::EntityJson;

const CHILDREN_AFTER_HELP: &str = "\
Examples:
  zae-limiter entity children project-1
  zae-limiter entity children project-1 -o json | jq -r '.[].entity_id'";

const AFTER_HELP: &str = "\
Examples:
  zae-limiter entity list --with-custom-limits gpt-4       entities with limits on gpt-4
  zae-limiter entity list --with-custom-limits _default_   entities with limits on all resources";

const RESOURCES_AFTER_HELP: &str = "\
Examples:
  zae-limiter entity list-resources
  zae-limiter entity list --with-custom-limits gpt-4   the entities with limits there";

/// Arguments of `entity children`.
#[derive(clap::Args, Debug)]
#[command(after_help = CHILDREN_AFTER_HELP)]
pub(crate) struct ChildrenArgs {
    /// Parent entity
    #[arg(value_name = "ID", value_parser = grammar::entity_id)]
    id: EntityId,
}

/// Arguments of `entity list`.
#[derive(clap::Args, Debug)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct Args {
    /// List entities with limits of their own on this resource; _default_ means on all resources
    #[arg(long, required = true, value_name = "RESOURCE", value_parser = grammar::resource_or_default)]
    with_custom_limits: Resources,
}

/// Arguments of `entity list-resources`.
#[derive(clap::Args, Debug)]
#[command(after_help = RESOURCES_AFTER_HELP)]
pub(crate) struct ResourcesArgs {}

pub(super) async fn children(
    args: ChildrenArgs,
    context: &mut Context,
) -> Result<ExitStatus, Failure> {
    let limiter = context.limiter().await?;
    let pages = limiter.children(args.id.as_str())?;
    let printer = &mut context.printer;
    if print_pages(printer, pages, EntityJson::from).await? == 0 {
        let id = args.id;
        printer.say_unless_json(format!(
            "{id} has no children; create one: zae-limiter entity create CHILD --parent {id}"
        ));
    }
    Ok(ExitStatus::Done)
}

pub(super) async fn with_custom_limits(
    args: Args,
    context: &mut Context,
) -> Result<ExitStatus, Failure> {
    let limiter = context.limiter().await?;
    let resource = args.with_custom_limits.one();
    let pages = limiter.entities_with_limits(resource)?;
    let printer = &mut context.printer;
    if print_pages(printer, pages, |config| ConfigJson::from(&config)).await? == 0 {
        let (on, option) = match resource {
            Some(resource) => (format!("on {resource}"), format!(" -r {resource}")),
            None => ("for all resources".to_owned(), String::new()),
        };
        printer.say_unless_json(format!(
            "no entity has limits of its own {on}; \
             set some: zae-limiter entity set-limits ID{option} -l rpm:100"
        ));
    }
    Ok(ExitStatus::Done)
}

pub(super) async fn resources(
    ResourcesArgs {}: ResourcesArgs,
    context: &mut Context,
) -> Result<ExitStatus, Failure> {
    let limiter = context.limiter().await?;
    let pages = limiter.resources(ResourceList::WithEntityConfigs);
    let printer = &mut context.printer;
    if print_pages(printer, pages, ResourceJson::from).await? == 0 {
        printer.say_unless_json(
            "no entity has limits of its own on a resource; \
             set some: zae-limiter entity set-limits ID -r RESOURCE -l rpm:100",
        );
    }
    Ok(ExitStatus::Done)
}
