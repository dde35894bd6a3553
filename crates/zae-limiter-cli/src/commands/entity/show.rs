//! `entity show`

use std::collections::BTreeMap;

use serde::Serialize;
use zae_limiter::model::{EntityId, Object, format_time};
use zae_limiter::{Entity, Error};

use crate::columns::{Align, Cell, print_fields};
use crate::context::Context;
use crate::exit::ExitStatus;
use crate::failure::Failure;
use crate::grammar;
use crate::listing::Item;

const AFTER_HELP: &str = "\
Examples:
  zae-limiter entity show key-1
  zae-limiter entity get-limits key-1 -r gpt-4 --effective   its limits
  zae-limiter available key-1 gpt-4                          its balances";

/// Arguments of `entity show`.
#[derive(clap::Args, Debug)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct Args {
    /// Entity to show
    #[arg(value_name = "ID", value_parser = grammar::entity_id)]
    id: EntityId,
}

/// An entity in a JSON document, or in a list.
#[derive(Debug, Serialize)]
pub(super) struct EntityJson {
    entity_id: String,
    name: Option<String>,
    parent_id: Option<String>,
    cascade: bool,
    metadata: BTreeMap<String, String>,
    created_at: String,
}

impl From<Entity> for EntityJson {
    fn from(entity: Entity) -> Self {
        Self {
            entity_id: entity.id.to_string(),
            name: entity.name,
            parent_id: entity.parent.map(|parent| parent.to_string()),
            cascade: entity.cascade,
            metadata: entity.metadata,
            created_at: format_time(entity.created_at),
        }
    }
}

impl EntityJson {
    fn name_text(&self) -> &str {
        self.name.as_deref().unwrap_or("-")
    }

    fn metadata_text(&self) -> String {
        let pairs: Vec<String> =
            self.metadata.iter().map(|(key, value)| format!("{key}={value}")).collect();
        if pairs.is_empty() { "-".to_owned() } else { pairs.join(" ") }
    }
}

impl Item for EntityJson {
    const HEADS: &'static [(&'static str, Align)] = &[
        ("ENTITY", Align::Left),
        ("NAME", Align::Left),
        ("CASCADE", Align::Left),
        ("CREATED", Align::Left),
        ("METADATA", Align::Left),
    ];

    fn row(&self) -> Vec<Cell> {
        vec![
            Cell::from(&self.entity_id),
            Cell::from(self.name_text()),
            Cell::from(if self.cascade { "yes" } else { "no" }),
            Cell::from(&self.created_at),
            Cell::from(self.metadata_text()),
        ]
    }
}

pub(super) async fn run(args: Args, context: &mut Context) -> Result<ExitStatus, Failure> {
    let limiter = context.limiter().await?;
    let Some(entity) = limiter.entity(args.id.as_str()).await? else {
        let id = args.id;
        let error = Error::NotFound(Object::Entity(id.clone()));
        return Err(Failure::from(error).hint(format!(
            "zae-limiter entity create {id}   (limits apply to it even if it does not exist)"
        )));
    };
    let entity = EntityJson::from(entity);
    if context.printer.is_json() {
        context.printer.json(&entity);
        return Ok(ExitStatus::Done);
    }
    let parent = match (&entity.parent_id, entity.cascade) {
        (None, _) => "-".to_owned(),
        (Some(parent), false) => parent.clone(),
        (Some(parent), true) => format!("{parent} (cascade)"),
    };
    let fields = vec![
        ("ENTITY", Cell::from(&entity.entity_id)),
        ("NAME", Cell::from(entity.name_text())),
        ("PARENT", Cell::from(parent)),
        ("METADATA", Cell::from(entity.metadata_text())),
        ("CREATED", Cell::from(&entity.created_at)),
    ];
    print_fields(&mut context.printer, fields);
    Ok(ExitStatus::Done)
}
