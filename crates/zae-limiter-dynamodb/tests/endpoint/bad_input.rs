//! Tables and endpoints that cannot be used: each has an error of its own that says what to do.

use std::collections::HashMap;
use std::net::TcpListener;
use std::sync::Arc;

use aws_sdk_dynamodb::types::{
    AttributeDefinition, AttributeValue, BillingMode, KeySchemaElement, KeyType,
    ScalarAttributeType,
};
use zae_limiter_core::{
    Applied, BucketKey, EntityId, Key, Leg, Lifetime, Limit, LimitSet, Millitokens, NamespaceId,
    NamespaceName, Plan, ResourceName, Store as _, StoreError, StoreErrorKind, Take, Target,
    Timestamp,
};
use zae_limiter_dynamodb::aws::{AwsTable, CreateTable, DynamoAddress, LazyTable};
use zae_limiter_dynamodb::{DynamoOptions, DynamoStore};

use crate::fake::{Fake, Reply};
use crate::server::{client, client_at, clock, endpoint};

/// The error of a store that is opened there and reads something.
async fn open_error(table: &str, endpoint: &str) -> StoreError {
    let address = DynamoAddress {
        table: table.to_owned(),
        region: Some("us-east-1".to_owned()),
        endpoint: Some(endpoint.to_owned()),
    };
    let store = DynamoStore::new(Arc::new(LazyTable::new(address)), DynamoOptions::default());
    let key = Key::NamespaceName(NamespaceName::new("default").unwrap());
    store.get(&[key]).await.unwrap_err()
}

fn check(error: &StoreError, kind: StoreErrorKind, says: &str) {
    assert_eq!(error.kind(), kind, "{error:?}");
    assert!(error.to_string().contains(says), "{error}");
}

#[tokio::test]
async fn a_table_that_does_not_exist() {
    let error = open_error("missing", &endpoint()).await;
    check(&error, StoreErrorKind::NotFound, "does not exist in this account and region");
}

#[tokio::test]
async fn a_table_of_somebody_else() {
    let attribute = |name: &str| {
        AttributeDefinition::builder()
            .attribute_name(name)
            .attribute_type(ScalarAttributeType::S)
            .build()
            .unwrap()
    };
    let key = |name: &str, kind| {
        KeySchemaElement::builder().attribute_name(name).key_type(kind).build().unwrap()
    };
    for (name, pk, sk, says) in [
        ("others-keys", "id", "at", "its keys are not PK and SK"),
        ("no-indexes", "PK", "SK", "has no index GSI1"),
    ] {
        client()
            .create_table()
            .table_name(name)
            .billing_mode(BillingMode::PayPerRequest)
            .attribute_definitions(attribute(pk))
            .attribute_definitions(attribute(sk))
            .key_schema(key(pk, KeyType::Hash))
            .key_schema(key(sk, KeyType::Range))
            .send()
            .await
            .unwrap();
        check(&open_error(name, &endpoint()).await, StoreErrorKind::Incompatible, says);
    }
}

#[tokio::test]
async fn a_table_of_a_later_release() {
    CreateTable::new("later").create(&client(), &clock()).await.unwrap();
    for (version, says) in [("0.11.0", "upgrade this program"), ("new", "upgrade this program")] {
        client()
            .update_item()
            .table_name("later")
            .key("PK", AttributeValue::S("_/SYSTEM#".to_owned()))
            .key("SK", AttributeValue::S("#VERSION".to_owned()))
            .update_expression("SET schema_version = :v")
            .expression_attribute_values(":v", AttributeValue::S(version.to_owned()))
            .send()
            .await
            .unwrap();
        check(&open_error("later", &endpoint()).await, StoreErrorKind::Incompatible, says);
    }
}

#[tokio::test]
async fn an_endpoint_that_does_not_listen() {
    // A port that was free a moment ago.
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let error = open_error("table", &format!("http://127.0.0.1:{port}")).await;
    check(&error, StoreErrorKind::Unavailable, "cannot be reached");
    assert_eq!(error.applied(), Applied::No, "nothing was sent");
    let table = AwsTable::new(client_at("http://no-such-host.invalid"), "table", clock());
    let store = DynamoStore::new(Arc::new(table), DynamoOptions::default());
    let key = Key::NamespaceName(NamespaceName::new("default").unwrap());
    let error = store.get(&[key]).await.unwrap_err();
    check(&error, StoreErrorKind::Unavailable, "its host name has no address");
    assert_eq!(error.applied(), Applied::No, "nothing was sent");
}

