//! The acquire-only policy, enforced. The conformance suite's checks of buckets, and a bucket with
//! several shards, run through the SDK with that principal's keys. The administrator's keys write, list
//! and delete everything else. Every write outside buckets is denied.

use std::sync::{Arc, LazyLock};
use std::time::Duration;

use aws_sdk_dynamodb::Client;
use aws_sdk_dynamodb::error::{ProvideErrorMetadata, SdkError};
use aws_sdk_dynamodb::types::{
    AttributeValue, Delete, DeleteRequest, Put, PutRequest, TransactWriteItem, Update, WriteRequest,
};
use tokio::sync::{Mutex, OwnedMutexGuard};
use zae_limiter::dynamodb::aws::AwsTable;
use zae_limiter::model::{LimitSet, Millitokens, Take};
use zae_limiter::store::{
    Admission, BucketKey, Leg, Lifetime, Placement, Plan, Settlement, Store, Target,
};
use zae_limiter::testing::{Clock, SystemClock};
use zae_limiter::{DynamoOptions, DynamoStore, Limit, Timestamp};
use zae_limiter_schema::{Item, ItemKey, Table as _};
use zae_limiter_testkit::Split;

use crate::aws::{ROOT, Server};
use crate::permissions::Principal;

const TABLE: &str = "app";

/// A stack, and a principal that may only acquire in it.
struct Account {
    server: Server,
    keys: (String, String),
    /// The policies are those of one table, so the tests take turns.
    turn: Arc<Mutex<()>>,
}

static ACCOUNT: LazyLock<Account> = LazyLock::new(|| {
    let server = Server::with_iam();
    let deployed = server.run(ROOT, "deploy --no-aggregator --no-alarms --name app");
    assert_eq!(deployed.code, 0, "{}", deployed.err);
    let keys = Principal::new(&server, "acq", None).keys().clone();
    Account { server, keys, turn: Arc::default() }
});

fn client(keys: (&str, &str)) -> Client {
    crate::aws::client(ACCOUNT.server.endpoint(), keys)
}

fn table(keys: (&str, &str)) -> Arc<AwsTable> {
    let clock: Arc<dyn Clock> = Arc::new(SystemClock);
    Arc::new(AwsTable::new(client(keys), TABLE, clock))
}

fn acquirer() -> (&'static str, &'static str) {
    (&ACCOUNT.keys.0, &ACCOUNT.keys.1)
}

/// Waits for this test's turn, and empties the table.
async fn turn() -> OwnedMutexGuard<()> {
    let turn = Arc::clone(&ACCOUNT.turn).lock_owned().await;
    let root = table(ROOT);
    let keys: Vec<ItemKey> = items(&root).await.iter().map(key_of).collect();
    root.delete(&keys).await.unwrap();
    turn
}

async fn items(table: &AwsTable) -> Vec<Item> {
    let (mut all, mut after) = (Vec::new(), None);
    loop {
        let (page, next) = table.scan_page(after.as_ref()).await.unwrap();
        all.extend(page);
        match next {
            Some(next) => after = Some(next),
            None => return all,
        }
    }
}

fn key_of(item: &Item) -> ItemKey {
    let text = |name: &str| item[name].as_str().unwrap().to_owned();
    ItemKey::new(text("PK"), text("SK"))
}

/// A store without local refusals, because another client deletes buckets.
fn store(keys: (&str, &str)) -> Arc<DynamoStore> {
    // The emulator is slower than AWS, above all on a busy machine.
    let patient = DynamoOptions::default().call_timeout(Duration::from_secs(60));
    // The checks have a time of their own.
    let options = patient.seed(1).local_refusal(Duration::ZERO).max_clock_skew(Duration::ZERO);
    Arc::new(DynamoStore::new(table(keys), options))
}

async fn acquire_only() -> (Arc<Split>, OwnedMutexGuard<()>) {
    let turn = turn().await;
    let split = Split { acquiring: store(acquirer()), administering: store(ROOT) };
    (Arc::new(split), turn)
}

zae_limiter_testkit::bucket_conformance_tests!(acquire_only_is_enough, acquire_only);

