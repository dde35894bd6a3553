//! One write to one bucket: what it decides, and how it is written. Pure: everything it depends on
//! is handed in.

use std::sync::Arc;

use smallvec::SmallVec;
use zae_limiter_core::{
    Ask, Bucket, Cell, Leg, LimitName, LimitStatus, Millitokens, Settlement, StoreErrorKind,
    Target, Timestamp, Verdict, decide, refused_statuses,
};
use zae_limiter_schema::bucket::{self, Alive, BucketItem, Expiry, Movement, Owner, Since};
use zae_limiter_schema::{BucketItemKey, Update};

/// What somebody wants of a bucket.
#[derive(Clone, Debug)]
pub(crate) enum Request {
    /// Tokens, all of them or none.
    Take(Leg),
    /// Differences, whatever is there.
    Settle(Settlement),
}

impl Request {
    pub(crate) fn target(&self) -> &Arc<Target> {
        match self {
            Self::Take(leg) => &leg.target,
            Self::Settle(settlement) => &settlement.target,
        }
    }

    fn amounts(&self) -> &[zae_limiter_core::Take] {
        match self {
            Self::Take(leg) => &leg.takes,
            Self::Settle(settlement) => &settlement.differences,
        }
    }

    /// Whether it changes nothing at all.
    pub(crate) fn is_empty(&self) -> bool {
        self.amounts().iter().all(|take| take.amount == Millitokens::ZERO)
    }
}

/// What is known of a bucket's item.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// There is none.
    Absent,
    /// This.
    Item(BucketItem),
}

/// What became of a request, as far as the known state goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    /// It is part of the write.
    Written,
    /// It needs no write: nothing is asked, or there is nothing to settle with.
    Nothing,
    /// It cannot be admitted.
    Refused(Vec<LimitStatus>),
    /// It cannot be carried out at all.
    Rejected(StoreErrorKind, String),
}

/// A write, and what it means for each request, in their order.
#[derive(Clone, Debug)]
pub(crate) struct Round {
    pub(crate) update: Option<Update>,
    pub(crate) fates: Vec<Fate>,
}

/// Decides requests on a known state, in the order in which a bucket would see them: what is given
/// back, what is charged, then what is taken, first come first served.
pub(crate) fn decided(
    key: &BucketItemKey,
    state: &State,
    requests: &[&Request],
    now: Timestamp,
) -> Round {
    match state {
        State::Item(item) if !item.is_expired(now) => on_item(key, item, requests, now),
        State::Item(expired) => on_nothing(key, Some(expired), requests, now),
        State::Absent => on_nothing(key, None, requests, now),
    }
}

/// The movements of a round, by limit.
struct Movements(Vec<Movement>);

impl Movements {
    /// All limits of an item, with what time has earned them.
    fn of(item: &BucketItem, now: Timestamp) -> Self {
        let limits = item.bucket.limits().iter();
        let mut movements =
            Self(limits.map(|(name, rate)| Movement::none(name.clone(), *rate)).collect());
        movements.pay_out(item, now);
        movements
    }

    /// What time has earned up to a moment.
    fn pay_out(&mut self, item: &BucketItem, until: Timestamp) {
        let elapsed = until.millis_since(item.bucket.refilled_at());
        for (movement, cell) in self.0.iter_mut().zip(item.bucket.cells()) {
            let (earned, remainder) = movement.rate.earned(elapsed, cell.remainder);
            (movement.earned, movement.remainder) = (earned.get(), remainder);
        }
    }

