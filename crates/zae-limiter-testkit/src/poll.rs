//! Polls futures by hand, so that a check can drop them at any point.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};

use tokio::sync::Notify;
use zae_limiter_core::{BoxFuture, StoreError};

/// How often [`soon`] checks a condition before it fails.
const LOOKS_MAX: usize = 20_000;

/// A call in progress.
pub(crate) struct ByHand<'a, T> {
    call: BoxFuture<'a, Result<T, StoreError>>,
    bell: Arc<Bell>,
}

/// Records that the call wants to be polled again.
#[derive(Default)]
struct Bell {
    rung: Notify,
}

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.rung.notify_one();
    }
}

impl<'a, T> ByHand<'a, T> {
    pub(crate) fn new(call: BoxFuture<'a, Result<T, StoreError>>) -> Self {
        Self { call, bell: Arc::default() }
    }

    pub(crate) fn poll(&mut self) -> Poll<Result<T, StoreError>> {
        let waker = Waker::from(Arc::clone(&self.bell));
        Pin::as_mut(&mut self.call).poll(&mut Context::from_waker(&waker))
    }

    /// Waits until the call wants to be polled again.
    pub(crate) async fn woken(&self) {
        self.bell.rung.notified().await;
    }
}

/// Waits until `holds` returns true, and yields to other tasks and threads in between.
pub(crate) async fn soon(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    for _ in 0..LOOKS_MAX {
        if holds().await {
            return;
        }
        tokio::task::yield_now().await;
        std::thread::yield_now();
    }
    panic!("still not true after {LOOKS_MAX} checks: {what}");
}
