//! Errors: the public one says what to do, the store's one says what happened.

use std::error::Error as StdError;
use std::fmt;
use std::time::Duration;

use zae_limiter_model::{
    EntityId, ExceedsCapacity, Invalid, LimitName, NamespaceId, NamespaceName, ParseLimitError,
    RateLimitExceeded, ResourceName, likely,
};

use crate::record::ConfigLevel;

/// The kind of a store's error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum StoreErrorKind {
    /// No answer: unreachable, failing, or too slow. Retry later.
    Unavailable,
    /// The store answers, but one bucket is throttled, contended, or has too many callers in its queue.
    /// Retry; other buckets are not affected.
    Busy,
    /// There is no space for another write.
    Full,
    /// Not allowed: permissions, a read-only file, credentials.
    Denied,
    /// The stored data is damaged, or not a limiter's.
    Corrupt,
    /// The table does not exist.
    NotFound,
    /// Written by another release of the format.
    Incompatible,
    /// The call itself is invalid. Retrying does not help.
    Rejected,
}

/// Whether a change that failed may still have been made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Applied {
    /// It was not made.
    No,
    /// Unknown: the answer was lost.
    Maybe,
}

/// A store's error: the call got no answer.
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

    /// Adds the error that caused this one.
    #[must_use]
    pub fn caused_by(mut self, source: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        self.source = Some(source.into());
        self
    }

    /// Marks that the change may have been made.
    #[must_use]
    pub fn maybe_applied(mut self) -> Self {
        self.applied = Applied::Maybe;
        self
    }

    /// The kind of error.
    pub fn kind(&self) -> StoreErrorKind {
        self.kind
    }

    /// Whether the change may have been made.
    pub fn applied(&self) -> Applied {
        self.applied
    }

    /// Whether the error is transient: `Unavailable`, `Busy` or `Full`. The limiter retries these until the
    /// deadline; then `on_unavailable` decides. A denied permission or a damaged file is not transient:
    /// admitting calls because of it would switch the limits off for good.
    ///
    /// For outages of the whole store, use [`is_outage`](Self::is_outage).
    pub fn is_transient(&self) -> bool {
        self.is_outage() || self.kind == StoreErrorKind::Busy
    }

    /// Whether the whole store is unavailable: `Unavailable` or `Full`. These errors open the breaker. A
    /// `Busy` bucket does not: the store answers for all others.
    ///
    /// To find out whether a retry may help, use [`is_transient`](Self::is_transient).
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

