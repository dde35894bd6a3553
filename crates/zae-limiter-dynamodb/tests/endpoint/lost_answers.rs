//! What the adapter does, and reports, when the answer to a write is lost.

use std::time::Duration;

use aws_sdk_dynamodb::config::retry::RetryConfig;
use zae_limiter_core::Applied;
use zae_limiter_dynamodb::aws::AwsTable;
use zae_limiter_schema::{
    Action, Change, ItemKey, Table as _, TableErrorKind, Transacted, Update, Value,
};

use crate::fake::{Fake, Reply, refuse};
use crate::server::{client_that_retries, clock};

const SERVER_ERROR: Reply = Reply::Http("500 Internal Server Error", "{}");
const THROTTLED: Reply = refuse(r#"{"__type":"x#ThrottlingException","message":"x"}"#);
const IN_PROGRESS: Reply = refuse(r#"{"__type":"x#TransactionInProgressException","Message":"x"}"#);
const DONE: Reply = Reply::Http("200 OK", "{}");
const UNMET: Reply = refuse(
    r#"{"__type":"x#TransactionCanceledException","Message":"x",
        "CancellationReasons":[{"Code":"ConditionalCheckFailed","Message":"x"}]}"#,
);
const CONFLICT: Reply = refuse(
    r#"{"__type":"x#TransactionCanceledException","Message":"x",
        "CancellationReasons":[{"Code":"TransactionConflict","Message":"x"}]}"#,
);

/// A client as users build it: with the SDK's retries.
fn table(fake: &Fake) -> AwsTable {
    let retries = RetryConfig::standard().with_initial_backoff(Duration::from_millis(1));
    AwsTable::new(client_that_retries(&fake.url, retries), "table", clock())
}

fn refund() -> Update {
    Update {
        key: ItemKey::new("pk", "sk"),
        actions: vec![Action::Add("b_rpm_tk".to_owned(), Value::number(1_000))],
        conditions: Vec::new(),
    }
}

#[tokio::test]
async fn an_update_is_sent_once_whatever_retries_the_client_has() {
    for reply in [
        Reply::Close,
        SERVER_ERROR,
        Reply::Http("503 Service Unavailable", "{}"),
        Reply::HalfAnswer("{}"),
        THROTTLED,
    ] {
        let fake = Fake::always(reply);
        table(&fake).update(&refund()).await.unwrap_err();
        assert_eq!(fake.received().len(), 1, "{reply:?}");
    }
}

#[tokio::test]
async fn a_transaction_is_repeated_under_one_token_and_the_next_has_another() {
    static REPLIES: [Reply; 4] = [Reply::Close, SERVER_ERROR, IN_PROGRESS, DONE];
    let fake = Fake::in_turn(&REPLIES);
    let (table, changes) = (table(&fake), [Change::Update(refund())]);
    let done = table.transact(&changes).await.unwrap();
    assert!(matches!(done, Transacted::Done(_)), "{done:?}");
    table.transact(&changes).await.unwrap();
    let tokens: Vec<String> = fake.received().iter().map(crate::fake::Request::token).collect();
    assert_eq!(tokens.len(), 5);
    assert!(tokens[..4].iter().all(|token| *token == tokens[0]), "{tokens:?}");
    assert_ne!(tokens[4], tokens[0]);
}

/// One transaction, answered by these replies in turn: how it failed.
async fn transact(replies: &'static [Reply]) -> (TableErrorKind, Applied) {
    let fake = Fake::in_turn(replies);
    let error = table(&fake).transact(&[Change::Update(refund())]).await.unwrap_err();
    (error.kind, error.applied)
}

#[tokio::test]
async fn a_transaction_in_progress_may_yet_be_applied_and_a_cancelled_one_is_not() {
    let (_, applied) = transact(&[IN_PROGRESS]).await;
    assert_eq!(applied, Applied::Maybe);
    assert_eq!(transact(&[CONFLICT]).await, (TableErrorKind::Conflict, Applied::No));
}

#[tokio::test]
async fn a_retry_does_not_hide_an_attempt_whose_answer_was_lost() {
    static CASES: [&[Reply]; 5] = [
        &[Reply::Close, THROTTLED],
        &[SERVER_ERROR, THROTTLED],
        &[Reply::Close, CONFLICT],
        &[Reply::HalfAnswer("{}"), CONFLICT],
        // Perhaps it is the first attempt that broke the conditions of the second: not every
        // endpoint remembers tokens.
        &[Reply::Close, UNMET],
    ];
    for replies in CASES {
        let (kind, applied) = transact(replies).await;
        assert_eq!((kind, applied), (TableErrorKind::Unavailable, Applied::Maybe), "{replies:?}");
    }
    // Throttled attempts have done nothing.
    assert_eq!(transact(&[THROTTLED]).await, (TableErrorKind::Throttled, Applied::No));
    assert_eq!(transact(&[THROTTLED, CONFLICT]).await, (TableErrorKind::Conflict, Applied::No));
}

#[tokio::test]
async fn a_success_whose_body_does_not_parse_may_be_applied() {
    for reply in [
        Reply::Http("200 OK", "this is no JSON"),
        Reply::Http("200 OK", r#"{"Attributes":5,"ConsumedCapacity":5}"#),
        Reply::Http("200 OK", r#"{"Attributes":{"PK":{"S":5}},"ConsumedCapacity":[5]}"#),
        Reply::Http("202 Accepted", "no JSON either"),
        Reply::Http("301 Moved Permanently", ""),
        Reply::Http("302 Found", r#"{"__type":"x#ThrottlingException","message":"x"}"#),
        Reply::Http(
            "299 Odd",
            r#"{"__type":"x#ConditionalCheckFailedException","message":"x","Attributes":5,
                "ConsumedCapacity":5}"#,
        ),
        Reply::HalfAnswer(r#"{"Attributes":{"PK":{"S":"a"}}}"#),
    ] {
        let fake = Fake::always(reply);
        let table = table(&fake);
        for error in [
            table.update(&refund()).await.unwrap_err(),
            table.transact(&[Change::Update(refund())]).await.unwrap_err(),
        ] {
            assert_eq!(error.applied, Applied::Maybe, "{reply:?}: {error:?}");
            assert_eq!(error.kind, TableErrorKind::Unavailable, "{reply:?}: {error:?}");
        }
    }
}

#[tokio::test]
async fn an_interrupted_deletion_may_be_applied() {
    const DENIED: Reply = refuse(r#"{"__type":"x#AccessDeniedException","message":"x"}"#);
    // More than one batch takes.
    let keys: Vec<ItemKey> = (0..26).map(|n| ItemKey::new("pk", n.to_string())).collect();
    static CASES: [(&[Reply], Applied); 3] = [
        (&[DENIED], Applied::No),
        (&[DONE, DENIED], Applied::Maybe),
        (&[Reply::Close, DENIED], Applied::Maybe),
    ];
    for (replies, applied) in CASES {
        let error = table(&Fake::in_turn(replies)).delete(&keys).await.unwrap_err();
        assert_eq!((error.kind, error.applied), (TableErrorKind::Denied, applied), "{replies:?}");
    }
}
