//! Peek reads buckets and changes nothing.

use std::sync::Arc;
use std::time::Duration;

use zae_limiter_core::{
    BucketKey, BucketQuery, CAPACITY_MAX, EntityId, LIMITS_MAX, Leg, Limit, LimitSet, Millitokens,
    PERIOD_SECONDS_MAX, Rate, ResourceName, Store, Take,
};

use crate::calls::{acquire, be_refused, list_buckets, peek, seen, take};
use crate::given::{
    DAY, NOW, bucket, forever, later, leg, limits, per_minute, plan, test_namespace, tokens,
};

pub async fn buckets_are_peeked_in_the_order_of_the_keys(store: Arc<dyn Store>) {
    let set = limits([per_minute("rpm", 1_000)]);
    assert_eq!(store.peek(&[], NOW).await.expect("peek must answer"), [], "no keys, no buckets");
    let keys: Vec<BucketKey> = (0..60).map(|n| bucket(&format!("e-{}", 59 - n), "r")).collect();
    // Every third is missing.
    for (number, key) in (0..).zip(&keys).filter(|(number, _)| number % 3 != 0) {
        let target = forever(key.clone(), &set);
        take(&*store, NOW, [leg(&target, [("rpm", tokens(number))])]).await;
    }
    let found = store.peek(&keys, NOW).await.expect("peek must answer");
    assert_eq!(found.len(), keys.len(), "one answer for each key");
    for (number, bucket) in (0..).zip(found) {
        let left = bucket.map(|bucket| bucket.cells()[0].tokens);
        let expected = (number % 3 != 0).then(|| tokens(1_000 - number));
        assert_eq!(left, expected, "key {number}");
    }
}

pub async fn peeking_changes_nothing(store: Arc<dyn Store>) {
    let target = forever(bucket("a", "r"), &limits([per_minute("rpm", 10)]));
    assert_eq!(peek(&*store, target.key(), NOW).await, None);
    let query = || BucketQuery::OnResource(test_namespace(), target.key().resource.clone());
    assert_eq!(list_buckets(&*store, query()).await, [], "peeking created no bucket");
    take(&*store, NOW, [leg(&target, [("rpm", tokens(10))])]).await;
    let before = seen(&list_buckets(&*store, query()).await[0].bucket);
    // A clock far ahead looks: it must not pay out the time for those behind.
    let full = peek(&*store, target.key(), later(DAY)).await.expect("a bucket");
    assert_eq!(full.cells()[0].tokens, tokens(10));
    be_refused(&*store, NOW, [leg(&target, [("rpm", tokens(1))])]).await;
    assert_eq!(seen(&list_buckets(&*store, query()).await[0].bucket), before, "as before");
}

pub async fn a_bucket_at_the_bounds_of_its_limits_is_kept_whole(store: Arc<dyn Store>) {
    let longest = Duration::from_secs(PERIOD_SECONDS_MAX);
    let limit = |number: usize| {
        let name = format!("{}{number:02}", "n".repeat(62));
        match number % 3 {
            0 => Limit::per(name, CAPACITY_MAX, longest),
            1 => Limit::per_second(name, 1).burst(CAPACITY_MAX),
            _ => Limit::per_second(name, CAPACITY_MAX).burst(1),
        }
    };
    let set = Arc::new(LimitSet::new((0..LIMITS_MAX).map(limit)).expect("within the bounds"));
    let key = BucketKey {
        namespace: test_namespace(),
        entity: EntityId::new("e".repeat(256)).unwrap(),
        resource: ResourceName::new("r".repeat(64)).unwrap(),
    };
    let target = forever(key.clone(), &set);
    // All but a millitoken.
    let most = |rate: &Rate| Millitokens::new(rate.capacity().get() - 1);
    let takes = set.rates().iter().enumerate().map(|(cell, r)| Take { cell, amount: most(r) });
    acquire(&*store, &plan(NOW, [Leg { target: Arc::clone(&target), takes: takes.collect() }]))
        .await;
    let found = peek(&*store, &key, NOW).await.expect("a bucket");
    assert_eq!(*found.limits(), set, "every name and number");
    for (cell, rate) in found.cells().iter().zip(set.rates()) {
        assert_eq!((cell.tokens, cell.consumed), (Millitokens::new(1), most(rate)));
    }
    // A moment later the slowest limits have a remainder in the order of their long period.
    let takes = [Take { cell: 1, amount: Millitokens::new(1) }].into_iter().collect();
    acquire(&*store, &plan(later(7), [Leg { target, takes }])).await;
    let mut expected = found;
    expected.refill(later(7));
    expected.charge(1, Millitokens::new(1)).expect("there is as much");
    let found = peek(&*store, &key, later(7)).await.expect("a bucket");
    assert_eq!(seen(&found), seen(&expected));
}
