//! One file for each command: its arguments and its implementation.

pub(crate) mod acquire;
pub(crate) mod aggregate;
pub(crate) mod audit;
pub(crate) mod available;
pub(crate) mod bench;
pub(crate) mod cfn_template;
pub(crate) mod check;
pub(crate) mod completions;
pub(crate) mod delete;
pub(crate) mod demo;
pub(crate) mod deploy;
pub(crate) mod entity;
pub(crate) mod lambda_export;
pub(crate) mod list;
pub(crate) mod local;
pub(crate) mod namespace;
pub(crate) mod resource;
pub(crate) mod stack;
pub(crate) mod status;
pub(crate) mod system;
pub(crate) mod upgrade;
pub(crate) mod usage;
pub(crate) mod version;
