//! A bucket's item, and every way in which it is written.
//!
//! All limits of an item share one refill time `rf`. A write that moves `rf` adds to every limit what
//! it has earned since. Each kind of write pins what it relies on:
//!
//! | write | what it does | what it pins |
//! | --- | --- | --- |
//! | [`create`] | creates an item, full less what is taken | that the item is absent |
//! | [`add`] | takes and refunds without moving `rf` | the generation, and bounds of the balance within which a later refill has the same result |
//! | [`refill`] | moves `rf`, adds what was earned, takes and refunds | `rf`, the generation, and whether each balance reaches its ceiling |
//! | [`rewrite`] | sets other limits, or starts an expired item again | `rf` and everything it was computed from; of a live item only bounds of the balances: see [`Balances`] |
//! | [`split`] | splits a shard in two | of the old shard what [`refill`] pins, and its count; of the new one that it is absent or retired |
//! | [`restore`] | creates a missing shard, or rebuilds a retired one | that it is missing or retired, and the count of the shard it was split from |
//! | [`merge`] | merges two shards into one | `rf` and everything it was computed from, of both |
//!
//! All of them pin that an expiring item is full again by then. Other processes may have taken more
//! than the snapshot says, and an item that expired with less would start again as a full one.
//!
//! Why [`add`] is exact: with balance `b`, refunds `c` and `e` earned since `rf`, the exact result is
//! `min(cap, b + e + c) - taken`. Without the refill the balance becomes `b + c - taken`, and a refill
//! at the same moment would make it `b + c - taken + e`. Both are equal as long as `b + c + e` stays
//! below `cap`: that is the upper bound. Taking from a full bucket without moving `rf` would later add
//! the same time twice.
//!
//! The generation stands for the rates and the shard count: our writers change it whenever they change
//! those. Other clients change rates, or the count, without it. A write that did not see such a change
//! has the same effect as one that came before it, and its answer shows the change. Another client may
//! have deleted and created an item without a generation. For such an item, and without a snapshot,
//! every attribute is pinned by itself.

mod count;
mod item;
mod reshard;

use zae_limiter_core::{Bucket, BucketKey, EntityId, LimitName, LimitSet, Rate, Timestamp};

pub use item::{BucketItem, Field, shards_seen, share_of};
pub use reshard::{ShardPair, after_merge, after_split, merge, restore, split};

pub use count::{carry_shard_count, delete_together, further_shards};

use crate::expression::{Action, Condition};
use crate::keys::{BucketItemKey, Index};
use crate::table::Update;
use crate::value::Value;

/// The reserved limit that counts the writes of an item: 1,000 a second.
const WCU: &str = "wcu";
/// Its ceiling and refill amount in millitokens, and its period in milliseconds.
const WCU_CAPACITY: i64 = 1_000_000;
const WCU_PERIOD_MS: u64 = 1_000;
/// A hot bucket is refilled only for the reserved limit at most this often.
const WCU_PAID_OUT_AFTER_MS: u64 = 100;
/// One write, in millitokens.
const ONE_WRITE: i64 = 1_000;

/// How many writes a shard takes in one burst, and in one second.
pub const WRITES_MAX: i64 = WCU_CAPACITY / ONE_WRITE;

/// The shared refill time.
const REFILLED_AT: &str = "rf";
/// The refill time that the remainders belong to. Other clients move `rf` and leave the remainders
/// behind; those are then worth nothing.
const REMAINDERS_AT: &str = "rm_at";
/// The generation. It changes with every write that changes limits or the shard count, or that drops a
/// remainder without moving `rf`, so that older snapshots fail their condition. It starts at the time
/// of creation, so that an item that was deleted and created again has another one. Other clients do
/// not write it; absent counts as 0.
const GENERATION: &str = "gn";
const SHARD_COUNT: &str = "shard_count";
/// On the first shard: the highest shard count there ever was. Retired shards stay until they expire,
/// and are deleted with the bucket.
const SHARDS_SEEN: &str = "shards_seen";
/// When the stored configuration was read that the item's limits come from. A process that read it
/// earlier has older limits and does not write them. Absent where a call passed its own limits, and on
/// items of other clients.
const LIMITS_AT: &str = "limits_at";
const TTL: &str = "ttl";
const PARENT: &str = "parent_id";
/// On the first shard: how long the bucket had to live when it was split, in seconds. Shards do not
/// expire; once merged into one, the bucket does again.
const IDLE: &str = "idle_s";

