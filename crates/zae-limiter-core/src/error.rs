//! Errors: the public one says what to do, the store's says what happened.

use std::error::Error as StdError;
use std::fmt;
use std::time::Duration;

use zae_limiter_model::{
    EntityId, ExceedsCapacity, Invalid, NamespaceName, RateLimitExceeded, ResourceName,
};

/// Why a store gave no answer, or cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum StoreErrorKind {
    /// No answer: unreachable, out of order, too slow. Trying again later may help.
    Unavailable,
    /// The store answers, but one bucket is throttled, contended, or has too many callers waiting. Trying
    /// again helps; other buckets are served meanwhile.
    Busy,
    /// There is no room for another write.
    Full,
    /// Not allowed: permissions, a read-only file, credentials.
    Denied,
    /// What is stored there is not what a limiter stores, or is damaged.
    Corrupt,
    /// Written by another release of the format.
    Incompatible,
    /// The call itself cannot be carried out, whenever it is tried.
    Rejected,
}

/// Whether a failed change may have been made all the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Applied {
    /// It was not.
    No,
    /// Nobody knows: the answer was lost.
    Maybe,
}

/// A store's error: there was no answer.
pub struct StoreError {
    kind: StoreErrorKind,
    applied: Applied,
    message: String,
    source: Option<Box<dyn StdError + Send + Sync>>,
}

impl StoreError {
    /// An error before anything was changed. `message` is one sentence without a full stop.
    pub fn new(kind: StoreErrorKind, message: impl Into<String>) -> Self {
        Self { kind, applied: Applied::No, message: message.into(), source: None }
    }

    /// With the error that caused it.
    #[must_use]
    pub fn caused_by(mut self, source: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        self.source = Some(source.into());
        self
    }

    /// After which the change may have been made.
    #[must_use]
    pub fn maybe_applied(mut self) -> Self {
        self.applied = Applied::Maybe;
        self
    }

    /// What kind of failure it is.
    pub fn kind(&self) -> StoreErrorKind {
        self.kind
    }

    /// Whether the change may have been made.
    pub fn applied(&self) -> Applied {
        self.applied
    }

    /// Whether it may pass by itself: `Unavailable`, `Busy` or `Full`. Then a call is worth repeating,
    /// and `on_unavailable` decides what becomes of it when time is up. A denied permission or a damaged
    /// file is not transient: waiting does not mend it, and letting calls pass because of it would switch
    /// the limits off for good.
    ///
    /// To ask whether the store as a whole is out of order, use [`is_outage`](Self::is_outage).
    pub fn is_transient(&self) -> bool {
        self.is_outage() || self.kind == StoreErrorKind::Busy
    }

    /// Whether the store as a whole is out of order: `Unavailable` or `Full`. Such errors open the
    /// breaker. A `Busy` bucket does not: the store answers for all others.
    ///
    /// To ask whether the call may be repeated, use [`is_transient`](Self::is_transient).
    pub fn is_outage(&self) -> bool {
        matches!(self.kind, StoreErrorKind::Unavailable | StoreErrorKind::Full)
    }
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl fmt::Debug for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}", self.kind, self.message)?;
        match &self.source {
            Some(source) => write!(f, " ({source})"),
            None => Ok(()),
        }
    }
}

