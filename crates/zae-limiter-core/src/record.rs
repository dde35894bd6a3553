//! The records that a store keeps beside buckets, and their keys.

use std::collections::BTreeMap;
use std::fmt;

use zae_limiter_model::{
    EntityId, Invalid, LimitName, LimitSet, Millitokens, NamespaceId, NamespaceName, ResourceName,
    Timestamp,
};

use crate::plan::BucketKey;
use crate::store::Scope;
use crate::window::Window;

/// An entity that has limits: an API key, a project, an organisation.
///
/// ```
/// # use zae_limiter_core::{MemoryStore, RateLimiter};
/// # tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(async {
/// # let limiter = RateLimiter::builder(MemoryStore::new()).open().await?;
/// limiter.create_entity("project-1").name("Search").await?;
/// limiter.create_entity("key-1").parent("project-1").cascade().await?;
/// let key = limiter.entity("key-1").await?.expect("created above");
/// assert_eq!(key.parent.unwrap().as_str(), "project-1");
/// assert!(key.cascade);
/// # Ok::<(), zae_limiter_core::Error>(())
/// # }).unwrap();
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entity {
    /// The namespace of the entity.
    pub namespace: NamespaceId,
    /// The id of the entity.
    pub id: EntityId,
    /// The display name.
    pub name: Option<String>,
    /// The parent.
    pub parent: Option<EntityId>,
    /// Whether every call of the entity also takes from its parent.
    pub cascade: bool,
    /// Free-form metadata.
    pub metadata: BTreeMap<String, String>,
    /// When the entity was created.
    pub created_at: Timestamp,
}

/// The level of a configuration. The most specific level that exists replaces all others.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ConfigLevel {
    /// All entities, all resources.
    System,
    /// All entities, one resource.
    Resource(ResourceName),
    /// One entity, all resources (`_default_`).
    Entity(EntityId),
    /// One entity, one resource.
    EntityResource(EntityId, ResourceName),
}

/// What happens to calls while the store is unavailable.
///
/// ```
/// # use zae_limiter_core::{Limit, MemoryStore, OnUnavailable, RateLimiter};
/// # tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(async {
/// # let limiter = RateLimiter::builder(MemoryStore::new()).open().await?;
/// // Stored, for all limiters of the namespace:
/// let limits = [Limit::per_minute("rpm", 100)];
/// limiter.set_system_defaults(limits, Some(OnUnavailable::Allow)).await?;
/// // For one call:
/// let call = limiter.acquire("key-1", "gpt-4").take("rpm", 1).on_unavailable(OnUnavailable::Block);
/// call.await?.commit().await?;
/// # Ok::<(), zae_limiter_core::Error>(())
/// # }).unwrap();
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OnUnavailable {
    /// Calls pass, with a lease that holds nothing.
    Allow,
    /// Calls fail with [`Error::Unavailable`](crate::Error::Unavailable).
    Block,
}

impl OnUnavailable {
    /// `allow` or `block`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Allow => "allow",
            Self::Block => "block",
        }
    }
}

impl std::str::FromStr for OnUnavailable {
    type Err = Invalid;

    fn from_str(text: &str) -> Result<Self, Invalid> {
        match text {
            "allow" => Ok(Self::Allow),
            "block" => Ok(Self::Block),
            other => Err(Invalid::new("on-unavailable", other, "use allow or block")),
        }
    }
}

#[cfg(feature = "serde")]
impl serde::Serialize for OnUnavailable {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

#[cfg(feature = "serde")]
impl<'de> serde::Deserialize<'de> for OnUnavailable {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = std::borrow::Cow::<'de, str>::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

/// The limits and settings stored at one level.
///
/// ```
/// # use zae_limiter_core::{Limit, MemoryStore, RateLimiter};
/// # tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(async {
/// # let limiter = RateLimiter::builder(MemoryStore::new()).open().await?;
/// limiter.set_limits("key-1", Some("gpt-4"), [Limit::per_minute("rpm", 100)]).await?;
/// let config = limiter.limits("key-1", Some("gpt-4")).await?.expect("stored above");
/// assert_eq!(config.limits.to_limits(), [Limit::per_minute("rpm", 100)]);
/// assert_eq!(config.version, 1);
/// # Ok::<(), zae_limiter_core::Error>(())
/// # }).unwrap();
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// The namespace of the configuration.
    pub namespace: NamespaceId,
    /// The entities and resources that it applies to.
    pub level: ConfigLevel,
    /// The limits. Only at system level they may be empty, beside other settings.
    pub limits: LimitSet,
    /// What happens while the store is unavailable. Only at system level.
    pub on_unavailable: Option<OnUnavailable>,
    /// How many days audit events are kept. Only at system level.
    pub audit_retention_days: Option<u32>,
    /// Incremented by each change; the first version is 1.
    pub version: u64,
}

impl Config {
    /// An empty configuration, version 0.
    pub(crate) fn nothing(namespace: NamespaceId, level: ConfigLevel) -> Self {
        Self {
            namespace,
            level,
            limits: LimitSet::default(),
            on_unavailable: None,
            audit_retention_days: None,
            version: 0,
        }
    }

