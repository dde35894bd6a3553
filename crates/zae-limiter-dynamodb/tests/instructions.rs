//! The instructions of one acquire in the store, without the SDK: the driver, the bucket's machine, the write, and the
//! decoding of the answer. The count hardly depends on the load of the machine. Needs valgrind:
//!
//! ```sh
//! test=$(cargo test --release -p zae-limiter-dynamodb --no-default-features --test instructions --no-run 2>&1 |
//!   sed -n 's/.*(\(.*\))/\1/p')
//! for calls in 1000 3000; do
//!   ZAEL_CALLS=$calls valgrind --tool=callgrind --callgrind-out-file=/dev/null "$test" --ignored 2>&1 | grep Collected
//! done
//! ```
//!
//! The difference of both counts, divided by 2,000, leaves out the start.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use zae_limiter_core::{
    Admission, BoxFuture, BucketKey, EntityId, Leg, Lifetime, Limit, LimitSet, NamespaceId, Plan,
    ResourceName, Store, Take, Target, Timestamp, amount,
};
use zae_limiter_dynamodb::{DynamoOptions, DynamoStore};
use zae_limiter_schema::bucket::{BucketItem, Field};
use zae_limiter_schema::{
    BatchRead, BucketItemKey, Change, Consistency, Consumed, Decoded, ItemKey, Query, QueryOutput,
    Table, TableError, Transacted, Update, Updated, render_update,
};

const NOW_MS: i64 = 1_795_003_200_000;

/// Replies to every update with the same item, as the SDK parses it, and to everything else with nothing.
#[derive(Debug)]
struct Canned {
    item: HashMap<String, String>,
}

const CONSUMED: Consumed = Consumed { write: 1.0, read: 0.0 };

impl Canned {
    /// A bucket with half of its tokens, refilled 5 ms ago.
    fn new() -> Self {
        let numbers = [
            ("b_rpm_tk", 500_000_000_000),
            ("b_rpm_cp", 1_000_000_000_000),
            ("b_rpm_ra", 1_000_000_000_000),
            ("b_rpm_rp", 1_000),
            ("b_rpm_tc", 7_000),
            ("b_tpm_tk", 50_000_000_000_000),
            ("b_tpm_cp", 100_000_000_000_000),
            ("b_tpm_ra", 100_000_000_000_000),
            ("b_tpm_rp", 1_000),
            ("b_tpm_tc", 70_000),
            ("b_wcu_tk", 999_000),
            ("b_wcu_cp", 1_000_000),
            ("b_wcu_ra", 1_000_000),
            ("b_wcu_rp", 1_000),
            ("b_wcu_tc", 7_000),
            ("rf", NOW_MS - 5),
            ("rm_at", NOW_MS - 5),
            ("gn", NOW_MS),
            ("limits_at", NOW_MS),
            ("shard_count", 1),
            ("ttl", NOW_MS / 1_000 + 7),
        ];
        let texts = ["PK", "SK", "entity_id", "resource", "GSI2PK", "GSI2SK", "GSI3PK", "GSI3SK"];
        let numbers = numbers.map(|(name, number)| (name.to_owned(), number.to_string()));
        let texts = texts.map(|name| (name.to_owned(), "default0000/BUCKET#key-1".to_owned()));
        Self { item: numbers.into_iter().chain(texts).collect() }
    }
}

impl Table for Canned {
    fn update<'a>(&'a self, _: &'a Update) -> BoxFuture<'a, Result<Updated, TableError>> {
        Box::pin(async { Ok(Updated::Unmet(None, CONSUMED)) })
    }

    fn update_bucket<'a>(
        &'a self,
        key: &'a BucketItemKey,
        update: Update,
    ) -> BoxFuture<'a, Result<Updated<Decoded>, TableError>> {
        Box::pin(async move {
            let rendered = render_update(&update.actions, &update.conditions);
            assert!(rendered.update.contains("ADD b_rpm_tk"), "{}", rendered.update);
            // The SDK hands over an item of its own.
            let item = self.item.clone();
            let fields = item.iter().map(|(name, value)| {
                let is_number = value.bytes().all(|c| c.is_ascii_digit());
                (name.as_str(), if is_number { Field::N(value) } else { Field::S(value) })
            });
            Ok(Updated::Done(BucketItem::decode_fields(key, fields), CONSUMED))
        })
    }

    fn transact<'a>(&'a self, _: &'a [Change]) -> BoxFuture<'a, Result<Transacted, TableError>> {
        Box::pin(async { Ok(Transacted::Done(CONSUMED)) })
    }

    fn read<'a>(
        &'a self,
        _: &'a [ItemKey],
        _: Consistency,
    ) -> BoxFuture<'a, Result<BatchRead, TableError>> {
        Box::pin(async { Ok(BatchRead::default()) })
    }

    fn query<'a>(&'a self, _: &'a Query) -> BoxFuture<'a, Result<QueryOutput, TableError>> {
        let nothing = QueryOutput { items: Vec::new(), next: None, consumed: CONSUMED };
        Box::pin(async { Ok(nothing) })
    }

    fn delete<'a>(&'a self, _: &'a [ItemKey]) -> BoxFuture<'a, Result<Consumed, TableError>> {
        Box::pin(async { Ok(CONSUMED) })
    }

    fn pause(&self, _: Duration) -> BoxFuture<'_, ()> {
        Box::pin(std::future::ready(()))
    }

    fn timeout(&self, _: Duration) -> BoxFuture<'_, ()> {
        Box::pin(std::future::pending())
    }
}

#[test]
#[ignore = "for valgrind"]
fn calls() {
    let calls = std::env::var("ZAEL_CALLS").map_or(10, |calls| calls.parse().unwrap());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let options = DynamoOptions::default().seed(1).runtime(runtime.handle().clone());
    let store = DynamoStore::new(Arc::new(Canned::new()), options);
    let limits =
        [Limit::per_second("rpm", 1_000_000_000), Limit::per_second("tpm", 100_000_000_000)];
    let limits = Arc::new(LimitSet::new(limits).unwrap());
    let key = BucketKey {
        namespace: NamespaceId::new("ns000000001").unwrap(),
        entity: EntityId::new("key-1").unwrap(),
        resource: ResourceName::new("gpt-4").unwrap(),
    };
    let target = Arc::new(Target::new(key, limits, Lifetime::Idle(Duration::from_secs(7))));
    let take = |cell, tokens| Take { cell, amount: amount(tokens).unwrap() };
    let leg = Leg { target, takes: [take(0, 1), take(1, 10)].into() };
    let plan = Plan {
        now: Timestamp::from_millis(NOW_MS),
        max_skew: None,
        legs: [leg].into_iter().collect(),
    };
    runtime.block_on(async {
        for _ in 0..calls {
            let admission = store.acquire(&plan).await.unwrap();
            assert!(matches!(admission, Admission::Taken(_)), "{admission:?}");
        }
    });
}
