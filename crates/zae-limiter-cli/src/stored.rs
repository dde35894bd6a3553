//! Stored limits, as a table and as the JSON that scripts rely on.

use serde::Serialize;
use zae_limiter::model::{ConfigLevel, ResourceName};
use zae_limiter::{Config, Limit, OnUnavailable};

use crate::columns::{Align, Cell, Columns};
use crate::listing::Item;
use crate::printer::Printer;

/// One limit in a JSON document.
#[derive(Debug, Serialize)]
pub(crate) struct LimitJson {
    name: String,
    capacity: u64,
    refill_amount: u64,
    refill_period_seconds: u64,
}

impl From<&Limit> for LimitJson {
    fn from(limit: &Limit) -> Self {
        Self {
            name: limit.name.clone(),
            capacity: limit.capacity,
            refill_amount: limit.refill_amount,
            refill_period_seconds: limit.refill_period.as_secs(),
        }
    }
}

/// Stored limits in a JSON document.
#[derive(Debug, Serialize)]
pub(crate) struct ConfigJson {
    level: &'static str,
    entity_id: Option<String>,
    resource: Option<String>,
    limits: Vec<LimitJson>,
    /// The policy of the system level; absent on other levels.
    #[serde(skip_serializing_if = "Option::is_none")]
    on_unavailable: Option<Option<&'static str>>,
    /// Absent if not stored.
    #[serde(skip_serializing_if = "Option::is_none")]
    audit_retention_days: Option<u32>,
    version: u64,
    /// For the table.
    #[serde(skip)]
    text: String,
}

impl From<&Config> for ConfigJson {
    fn from(config: &Config) -> Self {
        let limits = config.limits.to_limits();
        let on_unavailable = (config.level == ConfigLevel::System)
            .then(|| config.on_unavailable.map(OnUnavailable::as_str));
        let (entity, resource) = match &config.level {
            ConfigLevel::System => (None, None),
            ConfigLevel::Resource(resource) => (None, Some(resource)),
            ConfigLevel::Entity(entity) => (Some(entity), None),
            ConfigLevel::EntityResource(entity, resource) => (Some(entity), Some(resource)),
        };
        Self {
            level: level_word(&config.level),
            entity_id: entity.map(ToString::to_string),
            resource: resource.map(ToString::to_string),
            limits: limits.iter().map(LimitJson::from).collect(),
            on_unavailable,
            audit_retention_days: config.audit_retention_days,
            version: config.version,
            text: texts(&limits),
        }
    }
}

/// A row of the list of entities with limits of their own.
impl Item for ConfigJson {
    const HEADS: &'static [(&'static str, Align)] =
        &[("ENTITY", Align::Left), ("LIMITS", Align::Left)];

    fn row(&self) -> Vec<Cell> {
        vec![Cell::from(self.entity_id.as_deref().unwrap_or("-")), Cell::from(&self.text)]
    }
}

/// The JSON document of a deletion.
#[derive(Debug, Serialize)]
pub(crate) struct DeletedJson<T> {
    /// The deleted thing, as it was before.
    pub deleted: T,
}

/// A resource in a list.
#[derive(Debug, Serialize)]
pub(crate) struct ResourceJson {
    resource: String,
}

impl From<ResourceName> for ResourceJson {
    fn from(resource: ResourceName) -> Self {
        Self { resource: resource.to_string() }
    }
}

impl Item for ResourceJson {
    const HEADS: &'static [(&'static str, Align)] = &[("RESOURCE", Align::Left)];

    fn row(&self) -> Vec<Cell> {
        vec![Cell::from(&self.resource)]
    }
}

/// The level of a configuration, in one word.
pub(crate) fn level_word(level: &ConfigLevel) -> &'static str {
    match level {
        ConfigLevel::System => "system",
        ConfigLevel::Resource(_) => "resource",
        ConfigLevel::Entity(_) => "entity",
        ConfigLevel::EntityResource(..) => "entity_resource",
    }
}

/// The level of a configuration, in words that follow "limits of".
pub(crate) fn describe(level: &ConfigLevel) -> String {
    match level {
        ConfigLevel::System => "the system".to_owned(),
        ConfigLevel::Resource(resource) => format!("resource {resource}"),
        ConfigLevel::Entity(entity) => format!("{entity} on all resources"),
        ConfigLevel::EntityResource(entity, resource) => format!("{entity} on {resource}"),
    }
}

/// Limits on one line, in the notation of the command line.
pub(crate) fn texts(limits: &[Limit]) -> String {
    limits.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ")
}

/// A message that says what was stored.
pub(crate) fn set_words(config: &Config) -> String {
    let limits = texts(&config.limits.to_limits());
    let limits = if limits.is_empty() { "no limits" } else { &limits };
    format!("{} are now {limits}", settings_of(&config.level))
}

/// The text of the prompt before a deletion.
pub(crate) fn deletion(config: &Config) -> String {
    let policy = config.on_unavailable.map(|policy| format!("on-unavailable {}", policy.as_str()));
    let limits = config.limits.to_limits();
    let settings: Vec<String> = limits.iter().map(ToString::to_string).chain(policy).collect();
    format!("{} will be deleted: {}", settings_of(&config.level), settings.join(", "))
}

/// The settings of a level, in words.
fn settings_of(level: &ConfigLevel) -> String {
    match level {
        ConfigLevel::System => "the system's defaults".to_owned(),
        ConfigLevel::Resource(resource) => format!("the defaults of {resource}"),
        level => format!("the limits of {}", describe(level)),
    }
}

/// Prints stored limits, one a line, in the notation of the command line.
pub(crate) fn print_stored(printer: &mut Printer, config: &Config) {
    if printer.is_json() {
        printer.json(&ConfigJson::from(config));
        return;
    }
    let mut table = Columns::new(&[("LIMIT", Align::Left)]);
    let limits = config.limits.to_limits();
    let rows: Vec<Vec<Cell>> =
        limits.iter().map(|limit| vec![Cell::from(limit.to_string())]).collect();
    table.print(printer, &rows);
}

/// Prints what was deleted.
pub(crate) fn print_deleted(printer: &mut Printer, config: &Config) {
    let words = format!("deleted {}", settings_of(&config.level));
    printer.done(&DeletedJson { deleted: ConfigJson::from(config) }, words);
}
