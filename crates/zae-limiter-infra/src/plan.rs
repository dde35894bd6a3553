//! The request to CloudFormation: template, parameters and tags.

use std::collections::BTreeMap;

use zae_limiter_core::StackName;

use crate::cloud::StackState;
use crate::options::RetainTable;
use crate::template::{TEMPLATE, template};

/// The desired state of a stack.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StackPlan {
    /// The stack's name.
    pub name: StackName,
    /// The template, as YAML.
    pub template: String,
    /// The template's parameters, without those that locate the aggregator's code.
    pub parameters: BTreeMap<String, String>,
    /// The stack's tags.
    pub tags: BTreeMap<String, String>,
    /// Whether the stack has an aggregator, whose code is to be uploaded.
    pub has_aggregator: bool,
}

impl StackPlan {
    /// The parameter that names the object with the aggregator's code.
    pub const CODE_KEY: &'static str = "AggregatorCodeKey";

    /// The parameter with the processor that the aggregator's code is built for.
    pub const ARCHITECTURE: &'static str = "AggregatorArchitecture";

    /// The plan of an upgrade: this release's template, with the options of an existing stack.
    pub fn upgrade_of(state: &StackState, name: StackName) -> Self {
        let has = |name: &str| TEMPLATE.contains(&format!("\n  {name}:"));
        let known = state.parameters.iter().filter(|(name, _)| has(name));
        let is_on = |tag: &str| state.tags.get(tag).is_some_and(|value| value == "true");
        let retain = if is_on(tag::RETAIN) { RetainTable::Yes } else { RetainTable::No };
        let has_aggregator =
            state.parameters.get("EnableAggregator").is_some_and(|on| on == "true");
        let own = |(key, value): (&String, &String)| (key.clone(), value.clone());
        // AWS rejects requests that contain its own tags.
        let others = state.tags.iter().filter(|(key, _)| !key.starts_with("aws:"));
        let mut tags: BTreeMap<String, String> = others.map(own).collect();
        tags.extend(tag::ours(&name, retain, has_aggregator));
        Self {
            name,
            template: template(retain),
            parameters: known.map(own).collect(),
            tags,
            has_aggregator,
        }
    }
}

/// Tags that identify a limiter's stack. The Python client uses the same keys, so that each client
/// finds the other's stacks.
pub mod tag {
    use zae_limiter_schema::records::Version;

    use super::{BTreeMap, RetainTable, StackName};

    /// The program that created the stack.
    pub const MANAGED_BY: &str = "ManagedBy";
    /// The value of [`MANAGED_BY`] on a limiter's stack.
    pub const MANAGED_BY_US: &str = "zae-limiter";
    /// The limiter's name.
    pub const NAME: &str = "zae-limiter:name";
    /// The kind of the stack.
    pub const KIND: &str = "zae-limiter:type";
    /// The release that deployed it.
    pub const VERSION: &str = "zae-limiter:version";
    /// The release of the table's format.
    pub const SCHEMA_VERSION: &str = "zae-limiter:schema-version";
    /// The release of the aggregator.
    pub const AGGREGATOR_VERSION: &str = "zae-limiter:lambda-version";
    /// Whether the table is kept when the stack is deleted.
    pub const RETAIN: &str = "zae-limiter:retain-table";

    /// All tags of this module.
    pub const ALL: [&str; 7] =
        [MANAGED_BY, NAME, KIND, VERSION, SCHEMA_VERSION, AGGREGATOR_VERSION, RETAIN];

    /// The tags of a stack of this release.
    pub fn ours(
        name: &StackName,
        retain: RetainTable,
        has_aggregator: bool,
    ) -> BTreeMap<String, String> {
        let version = env!("CARGO_PKG_VERSION");
        let all = [
            (MANAGED_BY, MANAGED_BY_US),
            (NAME, name.as_str()),
            (KIND, "limiter"),
            (VERSION, version),
            (SCHEMA_VERSION, Version::SCHEMA),
            (AGGREGATOR_VERSION, if has_aggregator { version } else { "none" }),
            (RETAIN, if retain == RetainTable::Yes { "true" } else { "false" }),
        ];
        all.into_iter().map(|(key, value)| (key.to_owned(), value.to_owned())).collect()
    }
}
