//! Runs the program against an AWS emulator on this machine.

use std::io::{BufRead as _, BufReader};
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

use aws_sdk_dynamodb::Client;
use aws_sdk_dynamodb::config::retry::RetryConfig;
use aws_sdk_dynamodb::config::timeout::TimeoutConfig;
use aws_sdk_dynamodb::config::{BehaviorVersion, Credentials, Region};
use serde_json::Value;

/// An emulator. It ends when its stdin closes, with the test.
pub(crate) struct Server {
    _process: Child,
    python: PathBuf,
    endpoint: String,
}

fn tests_of_infra() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../zae-limiter-infra/tests"))
}

/// A virtual environment with these packages.
fn venv(packages: &[&str]) -> PathBuf {
    let made = Command::new(tests_of_infra().join("venv")).args(packages).output().unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    PathBuf::from(String::from_utf8(made.stdout).unwrap().trim())
}

impl Server {
    fn start(script: &str, packages: &[&str]) -> Self {
        let python = venv(packages).join("bin/python");
        let port = {
            let any = TcpListener::bind("127.0.0.1:0").unwrap();
            any.local_addr().unwrap().port()
        };
        let mut process = Command::new(&python)
            .arg(tests_of_infra().join(script))
            .arg(port.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut said = BufReader::new(process.stderr.take().unwrap()).lines();
        let ready = said.by_ref().map_while(Result::ok).any(|line| line.contains("Running on"));
        assert!(ready, "{script} does not start");
        // Drains the pipe, so that the emulator does not block.
        std::thread::spawn(move || said.for_each(drop));
        Self { _process: process, python, endpoint: format!("http://127.0.0.1:{port}") }
    }

    /// One that enforces permissions on tables.
    pub(crate) fn with_iam() -> Self {
        Self::start("iam.py", &["moto[server,all]==5.2.5", "boto3"])
    }

    /// Its address.
    pub(crate) fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// Runs the program with these credentials.
    pub(crate) fn run(&self, keys: (&str, &str), words: &str) -> Ran {
        let home = tempfile::tempdir().unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_zae-limiter"));
        with_account(&mut command, keys)
            .env("HOME", home.path())
            .args(["--region", "us-east-1", "--endpoint-url", &self.endpoint])
            .args(words.split_whitespace());
        Ran::of(command.output().unwrap())
    }

    /// Runs a line of Python with a client of each service.
    pub(crate) fn python(&self, line: &str) -> String {
        let script = format!(
            "import boto3, json\n\
             make = lambda name: boto3.client(name, endpoint_url={:?}, region_name='us-east-1')\n\
             {line}",
            self.endpoint
        );
        let mut command = Command::new(&self.python);
        let output = with_account(&mut command, ROOT).args(["-c", &script]).output().unwrap();
        let ran = Ran::of(output);
        assert_eq!(ran.code, 0, "{}", ran.err);
        ran.out
    }
}

/// Credentials of the administrator.
pub(crate) const ROOT: (&str, &str) = ("test", "test");

fn server() -> &'static Server {
    static SERVER: OnceLock<Server> = OnceLock::new();
    let packages = ["ministack==1.5.33", "boto3", "cbor2", "cryptography"];
    SERVER.get_or_init(|| Server::start("aws.py", &packages))
}

/// Its address.
pub(crate) fn endpoint() -> &'static str {
    &server().endpoint
}

/// A client of an emulator's tables with these credentials.
pub(crate) fn client(endpoint: &str, keys: (&str, &str)) -> Client {
    let config = aws_sdk_dynamodb::Config::builder()
        .behavior_version(BehaviorVersion::latest())
        .region(Region::new("us-east-1"))
        .credentials_provider(Credentials::new(keys.0, keys.1, None, None, "test"))
        .endpoint_url(endpoint)
        .retry_config(RetryConfig::disabled())
        // The emulators take seconds for a call on a busy machine. The store keeps the time limits of a client.
        .timeout_config(TimeoutConfig::builder().read_timeout(Duration::from_secs(60)).build())
        .http_client(aws_smithy_http_client::Builder::new().build_http())
        .build();
    Client::from_conf(config)
}

/// The result of a run of the program.
pub(crate) struct Ran {
    pub(crate) code: i32,
    pub(crate) out: String,
    pub(crate) err: String,
}

impl Ran {
    fn of(output: Output) -> Self {
        let text = |bytes| String::from_utf8(bytes).unwrap();
        Self {
            code: output.status.code().unwrap(),
            out: text(output.stdout),
            err: text(output.stderr),
        }
    }

    /// The document it printed.
    #[track_caller]
    pub(crate) fn json(&self) -> Value {
        assert_eq!(self.code, 0, "{}", self.err);
        serde_json::from_str(&self.out).unwrap()
    }
}

fn with_account<'a>(command: &'a mut Command, keys: (&str, &str)) -> &'a mut Command {
    command
        .env_clear()
        .env("AWS_ACCESS_KEY_ID", keys.0)
        .env("AWS_SECRET_ACCESS_KEY", keys.1)
        .env("AWS_EC2_METADATA_DISABLED", "true")
        .stdin(Stdio::null())
}

/// Runs the program in the account that all tests share.
pub(crate) fn run(words: &str) -> Ran {
    server().run(ROOT, words)
}

/// Runs a line of Python there.
pub(crate) fn python(line: &str) -> String {
    server().python(line)
}

/// Runs requests with a release of the Python client, in the namespace `default` of a table. `requests`
/// are pairs of an operation and its arguments.
pub(crate) fn python_client(release: &str, table: &str, requests: &[(&str, Value)]) -> Vec<Value> {
    use std::io::Write as _;
    let interop = concat!(env!("CARGO_MANIFEST_DIR"), "/../zae-limiter-dynamodb/tests/interop");
    let python = venv(&[&format!("zae-limiter=={release}")]).join("bin/python");
    let mut child = Command::new(python)
        .args([&format!("{interop}/client.py"), endpoint()])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = child.stdin.take().unwrap();
    for (op, arguments) in requests {
        let mut request = arguments.clone();
        request["op"] = Value::from(*op);
        request["table"] = Value::from(table);
        request["namespace"] = Value::from("default");
        writeln!(input, "{request}").unwrap();
    }
    drop(input);
    let output = child.wait_with_output().unwrap();
    let lines = String::from_utf8(output.stdout).unwrap();
    let answers: Vec<Value> =
        lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(answers.len(), requests.len(), "{release}: {lines}");
    answers
}

/// Records usage with a release of the Python aggregator, or reads it with the client: see `usage.py`.
pub(crate) fn python_usage(release: &str, table: &str, what: &str) -> Value {
    let python = venv(&[&format!("zae-limiter=={release}")]).join("bin/python");
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/stack/usage.py");
    let output = Command::new(python).args([script, endpoint(), table, what]).output().unwrap();
    let ran = Ran::of(output);
    assert_eq!(ran.code, 0, "{release}: {}", ran.err);
    serde_json::from_str(&ran.out).unwrap()
}
