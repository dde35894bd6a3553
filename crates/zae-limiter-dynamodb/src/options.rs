//! How a store works.

use std::time::Duration;

use tokio::runtime::Handle;

/// How many shards a bucket is split into at most: 64,000 writes a second.
const SHARDS_MAX: u32 = 64;

/// How a [`DynamoStore`](crate::DynamoStore) works.
#[derive(Clone, Debug)]
pub struct DynamoOptions {
    pub(crate) group_commit: bool,
    pub(crate) local_refusal: Duration,
    pub(crate) remembered_buckets: usize,
    pub(crate) shards_max: u32,
    pub(crate) merge_after: Duration,
    pub(crate) seed: u64,
    pub(crate) call_timeout: Duration,
    pub(crate) queue_max: usize,
    pub(crate) worker_threads: Option<usize>,
    pub(crate) runtime: Option<Handle>,
}

impl Default for DynamoOptions {
    fn default() -> Self {
        Self {
            group_commit: true,
            local_refusal: Duration::from_secs(1),
            remembered_buckets: 100_000,
            shards_max: SHARDS_MAX,
            merge_after: Duration::from_secs(600),
            seed: arbitrary(),
            call_timeout: Duration::from_secs(1),
            queue_max: 10_000,
            worker_threads: None,
            runtime: None,
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

    /// Into how many shards a bucket that is written too often is split at most: a power of two up to
    /// 64 (64). With 1 it never is. A bucket that others have split further is served all the same.
    #[must_use]
    pub fn shards_max(mut self, count: u32) -> Self {
        let count = count.clamp(1, SHARDS_MAX);
        self.shards_max = 1 << count.ilog2();
        self
    }

    /// For how long a bucket must be written little before half as many shards are made of its shards
    /// (10 minutes).
    #[must_use]
    pub fn merge_after(mut self, calm: Duration) -> Self {
        self.merge_after = calm;
        self
    }

    /// Where the choice among shards starts, so that a test can repeat it. By default it differs from
    /// process to process.
    #[must_use]
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// How long one call to the table may take (1 s). After that the store gives the call up, and serves
    /// the next ones: one silent connection stops no bucket. Records and lists get five times as long.
    #[must_use]
    pub fn call_timeout(mut self, limit: Duration) -> Self {
        self.call_timeout = limit;
        self
    }

    /// How many callers may wait for one bucket (10,000). Beyond it the store refuses them at once, with
    /// [`StoreErrorKind::Busy`](zae_limiter_core::StoreErrorKind::Busy). Settlements are always let in:
    /// there are no more of them than leases.
    #[must_use]
    pub fn queue_max(mut self, callers: usize) -> Self {
        self.queue_max = callers.max(1);
        self
    }

    /// How many threads the stores' own runtime has; without it as many as cores. All stores of a process
    /// share one runtime, so the first store decides.
    #[must_use]
    pub fn worker_threads(mut self, threads: usize) -> Self {
        self.worker_threads = Some(threads);
        self
    }

    /// Runs the store's work on this runtime instead of one of its own, which saves handing work over. It
    /// must have IO and time enabled and outlive the store: when it ends, every call fails.
    #[must_use]
    pub fn runtime(mut self, runtime: Handle) -> Self {
        self.runtime = Some(runtime);
        self
    }
}
