//! Taking and settling: what a caller asks, in the parts that its buckets are made of.

use std::sync::Arc;
use std::time::Duration;

use smallvec::SmallVec;
use zae_limiter_core::{
    Admission, Applied, Bucket, BucketKey, Leg, LegTaken, LimitStatus, Plan, Settlement,
    StoreError, Target, Timestamp, refused_statuses,
};
use zae_limiter_schema::bucket::{self, After, BucketItem, Expiry, Owner};
use zae_limiter_schema::{BucketItemKey, SHARD_ZERO, Updated};

use crate::Shared;
use crate::lane::Told;
use crate::parts::{self, Parts};
use crate::round::{Request, State};
use crate::work::{ATTEMPTS_MAX, Answering, bucket_for, contended, credit, decode, received};

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
            let seen = self.statuses_by_memory(level, leg, plan.now)?;
            refused |= seen.iter().any(|status| status.exceeded);
            statuses.extend(seen);
        }
        refused.then_some(statuses)
    }

    fn statuses_by_memory(
        &self,
        level: usize,
        leg: &Leg,
        now: Timestamp,
    ) -> Option<Vec<LimitStatus>> {
        {
            let lane = self.lanes.get(leg.target.key(), SHARD_ZERO);
            let inside = lane.lock();
            // Behind others who wait, the state at this leg's turn is not known yet.
            if inside.busy || !inside.waiting.is_empty() {
                return None;
            }
            let state = inside.fresh(now, self.options.local_refusal)?;
            if !state.is_divided(now) {
                return Some(statuses_of(level, leg, state, now));
            }
        }
        let parts = self.known_parts(leg.target.key(), now)?;
        Some(parts::statuses(level, leg, &parts.buckets(leg, now), now))
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

    /// Reads buckets, each as a whole.
    pub(crate) async fn peek(
        &self,
        keys: &[BucketKey],
        now: Timestamp,
    ) -> Result<Vec<Option<Bucket>>, StoreError> {
        let parts = self.read_all_parts(keys).await?;
        Ok(parts.into_iter().map(|items| Parts::live(items, now).whole(Some(now))).collect())
    }

    /// Reads all parts of buckets, as many as any of them says there are.
    pub(crate) async fn read_all_parts(
        &self,
        keys: &[BucketKey],
    ) -> Result<Vec<Vec<BucketItem>>, StoreError> {
        let mut parts: Vec<Vec<BucketItem>> = vec![Vec::new(); keys.len()];
        let mut read = vec![0; keys.len()];
        loop {
            let (mut missing, mut places) = (Vec::new(), Vec::new());
            for (place, bucket) in keys.iter().enumerate() {
                let counts = parts[place].iter().map(|item| item.shard_count.next_power_of_two());
                let count = counts.max().unwrap_or(1);
                for shard in read[place]..count {
                    missing.push(BucketItemKey { bucket: bucket.clone(), shard });
                    places.push(place);
                }
                read[place] = count;
            }
            if missing.is_empty() {
                return Ok(parts);
            }
            for (place, item) in places.into_iter().zip(self.read_buckets(&missing).await?) {
                parts[place].extend(item);
            }
        }
    }

    /// Gives an existing bucket exactly the target's limits and lifetime, part by part.
    pub(crate) async fn reconfigure(
        &self,
        target: &Target,
        now: Timestamp,
    ) -> Result<(), StoreError> {
        let keys = [target.key().clone()];
        let parts = self.read_all_parts(&keys).await?;
        for item in parts.into_iter().flatten() {
            self.reconfigure_part(target, item, now).await?;
        }
        Ok(())
    }

    async fn reconfigure_part(
        &self,
        target: &Target,
        mut item: BucketItem,
        now: Timestamp,
    ) -> Result<(), StoreError> {
        let key = BucketItemKey { bucket: target.key().clone(), shard: item.shard };
        for _ in 0..ATTEMPTS_MAX {
            if !item.is_live(now) {
                return Ok(());
            }
            let mut bucket = item.bucket.clone();
            bucket.replace_limits(&item.share_of(target.limits()), now);
            let expiry = match target.expiry(&bucket, now) {
                Some(moment) if item.shard_count == 1 => Expiry::At(moment),
                _ => Expiry::Never,
            };
            let owner = Owner { parent: target.parent() };
            let shard_count = item.shard_count;
            let after = After { bucket: &bucket, whole: target.limits(), shard_count };
            let update = bucket::rewrite(&key, &item, &after, &owner, expiry);
            let lane = self.lanes.get(&key.bucket, key.shard);
            let (found, is_done) = match self.update(&update).await {
                Ok(Updated::Done(item, _)) => (Some(item), true),
                Ok(Updated::Unmet(item, _)) => (item, false),
                Err(trouble) if trouble.is_passing() => continue,
                Err(trouble) => return Err(trouble.told()),
            };
            let state = decode(&key, found).map_err(|trouble| trouble.told())?;
            lane.lock().know(Some((state.clone(), now)));
            match state {
                State::Item(found) if !is_done => item = found,
                _ => return Ok(()),
            }
        }
        Err(contended())
    }
}

fn statuses_of(level: usize, leg: &Leg, state: &State, now: Timestamp) -> Vec<LimitStatus> {
    refused_statuses(level, leg, &bucket_for(leg, state, now), now).collect()
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
            .filter_map(|(leg, state)| {
                let LegState::Taken(LegTaken { shard, .. }) = state else { return None };
                let credit = credit(leg, *shard);
                // From here on the settling sees to it, whatever becomes of this future.
                *state = LegState::Done;
                Some(credit)
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
        let bucket = leg.target.key();
        let statuses = if self.count(bucket) > 1 {
            let parts = self.remembered_parts(bucket, now).buckets(leg, now);
            parts::statuses(level, leg, &parts, now)
        } else {
            let lane = self.lanes.get(bucket, SHARD_ZERO);
            let inside = lane.lock();
            let state = inside.known.as_ref().map_or(&State::Absent, |(state, _)| state);
            statuses_of(level, leg, state, now)
        };
        let passed = |status: LimitStatus| LimitStatus {
            // It had what was asked; that somebody else has taken it since is another matter.
            exceeded: false,
            retry_after: Duration::ZERO,
            ..status
        };
        statuses.into_iter().map(passed).collect()
    }
}

impl Drop for Legs<'_> {
    fn drop(&mut self) {
        for (leg, state) in self.plan.legs.iter().zip(&mut self.states) {
            let taken_from = match state {
                LegState::Taken(taken) => Some(taken.shard),
                LegState::Asked(answering) => {
                    // After this the lane sees that nobody waits. Before it, the answer lies here.
                    answering.close();
                    match answering.try_recv() {
                        Ok(Ok(Told::Taken(taken))) => Some(taken.shard),
                        _ => None,
                    }
                }
                LegState::Refused(_) | LegState::Failed(_) | LegState::Done => None,
            };
            if let Some(shard) = taken_from {
                self.shared.give_back(leg, shard, self.plan.now);
            }
        }
    }
}
