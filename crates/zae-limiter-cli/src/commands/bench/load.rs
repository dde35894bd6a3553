//! The load: concurrent callers, each with one call after the other.

use std::sync::atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use fastrand::Rng;
use tokio::task::JoinSet;
use zae_limiter::store::Cost;
use zae_limiter::{Error, Lease, Limit, RateLimiter, Timestamp};

use crate::context::Context;
use crate::failure::Failure;
use crate::figures::grouped;
use crate::interrupts::Interrupt;

use super::histogram::Histogram;

/// The interval of the progress line.
const TICK: Duration = Duration::from_millis(200);

/// Calls between yields: on a store that answers at once, a caller would never yield by itself.
const YIELD_EVERY: u32 = 32;

/// The parameters of a load.
#[derive(Debug)]
pub(super) struct Load {
    /// One for each simulated process; callers are spread over them.
    pub limiters: Vec<RateLimiter>,
    /// The beginning of the progress line.
    pub title: String,
    pub entities: Vec<String>,
    pub resource: String,
    pub amounts: Vec<(String, u64)>,
    /// Limits of the calls instead of the stored ones.
    pub limits: Option<Vec<Limit>>,
    pub concurrency: usize,
    pub first_calls: FirstCalls,
    pub warm_up: Duration,
    /// The load ends after this time at the latest.
    pub time_max: Duration,
    pub length: Length,
}

impl Load {
    /// The limiter of a caller's process.
    fn limiter_of(&self, caller: usize) -> &RateLimiter {
        &self.limiters[caller % self.limiters.len()]
    }

    /// The amounts of each call, in the notation of `-c`.
    pub(super) fn consume(&self) -> Vec<String> {
        self.amounts.iter().map(|(limit, tokens)| format!("{limit}:{tokens}")).collect()
    }

    /// The number of first calls: every process calls every entity.
    fn first_calls_in_all(&self) -> usize {
        self.limiters.len() * self.entities.len()
    }

    /// The cost of all processes so far, on a store with billed calls.
    fn cost(&self) -> Option<Cost> {
        let costs = self.limiters.iter().map(|limiter| limiter.store().cost());
        costs.reduce(|all, one| {
            let (all, one) = all.zip(one)?;
            Some(Cost {
                round_trips: all.round_trips + one.round_trips,
                write_units: all.write_units + one.write_units,
                read_units: all.read_units + one.read_units,
            })
        })?
    }
}

/// When the first call on every entity happens, which creates its bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FirstCalls {
    /// Before the warm-up, so that the measurement creates no buckets.
    Before,
    /// As part of the load.
    InTheLoad,
}

/// When the measurement ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Length {
    /// After this time.
    Time(Duration),
    /// After this many calls of each caller.
    Calls(u64),
}

/// What was measured.
#[derive(Debug)]
pub(super) struct Measured {
    pub elapsed: Duration,
    pub admitted: u64,
    pub refused: u64,
    pub failed: u64,
    /// The error of the first failed call.
    pub first_failure: Option<Failure>,
    pub latency: Histogram,
    /// Admitted calls of each entity, including the warm-up.
    pub admitted_by_entity: Vec<u64>,
    /// From the first call to the last on the limiter's clock, including the warm-up.
    pub span: (Timestamp, Timestamp),
    pub interrupt: Option<Interrupt>,
    /// The cost without the warm-up, on a store with billed calls.
    pub cost: Option<Cost>,
}

const WARM_UP: u8 = 0;
const MEASURE: u8 = 1;
const STOP: u8 = 2;

/// State that all callers share.
struct Shared {
    load: Load,
    /// The stopwatch at the first call.
    began: Duration,
    phase: AtomicU8,
    /// First calls handed out so far.
    touched: AtomicUsize,
    admitted_by_entity: Vec<AtomicU64>,
    // A std mutex: it is never held across an await.
    first_failure: Mutex<Option<Failure>>,
    /// An error that every call would get, such as an unknown limit.
    wrong_call: Mutex<Option<Failure>>,
}

