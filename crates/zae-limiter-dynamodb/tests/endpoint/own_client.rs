//! A store on a client that the program has built, with the SDK's retries on.

use std::sync::Arc;
use std::time::Duration;

use aws_sdk_dynamodb::config::retry::RetryConfig;
use zae_limiter_core::{
    Applied, BucketKey, Clock as _, EntityId, Key, Lifetime, Limit, LimitSet, Millitokens,
    NamespaceId, Placement, ResourceName, Settlement, Store as _, StoreErrorKind, SystemClock,
    Take, Target, TimeCheck, Timestamp,
};
use zae_limiter_dynamodb::{DynamoOptions, DynamoStore};

use crate::fake::{Fake, Reply, refuse};
use crate::server::{client_that_retries, new_table};

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
        let store = store(&fake);
        // Before the first response the store would read: it does not know the table's time yet.
        let key = Key::Entity(bucket().namespace, bucket().entity);
        assert_eq!(store.get(&[key]).await.unwrap(), [None]);
        let error = store.settle(&[refund()], now).await.unwrap_err();
        assert_eq!(error.applied(), Applied::Maybe, "{lost:?}: {error}");
        // Description, version, the record, and the refund, once.
        let expected = ["DescribeTable", "BatchGetItem", "BatchGetItem", "UpdateItem"];
        assert_eq!(operations(&fake), expected, "{lost:?}");
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

/// The endpoint's responses have a date, as DynamoDB's.
#[tokio::test]
async fn the_date_of_a_response_is_the_tables_time() {
    let store = DynamoStore::new(new_table().await, DynamoOptions::default());
    let (now, hour) = (SystemClock.now(), 3_600_000);
    assert_eq!(store.check_time(now), TimeCheck::Unknown);
    let key = Key::Entity(bucket().namespace, bucket().entity);
    assert_eq!(store.get(&[key]).await.unwrap(), [None]);
    assert_eq!(store.check_time(SystemClock.now()), TimeCheck::Within);
    for error in [-hour, hour] {
        let wrong = Timestamp::from_millis(now.as_millis() + error);
        assert!(matches!(store.check_time(wrong), TimeCheck::Beyond(_)), "{error}");
    }
}
