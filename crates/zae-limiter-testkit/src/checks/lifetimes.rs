//! A bucket whose expiry is not after the moment of a call counts as absent.
//!
//! Lifetimes here are at least as long as the limits take from empty to full, as they always are.

use std::sync::Arc;

use zae_limiter_core::{BucketQuery, Placement, Store, Target, Timestamp};

use crate::calls::{be_refused, list_buckets, peek, settle, take};
use crate::given::{
    MINUTE, NOW, bucket, forever, idle, later, leg, limits, per_minute, settlement, tokens,
};

/// Asserts that the bucket exists until `expiry`, and is absent from then on.
async fn check_expiry(store: &dyn Store, target: &Target, expiry: Timestamp) {
    let before = Timestamp::from_millis(expiry.as_millis() - 1);
    assert!(peek(store, target.key(), before).await.is_some(), "there until {expiry:?}");
    assert!(peek(store, target.key(), expiry).await.is_none(), "absent from {expiry:?} on");
    let key = target.key().clone();
    let listed = list_buckets(store, BucketQuery::OfEntity(key.namespace, key.entity)).await;
    assert_eq!(listed[0].expires_at, Some(expiry), "the expiry as it is listed");
}

pub async fn an_idle_bucket_is_absent_exactly_from_its_expiry_on(store: Arc<dyn Store>) {
    let target = idle(bucket("a", "r"), &limits([per_minute("x", 10)]), 60);
    let all = || [leg(&target, [("x", tokens(10))])];
    take(&*store, NOW, all()).await;
    check_expiry(&*store, &target, later(MINUTE)).await;
    be_refused(&*store, later(MINUTE - 1), all()).await;
    take(&*store, later(MINUTE), all()).await;
    let found = peek(&*store, target.key(), later(MINUTE)).await.expect("a new bucket");
    assert_eq!(found.cells()[0].tokens, tokens(0));
    check_expiry(&*store, &target, later(2 * MINUTE)).await;
}

/// A store whose usage is read off its changes goes on counting instead.
pub async fn a_bucket_that_starts_anew_has_consumed_nothing(store: Arc<dyn Store>) {
    let target = idle(bucket("a", "r"), &limits([per_minute("x", 10)]), 60);
    for minute in [0, MINUTE] {
        take(&*store, later(minute), [leg(&target, [("x", tokens(10))])]).await;
    }
    let found = peek(&*store, target.key(), later(MINUTE)).await.expect("a new bucket");
    assert_eq!(found.cells()[0].consumed, tokens(10), "nothing is left of the old one");
}

pub async fn an_acquire_renews_the_lifetime(store: Arc<dyn Store>) {
    let target = idle(bucket("a", "r"), &limits([per_minute("x", 10)]), 60);
    // Whole seconds: a store may keep its expiries no finer, rounded up.
    for moment in [0, 30_000, 89_000] {
        take(&*store, later(moment), [leg(&target, [("x", tokens(1))])]).await;
        check_expiry(&*store, &target, later(moment + MINUTE)).await;
    }
}

pub async fn a_debt_delays_the_expiry(store: Arc<dyn Store>) {
    let target = idle(bucket("a", "r"), &limits([per_minute("rpm", 10)]), 90);
    let taken = take(&*store, NOW, [leg(&target, [("rpm", tokens(10))])]).await;
    check_expiry(&*store, &target, later(90_000)).await;
    // In debt by 10, full again after 20 tokens: two minutes.
    settle(&*store, NOW, [settlement(&target, taken[0].placement, [("rpm", tokens(10))])]).await;
    check_expiry(&*store, &target, later(2 * MINUTE)).await;
    // A write in debt waits for it too, if that is longer.
    let zero = [leg(&target, [("rpm", tokens(0))])];
    take(&*store, later(6_000), zero).await;
    check_expiry(&*store, &target, later(2 * MINUTE)).await;
    // An expiry that forgave the debt would admit this.
    be_refused(&*store, later(90_000), [leg(&target, [("rpm", tokens(10))])]).await;
}

