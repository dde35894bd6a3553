//! The simulation: events in the order of their times. The clock is used for waiting only, so a test
//! that skips the waits plays the same events.

use std::collections::BTreeMap;
use std::time::Duration;

use fastrand::Rng;
use zae_limiter::{Error, Lease, RateLimiter};

use crate::context::Context;
use crate::failure::Failure;
use crate::interrupts::{Interrupt, Interrupts};
use crate::overadmission::Span;

use super::cast::{CAST, LIMITS, RESOURCE, keys};
use super::tally::Tally;
use super::traffic::{self, Request};
use super::view::Show;

#[derive(Clone, Copy, Debug)]
enum Event {
    /// A key calls.
    Call(usize),
    /// A call has done its work.
    Done(u64),
    /// The view is redrawn.
    Frame,
}

/// An admitted call that has not settled yet.
struct Working {
    key: usize,
    request: Request,
    lease: Lease,
}

struct Play<'a> {
    limiter: &'a RateLimiter,
    rng: Rng,
    total_ms: u64,
    /// Future events by time, then by number.
    agenda: BTreeMap<(u64, u64), Event>,
    next_number: u64,
    working: BTreeMap<u64, Working>,
    tally: Tally,
}

/// Runs the simulation. Returns the interrupt that ended it early, if any.
pub(super) async fn run(
    limiter: &RateLimiter,
    context: &mut Context,
    show: Show,
    length: Duration,
    seed: u64,
) -> Result<(Tally, Option<Interrupt>), Failure> {
    let mut play = Play {
        limiter,
        rng: Rng::with_seed(seed),
        total_ms: millis(length),
        agenda: BTreeMap::new(),
        next_number: 0,
        working: BTreeMap::new(),
        tally: Tally::new(),
    };
    for key in keys() {
        play.schedule_call(key, 0);
    }
    if let Some(every_ms) = show.every_ms() {
        play.schedule(every_ms, Event::Frame);
    }
    let ending = play.act(context, show).await;
    // Also after an error: no call keeps tokens that it does not use.
    let settled = play.settle_all(context).await;
    let ending = ending?;
    settled?;
    Ok((play.tally, ending))
}

impl Play<'_> {
    async fn act(
        &mut self,
        context: &mut Context,
        show: Show,
    ) -> Result<Option<Interrupt>, Failure> {
        let mut interrupts = context.interrupts.clone();
        let began = context.pace.stopwatch();
        let elapsed = |context: &Context| millis(context.pace.stopwatch().saturating_sub(began));
        while let Some(((due, _), event)) = self.agenda.pop_first() {
            let wait = due.min(self.total_ms).saturating_sub(elapsed(context));
            if let Some(interrupt) = wait_for(context, wait, &mut interrupts).await {
                self.tally.elapsed_ms = elapsed(context);
                return Ok(Some(interrupt));
            }
            self.tally.elapsed_ms = elapsed(context).min(self.total_ms);
            // A slow store does not extend the run.
            if self.tally.elapsed_ms >= self.total_ms {
                break;
            }
            match event {
                Event::Call(key) => self.call(key, due, context).await?,
                Event::Done(number) => {
                    if let Some(call) = self.working.remove(&number) {
                        self.finish(call, context).await?;
                    }
                }
                Event::Frame => {
                    let phase = traffic::phase(self.tally.elapsed_ms, self.total_ms).name;
                    let working = self.working.len();
                    let limiter = self.limiter;
                    show.frame(&self.tally, working, phase, self.total_ms, limiter, context)
                        .await?;
                    // `demo | head` has closed the pipe.
                    if !context.printer.has_reader() {
                        break;
                    }
                    if let Some(every_ms) = show.every_ms() {
                        // Skips late frames.
                        let next = (self.tally.elapsed_ms / every_ms + 1) * every_ms;
                        self.schedule(next, Event::Frame);
                    }
                }
            }
        }
        Ok(None)
    }

    fn schedule(&mut self, at_ms: u64, event: Event) {
        self.next_number += 1;
        self.agenda.insert((at_ms, self.next_number), event);
    }

    fn schedule_call(&mut self, key: usize, after_ms: u64) {
        let phase = traffic::phase(after_ms, self.total_ms);
        let at_ms = after_ms + traffic::gap_ms(&mut self.rng, key, phase);
        self.schedule(at_ms, Event::Call(key));
    }

    /// Acquires the estimate of a new call.
    async fn call(&mut self, key: usize, due: u64, context: &Context) -> Result<(), Failure> {
        self.schedule_call(key, due);
        let request = traffic::request(&mut self.rng);
        let amounts = [1, request.estimate];
        let from = context.clock.now();
        let mut acquire = self.limiter.acquire(CAST[key].id, RESOURCE);
        for (limit, amount) in LIMITS.iter().zip(amounts) {
            acquire = acquire.take(limit, amount);
        }
        match acquire.await {
            Ok(lease) => {
                let span = Span { from, until: context.clock.now() };
                self.tally.admit(key, amounts, span);
                self.schedule(due + request.work_ms, Event::Done(self.next_number + 1));
                self.working.insert(self.next_number, Working { key, request, lease });
                Ok(())
            }
            Err(Error::Exceeded(refusal)) => {
                self.tally.refuse(key);
                for status in refusal.statuses().iter().filter(|status| status.exceeded) {
                    let (entity, limit) = (status.entity_id.as_str(), status.limit_name.as_str());
                    self.tally.refused_by(entity, limit);
                }
                Ok(())
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Settles a call for what it used, or refunds it if it failed.
    async fn finish(&mut self, mut call: Working, context: &Context) -> Result<(), Failure> {
        let estimate = signed(call.request.estimate);
        let from = context.clock.now();
        let differences = match call.request.actual {
            Some(actual) => {
                call.lease.settle(LIMITS[1], actual)?;
                call.lease.commit().await?;
                self.tally.underestimated += u64::from(actual > call.request.estimate);
                [0, signed(actual) - estimate]
            }
            None => {
                call.lease.rollback().await?;
                self.tally.failed += 1;
                [-1, -estimate]
            }
        };
        let span = Span { from, until: context.clock.now() };
        self.tally.settle(call.key, differences, span);
        Ok(())
    }

    /// Settles all remaining calls. Continues after an error and returns the first one.
    async fn settle_all(&mut self, context: &Context) -> Result<(), Failure> {
        let mut result = Ok(());
        for call in std::mem::take(&mut self.working).into_values() {
            let settled = self.finish(call, context).await;
            result = result.and(settled);
        }
        result
    }
}

/// Waits, and also checks for an interrupt if the wait is zero.
async fn wait_for(
    context: &Context,
    wait_ms: u64,
    interrupts: &mut Interrupts,
) -> Option<Interrupt> {
    tokio::select! {
        biased;
        interrupt = interrupts.next() => Some(interrupt),
        () = async {
            if wait_ms > 0 {
                context.wait(Duration::from_millis(wait_ms)).await;
            }
        } => None,
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

fn signed(tokens: u64) -> i64 {
    i64::try_from(tokens).expect("the estimates are small")
}
