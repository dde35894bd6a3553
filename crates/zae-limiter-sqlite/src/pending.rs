//! Calls whose reply is awaited, and what becomes of them when their caller leaves.

use tokio::sync::oneshot;
use zae_limiter_core::{
    Admission, Applied, Plan, Settlement, StoreError, StoreErrorKind, Timestamp,
};

use crate::Shared;
use crate::job::Job;

/// An acquire whose reply is awaited. If it is dropped with the reply unread, the store refunds
/// what the plan took.
pub(crate) struct PendingAcquire<'a> {
    pub(crate) shared: &'a Shared,
    pub(crate) plan: &'a Plan,
    pub(crate) reply: oneshot::Receiver<Result<Admission, StoreError>>,
}

impl Drop for PendingAcquire<'_> {
    fn drop(&mut self) {
        // From here on the writer sees a closed channel. An earlier reply is still in it.
        self.reply.close();
        if let Ok(Ok(Admission::Taken(_))) = self.reply.try_recv() {
            self.shared.submit_detached(Job::refund(self.plan));
        }
    }
}

/// A settlement whose reply is awaited. Once polled, a settlement is carried out: if it is dropped
/// with a transient failure unread, the store queues it again.
pub(crate) struct PendingSettlement<'a> {
    pub(crate) shared: &'a Shared,
    pub(crate) settlements: &'a [Settlement],
    pub(crate) now: Timestamp,
    pub(crate) reply: oneshot::Receiver<Result<(), StoreError>>,
}

impl Drop for PendingSettlement<'_> {
    fn drop(&mut self) {
        // From here on the writer sees a closed channel. An earlier reply is still in it.
        self.reply.close();
        let Ok(Err(error)) = self.reply.try_recv() else { return };
        // Permissions can be mended while the store is open.
        let can_succeed_later = error.is_transient() || error.kind() == StoreErrorKind::Denied;
        if can_succeed_later && error.applied() == Applied::No {
            self.shared.submit_detached(Job::Settle(self.settlements.to_vec(), self.now, None));
        }
    }
}
