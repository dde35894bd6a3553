//! Settle applies signed differences, whatever is there.

use std::sync::Arc;
use std::time::Duration;

use zae_limiter_core::{
    Applied, Key, Millitokens, Placement, Settlement, Store, StoreErrorKind, Target,
};

use crate::calls::{balance, be_refused, delete, peek, seen, settle, take};
use crate::given::{
    MINUTE, NOW, bucket, forever, idle, later, leg, limits, per_minute, settlement, tokens,
    without_refill,
};

/// A bucket of ten per minute, of which `taken` are taken, and the placement of that.
async fn bucket_of_ten(store: &dyn Store, taken: i64) -> (Arc<Target>, Placement) {
    let target = forever(bucket("a", "r"), &limits([per_minute("rpm", 10)]));
    let legs = take(store, NOW, [leg(&target, [("rpm", tokens(taken))])]).await;
    (target, legs[0].placement)
}

pub async fn settling_takes_into_debt_and_the_debt_is_repaid(store: Arc<dyn Store>) {
    let (target, placement) = bucket_of_ten(&*store, 8).await;
    settle(&*store, NOW, [settlement(&target, placement, [("rpm", tokens(12))])]).await;
    assert_eq!(balance(&*store, target.key(), "rpm", NOW).await, Some(tokens(-10)));
    let refusal = be_refused(&*store, NOW, [leg(&target, [("rpm", tokens(1))])]).await;
    assert_eq!(refusal[0].available, tokens(-10));
    assert_eq!(refusal[0].retry_after, Duration::from_secs(66), "11 tokens at 10 per minute");
    be_refused(&*store, later(65_999), [leg(&target, [("rpm", tokens(1))])]).await;
    take(&*store, later(66_000), [leg(&target, [("rpm", tokens(1))])]).await;
}

pub async fn settling_refunds_what_was_taken(store: Arc<dyn Store>) {
    let (target, placement) = bucket_of_ten(&*store, 8).await;
    settle(&*store, NOW, [settlement(&target, placement, [("rpm", tokens(-5))])]).await;
    let found = peek(&*store, target.key(), NOW).await.expect("a bucket");
    let (cell, _) = found.cell("rpm").expect("the limit");
    assert_eq!(cell.tokens, tokens(7));
    assert_eq!(cell.consumed, tokens(3), "net consumption");
    take(&*store, NOW, [leg(&target, [("rpm", tokens(7))])]).await;
    be_refused(&*store, NOW, [leg(&target, [("rpm", tokens(1))])]).await;
}

pub async fn refunds_stop_at_the_capacity(store: Arc<dyn Store>) {
    let (target, placement) = bucket_of_ten(&*store, 8).await;
    // By then six tokens have been earned, and all eight are refunded.
    let now = later(36_000);
    settle(&*store, now, [settlement(&target, placement, [("rpm", tokens(-8))])]).await;
    assert_eq!(balance(&*store, target.key(), "rpm", now).await, Some(tokens(10)));
    take(&*store, now, [leg(&target, [("rpm", tokens(10))])]).await;
    be_refused(&*store, now, [leg(&target, [("rpm", tokens(1))])]).await;
    // More than was ever taken.
    settle(&*store, now, [settlement(&target, placement, [("rpm", tokens(-100))])]).await;
    assert_eq!(balance(&*store, target.key(), "rpm", now).await, Some(tokens(10)));
    take(&*store, now, [leg(&target, [("rpm", tokens(10))])]).await;
    be_refused(&*store, now, [leg(&target, [("rpm", tokens(1))])]).await;
}

pub async fn a_settlement_refills_first(store: Arc<dyn Store>) {
    let (target, placement) = bucket_of_ten(&*store, 1).await;
    // The bucket has long been full again when five more are charged. If they were charged before
    // the refill, the refill would cover them.
    settle(&*store, later(MINUTE), [settlement(&target, placement, [("rpm", tokens(5))])]).await;
    assert_eq!(balance(&*store, target.key(), "rpm", later(MINUTE)).await, Some(tokens(5)));
    be_refused(&*store, later(MINUTE), [leg(&target, [("rpm", tokens(6))])]).await;
}

pub async fn differences_of_several_limits_and_buckets_all_count(store: Arc<dyn Store>) {
    let set = limits([without_refill("x", 100), without_refill("y", 100)]);
    let [child, parent, other] =
        ["child", "parent", "other"].map(|e| forever(bucket(e, "r"), &set));
    let both = [("x", tokens(50)), ("y", tokens(50))];
    let legs = [&child, &parent, &other].map(|target| leg(target, both));
    let taken = take(&*store, NOW, legs).await;
    settle(
        &*store,
        NOW,
        [
            settlement(&parent, taken[1].placement, [("y", tokens(-20)), ("x", tokens(7))]),
            settlement(&child, taken[0].placement, [("x", Millitokens::new(1)), ("y", tokens(60))]),
        ],
    )
    .await;
    for (target, x, y) in
        [(&child, 49_999, -10_000), (&parent, 43_000, 70_000), (&other, 50_000, 50_000)]
    {
        let whose = target.key().entity.as_str();
        let found = balance(&*store, target.key(), "x", NOW).await;
        assert_eq!(found, Some(Millitokens::new(x)), "x of {whose}");
        let found = balance(&*store, target.key(), "y", NOW).await;
        assert_eq!(found, Some(Millitokens::new(y)), "y of {whose}");
    }
}