fn attribute(limit: &str, suffix: &str) -> String {
    ["b_", limit, "_", suffix].concat()
}

/// Seconds since the epoch, rounded up, so that nothing expires early.
pub(crate) fn ttl_of(moment: Timestamp) -> i64 {
    moment.as_millis().div_euclid(1_000) + i64::from(moment.as_millis().rem_euclid(1_000) != 0)
}

/// What a write does to one limit. Amounts are millitokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Movement {
    /// The limit.
    pub limit: LimitName,
    /// The shard's share of the rate. All amounts are computed from it.
    pub rate: Rate,
    /// The rate of the whole bucket, as the item stores it.
    pub whole: Rate,
    /// What acquires take. The balance must cover it.
    pub taken: i64,
    /// What is charged even if the balance does not cover it.
    pub charged: i64,
    /// What is refunded, up to the ceiling.
    pub credited: i64,
    /// The ceiling must not cut the refund: a full shard is not a full bucket.
    pub must_fit: bool,
    /// Whole millitokens earned since `rf`.
    pub earned: i64,
    /// What was earned beyond `earned`, less than a millitoken.
    pub remainder: u64,
    /// The least balance after the write from which the limit is full before the item expires. An
    /// item that expired with less would start again as a full one.
    pub least_left: Option<i64>,
}

impl Movement {
    /// A write that leaves the limit as it is.
    pub fn none(limit: LimitName, rate: Rate, whole: Rate) -> Self {
        Self {
            limit,
            rate,
            whole,
            taken: 0,
            charged: 0,
            credited: 0,
            must_fit: false,
            earned: 0,
            remainder: 0,
            least_left: None,
        }
    }

    /// Whether the write takes, charges or refunds anything.
    pub fn is_touched(&self) -> bool {
        self.taken != 0 || self.charged != 0 || self.credited != 0
    }

    fn attribute(&self, suffix: &str) -> String {
        attribute(self.limit.as_str(), suffix)
    }

    /// Taken and charged less credited.
    fn net(&self) -> i64 {
        self.taken.saturating_add(self.charged).saturating_sub(self.credited)
    }

    /// Credited and earned.
    fn gain(&self) -> i64 {
        self.credited.saturating_add(self.earned)
    }

    /// The highest balance that stays below the ceiling with `gain` added.
    fn highest_below_ceiling(&self, gain: i64) -> i64 {
        self.rate.capacity().get().saturating_sub(gain).saturating_sub(1)
    }

    /// The least balance that, with `gain`, covers what is taken and leaves enough.
    fn least_needed(&self, gain: i64) -> Option<i64> {
        let out = self.taken.saturating_add(self.charged).saturating_sub(gain);
        let to_take = (self.taken > 0).then_some(out);
        to_take.max(self.least_left.map(|left| left.saturating_add(out)))
    }

    /// Whether a balance is within the bounds of [`add`]. It must be high enough without `earned`,
    /// because another process may have added and taken that already, and low enough with it.
    pub fn can_be_added_to(&self, balance: i64) -> bool {
        let gain = self.gain();
        self.least_needed(self.credited).is_none_or(|least| balance >= least)
            && (!self.is_touched() || balance <= self.highest_below_ceiling(gain))
    }

    fn pin_rate(&self, conditions: &mut Vec<Condition>) {
        pin_rate(self.limit.as_str(), &self.whole, conditions);
    }
}

