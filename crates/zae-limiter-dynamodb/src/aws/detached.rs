//! Work that continues when its caller gives up. The next caller gets the result.
//!
//! A call has a time limit of about 2 s. Loading credentials from a process, from single sign-on, or on a
//! machine that starts may take longer. If each caller started again, none would ever get them.
//!
//! The SDK reads its files with blocking calls, and a file may hang: on a network folder, for example. So the work has
//! a thread with a runtime of its own. It holds up neither a caller's runtime nor its end.

use aws_credential_types::provider::error::CredentialsError;
use aws_credential_types::provider::future;
use aws_credential_types::provider::{ProvideCredentials, SharedCredentialsProvider};
use aws_sdk_dynamodb::config::Credentials;
use tokio::sync::{Mutex, oneshot};

/// Starts `work` on a thread of its own, and awaits its end there. The thread goes on if the caller gives up.
///
/// # Panics
///
/// If the work panics, or the machine has no thread left.
pub async fn on_own_thread<T: Send + 'static>(work: impl Future<Output = T> + Send + 'static) -> T {
    start(work).await.expect("the work ended without a panic")
}

/// `Err`: the work panicked.
fn start<T: Send + 'static>(
    work: impl Future<Output = T> + Send + 'static,
) -> oneshot::Receiver<T> {
    let (reply, done) = oneshot::channel();
    let run = move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.expect("a runtime without threads starts");
        // `Err`: nobody awaits it any longer.
        let _ = reply.send(runtime.block_on(work));
        // Waits for no blocking call, such as a name that does not resolve.
        runtime.shutdown_background();
    };
    let thread = std::thread::Builder::new().name("zae-limiter-load".to_owned());
    thread.spawn(run).expect("the machine has a thread left");
    done
}

/// Runs at most one piece of work at a time.
#[derive(Debug)]
pub(super) struct Detached<T> {
    // A tokio mutex: a caller holds it while it awaits the work.
    work: Mutex<Option<oneshot::Receiver<T>>>,
}

impl<T> Default for Detached<T> {
    fn default() -> Self {
        Self { work: Mutex::new(None) }
    }
}

impl<T: Send + 'static> Detached<T> {
    /// The result of the work that an earlier caller started, or else of `work`.
    pub(super) async fn run(&self, work: impl Future<Output = T> + Send + 'static) -> T {
        let mut slot = self.work.lock().await;
        if let Some(running) = slot.as_mut() {
            let left_behind = running.await;
            *slot = None;
            // `Err`: it panicked. Start again.
            if let Ok(done) = left_behind {
                return done;
            }
        }
        let done = slot.insert(start(work)).await;
        *slot = None;
        drop(slot);
        done.expect("the work ended without a panic")
    }
}

/// Credentials whose loading continues after the call that needs them. The SDK caches them.
#[derive(Debug)]
pub(super) struct DetachedCredentials {
    provider: SharedCredentialsProvider,
    loading: Detached<Result<Credentials, CredentialsError>>,
}

impl DetachedCredentials {
    pub(super) fn new(provider: SharedCredentialsProvider) -> Self {
        Self { provider, loading: Detached::default() }
    }
}

impl ProvideCredentials for DetachedCredentials {
    fn provide_credentials<'a>(&'a self) -> future::ProvideCredentials<'a>
    where
        Self: 'a,
    {
        let provider = self.provider.clone();
        let load = async move { provider.provide_credentials().await };
        future::ProvideCredentials::new(self.loading.run(load))
    }

    fn fallback_on_interrupt(&self) -> Option<Credentials> {
        self.provider.fallback_on_interrupt()
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::{Context, Waker};

    use tokio::sync::Notify;

    use super::*;

    /// A provider that counts calls, and waits until it may return.
    #[derive(Clone, Debug, Default)]
    struct Slow {
        asked: Arc<AtomicUsize>,
        go: Arc<Notify>,
    }

    impl ProvideCredentials for Slow {
        fn provide_credentials<'a>(&'a self) -> future::ProvideCredentials<'a>
        where
            Self: 'a,
        {
            future::ProvideCredentials::new(async {
                let number = self.asked.fetch_add(1, Ordering::Relaxed);
                self.go.notified().await;
                Ok(Credentials::new(format!("key-{number}"), "", None, None, "test"))
            })
        }
    }

    #[tokio::test]
    async fn the_next_caller_gets_the_result_of_one_that_gave_up() {
        let slow = Slow::default();
        let detached = DetachedCredentials::new(SharedCredentialsProvider::new(slow.clone()));
        for _ in 0..3 {
            let mut call = pin!(detached.provide_credentials());
            let polled = call.as_mut().poll(&mut Context::from_waker(Waker::noop()));
            assert!(polled.is_pending());
            // The task starts, and the call is dropped.
            tokio::task::yield_now().await;
        }
        slow.go.notify_one();
        let found = detached.provide_credentials().await.unwrap();
        assert_eq!(found.access_key_id(), "key-0");
        slow.go.notify_one();
        let found = detached.provide_credentials().await.unwrap();
        assert_eq!(found.access_key_id(), "key-1");
        assert_eq!(slow.asked.load(Ordering::Relaxed), 2);
    }

    #[tokio::test]
    async fn work_whose_runtime_ended_goes_on() {
        let (slow, detached) = (Slow::default(), Arc::new(Detached::default()));
        let there = Arc::clone(&detached);
        let (go, went) = (Arc::clone(&slow.go), Arc::clone(&slow.asked));
        let other = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            runtime.block_on(async {
                let work = async move { slow.provide_credentials().await.is_ok() };
                let mut call = pin!(there.run(work));
                let polled = call.as_mut().poll(&mut Context::from_waker(Waker::noop()));
                assert!(polled.is_pending());
            });
        });
        other.join().unwrap();
        go.notify_one();
        assert!(detached.run(async { false }).await);
        assert_eq!(went.load(Ordering::Relaxed), 1);
    }

    #[tokio::test]
    async fn work_that_panicked_starts_again() {
        let detached = Detached::<u8>::default();
        {
            let mut call = pin!(detached.run(async { panic!("on purpose") }));
            let polled = call.as_mut().poll(&mut Context::from_waker(Waker::noop()));
            assert!(polled.is_pending());
        }
        assert_eq!(detached.run(async { 7 }).await, 7);
    }
}
