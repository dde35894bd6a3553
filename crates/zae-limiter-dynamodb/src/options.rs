//! How a store works.

use std::time::Duration;

/// How a [`DynamoStore`](crate::DynamoStore) works.
#[derive(Clone, Debug)]
pub struct DynamoOptions {
    pub(crate) group_commit: bool,
    pub(crate) local_refusal: Duration,
    pub(crate) remembered_buckets: usize,
}

impl Default for DynamoOptions {
    fn default() -> Self {
        Self {
            group_commit: true,
            local_refusal: Duration::from_secs(1),
            remembered_buckets: 100_000,
        }
    }
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
}
