//! The work of a lane: one write to one part of a bucket after the other, each for all who wait.

use std::sync::Arc;

use smallvec::SmallVec;
use tokio::sync::oneshot;
use zae_limiter_core::{
    Applied, Bucket, Leg, LegTaken, Millitokens, Settlement, StoreError, StoreErrorKind, Take,
    Timestamp, spawn_in_background,
};
use zae_limiter_schema::bucket::BucketItem;
use zae_limiter_schema::{
    BucketItemKey, Consistency, Item, SHARD_ZERO, TableErrorKind, Update, Updated,
};

use crate::Shared;
use crate::error::Trouble;
use crate::lane::{Lane, Told, Waiting};
use crate::parts::{held_for, origin};
use crate::round::{Fate, Request, State, blind, decided};

/// How often a write is tried because others changed the bucket meanwhile.
pub(crate) const ATTEMPTS_MAX: u32 = 16;

/// Without group commit: how often others may be first before the bucket is divided, so that fewer
/// are in each other's way.
const CONTENDED_AFTER: u32 = 3;

/// How many requests go into one write at most.
const GROUP_MAX: usize = 1_024;

/// How many parts a take asks before all of them are looked at together.
const PARTS_TRIED_MAX: usize = 3;

/// How often a request is sent on because a part is gone or too full.
pub(crate) const MOVES_MAX: u32 = 128;

/// How often a request is turned away by busy parts before its caller is told: whether and when it
/// is worth another try is the caller's business.
const THROTTLED_MAX: u32 = 4;

pub(crate) type Answering = oneshot::Receiver<Result<Told, StoreError>>;

impl Shared {
    /// Asks for something, of the part that seems right.
    pub(crate) fn submit(self: &Arc<Self>, request: Request, now: Timestamp) -> Answering {
        let (answer, answering) = oneshot::channel();
        self.dispatch(Waiting::new(request, now, Some(answer)));
        answering
    }

    /// Asks one part.
    pub(crate) async fn submit_to(
        self: &Arc<Self>,
        shard: u32,
        request: Request,
        now: Timestamp,
    ) -> Result<Told, StoreError> {
        let (answer, answering) = oneshot::channel();
        self.enqueue(shard, Waiting::new(request, now, Some(answer)));
        received(answering.await)
    }

    /// Gives back what was taken for somebody who has gone away.
    pub(crate) fn give_back(self: &Arc<Self>, leg: &Leg, shard: u32, now: Timestamp) {
        self.dispatch(Waiting::new(Request::Settle(credit(leg, shard)), now, None));
    }

    /// Puts a request into the lane of the part that seems right.
    pub(crate) fn dispatch(self: &Arc<Self>, waiting: Waiting) {
        let count = self.count(waiting.request.target().key());
        let shard = match &waiting.request {
            _ if count == 1 => SHARD_ZERO,
            Request::Take(leg) => {
                self.watch_for_calm(leg, waiting.now);
                self.choose(leg, waiting.now, &waiting.tried)
            }
            // A part that is gone was put together with this one.
            Request::Settle(settlement) | Request::SettleRest(settlement) => {
                settlement.shard & (count - 1)
            }
        };
        self.enqueue(shard, waiting);
    }

    /// Puts a request into a part's lane, and somebody to work on it.
    pub(crate) fn enqueue(self: &Arc<Self>, shard: u32, waiting: Waiting) {
        let lane = self.lanes.get(waiting.request.target().key(), shard);
        let shared = Arc::clone(self);
        if !self.options.group_commit {
            spawn_in_background(async move { shared.round(&lane, vec![waiting]).await });
            return;
        }
        {
            let mut inside = lane.lock();
            inside.waiting.push_back(waiting);
            if std::mem::replace(&mut inside.busy, true) {
                return;
            }
        }
        spawn_in_background(async move { shared.work(&lane).await });
    }

    /// Works on a lane until nobody waits in it.
    async fn work(self: &Arc<Self>, lane: &Lane) {
        loop {
            let group: Vec<Waiting> = {
                let mut inside = lane.lock();
                let count = inside.waiting.len().min(GROUP_MAX);
                if count == 0 {
                    inside.busy = false;
                    return;
                }
                inside.waiting.drain(..count).collect()
            };
            self.round(lane, group).await;
            let pause = lane.lock().pause();
            if let Some(pause) = pause {
                self.table.pause(pause).await;
            }
        }
    }

