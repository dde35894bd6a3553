//! The program as Lambda starts it: against a Runtime API on this machine, with events as files, on
//! the DynamoDB endpoint of `local/`.
#![allow(clippy::unwrap_used, reason = "a test says what is wrong by panicking")]

#[path = "../endpoint/mod.rs"]
mod endpoint;
mod http;
mod stream;

use std::io::Read as _;
use std::process::{Child, Command, Stdio};

use http::{Http, Request};
use serde_json::Value as Json;
use zae_limiter::dynamodb::aws::AwsTable;
use zae_limiter_schema::{Consistency, Item, ItemKey, Table as _, Value};

/// A running function and its table.
struct Function {
    table: Option<AwsTable>,
    api: Http,
    child: Child,
}

impl Drop for Function {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn program(api: &Http, variables: &[(&str, &str)]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_zae-limiter"));
    command
        .env_clear()
        .env("AWS_LAMBDA_RUNTIME_API", api.address())
        .env("AWS_LAMBDA_FUNCTION_NAME", "aggregator")
        .env("AWS_REGION", "us-east-1")
        .env("AWS_ACCESS_KEY_ID", "AKIAIOSFODNN7EXAMPLE")
        .env("AWS_SECRET_ACCESS_KEY", "local")
        .env("AWS_ENDPOINT_URL", endpoint::address())
        .envs(variables.iter().copied())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

impl Function {
    async fn start(name: &str, variables: &[(&str, &str)]) -> Self {
        let table = Some(endpoint::table(name).await);
        let api = Http::listen();
        let child = program(&api, variables).env("TABLE_NAME", name).spawn().unwrap();
        Self { table, api, child }
    }

    /// Invokes the function with an event. Returns whether it failed, and its answer.
    fn invoke(&self, event: &str) -> (bool, Json) {
        let next = self.api.next();
        assert_eq!(next.line, "GET /2018-06-01/runtime/invocation/next");
        next.answer("200 OK", &[("Lambda-Runtime-Aws-Request-Id", "request-1")], event);
        let posted = self.api.next();
        let failed = match posted.line.as_str() {
            "POST /2018-06-01/runtime/invocation/request-1/response" => false,
            "POST /2018-06-01/runtime/invocation/request-1/error" => true,
            other => panic!("{other}"),
        };
        let answer = serde_json::from_slice(&posted.body).unwrap();
        posted.answer("202 Accepted", &[], r#"{"status":"OK"}"#);
        (failed, answer)
    }

    fn answer(&self, event: &str) -> Json {
        let (failed, answer) = self.invoke(event);
        assert!(!failed, "{answer}");
        answer
    }

    async fn usage(&self, label: &str) -> Item {
        let key = ItemKey::new("abcdefghijk/ENTITY#key-1", format!("#USAGE#gpt-4#{label}"));
        let read = self.table.as_ref().unwrap().read(&[key], Consistency::Strong).await.unwrap();
        read.items.into_iter().next().unwrap_or_default()
    }

    /// What it has written to its log.
    fn log(mut self) -> Vec<Json> {
        let _ = self.child.kill();
        let mut text = String::new();
        self.child.stdout.take().unwrap().read_to_string(&mut text).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }
}

fn number(item: &Item, name: &str) -> i64 {
    item.get(name).and_then(Value::as_i64).unwrap_or_default()
}

fn failures(answer: &Json) -> Vec<&str> {
    let failures = answer["batchItemFailures"].as_array().unwrap();
    failures.iter().map(|failure| failure["itemIdentifier"].as_str().unwrap()).collect()
}

#[tokio::test]
async fn changes_of_buckets_are_booked() {
    let function = Function::start("lambda-usage", &[("SNAPSHOT_TTL_DAYS", "7")]).await;
    let answer = function.answer(include_str!("events/insert.json"));
    insta::assert_json_snapshot!(answer);
    let answer = function.answer(include_str!("events/modify.json"));
    assert_eq!(answer["body"]["snapshots_updated"], 3);
    // The same event again, as after a lost answer.
    let answer = function.answer(include_str!("events/modify.json"));
    assert_eq!((&answer["body"]["snapshots_updated"], failures(&answer)), (&0.into(), vec![]));
    for label in ["2026-11-15T14:00:00Z", "2026-11-15", "2026-11"] {
        let usage = function.usage(label).await;
        assert_eq!((number(&usage, "rpm"), number(&usage, "tpm")), (2, 700), "{label}");
        assert_eq!(number(&usage, "total_events"), 3, "{label}");
    }
    let hour = function.usage("2026-11-15T14:00:00Z").await;
    assert_eq!(number(&hour, "ttl"), 1_794_751_200 + 3_600 + 7 * 86_400);
    let log = function.log();
    let figures = &log[0];
    assert_eq!((&figures["level"], &figures["RecordsProcessed"]), (&"INFO".into(), &1.into()));
    assert_eq!(figures["_aws"]["CloudWatchMetrics"][0]["Namespace"], "ZaeLimiter/Aggregator");
}

#[tokio::test]
async fn unrelated_changes_are_ignored() {
    let function = Function::start("lambda-others", &[]).await;
    let answer = function.answer(include_str!("events/others.json"));
    assert_eq!((&answer["body"]["processed"], failures(&answer)), (&3.into(), vec![]));
    assert_eq!(function.answer("{}")["body"]["processed"], 0);
    // Without an archive nothing is kept, and nothing fails.
    let answer = function.answer(include_str!("events/expired.json"));
    assert_eq!((&answer["body"]["events_archived"], failures(&answer)), (&0.into(), vec![]));
    let (failed, answer) = function.invoke("no event");
    assert!(failed && answer["errorMessage"].as_str().unwrap().starts_with("no stream event"));
    assert!(!function.invoke(include_str!("events/insert.json")).0);
}

#[tokio::test]
async fn bad_records_are_reported_as_failures_and_do_not_block_others() {
    let function = Function::start("lambda-malformed", &[("SNAPSHOT_WINDOWS", "monthly")]).await;
    let answer = function.answer(include_str!("events/malformed.json"));
    let numbers: Vec<String> = (10..14).map(|n| format!("1000000000000000000{n}")).collect();
    assert_eq!(failures(&answer), numbers);
    assert_eq!(answer["body"]["errors"].as_array().unwrap().len(), 5, "{answer}");
    let usage = function.usage("2026-11").await;
    assert_eq!(number(&usage, "rpm"), 4);
    let answer = function.answer(include_str!("events/malformed.json"));
    assert_eq!(failures(&answer), numbers);
    assert_eq!(number(&function.usage("2026-11").await, "rpm"), 4);
}

#[test]
fn without_a_table_its_records_are_reported_as_failures() {
    let api = Http::listen();
    let child = program(&api, &[("TABLE_NAME", "nowhere")]).spawn().unwrap();
    let function = Function { api, child, table: None };
    let answer = function.answer(include_str!("events/modify.json"));
    assert_eq!(failures(&answer), ["100000000000000000002", "100000000000000000003"]);
}

#[tokio::test]
async fn expired_audit_events_go_to_the_bucket() {
    let s3 = Http::listen();
    let endpoint = format!("http://{}", s3.address());
    let variables = [
        ("ENABLE_ARCHIVAL", "true"),
        ("ARCHIVE_BUCKET_NAME", "my-audit"),
        ("AWS_ENDPOINT_URL_S3", &endpoint),
    ];
    let function = Function::start("lambda-archive", &variables).await;
    let bucket = std::thread::spawn(move || {
        let put = s3.next();
        let (line, body) = (put.line.clone(), put.body.clone());
        put.answer("200 OK", &[], "");
        (line, body)
    });
    let answer = function.answer(include_str!("events/expired.json"));
    assert_eq!((&answer["body"]["events_archived"], failures(&answer)), (&1.into(), vec![]));
    let (line, body) = bucket.join().unwrap();
    let id = "01JCQ4Z8000000000000000000";
    let key = format!("audit/year%3D2026/month%3D08/day%3D15/{id}-");
    assert!(line.starts_with(&format!("PUT /my-audit/{key}")), "{line}");
    assert!(line.ends_with(".jsonl.gz?x-id=PutObject"), "{line}");
    let mut text = String::new();
    flate2::read::GzDecoder::new(&*body).read_to_string(&mut text).unwrap();
    insta::assert_snapshot!(text);
}

#[test]
fn wrong_settings_are_reported_to_lambda() {
    for (variables, wanted) in [
        (&[][..], "TABLE_NAME is not set"),
        (&[("TABLE_NAME", "t"), ("SNAPSHOT_WINDOWS", "weekly")], "SNAPSHOT_WINDOWS"),
        (&[("TABLE_NAME", "t"), ("ENABLE_ARCHIVAL", "true")], "ARCHIVE_BUCKET_NAME is not set"),
    ] {
        let api = Http::listen();
        let mut child = program(&api, variables).spawn().unwrap();
        let posted: Request = api.next();
        assert_eq!(posted.line, "POST /2018-06-01/runtime/init/error");
        let error: Json = serde_json::from_slice(&posted.body).unwrap();
        assert!(error["errorMessage"].as_str().unwrap().contains(wanted), "{error}");
        posted.answer("202 Accepted", &[], "");
        assert!(!child.wait().unwrap().success());
    }
}

/// Takes three tokens, and books them with the function, the daemon or both. Returns the booked tokens.
async fn booked_by(name: &str, order: &[&str]) -> Vec<i64> {
    let function = Function::start(name, &[("SNAPSHOT_WINDOWS", "daily")]).await;
    let run = |words: &str| {
        let store = format!("dynamodb:{name}?region=us-east-1&endpoint={}", endpoint::address());
        let mut command = Command::new(env!("CARGO_BIN_EXE_zae-limiter"));
        let command = command.env_clear().args(["--store", &store]).args(words.split(' '));
        let output = command.output().unwrap();
        assert!(output.status.success(), "{words}: {output:?}");
        output.stdout
    };
    for _ in 0..3 {
        run("acquire key-1 gpt-4 -c rpm:1 -l rpm:100 -q");
    }
    let mut booked = Vec::new();
    for who in order {
        match *who {
            "function" => {
                let event = stream::event(endpoint::address(), name).await;
                assert_eq!(failures(&function.answer(&event)), Vec::<&str>::new());
            }
            _ => drop(run("aggregate --once --windows daily --no-refill")),
        }
        let list: Json =
            serde_json::from_slice(&run("usage list -e key-1 -w daily -o json")).unwrap();
        booked.push(list[0]["consumed"]["rpm"].as_i64().unwrap());
    }
    booked
}

#[tokio::test]
async fn function_and_daemon_on_one_table_book_every_change_once() {
    assert_eq!(booked_by("both-1", &["function", "daemon", "function"]).await, [3, 3, 3]);
    assert_eq!(booked_by("both-2", &["daemon", "function", "daemon"]).await, [3, 3, 3]);
}
