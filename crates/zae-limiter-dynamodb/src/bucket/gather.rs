//! Gathering: taking one request from several shards in one transaction. And the opposite: a refund beyond the
//! ceiling of one shard goes to the shard with the most room.

use std::sync::Arc;

use smallvec::SmallVec;
use zae_limiter_core::{
    Bucket, Leg, LegTaken, Millitokens, Placement, Rate, Settlement, StoreError, Take, Takes,
    Timestamp,
};
use zae_limiter_schema::bucket::BucketItem;
use zae_limiter_schema::{BucketItemKey, Change, SHARD_ZERO, Transacted};

use super::debt;
use super::decide::{Request, Snapshot, decide_batch};
use super::flow::{Note, Port};
use super::message::{Caller, Counted, Queued, Reply};
use super::reshard::{read_all, restore};
use super::shards::{self, Shards};
use crate::error::contended;

/// How often all shards are read while other processes split or merge them, one by one.
const GATHERINGS_MAX: u32 = 128;

/// The most times that a request moves to another shard.
pub(crate) const MOVES_MAX: u32 = 128;

/// Takes from as many shards as needed, or refuses if all together have too little.
pub(crate) async fn gather<C: Caller>(port: &Port<C>, mut queued: Queued<C>) {
    let Request::Take(leg) = queued.request.clone() else { return };
    match gathered(port, &leg, &queued).await {
        Ok(Gathered::Reply(reply)) => port.note(Note::Reply(queued, Ok(reply))),
        Ok(Gathered::NoBucket) if queued.moves < MOVES_MAX => {
            queued.moves += 1;
            queued.tried.clear();
            port.note(Note::Enqueue(SHARD_ZERO, queued));
        }
        Ok(Gathered::NoBucket) => port.note(Note::Reply(queued, Err(contended(MOVES_MAX)))),
        Ok(Gathered::Abandoned) => {}
        Err(error) => port.note(Note::Reply(queued, Err(error))),
    }
}

enum Gathered {
    Reply(Reply),
    /// The bucket does not exist: it starts again at its first shard.
    NoBucket,
    Abandoned,
}

async fn gathered<C: Caller>(
    port: &Port<C>,
    leg: &Leg,
    queued: &Queued<C>,
) -> Result<Gathered, StoreError> {
    for _ in 0..GATHERINGS_MAX {
        if queued.is_abandoned() {
            return Ok(Gathered::Abandoned);
        }
        let all = read_all(port).await?;
        let now = port.now();
        let Some((first, _)) = all.iter().next() else { return Ok(Gathered::NoBucket) };
        if !all.is_complete() {
            for shard in all.missing(all.count()) {
                restore(port, shard).await?;
            }
            continue;
        }
        let buckets = all.buckets(leg, now);
        let statuses = shards::statuses(0, leg, &buckets, now);
        if statuses.iter().any(|status| status.exceeded) {
            return Ok(Gathered::Reply(Reply::Refused(statuses)));
        }
        let taken = spread(leg, &buckets);
        let change = |(shard, takes): &(u32, Takes)| {
            let (_, item) = all.iter().find(|(at, _)| at == shard)?;
            change(leg, item, takes, now)
        };
        let Some(changes) = taken.iter().map(change).collect::<Option<Vec<Change>>>() else {
            continue;
        };
        match port.transact(&changes).await {
            Ok(Transacted::Done(_)) => {
                let left = taken.iter().filter_map(|one| left_in(leg, &all, &buckets, one));
                left.for_each(|item| port.note(Note::Left(Box::new(item))));
                port.note(Note::Counted(Counted::Gathered));
                let shard = taken.first().map_or(first, |(shard, _)| *shard);
                let left = statuses.iter().map(|one| one.available.saturating_add(-one.requested));
                let taken = LegTaken { placement: Placement::new(shard), left: left.collect() };
                return Ok(Gathered::Reply(Reply::Taken(taken)));
            }
            Ok(Transacted::Unmet(..)) => {}
            Err(error) if error.is_transient() => {}
            Err(error) => return Err(error.to_store_error()),
        }
    }
    Err(contended(GATHERINGS_MAX))
}

/// A shard after it gave its portion.
fn left_in(
    leg: &Leg,
    all: &Shards,
    buckets: &[(u32, Bucket)],
    (shard, takes): &(u32, Takes),
) -> Option<BucketItem> {
    let (_, item) = all.iter().find(|(at, _)| at == shard)?;
    let (_, bucket) = buckets.iter().find(|(at, _)| at == shard)?;
    Some(shards::charged(item, bucket.clone(), &leg.target, takes))
}

