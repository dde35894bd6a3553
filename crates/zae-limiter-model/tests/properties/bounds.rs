//! The ends of every range: nothing overflows, and the arithmetic is still exact there.

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use zae_limiter_model::{
    Ask, Bucket, Millitokens, Overflow, Rate, Take, Timestamp, Verdict, WAIT_MAX, decide,
};

use crate::check;
use crate::generate::{
    MILLITOKENS_MAX, PERIOD_MS_MAX, State, at, extreme_rates, limit_set, states_of,
};
use crate::oracle::Oracle;
use crate::retry::wait_is_exact;

fn clocks() -> impl Strategy<Value = i64> {
    let ends = vec![i64::MIN, i64::MIN + 1, -1, 0, 1, i64::MAX - 1, i64::MAX];
    prop_oneof![3 => select(ends), 1 => any::<i64>(), 1 => 0..=2_000_000_000_000_i64]
}

fn differences() -> impl Strategy<Value = i64> {
    let ends = vec![0, 1, -1, MILLITOKENS_MAX, -MILLITOKENS_MAX, i64::MAX, -i64::MAX, i64::MIN];
    prop_oneof![3 => select(ends), 1 => any::<i64>()]
}

fn amounts() -> impl Strategy<Value = i64> {
    prop_oneof![2 => select(vec![0, 1, MILLITOKENS_MAX, i64::MAX]), 1 => 0..=MILLITOKENS_MAX]
}

#[derive(Clone, Debug)]
enum Event {
    Acquire(i64),
    Charge(i64),
    Wait(i64),
    Follow(Rate),
    Replace(Rate),
}

fn events() -> impl Strategy<Value = Event> {
    prop_oneof![
        3 => amounts().prop_map(Event::Acquire),
        3 => differences().prop_map(Event::Charge),
        2 => amounts().prop_map(Event::Wait),
        1 => extreme_rates().prop_map(Event::Follow),
        1 => extreme_rates().prop_map(Event::Replace),
    ]
}

#[test]
fn nothing_overflows_at_the_bounds() {
    let run = vec((clocks(), 0..3_usize, events()), 0..30);
    check((states_of(extreme_rates(), 1..=3), clocks(), run), |(state, start, run)| {
        let mut bucket = State { refilled_at: start, ..state }.bucket();
        let mut oracle = Oracle::open(&bucket);
        for (clock, cell, event) in run {
            let (now, cell) = (at(clock), cell % bucket.cells().len());
            match event {
                Event::Acquire(amount) => {
                    let takes = [Take { cell, amount: Millitokens::new(amount) }];
                    oracle.pass_to(now);
                    let verdict = decide(&mut [Ask { bucket: &mut bucket, takes: &takes }], now);
                    prop_assert_eq!(verdict == Verdict::Admitted, oracle.holds(&takes));
                    if verdict == Verdict::Admitted {
                        oracle.take(&takes);
                    }
                }
                Event::Charge(difference) => {
                    let before = bucket.clone();
                    let charged = bucket.charge(cell, Millitokens::new(difference));
                    prop_assert_eq!(charged.is_ok(), oracle.tallies[cell].charge(difference));
                    prop_assert!(charged.is_ok() || bucket == before, "an error changes nothing");
                }
                Event::Wait(amount) => {
                    let amount = Millitokens::new(amount);
                    prop_assert!(bucket.wait_for(cell, amount, now) <= WAIT_MAX);
                    prop_assert!(bucket.wait_until_full(now) <= WAIT_MAX);
                    let shown = format!("{bucket:?}");
                    prop_assert!(shown.contains("refilled_at"));
                }
                Event::Follow(rate) => {
                    bucket.follow(&limit_set([rate]), now);
                    oracle = Oracle::open(&bucket);
                }
                Event::Replace(rate) => {
                    bucket.replace_limits(&limit_set([rate]), now);
                    oracle = Oracle::open(&bucket);
                }
            }
            oracle.agree_with(&bucket)?;
        }
        Ok(())
    });
}

#[test]
fn the_wait_is_exact_at_the_bounds() {
    let debts = vec(0..=MILLITOKENS_MAX, 0..4);
    let clock = prop_oneof![Just(i64::MIN), Just(0), -1_000_000..=1_000_000_i64];
    let states = states_of(extreme_rates(), 1..=2);
    check((states, clock, debts, 0..=1_000_i64), |(state, clock, debts, thousandths)| {
        let mut bucket = State { refilled_at: clock, ..state }.bucket();
        for debt in debts {
            bucket.charge(0, Millitokens::new(debt)).expect("far from the bound");
        }
        let capacity = bucket.limits().rates()[0].capacity();
        let asked = i128::from(capacity.get()) * i128::from(thousandths) / 1_000;
        let asked = Millitokens::new(i64::try_from(asked).expect("below the capacity"));
        for amount in [Millitokens::new(1), asked, capacity] {
            let takes = vec![Take { cell: 0, amount }];
            wait_is_exact(std::slice::from_ref(&bucket), &[takes], at(clock))?;
        }
        Ok(())
    });
}

