//! The decision: never more than was earned, and all or nothing.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::TestCaseResult;
use zae_limiter_model::{
    Ask, Bucket, Limit, LimitSet, Millitokens, Rate, Take, Timestamp, Verdict, decide,
};

use crate::check;
use crate::generate::{State, at, extreme_rates, gaps, states, states_of, takes, wishes_for};
use crate::oracle::Oracle;

/// What a limit admitted, and when.
type Admitted = Vec<(i64, i64)>;

/// In every interval of the run: admitted <= capacity + rate * length.
pub(crate) fn never_over_admitted(rate: &Rate, admitted: &Admitted) -> TestCaseResult {
    let period = i128::from(rate.period_ms());
    let capacity = i128::from(rate.capacity().get());
    let earns = i128::from(rate.refill_amount().get());
    for (at, &(from, _)) in admitted.iter().enumerate() {
        let mut sum = 0;
        for &(to, amount) in &admitted[at..] {
            sum += i128::from(amount);
            let allowed = capacity * period + earns * i128::from(to - from);
            prop_assert!(sum * period <= allowed, "{sum} admitted from {from} to {to} by {rate:?}");
        }
    }
    Ok(())
}

fn check_never_over_admits(states: impl Strategy<Value = State>) {
    let calls = vec((gaps(), 0..4_usize, wishes_for(4)), 1..60);
    check((states, calls), |(state, calls)| {
        let mut bucket = state.bucket();
        let mut admitted = vec![Admitted::new(); bucket.cells().len()];
        let mut now = state.refilled_at;
        for (gap, pace, wishes) in calls {
            now += gap.millis(&bucket.limits().rates()[pace % admitted.len()]);
            let takes = takes(&bucket, &wishes, at(now));
            let verdict = decide(&mut [Ask { bucket: &mut bucket, takes: &takes }], at(now));
            if verdict == Verdict::Admitted {
                takes.iter().for_each(|take| admitted[take.cell].push((now, take.amount.get())));
            }
        }
        for (rate, admitted) in bucket.limits().rates().iter().zip(&admitted) {
            never_over_admitted(rate, admitted)?;
        }
        Ok(())
    });
}

#[test]
fn no_interval_admits_more_than_capacity_and_rate_allow() {
    check_never_over_admits(states(1..=4));
}

#[test]
fn no_interval_admits_more_than_that_at_the_bounds() {
    check_never_over_admits(states_of(extreme_rates(), 1..=4));
}

#[test]
fn no_interval_admits_more_than_that_when_clocks_disagree() {
    let calls = vec((gaps(), 0..=1_000_i64, wishes_for(1)), 1..60);
    check((states(1..=1), calls), |(state, calls)| {
        let mut bucket = state.bucket();
        let rate = bucket.limits().rates()[0];
        // Counted at the latest time of any clock: the other clocks lag behind it.
        let mut admitted = Admitted::new();
        let mut latest = state.refilled_at;
        for (gap, lag, wishes) in calls {
            let now = latest + gap.millis(&rate) - lag;
            let takes = takes(&bucket, &wishes, at(now));
            let verdict = decide(&mut [Ask { bucket: &mut bucket, takes: &takes }], at(now));
            latest = latest.max(now);
            if verdict == Verdict::Admitted {
                admitted.extend(takes.iter().map(|take| (latest, take.amount.get())));
            }
        }
        never_over_admitted(&rate, &admitted)
    });
}

/// Decides over the chain, without the borrowing.
fn decide_chain(chain: &mut [Bucket], takes: &[Vec<Take>], now: Timestamp) -> Verdict {
    let asks = chain.iter_mut().zip(takes).map(|(bucket, takes)| Ask { bucket, takes });
    decide(&mut asks.collect::<Vec<_>>(), now)
}

#[test]
fn a_chain_is_taken_from_as_a_whole_or_not_at_all() {
    let chain = vec(states(1..=4), 1..=8);
    let calls = vec((gaps(), vec(wishes_for(4), 8)), 1..8);
    check((chain, calls), |(states, calls)| {
        let start = states[0].refilled_at;
        let at_start = |state: State| State { refilled_at: start, ..state }.bucket();
        let mut chain: Vec<Bucket> = states.into_iter().map(at_start).collect();
        let mut oracle: Vec<Oracle> = chain.iter().map(Oracle::open).collect();
        let mut now = start;
        for (gap, wishes) in calls {
            now += gap.millis(&chain[0].limits().rates()[0]);
            let asked: Vec<Vec<Take>> =
                chain.iter().zip(&wishes).map(|(b, wishes)| takes(b, wishes, at(now))).collect();
            oracle.iter_mut().for_each(|oracle| oracle.pass_to(at(now)));
            let fits = oracle.iter().zip(&asked).all(|(oracle, takes)| oracle.holds(takes));

            let verdict = decide_chain(&mut chain, &asked, at(now));
            prop_assert_eq!(verdict == Verdict::Admitted, fits);
            if fits {
                oracle.iter_mut().zip(&asked).for_each(|(oracle, takes)| oracle.take(takes));
            }
            for (oracle, bucket) in oracle.iter().zip(&chain) {
                oracle.agree_with(bucket)?;
            }
        }
        Ok(())
    });
}