#[tokio::test]
async fn a_refusal_of_aws_says_what_to_do() {
    for (status, body, kind, says) in [
        (
            "400 Bad Request",
            r#"{"__type":"com.amazon.coral.service#ExpiredTokenException","message":"expired"}"#,
            StoreErrorKind::Denied,
            "have expired; renew them",
        ),
        (
            "400 Bad Request",
            r#"{"__type":"com.amazon.coral.service#UnrecognizedClientException","message":"x"}"#,
            StoreErrorKind::Denied,
            "does not accept the credentials",
        ),
        (
            "400 Bad Request",
            r#"{"__type":"com.amazonaws.dynamodb.v20120810#ThrottlingException","message":"x"}"#,
            StoreErrorKind::Busy,
            "throttled",
        ),
        (
            "400 Bad Request",
            r#"{"__type":"com.amazonaws.dynamodb.v20120810#RequestLimitExceeded","message":"x"}"#,
            StoreErrorKind::Busy,
            "throttled",
        ),
        ("500 Internal Server Error", "{}", StoreErrorKind::Unavailable, "internal error"),
        ("200 OK", "this is no JSON", StoreErrorKind::Unavailable, "cannot be parsed"),
    ] {
        let error = open_error("table", &Fake::always(Reply::Http(status, body)).url).await;
        check(&error, kind, says);
        assert!(std::error::Error::source(&error).is_some(), "what AWS said is kept: {error:?}");
    }
}

#[tokio::test]
async fn a_malformed_item_is_reported_by_its_attribute() {
    let table = crate::server::new_table().await;
    let store = DynamoStore::new(table.clone(), DynamoOptions::default());
    let limits = LimitSet::new([Limit::per_minute("rpm", 10)]).unwrap();
    let key = BucketKey {
        namespace: NamespaceId::new("abcdefghijk").unwrap(),
        entity: EntityId::new("a").unwrap(),
        resource: ResourceName::new("r").unwrap(),
    };
    let target = Arc::new(Target::new(key, Arc::new(limits), Lifetime::Forever));
    let takes = [Take { cell: 0, amount: Millitokens::new(1_000) }].into_iter().collect();
    let legs = [Leg { target: Arc::clone(&target), takes }].into_iter().collect();
    let plan = Plan { max_skew: None, now: Timestamp::from_millis(1_794_752_736_000), legs };
    store.acquire(&plan).await.unwrap();
    let text = |text: &str| Some(AttributeValue::S(text.to_owned()));
    let number = |number: &str| Some(AttributeValue::N(number.to_owned()));
    for (attribute, value, says) in [
        ("b_rpm_tk", text("ten"), "b_rpm_tk should be a whole number"),
        // One after the other, in the order in which they are found out from behind.
        ("b_rpm_cp", number("-1"), "b_rpm_cp should be"),
        ("b_rpm_ra", None, "b_rpm_ra should be present"),
        ("rf", Some(AttributeValue::Null(true)), "rf should be a whole number"),
        ("rf", None, "rf should be present"),
    ] {
        let before = damaged(table.name(), target.key(), attribute, value).await;
        let fresh = DynamoStore::new(table.clone(), DynamoOptions::default());
        check(&fresh.acquire(&plan).await.unwrap_err(), StoreErrorKind::Corrupt, says);
        assert_eq!(item(table.name(), target.key()).await, before, "nothing is lost");
    }
}

fn key_of(bucket: &BucketKey) -> HashMap<String, AttributeValue> {
    let key = zae_limiter_schema::ItemKey::of(&Key::Bucket(bucket.clone()));
    let text = AttributeValue::S;
    HashMap::from([("PK".to_owned(), text(key.pk)), ("SK".to_owned(), text(key.sk))])
}

async fn item(table: &str, bucket: &BucketKey) -> Option<HashMap<String, AttributeValue>> {
    let get = client().get_item().table_name(table).set_key(Some(key_of(bucket)));
    get.consistent_read(true).send().await.unwrap().item
}

/// Gives a bucket's item another value of an attribute, or takes it away: what it is then.
async fn damaged(
    table: &str,
    bucket: &BucketKey,
    attribute: &str,
    value: Option<AttributeValue>,
) -> Option<HashMap<String, AttributeValue>> {
    let update = client().update_item().table_name(table).set_key(Some(key_of(bucket)));
    let update = update.expression_attribute_names("#a", attribute);
    let update = match value {
        Some(value) => {
            update.update_expression("SET #a = :v").expression_attribute_values(":v", value)
        }
        None => update.update_expression("REMOVE #a"),
    };
    update.send().await.unwrap();
    item(table, bucket).await
}
