//! Commands against endpoints that do not answer, and places that cannot exist. A listener on this machine plays
//! the endpoint; the time limit of a call is a few milliseconds.

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};

use crate::session::Session;

/// What an endpoint does with a connection.
#[derive(Clone, Copy, Debug)]
enum Endpoint {
    /// Accepts it and never answers.
    Silent,
    /// Answers half a response.
    Half,
    /// Answers byte after byte, without end.
    Dripping,
    /// Closes it at once.
    Closing,
    /// Answers something that is not HTTP.
    Garbage,
    /// Answers with a web page.
    Page,
    /// Forbids every request, as a proxy does: without an error of AWS.
    Forbidding,
    /// Has an empty table, and no other service, as that of `local up`.
    Tables,
}

impl Endpoint {
    /// Starts it, and returns its URL. It ends with the process.
    fn start(self) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                std::thread::spawn(move || self.serve(stream.unwrap()));
            }
        });
        url
    }

    fn serve(self, mut stream: TcpStream) {
        const HEAD: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-length: 1000000000\r\n\r\n";
        if matches!(self, Self::Closing) {
            return;
        }
        if matches!(self, Self::Garbage | Self::Page | Self::Forbidding | Self::Tables) {
            while let Some(request) = read_request(&mut stream) {
                let _ = stream.write_all(self.answer(&request).as_bytes());
            }
            return;
        }
        let mut request = [0; 65_536];
        // Until the client closes the connection, which fails the write or ends the read.
        if matches!(self, Self::Half | Self::Dripping) {
            let _ = stream.read(&mut request);
            let _ = stream.write_all(HEAD);
        }
        if matches!(self, Self::Dripping) {
            while stream.write_all(b" ").is_ok() {}
        }
        while stream.read(&mut request).is_ok_and(|read| read > 0) {}
    }
}

impl Endpoint {
    fn answer(self, request: &str) -> String {
        let (status, body) = match self {
            Self::Garbage => return "these are not the bytes of HTTP\r\n\r\n".to_owned(),
            Self::Page => ("200 OK", "<html><body>Welcome</body></html>"),
            Self::Forbidding => ("403 Forbidden", "denied by the proxy"),
            _ if request.contains("DynamoDB_20120810.DescribeTable") => ("200 OK", TABLE),
            _ if request.contains("DynamoDB_20120810") => ("200 OK", "{}"),
            _ => ("400 Bad Request", r#"{"__type": "UnknownOperationException"}"#),
        };
        format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\n\r\n{body}", body.len())
    }
}

const TABLE: &str = r#"{"Table": {"TableName": "my-app", "TableStatus": "ACTIVE"}}"#;

/// The next request of a connection, as far as its bytes are text.
pub(crate) fn read_request(stream: &mut TcpStream) -> Option<String> {
    let mut request = Vec::new();
    loop {
        let text = String::from_utf8_lossy(&request).to_lowercase();
        if let Some((head, body)) = text.split_once("\r\n\r\n") {
            let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
            if body.len() >= length.map_or(0, |length| length.parse().unwrap()) {
                return Some(String::from_utf8_lossy(&request).into_owned());
            }
        }
        let mut bytes = [0; 4_096];
        match stream.read(&mut bytes) {
            Ok(read) if read > 0 => request.extend_from_slice(&bytes[..read]),
            _ => return None,
        }
    }
}

/// The URL of a port that nothing listens on.
pub(crate) fn closed_port() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    format!("http://{}", listener.local_addr().unwrap())
}

fn session() -> Session {
    let mut session = Session::new();
    session.env.insert("ZAEL_AWS_TIMEOUT".to_owned(), "150ms".to_owned());
    session
}

const STACK_COMMANDS: [&str; 6] =
    ["status", "list", "check", "upgrade", "delete --yes", "deploy --no-aggregator"];

