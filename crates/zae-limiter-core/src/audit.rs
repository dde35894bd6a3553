//! Who changed what, and when.

use zae_limiter_model::{EntityId, ResourceName, Timestamp};

use crate::error::Error;
use crate::limiter::{RateLimiter, call_store};
use crate::page::PageRequest;
use crate::pages::Pages;
use crate::record::{AuditAction, AuditEvent, AuditSubject, Record};
use crate::store::{Query, When, Write};

/// A change, as it goes into the audit trail.
pub(crate) struct Change {
    pub(crate) subject: AuditSubject,
    pub(crate) action: AuditAction,
    pub(crate) resource: Option<ResourceName>,
    /// A JSON object.
    pub(crate) details: serde_json::Value,
}

impl RateLimiter {
    /// The write that puts a change into the audit trail, to go in one batch with the change.
    pub(crate) fn audit(&self, change: Change) -> Write {
        self.namespaces().audit(self.namespace_id(), change)
    }

    /// What was changed about an entity, newest first.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for the id.
    pub fn audit_events(&self, entity: &str) -> Result<Pages<AuditEvent>, Error> {
        Ok(self.audit_events_of(AuditSubject::Entity(EntityId::new(entity)?)))
    }

    /// What was changed about an entity, the limits of a resource, or the system's, newest first.
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
                let now = limiter.clock().now();
                let page = limiter.inner.call(limiter.store().list(&query, &page)).await?;
                Ok(page.filter_map(|record| each(record, now)))
            }
        })
    }
}

impl crate::namespaces::Namespaces {
    pub(crate) fn audit(
        &self,
        namespace: &zae_limiter_model::NamespaceId,
        change: Change,
    ) -> Write {
        let at = self.clock.now();
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
            expires_at: Some(at.saturating_add(self.audit_retention)),
        };
        Write::Put(Record::Audit(event), When::Always)
    }

    pub(crate) async fn call<T>(
        &self,
        call: impl Future<Output = Result<T, crate::StoreError>>,
    ) -> Result<T, Error> {
        call_store(&*self.clock, self.deadline, call).await
    }
}
