//! A deterministic simulation: many clients on one simulated table, in virtual time, from a seed.
//!
//! # What is simulated
//!
//! - The table: [`SimTable`] in [`VirtualTime`]. Calls take time, get lost, are throttled or hang.
//! - The clients: about twenty processes with wrong clocks. They acquire, settle, cancel, change
//!   limits, delete and reshard buckets, and crash (`workload`). [`Stack`] runs whole limiters
//!   instead of bare stores (`stack`).
//! - Clocks that jump by minutes or a year, on a table whose responses have a date (`wrong_clocks`).
//! - Clients of the Python original, which know nothing of our rules (`original`).
//!
//! `scene` draws all parameters of a run from its seed: buckets, limits, faults and clock errors.
//!
//! # What is audited
//!
//! The auditor (`audit`) sees every write to a bucket and every call with its reply. It checks each
//! write exactly: refill, debt, over-admission, conservation, limits. Where the outcome is unknown,
//! for example after a crash, it accepts a range and counts an [`Excuse`]. After the run the
//! clients check liveness: every request is admitted after its retry-after.
//!
//! # How to replay a seed
//!
//! Everything runs on one thread. Whenever all tasks wait, the auditor compares writes and replies,
//! and time jumps to the next event. So the same seed gives the same run, down to the last write
//! ([`Report::digest`]). A failing test prints its seed and the command to replay it:
//!
//! ```text
//! ZAEL_SIM_SEED=1234 cargo test -p zae-limiter-dynamodb --test simulation
//! ```
//!
//! `ZAEL_SIM_SEEDS` and `ZAEL_SIM_BASE` set how many seeds run, and the first one: see [`Seeds`].

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
mod wrong_clocks;

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

/// A simulated world: a table in virtual time, and the auditor of its writes.
#[derive(Debug)]
pub struct World {
    /// The true time. Clients have clocks of their own.
    pub time: Arc<VirtualTime>,
    /// The table.
    pub table: SimTable,
    auditor: Arc<Auditor>,
}

/// Why a run cannot go on, if that is so.
#[derive(Default)]
struct Stuck {
    why: Option<&'static str>,
    waker: Option<Waker>,
}

/// The most events of a run. A run with more is considered endless.
const STEPS_MAX: u64 = 20_000_000;

impl World {
    /// Runs a scenario in a new world. Clocks are at most `ahead_ms` ahead of the true time.
    ///
    /// # Panics
    ///
    /// If all tasks wait and no event is left, or if the run does not end.
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
                    stuck.why = Some("all tasks wait and no event is left");
                } else if time.steps() > STEPS_MAX {
                    stuck.why = Some("the run does not end");
                }
                // An event may wake no task. Then the thread would park for ever, so the scenario
                // is polled after each event.
                if let Some(waker) = stuck.waker.take() {
                    waker.wake();
                }
            })
            .build()
            .expect("a runtime without I/O can be built");
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

    /// The first violation that the auditor has found.
    pub fn violation(&self) -> Option<String> {
        self.auditor.violation()
    }
}