/// An error of the limiter.
///
/// ```
/// # use zae_limiter_core::{Error, Limit, MemoryStore, RateLimiter};
/// # tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(async {
/// # let limiter = RateLimiter::builder(MemoryStore::new())
/// #     .default_limits([Limit::per_minute("rpm", 100)]).open().await?;
/// match limiter.acquire("key-1", "gpt-4").take("rpm", 1).await {
///     Ok(lease) => lease.commit().await?,
///     Err(Error::Exceeded(refusal)) => println!("retry in {:?}", refusal.retry_after()),
///     Err(Error::Unavailable { cause, .. }) => println!("the store is unavailable: {cause}"),
///     Err(other) => return Err(other),
/// }
/// # Ok::<(), Error>(())
/// # }).unwrap();
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A limit is exceeded. Wait for [`RateLimitExceeded::retry_after`].
    #[error(transparent)]
    Exceeded(Box<RateLimitExceeded>),
    /// More than the capacity of a limit. Take less.
    #[error(transparent)]
    ExceedsCapacity(Box<ExceedsCapacity>),
    /// A name, an amount or a limit breaks a rule.
    #[error(transparent)]
    Invalid(#[from] Invalid),
    /// The call names limits that are configured at no level.
    #[error(
        "no limit named {} is configured for this entity on {resource}; {}",
        unknown.join(", "),
        Configured(configured, unknown)
    )]
    UnknownLimits {
        /// The names that the call used, in its order.
        unknown: Vec<String>,
        /// The limits that are configured, those that resemble the first unknown one before the others.
        configured: Vec<LimitName>,
        /// The entity that called.
        entity: EntityId,
        /// The resource that the call is for.
        resource: ResourceName,
    },
    /// A change to a limit that the lease was not acquired with.
    #[error(
        "the lease was not acquired with {0}; take it in the acquire, with 0 tokens if need be"
    )]
    NotInLease(String),
    /// A refund of more tokens than the lease holds.
    #[error("the lease holds {held} of {limit} and cannot refund {asked}")]
    NotHeld {
        /// The limit's name.
        limit: String,
        /// The tokens that the lease holds.
        held: i64,
        /// The tokens to refund.
        asked: u64,
    },
    /// It does not exist.
    #[error("{0} does not exist")]
    NotFound(Object),
    /// It exists already.
    #[error("{0} exists already")]
    AlreadyExists(Object),
    /// It exists, but not as the call asks for it: see [`ensure_entity`](crate::RateLimiter::ensure_entity).
    #[error("{0} exists with another parent, name, cascade or metadata; nothing was changed")]
    Differs(Object),
    /// The parent of an entity does not exist.
    #[error("the parent {parent:?} does not exist; create it first")]
    MissingParent {
        /// The parent.
        parent: EntityId,
    },
    /// An entity would be its own ancestor.
    #[error("{entity:?} would be its own ancestor")]
    Cycle {
        /// The entity.
        entity: EntityId,
    },
    /// The hierarchy is too deep.
    #[error("{entity:?} would be level {} of its hierarchy, and {max} is the most; use a flatter one", max + 1)]
    TooDeep {
        /// The entity.
        entity: EntityId,
        /// The most levels, the entity included.
        max: usize,
    },
    /// The namespace is not registered, or was deleted.
    #[error("namespace {name} is not registered; register it, or recover it if it was deleted")]
    UnknownNamespace {
        /// Its name.
        name: NamespaceName,
    },
    /// Only a deleted namespace can be purged.
    #[error("namespace {name} is in use; delete it before it is purged")]
    NamespaceInUse {
        /// Its name.
        name: NamespaceName,
    },
    /// The namespace was purged, or a purge of it has begun.
    #[error(
        "namespace {name} was purged, and nothing of it can be used again; \
         register the name again and open a new limiter"
    )]
    NamespacePurged {
        /// Its name.
        name: NamespaceName,
    },
    /// Other clients kept changing the same record.
    #[error("others changed the same record {attempts} times in a row; try again")]
    Contended {
        /// The number of attempts.
        attempts: u32,
    },
    /// The call cannot be decided without waiting: see [`Acquire::try_now`](crate::Acquire::try_now). Nothing was taken.
    #[error("the call cannot be decided without waiting for the store; await the acquire")]
    WouldWait,
    /// The store is unavailable, or the bucket is busy, and `on_unavailable` is
    /// [`Block`](crate::OnUnavailable::Block).
    #[error("limits cannot be checked: {} ({:.3} s waited)", why_unchecked(cause), waited.as_secs_f64())]
    Unavailable {
        /// How long the call waited.
        waited: Duration,
        /// The last error of the store.
        #[source]
        cause: StoreError,
    },
    /// The store cannot be used; waiting does not help.
    #[error(transparent)]
    Store(StoreError),
}

/// The object that an error names. Its text contains no entity id: ids are often API keys, and errors end up in logs.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Object {
    /// An entity.
    Entity(EntityId),
    /// The limits stored at a level.
    Limits(ConfigLevel),
    /// A namespace, by its name.
    Namespace(NamespaceName),
    /// A namespace, by its id.
    NamespaceId(NamespaceId),
}

impl fmt::Display for Object {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Entity(id) => write!(f, "{id:?}"),
            Self::Limits(ConfigLevel::System) => f.write_str("a configuration of the system"),
            Self::Limits(ConfigLevel::Resource(resource)) => {
                write!(f, "a configuration of resource {resource}")
            }
            Self::Limits(ConfigLevel::Entity(id)) => write!(f, "a configuration of {id:?}"),
            Self::Limits(ConfigLevel::EntityResource(id, resource)) => {
                write!(f, "a configuration of {id:?} on {resource}")
            }
            Self::Namespace(name) => write!(f, "namespace {name}"),
            Self::NamespaceId(id) => write!(f, "namespace {id}"),
        }
    }
}

