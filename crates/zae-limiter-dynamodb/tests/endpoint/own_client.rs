//! A store on a client that the program has built, with the SDK's retries on.

use std::sync::Arc;
use std::time::Duration;

use aws_sdk_dynamodb::config::retry::RetryConfig;
use zae_limiter_core::{
    Applied, BucketKey, EntityId, Key, Lifetime, Limit, LimitSet, Millitokens, NamespaceId,
    Placement, ResourceName, Settlement, Store as _, StoreErrorKind, Take, Target, Timestamp,
};
use zae_limiter_dynamodb::DynamoStore;

use crate::fake::{Fake, Reply, refuse};
use crate::server::client_that_retries;

/// As for a role that may only acquire: the store goes on without the description.
const DENIED: Reply = refuse(r#"{"__type":"x#AccessDeniedException","message":"x"}"#);
const NOTHING: Reply = Reply::Http("200 OK", "{}");

fn store(fake: &Fake) -> DynamoStore {
    let retries =
        RetryConfig::standard().with_max_attempts(5).with_initial_backoff(Duration::from_millis(1));
    DynamoStore::from_client(client_that_retries(&fake.url, retries), "table")
}

fn bucket() -> BucketKey {
    BucketKey {
        namespace: NamespaceId::new("ns000000001").unwrap(),
        entity: EntityId::new("org").unwrap(),
        resource: ResourceName::new("gpt-4").unwrap(),
    }
}

fn refund() -> Settlement {
    let limits = Arc::new(LimitSet::new([Limit::per_minute("rpm", 100)]).unwrap());
    Settlement {
        target: Arc::new(Target::new(bucket(), limits, Lifetime::Forever)),
        placement: Placement::new(0),
        differences: [Take { cell: 0, amount: Millitokens::new(-1_000) }].into_iter().collect(),
    }
}

fn operations(fake: &Fake) -> Vec<String> {
    fake.received().into_iter().map(|request| request.operation).collect()
}

#[tokio::test]
async fn a_refund_whose_answer_is_lost_is_not_repeated_although_the_client_retries() {
    for lost in
        [Reply::Close, Reply::Http("500 Internal Server Error", "{}"), Reply::HalfAnswer("{}")]
    {
        let fake = Fake::new(move |_, request| match &*request.operation {
            "DescribeTable" => DENIED,
            "UpdateItem" => lost,
            _ => NOTHING,
        });
        let now = Timestamp::from_millis(1_794_751_200_000);
        let error = store(&fake).settle(&[refund()], now).await.unwrap_err();
        assert_eq!(error.applied(), Applied::Maybe, "{lost:?}: {error}");
        // Description, version, and the refund, once.
        assert_eq!(operations(&fake), ["DescribeTable", "BatchGetItem", "UpdateItem"], "{lost:?}");
    }
}

#[tokio::test]
async fn a_read_is_retried_with_the_settings_of_the_store() {
    let fake = Fake::new(|before, request| match &*request.operation {
        "DescribeTable" => DENIED,
        // The first read of the record itself.
        _ if before == 2 => Reply::Close,
        _ => NOTHING,
    });
    let key = Key::Entity(bucket().namespace, bucket().entity);
    assert_eq!(store(&fake).get(&[key]).await.unwrap(), [None]);
    let expected = ["DescribeTable", "BatchGetItem", "BatchGetItem", "BatchGetItem"];
    assert_eq!(operations(&fake), expected);
}

#[tokio::test]
async fn a_table_that_is_not_a_limiters_is_refused_before_anything_is_written() {
    const OTHER_KEYS: Reply = Reply::Http(
        "200 OK",
        r#"{"Table":{"KeySchema":[{"AttributeName":"id","KeyType":"HASH"}]}}"#,
    );
    let fake = Fake::always(OTHER_KEYS);
    let now = Timestamp::from_millis(1_794_751_200_000);
    let error = store(&fake).settle(&[refund()], now).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Incompatible, "{error}");
    assert!(error.to_string().contains("its keys are not PK and SK"), "{error}");
    assert_eq!(operations(&fake), ["DescribeTable"]);
}
