//! Parsers of command-line values: limits, amounts, durations, moments, names, addresses. Every
//! error points at the wrong characters.

mod duration;
mod limit;
mod misread;
mod moment;
mod names;
mod number;
mod shards;

pub use duration::duration;
pub use limit::{Adjustment, Amount, adjustment, amount, limit};
pub use misread::Misread;
pub use moment::{Moment, moment};
pub use names::{
    Resources, endpoint_url, entity_id, key_value, limit_name, namespace_id, namespace_name,
    region, resource, resource_or_default, stack_name, store_url, table_name,
};
pub use shards::shards;
