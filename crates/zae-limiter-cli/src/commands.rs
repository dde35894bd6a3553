//! One file for each command: its arguments, and what it does with them.

pub(crate) mod acquire;
pub(crate) mod aggregate;
pub(crate) mod audit;
pub(crate) mod available;
pub(crate) mod bench;
pub(crate) mod completions;
pub(crate) mod demo;
pub(crate) mod entity;
pub(crate) mod local;
pub(crate) mod namespace;
pub(crate) mod resource;
pub(crate) mod system;
pub(crate) mod usage;
pub(crate) mod version;
