//! Names, limits and records to test with.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use zae_limiter_core::{
    AuditAction, AuditEvent, AuditSubject, BucketKey, Config, ConfigLevel, Entity, EntityId, Leg,
    Lifetime, Limit, LimitSet, MILLI, Millitokens, NamespaceId, Placement, Plan, Record,
    ResourceName, Settlement, Take, Takes, Target, Timestamp, Usage, UsageKey, Window,
};

/// 2026-11-15T14:00:00Z.
pub(crate) const NOW: Timestamp = Timestamp::from_millis(1_794_751_200_000);

pub(crate) const MINUTE: i64 = 60_000;
pub(crate) const HOUR: i64 = 60 * MINUTE;
pub(crate) const DAY: i64 = 24 * HOUR;

/// So many milliseconds after [`NOW`].
pub(crate) fn later(millis: i64) -> Timestamp {
    Timestamp::from_millis(NOW.as_millis() + millis)
}

pub(crate) fn namespace(number: u32) -> NamespaceId {
    NamespaceId::new(format!("ns{number:09}")).expect("a valid id")
}

/// The namespace that most checks use.
pub(crate) fn test_namespace() -> NamespaceId {
    namespace(1)
}

pub(crate) fn entity_id(id: &str) -> EntityId {
    EntityId::new(id).expect("a valid id")
}

pub(crate) fn resource(name: &str) -> ResourceName {
    ResourceName::new(name).expect("a valid name")
}

pub(crate) fn bucket_in(namespace: &NamespaceId, entity: &str, on: &str) -> BucketKey {
    BucketKey { namespace: namespace.clone(), entity: entity_id(entity), resource: resource(on) }
}

pub(crate) fn bucket(entity: &str, on: &str) -> BucketKey {
    bucket_in(&test_namespace(), entity, on)
}

pub(crate) fn tokens(whole: i64) -> Millitokens {
    Millitokens::new(whole * MILLI)
}

pub(crate) fn limits(limits: impl IntoIterator<Item = Limit>) -> Arc<LimitSet> {
    Arc::new(LimitSet::new(limits).expect("valid limits"))
}

pub(crate) fn per_minute(name: &str, amount: u64) -> Limit {
    Limit::per_minute(name, amount)
}

/// A limit whose refill is too slow to matter within a check.
pub(crate) fn without_refill(name: &str, capacity: u64) -> Limit {
    Limit::per(name, 1, Duration::from_secs(1_000_000_000)).burst(capacity)
}

pub(crate) fn forever(key: BucketKey, limits: &Arc<LimitSet>) -> Arc<Target> {
    Arc::new(Target::new(key, Arc::clone(limits), Lifetime::Forever))
}

pub(crate) fn idle(key: BucketKey, limits: &Arc<LimitSet>, seconds: u64) -> Arc<Target> {
    let lifetime = Lifetime::Idle(Duration::from_secs(seconds));
    Arc::new(Target::new(key, Arc::clone(limits), lifetime))
}

fn amounts<const N: usize>(target: &Target, amounts: [(&str, Millitokens); N]) -> Takes {
    let cell = |name| target.limits().position(name).expect("a limit of the target");
    amounts.into_iter().map(|(name, amount)| Take { cell: cell(name), amount }).collect()
}

pub(crate) fn leg<const N: usize>(target: &Arc<Target>, takes: [(&str, Millitokens); N]) -> Leg {
    Leg { target: Arc::clone(target), takes: amounts(target, takes) }
}

pub(crate) fn plan(now: Timestamp, legs: impl IntoIterator<Item = Leg>) -> Plan {
    Plan { max_skew: None, now, legs: legs.into_iter().collect() }
}

pub(crate) fn settlement<const N: usize>(
    target: &Arc<Target>,
    placement: Placement,
    differences: [(&str, Millitokens); N],
) -> Settlement {
    Settlement { target: Arc::clone(target), placement, differences: amounts(target, differences) }
}

pub(crate) fn entity_in(namespace: &NamespaceId, id: &str, parent: Option<&str>) -> Record {
    Record::Entity(Entity {
        namespace: namespace.clone(),
        id: entity_id(id),
        name: None,
        parent: parent.map(entity_id),
        cascade: parent.is_some(),
        metadata: BTreeMap::new(),
        created_at: NOW,
    })
}

pub(crate) fn entity(id: &str, parent: Option<&str>) -> Record {
    entity_in(&test_namespace(), id, parent)
}

pub(crate) fn config_in(namespace: &NamespaceId, level: ConfigLevel, version: u64) -> Record {
    Record::Config(Config {
        namespace: namespace.clone(),
        level,
        limits: LimitSet::clone(&limits([per_minute("rpm", 10)])),
        on_unavailable: None,
        audit_retention_days: None,
        version,
    })
}

pub(crate) fn config(level: ConfigLevel, version: u64) -> Record {
    config_in(&test_namespace(), level, version)
}

pub(crate) fn on_resource(entity: &str, on: &str) -> ConfigLevel {
    ConfigLevel::EntityResource(entity_id(entity), resource(on))
}

/// The `number`-th event about a subject. Its id sorts by the number, as a ULID sorts by time.
pub(crate) fn event_in(namespace: &NamespaceId, subject: AuditSubject, number: u32) -> Record {
    Record::Audit(AuditEvent {
        namespace: namespace.clone(),
        id: format!("{number:026}"),
        subject,
        at: later(i64::from(number)),
        action: AuditAction::LimitsSet,
        principal: None,
        resource: None,
        details: serde_json::Map::new(),
        expires_at: None,
    })
}

pub(crate) fn event(subject: AuditSubject, number: u32) -> Record {
    event_in(&test_namespace(), subject, number)
}

pub(crate) fn usage_in(
    namespace: &NamespaceId,
    entity: &str,
    on: &str,
    window: Window,
    at: Timestamp,
) -> Record {
    let key = UsageKey {
        namespace: namespace.clone(),
        entity: entity_id(entity),
        resource: resource(on),
        window,
        start: window.start(at),
    };
    Record::Usage(Usage { key, consumed: BTreeMap::new(), events: 1, expires_at: None })
}

pub(crate) fn usage(entity: &str, on: &str, window: Window, at: Timestamp) -> Record {
    usage_in(&test_namespace(), entity, on, window, at)
}
