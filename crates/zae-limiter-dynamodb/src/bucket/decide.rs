//! Decides the requests of one batch on one shard, and computes their write. Pure: it depends only on its
//! arguments.

use std::sync::Arc;
use std::time::Duration;

use smallvec::SmallVec;
use zae_limiter_core::{
    Ask, Bucket, Cell, Leg, LimitName, LimitSet, LimitStatus, Millitokens, Rate, Settlement,
    StoreErrorKind, Take, Takes, Target, Timestamp, Verdict, decide, refused_statuses,
};
use zae_limiter_schema::bucket::{
    self, After, Alive, Balances, BucketItem, Expiry, Movement, Owner, Since, share_of,
};
use zae_limiter_schema::{BucketItemKey, Update};

/// A request to a bucket.
#[derive(Clone, Debug)]
pub(crate) enum Request {
    /// Takes all amounts, or none.
    Take(Leg),
    /// Applies differences, whatever the balance.
    Settle(Settlement),
    /// Applies differences after every shard has taken the refund it had room for. The rest of a refund is
    /// dropped, because the bucket is full.
    SettleRest(Settlement),
}

impl Request {
    pub(crate) fn target(&self) -> &Arc<Target> {
        match self {
            Self::Take(leg) => &leg.target,
            Self::Settle(settlement) | Self::SettleRest(settlement) => &settlement.target,
        }
    }

    fn amounts(&self) -> &[Take] {
        match self {
            Self::Take(leg) => &leg.takes,
            Self::Settle(settlement) | Self::SettleRest(settlement) => &settlement.differences,
        }
    }

    /// The settlement, if it is one.
    pub(crate) fn settlement(&self) -> Option<&Settlement> {
        match self {
            Self::Take(_) => None,
            Self::Settle(settlement) | Self::SettleRest(settlement) => Some(settlement),
        }
    }

    /// Whether it charges more than was taken, for any limit.
    pub(crate) fn charges(&self) -> bool {
        let differences = self.settlement().map_or(&[][..], |settlement| &settlement.differences);
        differences.iter().any(|one| one.amount > Millitokens::ZERO)
    }

    /// Whether all its amounts are 0.
    pub(crate) fn is_empty(&self) -> bool {
        self.amounts().iter().all(|take| take.amount == Millitokens::ZERO)
    }
}

/// What the last answer said of a shard's item.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Snapshot {
    /// It does not exist.
    Absent,
    /// It exists. Shared: a batch computes with the snapshot that the machine keeps.
    Item(Arc<BucketItem>),
}

impl Snapshot {
    pub(crate) fn of(item: BucketItem) -> Self {
        Self::Item(Arc::new(item))
    }
}

/// The outcome of a request, according to the snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// It is part of the write.
    Written,
    /// It needs no write: its amounts are 0, or it is a refund to an absent bucket or limit.
    Nothing,
    /// It cannot be admitted.
    Refused(Vec<LimitStatus>),
    /// It is invalid.
    Rejected(StoreErrorKind, String),
}

/// A write, and the outcome of each request, in their order.
#[derive(Clone, Debug)]
pub(crate) struct Decision {
    pub(crate) update: Option<Update>,
    pub(crate) outcomes: Vec<Outcome>,
    /// What other shards must settle, by the request's index.
    pub(crate) left_over: Vec<(usize, Takes)>,
}

impl Decision {
    fn without_write(outcomes: Vec<Outcome>, left_over: Vec<(usize, Takes)>) -> Self {
        Self { update: None, outcomes, left_over }
    }
}

/// Decides requests on a snapshot: refunds first, then charges, then takes, first come first served.
pub(crate) fn decide_batch(
    key: &BucketItemKey,
    snapshot: &Snapshot,
    requests: &[&Request],
    now: Timestamp,
) -> Decision {
    match snapshot {
        Snapshot::Item(item) if !item.is_expired(now) => on_item(key, item, requests, now),
        Snapshot::Item(expired) => on_nothing(key, Some(&**expired), requests, now),
        Snapshot::Absent => on_nothing(key, None, requests, now),
    }
}

/// An unchanged limit: its name, the shard's share of its rate, and the whole rate.
fn at_rest(((name, rate), whole): ((&LimitName, &Rate), &Rate)) -> Movement {
    Movement::none(name.clone(), *rate, *whole)
}

/// The movements of a batch, by limit.
struct Movements(Vec<Movement>);

