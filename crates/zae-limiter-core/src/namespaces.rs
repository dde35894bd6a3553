//! Namespaces: limiters that share a store and are isolated from each other.

use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use zae_limiter_model::{NamespaceId, NamespaceName, Timestamp};

use crate::audit::{Change, check_retention};
use crate::clock::Clock;
use crate::entropy::Entropy;
use crate::error::{Error, Object};
use crate::limiter::call_store;
use crate::limits::{ATTEMPTS_MAX, config_details};
use crate::page::PageRequest;
use crate::pages::Pages;
use crate::record::{
    AuditAction, AuditSubject, Config, ConfigLevel, Key, Namespace, NamespaceStatus, Record,
};
use crate::skew::ClockCheck;
use crate::store::{DELETION_WAIT_MAX, Precondition, Query, Scope, Store, Write, Written};

/// The namespace that is registered on first use.
const DEFAULT_NAMESPACE: &str = "default";

/// How often a purge lists the items of a namespace that others still write to.
const PURGE_PASSES_MAX: u32 = 8;

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
    pub(crate) clock_check: Arc<ClockCheck>,
    pub(crate) entropy: Arc<Entropy>,
    pub(crate) principal: Option<Arc<str>>,
    pub(crate) deadline: Duration,
    pub(crate) audit_retention: Option<Duration>,
}

