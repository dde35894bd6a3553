//! Namespaces: limiters that share a store and are isolated from each other.

use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use zae_limiter_model::{NamespaceId, NamespaceName};

use crate::audit::{Change, check_retention};
use crate::clock::Clock;
use crate::entropy::Entropy;
use crate::error::{Error, Object};
use crate::limits::{ATTEMPTS_MAX, config_details};
use crate::page::PageRequest;
use crate::pages::Pages;
use crate::record::{AuditAction, AuditSubject, Config, ConfigLevel, Key, Namespace, Record};
use crate::store::{Precondition, Query, Scope, Store, Write, Written};

/// The namespace that is registered on first use.
const DEFAULT_NAMESPACE: &str = "default";

/// Registers, lists, deletes and purges the namespaces of a store. Made by
/// [`RateLimiter::namespaces`](crate::RateLimiter::namespaces).
///
/// ```
/// # use zae_limiter_core::{MemoryStore, RateLimiter};
/// # use std::sync::Arc;
/// # tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(async {
/// # let store = Arc::new(MemoryStore::new());
/// # let limiter = RateLimiter::builder(Arc::clone(&store)).open().await?;
/// limiter.namespaces().register("team-a").await?;
/// let team = RateLimiter::builder(store).namespace("team-a").open().await?;
/// assert_eq!(limiter.namespaces().list().all().await?.len(), 2); // default and team-a
/// # Ok::<(), zae_limiter_core::Error>(())
/// # }).unwrap();
/// ```
#[derive(Clone, Debug)]
pub struct Namespaces {
    pub(crate) store: Arc<dyn Store>,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) entropy: Arc<Entropy>,
    pub(crate) principal: Option<Arc<str>>,
    pub(crate) deadline: Duration,
    pub(crate) audit_retention: Option<Duration>,
}

impl Namespaces {
    /// Finds a namespace for a limiter.
    pub(crate) async fn open(&self, name: &NamespaceName) -> Result<Namespace, Error> {
        match self.find(name).await? {
            Some(found) => Ok(found),
            None if name.as_str() == DEFAULT_NAMESPACE => self.register_name(name).await,
            None => Err(Error::UnknownNamespace { name: name.clone() }),
        }
    }

    /// Registers a namespace. One that is registered already is returned unchanged.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for the name; an error of the store.
    pub async fn register(&self, name: &str) -> Result<Namespace, Error> {
        self.register_name(&NamespaceName::new(name)?).await
    }

    async fn register_name(&self, name: &NamespaceName) -> Result<Namespace, Error> {
        let namespace = Namespace {
            id: self.entropy.namespace_id(),
            name: name.clone(),
            created_at: self.clock.now(),
            deleted_at: None,
        };
        let retention = self.default_retention(name).await?;
        let name_record = Record::NamespaceName(name.clone(), namespace.id.clone());
        let mut batch = vec![
            Write::Put(name_record, Precondition::Absent),
            Write::Put(Record::Namespace(namespace.clone()), Precondition::Absent),
            self.namespace_audit(&namespace, AuditAction::NamespaceRegistered, retention),
        ];
        if retention.is_some() {
            let config = with_retention(&namespace.id, None, retention);
            batch.push(Write::Put(Record::Config(config), Precondition::Absent));
        }
        match self.call(self.store.write(&batch)).await? {
            Written::Done => Ok(namespace),
            Written::Conflict(_) => {
                let found = self.find(name).await?;
                found.ok_or_else(|| Error::UnknownNamespace { name: name.clone() })
            }
        }
    }

    /// The namespace with this name; `None` if it was deleted.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for the name; an error of the store.
    pub async fn get(&self, name: &str) -> Result<Option<Namespace>, Error> {
        self.find(&NamespaceName::new(name)?).await
    }

    async fn find(&self, name: &NamespaceName) -> Result<Option<Namespace>, Error> {
        let key = [Key::NamespaceName(name.clone())];
        let mut found = self.call(self.store.get(&key)).await?;
        match found.pop().flatten() {
            Some(Record::NamespaceName(_, id)) => self.by_id(&id).await,
            _ => Ok(None),
        }
    }

