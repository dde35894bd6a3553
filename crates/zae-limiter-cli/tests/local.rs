//! `local` from up to down, with the endpoint of `local/`, and other commands against it.
//!
//! `cargo build --release --manifest-path local/Cargo.toml`, then
//! `cargo test -p zae-limiter-cli --features endpoint-tests --test local`. Another program than
//! `local/target/release/zae-limiter-local` is named by `ZAEL_LOCAL`.
#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a test says what is wrong by panicking")]

use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Command, Output};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;

const BESIDE: &str =
    concat!(env!("CARGO_MANIFEST_DIR"), "/../../local/target/release/zae-limiter-local");

/// A temporary home directory. Dropping it stops the endpoint.
struct Home {
    folder: TempDir,
    program: PathBuf,
}

impl Home {
    fn new() -> Self {
        let program = std::env::var_os("ZAEL_LOCAL").map_or_else(|| BESIDE.into(), PathBuf::from);
        assert!(
            program.is_file(),
            "{} is not there; build it: cargo build --release --manifest-path local/Cargo.toml",
            program.display()
        );
        Self { folder: tempfile::tempdir().unwrap(), program }
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        // Without this machine's AWS settings.
        command
            .env_clear()
            .env("PATH", "/usr/bin:/bin")
            .env("HOME", self.folder.path())
            .env("AWS_EC2_METADATA_DISABLED", "true")
            .env("ZAEL_LOCAL", &self.program);
        command
    }

    fn run(&self, line: &str) -> Said {
        let mut command = self.command(env!("CARGO_BIN_EXE_zae-limiter"));
        Said::from(command.args(line.split(' ')).output().unwrap())
    }

    /// Runs a script in which `zael` is our program.
    fn script(&self, script: &str) -> Said {
        let script =
            format!("set -e; zael() {{ {} \"$@\"; }}; {script}", env!("CARGO_BIN_EXE_zae-limiter"));
        let output = self.command("sh").args(["-c", &script]).output().unwrap();
        Said::from(output)
    }

    fn folder(&self) -> String {
        self.folder.path().join("tables").display().to_string()
    }

    /// The file that records the running endpoint.
    fn state_file(&self) -> PathBuf {
        self.folder.path().join(".local/share/zae-limiter/local.json")
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        let _ = self.command(env!("CARGO_BIN_EXE_zae-limiter")).args(["local", "down"]).output();
    }
}

/// The output of a command.
#[derive(Debug)]
struct Said {
    code: Option<i32>,
    stdout: String,
    stderr: String,
}

impl Said {
    fn from(output: Output) -> Self {
        Self {
            code: output.status.code(),
            stdout: String::from_utf8(output.stdout).unwrap(),
            stderr: String::from_utf8(output.stderr).unwrap(),
        }
    }

    /// It succeeded.
    #[track_caller]
    fn ok(self) -> Self {
        assert_eq!(self.code, Some(0), "{self:#?}");
        self
    }

    /// It failed, with all of these texts on stderr.
    #[track_caller]
    fn fails(&self, code: i32, texts: &[&str]) {
        assert_eq!(self.code, Some(code), "{self:#?}");
        for text in texts {
            assert!(self.stderr.contains(text), "{text:?} is missing: {self:#?}");
        }
    }

    #[track_caller]
    fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("{error}: {self:#?}"))
    }
}

const NOT_RUNNING: &[&str] = &["no local endpoint is running", "zae-limiter local up"];

