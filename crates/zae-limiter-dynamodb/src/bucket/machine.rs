//! The state machine of one bucket: it owns the snapshots of the bucket's shards and all queued requests. It
//! takes events and returns commands. It never waits, reads a clock or does IO.
//!
//! Each shard has a lane. While a write of a lane is in progress, later requests queue in it and share the next
//! write. The machine keeps a snapshot of each shard from the last answer, so that the next write needs no read,
//! and a refusal needs no call.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use zae_limiter_core::bucket_state::may_rewind;
use zae_limiter_core::{
    Applied, BucketKey, Leg, LimitStatus, Millitokens, Settlement, StoreError, StoreErrorKind,
    Takes, Timestamp,
};
use zae_limiter_schema::{BucketItemKey, SHARD_ZERO, TableErrorKind, TableTime, Updated, bucket};

use super::debt;
use super::decide::{Outcome, Request, Snapshot, blind, decide_batch};
use super::flow::{Flow, FlowKind, Flows, Note, Port};
use super::gather::{self, MOVES_MAX};
use super::lane::{Batch, Lanes};
use super::message::{
    Call, CallResult, Caller, Command, Event, Op, Queued, Reply, Response, Task, decode,
    snapshot_of,
};
use super::reshard::{self, ATTEMPTS_MAX};
use super::shards::origin_of;
use super::snapshots::{Snapshots, amounts};
use super::task;
use super::time::Time;
use crate::error::{CallError, contended};
use crate::options::DynamoOptions;

/// The most requests in one write.
const BATCH_MAX: usize = 1_024;

/// Without group commit: after this many failed attempts of a write the bucket is split, to reduce contention.
const CONTENDED_AFTER: u32 = 3;

/// The most shards that a take tries before all of them are read and gathered from.
const SHARDS_TRIED_MAX: usize = 3;

/// How often a request is rerouted from throttled shards before its caller gets the error. Whether to retry then
/// is up to the caller.
const THROTTLED_MAX: u32 = 4;

/// How often a failed settlement is retried, and the first pause before that. Pauses double up to 1.6 s: half a
/// minute in all.
const SETTLE_TRIES_MAX: u32 = 24;
const SETTLE_PAUSE: Duration = Duration::from_millis(50);

/// The most gathers at the same time. More would only read the same shards.
const GATHERS_MAX: usize = 8;

/// A shard is hot when it has fewer writes left than this.
const WRITES_LEFT_MIN: i64 = 150;

/// How long throttling is ignored after the shard count has changed: DynamoDB throttles by the second.
const PATIENCE_MS: u64 = 1_500;

/// The same for contention.
const CONTENDED_PATIENCE_MS: u64 = 300;

/// What a call is for.
#[derive(Debug)]
enum Pending<C> {
    Batch(Box<Batch<C>>),
    /// The pause of a lane.
    Pause(u32),
    /// A flow, and the versions of the snapshots of the shards that it reads.
    Flow(u64, Vec<(u32, u64)>),
}

/// See the module.
#[derive(Debug)]
pub(crate) struct BucketMachine<C> {
    key: BucketKey,
    options: Arc<DynamoOptions>,
    /// During the current event.
    time: Time,
    /// When this process last rewound each shard.
    rewound: BTreeMap<u32, Timestamp>,
    lanes: Lanes<C>,
    snapshots: Snapshots,
    pending: Vec<(Op, Pending<C>)>,
    flows: Flows<C>,
    /// Requests that wait for the current split, each with its throttled shard.
    parked: Vec<(u32, Queued<C>)>,
    /// Lanes that wait for the current split.
    parked_lanes: Vec<u32>,
    to_gather: VecDeque<Queued<C>>,
    /// Charges for all shards.
    to_charge: VecDeque<(Queued<C>, Settlement)>,
    tasks: VecDeque<(Task, Timestamp, C)>,
    /// The number of the next call or flow.
    next: u64,
    /// How many callers were dropped since the queues were last swept.
    abandoned: usize,
    out: Vec<Command<C>>,
}