fn target() -> Arc<Target> {
    let key = BucketKey {
        namespace: "ns000000001".parse().unwrap(),
        entity: "org".parse().unwrap(),
        resource: "gpt-4".parse().unwrap(),
    };
    let limits = LimitSet::new([Limit::per_minute("tpm", 1_000)]).unwrap();
    Arc::new(Target::new(key, Arc::new(limits), Lifetime::Forever))
}

const NOW: Timestamp = Timestamp::from_millis(1_794_751_200_000);

/// Takes tokens. Returns the shard, or `None` if refused.
async fn take(store: &DynamoStore, target: &Arc<Target>, tokens: i64) -> Option<u32> {
    let takes = [Take { cell: 0, amount: Millitokens::new(tokens * 1_000) }];
    let leg = Leg { target: Arc::clone(target), takes: takes.into_iter().collect() };
    let plan = Plan { max_skew: None, now: NOW, legs: [leg].into_iter().collect() };
    match store.acquire(&plan).await.unwrap() {
        Admission::Taken(taken) => Some(taken[0].placement.get()),
        Admission::Refused(_) => None,
    }
}

/// Split, gather, settlement over several shards, and merge are transactions: AWS checks the permission
/// for each item.
#[tokio::test]
async fn buckets_with_shards_need_no_other_permissions() {
    let _turn = turn().await;
    let (store, target) = (store(acquirer()), target());
    take(&store, &target, 100).await.unwrap();
    for shards in [2, 4] {
        store.split(target.key(), NOW).await.unwrap();
        // The other shards are split in the background; each look takes a while, too.
        let mut looks = 0;
        while items(&table(ROOT)).await.len() != shards {
            looks += 1;
            assert!(looks < 100, "not split into {shards} shards");
        }
    }
    assert_eq!(take(&store, &target, 901).await, None, "more than there is");
    let shard = take(&store, &target, 900).await.expect("all of it, from all shards");
    assert_eq!(store.reshard_counts().gathered, 1);
    let given = [Take { cell: 0, amount: Millitokens::new(-900_000) }].into_iter().collect();
    let settlement = Settlement {
        target: Arc::clone(&target),
        placement: Placement::new(shard),
        differences: given,
    };
    store.settle(&[settlement], NOW).await.unwrap();
    for _ in 0..2 {
        store.merge(target.key(), NOW).await.unwrap();
    }
    let whole = store.peek(&[target.key().clone()], NOW).await.unwrap();
    assert_eq!(whole[0].as_ref().unwrap().cell("tpm").unwrap().0.tokens.get(), 900_000);
    let reshard_counts = store.reshard_counts();
    assert_eq!((reshard_counts.splits, reshard_counts.merges), (2, 2), "{reshard_counts:?}");
}

/// An item of each kind but buckets; the last is a bucket.
const KINDS: [(&str, &str); 11] = [
    ("ns000000001/ENTITY#key-1", "#META"),
    ("ns000000001/ENTITY#key-1", "#CONFIG#gpt-4"),
    ("ns000000001/ENTITY#key-1", "#USAGE#gpt-4#2026-11-15"),
    ("ns000000001/RESOURCE#gpt-4", "#CONFIG"),
    ("ns000000001/SYSTEM#", "#CONFIG"),
    ("ns000000001/SYSTEM#", "#RESOURCES"),
    ("ns000000001/AUDIT#key-1", "#AUDIT#01JCQ"),
    ("_/SYSTEM#", "#VERSION"),
    ("_/SYSTEM#", "#NAMESPACE#default"),
    ("_/CHECKPOINT#", "#SHARD"),
    ("ns000000001/BUCKET#key-1#gpt-4#0", "#STATE"),
];