    /// Pins what must be left of each limit for the bucket to be full again before it expires:
    /// others may have taken more than is known. `bucket` is what is known to be left.
    fn keep_enough(
        &mut self,
        item: &BucketItem,
        bucket: &Bucket,
        expiry: Expiry,
        now: Timestamp,
    ) -> Alive {
        let (until, alive) = match (expiry, item.expires_at) {
            (Expiry::Never, _) => return Alive::After(now),
            (Expiry::Keep, None) => return Alive::Forever,
            (Expiry::At(moment), _) => (moment, Alive::After(now)),
            (Expiry::Keep, Some(expires_at)) => {
                // Halfway, so that neither a slightly shorter life nor a slightly lower balance
                // than is known stands in the way.
                let full = now.saturating_add(bucket.wait_until_full(now));
                let until = full.saturating_add_millis(expires_at.millis_since(full) / 2);
                let before = Timestamp::from_millis(until.as_millis().saturating_sub(1));
                (until, Alive::After(before.max(now)))
            }
        };
        let left_ms = until.millis_since(now);
        for (movement, cell) in self.0.iter_mut().zip(bucket.cells()) {
            if expiry != Expiry::Keep || movement.is_touched() {
                let (earned, _) = movement.rate.earned(left_ms, 0);
                let least = movement.rate.capacity().get().saturating_sub(earned.get());
                movement.least_left = Some(least.min(cell.tokens.get()));
            }
        }
        alive
    }

    fn get(&mut self, limit: &LimitName) -> Option<&mut Movement> {
        self.0.iter_mut().find(|movement| movement.limit == *limit)
    }
}

fn on_item(key: &BucketItemKey, item: &BucketItem, requests: &[&Request], now: Timestamp) -> Round {
    let mut movements = Movements::of(item, now);
    let mut bucket = item.bucket.clone();
    bucket.refill(now);
    let mut fates = vec![Fate::Nothing; requests.len()];
    settle_all(&mut movements, &mut bucket, requests, &mut fates);
    let outcome = take_all(&mut bucket, requests, &mut fates, now);
    for (limit, amount) in outcome.taken {
        if let Some(movement) = movements.get(&limit) {
            movement.taken = movement.taken.saturating_add(amount.get());
        }
    }
    if !fates.contains(&Fate::Written) {
        return Round { update: None, fates };
    }
    let expiry = match outcome.last_target {
        Some(target) => expiry_of(target, &bucket, item.expires_at, now),
        None => expiry_after_settling(&bucket, item.expires_at, now),
    };
    let update = if outcome.followed {
        let owner = owner_of(outcome.last_target);
        bucket::rewrite(key, item, &bucket, &owner, expiry)
    } else {
        let alive = movements.keep_enough(item, &bucket, expiry, now);
        add_or_refill(key, item, &movements, (expiry, alive), now)
    };
    Round { update: Some(update), fates }
}

/// Without moving the refill time where that comes to the same: then other processes that do
/// likewise are not in the way.
fn add_or_refill(
    key: &BucketItemKey,
    item: &BucketItem,
    movements: &Movements,
    (expiry, alive): (Expiry, Alive),
    now: Timestamp,
) -> Update {
    let fits = |movement: &Movement| {
        let cell = item.bucket.cell(movement.limit.as_str());
        cell.is_some_and(|(cell, _)| movement.can_be_added_to(cell.tokens.get()))
    };
    if movements.0.iter().all(fits) && !item.has_writes_to_pay_out(now) {
        let since = Since::Known(item.bucket.refilled_at(), item.generation);
        let counts_writes = item.wcu.is_some();
        let shards = item.shard_count;
        if let Some(add) =
            bucket::add(key, &movements.0, since, expiry, counts_writes, shards, alive)
        {
            return add;
        }
    }
    bucket::refill(key, item, &movements.0, expiry, alive, now)
}

/// Nothing is there: takes are from a full bucket, and there is nothing to settle with.
fn on_nothing(
    key: &BucketItemKey,
    expired: Option<&BucketItem>,
    requests: &[&Request],
    now: Timestamp,
) -> Round {
    let mut fates = vec![Fate::Nothing; requests.len()];
    let first = requests.iter().find_map(|request| match request {
        Request::Take(leg) => Some(&leg.target),
        Request::Settle(_) => None,
    });
    let Some(first) = first else { return Round { update: None, fates } };
    let mut bucket = full(first, expired, now);
    let outcome = take_all(&mut bucket, requests, &mut fates, now);
    let Some(target) = outcome.last_target.filter(|_| fates.contains(&Fate::Written)) else {
        return Round { update: None, fates };
    };
    let owner = owner_of(Some(target));
    let expiry = expiry_of(target, &bucket, expired.and_then(|item| item.expires_at), now);
    let update = match expired {
        Some(item) => bucket::rewrite(key, item, &bucket, &owner, expiry),
        None => bucket::create(key, &bucket, &owner, expiry),
    };
    Round { update: Some(update), fates }
}