    /// Whether it has neither limits nor `on_unavailable`.
    pub fn sets_nothing(&self) -> bool {
        self.limits.is_empty() && self.on_unavailable.is_none()
    }
}

/// The subject of an audit event. Its text contains the entity id: it is the stored form.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum AuditSubject {
    /// An entity or its limits.
    Entity(EntityId),
    /// The defaults of the system, or the namespace.
    System,
    /// The defaults of a resource.
    Resource(ResourceName),
}

impl fmt::Display for AuditSubject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Entity(id) => f.write_str(id.as_str()),
            Self::System => f.write_str("$SYSTEM"),
            Self::Resource(resource) => write!(f, "$RESOURCE:{resource}"),
        }
    }
}

impl std::str::FromStr for AuditSubject {
    type Err = Invalid;

    fn from_str(text: &str) -> Result<Self, Invalid> {
        if text == "$SYSTEM" {
            Ok(Self::System)
        } else if let Some(resource) = text.strip_prefix("$RESOURCE:") {
            Ok(Self::Resource(ResourceName::new(resource)?))
        } else {
            Ok(Self::Entity(EntityId::new(text)?))
        }
    }
}

/// The action of an audit event.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum AuditAction {
    /// An entity was created.
    EntityCreated,
    /// An entity was deleted, with its limits, buckets and usage.
    EntityDeleted,
    /// An entity got another parent. Only Python clients write it.
    EntityParentChanged,
    /// Limits were set.
    LimitsSet,
    /// Limits were deleted.
    LimitsDeleted,
    /// A bucket was filled. Only Python clients write it.
    BucketReset,
    /// Tokens were added to a bucket. Only Python clients write it.
    BucketToppedUp,
    /// The namespace was registered.
    NamespaceRegistered,
    /// The namespace was soft-deleted.
    NamespaceDeleted,
    /// The namespace was recovered.
    NamespaceRecovered,
    /// An action of another client or of a later release, as it is stored. Made only by
    /// [`from_stored`](Self::from_stored).
    Other(OtherAction),
}

/// The stored name of an action that this release does not know.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct OtherAction(Box<str>);

impl AuditAction {
    /// All actions that this release knows.
    pub const KNOWN: &'static [Self] = &[
        Self::EntityCreated,
        Self::EntityDeleted,
        Self::EntityParentChanged,
        Self::LimitsSet,
        Self::LimitsDeleted,
        Self::BucketReset,
        Self::BucketToppedUp,
        Self::NamespaceRegistered,
        Self::NamespaceDeleted,
        Self::NamespaceRecovered,
    ];

    /// The stored name of the action.
    pub fn as_str(&self) -> &str {
        match self {
            Self::EntityCreated => "entity_created",
            Self::EntityDeleted => "entity_deleted",
            Self::EntityParentChanged => "entity_parent_changed",
            Self::LimitsSet => "limits_set",
            Self::LimitsDeleted => "limits_deleted",
            Self::BucketReset => "bucket_reset",
            Self::BucketToppedUp => "bucket_topped_up",
            Self::NamespaceRegistered => "namespace_registered",
            Self::NamespaceDeleted => "namespace_deleted",
            Self::NamespaceRecovered => "namespace_recovered",
            Self::Other(OtherAction(name)) => name,
        }
    }

    /// The action with this stored name. An unknown name is kept as it is: an event of a later release must not make
    /// the others unreadable.
    pub fn from_stored(name: &str) -> Self {
        let known = Self::KNOWN.iter().find(|action| action.as_str() == name);
        known.cloned().unwrap_or_else(|| Self::Other(OtherAction(name.into())))
    }
}

/// An event of the audit trail. Its `Debug` form shows of the details only their names, because their values may be
/// entity ids.
#[derive(Clone, PartialEq, Eq)]
pub struct AuditEvent {
    /// The namespace of the event.
    pub namespace: NamespaceId,
    /// A ULID, which sorts by time.
    pub id: String,
    /// The object of the change.
    pub subject: AuditSubject,
    /// When the change was made.
    pub at: Timestamp,
    /// The kind of change.
    pub action: AuditAction,
    /// The actor, if the limiter has a principal.
    pub principal: Option<String>,
    /// The resource of the change, if there is one.
    pub resource: Option<ResourceName>,
    /// The new values.
    pub details: serde_json::Map<String, serde_json::Value>,
    /// When the event expires.
    pub expires_at: Option<Timestamp>,
}