impl<C: Caller> BucketMachine<C> {
    /// A machine without snapshots. Its calls are numbered from `next` on.
    pub(crate) fn new(key: BucketKey, options: Arc<DynamoOptions>, next: u64) -> Self {
        Self {
            key,
            snapshots: Snapshots::new(Arc::clone(&options)),
            time: Time::new(TableTime::Never, options.max_clock_skew),
            rewound: BTreeMap::new(),
            options,
            lanes: Lanes::default(),
            pending: Vec::new(),
            flows: Flows::default(),
            parked: Vec::new(),
            parked_lanes: Vec::new(),
            to_gather: VecDeque::new(),
            to_charge: VecDeque::new(),
            tasks: VecDeque::new(),
            next,
            abandoned: 0,
            out: Vec::new(),
        }
    }

    /// Sets the table's time for the next event.
    pub(crate) fn set_time(&mut self, time: Time) {
        self.time = time;
    }

    /// Handles an event and returns the commands that follow.
    pub(crate) fn on(&mut self, event: Event<C>) -> Vec<Command<C>> {
        match event {
            Event::Request(queued) => self.ask(queued),
            Event::Task(task, now, caller) => self.start_task(task, now, caller),
            Event::Answered(op, result) => self.on_result(op, result),
            Event::Abandoned => {
                self.abandoned += 1;
                if self.abandoned > 64 + self.queued() / 8 {
                    self.sweep();
                }
            }
            Event::Deleted => self.snapshots.forget(),
        }
        std::mem::take(&mut self.out)
    }

    /// An empty machine to replace this one. It ignores responses to this one's calls.
    pub(crate) fn anew(&self) -> Self {
        Self::new(self.key.clone(), Arc::clone(&self.options), self.next)
    }

    /// The number of queued requests.
    fn queued(&self) -> usize {
        self.lanes.queued() + self.parked.len() + self.to_gather.len() + self.to_charge.len()
    }

    fn ask(&mut self, mut queued: Queued<C>) {
        queued.now = self.time.corrected(queued.now);
        let queue_max = self.options.queue_max;
        if self.abandoned > 0 && self.queued() >= queue_max {
            self.sweep();
        }
        // A settlement is always queued: its tokens would be lost otherwise.
        if self.queued() >= queue_max && matches!(queued.request, Request::Take(_)) {
            let message =
                format!("{queue_max} callers already wait for this bucket; try again later");
            return self.reply(queued, Err(StoreError::new(StoreErrorKind::Busy, message)));
        }
        self.dispatch(queued);
    }

    /// Removes the requests of callers that were dropped.
    fn sweep(&mut self) {
        self.abandoned = 0;
        self.lanes.sweep();
        self.parked.retain(|(_, one)| !one.is_abandoned());
        self.to_gather.retain(|one| !one.is_abandoned());
    }

    /// Chooses a shard for a request and queues it there.
    fn dispatch(&mut self, queued: Queued<C>) {
        let count = self.snapshots.count();
        let shard = match &queued.request {
            _ if count == 1 => SHARD_ZERO,
            Request::Take(leg) => {
                let (leg, tried) = (leg.clone(), queued.tried.clone());
                self.watch_for_calm(queued.now);
                self.snapshots.choose(&leg, queued.now, &tried)
            }
            // A retired shard was merged into this one.
            Request::Settle(settlement) | Request::SettleRest(settlement) => {
                settlement.placement.get() & (count - 1)
            }
        };
        self.enqueue(shard, queued);
    }

    fn enqueue(&mut self, shard: u32, queued: Queued<C>) {
        if !self.options.group_commit {
            let batch = self.batch(shard, vec![queued]);
            self.advance(batch);
            return;
        }
        let lane = self.lanes.of(shard);
        lane.queue.push_back(queued);
        if !lane.is_busy {
            self.next_batch(shard);
        }
    }

    fn reply(&mut self, mut queued: Queued<C>, reply: Result<Reply, StoreError>) {
        if reply.is_ok()
            && let Some(then) = queued.then.take()
        {
            queued.request = Request::Settle(*then);
            queued.is_begun = true;
            return self.dispatch(queued);
        }
        let reply = match reply {
            Err(error) if queued.is_begun => Err(error.maybe_applied()),
            reply => reply,
        };
        let undo = match (&queued.request, &reply) {
            (Request::Take(leg), Ok(Reply::Taken(taken))) => {
                Some(Box::new(Queued::refund(leg, taken.placement.get(), queued.now)))
            }
            _ => None,
        };
        match (queued.caller, reply) {
            (Some(caller), reply) => self.out.push(Command::Reply { caller, reply, undo }),
            (None, Err(error)) => self.out.push(Command::LostRefund(error)),
            (None, Ok(_)) => {}
        }
    }

