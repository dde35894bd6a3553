//! Commands on the DynamoDB endpoint of `local/`.
//!
//! `cargo build --release --manifest-path local/Cargo.toml`, then
//! `cargo test -p zae-limiter-cli --features endpoint-tests --test endpoint`. Another program than
//! `local/target/release/zae-limiter-local` is named by `ZAEL_LOCAL`.
#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a test says what is wrong by panicking")]

mod bench;
mod blocking;
#[path = "mod.rs"]
mod endpoint;
