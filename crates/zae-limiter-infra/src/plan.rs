//! What is sent to CloudFormation.

use std::collections::BTreeMap;

use zae_limiter_core::StackName;

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
}

/// Tags by which stacks are found. The keys are the Python client's, so that each finds the other's.
pub mod tag {
    use super::{BTreeMap, StackName};
    use zae_limiter_schema::records::Version;

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

    /// The tags of every stack of ours.
    pub fn ours(name: &StackName) -> BTreeMap<String, String> {
        let all = [
            (MANAGED_BY, MANAGED_BY_US),
            (NAME, name.as_str()),
            (KIND, "limiter"),
            (VERSION, env!("CARGO_PKG_VERSION")),
            (SCHEMA_VERSION, Version::SCHEMA),
        ];
        all.into_iter().map(|(key, value)| (key.to_owned(), value.to_owned())).collect()
    }
}
