//! Background work: refunding dropped leases, probing a store.
//!
//! A refund must survive the caller's runtime, so it runs on the limiter's own thread, which starts on
//! first use. Work that may be lost runs on the caller's tokio runtime, if there is one.

use futures_core::future::BoxFuture;
use std::fmt;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Once, OnceLock};
use std::task::{Context, Poll, Waker};
use std::thread;

use tokio::runtime::{Builder, Handle, Runtime};

type Work = BoxFuture<'static, ()>;

/// Starts work without waiting for it.
type Spawn = dyn Fn(Work) + Send + Sync;

/// Runs background work: on the limiter's own thread, or as a test says.
#[derive(Clone, Default)]
pub(crate) struct Background(Option<Arc<Spawn>>);

impl fmt::Debug for Background {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Background").field(&self.0.as_ref().map(|_| "elsewhere")).finish()
    }
}

impl Background {
    /// Passes all work to `spawn`.
    pub(crate) fn elsewhere(spawn: impl Fn(Work) + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(spawn)))
    }

    /// Runs the work in the background, even if the caller's runtime ends.
    pub(crate) fn carry_out(&self, work: impl Future<Output = ()> + Send + 'static) {
        match &self.0 {
            Some(spawn) => spawn(Box::pin(work)),
            None => carry_out(work),
        }
    }
}

/// The limiter's own runtime in one process. A forked child has none of its parent's threads, so it gets another one.
struct Own {
    /// The process that made it.
    process: u32,
    runtime: Runtime,
    /// Started on first use. The tasks run once it has started.
    thread: Once,
    /// That of a child that was forked from this process.
    of_child: OnceLock<Box<Self>>,
}

impl Own {
    fn new(process: u32) -> Box<Self> {
        // Timers, and sockets if a store's crates enable them.
        let runtime = Builder::new_current_thread().enable_all().build();
        let runtime = runtime.expect("a runtime can be built");
        Box::new(Self { process, runtime, thread: Once::new(), of_child: OnceLock::new() })
    }

    /// The one of a process, in the list from its first ancestor on. No lock is held that a fork could leave locked.
    fn of(first: &'static OnceLock<Box<Self>>, process: u32) -> &'static Self {
        let mut own = first.get_or_init(|| Self::new(process));
        loop {
            own = match own.of_child.get() {
                Some(later) => later,
                None if own.process == process => return own,
                None => own.of_child.get_or_init(|| Self::new(process)),
            }
        }
    }

    /// The one of this process.
    fn here() -> &'static Self {
        static FIRST: OnceLock<Box<Own>> = OnceLock::new();
        Self::of(&FIRST, std::process::id())
    }

    /// Its handle, with its thread started.
    fn started(&'static self) -> &'static Handle {
        self.thread.call_once(|| {
            thread::Builder::new()
                .name("zae-limiter".to_owned())
                // A task that panics does not stop the others.
                .spawn(|| self.runtime.block_on(std::future::pending::<()>()))
                .expect("a thread can be started");
        });
        self.runtime.handle()
    }
}

/// A runtime to spawn on: the caller's, or the limiter's own.
pub(crate) fn runtime() -> Handle {
    Handle::try_current().unwrap_or_else(|_| Own::here().started().clone())
}

/// Enters the limiter's own runtime where the thread is in another one, so that timers and tasks do not need the other.
#[cfg(feature = "blocking")]
pub(crate) fn enter_own() -> Option<tokio::runtime::EnterGuard<'static>> {
    Handle::try_current().is_ok().then(|| Own::here().started().enter())
}

fn poll_once(work: &mut Work) -> Poll<()> {
    work.as_mut().poll(&mut Context::from_waker(Waker::noop()))
}

/// Runs the work in the background, even if the caller's runtime ends. Work that needs no waiting is done
/// when this returns. It never panics, because a lease may be dropped anywhere.
fn carry_out(work: impl Future<Output = ()> + Send + 'static) {
    let mut work: Work = Box::pin(work);
    let carried_out = catch_unwind(AssertUnwindSafe(move || {
        // A thread that is ending has no runtime context to enter.
        let ending = Handle::try_current().is_err_and(|error| error.is_thread_local_destroyed());
        let done = !ending && {
            // What the first poll creates, such as a timer, must not belong to the caller's runtime.
            let _context = Own::here().runtime.enter();
            poll_once(&mut work).is_ready()
        };
        if !done {
            Own::here().started().spawn(work);
        }
    }));
    if carried_out.is_err() {
        tracing::error!("background work panicked; a dropped lease may not be refunded");
    }
}

/// Runs the work on the caller's runtime, and loses it if that ends: for work that is started again.
/// Work that needs no waiting is done when this returns.
pub(crate) fn carry_out_here(work: impl Future<Output = ()> + Send + 'static) {
    let mut work: Work = Box::pin(work);
    if poll_once(&mut work).is_pending() {
        runtime().spawn(work);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;
    use crate::clock::{Clock as _, SystemClock};

    /// Work that is pending on its first poll and needs a timer.
    async fn slow_work(done: mpsc::Sender<&'static str>, what: &'static str) {
        SystemClock.sleep(Duration::from_millis(1)).await;
        let _ = done.send(what);
    }

    #[test]
    fn work_outlives_the_runtime_of_its_caller() {
        // Without timers: work that ran on it would panic.
        let runtime = Builder::new_current_thread().build().expect("a runtime");
        let (done, is_done) = mpsc::channel();
        runtime.block_on(async { carry_out(slow_work(done, "done")) });
        drop(runtime);
        assert_eq!(is_done.recv(), Ok("done"));
    }

    /// As after a fork: the threads of the first process do not run here.
    #[test]
    fn a_forked_child_has_a_runtime_of_its_own() {
        let first: &'static OnceLock<Box<Own>> = Box::leak(Box::new(OnceLock::new()));
        let parent = Own::of(first, 1);
        assert!(std::ptr::eq(parent, Own::of(first, 1)));
        parent.thread.call_once(|| {});
        let child = Own::of(first, 2);
        assert!(!std::ptr::eq(parent, child) && std::ptr::eq(child, Own::of(first, 2)));
        assert_eq!(Own::of(first, 3).process, 3, "and so has its own child");
        let (done, is_done) = mpsc::channel();
        child.started().spawn(slow_work(done, "done"));
        assert_eq!(is_done.recv(), Ok("done"));
    }

    #[test]
    fn work_goes_where_a_test_says() {
        let (spawned, works) = mpsc::channel();
        let background = Background::elsewhere(move |work| {
            let _ = spawned.send(work);
        });
        let (done, is_done) = mpsc::channel();
        background.carry_out(async move {
            let _ = done.send("done");
        });
        assert!(is_done.try_recv().is_err(), "the work ran before it was polled here");
        let mut work = works.recv().expect("the work");
        assert!(poll_once(&mut work).is_ready());
        assert_eq!(is_done.recv(), Ok("done"));
    }

    #[test]
    fn work_that_panics_does_not_stop_other_work() {
        let (done, is_done) = mpsc::channel();
        carry_out(slow_work(done.clone(), "before"));
        carry_out(async { panic!("on purpose, at once") });
        carry_out(async {
            tokio::task::yield_now().await;
            panic!("on purpose, later");
        });
        carry_out(slow_work(done, "after"));
        let mut both: Vec<_> = is_done.iter().take(2).collect();
        both.sort_unstable();
        assert_eq!(both, ["after", "before"]);
    }
}
