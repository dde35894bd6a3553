//! Promise: SIGTERM ends the process within 10 s in every state, also with a stderr that nobody reads.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a test says what is wrong by panicking")]
#![allow(
    clippy::disallowed_methods,
    reason = "the process runs in real time, and a hang must end the test"
)]

use std::io::Write as _;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

/// Whether a thread of the process is in a write to stderr.
fn writes(pid: u32) -> bool {
    let Ok(threads) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return false };
    threads.flatten().any(|thread| {
        let call = std::fs::read_to_string(thread.path().join("syscall")).unwrap_or_default();
        // The numbers of write on x86-64 and arm64.
        call.starts_with("1 0x2 ") || call.starts_with("64 0x2 ")
    })
}

#[test]
fn what_nobody_reads_ends_with_sigterm() {
    for args in [
        &["aggregate", "--windows", "nonsense"][..],
        &["namespace", "list", "--store", "sqlite:/proc/no/file.db"],
    ] {
        ends_with_sigterm(args);
    }
}

fn ends_with_sigterm(args: &[&str]) {
    let (reader, mut writer) = std::io::pipe().unwrap();
    // The capacity of a pipe.
    writer.write_all(&[b'x'; 65_536]).unwrap();
    let mut child = Command::new(env!("CARGO_BIN_EXE_zae-limiter"))
        .args(args)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(writer)
        .spawn()
        .unwrap();
    let begin = Instant::now();
    while !writes(child.id()) && begin.elapsed() < Duration::from_secs(5) {
        std::thread::yield_now();
    }
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    let begin = Instant::now();
    let mut ended = None;
    while ended.is_none() && begin.elapsed() < Duration::from_secs(10) {
        ended = child.try_wait().unwrap();
        std::thread::yield_now();
    }
    child.kill().unwrap();
    child.wait().unwrap();
    drop(reader);
    assert!(ended.is_some(), "{args:?} runs 10 s after SIGTERM");
}
