//! Refills and charges: no millitoken is lost or added, however often the bucket refills.

use std::sync::Arc;

use proptest::collection::vec;
use proptest::prelude::*;
use zae_limiter_model::{
    Ask, Bucket, Limit, LimitSet, Millitokens, Take, Timestamp, Verdict, amount, decide,
};

use crate::check;
use crate::generate::{Gap, Wish, Wishes, at, gaps, states, takes, wishes, wishes_for};
use crate::oracle::Oracle;

/// What can happen to a bucket.
#[derive(Clone, Debug)]
enum Event {
    Refill,
    Acquire(Wishes),
    /// A lease that adjusts: charges whatever the balance is, or refunds.
    Adjust(usize, Wish, i64),
}

fn events(limits: usize) -> impl Strategy<Value = Event> {
    let signs = proptest::sample::select(vec![-2, -1, 1, 2, 3]);
    prop_oneof![
        1 => Just(Event::Refill),
        3 => wishes_for(limits).prop_map(Event::Acquire),
        3 => (0..limits, wishes(), signs).prop_map(|(cell, wish, sign)| {
            Event::Adjust(cell, wish, sign)
        }),
    ]
}

#[test]
fn every_millitoken_is_accounted_for() {
    let run = vec((gaps(), 0..3_usize, events(3)), 0..40);
    check((states(1..=3), run), |(state, run)| {
        let mut bucket = state.bucket();
        let mut oracle = Oracle::open(&bucket);
        oracle.agree_with(&bucket)?;
        let mut now = state.refilled_at;
        for (gap, pace, event) in run {
            let limits = bucket.cells().len();
            now += gap.millis(&bucket.limits().rates()[pace % limits]);
            oracle.pass_to(at(now));
            match event {
                Event::Refill => bucket.refill(at(now)),
                Event::Acquire(wishes) => {
                    let takes = takes(&bucket, &wishes, at(now));
                    let mut asks = [Ask { bucket: &mut bucket, takes: &takes }];
                    let admitted = decide(&mut asks, at(now)) == Verdict::Admitted;
                    prop_assert_eq!(admitted, oracle.holds(&takes));
                    if admitted {
                        oracle.take(&takes);
                    }
                }
                Event::Adjust(cell, wish, sign) => {
                    let cell = cell % limits;
                    bucket.refill(at(now));
                    let held = &bucket.cells()[cell];
                    let size = wish.amount(held, &bucket.limits().rates()[cell]);
                    let difference = size.get() * sign;
                    let booked = bucket.charge(cell, Millitokens::new(difference)).is_ok();
                    prop_assert_eq!(booked, oracle.tallies[cell].charge(difference));
                }
            }
            oracle.agree_with(&bucket)?;
        }
        Ok(())
    });
}

#[test]
fn refilling_in_many_steps_is_refilling_once() {
    check((states(1..=3), vec((gaps(), 0..3_usize), 0..40)), |(state, steps)| {
        let mut often = state.bucket();
        let mut once = often.clone();
        let mut now = state.refilled_at;
        for (gap, pace) in steps {
            now += gap.millis(&once.limits().rates()[pace % once.cells().len()]);
            often.refill(at(now));
        }
        once.refill(at(now));
        prop_assert_eq!(often.cells(), once.cells());
        prop_assert_eq!(often.refilled_at(), once.refilled_at());
        Ok(())
    });
}

#[test]
fn refilling_every_millisecond_is_refilling_once() {
    check((states(1..=3), 1..300_i64), |(state, millis)| {
        let mut often = state.bucket();
        let mut once = often.clone();
        for passed in 1..=millis {
            often.refill(at(state.refilled_at + passed));
        }
        once.refill(at(state.refilled_at + millis));
        prop_assert_eq!(often.cells(), once.cells());
        Ok(())
    });
}