    /// Carries out a group of requests: with one write, as long as nobody else changes the part.
    async fn round(self: &Arc<Self>, lane: &Lane, mut group: Vec<Waiting>) {
        let now = group.iter().map(|waiting| waiting.now).max().unwrap_or_default();
        let mut sight = self.remembered(lane, now);
        for attempt in 0..ATTEMPTS_MAX {
            group.retain(|waiting| !waiting.is_abandoned());
            if attempt == CONTENDED_AFTER && !self.options.group_commit {
                self.divide_contended(lane, now).await;
            }
            if sight.is_no_part(lane, now) {
                return self.send_on(lane, &sight, group, now).await;
            }
            let Some(step) = self.next_step(lane, &sight, &mut group, now) else { return };
            let answer = match step {
                Step::Look => self.look(&lane.key).await.map(|item| (item, Written::default())),
                Step::Write(update, written) => match self.update(&update).await {
                    Ok(Updated::Done(item, _)) => Ok((Some(item), written)),
                    Ok(Updated::Unmet(item, _)) => {
                        lane.lock().lost += 1;
                        Ok((item, Written::default()))
                    }
                    Err(trouble) => Err(trouble),
                },
            };
            let learnt = answer.and_then(|(item, written)| Ok((decode(&lane.key, item)?, written)));
            match learnt {
                Ok((state, written)) => {
                    let known = matches!(state, State::Item(_)).then(|| (state.clone(), now));
                    lane.lock().know(known);
                    self.learn(lane, &state, now);
                    self.tell_written(lane, &mut group, written, &state, now);
                    self.divide_if_hot(lane, &state, now);
                    sight = Sight { state: Some(state), fresh: true, just_seen: true };
                }
                // Somebody's transaction was under way on the same item: it takes milliseconds.
                Err(trouble) if trouble.is(TableErrorKind::Conflict) => {}
                Err(trouble) if trouble.is(TableErrorKind::PartitionThrottled) => {
                    return self.elude(lane, group, &trouble, now).await;
                }
                Err(trouble) => {
                    lane.lock().know(None);
                    group.into_iter().for_each(|waiting| drop(waiting.tell(Err(trouble.told()))));
                    return;
                }
            }
        }
        group.into_iter().for_each(|waiting| drop(waiting.tell(Err(contended()))));
    }

    fn remembered(&self, lane: &Lane, now: Timestamp) -> Sight {
        let inside = lane.lock();
        let fresh = inside.fresh(now, self.options.local_refusal).is_some();
        let state = inside.known.as_ref().map(|(state, _)| state.clone());
        Sight { state, fresh, just_seen: false }
    }

    /// What to ask the table next; `None` when everybody has an answer, or was sent on. Whoever can
    /// be answered by what is seen is answered here and leaves the group.
    fn next_step(
        self: &Arc<Self>,
        lane: &Lane,
        sight: &Sight,
        group: &mut Vec<Waiting>,
        now: Timestamp,
    ) -> Option<Step> {
        if group.is_empty() {
            return None;
        }
        let count = || self.count(&lane.key.bucket);
        let Some(state) = &sight.state else {
            return Some(blind_step(&lane.key, count(), group, now));
        };
        if group.iter().any(|waiting| sight.is_unsure_of(&waiting.request, now)) {
            return Some(blind_step(&lane.key, count(), group, now));
        }
        let requests: Vec<&Request> = group.iter().map(|waiting| &waiting.request).collect();
        let round = decided(&lane.key, state, &requests, now);
        let is_written = |fate: &Fate| *fate == Fate::Written;
        if !sight.fresh {
            // Old knowledge is good enough to write by, because the write pins it, but not to
            // refuse by.
            return Some(match round.update {
                Some(update) => {
                    let members = places(&round.fates, is_written);
                    Step::Write(update, Written { members, left_over: round.left_over })
                }
                None => blind_step(&lane.key, count(), group, now),
            });
        }
        let mut written = Written::default();
        let mut left_over = round.left_over;
        let mut kept = Vec::with_capacity(group.len());
        for (at, (waiting, fate)) in std::mem::take(group).into_iter().zip(round.fates).enumerate()
        {
            if is_written(&fate) {
                if let Some((_, takes)) = left_over.iter_mut().find(|(place, _)| *place == at) {
                    written.left_over.push((kept.len(), std::mem::take(takes)));
                }
                written.members.push(kept.len());
                kept.push(waiting);
            } else if matches!(fate, Fate::Refused(_)) && state.is_divided(now) {
                self.try_elsewhere(lane, waiting);
            } else {
                let told = self.told_without_write(lane, &waiting.request, fate, state, now);
                let _ = waiting.tell(told);
            }
        }
        *group = kept;
        round.update.map(|update| Step::Write(update, written))
    }