/// The counts of one caller, read by the progress line meanwhile.
#[derive(Default)]
struct Counts {
    admitted: AtomicU64,
    refused: AtomicU64,
    failed: AtomicU64,
}

impl Counts {
    /// Admitted and refused calls.
    fn answered(&self) -> u64 {
        let counts = [&self.admitted, &self.refused];
        counts.iter().map(|count| count.load(Ordering::Relaxed)).sum()
    }
}

/// Runs the load.
///
/// # Errors
///
/// When every call would fail: an unknown limit, or an amount above the capacity.
pub(super) async fn run(load: Load, context: &mut Context) -> Result<Measured, Failure> {
    let (warm_up, length, concurrency) = (load.warm_up, load.length, load.concurrency);
    let (first_calls, title) = (load.first_calls, load.title.clone());
    let by_entity = load.entities.iter().map(|_| AtomicU64::new(0)).collect();
    let shared = Arc::new(Shared {
        load,
        began: context.clock.stopwatch(),
        phase: AtomicU8::new(if warm_up.is_zero() { MEASURE } else { WARM_UP }),
        touched: AtomicUsize::new(0),
        admitted_by_entity: by_entity,
        first_failure: Mutex::default(),
        wrong_call: Mutex::default(),
    });
    let counts: Vec<Arc<Counts>> = (0..concurrency).map(|_| Arc::default()).collect();
    let (callers, latency) = (JoinSet::new(), Histogram::new());
    let mut supervisor = Supervisor { callers, counts: &counts, latency, title, context };
    let first = supervisor.context.clock.now();
    let mut ending = Ending::Time;
    if first_calls == FirstCalls::Before {
        ending = supervisor.touch_all(&shared).await;
    }
    for (number, counts) in counts.iter().enumerate() {
        supervisor.callers.spawn(call(Arc::clone(&shared), Arc::clone(counts), number));
    }
    if !warm_up.is_zero() && ending == Ending::Time {
        ending = supervisor.supervise(Stage::WarmUp, Some(warm_up)).await;
        shared.phase.store(MEASURE, Ordering::Relaxed);
    }
    let started = supervisor.context.clock.stopwatch();
    let cost_before = shared.load.cost();
    if ending == Ending::Time {
        let time = match length {
            Length::Time(time) => Some(time),
            Length::Calls(_) => None,
        };
        ending = supervisor.supervise(Stage::Measure, time).await;
    }
    shared.phase.store(STOP, Ordering::Relaxed);
    supervisor.join_all().await;
    let elapsed = supervisor.context.clock.stopwatch().saturating_sub(started);
    let cost_after = shared.load.cost();
    let (latency, last) = (supervisor.latency, supervisor.context.clock.now());
    context.printer.wipe_progress();
    if let Some(failure) = take(&shared.wrong_call) {
        return Err(failure);
    }
    let sum = |of: fn(&Counts) -> &AtomicU64| {
        counts.iter().map(|counts| of(counts).load(Ordering::Relaxed)).sum()
    };
    let by_entity = shared.admitted_by_entity.iter();
    Ok(Measured {
        elapsed,
        admitted: sum(|counts| &counts.admitted),
        refused: sum(|counts| &counts.refused),
        failed: sum(|counts| &counts.failed),
        first_failure: take(&shared.first_failure),
        latency,
        admitted_by_entity: by_entity.map(|count| count.load(Ordering::Relaxed)).collect(),
        span: (first, last),
        interrupt: match ending {
            Ending::Interrupt(interrupt) => Some(interrupt),
            Ending::Time | Ending::AllDone => None,
        },
        cost: cost_before.zip(cost_after).map(|(before, after)| Cost {
            round_trips: after.round_trips - before.round_trips,
            write_units: after.write_units - before.write_units,
            read_units: after.read_units - before.read_units,
        }),
    })
}

fn take(failure: &Mutex<Option<Failure>>) -> Option<Failure> {
    failure.lock().unwrap_or_else(PoisonError::into_inner).take()
}

/// Why the supervisor returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ending {
    Time,
    AllDone,
    Interrupt(Interrupt),
}

