//! One bucket with one limit, and what is taken from it.

use std::sync::Arc;

use zae_limiter_core::{
    BucketKey, EntityId, Leg, Lifetime, Limit, LimitSet, Millitokens, NamespaceId, Plan,
    ResourceName, Take, Target, Timestamp,
};

pub(crate) fn key() -> BucketKey {
    BucketKey {
        namespace: NamespaceId::new("ns000000001").expect("a valid id"),
        entity: EntityId::new("org").expect("a valid id"),
        resource: ResourceName::new("gpt-4").expect("a valid name"),
    }
}

pub(crate) fn target(limit: Limit) -> Arc<Target> {
    let limits = LimitSet::new([limit]).expect("valid limits");
    Arc::new(Target::new(key(), Arc::new(limits), Lifetime::Forever))
}

pub(crate) fn at(millis: i64) -> Timestamp {
    Timestamp::from_millis(1_794_751_200_000 + millis)
}

pub(crate) fn plan(target: &Arc<Target>, millitokens: i64, now: Timestamp) -> Plan {
    let takes = [Take { cell: 0, amount: Millitokens::new(millitokens) }].into_iter().collect();
    let leg = Leg { target: Arc::clone(target), takes };
    Plan { max_skew: None, now, legs: [leg].into_iter().collect() }
}
