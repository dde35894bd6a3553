//! `audit`: lists audit events.

use clap::Subcommand;
use serde::Serialize;
use serde_json::{Map, Value};
use zae_limiter::Limit;
use zae_limiter::model::{AuditEvent, AuditSubject, EntityId, ResourceName, format_time};

use crate::columns::{Align, Cell};
use crate::context::Context;
use crate::exit::ExitStatus;
use crate::failure::Failure;
use crate::grammar;
use crate::listing::{Item, print_pages};

const AFTER_HELP: &str = "\
Examples:
  zae-limiter audit list -e key-1       changes to an entity and its limits
  zae-limiter audit list -r gpt-4       changes to the defaults of a resource
  zae-limiter audit list --system       changes to the system's defaults and the namespace";

const LIST_AFTER_HELP: &str = "\
Examples:
  zae-limiter audit list -e key-1       changes to an entity and its limits
  zae-limiter audit list -r gpt-4       changes to the defaults of a resource
  zae-limiter audit list --system       changes to the system's defaults and the namespace
  zae-limiter audit list -e key-1 -o json | jq '.[0].details'    the latest change

Newest first. BY is the principal: the value of ZAEL_PRINCIPAL, else of USER.";

/// Arguments of `audit`.
#[derive(clap::Args, Debug)]
#[command(after_help = AFTER_HELP, arg_required_else_help = true)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// List changes, newest first
    List(ListArgs),
}

/// Arguments of `audit list`.
#[derive(clap::Args, Debug)]
#[command(after_help = LIST_AFTER_HELP)]
#[group(required = true, multiple = false)]
pub(crate) struct ListArgs {
    /// List changes to this entity and its limits
    #[arg(short, long, value_name = "ID", value_parser = grammar::entity_id)]
    entity: Option<EntityId>,

    /// List changes to this resource's defaults
    #[arg(short, long, value_name = "RESOURCE", value_parser = grammar::resource)]
    resource: Option<ResourceName>,

    /// List changes to the system's defaults and the namespace
    #[arg(long)]
    system: bool,
}

/// An event in a JSON document, or in a list.
#[derive(Serialize)]
struct EventJson {
    event_id: String,
    time: String,
    action: String,
    principal: Option<String>,
    entity_id: Option<String>,
    resource: Option<String>,
    details: Map<String, Value>,
}

impl From<AuditEvent> for EventJson {
    fn from(event: AuditEvent) -> Self {
        let entity = match &event.subject {
            AuditSubject::Entity(id) => Some(id.to_string()),
            AuditSubject::Resource(_) | AuditSubject::System => None,
        };
        Self {
            event_id: event.id,
            time: format_time(event.at),
            action: event.action.as_str().to_owned(),
            principal: event.principal,
            entity_id: entity,
            resource: event.resource.map(|resource| resource.to_string()),
            details: event.details,
        }
    }
}

impl Item for EventJson {
    const HEADS: &'static [(&'static str, Align)] = &[
        ("TIME", Align::Left),
        ("ACTION", Align::Left),
        ("BY", Align::Left),
        ("RESOURCE", Align::Left),
        ("DETAILS", Align::Left),
    ];

    fn row(&self) -> Vec<Cell> {
        vec![
            Cell::from(&self.time),
            Cell::from(&self.action),
            Cell::from(self.principal.as_deref().unwrap_or("-")),
            Cell::from(self.resource.as_deref().unwrap_or("-")),
            Cell::from(details_text(&self.details)),
        ]
    }
}

pub(crate) async fn run(args: Args, context: &mut Context) -> Result<ExitStatus, Failure> {
    let Command::List(args) = args.command;
    let limiter = context.limiter().await?;
    let (subject, of) = match (args.entity, args.resource) {
        (Some(entity), _) => {
            let of = format!("entity {entity}");
            (AuditSubject::Entity(entity), of)
        }
        (None, Some(resource)) => {
            let of = format!("the defaults of {resource}");
            (AuditSubject::Resource(resource), of)
        }
        (None, None) => (AuditSubject::System, "the system".to_owned()),
    };
    let pages = limiter.audit_events_of(subject);
    if print_pages(&mut context.printer, pages, EventJson::from).await? == 0 {
        context.printer.say_unless_json(format!("no recorded changes to {of}"));
    }
    Ok(ExitStatus::Done)
}

/// `key=value …`, with limits in the notation of the command line. Skips null values.
fn details_text(details: &Map<String, Value>) -> String {
    let pairs = details.iter().filter(|(_, value)| !value.is_null());
    let pairs: Vec<String> =
        pairs.map(|(key, value)| format!("{key}={}", value_text(value))).collect();
    if pairs.is_empty() { "-".to_owned() } else { pairs.join(" ") }
}

fn value_text(value: &Value) -> String {
    match value {
        // Quoted where a reader could not see the end.
        Value::String(text) if text.contains([' ', '=']) => format!("{text:?}"),
        Value::String(text) => text.clone(),
        Value::Array(items) => items.iter().map(item_text).collect::<Vec<_>>().join(","),
        other => other.to_string(),
    }
}

fn item_text(item: &Value) -> String {
    let limit = || {
        let number = |field| item.get(field)?.as_u64();
        Some(Limit {
            name: item.get("name")?.as_str()?.to_owned(),
            capacity: number("capacity")?,
            refill_amount: number("refill_amount")?,
            refill_period: std::time::Duration::from_secs(number("refill_period_seconds")?),
        })
    };
    limit().map_or_else(|| value_text(item), |limit| limit.to_string())
}
