//! Compares the versions of a stack with this program's.
//!
//! Four things have a version: this program, the stack's template, its aggregator, and the format
//! of the table. A newer program works with an older stack. An older program never changes a newer
//! stack.

use std::fmt;

use zae_limiter_schema::records::Version;

use crate::cloud::StackState;
use crate::plan::tag;

/// The version of this program.
pub const PROGRAM: &str = env!("CARGO_PKG_VERSION");

/// The versions of a stack.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Versions {
    /// The version of the program that deployed the stack.
    pub stack: Option<String>,
    /// The version of the aggregator.
    pub aggregator: Option<String>,
    /// The version of the table's format, from the table's version record.
    pub schema: Option<String>,
}

/// Whether a stack is compatible with this program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// All versions are this program's.
    Current,
    /// Compatible. An upgrade would update these.
    Behind(Vec<String>),
    /// The table has an older format and must be migrated first.
    NeedsMigration,
    /// These are of a later release than this program.
    ProgramTooOld(Vec<String>),
}

impl Verdict {
    /// Whether this program may use the table.
    pub fn is_compatible(&self) -> bool {
        !matches!(self, Self::ProgramTooOld(_))
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Current => f.write_str("up to date"),
            Self::Behind(what) => write!(f, "works; behind: {}", what.join(", ")),
            Self::NeedsMigration => f.write_str("the table must be migrated"),
            Self::ProgramTooOld(what) => write!(f, "later than this program: {}", what.join(", ")),
        }
    }
}

impl Versions {
    /// The versions from a stack's tags and its table's version record.
    pub fn of(stack: Option<&StackState>, record: Option<&Version>) -> Self {
        let tag = |key: &str| stack.and_then(|stack| stack.tags.get(key)).cloned();
        Self {
            stack: tag(tag::VERSION),
            aggregator: tag(tag::AGGREGATOR_VERSION).filter(|version| version != "none"),
            schema: record.map(|record| record.schema.clone()),
        }
    }

    /// Compares the versions with this program's.
    pub fn verdict(&self) -> Verdict {
        self.verdict_of(PROGRAM, Version::SCHEMA)
    }

    fn verdict_of(&self, program: &str, schema: &str) -> Verdict {
        let all = [
            ("stack", &self.stack, program),
            ("aggregator", &self.aggregator, program),
            ("table format", &self.schema, schema),
        ];
        let named = |order: std::cmp::Ordering| {
            let differing = all.iter().filter_map(|(what, there, here)| {
                let there = there.as_deref()?;
                (number(there).cmp(&number(here)) == order).then(|| format!("{what} {there}"))
            });
            differing.collect::<Vec<String>>()
        };
        let later = named(std::cmp::Ordering::Greater);
        if !later.is_empty() {
            return Verdict::ProgramTooOld(later);
        }
        if self.schema.as_deref().is_some_and(|there| minor(there) < minor(schema)) {
            return Verdict::NeedsMigration;
        }
        let behind = named(std::cmp::Ordering::Less);
        if behind.is_empty() { Verdict::Current } else { Verdict::Behind(behind) }
    }
}

/// The numbers of a version. Text that is not a number counts as a later release.
fn number(version: &str) -> Vec<u64> {
    version.split('.').map(|part| part.parse().unwrap_or(u64::MAX)).collect()
}

fn minor(version: &str) -> Vec<u64> {
    number(version).into_iter().take(2).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verdict(stack: &str, aggregator: &str, schema: &str) -> Verdict {
        let some = |text: &str| (!text.is_empty()).then(|| text.to_owned());
        let versions =
            Versions { stack: some(stack), aggregator: some(aggregator), schema: some(schema) };
        versions.verdict_of("0.10.1", "0.10.0")
    }

    #[test]
    fn later_versions_are_rejected_and_older_ones_are_behind() {
        let behind = |what: &str| Verdict::Behind(vec![what.to_owned()]);
        let late = |what: &str| Verdict::ProgramTooOld(vec![what.to_owned()]);
        assert_eq!(verdict("0.10.1", "0.10.1", "0.10.0"), Verdict::Current);
        assert_eq!(verdict("", "", ""), Verdict::Current);
        assert_eq!(verdict("0.9.7", "0.10.1", "0.10.0"), behind("stack 0.9.7"));
        assert_eq!(verdict("0.10.1", "0.2.0", "0.10.0"), behind("aggregator 0.2.0"));
        assert_eq!(verdict("0.10.1", "0.10.1", "0.9.0"), Verdict::NeedsMigration);
        assert_eq!(verdict("0.11.0", "0.10.1", "0.9.0"), late("stack 0.11.0"));
        assert_eq!(verdict("0.10.1", "0.10.10", "0.10.0"), late("aggregator 0.10.10"));
        assert_eq!(verdict("0.10.1", "0.10.1", "0.11.0"), late("table format 0.11.0"));
        assert_eq!(verdict("0.10.1", "0.10.1", "next"), late("table format next"));
    }
}