pub async fn settlements_of_one_bucket_in_one_call_all_count(store: Arc<dyn Store>) {
    let (target, placement) = bucket_of_ten(&*store, 1).await;
    let difference = |amount| settlement(&target, placement, [("rpm", tokens(amount))]);
    settle(&*store, NOW, [difference(4), difference(-1)]).await;
    assert_eq!(balance(&*store, target.key(), "rpm", NOW).await, Some(tokens(6)));
}

pub async fn a_charge_on_an_absent_bucket_leaves_full_less_the_charge(store: Arc<dyn Store>) {
    let (present, placement) = bucket_of_ten(&*store, 1).await;
    let absent = forever(bucket("absent", "r"), present.limits());
    // The absent bucket comes first: the other one must be settled as well.
    let both =
        [&absent, &present].map(|target| settlement(target, placement, [("rpm", tokens(4))]));
    settle(&*store, NOW, both).await;
    assert_eq!(balance(&*store, present.key(), "rpm", NOW).await, Some(tokens(5)));
    let found = peek(&*store, absent.key(), NOW).await.expect("a bucket");
    assert_eq!(found.limits(), absent.limits(), "the limits of the settlement");
    assert_eq!(found.cells()[0].tokens, tokens(6));
    assert_eq!(found.cells()[0].consumed, tokens(4));
    be_refused(&*store, NOW, [leg(&absent, [("rpm", tokens(7))])]).await;
    take(&*store, NOW, [leg(&absent, [("rpm", tokens(6))])]).await;
}

pub async fn a_charge_on_an_absent_bucket_may_leave_debt(store: Arc<dyn Store>) {
    let target = idle(bucket("a", "r"), &limits([per_minute("rpm", 10)]), 60);
    settle(&*store, NOW, [settlement(&target, Placement::default(), [("rpm", tokens(15))])]).await;
    assert_eq!(balance(&*store, target.key(), "rpm", NOW).await, Some(tokens(-5)));
    let refusal = be_refused(&*store, NOW, [leg(&target, [("rpm", tokens(1))])]).await;
    assert_eq!(refusal[0].retry_after, Duration::from_secs(36), "6 tokens at 10 per minute");
}

pub async fn a_charge_on_an_expired_bucket_leaves_full_less_the_charge(store: Arc<dyn Store>) {
    let target = idle(bucket("a", "r"), &limits([per_minute("rpm", 10)]), 60);
    let taken = take(&*store, NOW, [leg(&target, [("rpm", tokens(10))])]).await;
    // The bucket expires when it is full. Nothing of its old state must remain.
    let now = later(MINUTE);
    settle(&*store, now, [settlement(&target, taken[0].placement, [("rpm", tokens(4))])]).await;
    assert_eq!(balance(&*store, target.key(), "rpm", now).await, Some(tokens(6)));
    be_refused(&*store, now, [leg(&target, [("rpm", tokens(7))])]).await;
    take(&*store, now, [leg(&target, [("rpm", tokens(6))])]).await;
}

pub async fn a_charge_on_an_expired_bucket_follows_its_own_limits(store: Arc<dyn Store>) {
    let old = idle(bucket("a", "r"), &limits([per_minute("rpm", 10), per_minute("x", 5)]), 60);
    let takes = [("rpm", tokens(10)), ("x", tokens(5))];
    take(&*store, NOW, [leg(&old, takes)]).await;
    let new = idle(bucket("a", "r"), &limits([per_minute("rpm", 20)]), 60);
    let now = later(MINUTE);
    settle(&*store, now, [settlement(&new, Placement::default(), [("rpm", tokens(4))])]).await;
    let found = peek(&*store, new.key(), now).await.expect("a bucket");
    let (cell, rate) = found.cell("rpm").expect("the limit");
    assert_eq!((cell.tokens, rate.capacity()), (tokens(16), tokens(20)));
}

