//! `available`

use serde::Serialize;
use zae_limiter::model::{EntityId, ResourceName};

use crate::context::Context;
use crate::exit::ExitStatus;
use crate::failure::Failure;
use crate::grammar::{self, Amount};
use crate::status::{self, StatusJson};

const AFTER_HELP: &str = "\
Examples:
  zae-limiter available key-1 gpt-4                  every limit of key-1 on gpt-4
  zae-limiter available key-1 gpt-4 -c tpm:5000      how long until 5,000 tokens would pass";

/// Arguments of `available`.
#[derive(clap::Args, Debug)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct Args {
    /// Who would call
    #[arg(value_parser = grammar::entity_id)]
    entity: EntityId,

    /// On what
    #[arg(value_parser = grammar::resource)]
    resource: ResourceName,

    /// What would be taken of a limit, as in tpm:500; once for each limit
    #[arg(short, long, value_name = "LIMIT:TOKENS", value_parser = grammar::amount)]
    consume: Vec<Amount>,
}

#[derive(Serialize)]
struct AvailableJson<'a> {
    entity_id: &'a str,
    resource: &'a str,
    limits: Vec<StatusJson>,
}

pub(crate) async fn run(args: Args, context: &mut Context) -> Result<ExitStatus, Failure> {
    let limiter = context.limiter().await?;
    let amounts: Vec<(&str, u64)> =
        args.consume.iter().map(|amount| (amount.limit.as_str(), amount.tokens)).collect();
    let (entity, resource) = (args.entity.as_str(), args.resource.as_str());
    let statuses = limiter.available(entity, resource, &amounts).await?;
    if context.printer.is_json() {
        let limits = statuses.iter().map(StatusJson::from).collect();
        context.printer.json(&AvailableJson { entity_id: entity, resource, limits });
    } else if statuses.is_empty() {
        context.printer.say(format!(
            "no limits hold for {entity} on {resource}; \
             set some: zae-limiter resource set-defaults {resource} -l rpm:100"
        ));
    } else {
        status::print_table(&mut context.printer, &statuses);
    }
    Ok(ExitStatus::Done)
}
