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
