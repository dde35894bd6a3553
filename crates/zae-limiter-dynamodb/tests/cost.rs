//! What calls cost, measured on a table that bills as DynamoDB does.

use std::sync::Arc;
use std::time::Duration;

use zae_limiter_core::{
    Admission, BucketKey, EntityId, Leg, Lifetime, Limit, LimitSet, Millitokens, NamespaceId,
    Placement, Plan, ResourceName, Settlement, Store, Take, Target, Timestamp,
};
use zae_limiter_dynamodb::{DynamoOptions, DynamoStore};
use zae_limiter_schema::{BucketItemKey, Index, SHARD_ZERO, item_size};
use zae_limiter_testkit::{Faults, Projection, Totals, World};

/// One way between a client and the table.
const WAY_US: u64 = 5_000;

fn limits(limits: impl IntoIterator<Item = Limit>) -> Arc<LimitSet> {
    Arc::new(LimitSet::new(limits).expect("valid limits"))
}

fn target(entity: &str, limits: &Arc<LimitSet>) -> Arc<Target> {
    let key = BucketKey {
        namespace: NamespaceId::new("ns000000001").expect("a valid id"),
        entity: EntityId::new(entity).expect("a valid id"),
        resource: ResourceName::new("gpt-4").expect("a valid name"),
    };
    Arc::new(Target::new(key, Arc::clone(limits), Lifetime::Forever))
}

fn take(target: &Arc<Target>, tokens: i64) -> Leg {
    let takes = [Take { cell: 0, amount: Millitokens::new(tokens * 1_000) }];
    Leg { target: Arc::clone(target), takes: takes.into_iter().collect() }
}

fn plan(now: Timestamp, legs: impl IntoIterator<Item = Leg>) -> Plan {
    Plan { max_skew: None, now, legs: legs.into_iter().collect() }
}

/// A client on a table, and what it has cost since the last look.
struct Till {
    world: Arc<World>,
    store: DynamoStore,
    before: Totals,
    since_us: u64,
}

/// Round trips one after the other, write units, read units.
#[derive(Debug, PartialEq)]
struct Price {
    round_trips: u64,
    writes: f64,
    reads: f64,
}

fn price(round_trips: u64, writes: f64, reads: f64) -> Price {
    Price { round_trips, writes, reads }
}

impl Till {
    fn new(world: &Arc<World>) -> Self {
        world.table.set_faults(Faults::delay(WAY_US));
        let table = Arc::new(world.table.for_client(1));
        let store = DynamoStore::new(table, DynamoOptions::default());
        let (before, since_us) = (world.table.totals(), world.time.now_us());
        Self { world: Arc::clone(world), store, before, since_us }
    }

    /// A client of the same table that knows nothing.
    fn another(&self) -> Self {
        Self::new(&self.world)
    }

    fn now(&self) -> Timestamp {
        self.world.time.now()
    }

    async fn pass(&mut self, millis: u64) {
        self.world.time.sleep(Duration::from_millis(millis)).await;
        self.price();
    }

    /// What was spent since the last look.
    fn price(&mut self) -> Price {
        let (after, now_us) = (self.world.table.totals(), self.world.time.now_us());
        let price = Price {
            round_trips: (now_us - self.since_us) / (2 * WAY_US),
            writes: after.writes() - self.before.writes(),
            reads: after.reads - self.before.reads,
        };
        (self.before, self.since_us) = (after, now_us);
        price
    }

    async fn admitted(&mut self, legs: impl IntoIterator<Item = Leg>) -> Price {
        self.price();
        let answer = self.store.acquire(&plan(self.now(), legs)).await.expect("an answer");
        assert!(matches!(answer, Admission::Taken(_)), "{answer:?}");
        self.price()
    }

    async fn refused(&mut self, legs: impl IntoIterator<Item = Leg>) -> Price {
        self.price();
        let answer = self.store.acquire(&plan(self.now(), legs)).await.expect("an answer");
        assert!(matches!(answer, Admission::Refused(_)), "{answer:?}");
        self.price()
    }
}

/// Plays a scenario on a new table.
fn measure(scenario: impl AsyncFnOnce(Till) + 'static) {
    World::play(0, 1, async move |world| {
        scenario(Till::new(&world)).await;
    });
}

