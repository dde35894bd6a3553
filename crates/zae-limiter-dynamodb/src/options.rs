//! The store's options.

use std::time::Duration;

use tokio::runtime::Handle;
use zae_limiter_core::MAX_CLOCK_SKEW;

/// The most shards of a bucket: 64,000 writes a second.
const SHARDS_MAX: u32 = 64;

/// Options of a [`DynamoStore`](crate::DynamoStore).
///
/// ```
/// # use std::time::Duration;
/// use zae_limiter_dynamodb::DynamoOptions;
///
/// let options = DynamoOptions::default()
///     .call_timeout(Duration::from_millis(500))
///     .shards_max(8)
///     .local_refusal(Duration::ZERO);
/// ```
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
    pub(crate) max_clock_skew: Duration,
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
            max_clock_skew: MAX_CLOCK_SKEW,
        }
    }
}

/// A number that differs from process to process.
fn arbitrary() -> u64 {
    use std::hash::BuildHasher;
    foldhash::quality::RandomState::default().hash_one(0)
}

impl DynamoOptions {
    /// Sends every request in a write of its own, instead of batching those that wait for one bucket.
    #[must_use]
    pub fn without_group_commit(mut self) -> Self {
        self.group_commit = false;
        self
    }

    /// How long the store may refuse requests by its last snapshot of a bucket, without a call (1 s). Refunds
    /// and new limits of other processes are seen that much later. Zero switches it off.
    #[must_use]
    pub fn local_refusal(mut self, trust: Duration) -> Self {
        self.local_refusal = trust;
        self
    }

    /// The most buckets whose snapshots are cached (100,000).
    #[must_use]
    pub fn remembered_buckets(mut self, count: usize) -> Self {
        self.remembered_buckets = count;
        self
    }

    /// The most shards that the store splits a hot bucket into: a power of two up to 64 (64). With 1 it never
    /// splits. It also serves buckets that other processes have split further.
    #[must_use]
    pub fn shards_max(mut self, count: u32) -> Self {
        let count = count.clamp(1, SHARDS_MAX);
        self.shards_max = 1 << count.ilog2();
        self
    }

    /// How long a bucket must have few writes before the store merges it into half as many shards
    /// (10 minutes).
    #[must_use]
    pub fn merge_after(mut self, calm: Duration) -> Self {
        self.merge_after = calm;
        self
    }

    /// The seed for choosing shards, so that a test can replay it. By default it differs from process to
    /// process.
    #[must_use]
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// The time limit of one call to the table (1 s). After it the store drops the call and serves the next
    /// ones, so that one silent connection blocks no bucket. Records and lists have five times as long.
    #[must_use]
    pub fn call_timeout(mut self, limit: Duration) -> Self {
        self.call_timeout = limit;
        self
    }

    /// The most callers in the queue of one bucket (10,000). Further ones fail at once with
    /// [`StoreErrorKind::Busy`](zae_limiter_core::StoreErrorKind::Busy). Settlements are always queued: there
    /// are no more of them than leases.
    #[must_use]
    pub fn queue_max(mut self, callers: usize) -> Self {
        self.queue_max = callers.max(1);
        self
    }

    /// How far the caller's clock may differ from the table's time (2 minutes). A call from a clock that differs by more
    /// uses the table's time. A refill time that lies further ahead of the table's time was written by a wrong clock,
    /// and the store sets it back. The table's time is the date of its responses. Zero switches both off: for tests with
    /// a clock of their own on a real endpoint.
    #[must_use]
    pub fn max_clock_skew(mut self, bound: Duration) -> Self {
        self.max_clock_skew = bound;
        self
    }

    /// The number of threads of the store's own runtime (as many as cores). All stores of a process share one
    /// runtime, so the first store decides.
    #[must_use]
    pub fn worker_threads(mut self, threads: usize) -> Self {
        self.worker_threads = Some(threads);
        self
    }

    /// Runs the store's tasks on this runtime instead of its own, which saves switching threads. It must have
    /// IO and time enabled and outlive the store: when it ends, every call fails.
    #[must_use]
    pub fn runtime(mut self, runtime: Handle) -> Self {
        self.runtime = Some(runtime);
        self
    }
}
