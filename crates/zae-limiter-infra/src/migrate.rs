//! Migrates a table of the Python client to this release's format.
//!
//! A migration adds missing index entries. It also splits usage items that the Python aggregator
//! shares between several windows. Limits, balances and everything else stay as they are. Every
//! write has a condition that fails if it was made before, so an interrupted run can be repeated.
//! Clients may go on meanwhile, but the Python aggregator should be switched off first.

mod entries;
mod usage;

use std::collections::BTreeSet;

use zae_limiter_core::{BoxFuture, NamespaceId, Timestamp, Window};
use zae_limiter_schema::records::Version;
use zae_limiter_schema::{
    Action, Condition, Item, ItemKey, ParsedKey, Table, TableError, TableErrorKind, Update,
    Updated, Value, parse_key,
};

use crate::records::read_version;

/// Some items, and the key to continue after. `None` at the end.
pub type ScanPage = (Vec<Item>, Option<ItemKey>);

/// A table that can be scanned.
pub trait Scan: Send + Sync {
    /// A page of items after that key, or from the beginning.
    fn page<'a>(
        &'a self,
        after: Option<&'a ItemKey>,
    ) -> BoxFuture<'a, Result<ScanPage, TableError>>;
}

/// Whether a run changes anything.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Run {
    /// It only counts what it would change.
    Dry,
    /// It changes the table.
    #[default]
    Real,
}

/// What a run has changed, or what a dry run would change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Items that were read.
    pub seen: u64,
    /// Items that got index entries.
    pub indexed: u64,
    /// Usage records of days and months that were split from shared items.
    pub usage: u64,
    /// Shared items whose amounts do not split into whole tokens. The hour keeps the rest.
    pub inexact: u64,
    /// Usage items that changed during the run. The next run migrates them.
    pub busy: u64,
    /// Expired buckets, which were skipped.
    pub expired: u64,
    /// Items with unknown keys, which were skipped.
    pub unknown: u64,
}

impl Counts {
    /// Whether there was nothing to do.
    pub fn is_clean(&self) -> bool {
        self.indexed == 0 && self.usage == 0
    }
}

/// Why a table cannot be migrated.
#[derive(Debug, thiserror::Error)]
pub enum MigrateError {
    /// The table's keys have no namespaces.
    #[error(
        "the table is of one of the Python client's first releases: its keys have no namespace \
         ({0}…, for example)"
    )]
    TooOld(&'static str),
    /// The table is of a later release.
    #[error("the table is in format {0}, of a later release than this program")]
    TooNew(String),
    /// A call to the table failed.
    #[error("the migration stopped")]
    Table(#[from] TableError),
}

impl MigrateError {
    /// What to do.
    pub fn hint(&self) -> &'static str {
        match self {
            Self::TooOld(_) => {
                "upgrade the table with the Python client first (its `upgrade` moves the items into \
                 a namespace), or start with a new table"
            }
            Self::TooNew(_) => "upgrade this program",
            Self::Table(_) => "start it again: it continues where it stopped",
        }
    }
}

/// A migration of a table.
#[derive(Clone, Debug)]
pub struct Migration {
    now: Timestamp,
    run: Run,
    namespace: Option<NamespaceId>,
    windows: BTreeSet<Window>,
}

impl Migration {
    /// A migration of the whole table, with the default windows of the Python aggregator: hourly
    /// and daily.
    pub fn new(now: Timestamp) -> Self {
        let windows = BTreeSet::from([Window::Hourly, Window::Daily]);
        Self { now, run: Run::default(), namespace: None, windows }
    }

    /// Sets whether the run changes the table.
    #[must_use]
    pub fn run(mut self, run: Run) -> Self {
        self.run = run;
        self
    }

    /// Migrates only one namespace. The table's version then stays as it is.
    #[must_use]
    pub fn namespace(mut self, id: NamespaceId) -> Self {
        self.namespace = Some(id);
        self
    }

    /// Sets the windows that the Python aggregator was configured with.
    #[must_use]
    pub fn windows(mut self, windows: impl IntoIterator<Item = Window>) -> Self {
        self.windows = windows.into_iter().collect();
        self
    }

    /// Runs the migration, and calls `progress` after every page.
    ///
    /// # Errors
    ///
    /// [`MigrateError`]. Starting again does the rest.
    pub async fn migrate(
        &self,
        table: &dyn Table,
        scan: &dyn Scan,
        progress: &mut (dyn FnMut(&Counts) + Send),
    ) -> Result<Counts, MigrateError> {
        let version = read_version(table).await?;
        if let Some(version) = &version
            && release(&version.schema) > release(Version::SCHEMA)
        {
            return Err(MigrateError::TooNew(version.schema.clone()));
        }
        let mut counts = Counts::default();
        let mut after = None;
        loop {
            let (items, next) = scan.page(after.as_ref()).await?;
            for item in &items {
                self.item(table, item, &mut counts).await?;
            }
            progress(&counts);
            match next {
                Some(next) => after = Some(next),
                None => break,
            }
        }
        if self.run == Run::Real && self.namespace.is_none() && counts.busy == 0 {
            self.write_version(table, version).await?;
        }
        Ok(counts)
    }

