//! What is sent to CloudFormation.

use std::collections::BTreeMap;

use zae_limiter_core::StackName;

use crate::cloud::StackState;
use crate::options::RetainTable;
use crate::template::{TEMPLATE, template};

/// A stack as it is to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StackPlan {
    /// What it is called.
    pub name: StackName,
    /// The template.
    pub template: String,
    /// The template's parameters, without those that say where the aggregator's code is.
    pub parameters: BTreeMap<String, String>,
    /// The stack's tags.
    pub tags: BTreeMap<String, String>,
    /// Whether there is code to be uploaded.
    pub has_aggregator: bool,
}

impl StackPlan {
    /// The parameter that names the object with the aggregator's code.
    pub const CODE_KEY: &'static str = "AggregatorCodeKey";

    /// This release's stack with the options that a stack has: what an upgrade makes of it.
    pub fn upgrade_of(state: &StackState, name: StackName) -> Self {
        let has = |name: &str| TEMPLATE.contains(&format!("\n  {name}:"));
        let known = state.parameters.iter().filter(|(name, _)| has(name));
        let is_on = |tag: &str| state.tags.get(tag).is_some_and(|value| value == "true");
        let retain = if is_on(tag::RETAIN) { RetainTable::Yes } else { RetainTable::No };
        let has_aggregator =
            state.parameters.get("EnableAggregator").is_some_and(|on| on == "true");
        let own = |(key, value): (&String, &String)| (key.clone(), value.clone());
        // What AWS has added to the tags cannot be sent back.
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

/// Tags by which stacks are found. The keys are the Python client's, so that each finds the other's.
pub mod tag {
    use zae_limiter_schema::records::Version;

    use super::{BTreeMap, RetainTable, StackName};

    /// Who made the stack.
    pub const MANAGED_BY: &str = "ManagedBy";
    /// What [`MANAGED_BY`] says of ours.
    pub const MANAGED_BY_US: &str = "zae-limiter";
    /// What the limiter is called.
    pub const NAME: &str = "zae-limiter:name";
    /// What kind of stack it is.
    pub const KIND: &str = "zae-limiter:type";
    /// The release that deployed it.
    pub const VERSION: &str = "zae-limiter:version";
    /// The release of the table's format.
    pub const SCHEMA_VERSION: &str = "zae-limiter:schema-version";
    /// The release of the aggregator.
    pub const AGGREGATOR_VERSION: &str = "zae-limiter:lambda-version";
    /// Whether the table stays when the stack goes.
    pub const RETAIN: &str = "zae-limiter:retain-table";

    /// All of them.
    pub const ALL: [&str; 7] =
        [MANAGED_BY, NAME, KIND, VERSION, SCHEMA_VERSION, AGGREGATOR_VERSION, RETAIN];

    /// The tags of every stack of ours.
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