fn per_minute(tokens: u64) -> Arc<LimitSet> {
    limits([Limit::per_minute("rpm", tokens)])
}

#[test]
fn a_new_bucket_costs_a_failed_write_a_write_and_its_indexes() {
    measure(async |mut till| {
        let bucket = target("key-1", &per_minute(100));
        // The blind write that finds nothing, the item, and three indexes of keys.
        assert_eq!(till.admitted([take(&bucket, 1)]).await, price(2, 5.0, 0.0));
        let indexes = till.world.table.totals().index_writes;
        assert_eq!(indexes, [0.0, 1.0, 1.0, 1.0]);
    });
}

#[test]
fn an_acquire_with_tokens_left_costs_one_write() {
    measure(async |mut till| {
        let bucket = target("key-1", &per_minute(100));
        till.admitted([take(&bucket, 20)]).await;
        assert_eq!(till.admitted([take(&bucket, 1)]).await, price(1, 1.0, 0.0), "warm");
        // Whoever knows nothing cannot tell a bucket that is more than half full from one that has
        // filled up meanwhile, and looks first.
        let cold = till.another().admitted([take(&bucket, 1)]).await;
        assert_eq!(cold, price(2, 2.0, 0.0), "cold, three quarters full");
        till.admitted([take(&bucket, 30)]).await;
        assert_eq!(till.another().admitted([take(&bucket, 1)]).await, price(1, 1.0, 0.0), "cold");
    });
}

#[test]
fn a_refill_costs_one_write_with_a_snapshot_and_two_without() {
    measure(async |mut till| {
        let bucket = target("key-1", &per_minute(60));
        till.admitted([take(&bucket, 60)]).await;
        till.pass(10_000).await;
        assert_eq!(till.admitted([take(&bucket, 8)]).await, price(1, 1.0, 0.0), "known");
        till.pass(10_000).await;
        assert_eq!(
            till.another().admitted([take(&bucket, 8)]).await,
            price(2, 2.0, 0.0),
            "unknown"
        );
    });
}

#[test]
fn a_refusal_costs_nothing_with_a_snapshot_and_one_write_without() {
    measure(async |mut till| {
        let bucket = target("key-1", &per_minute(60));
        till.admitted([take(&bucket, 60)]).await;
        assert_eq!(till.refused([take(&bucket, 30)]).await, price(0, 0.0, 0.0), "known");
        assert_eq!(
            till.another().refused([take(&bucket, 30)]).await,
            price(1, 1.0, 0.0),
            "unknown"
        );
    });
}

#[test]
fn a_child_and_its_parent_are_written_at_the_same_time() {
    measure(async |mut till| {
        let (child, parent) = (target("key-1", &per_minute(100)), target("org", &per_minute(900)));
        let legs = || [take(&child, 10), take(&parent, 10)];
        till.admitted(legs()).await;
        assert_eq!(till.admitted(legs()).await, price(1, 2.0, 0.0));
    });
}

#[test]
fn concurrent_callers_share_a_write() {
    measure(async |mut till| {
        let bucket = target("key-1", &per_minute(10_000));
        till.admitted([take(&bucket, 2_000)]).await;
        till.price();
        let now = till.now();
        let callers: Vec<_> = (0..10)
            .map(|_| {
                let (store, plan) = (till.store.clone(), plan(now, [take(&bucket, 1)]));
                tokio::spawn(async move { store.acquire(&plan).await })
            })
            .collect();
        for caller in callers {
            let answer = caller.await.expect("no panic").expect("an answer");
            assert!(matches!(answer, Admission::Taken(_)));
        }
        let spent = till.price();
        // The first goes at once, the others together in the next write.
        assert!(spent.round_trips <= 2 && spent.writes <= 2.0, "{spent:?}");
    });
}