impl Movements {
    /// All limits of an item, with what they have earned.
    fn of(item: &BucketItem, now: Timestamp) -> Self {
        let limits = item.bucket.limits().iter().zip(item.whole.rates());
        let mut movements = Self(limits.map(at_rest).collect());
        movements.pay_out(item, now);
        movements
    }

    /// Adds what was earned until a moment.
    fn pay_out(&mut self, item: &BucketItem, until: Timestamp) {
        let elapsed = until.millis_since(item.bucket.refilled_at());
        for (movement, cell) in self.0.iter_mut().zip(item.bucket.cells()) {
            let (earned, remainder) = movement.rate.earned(elapsed, cell.remainder);
            (movement.earned, movement.remainder) = (earned.get(), remainder);
        }
    }

    /// Pins the balance from which each limit is full before the bucket expires: other processes may have
    /// taken more than the snapshot says. `bucket` is the state after the write. `of_all` includes limits that
    /// the write does not touch.
    fn keep_enough(
        &mut self,
        item: &BucketItem,
        bucket: &Bucket,
        expiry: Expiry,
        of_all: bool,
        now: Timestamp,
    ) -> Alive {
        let (until, alive) = match (expiry, item.expires_at) {
            (Expiry::Never, _) => return Alive::After(now),
            (Expiry::Keep, None) => return Alive::Forever,
            (Expiry::At(moment), None) => (moment, Alive::After(now)),
            (Expiry::At(moment), Some(_)) => (moment, Alive::Until(now)),
            (Expiry::Keep, Some(expires_at)) => {
                // Halfway, so that the write still succeeds if the expiry is a little earlier, or the
                // balance a little lower, than in the snapshot.
                let full = now.saturating_add(bucket.wait_until_full(now));
                let until = full.saturating_add_millis(expires_at.millis_since(full) / 2);
                let before = Timestamp::from_millis(until.as_millis().saturating_sub(1));
                (until, Alive::Until(before.max(now)))
            }
        };
        let left_ms = until.millis_since(now);
        for movement in &mut self.0 {
            let Some((cell, rate)) = bucket.cell(movement.limit.as_str()) else { continue };
            if expiry != Expiry::Keep || movement.is_touched() || of_all {
                let (earned, _) = rate.earned(left_ms, 0);
                let least = rate.capacity().get().saturating_sub(earned.get());
                movement.least_left = Some(least.min(cell.tokens.get()));
            }
        }
        alive
    }

    /// The write gives the bucket other limits: the lowest ceiling cuts the balance.
    fn pass_under(&mut self, limits: &LimitSet) {
        for movement in &mut self.0 {
            let Some(at) = limits.position(movement.limit.as_str()) else { continue };
            if limits.rates()[at].capacity() < movement.rate.capacity() {
                movement.rate = limits.rates()[at];
            }
        }
    }

    /// What a write of other limits requires. `bucket` is the state after the write.
    fn within(
        &mut self,
        item: &BucketItem,
        bucket: &Bucket,
        expiry: Expiry,
        now: Timestamp,
    ) -> Balances<'_> {
        // A limit that gets another rate may take longer to fill.
        let alive = self.keep_enough(item, bucket, expiry, true, now);
        Balances::Within(&self.0, alive)
    }

    fn get(&mut self, limit: &LimitName) -> Option<&mut Movement> {
        self.0.iter_mut().find(|movement| movement.limit == *limit)
    }
}

