//! Entities and their hierarchy.

use std::collections::BTreeMap;
use std::future::IntoFuture;

use futures_core::future::BoxFuture;
use serde_json::json;
use zae_limiter_model::EntityId;

use crate::audit::Change;
use crate::error::{Error, Object};
use crate::limiter::{LEVELS_MAX, RateLimiter};
use crate::limits::ATTEMPTS_MAX;
use crate::page::PageRequest;
use crate::pages::Pages;
use crate::record::{AuditAction, AuditSubject, Entity, Key, Record};
use crate::stale::{Entries, Stale};
use crate::store::{Precondition, Query, Scope, UsageRecording, Write, Written};

impl RateLimiter {
    /// Creates an entity.
    ///
    /// Limits also apply to entities that were not created. Create one to give it a parent, a name or metadata.
    ///
    /// ```
    /// # use zae_limiter_core::{MemoryStore, RateLimiter};
    /// # tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(async {
    /// # let limiter = RateLimiter::builder(MemoryStore::new()).open().await?;
    /// limiter.create_entity("project-1").await?;
    /// limiter.create_entity("key-1").parent("project-1").cascade().await?;
    /// # Ok::<(), zae_limiter_core::Error>(())
    /// # }).unwrap();
    /// ```
    pub fn create_entity<'a>(&'a self, id: &'a str) -> CreateEntity<'a> {
        CreateEntity::new(self, id, Existing::IsError)
    }

    /// Creates an entity unless it exists with everything that the call sets: parent, name, cascade, metadata. Then
    /// nothing is written, and no audit event. For programs that declare their hierarchy each time they start.
    ///
    /// It never changes an entity that exists. If one exists without something that the call sets, the call fails with
    /// [`Error::Differs`]. What the call does not set may be anything.
    ///
    /// ```
    /// # use zae_limiter_core::{MemoryStore, RateLimiter};
    /// # tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(async {
    /// # let limiter = RateLimiter::builder(MemoryStore::new()).open().await?;
    /// for _ in 0..2 {
    ///     limiter.ensure_entity("project-1").await?;
    ///     limiter.ensure_entity("key-1").parent("project-1").cascade().await?;
    /// }
    /// # Ok::<(), zae_limiter_core::Error>(())
    /// # }).unwrap();
    /// ```
    pub fn ensure_entity<'a>(&'a self, id: &'a str) -> CreateEntity<'a> {
        CreateEntity::new(self, id, Existing::IsChecked)
    }

    /// The entity; `None` if it was not created.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for the id; an error of the store.
    pub async fn entity(&self, id: &str) -> Result<Option<Entity>, Error> {
        self.entity_by_id(&EntityId::new(id)?).await
    }

    async fn entity_by_id(&self, id: &EntityId) -> Result<Option<Entity>, Error> {
        let key = [Key::Entity(self.namespace_id().clone(), id.clone())];
        let found = self.inner.call(self.store().get(&key)).await?;
        Ok(found.into_iter().flatten().find_map(Record::into_entity))
    }

    /// The children of an entity, by id.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for the id.
    pub fn children(&self, parent: &str) -> Result<Pages<Entity>, Error> {
        let query = Query::Children(self.namespace_id().clone(), EntityId::new(parent)?);
        Ok(self.pages(query, |record, _| record.into_entity()))
    }

    /// Deletes an entity with its limits, buckets and usage. Its audit events stay. Its children stay too,
    /// with a parent that has no limits of its own.
    ///
    /// Returns the number of items that were removed.
    ///
    /// An entity that is created again with the same id should wait for what uses the old one: a lease from before the
    /// deletion refunds into the new bucket, and a second client that still deletes the old entity may remove limits of
    /// the new one.
    ///
    /// # Errors
    ///
    /// [`Error::NotFound`] when there is nothing to delete; an error of the store, after which the call can
    /// be repeated.
    pub async fn delete_entity(&self, id: &str) -> Result<u64, Error> {
        let id = EntityId::new(id)?;
        let stale = Stale::new(&self.inner, Entries::Of(id.clone()));
        let removed = self.remove_entity(&id).await?;
        stale.answered();
        Ok(removed)
    }