#[test]
fn one_limit_short_anywhere_in_the_chain_refuses_all_of_it() {
    let chain = vec(states(1..=4), 1..=8);
    check((chain, any::<usize>(), any::<usize>()), |(states, level, cell)| {
        let start = at(states[0].refilled_at);
        let full = |state: &State| Bucket::full(Arc::clone(state.bucket().limits()), start);
        let mut chain: Vec<Bucket> = states.iter().map(full).collect();
        let (level, all) = (level % chain.len(), |bucket: &Bucket| {
            let rates = bucket.limits().rates().iter().enumerate();
            rates.map(|(cell, rate)| Take { cell, amount: rate.capacity() }).collect::<Vec<_>>()
        });
        let takes: Vec<Vec<Take>> = chain.iter().map(all).collect();

        let cell = cell % chain[level].cells().len();
        chain[level].charge(cell, Millitokens::new(1)).expect("a full bucket has that");
        let before = chain.clone();
        prop_assert_eq!(decide_chain(&mut chain, &takes, start), Verdict::Refused);
        prop_assert_eq!(&chain, &before);

        chain[level].charge(cell, Millitokens::new(-1)).expect("there is room for that");
        prop_assert_eq!(decide_chain(&mut chain, &takes, start), Verdict::Admitted);
        prop_assert!(chain.iter().all(|b| b.cells().iter().all(|c| c.tokens.get() == 0)));
        Ok(())
    });
}

#[test]
fn a_limit_named_twice_must_hold_the_sum() {
    let parts = vec((0..3_usize, 0..=1_000_i64), 1..6);
    check((states(3..=3), parts), |(state, parts)| {
        let mut bucket = state.bucket();
        let mut oracle = Oracle::open(&bucket);
        let takes: Vec<Take> = parts
            .into_iter()
            .map(|(cell, thousandths)| {
                let capacity = i128::from(bucket.limits().rates()[cell].capacity().get());
                let part = i64::try_from(capacity * i128::from(thousandths) / 1_000);
                Take { cell, amount: Millitokens::new(part.expect("below the capacity")) }
            })
            .collect();
        let now = at(state.refilled_at);
        let verdict = decide(&mut [Ask { bucket: &mut bucket, takes: &takes }], now);
        prop_assert_eq!(verdict == Verdict::Admitted, oracle.holds(&takes), "{:?}", takes);
        if verdict == Verdict::Admitted {
            oracle.take(&takes);
        }
        oracle.agree_with(&bucket)
    });
}

#[test]
fn nothing_is_always_held_even_in_debt() {
    check((states(1..=4), 0..100_i64), |(state, passed)| {
        let mut bucket = state.bucket();
        let now = at(state.refilled_at + passed);
        let cells = 0..bucket.cells().len();
        let takes: Vec<_> = cells.map(|cell| Take { cell, amount: Millitokens::ZERO }).collect();
        let mut refilled = bucket.clone();
        refilled.refill(now);
        let verdict = decide(&mut [Ask { bucket: &mut bucket, takes: &takes }], now);
        prop_assert_eq!(verdict, Verdict::Admitted);
        prop_assert_eq!(bucket, refilled);
        Ok(())
    });
}

#[test]
fn a_negative_amount_panics_before_anything_is_taken() {
    let limits = Arc::new(LimitSet::new([Limit::per_minute("rpm", 1)]).unwrap());
    let mut chain = [(); 2].map(|()| Bucket::full(Arc::clone(&limits), at(0)));
    let before = chain.clone();
    let takes = [1, -1].map(|amount| vec![Take { cell: 0, amount: Millitokens::new(amount) }]);
    let decided = catch_unwind(AssertUnwindSafe(|| decide_chain(&mut chain, &takes, at(0))));
    assert!(decided.is_err());
    assert_eq!(chain, before);
}
