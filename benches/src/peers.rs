//! The other limiters, and a baseline. Each decides on two limits per call, requests and tokens, and
//! admits every call.

use std::collections::HashMap;
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicI64, Ordering};

use governor::clock::DefaultClock;
use governor::state::keyed::DashMapStateStore;
use limitador::limit::Context;

/// The baseline: two atomic counters per key, found by index. No hashing, no refill, no refusal.
pub struct Baseline(Vec<(AtomicI64, AtomicI64)>);

impl Baseline {
    pub fn new(keys: usize) -> Self {
        Self((0..keys).map(|_| Default::default()).collect())
    }

    pub fn decide(&self, key: usize) {
        let (requests, tokens) = &self.0[key];
        requests.fetch_sub(1, Ordering::AcqRel);
        tokens.fetch_sub(10, Ordering::AcqRel);
    }
}

type Keyed = governor::RateLimiter<String, DashMapStateStore<String>, DefaultClock>;

/// governor: two keyed limiters, called one after the other.
pub struct Governor {
    requests: Keyed,
    tokens: Keyed,
}

impl Governor {
    pub fn new() -> Self {
        let quota = || governor::Quota::per_second(NonZeroU32::new(u32::MAX).unwrap());
        Self {
            requests: governor::RateLimiter::dashmap(quota()),
            tokens: governor::RateLimiter::dashmap(quota()),
        }
    }

    pub fn decide(&self, key: &String) {
        self.requests.check_key(key).expect("within the limit");
        let ten = NonZeroU32::new(10).unwrap();
        self.tokens.check_key_n(key, ten).expect("within the burst").expect("within the limit");
    }
}

/// limitador: two limits with one variable, in memory.
pub struct Limitador {
    limiter: limitador::RateLimiter,
    namespace: limitador::limit::Namespace,
    /// Created beforehand, in its favour.
    contexts: Vec<Context<'static>>,
}

impl Limitador {
    pub fn new(keys: &[String]) -> Self {
        let limiter = limitador::RateLimiter::new(4 * keys.len() as u64 + 1_000);
        for seconds in [60, 61] {
            let variables = vec!["key".try_into().expect("a variable")];
            let limit =
                limitador::limit::Limit::new("bench", u64::MAX / 2, seconds, vec![], variables);
            assert!(limiter.add_limit(limit));
        }
        let context =
            |key: &String| Context::from(HashMap::from([("key".to_owned(), key.clone())]));
        Self { limiter, namespace: "bench".into(), contexts: keys.iter().map(context).collect() }
    }

    pub fn decide(&self, key: usize) {
        let context = &self.contexts[key];
        let result = self.limiter.check_rate_limited_and_update(&self.namespace, context, 1);
        assert!(!result.expect("in memory").limited);
    }
}