fn pin_rate(limit: &str, rate: &Rate, conditions: &mut Vec<Condition>) {
    let period = i64::try_from(rate.period_ms()).unwrap_or(i64::MAX);
    for (suffix, value) in
        [("cp", rate.capacity().get()), ("ra", rate.refill_amount().get()), ("rp", period)]
    {
        conditions.push(Condition::Equal(attribute(limit, suffix), Value::number(value)));
    }
}

/// What a write does to the item's expiry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expiry {
    /// Leaves it as it is.
    Keep,
    /// Removes it: the item does not expire.
    Never,
    /// Sets it to this time.
    At(Timestamp),
}

impl Expiry {
    fn push(self, actions: &mut Vec<Action>) {
        match self {
            Self::Keep => {}
            Self::Never => actions.push(Action::Remove(TTL.to_owned())),
            Self::At(moment) => {
                actions.push(Action::Set(TTL.to_owned(), Value::number(ttl_of(moment))));
            }
        }
    }
}

/// What an [`add`] is computed from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Since {
    /// A snapshot's refill time, from which `earned` counts, and its generation.
    Snapshot(Timestamp, i64),
    /// No snapshot. `earned` counts from this guess, and the write requires that `rf` is not earlier.
    Guessed(Timestamp),
}

/// What a write requires of the item's expiry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Alive {
    /// It does not expire.
    Forever,
    /// It does not expire, or expires after this time.
    After(Timestamp),
    /// It expires after this time.
    Until(Timestamp),
}

impl Alive {
    fn condition(self) -> Condition {
        let absent = || Condition::Absent(TTL.to_owned());
        let later = |moment: Timestamp| {
            let next_second = moment.as_millis().div_euclid(1_000) + 1;
            Condition::AtLeast(TTL.to_owned(), Value::number(next_second))
        };
        match self {
            Self::Forever => absent(),
            Self::After(moment) => Condition::Any(vec![absent(), later(moment)]),
            Self::Until(moment) => later(moment),
        }
    }
}

fn same_shard_count(shard_count: u32) -> Condition {
    let equal = Condition::Equal(SHARD_COUNT.to_owned(), Value::number(shard_count.into()));
    match shard_count {
        1 => Condition::Any(vec![Condition::Absent(SHARD_COUNT.to_owned()), equal]),
        _ => equal,
    }
}

/// Takes and refunds without moving the refill time. Of untouched limits it only pins the least
/// balance that an expiring item must have. Returns `None` when no limit is touched.
pub fn add(
    key: &BucketItemKey,
    movements: &[Movement],
    since: Since,
    expiry: Expiry,
    counts_writes: bool,
    shard_count: u32,
    alive: Alive,
) -> Option<Update> {
    let (mut actions, mut conditions) = (Vec::new(), Vec::new());
    let (Since::Snapshot(rf, _) | Since::Guessed(rf)) = since;
    let is_ours = matches!(since, Since::Snapshot(_, generation) if generation != 0);
    conditions.push(Condition::AtLeast(REFILLED_AT.to_owned(), Value::number(rf.as_millis())));
    for movement in movements {
        let tokens = movement.attribute("tk");
        let least = movement.least_needed(movement.credited);
        conditions
            .extend(least.map(|least| Condition::AtLeast(tokens.clone(), Value::number(least))));
        if !movement.is_touched() {
            continue;
        }
        let net = movement.net();
        actions.push(Action::Add(tokens.clone(), Value::number(net.saturating_neg())));
        actions.push(Action::Add(movement.attribute("tc"), Value::number(net)));
        if !is_ours {
            movement.pin_rate(&mut conditions);
        }
        let gain = movement.gain();
        let highest = Value::number(movement.highest_below_ceiling(gain));
        conditions.push(Condition::AtMost(tokens, highest));
    }
    if actions.is_empty() {
        return None;
    }
    if let Since::Snapshot(_, generation) = since {
        conditions.push(pin_generation(generation));
    }
    if counts_writes {
        actions.push(Action::Add(attribute(WCU, "tk"), Value::number(-ONE_WRITE)));
        actions.push(Action::Add(attribute(WCU, "tc"), Value::number(ONE_WRITE)));
    }
    if !is_ours {
        conditions.push(same_shard_count(shard_count));
        if counts_writes {
            conditions.push(Condition::Exists(attribute(WCU, "tk")));
        }
    }
    conditions.push(alive.condition());
    expiry.push(&mut actions);
    Some(Update { key: key.item_key(), actions, conditions })
}

