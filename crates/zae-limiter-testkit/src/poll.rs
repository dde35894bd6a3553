//! Futures polled by hand, to be dropped at any moment.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};

use tokio::sync::Notify;
use zae_limiter_core::{BoxFuture, StoreError};

/// A condition that does not hold after so many looks never will.
const LOOKS_MAX: usize = 20_000;

/// A call under way.
pub(crate) struct ByHand<'a, T> {
    answer: BoxFuture<'a, Result<T, StoreError>>,
    bell: Arc<Bell>,
}

/// Remembers that the call asked to be polled again.
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
    pub(crate) fn new(answer: BoxFuture<'a, Result<T, StoreError>>) -> Self {
        Self { answer, bell: Arc::default() }
    }

    pub(crate) fn poll(&mut self) -> Poll<Result<T, StoreError>> {
        let waker = Waker::from(Arc::clone(&self.bell));
        Pin::as_mut(&mut self.answer).poll(&mut Context::from_waker(&waker))
    }

    /// Waits until the call asks to be polled again.
    pub(crate) async fn woken(&self) {
        self.bell.rung.notified().await;
    }
}

/// Looks until `holds`, and lets other tasks and threads go on in between.
pub(crate) async fn soon(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    for _ in 0..LOOKS_MAX {
        if holds().await {
            return;
        }
        tokio::task::yield_now().await;
        std::thread::yield_now();
    }
    panic!("not even after {LOOKS_MAX} looks: {what}");
}
