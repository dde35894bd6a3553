//! The rate limiter, over any store.

pub mod account;
mod clock;
mod entropy;
mod error;
mod page;
mod plan;
mod record;
mod store;
mod window;

pub use clock::{Clock, ManualClock, SystemClock, Waiting};
pub use entropy::Entropy;
pub use error::{Applied, Error, StoreError, StoreErrorKind};
pub use page::{Cursor, PAGE_MAX, Page, PageRequest};
pub use plan::{
    Admission, BucketKey, Leg, LegTaken, Lifetime, Plan, Settlement, Takes, Target,
    refused_statuses,
};
pub use record::{
    AuditAction, AuditEvent, AuditSubject, Config, ConfigLevel, Entity, Key, Namespace,
    OnUnavailable, Record, Usage, UsageKey,
};
pub use store::{
    Answer, BATCH_MAX, BucketQuery, Query, ResourceList, Scope, Store, StoredBucket, When, Write,
    Written,
};
pub use window::{UsageSettings, Window, format_time, hour_of, start_of_hour};
pub use zae_limiter_model::*;