fn on_item(
    key: &BucketItemKey,
    item: &BucketItem,
    requests: &[&Request],
    now: Timestamp,
) -> Decision {
    let mut movements = Movements::of(item, now);
    let mut bucket = item.bucket.clone();
    bucket.refill(now);
    let mut outcomes = vec![Outcome::Nothing; requests.len()];
    let shard = (key.shard, item.shard_count);
    let whole = add_charged(&mut bucket, (shard, &item.whole), requests, now);
    let is_last =
        |request: &Request| item.shard_count == 1 || matches!(request, Request::SettleRest(_));
    let left_over = settle_all(is_last, &mut movements, &mut bucket, requests, &mut outcomes);
    let is_wider = whole.len() != item.whole.len();
    let mut taking =
        take_all(&mut bucket, (shard, whole, item.limits_at), requests, &mut outcomes, now);
    taking.followed |= is_wider;
    taking.passed.iter().for_each(|limits| movements.pass_under(limits));
    for (limit, amount) in taking.taken {
        if let Some(movement) = movements.get(&limit) {
            movement.taken = movement.taken.saturating_add(amount.get());
        }
    }
    if !outcomes.contains(&Outcome::Written) {
        return Decision::without_write(outcomes, left_over);
    }
    let expiry = match taking.last_target {
        // A bucket with several shards does not expire: its shards would expire one by one.
        _ if item.shard_count > 1 && item.expires_at.is_some() => Expiry::Never,
        _ if item.shard_count > 1 => Expiry::Keep,
        Some(target) => expiry_of(target, &bucket, item.expires_at, now),
        None => expiry_after_settling(&bucket, item.expires_at, now),
    };
    let update = if taking.followed {
        let owner = owner_of(taking.last_target);
        let shard_count = item.shard_count;
        let (whole, limits_at) = (&*taking.whole, taking.limits_at);
        let after = After { bucket: &bucket, whole, shard_count, limits_at };
        // If there are too many limits, the balances decide which ones are dropped.
        let keeps = |name: &LimitName| bucket.limits().position(name.as_str()).is_some();
        let balances = match item.whole.names().iter().all(keeps) {
            true => movements.within(item, &bucket, expiry, now),
            false => Balances::Exact,
        };
        bucket::rewrite(key, item, &after, &owner, expiry, balances)
    } else {
        let alive = movements.keep_enough(item, &bucket, expiry, false, now);
        add_or_refill(key, item, &movements, (expiry, alive), now)
    };
    Decision { update: Some(update), outcomes, left_over }
}

/// The write that gives a live shard exactly the target's limits and lifetime.
pub(crate) fn reconfigured(
    key: &BucketItemKey,
    item: &BucketItem,
    target: &Target,
    now: Timestamp,
) -> Update {
    let mut movements = Movements::of(item, now);
    let mut bucket = item.bucket.clone();
    bucket.refill(now);
    bucket.replace_limits(&item.share_of(target.limits()), now);
    movements.pass_under(bucket.limits());
    let expiry = target.expiry(&bucket, now).map_or(Expiry::Never, Expiry::At);
    // Shards do not expire; the first one stores how long the bucket has to live.
    let own_expiry = if item.shard_count == 1 { expiry } else { Expiry::Never };
    let owner = Owner { parent: target.parent() };
    let (shard_count, limits_at) = (item.shard_count, target.limits_read_at());
    let after = After { bucket: &bucket, whole: target.limits(), shard_count, limits_at };
    let balances = movements.within(item, &bucket, own_expiry, now);
    bucket::rewrite(key, item, &after, &owner, expiry, balances)
}

/// Prefers a write that does not move the refill time: then concurrent writes of other processes do not fail each
/// other's conditions.
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
        let since = Since::Snapshot(item.bucket.refilled_at(), item.generation);
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

/// An absent bucket counts as a full one: takes and charges apply to that. Refunds are ignored. The limits are
/// those of the first request that is part of the write: another one may have its reply before.
fn on_nothing(
    key: &BucketItemKey,
    expired: Option<&BucketItem>,
    requests: &[&Request],
    now: Timestamp,
) -> Decision {
    let counts = |request: &Request| {
        request.charges() || matches!(request, Request::Take(_)) && !request.is_empty()
    };
    let mut unwritten = None;
    for (at, first) in requests.iter().enumerate().filter(|(_, request)| counts(request)) {
        let decision = on_full(key, expired, first.target(), requests, now);
        if decision.outcomes[at] == Outcome::Written {
            return decision;
        }
        unwritten.get_or_insert(decision);
    }
    let nothing = || vec![Outcome::Nothing; requests.len()];
    unwritten.unwrap_or_else(|| Decision::without_write(nothing(), Vec::new()))
}

