//! Counters and histograms, by name and label, and never by entity.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use metrics::{
    Counter, CounterFn, Gauge, Histogram, HistogramFn, Key, KeyName, Metadata, Recorder,
    SharedString, Unit, with_local_recorder,
};
use tokio::runtime::Builder;
use zae_limiter::OnUnavailable;
use zae_limiter::model::BreakerSettings;
use zae_limiter::store::StoreErrorKind;
use zae_limiter_testkit::{Call, Fault};

use crate::world::{Kind, World, child, drive, own_limits, spend, without_refill};

/// Adds up what is counted and how often something is measured, under `name{label=value}`.
#[derive(Clone, Default)]
struct Counts(Arc<Mutex<BTreeMap<String, u64>>>);

struct Count(Counts, String);

impl Counts {
    fn of(&self, key: &Key) -> Arc<Count> {
        let labels: Vec<String> =
            key.labels().map(|label| format!("{}={}", label.key(), label.value())).collect();
        Arc::new(Count(self.clone(), format!("{}{{{}}}", key.name(), labels.join(","))))
    }

    fn get(&self, name: &str) -> u64 {
        self.0.lock().unwrap().get(name).copied().unwrap_or(0)
    }
}

impl CounterFn for Count {
    fn increment(&self, value: u64) {
        *self.0.0.lock().unwrap().entry(self.1.clone()).or_default() += value;
    }

    fn absolute(&self, value: u64) {
        panic!("{} is set to {value}", self.1);
    }
}

impl HistogramFn for Count {
    fn record(&self, _: f64) {
        CounterFn::increment(self, 1);
    }
}

impl Recorder for Counts {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        Counter::from_arc(self.of(key))
    }

    fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
        panic!("there is no gauge, but {key} was registered");
    }

    fn register_histogram(&self, key: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::from_arc(self.of(key))
    }
}

#[test]
fn decisions_and_refusals_are_counted_and_no_label_names_an_entity() {
    for kind in Kind::ALL {
        let counts = Counts::default();
        let runtime = Builder::new_current_thread().build().unwrap();
        with_local_recorder(&counts, || runtime.block_on(calls(World::new(*kind))));
        for (name, expected) in [
            ("zae_limiter_decisions_total{outcome=admitted}", 4),
            ("zae_limiter_decisions_total{outcome=refused}", 3),
            ("zae_limiter_decisions_total{outcome=degraded}", 1),
            ("zae_limiter_decisions_total{outcome=unavailable}", 2),
            ("zae_limiter_refusals_total{limit=rpm}", 2),
            ("zae_limiter_refusals_total{limit=tpm}", 4),
            ("zae_limiter_unsettled_leases_total{}", 1),
            ("zae_limiter_acquire_seconds{}", 10),
            // The key and the organisation above it.
            ("zae_limiter_config_cache_misses_total{}", 2),
        ] {
            assert_eq!(counts.get(name), expected, "{kind:?}: {name}");
        }
        assert!(counts.get("zae_limiter_config_cache_hits_total{}") >= 10, "{kind:?}");
        let all = counts.0.lock().unwrap();
        for name in all.keys() {
            assert!(!name.contains("sk-") && !name.contains("org"), "{name} names an entity");
        }
        assert_eq!(all.len(), 10, "{:?}", all.keys());
    }
}

async fn calls(world: World) {
    let off = BreakerSettings { failures: 0, ..BreakerSettings::default() };
    let limiter = world.builder().breaker(off).open().await.unwrap();
    limiter.create_entity("org").await.unwrap();
    child(&limiter, "sk-key", "org").await;
    let limits = || [without_refill("rpm", 11), without_refill("tpm", 10)];
    own_limits(&limiter, "sk-key", limits()).await;
    own_limits(&limiter, "org", limits()).await;
    let lease = limiter.acquire("sk-key", "gpt-4").take("rpm", 1).await.unwrap();
    // Two are admitted and use everything up.
    for _ in 0..2 {
        let call = limiter.acquire("sk-key", "gpt-4").take("rpm", 5).take("tpm", 5);
        call.await.unwrap().commit().await.unwrap();
    }
    // Of the key and of its organisation, `tpm` is short; then both are.
    limiter.acquire("sk-key", "gpt-4").take("tpm", 1).await.unwrap_err();
    for _ in 0..2 {
        let both = limiter.acquire("org", "gpt-4").take("tpm", 1).take("rpm", 1);
        both.await.unwrap_err();
    }
    spend(&limiter, "sk-key", "gpt-4", "rpm", 0).await;
    world.store.break_down(Fault::FailBefore(StoreErrorKind::Unavailable));
    for policy in [OnUnavailable::Allow, OnUnavailable::Block, OnUnavailable::Block] {
        let call = limiter.acquire("sk-key", "gpt-4").take("rpm", 1).on_unavailable(policy);
        assert_eq!(
            drive(&world, call.into_future()).await.0.is_ok(),
            policy == OnUnavailable::Allow
        );
    }
    // Neither kept nor refunded. The refund fails at once: a later failure would happen on the limiter's own
    // thread, where this test's recorder does not count.
    world.store.script(Call::Settle, Fault::FailBefore(StoreErrorKind::Denied));
    drop(lease);
}

/// A bucket that is split, gathered from, and merged.
#[cfg(feature = "dynamodb")]
#[test]
fn splits_merges_and_gathered_acquires_are_counted() {
    use zae_limiter::model::{EntityId, LimitSet, Millitokens, NamespaceId, ResourceName, Take};
    use zae_limiter::store::{Admission, BucketKey, Leg, Lifetime, Plan, Store as _, Target};
    use zae_limiter::{DynamoOptions, DynamoStore};

    let counts = Counts::default();
    let runtime = Builder::new_current_thread().build().unwrap();
    let work = async {
        let table = Arc::new(zae_limiter_testkit::SimTable::default());
        let store = DynamoStore::new(table, DynamoOptions::default().seed(1));
        let bucket = BucketKey {
            namespace: NamespaceId::new("ns000000001").unwrap(),
            entity: EntityId::new("org").unwrap(),
            resource: ResourceName::new("gpt-4").unwrap(),
        };
        let limits = Arc::new(LimitSet::new([without_refill("rpm", 100)]).unwrap());
        let target = Arc::new(Target::new(bucket.clone(), limits, Lifetime::Forever));
        let take = async |tokens: i64| {
            let takes = [Take { cell: 0, amount: Millitokens::new(tokens * 1_000) }];
            let leg = Leg { target: Arc::clone(&target), takes: takes.into_iter().collect() };
            let legs = [leg].into_iter().collect();
            let plan = Plan { max_skew: None, now: crate::world::NOW, legs };
            assert!(matches!(store.acquire(&plan).await, Ok(Admission::Taken(_))));
        };
        take(1).await;
        store.split(&bucket, crate::world::NOW).await.unwrap();
        // More than any shard has.
        take(80).await;
        store.merge(&bucket, crate::world::NOW).await.unwrap();
    };
    with_local_recorder(&counts, || runtime.block_on(work));
    for (name, expected) in [
        ("zae_limiter_bucket_splits_total{}", 1),
        ("zae_limiter_bucket_merges_total{}", 1),
        ("zae_limiter_bucket_shards{}", 2),
        ("zae_limiter_gathered_acquires_total{}", 1),
    ] {
        assert_eq!(counts.get(name), expected, "{name}");
    }
}
