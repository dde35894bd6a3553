//! Finds, starts and stops the program of the endpoint.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::net::TcpStream;
use tokio::process::Command;

use crate::context::Context;
use crate::exit::ExitStatus;
use crate::failure::Failure;

const NAME: &str = "zae-limiter-local";

/// The source of the program, in a checkout.
const SOURCE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../local");

/// Finds the program: the one that `ZAEL_LOCAL` names, else in this program's folder, on `PATH`, or
/// in the checkout, where it is built first.
pub(super) async fn program(context: &mut Context) -> Result<PathBuf, Failure> {
    if let Some(named) = context.local_program() {
        if named.is_file() {
            return Ok(named);
        }
        let message = format!("ZAEL_LOCAL names {}, which does not exist", named.display());
        let failure = Failure::new(ExitStatus::NotFound, message);
        return Err(failure.hint("name the program zae-limiter-local, or unset ZAEL_LOCAL"));
    }
    let ours = std::env::current_exe().ok();
    let beside = ours.as_deref().and_then(Path::parent).map(|folder| folder.join(NAME));
    let on_path = context.search_path().into_iter().map(|folder| folder.join(NAME));
    if let Some(found) = beside.into_iter().chain(on_path).find(|file| file.is_file()) {
        return Ok(found);
    }
    let manifest = Path::new(SOURCE).join("Cargo.toml");
    let built = Path::new(SOURCE).join("target/release").join(NAME);
    if !manifest.is_file() {
        let failure = Failure::new(ExitStatus::NotFound, format!("{NAME} is not installed"));
        return Err(failure.hint("put it into the folder of zae-limiter, or on PATH"));
    }
    // Cargo does nothing if the program is up to date.
    if !built.is_file() {
        context.printer.say("building the endpoint once; this takes some minutes");
    }
    let status = Command::new("cargo")
        .args(["build", "--release", "--quiet", "--manifest-path"])
        .arg(&manifest)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .status()
        .await;
    match status {
        Ok(status) if status.success() => Ok(built),
        _ if built.is_file() => Ok(built),
        _ => {
            let failure = Failure::new(ExitStatus::Error, "could not build the endpoint");
            Err(failure.hint(format!("cargo build --release --manifest-path {SOURCE}/Cargo.toml")))
        }
    }
}

pub(super) struct Started {
    pub(super) endpoint: String,
    pub(super) pid: u32,
}

/// Starts the program in the background and waits until it prints its address.
pub(super) async fn start(
    context: &Context,
    program: &Path,
    port: u16,
    folder: Option<&Path>,
) -> Result<Started, Failure> {
    let failed = |error: &dyn std::error::Error| {
        let message = format!("could not start {}", program.display());
        Failure::new(ExitStatus::Error, message).caused_by(error)
    };
    let log_file = context.data_file("local.log")?;
    let log = std::fs::File::create(&log_file).map_err(|error| failed(&error))?;
    let mut command = Command::new(program);
    command
        .args(["--port", &port.to_string()])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::from(log));
    if let Some(folder) = folder {
        command.arg("--folder").arg(folder);
    }
    // Its own process group: Ctrl-C in this shell must not stop the endpoint.
    #[cfg(unix)]
    command.process_group(0);
    let mut child = command.spawn().map_err(|error| failed(&error))?;
    let mut endpoint = String::new();
    if let Some(stdout) = child.stdout.take() {
        let read = BufReader::new(stdout).read_line(&mut endpoint).await;
        read.map_err(|error| failed(&error))?;
    }
    match child.id() {
        Some(pid) if endpoint.starts_with("http://") => {
            Ok(Started { endpoint: endpoint.trim().to_owned(), pid })
        }
        _ => {
            let log = std::fs::read_to_string(&log_file).unwrap_or_default();
            let log = log.trim().trim_start_matches("error: ").to_owned();
            let mut failure = Failure::new(ExitStatus::Error, "the endpoint did not start");
            if log.contains("listen on port ") {
                failure = failure.hint("leave out --port to use any free port");
            }
            if !log.is_empty() {
                failure.causes.push(log);
            }
            Err(failure)
        }
    }
}

/// Whether the endpoint accepts connections.
pub(super) async fn answers(endpoint: &str) -> bool {
    let address = endpoint.trim_start_matches("http://");
    TcpStream::connect(address).await.is_ok()
}

/// The start time of a process, which distinguishes it from others with the same pid. `None` if
/// there is no such process or no `/proc`.
pub(super) fn start_time(pid: u32) -> Option<String> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The program's name, in parentheses, may contain spaces; the start is the 20th field after it.
    let (_, fields) = stat.rsplit_once(')')?;
    fields.split_whitespace().nth(19).map(str::to_owned)
}

#[cfg(unix)]
pub(super) fn stop(pid: u32) {
    use rustix::process::{Pid, Signal, kill_process};
    if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
        // Fails only if the process has ended already.
        let _ = kill_process(pid, Signal::TERM);
    }
}

#[cfg(not(unix))]
pub(super) fn stop(pid: u32) {
    let _ = std::process::Command::new("taskkill").args(["/PID", &pid.to_string()]).status();
}
