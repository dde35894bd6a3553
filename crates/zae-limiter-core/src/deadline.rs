use futures_core::future::BoxFuture;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use crate::clock::Clock;

/// What `work` comes to, or `None` when `wait` has passed first; the work is then dropped.
pub(crate) async fn within<T>(
    clock: &dyn Clock,
    wait: Duration,
    work: impl Future<Output = T>,
) -> Option<T> {
    let mut work = pin!(work);
    // Most work is done at once, or needs a timer only when it is not.
    let mut timer: Option<BoxFuture<'_, ()>> = None;
    poll_fn(|context| {
        if let Poll::Ready(done) = work.as_mut().poll(context) {
            return Poll::Ready(Some(done));
        }
        let timer = timer.get_or_insert_with(|| clock.sleep(wait));
        timer.as_mut().poll(context).map(|()| None)
    })
    .await
}
