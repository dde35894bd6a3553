//! Connecting to a table whose endpoint does not answer: nothing waits for ever, and the next call starts again.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::Duration;

use aws_sdk_dynamodb::Client;
use aws_sdk_dynamodb::config::timeout::TimeoutConfig;
use aws_sdk_dynamodb::config::{AsyncSleep, Sleep};
use tokio::sync::oneshot;
use zae_limiter_core::Applied;
use zae_limiter_dynamodb::aws::{AwsTable, DynamoAddress, LazyTable};
use zae_limiter_schema::{Action, Consistency, ItemKey, Table as _, TableErrorKind, Update, Value};

use crate::fake::{Fake, Reply};
use crate::server::{clock, config_at};

fn lazy(table: &str, endpoint: &str) -> LazyTable {
    LazyTable::new(DynamoAddress {
        table: table.to_owned(),
        region: Some("us-east-1".to_owned()),
        endpoint: Some(endpoint.to_owned()),
    })
}

/// Polls a call, which gets no answer, until `seen` is true of the endpoint.
async fn poll_until<F: Future>(call: &mut std::pin::Pin<&mut F>, seen: impl Fn() -> bool) {
    poll_fn(|context| {
        assert!(call.as_mut().poll(context).is_pending(), "there is no answer");
        if seen() {
            return Poll::Ready(());
        }
        // The endpoint runs on a thread of its own.
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

#[tokio::test]
async fn a_pause_needs_no_connection() {
    let fake = Fake::always(Reply::Silence);
    let table = lazy("table", &fake.url);
    table.pause(Duration::from_millis(1)).await;
    assert_eq!(fake.received().len(), 0);
}

const DESCRIBED: Reply = Reply::Http(
    "400 Bad Request",
    r#"{"__type":"com.amazon.coral.service#AccessDeniedException","message":"x"}"#,
);

#[tokio::test]
async fn a_dropped_call_does_not_keep_the_next_one_from_connecting() {
    // The first description gets no answer. The others are denied, as for a role that may only acquire.
    let fake = Fake::new(|before, request| match &*request.operation {
        _ if before == 0 => Reply::Silence,
        "DescribeTable" => DESCRIBED,
        _ => Reply::Http("200 OK", "{}"),
    });
    let table = lazy("table", &fake.url);
    let keys = [ItemKey::new("pk", "sk")];
    {
        let mut call = pin!(table.read(&keys, Consistency::Eventual));
        poll_until(&mut call, || fake.received().len() == 1).await;
    }
    let read = table.read(&keys, Consistency::Eventual).await.unwrap();
    assert!(read.items.is_empty());
    let operations: Vec<String> = fake.received().into_iter().map(|r| r.operation).collect();
    let expected = ["DescribeTable", "DescribeTable", "BatchGetItem", "BatchGetItem"];
    assert_eq!(operations, expected, "description, again, version, and the read itself");
}

/// Time as the SDK sees it: a wait of seconds ends when the test says so, a shorter one at once.
#[derive(Clone, Debug, Default)]
struct SdkTime {
    limits: Arc<Mutex<Vec<oneshot::Sender<()>>>>,
}

impl SdkTime {
    /// All limits that are being waited for are over.
    fn pass(&self) {
        for limit in self.limits.lock().unwrap().drain(..) {
            // The attempt may have ended.
            let _ = limit.send(());
        }
    }
}

impl AsyncSleep for SdkTime {
    fn sleep(&self, wait: Duration) -> Sleep {
        if wait < Duration::from_secs(1) {
            return Sleep::new(async {});
        }
        let (over, is_over) = oneshot::channel();
        self.limits.lock().unwrap().push(over);
        Sleep::new(async {
            let _ = is_over.await;
        })
    }
}

/// Tables through a client without limits, and through one that has a limit of its own.
fn tables(fake: &Fake) -> [(AwsTable, SdkTime); 2] {
    let own = TimeoutConfig::builder().read_timeout(Duration::from_secs(7)).build();
    [config_at(&fake.url), config_at(&fake.url).timeout_config(own)].map(|config| {
        let time = SdkTime::default();
        let client = Client::from_conf(config.sleep_impl(time.clone()).build());
        (AwsTable::new(client, "table", clock()), time)
    })
}

#[tokio::test]
async fn a_read_on_a_silent_connection_is_repeated_on_another() {
    let fake = Fake::new(|before, _| match before % 2 {
        0 => Reply::Silence,
        _ => Reply::Http("200 OK", "{}"),
    });
    for (n, (table, time)) in tables(&fake).into_iter().enumerate() {
        let keys = [ItemKey::new("pk", "sk")];
        let mut call = pin!(table.read(&keys, Consistency::Strong));
        poll_until(&mut call, || fake.received().len() == 2 * n + 1).await;
        time.pass();
        assert!(call.await.unwrap().items.is_empty());
        assert_eq!(fake.received().len(), 2 * n + 2);
    }
}

#[tokio::test]
async fn an_update_on_a_silent_connection_ends_and_may_be_applied() {
    let fake = Fake::always(Reply::Silence);
    let actions = vec![Action::Set("a".to_owned(), Value::number(1))];
    let update = Update { key: ItemKey::new("pk", "sk"), actions, conditions: Vec::new() };
    for (n, (table, time)) in tables(&fake).into_iter().enumerate() {
        let mut call = pin!(table.update(&update));
        poll_until(&mut call, || fake.received().len() == n + 1).await;
        time.pass();
        let error = call.await.unwrap_err();
        assert_eq!((error.kind, error.applied), (TableErrorKind::Unavailable, Applied::Maybe));
        assert!(error.message.contains("did not answer in time"), "{error}");
        assert_eq!(fake.received().len(), n + 1);
    }
}

#[tokio::test]
async fn a_client_of_an_address_has_limits() {
    let address = DynamoAddress {
        table: "table".to_owned(),
        region: Some("us-east-1".to_owned()),
        endpoint: Some("http://127.0.0.1:1".to_owned()),
    };
    let client = address.client().await;
    let limits = client.config().timeout_config().unwrap();
    assert_eq!(limits.connect_timeout(), Some(Duration::from_millis(1_500)));
    assert_eq!(limits.read_timeout(), Some(Duration::from_secs(2)));
}
