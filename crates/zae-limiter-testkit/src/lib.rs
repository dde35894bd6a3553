//! What a store needs to prove itself, and what the limiter needs to see stores fail.
//!
//! - [`conformance_tests!`] runs the contract of [`Store`](zae_limiter_core::Store) as tests, one
//!   for each sentence or so. [`usage_conformance_tests!`] adds those for stores that keep usage
//!   records themselves; [`bucket_conformance_tests!`] is the shard about buckets, for somebody who may
//!   only acquire, which a [`Split`] store tells from whoever administers.
//! - [`SimTable`] is a DynamoDB table in memory, with its semantics, its bill and its faults;
//!   [`Simulation`] runs many clients against it, from a seed, and audits every step.
//! - [`CutOff`] is any table until it has taken so many writes.
//! - [`Faulty`] wraps a store, counts its calls, and fails, hangs or waits where it is told to.
//!
//! `examples/toy_store.rs` is the smallest store that passes.
//!
//! Nothing here sleeps, reads a clock or draws an unseeded random number.

#![allow(
    clippy::missing_panics_doc,
    clippy::unwrap_used,
    reason = "a check says what is wrong by panicking"
)]

mod ask;
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