impl fmt::Debug for AuditEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AuditEvent")
            .field("namespace", &self.namespace)
            .field("id", &self.id)
            .field("subject", &self.subject)
            .field("at", &self.at)
            .field("action", &self.action)
            .field("principal", &self.principal)
            .field("resource", &self.resource)
            .field("details", &self.details.keys().collect::<Vec<_>>())
            .field("expires_at", &self.expires_at)
            .finish()
    }
}

/// The key of a usage record.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct UsageKey {
    /// The namespace of the record.
    pub namespace: NamespaceId,
    /// The entity that used the resource.
    pub entity: EntityId,
    /// The resource that was used.
    pub resource: ResourceName,
    /// The kind of window.
    pub window: Window,
    /// The first moment of the window.
    pub start: Timestamp,
}

/// The usage of one entity on one resource within one window.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Usage {
    /// The key of the record.
    pub key: UsageKey,
    /// Net consumption by limit.
    pub consumed: BTreeMap<LimitName, Millitokens>,
    /// The number of changes of the bucket: acquires, and settlements of leases.
    pub events: u64,
    /// When the record expires.
    pub expires_at: Option<Timestamp>,
}

/// A namespace: an isolated limiter within the same store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Namespace {
    /// The id under which its items are stored.
    pub id: NamespaceId,
    /// Its name.
    pub name: NamespaceName,
    /// When it was registered.
    pub created_at: Timestamp,
    /// When it was soft-deleted; its items still exist.
    pub deleted_at: Option<Timestamp>,
    /// Whether a purge of the deleted namespace has begun. It can only end with the record's removal.
    pub is_purging: bool,
}

/// What may happen to a namespace next. Every change of a namespace requires the status that it starts from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NamespaceStatus {
    /// It is registered and has its name: it can be deleted.
    Active,
    /// It is soft-deleted: it can be recovered or purged.
    Deleted,
    /// Its items are being removed: it can only be purged to the end.
    Purging,
}

impl Namespace {
    /// What may happen to the namespace next.
    pub fn status(&self) -> NamespaceStatus {
        match self.deleted_at {
            None => NamespaceStatus::Active,
            Some(_) if self.is_purging => NamespaceStatus::Purging,
            Some(_) => NamespaceStatus::Deleted,
        }
    }
}

/// A record, which is read and written as a whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Record {
    /// See [`Entity`].
    Entity(Entity),
    /// See [`Config`].
    Config(Config),
    /// See [`AuditEvent`].
    Audit(AuditEvent),
    /// See [`Usage`].
    Usage(Usage),
    /// See [`Namespace`].
    Namespace(Namespace),
    /// The namespace of a name. A soft-deleted namespace has no name record, so that its name is free.
    NamespaceName(NamespaceName, NamespaceId),
}

/// The key of a record or a bucket.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Key {
    /// An [`Entity`].
    Entity(NamespaceId, EntityId),
    /// A [`Config`].
    Config(NamespaceId, ConfigLevel),
    /// An [`AuditEvent`], by its id.
    Audit(NamespaceId, AuditSubject, String),
    /// A [`Usage`] record.
    Usage(UsageKey),
    /// A bucket. A key can only delete it; `acquire`, `settle` and `reconfigure` write it.
    Bucket(BucketKey),
    /// A [`Namespace`].
    Namespace(NamespaceId),
    /// A name record.
    NamespaceName(NamespaceName),
    /// What [`Store::note_deletion`](crate::Store::note_deletion) left. A key can only delete it.
    Tombstone(Scope),
}

impl Record {
    /// The key of the record.
    pub fn key(&self) -> Key {
        match self {
            Self::Entity(entity) => Key::Entity(entity.namespace.clone(), entity.id.clone()),
            Self::Config(config) => Key::Config(config.namespace.clone(), config.level.clone()),
            Self::Audit(event) => {
                Key::Audit(event.namespace.clone(), event.subject.clone(), event.id.clone())
            }
            Self::Usage(usage) => Key::Usage(usage.key.clone()),
            Self::Namespace(namespace) => Key::Namespace(namespace.id.clone()),
            Self::NamespaceName(name, _) => Key::NamespaceName(name.clone()),
        }
    }
}

macro_rules! record_kinds {
    ($($into:ident: $kind:ident, $inner:ty;)+) => {
        impl Record {$(
            #[doc = concat!("The [`", stringify!($inner), "`], if the record is one.")]
            pub fn $into(self) -> Option<$inner> {
                match self {
                    Self::$kind(inner) => Some(inner),
                    _ => None,
                }
            }
        )+}
    };
}

record_kinds! {
    into_entity: Entity, Entity;
    into_config: Config, Config;
    into_audit: Audit, AuditEvent;
    into_usage: Usage, Usage;
    into_namespace: Namespace, Namespace;
}
