//! The rate limiter's store for many machines: one DynamoDB table.
//!
//! `hot` takes and settles, through one lane for each bucket (`lane`); `round` decides what one
//! write does, and is pure. Everything else is `records`, `lists` and `deletion`. `cold` is the store
//! made of them, and the table is whatever implements [`Table`], called through `calls`.

#[cfg(feature = "aws")]
pub mod aws;
mod calls;
mod cold;
mod cursor;
mod deletion;
mod error;
mod hot;
mod lane;
mod lists;
mod meter;
mod options;
mod records;
mod round;
mod usage;

use std::fmt;
use std::sync::Arc;

use zae_limiter_schema::Table;

pub use options::DynamoOptions;

use crate::lane::Lanes;
use crate::meter::Meter;

/// A [`Store`](zae_limiter_core::Store) in one DynamoDB table. Clones are handles to the same store.
#[derive(Clone)]
pub struct DynamoStore {
    shared: Arc<Shared>,
}

/// What all handles, and the work in the background, share.
struct Shared {
    table: Arc<dyn Table>,
    options: DynamoOptions,
    lanes: Lanes,
    meter: Meter,
}

impl DynamoStore {
    /// A store on a table.
    pub fn new(table: Arc<dyn Table>, options: DynamoOptions) -> Self {
        let lanes = Lanes::new(options.remembered_buckets);
        Self { shared: Arc::new(Shared { table, options, lanes, meter: Meter::default() }) }
    }
}

impl fmt::Debug for DynamoStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DynamoStore").field("table", &self.shared.table).finish_non_exhaustive()
    }
}
