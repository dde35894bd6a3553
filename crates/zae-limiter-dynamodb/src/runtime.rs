//! The store's own runtime, so that no task depends on a caller's. It starts at the first use, is shared by all
//! stores of the process, and ends with the last of them.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use tokio::runtime::Builder;
use zae_limiter_core::{StoreError, StoreErrorKind};
use zae_limiter_schema::Task;

/// The stores' runtime.
#[derive(Debug)]
pub(crate) struct Runtime {
    /// `None` only while it is dropped.
    inner: Option<tokio::runtime::Runtime>,
    /// The process that started it. A forked child has none of its threads.
    process: u32,
}

impl Runtime {
    /// The runtime of this process. It is started if there is none, with `workers` threads, or else as many as
    /// cores.
    ///
    /// # Errors
    ///
    /// When the system cannot start its threads.
    pub(crate) fn shared(workers: Option<usize>) -> Result<Arc<Self>, StoreError> {
        static SHARED: Mutex<Weak<Runtime>> = Mutex::new(Weak::new());
        let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(runtime) = shared.upgrade().filter(|runtime| runtime.check().is_ok()) {
            return Ok(runtime);
        }
        let mut builder = Builder::new_multi_thread();
        builder.enable_all().thread_name("zae-limiter-dynamodb");
        if let Some(workers) = workers {
            builder.worker_threads(workers.max(1));
        }
        let inner = builder.build().map_err(|error| {
            let message = "could not start the store's runtime";
            StoreError::new(StoreErrorKind::Unavailable, message).caused_by(error)
        })?;
        let runtime = Arc::new(Self { inner: Some(inner), process: std::process::id() });
        *shared = Arc::downgrade(&runtime);
        Ok(runtime)
    }

    /// Checks that its threads run in this process.
    ///
    /// # Errors
    ///
    /// In a forked child.
    pub(crate) fn check(&self) -> Result<(), StoreError> {
        if self.process == std::process::id() {
            return Ok(());
        }
        let message = "this process was forked after the store was opened; \
                       open the store in the child";
        Err(StoreError::new(StoreErrorKind::Rejected, message))
    }

    pub(crate) fn spawn(&self, task: Task) {
        if let Some(runtime) = &self.inner {
            runtime.spawn(task);
        }
    }
}

impl Drop for Runtime {
    fn drop(&mut self) {
        if let Some(runtime) = self.inner.take() {
            // Without waiting: this may be one of its own threads.
            runtime.shutdown_background();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_forked_child_is_refused() {
        let parent = Runtime { inner: None, process: std::process::id().wrapping_add(1) };
        let error = parent.check().unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Rejected);
        assert!(error.to_string().contains("forked"), "{error}");
    }

    #[test]
    fn stores_share_one_runtime_and_the_last_ends_it() {
        let one = Runtime::shared(Some(1)).unwrap();
        let other = Runtime::shared(Some(1)).unwrap();
        assert!(Arc::ptr_eq(&one, &other));
        let ended = Arc::downgrade(&one);
        drop((one, other));
        assert!(ended.upgrade().is_none());
        Runtime::shared(Some(1)).unwrap().check().unwrap();
    }
}