    fn item_key(&self, shard: u32) -> BucketItemKey {
        BucketItemKey { bucket: self.key.clone(), shard }
    }

    /// Whether [`statuses_from_snapshots`](Self::statuses_from_snapshots) may refuse a leg.
    pub(crate) fn may_refuse(&self, leg: &Leg, now: Timestamp) -> bool {
        self.lanes.are_idle() && self.snapshots.may_refuse(leg, now)
    }

    /// The statuses of a leg, if the snapshots of all shards are fresh and no request is queued before it.
    pub(crate) fn statuses_from_snapshots(
        &self,
        level: usize,
        leg: &Leg,
        now: Timestamp,
    ) -> Option<Vec<LimitStatus>> {
        self.lanes
            .are_idle()
            .then(|| self.snapshots.statuses_from_snapshots(level, leg, now))
            .flatten()
    }

    /// The statuses of a leg that was admitted, by the last snapshots.
    pub(crate) fn last_statuses(
        &self,
        level: usize,
        leg: &Leg,
        now: Timestamp,
    ) -> Vec<LimitStatus> {
        self.snapshots.last_statuses(level, leg, now)
    }

    fn call(&mut self, pending: Pending<C>, call: Call) {
        let op = Op(self.next);
        self.next += 1;
        self.pending.push((op, pending));
        self.out.push(Command::Call(op, call));
    }

    fn on_result(&mut self, op: Op, result: CallResult) {
        let Some(at) = self.pending.iter().position(|(one, _)| *one == op) else { return };
        match self.pending.swap_remove(at).1 {
            Pending::Batch(batch) => self.on_batch_result(*batch, result),
            Pending::Pause(shard) => self.next_batch(shard),
            Pending::Flow(flow, versions) => {
                self.cache_flow_result(&versions, flow, &result);
                self.resume(flow, Some(result));
            }
        }
    }
}

/// Batches.
impl<C: Caller> BucketMachine<C> {
    /// Starts the next batch of an idle lane.
    fn next_batch(&mut self, shard: u32) {
        loop {
            let lane = self.lanes.of(shard);
            let mut members = Vec::new();
            while members.len() < BATCH_MAX
                && let Some(queued) = lane.queue.pop_front()
            {
                if !queued.is_abandoned() {
                    members.push(queued);
                }
            }
            lane.is_busy = !members.is_empty();
            if members.is_empty() {
                return;
            }
            let batch = self.batch(shard, members);
            if !self.advance(batch) || self.pause(shard) {
                return;
            }
        }
    }

    /// A batch of a lane has ended.
    fn finish_batch(&mut self, shard: u32) {
        if self.options.group_commit && !self.pause(shard) {
            self.next_batch(shard);
        }
    }

    fn pause(&mut self, shard: u32) -> bool {
        let pause = self.snapshots.shard(shard).pause();
        // An empty queue needs no pause.
        let pause = pause.filter(|_| !self.lanes.of(shard).queue.is_empty());
        if let Some(pause) = pause {
            self.call(Pending::Pause(shard), Call::Pause(pause));
        }
        pause.is_some()
    }

    fn batch(&mut self, shard: u32, members: Vec<Queued<C>>) -> Batch<C> {
        let now = members.iter().map(|queued| queued.now).max().unwrap_or_default();
        let trust = self.options.local_refusal;
        let cached = self.snapshots.shard(shard);
        let is_fresh = cached.fresh(now, trust).is_some();
        let snapshot = cached.snapshot().cloned();
        Batch {
            shard,
            now,
            members,
            attempt: 0,
            snapshot,
            is_fresh,
            is_just_seen: false,
            written: Vec::new(),
            left_over: Vec::new(),
            is_rewind: false,
        }
    }

    /// Takes a batch to its next call. True if it has ended.
    fn advance(&mut self, mut batch: Batch<C>) -> bool {
        if batch.attempt == ATTEMPTS_MAX {
            self.fail(batch.members, || contended(ATTEMPTS_MAX));
            return true;
        }
        batch.members.retain(|queued| !queued.is_abandoned());
        // The last response may have brought the table's time.
        batch.now = self.time.corrected(batch.now);
        batch.members.iter_mut().for_each(|one| one.now = self.time.corrected(one.now));
        if batch.attempt == CONTENDED_AFTER && !self.options.group_commit {
            self.split_unless_early(CONTENDED_PATIENCE_MS, batch.now);
        }
        if batch.is_no_shard() {
            return self.redirect_to_owner(batch);
        }
        let Some(call) = self.next_call(&mut batch) else { return true };
        self.call(Pending::Batch(Box::new(batch)), call);
        false
    }