/// A full bucket; net consumption goes on counting where there was a bucket before.
fn full(target: &Target, expired: Option<&BucketItem>, now: Timestamp) -> Bucket {
    let limits = target.limits();
    let cells = limits.iter().map(|(name, rate)| {
        let before = expired.and_then(|item| item.bucket.cell(name.as_str()));
        let consumed = before.map_or(Millitokens::ZERO, |(cell, _)| cell.consumed);
        Cell { tokens: rate.capacity(), consumed, ..Cell::default() }
    });
    let cells: Vec<Cell> = cells.collect();
    // Time never runs back, not even for an item that starts anew.
    let since = expired.map_or(now, |item| item.bucket.refilled_at().max(now));
    Bucket::from_parts(Arc::clone(limits), cells, since)
}

fn settle_all(
    movements: &mut Movements,
    bucket: &mut Bucket,
    requests: &[&Request],
    fates: &mut [Fate],
) {
    let mut charges: Vec<(LimitName, Millitokens)> = Vec::new();
    for (request, fate) in requests.iter().zip(fates.iter_mut()) {
        let Request::Settle(settlement) = request else { continue };
        let names = settlement.target.limits().names();
        let known = settlement.differences.iter().filter(|difference| {
            difference.amount != Millitokens::ZERO
                && bucket.limits().position(names[difference.cell].as_str()).is_some()
        });
        let known: SmallVec<[_; 2]> = known.collect();
        let too_much = known.iter().any(|difference| {
            let balance = bucket.cell(names[difference.cell].as_str());
            balance.is_some_and(|(cell, _)| {
                cell.tokens.get().checked_sub(difference.amount.get().max(0)).is_none()
            })
        });
        if too_much {
            *fate =
                Fate::Rejected(StoreErrorKind::Rejected, zae_limiter_core::Overflow.to_string());
            continue;
        }
        for difference in known {
            charges.push((names[difference.cell].clone(), difference.amount));
            *fate = Fate::Written;
        }
    }
    // First what is given back: then it cannot be lost to a ceiling that a charge would lower.
    charges.sort_by_key(|(_, amount)| *amount > Millitokens::ZERO);
    for (limit, amount) in charges {
        let Some(movement) = movements.get(&limit) else { continue };
        if amount > Millitokens::ZERO {
            movement.charged = movement.charged.saturating_add(amount.get());
        } else {
            movement.credited = movement.credited.saturating_add(amount.get().saturating_neg());
        }
        let at = bucket.limits().position(limit.as_str());
        // It fits: checked one by one above, and all together they are few and bounded.
        let _ = at.map(|at| bucket.charge(at, amount));
    }
}

/// What the taking came to.
struct Outcome<'a> {
    /// By limit.
    taken: Vec<(LimitName, Millitokens)>,
    /// The target of the last request that was admitted.
    last_target: Option<&'a Arc<Target>>,
    /// Whether the bucket has taken on other limits.
    followed: bool,
}

