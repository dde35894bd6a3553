//! A refusal reports exactly which limits were exceeded, and changes nothing.

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use zae_limiter_core::{BucketKey, BucketQuery, Limit, LimitStatus, Store};

use crate::calls::{balance, be_refused, list_buckets, peek, seen, settle, take};
use crate::given::{
    MINUTE, NOW, bucket, forever, idle, later, leg, limits, per_minute, settlement, test_namespace,
    tokens,
};

pub async fn a_refusal_lists_every_requested_limit(store: Arc<dyn Store>) {
    let own = limits([per_minute("rpm", 10), per_minute("tpd", 1), per_minute("tpm", 1_000)]);
    let above = limits([per_minute("rpm", 60).burst(90), per_minute("tpm", 6)]);
    let child = forever(bucket("child", "r"), &own);
    let parent = forever(bucket("parent", "r"), &above);
    take(&*store, NOW, [leg(&child, [("rpm", tokens(8))])]).await;
    let placement = take(&*store, NOW, [leg(&parent, [("tpm", tokens(6))])]).await[0].placement;
    settle(&*store, NOW, [settlement(&parent, placement, [("tpm", tokens(2))])]).await;

    let asked_of_child = leg(&child, [("tpm", tokens(7)), ("rpm", tokens(5))]);
    let asked_of_parent = leg(&parent, [("rpm", tokens(90)), ("tpm", tokens(1))]);
    let refusal = be_refused(&*store, NOW, [asked_of_child, asked_of_parent]).await;
    let millis = Duration::from_millis;
    let status = |level, limit, available, requested, retry, full| {
        let target = if level == 0 { &child } else { &parent };
        let at = target.limits().position(limit).unwrap();
        LimitStatus {
            entity_id: target.key().entity.clone(),
            level,
            resource: target.key().resource.clone(),
            limit_name: target.limits().names()[at].clone(),
            rate: target.limits().rates()[at],
            available: tokens(available),
            requested: tokens(requested),
            exceeded: retry > 0,
            retry_after: millis(retry),
            full_after: millis(full),
        }
    };
    let expected = [
        status(0, "tpm", 1_000, 7, 0, 0),
        status(0, "rpm", 2, 5, 18_000, 48_000),
        status(1, "rpm", 90, 90, 0, 0),
        status(1, "tpm", -2, 1, 30_000, 80_000),
    ];
    assert_eq!(refusal, expected, "every requested limit, in that order, and no other");
}

pub async fn a_wait_is_exact_to_the_millisecond(store: Arc<dyn Store>) {
    let cases = [
        Limit::per_minute("x", 7),
        Limit::per_second("x", 3),
        Limit::per_day("x", 1_000),
        Limit::per("x", 1_000_003, Duration::from_secs(7_919)),
        Limit::per("x", 1, Duration::from_secs(86_400 * 365)),
        Limit::per_second("x", 1_000_000),
    ];
    for (number, limit) in cases.into_iter().enumerate() {
        let requested = tokens(i64::try_from(limit.capacity).unwrap() * 2 / 3).max(tokens(1));
        let target = forever(bucket("a", &format!("r-{number}")), &limits([limit.clone()]));
        let all = target.limits().rates()[0].capacity();
        let again = || [leg(&target, [("x", requested)])];
        take(&*store, NOW, [leg(&target, [("x", all)])]).await;
        // The time that has passed at the refusal leaves a remainder.
        for passed in [0, 1, 13] {
            let refusal = be_refused(&*store, later(passed), again()).await;
            let wait = i64::try_from(refusal[0].retry_after.as_millis()).unwrap();
            let context = format!("{limit}: a wait of {wait} ms after {passed} ms");
            assert!(wait > 0, "{context}");
            let early = be_refused(&*store, later(passed + wait - 1), again()).await;
            assert_eq!(
                early[0].retry_after,
                Duration::from_millis(1),
                "{context}, one less waited"
            );
            if passed == 13 {
                let taken = take(&*store, later(passed + wait), again()).await;
                assert!(taken[0].left[0] >= tokens(0), "{context}");
            }
        }
    }
}

pub async fn a_wait_of_a_clock_that_lags_counts_from_the_last_refill(store: Arc<dyn Store>) {
    let target = forever(bucket("a", "r"), &limits([per_minute("rpm", 60)]));
    take(&*store, later(10_000), [leg(&target, [("rpm", tokens(60))])]).await;
    let refusal = be_refused(&*store, NOW, [leg(&target, [("rpm", tokens(1))])]).await;
    assert_eq!(refusal[0].retry_after, Duration::from_millis(11_000), "10 s behind, 1 s to earn");
    be_refused(&*store, later(10_999), [leg(&target, [("rpm", tokens(1))])]).await;
    take(&*store, later(11_000), [leg(&target, [("rpm", tokens(1))])]).await;
}

async fn look(store: &dyn Store, key: &BucketKey) -> Option<impl PartialEq + Debug + use<>> {
    peek(store, key, NOW).await.as_ref().map(seen)
}

