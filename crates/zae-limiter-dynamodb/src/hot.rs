//! Taking and settling: the way of a request through its lane to the table and back.

use std::sync::Arc;
use std::time::Duration;

use smallvec::SmallVec;
use tokio::sync::oneshot;
use zae_limiter_core::{
    Admission, Applied, Bucket, Leg, LegTaken, LimitStatus, Millitokens, Plan, Settlement,
    StoreError, StoreErrorKind, Take, Target, Timestamp, refused_statuses, spawn_in_background,
};
use zae_limiter_schema::bucket::{self, BucketItem, Expiry, Owner};
use zae_limiter_schema::{BucketItemKey, Consistency, Item, SHARD_ZERO, Update, Updated};

use crate::Shared;
use crate::error::Trouble;
use crate::lane::{Lane, Told, Waiting};
use crate::round::{Fate, Request, State, blind, decided};

/// How often a write is tried because others changed the bucket meanwhile.
const ATTEMPTS_MAX: u32 = 16;

/// How many requests go into one write at most.
const GROUP_MAX: usize = 1_024;

type Answering = oneshot::Receiver<Result<Told, StoreError>>;

impl Shared {
    /// Takes all that is asked from all buckets of the chain, or nothing.
    pub(crate) async fn acquire(self: &Arc<Self>, plan: &Plan) -> Result<Admission, StoreError> {
        if let Some(statuses) = self.refused_by_memory(plan) {
            return Ok(Admission::Refused(statuses));
        }
        let asked = |leg: &Leg| LegState::Asked(self.submit(Request::Take(leg.clone()), plan.now));
        let mut legs = Legs { shared: self, plan, states: plan.legs.iter().map(asked).collect() };
        legs.wait().await
    }

    /// The statuses of all limits, if what is known of all buckets is fresh and one of them refuses.
    fn refused_by_memory(&self, plan: &Plan) -> Option<Vec<LimitStatus>> {
        let mut refused = false;
        let mut statuses = Vec::new();
        for (level, leg) in plan.legs.iter().enumerate() {
            let lane = self.lanes.get(leg.target.key());
            let inside = lane.lock();
            // Behind others who wait, the state at this leg's turn is not known yet.
            if inside.busy || !inside.waiting.is_empty() {
                return None;
            }
            let state = inside.fresh(plan.now, self.options.local_refusal)?;
            let seen = statuses_of(level, leg, state, plan.now);
            refused |= seen.iter().any(|status| status.exceeded);
            statuses.extend(seen);
        }
        refused.then_some(statuses)
    }

    /// Applies differences to buckets that were taken from before.
    pub(crate) async fn settle(
        self: &Arc<Self>,
        settlements: &[Settlement],
        now: Timestamp,
    ) -> Result<(), StoreError> {
        let submitted = settlements.iter().filter(|settlement| !settlement.differences.is_empty());
        let answers: Vec<Answering> = submitted
            .map(|settlement| self.submit(Request::Settle(settlement.clone()), now))
            .collect();
        let (mut failed, mut some_done) = (None, false);
        for answer in answers {
            match received(answer.await) {
                Ok(_) => some_done = true,
                Err(error) => {
                    some_done |= error.applied() == Applied::Maybe;
                    failed = failed.or(Some(error));
                }
            }
        }
        match failed {
            None => Ok(()),
            // Whoever tried all of it again would do a part of it twice.
            Some(error) if some_done => Err(error.maybe_applied()),
            Some(error) => Err(error),
        }
    }

    /// Gives back what was taken for somebody who has gone away.
    fn give_back(self: &Arc<Self>, leg: &Leg, now: Timestamp) {
        let request = Request::Settle(credit(leg));
        self.enqueue(Waiting { request, now, answer: None });
    }

    fn submit(self: &Arc<Self>, request: Request, now: Timestamp) -> Answering {
        let (answer, answering) = oneshot::channel();
        self.enqueue(Waiting { request, now, answer: Some(answer) });
        answering
    }