#[test]
fn a_clock_that_runs_back_changes_nothing() {
    let back = prop_oneof![0..100_i64, 0..=i64::MAX / 2];
    check((states(1..=3), back, wishes_for(3)), |(state, back, wishes)| {
        let before = state.bucket();
        let now = at(state.refilled_at - back);
        let mut bucket = before.clone();
        bucket.refill(now);
        prop_assert_eq!(&bucket, &before);

        let takes = takes(&bucket, &wishes, now);
        let verdict = decide(&mut [Ask { bucket: &mut bucket, takes: &takes }], now);
        prop_assert_eq!(bucket.refilled_at(), before.refilled_at());
        let mut expected: Vec<i64> = before.cells().iter().map(|c| c.tokens.get()).collect();
        if verdict == Verdict::Admitted {
            takes.iter().for_each(|take| expected[take.cell] -= take.amount.get());
        }
        let tokens: Vec<i64> = bucket.cells().iter().map(|c| c.tokens.get()).collect();
        prop_assert_eq!(tokens, expected);
        Ok(())
    });
}

#[test]
fn of_clocks_that_disagree_only_the_furthest_counts() {
    let clocks = vec((-20_i64..=20, gaps(), 0..3_usize), 1..30);
    check((states(1..=3), clocks), |(state, clocks)| {
        let mut bucket = state.bucket();
        let mut once = bucket.clone();
        let mut latest = state.refilled_at;
        for (twentieths, gap, pace) in clocks {
            let gap = gap.millis(&once.limits().rates()[pace % once.cells().len()]);
            let now = latest + gap * twentieths / 20;
            let before = bucket.refilled_at();
            bucket.refill(at(now));
            prop_assert!(bucket.refilled_at() >= before, "time was paid out twice");
            latest = latest.max(now);
        }
        once.refill(at(latest));
        prop_assert_eq!(bucket, once);
        Ok(())
    });
}

#[test]
fn a_slow_limit_refills_beside_a_busy_one() {
    const DAY_MS: i64 = 86_400_000;
    const CALL_EVERY_MS: i64 = 50;
    const DAILY_MILLI: i64 = 1_000_000;
    let limits = [Limit::per_day("daily", 1_000), Limit::per_second("rps", 1)];
    let limits = Arc::new(LimitSet::new(limits).unwrap());
    let start = 1_700_000_000_000;
    let mut bucket = Bucket::full(limits, at(start));
    let mut acquire = |takes: &[Take], now: Timestamp| {
        let verdict = decide(&mut [Ask { bucket: &mut bucket, takes }], now);
        (verdict, bucket.cells()[0].tokens.get())
    };

    let whole_day = [Take { cell: 0, amount: amount(1_000).unwrap() }];
    assert_eq!(acquire(&whole_day, at(start)), (Verdict::Admitted, 0));

    let one = [Take { cell: 1, amount: amount(1).unwrap() }];
    let mut admitted = 0;
    for passed in (0..=DAY_MS).step_by(usize::try_from(CALL_EVERY_MS).unwrap()) {
        let (verdict, daily) = acquire(&one, at(start + passed));
        admitted += i64::from(verdict == Verdict::Admitted);
        assert_eq!(daily, passed * DAILY_MILLI / DAY_MS, "after {passed} ms");
    }
    assert_eq!(admitted, 1 + DAY_MS / 1_000, "the busy limit starves neither");
    assert_eq!(acquire(&whole_day, at(start + DAY_MS)), (Verdict::Admitted, 0));
}

#[test]
fn every_limit_earns_its_rate_under_any_pattern_of_calls_on_another() {
    let calls = vec((gaps(), wishes()), 1..60);
    check((states(2..=4), calls), |(state, calls)| {
        let mut bucket = state.bucket();
        let mut alone = bucket.clone();
        let mut now = state.refilled_at;
        for (gap, wish) in calls {
            now += Gap::millis(gap, &bucket.limits().rates()[1]);
            let takes = takes(&bucket, &vec![Some(wish)], at(now));
            decide(&mut [Ask { bucket: &mut bucket, takes: &takes }], at(now));
        }
        alone.refill(at(now));
        prop_assert_eq!(&bucket.cells()[1..], &alone.cells()[1..]);
        Ok(())
    });
}