fn pin_generation(generation: i64) -> Condition {
    match generation {
        0 => Condition::Absent(GENERATION.to_owned()),
        _ => Condition::Equal(GENERATION.to_owned(), Value::number(generation)),
    }
}

/// Older snapshots fail their condition from then on.
fn next_generation(snapshot: &BucketItem, now: Timestamp) -> Action {
    match snapshot.generation {
        0 => first_generation(now),
        _ => Action::Add(GENERATION.to_owned(), Value::number(1)),
    }
}

fn first_generation(now: Timestamp) -> Action {
    Action::Set(GENERATION.to_owned(), Value::number(now.as_millis().max(1)))
}

/// Pins a snapshot's refill time, limits and remainders.
fn pin_snapshot(snapshot: &BucketItem, conditions: &mut Vec<Condition>) {
    let refilled_at = REFILLED_AT.to_owned();
    conditions.push(match snapshot.is_remnant {
        true => Condition::Absent(refilled_at),
        false => {
            let before = snapshot.bucket.refilled_at().as_millis();
            Condition::Equal(refilled_at, Value::number(before))
        }
    });
    conditions.push(pin_generation(snapshot.generation));
}

/// Pins all rates and balances of a snapshot.
fn pin_balances(snapshot: &BucketItem, conditions: &mut Vec<Condition>) {
    for name in snapshot.whole.names() {
        pin_balance(snapshot, name, conditions);
    }
}

/// Pins the rate and the balance of one limit. A balance above the ceiling counts as full.
fn pin_balance(snapshot: &BucketItem, name: &LimitName, conditions: &mut Vec<Condition>) {
    let Some(at) = snapshot.whole.position(name.as_str()) else { return };
    let (cell, rate) = (snapshot.bucket.cells()[at], snapshot.bucket.limits().rates()[at]);
    let (name, tokens) = (name.as_str(), Value::number(cell.tokens.get()));
    pin_rate(name, &snapshot.whole.rates()[at], conditions);
    conditions.push(match cell.tokens >= rate.capacity() {
        true => Condition::AtLeast(attribute(name, "tk"), tokens),
        false => Condition::Equal(attribute(name, "tk"), tokens),
    });
}