/// Decides requests on a bucket that is full under the limits of `first`.
fn on_full(
    key: &BucketItemKey,
    expired: Option<&BucketItem>,
    first: &Arc<Target>,
    requests: &[&Request],
    now: Timestamp,
) -> Decision {
    let mut outcomes = vec![Outcome::Nothing; requests.len()];
    let mut bucket = full(first, expired, now);
    // A new bucket has one shard, however many it had before.
    let shard = (key.shard, 1);
    let whole = Arc::clone(bucket.limits());
    let whole = add_charged(&mut bucket, (shard, &whole), requests, now);
    charge_all(&mut bucket, requests, &mut outcomes);
    let limits_at = first.limits_read_at();
    let taking = take_all(&mut bucket, (shard, whole, limits_at), requests, &mut outcomes, now);
    if !outcomes.contains(&Outcome::Written) {
        return Decision::without_write(outcomes, Vec::new());
    }
    let owner = owner_of(Some(taking.last_target.unwrap_or(first)));
    let expiry = match taking.last_target {
        Some(target) => expiry_of(target, &bucket, expired.and_then(|item| item.expires_at), now),
        // After a late charge the bucket expires as soon as it is full: its entity may have been deleted.
        None => Expiry::At(now.saturating_add(bucket.wait_until_full(now))),
    };
    let (whole, limits_at) = (&*taking.whole, taking.limits_at);
    let after = After { bucket: &bucket, whole, shard_count: 1, limits_at };
    let update = match expired {
        Some(item) => bucket::rewrite(key, item, &after, &owner, expiry, Balances::Exact),
        None => bucket::create(key, &after, &owner, expiry),
    };
    Decision { update: Some(update), outcomes, left_over: Vec::new() }
}

/// A full bucket. Net consumption continues from an expired one.
fn full(target: &Target, expired: Option<&BucketItem>, now: Timestamp) -> Bucket {
    let limits = target.limits();
    let cells = limits.iter().map(|(name, rate)| {
        let before = expired.and_then(|item| item.bucket.cell(name.as_str()));
        let consumed = before.map_or(Millitokens::ZERO, |(cell, _)| cell.consumed);
        Cell { tokens: rate.capacity(), consumed, ..Cell::default() }
    });
    let cells: Vec<Cell> = cells.collect();
    // The refill time never moves back, not even for a new bucket.
    let since = expired.map_or(now, |item| item.bucket.refilled_at().max(now));
    Bucket::from_parts(Arc::clone(limits), cells, since)
}

/// Adds the limits that are charged and that the bucket lacks, as full ones. Returns the limits of the whole
/// bucket.
fn add_charged(
    bucket: &mut Bucket,
    ((shard, shard_count), whole): ((u32, u32), &Arc<LimitSet>),
    requests: &[&Request],
    now: Timestamp,
) -> Arc<LimitSet> {
    let mut whole = Arc::clone(whole);
    for settlement in requests.iter().filter_map(|request| request.settlement()) {
        let limits = settlement.target.limits();
        let charged = settlement.differences.iter().filter(|one| one.amount > Millitokens::ZERO);
        let lacking = charged.filter_map(|one| {
            let (name, rate) = (&limits.names()[one.cell], limits.rates()[one.cell]);
            bucket.limits().position(name.as_str()).is_none().then(|| (name.clone(), rate))
        });
        let lacking = Arc::new(LimitSet::from_rates(lacking).unwrap_or_default());
        if !lacking.is_empty() {
            bucket.follow(&share_of(&lacking, shard, shard_count), now);
            whole = whole_after(bucket, &whole, &lacking);
        }
    }
    whole
}

/// Applies the charges to a new bucket.
fn charge_all(bucket: &mut Bucket, requests: &[&Request], outcomes: &mut [Outcome]) {
    for (request, outcome) in requests.iter().zip(outcomes) {
        let Some(settlement) = request.settlement() else { continue };
        let mut charged = bucket.clone();
        let names = settlement.target.limits().names();
        let charges = settlement.differences.iter().filter(|one| one.amount > Millitokens::ZERO);
        let done = charges.clone().try_for_each(|one| {
            let at = bucket.limits().position(names[one.cell].as_str());
            at.map_or(Ok(()), |at| charged.charge(at, one.amount))
        });
        match done {
            Ok(()) if charges.count() == 0 => {}
            Ok(()) => {
                *bucket = charged;
                *outcome = Outcome::Written;
            }
            Err(overflow) => {
                *outcome = Outcome::Rejected(StoreErrorKind::Rejected, overflow.to_string());
            }
        }
    }
}

