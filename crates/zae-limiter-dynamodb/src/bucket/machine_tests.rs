//! The machine alone, without a runtime: events, and the commands that follow.

use std::collections::VecDeque;
use std::fmt::Write as _;
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Waker};

use zae_limiter_core::{
    BucketKey, EntityId, Leg, Lifetime, Limit, LimitSet, Millitokens, NamespaceId, Placement,
    ResourceName, Settlement, StoreError, Take, Target, Timestamp,
};
use zae_limiter_schema::{
    Action, BucketItemKey, Condition, Consistency, Table, TableError, TableErrorKind, TableTime,
    Update,
};
use zae_limiter_testkit::SimTable;

use super::decide::Request;
use super::machine::BucketMachine;
use super::message::{Call, Caller, Command, Event, Op, Queued, Reply, Response, Task};
use super::time::Time;
use crate::driver::key_of;
use crate::options::DynamoOptions;

/// A caller, until it is dropped.
#[derive(Clone, Debug)]
struct Who {
    name: &'static str,
    gone: Arc<AtomicBool>,
}

impl Caller for Who {
    fn has_gone(&self) -> bool {
        self.gone.load(Ordering::Relaxed)
    }
}

/// A step of a test.
#[derive(Clone, Debug)]
enum Step {
    /// A caller asks for tokens.
    Asks(&'static str, i64),
    /// A caller settles a difference of tokens with a shard.
    Settles(&'static str, i64, u32),
    /// A caller is dropped.
    Goes(&'static str),
    /// A caller submits a task for the whole bucket.
    Wants(&'static str, Task),
    /// The table answers the call of this number.
    Answers(usize),
    /// The call of this number fails, and nothing was applied.
    Fails(usize, TableErrorKind),
    /// The call of this number exceeds its time limit, and may have been applied.
    TimesOut(usize),
    /// An answer to a call that is not in progress.
    Stray,
    /// The clock advances by milliseconds.
    Later(i64),
}

use Step::{Answers, Asks, Fails, Goes, Later, Settles, Stray, TimesOut, Wants};

/// A machine, and a table that answers its calls when the test says so. Calls are numbered from 0.
struct Process {
    machine: BucketMachine<Who>,
    table: SimTable,
    target: Arc<Target>,
    now: Timestamp,
    calls: Vec<(Op, Call)>,
    callers: Vec<Who>,
}

fn key() -> BucketKey {
    BucketKey {
        namespace: NamespaceId::new("ns000000001").unwrap(),
        entity: EntityId::new("org").unwrap(),
        resource: ResourceName::new("gpt-4").unwrap(),
    }
}

fn options() -> DynamoOptions {
    DynamoOptions::default().seed(1)
}

/// The result of a call on a simulated table without time, which answers at once.
fn at_once<T>(call: impl Future<Output = Result<T, TableError>>) -> T {
    match pin!(call).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(Ok(answer)) => answer,
        Poll::Ready(Err(error)) => panic!("{error}"),
        Poll::Pending => panic!("no time passes here"),
    }
}

/// The kind of a write, and the tokens that it adds to the balance.
fn describe(update: &Update) -> String {
    let conditions = &update.conditions;
    let sets = |name: &str| {
        update.actions.iter().any(|one| matches!(one, Action::Set(set, _) if set == name))
    };
    let pins = |name: &str| {
        conditions.iter().any(|one| matches!(one, Condition::Equal(pinned, _) if pinned == name))
    };
    let kind = match () {
        () if conditions == &[Condition::Absent("PK".to_owned())] => "create",
        () if sets("b_rpm_cp") => "rewrite",
        () if sets("rf") => "refill",
        () if pins("gn") => "add",
        () => "blind add",
    };
    let by = update.actions.iter().find_map(|action| match action {
        Action::Add(name, by) if name == "b_rpm_tk" => by.as_i64(),
        _ => None,
    });
    by.map_or_else(|| kind.to_owned(), |by| format!("{kind} {}", by / 1_000))
}

impl Process {
    fn new(table: &SimTable, options: DynamoOptions) -> Self {
        let limit = Limit::per("rpm", 1, std::time::Duration::from_secs(1_000_000_000)).burst(10);
        let limits = Arc::new(LimitSet::new([limit]).unwrap());
        Self {
            machine: BucketMachine::new(key(), Arc::new(options), 0),
            table: table.clone(),
            target: Arc::new(Target::new(key(), limits, Lifetime::Forever)),
            now: Timestamp::from_millis(1_794_751_200_000),
            calls: Vec::new(),
            callers: Vec::new(),
        }
    }

    fn caller(&mut self, name: &'static str) -> Who {
        let who = Who { name, gone: Arc::default() };
        self.callers.push(who.clone());
        who
    }

    fn amount(tokens: i64) -> smallvec::SmallVec<[Take; 2]> {
        [Take { cell: 0, amount: Millitokens::new(tokens * 1_000) }].into_iter().collect()
    }

    fn event(&mut self, step: &Step) -> Option<Event<Who>> {
        let now = self.now;
        let target = Arc::clone(&self.target);
        let error = |kind| TableError::new(kind, "no answer");
        Some(match step {
            Asks(who, tokens) => {
                let leg = Leg { target, takes: Self::amount(*tokens) };
                Event::Request(Queued::new(Request::Take(leg), now, Some(self.caller(who))))
            }
            Settles(who, tokens, shard) => {
                let differences = Self::amount(*tokens);
                let settlement =
                    Settlement { target, placement: Placement::new(*shard), differences };
                let request = Request::Settle(settlement);
                Event::Request(Queued::new(request, now, Some(self.caller(who))))
            }
            Wants(who, task) => Event::Task(task.clone(), now, self.caller(who)),
            Answers(nth) => {
                let (op, call) = self.calls[*nth].clone();
                Event::Answered(op, Ok(self.answer(call)))
            }
            Fails(nth, kind) => Event::Answered(self.calls[*nth].0, Err(error(*kind).into())),
            TimesOut(nth) => {
                let error = error(TableErrorKind::Unavailable).maybe_applied();
                Event::Answered(self.calls[*nth].0, Err(error.into()))
            }
            Stray => Event::Answered(Op(u64::MAX), Ok(Response::Woke)),
            Goes(who) => {
                let caller = self.callers.iter().find(|one| one.name == *who);
                caller.expect("a caller").gone.store(true, Ordering::Relaxed);
                Event::Abandoned
            }
            Later(millis) => {
                self.now = Timestamp::from_millis(self.now.as_millis() + millis);
                return None;
            }
        })
    }

    fn answer(&self, call: Call) -> Response {
        match call {
            Call::Update(shard, update) => {
                let key = BucketItemKey { bucket: key(), shard };
                Response::Updated(at_once(self.table.update_bucket(&key, update)))
            }
            Call::Transact(changes) => Response::Transacted(at_once(self.table.transact(&changes))),
            Call::Read(keys) => {
                let keys: Vec<_> = keys.iter().map(|key| key.item_key()).collect();
                let read = at_once(self.table.read(&keys, Consistency::Strong));
                let find = |key| read.items.iter().find(|item| key_of(item).as_ref() == Some(key));
                Response::Read(keys.iter().map(|key| find(key).cloned()).collect())
            }
            Call::Pause(_) => Response::Woke,
        }
    }

    /// Handles commands as the driver does, and describes them.
    fn step(&mut self, step: &Step) -> Vec<String> {
        let mut events: VecDeque<Event<Who>> = self.event(step).into_iter().collect();
        let mut lines = Vec::new();
        while let Some(event) = events.pop_front() {
            for command in self.machine.on(event) {
                lines.push(match command {
                    Command::Call(op, call) => {
                        let nth = self.calls.len();
                        let what = match &call {
                            Call::Update(shard, update) => {
                                format!("{} on shard {shard}", describe(update))
                            }
                            Call::Transact(changes) => format!("transact {}", changes.len()),
                            Call::Read(keys) => {
                                let shards: Vec<u32> = keys.iter().map(|key| key.shard).collect();
                                format!("read {shards:?}")
                            }
                            Call::Pause(wait) => format!("pause {wait:?}"),
                        };
                        self.calls.push((op, call));
                        format!("#{nth} {what}")
                    }
                    Command::Reply { caller, reply, undo } => {
                        let mut line = format!("{}: {}", caller.name, describe_reply(&reply));
                        if caller.has_gone() {
                            let undo = *undo.expect("a take has an undo");
                            events.push_back(Event::Request(undo));
                            write!(line, ", undone").unwrap();
                        }
                        line
                    }
                    Command::LostRefund(_) => "a refund is lost".to_owned(),
                    Command::Rewound => "rewound".to_owned(),
                    Command::Count(counted) => format!("counts {counted:?}"),
                });
            }
        }
        lines
    }

    /// Answers all calls until there are no more.
    fn quietly(&mut self, step: &Step) {
        let mut next = self.calls.len();
        self.step(step);
        while next < self.calls.len() {
            self.step(&Answers(next));
            next += 1;
        }
        self.calls.clear();
    }

    #[track_caller]
    fn check(&mut self, steps: &[(Step, &[&str])]) {
        for (step, expected) in steps {
            assert_eq!(self.step(step), *expected, "{step:?}");
        }
    }
}

fn describe_reply(reply: &Result<Reply, StoreError>) -> String {
    match reply {
        Ok(Reply::Taken(taken)) => {
            format!("taken from {}, {} left", taken.placement.get(), taken.left[0].whole_tokens())
        }
        Ok(Reply::Settled) => "settled".to_owned(),
        Ok(Reply::Refused(statuses)) => {
            format!("refused, {} left", statuses[0].available.whole_tokens())
        }
        Ok(Reply::Done(count)) => format!("done, {count:?}"),
        Err(error) => format!("{:?}, applied: {:?}", error.kind(), error.applied()),
    }
}

/// Checks a machine without snapshots, on an empty table.
#[track_caller]
fn check(steps: &[(Step, &[&str])]) {
    Process::new(&SimTable::default(), options()).check(steps);
}

/// The same for a machine that has taken one of ten tokens.
#[track_caller]
fn check_warm(steps: &[(Step, &[&str])]) {
    let mut process = Process::new(&SimTable::default(), options());
    process.quietly(&Asks("first", 1));
    process.check(steps);
}

/// A machine that has split its bucket of ten into two shards of five.
fn sharded(table: &SimTable) -> Process {
    let mut process = Process::new(table, options());
    process.quietly(&Asks("a", 1));
    process.quietly(&Settles("a", -1, 0));
    process.quietly(&Wants("a", Task::SplitTo(2)));
    // With the first take it counts the writes of all shards, to merge them if they are few.
    process.quietly(&Asks("a", 0));
    process
}

#[test]
fn a_write_without_a_snapshot_returns_the_snapshot_of_the_next_one() {
    check(&[
        (Asks("a", 1), &["#0 blind add -1 on shard 0"]),
        (Answers(0), &["#1 create on shard 0"]),
        (Answers(1), &["a: taken from 0, 9 left"]),
        (Asks("b", 2), &["#2 add -2 on shard 0"]),
        (Answers(2), &["b: taken from 0, 7 left"]),
        // By the snapshot, without a call.
        (Asks("c", 8), &["c: refused, 7 left"]),
        // The snapshot is too old to refuse, and no write could succeed: the table is asked.
        (Later(1_000), &[]),
        (Asks("d", 8), &["#3 blind add -8 on shard 0"]),
        (Answers(3), &["d: refused, 7 left"]),
    ]);
}

#[test]
fn a_write_that_fails_its_condition_is_computed_again_from_the_item_it_returns() {
    let table = SimTable::default();
    let mut process = Process::new(&table, options());
    process.quietly(&Asks("a", 1));
    Process::new(&table, options()).quietly(&Asks("other", 6));
    process.check(&[
        (Asks("b", 4), &["#0 add -4 on shard 0"]),
        (Answers(0), &["b: refused, 3 left"]),
        (Asks("c", 3), &["#1 add -3 on shard 0"]),
        (Answers(1), &["c: taken from 0, 0 left"]),
    ]);
}

#[test]
fn requests_during_a_write_share_the_next_batch() {
    check_warm(&[
        (Asks("a", 1), &["#0 add -1 on shard 0"]),
        (Asks("b", 2), &[]),
        (Asks("c", 7), &[]),
        (Asks("d", 3), &[]),
        (Answers(0), &["a: taken from 0, 8 left", "c: refused, 6 left", "#1 add -5 on shard 0"]),
        (Asks("e", 1), &[]),
        (
            Answers(1),
            &["b: taken from 0, 6 left", "d: taken from 0, 3 left", "#2 add -1 on shard 0"],
        ),
        (Answers(2), &["e: taken from 0, 2 left"]),
    ]);
}

#[test]
fn a_throttled_shard_is_split_and_its_requests_continue() {
    check_warm(&[
        (Asks("a", 1), &["#0 add -1 on shard 0"]),
        (Asks("b", 1), &[]),
        (Fails(0, TableErrorKind::PartitionThrottled), &["#1 read [0]"]),
        // Later requests wait, too.
        (Asks("c", 1), &[]),
        (Answers(1), &["#2 transact 2"]),
        (
            Answers(2),
            &["counts Split(2)", "#3 blind add -1 on shard 1", "#4 blind add -2 on shard 0"],
        ),
        (Answers(3), &["#5 add -1 on shard 1"]),
        (Answers(4), &["#6 add -2 on shard 0"]),
        (Answers(5), &["a: taken from 1, 8 left"]),
        (Answers(6), &["b: taken from 0, 7 left", "c: taken from 0, 6 left"]),
    ]);
}

#[test]
fn a_failed_call_replies_to_all_and_leaves_the_lane_usable() {
    let unavailable = TableErrorKind::Unavailable;
    check_warm(&[
        (Asks("a", 1), &["#0 add -1 on shard 0"]),
        (Asks("b", 1), &[]),
        (Asks("c", 1), &[]),
        (Fails(0, unavailable), &["a: Unavailable, applied: No", "#1 blind add -2 on shard 0"]),
        (TimesOut(1), &["b: Unavailable, applied: Maybe", "c: Unavailable, applied: Maybe"]),
        // The late answers are ignored.
        (Answers(0), &[]),
        (Answers(1), &[]),
        (Asks("d", 1), &["#2 blind add -1 on shard 0"]),
        (Answers(2), &["#3 add -1 on shard 0"]),
        (Answers(3), &["d: taken from 0, 7 left"]),
    ]);
}

#[test]
fn a_conflict_with_a_transaction_is_retried() {
    check(&[
        (Asks("a", 1), &["#0 blind add -1 on shard 0"]),
        (Fails(0, TableErrorKind::Conflict), &["#1 blind add -1 on shard 0"]),
        (Answers(1), &["#2 create on shard 0"]),
        (Answers(2), &["a: taken from 0, 9 left"]),
    ]);
}

#[test]
fn a_dropped_caller_is_skipped_or_refunded() {
    check_warm(&[
        (Asks("a", 1), &["#0 add -1 on shard 0"]),
        (Asks("b", 2), &[]),
        (Asks("c", 3), &[]),
        (Goes("a"), &[]),
        (Goes("b"), &[]),
        // Nothing is taken for `b`; the refund of `a` waits its turn.
        (Answers(0), &["a: taken from 0, 8 left, undone", "#1 add -3 on shard 0"]),
        (Answers(1), &["c: taken from 0, 5 left", "#2 add 1 on shard 0"]),
        (Answers(2), &[]),
        (Asks("d", 6), &["#3 add -6 on shard 0"]),
        (Answers(3), &["d: taken from 0, 0 left"]),
    ]);
}

#[test]
fn a_request_to_a_retired_shard_goes_to_the_shard_it_was_merged_into() {
    let table = SimTable::default();
    let mut process = sharded(&table);
    process.quietly(&Settles("a", 2, 1));
    Process::new(&table, options()).quietly(&Wants("other", Task::Merge));
    process.check(&[
        (Settles("b", -1, 1), &["#0 add 1 on shard 1"]),
        // By the snapshot of the first shard, which is out of date.
        (Answers(0), &["#1 refill on shard 0"]),
        (Answers(1), &["#2 add 1 on shard 0"]),
        (Answers(2), &["b: settled"]),
        (Asks("c", 10), &["c: refused, 9 left"]),
    ]);
}

#[test]
fn a_request_that_no_shard_covers_is_gathered_from_all_of_them() {
    let table = SimTable::default();
    let mut process = sharded(&table);
    process.check(&[
        (Asks("b", 8), &["#0 read [0, 1]"]),
        (Answers(0), &["#1 transact 2"]),
        (Answers(1), &["counts Gathered", "b: taken from 0, 2 left"]),
        // Both together have too little: the refusal is about the bucket.
        (Asks("c", 3), &["#2 blind add -3 on shard 0"]),
        (Answers(2), &["#3 blind add -3 on shard 1"]),
        (Answers(3), &["#4 read [0, 1]"]),
        (Answers(4), &["c: refused, 2 left"]),
    ]);
}

#[test]
fn a_full_queue_refuses_until_a_caller_is_dropped() {
    let mut process = Process::new(&SimTable::default(), options().queue_max(2));
    process.quietly(&Asks("first", 1));
    process.check(&[
        (Asks("a", 1), &["#0 add -1 on shard 0"]),
        (Asks("b", 1), &[]),
        (Asks("c", 1), &[]),
        (Asks("d", 1), &["d: Busy, applied: No"]),
        (Goes("b"), &[]),
        (Asks("e", 1), &[]),
        (Answers(0), &["a: taken from 0, 8 left", "#1 add -2 on shard 0"]),
        (Answers(1), &["c: taken from 0, 7 left", "e: taken from 0, 6 left"]),
    ]);
}

#[test]
fn an_answer_to_an_unknown_call_is_ignored() {
    check(&[
        (Stray, &[]),
        (Asks("a", 1), &["#0 blind add -1 on shard 0"]),
        (Stray, &[]),
        (Answers(0), &["#1 create on shard 0"]),
        // A second answer to the same call.
        (Answers(0), &[]),
        (Answers(1), &["a: taken from 0, 9 left"]),
    ]);
}

/// A refused refund would be lost: a refused chain refunds what it took.
#[test]
fn a_settlement_is_queued_even_if_the_queue_is_full() {
    let mut process = Process::new(&SimTable::default(), options().queue_max(1));
    process.quietly(&Asks("first", 5));
    process.check(&[
        (Asks("a", 1), &["#0 add -1 on shard 0"]),
        (Asks("b", 1), &[]),
        (Settles("first", -5, 0), &[]),
        (Answers(0), &["a: taken from 0, 4 left", "#1 add 4 on shard 0"]),
        (Answers(1), &["b: taken from 0, 8 left", "first: settled"]),
    ]);
}

/// A machine that knows the table's time, and an empty bucket that a clock an hour ahead has written.
fn before_a_frozen_bucket() -> Process {
    let table = SimTable::default();
    let mut ahead = Process::new(&table, options());
    ahead.step(&Later(3_600_000));
    ahead.quietly(&Asks("ahead", 10));
    let mut process = Process::new(&table, options());
    let max_skew = DynamoOptions::default().max_clock_skew;
    process.machine.set_time(Time::new(TableTime::At(process.now), max_skew));
    process
}

#[test]
fn a_rewind_that_fails_is_tried_again() {
    before_a_frozen_bucket().check(&[
        (Asks("a", 1), &["#0 blind add -1 on shard 0"]),
        (Answers(0), &["#1 refill on shard 0"]),
        (Fails(1, TableErrorKind::Conflict), &["#2 refill on shard 0"]),
        (Answers(2), &["rewound", "a: refused, 0 left"]),
    ]);
}

#[test]
fn a_rewind_without_an_answer_is_left_to_the_next_call() {
    before_a_frozen_bucket().check(&[
        (Asks("a", 1), &["#0 blind add -1 on shard 0"]),
        (Answers(0), &["#1 refill on shard 0"]),
        (TimesOut(1), &["a: Unavailable, applied: Maybe"]),
        (Asks("b", 1), &["#2 blind add -1 on shard 0"]),
        (Answers(2), &["#3 refill on shard 0"]),
        (Answers(3), &["rewound", "b: refused, 0 left"]),
    ]);
}
