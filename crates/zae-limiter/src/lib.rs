#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]

#[cfg(doc)]
pub mod guide;
#[cfg(feature = "infra")]
mod stack;
mod url;

#[cfg(feature = "infra")]
pub use stack::ensure_stack;
pub use url::StoreUrl;
#[doc(inline)]
pub use zae_limiter_core::{
    Acquire, BucketStatus, Builder, Config, EffectiveLimits, Entity, Error, Lease, Limit,
    LimitStatus, MemoryStore, Namespaces, OnDrop, OnUnavailable, Pages, Prepared, PreparedLease,
    PublicRefusal, RateLimitExceeded, RateLimiter, Timestamp, UsageSummary, Window,
};
#[cfg(feature = "dynamodb")]
#[doc(inline)]
pub use zae_limiter_dynamodb::{DynamoOptions, DynamoStore};
#[cfg(feature = "sqlite")]
#[doc(inline)]
pub use zae_limiter_sqlite::{Durability, SqliteOptions, SqliteStore};

#[cfg(feature = "blocking")]
#[doc(inline)]
pub use zae_limiter_core::blocking;

/// Opens a limiter on the store at `url`, in the namespace `default`. See [`StoreUrl`] for the URLs.
///
/// ```
/// # tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(async {
/// let limiter = zae_limiter::open("memory:").await?;
/// assert_eq!(limiter.namespace().as_str(), "default");
/// # Ok::<(), zae_limiter::Error>(())
/// # }).unwrap();
/// ```
///
/// # Errors
///
/// [`Error::Invalid`] for the URL; [`Error::Store`] or [`Error::Unavailable`] when the store cannot be
/// opened.
pub async fn open(url: &str) -> Result<RateLimiter, Error> {
    builder(url)?.open().await
}

/// A builder for a limiter on the store at `url`. See [`StoreUrl`] for the URLs.
///
/// ```
/// # use std::time::Duration;
/// # tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(async {
/// let builder = zae_limiter::builder("memory:")?;
/// let limiter = builder.deadline(Duration::from_millis(200)).principal("gateway-1").open().await?;
/// # Ok::<(), zae_limiter::Error>(())
/// # }).unwrap();
/// ```
///
/// # Errors
///
/// [`Error::Invalid`] for the URL; [`Error::Store`] or [`Error::Unavailable`] when the store cannot be
/// opened.
pub fn builder(url: &str) -> Result<Builder, Error> {
    Ok(RateLimiter::builder(store::open(url)?))
}

/// Values: names, amounts, records, settings and results.
pub mod model {
    #[doc(inline)]
    pub use zae_limiter_core::{
        AUDIT_RETENTION_DAYS_MAX, Acquiring, AuditAction, AuditEvent, AuditSubject,
        BreakerSettings, CacheStats, ConfigLevel, CreateEntity, EntityCapacity, LEVELS_MAX,
        Namespace, NamespaceStatus, Object, OrphanItems, Orphans, OtherAction, PreparedAcquire,
        PreparedAcquiring, ResourceCapacity, ResourceList, Usage, UsageKey, UsageQuery,
        UsageSettings, format_time, hour_of, start_of_hour,
    };
    #[doc(inline)]
    pub use zae_limiter_model::*;
}

/// For authors of stores: the trait, its contract and its data types.
///
/// The macro `conformance_tests!` of the crate `zae-limiter-testkit` checks a store.
pub mod store {
    use std::sync::Arc;

    #[doc(inline)]
    pub use zae_limiter_core::{
        Admission, Applied, BATCH_MAX, BoxFuture, BucketKey, BucketQuery, Cost, Cursor,
        DELETION_WAIT_MAX, Key, Leg, LegTaken, Lifetime, PAGE_MAX, Page, PageRequest, Placement,
        Plan, Precondition, Query, Record, Scope, Settlement, SingleLeg, Store, StoreError,
        StoreErrorKind, StoredBucket, Takes, Target, TimeCheck, UsageRecording, Write, Written,
        bucket_state, refused_statuses,
    };

    #[cfg(feature = "sqlite")]
    #[doc(inline)]
    pub use zae_limiter_sqlite::CommitOn;

    use crate::{Error, StoreUrl};

    /// Opens the store at `url`. See [`StoreUrl`] for the URLs.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for the URL; [`Error::Store`] or [`Error::Unavailable`] when the store cannot be
    /// opened.
    pub fn open(url: &str) -> Result<Arc<dyn Store>, Error> {
        url.parse::<StoreUrl>()?.open()
    }
}

/// Clocks and random ids for tests: a clock that a test moves, and ids from a seed.
pub mod testing {
    #[doc(inline)]
    pub use zae_limiter_core::{Clock, Entropy, ManualClock, SystemClock};
}

/// The table of a [`DynamoStore`], and how to connect to it.
#[cfg(feature = "dynamodb")]
pub mod dynamodb {
    #[doc(inline)]
    pub use zae_limiter_dynamodb::*;
}

/// The stack that [`ensure_stack`] deploys.
#[cfg(feature = "infra")]
pub mod infra {
    pub use crate::stack::StackError;
    #[doc(inline)]
    pub use zae_limiter_infra::*;
}

/// Runs the Rust examples of the guides as doctests.
#[cfg(doctest)]
mod guides {
    #[cfg(feature = "blocking")]
    #[doc = include_str!("../docs/blocking.md")]
    mod blocking {}
    #[doc = include_str!("../docs/configuration-levels.md")]
    mod configuration_levels {}
    #[cfg(feature = "infra")]
    #[doc = include_str!("../docs/ensure-stack.md")]
    mod ensure_stack {}
    #[doc = include_str!("../docs/getting-started.md")]
    mod getting_started {}
    #[doc = include_str!("../docs/hierarchies.md")]
    mod hierarchies {}
    #[doc = include_str!("../docs/limits-and-bursts.md")]
    mod limits_and_bursts {}
    #[doc = include_str!("../docs/llm-settling.md")]
    mod llm_settling {}
    #[doc = include_str!("../docs/unavailability.md")]
    mod unavailability {}
}