pub async fn a_charge_on_a_limit_that_the_bucket_lacks_adds_it(store: Arc<dyn Store>) {
    let one = forever(bucket("a", "r"), &limits([without_refill("x", 10)]));
    let placement = take(&*store, NOW, [leg(&one, [("x", tokens(3))])]).await[0].placement;
    let both = limits([without_refill("x", 50), without_refill("y", 10)]);
    let both = forever(bucket("a", "r"), &both);
    let differences = [("x", tokens(1)), ("y", tokens(4))];
    settle(&*store, NOW, [settlement(&both, placement, differences)]).await;
    let found = peek(&*store, one.key(), NOW).await.expect("a bucket");
    let (x, rate_of_x) = found.cell("x").expect("the limit that was there");
    assert_eq!((x.tokens, rate_of_x.capacity()), (tokens(6), tokens(10)), "x keeps its limit");
    let (y, rate_of_y) = found.cell("y").expect("the limit that was charged");
    assert_eq!((y.tokens, rate_of_y.capacity()), (tokens(6), tokens(10)), "y starts full");
    be_refused(&*store, NOW, [leg(&both, [("y", tokens(7))])]).await;
}

pub async fn a_refund_on_an_absent_bucket_leaves_it_absent(store: Arc<dyn Store>) {
    let (present, placement) = bucket_of_ten(&*store, 5).await;
    let absent = forever(bucket("absent", "r"), present.limits());
    for (difference, left) in [(-3, 8), (0, 8)] {
        let settlements = [&absent, &present]
            .map(|target| settlement(target, placement, [("rpm", tokens(difference))]));
        settle(&*store, NOW, settlements).await;
        assert_eq!(peek(&*store, absent.key(), NOW).await, None, "after {difference}");
        let found = balance(&*store, present.key(), "rpm", NOW).await;
        assert_eq!(found, Some(tokens(left)), "the other one, after {difference}");
    }
}

pub async fn a_refund_on_an_expired_bucket_leaves_it_absent(store: Arc<dyn Store>) {
    let target = idle(bucket("a", "r"), &limits([per_minute("rpm", 10)]), 60);
    let taken = take(&*store, NOW, [leg(&target, [("rpm", tokens(5))])]).await;
    let now = later(MINUTE);
    settle(&*store, now, [settlement(&target, taken[0].placement, [("rpm", tokens(-5))])]).await;
    assert_eq!(peek(&*store, target.key(), now).await, None);
    take(&*store, now, [leg(&target, [("rpm", tokens(10))])]).await;
}

pub async fn a_refund_next_to_a_charge_on_an_absent_bucket_is_ignored(store: Arc<dyn Store>) {
    let set = limits([without_refill("x", 10), without_refill("y", 10)]);
    let target = forever(bucket("a", "r"), &set);
    let differences = [("x", tokens(4)), ("y", tokens(-4))];
    settle(&*store, NOW, [settlement(&target, Placement::default(), differences)]).await;
    let found = peek(&*store, target.key(), NOW).await.expect("a bucket");
    let of = |limit: &str| found.cell(limit).map(|(cell, _)| (cell.tokens, cell.consumed));
    assert_eq!(of("x"), Some((tokens(6), tokens(4))), "the charge counts");
    let y = of("y").unwrap_or((tokens(10), tokens(0)));
    assert_eq!(y, (tokens(10), tokens(0)), "the refund does not");
}

/// Takes nothing, and settles what was used: the way to limit a cost that cannot be estimated.
pub async fn calls_that_only_settle_are_limited(store: Arc<dyn Store>) {
    let target = idle(bucket("a", "r"), &limits([per_minute("tpm", 100)]), 60);
    for call in 0..3 {
        let placement = take(&*store, NOW, [leg(&target, [("tpm", tokens(0))])]).await[0].placement;
        settle(&*store, NOW, [settlement(&target, placement, [("tpm", tokens(40))])]).await;
        let left = balance(&*store, target.key(), "tpm", NOW).await;
        assert_eq!(left, Some(tokens(60 - 40 * call)), "after call {call}");
    }
    let refusal = be_refused(&*store, NOW, [leg(&target, [("tpm", tokens(1))])]).await;
    assert_eq!(refusal[0].available, tokens(-20));
}

/// The same, with a bucket that is deleted between the acquire and the settlement.
pub async fn a_charge_counts_on_a_bucket_deleted_since_its_acquire(store: Arc<dyn Store>) {
    let target = forever(bucket("a", "r"), &limits([per_minute("tpm", 100)]));
    let placement = take(&*store, NOW, [leg(&target, [("tpm", tokens(0))])]).await[0].placement;
    delete(&*store, [Key::Bucket(target.key().clone())]).await;
    settle(&*store, NOW, [settlement(&target, placement, [("tpm", tokens(130))])]).await;
    let refusal = be_refused(&*store, NOW, [leg(&target, [("tpm", tokens(1))])]).await;
    assert_eq!(refusal[0].available, tokens(-30));
}