    /// Puts a request into its lane, and somebody to work on it.
    fn enqueue(self: &Arc<Self>, waiting: Waiting) {
        let lane = self.lanes.get(waiting.request.target().key());
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
        }
    }

    /// Carries out a group of requests: with one write, as long as nobody else changes the bucket.
    async fn round(self: &Arc<Self>, lane: &Lane, mut group: Vec<Waiting>) {
        let key = BucketItemKey { bucket: lane.key.clone(), shard: SHARD_ZERO };
        let now = group.iter().map(|waiting| waiting.now).max().unwrap_or_default();
        let mut sight = self.remembered(lane, now);
        for _ in 0..ATTEMPTS_MAX {
            group.retain(|waiting| !waiting.is_abandoned());
            let Some(step) = self.next_step(&key, &sight, &mut group, now) else { return };
            let answer = match step {
                Step::Look => self.look(&key).await.map(|item| (item, Vec::new())),
                Step::Write(update, members) => match self.table.update(&update).await {
                    Ok(Updated::Done(item, consumed)) => {
                        self.meter.count(consumed);
                        Ok((Some(item), members))
                    }
                    Ok(Updated::Unmet(item, consumed)) => {
                        self.meter.count(consumed);
                        Ok((item, Vec::new()))
                    }
                    Err(error) => {
                        self.meter.count_unanswered();
                        Err(Trouble::from(error))
                    }
                },
            };
            let learnt = answer.and_then(|(item, members)| Ok((decode(&key, item)?, members)));
            match learnt {
                Ok((state, members)) => {
                    let known = matches!(state, State::Item(_)).then(|| (state.clone(), now));
                    lane.lock().known = known;
                    self.tell_written(&mut group, &members, &state, now);
                    sight = Sight { state: Some(state), fresh: true, just_seen: true };
                }
                Err(trouble) => {
                    lane.lock().known = None;
                    group.into_iter().for_each(|waiting| drop(waiting.tell(Err(trouble.told()))));
                    return;
                }
            }
        }
        let message = format!("others changed the bucket {ATTEMPTS_MAX} times in a row; try again");
        for waiting in group {
            let _ = waiting.tell(Err(StoreError::new(StoreErrorKind::Unavailable, &*message)));
        }
    }

    fn remembered(&self, lane: &Lane, now: Timestamp) -> Sight {
        let inside = lane.lock();
        let fresh = inside.fresh(now, self.options.local_refusal).is_some();
        let state = inside.known.as_ref().map(|(state, _)| state.clone());
        Sight { state, fresh, just_seen: false }
    }

    /// What to ask the table next; `None` when everybody has an answer. Whoever can be answered by
    /// what is seen is answered here and leaves the group.
    fn next_step(
        self: &Arc<Self>,
        key: &BucketItemKey,
        sight: &Sight,
        group: &mut Vec<Waiting>,
        now: Timestamp,
    ) -> Option<Step> {
        if group.is_empty() {
            return None;
        }
        let Some(state) = &sight.state else { return Some(blind_step(key, group, now)) };
        if group.iter().any(|waiting| sight.is_unsure_of(&waiting.request, now)) {
            return Some(blind_step(key, group, now));
        }
        let requests: Vec<&Request> = group.iter().map(|waiting| &waiting.request).collect();
        let round = decided(key, state, &requests, now);
        let is_written = |fate: &Fate| *fate == Fate::Written;
        if !sight.fresh {
            // Old knowledge is good enough to write by, because the write pins it, but not to
            // refuse by.
            return Some(match round.update {
                Some(update) => Step::Write(update, places(&round.fates, is_written)),
                None => blind_step(key, group, now),
            });
        }
        let mut members = Vec::new();
        let mut kept = Vec::with_capacity(group.len());
        for (waiting, fate) in std::mem::take(group).into_iter().zip(round.fates) {
            if is_written(&fate) {
                members.push(kept.len());
                kept.push(waiting);
            } else {
                let told = told_without_write(&waiting.request, fate, state, now);
                let _ = waiting.tell(told);
            }
        }
        *group = kept;
        round.update.map(|update| Step::Write(update, members))
    }

    /// Reads the item.
    async fn look(&self, key: &BucketItemKey) -> Result<Option<Item>, Trouble> {
        let read = self.table.read(&[key.item_key()], Consistency::Strong).await?;
        self.meter.count(read.consumed);
        Ok(read.items.into_iter().next())
    }

    /// Tells those who were part of a write, and lets them leave the group.
    fn tell_written(
        self: &Arc<Self>,
        group: &mut Vec<Waiting>,
        members: &[usize],
        state: &State,
        now: Timestamp,
    ) {
        if members.is_empty() {
            return;
        }
        let mut later = Vec::new();
        let mut is_member = vec![false; group.len()];
        members.iter().for_each(|at| is_member[*at] = true);
        let (mut kept, mut told) = (Vec::new(), Vec::new());
        // From the last to the first: what was left after one is what is left now and all that was
        // taken after it.
        for (waiting, is_member) in std::mem::take(group).into_iter().zip(is_member).rev() {
            match &waiting.request {
                _ if !is_member => kept.push(waiting),
                Request::Settle(_) => told.push((waiting, Told::Settled)),
                Request::Take(leg) => {
                    let left = left_after(leg, state, &later, now);
                    later.extend(amounts(leg));
                    told.push((waiting, Told::Taken(LegTaken { shard: SHARD_ZERO, left })));
                }
            }
        }
        kept.reverse();
        *group = kept;
        for (waiting, told) in told.into_iter().rev() {
            let leg = match &waiting.request {
                Request::Take(leg) => Some(leg.clone()),
                Request::Settle(_) => None,
            };
            if waiting.tell(Ok(told)).is_err()
                && let Some(leg) = leg
            {
                self.give_back(&leg, now);
            }
        }
    }

    /// Reads buckets.
    pub(crate) async fn peek(
        &self,
        keys: &[zae_limiter_core::BucketKey],
        now: Timestamp,
    ) -> Result<Vec<Option<Bucket>>, StoreError> {
        let keys: Vec<BucketItemKey> = keys
            .iter()
            .map(|bucket| BucketItemKey { bucket: bucket.clone(), shard: SHARD_ZERO })
            .collect();
        let items = self.read_buckets(&keys).await?;
        let alive = |item: BucketItem| (!item.is_expired(now)).then_some(item.bucket);
        Ok(items.into_iter().map(|item| item.and_then(alive)).collect())
    }

    /// Gives an existing bucket exactly the target's limits and lifetime.
    pub(crate) async fn reconfigure(
        &self,
        target: &Target,
        now: Timestamp,
    ) -> Result<(), StoreError> {
        let key = BucketItemKey { bucket: target.key().clone(), shard: SHARD_ZERO };
        let lane = self.lanes.get(target.key());
        let mut found = self.look(&key).await.map_err(|trouble| trouble.told())?;
        for _ in 0..ATTEMPTS_MAX {
            let state = decode(&key, found).map_err(|trouble| trouble.told())?;
            let State::Item(item) = state else { return Ok(()) };
            if item.is_expired(now) {
                return Ok(());
            }
            let mut bucket = item.bucket.clone();
            bucket.replace_limits(target.limits(), now);
            let expiry = target.expiry(&bucket, now).map_or(Expiry::Never, Expiry::At);
            let owner = Owner { parent: target.parent() };
            let update = bucket::rewrite(&key, &item, &bucket, &owner, expiry);
            let updated = self.table.update(&update).await;
            match updated.map_err(|error| Trouble::from(error).told())? {
                Updated::Done(item, consumed) => {
                    self.meter.count(consumed);
                    let state = decode(&key, Some(item)).map_err(|trouble| trouble.told())?;
                    lane.lock().known = Some((state, now));
                    return Ok(());
                }
                Updated::Unmet(item, consumed) => {
                    self.meter.count(consumed);
                    found = item;
                }
            }
        }
        let message = format!("others changed the bucket {ATTEMPTS_MAX} times in a row; try again");
        Err(StoreError::new(StoreErrorKind::Unavailable, message))
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
    /// Whether a settlement finds nothing to settle with, but only by memory: somebody may have
    /// brought it back since, and what it charges must not be lost.
    fn is_unsure_of(&self, request: &Request, now: Timestamp) -> bool {
        let Request::Settle(settlement) = request else { return false };
        let bucket = match &self.state {
            Some(State::Item(item)) if !item.is_expired(now) => Some(&item.bucket),
            _ => None,
        };
        let names = settlement.target.limits().names();
        !self.just_seen
            && settlement.differences.iter().any(|difference| {
                let limit = names[difference.cell].as_str();
                difference.amount != Millitokens::ZERO
                    && bucket.is_none_or(|bucket| bucket.limits().position(limit).is_none())
            })
    }
}

