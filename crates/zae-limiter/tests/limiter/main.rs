//! What the limiter promises, on every store, with a clock that stands until it is moved.

#![allow(clippy::unwrap_used, reason = "a test says what is wrong by panicking")]

mod acquire;
mod audit;
mod availability;
mod breaker;
mod buckets;
mod cache;
mod cancellation;
mod cascade;
mod change;
mod concurrency;
mod dropping;
mod ensure;
mod entities;
mod lease;
mod levels;
mod lists;
mod namespaces;
mod overrides;
mod refusal;
mod retries;
mod simulation;
mod streaming;
mod unavailable;
mod usage;
mod waiting;
mod world;