/// Moves the refill time of an item to `now`, takes and refunds. `movements` names every limit of the
/// item, with what it has earned until then.
pub fn refill(
    key: &BucketItemKey,
    snapshot: &BucketItem,
    movements: &[Movement],
    expiry: Expiry,
    alive: Alive,
    now: Timestamp,
) -> Update {
    let (mut actions, mut conditions) = (Vec::new(), Vec::new());
    let before = snapshot.bucket.refilled_at();
    let after = before.max(now);
    pin_snapshot(snapshot, &mut conditions);
    let mut drops_remainder = false;
    actions.push(Action::Set(REFILLED_AT.to_owned(), Value::number(after.as_millis())));
    let fills_up = |movement: &Movement| {
        let cell = snapshot.bucket.cell(movement.limit.as_str()).map(|(cell, _)| *cell);
        let gain = movement.gain();
        cell.unwrap_or_default().tokens.get() > movement.highest_below_ceiling(gain)
    };
    // Remainders have attributes only while one of them is not 0.
    let has_remainders = snapshot.has_remainders
        || movements.iter().any(|movement| movement.remainder != 0 && !fills_up(movement));
    if has_remainders {
        actions.push(Action::Set(REMAINDERS_AT.to_owned(), Value::number(after.as_millis())));
    }
    for movement in movements {
        if snapshot.generation == 0 {
            movement.pin_rate(&mut conditions);
        }
        let tokens = movement.attribute("tk");
        let gain = movement.gain();
        let fills_up = fills_up(movement);
        let cell = snapshot.bucket.cell(movement.limit.as_str());
        drops_remainder |= fills_up && cell.is_some_and(|(cell, _)| cell.remainder != 0);
        if fills_up {
            // The exact balance does not matter as long as it reaches the ceiling.
            let capacity = movement.rate.capacity().get();
            let least = capacity.saturating_sub(gain);
            conditions.push(Condition::AtLeast(tokens.clone(), Value::number(least)));
            if movement.must_fit {
                conditions.push(Condition::AtMost(tokens.clone(), Value::number(least)));
            }
            let left = capacity.saturating_sub(movement.taken).saturating_sub(movement.charged);
            actions.push(Action::Set(tokens, Value::number(left)));
        } else {
            let highest = movement.highest_below_ceiling(gain);
            conditions.push(Condition::AtMost(tokens.clone(), Value::number(highest)));
            if let Some(least) = movement.least_needed(gain) {
                conditions.push(Condition::AtLeast(tokens.clone(), Value::number(least)));
            }
            let difference = movement.earned.saturating_sub(movement.net());
            if difference != 0 {
                actions.push(Action::Add(tokens, Value::number(difference)));
            }
        }
        if has_remainders {
            let remainder = if fills_up { 0 } else { movement.remainder };
            push_remainder(&mut actions, &movement.limit, remainder);
        }
        if movement.net() != 0 {
            actions.push(Action::Add(movement.attribute("tc"), Value::number(movement.net())));
        }
    }
    if drops_remainder && after == before {
        actions.push(next_generation(snapshot, after));
    }
    if let Some(writes) = snapshot.wcu {
        count_write(&mut actions, writes, before, after);
    }
    if snapshot.generation == 0 {
        conditions.push(same_shard_count(snapshot.shard_count));
    }
    conditions.push(alive.condition());
    expiry.push(&mut actions);
    Update { key: key.item_key(), actions, conditions }
}

/// Sets a refill time that a wrong clock has written to `now`, which is before it. Balances stay; remainders are dropped.
///
/// Older snapshots fail their conditions afterwards, by the generation: the refill time may come to stand where it
/// stood before.
pub fn rewind(key: &BucketItemKey, snapshot: &BucketItem, now: Timestamp) -> Update {
    let (mut actions, mut conditions) = (Vec::new(), Vec::new());
    pin_snapshot(snapshot, &mut conditions);
    actions.push(Action::Set(REFILLED_AT.to_owned(), Value::number(now.as_millis())));
    if snapshot.has_remainders {
        actions.push(Action::Remove(REMAINDERS_AT.to_owned()));
        snapshot.whole.names().iter().for_each(|limit| push_remainder(&mut actions, limit, 0));
    }
    if snapshot.generation != 0 {
        actions.push(next_generation(snapshot, now));
    }
    if let Some(writes) = snapshot.wcu {
        // It earned nothing either, so this count says nothing.
        count_write(&mut actions, writes.max(WCU_CAPACITY), now, now);
    }
    Update { key: key.item_key(), actions, conditions }
}

/// A remainder of 0 has no attribute, which keeps the item small.
fn push_remainder(actions: &mut Vec<Action>, limit: &LimitName, remainder: u64) {
    let name = attribute(limit.as_str(), "rm");
    actions.push(match i64::try_from(remainder) {
        Ok(0) | Err(_) => Action::Remove(name),
        Ok(remainder) => Action::Set(name, Value::number(remainder)),
    });
}

/// Refills the reserved limit and counts this write. The count is an estimate, so nothing is pinned.
fn count_write(actions: &mut Vec<Action>, writes: i64, before: Timestamp, after: Timestamp) {
    let elapsed = i64::try_from(after.millis_since(before)).unwrap_or(i64::MAX);
    let earned = elapsed.saturating_mul(WCU_CAPACITY / 1_000);
    let left = writes.saturating_add(earned).min(WCU_CAPACITY) - ONE_WRITE;
    actions.push(Action::Set(attribute(WCU, "tk"), Value::number(left)));
    actions.push(Action::Add(attribute(WCU, "tc"), Value::number(ONE_WRITE)));
}

