//! What the table was asked, and what it cost.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use zae_limiter_core::{BucketKey, Cost};
use zae_limiter_schema::Consumed;

use crate::bucket::message::Counted;

#[derive(Debug, Default)]
pub(crate) struct Meter(Mutex<Cost>);

impl Meter {
    /// Counts a call. What one without an answer cost nobody knows.
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

/// What became of buckets that were too hot for one item.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReshardCounts {
    /// How often a bucket was split into twice as many shards.
    pub splits: u64,
    /// How often half as many shards were made of a bucket's.
    pub merges: u64,
    /// How often tokens were taken from several shards at once.
    pub gathered: u64,
    /// The most shards that a bucket was split into.
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

/// Above this many shards something else is wrong.
const SHARDS_USUAL: u32 = 32;

impl Resharding {
    pub(crate) fn count(&self, counted: Counted, bucket: &BucketKey) {
        match counted {
            Counted::Split(shards) => {
                self.splits.fetch_add(1, Ordering::Relaxed);
                self.most_shards.fetch_max(shards.into(), Ordering::Relaxed);
                #[cfg(feature = "metrics")]
                {
                    metrics::counter!("zae_limiter_bucket_doublings_total").increment(1);
                    metrics::histogram!("zae_limiter_bucket_parts").record(shards);
                }
                tracing::info!(shards, "a hot bucket was split");
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
                    metrics::histogram!("zae_limiter_bucket_parts").record(shards);
                }
                tracing::info!(shards, "a calm bucket was merged");
            }
            Counted::Gathered => {
                self.gathered.fetch_add(1, Ordering::Relaxed);
                #[cfg(feature = "metrics")]
                metrics::counter!("zae_limiter_gathered_acquires_total").increment(1);
            }
        }
    }
}
