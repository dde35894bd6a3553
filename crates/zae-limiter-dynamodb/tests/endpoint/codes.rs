//! What each of DynamoDB's error codes means to the store.

use zae_limiter_core::Applied;
use zae_limiter_dynamodb::aws::AwsTable;
use zae_limiter_schema::TableErrorKind::{
    Conflict, Denied, NoTable, PartitionThrottled, Rejected, Throttled, Unavailable,
};
use zae_limiter_schema::{
    Action, Change, Consistency, ItemKey, Table as _, TableError, TableErrorKind, Update, Value,
};

use crate::fake::{Fake, Reply};
use crate::server::{client_at, clock};

fn update() -> Update {
    Update {
        key: ItemKey::new("pk", "sk"),
        actions: vec![Action::Set("a".to_owned(), Value::number(1))],
        conditions: Vec::new(),
    }
}

/// A table that gives this answer to every call. Test data lives as long as the process.
fn table(status: &'static str, body: String) -> AwsTable {
    let fake = Fake::always(Reply::Http(status, body.leak()));
    AwsTable::new(client_at(&fake.url), "table", clock())
}

fn check(case: &str, error: &TableError, kind: TableErrorKind, applied: Applied) {
    assert_eq!((error.kind, error.applied), (kind, applied), "{case}: {error:?}");
}

#[tokio::test]
async fn every_code_of_an_update_has_a_kind() {
    use Applied::{Maybe, No};
    for (status, code, kind, applied) in [
        ("400", "ThrottlingException", Throttled, No),
        ("400", "Throttling", Throttled, No),
        ("400", "RequestLimitExceeded", Throttled, No),
        ("400", "LimitExceededException", Throttled, No),
        ("400", "TooManyRequestsException", Throttled, No),
        ("400", "ProvisionedThroughputExceededException", PartitionThrottled, No),
        ("400", "TransactionConflictException", Conflict, No),
        ("400", "ReplicatedWriteConflictException", Conflict, No),
        ("400", "TransactionInProgressException", Unavailable, Maybe),
        ("500", "InternalServerError", Unavailable, Maybe),
        ("400", "InternalServerError", Unavailable, Maybe),
        ("500", "InternalFailure", Unavailable, Maybe),
        ("503", "ServiceUnavailable", Unavailable, Maybe),
        ("503", "ThrottlingException", Unavailable, Maybe),
        ("408", "RequestTimeout", Unavailable, Maybe),
        ("400", "RequestTimeoutException", Unavailable, Maybe),
        ("400", "ItemCollectionSizeLimitExceededException", Rejected, No),
        ("400", "ValidationException", Rejected, No),
        ("400", "SerializationException", Rejected, No),
        ("400", "ResourceNotFoundException", NoTable, No),
        ("400", "AccessDeniedException", Denied, No),
        ("400", "ExpiredTokenException", Denied, No),
        ("400", "UnrecognizedClientException", Denied, No),
        ("403", "InvalidSignatureException", Denied, No),
        ("403", "RequestTimeTooSkewed", Denied, No),
    ] {
        let body =
            format!(r#"{{"__type":"com.amazonaws.dynamodb.v20120810#{code}","message":"x"}}"#);
        let error = table(status, body).update(&update()).await.unwrap_err();
        check(&format!("{status} {code}"), &error, kind, applied);
    }
}

#[tokio::test]
async fn throttling_reasons_distinguish_a_partition_from_the_table() {
    for (code, list, reason, kind) in [
        ("ThrottlingException", "throttlingReasons", "TableWriteKeyRangeThroughputExceeded", true),
        ("ThrottlingException", "throttlingReasons", "IndexWriteKeyRangeThroughputExceeded", true),
        ("ThrottlingException", "throttlingReasons", "TableWriteAccountLimitExceeded", false),
        (
            "ThrottlingException",
            "throttlingReasons",
            "TableWriteMaxOnDemandThroughputExceeded",
            false,
        ),
        (
            "ProvisionedThroughputExceededException",
            "ThrottlingReasons",
            "TableReadKeyRangeThroughputExceeded",
            true,
        ),
        (
            "ProvisionedThroughputExceededException",
            "ThrottlingReasons",
            "TableReadProvisionedThroughputExceeded",
            false,
        ),
    ] {
        let kind = if kind { PartitionThrottled } else { Throttled };
        let body = format!(
            r#"{{"__type":"x#{code}","message":"x","{list}":[{{"reason":"{reason}","resource":"arn"}}]}}"#
        );
        let table = table("400 Bad Request", body);
        let keys = [ItemKey::new("pk", "sk")];
        for error in [
            table.update(&update()).await.unwrap_err(),
            table.read(&keys, Consistency::Strong).await.unwrap_err(),
            table.delete(&keys).await.unwrap_err(),
            table.transact(&[Change::Update(update())]).await.unwrap_err(),
        ] {
            check(reason, &error, kind, Applied::No);
        }
    }
}

#[tokio::test]
async fn every_reason_of_a_cancellation_has_a_kind_and_nothing_was_done() {
    for (reasons, kind) in [
        (r#"{"Code":"ThrottlingError","Message":"x"}"#, Throttled),
        (
            r#"{"Code":"ThrottlingError","Message":"TableWriteKeyRangeThroughputExceeded"}"#,
            PartitionThrottled,
        ),
        (r#"{"Code":"ProvisionedThroughputExceeded","Message":"x"}"#, PartitionThrottled),
        (r#"{"Code":"ItemCollectionSizeLimitExceeded","Message":"x"}"#, Rejected),
        (r#"{"Code":"ValidationError","Message":"x"}"#, Rejected),
        (r#"{"Code":"DuplicateItem","Message":"x"}"#, Rejected),
        (r#"{"Code":"TransactionConflict","Message":"x"}"#, Conflict),
        (r#"{"Code":"InternalServerError","Message":"x"}"#, Unavailable),
        // A condition beside another reason is no answer: the condition may hold next time.
        (r#"{"Code":"ConditionalCheckFailed"},{"Code":"TransactionConflict"}"#, Conflict),
        (r#"{"Code":"None"},{"Code":"TransactionConflict"}"#, Conflict),
        (r#"{"Code":"TransactionConflict"},{"Code":"ValidationError"}"#, Rejected),
        // No reason at all.
        ("", Conflict),
        (r#"{"Code":"None"}"#, Conflict),
    ] {
        let body = format!(
            r#"{{"__type":"x#TransactionCanceledException","Message":"x",
                 "CancellationReasons":[{reasons}]}}"#
        );
        let table = table("400 Bad Request", body);
        let error = table.transact(&[Change::Update(update())]).await.unwrap_err();
        check(reasons, &error, kind, Applied::No);
    }
}

#[tokio::test]
async fn the_message_of_a_cancellation_reason_is_kept() {
    let body = r#"{"__type":"x#TransactionCanceledException","Message":"x",
        "CancellationReasons":[{"Code":"ValidationError","Message":"the item is too large"}]}"#;
    let table = table("400 Bad Request", body.to_owned());
    let error = table.transact(&[Change::Update(update())]).await.unwrap_err();
    assert!(error.message.contains("ValidationError the item is too large"), "{error}");
}