/// What to do about unknown limits: use those that are configured, or configure some.
struct Configured<'a>(&'a [LimitName], &'a [String]);

impl fmt::Display for Configured<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("configure it at some level, or pass it with the call");
        }
        if let Some(meant) = self.1.first().and_then(|typed| likely(typed, self.0)) {
            write!(f, "did you mean {meant}? ")?;
        }
        let names: Vec<&str> = self.0.iter().map(LimitName::as_str).collect();
        write!(f, "configured: {}", names.join(", "))
    }
}

fn why_unchecked(cause: &StoreError) -> &'static str {
    match cause.kind() {
        StoreErrorKind::Busy => "the bucket is busy",
        _ => "no answer from the store",
    }
}

impl Error {
    /// How long to wait before the same call may succeed: [`RateLimitExceeded::retry_after`] for a refusal, one
    /// second for a store that does not answer, `None` where waiting does not help.
    ///
    /// ```
    /// # use zae_limiter_core::{Error, Limit, MemoryStore, RateLimiter};
    /// # tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(async {
    /// # let limiter = RateLimiter::builder(MemoryStore::new())
    /// #     .default_limits([Limit::per_minute("rpm", 1)]).open().await?;
    /// limiter.acquire("key-1", "gpt-4").take("rpm", 1).await?.commit().await?;
    /// let refused = limiter.acquire("key-1", "gpt-4").take("rpm", 1).await.unwrap_err();
    /// assert!(refused.retry_after().unwrap().as_secs() >= 59);
    /// let never = limiter.acquire("key-1", "gpt-4").take("rpm", 2).await.unwrap_err();
    /// assert_eq!(never.retry_after(), None);
    /// # Ok::<(), Error>(())
    /// # }).unwrap();
    /// ```
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Exceeded(refusal) => Some(refusal.retry_after()),
            Self::Unavailable { .. } => Some(Duration::from_secs(1)),
            Self::Store(error) if error.is_transient() => Some(Duration::from_secs(1)),
            _ => None,
        }
    }

    /// The HTTP response for a failed call: status, header fields and a JSON body, with only what a caller may see. A
    /// refusal is 429, an invalid request 400, a request above the capacity of a limit 413, an unavailable store 503,
    /// and everything else 500, without details.
    #[cfg(feature = "http")]
    pub fn to_response(&self) -> http::Response<String> {
        use http::{HeaderValue, StatusCode, header};

        let (status, code) = match self {
            Self::Exceeded(_) => (StatusCode::TOO_MANY_REQUESTS, "rate_limit_exceeded"),
            Self::ExceedsCapacity(_) => (StatusCode::PAYLOAD_TOO_LARGE, "exceeds_capacity"),
            Self::Invalid(_) => (StatusCode::BAD_REQUEST, "invalid"),
            Self::Unavailable { .. } => (StatusCode::SERVICE_UNAVAILABLE, "unavailable"),
            Self::Store(error) if error.is_transient() => {
                (StatusCode::SERVICE_UNAVAILABLE, "unavailable")
            }
            _ => (StatusCode::INTERNAL_SERVER_ERROR, "internal"),
        };
        let body = match self {
            Self::Exceeded(refusal) => refusal.public().to_json(),
            Self::ExceedsCapacity(_) | Self::Invalid(_) => {
                serde_json::json!({ "error": code, "message": self.to_string() }).to_string()
            }
            _ => serde_json::json!({ "error": code }).to_string(),
        };
        let mut response = http::Response::new(body);
        *response.status_mut() = status;
        let headers = response.headers_mut();
        if let Self::Exceeded(refusal) = self {
            *headers = refusal.headers();
        } else if status == StatusCode::SERVICE_UNAVAILABLE {
            headers.insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        response
    }

    /// The refusal, if the error is one.
    pub fn as_exceeded(&self) -> Option<&RateLimitExceeded> {
        match self {
            Self::Exceeded(refusal) => Some(refusal),
            _ => None,
        }
    }
}

impl From<ParseLimitError> for Error {
    fn from(error: ParseLimitError) -> Self {
        Self::Invalid(error.into())
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
