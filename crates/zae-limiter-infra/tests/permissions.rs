//! Each policy allows what its users need and nothing else. Real clients run on a simulated table,
//! and an evaluator checks every call against the template's policies, as IAM does.
#![allow(clippy::unwrap_used, reason = "a test says what is wrong by panicking")]

#[allow(dead_code, reason = "not every test uses all of it")]
mod common;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use common::cfn::Stack;
use common::iam::{Request, allows};
use serde_json::Value;
use zae_limiter_core::{BoxFuture, Entropy, Error, Limit, ManualClock, RateLimiter, Timestamp};
use zae_limiter_dynamodb::{DynamoOptions, DynamoStore};
use zae_limiter_infra::StackOptions;
use zae_limiter_schema::{
    BatchRead, Change, Consistency, Consumed, ItemKey, Query, QueryOutput, Table, TableError,
    TableErrorKind, Task, Transacted, Update, Updated,
};
use zae_limiter_testkit::{SimTable, Split};

/// The table's ARN, as the tests evaluate the template's functions.
const TABLE_ARN: &str = "att:Table.Arn";

/// A table that checks every call against a policy.
#[derive(Debug)]
struct Guarded {
    table: SimTable,
    principal: Principal,
}

#[derive(Clone)]
struct Principal {
    policy: Value,
    tag: Option<String>,
}

impl fmt::Debug for Principal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Principal").field("tag", &self.tag).finish_non_exhaustive()
    }
}

impl Principal {
    /// A principal with one of the template's policies.
    fn with(policy: &str) -> Self {
        let options = StackOptions::new("my-app".parse().unwrap());
        let stack = Stack::of(&options.plan().unwrap(), "code/x.zip");
        let policy = stack.properties(policy)["PolicyDocument"].clone();
        Self { policy, tag: None }
    }

    fn of_namespace(policy: &str, id: &str) -> Self {
        Self { tag: Some(id.to_owned()), ..Self::with(policy) }
    }

    fn may(&self, action: &str, resource: &str, keys: &[String]) -> bool {
        let action = format!("dynamodb:{action}");
        let tag = self.tag.as_deref();
        allows(&self.policy, &Request { action: &action, resource, leading_keys: keys, tag })
    }

    fn check(&self, action: &str, resource: &str, keys: &[String]) -> Result<(), TableError> {
        if self.may(action, resource, keys) {
            return Ok(());
        }
        let message = format!("no permission for {action} on {resource} {keys:?}");
        Err(TableError::new(TableErrorKind::Denied, message))
    }
}

fn leading<'a>(keys: impl IntoIterator<Item = &'a ItemKey>) -> Vec<String> {
    keys.into_iter().map(|key| key.pk.clone()).collect()
}

// The permissions that each call of the SDK adapter needs.
impl Table for Guarded {
    fn update<'a>(&'a self, update: &'a Update) -> BoxFuture<'a, Result<Updated, TableError>> {
        Box::pin(async move {
            self.principal.check("UpdateItem", TABLE_ARN, &leading([&update.key]))?;
            self.table.update(update).await
        })
    }

    fn transact<'a>(
        &'a self,
        changes: &'a [Change],
    ) -> BoxFuture<'a, Result<Transacted, TableError>> {
        Box::pin(async move {
            for change in changes {
                let action = match change {
                    Change::Update(_) => "UpdateItem",
                    Change::Delete(..) => "DeleteItem",
                    Change::Check(..) => "ConditionCheckItem",
                };
                self.principal.check(action, TABLE_ARN, &leading([change.key()]))?;
            }
            self.table.transact(changes).await
        })
    }

    fn read<'a>(
        &'a self,
        keys: &'a [ItemKey],
        consistency: Consistency,
    ) -> BoxFuture<'a, Result<BatchRead, TableError>> {
        Box::pin(async move {
            self.principal.check("BatchGetItem", TABLE_ARN, &leading(keys))?;
            self.table.read(keys, consistency).await
        })
    }

    fn query<'a>(&'a self, query: &'a Query) -> BoxFuture<'a, Result<QueryOutput, TableError>> {
        Box::pin(async move {
            let resource = match query.index {
                Some(index) => format!("{TABLE_ARN}/index/{}", index.name()),
                None => TABLE_ARN.to_owned(),
            };
            self.principal.check("Query", &resource, std::slice::from_ref(&query.partition))?;
            let mut query = query.clone();
            if query.index.is_some() {
                query.consistency = Consistency::Eventual;
            }
            self.table.query(&query).await
        })
    }

    fn delete<'a>(&'a self, keys: &'a [ItemKey]) -> BoxFuture<'a, Result<Consumed, TableError>> {
        Box::pin(async move {
            self.principal.check("BatchWriteItem", TABLE_ARN, &leading(keys))?;
            self.table.delete(keys).await
        })
    }

    fn pause(&self, wait: Duration) -> BoxFuture<'_, ()> {
        self.table.pause(wait)
    }

    fn timeout(&self, limit: Duration) -> BoxFuture<'_, ()> {
        self.table.timeout(limit)
    }

    fn spawn(&self, task: Task) -> Result<(), Task> {
        self.table.spawn(task)
    }
}