    /// Replies with an error. A settlement that was not applied is retried instead if the table was busy, or if
    /// nobody awaits the reply: its lease is over, and nobody else would retry it.
    fn fail(&mut self, members: Vec<Queued<C>>, error: impl Fn() -> StoreError) {
        for mut queued in members {
            let error = error();
            let is_retried = error.kind() == StoreErrorKind::Busy || queued.caller.is_none();
            if queued.request.settlement().is_none()
                || error.applied() == Applied::Maybe
                || !is_retried
                || queued.tries == SETTLE_TRIES_MAX
            {
                self.reply(queued, Err(error));
                continue;
            }
            let pause = SETTLE_PAUSE * 2_u32.pow(queued.tries.min(5));
            (queued.tries, queued.moves) = (queued.tries + 1, 0);
            self.start(FlowKind::Other, queued.now, async move |port| {
                port.pause(pause).await;
                port.note(Note::Dispatch(queued));
            });
        }
    }

    fn on_batch_result(&mut self, mut batch: Batch<C>, result: CallResult) {
        let shard = batch.shard;
        batch.attempt += 1;
        let (written, left_over) =
            (std::mem::take(&mut batch.written), std::mem::take(&mut batch.left_over));
        if std::mem::take(&mut batch.is_rewind)
            && let Ok(Response::Updated(Updated::Done(..))) = &result
        {
            // One that failed does not count: the bucket would stay frozen.
            self.rewound.insert(shard, batch.now);
            self.out.push(Command::Rewound);
        }
        let seen = match result {
            Ok(Response::Updated(Updated::Done(item, _))) => snapshot_of(Some(item))
                .map(|snapshot| (snapshot, written))
                .map_err(CallError::maybe_applied),
            Ok(Response::Updated(Updated::Unmet(item, _))) => {
                self.snapshots.shard(shard).lost += 1;
                snapshot_of(item).map(|snapshot| (snapshot, Vec::new()))
            }
            Ok(Response::Read(mut items)) => {
                let key = self.item_key(shard);
                decode(&key, items.pop().flatten().as_ref()).map(|snapshot| (snapshot, Vec::new()))
            }
            Ok(_) => unreachable!("a batch asks for updates and reads"),
            Err(error) => Err(error),
        };
        match seen {
            Ok((snapshot, written)) => {
                self.snapshots.shard(shard).set_snapshot(snapshot.clone(), batch.now);
                self.snapshots.update_count(shard, &snapshot, batch.now);
                self.reply_written(&mut batch, &written, left_over, &snapshot);
                self.split_if_hot(shard, &snapshot, batch.now);
                batch.snapshot = Some(snapshot);
                (batch.is_fresh, batch.is_just_seen) = (true, true);
            }
            // A transaction was in progress on the same item: it takes milliseconds.
            Err(error) if error.is(TableErrorKind::Conflict) => {}
            Err(error) if error.is(TableErrorKind::PartitionThrottled) => {
                return self.reroute_throttled(batch, &error);
            }
            Err(error) => {
                self.snapshots.shard(shard).distrust();
                self.fail(batch.members, || error.to_store_error());
                return self.finish_batch(shard);
            }
        }
        if self.advance(batch) {
            self.finish_batch(shard);
        }
    }

