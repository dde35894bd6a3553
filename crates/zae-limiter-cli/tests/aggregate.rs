//! The aggregator during a load, on the DynamoDB endpoint of `local/`. Afterwards usage equals what
//! was admitted, however often the aggregator was killed.
#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a test says what is wrong by panicking")]

#[path = "endpoint/mod.rs"]
mod endpoint;

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Output, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value as Json;

/// A table, and the program.
struct Play {
    store: String,
    folder: tempfile::TempDir,
}

impl Play {
    async fn new(table: &str) -> Self {
        endpoint::table(table).await;
        let store = format!("dynamodb:{table}?region=us-east-1&endpoint={}", endpoint::address());
        Self { store, folder: tempfile::tempdir().unwrap() }
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_zae-limiter"));
        command
            .env_clear()
            .env("HOME", self.folder.path())
            .env("AWS_ACCESS_KEY_ID", "AKIAIOSFODNN7EXAMPLE")
            .env("AWS_SECRET_ACCESS_KEY", "local")
            .args(["--store", &self.store])
            .args(args)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    fn run(&self, args: &[&str]) -> Output {
        let output = self.command(args).output().unwrap();
        assert!(output.status.success(), "{args:?}: {output:?}");
        output
    }

    fn json(&self, args: &[&str]) -> Json {
        serde_json::from_slice(&self.run(&[args, &["-o", "json"]].concat()).stdout).unwrap()
    }

    /// Starts a load of 16 callers with `each` calls, on two limits.
    fn load(&self, each: u32, rpm: &str) -> Child {
        let each = each.to_string();
        let args = ["bench", "--entity", "key-1", "--resource", "gpt-4", "--concurrency", "16"];
        let limits = ["-l", rpm, "-l", "tpm:1000000", "-c", "rpm:1", "-c", "tpm:7"];
        let rest = ["--each", &each, "-o", "json"];
        self.command(&[&args[..], &limits, &rest].concat()).spawn().unwrap()
    }

    fn daemon(&self) -> Daemon {
        let args = ["aggregate", "--metrics", "127.0.0.1:0", "--takeover-after", "1s"];
        let mut child = self.command(&args).spawn().unwrap();
        let mut stderr = BufReader::new(child.stderr.take().unwrap());
        let mut line = String::new();
        while !line.contains("metrics are at http://") {
            line.clear();
            assert!(stderr.read_line(&mut line).unwrap() > 0, "it ended");
        }
        let address = line.split("http://").nth(1).unwrap().split('/').next().unwrap();
        Daemon { address: address.to_owned(), child, _stderr: stderr }
    }

    fn summary(&self, window: &str) -> Json {
        self.json(&["usage", "summary", "-e", "key-1", "-r", "gpt-4", "-w", window])
    }
}

struct Daemon {
    address: String,
    child: Child,
    // Keeps the pipe open, so that writes to stderr succeed.
    _stderr: BufReader<std::process::ChildStderr>,
}

impl Daemon {
    fn figures(&self) -> String {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        write!(stream, "GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n").unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        text
    }

    fn records(&self) -> u64 {
        let name = "zae_limiter_aggregator_records_total ";
        let text = self.figures();
        text.lines().find_map(|line| line.strip_prefix(name)).unwrap().parse().unwrap()
    }

    fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(i32::try_from(self.child.id()).unwrap()).unwrap();
        kill_process(pid, signal).unwrap();
    }
}

fn admitted(child: Child) -> i64 {
    let output = child.wait_with_output().unwrap();
    let report: Json = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: {output:?}"));
    assert_eq!(report["over_admitted"], 0, "{report}");
    report["admitted"].as_i64().unwrap()
}

fn check(play: &Play, admitted: i64) {
    for window in ["hourly", "daily", "monthly"] {
        let summary = play.summary(window);
        assert_eq!(summary["consumed"]["rpm"].as_i64(), Some(admitted), "{window}: {summary}");
        assert_eq!(summary["consumed"]["tpm"].as_i64(), Some(admitted * 7), "{window}: {summary}");
    }
}