fn store(table: &SimTable, principal: Principal) -> Arc<DynamoStore> {
    let guarded = Guarded { table: table.clone(), principal };
    Arc::new(DynamoStore::new(Arc::new(guarded), DynamoOptions::default()))
}

/// A store that may only acquire, next to one of an administrator who can read everything.
async fn acquire_only() -> Arc<Split> {
    let table = SimTable::default();
    Arc::new(Split {
        acquiring: store(&table, Principal::with("AcquirePolicy")),
        administering: store(&table, Principal::with("FullPolicy")),
    })
}

zae_limiter_testkit::bucket_conformance_tests!(acquire_only_is_enough, acquire_only);

async fn open(
    table: &SimTable,
    principal: Principal,
    namespace: &str,
) -> Result<RateLimiter, Error> {
    let clock = ManualClock::new(Timestamp::from_millis(1_800_000_000_000));
    RateLimiter::builder(DynamoStore::clone(&store(table, principal)))
        .clock(Arc::new(clock))
        .entropy(Entropy::seeded(7))
        .namespace(namespace)
        .open()
        .await
}

/// A table with a namespace `acme`, which has stored limits, a parent and a child.
async fn given() -> (SimTable, RateLimiter) {
    let table = SimTable::default();
    let root = open(&table, Principal::with("FullPolicy"), "default").await.unwrap();
    root.namespaces().register("acme").await.unwrap();
    root.namespaces().register("other").await.unwrap();
    let acme = open(&table, Principal::with("FullPolicy"), "acme").await.unwrap();
    acme.set_resource_defaults("gpt-4", [Limit::per_minute("rpm", 100)]).await.unwrap();
    acme.create_entity("org").await.unwrap();
    acme.create_entity("key-1").parent("org").cascade().await.unwrap();
    (table, acme)
}

fn is_denied(error: &Error) -> bool {
    format!("{error:?}").contains("no permission for")
}

async fn take(limiter: &RateLimiter) -> Result<(), Error> {
    let lease = limiter.acquire("key-1", "gpt-4").take("rpm", 1).await?;
    lease.commit().await
}

/// All calls that write to items other than buckets.
async fn writes_outside_buckets(limiter: &RateLimiter) -> Vec<(&'static str, Result<(), Error>)> {
    let limit = || [Limit::per_minute("rpm", 5)];
    vec![
        ("entity", limiter.create_entity("new").await.map(drop)),
        ("system", limiter.set_system_defaults(limit(), None).await.map(drop)),
        ("resource", limiter.set_resource_defaults("gpt-4", limit()).await.map(drop)),
        ("entity limits", limiter.set_limits("key-1", Some("gpt-4"), limit()).await.map(drop)),
        ("delete limits", limiter.delete_resource_defaults("gpt-4").await.map(drop)),
        ("namespace", limiter.namespaces().register("mine").await.map(drop)),
        ("delete entity", limiter.delete_entity("key-1").await.map(drop)),
    ]
}

async fn every_write_outside_buckets_is_denied(table: &SimTable, limiter: &RateLimiter) {
    let before = outside_buckets(table);
    for (what, result) in writes_outside_buckets(limiter).await {
        let error = result.expect_err(what);
        assert!(is_denied(&error), "{what}: {error:?}");
    }
    assert_eq!(outside_buckets(table), before);
}

fn outside_buckets(table: &SimTable) -> Vec<zae_limiter_schema::Item> {
    let is_bucket =
        |item: &zae_limiter_schema::Item| item["PK"].as_str().unwrap().contains("/BUCKET#");
    table.items().into_iter().filter(|item| !is_bucket(item)).collect()
}

#[tokio::test]
async fn the_acquire_policy_writes_only_to_buckets() {
    let (table, _) = given().await;
    let limiter = open(&table, Principal::with("AcquirePolicy"), "acme").await.unwrap();
    take(&limiter).await.unwrap();
    limiter.available("key-1", "gpt-4", &[]).await.unwrap();
    every_write_outside_buckets_is_denied(&table, &limiter).await;
}

#[tokio::test]
async fn the_read_policy_reads_everything_and_writes_nothing() {
    let (table, acme) = given().await;
    take(&acme).await.unwrap();
    let limiter = open(&table, Principal::with("ReadPolicy"), "acme").await.unwrap();
    read_all(&limiter).await.unwrap();
    every_write_outside_buckets_is_denied(&table, &limiter).await;
    assert!(is_denied(&take(&limiter).await.unwrap_err()));
}

