//! The command that runs under a lease.

use std::ffi::OsString;
use std::io::ErrorKind;
use std::process::ExitStatus as ChildStatus;

use tokio::process::{Child, Command};

use crate::context::Context;
use crate::exit::ExitStatus;
use crate::failure::Failure;
use crate::interrupts::Interrupt;

/// Runs the command to its end. An interrupt is passed on to the command, which may use its tokens
/// until it ends. A second interrupt kills the command.
pub(super) async fn run(command: &[OsString], context: &Context) -> Result<ExitStatus, Failure> {
    let (program, args) = command.split_first().expect("clap gives no empty command");
    // Cloned before the start, so that no interrupt is missed.
    let mut interrupts = context.interrupts.clone();
    let mut child = match Command::new(program).args(args).spawn() {
        Ok(child) => child,
        Err(error) => {
            // The statuses of a shell.
            let (status, hint) = match error.kind() {
                ErrorKind::NotFound => (127, "check its name and PATH"),
                _ => (126, "check that it is executable"),
            };
            let message = format!("could not start {}", program.to_string_lossy());
            let failure = Failure::new(ExitStatus::Other(status), message).caused_by(&error);
            return Err(failure.hint(format!("{hint}; the tokens are refunded")));
        }
    };
    let mut stopped_by = None;
    loop {
        let interrupt = tokio::select! {
            ended = child.wait() => return ending(ended, stopped_by),
            interrupt = interrupts.next() => interrupt,
        };
        match stopped_by {
            None => pass_on(&child, interrupt, context),
            // Fails only if the command has ended meanwhile.
            Some(_) => drop(child.start_kill()),
        }
        stopped_by.get_or_insert(interrupt);
    }
}

fn ending(
    ended: std::io::Result<ChildStatus>,
    stopped_by: Option<Interrupt>,
) -> Result<ExitStatus, Failure> {
    let ended = ended.map_err(|error| {
        Failure::new(ExitStatus::Error, "could not wait for the command").caused_by(&error)
    })?;
    let status = match ended.code() {
        Some(code) => u8::try_from(code).unwrap_or(1),
        None => 128_u8.saturating_add(signal_of(ended)),
    };
    Ok(match (status, stopped_by) {
        // An interrupted command may exit with 0 without having done its work.
        (0, Some(interrupt)) => interrupt.status(),
        (0, None) => ExitStatus::Done,
        (status, _) => ExitStatus::Other(status),
    })
}

#[cfg(unix)]
fn signal_of(ended: ChildStatus) -> u8 {
    use std::os::unix::process::ExitStatusExt as _;
    ended.signal().and_then(|signal| u8::try_from(signal).ok()).unwrap_or(0)
}

#[cfg(not(unix))]
fn signal_of(_: ChildStatus) -> u8 {
    0
}

#[cfg(unix)]
fn pass_on(child: &Child, interrupt: Interrupt, context: &Context) {
    use rustix::process::{Pid, Signal, kill_process};
    let terminal = &context.printer.terminal;
    let signal = match interrupt {
        // The terminal sends Ctrl-C to the command itself.
        Interrupt::Interrupt if terminal.stdin || terminal.stderr => return,
        Interrupt::Interrupt => Signal::INT,
        Interrupt::Terminate => Signal::TERM,
        Interrupt::Hangup => Signal::HUP,
    };
    let pid = child.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw);
    if let Some(pid) = pid {
        // Fails only if the command has ended meanwhile.
        let _ = kill_process(pid, signal);
    }
}

#[cfg(not(unix))]
fn pass_on(_: &Child, _: Interrupt, _: &Context) {}
