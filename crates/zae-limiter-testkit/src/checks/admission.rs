//! Acquire takes all requested amounts, or nothing.

use std::sync::Arc;

use zae_limiter_core::{CAPACITY_MAX, Leg, Limit, Store, Target};

use crate::calls::{acquire, balance, be_refused, settle, take};
use crate::given::{
    NOW, bucket, bucket_in, forever, leg, limits, namespace, per_minute, plan, settlement,
    test_namespace, tokens,
};

pub async fn an_absent_bucket_is_full(store: Arc<dyn Store>) {
    let target = forever(bucket("a", "r"), &limits([per_minute("rpm", 10)]));
    let taken = take(&*store, NOW, [leg(&target, [("rpm", tokens(10))])]).await;
    assert_eq!(taken[0].left[..], [tokens(0)], "ten of ten were taken");
    be_refused(&*store, NOW, [leg(&target, [("rpm", tokens(1))])]).await;
}

pub async fn what_is_left_is_reported_in_the_order_of_the_takes(store: Arc<dyn Store>) {
    let set = limits([per_minute("a", 10), per_minute("b", 100), per_minute("c", 1_000)]);
    let target = forever(bucket("a", "r"), &set);
    let takes = [("c", tokens(3)), ("a", tokens(1))];
    let taken = take(&*store, NOW, [leg(&target, takes)]).await;
    assert_eq!(taken[0].left[..], [tokens(997), tokens(9)], "of c, then of a");
}

pub async fn nothing_is_taken_when_one_limit_refuses(store: Arc<dyn Store>) {
    let set = limits([per_minute("a", 10), per_minute("b", 10), per_minute("c", 10)]);
    let target = forever(bucket("a", "r"), &set);
    take(&*store, NOW, [leg(&target, [("b", tokens(8))])]).await;
    let all = [("a", tokens(5)), ("b", tokens(5)), ("c", tokens(5))];
    be_refused(&*store, NOW, [leg(&target, all)]).await;
    for (limit, left) in [("a", 10), ("b", 2), ("c", 10)] {
        let found = balance(&*store, target.key(), limit, NOW).await;
        assert_eq!(found, Some(tokens(left)), "{limit} after a refusal because of b");
    }
}

/// A chain of buckets with ten tokens each.
fn chain(resource: &str, length: usize) -> Vec<Arc<Target>> {
    let set = limits([per_minute("rpm", 10)]);
    (0..length).map(|n| forever(bucket(&format!("level-{n}"), resource), &set)).collect()
}

fn five_of_each(chain: &[Arc<Target>]) -> Vec<Leg> {
    chain.iter().map(|target| leg(target, [("rpm", tokens(5))])).collect()
}

pub async fn nothing_is_taken_when_one_leg_refuses(store: Arc<dyn Store>) {
    for length in [2, 3, 8] {
        for short in 0..length {
            let chain = chain(&format!("r-{length}-{short}"), length);
            // All buckets exist, so that what is taken by mistake can be seen in all of them.
            for target in &chain {
                take(&*store, NOW, [leg(target, [("rpm", tokens(1))])]).await;
            }
            take(&*store, NOW, [leg(&chain[short], [("rpm", tokens(7))])]).await;
            be_refused(&*store, NOW, five_of_each(&chain)).await;
            for (level, target) in chain.iter().enumerate() {
                let left = if level == short { tokens(2) } else { tokens(9) };
                let found = balance(&*store, target.key(), "rpm", NOW).await;
                assert_eq!(found, Some(left), "level {level} of {length}, level {short} refused");
            }
        }
    }
}

pub async fn a_chain_of_eight_is_taken_together(store: Arc<dyn Store>) {
    let chain = chain("r", 8);
    for left in [5, 0] {
        let taken = take(&*store, NOW, five_of_each(&chain)).await;
        assert_eq!(taken.len(), 8, "one entry for each leg");
        for (level, leg) in taken.iter().enumerate() {
            assert_eq!(leg.left[..], [tokens(left)], "left at level {level}");
        }
    }
    let statuses = be_refused(&*store, NOW, five_of_each(&chain)).await;
    assert_eq!(statuses.len(), 8, "one status for each leg");
}

pub async fn limits_that_are_not_requested_are_not_checked(store: Arc<dyn Store>) {
    let set = limits([per_minute("rpm", 10), per_minute("tpm", 10)]);
    let target = forever(bucket("a", "r"), &set);
    take(&*store, NOW, [leg(&target, [("rpm", tokens(10)), ("tpm", tokens(0))])]).await;
    take(&*store, NOW, [leg(&target, [("tpm", tokens(10))])]).await;
    assert_eq!(balance(&*store, target.key(), "tpm", NOW).await, Some(tokens(0)));
    assert_eq!(balance(&*store, target.key(), "rpm", NOW).await, Some(tokens(0)));
}

pub async fn an_amount_of_zero_checks_nothing_even_in_debt(store: Arc<dyn Store>) {
    let set = limits([per_minute("rpm", 10), per_minute("tpm", 10)]);
    let target = forever(bucket("a", "r"), &set);
    let taken = take(&*store, NOW, [leg(&target, [("rpm", tokens(1))])]).await;
    settle(&*store, NOW, [settlement(&target, taken[0].placement, [("rpm", tokens(20))])]).await;
    let zero = [("rpm", tokens(0)), ("tpm", tokens(4))];
    let taken = take(&*store, NOW, [leg(&target, zero)]).await;
    assert_eq!(taken[0].left[..], [tokens(-11), tokens(6)], "zero takes nothing from a debt");
    let refusal =
        be_refused(&*store, NOW, [leg(&target, [("rpm", tokens(0)), ("tpm", tokens(7))])]).await;
    assert!(!refusal[0].exceeded, "rpm was not requested: {refusal:#?}");
    assert!(refusal[1].exceeded, "tpm stood in the way: {refusal:#?}");
}

