//! For programs without an async runtime: the same calls, each blocking its thread.
//!
//! ```
//! use zae_limiter_core::{Limit, MemoryStore, blocking};
//!
//! let limiter = blocking::open(zae_limiter_core::RateLimiter::builder(MemoryStore::new()))?;
//! blocking::wait(limiter.set_system_defaults([Limit::per_minute("rpm", 100)], None))?;
//!
//! let mut lease = blocking::wait(limiter.acquire("key-1", "gpt-4").take("rpm", 1))?;
//! blocking::wait(lease.commit())?;
//! # Ok::<(), zae_limiter_core::Error>(())
//! ```

use std::future::IntoFuture;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};

use crate::background;
use crate::error::Error;
use crate::lease::Lease;
use crate::limiter::{Builder, RateLimiter};

/// Blocks this thread until a call of the limiter is done. Timers run on the limiter's own thread.
///
/// Do not use it inside an async runtime: it would block a worker thread. It does not wait for ever there: no timer of the
/// limiter depends on that thread. But a call that waits for a task of the same thread, for example for limits that the
/// task reads, fails at its deadline.
pub fn wait<F: IntoFuture>(call: F) -> F::Output {
    struct Unpark(Thread);

    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }

    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut context = Context::from_waker(&waker);
    // Within a runtime, the call would create its timers there, and this thread may be the one that drives them.
    let _context = background::enter_own();
    let mut call = pin!(call.into_future());
    loop {
        match call.as_mut().poll(&mut context) {
            Poll::Ready(done) => return done,
            Poll::Pending => thread::park(),
        }
    }
}

/// Opens a limiter.
///
/// # Errors
///
/// As [`Builder::open`].
pub fn open(builder: Builder) -> Result<RateLimiter, Error> {
    wait(builder.open())
}

/// Takes tokens and runs `work` with the lease. Commits the lease if the work succeeds, and rolls it
/// back if it fails.
///
/// # Errors
///
/// The error of the work, or the limiter's [`Error`] converted to its type.
pub fn run<T, E: From<Error>>(
    acquire: crate::Acquire<'_>,
    work: impl FnOnce(&mut Lease) -> Result<T, E>,
) -> Result<T, E> {
    wait(acquire.run(async |lease: &mut Lease| work(lease)))
}
