//! Calls against canned responses: no network, one thread, the same instructions in every run.
//!
//!     cargo build --release --manifest-path benches/Cargo.toml
//!     benches/src/dynamodb/instructions
//!
//! counts the instructions of an acquire, and of a bare call that returns the item.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use aws_sdk_dynamodb::config::{HttpClient, RuntimeComponents, SharedHttpClient};
use aws_smithy_runtime_api::client::http::{
    HttpConnector, HttpConnectorFuture, HttpConnectorSettings, SharedHttpConnector,
};
use aws_smithy_runtime_api::client::orchestrator::{HttpRequest, HttpResponse};
use aws_smithy_runtime_api::http::StatusCode;
use aws_smithy_types::body::SdkBody;
use tokio::runtime::Runtime;
use zae_limiter_core::{
    Admission, BucketKey, Clock, EntityId, Leg, Lifetime, LimitSet, ManualClock, NamespaceId, Plan,
    ResourceName, Store as _, Take, Target, Timestamp, amount,
};
use zae_limiter_dynamodb::aws::AwsTable;
use zae_limiter_dynamodb::{DynamoOptions, DynamoStore};

use super::contenders::{Bare, Contender as _, TABLE, client_with};
use crate::memory::limits;

/// The date of every response, and the time of the calls.
const DATE: &str = "Wed, 18 Nov 2026 12:00:00 GMT";
const NOW_MS: i64 = 1_795_003_200_000;

/// The bucket in every response to an update: `balance` thousandths of its limits.
fn item(balance: u64, refilled_at: i64) -> String {
    let text = |name: &str, text: &str| format!(r#""{name}":{{"S":"{text}"}}"#);
    let number = |name: &str, number: u64| format!(r#""{name}":{{"N":"{number}"}}"#);
    let rate = |limit: &str, amount: u64, balance: u64| {
        [("tk", balance), ("cp", amount), ("ra", amount), ("rp", 1_000), ("tc", 7_000)]
            .map(|(suffix, value)| number(&format!("b_{limit}_{suffix}"), value))
            .join(",")
    };
    let [rpm, tpm] = [1_000_000_000_000, 100_000_000_000_000];
    [
        text("PK", "default0000/BUCKET#key-0000000#gpt-4#0"),
        text("SK", "#STATE"),
        text("entity_id", "key-0000000"),
        text("resource", "gpt-4"),
        r#""cascade":{"BOOL":false},"parent_id":{"NULL":true}"#.to_owned(),
        text("GSI2PK", "default0000/RESOURCE#gpt-4"),
        text("GSI2SK", "BUCKET#key-0000000#0"),
        text("GSI3PK", "default0000/ENTITY#key-0000000"),
        text("GSI3SK", "BUCKET#gpt-4#0"),
        text("GSI4PK", "default0000"),
        text("GSI4SK", "BUCKET#key-0000000#gpt-4#0"),
        rate("rpm", rpm, rpm / 1_000 * balance),
        rate("tpm", tpm, tpm / 1_000 * balance),
        rate("wcu", 1_000_000, 999_000),
        number("rf", refilled_at.unsigned_abs()),
        number("gn", NOW_MS.unsigned_abs()),
        number("shard_count", 1),
        number("ttl", NOW_MS.unsigned_abs() / 1_000 + 7),
    ]
    .join(",")
}

/// Replies to every update with the same item, and to everything else with nothing.
#[derive(Clone, Debug)]
struct Canned {
    updated: Arc<str>,
    updates: Arc<AtomicUsize>,
}

impl HttpConnector for Canned {
    fn call(&self, request: HttpRequest) -> HttpConnectorFuture {
        let is_update =
            request.headers().get("x-amz-target") == Some("DynamoDB_20120810.UpdateItem");
        let body = match is_update {
            true => {
                self.updates.fetch_add(1, Ordering::Relaxed);
                SdkBody::from(self.updated.as_bytes().to_vec())
            }
            false => SdkBody::from("{}"),
        };
        let mut response = HttpResponse::new(StatusCode::try_from(200).expect("a status"), body);
        for (name, value) in [
            ("date", DATE),
            ("content-type", "application/x-amz-json-1.0"),
            ("x-amzn-requestid", "UNQ4R0S4M1ESI6V0M3T7Q0UQ9NVV4KQNSO5AEMVJF66Q9ASUAAJG"),
            ("x-amz-crc32", "2745614147"),
        ] {
            response.headers_mut().insert(name, value);
        }
        HttpConnectorFuture::ready(Ok(response))
    }
}

impl HttpClient for Canned {
    fn http_connector(
        &self,
        _: &HttpConnectorSettings,
        _: &RuntimeComponents,
    ) -> SharedHttpConnector {
        SharedHttpConnector::new(self.clone())
    }
}

/// Makes calls on one bucket: `bare`, `add` (without a refill) or `refill`.
pub fn profile(what: &str, calls: usize) {
    // A full bucket is refilled by every write; half a bucket only after a while.
    let (balance, refilled_at) = match what {
        "refill" => (1_000, NOW_MS - 5),
        _ => (500, NOW_MS - 5),
    };
    let updated = format!(
        r#"{{"Attributes":{{{}}},"ConsumedCapacity":{{"TableName":"{TABLE}","CapacityUnits":1.0}}}}"#,
        item(balance, refilled_at)
    );
    let canned = Canned { updated: updated.into(), updates: Arc::default() };
    let client = client_with("http://127.0.0.1:8000", SharedHttpClient::new(canned.clone()));
    let mut builder = tokio::runtime::Builder::new_current_thread();
    let runtime: Runtime = builder.enable_all().build().expect("a runtime");
    if what == "bare" {
        let bare = Bare::on(client, 1).returning_the_item();
        return runtime.block_on(async {
            for _ in 0..calls {
                bare.call(0).await;
            }
        });
    }
    let now = Timestamp::from_millis(NOW_MS);
    let clock: Arc<dyn Clock> = Arc::new(ManualClock::new(now));
    let table = Arc::new(AwsTable::new(client, TABLE, clock));
    let options = DynamoOptions::default().runtime(runtime.handle().clone());
    let store = DynamoStore::new(table, options);
    let plan = Plan { now, max_skew: None, legs: [leg()].into_iter().collect() };
    runtime.block_on(async {
        for _ in 0..calls {
            let admission = store.acquire(&plan).await.expect("an answer");
            assert!(matches!(admission, Admission::Taken(_)), "{admission:?}");
        }
    });
    assert!(canned.updates.load(Ordering::Relaxed) >= calls, "each call has a write to itself");
}

/// One request and ten tokens of the bucket.
fn leg() -> Leg {
    let key = BucketKey {
        namespace: NamespaceId::new("default0000").expect("a valid id"),
        entity: EntityId::new("key-0000000").expect("a valid id"),
        resource: ResourceName::new("gpt-4").expect("a valid name"),
    };
    let limits = Arc::new(LimitSet::new(limits()).expect("valid"));
    let target = Target::new(key, limits, Lifetime::Idle(Duration::from_secs(7)));
    let take = |cell, tokens| Take { cell, amount: amount(tokens).expect("small") };
    Leg { target: Arc::new(target), takes: [take(0, 1), take(1, 10)].into() }
}