impl Namespaces {
    pub(crate) fn now(&self) -> Timestamp {
        self.clock_check.now(&*self.clock, &*self.store, None::<fn()>).now
    }

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
        // Before the clock is read: the response may bring the store's time.
        let retention = self.default_retention(name).await?;
        let namespace = Namespace {
            id: self.entropy.namespace_id(),
            name: name.clone(),
            created_at: self.now(),
            deleted_at: None,
            is_purging: false,
        };
        // Most names are free: the first attempt does not look.
        let mut holder = Holder::Nobody;
        for _ in 0..ATTEMPTS_MAX {
            let mut batch = match holder {
                Holder::Namespace(found) => return Ok(found),
                free => free.claim(name, &namespace.id),
            };
            batch.push(Write::Put(Record::Namespace(namespace.clone()), Precondition::Absent));
            let action = AuditAction::NamespaceRegistered;
            batch.push(self.namespace_audit(&namespace, action, retention));
            if retention.is_some() {
                let config = with_retention(&namespace.id, None, retention);
                batch.push(Write::Put(Record::Config(config), Precondition::Absent));
            }
            if self.call(self.store.write(&batch)).await? == Written::Done {
                return Ok(namespace);
            }
            holder = self.holder(name).await?;
        }
        Err(Error::Contended { attempts: ATTEMPTS_MAX })
    }

    /// The namespace with this name; `None` if it was deleted.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for the name; an error of the store.
    pub async fn get(&self, name: &str) -> Result<Option<Namespace>, Error> {
        self.find(&NamespaceName::new(name)?).await
    }

    pub(crate) async fn find(&self, name: &NamespaceName) -> Result<Option<Namespace>, Error> {
        Ok(match self.holder(name).await? {
            Holder::Namespace(found) => Some(found),
            Holder::Nobody | Holder::Dangling(..) => None,
        })
    }

    /// Who has a name.
    pub(crate) async fn holder(&self, name: &NamespaceName) -> Result<Holder, Error> {
        let key = [Key::NamespaceName(name.clone())];
        let Some(Record::NamespaceName(_, id)) =
            self.call(self.store.get(&key)).await?.pop().flatten()
        else {
            return Ok(Holder::Nobody);
        };
        let found = self.by_id(&id).await?;
        Ok(match found.as_ref().map(Namespace::status) {
            Some(NamespaceStatus::Active) => Holder::Namespace(found.expect("it has a status")),
            status => Holder::Dangling(id, status),
        })
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
        namespace.deleted_at = Some(self.now());
        let retention = self.stored_retention(&namespace.id).await?;
        let active = Precondition::Status(NamespaceStatus::Active);
        let named = Precondition::NameOf(namespace.id.clone());
        let batch = [
            Write::Delete(Key::NamespaceName(name.clone()), named),
            Write::Put(Record::Namespace(namespace.clone()), active),
            self.namespace_audit(&namespace, AuditAction::NamespaceDeleted, retention),
        ];
        match self.call(self.store.write(&batch)).await? {
            Written::Done => Ok(namespace),
            Written::Conflict(_) => Err(Error::NotFound(Object::Namespace(name.clone()))),
        }
    }

    /// Restores a deleted namespace under its name. One that is registered, but has lost its name, gets it back.
    ///
    /// # Errors
    ///
    /// [`Error::NotFound`]; [`Error::AlreadyExists`] when another namespace has the name;
    /// [`Error::NamespacePurged`] when a purge has begun; [`Error::Contended`]; an error of the store.
    pub async fn recover(&self, id: &NamespaceId) -> Result<Namespace, Error> {
        let retention = self.stored_retention(id).await?;
        for _ in 0..ATTEMPTS_MAX {
            let found = self.by_id(id).await?;
            let found = found.ok_or_else(|| Error::NotFound(Object::NamespaceId(id.clone())))?;
            let (name, status) = (found.name.clone(), found.status());
            if status == NamespaceStatus::Purging {
                return Err(Error::NamespacePurged { name });
            }
            let namespace = Namespace { deleted_at: None, ..found };
            let mut batch = match self.holder(&name).await? {
                Holder::Namespace(other) if other.id == *id => return Ok(namespace),
                Holder::Namespace(_) => return Err(Error::AlreadyExists(Object::Namespace(name))),
                free => free.claim(&name, id),
            };
            let precondition = Precondition::Status(status);
            batch.push(Write::Put(Record::Namespace(namespace.clone()), precondition));
            let action = AuditAction::NamespaceRecovered;
            batch.push(self.namespace_audit(&namespace, action, retention));
            if self.call(self.store.write(&batch)).await? == Written::Done {
                return Ok(namespace);
            }
        }
        Err(Error::Contended { attempts: ATTEMPTS_MAX })
    }

    /// Removes a deleted namespace with all its items, for good. Calls `progress` with the number of items
    /// removed so far. A purge that was interrupted can be repeated, and can no longer be undone.
    ///
    /// Limiters that are open in the namespace notice within the TTL of their cache, and may write until then.
    ///
    /// Returns the number of items removed.
    ///
    /// # Errors
    ///
    /// [`Error::NotFound`]; [`Error::NamespaceInUse`] unless it was deleted first; [`Error::Contended`]; an
    /// error of the store.
    pub async fn purge(
        &self,
        id: &NamespaceId,
        mut progress: impl FnMut(u64),
    ) -> Result<u64, Error> {
        self.begin_purge(id).await?;
        let scope = Scope::Namespace(id.clone());
        let deadline = self.deadline.saturating_add(DELETION_WAIT_MAX);
        let noting = self.store.note_deletion(&scope, self.now());
        call_store(&*self.clock, deadline, noting).await?;
        let mut removed = 0;
        for _ in 0..PURGE_PASSES_MAX {
            let before = removed;
            self.purge_once(id, &mut removed, &mut progress).await?;
            // Open limiters and aggregators may have written meanwhile.
            if removed == before {
                break;
            }
        }
        // No precondition: nothing leads out of the status of a purge.
        self.call(self.store.delete(&[Key::Namespace(id.clone())])).await?;
        Ok(removed)
    }

    /// Marks the namespace, so that nobody recovers it while its items are removed.
    async fn begin_purge(&self, id: &NamespaceId) -> Result<(), Error> {
        for _ in 0..ATTEMPTS_MAX {
            let found = self.by_id(id).await?;
            let found = found.ok_or_else(|| Error::NotFound(Object::NamespaceId(id.clone())))?;
            match found.status() {
                NamespaceStatus::Active => {
                    return Err(Error::NamespaceInUse { name: found.name });
                }
                NamespaceStatus::Purging => return Ok(()),
                NamespaceStatus::Deleted => {}
            }
            let marked = Record::Namespace(Namespace { is_purging: true, ..found });
            let deleted = Precondition::Status(NamespaceStatus::Deleted);
            if self.call(self.store.write(&[Write::Put(marked, deleted)])).await? == Written::Done {
                return Ok(());
            }
        }
        Err(Error::Contended { attempts: ATTEMPTS_MAX })
    }

    async fn purge_once(
        &self,
        id: &NamespaceId,
        removed: &mut u64,
        progress: &mut impl FnMut(u64),
    ) -> Result<(), Error> {
        let scope = Scope::Namespace(id.clone());
        let mut request = PageRequest::first(crate::PAGE_MAX);
        loop {
            let page = self.call(self.store.list_keys(&scope, &request)).await?;
            if !page.items.is_empty() {
                self.call(self.store.delete(&page.items)).await?;
                *removed += page.items.len() as u64;
                progress(*removed);
            }
            match page.next {
                Some(after) => request.after = Some(after),
                None => return Ok(()),
            }
        }
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
                if self.set_audit_retention_of(&namespace.id, days).await? {
                    done += 1;
                    progress(done);
                }
            }
        }
        Ok(())
    }

    /// Stores the retention for one namespace, unless it is stored already. Returns `false`, and writes nothing, if the
    /// namespace was purged.
    pub(crate) async fn set_audit_retention_of(
        &self,
        id: &NamespaceId,
        days: u32,
    ) -> Result<bool, Error> {
        check_retention(days)?;
        let own = Key::Namespace(id.clone());
        let keys = [own.clone(), Key::Config(id.clone(), ConfigLevel::System)];
        for _ in 0..ATTEMPTS_MAX {
            let (mut status, mut current) = (None, None);
            for record in self.call(self.store.get(&keys)).await?.into_iter().flatten() {
                match record {
                    Record::Namespace(namespace) => status = Some(namespace.status()),
                    record => current = record.into_config(),
                }
            }
            let Some(status) = status.filter(|status| *status != NamespaceStatus::Purging) else {
                return Ok(false);
            };
            let stored = current.as_ref().and_then(|current| current.audit_retention_days);
            if stored == Some(days) {
                return Ok(true);
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
            let exists = Write::Check(own.clone(), Precondition::Status(status));
            let batch = [Write::Put(Record::Config(config), precondition), audit, exists];
            if self.call(self.store.write(&batch)).await? == Written::Done {
                return Ok(true);
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

/// Who has a name.
///
/// All changes keep this true: the record of a name points to a namespace that is active, and every active
/// namespace has its name. Each change requires, in one batch, the status from which it starts. Purges of
/// earlier releases, and clients that write the two records one after the other, leave names that point to
/// a namespace which is deleted or gone. Such a name is free.
#[derive(Debug)]
pub(crate) enum Holder {
    Nobody,
    Namespace(Namespace),
    /// The namespace that the name points to, and its status if it exists.
    Dangling(NamespaceId, Option<NamespaceStatus>),
}

impl Holder {
    /// The writes that give a free name to a namespace. The caller writes the record of that namespace.
    fn claim(&self, name: &NamespaceName, id: &NamespaceId) -> Vec<Write> {
        let record = Record::NamespaceName(name.clone(), id.clone());
        let (old, status) = match self {
            Self::Nobody => return vec![Write::Put(record, Precondition::Absent)],
            Self::Namespace(found) => (&found.id, Some(found.status())),
            Self::Dangling(old, status) => (old, *status),
        };
        let mut writes = vec![Write::Put(record, Precondition::NameOf(old.clone()))];
        if old != id {
            let precondition = status.map_or(Precondition::Absent, Precondition::Status);
            writes.push(Write::Check(Key::Namespace(old.clone()), precondition));
        }
        writes
    }
}

/// The configuration of the system with another retention of audit events.
fn with_retention(id: &NamespaceId, current: Option<Config>, days: Option<u32>) -> Config {
    let current = current.unwrap_or_else(|| Config::nothing(id.clone(), ConfigLevel::System));
    Config { audit_retention_days: days, version: current.version + 1, ..current }
}