    async fn remove_entity(&self, id: &EntityId) -> Result<u64, Error> {
        let own = Key::Entity(self.namespace_id().clone(), id.clone());
        let retention = self.stored_retention().await?;
        let audit = |items: u64| {
            let change = Change {
                subject: AuditSubject::Entity(id.clone()),
                action: AuditAction::EntityDeleted,
                resource: None,
                details: json!({ "items": items }),
            };
            self.audit(change, retention)
        };
        if self.entity_by_id(id).await?.is_none() {
            // It has buckets or limits, but was never created. Nothing of it can go last, so the audit event goes
            // first: a deletion cut short and repeated may find nothing left.
            let found = self.each_key_page(id, async |_| Ok(())).await?;
            if found == 0 {
                return Err(Error::NotFound(Object::Entity(id.clone())));
            }
            self.note_deletion(id).await?;
            self.inner.call(self.store().write(&[audit(found)])).await?;
            return self.delete_keys(id).await;
        }
        self.note_deletion(id).await?;
        // The entity itself goes last, so that a deletion cut short can be repeated.
        let removed = self.delete_keys(id).await? + 1;
        let batch = [Write::Delete(own, Precondition::Always), audit(removed)];
        self.inner.call(self.store().write(&batch)).await?;
        Ok(removed)
    }

    async fn note_deletion(&self, id: &EntityId) -> Result<(), Error> {
        let scope = Scope::Entity(self.namespace_id().clone(), id.clone());
        self.inner.note_deletion(&scope).await
    }

    /// Deletes everything of an entity but its own record, and returns how much that was.
    async fn delete_keys(&self, id: &EntityId) -> Result<u64, Error> {
        let delete = async |keys: &[Key]| self.inner.call(self.store().delete(keys)).await;
        let mut removed = self.each_key_page(id, delete).await?;
        if self.store().usage_recording() == UsageRecording::Immediate && removed > 0 {
            // Somebody who has read usage meanwhile has made a record of what the buckets had counted.
            removed += self.each_key_page(id, delete).await?;
        }
        Ok(removed)
    }

    /// Goes through the keys of everything of an entity but its own record, and returns their number.
    async fn each_key_page(
        &self,
        id: &EntityId,
        work: impl AsyncFn(&[Key]) -> Result<(), Error>,
    ) -> Result<u64, Error> {
        let scope = Scope::Entity(self.namespace_id().clone(), id.clone());
        let own = Key::Entity(self.namespace_id().clone(), id.clone());
        let mut found = 0;
        let mut request = PageRequest::first(crate::PAGE_MAX);
        loop {
            let page = self.inner.call(self.store().list_keys(&scope, &request)).await?;
            let keys: Vec<Key> = page.items.into_iter().filter(|key| *key != own).collect();
            work(&keys).await?;
            found += keys.len() as u64;
            match page.next {
                Some(after) => request.after = Some(after),
                None => return Ok(found),
            }
        }
    }

    /// Rejects a parent that does not exist, is below the entity, or makes the hierarchy too deep. Returns the checks
    /// that keep it so until the entity is written: each entity above still has the parent that was read.
    async fn check_parent(
        &self,
        entity: &EntityId,
        parent: &EntityId,
    ) -> Result<Vec<Write>, Error> {
        let key = |id: &EntityId| Key::Entity(self.namespace_id().clone(), id.clone());
        let mut checks = Vec::new();
        let mut above = Some(parent.clone());
        // The entity itself is the first level.
        let mut levels = 1;
        while let Some(current) = above {
            if current == *entity {
                return Err(Error::Cycle { entity: entity.clone() });
            }
            levels += 1;
            if levels > LEVELS_MAX {
                return Err(Error::TooDeep { entity: entity.clone(), max: LEVELS_MAX });
            }
            above = match self.entity_by_id(&current).await? {
                Some(Entity { parent, .. }) => {
                    checks.push(Write::Check(key(&current), Precondition::Parent(parent.clone())));
                    parent
                }
                None if current == *parent => {
                    return Err(Error::MissingParent { parent: parent.clone() });
                }
                // A grandparent that was deleted ends the chain. Were it created meanwhile, the two could close a
                // cycle.
                None => {
                    checks.push(Write::Check(key(&current), Precondition::Absent));
                    None
                }
            };
        }
        Ok(checks)
    }
}

/// A call that creates an entity; `await` it. Made by [`RateLimiter::create_entity`] and
/// [`RateLimiter::ensure_entity`].
#[must_use = "nothing is created before it is awaited"]
pub struct CreateEntity<'a> {
    limiter: &'a RateLimiter,
    id: &'a str,
    existing: Existing,
    name: Option<String>,
    parent: Option<&'a str>,
    cascade: bool,
    metadata: BTreeMap<String, String>,
}

/// What to do with an entity that exists already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Existing {
    IsError,
    IsChecked,
}

