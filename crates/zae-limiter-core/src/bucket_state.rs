//! A bucket as the embedded stores keep it: with its expiry and its unbooked usage.
//!
//! A store that loads bucket states, passes them to [`admit`] or [`settle`], and saves them, all in one
//! transaction, fulfils the [`Store`](crate::Store) contract for buckets.

use std::sync::Arc;
use std::time::Duration;

use smallvec::SmallVec;
use zae_limiter_model::{Ask, Bucket, LimitName, Millitokens, Overflow, Take, Timestamp, decide};
use zae_limiter_model::{LimitSet, Rate, Verdict};

use crate::plan::{
    Admission, Leg, LegTaken, Placement, Plan, Settlement, SingleLeg, Takes, Target,
    refused_statuses,
};
use crate::window::{hour_of, is_in_hour};

/// A bucket with its expiry and its unbooked usage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BucketState {
    /// The balances.
    pub bucket: Bucket,
    /// The moment from which the bucket counts as absent; `None` if it does not expire.
    pub expires_at: Option<Timestamp>,
    /// The hour of the unbooked consumption, as [`hour_of`] counts. Stores book usage when the hour
    /// changes or usage is read, not with every call.
    pub hour: i64,
    /// The number of changes in the unbooked consumption.
    pub events: u64,
    /// When this process last [rewound](rewind) the bucket. A store does not save it.
    pub rewound_at: Option<Timestamp>,
}

/// Five minutes: a bucket is rewound at most that often. Two processes that disagree about the time would otherwise take
/// turns: one rewinds, the other refills the same time again. A process believes a clock that has jumped after five
/// minutes, so they do not disagree for longer.
pub const REWIND_EVERY: Duration = Duration::from_secs(300);

/// Whether a bucket may be rewound that was rewound at this time before.
pub fn may_rewind(rewound_at: Option<Timestamp>, now: Timestamp) -> bool {
    rewound_at.is_none_or(|at| now < at || at.saturating_add(REWIND_EVERY) <= now)
}

/// Consumption to add to usage records.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Booking {
    /// The hour of the consumption, as [`hour_of`] counts.
    pub hour: i64,
    /// Net consumption by limit, without zeros.
    pub consumed: Vec<(LimitName, Millitokens)>,
    /// The number of changes in it.
    pub events: u64,
}

impl BucketState {
    /// A full bucket.
    pub fn open(target: &Target, now: Timestamp) -> Self {
        Self {
            bucket: Bucket::full(target.limits().clone(), now),
            expires_at: None,
            hour: hour_of(now),
            events: 0,
            rewound_at: None,
        }
    }

    /// Whether the bucket counts as absent.
    pub fn is_expired(&self, now: Timestamp) -> bool {
        self.expires_at.is_some_and(|expiry| expiry <= now)
    }

    /// Returns the unbooked consumption and resets it.
    pub fn take_booking(&mut self) -> Option<Booking> {
        if self.events == 0 {
            return None;
        }
        let consumed = self.bucket.take_unbooked();
        Some(Booking { hour: self.hour, consumed, events: std::mem::take(&mut self.events) })
    }

    /// Whether [`decide`] can use the bucket unprepared.
    #[inline]
    fn is_ready(&self, target: &Target, now: Timestamp) -> bool {
        let limits = self.bucket.limits();
        is_in_hour(self.hour, now)
            && !self.is_expired(now)
            && (Arc::ptr_eq(limits, target.limits()) || limits == target.limits())
    }

    /// Prepares the bucket state for a change at `now` under the target's limits.
    fn prepare(&mut self, target: &Target, now: Timestamp) -> Option<Booking> {
        let expired = self.is_expired(now);
        let hour = hour_of(now);
        let booking = if expired || self.hour != hour { self.take_booking() } else { None };
        self.hour = hour;
        if expired {
            *self = Self::open(target, now);
        } else {
            self.bucket.follow(target.limits(), now);
        }
        booking
    }

    /// Counts a change and renews the expiry.
    #[inline]
    fn touch(&mut self, target: &Target, changed: bool, now: Timestamp) {
        self.events += u64::from(changed);
        self.expires_at = target.expiry(&self.bucket, now);
    }

    /// Gives the bucket state exactly the target's limits and lifetime.
    pub fn reconfigure(&mut self, target: &Target, now: Timestamp) -> Option<Booking> {
        // The unbooked consumption of limits that are dropped must not be lost.
        let booking = self.take_booking();
        self.hour = hour_of(now);
        self.bucket.replace_limits(target.limits(), now);
        self.touch(target, false, now);
        booking
    }
}

