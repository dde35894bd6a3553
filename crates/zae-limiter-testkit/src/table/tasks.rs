//! Runs the tasks that a store starts on the table's runtime. Each client has its own runtime,
//! which may end. Any task may be dropped between two polls, or panic within a table call.

use std::any::Any;
use std::collections::BTreeMap;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use fastrand::Rng;
use zae_limiter_schema::Task;

use super::{ClientId, Faults, Inside};

/// The most polls before a task is dropped, and the most table calls before it panics.
const POLLS_MAX: u32 = 6;
const CALLS_MAX: u32 = 4;

/// How the simulation ends a task early.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Doom {
    Never,
    /// Dropped after that many polls.
    DroppedAfter(u32),
    /// Panics after that many table calls.
    PanicsAfter(u32),
}

impl Doom {
    fn draw(faults: &Faults, rng: &mut Rng) -> Self {
        if faults.dropped_task + faults.panicked_task <= 0.0 {
            return Self::Never;
        }
        match rng.f64() {
            drawn if drawn < faults.dropped_task => Self::DroppedAfter(rng.u32(..=POLLS_MAX)),
            drawn if drawn < faults.dropped_task + faults.panicked_task => {
                Self::PanicsAfter(rng.u32(..CALLS_MAX))
            }
            _ => Self::Never,
        }
    }

    /// Counts a poll. Returns true if the task is dropped instead.
    fn is_dropped(&mut self) -> bool {
        match self {
            Self::DroppedAfter(0) => true,
            Self::DroppedAfter(polls) => {
                *polls -= 1;
                false
            }
            _ => false,
        }
    }

    /// Counts a table call. Returns true if it panics.
    fn panics(&mut self) -> bool {
        match self {
            Self::PanicsAfter(0) => true,
            Self::PanicsAfter(calls) => {
                *calls -= 1;
                false
            }
            _ => false,
        }
    }
}

/// The payload of a panic that the simulation causes. It bypasses the panic hook.
struct Drawn;

/// The running tasks, and the one that is being polled.
#[derive(Default)]
pub(super) struct Tasks {
    running: BTreeMap<(ClientId, u64), Arc<Running>>,
    started: u64,
    polled: Option<Arc<Running>>,
}

struct Running {
    client: ClientId,
    number: u64,
    inner: Mutex<Inner>,
}

struct Inner {
    doom: Doom,
    /// `None` while the task is being polled, and after it has ended.
    task: Option<Task>,
    waker: Option<Waker>,
    is_ended: bool,
}

impl Running {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inside {
    fn tasks(&self) -> MutexGuard<'_, Tasks> {
        self.tasks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts a task on a client's runtime.
    pub(super) fn spawn(self: &Arc<Self>, client: ClientId, task: Task) {
        let doom = {
            let state = &mut *self.lock();
            Doom::draw(&state.faults, &mut state.rng)
        };
        let inner = Inner { doom, task: Some(task), waker: None, is_ended: false };
        let mut tasks = self.tasks();
        tasks.started += 1;
        let number = tasks.started;
        let running = Arc::new(Running { client, number, inner: Mutex::new(inner) });
        tasks.running.insert((client, number), Arc::clone(&running));
        tokio::spawn(Polling { inside: Arc::clone(self), running });
    }

    /// The number of running tasks of clients that have not crashed.
    pub(super) fn running(&self) -> usize {
        let crashed = self.lock().crashed.clone();
        self.tasks().running.keys().filter(|(client, _)| !crashed.contains(client)).count()
    }

    /// Drops all tasks of a client, like the end of their runtime. Returns whether there were any.
    pub(super) fn drop_tasks(&self, client: ClientId) -> bool {
        let ended: Vec<Arc<Running>> = {
            let mut tasks = self.tasks();
            let of_client = tasks.running.range((client, 0)..=(client, u64::MAX));
            let numbers: Vec<_> = of_client.map(|(key, _)| *key).collect();
            numbers.iter().filter_map(|key| tasks.running.remove(key)).collect()
        };
        for running in &ended {
            let (task, waker) = {
                let mut inner = running.lock();
                inner.is_ended = true;
                (inner.task.take(), inner.waker.take())
            };
            // Dropping a task may start other tasks, so no lock is held.
            drop(task);
            if let Some(waker) = waker {
                waker.wake();
            }
        }
        !ended.is_empty()
    }

    /// Panics if that was drawn for this call of the task that is being polled.
    pub(super) fn panic_if_doomed(&self) {
        let polled = self.tasks().polled.clone();
        if polled.is_some_and(|running| running.lock().doom.panics()) {
            resume_unwind(Box::new(Drawn));
        }
    }

    /// Records that the client does not know the outcome of its calls.
    pub(super) fn note_fault(&self, client: ClientId) {
        if let Some(watch) = &self.watch {
            watch.sent(client);
            watch.done(client, true);
            watch.unanswered(client);
        }
    }
}

/// Polls a task until it completes or is ended.
struct Polling {
    inside: Arc<Inside>,
    running: Arc<Running>,
}

impl Polling {
    fn end(&self) -> Poll<()> {
        self.inside.tasks().running.remove(&(self.running.client, self.running.number));
        Poll::Ready(())
    }

    fn panicked(&self, payload: &(dyn Any + Send)) {
        self.inside.note_fault(self.running.client);
        if payload.is::<Drawn>() {
            self.inside.lock().ended_tasks += 1;
            return;
        }
        let text = payload.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| payload.downcast_ref::<&str>().copied()).unwrap_or("no message");
        if let Some(watch) = &self.inside.watch {
            watch.task_panicked(self.running.client, text);
        }
    }
}

impl Future for Polling {
    type Output = ();

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let (task, is_dropped) = {
            let mut inner = self.running.lock();
            inner.waker = Some(context.waker().clone());
            (inner.task.take(), inner.doom.is_dropped())
        };
        let Some(mut task) = task else { return self.end() };
        if is_dropped {
            drop(task);
            self.inside.note_fault(self.running.client);
            self.inside.lock().ended_tasks += 1;
            return self.end();
        }
        self.inside.tasks().polled = Some(Arc::clone(&self.running));
        let polled = catch_unwind(AssertUnwindSafe(|| task.as_mut().poll(context)));
        self.inside.tasks().polled = None;
        match polled {
            Ok(Poll::Ready(())) => self.end(),
            Ok(Poll::Pending) => {
                let mut inner = self.running.lock();
                if inner.is_ended {
                    drop(inner);
                    drop(task);
                    return self.end();
                }
                inner.task = Some(task);
                Poll::Pending
            }
            Err(payload) => {
                // The rest of the task is dropped before the panic is reported.
                drop(task);
                self.panicked(&*payload);
                self.end()
            }
        }
    }
}
