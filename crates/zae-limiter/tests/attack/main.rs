//! Attacks on what the documents promise. A test that fails here names the promise that is broken.

#![allow(clippy::unwrap_used, reason = "a test says what is wrong by panicking")]

#[path = "../limiter/world.rs"]
mod world;

mod arcs;
mod cancelled;
mod clocks;
mod ensuring;
mod grammar;
mod hierarchies;
mod leases;
mod lists;
mod refusals;
mod secrets;
mod sweeps;
mod times;
mod waiting;