    /// The next call of a batch; `None` if every member has a reply or moved elsewhere. Members that the
    /// snapshot decides get their reply here and leave the batch.
    fn next_call(&mut self, batch: &mut Batch<C>) -> Option<Call> {
        if batch.members.is_empty() {
            return None;
        }
        let (key, now) = (self.item_key(batch.shard), batch.now);
        // Nothing is decided by a time that the table has not confirmed.
        let is_awaited = self.time.is_awaited() && !batch.is_just_seen;
        let is_unsure = batch.members.iter().any(|queued| batch.is_unsure_of(&queued.request));
        let Some(snapshot) = batch.snapshot.clone().filter(|_| !is_awaited && !is_unsure) else {
            return Some(self.blind_call(batch));
        };
        if let Snapshot::Item(item) = &snapshot
            && self.time.is_ahead(item)
            && may_rewind(self.rewound.get(&batch.shard).copied(), now)
        {
            batch.is_rewind = true;
            let rewind = bucket::rewind(&key, item, self.time.rewound_to(now));
            return Some(Call::Update(batch.shard, rewind));
        }
        let requests: Vec<&Request> = batch.members.iter().map(|one| &one.request).collect();
        let decision = decide_batch(&key, &snapshot, &requests, now);
        if !batch.is_fresh {
            // A write may rely on an old snapshot, because it pins it. A refusal may not.
            let Some(update) = decision.update else { return Some(self.blind_call(batch)) };
            let is_written = |at: &usize| decision.outcomes[*at] == Outcome::Written;
            batch.written = (0..batch.members.len()).filter(is_written).collect();
            batch.left_over = decision.left_over;
            return Some(Call::Update(batch.shard, update));
        }
        let mut left_over = decision.left_over;
        let members = std::mem::take(&mut batch.members);
        for (at, (queued, outcome)) in members.into_iter().zip(decision.outcomes).enumerate() {
            let rest = left_over.iter_mut().find(|(place, _)| *place == at);
            let rest = rest.map(|(_, takes)| std::mem::take(takes));
            match (outcome, queued.request.settlement()) {
                (Outcome::Written, _) => {
                    batch.left_over.extend(rest.map(|takes| (batch.members.len(), takes)));
                    batch.written.push(batch.members.len());
                    batch.members.push(queued);
                }
                (Outcome::Refused(_), _) if snapshot.is_sharded(now) => {
                    self.try_next_shard(batch.shard, queued);
                }
                (Outcome::Refused(statuses), _) => {
                    self.reply(queued, Ok(Reply::Refused(statuses)));
                }
                (Outcome::Rejected(kind, message), _) => {
                    self.reply(queued, Err(StoreError::new(kind, message)));
                }
                (Outcome::Nothing, Some(settlement)) => match rest {
                    Some(differences) => {
                        let rest = Settlement { differences, ..settlement.clone() };
                        self.settle_elsewhere(queued, rest);
                    }
                    None => self.reply(queued, Ok(Reply::Settled)),
                },
                (Outcome::Nothing, None) => {
                    let taken =
                        self.snapshots.taken(batch.shard, &queued.request, &snapshot, &[], now);
                    self.reply(queued, Ok(Reply::Taken(taken)));
                }
            }
        }
        decision.update.map(|update| Call::Update(batch.shard, update))
    }

    /// The first call without a snapshot: a write whose answer has the item, whether it was applied or not.
    fn blind_call(&self, batch: &mut Batch<C>) -> Call {
        let key = self.item_key(batch.shard);
        if self.time.is_awaited() {
            return Call::Read(vec![key]);
        }
        // One write relies on one set of limits.
        let limits = batch.members.first().map(|one| Arc::clone(one.request.target().limits()));
        let fits = |request: &Request| {
            Some(request.target().limits()) == limits.as_ref() && !request.is_empty()
        };
        let places = (0..batch.members.len()).filter(|at| fits(&batch.members[*at].request));
        batch.written = places.collect();
        batch.left_over.clear();
        let requests: Vec<&Request> =
            batch.written.iter().map(|at| &batch.members[*at].request).collect();
        match blind(&key, self.snapshots.count(), &requests, batch.now) {
            Some(update) => Call::Update(batch.shard, update),
            None => Call::Read(vec![key]),
        }
    }

    /// Replies to the members of a write, and removes them from the batch.
    fn reply_written(
        &mut self,
        batch: &mut Batch<C>,
        written: &[usize],
        mut left_over: Vec<(usize, Takes)>,
        snapshot: &Snapshot,
    ) {
        let mut is_written = vec![false; batch.members.len()];
        written.iter().for_each(|at| is_written[*at] = true);
        let (mut kept, mut replies, mut later) = (Vec::new(), Vec::new(), Vec::new());
        // From the last to the first: what was left after a take is the balance now plus all later takes.
        let members = std::mem::take(&mut batch.members);
        for ((at, mut queued), is_written) in members.into_iter().enumerate().zip(is_written).rev()
        {
            if !is_written {
                kept.push(queued);
                continue;
            }
            let Some(settlement) = queued.request.settlement() else {
                let taken =
                    self.snapshots.taken(batch.shard, &queued.request, snapshot, &later, batch.now);
                later.extend(amounts(&queued.request));
                replies.push((queued, Reply::Taken(taken)));
                continue;
            };
            match left_over.iter_mut().find(|(place, _)| *place == at) {
                Some((_, differences)) => {
                    let differences = std::mem::take(differences);
                    let rest = Settlement { differences, ..settlement.clone() };
                    queued.is_begun = true;
                    self.settle_elsewhere(queued, rest);
                }
                None => replies.push((queued, Reply::Settled)),
            }
        }
        kept.reverse();
        batch.members = kept;
        for (queued, reply) in replies.into_iter().rev() {
            self.reply(queued, Ok(reply));
        }
    }

