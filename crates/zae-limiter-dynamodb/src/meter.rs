//! Counters: calls to the table and their cost, and splits, merges and gathers of buckets.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use zae_limiter_core::{BucketKey, Cost};
use zae_limiter_schema::Consumed;

use crate::bucket::message::Counted;

#[derive(Debug, Default)]
pub(crate) struct Meter(Mutex<Cost>);

impl Meter {
    /// Counts a call. The cost of a failed call is unknown and counts as 0.
    pub(crate) fn count(&self, consumed: Consumed) {
        let mut cost = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        cost.round_trips += 1;
        cost.write_units += consumed.write;
        cost.read_units += consumed.read;
    }

    pub(crate) fn so_far(&self) -> Cost {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How often a store has split, merged and gathered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ReshardCounts {
    /// Splits of a bucket into twice as many shards.
    pub splits: u64,
    /// Merges of a bucket into half as many shards.
    pub merges: u64,
    /// Requests that took tokens from several shards.
    pub gathered: u64,
    /// The highest shard count after a split.
    pub most_shards: u64,
}

#[derive(Debug, Default)]
pub(crate) struct Resharding {
    splits: AtomicU64,
    merges: AtomicU64,
    gathered: AtomicU64,
    most_shards: AtomicU64,
}

impl Resharding {
    pub(crate) fn so_far(&self) -> ReshardCounts {
        ReshardCounts {
            splits: self.splits.load(Ordering::Relaxed),
            merges: self.merges.load(Ordering::Relaxed),
            gathered: self.gathered.load(Ordering::Relaxed),
            most_shards: self.most_shards.load(Ordering::Relaxed),
        }
    }
}

/// Above this many shards every split logs a warning.
const SHARDS_USUAL: u32 = 32;

impl Resharding {
    pub(crate) fn count(&self, counted: Counted, bucket: &BucketKey) {
        match counted {
            Counted::Split(shards) => {
                self.splits.fetch_add(1, Ordering::Relaxed);
                self.most_shards.fetch_max(shards.into(), Ordering::Relaxed);
                #[cfg(feature = "metrics")]
                {
                    metrics::counter!("zae_limiter_bucket_splits_total").increment(1);
                    metrics::histogram!("zae_limiter_bucket_shards").record(shards);
                }
                tracing::info!(shards, "split a hot bucket");
                if shards > SHARDS_USUAL {
                    let (entity, resource) = (&bucket.entity, &bucket.resource);
                    tracing::warn!(?entity, %resource, shards, "a bucket is very hot");
                }
            }
            Counted::Merged(shards) => {
                self.merges.fetch_add(1, Ordering::Relaxed);
                #[cfg(feature = "metrics")]
                {
                    metrics::counter!("zae_limiter_bucket_merges_total").increment(1);
                    metrics::histogram!("zae_limiter_bucket_shards").record(shards);
                }
                tracing::info!(shards, "merged a calm bucket");
            }
            Counted::Gathered => {
                self.gathered.fetch_add(1, Ordering::Relaxed);
                #[cfg(feature = "metrics")]
                metrics::counter!("zae_limiter_gathered_acquires_total").increment(1);
            }
        }
    }
}
