//! Changes of a bucket's limits: they never add tokens and never drop a debt.

use std::sync::Arc;

use proptest::collection::vec;
use proptest::prelude::*;
use zae_limiter_model::{
    Ask, Bucket, LIMITS_MAX, Limit, LimitSet, Millitokens, Rate, Verdict, decide,
};

use crate::admission::never_over_admitted;
use crate::check;
use crate::generate::{at, gaps, limit_set, name, rates, states, takes, wishes_for};

/// Limits of these numbers under these names.
fn named(limits: impl IntoIterator<Item = (usize, Rate)>) -> Arc<LimitSet> {
    let limits = limits.into_iter().map(|(number, rate)| (name(number), rate));
    Arc::new(LimitSet::from_rates(limits).expect("each name once, within the bound"))
}

/// How a bucket changes to other limits.
#[derive(Clone, Copy, Debug)]
enum How {
    Follow,
    Replace,
}

impl How {
    fn change(self, bucket: &mut Bucket, limits: &Arc<LimitSet>, now: i64) {
        match self {
            Self::Follow => bucket.follow(limits, at(now)),
            Self::Replace => bucket.replace_limits(limits, at(now)),
        }
    }
}

fn ways() -> impl Strategy<Value = How> {
    prop_oneof![Just(How::Follow), Just(How::Replace)]
}

#[test]
fn lowering_cuts_the_balance_and_raising_grants_nothing() {
    let inputs = (states(1..=3), vec(rates(), 3), gaps(), ways());
    check(inputs, |(state, new, gap, how)| {
        let mut bucket = state.bucket();
        let now = state.refilled_at + gap.millis(&bucket.limits().rates()[0]);
        let mut before = bucket.clone();
        let new = limit_set(new.into_iter().take(before.cells().len()));
        how.change(&mut bucket, &new, now);
        prop_assert_eq!(bucket.limits(), &new);
        // The same limits again are no change, and so no reason to refill.
        before.refill(at(now));
        bucket.refill(at(now));
        prop_assert_eq!(bucket.refilled_at(), at(now));

        let limits = before.limits().rates().iter().zip(new.rates());
        let cells = before.cells().iter().zip(bucket.cells());
        for ((old_rate, new_rate), (was, is)) in limits.zip(cells) {
            prop_assert_eq!(is.tokens, was.tokens.min(new_rate.capacity()));
            prop_assert_eq!((is.consumed, is.unbooked), (was.consumed, was.unbooked));
            // The same fraction of a millitoken, rounded down to the new unit; none when full.
            let fraction = u128::from(was.remainder) * u128::from(new_rate.period_ms());
            let full = is.tokens == new_rate.capacity();
            let expected = if full { 0 } else { fraction / u128::from(old_rate.period_ms()) };
            prop_assert_eq!(u128::from(is.remainder), expected);
        }
        Ok(())
    });
}

#[test]
fn time_before_the_change_is_paid_at_the_old_rate_and_after_it_at_the_new() {
    let inputs = (states(1..=1), rates(), gaps(), gaps(), ways());
    check(inputs, |(state, new, before, after, how)| {
        let mut bucket = state.bucket();
        let changed_at = state.refilled_at + before.millis(&bucket.limits().rates()[0]);
        let until = changed_at + after.millis(&new);
        let mut old = bucket.clone();
        old.refill(at(changed_at));
        let limits = limit_set([new]);
        if &limits == bucket.limits() {
            return Ok(());
        }
        how.change(&mut bucket, &limits, changed_at);
        let mut expected = Bucket::from_parts(limits, [bucket.cells()[0]], at(changed_at));
        prop_assert_eq!(bucket.cells()[0].tokens, old.cells()[0].tokens.min(new.capacity()));
        bucket.refill(at(until));
        expected.refill(at(until));
        prop_assert_eq!(bucket, expected);
        Ok(())
    });
}

/// The larger ceiling with the faster rate, as one limit.
fn more_generous(a: &Rate, b: &Rate) -> Rate {
    let earns = |rate: &Rate, other: &Rate| {
        i128::from(rate.refill_amount().get()) * i128::from(other.period_ms())
    };
    let faster = if earns(a, b) >= earns(b, a) { a } else { b };
    let capacity = a.capacity().max(b.capacity());
    Rate::new(capacity, faster.refill_amount(), faster.period_ms()).expect("both are valid")
}

