//! Errors of calls to the table, and their meaning for the store's callers.

use std::sync::Arc;

use zae_limiter_core::{Applied, StoreError, StoreErrorKind};
use zae_limiter_schema::{Malformed, TableError, TableErrorKind};

/// How often a transaction is sent while it conflicts with another one. There is no wait in between: such
/// transactions take milliseconds, as long as the round trip itself.
pub(crate) const COLLISIONS_MAX: u32 = 5;

/// A failed call. It is cloned for every caller that waits for it.
#[derive(Clone, Debug)]
pub(crate) enum CallError {
    /// The call failed.
    Table(Arc<TableError>),
    /// An item is malformed; and whether this call may have written it.
    Item(Malformed, Applied),
}

impl From<TableError> for CallError {
    fn from(error: TableError) -> Self {
        Self::Table(Arc::new(error))
    }
}

impl From<Malformed> for CallError {
    fn from(malformed: Malformed) -> Self {
        Self::Item(malformed, Applied::No)
    }
}

impl CallError {
    /// The same error after a write that was applied.
    pub(crate) fn maybe_applied(self) -> Self {
        match self {
            Self::Item(malformed, _) => Self::Item(malformed, Applied::Maybe),
            Self::Table(error) => Self::Table(error),
        }
    }

    /// Whether it is of this kind, and nothing was applied.
    pub(crate) fn is(&self, kind: TableErrorKind) -> bool {
        matches!(self, Self::Table(error) if error.kind == kind && error.applied == Applied::No)
    }

    /// Whether nothing was applied and a retry may succeed: a conflict, or a throttled partition.
    pub(crate) fn is_transient(&self) -> bool {
        self.is(TableErrorKind::Conflict) || self.is(TableErrorKind::PartitionThrottled)
    }

    /// The error for the store's callers.
    pub(crate) fn to_store_error(&self) -> StoreError {
        let (error, applied) = match self {
            Self::Item(malformed, applied) => {
                let message = format!("{malformed}; repair or delete the item");
                (StoreError::new(StoreErrorKind::Corrupt, message), *applied)
            }
            Self::Table(table) => {
                let error = StoreError::new(kind_of(table.kind), table.message.clone());
                let error = match &table.source {
                    Some(_) => error.caused_by(TableSource(Arc::clone(table))),
                    None => error,
                };
                (error, table.applied)
            }
        };
        if applied == Applied::Maybe { error.maybe_applied() } else { error }
    }
}

fn kind_of(kind: TableErrorKind) -> StoreErrorKind {
    match kind {
        TableErrorKind::Unavailable => StoreErrorKind::Unavailable,
        // The table is available: other buckets are served meanwhile.
        TableErrorKind::Throttled
        | TableErrorKind::PartitionThrottled
        | TableErrorKind::Conflict => StoreErrorKind::Busy,
        TableErrorKind::Denied => StoreErrorKind::Denied,
        TableErrorKind::NoTable => StoreErrorKind::NotFound,
        TableErrorKind::Incompatible => StoreErrorKind::Incompatible,
        TableErrorKind::Rejected => StoreErrorKind::Rejected,
    }
}

/// Other processes changed the bucket before every attempt.
pub(crate) fn contended(attempts: u32) -> StoreError {
    let message =
        format!("other processes changed the bucket {attempts} times in a row; try again");
    StoreError::new(StoreErrorKind::Busy, message)
}

impl From<CallError> for StoreError {
    fn from(error: CallError) -> Self {
        error.to_store_error()
    }
}

/// The source of a table's error, shared by all callers that get it.
#[derive(Debug)]
struct TableSource(Arc<TableError>);

impl std::fmt::Display for TableSource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.0.source {
            Some(source) => write!(f, "{source}"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for TableSource {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.0.source.as_ref()?.source()
    }
}