#[test]
fn up_twice_and_down_twice() {
    let home = Home::new();
    home.run("local status").fails(4, NOT_RUNNING);
    home.run("local env").fails(4, NOT_RUNNING);
    home.run("local down").fails(4, NOT_RUNNING);
    let up = home.run("local up").ok();
    let endpoint = up.stdout.trim();
    assert!(endpoint.starts_with("http://127.0.0.1:"), "{up:#?}");
    let again = home.run("local up").ok();
    assert_eq!(again.stdout.trim(), endpoint);
    assert!(again.stderr.contains("the endpoint already runs as process"), "{again:#?}");
    // Other settings than those of the running endpoint are an error.
    let other =
        ["another endpoint already runs", endpoint, "table zae-limiter", "zae-limiter local down"];
    home.run("local up --table limits").fails(1, &other);
    home.run("local up --port 1").fails(1, &other);
    let port = endpoint.rsplit(':').next().unwrap();
    home.run(&format!("local up --table zae-limiter --port {port}")).ok();
    home.run("local up --table ab").fails(2, &["\"ab\" is too short for a table"]);
    let status = home.run("local status").ok();
    let store = format!("dynamodb:zae-limiter?region=us-east-1&endpoint={endpoint}");
    assert!(status.stdout.contains(&store), "{status:#?}");
    assert!(home.run("local down").ok().stderr.contains("stopped"));
    TcpStream::connect(endpoint.trim_start_matches("http://")).unwrap_err();
    home.run("local down").fails(4, NOT_RUNNING);
    home.run("local status").fails(4, NOT_RUNNING);
}

#[test]
fn scripts_get_documents() {
    let home = Home::new();
    let up = home.run("local up --table limits --stream -o json").ok().json();
    assert_eq!(up["table"], "limits");
    assert_eq!(home.run("local up -o json").ok().json(), up);
    assert_eq!(home.run("local status -o json").ok().json(), up);
    let env = home.run("local env -o json").ok().json();
    assert_eq!(env["AWS_ENDPOINT_URL_DYNAMODB"], up["endpoint"]);
    // Of all services, so that no command reaches a real account.
    assert_eq!(env["AWS_ENDPOINT_URL"], up["endpoint"]);
    let store = env["ZAEL_STORE"].as_str().unwrap();
    assert!(store.starts_with("dynamodb:limits?"), "{env}");
    // Commands also work on a table with a stream.
    home.run(&format!("acquire key-1 gpt-4 -l rpm:10 -c rpm:1 --store {store}")).ok();
    let usage = format!("usage summary -e key-1 --store {store}");
    let nothing = home.run(&usage).ok();
    assert!(
        nothing.stderr.contains(&format!("--store '{store}' aggregate --once")),
        "{nothing:#?}"
    );
    home.run(&format!("aggregate --once --store {store}")).ok();
    assert!(home.run(&usage).ok().stdout.contains("rpm"));
    assert_eq!(home.run("local down -o json").ok().json()["stopped"], up);
}

#[test]
fn what_env_prints_points_other_commands_at_it() {
    let home = Home::new();
    home.run("local up -q").ok();
    let said = home.script(
        "eval \"$(zael local env)\"; \
         zael acquire key-1 gpt-4 -l runs:10/day -c runs:4 >&2; \
         zael acquire key-1 gpt-4 -l runs:10/day -c runs:1 -o json",
    );
    assert_eq!(said.ok().json()["limits"][0]["available"], 5);
    let refused = home.script(
        "eval \"$(zael local env)\"; zael acquire key-2 gpt-4 -l rpm:1/day -c rpm:1 -q; \
         zael acquire key-2 gpt-4 -l rpm:1/day -c rpm:1",
    );
    refused.fails(5, &["refused"]);
}

#[test]
fn bench_creates_the_buckets_before_it_measures() {
    let home = Home::new();
    home.run("local up -q").ok();
    let units = |options: &str| {
        let script =
            format!("eval \"$(zael local env)\"; zael bench --concurrency 4 {options} -o json");
        let measured = home.script(&script).ok().json();
        assert_eq!(measured["over_admitted"], 0, "{measured}");
        assert_eq!(measured["failed"], 0, "{measured}");
        measured["write_units_per_acquire"].as_f64().unwrap()
    };
    // An acquire on a new bucket costs five units, on an existing one at most one.
    let warm = units("--entities 20 --each 10");
    assert!(warm <= 1.0, "{warm} write units per acquire");
    let cold = units("--entities 20 --each 10 --warm-up 0s");
    assert!(cold > 1.2, "{cold} write units per acquire from the first call on");
    let few = units("--entities 100 --each 10");
    assert!(few > 3.0, "{few} write units per acquire where all are first calls");
}

