//! Work that outlives its caller: giving back the tokens of a dropped lease, probing a store.
//!
//! It runs on the caller's tokio runtime where there is one, and otherwise on a thread of its own,
//! started when it is first needed.

use std::future::Future;
use std::sync::LazyLock;
use std::task::{Context, Waker};
use std::thread;

use tokio::runtime::{Builder, Handle};

/// A runtime to spawn on.
pub(crate) fn runtime() -> Handle {
    static FALLBACK: LazyLock<Handle> = LazyLock::new(|| {
        let runtime = Builder::new_current_thread().enable_time().build();
        let runtime = runtime.expect("a timer can be made");
        let handle = runtime.handle().clone();
        thread::Builder::new()
            .name("zae-limiter".to_owned())
            .spawn(move || runtime.block_on(std::future::pending::<()>()))
            .expect("a thread can be started");
        handle
    });
    Handle::try_current().unwrap_or_else(|_| FALLBACK.clone())
}

/// Carries the work out without anybody waiting for it. What can be done at once is done at once.
pub(crate) fn carry_out(work: impl Future<Output = ()> + Send + 'static) {
    let mut work = Box::pin(work);
    let mut nobody = Context::from_waker(Waker::noop());
    if work.as_mut().poll(&mut nobody).is_pending() {
        runtime().spawn(work);
    }
}

/// Has the work done on the caller's tokio runtime, or, where there is none, on the limiter's own
/// thread. For stores whose work outlives their callers.
pub fn spawn_in_background(work: impl Future<Output = ()> + Send + 'static) {
    runtime().spawn(work);
}