#[test]
fn stack_commands_end_on_an_endpoint_that_does_not_answer() {
    for (endpoint, commands) in [
        (Endpoint::Silent, &STACK_COMMANDS[..]),
        (Endpoint::Half, &["status", "list"]),
        (Endpoint::Dripping, &["status", "list"]),
    ] {
        let url = endpoint.start();
        for command in commands {
            let line = format!("{command} -n my-app --region us-east-1 --endpoint-url {url}");
            let (status, _, err) = session().run_unseen(&line, usize::MAX);
            assert_eq!(status, 3, "{endpoint:?} {command}: {err}");
            let says =
                format!("CloudFormation at {url} did not answer DescribeStacks within 150 ms");
            assert!(err.contains(&says), "{endpoint:?} {command}: {err}");
        }
    }
}

#[test]
fn an_endpoint_that_closes_its_connections_is_unavailable() {
    let url = Endpoint::Closing.start();
    for command in ["status", "list", "deploy --no-aggregator"] {
        let line = format!("{command} -n my-app --region us-east-1 --endpoint-url {url}");
        let (status, _, err) = session().run_unseen(&line, usize::MAX);
        assert_eq!(status, 3, "{command}: {err}");
        assert!(err.contains("CloudFormation") && err.contains(&url), "{command}: {err}");
    }
}

#[test]
fn the_error_is_json_with_json() {
    let url = Endpoint::Silent.start();
    let line = format!("list --region us-east-1 --endpoint-url {url} -o json");
    let (status, out, err) = session().run_unseen(&line, usize::MAX);
    let error: serde_json::Value = serde_json::from_str(&err).unwrap();
    assert_eq!((status, out.as_str(), &error["exit_status"]), (3, "", &3.into()));
}

#[test]
fn the_aggregator_ends_on_an_endpoint_that_does_not_answer() {
    let url = Endpoint::Silent.start();
    let line = format!("aggregate --once --store dynamodb:my-app?region=us-east-1&endpoint={url}");
    let (status, _, err) = session().run_unseen(&line, usize::MAX);
    assert_eq!(status, 3, "{err}");
    assert!(err.contains("could not read the table's streams"), "{err}");
}

#[test]
fn a_terminal_shows_what_a_command_waits_for() {
    let url = Endpoint::Silent.start();
    for (command, says) in [
        ("status", "reading the status of my-app"),
        ("list", "listing the stacks"),
        ("check", "reading the versions of my-app"),
        ("upgrade", "reading the versions of my-app"),
        ("delete --yes", "reading the status of my-app"),
        ("deploy --no-aggregator", "waiting for CloudFormation: stack my-app"),
        ("acquire key-1 gpt-4 -c rpm:1", "waiting for the store…"),
        ("entity show key-1", "waiting for the store…"),
    ] {
        let mut session = session().on_a_terminal("");
        session.impatient = true;
        let line = format!("{command} -n my-app --region us-east-1 --endpoint-url {url}");
        let (status, _, err) = session.run_unseen(&line, usize::MAX);
        assert_eq!(status, 3, "{command}: {err}");
        assert!(err.contains(says), "{command}: {err}");
    }
}

#[test]
fn a_store_that_does_not_answer_before_the_deadline_is_unavailable() {
    for endpoint in [Endpoint::Silent, Endpoint::Half, Endpoint::Dripping] {
        let url = endpoint.start();
        for command in ["acquire key-1 gpt-4 -c rpm:1", "namespace list"] {
            let mut session = session();
            session.impatient = true;
            let line = format!("{command} -n my-app --region us-east-1 --endpoint-url {url}");
            let (status, _, err) = session.run_unseen(&line, usize::MAX);
            assert_eq!(status, 3, "{endpoint:?} {command}: {err}");
            assert!(err.contains("my-app") && err.contains(&url), "{endpoint:?} {command}: {err}");
        }
    }
}