    /// A part cannot give what is asked: another may, or all of them together.
    fn try_elsewhere(self: &Arc<Self>, lane: &Lane, mut waiting: Waiting) {
        waiting.tried.push(lane.key.shard);
        let Request::Take(leg) = &waiting.request else { return };
        let next = self.next_best(leg, waiting.now, &waiting.tried);
        match next.filter(|_| waiting.tried.len() < PARTS_TRIED_MAX) {
            Some(shard) => self.enqueue(shard, waiting),
            None => spawn_in_background(Arc::clone(self).gather(waiting)),
        }
    }

    /// The part is not there: whoever asked it is sent where its share is now.
    async fn send_on(
        self: &Arc<Self>,
        lane: &Lane,
        sight: &Sight,
        group: Vec<Waiting>,
        now: Timestamp,
    ) {
        let shard = lane.key.shard;
        // Whoever took it over is the one that it was divided from.
        let origin = origin(shard).map_or(SHARD_ZERO, |(origin, _)| origin);
        let next = match &sight.state {
            Some(State::Item(item)) if item.is_retired() => Ok(origin),
            _ => self.restore(lane, now).await,
        };
        let next = match next {
            Ok(next) => next,
            Err(trouble) if trouble.is_passing() => origin,
            Err(trouble) => {
                group.into_iter().for_each(|waiting| drop(waiting.tell(Err(trouble.told()))));
                return;
            }
        };
        lane.lock().know(None);
        self.turn_to(&lane.key.bucket, shard, next, now);
        for mut waiting in group {
            waiting.moves += 1;
            match waiting.moves > MOVES_MAX {
                true => drop(waiting.tell(Err(contended()))),
                false => self.enqueue(next, waiting),
            }
        }
    }

    /// The part takes no more writes in this moment: the bucket is divided further, and whoever
    /// wants tokens asks another part. What is settled waits its turn.
    async fn elude(
        self: &Arc<Self>,
        lane: &Lane,
        group: Vec<Waiting>,
        trouble: &Trouble,
        now: Timestamp,
    ) {
        self.divide_throttled(lane, now).await;
        for mut waiting in group {
            waiting.moves += 1;
            match &waiting.request {
                _ if waiting.moves > THROTTLED_MAX => drop(waiting.tell(Err(trouble.told()))),
                Request::Take(leg) => {
                    let shard = self.choose(leg, waiting.now, &[lane.key.shard]);
                    self.enqueue(shard, waiting);
                }
                Request::Settle(_) | Request::SettleRest(_) => self.dispatch(waiting),
            }
        }
    }

    /// Reads the item.
    pub(crate) async fn look(&self, key: &BucketItemKey) -> Result<Option<Item>, Trouble> {
        let read = self.table.read(&[key.item_key()], Consistency::Strong).await;
        let read = read.inspect_err(|_| self.meter.count_unanswered())?;
        self.meter.count(read.consumed);
        Ok(read.items.into_iter().next())
    }