/// The entity ids are hashed: they are often API keys.
impl std::fmt::Debug for CreateEntity<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CreateEntity")
            .field("id", &EntityId::new(self.id).ok())
            .field("existing", &self.existing)
            .field("name", &self.name)
            .field("parent", &self.parent.and_then(|parent| EntityId::new(parent).ok()))
            .field("cascade", &self.cascade)
            .finish_non_exhaustive()
    }
}

impl<'a> CreateEntity<'a> {
    fn new(limiter: &'a RateLimiter, id: &'a str, existing: Existing) -> Self {
        let metadata = BTreeMap::new();
        Self { limiter, id, existing, name: None, parent: None, cascade: false, metadata }
    }

    /// Sets the display name.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = Some(name.into());
        self
    }

    /// Sets the parent, which must exist.
    pub fn parent(mut self, parent: &'a str) -> Self {
        self.parent = Some(parent);
        self
    }

    /// Cascades: every call of this entity also takes from its parent.
    pub fn cascade(mut self) -> Self {
        self.cascade = true;
        self
    }

    /// Adds a metadata entry.
    pub fn metadata(mut self, key: impl Into<String>, value: impl Into<String>) -> Self {
        self.metadata.insert(key.into(), value.into());
        self
    }

    async fn run(self) -> Result<Entity, Error> {
        let id = EntityId::new(self.id)?;
        let parent = self.parent.map(EntityId::new).transpose()?;
        if self.existing == Existing::IsError {
            return self.create(id, parent).await;
        }
        for _ in 0..ATTEMPTS_MAX {
            if let Some(current) = self.limiter.entity_by_id(&id).await? {
                return match self.is_met_by(&current, parent.as_ref()) {
                    true => Ok(current),
                    false => Err(Error::Differs(Object::Entity(id))),
                };
            }
            match self.create(id.clone(), parent.clone()).await {
                // Another client created it first.
                Err(Error::AlreadyExists(_)) => {}
                created => return created,
            }
        }
        Err(Error::Contended { attempts: ATTEMPTS_MAX })
    }

    /// Whether an entity has everything that the call sets.
    fn is_met_by(&self, entity: &Entity, parent: Option<&EntityId>) -> bool {
        let has = |(key, value): (&String, &String)| entity.metadata.get(key) == Some(value);
        (self.name.is_none() || self.name == entity.name)
            && (parent.is_none() || parent == entity.parent.as_ref())
            && (!self.cascade || entity.cascade)
            && self.metadata.iter().all(has)
    }

    async fn create(&self, id: EntityId, parent: Option<EntityId>) -> Result<Entity, Error> {
        let limiter = self.limiter;
        // Before the clock is read: the response may bring the store's time.
        let retention = limiter.stored_retention().await?;
        let entity = Entity {
            namespace: limiter.namespace_id().clone(),
            id: id.clone(),
            name: self.name.clone(),
            parent: parent.clone(),
            cascade: self.cascade,
            metadata: self.metadata.clone(),
            created_at: limiter.inner.now().now,
        };
        let change = Change {
            subject: AuditSubject::Entity(id.clone()),
            action: AuditAction::EntityCreated,
            resource: None,
            details: json!({
                "name": entity.name,
                "parent_id": parent.as_ref().map(EntityId::as_str),
                "cascade": entity.cascade,
            }),
        };
        for _ in 0..ATTEMPTS_MAX {
            let mut batch = vec![
                Write::Put(Record::Entity(entity.clone()), Precondition::Absent),
                limiter.audit(change.clone(), retention),
            ];
            if let Some(parent) = &parent {
                batch.extend(limiter.check_parent(&id, parent).await?);
            }
            // The cache may hold it without a parent.
            let stale = Stale::new(&limiter.inner, Entries::Of(id.clone()));
            let written = limiter.inner.call(limiter.store().write(&batch)).await?;
            stale.answered();
            match (written, &parent) {
                (Written::Done, _) => return Ok(entity),
                (Written::Conflict(0 | 1), _) | (_, None) => {
                    return Err(Error::AlreadyExists(Object::Entity(id)));
                }
                // Somebody has changed the chain: the next attempt reads it again.
                (Written::Conflict(_), _) => {}
            }
        }
        Err(Error::Contended { attempts: ATTEMPTS_MAX })
    }
}

impl<'a> IntoFuture for CreateEntity<'a> {
    type Output = Result<Entity, Error>;
    type IntoFuture = BoxFuture<'a, Self::Output>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(self.run())
    }
}
