//! The Python client as a process that reads commands, line by line.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{LazyLock, Mutex, PoisonError};

use serde_json::Value;

use crate::server;

/// A release of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Release {
    V0_10_3,
    V0_17_0,
}

pub(crate) struct Process {
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    // Ends with its input.
    _child: Child,
}

/// One of each release is enough for all tests that call one after the other.
static PROCESSES: [LazyLock<Mutex<Process>>; 2] = [
    LazyLock::new(|| Mutex::new(Process::start(Release::V0_10_3))),
    LazyLock::new(|| Mutex::new(Process::start(Release::V0_17_0))),
];

impl Process {
    pub(crate) fn start(release: Release) -> Self {
        let variable = match release {
            Release::V0_10_3 => "ZAEL_PYTHON_0_10_3",
            Release::V0_17_0 => "ZAEL_PYTHON_0_17_0",
        };
        let program = std::env::var_os(variable).unwrap_or_else(|| {
            panic!("{variable} names no interpreter; eval \"$(tests/interop/venvs)\" sets it")
        });
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/interop/client.py");
        let mut child = Command::new(program)
            .args([script, &server::endpoint()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let input = child.stdin.take().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Self { input, output, _child: child }
    }
    pub(crate) fn call(&mut self, request: &Value) -> Result<Value, String> {
        writeln!(self.input, "{request}").unwrap();
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        let answer: Value = serde_json::from_str(&line)
            .unwrap_or_else(|error| panic!("{request} is answered by {line:?}: {error}"));
        match answer.get("ok") {
            Some(ok) => Ok(ok.clone()),
            None => Err(format!("{}: {}", answer["error"], answer["message"])),
        }
    }
}

impl Release {
    /// Has a request carried out, one at a time.
    pub(crate) fn call(self, request: &Value) -> Result<Value, String> {
        let process = &PROCESSES[self as usize];
        process.lock().unwrap_or_else(PoisonError::into_inner).call(request)
    }
}
