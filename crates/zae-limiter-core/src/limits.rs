//! Stored limits, at four levels. The most specific level that exists replaces all others.

use serde_json::json;
use zae_limiter_model::{EntityId, Invalid, Limit, LimitSet, ResourceName};

use crate::audit::Change;
use crate::error::{Error, Object};
use crate::limiter::RateLimiter;
use crate::page::PageRequest;
use crate::pages::Pages;
use crate::plan::Source;
use crate::record::{AuditAction, AuditSubject, Config, ConfigLevel, Key, OnUnavailable, Record};
use crate::stale::{Entries, Stale};
use crate::store::{BucketQuery, Precondition, Query, ResourceList, Write, Written};

/// The most attempts of a change while other clients change the same record.
pub(crate) const ATTEMPTS_MAX: u32 = 16;

/// The limits that apply to an entity on a resource, and the level they come from.
///
/// ```
/// # use zae_limiter_core::{Limit, MemoryStore, RateLimiter};
/// # use zae_limiter_core::{ConfigLevel, ResourceName};
/// # tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(async {
/// # let limiter = RateLimiter::builder(MemoryStore::new()).open().await?;
/// limiter.set_resource_defaults("gpt-4", [Limit::per_minute("rpm", 100)]).await?;
/// let effective = limiter.effective_limits("key-1", "gpt-4").await?;
/// assert_eq!(effective.limits, [Limit::per_minute("rpm", 100)]);
/// assert_eq!(effective.level, Some(ConfigLevel::Resource(ResourceName::new("gpt-4")?)));
/// # Ok::<(), zae_limiter_core::Error>(())
/// # }).unwrap();
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct EffectiveLimits {
    /// The limits; empty when there are none at any level.
    pub limits: Vec<Limit>,
    /// The level they come from; `None` for the limiter's own defaults.
    pub level: Option<ConfigLevel>,
}

/// What to do when exactly these limits are stored already.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Same {
    /// Write them again, with a new version.
    Write,
    /// Leave them as they are.
    Keep,
}

impl RateLimiter {
    /// Sets the limits of an entity on one resource, or, without a resource, on all resources for which it
    /// has none. Existing buckets change at once.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for a name or a limit; [`Error::Contended`]; an error of the store.
    pub async fn set_limits(
        &self,
        entity: &str,
        resource: Option<&str>,
        limits: impl IntoIterator<Item = Limit>,
    ) -> Result<Config, Error> {
        let level = entity_level(entity, resource)?;
        let (config, _) =
            self.put_config(level.clone(), not_empty(limits)?, None, Same::Write).await?;
        self.update_buckets(&level).await?;
        Ok(config)
    }

    /// Sets the limits of an entity as [`set_limits`](Self::set_limits) does. If exactly these are stored, it writes
    /// nothing, and no audit event. For programs that declare their limits each time they start.
    ///
    /// ```
    /// # use zae_limiter_core::{Limit, MemoryStore, RateLimiter};
    /// # tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(async {
    /// # let limiter = RateLimiter::builder(MemoryStore::new()).open().await?;
    /// for _ in 0..2 {
    ///     let limits = [Limit::per_minute("rpm", 100)];
    ///     let stored = limiter.ensure_limits("key-1", Some("gpt-4"), limits).await?;
    ///     assert_eq!(stored.version, 1); // the second call changes nothing
    /// }
    /// # Ok::<(), zae_limiter_core::Error>(())
    /// # }).unwrap();
    /// ```
    ///
    /// # Errors
    ///
    /// As [`set_limits`](Self::set_limits).
    pub async fn ensure_limits(
        &self,
        entity: &str,
        resource: Option<&str>,
        limits: impl IntoIterator<Item = Limit>,
    ) -> Result<Config, Error> {
        let level = entity_level(entity, resource)?;
        let (config, changed) =
            self.put_config(level.clone(), not_empty(limits)?, None, Same::Keep).await?;
        if changed {
            self.update_buckets(&level).await?;
        }
        Ok(config)
    }

    /// The limits stored for an entity on a resource, or for all its resources.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for a name; an error of the store.
    pub async fn limits(
        &self,
        entity: &str,
        resource: Option<&str>,
    ) -> Result<Option<Config>, Error> {
        self.get_config(entity_level(entity, resource)?).await
    }