#[test]
fn alternating_between_two_sets_earns_at_most_the_larger_of_both() {
    let calls = vec((gaps(), any::<bool>(), ways(), wishes_for(1)), 1..60);
    check((states(1..=1), rates(), calls), |(state, other, calls)| {
        let mut bucket = state.bucket();
        let both = [Arc::clone(bucket.limits()), limit_set([other])];
        let bound = more_generous(&both[0].rates()[0], &other);
        let mut admitted = Vec::new();
        let mut now = state.refilled_at;
        for (gap, which, how, wishes) in calls {
            let limits = &both[usize::from(which)];
            now += gap.millis(&limits.rates()[0]);
            how.change(&mut bucket, limits, now);
            let takes = takes(&bucket, &wishes, at(now));
            let verdict = decide(&mut [Ask { bucket: &mut bucket, takes: &takes }], at(now));
            if verdict == Verdict::Admitted {
                admitted.extend(takes.iter().map(|take| (now, take.amount.get())));
            }
        }
        never_over_admitted(&bound, &admitted)
    });
}

#[test]
fn alternating_without_time_passing_never_adds() {
    let changes = vec((0..3_usize, ways()), 1..20);
    check((states(2..=2), vec(rates(), 4), changes), |(state, others, changes)| {
        let mut bucket = state.bucket();
        let mut sets = vec![Arc::clone(bucket.limits())];
        sets.extend(others.chunks(2).map(|pair| limit_set(pair.iter().copied())));
        let exact = |bucket: &Bucket, cell: usize| {
            let held = &bucket.cells()[cell];
            let period = i128::from(bucket.limits().rates()[cell].period_ms());
            (i128::from(held.tokens.get()) * period + i128::from(held.remainder), period)
        };
        for (which, how) in changes {
            let before = bucket.clone();
            how.change(&mut bucket, &sets[which], state.refilled_at);
            for cell in 0..2 {
                let ((was, old), (is, new)) = (exact(&before, cell), exact(&bucket, cell));
                // Compared without a common period, for it would not fit.
                let whole = (was.div_euclid(old), is.div_euclid(new));
                let rest = (was.rem_euclid(old) * new, is.rem_euclid(new) * old);
                prop_assert!((whole.1, rest.1) <= (whole.0, rest.0), "cell {} grew", cell);
            }
        }
        Ok(())
    });
}

/// Compares with a twin bucket that never gets the calls with limits of their own.
#[test]
fn a_call_with_limits_of_its_own_leaves_the_others_as_they_are() {
    let flags = any::<(bool, bool)>();
    let calls = vec((gaps(), 0..3_usize, flags, wishes_for(3)), 1..40);
    let own = vec(rates(), 1..=3);
    check((states(1..=3), own, calls), |(state, own, calls)| {
        let mut bucket = state.bucket();
        let mut twin = bucket.clone();
        let stored = Arc::clone(bucket.limits());
        let other = named(own.into_iter().enumerate().map(|(n, rate)| (10 + n, rate)));
        let mut now = state.refilled_at;
        for (gap, pace, (ask_stored, book), wishes) in calls {
            now += gap.millis(&stored.rates()[pace % stored.len()]);
            bucket.follow(if ask_stored { &stored } else { &other }, at(now));
            if ask_stored {
                // Also where the other limits are still in the bucket: these come first by name.
                let takes = takes(&twin, &wishes, at(now));
                let mine = decide(&mut [Ask { bucket: &mut bucket, takes: &takes }], at(now));
                let twins = decide(&mut [Ask { bucket: &mut twin, takes: &takes }], at(now));
                prop_assert_eq!(mine, twins);
            }
            if book {
                bucket.take_unbooked();
            }
            bucket.refill(at(now));
            twin.refill(at(now));
            for ((name, rate), expected) in stored.iter().zip(twin.cells()) {
                match bucket.cell(name.as_str()) {
                    Some((cell, current)) => {
                        prop_assert_eq!(current, rate);
                        prop_assert_eq!(cell.tokens, expected.tokens);
                        prop_assert_eq!(cell.remainder, expected.remainder);
                    }
                    None => prop_assert_eq!(expected.tokens, rate.capacity(), "{} is gone", name),
                }
            }
        }
        Ok(())
    });
}

#[test]
fn a_debt_outlives_any_number_of_other_limits() {
    check((states(1..=1), rates(), 1..30_usize), |(state, other, times)| {
        let mut bucket = state.bucket();
        let stored = Arc::clone(bucket.limits());
        let owed = 2 * stored.rates()[0].capacity().get();
        bucket.charge(0, Millitokens::new(owed)).expect("far from the bound");
        // With its usage booked, only the debt is a reason to keep it.
        bucket.take_unbooked();
        let indebted = *bucket.cell(name(0).as_str()).expect("it has one limit").0;
        prop_assert!(indebted.tokens < Millitokens::ZERO);
        let other = named([(1, other)]);
        for _ in 0..times {
            bucket.follow(&other, at(state.refilled_at));
            bucket.follow(&stored, at(state.refilled_at));
        }
        prop_assert_eq!(*bucket.cell(name(0).as_str()).expect("it is in debt").0, indebted);
        Ok(())
    });
}

