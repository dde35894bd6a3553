//! The program without the feature `aws`: what it says about the commands that it does not have.

use clap::error::{ContextKind, ContextValue, ErrorKind};

use crate::failure::Failure;

/// The commands that need the feature.
const COMMANDS: [&str; 10] = [
    "aggregate",
    "cfn-template",
    "check",
    "delete",
    "deploy",
    "lambda-export",
    "list",
    "local",
    "status",
    "upgrade",
];

/// The failure of a command or option that needs AWS.
pub(crate) fn failure(what: &str) -> Failure {
    let message = format!("{what} is not in this program: it was built without AWS");
    Failure::usage(message).hint("build all of it: cargo run --release -- --help")
}

/// The failure for a command line that names one of the missing commands.
pub(crate) fn missing_command(error: &clap::Error) -> Option<Failure> {
    if error.kind() != ErrorKind::InvalidSubcommand {
        return None;
    }
    match error.get(ContextKind::InvalidSubcommand)? {
        ContextValue::String(name) if COMMANDS.contains(&name.as_str()) => Some(failure(name)),
        _ => None,
    }
}
