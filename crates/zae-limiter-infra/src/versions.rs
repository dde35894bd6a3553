//! Which releases meet in a stack, and what fits with what.
//!
//! Four things have a release: this program, the stack (its template), the aggregator in it, and the
//! format of the table. A newer program works with an older stack; an older one is never allowed to
//! change a newer stack.

use std::fmt;

use zae_limiter_schema::records::Version;

use crate::cloud::StackState;
use crate::plan::tag;

/// The release of this program.
pub const PROGRAM: &str = env!("CARGO_PKG_VERSION");

/// The releases that meet in a stack.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Versions {
    /// The release that deployed the stack.
    pub stack: Option<String>,
    /// The release of the aggregator.
    pub aggregator: Option<String>,
    /// The release of the table's format, by the table's own record.
    pub schema: Option<String>,
}

/// What fits, and what to do where it does not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Everything is of this release.
    Current,
    /// It works, and an upgrade would bring it up to date: these are behind.
    Behind(Vec<String>),
    /// The table is of an older format: it has to be migrated first.
    NeedsMigration,
    /// The stack or its table is of a later release than this program.
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
            Self::NeedsMigration => f.write_str("the table has to be migrated"),
            Self::ProgramTooOld(what) => write!(f, "later than this program: {}", what.join(", ")),
        }
    }
}

impl Versions {
    /// Of a stack and its table's record, where there are any.
    pub fn of(stack: Option<&StackState>, record: Option<&Version>) -> Self {
        let tag = |key: &str| stack.and_then(|stack| stack.tags.get(key)).cloned();
        Self {
            stack: tag(tag::VERSION),
            aggregator: tag(tag::AGGREGATOR_VERSION).filter(|version| version != "none"),
            schema: record.map(|record| record.schema.clone()),
        }
    }

    /// What fits with this program.
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

/// The numbers of a release. What is no number counts as a later one: it is not known here.
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
    fn what_fits_with_what() {
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
