//! Values and arithmetic of the rate limiter: limits, refills, and the decision to admit a request.
//!
//! Everything here is a pure function of its arguments. There is no IO, no clock and no randomness,
//! and the crate has no dependencies, so that every store, in every process, on every machine,
//! decides by the same integer arithmetic.
//!
//! The central invariant: a bucket's state at a moment does not depend on how often it was refilled
//! before. Refilling in ten steps or in one gives the same tokens, because each step carries the
//! fraction of a millitoken over to the next.

mod bucket;
mod decide;
mod exceeded;
pub mod grammar;
#[cfg(feature = "http")]
mod headers;
mod invalid;
mod json;
mod limit;
mod name;
mod public;
#[cfg(feature = "serde")]
mod serialized;
mod share;
mod spelling;
mod status;
mod time;
mod tokens;

pub use bucket::{Balances, Bucket, Cell, Overflow};
pub use decide::{Ask, Take, Verdict, decide};
pub use exceeded::{ExceedsCapacity, RateLimitExceeded};
pub use grammar::ParseLimitError;
#[cfg(feature = "http")]
pub use headers::headers;
pub use invalid::Invalid;
pub use json::escape as escape_json;
pub use limit::{
    CAPACITY_MAX, LIMITS_MAX, Limit, LimitSet, PERIOD_SECONDS_MAX, RESERVED_LIMIT_NAMES, Rate,
};
pub use name::{
    DEFAULT_RESOURCE, EntityId, LimitName, NamespaceId, NamespaceName, ResourceName, StackName,
};
pub use public::{PublicRefusal, http_fields};
pub use share::share;
pub use spelling::{likely, nearest};
pub use status::LimitStatus;
pub use time::{Timestamp, WAIT_MAX};
pub use tokens::{AMOUNT_MAX, MILLI, Millitokens, amount};
