//! What a store keeps beside buckets, and how it is addressed.

use std::collections::BTreeMap;
use std::fmt;

use zae_limiter_model::{
    EntityId, Invalid, LimitName, LimitSet, Millitokens, NamespaceId, NamespaceName, ResourceName,
    Timestamp,
};

use crate::plan::BucketKey;
use crate::window::Window;

/// Who is limited.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entity {
    /// In which namespace.
    pub namespace: NamespaceId,
    /// Its id.
    pub id: EntityId,
    /// A name for people.
    pub name: Option<String>,
    /// The entity above it.
    pub parent: Option<EntityId>,
    /// Whether what it takes is also taken from its parent.
    pub cascade: bool,
    /// Whatever its owner wants to remember.
    pub metadata: BTreeMap<String, String>,
    /// When it was created.
    pub created_at: Timestamp,
}

/// For whom a set of limits holds. The most specific level that exists wins as a whole.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ConfigLevel {
    /// Everybody, on everything.
    System,
    /// Everybody, on one resource.
    Resource(ResourceName),
    /// One entity, on everything (`_default_`).
    Entity(EntityId),
    /// One entity, on one resource.
    EntityResource(EntityId, ResourceName),
}

/// What happens to calls while the store does not answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OnUnavailable {
    /// They pass, with a lease that holds nothing.
    Allow,
    /// They fail.
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

/// Stored limits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// In which namespace.
    pub namespace: NamespaceId,
    /// For whom.
    pub level: ConfigLevel,
    /// The limits. May be empty at system level only, beside what else is stored there.
    pub limits: LimitSet,
    /// Only at system level.
    pub on_unavailable: Option<OnUnavailable>,
    /// For how many days audit events are kept. Only at system level.
    pub audit_retention_days: Option<u32>,
    /// Rises by one with each change.
    pub version: u64,
}

impl Config {
    /// What is stored before anything is.
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

    /// Whether it sets no limits and says nothing about a store that does not answer.
    pub fn sets_nothing(&self) -> bool {
        self.limits.is_empty() && self.on_unavailable.is_none()
    }
}

/// What an audit event is about.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum AuditSubject {
    /// An entity, its limits included.
    Entity(EntityId),
    /// Limits for everybody, and the namespace itself.
    System,
    /// Limits of a resource.
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

/// What was done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum AuditAction {
    /// An entity was created.
    EntityCreated,
    /// An entity got another parent, name or metadata.
    EntityUpdated,
    /// An entity and all that belonged to it was deleted.
    EntityDeleted,
    /// Limits were set.
    LimitsSet,
    /// Limits were deleted.
    LimitsDeleted,
    /// The namespace was registered.
    NamespaceRegistered,
    /// The namespace was soft-deleted.
    NamespaceDeleted,
    /// The namespace was recovered.
    NamespaceRecovered,
}

impl AuditAction {
    const ALL: [Self; 8] = [
        Self::EntityCreated,
        Self::EntityUpdated,
        Self::EntityDeleted,
        Self::LimitsSet,
        Self::LimitsDeleted,
        Self::NamespaceRegistered,
        Self::NamespaceDeleted,
        Self::NamespaceRecovered,
    ];

    /// The action as it is stored.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::EntityCreated => "entity_created",
            Self::EntityUpdated => "entity_updated",
            Self::EntityDeleted => "entity_deleted",
            Self::LimitsSet => "limits_set",
            Self::LimitsDeleted => "limits_deleted",
            Self::NamespaceRegistered => "namespace_registered",
            Self::NamespaceDeleted => "namespace_deleted",
            Self::NamespaceRecovered => "namespace_recovered",
        }
    }
}

impl std::str::FromStr for AuditAction {
    type Err = Invalid;

    fn from_str(text: &str) -> Result<Self, Invalid> {
        let found = Self::ALL.into_iter().find(|action| action.as_str() == text);
        found.ok_or_else(|| Invalid::new("audit action", text, "not an action of this release"))
    }
}

/// A change that somebody made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuditEvent {
    /// In which namespace.
    pub namespace: NamespaceId,
    /// A ULID: sorts by time.
    pub id: String,
    /// What it is about.
    pub subject: AuditSubject,
    /// When it was done.
    pub at: Timestamp,
    /// What was done.
    pub action: AuditAction,
    /// By whom, as far as the limiter was told.
    pub principal: Option<String>,
    /// On which resource, where there is one.
    pub resource: Option<ResourceName>,
    /// The new values.
    pub details: serde_json::Map<String, serde_json::Value>,
    /// When the event may be forgotten.
    pub expires_at: Option<Timestamp>,
}

/// Which usage record.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct UsageKey {
    /// In which namespace.
    pub namespace: NamespaceId,
    /// Who used it.
    pub entity: EntityId,
    /// What was used.
    pub resource: ResourceName,
    /// The kind of window.
    pub window: Window,
    /// The window's first moment.
    pub start: Timestamp,
}

/// What an entity used of a resource within a window.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Usage {
    /// Which record.
    pub key: UsageKey,
    /// Net consumption for each limit.
    pub consumed: BTreeMap<LimitName, Millitokens>,
    /// How many changes of the bucket went into it: acquires, and settlements of leases.
    pub events: u64,
    /// When the record may be forgotten.
    pub expires_at: Option<Timestamp>,
}

/// A namespace: a limiter of its own within the same store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Namespace {
    /// Under which its items are kept.
    pub id: NamespaceId,
    /// What people call it.
    pub name: NamespaceName,
    /// When it was registered.
    pub created_at: Timestamp,
    /// When it was soft-deleted: its items are still there.
    pub deleted_at: Option<Timestamp>,
}

/// Anything that is read and written whole.
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
    /// Which namespace a name stands for now. A soft-deleted namespace has no name record, so that
    /// its name is free.
    NamespaceName(NamespaceName, NamespaceId),
}

/// The address of anything a store keeps.
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
    /// A bucket. It is deleted by its key; only `acquire`, `settle` and `reconfigure` write it.
    Bucket(BucketKey),
    /// A [`Namespace`].
    Namespace(NamespaceId),
    /// A name record.
    NamespaceName(NamespaceName),
}

impl Record {
    /// Where the record is kept.
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
            #[doc = concat!("The [`", stringify!($inner), "`], if that is what it is.")]
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