    /// Deletes the limits stored for an entity. Then those of the next level apply.
    ///
    /// # Errors
    ///
    /// [`Error::NotFound`] when there are none; [`Error::Invalid`]; an error of the store.
    pub async fn delete_limits(&self, entity: &str, resource: Option<&str>) -> Result<(), Error> {
        let level = entity_level(entity, resource)?;
        self.delete_config(level.clone()).await?;
        self.update_buckets(&level).await
    }

    /// Sets the limits of a resource, for all entities that have none of their own. Existing buckets change
    /// with their next call.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for a name or a limit; [`Error::Contended`]; an error of the store.
    pub async fn set_resource_defaults(
        &self,
        resource: &str,
        limits: impl IntoIterator<Item = Limit>,
    ) -> Result<Config, Error> {
        let level = ConfigLevel::Resource(ResourceName::new(resource)?);
        let put = self.put_config(level, not_empty(limits)?, None, Same::Write);
        put.await.map(|(config, _)| config)
    }

    /// Sets the limits of a resource as [`set_resource_defaults`](Self::set_resource_defaults) does. If exactly these
    /// are stored, it writes nothing, and no audit event.
    ///
    /// # Errors
    ///
    /// As [`set_resource_defaults`](Self::set_resource_defaults).
    pub async fn ensure_resource_defaults(
        &self,
        resource: &str,
        limits: impl IntoIterator<Item = Limit>,
    ) -> Result<Config, Error> {
        let level = ConfigLevel::Resource(ResourceName::new(resource)?);
        let put = self.put_config(level, not_empty(limits)?, None, Same::Keep);
        put.await.map(|(config, _)| config)
    }

    /// The limits stored for a resource.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for the name; an error of the store.
    pub async fn resource_defaults(&self, resource: &str) -> Result<Option<Config>, Error> {
        self.get_config(ConfigLevel::Resource(ResourceName::new(resource)?)).await
    }

    /// Deletes the limits stored for a resource.
    ///
    /// # Errors
    ///
    /// [`Error::NotFound`] when there are none; [`Error::Invalid`]; an error of the store.
    pub async fn delete_resource_defaults(&self, resource: &str) -> Result<(), Error> {
        self.delete_config(ConfigLevel::Resource(ResourceName::new(resource)?)).await
    }

    /// Sets the limits that apply if no others are stored, and what happens to calls while the store is
    /// unavailable; `None` leaves that as it is.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for a limit; [`Error::Contended`]; an error of the store.
    pub async fn set_system_defaults(
        &self,
        limits: impl IntoIterator<Item = Limit>,
        on_unavailable: Option<OnUnavailable>,
    ) -> Result<Config, Error> {
        let limits = system_limits(limits, on_unavailable)?;
        let put = self.put_config(ConfigLevel::System, limits, on_unavailable, Same::Write);
        put.await.map(|(config, _)| config)
    }

    /// Sets the defaults of the system as [`set_system_defaults`](Self::set_system_defaults) does. If exactly these are
    /// stored, it writes nothing, and no audit event.
    ///
    /// # Errors
    ///
    /// As [`set_system_defaults`](Self::set_system_defaults).
    pub async fn ensure_system_defaults(
        &self,
        limits: impl IntoIterator<Item = Limit>,
        on_unavailable: Option<OnUnavailable>,
    ) -> Result<Config, Error> {
        let limits = system_limits(limits, on_unavailable)?;
        let put = self.put_config(ConfigLevel::System, limits, on_unavailable, Same::Keep);
        put.await.map(|(config, _)| config)
    }

    /// The configuration stored for the system.
    ///
    /// # Errors
    ///
    /// An error of the store.
    pub async fn system_defaults(&self) -> Result<Option<Config>, Error> {
        self.get_config(ConfigLevel::System).await
    }

    /// Deletes the limits and `on_unavailable` stored for the system. The retention of audit events stays
    /// stored.
    ///
    /// # Errors
    ///
    /// [`Error::NotFound`] when there is nothing; [`Error::Contended`]; an error of the store.
    pub async fn delete_system_defaults(&self) -> Result<(), Error> {
        let level = ConfigLevel::System;
        let nothing = Config::nothing(self.namespace_id().clone(), level.clone());
        for _ in 0..ATTEMPTS_MAX {
            let (current, retention) = self.config_and_retention(&level).await?;
            let Some(current) = current.filter(|current| !current.sets_nothing()) else {
                return Err(Error::NotFound(Object::Limits(level)));
            };
            let precondition = Precondition::Version(current.version);
            let change = match current.audit_retention_days {
                None => Write::Delete(Record::Config(current).key(), precondition),
                days => {
                    let version = current.version + 1;
                    let left = Config { audit_retention_days: days, version, ..nothing.clone() };
                    Write::Put(Record::Config(left), precondition)
                }
            };
            let audit = self.config_audit(&level, AuditAction::LimitsDeleted, json!({}), retention);
            if self.change_config(&level, change, audit).await? {
                self.remember_system(&nothing);
                return Ok(());
            }
        }
        Err(Error::Contended { attempts: ATTEMPTS_MAX })
    }