/// Applies the settlements, and returns the amounts that other shards must settle. `is_last` tells whether no
/// other shard can settle a request.
fn settle_all(
    is_last: impl Fn(&Request) -> bool,
    movements: &mut Movements,
    bucket: &mut Bucket,
    requests: &[&Request],
    outcomes: &mut [Outcome],
) -> Vec<(usize, Takes)> {
    let mut charges: Vec<(usize, Take, LimitName)> = Vec::new();
    let mut left_over: Vec<(usize, Takes)> = Vec::new();
    let mut charged = bucket.clone();
    for (place, (request, outcome)) in requests.iter().zip(outcomes.iter_mut()).enumerate() {
        let Some(settlement) = request.settlement() else { continue };
        let names = settlement.target.limits().names();
        let moved = settlement.differences.iter().filter(|one| one.amount != Millitokens::ZERO);
        let (present, lacking): (SmallVec<[&Take; 2]>, SmallVec<[&Take; 2]>) =
            moved.partition(|one| bucket.limits().position(names[one.cell].as_str()).is_some());
        if !is_last(request) {
            // Another shard may have the limit: new limits reach the shards one by one.
            lacking.into_iter().for_each(|rest| leave_over(&mut left_over, place, *rest));
        }
        // One after the other: their sum may overflow where each by itself does not.
        let mut next = charged.clone();
        let too_much = present.iter().any(|one| {
            let at = next.limits().position(names[one.cell].as_str());
            at.is_some_and(|at| next.charge(at, one.amount.max(Millitokens::ZERO)).is_err())
        });
        if too_much {
            *outcome =
                Outcome::Rejected(StoreErrorKind::Rejected, zae_limiter_core::Overflow.to_string());
            continue;
        }
        // A spread charge goes to all shards; the refunds stay here.
        let is_spread = !is_last(request) && is_long_in_debt(&next, &present, names);
        if !is_spread {
            charged = next;
        }
        for difference in present {
            if is_spread && difference.amount > Millitokens::ZERO {
                leave_over(&mut left_over, place, *difference);
                continue;
            }
            charges.push((place, *difference, names[difference.cell].clone()));
            *outcome = Outcome::Written;
        }
    }
    // Refunds first, then charges: as `decide_batch` says.
    charges.sort_by_key(|(_, difference, _)| difference.amount > Millitokens::ZERO);
    for (place, Take { cell, mut amount }, limit) in charges {
        let at = bucket.limits().position(limit.as_str());
        let Some(movement) = movements.get(&limit) else {
            if amount < Millitokens::ZERO && !is_last(requests[place]) {
                // It was taken from a shard that has the limit, and belongs there.
                leave_over(&mut left_over, place, Take { cell, amount });
                continue;
            }
            // This write, a rewrite, adds the limit to the item.
            let _ = at.map(|at| bucket.charge(at, amount));
            continue;
        };
        if amount < Millitokens::ZERO && !is_last(requests[place]) {
            // Other shards may have room for what this shard cannot hold.
            let held = bucket.cell(limit.as_str()).map_or(0, |(cell, _)| cell.tokens.get());
            let room = match held < 0 {
                // Other shards owe, too: all of them share the refund.
                true => 0,
                false => movement.rate.capacity().get().saturating_sub(held).max(0),
            };
            let fits = Millitokens::new(amount.get().max(room.saturating_neg()));
            let rest = Take { cell, amount: amount.saturating_add(-fits) };
            if rest.amount != Millitokens::ZERO {
                leave_over(&mut left_over, place, rest);
            }
            amount = fits;
            movement.must_fit |= amount < Millitokens::ZERO;
        } else if amount < Millitokens::ZERO {
            movement.must_fit = false;
        }
        if amount > Millitokens::ZERO {
            movement.charged = movement.charged.saturating_add(amount.get());
        } else {
            movement.credited = movement.credited.saturating_add(amount.get().saturating_neg());
        }
        // It does not overflow: each was checked above, and their number is bounded.
        let _ = at.map(|at| bucket.charge(at, amount));
    }
    left_over
}

/// Whether a shard would owe the charge for longer than [`DEBT_MAX`].
fn is_long_in_debt(charged: &Bucket, charges: &[&Take], names: &[LimitName]) -> bool {
    charges.iter().filter(|charge| charge.amount > Millitokens::ZERO).any(|charge| {
        let cell = charged.cell(names[charge.cell].as_str());
        cell.is_some_and(|(cell, rate)| {
            rate.time_to_earn(-cell.tokens.min(Millitokens::ZERO)) > DEBT_MAX
        })
    })
}

/// A shard bears a charge alone if it repays its debt in this time. Otherwise the other shards would keep
/// admitting while the bucket owes.
const DEBT_MAX: Duration = Duration::from_secs(1);

fn leave_over(left_over: &mut Vec<(usize, Takes)>, place: usize, rest: Take) {
    match left_over.iter_mut().find(|(at, _)| *at == place) {
        Some((_, takes)) => takes.push(rest),
        None => left_over.push((place, SmallVec::from_slice(&[rest]))),
    }
}