/// Every call of DynamoDB's that changes an item, on one of them.
async fn writes(client: &Client, kind: (&str, &str)) -> Vec<(&'static str, Option<String>)> {
    let text = |text: &str| AttributeValue::S(text.to_owned());
    let (pk, sk) = (text(kind.0), text(kind.1));
    let put = PutRequest::builder().item("PK", pk.clone()).item("SK", sk.clone()).build().unwrap();
    let delete = DeleteRequest::builder().key("PK", pk.clone()).key("SK", sk.clone()).build();
    let batch = async |request| {
        client.batch_write_item().request_items(TABLE, vec![request]).send().await.map(drop)
    };
    let set = "SET hacked = :pk";
    let update = Update::builder().table_name(TABLE).update_expression(set);
    let update = update.key("PK", pk.clone()).key("SK", sk.clone());
    let update = update.expression_attribute_values(":pk", pk.clone()).build().unwrap();
    let whole = Put::builder().table_name(TABLE).item("PK", pk.clone()).item("SK", sk.clone());
    let gone = Delete::builder().table_name(TABLE).key("PK", pk.clone()).key("SK", sk.clone());
    let changes = [
        ("a put in a transaction", TransactWriteItem::builder().put(whole.build().unwrap())),
        ("an update in a transaction", TransactWriteItem::builder().update(update)),
        ("a deletion in a transaction", TransactWriteItem::builder().delete(gone.build().unwrap())),
    ];
    let item = client.put_item().table_name(TABLE).item("PK", pk.clone()).item("SK", sk.clone());
    let one = client.update_item().table_name(TABLE).update_expression(set);
    let one = one.key("PK", pk.clone()).key("SK", sk.clone());
    let one = one.expression_attribute_values(":pk", pk.clone());
    let none = client.delete_item().table_name(TABLE).key("PK", pk.clone()).key("SK", sk.clone());
    let write = WriteRequest::builder();
    let mut codes = vec![
        ("PutItem", code(item.send().await)),
        ("UpdateItem", code(one.send().await)),
        ("DeleteItem", code(none.send().await)),
        ("BatchWriteItem: put", code(batch(write.clone().put_request(put).build()).await)),
        (
            "BatchWriteItem: delete",
            code(batch(write.delete_request(delete.unwrap()).build()).await),
        ),
    ];
    for (what, change) in changes {
        // With an allowed change in the same transaction, which must not happen either.
        let sent =
            client.transact_write_items().transact_items(allowed()).transact_items(change.build());
        codes.push((what, code(sent.send().await)));
    }
    codes
}

/// A change of another bucket.
fn allowed() -> TransactWriteItem {
    let text = |text: &str| AttributeValue::S(text.to_owned());
    let (pk, sk) = ("ns000000001/BUCKET#key-2#gpt-4#0", "#STATE");
    let update = Update::builder().table_name(TABLE).key("PK", text(pk)).key("SK", text(sk));
    let update = update.update_expression("SET hacked = :pk");
    let update = update.expression_attribute_values(":pk", text(pk)).build().unwrap();
    TransactWriteItem::builder().update(update).build()
}

/// The error code of a call.
fn code<T, E, R>(sent: Result<T, SdkError<E, R>>) -> Option<String>
where
    SdkError<E, R>: ProvideErrorMetadata,
{
    sent.err().map(|error| error.code().unwrap_or("no code").to_owned())
}

#[tokio::test]
async fn every_write_outside_buckets_is_denied() {
    let _turn = turn().await;
    let root = client(ROOT);
    for (pk, sk) in KINDS {
        let text = |text: &str| AttributeValue::S(text.to_owned());
        let put = root.put_item().table_name(TABLE).item("PK", text(pk)).item("SK", text(sk));
        put.item("kept", text("as it is")).send().await.unwrap();
    }
    let before = items(&table(ROOT)).await;
    assert_eq!(before.len(), KINDS.len());
    let client = client(acquirer());
    for kind in &KINDS[..KINDS.len() - 1] {
        for (call, code) in writes(&client, *kind).await {
            assert_eq!(code.as_deref(), Some("AccessDeniedException"), "{call} of {kind:?}");
        }
    }
    assert_eq!(items(&table(ROOT)).await, before);
    // The same calls on a bucket: all but deletions are allowed.
    let codes = writes(&client, KINDS[KINDS.len() - 1]).await;
    let denied: Vec<&str> = codes.iter().filter(|one| one.1.is_some()).map(|one| one.0).collect();
    assert_eq!(
        denied,
        [
            "DeleteItem",
            "BatchWriteItem: put",
            "BatchWriteItem: delete",
            "a deletion in a transaction"
        ]
    );
}