pub async fn the_largest_amount_can_be_taken(store: Arc<dyn Store>) {
    let target = forever(bucket("a", "r"), &limits([Limit::per_second("rpm", CAPACITY_MAX)]));
    let all = target.limits().rates()[0].capacity();
    let taken = take(&*store, NOW, [leg(&target, [("rpm", all)])]).await;
    assert_eq!(taken[0].left[..], [tokens(0)]);
    be_refused(&*store, NOW, [leg(&target, [("rpm", all)])]).await;
}

pub async fn buckets_differ_by_namespace_entity_and_resource(store: Arc<dyn Store>) {
    let set = limits([per_minute("rpm", 10)]);
    // Names that run together when they are joined, or differ by case only.
    let keys = [
        bucket_in(&test_namespace(), "a", "b:c"),
        bucket_in(&test_namespace(), "a:b", "c"),
        bucket_in(&test_namespace(), "a.b", "c"),
        bucket_in(&test_namespace(), "a", "B:c"),
        bucket_in(&test_namespace(), "A", "b:c"),
        bucket_in(&test_namespace(), "a", "b:c:c"),
        bucket_in(&test_namespace(), "a", "b/c"),
        bucket_in(&namespace(2), "a", "b:c"),
        bucket_in(&namespace(2), "a:b", "c"),
    ];
    for (amount, key) in (1..).zip(&keys) {
        let target = forever(key.clone(), &set);
        take(&*store, NOW, [leg(&target, [("rpm", tokens(amount))])]).await;
    }
    for (amount, key) in (1..).zip(&keys) {
        let found = balance(&*store, key, "rpm", NOW).await;
        assert_eq!(found, Some(tokens(10 - amount)), "{} on {}", key.entity, key.resource);
    }
}

pub async fn acquire_now_gives_the_reply_of_acquire(store: Arc<dyn Store>) {
    let set = limits([per_minute("rpm", 10)]);
    let [now, waiting] = ["now", "waiting"].map(|on| forever(bucket("a", on), &set));
    let other = forever(bucket("b", "other"), &set);
    for amount in [0, 4, 4, 4, 2, 1] {
        let of = |target| plan(NOW, [leg(target, [("rpm", tokens(amount))])]);
        let Some(answer) = store.acquire_now(&of(&now)) else {
            // This store leaves it to `acquire`.
            return;
        };
        let answer = answer.expect("an answer");
        let awaited = acquire(&*store, &of(&waiting)).await;
        match (&answer, &awaited) {
            (zae_limiter_core::Admission::Refused(a), zae_limiter_core::Admission::Refused(b)) => {
                assert_eq!(a[0].available, b[0].available, "requested {amount}");
                assert_eq!(a[0].retry_after, b[0].retry_after, "requested {amount}");
            }
            _ => assert_eq!(answer, awaited, "requested {amount}"),
        }
        assert_eq!(
            balance(&*store, now.key(), "rpm", NOW).await,
            balance(&*store, waiting.key(), "rpm", NOW).await,
            "after a request for {amount}"
        );
    }
    let chain = plan(NOW, [leg(&other, [("rpm", tokens(1))]), leg(&now, [("rpm", tokens(1))])]);
    if let Some(answer) = store.acquire_now(&chain) {
        let refused = matches!(answer, Ok(zae_limiter_core::Admission::Refused(_)));
        assert!(refused, "the second leg is empty: {answer:?}");
        assert_eq!(balance(&*store, other.key(), "rpm", NOW).await, None, "nothing was taken");
    }
}

pub async fn take_now_takes_what_acquire_takes_or_nothing(store: Arc<dyn Store>) {
    let set = limits([per_minute("rpm", 10), per_minute("tpm", 1_000)]);
    let [now, waiting] = ["now", "waiting"].map(|on| forever(bucket("a", on), &set));
    let later =
        |seconds: i64| zae_limiter_core::Timestamp::from_millis(NOW.as_millis() + seconds * 1_000);
    for (second, rpm, tpm) in [
        (0, 1, 1),
        (0, 4, 400),
        (1, 5, 0),
        (2, 1, 600),
        (2, 0, 0),
        (30, 5, 500),
        (29, 1, 1),
        (30, 10, 0),
    ] {
        let of = |target| leg(target, [("rpm", tokens(rpm)), ("tpm", tokens(tpm))]);
        let request = of(&now);
        let mut left = [zae_limiter_core::Millitokens::ZERO; 2];
        let single = zae_limiter_core::SingleLeg {
            now: later(second),
            target: &request.target,
            takes: &request.takes,
        };
        let before = store.peek(&[now.key().clone()], later(second)).await.expect("an answer");
        if store.take_now(&single, &mut left) {
            let awaited = acquire(&*store, &plan(later(second), [of(&waiting)])).await;
            let zae_limiter_core::Admission::Taken(taken) = awaited else {
                panic!("an acquire of {rpm} and {tpm} is refused")
            };
            assert_eq!(taken[0].left[..], left, "{rpm} and {tpm}");
        } else {
            let after = store.peek(&[now.key().clone()], later(second)).await.expect("an answer");
            assert_eq!(after, before, "{rpm} and {tpm} were not taken");
            // Both buckets go on from the same state.
            for target in [&now, &waiting] {
                acquire(&*store, &plan(later(second), [of(target)])).await;
            }
        }
    }
}
