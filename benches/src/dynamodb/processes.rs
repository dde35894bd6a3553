//! The endpoint's process, and the CPU time of processes.

use std::io::{BufRead as _, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

/// Ticks per CPU second in `/proc`, on all current Linux systems.
const TICKS: f64 = 100.0;

/// An endpoint in memory. Dropping it ends the process.
pub struct Endpoint {
    pub url: String,
    // The endpoint ends when its stdin closes, which happens when this process ends.
    child: Child,
}

impl Endpoint {
    pub fn start() -> Result<Self, String> {
        let beside =
            concat!(env!("CARGO_MANIFEST_DIR"), "/../local/target/release/zae-limiter-local");
        let program = std::env::var_os("ZAEL_LOCAL").map_or_else(|| beside.into(), PathBuf::from);
        let child = Command::new(&program)
            .args(["--until-eof", "--no-sweep"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn();
        let mut child = child.map_err(|error| {
            format!(
                "could not start {} ({error}); \
                 build it: cargo build --release --manifest-path local/Cargo.toml",
                program.display()
            )
        })?;
        let mut url = String::new();
        let stdout = child.stdout.take().expect("it is piped");
        BufReader::new(stdout).read_line(&mut url).map_err(|error| error.to_string())?;
        Ok(Self { url: url.trim().to_owned(), child })
    }

    /// CPU seconds so far.
    pub fn cpu(&self) -> f64 {
        cpu_of(self.child.id())
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// CPU seconds of a process so far, over all threads; 0 without `/proc`.
pub fn cpu_of(pid: u32) -> f64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The name, in parentheses, may contain spaces; user and system time are fields 12 and 13 after it.
    let fields = stat.rsplit_once(')').map_or("", |(_, fields)| fields);
    let ticks = fields.split_whitespace().skip(11).take(2).filter_map(|f| f.parse::<f64>().ok());
    ticks.sum::<f64>() / TICKS
}