#[test]
fn regions_and_endpoints_are_checked_before_any_call() {
    let mut session = Session::new();
    for line in [
        "deploy -n my-app --region 'not a region'",
        "list --region eu_west_1",
        "status -n my-app --endpoint-url 127.0.0.1:8000",
        "available key-1 gpt-4 -n my-app --endpoint-url http://:8000",
        "available key-1 gpt-4 --store 'dynamodb:my-app?region=not a region'",
        "list --store 'dynamodb:my-app?endpoint=http://host:port' -o json",
    ] {
        assert_eq!(session.run(line), 2, "{line}");
    }
    for (name, value) in [
        ("AWS_REGION", "not a region"),
        ("AWS_DEFAULT_REGION", "eu west"),
        ("AWS_ENDPOINT_URL", "localhost"),
        ("AWS_ENDPOINT_URL_DYNAMODB", "http://"),
        ("ZAEL_AWS_TIMEOUT", "soon"),
        ("ZAEL_AWS_TIMEOUT", "0s"),
    ] {
        session.env.insert(name.to_owned(), value.to_owned());
        for line in ["list", "status -n my-app"] {
            assert_eq!(session.run(line), 2, "{name} {line}");
        }
        if !name.starts_with("ZAEL") {
            assert_eq!(session.run("available key-1 gpt-4 -n my-app"), 2, "{name}");
        }
        session.env.remove(name);
    }
    insta::assert_snapshot!(session.transcript);
}

/// Runs the program with these variables alone: the SDK reads those of the process.
fn program(line: &str, env: &[(&str, &str)]) -> (Option<i32>, String) {
    let folder = tempfile::tempdir().unwrap();
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_zae-limiter"))
        .args(line.split(' '))
        .env_clear()
        .env("HOME", folder.path())
        .env("AWS_EC2_METADATA_DISABLED", "true")
        .env("AWS_ACCESS_KEY_ID", "x")
        .env("AWS_SECRET_ACCESS_KEY", "y")
        .envs(env.iter().copied())
        .output()
        .unwrap();
    (output.status.code(), String::from_utf8(output.stderr).unwrap())
}

#[test]
fn aggregate_checks_the_region_before_any_call() {
    let region = [("AWS_REGION", "not a region")];
    let (status, stderr) = program("aggregate --once -n my-app", &region);
    assert_eq!(status, Some(2), "{stderr}");
    assert!(stderr.contains("AWS_REGION"), "{stderr}");
}

#[test]
fn every_endpoint_is_checked_before_any_call() {
    for (name, lines) in [
        ("AWS_ENDPOINT_URL", &["aggregate --once -n my-app", "list"][..]),
        ("AWS_ENDPOINT_URL_DYNAMODB", &["aggregate --once -n my-app", "list"]),
        ("AWS_ENDPOINT_URL_DYNAMODB_STREAMS", &["aggregate --once -n my-app"]),
        ("AWS_ENDPOINT_URL_CLOUDFORMATION", &["list", "status -n my-app"]),
        ("AWS_ENDPOINT_URL_CLOUDWATCH", &["status -n my-app"]),
        ("AWS_ENDPOINT_URL_S3", &["deploy -n my-app"]),
        ("AWS_ENDPOINT_URL_SQS", &["status -n my-app"]),
    ] {
        for (line, value) in lines.iter().flat_map(|line| [(line, "foo"), (line, "")]) {
            let mut session = session();
            session.env.insert(name.to_owned(), value.to_owned());
            let (status, _, stderr) = session.run_unseen(line, usize::MAX);
            assert_eq!(status, 2, "{name} {line}: {stderr}");
            assert!(stderr.contains(&format!("{value:?} for {name}:")), "{line}: {stderr}");
        }
    }
}

#[test]
fn an_empty_region_is_checked_before_any_call() {
    for line in ["list", "deploy -n my-app --no-aggregator", "aggregate --once -n my-app"] {
        for env in [&[("AWS_REGION", "")][..], &[("AWS_DEFAULT_REGION", "")], &[]] {
            let (status, stderr) = program(line, env);
            assert!(!stderr.contains("failed to construct request"), "{line}: {stderr}");
            assert!(stderr.contains("no AWS region is set"), "{line}: {stderr}");
            assert_eq!(status, Some(1), "{line}: {stderr}");
        }
    }
}

/// The SDK panics on these.
#[test]
fn an_empty_endpoint_is_wrong_usage() {
    for (name, line) in [
        ("AWS_ENDPOINT_URL", "list"),
        ("AWS_ENDPOINT_URL_DYNAMODB", "acquire key-1 gpt-4 -c rpm:1 -n my-app"),
        ("AWS_ENDPOINT_URL_DYNAMODB_STREAMS", "aggregate --once -n my-app"),
    ] {
        let (status, stderr) = program(line, &[("AWS_REGION", "us-east-1"), (name, "")]);
        assert_eq!(status, Some(2), "{line}: {stderr}");
        assert!(stderr.contains(&format!("unset {name}")), "{line}: {stderr}");
    }
}