#[tokio::test]
async fn usage_is_what_the_load_was_admitted() {
    let play = Play::new("aggregate-usage").await;
    let mut daemon = play.daemon();
    // Most of it is refused.
    let admitted = admitted(play.load(120, "rpm:500"));
    assert!((500..1_900).contains(&admitted), "{admitted}");
    // After this one stops, another one processes the rest.
    daemon.signal(Signal::TERM);
    assert!(daemon.child.wait().unwrap().success());
    let figures = play.json(&["aggregate", "--once", "--takeover-after", "1s"]);
    assert_eq!(figures["failed_records"], 0, "{figures}");
    check(&play, admitted);
    let by_resource = play.json(&["usage", "list", "-r", "gpt-4", "-w", "daily"]);
    let days: Vec<&Json> = by_resource.as_array().unwrap().iter().collect();
    let rpm: i64 = days.iter().map(|day| day["consumed"]["rpm"].as_i64().unwrap()).sum();
    assert_eq!(rpm, admitted, "{by_resource}");
    // There is nothing left to do.
    assert_eq!(play.json(&["aggregate", "--once"])["snapshots_updated"], 0);
    let chart = play.run(&["usage", "list", "-e", "key-1", "--plot"]);
    assert!(String::from_utf8_lossy(&chart.stdout).contains("rpm"));
    play.run(&["entity", "set-limits", "key-1", "-r", "gpt-4", "-l", "rpm:100"]);
    let audit = play.json(&["audit", "list", "-e", "key-1"]);
    assert_eq!(audit[0]["action"], "limits_set", "{audit}");
}

#[tokio::test]
async fn a_repeatedly_killed_aggregator_counts_every_change_once() {
    let play = Play::new("aggregate-killed").await;
    let mut sum = 0;
    // After a number of records: usually in the middle of a batch.
    for records in [1, 40, 7, 90, 3] {
        let load = play.load(40, "rpm:100000");
        let mut daemon = play.daemon();
        while daemon.records() < records {}
        daemon.signal(Signal::KILL);
        daemon.child.wait().unwrap();
        sum += admitted(load);
    }
    play.run(&["aggregate", "--once", "--takeover-after", "1s"]);
    check(&play, sum);
}

#[tokio::test]
async fn usage_by_month_says_what_the_table_does_not_record() {
    let play = Play::new("aggregate-months").await;
    let take = || play.run(&["acquire", "key-1", "gpt-4", "-c", "rpm:1", "-l", "rpm:100"]);
    let months = |which: &[&str]| {
        let args = [&["usage"], which, &["-e", "key-1", "-w", "monthly"]].concat();
        play.command(&args).output().unwrap()
    };
    let err = |output: &Output| String::from_utf8(output.stderr.clone()).unwrap();
    // Nothing is recorded at all: that is no error.
    assert_eq!(months(&["list"]).status.code(), Some(0));
    take();
    play.run(&["aggregate", "--once", "--windows", "hourly,daily"]);
    for which in ["list", "summary"] {
        let missing = months(&[which]);
        assert_eq!(missing.status.code(), Some(4), "{missing:?}");
        let says = "this table records hourly and daily usage only; months are not recorded";
        assert!(err(&missing).contains(says), "{missing:?}");
        assert!(missing.stdout.is_empty(), "{missing:?}");
    }
    // An aggregator with other settings records the rest of the month.
    take();
    take();
    play.run(&["aggregate", "--once"]);
    for which in ["list", "summary"] {
        let part = months(&[which]);
        assert_eq!(part.status.code(), Some(0), "{part:?}");
        assert!(err(&part).contains("has 2 of 3 events"), "{part:?}");
    }
    let summary: Json = serde_json::from_slice(&months(&["summary", "-o", "json"]).stdout).unwrap();
    assert_eq!(summary["incomplete"][0]["recorded_events"], 2, "{summary}");
    let warned: Json = serde_json::from_slice(&months(&["list", "-o", "json"]).stderr).unwrap();
    assert_eq!(warned["incomplete"][0]["known_events"], 3, "{warned}");
    // Days are complete.
    let days = play.summary("daily");
    assert_eq!((&days["events"], days.get("incomplete")), (&3.into(), None));
}