/// The result of all takes of a batch.
struct Taking<'a> {
    /// The amounts, by limit.
    taken: Vec<(LimitName, Millitokens)>,
    /// The target of the last request that was admitted.
    last_target: Option<&'a Arc<Target>>,
    /// Whether the bucket got other limits.
    followed: bool,
    /// The shard's shares of those limits, one set after the other.
    passed: Vec<Arc<LimitSet>>,
    /// The limits of the whole bucket afterwards.
    whole: Arc<LimitSet>,
    /// When the stored configuration was read that they come from.
    limits_at: Option<Timestamp>,
}

/// The limits that a target gives a bucket, and when they were read. If the target's limits are older than the
/// bucket's own, only those that the bucket lacks. Otherwise processes with a stale configuration would undo a
/// change, and others would redo it.
fn limits_to_follow(
    target: &Target,
    bucket: &Bucket,
    limits_at: Option<Timestamp>,
    now: Timestamp,
) -> (Arc<LimitSet>, Option<Timestamp>) {
    if !is_older(target, limits_at, now) {
        return (Arc::clone(target.limits()), target.limits_read_at());
    }
    let lacks = |name: &LimitName| bucket.limits().position(name.as_str()).is_none();
    let lacking = target.limits().iter().filter(|(name, _)| lacks(name));
    let lacking = lacking.map(|(name, rate)| (name.clone(), *rate));
    (Arc::new(LimitSet::from_rates(lacking).unwrap_or_default()), limits_at)
}

/// Whether a target's limits were read before an item's. A time too far in the future comes from a wrong clock
/// and is ignored.
pub(crate) fn is_older(target: &Target, limits_at: Option<Timestamp>, now: Timestamp) -> bool {
    let latest = now.saturating_add_millis(AHEAD_MAX_MS);
    let limits_at = limits_at.filter(|at| *at <= latest);
    matches!((target.limits_read_at(), limits_at), (Some(read), Some(at)) if read < at)
}

/// 10 s: a clock that is further ahead counts as wrong.
const AHEAD_MAX_MS: u64 = 10_000;

/// A shard's balances at a moment, under a leg's limits.
pub(crate) fn held_for(leg: &Leg, item: &BucketItem, now: Timestamp) -> Bucket {
    let mut bucket = item.bucket.clone();
    let (limits, _) = limits_to_follow(&leg.target, &bucket, item.limits_at, now);
    bucket.follow(&item.share_of(&limits), now);
    bucket.refill(now);
    bucket
}

/// The limits of the whole bucket after a shard got other ones.
fn whole_after(bucket: &Bucket, before: &Arc<LimitSet>, target: &Arc<LimitSet>) -> Arc<LimitSet> {
    if bucket.limits().len() == target.len() {
        return Arc::clone(target);
    }
    let rates = bucket.limits().names().iter().filter_map(|name| {
        let of = |limits: &LimitSet| limits.position(name.as_str()).map(|at| limits.rates()[at]);
        Some((name.clone(), of(target).or_else(|| of(before))?))
    });
    Arc::new(LimitSet::from_rates(rates).unwrap_or_default())
}

fn take_all<'a>(
    bucket: &mut Bucket,
    ((shard, shard_count), whole, limits_at): ((u32, u32), Arc<LimitSet>, Option<Timestamp>),
    requests: &[&'a Request],
    outcomes: &mut [Outcome],
    now: Timestamp,
) -> Taking<'a> {
    let mut taking = Taking {
        taken: Vec::new(),
        last_target: None,
        followed: false,
        passed: Vec::new(),
        whole,
        limits_at,
    };
    for (request, outcome) in requests.iter().zip(outcomes) {
        let Request::Take(leg) = request else { continue };
        // A refused request must change nothing, not even the limits.
        let mut tried = bucket.clone();
        let (limits, limits_at) = limits_to_follow(&leg.target, &tried, taking.limits_at, now);
        tried.follow(&share_of(&limits, shard, shard_count), now);
        let names = leg.target.limits().names();
        let place = |take: &Take| {
            let cell = tried.limits().position(names[take.cell].as_str())?;
            Some(Take { cell, amount: take.amount })
        };
        let takes: SmallVec<[_; 2]> = leg.takes.iter().filter_map(place).collect();
        match decide(&mut [Ask { bucket: &mut tried, takes: &takes }], now) {
            Verdict::Admitted if request.is_empty() => {}
            Verdict::Admitted => {
                if tried.limits() != bucket.limits() {
                    taking.followed = true;
                    taking.passed.push(Arc::clone(tried.limits()));
                    taking.whole = whole_after(&tried, &taking.whole, &limits);
                    taking.limits_at = limits_at;
                }
                *bucket = tried;
                let amounts = leg.takes.iter().map(|take| (names[take.cell].clone(), take.amount));
                taking.taken.extend(amounts);
                taking.last_target = Some(&leg.target);
                *outcome = Outcome::Written;
            }
            Verdict::Refused => {
                *outcome = Outcome::Refused(refused_statuses(0, leg, &tried, now).collect());
            }
        }
    }
    taking
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
        // The bucket's own limits may be newer than the target's, and take longer to fill.
        (Some(moment), _) => {
            let since = now.max(bucket.refilled_at());
            Expiry::At(moment.max(since.saturating_add(bucket.limits().time_to_fill())))
        }
        (None, Some(_)) => Expiry::Never,
        (None, None) => Expiry::Keep,
    }
}

