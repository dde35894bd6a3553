//! What the limiter promises, on every store, with a clock that stands until it is moved.

#![allow(clippy::unwrap_used, reason = "a test says what is wrong by panicking")]

mod acquire;
mod attack_sweeping;
mod audit;
mod availability;
mod breaker;
mod buckets;
mod cache;
mod cancellation;
mod cascade;
mod change;
mod clocks;
mod concurrency;
mod dropping;
mod ensure;
mod entities;
mod lease;
mod levels;
mod lists;
mod namespace_races;
mod namespaces;
mod overrides;
mod prepared;
mod refusal;
mod retries;
mod simulation;
mod streaming;
mod sweeping;
mod unavailable;
mod usage;
mod waiting;
mod world;
