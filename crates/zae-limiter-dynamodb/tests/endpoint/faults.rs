//! The proxy's modes, and what the adapter reports in each of them.

use std::future::poll_fn;
use std::pin::pin;
use std::task::Poll;

use zae_limiter_core::Applied;
use zae_limiter_dynamodb::aws::AwsTable;
use zae_limiter_schema::{
    Action, Consistency, ItemKey, Table as _, TableError, TableErrorKind, Update, Value,
};

use crate::proxy::{DROP_EVERY, Mode, Proxy};
use crate::server::{client_at, clock, endpoint, new_table};

/// Adds one to a number.
fn count() -> Update {
    let actions = vec![Action::Add("n".to_owned(), Value::number(1))];
    Update { key: ItemKey::new("pk", "sk"), actions, conditions: Vec::new() }
}

async fn counted(table: &AwsTable) -> i64 {
    let read = table.read(&[ItemKey::new("pk", "sk")], Consistency::Strong).await.unwrap();
    read.items[0]["n"].as_i64().unwrap()
}

#[tokio::test]
async fn every_mode_of_the_proxy_fails_as_it_says() {
    let direct = new_table().await;
    let proxy = Proxy::to(&endpoint());
    let table = AwsTable::new(client_at(&proxy.url), direct.name(), clock());
    let is = |error: &TableError, applied| {
        error.kind == TableErrorKind::Unavailable && error.applied == applied
    };
    table.update(&count()).await.unwrap();
    assert_eq!(counted(&direct).await, 1);

    proxy.set(Mode::Hang);
    let before = proxy.requests();
    {
        let update = count();
        let mut call = pin!(table.update(&update));
        poll_fn(|context| {
            assert!(call.as_mut().poll(context).is_pending(), "there is no answer");
            if proxy.requests() > before {
                return Poll::Ready(());
            }
            // The proxy runs on a thread of its own.
            context.waker().wake_by_ref();
            Poll::Pending
        })
        .await;
    }
    assert_eq!(counted(&direct).await, 1, "nothing is forwarded");

    proxy.set(Mode::DropAnswers);
    let mut lost = 0;
    for _ in 0..2 * DROP_EVERY {
        if let Err(error) = table.update(&count()).await {
            assert!(is(&error, Applied::Maybe), "{error:?}");
            lost += 1;
        }
    }
    assert_eq!(lost, 2);
    assert_eq!(counted(&direct).await, 41, "all are forwarded");

    proxy.set(Mode::Refuse);
    // An update may still find its connection open; the next one does not.
    let refused = async || {
        for _ in 0..100 {
            match table.update(&count()).await {
                Err(error) if is(&error, Applied::No) => return true,
                _ => {}
            }
        }
        false
    };
    assert!(refused().await);

    proxy.set(Mode::Pass);
    let served = async || {
        for _ in 0..10_000 {
            if table.update(&count()).await.is_ok() {
                return true;
            }
        }
        false
    };
    assert!(served().await, "the proxy listens again");
}