#[test]
fn an_empty_region_hides_no_other() {
    let url = closed_port();
    let env = [
        ("AWS_REGION", ""),
        ("AWS_DEFAULT_REGION", "eu-west-1"),
        ("AWS_ENDPOINT_URL_CLOUDFORMATION", &url),
    ];
    let (status, stderr) = program("list", &env);
    assert_eq!(status, Some(3), "{stderr}");
    assert!(stderr.contains(&format!("CloudFormation cannot be reached at {url}")), "{stderr}");
}

#[test]
fn aggregate_names_the_call_and_the_endpoint_that_does_not_answer() {
    let url = Endpoint::Silent.start();
    let line = format!("aggregate --once -n my-app --region us-east-1 --endpoint-url {url}");
    let (status, _, stderr) = session().run_unseen(&line, usize::MAX);
    assert_eq!(status, 3, "{stderr}");
    let says = format!("DynamoDB Streams at {url} did not answer ListStreams within 150 ms");
    assert!(stderr.contains(&says), "{stderr}");
    assert!(!stderr.contains("TimeoutError {"), "{stderr}");
}

#[test]
fn no_error_shows_the_insides_of_the_sdk() {
    let mut urls = vec![("closed", closed_port())];
    for (name, endpoint) in [
        ("silent", Endpoint::Silent),
        ("closing", Endpoint::Closing),
        ("garbage", Endpoint::Garbage),
        ("page", Endpoint::Page),
    ] {
        urls.push((name, endpoint.start()));
    }
    for (name, url) in urls {
        for command in ["aggregate --once", "status", "list", "acquire key-1 gpt-4 -c rpm:1"] {
            let mut session = session();
            session.impatient = command.starts_with("acquire");
            let line = format!("{command} -n my-app --region us-east-1 --endpoint-url {url}");
            let (status, _, stderr) = session.run_unseen(&line, usize::MAX);
            assert_eq!(status, 3, "{name} {command}: {stderr}");
            assert!(stderr.contains(&url), "{name} {command}: {stderr}");
            for inside in [" { ", "Some(", "Error(", "interceptor"] {
                assert!(!stderr.contains(inside), "{name} {command}: {stderr}");
            }
        }
    }
}

#[test]
fn an_endpoint_that_forbids_everything_does_not_look_like_aws() {
    let url = Endpoint::Forbidding.start();
    for (command, service) in [
        ("acquire key-1 gpt-4 -c rpm:1", "DynamoDB"),
        ("namespace list", "DynamoDB"),
        ("aggregate --once", "DynamoDB"),
        ("status", "CloudFormation"),
        ("check", "CloudFormation"),
        ("list", "CloudFormation"),
        ("deploy --no-aggregator", "CloudFormation"),
        ("delete --yes", "CloudFormation"),
    ] {
        let line = format!("{command} -n my-app --region us-east-1 --endpoint-url {url}");
        let (status, _, stderr) = session().run_unseen(&line, usize::MAX);
        assert_eq!(status, 1, "{command}: {stderr}");
        assert!(stderr.contains("HTTP status 403"), "{command}: {stderr}");
        assert!(stderr.contains(&url), "{command}: {stderr}");
        let says = format!("this does not look like {service}");
        assert!(stderr.contains(&says), "{command}: {stderr}");
    }
}

#[test]
fn commands_about_a_table_say_that_there_is_no_cloudformation() {
    let url = Endpoint::Tables.start();
    for command in ["status", "check", "upgrade", "upgrade --dry-run"] {
        let line = format!("{command} -n my-app --region us-east-1 --endpoint-url {url}");
        // It answers, on a busy machine perhaps late.
        let (_, stdout, stderr) = Session::new().run_unseen(&line, usize::MAX);
        let says = format!("there is no CloudFormation at {url}");
        assert!(format!("{stdout}{stderr}").contains(&says), "{command}: {stdout}{stderr}");
        assert!(!stderr.contains("stack my-app was not changed"), "{command}: {stderr}");
    }
}
