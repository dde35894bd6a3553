//! What went wrong with a call to the table, and what that means for the store's callers.

use std::sync::Arc;

use zae_limiter_core::{Applied, StoreError, StoreErrorKind};
use zae_limiter_schema::{Malformed, TableError, TableErrorKind};

/// How often a transaction is sent while others are under way on the same items. Nothing waits in
/// between but the round trip itself: such transactions take milliseconds.
pub(crate) const COLLISIONS_MAX: u32 = 5;

/// A call without an answer that can be used; any number of callers get to know of it.
#[derive(Clone, Debug)]
pub(crate) enum CallError {
    /// The table gave no answer.
    Table(Arc<TableError>),
    /// An item is not what it should be, and whether it was written by this call all the same.
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
    /// The call may have been applied, because its write came before the error.
    pub(crate) fn maybe_applied(self) -> Self {
        match self {
            Self::Item(malformed, _) => Self::Item(malformed, Applied::Maybe),
            Self::Table(error) => Self::Table(error),
        }
    }

    /// Whether it is of this kind, and nothing was done.
    pub(crate) fn is(&self, kind: TableErrorKind) -> bool {
        matches!(self, Self::Table(error) if error.kind == kind && error.applied == Applied::No)
    }

    /// Whether the same call may well go through the next time, and did nothing this time.
    pub(crate) fn is_transient(&self) -> bool {
        self.is(TableErrorKind::Conflict) || self.is(TableErrorKind::PartitionThrottled)
    }

    /// As the store's callers see it.
    pub(crate) fn to_store_error(&self) -> StoreError {
        let (error, applied) = match self {
            Self::Item(malformed, applied) => {
                let message = format!("{malformed}; repair it, or delete the item");
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
        // The table answers: others may be served meanwhile.
        TableErrorKind::Throttled
        | TableErrorKind::PartitionThrottled
        | TableErrorKind::Conflict => StoreErrorKind::Busy,
        TableErrorKind::Denied => StoreErrorKind::Denied,
        TableErrorKind::NoTable | TableErrorKind::Incompatible => StoreErrorKind::Incompatible,
        TableErrorKind::Rejected => StoreErrorKind::Rejected,
    }
}

/// Others were faster, again and again.
pub(crate) fn contended(attempts: u32) -> StoreError {
    let message = format!("others changed the bucket {attempts} times in a row; try again");
    StoreError::new(StoreErrorKind::Busy, message)
}

impl From<CallError> for StoreError {
    fn from(error: CallError) -> Self {
        error.to_store_error()
    }
}

/// What lies behind a table's error, shared by all whom it reaches.
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
