//! Tests for stores: a conformance suite, fault injection, and a deterministic simulation.
//!
//! - [`conformance_tests!`] checks the contract of [`Store`](zae_limiter_core::Store), with about
//!   one test per sentence. [`usage_conformance_tests!`] is for stores that keep usage records
//!   themselves. [`bucket_conformance_tests!`] has only the checks of buckets, for credentials that
//!   may only acquire. [`Split`] gives these checks a second store for administration.
//! - [`SimTable`] is a DynamoDB table in memory: it has DynamoDB's semantics, prices and faults.
//!   [`Simulation`] runs many clients against it from a seed, and audits every write.
//! - [`CutOff`] wraps a table, and fails all writes after a given number.
//! - [`Faulty`] wraps a store. It counts the calls, and fails, delays or hangs those that a test
//!   chooses.
//!
//! `examples/toy_store.rs` is a small store that passes the suite.
//!
//! Nothing here sleeps, reads a clock or draws an unseeded random number.

#![allow(clippy::missing_panics_doc, clippy::unwrap_used, reason = "a check fails by panicking")]

mod calls;
#[doc(hidden)]
pub mod checks;
mod conformance;
mod cut_off;
mod faulty;
mod given;
mod oracle;
mod poll;
mod simulation;
mod split;
mod table;

pub use conformance::{Fixture, run, run_on_threads};
pub use cut_off::CutOff;
pub use faulty::{Call, Fault, Faulty, Gate};
pub use simulation::{
    ClientClock, Companion, Excuse, Excuses, Harsh, Report, Reshard, Seeds, Simulation, Stack,
    StackReport, VirtualTime, World,
};
pub use split::Split;
pub use table::{Changed, ClientId, Faults, Projection, SimTable, Totals, Watch, Wrote};
