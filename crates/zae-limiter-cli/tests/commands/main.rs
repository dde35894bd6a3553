//! A snapshot of every command: what was typed, what came out, and how it ended.
//!
//! The commands run in this process, on a file of their own, at a time of their own: everything
//! that is printed is the same in every run. `INSTA_UPDATE=always cargo test -p zae-limiter-cli`
//! writes the snapshots anew; read the difference before you keep it.

#![allow(clippy::unwrap_used, unreachable_pub, reason = "a test")]

mod acquire;
mod audit;
mod available;
mod bench;
mod completions;
mod demo;
mod entity;
mod long_lists;
mod namespace;
mod resource;
mod session;
mod system;
mod usage;
mod usage_errors;