pub async fn a_refused_plan_changes_no_balance(store: Arc<dyn Store>) {
    let set = limits([per_minute("rpm", 10), per_minute("tpm", 100)]);
    let [full, short, absent] = ["full", "short", "absent"].map(|e| forever(bucket(e, "r"), &set));
    take(&*store, NOW, [leg(&full, [("rpm", tokens(1)), ("tpm", tokens(1))])]).await;
    take(&*store, NOW, [leg(&short, [("rpm", tokens(7)), ("tpm", tokens(1))])]).await;
    for legs in [[&absent, &full, &short], [&short, &absent, &full]] {
        let legs = legs.map(|target| leg(target, [("rpm", tokens(4)), ("tpm", tokens(4))]));
        be_refused(&*store, NOW, legs).await;
    }
    for (target, rpm, tpm) in [(&full, 9, 99), (&short, 3, 99), (&absent, 10, 100)] {
        for (limit, left) in [("rpm", rpm), ("tpm", tpm)] {
            // A bucket that is absent is full.
            let found = balance(&*store, target.key(), limit, NOW).await;
            let whole = tokens(if limit == "rpm" { 10 } else { 100 });
            assert_eq!(found.unwrap_or(whole), tokens(left), "{limit} of {target:?}");
        }
    }
}

pub async fn a_refused_plan_leaves_no_trace(store: Arc<dyn Store>) {
    let set = limits([per_minute("rpm", 10), per_minute("tpm", 100)]);
    let [full, short, absent] = ["full", "short", "absent"].map(|e| forever(bucket(e, "r"), &set));
    take(&*store, NOW, [leg(&full, [("rpm", tokens(1)), ("tpm", tokens(1))])]).await;
    take(&*store, NOW, [leg(&short, [("rpm", tokens(7)), ("tpm", tokens(1))])]).await;
    let query = BucketQuery::OnResource(test_namespace(), full.key().resource.clone());
    let before = (look(&*store, full.key()).await, look(&*store, short.key()).await);
    let listed = list_buckets(&*store, query.clone()).await.len();
    for legs in [[&absent, &full, &short], [&short, &absent, &full]] {
        let legs = legs.map(|target| leg(target, [("rpm", tokens(4)), ("tpm", tokens(4))]));
        be_refused(&*store, NOW, legs).await;
    }
    let after = (look(&*store, full.key()).await, look(&*store, short.key()).await);
    assert_eq!(before, after, "balances, what was consumed, the time of the last refill");
    assert!(look(&*store, absent.key()).await.is_none(), "a refusal creates no bucket");
    assert_eq!(list_buckets(&*store, query).await.len(), listed, "no bucket came or went");
}

pub async fn a_refused_plan_refills_nothing(store: Arc<dyn Store>) {
    let target = forever(bucket("a", "r"), &limits([per_minute("rpm", 10)]));
    take(&*store, NOW, [leg(&target, [("rpm", tokens(10))])]).await;
    // A request with a clock far ahead is refused. Later requests must not profit from its time.
    be_refused(&*store, later(MINUTE / 2), [leg(&target, [("rpm", tokens(6))])]).await;
    be_refused(&*store, NOW, [leg(&target, [("rpm", tokens(1))])]).await;
    assert_eq!(balance(&*store, target.key(), "rpm", NOW).await, Some(tokens(0)));
    take(&*store, later(MINUTE / 2), [leg(&target, [("rpm", tokens(5))])]).await;
}

pub async fn a_refused_plan_does_not_make_the_bucket_follow(store: Arc<dyn Store>) {
    let wide = limits([per_minute("rpm", 100), per_minute("tpm", 100)]);
    let narrow = limits([per_minute("rpm", 5), per_minute("tpm", 100)]);
    let stored = forever(bucket("a", "r"), &wide);
    let given = forever(bucket("a", "r"), &narrow);
    take(&*store, NOW, [leg(&stored, [("tpm", tokens(100)), ("rpm", tokens(1))])]).await;
    be_refused(&*store, NOW, [leg(&given, [("rpm", tokens(1)), ("tpm", tokens(1))])]).await;
    let found = peek(&*store, stored.key(), NOW).await.expect("a bucket");
    assert_eq!(found.cell("rpm").unwrap().0.tokens, tokens(99), "not cut by a refused plan");
    assert_eq!(*found.limits(), wide, "not changed by a refused plan");
    take(&*store, NOW, [leg(&stored, [("rpm", tokens(99))])]).await;
}

pub async fn a_refused_plan_renews_no_lifetime(store: Arc<dyn Store>) {
    let target = idle(bucket("a", "r"), &limits([per_minute("rpm", 10)]), 120);
    take(&*store, NOW, [leg(&target, [("rpm", tokens(10))])]).await;
    be_refused(&*store, later(30_000), [leg(&target, [("rpm", tokens(6))])]).await;
    assert!(peek(&*store, target.key(), later(119_999)).await.is_some(), "not expired yet");
    assert!(peek(&*store, target.key(), later(120_000)).await.is_none(), "expired");
}
