//! Work that continues when its caller gives up. The next caller gets the result.
//!
//! A call has a time limit of about 2 s. Loading credentials from a process, from single sign-on, or on a
//! machine that starts may take longer. If each caller started again, none would ever get them.

use aws_credential_types::provider::error::CredentialsError;
use aws_credential_types::provider::future;
use aws_credential_types::provider::{ProvideCredentials, SharedCredentialsProvider};
use aws_sdk_dynamodb::config::Credentials;
use tokio::sync::Mutex;
use tokio::task::JoinHandle;

/// Runs at most one task at a time.
#[derive(Debug)]
pub(super) struct Detached<T> {
    // A tokio mutex: a caller holds it while it awaits the task.
    task: Mutex<Option<JoinHandle<T>>>,
}

impl<T> Default for Detached<T> {
    fn default() -> Self {
        Self { task: Mutex::new(None) }
    }
}

impl<T: Send + 'static> Detached<T> {
    /// The result of the task that an earlier caller started, or else of `work`.
    pub(super) async fn run(&self, work: impl Future<Output = T> + Send + 'static) -> T {
        let mut slot = self.task.lock().await;
        if let Some(task) = slot.as_mut() {
            let left_behind = task.await;
            *slot = None;
            // `Err`: it panicked, or its runtime ended. Start again on this runtime.
            if let Ok(done) = left_behind {
                return done;
            }
        }
        let task = slot.insert(tokio::spawn(work));
        let done = task.await;
        *slot = None;
        drop(slot);
        match done {
            Ok(done) => done,
            Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
            // The runtime is shutting down, and drops this caller too.
            Err(_) => std::future::pending().await,
        }
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
    async fn work_whose_runtime_ended_starts_again() {
        let detached = Arc::new(Detached::<u8>::default());
        let there = Arc::clone(&detached);
        let other = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            runtime.block_on(async {
                let mut call = pin!(there.run(std::future::pending()));
                let polled = call.as_mut().poll(&mut Context::from_waker(Waker::noop()));
                assert!(polled.is_pending());
            });
        });
        other.join().unwrap();
        assert_eq!(detached.run(async { 7 }).await, 7);
    }
}
