//! The command line of zae-limiter.

use clap::{Parser, Subcommand};

/// A rate limiter for LLM gateways and APIs.
#[derive(Debug, Parser)]
#[command(name = "zae-limiter", version, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Print the version.
    Version,
}

fn main() {
    match Cli::parse().command {
        Command::Version => println!("zae-limiter {}", env!("CARGO_PKG_VERSION")),
    }
}
