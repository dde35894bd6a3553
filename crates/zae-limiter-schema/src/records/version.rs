//! The version record: the release of the table's format, and which clients may use it.

use zae_limiter_core::Timestamp;

use super::reader::Reader;
use super::{moment, set, text_or_null};
use crate::expression::Action;
use crate::keys::{Index, ItemKey, REGISTRY, system_partition};
use crate::table::Update;
use crate::value::{Item, Malformed, Value};

/// The version record of a table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Version {
    /// The release of the format, for example `0.10.0`.
    pub schema: String,
    /// The release of the deployed aggregator.
    pub aggregator: Option<String>,
    /// The oldest client release that may use the table.
    pub client_min: String,
    /// When the record was written.
    pub updated_at: Option<Timestamp>,
    /// The program that wrote it, with its release.
    pub updated_by: Option<String>,
}

impl Version {
    /// The release of the format that this crate reads and writes.
    pub const SCHEMA: &'static str = "0.10.0";

    /// Writes the record unconditionally.
    pub fn update(&self) -> Update {
        let mut actions: Vec<Action> = Vec::new();
        set(&mut actions, "schema_version", Value::text(&self.schema));
        set(&mut actions, "lambda_version", text_or_null(self.aggregator.as_deref()));
        set(&mut actions, "client_min_version", Value::text(&self.client_min));
        match self.updated_at {
            Some(moment) => moment::push(&mut actions, "updated_at", moment),
            None => moment::push_none(&mut actions, "updated_at"),
        }
        set(&mut actions, "updated_by", text_or_null(self.updated_by.as_deref()));
        set(&mut actions, Index::Namespace.pk(), Value::text(REGISTRY));
        set(&mut actions, Index::Namespace.sk(), Value::S(system_partition(REGISTRY)));
        Update { key: ItemKey::version(), actions, conditions: Vec::new() }
    }

    /// Reads the record.
    ///
    /// # Errors
    ///
    /// [`Malformed`] when an attribute is missing or not what it should be.
    pub fn decode(item: &Item) -> Result<Self, Malformed> {
        let reader = Reader::new(ItemKey::version(), item);
        let client_min = reader.text_if_any("client_min_version")?.unwrap_or("0.0.0");
        Ok(Self {
            schema: reader.text("schema_version")?.to_owned(),
            aggregator: reader.text_if_any("lambda_version")?.map(str::to_owned),
            client_min: client_min.to_owned(),
            updated_at: moment::read_if_any(&reader, "updated_at")?,
            updated_by: reader.text_if_any("updated_by")?.map(str::to_owned),
        })
    }
}