impl StdError for StoreError {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.source.as_deref().map(|source| source as &(dyn StdError + 'static))
    }
}

/// What a caller of the limiter has to know.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A limit stands in the way. Wait for [`RateLimitExceeded::retry_after`].
    #[error(transparent)]
    Exceeded(Box<RateLimitExceeded>),
    /// More than a limit can ever hold. Ask for less.
    #[error(transparent)]
    ExceedsCapacity(Box<ExceedsCapacity>),
    /// A name, an amount or a limit breaks a rule.
    #[error(transparent)]
    Invalid(#[from] Invalid),
    /// Limits named in the call that are configured at no level.
    #[error(
        "no limit named {names} holds for {entity} on {resource}; \
         configure it at some level, or pass it with the call"
    )]
    UnknownLimits {
        /// The names, with commas between them.
        names: String,
        /// Who called.
        entity: EntityId,
        /// On what.
        resource: ResourceName,
    },
    /// A lease was asked to change a limit that it was not acquired with.
    #[error("the lease holds nothing of {0}; name it in the acquire, with 0 if need be")]
    NotInLease(String),
    /// A lease was asked to give back more than it holds.
    #[error("the lease holds {held} of {limit} and cannot give back {asked}")]
    NotHeld {
        /// Which limit.
        limit: String,
        /// What it holds, in tokens.
        held: i64,
        /// What it was asked to give back.
        asked: u64,
    },
    /// A lease was used after its commit or rollback.
    #[error("the lease was already committed or rolled back; acquire a new one")]
    LeaseClosed,
    /// There is no such thing.
    #[error("{what} {name:?} does not exist")]
    NotFound {
        /// What kind of thing.
        what: &'static str,
        /// Its name.
        name: String,
    },
    /// It is there already.
    #[error("{what} {name:?} exists already")]
    AlreadyExists {
        /// What kind of thing.
        what: &'static str,
        /// Its name.
        name: String,
    },
    /// The parent named for a new entity does not exist.
    #[error("the parent {parent} does not exist; create it first")]
    MissingParent {
        /// The parent.
        parent: EntityId,
    },
    /// An entity would be its own ancestor.
    #[error("{entity} would be its own ancestor")]
    Cycle {
        /// The entity.
        entity: EntityId,
    },
    /// More ancestors than are followed.
    #[error("{entity} has more than {max} levels above it; use a flatter hierarchy")]
    TooDeep {
        /// The entity.
        entity: EntityId,
        /// How many are followed.
        max: usize,
    },
    /// A namespace that was soft-deleted is being used by name.
    #[error("namespace {name} is not registered; register it, or recover it if it was deleted")]
    UnknownNamespace {
        /// Its name.
        name: NamespaceName,
    },
    /// A namespace that is in use is to be purged.
    #[error("namespace {name} is in use; delete it before it is purged")]
    NamespaceInUse {
        /// Its name.
        name: NamespaceName,
    },
    /// Others kept changing the same record.
    #[error("others changed the same record {attempts} times in a row; try again")]
    Contended {
        /// How often it was tried.
        attempts: u32,
    },
    /// The store does not answer, or has no time for this bucket, and calls are to fail meanwhile.
    #[error("limits cannot be checked: {} ({:.3} s waited)", why_unchecked(cause), waited.as_secs_f64())]
    Unavailable {
        /// How long it was waited for.
        waited: Duration,
        /// What the store said last.
        #[source]
        cause: StoreError,
    },
    /// The store cannot be used as it is; waiting will not help.
    #[error(transparent)]
    Store(StoreError),
}

fn why_unchecked(cause: &StoreError) -> &'static str {
    match cause.kind() {
        StoreErrorKind::Busy => "the bucket is busy",
        _ => "no answer from the store",
    }
}

impl Error {
    /// The refusal, if that is what it is.
    pub fn as_exceeded(&self) -> Option<&RateLimitExceeded> {
        match self {
            Self::Exceeded(refusal) => Some(refusal),
            _ => None,
        }
    }

    pub(crate) fn not_found(what: &'static str, name: impl fmt::Display) -> Self {
        Self::NotFound { what, name: name.to_string() }
    }
}

impl From<RateLimitExceeded> for Error {
    fn from(refusal: RateLimitExceeded) -> Self {
        Self::Exceeded(Box::new(refusal))
    }
}

impl From<ExceedsCapacity> for Error {
    fn from(refusal: ExceedsCapacity) -> Self {
        Self::ExceedsCapacity(Box::new(refusal))
    }
}