    /// A shard refused a take: another one may cover it, or all of them together.
    fn try_next_shard(&mut self, shard: u32, mut queued: Queued<C>) {
        queued.tried.push(shard);
        let Request::Take(leg) = &queued.request else { return };
        let next = self.snapshots.next_best(leg, queued.now, &queued.tried);
        match next.filter(|_| queued.tried.len() < SHARDS_TRIED_MAX) {
            Some(shard) => self.enqueue(shard, queued),
            None => self.gather(queued),
        }
    }

    /// The shard is missing or retired: its requests go to the shard that has its share. True if the batch has
    /// ended.
    fn redirect_to_owner(&mut self, batch: Batch<C>) -> bool {
        let (shard, now) = (batch.shard, batch.now);
        if let Some(Snapshot::Item(item)) = &batch.snapshot
            && item.is_retired()
        {
            // It was merged into the shard that it was split from.
            self.redirect(shard, Ok(origin_of(shard)), batch.members, now);
            return true;
        }
        let kind =
            if self.options.group_commit { FlowKind::Restore(shard) } else { FlowKind::Other };
        self.start(kind, now, async move |port| {
            let to = reshard::restore(&port, shard).await;
            port.note(Note::Redirect { from: shard, to, batch: batch.members });
        });
        false
    }

    fn redirect(
        &mut self,
        from: u32,
        to: Result<u32, CallError>,
        members: Vec<Queued<C>>,
        now: Timestamp,
    ) {
        let to = match to {
            Ok(to) => to,
            Err(error) if error.is_transient() => origin_of(from),
            Err(error) => return self.fail(members, || error.to_store_error()),
        };
        self.snapshots.shard(from).forget();
        let map = self.snapshots.map(now);
        if map.current == from {
            map.current = to;
        }
        for mut queued in members {
            queued.moves += 1;
            match queued.moves > MOVES_MAX {
                true => self.fail(vec![queued], || contended(MOVES_MAX)),
                false => self.enqueue(to, queued),
            }
        }
    }

    /// The shard is throttled: the bucket is split further, and takes go to another shard. Settlements are
    /// queued again.
    fn reroute_throttled(&mut self, batch: Batch<C>, error: &CallError) {
        let (shard, now) = (batch.shard, batch.now);
        if self.snapshots.is_busy_all_over(shard, now) {
            self.split_unless_early(PATIENCE_MS, now);
        }
        let waits = self.is_resharding();
        for mut queued in batch.members {
            queued.moves += 1;
            match queued.moves > THROTTLED_MAX {
                true => self.fail(vec![queued], || error.to_store_error()),
                false if waits => self.parked.push((shard, queued)),
                false => self.dispatch_avoiding(shard, queued),
            }
        }
        match waits {
            true if self.options.group_commit => self.parked_lanes.push(shard),
            _ => self.finish_batch(shard),
        }
    }

    fn dispatch_avoiding(&mut self, shard: u32, queued: Queued<C>) {
        match &queued.request {
            Request::Take(leg) if self.snapshots.count() > 1 => {
                let leg = leg.clone();
                let next = self.snapshots.choose(&leg, queued.now, &[shard]);
                self.enqueue(next, queued);
            }
            _ => self.dispatch(queued),
        }
    }

    /// Requests and lanes that waited for a split continue.
    fn unpark(&mut self) {
        let parked = std::mem::take(&mut self.parked);
        for (shard, queued) in parked {
            self.dispatch_avoiding(shard, queued);
        }
        for shard in std::mem::take(&mut self.parked_lanes) {
            self.finish_batch(shard);
        }
    }
}

