//! Entities and their hierarchy.

use std::collections::BTreeMap;
use std::future::{Future, IntoFuture};
use std::pin::Pin;

use serde_json::json;
use zae_limiter_model::EntityId;

use crate::audit::Change;
use crate::error::Error;
use crate::limiter::{LEVELS_MAX, RateLimiter};
use crate::page::PageRequest;
use crate::pages::Pages;
use crate::record::{AuditAction, AuditSubject, Entity, Key, Record};
use crate::store::{Precondition, Query, Scope, Write, Written};

impl RateLimiter {
    /// Creates an entity.
    ///
    /// An entity need not be created to be limited; only one that has a parent, or a name, must.
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
        CreateEntity {
            limiter: self,
            id,
            name: None,
            parent: None,
            cascade: false,
            metadata: BTreeMap::new(),
        }
    }

    /// The entity, if it was created.
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

    /// The entities whose parent this one is, by id.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] for the id.
    pub fn children(&self, parent: &str) -> Result<Pages<Entity>, Error> {
        let query = Query::Children(self.namespace_id().clone(), EntityId::new(parent)?);
        Ok(self.pages(query, |record, _| record.into_entity()))
    }

    /// Deletes all that belongs to an entity: itself, its limits, buckets and usage. Its audit
    /// events stay. Its children stay too; they then have a parent without limits of its own.
    ///
    /// Gives the number of items that were removed.
    ///
    /// # Errors
    ///
    /// [`Error::NotFound`] when nothing belongs to it; an error of the store, after which the call
    /// can be repeated.
    pub async fn delete_entity(&self, id: &str) -> Result<u64, Error> {
        let id = EntityId::new(id)?;
        let removed = self.remove_entity(&id).await;
        // After an error too: a part of it may be gone all the same.
        self.inner.cache.invalidate_entity(&id);
        removed
    }

    async fn remove_entity(&self, id: &EntityId) -> Result<u64, Error> {
        let scope = Scope::Entity(self.namespace_id().clone(), id.clone());
        let own = Key::Entity(self.namespace_id().clone(), id.clone());
        let mut removed = 0;
        let mut request = PageRequest::first(crate::PAGE_MAX);
        loop {
            let page = self.inner.call(self.store().list_keys(&scope, &request)).await?;
            // The entity itself goes last, so that a deletion cut short can be repeated.
            let keys: Vec<Key> = page.items.into_iter().filter(|key| *key != own).collect();
            self.inner.call(self.store().delete(&keys)).await?;
            removed += keys.len() as u64;
            match page.next {
                Some(after) => request.after = Some(after),
                None => break,
            }
        }
        let exists = self.entity_by_id(id).await?.is_some();
        if removed == 0 && !exists {
            return Err(Error::not_found("entity", id));
        }
        let change = Change {
            subject: AuditSubject::Entity(id.clone()),
            action: AuditAction::EntityDeleted,
            resource: None,
            details: json!({ "items": removed + u64::from(exists) }),
        };
        let retention = self.stored_retention().await?;
        let batch = [Write::Delete(own, Precondition::Always), self.audit(change, retention)];
        self.inner.call(self.store().write(&batch)).await?;
        Ok(removed + u64::from(exists))
    }

    /// Refuses a parent that is missing, below the entity itself, or too far down.
    async fn check_parent(&self, entity: &EntityId, parent: &EntityId) -> Result<(), Error> {
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
                Some(found) => found.parent,
                None if current == *parent => {
                    return Err(Error::MissingParent { parent: parent.clone() });
                }
                // A grandparent that was deleted ends the chain.
                None => None,
            };
        }
        Ok(())
    }
}

/// An entity that is being put together; `await` it to create it.
#[derive(Debug)]
#[must_use = "nothing is created before it is awaited"]
pub struct CreateEntity<'a> {
    limiter: &'a RateLimiter,
    id: &'a str,
    name: Option<String>,
    parent: Option<&'a str>,
    cascade: bool,
    metadata: BTreeMap<String, String>,
}

impl<'a> CreateEntity<'a> {
    /// A name for people.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = Some(name.into());
        self
    }

    /// The entity above, which must exist.
    pub fn parent(mut self, parent: &'a str) -> Self {
        self.parent = Some(parent);
        self
    }

    /// Takes from the parent too whatever is taken from this entity.
    pub fn cascade(mut self) -> Self {
        self.cascade = true;
        self
    }

    /// Something to remember about it.
    pub fn metadata(mut self, key: impl Into<String>, value: impl Into<String>) -> Self {
        self.metadata.insert(key.into(), value.into());
        self
    }

    async fn create(self) -> Result<Entity, Error> {
        let limiter = self.limiter;
        let id = EntityId::new(self.id)?;
        let parent = self.parent.map(EntityId::new).transpose()?;
        let entity = Entity {
            namespace: limiter.namespace_id().clone(),
            id: id.clone(),
            name: self.name,
            parent: parent.clone(),
            cascade: self.cascade,
            metadata: self.metadata,
            created_at: limiter.clock().now(),
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
        let retention = limiter.stored_retention().await?;
        let mut batch = vec![
            Write::Put(Record::Entity(entity.clone()), Precondition::Absent),
            limiter.audit(change, retention),
        ];
        if let Some(parent) = &parent {
            limiter.check_parent(&id, parent).await?;
            let key = Key::Entity(limiter.namespace_id().clone(), parent.clone());
            batch.push(Write::Check(key, Precondition::Present));
        }
        let written = limiter.inner.call(limiter.store().write(&batch)).await;
        // It may be remembered as one that has no parent. After an error too: it may have been
        // created all the same.
        limiter.inner.cache.invalidate_entity(&id);
        match written? {
            Written::Done => Ok(entity),
            Written::Conflict(0) => {
                Err(Error::AlreadyExists { what: "entity", name: id.to_string() })
            }
            Written::Conflict(_) => {
                let parent = parent.expect("only the parent is checked besides the entity");
                Err(Error::MissingParent { parent })
            }
        }
    }
}

impl<'a> IntoFuture for CreateEntity<'a> {
    type Output = Result<Entity, Error>;
    type IntoFuture = Pin<Box<dyn Future<Output = Self::Output> + Send + 'a>>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(self.create())
    }
}
