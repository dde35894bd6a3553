//! One bucket: the snapshots of its shards, the queued requests, and the next calls to the table.
//!
//! Everything here is pure. `machine` takes events and returns commands. `decide` computes one write. `reshard`,
//! `gather` and `debt` are procedures of several calls, which `flow` suspends at each of them.

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
pub(crate) mod time;