/// Keeps the expiry of the last acquire, unless the bucket needs longer to be full.
fn expiry_after_settling(bucket: &Bucket, current: Option<Timestamp>, now: Timestamp) -> Expiry {
    let full = now.saturating_add(bucket.wait_until_full(now));
    match current {
        Some(current) if full > current => Expiry::At(full),
        _ => Expiry::Keep,
    }
}

/// A write without a snapshot, for requests under the same limits. It succeeds if the balance is sufficient and
/// the refill time so recent that no refill is needed. `None` if all amounts are 0.
pub(crate) fn blind(
    key: &BucketItemKey,
    shard_count: u32,
    requests: &[&Request],
    now: Timestamp,
) -> Option<Update> {
    let whole = requests.first()?.target().limits();
    // A request may be queued for a shard that was merged meanwhile. The retired item has a lower count and must
    // not be written to.
    let shard_count = shard_count.max((key.shard + 1).next_power_of_two());
    let limits = share_of(whole, key.shard, shard_count);
    let mut movements: Vec<Movement> = limits.iter().zip(whole.rates()).map(at_rest).collect();
    for request in requests {
        let is_take = matches!(request, Request::Take(_));
        for take in request.amounts() {
            let (movement, amount) = (&mut movements[take.cell], take.amount.get());
            let sum = match (is_take, amount >= 0) {
                (true, _) => &mut movement.taken,
                (false, true) => &mut movement.charged,
                (false, false) => &mut movement.credited,
            };
            *sum = sum.saturating_add(amount.saturating_abs());
        }
    }
    // How old the refill time may be: what was earned since is at most half of the room between what is needed
    // and the ceiling.
    let touched = || movements.iter().filter(|movement| movement.is_touched());
    let windows = touched().map(|movement| {
        let capacity = movement.rate.capacity().get();
        let busy = movement.taken.saturating_add(movement.charged).max(movement.credited);
        let room = capacity.saturating_sub(busy).max(0) / 2;
        let window = movement.rate.time_to_earn(Millitokens::new(room));
        u64::try_from(window.as_millis()).unwrap_or(u64::MAX)
    });
    let window_ms = windows.min()?.saturating_sub(1);
    // It must not expire before it is full, starting from 0 at worst.
    let fills = touched().map(|movement| movement.rate.time_to_fill());
    let alive = Alive::After(now.saturating_add(fills.max().unwrap_or_default()));
    for movement in &mut movements {
        let (earned, _) = movement.rate.earned(window_ms, movement.rate.period_ms() - 1);
        movement.earned = earned.get();
        if movement.charged > 0 {
            // Without a snapshot no charge may leave debt.
            movement.least_left = Some(0);
        }
        if movement.credited > 0 && shard_count > 1 {
            // A refund to a shard in debt is shared by all shards.
            let without_debt = movement.credited - movement.taken - movement.charged;
            movement.least_left = movement.least_left.max(Some(without_debt));
        }
    }
    let back = i64::try_from(window_ms).unwrap_or(i64::MAX);
    let since = Since::Guessed(Timestamp::from_millis(now.as_millis().saturating_sub(back)));
    bucket::add(key, &movements, since, Expiry::Keep, true, shard_count, alive)
}

#[cfg(test)]
mod tests {
    use zae_limiter_core::{
        BucketKey, EntityId, Lifetime, Limit, NamespaceId, Placement, ResourceName,
    };
    use zae_limiter_schema::{Action, Condition, Value};