/// The current stage of the run.
#[derive(Clone, Copy)]
enum Stage<'a> {
    Touch(&'a Shared),
    WarmUp,
    Measure,
}

/// Waits for the callers and shows the progress.
struct Supervisor<'a> {
    callers: JoinSet<Histogram>,
    counts: &'a [Arc<Counts>],
    latency: Histogram,
    title: String,
    context: &'a mut Context,
}

impl Supervisor<'_> {
    /// Makes the first call on every entity. Stops the callers at an interrupt.
    async fn touch_all(&mut self, shared: &Arc<Shared>) -> Ending {
        for _ in 0..shared.load.concurrency.min(shared.load.first_calls_in_all()) {
            self.callers.spawn(touch(Arc::clone(shared)));
        }
        let ending = self.supervise(Stage::Touch(shared), None).await;
        if ending == Ending::AllDone {
            return Ending::Time;
        }
        shared.phase.store(STOP, Ordering::Relaxed);
        self.join_all().await;
        ending
    }

    /// Waits until the time is up, all callers are done, or an interrupt arrives.
    async fn supervise(&mut self, stage: Stage<'_>, time: Option<Duration>) -> Ending {
        let mut interrupts = self.context.interrupts.clone();
        let shows_progress = self.context.printer.shows_progress();
        let pace = Arc::clone(&self.context.pace);
        let began = pace.stopwatch();
        loop {
            let elapsed = pace.stopwatch().saturating_sub(began);
            let left = time.map(|time| time.saturating_sub(elapsed));
            if left == Some(Duration::ZERO) {
                return Ending::Time;
            }
            let wait = match left {
                Some(left) if shows_progress => Some(left.min(TICK)),
                None if shows_progress => Some(TICK),
                left => left,
            };
            tokio::select! {
                biased;
                interrupt = interrupts.next() => return Ending::Interrupt(interrupt),
                joined = self.callers.join_next() => match joined {
                    Some(latency) => self.latency.add(&latency.expect("a caller does not panic")),
                    None => return Ending::AllDone,
                },
                () = async {
                    match wait {
                        Some(wait) => pace.sleep(wait).await,
                        None => std::future::pending().await,
                    }
                } => self.show_progress(stage, pace.stopwatch().saturating_sub(began), time),
            }
        }
    }

    async fn join_all(&mut self) {
        while let Some(latency) = self.callers.join_next().await {
            self.latency.add(&latency.expect("a caller does not panic"));
        }
    }

    fn show_progress(&mut self, stage: Stage<'_>, elapsed: Duration, time: Option<Duration>) {
        let title = &self.title;
        let what = match stage {
            Stage::Touch(shared) => {
                let all = shared.load.first_calls_in_all();
                let touched = shared.touched.load(Ordering::Relaxed).min(all);
                let (touched, all) = (grouped(touched as u64), grouped(all as u64));
                let text = format!("{title}calling every entity once: {touched} of {all}");
                return self.context.printer.progress(text);
            }
            Stage::WarmUp => "warming up",
            Stage::Measure => "measuring",
        };
        let calls: u64 = self.counts.iter().map(|counts| counts.answered()).sum();
        let refused: u64 =
            self.counts.iter().map(|counts| counts.refused.load(Ordering::Relaxed)).sum();
        let of = time.map_or(String::new(), |time| format!(" of {} s", time.as_secs_f64()));
        let millis = elapsed.as_millis().max(1);
        let mut text = format!("{title}{what}: {:.1} s{of}", elapsed.as_secs_f64());
        if calls > 0 {
            let rate = u128::from(calls) * 1_000 / millis;
            let rate = grouped(i128::try_from(rate).unwrap_or(i128::MAX));
            text.push_str(&format!(", {rate} acquires/s, {} refused", grouped(refused)));
        }
        self.context.printer.progress(text);
    }
}