    /// The namespace with this id, deleted or not.
    ///
    /// # Errors
    ///
    /// An error of the store.
    pub async fn by_id(&self, id: &NamespaceId) -> Result<Option<Namespace>, Error> {
        let key = [Key::Namespace(id.clone())];
        let found = self.call(self.store.get(&key)).await?;
        Ok(found.into_iter().flatten().find_map(Record::into_namespace))
    }

    /// All registered namespaces.
    pub fn list(&self) -> Pages<Namespace> {
        self.pages(|namespace| namespace.deleted_at.is_none())
    }

    /// Deleted namespaces whose items still exist: they can be recovered or purged.
    pub fn orphans(&self) -> Pages<Namespace> {
        self.pages(|namespace| namespace.deleted_at.is_some())
    }

    fn pages(&self, which: fn(&Namespace) -> bool) -> Pages<Namespace> {
        let registry = self.clone();
        Pages::new(move |page: PageRequest| {
            let registry = registry.clone();
            async move {
                let page = registry.call(registry.store.list(&Query::Namespaces, &page)).await?;
                Ok(page.filter_map(|record| record.into_namespace().filter(which)))
            }
        })
    }

    /// Soft-deletes a namespace: its name is free at once, its items stay until they are purged. Open
    /// limiters keep working in it.
    ///
    /// # Errors
    ///
    /// [`Error::NotFound`]; [`Error::Invalid`] for the name; an error of the store.
    pub async fn delete(&self, name: &str) -> Result<Namespace, Error> {
        let name = NamespaceName::new(name)?;
        let found = self.find(&name).await?;
        let mut namespace =
            found.ok_or_else(|| Error::NotFound(Object::Namespace(name.clone())))?;
        namespace.deleted_at = Some(self.clock.now());
        let retention = self.stored_retention(&namespace.id).await?;
        let batch = [
            Write::Delete(Key::NamespaceName(name.clone()), Precondition::Present),
            Write::Put(Record::Namespace(namespace.clone()), Precondition::Present),
            self.namespace_audit(&namespace, AuditAction::NamespaceDeleted, retention),
        ];
        match self.call(self.store.write(&batch)).await? {
            Written::Done => Ok(namespace),
            Written::Conflict(_) => Err(Error::NotFound(Object::Namespace(name.clone()))),
        }
    }

    /// Restores a deleted namespace under its name.
    ///
    /// # Errors
    ///
    /// [`Error::NotFound`]; [`Error::AlreadyExists`] when another namespace has the name; an error of the
    /// store.
    pub async fn recover(&self, id: &NamespaceId) -> Result<Namespace, Error> {
        let mut namespace = self
            .by_id(id)
            .await?
            .ok_or_else(|| Error::NotFound(Object::NamespaceId(id.clone())))?;
        if namespace.deleted_at.take().is_none() {
            return Ok(namespace);
        }
        let retention = self.stored_retention(id).await?;
        let name_record = Record::NamespaceName(namespace.name.clone(), id.clone());
        let batch = [
            Write::Put(name_record, Precondition::Absent),
            Write::Put(Record::Namespace(namespace.clone()), Precondition::Present),
            self.namespace_audit(&namespace, AuditAction::NamespaceRecovered, retention),
        ];
        match self.call(self.store.write(&batch)).await? {
            Written::Done => Ok(namespace),
            Written::Conflict(0) => Err(Error::AlreadyExists(Object::Namespace(namespace.name))),
            Written::Conflict(_) => Err(Error::NotFound(Object::NamespaceId(id.clone()))),
        }
    }

    /// Removes a deleted namespace with all its items, for good. Calls `progress` with the number of items
    /// removed so far. A purge that was interrupted can be repeated.
    ///
    /// Returns the number of items removed.
    ///
    /// # Errors
    ///
    /// [`Error::NotFound`]; [`Error::NamespaceInUse`] unless it was deleted first; an error of the
    /// store.
    pub async fn purge(
        &self,
        id: &NamespaceId,
        mut progress: impl FnMut(u64),
    ) -> Result<u64, Error> {
        let namespace = self
            .by_id(id)
            .await?
            .ok_or_else(|| Error::NotFound(Object::NamespaceId(id.clone())))?;
        if namespace.deleted_at.is_none() {
            return Err(Error::NamespaceInUse { name: namespace.name });
        }
        let scope = Scope::Namespace(id.clone());
        let mut removed = 0;
        let mut request = PageRequest::first(crate::PAGE_MAX);
        loop {
            let page = self.call(self.store.list_keys(&scope, &request)).await?;
            if !page.items.is_empty() {
                self.call(self.store.delete(&page.items)).await?;
                removed += page.items.len() as u64;
                progress(removed);
            }
            match page.next {
                Some(after) => request.after = Some(after),
                None => break,
            }
        }
        self.call(self.store.delete(&[Key::Namespace(id.clone())])).await?;
        Ok(removed)
    }

