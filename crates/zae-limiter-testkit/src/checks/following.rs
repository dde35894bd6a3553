//! A bucket follows the limits that a plan brings.

use std::sync::Arc;

use zae_limiter_core::{Store, Target};

use crate::calls::{balance, be_refused, peek, take};
use crate::given::{
    MINUTE, NOW, bucket, forever, idle, later, leg, limits, per_minute, tokens, without_refill,
};

/// The one bucket of these checks, under one limit.
fn rpm(amount: u64) -> Arc<Target> {
    forever(bucket("a", "r"), &limits([per_minute("rpm", amount)]))
}

pub async fn a_lower_capacity_cuts_the_balance(store: Arc<dyn Store>) {
    take(&*store, NOW, [leg(&rpm(100), [("rpm", tokens(10))])]).await;
    let taken = take(&*store, NOW, [leg(&rpm(20), [("rpm", tokens(1))])]).await;
    assert_eq!(taken[0].left[..], [tokens(19)], "90 were cut to 20");
    let taken = take(&*store, NOW, [leg(&rpm(100), [("rpm", tokens(1))])]).await;
    assert_eq!(taken[0].left[..], [tokens(18)], "what was cut does not come back");
}

pub async fn a_higher_capacity_grants_nothing_at_once(store: Arc<dyn Store>) {
    take(&*store, NOW, [leg(&rpm(10), [("rpm", tokens(4))])]).await;
    let taken = take(&*store, NOW, [leg(&rpm(600), [("rpm", tokens(1))])]).await;
    assert_eq!(taken[0].left[..], [tokens(5)], "6 were there");
    be_refused(&*store, NOW, [leg(&rpm(600), [("rpm", tokens(6))])]).await;
    take(&*store, later(100), [leg(&rpm(600), [("rpm", tokens(6))])]).await;
}

pub async fn a_changed_rate_earns_from_then_on(store: Arc<dyn Store>) {
    take(&*store, NOW, [leg(&rpm(60), [("rpm", tokens(60))])]).await;
    // 10 s at one per second, then 1 s at ten per second.
    let taken = take(&*store, later(10_000), [leg(&rpm(600), [("rpm", tokens(10))])]).await;
    assert_eq!(taken[0].left[..], [tokens(0)], "earned at the old rate up to the change");
    let taken = take(&*store, later(11_000), [leg(&rpm(600), [("rpm", tokens(10))])]).await;
    assert_eq!(taken[0].left[..], [tokens(0)], "earned at the new rate from then on");
}

pub async fn a_new_limit_starts_full(store: Arc<dyn Store>) {
    take(&*store, NOW, [leg(&rpm(10), [("rpm", tokens(10))])]).await;
    let both = limits([per_minute("rpm", 10), per_minute("tpm", 50)]);
    let target = forever(bucket("a", "r"), &both);
    let taken = take(&*store, NOW, [leg(&target, [("tpm", tokens(50))])]).await;
    assert_eq!(taken[0].left[..], [tokens(0)]);
    assert_eq!(balance(&*store, target.key(), "rpm", NOW).await, Some(tokens(0)), "still empty");
}

pub async fn a_limit_missing_from_the_plan_keeps_its_balance(store: Arc<dyn Store>) {
    let stored = limits([without_refill("day", 10), per_minute("rpm", 60)]);
    let stored = forever(bucket("a", "r"), &stored);
    take(&*store, NOW, [leg(&stored, [("day", tokens(4)), ("rpm", tokens(60))])]).await;
    // A call with limits of its own must not wipe out what was taken under the stored ones.
    let own = forever(bucket("a", "r"), &limits([per_minute("tpm", 5)]));
    take(&*store, NOW, [leg(&own, [("tpm", tokens(5))])]).await;
    assert_eq!(balance(&*store, own.key(), "day", NOW).await, Some(tokens(6)));
    take(&*store, later(10_000), [leg(&own, [("tpm", tokens(0))])]).await;
    let refusal = be_refused(&*store, later(10_000), [leg(&stored, [("rpm", tokens(11))])]).await;
    assert_eq!(refusal[0].available, tokens(10), "it went on earning");
    let refusal = be_refused(&*store, NOW, [leg(&stored, [("day", tokens(7))])]).await;
    assert_eq!(refusal[0].available, tokens(6), "and nothing of it was granted anew");
}

