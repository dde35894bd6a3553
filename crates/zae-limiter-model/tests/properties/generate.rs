//! Inputs: limits small and at their bounds, buckets in any state, calls at any pace.
//!
//! Balances, gaps and amounts are fractions of the limit's capacity or rate: almost every absolute
//! number would be far from any edge.

use std::ops::RangeInclusive;
use std::sync::Arc;

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use zae_limiter_model::{
    Bucket, CAPACITY_MAX, Cell, LimitName, LimitSet, MILLI, Millitokens, PERIOD_SECONDS_MAX, Rate,
    Take, Timestamp,
};

pub(crate) const MILLITOKENS_MAX: i64 = CAPACITY_MAX as i64 * MILLI;
pub(crate) const PERIOD_MS_MAX: u64 = PERIOD_SECONDS_MAX * 1_000;

/// The longest single gap, so that a run of them stays far from the end of time.
const GAP_MAX: u128 = 1 << 40;

pub(crate) fn at(millis: i64) -> Timestamp {
    Timestamp::from_millis(millis)
}

pub(crate) fn name(number: usize) -> LimitName {
    LimitName::new(format!("limit-{number:02}")).expect("a letter, then letters and digits")
}

/// Limits `limit-00`, `limit-01`, … with these numbers.
pub(crate) fn limit_set(rates: impl IntoIterator<Item = Rate>) -> Arc<LimitSet> {
    let named = rates.into_iter().enumerate().map(|(number, rate)| (name(number), rate));
    Arc::new(LimitSet::from_rates(named).expect("each name once, within the bound"))
}

fn rate_of((capacity, amount, period_ms): (i64, i64, u64)) -> Rate {
    Rate::new(Millitokens::new(capacity), Millitokens::new(amount), period_ms)
        .expect("drawn within the bounds")
}

/// Rates at their bounds: the largest, the smallest, the slowest, the fastest.
pub(crate) fn extreme_rates() -> impl Strategy<Value = Rate> {
    let amount = || select(vec![1, 999, MILLI, MILLITOKENS_MAX - 1, MILLITOKENS_MAX]);
    let period = select(vec![1, 999, 1_000, PERIOD_MS_MAX - 1, PERIOD_MS_MAX]);
    (amount(), amount(), period).prop_map(rate_of)
}

/// Rates of every size. Small ones come most often: with them every edge is near.
pub(crate) fn rates() -> impl Strategy<Value = Rate> {
    let tiny = (1..=60_i64, 1..=60_i64, 1..=40_u64).prop_map(rate_of);
    let usual = (1..=10_000_i64, 1..=10_000_i64, select(vec![1_u64, 60, 3_600, 86_400]))
        .prop_map(|(capacity, amount, s)| rate_of((capacity * MILLI, amount * MILLI, s * 1_000)));
    let any = (1..=MILLITOKENS_MAX, 1..=MILLITOKENS_MAX, 1..=PERIOD_MS_MAX).prop_map(rate_of);
    prop_oneof![4 => tiny, 3 => usual, 2 => extreme_rates(), 1 => any]
}

/// The values of a bucket, printed in full when a property breaks.
#[derive(Clone, Debug)]
pub(crate) struct State {
    pub(crate) cells: Vec<(Rate, Cell)>,
    pub(crate) refilled_at: i64,
}

impl State {
    pub(crate) fn bucket(&self) -> Bucket {
        let limits = limit_set(self.cells.iter().map(|(rate, _)| *rate));
        let cells = self.cells.iter().map(|(_, cell)| *cell);
        Bucket::from_parts(limits, cells, at(self.refilled_at))
    }
}

/// A cell as a store could return it: full, partly full, in debt, with any remainder, even one that
/// another client left on a full bucket.
fn cells(rates: impl Strategy<Value = Rate>) -> impl Strategy<Value = (Rate, Cell)> {
    let fill = prop_oneof![2 => Just(1_000), 3 => 0..=1_000_i64, 2 => -2_000..=0_i64];
    let rest = prop_oneof![2 => Just(0), 1 => Just(1_000), 2 => 0..=1_000_i64];
    let booked = (-5_000..=5_000_i64, prop_oneof![Just(0), -5_000..=5_000_i64]);
    (rates, fill, -1..=1_i64, rest, booked).prop_map(|(rate, fill, off, rest, booked)| {
        let remainder_max = i64::try_from(rate.period_ms() - 1).expect("within the bounds");
        let cell = Cell {
            tokens: Millitokens::new(part(rate.capacity().get(), fill) + off),
            remainder: part(remainder_max, rest).unsigned_abs(),
            consumed: Millitokens::new(booked.0),
            unbooked: Millitokens::new(booked.1),
        };
        (rate, cell)
    })
}

