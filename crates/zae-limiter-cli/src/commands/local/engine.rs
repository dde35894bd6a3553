//! Finds, starts and stops the program of the endpoint.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::net::TcpStream;
use tokio::process::Command;

use crate::context::Context;
use crate::exit::ExitStatus;
use crate::failure::Failure;

const NAME: &str = "zae-limiter-local";

/// The lines of cargo's output in an error.
const LINES_MAX: usize = 10;
/// The endpoint prints its address within this time. It starts in milliseconds.
const START_TIMEOUT: Duration = Duration::from_secs(10);
/// A program on this machine accepts a connection within this time.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

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
    let source = Path::new(SOURCE);
    if !source.join("Cargo.toml").is_file() {
        let failure = Failure::new(ExitStatus::NotFound, format!("{NAME} is not installed"));
        return Err(failure.hint("put it into the folder of zae-limiter, or on PATH"));
    }
    let built = source.join("target/release").join(NAME);
    // Cargo does nothing if the program is up to date.
    if !built.is_file() {
        context.printer.say_unless_json("building the endpoint once; this takes some minutes");
    }
    match build(source, &context.search_path()).await {
        Ok(()) => Ok(built),
        Err(failure) if built.is_file() => {
            context.printer.detail(format!("{}: using the last build", failure.message));
            Ok(built)
        }
        Err(failure) => Err(failure),
    }
}

/// Builds the program with the `cargo` of a search path.
async fn build(source: &Path, search_path: &[PathBuf]) -> Result<(), Failure> {
    const HINT: &str = "or name a program that is built: ZAEL_LOCAL=FILE";
    let name = format!("cargo{}", std::env::consts::EXE_SUFFIX);
    let cargo = search_path.iter().map(|folder| folder.join(&name)).find(|file| file.is_file());
    let Some(cargo) = cargo else {
        let message = format!("{NAME} is not installed, and no cargo is on PATH to build it");
        let failure = Failure::new(ExitStatus::NotFound, message);
        return Err(failure.hint(format!("install Rust (https://rustup.rs), {HINT}")));
    };
    let manifest = source.join("Cargo.toml");
    let by_hand = format!("cargo build --release --manifest-path {}", manifest.display());
    let output = Command::new(&cargo)
        .args(["build", "--release", "--quiet", "--manifest-path"])
        .arg(&manifest)
        .arg("--target-dir")
        .arg(source.join("target"))
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output()
        .await;
    let output = output.map_err(|error| {
        let message = format!("could not run {}", cargo.display());
        let failure = Failure::new(ExitStatus::Error, message).caused_by(&error);
        failure.hint(format!("check that `cargo --version` works, {HINT}"))
    })?;
    if output.status.success() {
        return Ok(());
    }
    let message = format!("could not build the endpoint: cargo ended with {}", output.status);
    let mut failure = Failure::new(ExitStatus::Error, message);
    failure.causes.extend(last_lines(&String::from_utf8_lossy(&output.stderr)));
    Err(failure.hint(format!("repair what cargo reports, then run {by_hand}; {HINT}")))
}

/// What cargo said last.
fn last_lines(text: &str) -> Vec<String> {
    let lines = text.lines().map(str::trim_end).filter(|line| !line.trim().is_empty());
    let mut last: Vec<String> = lines.rev().take(LINES_MAX).map(str::to_owned).collect();
    last.reverse();
    last
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
        let mut stdout = BufReader::new(stdout);
        let read = tokio::select! {
            read = stdout.read_line(&mut endpoint) => read,
            () = context.wait(START_TIMEOUT) => {
                // Fails only if the process has ended already.
                let _ = child.start_kill();
                let seconds = START_TIMEOUT.as_secs();
                let message = format!("{} printed no address within {seconds} s", program.display());
                let failure = Failure::new(ExitStatus::Unavailable, message);
                return Err(failure.hint("check that this program is zae-limiter-local"));
            }
        };
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
pub(super) async fn answers(context: &Context, endpoint: &str) -> bool {
    let address = endpoint.trim_start_matches("http://");
    tokio::select! {
        connected = TcpStream::connect(address) => connected.is_ok(),
        () = context.wait(CONNECT_TIMEOUT) => false,
    }
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

#[cfg(all(test, unix))]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    /// Builds with a `cargo` that is this script, or with none.
    async fn build_with(script: Option<&str>) -> Failure {
        let folder = tempfile::tempdir().expect("a folder");
        if let Some(script) = script {
            let cargo = folder.path().join("cargo");
            std::fs::write(&cargo, script).expect("it is writable");
            let mode = std::fs::Permissions::from_mode(0o755);
            std::fs::set_permissions(&cargo, mode).expect("it is ours");
        }
        let path = [PathBuf::from("/nowhere"), folder.path().to_owned()];
        build(Path::new("/source"), &path).await.expect_err("it fails")
    }

    #[tokio::test]
    async fn a_failed_build_quotes_cargo_and_says_what_to_do() {
        let script = "#!/bin/sh\nfor i in 1 2 3 4 5 6 7 8 9; do echo noise $i >&2; done\n\
                      echo >&2\necho 'error: linker `cc` not found' >&2\nexit 101\n";
        let failure = build_with(Some(script)).await;
        assert_eq!(failure.status, ExitStatus::Error);
        assert!(failure.message.ends_with("cargo ended with exit status: 101"), "{failure:?}");
        assert_eq!(failure.causes.len(), LINES_MAX, "{failure:?}");
        assert_eq!(failure.causes[9], "error: linker `cc` not found");
        let hint = failure.hint.expect("a hint");
        assert!(
            hint.contains("cargo build --release --manifest-path /source/Cargo.toml"),
            "{hint}"
        );
        assert!(hint.contains("ZAEL_LOCAL=FILE"), "{hint}");
    }

    #[tokio::test]
    async fn without_cargo_the_hint_is_to_install_it() {
        let failure = build_with(None).await;
        assert_eq!(failure.status, ExitStatus::NotFound);
        assert!(failure.message.contains("no cargo is on PATH"), "{failure:?}");
        assert!(failure.hint.expect("a hint").contains("https://rustup.rs"));
    }

    #[tokio::test]
    async fn a_cargo_that_cannot_run_is_the_cause() {
        let failure = build_with(Some("#!/nowhere/interpreter\n")).await;
        assert_eq!((failure.status, failure.causes.len()), (ExitStatus::Error, 1), "{failure:?}");
        assert!(failure.message.contains("could not run"), "{failure:?}");
        assert!(failure.hint.expect("a hint").contains("cargo --version"));
    }
}