#[test]
fn what_is_in_a_folder_survives() {
    let home = Home::new();
    let up = format!("local up -q --folder {}", home.folder());
    let take = "eval \"$(zael local env)\"; zael acquire key-1 gpt-4 -l runs:10/day -c runs:3 -q";
    let left =
        "eval \"$(zael local env)\"; zael acquire key-1 gpt-4 -l runs:10/day -c runs:0 -o json";
    let left = |home: &Home| home.script(left).ok().json()["limits"][0]["available"].clone();
    home.run(&up).ok();
    home.script(take).ok();
    assert_eq!(left(&home), 7);
    home.run("local down").ok();
    home.run(&up).ok();
    assert_eq!(left(&home), 7, "after down and up");
    home.run("local down").ok();
    // In memory it starts empty.
    home.run("local up -q").ok();
    assert_eq!(left(&home), 10);
}

#[test]
fn a_recorded_endpoint_that_has_ended_is_ignored() {
    let home = Home::new();
    home.run("local up -q").ok();
    let before = home.run("local status -o json").ok().json();
    let pid = i32::try_from(before["pid"].as_i64().unwrap()).unwrap();
    kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
    let address = before["endpoint"].as_str().unwrap().trim_start_matches("http://").to_owned();
    // It is no child of ours to be waited for.
    while TcpStream::connect(&address).is_ok() {
        std::thread::yield_now();
    }
    assert!(home.state_file().is_file());
    for line in ["local status", "local env", "local down"] {
        home.run(line).fails(4, NOT_RUNNING);
    }
    home.run("local up -q").ok();
    let after = home.run("local status -o json").ok().json();
    assert_ne!(after["pid"], before["pid"]);
    home.run("local down").ok();
    // An unreadable file is ignored, too.
    std::fs::write(home.state_file(), "{\"pid\": 1").unwrap();
    home.run("local status").fails(4, NOT_RUNNING);
    home.run("local up -q").ok();
}

/// Another process has the pid of the recorded endpoint, while its port still answers.
#[test]
fn a_process_that_is_not_the_endpoint_is_left_alone() {
    let home = Home::new();
    let up = home.run("local up -o json").ok().json();
    home.run("local status").ok();
    let mut other = Command::new("sleep").arg("600").spawn().unwrap();
    let mut written: Value =
        serde_json::from_str(&std::fs::read_to_string(home.state_file()).unwrap()).unwrap();
    written["pid"] = other.id().into();
    std::fs::write(home.state_file(), written.to_string()).unwrap();
    for line in ["local status", "local env", "local down"] {
        home.run(line).fails(4, NOT_RUNNING);
    }
    assert!(other.try_wait().unwrap().is_none(), "it still runs");
    other.kill().unwrap();
    other.wait().unwrap();
    // With the right pid it is stopped.
    written["pid"] = up["pid"].clone();
    std::fs::write(home.state_file(), written.to_string()).unwrap();
    assert_eq!(home.run("local down -o json").ok().json()["stopped"], up);
}

#[test]
fn a_port_that_is_taken() {
    let home = Home::new();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let up = home.run(&format!("local up --port {port}"));
    let cause = format!("could not listen on port {port}");
    up.fails(1, &["the endpoint did not start", &cause, "leave out --port"]);
    home.run("local status").fails(4, NOT_RUNNING);
    let up = home.run("local up --folder /proc/no/such");
    up.fails(1, &["the endpoint did not start", "could not create /proc/no/such"]);
    assert!(!up.stderr.contains("--port"), "{up:#?}");
    drop(taken);
    let up = home.run(&format!("local up --port {port}")).ok();
    assert_eq!(up.stdout.trim(), format!("http://127.0.0.1:{port}"));
}

