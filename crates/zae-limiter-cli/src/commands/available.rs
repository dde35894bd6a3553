//! `available`

use serde::Serialize;
use zae_limiter::model::{EntityId, ResourceName};

use crate::context::Context;
use crate::exit::ExitStatus;
use crate::failure::Failure;
use crate::grammar::{self, Amount};
use crate::status::{self, StatusJson};
use crate::suggestion::{meant_resource, with_meant_resource};

const AFTER_HELP: &str = "\
Examples:
  zae-limiter available key-1 gpt-4                  every limit of key-1 on gpt-4
  zae-limiter available key-1 gpt-4 -c tpm:5000      how long to wait for 5,000 tokens";

/// Arguments of `available`.
#[derive(clap::Args, Debug)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct Args {
    /// Entity that would call, such as an API key
    #[arg(value_parser = grammar::entity_id)]
    entity: EntityId,

    /// Resource that it would call, such as a model
    #[arg(value_parser = grammar::resource)]
    resource: ResourceName,

    /// Tokens that the call would take from a limit, as in tpm:500; repeat for each limit
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
    let statuses = match limiter.available(entity, resource, &amounts).await {
        Ok(statuses) => statuses,
        Err(error) => return Err(with_meant_resource(error, &limiter).await),
    };
    if context.printer.is_json() {
        let limits = statuses.iter().map(StatusJson::from).collect();
        context.printer.json(&AvailableJson { entity_id: entity, resource, limits });
    } else if statuses.is_empty() {
        let guess = meant_resource(resource, &limiter).await;
        context.printer.say(format!(
            "no limits apply to {entity} on {resource}; {guess}\
             set some: zae-limiter resource set-defaults {resource} -l rpm:100"
        ));
    } else {
        status::print_table(&mut context.printer, &statuses);
    }
    Ok(ExitStatus::Done)
}