enum Step {
    /// Read the item.
    Look,
    /// Write it, for the members of the group at these places.
    Write(Update, Vec<usize>),
}

/// The first step where nothing is known: a write that tells, whether it happens or not.
fn blind_step(key: &BucketItemKey, group: &[Waiting], now: Timestamp) -> Step {
    // One write can rely on one set of limits.
    let limits = group.first().map(|waiting| waiting.request.target().limits());
    let fits = |waiting: &Waiting| {
        Some(waiting.request.target().limits()) == limits && !waiting.request.is_empty()
    };
    let members: Vec<usize> = (0..group.len()).filter(|at| fits(&group[*at])).collect();
    let requests: Vec<&Request> = members.iter().map(|at| &group[*at].request).collect();
    match blind(key, &requests, now) {
        Some(update) => Step::Write(update, members),
        None => Step::Look,
    }
}

fn places(fates: &[Fate], is: impl Fn(&Fate) -> bool) -> Vec<usize> {
    (0..fates.len()).filter(|at| is(&fates[*at])).collect()
}

fn told_without_write(
    request: &Request,
    fate: Fate,
    state: &State,
    now: Timestamp,
) -> Result<Told, StoreError> {
    match (fate, request) {
        (Fate::Refused(statuses), _) => Ok(Told::Refused(statuses)),
        (Fate::Rejected(kind, message), _) => Err(StoreError::new(kind, message)),
        (_, Request::Settle(_)) => Ok(Told::Settled),
        (_, Request::Take(leg)) => {
            let left = left_after(leg, state, &[], now);
            Ok(Told::Taken(LegTaken { shard: SHARD_ZERO, left }))
        }
    }
}