/// Refunds to other shards what a full or indebted shard cannot take. If shards owe tokens, all of them share
/// the refund. Otherwise it goes to the shard with the most room. Without any room, the bucket is full.
pub(crate) async fn credit_other_shards<C: Caller>(
    port: &Port<C>,
    mut queued: Queued<C>,
    rest: Settlement,
) {
    queued.is_begun = true;
    queued.moves += 1;
    let all = match read_all(port).await {
        Ok(all) => all,
        Err(error) => return port.note(Note::Reply(queued, Err(error.to_store_error()))),
    };
    if all.iter().any(|(_, item)| owes(item, &rest, port.now())) {
        match debt::spread(port, &rest).await {
            Ok(true) => return port.note(Note::Reply(queued, Ok(Reply::Settled))),
            Ok(false) => {}
            Err(error) => return port.note(Note::Reply(queued, Err(error.to_store_error()))),
        }
    }
    let roomiest = all.iter().max_by_key(|(_, item)| room(item, &rest, port.now()));
    let roomiest = roomiest.filter(|(_, item)| room(item, &rest, port.now()) > 0);
    queued.request = match roomiest.filter(|_| queued.moves <= MOVES_MAX) {
        Some((shard, _)) => {
            Request::Settle(Settlement { placement: Placement::new(shard), ..rest })
        }
        None => {
            let (last, others) = on_a_holder(&all, rest);
            queued.then = others.map(Box::new);
            Request::SettleRest(last)
        }
    };
    port.note(Note::Dispatch(queued));
}

/// The refunds for one shard that has their limits, and those for other shards. No balance has room for them, but
/// they lower the net consumption. If no shard has a limit, its refund is ignored.
fn on_a_holder(all: &Shards, rest: Settlement) -> (Settlement, Option<Settlement>) {
    let names = rest.target.limits().names();
    let has = |item: &BucketItem, refund: &Take| {
        item.bucket.limits().position(names[refund.cell].as_str()).is_some()
    };
    // The shard that was refunded to comes first.
    let placement = rest.placement.get();
    let mut holders: Vec<(u32, &BucketItem)> = all.iter().collect();
    holders.sort_by_key(|(shard, _)| *shard != placement);
    let held = |refund: &Take| holders.iter().find(|(_, item)| has(item, refund));
    let Some((shard, holder)) = rest.differences.iter().find_map(held) else { return (rest, None) };
    let (own, others): (Takes, Takes) =
        rest.differences.iter().copied().partition(|refund| has(holder, refund));
    let others = (!others.is_empty()).then(|| Settlement { differences: others, ..rest.clone() });
    (Settlement { placement: Placement::new(*shard), differences: own, ..rest }, others)
}

/// How much of a refund fits into a shard.
fn room(item: &BucketItem, rest: &Settlement, now: Timestamp) -> i64 {
    let rooms = held(item, rest, now).into_iter().map(|(tokens, rate, refund)| {
        rate.capacity().get().saturating_sub(tokens).min(refund.saturating_neg())
    });
    rooms.max().unwrap_or(0)
}

/// Whether a shard owes tokens of a refunded limit.
fn owes(item: &BucketItem, rest: &Settlement, now: Timestamp) -> bool {
    held(item, rest, now).into_iter().any(|(tokens, ..)| tokens < 0)
}

/// For each settled limit: the shard's balance, its share of the rate, and the difference.
fn held(item: &BucketItem, rest: &Settlement, now: Timestamp) -> SmallVec<[(i64, Rate, i64); 2]> {
    let mut bucket = item.bucket.clone();
    bucket.refill(now);
    let names = rest.target.limits().names();
    let held = rest.differences.iter().filter_map(|difference| {
        let (cell, rate) = bucket.cell(names[difference.cell].as_str())?;
        Some((cell.tokens.get(), *rate, difference.amount.get()))
    });
    held.collect()
}

/// How much each shard gives: the fullest first, so that few are needed. Together they have enough.
fn spread(leg: &Leg, buckets: &[(u32, Bucket)]) -> Vec<(u32, Takes)> {
    let names = leg.target.limits().names();
    let held = |bucket: &Bucket, take: &Take| {
        let cell = bucket.cell(names[take.cell].as_str());
        cell.map_or(Millitokens::ZERO, |(cell, _)| cell.tokens.max(Millitokens::ZERO))
    };
    let mut by_fullness: Vec<&(u32, Bucket)> = buckets.iter().collect();
    by_fullness.sort_by_key(|(_, bucket)| {
        let scarcest = leg.takes.iter().map(|take| held(bucket, take)).min();
        std::cmp::Reverse(scarcest)
    });
    let mut left: SmallVec<[Take; 2]> = leg.takes.clone();
    let mut taken: Vec<(u32, Takes)> = Vec::new();
    for (shard, bucket) in by_fullness {
        let mut takes = Takes::new();
        for missing in &mut left {
            let amount = missing.amount.min(held(bucket, missing));
            if amount > Millitokens::ZERO {
                takes.push(Take { cell: missing.cell, amount });
                missing.amount = missing.amount.saturating_add(-amount);
            }
        }
        if !takes.is_empty() {
            taken.push((*shard, takes));
        }
    }
    taken
}

/// The write that takes one shard's portion.
fn change(leg: &Leg, item: &BucketItem, takes: &Takes, now: Timestamp) -> Option<Change> {
    let key = BucketItemKey { bucket: leg.target.key().clone(), shard: item.shard };
    let leg = Leg { target: Arc::clone(&leg.target), takes: takes.clone() };
    let snapshot = Snapshot::of(item.clone());
    let decision = decide_batch(&key, &snapshot, &[&Request::Take(leg)], now);
    decision.update.map(Change::Update)
}