/// Maps the cells of `takes` from `limits` to the bucket, which may have more limits.
fn cells_in(limits: &LimitSet, bucket: &Bucket, takes: &[Take]) -> Takes {
    let place = |take: &Take| {
        let cell = bucket.limits().position(limits.names()[take.cell].as_str())?;
        Some(Take { cell, amount: take.amount })
    };
    takes.iter().filter_map(place).collect()
}

/// Rewinds the refill time of a plan's bucket if it is ahead of the plan. A store keeps that also if the plan is
/// refused. Returns whether the bucket state has changed.
pub fn rewind(plan: &Plan, state: &mut BucketState) -> bool {
    let is_rewound = plan.max_skew.is_some_and(|max_skew| {
        state.bucket.is_ahead(plan.now, max_skew)
            && may_rewind(state.rewound_at, plan.now)
            && state.bucket.rewind(plan.now, max_skew)
    });
    if is_rewound {
        state.rewound_at = Some(plan.now);
    }
    is_rewound
}

/// Decides a plan on the bucket states of its legs, one for each, in their order. Calls `book` with the
/// usage to book and the index of its leg. A refusal books nothing and leaves the bucket states
/// unchanged, except that it may [rewind] them.
///
/// # Panics
///
/// When the number of bucket states is not the number of legs.
pub fn admit(
    plan: &Plan,
    states: &mut [&mut BucketState],
    mut book: impl FnMut(usize, Booking),
) -> Admission {
    assert_eq!(plan.legs.len(), states.len(), "one bucket state for each leg");
    for state in states.iter_mut() {
        rewind(plan, state);
    }
    if let ([leg], [state]) = (&plan.legs[..], &mut *states)
        && state.is_ready(&leg.target, plan.now)
    {
        return admit_ready(leg, state, plan.now);
    }
    let mut changed: SmallVec<[BucketState; 1]> = states.iter().map(|a| (**a).clone()).collect();
    let mut bookings: SmallVec<[(usize, Booking); 1]> = SmallVec::new();
    let admission = admit_all(plan, &mut changed, &mut bookings);
    if let Admission::Taken(_) = admission {
        for (state, changed) in states.iter_mut().zip(changed) {
            **state = changed;
        }
        bookings.into_iter().for_each(|(at, booking)| book(at, booking));
    }
    admission
}

/// Like [`admit`] for the usual call: one bucket that needs no preparation and covers the amounts. It then takes them,
/// writes the balances to `left`, and returns `true`. Otherwise nothing changes: [`admit`] decides.
///
/// # Panics
///
/// When `left` has another length than the takes.
#[inline]
pub fn take_now(leg: &SingleLeg<'_>, state: &mut BucketState, left: &mut [Millitokens]) -> bool {
    // A refill time ahead of the call may have to be rewound.
    let takes = state.bucket.refilled_at() <= leg.now
        && state.is_ready(leg.target, leg.now)
        && state.bucket.take(leg.takes, left, leg.now);
    if takes {
        let changed = leg.takes.iter().any(|take| take.amount != Millitokens::ZERO);
        state.touch(leg.target, changed, leg.now);
    }
    takes
}

/// The common case: one bucket, unchanged limits, the same hour. It copies only the balances, and
/// restores them after a refusal.
fn admit_ready(leg: &Leg, state: &mut BucketState, now: Timestamp) -> Admission {
    let before = state.bucket.balances();
    match decide(&mut [Ask { bucket: &mut state.bucket, takes: &leg.takes }], now) {
        Verdict::Admitted => {
            let mut legs = SmallVec::new();
            legs.push(taken(leg, state, &leg.takes, now));
            Admission::Taken(legs)
        }
        Verdict::Refused => {
            let statuses = refused_statuses(0, leg, &state.bucket, now).collect();
            state.bucket.restore(before);
            Admission::Refused(statuses)
        }
    }
}