    /// Tells those who were part of a write, and lets them leave the group.
    fn tell_written(
        self: &Arc<Self>,
        lane: &Lane,
        group: &mut Vec<Waiting>,
        mut written: Written,
        state: &State,
        now: Timestamp,
    ) {
        if written.members.is_empty() {
            return;
        }
        let mut later = Vec::new();
        let mut is_member = vec![false; group.len()];
        written.members.iter().for_each(|at| is_member[*at] = true);
        let (mut kept, mut told) = (Vec::new(), Vec::new());
        // From the last to the first: what was left after one is what is left now and all that was
        // taken after it.
        let places = std::mem::take(group).into_iter().enumerate().zip(is_member);
        for ((at, waiting), is_member) in places.rev() {
            match &waiting.request {
                _ if !is_member => kept.push(waiting),
                Request::Settle(settlement) | Request::SettleRest(settlement) => {
                    let rest = written.left_over.iter_mut().find(|(place, _)| *place == at);
                    match rest.map(|(_, takes)| std::mem::take(takes)) {
                        Some(differences) => {
                            let rest = Settlement { differences, ..settlement.clone() };
                            let shared = Arc::clone(self);
                            spawn_in_background(shared.give_elsewhere(waiting, rest));
                        }
                        None => told.push((waiting, Told::Settled)),
                    }
                }
                Request::Take(leg) => {
                    let left = self.left_after(lane, leg, state, &later, now);
                    later.extend(amounts(leg));
                    told.push((waiting, Told::Taken(LegTaken { shard: lane.key.shard, left })));
                }
            }
        }
        kept.reverse();
        *group = kept;
        for (waiting, told) in told.into_iter().rev() {
            let leg = match &waiting.request {
                Request::Take(leg) => Some(leg.clone()),
                Request::Settle(_) | Request::SettleRest(_) => None,
            };
            if waiting.tell(Ok(told)).is_err()
                && let Some(leg) = leg
            {
                self.give_back(&leg, lane.key.shard, now);
            }
        }
    }

    fn told_without_write(
        &self,
        lane: &Lane,
        request: &Request,
        fate: Fate,
        state: &State,
        now: Timestamp,
    ) -> Result<Told, StoreError> {
        match (fate, request) {
            (Fate::Refused(statuses), _) => Ok(Told::Refused(statuses)),
            (Fate::Rejected(kind, message), _) => Err(StoreError::new(kind, message)),
            (_, Request::Settle(_) | Request::SettleRest(_)) => Ok(Told::Settled),
            (_, Request::Take(leg)) => {
                let left = self.left_after(lane, leg, state, &[], now);
                Ok(Told::Taken(LegTaken { shard: lane.key.shard, left }))
            }
        }
    }

    /// What is left in the bucket, and not only in a part of it.
    fn left_after(
        &self,
        lane: &Lane,
        leg: &Leg,
        state: &State,
        later: &[(String, Millitokens)],
        now: Timestamp,
    ) -> SmallVec<[Millitokens; 2]> {
        let mut buckets = vec![bucket_for(leg, state, now)];
        if state.is_divided(now) {
            let others = self.remembered_parts(&lane.key.bucket, now).buckets(leg, now);
            let others = others.into_iter().filter(|(shard, _)| *shard != lane.key.shard);
            buckets.extend(others.map(|(_, bucket)| bucket));
        }
        let left = amounts(leg).map(|(limit, _)| {
            let held = |bucket: &Bucket| bucket.cell(&limit).map(|(cell, _)| cell.tokens);
            let tokens = buckets.iter().filter_map(held);
            let tokens = tokens.fold(Millitokens::ZERO, Millitokens::saturating_add);
            let later = later.iter().filter(|(other, _)| *other == limit);
            later.fold(tokens, |tokens, (_, amount)| tokens.saturating_add(*amount))
        });
        left.collect()
    }
}

/// What a round goes by.
struct Sight {
    state: Option<State>,
    /// Recent enough to refuse by.
    fresh: bool,
    /// Seen in this round, so that what is missing there may be passed over.
    just_seen: bool,
}

impl Sight {
    /// Whether a part other than the first holds no share.
    fn is_no_part(&self, lane: &Lane, now: Timestamp) -> bool {
        match &self.state {
            None => false,
            Some(State::Item(item)) if item.is_live(now) => false,
            Some(_) => lane.key.shard != SHARD_ZERO,
        }
    }

    /// Whether what is given back would be passed over, but only by memory: somebody may have brought
    /// the bucket, or the limit, back since.
    fn is_unsure_of(&self, request: &Request, now: Timestamp) -> bool {
        let Some(settlement) = request.settlement() else { return false };
        let bucket = match &self.state {
            Some(State::Item(item)) if !item.is_expired(now) => Some(&item.bucket),
            _ => None,
        };
        let names = settlement.target.limits().names();
        !self.just_seen
            && settlement.differences.iter().any(|difference| {
                let limit = names[difference.cell].as_str();
                difference.amount < Millitokens::ZERO
                    && bucket.is_none_or(|bucket| bucket.limits().position(limit).is_none())
            })
    }
}

