//! The checks of the conformance suite, by topic. Each gets a fresh, empty store.

#![allow(missing_docs, reason = "the name of a check states the rule")]

pub mod admission;
pub mod cancellation;
pub mod concurrency;
pub mod following;
pub mod lifetimes;
pub mod lists;
pub mod paging;
pub mod peeking;
pub mod random;
pub mod records;
pub mod refill;
pub mod refusal;
pub mod round_trips;
pub mod scopes;
pub mod settling;
pub mod usage;
pub mod write_races;
