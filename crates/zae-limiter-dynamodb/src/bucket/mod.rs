//! One bucket: what is known of its shards, who waits for them, and what to ask the table next.
//!
//! Everything here is pure. `machine` takes events and returns commands; `decide` decides one write;
//! `reshard` and `gather` are procedures of several calls, which `flow` suspends at each of them.

mod debt;
pub(crate) mod decide;
mod flow;
mod gather;
mod lane;
pub(crate) mod machine;
#[cfg(test)]
mod machine_tests;
pub(crate) mod message;
mod reshard;
pub(crate) mod shards;
mod snapshots;
mod task;
