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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(feature = "aws")]
    fn the_missing_commands_exist_with_aws() {
        let command = crate::command();
        for name in COMMANDS {
            assert!(command.find_subcommand(name).is_some(), "{name}");
        }
        assert_eq!(failure("deploy").status, crate::ExitStatus::Usage);
    }

    #[test]
    fn a_misspelt_command_is_not_a_missing_one() {
        let read = |name: &str| crate::cli::Cli::read(&[name.into()]).err();
        let found = read("deplyo").expect("there is no such command");
        assert_eq!(missing_command(&found), None);
        #[cfg(not(feature = "aws"))]
        assert!(missing_command(&read("deploy").expect("not built")).is_some());
    }
}