    use super::*;

    fn requirement_on_count(shard: u32, count: u32) -> Vec<Condition> {
        let limits = LimitSet::new([Limit::per_minute("rpm", 100)]).unwrap();
        let bucket = BucketKey {
            namespace: NamespaceId::new("ns000000001").unwrap(),
            entity: EntityId::new("e").unwrap(),
            resource: ResourceName::new("r").unwrap(),
        };
        let target = Arc::new(Target::new(bucket.clone(), Arc::new(limits), Lifetime::Forever));
        let takes = SmallVec::from_slice(&[Take { cell: 0, amount: Millitokens::new(1_000) }]);
        let request = Request::Take(Leg { target, takes });
        let key = BucketItemKey { bucket, shard };
        let now = Timestamp::from_millis(1_794_751_200_000);
        let update = blind(&key, count, &[&request], now).unwrap();
        let is_on_count = |condition: &Condition| format!("{condition:?}").contains("shard_count");
        update.conditions.into_iter().filter(is_on_count).collect()
    }

    /// The ceiling, the balance, and `limits_at` of the bucket that a charge creates, behind a call that takes
    /// `taken` under limits of its own.
    fn created(taken: i64, charged: i64) -> (Vec<Outcome>, [Option<i64>; 3]) {
        let bucket = BucketKey {
            namespace: NamespaceId::new("ns000000001").unwrap(),
            entity: EntityId::new("e").unwrap(),
            resource: ResourceName::new("r").unwrap(),
        };
        let target = |capacity, read_ms| {
            let limits = LimitSet::new([Limit::per_minute("rpm", capacity)]).unwrap();
            let target = Target::new(bucket.clone(), Arc::new(limits), Lifetime::Forever);
            Arc::new(target.with_limits_read_at(Timestamp::from_millis(read_ms)))
        };
        let amount = |amount| {
            let amount = Millitokens::new(amount);
            SmallVec::from_slice(&[Take { cell: 0, amount }])
        };
        let take = Request::Take(Leg { target: target(200, 2_000), takes: amount(taken) });
        let charge = Request::Settle(Settlement {
            target: target(100, 1_000),
            placement: Placement::default(),
            differences: amount(charged),
        });
        let key = BucketItemKey { bucket: bucket.clone(), shard: 0 };
        let now = Timestamp::from_millis(3_000);
        let decision = decide_batch(&key, &Snapshot::Absent, &[&take, &charge], now);
        let set = |name: &str| {
            let actions = decision.update.iter().flat_map(|update| &update.actions);
            actions.cloned().find_map(|action| match action {
                Action::Set(set, value) if set == name => value.as_i64(),
                _ => None,
            })
        };
        let written = ["b_rpm_cp", "b_rpm_tk", "limits_at"].map(set);
        (decision.outcomes, written)
    }

    /// Calls that take nothing, or are refused, get their reply before the write.
    #[test]
    fn only_a_call_that_is_part_of_the_write_gives_a_new_bucket_its_limits() {
        let (outcomes, written) = created(1_000, 1_000);
        assert_eq!(outcomes, [Outcome::Written, Outcome::Written]);
        assert_eq!(written, [200_000, 198_000, 2_000].map(Some));
        let (outcomes, written) = created(0, 1_000);
        assert_eq!(outcomes, [Outcome::Nothing, Outcome::Written]);
        assert_eq!(written, [100_000, 99_000, 1_000].map(Some));
        let (outcomes, written) = created(1_000, 300_000);
        assert!(matches!(outcomes[..], [Outcome::Refused(_), Outcome::Written]), "{outcomes:?}");
        assert_eq!(written, [100_000, -200_000, 1_000].map(Some));
        let (outcomes, written) = created(0, 0);
        assert_eq!(outcomes, [Outcome::Nothing, Outcome::Nothing]);
        assert_eq!(written, [None; 3]);
    }

    #[test]
    fn a_write_without_a_snapshot_requires_a_count_above_the_shard_number() {
        let equal = |count| vec![Condition::Equal("shard_count".to_owned(), Value::number(count))];
        assert_eq!(requirement_on_count(3, 4), equal(4));
        // A retired shard 3 has one of these counts.
        for count in [1, 2] {
            assert_eq!(requirement_on_count(3, count), equal(4));
        }
        assert_eq!(requirement_on_count(1, 1), equal(2));
    }
}
