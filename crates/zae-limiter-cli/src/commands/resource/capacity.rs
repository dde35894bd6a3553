//! `resource capacity`

use std::collections::BTreeSet;

use serde::Serialize;
use zae_limiter::RateLimiter;
use zae_limiter::model::{EntityCapacity, EntityId, LimitName, ResourceCapacity, ResourceName};

use crate::columns::{Align, Cell};
use crate::context::Context;
use crate::exit::ExitStatus;
use crate::failure::Failure;
use crate::grammar;
use crate::listing::{Item, Listing};
use crate::printer::Look;
use crate::suggestion::limits_that_hold;

const AFTER_HELP: &str = "\
Examples:
  zae-limiter resource capacity gpt-4 tpm
  zae-limiter resource capacity gpt-4 tpm -o json | jq .utilization

Only entities that have called have a balance. If the calls of an entity also take from an ancestor
in the list, the column WITHIN names it. The total counts such tokens once, with the ancestor.";

/// Arguments of `resource capacity`.
#[derive(clap::Args, Debug)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct Args {
    /// Resource
    #[arg(value_parser = grammar::resource)]
    resource: ResourceName,

    /// Name of the limit, as in tpm
    #[arg(value_parser = grammar::limit_name)]
    limit: LimitName,
}

/// The fields of the document before the entities.
#[derive(Serialize)]
struct Before<'a> {
    resource: &'a str,
    limit_name: &'a str,
}

/// The fields of the document after the entities.
#[derive(Serialize)]
struct After {
    total_capacity: i128,
    total_available: i128,
    utilization: f64,
}

#[derive(Serialize)]
struct CapacityJson {
    entity_id: String,
    capacity: i64,
    available: i64,
    /// The nearest ancestor in the list that is taken from, too.
    within: Option<String>,
}

impl CapacityJson {
    fn of(entity: &EntityCapacity, listed: &BTreeSet<&EntityId>) -> Self {
        Self {
            entity_id: entity.entity.to_string(),
            capacity: entity.capacity.whole_tokens(),
            available: entity.available.whole_tokens(),
            within: entity.within(listed).map(ToString::to_string),
        }
    }
}

impl Item for CapacityJson {
    const HEADS: &'static [(&'static str, Align)] = &[
        ("ENTITY", Align::Left),
        ("AVAILABLE", Align::Right),
        ("CAPACITY", Align::Right),
        ("USED", Align::Right),
        ("WITHIN", Align::Left),
    ];

    fn row(&self) -> Vec<Cell> {
        let mut one = ResourceCapacity::default();
        (one.capacity, one.available) = (self.capacity.into(), self.available.into());
        let look = if self.available <= 0 { Look::Bad } else { Look::Plain };
        vec![
            Cell::from(&self.entity_id),
            Cell::new(look, self.available),
            Cell::from(self.capacity),
            Cell::from(percent(one.utilization())),
            Cell::new(Look::Dim, self.within.as_deref().unwrap_or("-")),
        ]
    }
}

fn percent(ratio: f64) -> String {
    format!("{:.1}%", ratio * 100.0)
}

fn total_row(total: &ResourceCapacity) -> Vec<Cell> {
    vec![
        Cell::new(Look::Head, "TOTAL"),
        Cell::new(Look::Head, total.available),
        Cell::new(Look::Head, total.capacity),
        Cell::new(Look::Head, percent(total.utilization())),
    ]
}

pub(super) async fn run(args: Args, context: &mut Context) -> Result<ExitStatus, Failure> {
    let limiter = context.limiter().await?;
    let (resource, limit) = (args.resource.as_str(), args.limit.as_str());
    let printer = &mut context.printer;
    let mut listing = Listing::inside(&Before { resource, limit_name: limit }, "entities");
    // All of them, before the first is printed: an ancestor may come after its descendants.
    let entities = limiter.entity_capacities(resource, limit)?.all().await?;
    let total = ResourceCapacity::of(&entities);
    let listed: BTreeSet<&EntityId> = entities.iter().map(|entity| &entity.entity).collect();
    let items: Vec<CapacityJson> =
        entities.iter().map(|entity| CapacityJson::of(entity, &listed)).collect();
    if !items.is_empty() {
        listing.print_with(printer, &items, Some(total_row(&total)));
    }
    if total.entities == 0 {
        printer.say_unless_json(match check_limit(&args, &limiter).await? {
            Holds::Somewhere => {
                format!("no entity has a balance of {limit} on {resource} yet: the first call creates it")
            }
            Holds::Nowhere => format!(
                "no limits are stored for {resource}, and those of single calls are not listed; \
                 set some: zae-limiter resource set-defaults {resource} -l {limit}:100"
            ),
        });
    }
    listing.end_with(
        printer,
        &After {
            total_capacity: total.capacity,
            total_available: total.available,
            utilization: total.utilization(),
        },
    );
    Ok(ExitStatus::Done)
}

/// Whether anybody has limits on a resource.
enum Holds {
    /// The limit in question, for some entity at least.
    Somewhere,
    /// No limits at all.
    Nowhere,
}

/// Rejects the name of a limit that nobody has on the resource, if anybody has others.
async fn check_limit(args: &Args, limiter: &RateLimiter) -> Result<Holds, Failure> {
    let (resource, limit) = (args.resource.as_str(), args.limit.as_str());
    let mut held = BTreeSet::new();
    let defaults = match limiter.resource_defaults(resource).await? {
        Some(defaults) => Some(defaults),
        None => limiter.system_defaults().await?,
    };
    held.extend(defaults.iter().flat_map(|config| config.limits.names().to_vec()));
    for of in [Some(resource), None] {
        let mut pages = limiter.entities_with_limits(of)?;
        while let Some(configs) = pages.next_page().await? {
            held.extend(configs.iter().flat_map(|config| config.limits.names().to_vec()));
        }
    }
    if held.contains(&args.limit) {
        return Ok(Holds::Somewhere);
    }
    match limits_that_hold(limit, held.iter().map(LimitName::as_str)) {
        None => Ok(Holds::Nowhere),
        Some(hint) => {
            let message = format!("no limit named {limit} holds on {resource}");
            Err(Failure::new(ExitStatus::Error, message).hint(hint))
        }
    }
}