/// The owner's attributes that a bucket's item has a copy of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owner<'a> {
    /// The parent entity, if an acquire also takes from it.
    pub parent: Option<&'a EntityId>,
}

/// An item's state after a write.
#[derive(Clone, Copy, Debug)]
pub struct After<'a> {
    /// The shard's share of the limits, and its balances.
    pub bucket: &'a Bucket,
    /// The limits of the whole bucket, with the same names.
    pub whole: &'a LimitSet,
    /// How many shards the bucket has.
    pub shard_count: u32,
    /// When the stored configuration was read that the limits come from.
    pub limits_at: Option<Timestamp>,
}

/// Creates an item.
pub fn create(key: &BucketItemKey, after: &After<'_>, owner: &Owner<'_>, expiry: Expiry) -> Update {
    let After { bucket, whole, shard_count, limits_at } = *after;
    let mut actions = Vec::new();
    push_limits(&mut actions, bucket, whole);
    push_tokens(&mut actions, bucket);
    push_limits_at(&mut actions, limits_at, None);
    for (name, cell) in bucket.limits().names().iter().zip(bucket.cells()) {
        let consumed = Value::number(cell.consumed.get());
        actions.push(Action::Set(attribute(name.as_str(), "tc"), consumed));
    }
    push_whole_wcu(&mut actions);
    actions.push(Action::Set(attribute(WCU, "tc"), Value::number(ONE_WRITE)));
    actions.push(Action::Set(SHARD_COUNT.to_owned(), Value::number(shard_count.into())));
    actions.push(first_generation(bucket.refilled_at()));
    push_copies(&mut actions, key, owner);
    if let Expiry::At(_) = expiry {
        expiry.push(&mut actions);
    }
    let conditions = vec![Condition::Absent("PK".to_owned())];
    Update { key: key.item_key(), actions, conditions }
}

/// What a [`rewrite`] requires of balances and expiry.
#[derive(Clone, Copy, Debug)]
pub enum Balances<'a> {
    /// Both are as in the snapshot.
    Exact,
    /// The item is alive, and each balance is within bounds in which the write has the same result, so
    /// that other processes may take and refund meanwhile. A balance that a ceiling cuts is pinned
    /// exactly. The movements name the limits that the item keeps, each with the rate of the lowest
    /// ceiling that it passes.
    Within(&'a [Movement], Alive),
}

/// How a balance is written whose exact value is not pinned.
enum Bounded<'a> {
    /// As a difference: no ceiling cuts it.
    Moved(&'a Movement),
    /// As full under its lowest ceiling, whatever it was exactly.
    Full(&'a Movement),
}

impl Balances<'_> {
    /// `None` where the exact balance is pinned.
    fn bounded(&self, snapshot: &BucketItem, limit: &LimitName) -> Option<Bounded<'_>> {
        let Self::Within(movements, _) = self else { return None };
        // Without a generation everything is pinned by itself.
        let mut movements = movements.iter().filter(|_| snapshot.generation != 0);
        let movement = movements.find(|movement| movement.limit == *limit)?;
        let (cell, _) = snapshot.bucket.cell(limit.as_str())?;
        match cell.tokens.get() <= movement.highest_below_ceiling(movement.gain()) {
            true => Some(Bounded::Moved(movement)),
            false if movement.charged == 0 && !movement.must_fit => Some(Bounded::Full(movement)),
            false => None,
        }
    }
}