pub async fn cells_count_in_the_limits_of_the_plan(store: Arc<dyn Store>) {
    let names = ["a", "b", "c", "d"];
    let all = limits(names.map(|name| without_refill(name, 100)));
    let all = forever(bucket("a", "r"), &all);
    take(&*store, NOW, [leg(&all, names.map(|name| (name, tokens(10))))]).await;
    // The first limit of this plan is the third of the bucket.
    let some = limits(["c", "d", "e"].map(|name| without_refill(name, 100)));
    let some = forever(bucket("a", "r"), &some);
    let taken =
        take(&*store, NOW, [leg(&some, [("e", tokens(5)), ("c", tokens(1)), ("d", tokens(2))])])
            .await;
    assert_eq!(taken[0].left[..], [tokens(95), tokens(89), tokens(88)]);
    for (limit, left) in [("a", 90), ("b", 90), ("c", 89), ("d", 88), ("e", 95)] {
        assert_eq!(balance(&*store, some.key(), limit, NOW).await, Some(tokens(left)), "{limit}");
    }
    let refusal = be_refused(&*store, NOW, [leg(&some, [("d", tokens(89))])]).await;
    assert_eq!(refusal[0].limit_name.as_str(), "d");
    assert_eq!(refusal[0].available, tokens(88));
}

pub async fn reconfigure_gives_exactly_the_limits(store: Arc<dyn Store>) {
    let old = limits([
        per_minute("cut", 100),
        without_refill("removed", 100),
        per_minute("raised", 10),
        per_minute("same", 10),
    ]);
    let old = forever(bucket("a", "r"), &old);
    let takes = [("cut", 1), ("removed", 1), ("raised", 4), ("same", 3)];
    take(&*store, NOW, [leg(&old, takes.map(|(name, amount)| (name, tokens(amount))))]).await;
    let new = limits([
        per_minute("cut", 20),
        per_minute("new", 7),
        per_minute("raised", 600),
        per_minute("same", 10),
    ]);
    let new = forever(bucket("a", "r"), &new);
    store.reconfigure(&new, NOW).await.expect("reconfigure must answer");
    let found = peek(&*store, new.key(), NOW).await.expect("the bucket is still there");
    assert_eq!(found.limits(), new.limits(), "exactly the new limits");
    let left: Vec<_> = found.cells().iter().map(|cell| cell.tokens).collect();
    assert_eq!(left, [20, 7, 6, 7].map(tokens), "cut, new, raised, same");
    // A limit that was removed and is added again starts full.
    take(&*store, later(MINUTE), [leg(&old, [("removed", tokens(100))])]).await;
}

pub async fn reconfigure_leaves_an_absent_bucket_absent(store: Arc<dyn Store>) {
    let target = rpm(10);
    store.reconfigure(&target, NOW).await.expect("reconfigure must answer");
    assert_eq!(peek(&*store, target.key(), NOW).await, None);
}

pub async fn reconfigure_leaves_an_expired_bucket_absent(store: Arc<dyn Store>) {
    let short = idle(bucket("a", "r"), &limits([per_minute("rpm", 10)]), 60);
    take(&*store, NOW, [leg(&short, [("rpm", tokens(10))])]).await;
    let kept = forever(bucket("a", "r"), short.limits());
    store.reconfigure(&kept, later(MINUTE)).await.expect("reconfigure must answer");
    assert_eq!(peek(&*store, kept.key(), later(MINUTE)).await, None, "expired is absent");
    take(&*store, later(MINUTE), [leg(&kept, [("rpm", tokens(10))])]).await;
}
