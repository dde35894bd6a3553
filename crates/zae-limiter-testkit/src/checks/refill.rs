//! Time is paid out exactly, and once.

use std::sync::Arc;

use zae_limiter_core::{Limit, Store, Timestamp};

use crate::calls::{balance, be_refused, peek, take};
use crate::given::{
    DAY, MINUTE, NOW, bucket, forever, later, leg, limits, per_minute, tokens, without_refill,
};

pub async fn a_slow_limit_earns_beside_a_busy_one(store: Arc<dyn Store>) {
    let set = limits([per_minute("busy", 60_000), Limit::per_day("slow", 1_000)]);
    let target = forever(bucket("a", "r"), &set);
    take(&*store, NOW, [leg(&target, [("busy", tokens(1)), ("slow", tokens(1_000))])]).await;
    // Each step earns the slow limit 0.58 millitokens. Without a remainder it would starve.
    let step = 50;
    for number in 1..=400 {
        take(&*store, later(number * step), [leg(&target, [("busy", tokens(1))])]).await;
    }
    let end = later(400 * step);
    let bucket = peek(&*store, target.key(), end).await.expect("a bucket");
    let (slow, _) = bucket.cell("slow").expect("both limits");
    // 20,000 ms * 1,000,000 millitokens / 86,400,000 ms = 231.48
    assert_eq!(slow.tokens.get(), 231, "to the millitoken");
    assert_eq!(slow.remainder, 41_600_000, "and what is left of one");
    let (busy, _) = bucket.cell("busy").expect("both limits");
    assert_eq!(busy.tokens, tokens(59_999), "earns 50 in each step, and is full");
}

pub async fn an_idle_bucket_fills_to_its_capacity_and_no_higher(store: Arc<dyn Store>) {
    let target = forever(bucket("a", "r"), &limits([per_minute("rpm", 10).burst(15)]));
    take(&*store, NOW, [leg(&target, [("rpm", tokens(15))])]).await;
    assert_eq!(balance(&*store, target.key(), "rpm", later(MINUTE)).await, Some(tokens(10)));
    assert_eq!(balance(&*store, target.key(), "rpm", later(DAY)).await, Some(tokens(15)));
    let taken = take(&*store, later(DAY), [leg(&target, [("rpm", tokens(15))])]).await;
    assert_eq!(taken[0].left[..], [tokens(0)], "no more than the capacity was saved up");
    be_refused(&*store, later(DAY), [leg(&target, [("rpm", tokens(1))])]).await;
}

pub async fn a_clock_that_runs_back_refills_nothing(store: Arc<dyn Store>) {
    let target = forever(bucket("a", "r"), &limits([per_minute("rpm", 60)]));
    let one = || [leg(&target, [("rpm", tokens(1))])];
    take(&*store, NOW, [leg(&target, [("rpm", tokens(60))])]).await;
    take(&*store, later(2_000), one()).await;
    // The second minute between 1 s and 2 s must not be paid a second time.
    take(&*store, later(1_000), one()).await;
    be_refused(&*store, later(1_000), one()).await;
    be_refused(&*store, later(2_999), one()).await;
    take(&*store, later(3_000), one()).await;
    be_refused(&*store, later(3_000), one()).await;
}

pub async fn the_ends_of_time_do_no_harm(store: Arc<dyn Store>) {
    let set = limits([per_minute("rpm", 10), without_refill("day", 10)]);
    let target = forever(bucket("a", "r"), &set);
    let all = || [leg(&target, [("rpm", tokens(10)), ("day", tokens(1))])];
    let (first, last) = (Timestamp::from_millis(i64::MIN), Timestamp::from_millis(i64::MAX));
    take(&*store, first, all()).await;
    be_refused(&*store, first, all()).await;
    take(&*store, Timestamp::from_millis(0), all()).await;
    take(&*store, last, all()).await;
    be_refused(&*store, last, all()).await;
    be_refused(&*store, first, all()).await;
}
