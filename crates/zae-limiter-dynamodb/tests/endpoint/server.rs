//! One endpoint for all tests of this process, and tables on it.

use std::io::{BufRead as _, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};

use aws_sdk_dynamodb::Client;
use aws_sdk_dynamodb::config::retry::RetryConfig;
use aws_sdk_dynamodb::config::{BehaviorVersion, Credentials, Region};
use zae_limiter_core::{Clock, SystemClock};
use zae_limiter_dynamodb::aws::{AwsTable, CreateTable};

struct Server {
    endpoint: String,
    // Its standard input ends with this process, and the endpoint with it.
    _child: Child,
}

static SERVER: LazyLock<Server> = LazyLock::new(|| {
    let beside =
        concat!(env!("CARGO_MANIFEST_DIR"), "/../../local/target/release/zae-limiter-local");
    let program = std::env::var_os("ZAEL_LOCAL").map_or_else(|| beside.into(), PathBuf::from);
    let mut child = Command::new(&program)
        // The checks have a time of their own.
        .args(["--until-eof", "--no-sweep"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap_or_else(|error| {
            panic!(
                "{} does not start ({error}); \
                 build it: cargo build --release --manifest-path local/Cargo.toml",
                program.display()
            )
        });
    let mut endpoint = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut endpoint).unwrap();
    Server { endpoint: endpoint.trim().to_owned(), _child: child }
});

static TABLES: AtomicU64 = AtomicU64::new(0);

pub(crate) fn client() -> Client {
    client_at(&SERVER.endpoint)
}

pub(crate) fn client_at(endpoint: &str) -> Client {
    client_that_retries(endpoint, RetryConfig::disabled())
}

pub(crate) fn client_that_retries(endpoint: &str, retries: RetryConfig) -> Client {
    Client::from_conf(config_at(endpoint).retry_config(retries).build())
}

pub(crate) fn config_at(endpoint: &str) -> aws_sdk_dynamodb::config::Builder {
    let http = aws_smithy_http_client::Builder::new().build_http();
    aws_sdk_dynamodb::Config::builder()
        .behavior_version(BehaviorVersion::latest())
        .region(Region::new("us-east-1"))
        .credentials_provider(Credentials::new("AKIAIOSFODNN7EXAMPLE", "local", None, None, "test"))
        .endpoint_url(endpoint)
        .http_client(http)
}

pub(crate) fn clock() -> Arc<dyn Clock> {
    Arc::new(SystemClock)
}

pub(crate) fn endpoint() -> String {
    SERVER.endpoint.clone()
}

pub(crate) async fn new_table() -> Arc<AwsTable> {
    let name = format!("table-{}", TABLES.fetch_add(1, Ordering::Relaxed));
    let client = client();
    CreateTable::new(&name).create(&client, &clock()).await.unwrap();
    Arc::new(AwsTable::new(client, name, clock()))
}
