//! Tombstones: when an entity was deleted, or that a namespace was purged. An aggregator that lags behind must not
//! create usage again from changes that were made before.
//!
//! *Which changes come before a deletion.* A deletion has the time of the deleting client's clock. A change has the
//! time of DynamoDB's clock, in whole seconds, rounded down. [`CLOCK_MARGIN`] is added to the former: if the client's
//! clock is behind DynamoDB's by at most that, no change made before the deletion counts. A change made after it counts
//! unless it is less than the margin, one second of rounding, and what the client's clock is ahead, after the deletion.
//! The aggregator's own clock plays no part.
//!
//! *A purge needs no times*: ids of namespaces are never used twice, so nothing of a purged one counts.

use std::time::Duration;

use zae_limiter_core::{Scope, Timestamp};

use super::set;
use crate::bucket::ttl_of;
use crate::expression::Condition;
use crate::keys::{Index, ItemKey, entity_partition, namespace_partition, system_partition};
use crate::table::{Change, Update};
use crate::value::{Item, Value};

/// How long a tombstone is kept: a change stays in the stream for one day.
pub const KEPT: Duration = Duration::from_secs(3 * 86_400);

/// How far the clock of a deleting client may be behind DynamoDB's.
pub const CLOCK_MARGIN: Duration = Duration::from_secs(1);

const DELETED_AT: &str = "deleted_at";
pub(crate) const ENTITY_SORT_KEY: &str = "#DELETED";
pub(crate) const NAMESPACE_SORT_KEY: &str = "#PURGED";

/// The key of an owner's tombstone.
pub fn key(scope: &Scope) -> ItemKey {
    match scope {
        Scope::Entity(ns, id) => ItemKey::new(entity_partition(ns, id), ENTITY_SORT_KEY),
        Scope::Namespace(ns) => ItemKey::new(system_partition(ns.as_str()), NAMESPACE_SORT_KEY),
    }
}

/// Writes a tombstone. It never moves back: of two deletions the later one counts.
pub fn write(scope: &Scope, now: Timestamp) -> Update {
    let (Scope::Entity(ns, _) | Scope::Namespace(ns)) = scope;
    let key = key(scope);
    let moment = Value::number(now.as_millis());
    let mut actions = Vec::new();
    set(&mut actions, DELETED_AT, moment.clone());
    set(&mut actions, "ttl", Value::number(ttl_of(now.saturating_add(KEPT))));
    // A purge finds the tombstones of entities by this, and a deletion sees by its own that an index has caught up.
    set(&mut actions, Index::Namespace.pk(), Value::text(namespace_partition(ns)));
    set(&mut actions, Index::Namespace.sk(), Value::text(&key.pk));
    if let Scope::Entity(..) = scope {
        set(&mut actions, Index::Entity.pk(), Value::text(&key.pk));
        set(&mut actions, Index::Entity.sk(), Value::text(ENTITY_SORT_KEY));
    }
    let conditions = vec![Condition::Any(vec![
        Condition::Absent(DELETED_AT.to_owned()),
        Condition::AtMost(DELETED_AT.to_owned(), moment),
    ])];
    Update { key, actions, conditions }
}

/// The index by which a deletion finds what belongs to the owner, and where it has the owner's tombstone: the partition
/// and the sort key.
pub fn place_in_index(scope: &Scope) -> (Index, String, String) {
    let key = key(scope);
    match scope {
        Scope::Entity(..) => (Index::Entity, key.pk, ENTITY_SORT_KEY.to_owned()),
        Scope::Namespace(ns) => (Index::Namespace, namespace_partition(ns), key.pk),
    }
}

/// The deletion that an item tells of.
pub fn deleted_at(item: &Item) -> Option<Timestamp> {
    item.get(DELETED_AT).and_then(Value::as_i64).map(Timestamp::from_millis)
}

/// The last moment whose changes count as made before a deletion.
pub fn last_before(deleted_at: Timestamp) -> Timestamp {
    deleted_at.saturating_add(CLOCK_MARGIN)
}

/// Requires that there is still the same tombstone, or still none.
pub fn check(scope: &Scope, seen: Option<Timestamp>) -> Change {
    let deleted_at = DELETED_AT.to_owned();
    let unchanged = match seen {
        None => Condition::Absent(deleted_at),
        Some(moment) => Condition::Equal(deleted_at, Value::number(moment.as_millis())),
    };
    Change::Check(key(scope), vec![unchanged])
}
