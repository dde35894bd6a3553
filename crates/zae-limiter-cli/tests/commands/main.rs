//! A snapshot of every command: arguments, stdout, stderr and exit status.
//!
//! The commands run in this process, on a temporary file and with a manual clock, so that the output
//! is the same in every run. `INSTA_UPDATE=always cargo test -p zae-limiter-cli` updates the
//! snapshots; read the difference before you commit it.

#![allow(clippy::unwrap_used, unreachable_pub, reason = "a test")]

mod acquire;
mod attack_again;
mod attack_credentials;
mod audit;
mod available;
mod aws;
mod bench;
mod completions;
mod credentials;
mod demo;
mod entity;
mod function;
mod long_lists;
mod namespace;
mod promises;
mod resource;
mod session;
mod system;
mod usage;
mod usage_errors;