pub async fn a_bucket_created_by_a_late_charge_expires_when_it_is_full(store: Arc<dyn Store>) {
    let set = limits([per_minute("rpm", 10)]);
    for target in [forever(bucket("kept", "r"), &set), idle(bucket("idle", "r"), &set, 600)] {
        settle(&*store, NOW, [settlement(&target, Placement::default(), [("rpm", tokens(5))])])
            .await;
        check_expiry(&*store, &target, later(MINUTE / 2)).await;
        // Another late charge delays it by as much as it takes.
        settle(&*store, NOW, [settlement(&target, Placement::default(), [("rpm", tokens(10))])])
            .await;
        check_expiry(&*store, &target, later(MINUTE * 3 / 2)).await;
        // An expiry that came too early would forgive the rest.
        let all = || [leg(&target, [("rpm", tokens(10))])];
        be_refused(&*store, later(MINUTE * 3 / 2 - 1), all()).await;
        take(&*store, later(MINUTE * 3 / 2), all()).await;
    }
}

pub async fn an_acquire_gives_a_late_charge_the_lifetime_of_its_target(store: Arc<dyn Store>) {
    let set = limits([per_minute("rpm", 10)]);
    let kept = forever(bucket("kept", "r"), &set);
    settle(&*store, NOW, [settlement(&kept, Placement::default(), [("rpm", tokens(5))])]).await;
    take(&*store, later(1_000), [leg(&kept, [("rpm", tokens(1))])]).await;
    assert!(peek(&*store, kept.key(), later(10 * MINUTE)).await.is_some(), "kept forever");
    let short = idle(bucket("idle", "r"), &set, 600);
    settle(&*store, NOW, [settlement(&short, Placement::default(), [("rpm", tokens(5))])]).await;
    take(&*store, later(1_000), [leg(&short, [("rpm", tokens(1))])]).await;
    check_expiry(&*store, &short, later(601_000)).await;
}

pub async fn a_bucket_kept_forever_never_expires(store: Arc<dyn Store>) {
    let target = forever(bucket("a", "r"), &limits([per_minute("rpm", 10)]));
    let taken = take(&*store, NOW, [leg(&target, [("rpm", tokens(1))])]).await;
    settle(&*store, NOW, [settlement(&target, taken[0].placement, [("rpm", tokens(50))])]).await;
    let last = Timestamp::from_millis(i64::MAX);
    assert!(peek(&*store, target.key(), last).await.is_some(), "still there at the end of time");
    let key = target.key().clone();
    let listed = list_buckets(&*store, BucketQuery::OfEntity(key.namespace, key.entity)).await;
    assert_eq!(listed[0].expires_at, None);
}

pub async fn a_lifetime_changes_with_the_plan(store: Arc<dyn Store>) {
    let set = limits([per_minute("x", 10)]);
    let kept = forever(bucket("a", "r"), &set);
    let short = idle(bucket("a", "r"), &set, 60);
    take(&*store, NOW, [leg(&kept, [("x", tokens(1))])]).await;
    assert!(peek(&*store, kept.key(), later(2 * MINUTE)).await.is_some(), "kept forever");
    take(&*store, NOW, [leg(&short, [("x", tokens(1))])]).await;
    check_expiry(&*store, &short, later(MINUTE)).await;
    take(&*store, NOW, [leg(&kept, [("x", tokens(1))])]).await;
    assert!(peek(&*store, kept.key(), later(2 * MINUTE)).await.is_some(), "kept again");
}

pub async fn reconfigure_changes_the_lifetime(store: Arc<dyn Store>) {
    let set = limits([per_minute("x", 10)]);
    let kept = forever(bucket("a", "r"), &set);
    let short = idle(bucket("a", "r"), &set, 60);
    take(&*store, NOW, [leg(&short, [("x", tokens(3))])]).await;
    store.reconfigure(&kept, later(1)).await.expect("reconfigure must answer");
    let found = peek(&*store, kept.key(), NOW).await.expect("a bucket");
    assert_eq!(found.cells()[0].tokens, tokens(7), "the same limits, the same balance");
    assert!(peek(&*store, kept.key(), later(2 * MINUTE)).await.is_some(), "kept forever");
    store.reconfigure(&short, later(MINUTE)).await.expect("reconfigure must answer");
    check_expiry(&*store, &short, later(2 * MINUTE)).await;
}