    /// The limits that apply to an entity on a resource, and the level they come from.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for a name; an error of the store.
    pub async fn effective_limits(
        &self,
        entity: &str,
        resource: &str,
    ) -> Result<EffectiveLimits, Error> {
        let (entity, resource) = (EntityId::new(entity)?, ResourceName::new(resource)?);
        let now = self.inner.now().now;
        let target = self.inner.call(self.inner.resolve(&entity, &resource, now)).await?;
        let level = match target.origin().source {
            Source::EntityResource => Some(ConfigLevel::EntityResource(entity, resource)),
            Source::Entity => Some(ConfigLevel::Entity(entity)),
            Source::Resource => Some(ConfigLevel::Resource(resource)),
            Source::System => Some(ConfigLevel::System),
            Source::Limiter | Source::Call => None,
        };
        Ok(EffectiveLimits { limits: target.limits().to_limits(), level })
    }

    /// The entities with their own limits for a resource, or for all resources, by id.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for the name.
    pub fn entities_with_limits(&self, resource: Option<&str>) -> Result<Pages<Config>, Error> {
        let resource = resource.map(ResourceName::new).transpose()?;
        let query = Query::EntityConfigs(self.namespace_id().clone(), resource);
        Ok(self.pages(query, |record, _| record.into_config()))
    }

    /// The resources with default limits, or with limits of some entity, by name.
    pub fn resources(&self, which: ResourceList) -> Pages<ResourceName> {
        let limiter = self.clone();
        Pages::new(move |page: PageRequest| {
            let limiter = limiter.clone();
            async move {
                let namespace = limiter.namespace_id();
                let list = limiter.store().list_resources(namespace, which, &page);
                limiter.inner.call(list).await
            }
        })
    }

    /// What is stored at a level.
    ///
    /// # Errors
    ///
    /// An error of the store.
    pub async fn stored_limits(&self, level: &ConfigLevel) -> Result<Option<Config>, Error> {
        self.get_config(level.clone()).await
    }

    /// Sets the limits of a level, if `expected` is still what [`stored_limits`](Self::stored_limits) returns; else
    /// changes nothing and returns `None`. For programs that show somebody what a change replaces.
    ///
    /// ```
    /// # use zae_limiter_core::{ConfigLevel, Limit, MemoryStore, RateLimiter};
    /// # tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(async {
    /// # let limiter = RateLimiter::builder(MemoryStore::new()).open().await?;
    /// let (level, limits) = (ConfigLevel::System, [Limit::per_minute("rpm", 100)]);
    /// let stored = limiter.stored_limits(&level).await?;
    /// let set = limiter.replace_limits(&level, stored.as_ref(), limits.clone(), None).await?;
    /// assert!(set.is_some());
    /// let late = limiter.replace_limits(&level, stored.as_ref(), limits, None).await?;
    /// assert!(late.is_none());
    /// # Ok::<(), zae_limiter_core::Error>(())
    /// # }).unwrap();
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for a limit; an error of the store.
    pub async fn replace_limits(
        &self,
        level: &ConfigLevel,
        expected: Option<&Config>,
        limits: impl IntoIterator<Item = Limit>,
        on_unavailable: Option<OnUnavailable>,
    ) -> Result<Option<Config>, Error> {
        let limits = match level {
            ConfigLevel::System => system_limits(limits, on_unavailable)?,
            _ => not_empty(limits)?,
        };
        let (current, retention) = self.config_and_retention(level).await?;
        if current.as_ref() != expected {
            return Ok(None);
        }
        let put = self.try_put(level, current, retention, limits, on_unavailable).await?;
        if put.is_some() {
            self.update_buckets(level).await?;
        }
        Ok(put)
    }