#[test]
fn a_busy_bucket_costs_a_fraction_of_a_write_for_each_call() {
    measure(async |mut till| {
        const CALLERS: u32 = 64;
        const CALLS: u32 = 20;
        let bucket = target("key-1", &limits([Limit::per_minute("rpm", 1_000_000)]));
        till.admitted([take(&bucket, 200_000)]).await;
        till.price();
        let callers: Vec<_> = (0..CALLERS)
            .map(|_| {
                let (store, bucket) = (till.store.clone(), Arc::clone(&bucket));
                let time = Arc::clone(&till.world.time);
                tokio::spawn(async move {
                    for _ in 0..CALLS {
                        let plan = plan(time.now(), [take(&bucket, 1)]);
                        let answer = store.acquire(&plan).await.expect("an answer");
                        assert!(matches!(answer, Admission::Taken(_)));
                    }
                })
            })
            .collect();
        for caller in callers {
            caller.await.expect("no panic");
        }
        let each = till.price().writes / f64::from(CALLERS * CALLS);
        println!("64 callers on one bucket: {each:.4} write units for each acquire");
        assert!(each <= 0.25, "{each}");
    });
}

#[test]
fn an_acquire_and_its_settlement_cost_two_writes() {
    measure(async |mut till| {
        let bucket = target("key-1", &per_minute(100));
        till.admitted([take(&bucket, 30)]).await;
        let taken = till.admitted([take(&bucket, 10)]).await;
        let differences = [Take { cell: 0, amount: Millitokens::new(-4_000) }];
        let settlement = Settlement {
            target: Arc::clone(&bucket),
            placement: Placement::new(SHARD_ZERO),
            differences: differences.into_iter().collect(),
        };
        till.store.settle(&[settlement], till.now()).await.expect("an answer");
        let settled = till.price();
        assert!(taken.writes + settled.writes <= 2.0, "{taken:?} {settled:?}");
    });
}

#[test]
fn repeated_refusals_cost_one_write_a_second() {
    measure(async |mut till| {
        let bucket = target("key-1", &limits([Limit::per_day("tpd", 100)]));
        till.admitted([take(&bucket, 100)]).await;
        till.price();
        let end_us = till.world.time.now_us() + 10_000_000;
        let mut calls = 0;
        while till.world.time.now_us() < end_us {
            let answer = till.store.acquire(&plan(till.now(), [take(&bucket, 50)])).await;
            assert!(matches!(answer, Ok(Admission::Refused(_))), "{answer:?}");
            till.world.time.sleep(Duration::from_millis(5)).await;
            calls += 1;
        }
        let spent = till.price();
        println!("{calls} refusals in 10 s: {} write units", spent.writes);
        assert!(spent.writes <= 10.0, "{spent:?}");
    });
}

#[test]
fn a_bucket_of_four_limits_is_one_write_unit() {
    measure(async |mut till| {
        // Names and ids as long as they usually are, numbers as large, remainders everywhere.
        let four = limits([
            Limit::per_minute("input_tokens", 1_000_007),
            Limit::per_minute("output_tokens", 400_003).burst(9_000_001),
            Limit::per_minute("requests_per_min", 10_007),
            Limit::per_day("tokens_per_day", 1_000_000_007),
        ]);
        let bucket = target("user-0123456789-0123456789-0123456789", &four);
        let leg = || {
            let amounts = four.rates().iter().enumerate();
            let takes = amounts.map(|(cell, rate)| Take {
                cell,
                amount: Millitokens::new(rate.capacity().get() / 2 - 7),
            });
            Leg { target: Arc::clone(&bucket), takes: takes.collect() }
        };
        till.admitted([leg()]).await;
        till.pass(1_234_567).await;
        assert_eq!(till.admitted([leg()]).await, price(1, 1.0, 0.0));
        let key = BucketItemKey { bucket: bucket.key().clone(), shard: SHARD_ZERO };
        let item = till.world.table.item(&key.item_key()).expect("the bucket");
        println!("a bucket of four limits: {} bytes", item_size(&item));
        assert!(item_size(&item) <= 1_024, "{item:#?}");
    });
}

#[test]
fn an_index_of_all_attributes_costs_every_write_twice() {
    World::play(0, 1, async |world| {
        world.table.set_projection(Index::Resource, Projection::All);
        let mut till = Till::new(&world);
        let bucket = target("key-1", &per_minute(100));
        till.admitted([take(&bucket, 20)]).await;
        assert_eq!(till.admitted([take(&bucket, 1)]).await, price(1, 2.0, 0.0));
    });
}