/// Flows and their notes.
impl<C: Caller> BucketMachine<C> {
    fn start<F>(&mut self, kind: FlowKind, now: Timestamp, work: impl FnOnce(Port<C>) -> F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let id = self.next;
        self.next += 1;
        let now = self.time.corrected(now);
        self.flows.insert(id, kind, Flow::new(self.key.clone(), now, self.time, work));
        self.resume(id, None);
    }

    fn resume(&mut self, id: u64, result: Option<CallResult>) {
        let resumed = self.flows.resume(id, result, self.snapshots.count(), self.time);
        let Some(resumed) = resumed else { return };
        resumed.notes.into_iter().for_each(|note| self.note(note, resumed.now));
        match resumed.next {
            Ok(call) => {
                let asked = match &call {
                    Call::Read(keys) => keys.iter().map(|key| key.shard).collect(),
                    Call::Update(shard, _) => vec![*shard],
                    Call::Transact(_) | Call::Pause(_) => Vec::new(),
                };
                let versions =
                    asked.into_iter().map(|shard| (shard, self.snapshots.shard(shard).version));
                let versions = versions.collect();
                self.call(Pending::Flow(id, versions), call);
            }
            Err(kind) => self.flow_ended(kind),
        }
    }

    fn flow_ended(&mut self, kind: FlowKind) {
        match kind {
            FlowKind::Reshard => {
                self.unpark();
                if !self.is_resharding()
                    && let Some((task, now, caller)) = self.tasks.pop_front()
                {
                    self.start_task(task, now, caller);
                }
            }
            FlowKind::Gather => {
                // A request that snapshots refuse starts no flow: take the next one.
                while self.flows.count(FlowKind::Gather) < GATHERS_MAX
                    && let Some(queued) = self.to_gather.pop_front()
                {
                    self.gather(queued);
                }
            }
            FlowKind::Restore(shard) => self.finish_batch(shard),
            FlowKind::Charge => self.charge_all_shards(),
            FlowKind::Other => {}
        }
    }

    fn note(&mut self, note: Note<C>, now: Timestamp) {
        match note {
            Note::Count(count) => self.snapshots.set_count(count, now),
            Note::Forget(shard) => self.snapshots.shard(shard).forget(),
            Note::Left(item) => self.snapshots.shard(item.shard).replace(*item),
            Note::Writes(writes) => self.snapshots.map(now).set_writes(writes, now),
            Note::Counted(counted) => self.out.push(Command::Count(counted)),
            Note::Unpark => self.unpark(),
            Note::Reply(queued, reply) => self.reply(queued, reply),
            Note::Finish(caller, done) => {
                let reply = done.map(Reply::Done);
                self.out.push(Command::Reply { caller, reply, undo: None });
            }
            Note::Enqueue(shard, queued) => self.enqueue(shard, queued),
            Note::Dispatch(queued) => self.dispatch(queued),
            Note::Redirect { from, to, batch } => self.redirect(from, to, batch, now),
        }
    }

    /// Keeps what a flow has read or written as snapshots, unless they have changed since its call.
    fn cache_flow_result(&mut self, versions: &[(u32, u64)], flow: u64, result: &CallResult) {
        let seen: Vec<Result<Snapshot, CallError>> = match result {
            Ok(Response::Read(items)) => {
                let items = versions.iter().zip(items);
                let decode = |((shard, _), item): (&(u32, u64), &Option<_>)| {
                    decode(&self.item_key(*shard), item.as_ref())
                };
                items.map(decode).collect()
            }
            Ok(Response::Updated(Updated::Done(item, _))) => vec![snapshot_of(Some(item.clone()))],
            Ok(Response::Updated(Updated::Unmet(item, _))) => vec![snapshot_of(item.clone())],
            _ => return,
        };
        let Some(now) = self.flows.now_of(flow) else { return };
        for ((shard, version), snapshot) in versions.iter().zip(seen) {
            let Ok(snapshot) = snapshot else { continue };
            let cached = self.snapshots.shard(*shard);
            if cached.version == *version {
                cached.set_snapshot(snapshot, now);
            }
        }
    }

    fn is_resharding(&self) -> bool {
        self.flows.count(FlowKind::Reshard) > 0
    }

