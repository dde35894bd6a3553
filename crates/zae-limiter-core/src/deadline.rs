use futures_core::future::BoxFuture;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use crate::clock::Clock;

/// The output of `work`, or `None` when `wait` has passed first; then the work is dropped.
pub async fn within<T>(
    clock: &dyn Clock,
    wait: Duration,
    work: impl Future<Output = T>,
) -> Option<T> {
    let mut work = pin!(work);
    // Created on demand: most work is ready at the first poll.
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