impl State {
    /// Whether it is one of several parts.
    pub(crate) fn is_divided(&self, now: Timestamp) -> bool {
        matches!(self, Self::Item(item) if item.shard_count > 1 && item.is_live(now))
    }
}

enum Step {
    /// Read the item.
    Look,
    /// Write it.
    Write(Update, Written),
}

/// For whom a write is.
#[derive(Default)]
struct Written {
    /// The members of the group at these places.
    members: Vec<usize>,
    /// What some of them must settle elsewhere.
    left_over: Vec<(usize, zae_limiter_core::Takes)>,
}

/// The first step where nothing is known: a write that tells, whether it happens or not.
fn blind_step(key: &BucketItemKey, count: u32, group: &[Waiting], now: Timestamp) -> Step {
    // One write can rely on one set of limits.
    let limits = group.first().map(|waiting| waiting.request.target().limits());
    let fits = |waiting: &Waiting| {
        Some(waiting.request.target().limits()) == limits && !waiting.request.is_empty()
    };
    let members: Vec<usize> = (0..group.len()).filter(|at| fits(&group[*at])).collect();
    let requests: Vec<&Request> = members.iter().map(|at| &group[*at].request).collect();
    match blind(key, count, &requests, now) {
        Some(update) => Step::Write(update, Written { members, left_over: Vec::new() }),
        None => Step::Look,
    }
}

fn places(fates: &[Fate], is: impl Fn(&Fate) -> bool) -> Vec<usize> {
    (0..fates.len()).filter(|at| is(&fates[*at])).collect()
}

pub(crate) fn decode(key: &BucketItemKey, item: Option<Item>) -> Result<State, Trouble> {
    match item {
        None => Ok(State::Absent),
        Some(item) => Ok(State::Item(BucketItem::decode(key, &item)?)),
    }
}

/// The bucket, or its part, as a leg sees it.
pub(crate) fn bucket_for(leg: &Leg, state: &State, now: Timestamp) -> Bucket {
    match state {
        State::Item(item) if !item.is_expired(now) => held_for(leg, item, now),
        _ => Bucket::full(Arc::clone(leg.target.limits()), now),
    }
}

fn amounts(leg: &Leg) -> impl Iterator<Item = (String, Millitokens)> {
    let names = leg.target.limits().names();
    leg.takes.iter().map(|take| (names[take.cell].to_string(), take.amount))
}

/// What gives a leg's tokens back.
pub(crate) fn credit(leg: &Leg, shard: u32) -> Settlement {
    let differences = leg.takes.iter().map(|take| Take { cell: take.cell, amount: -take.amount });
    Settlement { target: Arc::clone(&leg.target), shard, differences: differences.collect() }
}

pub(crate) fn contended() -> StoreError {
    let message = format!("others changed the bucket {ATTEMPTS_MAX} times in a row; try again");
    StoreError::new(StoreErrorKind::Unavailable, message)
}

pub(crate) fn received(
    answer: Result<Result<Told, StoreError>, oneshot::error::RecvError>,
) -> Result<Told, StoreError> {
    answer.unwrap_or_else(|_| {
        let message = "the runtime ended before the table answered; keep it until calls are done";
        Err(StoreError::new(StoreErrorKind::Unavailable, message).maybe_applied())
    })
}

impl Trouble {
    /// Whether it is of this kind, and nothing was done.
    pub(crate) fn is(&self, kind: TableErrorKind) -> bool {
        matches!(self, Self::Table(error) if error.kind == kind && error.applied == Applied::No)
    }
}

impl Waiting {
    /// Gives the answer; back again when nobody wants it any more.
    pub(crate) fn tell(
        self,
        told: Result<Told, StoreError>,
    ) -> Result<(), Result<Told, StoreError>> {
        let told = match told {
            Err(error) if self.is_begun => Err(error.maybe_applied()),
            told => told,
        };
        match self.answer {
            Some(answer) => answer.send(told),
            None => {
                if let Err(error) = &told {
                    tracing::warn!(%error, "could not give back what a cancelled call had taken");
                }
                Ok(())
            }
        }
    }
}
