//! The DynamoDB endpoint of `local/`, one for all tests of a process, and tables on it.

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, LazyLock};

use zae_limiter::dynamodb::aws::{AwsTable, CreateTable, DynamoAddress};
use zae_limiter::testing::{Clock, SystemClock};

struct Endpoint {
    address: String,
    // The endpoint ends when its stdin closes, which happens when this process ends.
    _child: Child,
}

static ENDPOINT: LazyLock<Endpoint> = LazyLock::new(|| {
    let beside =
        concat!(env!("CARGO_MANIFEST_DIR"), "/../../local/target/release/zae-limiter-local");
    let program = std::env::var_os("ZAEL_LOCAL").unwrap_or_else(|| beside.into());
    let mut child = Command::new(&program)
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
    let mut address = String::new();
    let stdout = child.stdout.take().expect("it is piped");
    BufReader::new(stdout).read_line(&mut address).expect("it says where it is");
    Endpoint { address: address.trim().to_owned(), _child: child }
});

/// Its address.
pub(crate) fn address() -> &'static str {
    &ENDPOINT.address
}

/// A new table with a stream.
pub(crate) async fn table(name: &str) -> AwsTable {
    let place = DynamoAddress {
        table: name.to_owned(),
        region: Some("us-east-1".to_owned()),
        endpoint: Some(address().to_owned()),
    };
    let client = place.client().await;
    let clock: Arc<dyn Clock> = Arc::new(SystemClock);
    let table = CreateTable::new(name).with_stream();
    table.create(&client, &clock).await.expect("a table can be made");
    AwsTable::new(client, name, clock)
}