/// Gives an item other limits, or starts an expired one again. Limits that it no longer has are
/// removed. Net consumption keeps counting.
pub fn rewrite(
    key: &BucketItemKey,
    snapshot: &BucketItem,
    after: &After<'_>,
    owner: &Owner<'_>,
    expiry: Expiry,
    balances: Balances<'_>,
) -> Update {
    let After { bucket, whole, shard_count, limits_at } = *after;
    let (mut actions, mut conditions) = (Vec::new(), Vec::new());
    let before = snapshot.bucket.refilled_at();
    pin_snapshot(snapshot, &mut conditions);
    actions.push(next_generation(snapshot, bucket.refilled_at()));
    conditions.push(match (balances, snapshot.expires_at) {
        (Balances::Within(_, alive), _) => alive.condition(),
        (_, Some(expiry)) => Condition::Equal(TTL.to_owned(), Value::number(ttl_of(expiry))),
        (_, None) => Condition::Absent(TTL.to_owned()),
    });
    conditions.push(same_shard_count(snapshot.shard_count));
    if shard_count != snapshot.shard_count {
        actions.push(Action::Set(SHARD_COUNT.to_owned(), Value::number(shard_count.into())));
    }
    for name in snapshot.whole.names() {
        let is_dropped = bucket.limits().position(name.as_str()).is_none();
        let is_free = matches!(balances, Balances::Within(..)) && snapshot.generation != 0;
        if balances.bounded(snapshot, name).is_none() && !(is_dropped && is_free) {
            pin_balance(snapshot, name, &mut conditions);
        }
        if is_dropped {
            for suffix in ["tk", "cp", "ra", "rp", "tc", "rm", "bx"] {
                actions.push(Action::Remove(attribute(name.as_str(), suffix)));
            }
        }
    }
    push_limits(&mut actions, bucket, whole);
    for (name, cell) in bucket.limits().names().iter().zip(bucket.cells()) {
        let tokens = attribute(name.as_str(), "tk");
        match balances.bounded(snapshot, name) {
            Some(Bounded::Moved(movement)) => {
                let gain = movement.gain();
                let highest = Value::number(movement.highest_below_ceiling(gain));
                conditions.push(Condition::AtMost(tokens.clone(), highest));
                let least = movement.least_needed(gain).map(Value::number);
                conditions.extend(least.map(|least| Condition::AtLeast(tokens.clone(), least)));
                let before =
                    snapshot.bucket.cell(name.as_str()).map_or(0, |(cell, _)| cell.tokens.get());
                let difference = cell.tokens.get().saturating_sub(before);
                actions.push(Action::Add(tokens, Value::number(difference)));
            }
            bounded => {
                if let Some(Bounded::Full(movement)) = bounded {
                    let least = movement.highest_below_ceiling(movement.gain()) + 1;
                    conditions.push(Condition::AtLeast(tokens.clone(), Value::number(least)));
                }
                actions.push(Action::Set(tokens, Value::number(cell.tokens.get())));
            }
        }
    }
    push_limits_at(&mut actions, limits_at, snapshot.limits_at);
    for (name, cell) in bucket.limits().names().iter().zip(bucket.cells()) {
        let old = snapshot.bucket.cell(name.as_str()).map_or(0, |(cell, _)| cell.consumed.get());
        let more = cell.consumed.get().saturating_sub(old);
        if more != 0 || snapshot.bucket.cell(name.as_str()).is_none() {
            actions.push(Action::Add(attribute(name.as_str(), "tc"), Value::number(more)));
        }
        actions.push(Action::Remove(attribute(name.as_str(), "bx")));
    }
    match snapshot.wcu {
        Some(writes) => count_write(&mut actions, writes, before, bucket.refilled_at()),
        None => {
            push_whole_wcu(&mut actions);
            actions.push(Action::Set(attribute(WCU, "tc"), Value::number(ONE_WRITE)));
        }
    }
    push_copies(&mut actions, key, owner);
    match expiry {
        Expiry::At(moment) if shard_count > 1 => {
            Expiry::Never.push(&mut actions);
            push_idle(&mut actions, key, moment.millis_since(bucket.refilled_at()));
        }
        Expiry::Never if shard_count > 1 && key.shard == 0 => {
            expiry.push(&mut actions);
            actions.push(Action::Remove(IDLE.to_owned()));
        }
        _ => expiry.push(&mut actions),
    }
    Update { key: key.item_key(), actions, conditions }
}