fn decode(key: &BucketItemKey, item: Option<Item>) -> Result<State, Trouble> {
    match item {
        None => Ok(State::Absent),
        Some(item) => Ok(State::Item(BucketItem::decode(key, &item)?)),
    }
}

/// The bucket as a leg sees it.
fn bucket_for(leg: &Leg, state: &State, now: Timestamp) -> Bucket {
    let mut bucket = match state {
        State::Item(item) if !item.is_expired(now) => item.bucket.clone(),
        _ => Bucket::full(Arc::clone(leg.target.limits()), now),
    };
    bucket.follow(leg.target.limits(), now);
    bucket.refill(now);
    bucket
}

fn statuses_of(level: usize, leg: &Leg, state: &State, now: Timestamp) -> Vec<LimitStatus> {
    refused_statuses(level, leg, &bucket_for(leg, state, now), now).collect()
}

fn left_after(
    leg: &Leg,
    state: &State,
    later: &[(String, Millitokens)],
    now: Timestamp,
) -> SmallVec<[Millitokens; 2]> {
    let bucket = bucket_for(leg, state, now);
    let left = amounts(leg).map(|(limit, _)| {
        let tokens = bucket.cell(&limit).map_or(Millitokens::ZERO, |(cell, _)| cell.tokens);
        let later = later.iter().filter(|(other, _)| *other == limit);
        later.fold(tokens, |tokens, (_, amount)| tokens.saturating_add(*amount))
    });
    left.collect()
}

fn amounts(leg: &Leg) -> impl Iterator<Item = (String, Millitokens)> {
    let names = leg.target.limits().names();
    leg.takes.iter().map(|take| (names[take.cell].to_string(), take.amount))
}

/// What gives a leg's tokens back.
fn credit(leg: &Leg) -> Settlement {
    let differences = leg.takes.iter().map(|take| Take { cell: take.cell, amount: -take.amount });
    Settlement {
        target: Arc::clone(&leg.target),
        shard: SHARD_ZERO,
        differences: differences.collect(),
    }
}

fn received(
    answer: Result<Result<Told, StoreError>, oneshot::error::RecvError>,
) -> Result<Told, StoreError> {
    answer.unwrap_or_else(|_| {
        let message = "the runtime ended before the table answered; keep it until calls are done";
        Err(StoreError::new(StoreErrorKind::Unavailable, message).maybe_applied())
    })
}

