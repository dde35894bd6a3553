//! The DynamoDB table of zae-limiter as data: keys, items, typed updates and conditions, and the
//! six [calls](Table) that a store makes.
//!
//! This crate does not depend on the AWS SDK. The SDK's adapter and the simulated table both implement
//! [`Table`]. Keys, attribute names and expressions are made only here. `docs/schema.md` describes every
//! item and attribute.

pub mod bucket;
pub mod change;
mod dates;
mod expression;
mod keys;
pub mod records;
mod table;
mod value;
mod writers;

pub use dates::{ResponseDates, TableTime, parse_http_date};
pub use expression::{Action, Condition, Rendered, render_condition, render_update};
pub use keys::{
    BucketItemKey, Index, ItemKey, ParsedKey, REGISTRY, SHARD_ZERO, bucket_partition,
    children_partition, entity_configs_partition, entity_partition, namespace_partition, parse_key,
    resource_partition, system_partition,
};
pub use table::{
    BatchRead, Change, Consistency, Consumed, Decoded, PAGE_ITEMS_MAX, Query, QueryOutput, Range,
    Scanned, Step, Table, TableError, TableErrorKind, Task, Transacted, Update, Updated,
};
pub use value::{Item, Malformed, Value, item_size};
pub use writers::{ATTRIBUTES, Attribute, WRITERS, Writer};
