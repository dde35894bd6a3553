//! The wait in a refusal is exact: after it the request passes, a millisecond earlier it fails.

use std::time::Duration;

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::TestCaseResult;
use zae_limiter_model::{Ask, Bucket, Millitokens, Take, Timestamp, Verdict, decide};

use crate::check;
use crate::generate::{Gap, State, at, gaps, states, takes, wishes_for};

/// Longer waits would end after the last timestamp.
const WAIT_CHECKED_MAX: Duration = Duration::from_millis(1 << 62);

fn verdict_at(chain: &[Bucket], takes: &[Vec<Take>], now: Timestamp) -> Verdict {
    let mut chain = chain.to_vec();
    let asks = chain.iter_mut().zip(takes).map(|(bucket, takes)| Ask { bucket, takes });
    decide(&mut asks.collect::<Vec<_>>(), now)
}

/// The longest wait of all requested limits is exact for the whole chain.
pub(crate) fn wait_is_exact(
    chain: &[Bucket],
    takes: &[Vec<Take>],
    now: Timestamp,
) -> TestCaseResult {
    let waits = chain.iter().zip(takes).flat_map(|(bucket, takes)| {
        takes.iter().map(|take| bucket.wait_for(take.cell, take.amount, now))
    });
    let wait = waits.max().unwrap_or_default();
    if wait > WAIT_CHECKED_MAX {
        prop_assert_eq!(verdict_at(chain, takes, now), Verdict::Refused);
        return Ok(());
    }
    prop_assert_eq!(verdict_at(chain, takes, now.saturating_add(wait)), Verdict::Admitted);
    if let Some(early) = wait.checked_sub(Duration::from_millis(1)) {
        let early = verdict_at(chain, takes, now.saturating_add(early));
        prop_assert_eq!(early, Verdict::Refused, "{:?} is too long", wait);
    }
    Ok(())
}

/// Requests that can pass: no amount is above its limit's capacity.
fn within_capacity(bucket: &Bucket, mut takes: Vec<Take>) -> Vec<Take> {
    for take in &mut takes {
        take.amount = take.amount.min(bucket.limits().rates()[take.cell].capacity());
    }
    takes
}

#[test]
fn the_wait_is_exact_over_limits_and_levels() {
    let level = (states(1..=3), wishes_for(3));
    check(vec(level, 1..=4), |levels| {
        let now = at(levels[0].0.refilled_at);
        let at_now = |state: &State| State { refilled_at: now.as_millis(), ..state.clone() };
        let chain: Vec<Bucket> = levels.iter().map(|(state, _)| at_now(state).bucket()).collect();
        let asked = chain.iter().zip(&levels);
        let takes: Vec<Vec<Take>> =
            asked.map(|(b, (_, wishes))| within_capacity(b, takes(b, wishes, now))).collect();
        wait_is_exact(&chain, &takes, now)
    });
}

/// A bucket whose last refill is `gap` before the clock, or after it.
fn check_wait_when_refilled(direction: i64) {
    check((states(1..=3), wishes_for(3), gaps()), |(state, wishes, gap)| {
        let bucket = state.bucket();
        let gap = Gap::millis(gap, &bucket.limits().rates()[0]);
        let now = at(state.refilled_at + gap * direction);
        let takes = within_capacity(&bucket, takes(&bucket, &wishes, now));
        wait_is_exact(&[bucket], &[takes], now)
    });
}

#[test]
fn the_wait_is_exact_when_the_clock_is_behind() {
    check_wait_when_refilled(-1);
}

#[test]
fn the_wait_is_exact_when_the_last_refill_is_long_ago() {
    check_wait_when_refilled(1);
}

#[test]
fn the_wait_is_exact_in_debt() {
    check((states(1..=3), wishes_for(3), 1..=4_i64), |(state, wishes, times)| {
        let mut bucket = state.bucket();
        for cell in 0..bucket.cells().len() {
            let capacity = bucket.limits().rates()[cell].capacity().get();
            bucket.charge(cell, Millitokens::new(capacity * times)).expect("far from the bound");
            bucket.charge(cell, Millitokens::new(1)).expect("far from the bound");
        }
        prop_assert!(bucket.in_debt());
        let now = at(state.refilled_at);
        let takes = within_capacity(&bucket, takes(&bucket, &wishes, now));
        wait_is_exact(&[bucket], &[takes], now)
    });
}

#[test]
fn the_wait_until_full_is_exact() {
    let skew = prop_oneof![Just(0), -50..=50_i64];
    check((states(1..=3), skew), |(state, skew)| {
        let bucket = state.bucket();
        let now = at(state.refilled_at + skew);
        let wait = bucket.wait_until_full(now);
        if wait > WAIT_CHECKED_MAX {
            return Ok(());
        }
        let is_full_after = |wait| {
            let mut then = bucket.clone();
            then.refill(now.saturating_add(wait));
            then.cells().iter().zip(then.limits().rates()).all(|(c, r)| c.tokens == r.capacity())
        };
        prop_assert!(is_full_after(wait));
        if let Some(early) = wait.checked_sub(Duration::from_millis(1)) {
            prop_assert!(!is_full_after(early), "{:?} is too long", wait);
        }
        Ok(())
    });
}
