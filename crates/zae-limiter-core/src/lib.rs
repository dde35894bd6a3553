//! The rate limiter, on any store.

mod acquire;
mod audit;
mod availability;
mod background;
#[cfg(feature = "blocking")]
pub mod blocking;
mod breaker;
pub mod bucket_state;
mod cache;
mod clock;
mod deadline;
mod dropped;
mod entities;
mod entropy;
mod error;
mod lease;
mod limiter;
mod limits;
mod memory;
mod namespaces;
mod page;
mod pages;
mod plan;
mod prepared;
mod prepared_lease;
mod record;
mod skew;
mod stale;
mod store;
mod sweep;
mod telemetry;
mod usage;
mod waiting;
mod warm;
mod window;

pub use acquire::{Acquire, Acquiring};
pub use audit::AUDIT_RETENTION_DAYS_MAX;
pub use availability::{BucketStatus, EntityCapacity, ResourceCapacity};
pub use breaker::BreakerSettings;
pub use cache::CacheStats;
pub use clock::{Clock, ManualClock, SystemClock};
#[doc(hidden)]
pub use deadline::within;
pub use dropped::OnDrop;
pub use entities::CreateEntity;
pub use entropy::Entropy;
pub use error::{Applied, Error, Object, StoreError, StoreErrorKind};
pub use futures_core::future::BoxFuture;
pub use lease::Lease;
pub use limiter::{Builder, LEVELS_MAX, RateLimiter};
pub use limits::EffectiveLimits;
pub use memory::MemoryStore;
pub use namespaces::Namespaces;
pub use page::{Cursor, PAGE_MAX, Page, PageRequest};
pub use pages::Pages;
pub use plan::{
    Admission, BucketKey, Leg, LegTaken, Lifetime, Placement, Plan, Settlement, SingleLeg, Takes,
    Target, refused_statuses,
};
pub use prepared::{Prepared, PreparedAcquire, PreparedAcquiring};
pub use prepared_lease::PreparedLease;
pub use record::{
    AuditAction, AuditEvent, AuditSubject, Config, ConfigLevel, Entity, Key, Namespace,
    NamespaceStatus, OnUnavailable, OtherAction, Record, Usage, UsageKey,
};
pub use skew::MAX_CLOCK_SKEW;
pub use store::{
    BATCH_MAX, BucketQuery, Cost, DELETION_WAIT_MAX, Precondition, Query, ResourceList, Scope,
    Store, StoredBucket, TimeCheck, UsageRecording, Write, Written,
};
pub use sweep::{OrphanItems, Orphans};
pub use usage::{UsageQuery, UsageSummary};
pub use window::{UsageSettings, Window, format_time, hour_of, start_of_hour};
pub use zae_limiter_model::*;