fn take_all<'a>(
    bucket: &mut Bucket,
    requests: &[&'a Request],
    fates: &mut [Fate],
    now: Timestamp,
) -> Outcome<'a> {
    let mut outcome = Outcome { taken: Vec::new(), last_target: None, followed: false };
    for (request, fate) in requests.iter().zip(fates) {
        let Request::Take(leg) = request else { continue };
        // A refused request must leave nothing behind, not even its limits.
        let mut tried = bucket.clone();
        tried.follow(leg.target.limits(), now);
        let names = leg.target.limits().names();
        let place = |take: &zae_limiter_core::Take| {
            let cell = tried.limits().position(names[take.cell].as_str())?;
            Some(zae_limiter_core::Take { cell, amount: take.amount })
        };
        let takes: SmallVec<[_; 2]> = leg.takes.iter().filter_map(place).collect();
        match decide(&mut [Ask { bucket: &mut tried, takes: &takes }], now) {
            Verdict::Admitted if request.is_empty() => {}
            Verdict::Admitted => {
                outcome.followed |= tried.limits() != bucket.limits();
                *bucket = tried;
                let amounts = leg.takes.iter().map(|take| (names[take.cell].clone(), take.amount));
                outcome.taken.extend(amounts);
                outcome.last_target = Some(&leg.target);
                *fate = Fate::Written;
            }
            Verdict::Refused => {
                *fate = Fate::Refused(refused_statuses(0, leg, &tried, now).collect());
            }
        }
    }
    outcome
}

fn owner_of(target: Option<&Arc<Target>>) -> Owner<'_> {
    Owner { parent: target.and_then(|target| target.parent()) }
}

fn expiry_of(
    target: &Target,
    bucket: &Bucket,
    current: Option<Timestamp>,
    now: Timestamp,
) -> Expiry {
    match (target.expiry(bucket, now), current) {
        (Some(moment), _) => Expiry::At(moment),
        (None, Some(_)) => Expiry::Never,
        (None, None) => Expiry::Keep,
    }
}

/// The lifetime stays that of the last acquire; only a debt can need more time.
fn expiry_after_settling(bucket: &Bucket, current: Option<Timestamp>, now: Timestamp) -> Expiry {
    let full = now.saturating_add(bucket.wait_until_full(now));
    match current {
        Some(current) if full > current => Expiry::At(full),
        _ => Expiry::Keep,
    }
}

/// A write for requests about whose bucket nothing is known, all under the same limits: it happens
/// if the balance is there and the refill time so recent that no refill is needed. `None` when
/// nothing is asked.
pub(crate) fn blind(key: &BucketItemKey, requests: &[&Request], now: Timestamp) -> Option<Update> {
    let limits = requests.first()?.target().limits();
    let mut movements: Vec<Movement> =
        limits.iter().map(|(name, rate)| Movement::none(name.clone(), *rate)).collect();
    for request in requests {
        let is_take = matches!(request, Request::Take(_));
        for part in request.amounts() {
            let (movement, amount) = (&mut movements[part.cell], part.amount.get());
            let sum = match (is_take, amount >= 0) {
                (true, _) => &mut movement.taken,
                (false, true) => &mut movement.charged,
                (false, false) => &mut movement.credited,
            };
            *sum = sum.saturating_add(amount.saturating_abs());
        }
    }
    // How far back the refill time may lie: so that what it has earned is no more than half of the
    // room between what is needed and the ceiling.
    let touched = || movements.iter().filter(|movement| movement.is_touched());
    let windows = touched().map(|movement| {
        let capacity = movement.rate.capacity().get();
        let busy = movement.taken.saturating_add(movement.charged).max(movement.credited);
        let room = capacity.saturating_sub(busy).max(0) / 2;
        let window = movement.rate.time_to_earn(Millitokens::new(room));
        u64::try_from(window.as_millis()).unwrap_or(u64::MAX)
    });
    let window_ms = windows.min()?.saturating_sub(1);
    // It must not expire before it is full again, from nothing at the worst.
    let fills = touched().map(|movement| movement.rate.time_to_fill());
    let alive = Alive::After(now.saturating_add(fills.max().unwrap_or_default()));
    for movement in &mut movements {
        let (earned, _) = movement.rate.earned(window_ms, movement.rate.period_ms() - 1);
        movement.earned = earned.get();
        if movement.charged > 0 {
            // No debt without knowing how deep.
            movement.least_left = Some(0);
        }
    }
    let back = i64::try_from(window_ms).unwrap_or(i64::MAX);
    let since = Since::Guessed(Timestamp::from_millis(now.as_millis().saturating_sub(back)));
    bucket::add(key, &movements, since, Expiry::Keep, true, 1, alive)
}
