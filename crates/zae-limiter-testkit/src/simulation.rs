//! Many clients on one simulated table, in virtual time, from a seed.
//!
//! Everything runs on one thread. Whenever no task has anything to do, the auditor looks at the
//! books and time jumps to the next event. The same seed gives the same run, to the last write: see
//! [`Report::digest`].

mod audit;
mod intervals;
mod ledger;
mod original;
mod reading;
mod resharding;
mod scene;
mod seeds;
mod stack;
mod time;
mod watched;
mod workload;

use std::future::poll_fn;
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Poll, Waker};

use tokio::runtime::Builder;

pub use audit::{Excuse, Excuses};
pub use seeds::Seeds;
pub use stack::{Stack, StackReport};
pub use time::{ClientClock, VirtualTime};
pub use workload::{Companion, Harsh, Report, Reshard, Simulation};

use crate::table::{SimTable, Watch};
use audit::Auditor;

/// A table in virtual time, watched by an auditor.
#[derive(Debug)]
pub struct World {
    /// The true time.
    pub time: Arc<VirtualTime>,
    /// The table.
    pub table: SimTable,
    auditor: Arc<Auditor>,
}

/// Whether anything can still happen.
#[derive(Default)]
struct Stuck {
    why: Option<&'static str>,
    waker: Option<Waker>,
}

/// A run of more events never ends.
const STEPS_MAX: u64 = 20_000_000;

impl World {
    /// Plays a scenario in a new world, in which clocks are at most so far ahead.
    ///
    /// # Panics
    ///
    /// When everybody waits and nothing will ever happen again, or it never ends.
    pub fn play<T>(
        seed: u64,
        ahead_ms: i64,
        scenario: impl AsyncFnOnce(Arc<World>) -> T + 'static,
    ) -> T {
        let time = Arc::new(VirtualTime::default());
        let auditor = Arc::new(Auditor::new(Arc::clone(&time), ahead_ms));
        let watch: Arc<dyn Watch> = Arc::clone(&auditor) as Arc<dyn Watch>;
        let table = SimTable::in_time(Arc::clone(&time), Some(watch), seed);
        let world =
            Arc::new(World { time: Arc::clone(&time), table, auditor: Arc::clone(&auditor) });
        let stuck: Arc<Mutex<Stuck>> = Arc::default();
        let hook = Arc::clone(&stuck);
        let watching = Arc::clone(&auditor);
        let runtime = Builder::new_current_thread()
            .on_thread_park(move || {
                auditor.at_rest();
                let goes_on = time.step();
                let mut stuck = hook.lock().unwrap_or_else(PoisonError::into_inner);
                if !goes_on {
                    stuck.why = Some("everybody waits for ever");
                } else if time.steps() > STEPS_MAX {
                    stuck.why = Some("the run does not end");
                }
                // An event need not wake anybody. Without work the thread would park for good, so
                // the scenario is looked at after each.
                if let Some(waker) = stuck.waker.take() {
                    waker.wake();
                }
            })
            .build()
            .expect("a runtime without IO can be made");
        runtime.block_on(async move {
            let mut scenario = pin!(scenario(world));
            poll_fn(move |context| {
                let played = scenario.as_mut().poll(context);
                let mut stuck = stuck.lock().unwrap_or_else(PoisonError::into_inner);
                if let (Some(why), Poll::Pending) = (stuck.why, &played) {
                    let unended = watching.unended(u64::MAX);
                    panic!("{why}: {unended:#?}, before that: {:?}", watching.violation());
                }
                stuck.waker = Some(context.waker().clone());
                match played {
                    Poll::Ready(value) => Poll::Ready(value),
                    Poll::Pending => Poll::Pending,
                }
            })
            .await
        })
    }

    /// What the auditor has found, if anything.
    pub fn violation(&self) -> Option<String> {
        self.auditor.violation()
    }
}