pub async fn a_refund_on_a_removed_limit_is_ignored(store: Arc<dyn Store>) {
    let both = limits([without_refill("removed", 10), without_refill("stays", 10)]);
    let both = forever(bucket("a", "r"), &both);
    let takes = [("removed", tokens(5)), ("stays", tokens(5))];
    let placement = take(&*store, NOW, [leg(&both, takes)]).await[0].placement;
    let one = forever(bucket("a", "r"), &limits([without_refill("stays", 10)]));
    store.reconfigure(&one, NOW).await.expect("reconfigure must answer");
    let back = [("removed", tokens(-2)), ("stays", tokens(-2))];
    settle(&*store, NOW, [settlement(&both, placement, back)]).await;
    let found = peek(&*store, both.key(), NOW).await.expect("a bucket");
    assert_eq!(found.limits(), one.limits(), "the limit stays removed");
    assert_eq!(found.cells()[0].tokens, tokens(7), "the other was settled");
}

pub async fn settling_by_old_limits_keeps_the_new_ones(store: Arc<dyn Store>) {
    let old = forever(bucket("a", "r"), &limits([without_refill("x", 100)]));
    let placement = take(&*store, NOW, [leg(&old, [("x", tokens(50))])]).await[0].placement;
    let new = forever(bucket("a", "r"), &limits([without_refill("x", 20)]));
    store.reconfigure(&new, NOW).await.expect("reconfigure must answer");
    settle(&*store, NOW, [settlement(&old, placement, [("x", tokens(15))])]).await;
    assert_eq!(balance(&*store, new.key(), "x", NOW).await, Some(tokens(5)), "20 less 15");
    settle(&*store, NOW, [settlement(&old, placement, [("x", tokens(-50))])]).await;
    let found = peek(&*store, new.key(), NOW).await.expect("a bucket");
    assert_eq!(found.cells()[0].tokens, tokens(20), "no higher than the capacity it has now");
    assert_eq!(found.limits(), new.limits(), "a lease with old limits does not restore them");
}

pub async fn an_overflow_is_an_error_and_changes_nothing(store: Arc<dyn Store>) {
    let set = limits([without_refill("x", 10), without_refill("y", 10)]);
    let target = forever(bucket("a", "r"), &set);
    let takes = [("x", tokens(1)), ("y", tokens(1))];
    let placement = take(&*store, NOW, [leg(&target, takes)]).await[0].placement;
    let deepest = Millitokens::new(i64::MAX);
    settle(&*store, NOW, [settlement(&target, placement, [("y", deepest)])]).await;
    let before = peek(&*store, target.key(), NOW).await.as_ref().map(seen);

    // The difference of x alone would fit.
    let differences = [settlement(&target, placement, [("x", tokens(3)), ("y", deepest)])];
    let error = store.settle(&differences, NOW).await.expect_err("y must overflow");
    assert_eq!(error.kind(), StoreErrorKind::Rejected, "it will never fit");
    assert_eq!(error.applied(), Applied::No);
    let after = peek(&*store, target.key(), NOW).await.as_ref().map(seen);
    assert_eq!(after, before, "neither x nor y has changed");
    settle(&*store, NOW, [settlement(&target, placement, [("x", tokens(3))])]).await;
    assert_eq!(balance(&*store, target.key(), "x", NOW).await, Some(tokens(6)));
}

pub async fn an_overflow_of_one_bucket_leaves_the_others_alone(store: Arc<dyn Store>) {
    let set = limits([without_refill("x", 10)]);
    let targets = ["first", "second", "third"].map(|entity| forever(bucket(entity, "r"), &set));
    let legs = [&targets[0], &targets[1]].map(|target| leg(target, [("x", tokens(1))]));
    let placement = take(&*store, NOW, legs).await[0].placement;
    let deepest = Millitokens::new(i64::MAX);
    settle(&*store, NOW, [settlement(&targets[1], placement, [("x", deepest)])]).await;

    let amounts = [tokens(3), deepest, tokens(3)];
    let differences: Vec<Settlement> = (targets.iter().zip(amounts))
        .map(|(target, amount)| settlement(target, placement, [("x", amount)]))
        .collect();
    let error = store.settle(&differences, NOW).await.expect_err("the second must overflow");
    assert_eq!(error.applied(), Applied::No);
    let first = balance(&*store, targets[0].key(), "x", NOW).await;
    assert_eq!(first, Some(tokens(9)), "before the one that overflows");
    assert_eq!(peek(&*store, targets[2].key(), NOW).await, None, "after it");
}

pub async fn settling_nothing_is_no_error(store: Arc<dyn Store>) {
    let (target, placement) = bucket_of_ten(&*store, 4).await;
    settle(&*store, NOW, []).await;
    settle(&*store, NOW, [settlement(&target, placement, [])]).await;
    settle(&*store, NOW, [settlement(&target, placement, [("rpm", tokens(0))])]).await;
    assert_eq!(balance(&*store, target.key(), "rpm", NOW).await, Some(tokens(6)));
}