/// The legs of an acquire. Dropped before the end, it gives back what was taken.
struct Legs<'a> {
    shared: &'a Arc<Shared>,
    plan: &'a Plan,
    states: SmallVec<[LegState; 1]>,
}

enum LegState {
    Asked(Answering),
    Taken(LegTaken),
    Refused(Vec<LimitStatus>),
    Failed(StoreError),
    /// Nothing more to do for it.
    Done,
}

impl Legs<'_> {
    async fn wait(&mut self) -> Result<Admission, StoreError> {
        for state in &mut self.states {
            if let LegState::Asked(answering) = state {
                *state = match received(answering.await) {
                    Ok(Told::Taken(taken)) => LegState::Taken(taken),
                    Ok(Told::Refused(statuses)) => LegState::Refused(statuses),
                    Ok(Told::Settled) => unreachable!("a take is not settled"),
                    Err(error) => LegState::Failed(error),
                };
            }
        }
        if self.states.iter().all(|state| matches!(state, LegState::Taken(_))) {
            let taken = self.states.drain(..).filter_map(|state| match state {
                LegState::Taken(taken) => Some(taken),
                _ => None,
            });
            return Ok(Admission::Taken(taken.collect()));
        }
        self.undo().await
    }

    /// Gives back what some have taken, because others have not.
    async fn undo(&mut self) -> Result<Admission, StoreError> {
        let legs = self.plan.legs.iter().zip(&mut self.states);
        let credits: Vec<Settlement> = legs
            .filter(|(_, state)| matches!(state, LegState::Taken(_)))
            .map(|(leg, state)| {
                // From here on the settling sees to it, whatever becomes of this future.
                *state = LegState::Done;
                credit(leg)
            })
            .collect();
        let mut some_taken = self.states.iter().any(
            |state| matches!(state, LegState::Failed(error) if error.applied() == Applied::Maybe),
        );
        if let Err(error) = self.shared.settle(&credits, self.plan.now).await {
            tracing::warn!(%error, "could not give back what a refused call had taken");
            some_taken = true;
        }
        let mut statuses = Vec::new();
        for (level, (leg, state)) in self.plan.legs.iter().zip(self.states.drain(..)).enumerate() {
            match state {
                LegState::Failed(error) if some_taken => return Err(error.maybe_applied()),
                LegState::Failed(error) => return Err(error),
                LegState::Refused(refused) => {
                    statuses.extend(refused.into_iter().map(|one| LimitStatus { level, ..one }));
                }
                _ => statuses.extend(self.shared.as_remembered(level, leg, self.plan.now)),
            }
        }
        Ok(Admission::Refused(statuses))
    }
}

impl Shared {
    /// How a leg that passed stands now.
    fn as_remembered(&self, level: usize, leg: &Leg, now: Timestamp) -> Vec<LimitStatus> {
        let lane = self.lanes.get(leg.target.key());
        let inside = lane.lock();
        let state = inside.known.as_ref().map_or(&State::Absent, |(state, _)| state);
        let passed = |status: LimitStatus| LimitStatus {
            // It had what was asked; that somebody else has taken it since is another matter.
            exceeded: false,
            retry_after: Duration::ZERO,
            ..status
        };
        statuses_of(level, leg, state, now).into_iter().map(passed).collect()
    }
}

impl Drop for Legs<'_> {
    fn drop(&mut self) {
        for (leg, state) in self.plan.legs.iter().zip(&mut self.states) {
            let was_taken = match state {
                LegState::Taken(_) => true,
                LegState::Asked(answering) => {
                    // After this the lane sees that nobody waits. Before it, the answer lies here.
                    answering.close();
                    matches!(answering.try_recv(), Ok(Ok(Told::Taken(_))))
                }
                LegState::Refused(_) | LegState::Failed(_) | LegState::Done => false,
            };
            if was_taken {
                self.shared.give_back(leg, self.plan.now);
            }
        }
    }
}

impl Waiting {
    /// Gives the answer; back again when nobody wants it any more.
    fn tell(self, told: Result<Told, StoreError>) -> Result<(), Result<Told, StoreError>> {
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