/// The slowest rate with the largest ceiling: a millitoken in 10^9 s, and 10^12 tokens.
fn slowest() -> Bucket {
    let rate = Rate::new(Millitokens::new(MILLITOKENS_MAX), Millitokens::new(1), PERIOD_MS_MAX);
    Bucket::full(limit_set([rate.expect("at the bounds")]), at(0))
}

#[test]
fn a_debt_past_the_bound_is_refused_and_changes_nothing() {
    let mut bucket = slowest();
    let largest = Millitokens::new(MILLITOKENS_MAX);
    let mut charged = 0_i128;
    while bucket.charge(0, largest).is_ok() {
        charged += 1;
        let cell = bucket.cells()[0];
        let net = charged * i128::from(MILLITOKENS_MAX);
        assert_eq!(i128::from(cell.tokens.get()), i128::from(MILLITOKENS_MAX) - net);
        assert_eq!(i128::from(cell.consumed.get()), net.min(i64::MAX.into()));
    }
    let room = i128::from(MILLITOKENS_MAX) - i128::from(i64::MIN);
    assert_eq!(charged, room / i128::from(MILLITOKENS_MAX));

    let before = bucket.clone();
    assert_eq!(bucket.charge(0, largest), Err(Overflow));
    assert_eq!(bucket, before);
    assert_eq!(bucket.wait_for(0, Millitokens::new(1), at(0)), WAIT_MAX);
    assert_eq!(bucket.wait_until_full(at(i64::MIN)), WAIT_MAX);
    bucket.charge(0, -largest).unwrap();
    assert_eq!(bucket.cells()[0].tokens.get(), before.cells()[0].tokens.get() + largest.get());
}

#[test]
fn a_credit_of_any_size_fills_the_bucket_and_no_more() {
    for credit in [i64::MIN, i64::MIN + 1, -i64::MAX / 2, -2 * MILLITOKENS_MAX] {
        let mut bucket = slowest();
        bucket.charge(0, Millitokens::new(5)).unwrap();
        assert_eq!(bucket.charge(0, Millitokens::new(credit)), Ok(()), "{credit}");
        assert_eq!(bucket.cells()[0].tokens.get(), MILLITOKENS_MAX, "{credit}");
        assert_eq!(bucket.cells()[0].remainder, 0);
    }
}

#[test]
fn the_slowest_rate_earns_its_millitoken_to_the_millisecond() {
    let mut bucket = slowest();
    bucket.charge(0, Millitokens::new(MILLITOKENS_MAX)).unwrap();
    let period_ms = i64::try_from(PERIOD_MS_MAX).unwrap();
    for (now, tokens) in [(period_ms - 1, 0), (period_ms, 1), (3 * period_ms - 1, 2)] {
        bucket.refill(at(now));
        assert_eq!(bucket.cells()[0].tokens.get(), tokens, "after {now} ms");
    }
    assert_eq!(bucket.cells()[0].remainder, PERIOD_MS_MAX - 1);
}

#[test]
fn the_fastest_rate_is_full_a_millisecond_after_any_emptying() {
    let most = Millitokens::new(MILLITOKENS_MAX);
    let bucket = Bucket::full(limit_set([Rate::new(most, most, 1).unwrap()]), at(i64::MIN));
    for last in [i64::MIN + 1, 0, i64::MAX] {
        let mut emptied = bucket.clone();
        emptied.charge(0, most).unwrap();
        assert_eq!(emptied.wait_until_full(at(i64::MIN)).as_millis(), 1);
        emptied.refill(at(last));
        assert_eq!(emptied.cells()[0].tokens, most, "at {last}");
        emptied.refill(at(i64::MIN));
        assert_eq!(emptied.refilled_at(), at(last));
    }
}

#[test]
fn time_differences_fit_or_are_cut_and_never_negative() {
    check((clocks(), clocks()), |(a, b)| {
        let (earlier, later) = (a.min(b), a.max(b));
        let exact = i128::from(later) - i128::from(earlier);
        let cut = exact.min(i64::MAX.into());
        prop_assert_eq!(i128::from(at(later).millis_since(at(earlier))), cut);
        prop_assert_eq!(at(earlier).millis_since(at(later)), 0);
        prop_assert!(at(later).saturating_add(WAIT_MAX) >= at(later));
        prop_assert_eq!(Timestamp::from_millis(a).as_millis(), a);
        Ok(())
    });
}
