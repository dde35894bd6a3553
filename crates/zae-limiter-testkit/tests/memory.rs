//! Runs the conformance suite on the memory store.

use std::sync::Arc;

use zae_limiter_core::MemoryStore;
use zae_limiter_testkit::{conformance_tests, one_step_conformance_tests, usage_conformance_tests};

conformance_tests!(memory, || async { Arc::new(MemoryStore::new()) });
usage_conformance_tests!(memory_usage, || async { Arc::new(MemoryStore::new()) });
one_step_conformance_tests!(memory_steps, || async { Arc::new(MemoryStore::new()) });
