//! What the features `blocking`, `http`, `metrics` and `serde` add.

#![allow(clippy::unwrap_used, reason = "a test says what is wrong by panicking")]

mod attack_blocking;
mod blocking;
mod metrics;
mod response;
#[expect(dead_code, reason = "shared with the other tests, which use all of it")]
#[path = "../limiter/world.rs"]
mod world;
