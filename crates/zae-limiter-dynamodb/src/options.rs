//! How a store works.

use std::time::Duration;

/// How many parts a bucket is divided into at most: 64,000 writes a second.
const SHARDS_MAX: u32 = 64;

/// How a [`DynamoStore`](crate::DynamoStore) works.
#[derive(Clone, Debug)]
pub struct DynamoOptions {
    pub(crate) group_commit: bool,
    pub(crate) local_refusal: Duration,
    pub(crate) remembered_buckets: usize,
    pub(crate) parts_max: u32,
    pub(crate) merge_after: Duration,
    pub(crate) seed: u64,
}

impl Default for DynamoOptions {
    fn default() -> Self {
        Self {
            group_commit: true,
            local_refusal: Duration::from_secs(1),
            remembered_buckets: 100_000,
            parts_max: SHARDS_MAX,
            merge_after: Duration::from_secs(600),
            seed: arbitrary(),
        }
    }
}

/// A number that is another one in every process.
fn arbitrary() -> u64 {
    use std::hash::BuildHasher;
    foldhash::quality::RandomState::default().hash_one(0)
}

impl DynamoOptions {
    /// Sends every request by itself, instead of letting those that wait for one bucket go together.
    #[must_use]
    pub fn without_group_commit(mut self) -> Self {
        self.group_commit = false;
        self
    }

    /// For how long what is known of a bucket may refuse a request without asking the table (1 s).
    /// Tokens that another process gives back, and limits that it changes, are seen that much later.
    /// Zero switches it off.
    #[must_use]
    pub fn local_refusal(mut self, trust: Duration) -> Self {
        self.local_refusal = trust;
        self
    }

    /// How many buckets are remembered (100,000).
    #[must_use]
    pub fn remembered_buckets(mut self, count: usize) -> Self {
        self.remembered_buckets = count;
        self
    }

    /// Into how many parts a bucket that is written too often is divided at most: a power of two up to
    /// 64 (64). With 1 it never is. A bucket that others have divided further is served all the same.
    #[must_use]
    pub fn parts_max(mut self, count: u32) -> Self {
        self.parts_max = count.clamp(1, SHARDS_MAX);
        self
    }

    /// For how long a bucket must be written little before half as many parts are made of its parts
    /// (10 minutes).
    #[must_use]
    pub fn merge_after(mut self, calm: Duration) -> Self {
        self.merge_after = calm;
        self
    }

    /// Where the choice among parts starts, so that a test can repeat it. By default it differs from
    /// process to process.
    #[must_use]
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }
}