/// Reads of every kind within a namespace.
async fn read_all(limiter: &RateLimiter) -> Result<(), Error> {
    limiter.available("key-1", "gpt-4", &[]).await?;
    assert!(limiter.entity("key-1").await?.is_some());
    assert_eq!(limiter.children("org")?.all().await?.len(), 1);
    assert!(limiter.resource_defaults("gpt-4").await?.is_some());
    assert!(!limiter.audit_events("key-1")?.all().await?.is_empty());
    Ok(())
}

#[tokio::test]
async fn a_namespace_principal_stays_in_its_namespace() {
    let (table, acme) = given().await;
    let id = acme.namespace_id().as_str().to_owned();
    let full = |tag: &str| Principal::of_namespace("NamespaceFullPolicy", tag);
    let limiter = open(&table, full(&id), "acme").await.unwrap();
    take(&limiter).await.unwrap();
    read_all(&limiter).await.unwrap();
    limiter.set_limits("key-1", Some("gpt-4"), [Limit::per_minute("rpm", 5)]).await.unwrap();
    limiter.delete_entity("key-1").await.unwrap();
    assert!(is_denied(&limiter.namespaces().register("mine").await.unwrap_err()));
    let elsewhere = open(&table, full(&id), "other").await.unwrap();
    let before = table.items();
    assert!(is_denied(&take(&elsewhere).await.unwrap_err()));
    assert!(is_denied(&read_all(&elsewhere).await.unwrap_err()));
    every_write_outside_buckets_is_denied(&table, &elsewhere).await;
    assert_eq!(table.items(), before);
}

#[tokio::test]
async fn namespace_policies_are_as_narrow_as_the_global_ones() {
    let (table, acme) = given().await;
    let id = acme.namespace_id().as_str().to_owned();
    let acquire = || Principal::of_namespace("NamespaceAcquirePolicy", &id);
    let limiter = open(&table, acquire(), "acme").await.unwrap();
    take(&limiter).await.unwrap();
    every_write_outside_buckets_is_denied(&table, &limiter).await;
    let elsewhere = open(&table, acquire(), "other").await.unwrap();
    assert!(is_denied(&take(&elsewhere).await.unwrap_err()));
    let read = || Principal::of_namespace("NamespaceReadPolicy", &id);
    let limiter = open(&table, read(), "acme").await.unwrap();
    read_all(&limiter).await.unwrap();
    every_write_outside_buckets_is_denied(&table, &limiter).await;
    assert!(is_denied(&take(&limiter).await.unwrap_err()));
    let elsewhere = open(&table, read(), "other").await.unwrap();
    assert!(is_denied(&read_all(&elsewhere).await.unwrap_err()));
}

#[tokio::test]
async fn a_principal_without_the_tag_may_do_nothing() {
    let (table, _) = given().await;
    for policy in ["NamespaceAcquirePolicy", "NamespaceFullPolicy", "NamespaceReadPolicy"] {
        let limiter = open(&table, Principal::with(policy), "acme").await.unwrap();
        assert!(
            is_denied(&limiter.available("key-1", "gpt-4", &[]).await.unwrap_err()),
            "{policy}"
        );
        assert!(is_denied(&take(&limiter).await.unwrap_err()), "{policy}");
    }
}

/// Calls that no limiter makes, but that its credentials could be used for.
#[test]
fn calls_that_no_limiter_makes_are_denied() {
    let acquire = Principal::with("AcquirePolicy");
    let key = |text: &str| vec![text.to_owned()];
    let ns = "abcdefghijk";
    let bucket = key(&format!("{ns}/BUCKET#key-1#gpt-4#0"));
    for action in ["UpdateItem", "PutItem", "ConditionCheckItem", "GetItem", "BatchGetItem"] {
        assert!(acquire.may(action, TABLE_ARN, &bucket), "{action}");
    }
    for action in ["DeleteItem", "BatchWriteItem", "Scan", "DeleteTable", "UpdateTable", "Query"] {
        assert!(!acquire.may(action, TABLE_ARN, &bucket), "{action}");
        assert!(!acquire.may(action, TABLE_ARN, &[]), "{action}");
    }
    for other in ["ENTITY#key-1", "RESOURCE#a/BUCKET", "SYSTEM#", "AUDIT#key-1", "RESOURCE#gpt-4"] {
        for action in ["UpdateItem", "PutItem", "ConditionCheckItem"] {
            let keys = key(&format!("{ns}/{other}"));
            assert!(!acquire.may(action, TABLE_ARN, &keys), "{action} {other}");
            let mixed = [keys, bucket.clone()].concat();
            assert!(!acquire.may(action, TABLE_ARN, &mixed), "{action} {mixed:?}");
        }
    }
    assert!(!acquire.may("GetItem", TABLE_ARN, &key(&format!("{ns}/AUDIT#key-1"))));
    assert!(!acquire.may("UpdateItem", TABLE_ARN, &key("_/SYSTEM#")));
    // A call without keys cannot meet a condition on keys.
    assert!(!acquire.may("UpdateItem", TABLE_ARN, &[]));
    assert!(!acquire.may("UpdateItem", "another-table", &bucket));
    let full = Principal::with("FullPolicy");
    for action in ["DeleteTable", "UpdateTable", "CreateBackup", "UpdateTimeToLive"] {
        assert!(!full.may(action, TABLE_ARN, &[]), "{action}");
    }
    assert!(full.may("Query", &format!("{TABLE_ARN}/index/GSI4"), &key(ns)));
    assert!(full.may("Scan", TABLE_ARN, &[]));
    let tenant = Principal::of_namespace("NamespaceFullPolicy", ns);
    assert!(!tenant.may("Scan", TABLE_ARN, &[]));
    assert!(tenant.may("Query", &format!("{TABLE_ARN}/index/GSI4"), &key(ns)));
    assert!(!tenant.may("Query", &format!("{TABLE_ARN}/index/GSI4"), &key("kjihgfedcba")));
    assert!(!tenant.may("Query", TABLE_ARN, &key("_/SYSTEM#")), "others are not listed");
}