    async fn get_config(&self, level: ConfigLevel) -> Result<Option<Config>, Error> {
        let key = [Key::Config(self.namespace_id().clone(), level)];
        let found = self.inner.call(self.store().get(&key)).await?;
        Ok(found.into_iter().flatten().find_map(Record::into_config))
    }

    /// Reads the configuration of a level, and the retention of audit events in days. Fails if the namespace was
    /// purged.
    async fn config_and_retention(
        &self,
        level: &ConfigLevel,
    ) -> Result<(Option<Config>, Option<u32>), Error> {
        let key = |level: &ConfigLevel| Key::Config(self.namespace_id().clone(), level.clone());
        let namespace = Key::Namespace(self.namespace_id().clone());
        let keys = [namespace, key(level), key(&ConfigLevel::System)];
        let keys = if *level == ConfigLevel::System { &keys[..2] } else { &keys };
        let (mut current, mut retention) = (None, None);
        let found = self.inner.call(self.store().get(keys)).await?;
        self.inner.require_namespace(found.iter().flatten())?;
        for config in found.into_iter().flatten().filter_map(Record::into_config) {
            retention = retention.or(config.audit_retention_days);
            if config.level == *level {
                current = Some(config);
            }
        }
        Ok((current, retention))
    }

    /// Stores limits, and says whether that changed anything.
    async fn put_config(
        &self,
        level: ConfigLevel,
        limits: LimitSet,
        on_unavailable: Option<OnUnavailable>,
        same: Same,
    ) -> Result<(Config, bool), Error> {
        for _ in 0..ATTEMPTS_MAX {
            let (current, retention) = self.config_and_retention(&level).await?;
            // Compared in every attempt: another client may just have stored the same.
            let is_same = |stored: &Config| {
                let policy = on_unavailable.or(stored.on_unavailable);
                stored.limits == limits && stored.on_unavailable == policy
            };
            let current = match current {
                Some(stored) if same == Same::Keep && is_same(&stored) => {
                    // As after a change: this process goes by what is stored now.
                    self.remember_system(&stored);
                    Entries::from(&level).forget(&self.inner);
                    return Ok((stored, false));
                }
                current => current,
            };
            let put =
                self.try_put(&level, current, retention, limits.clone(), on_unavailable).await?;
            if let Some(config) = put {
                return Ok((config, true));
            }
        }
        Err(Error::Contended { attempts: ATTEMPTS_MAX })
    }

    /// Writes limits in place of `current`; `None` when something else is stored by now.
    async fn try_put(
        &self,
        level: &ConfigLevel,
        current: Option<Config>,
        retention: Option<u32>,
        limits: LimitSet,
        on_unavailable: Option<OnUnavailable>,
    ) -> Result<Option<Config>, Error> {
        // Versions start at 1 again when a level is deleted and set, here as in other clients of a
        // shared table. So a writer that read the old version 1 may replace the new one, as if it had
        // written a moment later. It writes its own limits; only the system level keeps other fields
        // that it read.
        let precondition =
            current.as_ref().map_or(Precondition::Absent, |it| Precondition::Version(it.version));
        let nothing = || Config::nothing(self.namespace_id().clone(), level.clone());
        let current = current.unwrap_or_else(nothing);
        let config = Config {
            limits,
            on_unavailable: on_unavailable.or(current.on_unavailable),
            version: current.version + 1,
            ..current
        };
        let details = config_details(&config);
        let audit = self.config_audit(level, AuditAction::LimitsSet, details, retention);
        let change = Write::Put(Record::Config(config.clone()), precondition);
        if !self.change_config(level, change, audit).await? {
            return Ok(None);
        }
        self.remember_system(&config);
        Ok(Some(config))
    }

    async fn delete_config(&self, level: ConfigLevel) -> Result<(), Error> {
        let key = Key::Config(self.namespace_id().clone(), level.clone());
        let retention = self.stored_retention().await?;
        let audit = self.config_audit(&level, AuditAction::LimitsDeleted, json!({}), retention);
        match self.change_config(&level, Write::Delete(key, Precondition::Present), audit).await? {
            true => Ok(()),
            false => Err(Error::NotFound(Object::Limits(level))),
        }
    }

    /// Writes the change and its audit event; `false` when the precondition did not hold.
    async fn change_config(
        &self,
        level: &ConfigLevel,
        change: Write,
        audit: Write,
    ) -> Result<bool, Error> {
        let stale = Stale::new(&self.inner, level.into());
        let written = self.inner.call(self.store().write(&[change, audit])).await?;
        stale.answered();
        Ok(written == Written::Done)
    }