    fn gather(&mut self, queued: Queued<C>) {
        let now = queued.now;
        let Request::Take(leg) = &queued.request else { return };
        // Another gather may have read all shards just now.
        if let Some(statuses) = self.statuses_from_snapshots(0, leg, now)
            && statuses.iter().any(|status| status.exceeded)
        {
            return self.reply(queued, Ok(Reply::Refused(statuses)));
        }
        if self.flows.count(FlowKind::Gather) >= GATHERS_MAX {
            return self.to_gather.push_back(queued);
        }
        self.start(FlowKind::Gather, now, async move |port| gather::gather(&port, queued).await);
    }

    /// Settles on other shards what one shard cannot: refunds beyond its ceiling, or charges that are too large.
    fn settle_elsewhere(&mut self, mut queued: Queued<C>, rest: Settlement) {
        let differences = rest.differences.iter().copied();
        let (charges, refunds): (Takes, Takes) =
            differences.partition(|one| one.amount > Millitokens::ZERO);
        let subset = |differences| Settlement { differences, ..rest.clone() };
        if charges.is_empty() {
            return self.start(FlowKind::Other, queued.now, async move |port| {
                gather::credit_other_shards(&port, queued, rest).await;
            });
        }
        queued.then = (!refunds.is_empty()).then(|| Box::new(subset(refunds)));
        self.to_charge.push_back((queued, subset(charges)));
        self.charge_all_shards();
    }

    /// Starts the next charge of all shards, unless one is running. Charges under the same limits are combined.
    fn charge_all_shards(&mut self) {
        if self.flows.count(FlowKind::Charge) > 0 {
            return;
        }
        let Some((_, first)) = self.to_charge.front() else { return };
        let limits = Arc::clone(first.target.limits());
        let is_alike = |(_, one): &(Queued<C>, Settlement)| *one.target.limits() == limits;
        let queued = std::mem::take(&mut self.to_charge);
        let (batch, later): (Vec<_>, Vec<_>) = queued.into_iter().partition(is_alike);
        self.to_charge = later.into();
        let now = batch.iter().map(|(queued, _)| queued.now).max().unwrap_or_default();
        self.start(FlowKind::Charge, now, async move |port| {
            debt::charge_all_shards(&port, batch).await;
        });
    }

    fn start_task(&mut self, task: Task, now: Timestamp, caller: C) {
        let kind = match task {
            Task::Reconfigure(_) => FlowKind::Other,
            Task::Split | Task::SplitTo(_) | Task::Merge => FlowKind::Reshard,
        };
        if kind == FlowKind::Reshard && self.is_resharding() {
            return self.tasks.push_back((task, now, caller));
        }
        let shards_max = self.options.shards_max;
        self.start(kind, now, async move |port| {
            task::run_task(&port, task, shards_max, caller).await;
        });
    }

    /// Splits the bucket unless its shard count has changed just now.
    fn split_unless_early(&mut self, patience_ms: u64, now: Timestamp) {
        if !self.snapshots.map(now).has_changed_within(patience_ms, now) {
            self.start_split(self.snapshots.count(), now);
        }
    }

    fn start_split(&mut self, from: u32, now: Timestamp) {
        if self.is_resharding() || self.snapshots.count() != from || from >= self.options.shards_max
        {
            return;
        }
        self.start(FlowKind::Reshard, now, async move |port| {
            // After an error, the next hot write tries again.
            if let Ok(true) = reshard::begin_split(&port, from).await {
                let _ = reshard::finish_split(&port, from).await;
            }
        });
    }

    /// Splits the bucket if a write found the shard hot.
    fn split_if_hot(&mut self, shard: u32, snapshot: &Snapshot, now: Timestamp) {
        let Snapshot::Item(item) = snapshot else { return };
        let count = item.shard_count.next_power_of_two();
        // Before it is rewound, it earns no writes either.
        let is_hot = item.writes_left(now) < WRITES_LEFT_MIN
            && item.is_live(now)
            && !self.time.is_ahead(item);
        if is_hot && count < self.options.shards_max && self.snapshots.is_busy_all_over(shard, now)
        {
            self.start_split(count, now);
        }
    }

    /// Every `merge_after`, counts the writes of a bucket with several shards, and merges it if they are few.
    fn watch_for_calm(&mut self, now: Timestamp) {
        if self.is_resharding() {
            return;
        }
        let merge_after = self.options.merge_after;
        let Some(before) = self.snapshots.map(now).recount_due(merge_after, now) else { return };
        self.start(FlowKind::Reshard, now, async move |port| {
            // After an error, it is tried again after `merge_after`.
            let _ = reshard::merge_if_calm(&port, before).await;
        });
    }
}