/// A CloudFormation with one stack, or one that denies every call.
fn cloudformation(parameters: Option<&[(&str, &str)]>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let parameter = |(name, value): &(&str, &str)| {
        format!(
            "<member><ParameterKey>{name}</ParameterKey><ParameterValue>{value}</ParameterValue></member>"
        )
    };
    let (status, body) = match parameters {
        Some(all) => {
            let all: String = all.iter().map(parameter).collect();
            let stack = "<StackName>x</StackName><CreationTime>2026-11-01T00:00:00Z</CreationTime>\
                         <StackStatus>CREATE_COMPLETE</StackStatus>";
            let stacks =
                format!("<Stacks><member>{stack}<Parameters>{all}</Parameters></member></Stacks>");
            let result = format!("<DescribeStacksResult>{stacks}</DescribeStacksResult>");
            ("200 OK", format!("<DescribeStacksResponse>{result}</DescribeStacksResponse>"))
        }
        None => {
            let error = "<Error><Code>AccessDenied</Code><Message>not yours</Message></Error>";
            ("403 Forbidden", format!("<ErrorResponse>{error}</ErrorResponse>"))
        }
    };
    let answer = format!(
        "HTTP/1.1 {status}\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let _ = stream.read(&mut [0; 65_536]).unwrap();
            stream.write_all(answer.as_bytes()).unwrap();
        }
    });
    url
}

#[tokio::test]
async fn a_run_beside_a_deployed_function_records_the_same_windows() {
    let play = Play::new("aggregate-beside").await;
    play.run(&["acquire", "key-1", "gpt-4", "-c", "rpm:1", "-l", "rpm:100"]);
    // The stack is in one place, the table in another.
    let aggregate = |cloudformation: &str, windows: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_zae-limiter"));
        command.env_clear().env("HOME", play.folder.path());
        for (name, value) in [
            ("AWS_ACCESS_KEY_ID", "AKIAIOSFODNN7EXAMPLE"),
            ("AWS_SECRET_ACCESS_KEY", "local"),
            ("AWS_REGION", "us-east-1"),
            ("AWS_ENDPOINT_URL_DYNAMODB", endpoint::address()),
            ("AWS_ENDPOINT_URL_DYNAMODB_STREAMS", endpoint::address()),
            ("AWS_ENDPOINT_URL_CLOUDFORMATION", cloudformation),
        ] {
            command.env(name, value);
        }
        let args = ["aggregate", "--once", "-n", "aggregate-beside"];
        let output = command.args(args).args(windows).output().unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    // It does not guess.
    let (status, err) = aggregate(&cloudformation(None), &[]);
    assert_eq!(status, Some(1), "{err}");
    assert!(err.contains("no permission for CloudFormation: not yours"), "{err}");
    assert!(err.contains("--windows hourly,daily"), "{err}");
    let windows = [("SnapshotWindows", "hourly,daily"), ("UsageRetentionDays", "30")];
    let (status, err) = aggregate(&cloudformation(Some(&windows)), &[]);
    assert_eq!(status, Some(0), "{err}");
    assert!(err.contains("recording hourly and daily usage, as the deployed function"), "{err}");
    assert_eq!(play.summary("daily")["events"], 1);
    let args = ["usage", "summary", "-e", "key-1", "-w", "monthly"];
    let months = play.command(&args).output().unwrap();
    assert_eq!(months.status.code(), Some(4), "{months:?}");
    // The user decides, also without CloudFormation. A stack without a function decides nothing.
    play.run(&["acquire", "key-1", "gpt-4", "-c", "rpm:1", "-l", "rpm:100"]);
    let (status, err) = aggregate(&cloudformation(None), &["--windows", "daily"]);
    assert_eq!(status, Some(0), "{err}");
    assert_eq!(play.summary("daily")["events"], 2);
    play.run(&["acquire", "key-1", "gpt-4", "-c", "rpm:1", "-l", "rpm:100"]);
    let without = [("SnapshotWindows", "hourly,daily"), ("EnableAggregator", "false")];
    let (status, err) = aggregate(&cloudformation(Some(&without)), &[]);
    assert_eq!(status, Some(0), "{err}");
    let months = play.command(&args).output().unwrap();
    assert_eq!(months.status.code(), Some(0), "{months:?}");
}