    fn remember_system(&self, config: &Config) {
        if config.level == ConfigLevel::System {
            self.inner.remember_policy(config.on_unavailable);
        }
    }

    fn config_audit(
        &self,
        level: &ConfigLevel,
        action: AuditAction,
        details: serde_json::Value,
        retention: Option<u32>,
    ) -> Write {
        let (subject, resource) = match level {
            ConfigLevel::System => (AuditSubject::System, None),
            ConfigLevel::Resource(resource) => {
                (AuditSubject::Resource(resource.clone()), Some(resource.clone()))
            }
            ConfigLevel::Entity(entity) => (AuditSubject::Entity(entity.clone()), None),
            ConfigLevel::EntityResource(entity, resource) => {
                (AuditSubject::Entity(entity.clone()), Some(resource.clone()))
            }
        };
        self.audit(Change { subject, action, resource, details }, retention)
    }

    /// Changes the existing buckets of an entity to its limits. Without this they would change with their
    /// next call.
    async fn update_buckets(&self, level: &ConfigLevel) -> Result<(), Error> {
        let (entity, resource) = match level {
            ConfigLevel::EntityResource(entity, resource) => (entity, Some(resource)),
            ConfigLevel::Entity(entity) => (entity, None),
            ConfigLevel::System | ConfigLevel::Resource(_) => return Ok(()),
        };
        if let Some(resource) = resource {
            return self.update_bucket(entity, resource).await;
        }
        let query = BucketQuery::OfEntity(self.namespace_id().clone(), entity.clone());
        let mut request = PageRequest::first(crate::PAGE_MAX);
        loop {
            let page = self.inner.call(self.store().list_buckets(&query, &request)).await?;
            for stored in page.items {
                self.update_bucket(entity, &stored.key.resource).await?;
            }
            match page.next {
                Some(after) => request.after = Some(after),
                None => return Ok(()),
            }
        }
    }

    async fn update_bucket(&self, entity: &EntityId, resource: &ResourceName) -> Result<(), Error> {
        // Not from the cache: a call that began before the change may have cached old limits, and the
        // target's read time must be after the change.
        let now = self.inner.now().now;
        let target = self.inner.call(self.inner.load(entity, resource, now)).await?;
        if target.limits().is_empty() {
            return Ok(());
        }
        self.inner.call(self.store().reconfigure(&target, now)).await
    }
}

fn entity_level(entity: &str, resource: Option<&str>) -> Result<ConfigLevel, Error> {
    let entity = EntityId::new(entity)?;
    Ok(match resource {
        None | Some(zae_limiter_model::DEFAULT_RESOURCE) => ConfigLevel::Entity(entity),
        Some(resource) => ConfigLevel::EntityResource(entity, ResourceName::new(resource)?),
    })
}

fn system_limits(
    limits: impl IntoIterator<Item = Limit>,
    on_unavailable: Option<OnUnavailable>,
) -> Result<LimitSet, Error> {
    let limits = LimitSet::new(limits)?;
    match limits.is_empty() && on_unavailable.is_none() {
        true => Err(nothing_to_set()),
        false => Ok(limits),
    }
}

fn not_empty(limits: impl IntoIterator<Item = Limit>) -> Result<LimitSet, Error> {
    let limits = LimitSet::new(limits)?;
    if limits.is_empty() { Err(nothing_to_set()) } else { Ok(limits) }
}

fn nothing_to_set() -> Error {
    Invalid::new("limits", "", "give at least one limit; to have none, delete them").into()
}

/// The details of an audit event about stored limits.
pub(crate) fn config_details(config: &Config) -> serde_json::Value {
    let limits = config.limits.to_limits();
    let mut details = json!({
        "limits": limits.iter().map(limit_json).collect::<Vec<_>>(),
        "on_unavailable": config.on_unavailable.map(OnUnavailable::as_str),
        "config_version": config.version,
    });
    if let Some(days) = config.audit_retention_days {
        details["audit_retention_days"] = days.into();
    }
    details
}

fn limit_json(limit: &Limit) -> serde_json::Value {
    json!({
        "name": limit.name,
        "capacity": limit.capacity,
        "refill_amount": limit.refill_amount,
        "refill_period_seconds": limit.refill_period.as_secs(),
    })
}
