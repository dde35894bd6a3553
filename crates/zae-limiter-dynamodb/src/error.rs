//! What went wrong with the table, and what callers are told.

use std::sync::Arc;

use zae_limiter_core::{Applied, StoreError, StoreErrorKind};
use zae_limiter_schema::{Malformed, TableError, TableErrorKind};

/// What happened, to be told to any number of callers.
#[derive(Clone, Debug)]
pub(crate) enum Trouble {
    /// The table gave no answer.
    Table(Arc<TableError>),
    /// An item is not what it should be.
    Item(Malformed),
}

impl From<TableError> for Trouble {
    fn from(error: TableError) -> Self {
        Self::Table(Arc::new(error))
    }
}

impl From<Malformed> for Trouble {
    fn from(malformed: Malformed) -> Self {
        Self::Item(malformed)
    }
}

impl Trouble {
    /// What a caller is told.
    pub(crate) fn told(&self) -> StoreError {
        match self {
            Self::Item(malformed) => {
                let message = format!("{malformed}; repair it, or delete the item");
                StoreError::new(StoreErrorKind::Corrupt, message)
            }
            Self::Table(error) => {
                let kind = match error.kind {
                    TableErrorKind::Unavailable
                    | TableErrorKind::Throttled
                    | TableErrorKind::PartitionThrottled
                    | TableErrorKind::Conflict => StoreErrorKind::Unavailable,
                    TableErrorKind::Denied => StoreErrorKind::Denied,
                    TableErrorKind::NoTable | TableErrorKind::Incompatible => {
                        StoreErrorKind::Incompatible
                    }
                    TableErrorKind::Rejected => StoreErrorKind::Rejected,
                };
                let told = StoreError::new(kind, error.message.clone());
                let told = match &error.source {
                    Some(_) => told.caused_by(Behind(Arc::clone(error))),
                    None => told,
                };
                if error.applied == Applied::Maybe { told.maybe_applied() } else { told }
            }
        }
    }
}

impl From<Trouble> for StoreError {
    fn from(trouble: Trouble) -> Self {
        trouble.told()
    }
}

/// What lies behind a table's error, shared by all who are told of it.
#[derive(Debug)]
struct Behind(Arc<TableError>);

impl std::fmt::Display for Behind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.0.source {
            Some(source) => write!(f, "{source}"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for Behind {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.0.source.as_ref()?.source()
    }
}