/// Shards do not expire. The first one stores how long the bucket has to live.
fn push_idle(actions: &mut Vec<Action>, key: &BucketItemKey, lives_ms: u64) {
    if key.shard == 0 {
        let seconds = u32::try_from(lives_ms.div_ceil(1_000)).unwrap_or(u32::MAX);
        actions.push(Action::Set(IDLE.to_owned(), Value::number(seconds.into())));
    }
}

/// Rates, remainders and the refill time they belong to.
fn push_limits(actions: &mut Vec<Action>, bucket: &Bucket, whole: &LimitSet) {
    let refilled_at = bucket.refilled_at().as_millis();
    for name in [REFILLED_AT, REMAINDERS_AT] {
        actions.push(Action::Set(name.to_owned(), Value::number(refilled_at)));
    }
    for ((name, rate), cell) in whole.iter().zip(bucket.cells()) {
        let period = i64::try_from(rate.period_ms()).unwrap_or(i64::MAX);
        for (suffix, value) in
            [("cp", rate.capacity().get()), ("ra", rate.refill_amount().get()), ("rp", period)]
        {
            actions.push(Action::Set(attribute(name.as_str(), suffix), Value::number(value)));
        }
        push_remainder(actions, name, cell.remainder);
    }
}

fn push_tokens(actions: &mut Vec<Action>, bucket: &Bucket) {
    for (name, cell) in bucket.limits().names().iter().zip(bucket.cells()) {
        let tokens = Value::number(cell.tokens.get());
        actions.push(Action::Set(attribute(name.as_str(), "tk"), tokens));
    }
}

fn push_limits_at(
    actions: &mut Vec<Action>,
    limits_at: Option<Timestamp>,
    before: Option<Timestamp>,
) {
    match limits_at {
        Some(at) if before == Some(at) => {}
        Some(at) => {
            actions.push(Action::Set(LIMITS_AT.to_owned(), Value::number(at.as_millis())));
        }
        None if before.is_some() => actions.push(Action::Remove(LIMITS_AT.to_owned())),
        None => {}
    }
}

fn push_whole_wcu(actions: &mut Vec<Action>) {
    let period = i64::try_from(WCU_PERIOD_MS).unwrap_or(i64::MAX);
    for (suffix, value) in [
        ("tk", WCU_CAPACITY - ONE_WRITE),
        ("cp", WCU_CAPACITY),
        ("ra", WCU_CAPACITY),
        ("rp", period),
    ] {
        actions.push(Action::Set(attribute(WCU, suffix), Value::number(value)));
    }
}

/// The copies and index keys that other clients and the indexes read.
fn push_copies(actions: &mut Vec<Action>, key: &BucketItemKey, owner: &Owner<'_>) {
    let BucketKey { namespace, entity, resource } = &key.bucket;
    let shard = key.shard;
    let parent = owner.parent.map_or(Value::Null, |parent| Value::text(parent.as_str()));
    let mut set = |name: &str, value| actions.push(Action::Set(name.to_owned(), value));
    set("entity_id", Value::text(entity.as_str()));
    set("resource", Value::text(resource.as_str()));
    set("cascade", Value::Bool(owner.parent.is_some()));
    set(PARENT, parent);
    set(Index::Resource.pk(), Value::text(crate::resource_partition(namespace, resource)));
    set(Index::Resource.sk(), Value::text(format!("BUCKET#{entity}#{shard}")));
    set(Index::Entity.pk(), Value::text(crate::entity_partition(namespace, entity)));
    set(Index::Entity.sk(), Value::text(format!("BUCKET#{resource}#{shard}")));
    set(Index::Namespace.pk(), Value::text(crate::namespace_partition(namespace)));
    set(Index::Namespace.sk(), Value::text(format!("BUCKET#{entity}#{resource}#{shard}")));
}