#[test]
fn follow_keeps_what_is_not_named_and_replace_drops_it() {
    let inputs = (states(1..=6), vec(prop::option::of(rates()), 8), gaps());
    check(inputs, |(state, new, gap)| {
        let bucket = state.bucket();
        let now = state.refilled_at + gap.millis(&bucket.limits().rates()[0]);
        let numbered = new.into_iter().enumerate();
        let new = named(numbered.filter_map(|(number, rate)| rate.map(|rate| (number, rate))));
        let (mut followed, mut replaced, mut refilled) =
            (bucket.clone(), bucket.clone(), bucket.clone());
        How::Follow.change(&mut followed, &new, now);
        How::Replace.change(&mut replaced, &new, now);
        refilled.refill(at(now));
        followed.refill(at(now));
        replaced.refill(at(now));

        prop_assert_eq!(replaced.limits(), &new);
        for (name, rate) in new.iter() {
            let ours = followed.cell(name.as_str());
            prop_assert_eq!(ours, replaced.cell(name.as_str()));
            let (cell, current) = ours.expect("what is named is there");
            prop_assert_eq!(current, rate);
            if bucket.cell(name.as_str()).is_none() {
                prop_assert_eq!(cell.tokens, rate.capacity(), "a new limit starts full");
            }
        }
        for (name, rate) in bucket.limits().iter() {
            if new.position(name.as_str()).is_some() {
                continue;
            }
            let (was, _) = refilled.cell(name.as_str()).expect("it was there");
            prop_assert_eq!(followed.cell(name.as_str()), Some((was, rate)), "it stays");
        }
        Ok(())
    });
}

#[test]
fn a_clock_that_runs_back_pays_nothing_for_a_change() {
    let inputs = (states(1..=3), vec(rates(), 3), 0..1_000_000_i64, ways());
    check(inputs, |(state, new, back, how)| {
        let before = state.bucket();
        let mut bucket = before.clone();
        let new = limit_set(new.into_iter().take(before.cells().len()));
        how.change(&mut bucket, &new, state.refilled_at - back);
        prop_assert_eq!(bucket.refilled_at(), before.refilled_at());
        let mut cells = bucket.cells().iter().zip(before.cells());
        prop_assert!(cells.all(|(is, was)| is.tokens <= was.tokens));
        Ok(())
    });
}

#[test]
fn a_bucket_never_has_more_limits_than_the_bound_and_keeps_the_named_ones() {
    check((states(1..=8), rates(), 1..=LIMITS_MAX), |(state, rate, count)| {
        let mut bucket = state.bucket();
        for cell in 0..bucket.cells().len() {
            bucket.charge(cell, Millitokens::new(1)).expect("far from the bound");
        }
        let new = named((0..count).map(|number| (20 + number, rate)));
        bucket.follow(&new, at(state.refilled_at));
        prop_assert!(bucket.cells().len() <= LIMITS_MAX);
        prop_assert!(new.iter().all(|(name, _)| bucket.cell(name.as_str()).is_some()));
        Ok(())
    });
}

#[test]
fn a_limit_that_was_full_under_another_rate_does_not_come_back_full() {
    let set = |limit: Limit| Arc::new(LimitSet::new([limit]).unwrap());
    let (slow, fast) = (set(Limit::per_day("x", 1_000)), set(Limit::per_second("x", 1)));
    let other = set(Limit::per_second("y", 1));
    let mut bucket = Bucket::full(Arc::clone(&slow), at(0));
    bucket.charge(0, Millitokens::new(1_000_000)).unwrap();
    bucket.follow(&fast, at(0));
    bucket.follow(&other, at(1_000));
    bucket.follow(&slow, at(1_000));
    let (cell, _) = bucket.cell("x").unwrap();
    assert_eq!(cell.tokens, Millitokens::new(1_000));
}

#[test]
fn above_the_bound_full_limits_are_dropped_first() {
    let named = |prefix: &str, count: usize| {
        let limits = (0..count).map(|n| Limit::per_minute(format!("{prefix}{n:02}"), 10));
        Arc::new(LimitSet::new(limits).unwrap())
    };
    let mut bucket = Bucket::full(named("a", 2), at(0));
    bucket.charge(1, Millitokens::new(50_000)).unwrap();
    bucket.follow(&named("b", LIMITS_MAX - 1), at(0));
    assert!(bucket.cell("a00").is_none());
    assert_eq!(bucket.cell("a01").unwrap().0.tokens, Millitokens::new(-40_000));
}