    /// Stores how many days audit events are kept, in every registered namespace. A namespace that is
    /// registered later copies it from `default`. The expiry of existing events does not change. Calls
    /// `progress` with the number of namespaces so far. A call that was interrupted can be repeated.
    ///
    /// ```
    /// # use zae_limiter_core::{MemoryStore, RateLimiter};
    /// # tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(async {
    /// # let limiter = RateLimiter::builder(MemoryStore::new()).open().await?;
    /// limiter.namespaces().set_audit_retention(30, |_| {}).await?;
    /// let stored = limiter.system_defaults().await?;
    /// assert_eq!(stored.and_then(|stored| stored.audit_retention_days), Some(30));
    /// # Ok::<(), zae_limiter_core::Error>(())
    /// # }).unwrap();
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] unless `days` is 1 to [`AUDIT_RETENTION_DAYS_MAX`](crate::AUDIT_RETENTION_DAYS_MAX);
    /// [`Error::Contended`]; an error of the store.
    pub async fn set_audit_retention(
        &self,
        days: u32,
        mut progress: impl FnMut(u64),
    ) -> Result<(), Error> {
        check_retention(days)?;
        let mut done = 0;
        let mut pages = self.list();
        while let Some(namespaces) = pages.next_page().await? {
            for namespace in namespaces {
                self.set_audit_retention_of(&namespace.id, days).await?;
                done += 1;
                progress(done);
            }
        }
        Ok(())
    }

    /// Stores the retention for one namespace. If it is stored already, nothing is written.
    pub(crate) async fn set_audit_retention_of(
        &self,
        id: &NamespaceId,
        days: u32,
    ) -> Result<(), Error> {
        check_retention(days)?;
        let key = [Key::Config(id.clone(), ConfigLevel::System)];
        for _ in 0..ATTEMPTS_MAX {
            let found = self.call(self.store.get(&key)).await?;
            let current = found.into_iter().flatten().find_map(Record::into_config);
            let stored = current.as_ref().and_then(|current| current.audit_retention_days);
            if stored == Some(days) {
                return Ok(());
            }
            let precondition = current
                .as_ref()
                .map_or(Precondition::Absent, |it| Precondition::Version(it.version));
            let config = with_retention(id, current, Some(days));
            let change = Change {
                subject: AuditSubject::System,
                action: AuditAction::LimitsSet,
                resource: None,
                details: config_details(&config),
            };
            let audit = self.audit(id, change, Some(days));
            let batch = [Write::Put(Record::Config(config), precondition), audit];
            if self.call(self.store.write(&batch)).await? == Written::Done {
                return Ok(());
            }
        }
        Err(Error::Contended { attempts: ATTEMPTS_MAX })
    }

    /// The retention that a new namespace copies from `default`.
    async fn default_retention(&self, new: &NamespaceName) -> Result<Option<u32>, Error> {
        if new.as_str() == DEFAULT_NAMESPACE {
            return Ok(None);
        }
        let key = [Key::NamespaceName(NamespaceName::new(DEFAULT_NAMESPACE)?)];
        match self.call(self.store.get(&key)).await?.pop().flatten() {
            Some(Record::NamespaceName(_, id)) => self.stored_retention(&id).await,
            _ => Ok(None),
        }
    }

    fn namespace_audit(
        &self,
        namespace: &Namespace,
        action: AuditAction,
        retention: Option<u32>,
    ) -> Write {
        let change = Change {
            subject: AuditSubject::System,
            action,
            resource: None,
            details: json!({ "namespace_name": namespace.name.as_str() }),
        };
        self.audit(&namespace.id, change, retention)
    }
}

/// The configuration of the system with another retention of audit events.
fn with_retention(id: &NamespaceId, current: Option<Config>, days: Option<u32>) -> Config {
    let current = current.unwrap_or_else(|| Config::nothing(id.clone(), ConfigLevel::System));
    Config { audit_retention_days: days, version: current.version + 1, ..current }
}