/// A caller before the load. It takes the next entity that its process has not called yet, and
/// refunds the tokens, so that the load starts with full buckets.
async fn touch(shared: Arc<Shared>) -> Histogram {
    while shared.phase.load(Ordering::Relaxed) != STOP && !shared.is_over(shared.now()) {
        let number = shared.touched.fetch_add(1, Ordering::Relaxed);
        if number >= shared.load.first_calls_in_all() {
            break;
        }
        let entities = shared.load.entities.len();
        let limiter = &shared.load.limiters[number / entities];
        match acquire(&shared, limiter, number % entities).await {
            Ok(lease) => {
                if let Err(error) = lease.rollback().await {
                    shared.failed(error);
                }
            }
            Err(Error::Exceeded(_)) => {}
            Err(error) => shared.failed(error),
        }
        tokio::task::yield_now().await;
    }
    Histogram::new()
}

/// A caller of the load.
async fn call(shared: Arc<Shared>, counts: Arc<Counts>, number: usize) -> Histogram {
    let mut latency = Histogram::new();
    let mut rng = Rng::with_seed(number as u64);
    let limiter = shared.load.limiter_of(number);
    let clock = Arc::clone(limiter.clock());
    let mut left = match shared.load.length {
        Length::Calls(calls) => calls,
        Length::Time(_) => u64::MAX,
    };
    for turn in 0_u32.. {
        let phase = shared.phase.load(Ordering::Relaxed);
        if phase == STOP || left == 0 {
            break;
        }
        let entity = rng.usize(..shared.load.entities.len());
        let started = clock.stopwatch();
        if shared.is_over(started) {
            break;
        }
        let outcome = one_call(&shared, limiter, entity).await;
        let took = clock.stopwatch().saturating_sub(started);
        if phase == MEASURE {
            left -= 1;
            let count = match outcome {
                Outcome::Admitted => &counts.admitted,
                Outcome::Refused => &counts.refused,
                Outcome::Failed => &counts.failed,
            };
            count.fetch_add(1, Ordering::Relaxed);
            // The time of a failed call is not a latency.
            if !matches!(outcome, Outcome::Failed) {
                latency.record(took);
            }
        }
        if turn % YIELD_EVERY == 0 {
            tokio::task::yield_now().await;
        }
    }
    latency
}

enum Outcome {
    Admitted,
    Refused,
    Failed,
}

async fn acquire(shared: &Shared, limiter: &RateLimiter, entity: usize) -> Result<Lease, Error> {
    let load = &shared.load;
    let mut acquire = limiter.acquire(&load.entities[entity], &load.resource);
    for (limit, tokens) in &load.amounts {
        acquire = acquire.take(limit, *tokens);
    }
    if let Some(limits) = &load.limits {
        acquire = acquire.limits(limits.iter().cloned());
    }
    acquire.await
}

async fn one_call(shared: &Shared, limiter: &RateLimiter, entity: usize) -> Outcome {
    let result = match acquire(shared, limiter, entity).await {
        // The store was unavailable: nothing was taken.
        Ok(lease) if lease.is_degraded() => return Outcome::Failed,
        Ok(lease) => {
            shared.admitted_by_entity[entity].fetch_add(1, Ordering::Relaxed);
            lease.commit().await
        }
        Err(error) => Err(error),
    };
    match result {
        Ok(()) => Outcome::Admitted,
        Err(Error::Exceeded(_)) => Outcome::Refused,
        Err(error) => {
            shared.failed(error);
            Outcome::Failed
        }
    }
}

impl Shared {
    fn now(&self) -> Duration {
        self.load.limiters[0].clock().stopwatch()
    }

    /// Whether the load has taken all the time that it may take.
    fn is_over(&self, now: Duration) -> bool {
        now.saturating_sub(self.began) >= self.load.time_max
    }

    /// Records the first failure. An error that is not the store's ends the load: every call would
    /// get the same one.
    fn failed(&self, error: Error) {
        let is_of_the_store = matches!(error, Error::Unavailable { .. } | Error::Store(_));
        let place = if is_of_the_store { &self.first_failure } else { &self.wrong_call };
        place.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_with(|| error.into());
        if !is_of_the_store {
            self.phase.store(STOP, Ordering::Relaxed);
        }
    }
}
