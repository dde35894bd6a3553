//! `entity set-limits`, `get-limits` and `delete-limits`

use serde::Serialize;
use zae_limiter::model::{ConfigLevel, EntityId};
use zae_limiter::{EffectiveLimits, Limit};

use crate::columns::{Align, Cell, Columns};
use crate::context::{Context, Yes};
use crate::exit::ExitStatus;
use crate::failure::Failure;
use crate::grammar::{self, Resources};
use crate::printer::{Look, Printer};
use crate::replacing::{Change, replace};
use crate::stored::{self, LimitJson};

const SET_AFTER_HELP: &str = "\
Examples:
  zae-limiter entity set-limits key-1 -r gpt-4 -l rpm:100 -l tpm:10000/min:15000
  zae-limiter entity set-limits key-1 -l rpm:50     on all resources without limits for key-1

The limits replace all stored limits of the same entity and resource, and hide the defaults of the
resource and the system. Balances are kept. On a terminal the command asks before a limit is
dropped.";

const GET_AFTER_HELP: &str = "\
Examples:
  zae-limiter entity get-limits key-1 -r gpt-4               stored for key-1 on gpt-4
  zae-limiter entity get-limits key-1                        stored for key-1 on all resources
  zae-limiter entity get-limits key-1 -r gpt-4 --effective   the limits that apply to a call

The first stored level applies as a whole: the entity's limits on the resource, the entity's limits
on all resources, the resource's defaults, the system's defaults.";

const DELETE_AFTER_HELP: &str = "\
Examples:
  zae-limiter entity delete-limits key-1 -r gpt-4
  zae-limiter entity delete-limits key-1 --yes      those for all resources, without asking

Afterwards the next stored level applies: the entity's limits on all resources, the resource's
defaults, the system's defaults.";

/// The entity and the resource.
#[derive(clap::Args, Debug)]
struct Whose {
    /// Entity
    #[arg(value_name = "ID", value_parser = grammar::entity_id)]
    id: EntityId,

    /// Resource [default: _default_, all resources without limits for the entity]
    #[arg(short, long, value_name = "RESOURCE", value_parser = grammar::resource_or_default)]
    resource: Option<Resources>,
}

impl Whose {
    fn resource(&self) -> Option<&str> {
        self.resource.as_ref().and_then(Resources::one)
    }

    fn level(&self) -> ConfigLevel {
        match &self.resource {
            Some(Resources::One(resource)) => {
                ConfigLevel::EntityResource(self.id.clone(), resource.clone())
            }
            _ => ConfigLevel::Entity(self.id.clone()),
        }
    }

    /// The error if no limits are stored.
    fn nothing(&self) -> Failure {
        let whose = stored::describe(&self.level());
        Failure::new(ExitStatus::NotFound, format!("no limits are stored for {whose}")).hint(
            format!(
                "zae-limiter entity get-limits {} -r {} --effective   (the limits that apply)",
                self.id,
                self.resource().unwrap_or("RESOURCE")
            ),
        )
    }
}

/// Arguments of `entity set-limits`.
#[derive(clap::Args, Debug)]
#[command(after_help = SET_AFTER_HELP)]
pub(crate) struct SetArgs {
    #[command(flatten)]
    whose: Whose,

    /// Limit, as in rpm:100 or tpm:10000/min:15000; repeat for each limit
    #[arg(
        short, long = "limit", required = true, value_name = "LIMIT",
        value_parser = grammar::limit,
    )]
    limits: Vec<Limit>,

    #[command(flatten)]
    yes: Yes,
}

/// Arguments of `entity get-limits`.
#[derive(clap::Args, Debug)]
#[command(after_help = GET_AFTER_HELP)]
pub(crate) struct GetArgs {
    #[command(flatten)]
    whose: Whose,

    /// Show the limits that apply to a call, and their level
    #[arg(long, requires = "resource")]
    effective: bool,
}

/// Arguments of `entity delete-limits`.
#[derive(clap::Args, Debug)]
#[command(after_help = DELETE_AFTER_HELP)]
pub(crate) struct DeleteArgs {
    #[command(flatten)]
    whose: Whose,

    #[command(flatten)]
    yes: Yes,
}

#[derive(Serialize)]
struct EffectiveJson<'a> {
    entity_id: &'a str,
    resource: &'a str,
    /// The level that the limits come from; null where there are none at any level.
    level: Option<&'static str>,
    limits: Vec<LimitJson>,
}

pub(super) async fn set(args: SetArgs, context: &mut Context) -> Result<ExitStatus, Failure> {
    let limiter = context.limiter().await?;
    let change = Change {
        level: args.whose.level(),
        limits: Some(args.limits),
        on_unavailable: None,
        yes: args.yes,
    };
    replace(change, &limiter, context).await?.print_set(context);
    Ok(ExitStatus::Done)
}

pub(super) async fn get(args: GetArgs, context: &mut Context) -> Result<ExitStatus, Failure> {
    let whose = &args.whose;
    if args.effective {
        let Some(resource) = whose.resource() else {
            let failure = Failure::usage("--effective needs a resource, and _default_ is not one");
            let id = &whose.id;
            return Err(
                failure.hint(format!("zae-limiter entity get-limits {id} -r RESOURCE --effective"))
            );
        };
        let limiter = context.limiter().await?;
        let effective = limiter.effective_limits(whose.id.as_str(), resource).await?;
        print_effective(&mut context.printer, whose.id.as_str(), resource, &effective);
        return Ok(ExitStatus::Done);
    }
    let limiter = context.limiter().await?;
    match limiter.limits(whose.id.as_str(), whose.resource()).await? {
        Some(config) => stored::print_stored(&mut context.printer, &config),
        None => return Err(whose.nothing()),
    }
    Ok(ExitStatus::Done)
}

fn print_effective(printer: &mut Printer, id: &str, resource: &str, effective: &EffectiveLimits) {
    if printer.is_json() {
        printer.json(&EffectiveJson {
            entity_id: id,
            resource,
            level: effective.level.as_ref().map(stored::level_word),
            limits: effective.limits.iter().map(LimitJson::from).collect(),
        });
        return;
    }
    if effective.limits.is_empty() {
        printer.say(format!(
            "no limits apply to {id} on {resource}; \
             set some: zae-limiter resource set-defaults {resource} -l rpm:100"
        ));
        return;
    }
    let from = match &effective.level {
        Some(level) => stored::describe(level),
        None => "the limiter".to_owned(),
    };
    let mut table = Columns::new(&[("LIMIT", Align::Left), ("STORED FOR", Align::Left)]);
    let row = |limit: &Limit| vec![Cell::from(limit.to_string()), Cell::new(Look::Dim, &from)];
    let rows: Vec<Vec<Cell>> = effective.limits.iter().map(row).collect();
    table.print(printer, &rows);
}

pub(super) async fn delete(args: DeleteArgs, context: &mut Context) -> Result<ExitStatus, Failure> {
    let limiter = context.limiter().await?;
    let whose = &args.whose;
    let stored = limiter.limits(whose.id.as_str(), whose.resource()).await?;
    let Some(config) = stored else { return Err(whose.nothing()) };
    context.confirm(args.yes, &stored::deletion(&config)).await?;
    limiter.delete_limits(whose.id.as_str(), whose.resource()).await?;
    stored::print_deleted(&mut context.printer, &config);
    Ok(ExitStatus::Done)
}
