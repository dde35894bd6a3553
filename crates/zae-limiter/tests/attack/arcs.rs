//! `impl Store for Arc<S>`, `Target`, `Placement`.

use std::sync::Arc;

use zae_limiter::model::{EntityId, LimitSet, NamespaceId, ResourceName};
use zae_limiter::store::{BucketKey, Lifetime, Placement, Store, Target, UsageRecording};
use zae_limiter::{Limit, MemoryStore, RateLimiter, Timestamp};
use zae_limiter_dynamodb::{DynamoOptions, DynamoStore};
use zae_limiter_testkit::{
    Faulty, SimTable, conformance_tests, one_step_conformance_tests, usage_conformance_tests,
};

use crate::world::{ms, spend};

fn twice() -> Arc<Arc<dyn Store>> {
    Arc::new(Arc::new(MemoryStore::new()) as Arc<dyn Store>)
}

#[expect(clippy::redundant_allocation, reason = "that is what is tested")]
fn thrice() -> Arc<Arc<Arc<MemoryStore>>> {
    Arc::new(Arc::new(Arc::new(MemoryStore::new())))
}

fn dynamo() -> Arc<Arc<dyn Store>> {
    let options = DynamoOptions::default().seed(1).worker_threads(2);
    Arc::new(Arc::new(DynamoStore::new(Arc::new(SimTable::default().leaving_tasks()), options)))
}

conformance_tests!(arc_of_arc_of_dyn, || async { twice() });
usage_conformance_tests!(arc_of_arc_of_dyn_usage, || async { twice() });
one_step_conformance_tests!(arc_of_arc_of_dyn_steps, || async { twice() });
conformance_tests!(three_arcs, || async { thrice() });

/// Promise: every call goes to the store behind the `Arc`, its cost and usage recording included.
#[test]
fn an_arc_has_the_cost_and_usage_recording_of_its_store() {
    let wrapped = dynamo();
    assert_eq!(wrapped.cost().is_some(), (**wrapped).cost().is_some());
    assert!(Store::cost(&wrapped).is_some(), "calls of DynamoDB are billed");
    assert_eq!(Store::usage_recording(&wrapped), (**wrapped).usage_recording());
    let memory = twice();
    assert!(Store::cost(&memory).is_none());
    assert!(matches!(Store::usage_recording(&memory), UsageRecording::Immediate));
}

/// Promise: a builder takes a store, or a shared one.
#[tokio::test]
async fn a_builder_takes_every_kind_of_shared_store() {
    let plain = Arc::new(MemoryStore::new());
    let object: Arc<dyn Store> = Arc::clone(&plain) as Arc<dyn Store>;
    let faulty = Arc::new(Faulty::new(Arc::clone(&object)));
    let limits = || [Limit::per_day("rpm", 100)];
    let builders = [
        RateLimiter::builder(Arc::clone(&plain)),
        RateLimiter::builder(Arc::clone(&object)),
        RateLimiter::builder(Arc::new(Arc::clone(&object))),
        RateLimiter::builder(Arc::new(Arc::new(plain))),
        RateLimiter::builder(faulty),
    ];
    // One store: all of them take from the same bucket.
    let mut last = None;
    for builder in builders {
        let limiter = builder.default_limits(limits()).open().await.unwrap();
        spend(&limiter, "key", "gpt-4", "rpm", 20).await;
        last = Some(limiter);
    }
    assert!(last.unwrap().acquire("key", "gpt-4").take("rpm", 1).await.is_err());
}

fn target(entity: &str, limits: [Limit; 1], lifetime: Lifetime) -> Target {
    let key = BucketKey {
        namespace: NamespaceId::new("AAAAAAAAAAA").unwrap(),
        entity: EntityId::new(entity).unwrap(),
        resource: ResourceName::new("gpt-4").unwrap(),
    };
    Target::new(key, Arc::new(LimitSet::new(limits).unwrap()), lifetime)
}

/// Promise: equal are targets with the same bucket, limits, lifetime, parent and moment; what a store keeps with one
/// of them does not count.
#[test]
fn targets_are_compared_by_what_they_say() {
    let limits = || [Limit::per_minute("rpm", 10)];
    let one = target("key", limits(), Lifetime::Forever);
    assert_eq!(one, target("key", limits(), Lifetime::Forever));
    assert_eq!(one, one.clone());
    assert_ne!(one, target("kez", limits(), Lifetime::Forever));
    assert_ne!(one, target("key", [Limit::per_minute("rpm", 11)], Lifetime::Forever));
    assert_ne!(one, target("key", limits(), Lifetime::Idle(ms(5))));
    let read = |at| one.clone().with_limits_read_at(Timestamp::from_millis(at));
    assert_ne!(one, read(0));
    assert_ne!(read(0), read(1));
    assert_eq!(read(1), read(1));
    assert_eq!(read(1).limits_read_at(), Some(Timestamp::from_millis(1)));
    let long = "k".repeat(256);
    assert_eq!(
        target(&long, limits(), Lifetime::Forever),
        target(&long, limits(), Lifetime::Forever)
    );
    assert!(!format!("{:?}", target("sk-s3cr3t", limits(), Lifetime::Forever)).contains("s3cr3t"));
}

/// Promise: a target that was used by a store equals one that was not, and its clone is another one's.
#[tokio::test]
async fn a_target_that_a_store_has_used_is_still_equal() {
    use zae_limiter::store::{Admission, Leg, Plan, Takes};
    let used = Arc::new(target("key", [Limit::per_minute("rpm", 10)], Lifetime::Forever));
    let store = MemoryStore::new();
    let plan = |target: &Arc<Target>| Plan {
        max_skew: None,
        now: Timestamp::from_millis(0),
        legs: std::iter::once(Leg { target: Arc::clone(target), takes: takes(4) }).collect(),
    };
    fn takes(tokens: i64) -> Takes {
        std::iter::once(zae_limiter::model::Take {
            cell: 0,
            amount: zae_limiter::model::Millitokens::new(tokens * 1_000),
        })
        .collect()
    }
    for _ in 0..2 {
        store.acquire(&plan(&used)).await.unwrap();
    }
    assert_eq!(*used, target("key", [Limit::per_minute("rpm", 10)], Lifetime::Forever));
    // A clone used with another store does not bring the bucket along.
    let clone = Arc::new((*used).clone());
    let other = MemoryStore::new();
    let taken = other.acquire(&plan(&clone)).await.unwrap();
    let Admission::Taken(taken) = taken else { panic!("{taken:?}") };
    assert_eq!(taken[0].left[0].get(), 6_000);
    let peeked = store.peek(&[used.key().clone()], Timestamp::from_millis(0)).await.unwrap();
    assert_eq!(peeked[0].as_ref().unwrap().cells()[0].tokens.get(), 2_000);
}

#[test]
fn a_placement_is_its_number() {
    assert_eq!(Placement::default(), Placement::new(0));
    assert_eq!(Placement::new(u32::MAX).get(), u32::MAX);
    assert!(Placement::new(1) != Placement::new(2));
}