#[test]
fn a_program_that_is_missing_or_another() {
    let mut home = Home::new();
    home.program = "/no/such/program".into();
    home.run("local up").fails(4, &["ZAEL_LOCAL names /no/such/program, which does not exist"]);
    home.program = "/bin/false".into();
    home.run("local up").fails(1, &["the endpoint did not start"]);
    // Not a program at all.
    home.program = home.folder.path().join("text");
    std::fs::write(&home.program, "text").unwrap();
    home.run("local up").fails(1, &["could not start", "/text"]);
    home.run("local status").fails(4, NOT_RUNNING);
}

#[test]
fn the_name_of_a_stack_is_the_name_of_the_table() {
    let home = Home::new();
    home.run("local up --name my-app --table other").fails(2, &["--name and --table name two"]);
    home.run("local up --name ab").fails(2, &["\"ab\" is too short for a table"]);
    let up = home.run("local up --name my-app -o json").ok().json();
    assert_eq!(up["table"], "my-app");
    home.run("local up --name my-app").ok();
    home.run("local up --name my-app --table my-app").ok();
    home.run("local up --name your-app").fails(1, &["with table my-app"]);
    for command in ["status", "env", "down"] {
        home.run(&format!("local {command} --name your-app"))
            .fails(4, &["no local endpoint with table your-app is running", "has my-app"]);
    }
    home.run("local status --name my-app").ok();
    home.run("local down --name my-app").ok();
}

#[test]
fn without_cloudformation_the_table_is_shown() {
    let home = Home::new();
    let up = home.run("local up --name my-app -o json").ok().json();
    let endpoint = up["endpoint"].as_str().unwrap();
    let run = |line: &str| {
        home.run(&format!("{line} --name my-app --region us-east-1 --endpoint-url {endpoint}"))
    };
    let none = format!("there is no CloudFormation at {endpoint}");
    let status = run("status").ok();
    for text in [format!("none: {none}").as_str(), "ACTIVE", "up to date"] {
        assert!(status.stdout.contains(text), "{text}: {status:#?}");
    }
    let json = run("status -o json").ok().json();
    assert_eq!((&json["stack"], &json["table"]["status"]), (&Value::Null, &"ACTIVE".into()));
    assert!(run("check").ok().stdout.contains(&none));
    let upgrade = run("upgrade --dry-run").ok();
    assert!(format!("{}{}", upgrade.stdout, upgrade.stderr).contains(&none), "{upgrade:#?}");
    for command in ["list", "delete --yes", "deploy --no-aggregator"] {
        run(command).fails(4, &[&none, "have tables only", "zae-limiter"]);
    }
}

#[test]
fn a_missing_table_is_not_found() {
    let home = Home::new();
    let up = home.run("local up -o json").ok().json();
    let endpoint = up["endpoint"].as_str().unwrap();
    for command in [
        "status",
        "check",
        "upgrade",
        "aggregate --once",
        "acquire key-1 gpt-4 -c rpm:1",
        "available key-1 gpt-4",
        "entity create key-1",
        "entity list --with-custom-limits gpt-4",
        "resource set-defaults gpt-4 -l rpm:1",
        "system get-defaults",
        "namespace list",
        "usage list -e key-1",
        "audit list -e key-1",
        "bench --each 1 --concurrency 1",
        "demo",
    ] {
        let place = format!("--name nowhere --region us-east-1 --endpoint-url {endpoint}");
        home.run(&format!("{command} {place}")).fails(4, &["nowhere"]);
        let json = home.run(&format!("{command} {place} -o json"));
        let error: Value = serde_json::from_str(&json.stderr).unwrap();
        assert_eq!(error["exit_status"], 4, "{command}");
    }
}
