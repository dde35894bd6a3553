//! The paths of the memory store. Each call takes from two limits and commits.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use zae_limiter_core::{BoxFuture, Clock, Error, Limit, MemoryStore, RateLimiter, Timestamp};

use crate::{block_on, measured};

/// Enough that tables have several entries in a group. Filling the cache takes callgrind seconds for so many.
const MANY: usize = 10_000;

/// A clock on which every eighth reading is a millisecond later: then buckets refill.
#[derive(Debug)]
struct Steps(AtomicI64);

impl Clock for Steps {
    fn now(&self) -> Timestamp {
        // One hour after an hour's start, so that no run crosses one.
        Timestamp::from_millis(1_794_751_200_000 + self.0.fetch_add(1, Ordering::Relaxed) / 8)
    }

    fn sleep(&self, _: Duration) -> BoxFuture<'_, ()> {
        Box::pin(async {})
    }
}

fn limiter(tokens: u64) -> RateLimiter {
    block_on(async {
        let builder = RateLimiter::builder(MemoryStore::new()).cache_capacity(2 * MANY);
        let limiter = builder.clock(Arc::new(Steps(AtomicI64::new(0)))).open().await.expect("open");
        let limits = [Limit::per_hour("rpm", tokens), Limit::per_hour("tpm", 10 * tokens)];
        limiter.set_resource_defaults("gpt-4", limits).await.expect("in memory");
        limiter
    })
}

fn keys(count: usize) -> Vec<String> {
    (0..count).map(|n| format!("key-{n:07}")).collect()
}

/// Random places, the same in every run.
fn walk(len: usize) -> impl Iterator<Item = usize> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    std::iter::repeat_with(move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (((state >> 33) * len as u64) >> 31) as usize
    })
}

async fn acquire(limiter: &RateLimiter, key: &str) {
    let lease = limiter.acquire(key, "gpt-4").take("rpm", 1).take("tpm", 10).await;
    lease.expect("within the limits").commit().await.expect("nothing to write");
}

/// A limiter with these keys in its cache.
fn warm(keys: &[String]) -> RateLimiter {
    let limiter = limiter(1_000_000_000);
    block_on(async {
        for key in keys {
            acquire(&limiter, key).await;
        }
    });
    limiter
}

pub fn generic(count: usize) {
    let limiter = warm(&keys(1));
    measured(|| {
        block_on(async {
            for _ in 0..count {
                acquire(&limiter, "key-0000000").await;
            }
        })
    });
}

pub fn generic_many_keys(count: usize) {
    let keys = keys(MANY);
    let limiter = warm(&keys);
    measured(|| {
        block_on(async {
            for at in walk(keys.len()).take(count) {
                acquire(&limiter, &keys[at]).await;
            }
        })
    });
}

pub fn prepared(count: usize) {
    let limiter = warm(&keys(1));
    let prepared = limiter.prepare("gpt-4", ["rpm", "tpm"]).expect("valid names");
    measured(|| {
        block_on(async {
            for _ in 0..count {
                let lease =
                    prepared.acquire("key-0000000", [1, 10]).await.expect("within the limits");
                lease.commit().await.expect("nothing to write");
            }
        })
    });
}

pub fn prepared_many_keys(count: usize) {
    let keys = keys(MANY);
    let limiter = warm(&keys);
    let prepared = limiter.prepare("gpt-4", ["rpm", "tpm"]).expect("valid names");
    measured(|| {
        block_on(async {
            for at in walk(keys.len()).take(count) {
                let lease = prepared.acquire(&keys[at], [1, 10]).await.expect("within the limits");
                lease.commit().await.expect("nothing to write");
            }
        })
    });
}

pub fn try_acquire(count: usize) {
    let limiter = warm(&keys(1));
    let prepared = limiter.prepare("gpt-4", ["rpm", "tpm"]).expect("valid names");
    measured(|| {
        for _ in 0..count {
            let lease = prepared.try_acquire("key-0000000", [1, 10]).expect("within the limits");
            drop(lease.commit());
        }
    });
}

/// A limiter on which the key has no token left, for an hour.
fn drained() -> RateLimiter {
    let limiter = limiter(1);
    block_on(acquire(&limiter, "key"));
    limiter
}

pub fn generic_refused(count: usize) {
    let limiter = drained();
    measured(|| {
        block_on(async {
            for _ in 0..count {
                let done = limiter.acquire("key", "gpt-4").take("rpm", 1).take("tpm", 10).await;
                assert!(matches!(done, Err(Error::Exceeded(_))));
            }
        })
    });
}

pub fn prepared_refused(count: usize) {
    let limiter = drained();
    let prepared = limiter.prepare("gpt-4", ["rpm", "tpm"]).expect("valid names");
    measured(|| {
        block_on(async {
            for _ in 0..count {
                let done = prepared.acquire("key", [1, 10]).await;
                assert!(matches!(done, Err(Error::Exceeded(_))));
            }
        })
    });
}
