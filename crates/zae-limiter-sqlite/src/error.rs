//! The store's internal error, and how it becomes a [`StoreError`].

use std::path::Path;
use std::sync::Arc;

use rusqlite::ErrorCode;
use rusqlite::ffi;
use zae_limiter_core::{Invalid, Overflow, StoreError, StoreErrorKind};

use crate::codec::Malformed;

/// Why a job failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    /// An error of SQLite.
    #[error(transparent)]
    Sqlite(#[from] rusqlite::Error),
    /// A row does not decode.
    #[error(transparent)]
    Malformed(#[from] Malformed),
    /// A row holds an invalid name or number.
    #[error(transparent)]
    Invalid(#[from] Invalid),
    /// A row holds invalid JSON.
    #[error(transparent)]
    Json(#[from] serde_json::Error),
    /// A balance would leave the range of 64 bits.
    #[error(transparent)]
    Overflow(#[from] Overflow),
    /// The call is invalid.
    #[error("{0}")]
    Rejected(&'static str),
    /// The file cannot be used. The message continues the file's name.
    #[error("{1}")]
    Unusable(StoreErrorKind, &'static str),
}

impl Failure {
    /// Whether another connection holds a lock, so that a retry can succeed soon.
    pub(crate) fn is_busy(&self) -> bool {
        matches!(self.code(), Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked))
    }

    /// Whether there was no room for a write.
    pub(crate) fn is_full(&self) -> bool {
        self.kind() == StoreErrorKind::Full
    }

    /// Whether SQLite could not write all that it had to. For a `COMMIT` this means that nothing of the transaction
    /// counts: the frame with the commit mark is the last one that SQLite writes to the log. A failed sync, or shared
    /// memory that cannot grow, comes after that frame.
    pub(crate) fn is_short_write(&self) -> bool {
        let Self::Sqlite(error) = self else { return false };
        let code = error.sqlite_error().map(|error| error.extended_code);
        matches!(code, Some(ffi::SQLITE_FULL | ffi::SQLITE_IOERR_WRITE))
    }

    /// Whether the failure concerns the whole store, and not one job or row.
    pub(crate) fn is_outage(&self) -> bool {
        use StoreErrorKind::{Denied, Full, Unavailable};
        matches!(self.kind(), Unavailable | Full | Denied)
    }

    fn code(&self) -> Option<ErrorCode> {
        match self {
            Self::Sqlite(error) => error.sqlite_error_code(),
            _ => None,
        }
    }

    fn kind(&self) -> StoreErrorKind {
        match self {
            Self::Sqlite(error) => sqlite_kind(error),
            Self::Malformed(_) | Self::Invalid(_) | Self::Json(_) => StoreErrorKind::Corrupt,
            Self::Overflow(_) | Self::Rejected(_) => StoreErrorKind::Rejected,
            Self::Unusable(kind, _) => *kind,
        }
    }

    /// The error for a caller. In an `Arc`, because one failure can end many calls.
    pub(crate) fn to_store_error(self: &Arc<Self>, file: &Path) -> StoreError {
        let kind = self.kind();
        let file = file.display();
        let message = match (&**self, kind) {
            (Self::Unusable(_, message), _) => format!("{file} {message}"),
            (Self::Rejected(message), _) => (*message).to_owned(),
            (Self::Overflow(overflow), _) => overflow.to_string(),
            (_, StoreErrorKind::Full) => {
                format!(
                    "{file} cannot grow: the disk, a quota or a file size limit is full; free some space"
                )
            }
            (_, StoreErrorKind::Denied) => {
                format!(
                    "{file} cannot be written; check the permissions of the file and its folder"
                )
            }
            (_, StoreErrorKind::Corrupt) => {
                format!("{file} is damaged; restore it from a backup, or move it away")
            }
            (_, StoreErrorKind::Rejected) => {
                format!("{file} cannot hold a value this large; send a smaller one")
            }
            _ if self.is_busy() => {
                format!("{file} is locked by another program; try again, or stop that program")
            }
            _ => format!("{file} cannot be read or written now; check the disk and try again"),
        };
        let error = StoreError::new(kind, message);
        match &**self {
            Self::Unusable(..) | Self::Rejected(_) | Self::Overflow(_) => error,
            // The message says all that SQLite says.
            _ if self.is_busy() => error,
            _ => error.caused_by(self.to_string()),
        }
    }
}

fn sqlite_kind(error: &rusqlite::Error) -> StoreErrorKind {
    let rusqlite::Error::SqliteFailure(inner, _) = error else {
        // All other errors of rusqlite are about columns of the wrong type.
        return StoreErrorKind::Corrupt;
    };
    match inner.code {
        ErrorCode::DiskFull => StoreErrorKind::Full,
        // SQLite reports a full disk as such, but a file size limit or quota as an I/O error.
        ErrorCode::SystemIoFailure => match inner.extended_code {
            ffi::SQLITE_IOERR_WRITE | ffi::SQLITE_IOERR_SHMSIZE | ffi::SQLITE_IOERR_TRUNCATE => {
                StoreErrorKind::Full
            }
            _ => StoreErrorKind::Unavailable,
        },
        ErrorCode::ReadOnly
        | ErrorCode::CannotOpen
        | ErrorCode::PermissionDenied
        | ErrorCode::AuthorizationForStatementDenied => StoreErrorKind::Denied,
        // `Unknown` is SQL that does not fit the tables: another program has changed them.
        ErrorCode::DatabaseCorrupt
        | ErrorCode::NotADatabase
        | ErrorCode::SchemaChanged
        | ErrorCode::TypeMismatch
        | ErrorCode::Unknown => StoreErrorKind::Corrupt,
        ErrorCode::TooBig | ErrorCode::ConstraintViolation => StoreErrorKind::Rejected,
        _ => StoreErrorKind::Unavailable,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_of_sqlite_maps_to_its_kind() {
        use StoreErrorKind::{Corrupt, Denied, Full, Rejected, Unavailable};
        for (code, kind) in [
            (ffi::SQLITE_BUSY, Unavailable),
            (ffi::SQLITE_BUSY_SNAPSHOT, Unavailable),
            (ffi::SQLITE_LOCKED, Unavailable),
            (ffi::SQLITE_NOMEM, Unavailable),
            (ffi::SQLITE_IOERR_READ, Unavailable),
            (ffi::SQLITE_IOERR_FSYNC, Unavailable),
            (ffi::SQLITE_IOERR_WRITE, Full),
            (ffi::SQLITE_FULL, Full),
            (ffi::SQLITE_READONLY, Denied),
            (ffi::SQLITE_READONLY_DIRECTORY, Denied),
            (ffi::SQLITE_CANTOPEN, Denied),
            (ffi::SQLITE_PERM, Denied),
            (ffi::SQLITE_CORRUPT, Corrupt),
            (ffi::SQLITE_NOTADB, Corrupt),
            (ffi::SQLITE_ERROR, Corrupt),
            (ffi::SQLITE_TOOBIG, Rejected),
        ] {
            let error = rusqlite::Error::SqliteFailure(ffi::Error::new(code), None);
            let error = Arc::new(Failure::from(error)).to_store_error(Path::new("limits.db"));
            assert_eq!(error.kind(), kind, "code {code}");
            let cause = std::error::Error::source(&error);
            let is_locked = [ffi::SQLITE_BUSY, ffi::SQLITE_BUSY_SNAPSHOT, ffi::SQLITE_LOCKED];
            assert_eq!(cause.is_none(), is_locked.contains(&code), "code {code}");
            let more = cause.and_then(std::error::Error::source);
            assert!(more.is_none(), "SQLite says the same thing twice: {more:?}");
            assert!(error.to_string().contains("limits.db"), "{error}");
        }
    }
}
