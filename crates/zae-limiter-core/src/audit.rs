//! The audit trail: who changed what, and when.

use std::time::Duration;

use zae_limiter_model::{EntityId, Invalid, NamespaceId, ResourceName, Timestamp};

use crate::error::Error;
use crate::limiter::{RateLimiter, call_store};
use crate::page::PageRequest;
use crate::pages::Pages;
use crate::record::{AuditAction, AuditEvent, AuditSubject, ConfigLevel, Key, Record};
use crate::store::{Precondition, Query, Write};

/// How long audit events are kept by default.
const RETENTION: Duration = days(90);
/// The longest retention of audit events: a hundred years.
pub const AUDIT_RETENTION_DAYS_MAX: u32 = 36_500;

const fn days(count: u32) -> Duration {
    Duration::from_secs(count as u64 * 86_400)
}

/// Checks the bounds of a retention.
pub(crate) fn check_retention(days: u32) -> Result<(), Error> {
    if (1..=AUDIT_RETENTION_DAYS_MAX).contains(&days) {
        return Ok(());
    }
    Err(Invalid::new("audit retention", days, "use 1 to 36500 days").into())
}

/// A change, as the audit trail records it.
#[derive(Clone)]
pub(crate) struct Change {
    pub(crate) subject: AuditSubject,
    pub(crate) action: AuditAction,
    pub(crate) resource: Option<ResourceName>,
    /// A JSON object.
    pub(crate) details: serde_json::Value,
}

impl RateLimiter {
    /// The write of a change's audit event, for the same batch as the change. `retention` is the stored
    /// one, in days.
    pub(crate) fn audit(&self, change: Change, retention: Option<u32>) -> Write {
        self.namespaces().audit(self.namespace_id(), change, retention)
    }

    /// Stores how many days audit events are kept, for this limiter's namespace.
    /// [`Namespaces::set_audit_retention`](crate::Namespaces::set_audit_retention) stores it for all namespaces.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] unless `days` is 1 to [`AUDIT_RETENTION_DAYS_MAX`]; [`Error::NamespacePurged`];
    /// [`Error::Contended`]; an error of the store.
    pub async fn set_audit_retention(&self, days: u32) -> Result<(), Error> {
        self.inner.check_purged()?;
        let id = self.namespace_id();
        match self.namespaces().set_audit_retention_of(id, days).await? {
            true => Ok(()),
            false => self.inner.require_namespace([]),
        }
    }

    /// The stored retention of audit events, in days. Fails if the namespace was purged.
    pub(crate) async fn stored_retention(&self) -> Result<Option<u32>, Error> {
        let namespace = self.namespace_id();
        let keys = [
            Key::Namespace(namespace.clone()),
            Key::Config(namespace.clone(), ConfigLevel::System),
        ];
        let found = self.inner.call(self.store().get(&keys)).await?;
        self.inner.require_namespace(found.iter().flatten())?;
        let mut configs = found.into_iter().flatten().filter_map(Record::into_config);
        Ok(configs.find_map(|config| config.audit_retention_days))
    }

    /// The audit events of an entity, newest first.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for the id.
    pub fn audit_events(&self, entity: &str) -> Result<Pages<AuditEvent>, Error> {
        Ok(self.audit_events_of(AuditSubject::Entity(EntityId::new(entity)?)))
    }

    /// The audit events of an entity, of a resource's defaults, or of the system, newest first.
    pub fn audit_events_of(&self, subject: AuditSubject) -> Pages<AuditEvent> {
        let query = Query::Audit(self.namespace_id().clone(), subject);
        self.pages(query, |record, now| {
            record.into_audit().filter(|event| event.expires_at.is_none_or(|expiry| expiry > now))
        })
    }

    /// The records of a query, page by page.
    pub(crate) fn pages<T: Send + 'static>(
        &self,
        query: Query,
        each: fn(Record, Timestamp) -> Option<T>,
    ) -> Pages<T> {
        let limiter = self.clone();
        Pages::new(move |page: PageRequest| {
            let (limiter, query) = (limiter.clone(), query.clone());
            async move {
                let now = limiter.inner.now().now;
                let page = limiter.inner.call(limiter.store().list(&query, &page)).await?;
                Ok(page.filter_map(|record| each(record, now)))
            }
        })
    }
}

impl crate::namespaces::Namespaces {
    /// The stored retention of a namespace's audit events, in days.
    pub(crate) async fn stored_retention(
        &self,
        namespace: &NamespaceId,
    ) -> Result<Option<u32>, Error> {
        let key = [Key::Config(namespace.clone(), ConfigLevel::System)];
        let found = self.call(self.store.get(&key)).await?.into_iter().flatten();
        Ok(found.filter_map(Record::into_config).find_map(|config| config.audit_retention_days))
    }

    pub(crate) fn audit(
        &self,
        namespace: &NamespaceId,
        change: Change,
        retention: Option<u32>,
    ) -> Write {
        let at = self.now();
        let kept = self.audit_retention.or(retention.map(days)).unwrap_or(RETENTION);
        let details = match change.details {
            serde_json::Value::Object(details) => details,
            other => unreachable!("details are an object, not {other}"),
        };
        let event = AuditEvent {
            namespace: namespace.clone(),
            id: self.entropy.event_id(at),
            subject: change.subject,
            at,
            action: change.action,
            principal: self.principal.as_deref().map(str::to_owned),
            resource: change.resource,
            details,
            expires_at: Some(at.saturating_add(kept)),
        };
        Write::Put(Record::Audit(event), Precondition::Always)
    }

    pub(crate) async fn call<T>(
        &self,
        call: impl Future<Output = Result<T, crate::StoreError>>,
    ) -> Result<T, Error> {
        call_store(&*self.clock, self.deadline, call).await
    }
}
