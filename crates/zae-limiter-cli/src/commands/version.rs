//! `version`

use serde::Serialize;

use crate::context::Context;
use crate::exit::ExitStatus;
use crate::failure::Failure;

/// Arguments of `version`.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {}

#[derive(Serialize)]
struct VersionJson {
    version: &'static str,
}

#[expect(clippy::unnecessary_wraps, reason = "all commands have this signature")]
pub(crate) fn run(Args {}: Args, context: &mut Context) -> Result<ExitStatus, Failure> {
    let version = env!("CARGO_PKG_VERSION");
    if context.printer.is_json() {
        context.printer.json(&VersionJson { version });
    } else {
        context.printer.line(format!("zae-limiter {version}"));
    }
    Ok(ExitStatus::Done)
}