#[test]
fn the_aggregator_may_book_and_refill_and_nothing_else() {
    let options = StackOptions::new("my-app".parse().unwrap());
    let stack = Stack::of(&options.plan().unwrap(), "code/x.zip");
    let policy = stack.properties("AggregatorRole")["Policies"][0]["PolicyDocument"].clone();
    let aggregator = Principal { policy, tag: None };
    let key = |text: &str| vec![text.to_owned()];
    assert!(aggregator.may("UpdateItem", TABLE_ARN, &key("abcdefghijk/BUCKET#k#r#0")));
    assert!(aggregator.may("UpdateItem", TABLE_ARN, &key("abcdefghijk/ENTITY#k")));
    assert!(aggregator.may("GetRecords", "att:Table.StreamArn", &[]));
    // A record is created with a check of the tombstones of its entity and namespace.
    let tombstones = ["abcdefghijk/ENTITY#k".to_owned(), "abcdefghijk/SYSTEM#".to_owned()];
    assert!(aggregator.may("BatchGetItem", TABLE_ARN, &tombstones));
    assert!(aggregator.may("ConditionCheckItem", TABLE_ARN, &tombstones[..1]));
    assert!(aggregator.may("BatchWriteItem", TABLE_ARN, &tombstones[..1]));
    assert!(!aggregator.may("GetItem", TABLE_ARN, &key("_/SYSTEM#")));
    assert!(!aggregator.may("GetItem", TABLE_ARN, &key("abcdefghijk/RESOURCE#r")));
    for other in
        ["abcdefghijk/SYSTEM#", "abcdefghijk/RESOURCE#r", "abcdefghijk/AUDIT#k", "_/SYSTEM#"]
    {
        assert!(!aggregator.may("UpdateItem", TABLE_ARN, &key(other)), "{other}");
    }
    for action in ["DeleteItem", "PutItem", "Scan", "BatchWriteItem"] {
        assert!(!aggregator.may(action, TABLE_ARN, &key("abcdefghijk/BUCKET#k#r#0")), "{action}");
    }
}

/// No call reaches another namespace.
#[test]
fn a_namespace_policy_gives_no_access_to_other_namespaces() {
    let (own, other) = ("abcdefghijk", "kjihgfedcba");
    let actions = [
        "BatchGetItem",
        "BatchWriteItem",
        "ConditionCheckItem",
        "DeleteItem",
        "GetItem",
        "PutItem",
        "Query",
        "UpdateItem",
    ];
    let kinds = ["BUCKET#k#r#0", "ENTITY#k", "RESOURCE#r", "SYSTEM#", "AUDIT#k", "PARENT#k"];
    for policy in ["NamespaceAcquirePolicy", "NamespaceFullPolicy", "NamespaceReadPolicy"] {
        let tenant = Principal::of_namespace(policy, own);
        for action in actions {
            for kind in kinds {
                let foreign = format!("{other}/{kind}");
                for resource in [TABLE_ARN, "att:Table.Arn/index/GSI1"] {
                    let keys = [foreign.clone()];
                    assert!(!tenant.may(action, resource, &keys), "{policy} {action} {kind}");
                    let mixed = [format!("{own}/{kind}"), foreign.clone()];
                    assert!(!tenant.may(action, resource, &mixed), "{policy} {action} {kind}");
                }
            }
            assert!(!tenant.may(action, TABLE_ARN, &[]), "{policy} {action} without keys");
        }
    }
}