/// Buckets of so many limits, in any state.
pub(crate) fn states(limits: RangeInclusive<usize>) -> impl Strategy<Value = State> {
    states_of(rates(), limits)
}

pub(crate) fn states_of(
    rates: impl Strategy<Value = Rate>,
    limits: RangeInclusive<usize>,
) -> impl Strategy<Value = State> {
    (vec(cells(rates), limits), -1_000_000..=2_000_000_000_000_i64)
        .prop_map(|(cells, refilled_at)| State { cells, refilled_at })
}

/// How long until the next call.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Gap {
    Millis(u64),
    /// The time to earn this many millitokens, or a millisecond less.
    Earning(u32, u32),
    /// Thousandths of the time from empty to full.
    Filling(u32),
}

impl Gap {
    /// The gap at the pace of `rate`.
    pub(crate) fn millis(self, rate: &Rate) -> i64 {
        let amount = u128::from(rate.refill_amount().get().unsigned_abs());
        let period = u128::from(rate.period_ms());
        let millis = match self {
            Self::Millis(millis) => u128::from(millis),
            Self::Earning(milli, early) => {
                (u128::from(milli) * period).div_ceil(amount).saturating_sub(u128::from(early))
            }
            Self::Filling(thousandths) => {
                let capacity = u128::from(rate.capacity().get().unsigned_abs());
                capacity * period * u128::from(thousandths) / amount / 1_000
            }
        };
        i64::try_from(millis.min(GAP_MAX)).expect("2^40 fits")
    }
}

pub(crate) fn gaps() -> impl Strategy<Value = Gap> {
    prop_oneof![
        2 => Just(Gap::Millis(0)),
        3 => (1..=50_u64).prop_map(Gap::Millis),
        3 => (1..=3_u32, 0..=1_u32).prop_map(|(milli, early)| Gap::Earning(milli, early)),
        2 => (0..=1_200_u32).prop_map(Gap::Filling),
    ]
}

/// The amount of a request to a limit.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Wish {
    /// Thousandths of the capacity.
    Thousandths(i64),
    /// The whole balance, and this much more.
    Left(i64),
}

impl Wish {
    pub(crate) fn amount(self, cell: &Cell, rate: &Rate) -> Millitokens {
        Millitokens::new(match self {
            Self::Thousandths(thousandths) => part(rate.capacity().get(), thousandths),
            Self::Left(more) => cell.tokens.get().max(0) + more,
        })
    }
}

pub(crate) fn wishes() -> impl Strategy<Value = Wish> {
    prop_oneof![
        2 => (0..=1_000_i64).prop_map(Wish::Thousandths),
        2 => (0..=30_i64).prop_map(Wish::Thousandths),
        3 => (0..=1_i64).prop_map(Wish::Left),
    ]
}

/// The request to the first limits of a bucket; `None` leaves a limit out.
pub(crate) type Wishes = Vec<Option<Wish>>;

pub(crate) fn wishes_for(limits: usize) -> impl Strategy<Value = Wishes> {
    vec(prop::option::weighted(0.7, wishes()), limits)
}

/// The wishes as takes from what `bucket` will hold at `now`.
pub(crate) fn takes(bucket: &Bucket, wishes: &Wishes, now: Timestamp) -> Vec<Take> {
    let mut then = bucket.clone();
    then.refill(now);
    let limits = then.cells().iter().zip(then.limits().rates()).zip(wishes).enumerate();
    limits
        .filter_map(|(cell, ((held, rate), wish))| {
            wish.map(|wish| Take { cell, amount: wish.amount(held, rate) })
        })
        .collect()
}

fn part(whole: i64, thousandths: i64) -> i64 {
    let part = i128::from(whole) * i128::from(thousandths) / 1_000;
    i64::try_from(part).expect("a few times the capacity fits")
}