fn admit_all(
    plan: &Plan,
    states: &mut [BucketState],
    bookings: &mut SmallVec<[(usize, Booking); 1]>,
) -> Admission {
    let now = plan.now;
    let mut mapped: SmallVec<[Takes; 1]> = SmallVec::new();
    for (at, (leg, state)) in plan.legs.iter().zip(states.iter_mut()).enumerate() {
        bookings.extend(state.prepare(&leg.target, now).map(|booking| (at, booking)));
        mapped.push(cells_in(leg.target.limits(), &state.bucket, &leg.takes));
    }
    let verdict = {
        let pairs = states.iter_mut().zip(&mapped);
        let mut asks: SmallVec<[Ask<'_>; 1]> =
            pairs.map(|(state, takes)| Ask { bucket: &mut state.bucket, takes }).collect();
        decide(&mut asks, now)
    };
    match verdict {
        Verdict::Admitted => {
            let legs = plan.legs.iter().zip(states.iter_mut()).zip(&mapped);
            let legs = legs.map(|((leg, state), takes)| taken(leg, state, takes, now));
            Admission::Taken(legs.collect())
        }
        Verdict::Refused => {
            let legs = plan.legs.iter().zip(states.iter()).enumerate();
            let statuses = legs
                .flat_map(|(level, (leg, state))| refused_statuses(level, leg, &state.bucket, now));
            Admission::Refused(statuses.collect())
        }
    }
}

fn taken(leg: &Leg, state: &mut BucketState, takes: &[Take], now: Timestamp) -> LegTaken {
    let changed = takes.iter().any(|take| take.amount != Millitokens::ZERO);
    state.touch(&leg.target, changed, now);
    let cells = state.bucket.cells();
    let mut left = SmallVec::new();
    for take in takes {
        left.push(cells[take.cell].tokens);
    }
    LegTaken { placement: Placement::default(), left }
}

/// Applies a settlement to its bucket state, if there is one. Calls `book` with the usage to book.
///
/// An absent or expired bucket counts as full, for charges as for acquires. A charge creates it under the
/// settlement's limits, and it expires once it is full again, whatever the target's lifetime: a late
/// charge leaves nothing behind on an entity that was deleted meanwhile. A limit that the bucket lacks
/// also starts full. Refunds to these are ignored, because they are full.
///
/// # Errors
///
/// [`Overflow`]; the caller must discard the bucket state.
pub fn settle(
    settlement: &Settlement,
    state: &mut Option<BucketState>,
    now: Timestamp,
    book: impl FnOnce(Booking),
) -> Result<(), Overflow> {
    let target = &settlement.target;
    let absent = state.as_ref().is_none_or(|state| state.is_expired(now));
    if absent && !settlement.differences.iter().any(is_charge) {
        return Ok(());
    }
    let hour = hour_of(now);
    let mut current = state.take().unwrap_or_else(|| BucketState::open(target, now));
    let booking = if absent || current.hour != hour { current.take_booking() } else { None };
    if absent {
        current = BucketState::open(target, now);
    }
    current.hour = hour;
    // Not `follow`: a lease settles under the limits it was acquired with, which may be old ones.
    current.bucket.refill(now);
    add_charged_limits(settlement, &mut current.bucket, now);
    let mut changed = false;
    for take in cells_in(target.limits(), &current.bucket, &settlement.differences) {
        if absent && !is_charge(&take) {
            continue;
        }
        current.bucket.charge(take.cell, take.amount)?;
        changed |= take.amount != Millitokens::ZERO;
    }
    current.events += u64::from(changed);
    let full = || now.saturating_add(current.bucket.wait_until_full(now));
    current.expires_at = match current.expires_at {
        _ if absent => Some(full()),
        // The last acquire decides the lifetime; only a debt can need more time.
        Some(expiry) => Some(expiry.max(full())),
        None => None,
    };
    *state = Some(current);
    if let Some(booking) = booking {
        book(booking);
    }
    Ok(())
}

/// Whether a difference is positive.
fn is_charge(difference: &Take) -> bool {
    difference.amount > Millitokens::ZERO
}

/// Adds the charged limits that the bucket lacks, as full ones.
fn add_charged_limits(settlement: &Settlement, bucket: &mut Bucket, now: Timestamp) {
    let limits = settlement.target.limits();
    let mut lacking: SmallVec<[(LimitName, Rate); 2]> = SmallVec::new();
    for take in settlement.differences.iter().filter(|take| is_charge(take)) {
        let (name, rate) = (&limits.names()[take.cell], limits.rates()[take.cell]);
        let exists = bucket.limits().position(name.as_str()).is_some();
        if !exists && lacking.iter().all(|(other, _)| other != name) {
            lacking.push((name.clone(), rate));
        }
    }
    if !lacking.is_empty() {
        let added = LimitSet::from_rates(lacking).expect("limits of one set, each once");
        bucket.follow(&Arc::new(added), now);
    }
}
