//! The store on a real endpoint: the SDK, HTTP, and the engine of `local/`.
//!
//! `cargo build --release --manifest-path local/Cargo.toml`, then
//! `cargo test -p zae-limiter-dynamodb --features endpoint-tests --test endpoint`. Another program
//! than `local/target/release/zae-limiter-local` is named by `ZAEL_LOCAL`.
#![allow(clippy::unwrap_used, reason = "a test says what is wrong by panicking")]

mod bad_input;
mod codes;
mod connecting;
mod fake;
mod faults;
mod load;
mod lost_answers;
mod outages;
mod own_client;
mod proxy;
mod server;
mod slow;

use std::sync::Arc;
use std::time::Duration;

use zae_limiter_dynamodb::{DynamoOptions, DynamoStore};

/// A store on a table of its own, without snapshots: checks look at one bucket through several
/// stores, or change it behind a store's back.
async fn open() -> Arc<DynamoStore> {
    // The checks have a time of their own, and the endpoint's responses have the date of today.
    let options = DynamoOptions::default().max_clock_skew(Duration::ZERO);
    Arc::new(DynamoStore::new(server::new_table().await, options))
}

zae_limiter_testkit::conformance_tests!(endpoint, open);