    async fn item(
        &self,
        table: &dyn Table,
        item: &Item,
        counts: &mut Counts,
    ) -> Result<(), MigrateError> {
        let text = |name: &str| item.get(name).and_then(Value::as_str).unwrap_or_default();
        let key = ItemKey::new(text("PK"), text("SK"));
        if let Some(kind) = kind_without_namespace(&key.pk) {
            return Err(MigrateError::TooOld(kind));
        }
        if self.namespace.as_ref().is_some_and(|ns| !key.pk.starts_with(&format!("{ns}/"))) {
            return Ok(());
        }
        counts.seen += 1;
        let Some(parsed) = parse_key(&key) else {
            counts.unknown += 1;
            return Ok(());
        };
        if entries::is_bucket(&parsed) && self.is_expired(item) {
            counts.expired += 1;
            return Ok(());
        }
        self.add_entries(table, &key, &parsed, item, counts).await?;
        if let ParsedKey::Record(zae_limiter_core::Key::Usage(usage)) = &parsed {
            self.split_usage(table, usage, item, counts).await?;
        }
        Ok(())
    }

    fn is_expired(&self, item: &Item) -> bool {
        let seconds = match item.get("ttl") {
            Some(Value::N(seconds)) => seconds.parse::<i64>().ok(),
            _ => None,
        };
        seconds.is_some_and(|seconds| seconds.saturating_mul(1_000) <= self.now.as_millis())
    }

    async fn add_entries(
        &self,
        table: &dyn Table,
        key: &ItemKey,
        parsed: &ParsedKey,
        item: &Item,
        counts: &mut Counts,
    ) -> Result<(), MigrateError> {
        let missing = entries::missing(parsed, key, item);
        if missing.is_empty() {
            return Ok(());
        }
        counts.indexed += 1;
        if self.run == Run::Dry {
            return Ok(());
        }
        let mut actions = Vec::new();
        for (index, pk, sk) in missing {
            actions.push(Action::Set(index.pk().to_owned(), Value::S(pk)));
            actions.push(Action::Set(index.sk().to_owned(), Value::S(sk)));
        }
        // An item that was deleted meanwhile must not be created again without its attributes.
        let conditions = vec![Condition::Exists("PK".to_owned())];
        table.update(&Update { key: key.clone(), actions, conditions }).await?;
        Ok(())
    }

    async fn write_version(
        &self,
        table: &dyn Table,
        before: Option<Version>,
    ) -> Result<(), MigrateError> {
        let by = format!("zae-limiter {}", crate::versions::PROGRAM);
        let pin = match &before {
            Some(version) if !is_needed(Some(version)) => return Ok(()),
            Some(version) => {
                Condition::Equal("schema_version".to_owned(), Value::text(&version.schema))
            }
            None => Condition::Absent("PK".to_owned()),
        };
        let version = Version {
            schema: Version::SCHEMA.to_owned(),
            updated_at: Some(self.now),
            updated_by: Some(by),
            aggregator: before.as_ref().and_then(|version| version.aggregator.clone()),
            client_min: before.map_or_else(|| "0.0.0".to_owned(), |version| version.client_min),
        };
        let mut update = version.update();
        update.conditions.push(pin);
        match table.update(&update).await? {
            Updated::Done(..) => Ok(()),
            Updated::Unmet(..) => {
                let message = "another program has changed the table's version meanwhile";
                Err(TableError::new(TableErrorKind::Conflict, message).into())
            }
        }
    }
}

/// Whether a table with that version must be migrated: it has an older format, or another program
/// wrote it.
pub fn is_needed(version: Option<&Version>) -> bool {
    version.is_some_and(|version| {
        let is_ours = version.updated_by.as_deref().is_some_and(|by| by.starts_with(OURS));
        release(&version.schema) < release(Version::SCHEMA) || !is_ours
    })
}

/// The prefix of this program's name in the version record.
const OURS: &str = "zae-limiter ";

/// The kind of a key like `ENTITY#key-1`, which should be `{namespace}/ENTITY#key-1`. Errors show
/// only the kind: the rest may be an API key.
fn kind_without_namespace(pk: &str) -> Option<&'static str> {
    ["ENTITY#", "SYSTEM#", "RESOURCE#", "AUDIT#"].into_iter().find(|kind| pk.starts_with(kind))
}

/// Major and minor number. Patch releases never change the format.
fn release(version: &str) -> (u64, u64) {
    let mut numbers = version.split('.').map(|part| part.parse().unwrap_or(u64::MAX));
    (numbers.next().unwrap_or(u64::MAX), numbers.next().unwrap_or(u64::MAX))
}
