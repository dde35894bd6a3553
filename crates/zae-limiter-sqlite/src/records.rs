//! Records as rows: everything but buckets.

use std::str::FromStr;

use rusqlite::{Connection, OptionalExtension, Row, ToSql, params};
use zae_limiter_core::{
    AuditAction, AuditEvent, BucketKey, Config, ConfigLevel, Entity, Invalid, Key, Namespace,
    Precondition, Record, Timestamp, Usage, UsageKey, Window,
};

use crate::codec::{decode_consumed, decode_limits, encode_consumed, encode_limits};
use crate::error::Failure;

pub(crate) const ENTITY: &str = "SELECT ns, id, name, parent, cascade, metadata, created_at";
pub(crate) const CONFIG: &str =
    "SELECT ns, level, resource, entity, version, on_unavailable, limits, audit_retention_days";
pub(crate) const AUDIT: &str =
    "SELECT ns, subject, id, at, action, principal, resource, details, expires_at";
pub(crate) const USAGE: &str =
    "SELECT ns, entity, window, resource, start, events, consumed, expires_at";
pub(crate) const NAMESPACE: &str = "SELECT id, name, created_at, deleted_at, purging";

/// Reads a name, which must follow its rule.
pub(crate) fn name<T: FromStr<Err = Invalid>>(row: &Row<'_>, at: usize) -> Result<T, Failure> {
    Ok(row.get_ref(at)?.as_str().map_err(rusqlite::Error::from)?.parse()?)
}

fn optional_name<T: FromStr<Err = Invalid>>(
    row: &Row<'_>,
    at: usize,
) -> Result<Option<T>, Failure> {
    let text = row.get_ref(at)?.as_str_or_null().map_err(rusqlite::Error::from)?;
    Ok(text.map(str::parse).transpose()?)
}

pub(crate) fn time(row: &Row<'_>, at: usize) -> Result<Timestamp, Failure> {
    Ok(Timestamp::from_millis(row.get(at)?))
}

pub(crate) fn optional_time(row: &Row<'_>, at: usize) -> Result<Option<Timestamp>, Failure> {
    Ok(row.get::<_, Option<i64>>(at)?.map(Timestamp::from_millis))
}

pub(crate) fn millis(time: Option<Timestamp>) -> Option<i64> {
    time.map(Timestamp::as_millis)
}

pub(crate) fn window_number(window: Window) -> i64 {
    match window {
        Window::Hourly => 0,
        Window::Daily => 1,
        Window::Monthly => 2,
    }
}

pub(crate) fn window(row: &Row<'_>, at: usize) -> Result<Window, Failure> {
    let number: i64 = row.get(at)?;
    let found = Window::ALL.into_iter().find(|window| window_number(*window) == number);
    Ok(found.ok_or_else(|| Invalid::new("window", number, "use 0, 1 or 2"))?)
}

/// The columns of a level: its number, the entity and the resource, empty where it has none.
pub(crate) fn level_columns(level: &ConfigLevel) -> (i64, &str, &str) {
    match level {
        ConfigLevel::System => (0, "", ""),
        ConfigLevel::Resource(resource) => (1, "", resource.as_str()),
        ConfigLevel::Entity(entity) => (2, entity.as_str(), ""),
        ConfigLevel::EntityResource(entity, resource) => (3, entity.as_str(), resource.as_str()),
    }
}

pub(crate) fn level(
    row: &Row<'_>,
    level: usize,
    entity: usize,
    resource: usize,
) -> Result<ConfigLevel, Failure> {
    Ok(match row.get::<_, i64>(level)? {
        0 => ConfigLevel::System,
        1 => ConfigLevel::Resource(name(row, resource)?),
        2 => ConfigLevel::Entity(name(row, entity)?),
        3 => ConfigLevel::EntityResource(name(row, entity)?, name(row, resource)?),
        other => return Err(Invalid::new("config level", other, "use 0 to 3").into()),
    })
}

pub(crate) fn entity(row: &Row<'_>) -> Result<Record, Failure> {
    Ok(Record::Entity(Entity {
        namespace: name(row, 0)?,
        id: name(row, 1)?,
        name: row.get(2)?,
        parent: optional_name(row, 3)?,
        cascade: row.get(4)?,
        metadata: serde_json::from_str(&row.get::<_, String>(5)?)?,
        created_at: time(row, 6)?,
    }))
}

pub(crate) fn config(row: &Row<'_>) -> Result<Record, Failure> {
    Ok(Record::Config(Config {
        namespace: name(row, 0)?,
        level: level(row, 1, 3, 2)?,
        version: row.get::<_, i64>(4)?.cast_unsigned(),
        on_unavailable: optional_name(row, 5)?,
        limits: decode_limits(row.get_ref(6)?.as_blob().map_err(rusqlite::Error::from)?)?,
        audit_retention_days: row.get(7)?,
    }))
}

pub(crate) fn audit(row: &Row<'_>) -> Result<Record, Failure> {
    Ok(Record::Audit(AuditEvent {
        namespace: name(row, 0)?,
        subject: name(row, 1)?,
        id: row.get(2)?,
        at: time(row, 3)?,
        action: AuditAction::from_stored(row.get_ref(4)?.as_str().map_err(rusqlite::Error::from)?),
        principal: row.get(5)?,
        resource: optional_name(row, 6)?,
        details: serde_json::from_str(&row.get::<_, String>(7)?)?,
        expires_at: optional_time(row, 8)?,
    }))
}

pub(crate) fn usage(row: &Row<'_>) -> Result<Record, Failure> {
    Ok(Record::Usage(Usage {
        key: UsageKey {
            namespace: name(row, 0)?,
            entity: name(row, 1)?,
            window: window(row, 2)?,
            resource: name(row, 3)?,
            start: time(row, 4)?,
        },
        events: row.get::<_, i64>(5)?.cast_unsigned(),
        consumed: decode_consumed(row.get_ref(6)?.as_blob().map_err(rusqlite::Error::from)?)?,
        expires_at: optional_time(row, 7)?,
    }))
}

pub(crate) fn namespace(row: &Row<'_>) -> Result<Record, Failure> {
    Ok(Record::Namespace(Namespace {
        id: name(row, 0)?,
        name: name(row, 1)?,
        created_at: time(row, 2)?,
        deleted_at: optional_time(row, 3)?,
        is_purging: row.get(4)?,
    }))
}

fn namespace_name(row: &Row<'_>) -> Result<Record, Failure> {
    Ok(Record::NamespaceName(name(row, 0)?, name(row, 1)?))
}

/// The first row of a query, if there is one.
fn first<T>(
    conn: &Connection,
    sql: &str,
    params: &[&dyn ToSql],
    read: impl FnOnce(&Row<'_>) -> Result<T, Failure>,
) -> Result<Option<T>, Failure> {
    let mut statement = conn.prepare_cached(sql)?;
    let mut rows = statement.query(params)?;
    rows.next()?.map(read).transpose()
}

/// Calls `then` with the `FROM` and `WHERE` clause that finds a key's row, and its parameters.
fn with_row<T>(key: &Key, then: impl FnOnce(&str, &[&dyn ToSql]) -> T) -> T {
    match key {
        Key::Entity(ns, id) => {
            then(" FROM entity WHERE ns = ?1 AND id = ?2", &[&ns.as_str(), &id.as_str()])
        }
        Key::Config(ns, config) => {
            let (level, entity, resource) = level_columns(config);
            let sql = " FROM config WHERE ns = ?1 AND level = ?2 AND resource = ?3 AND entity = ?4";
            then(sql, &[&ns.as_str(), &level, &resource, &entity])
        }
        Key::Audit(ns, subject, id) => {
            let sql = " FROM audit WHERE ns = ?1 AND subject = ?2 AND id = ?3";
            then(sql, &[&ns.as_str(), &subject.to_string(), id])
        }
        Key::Usage(key) => then(
            " FROM usage WHERE ns = ?1 AND entity = ?2 AND window = ?3 AND resource = ?4 \
             AND start = ?5",
            &[
                &key.namespace.as_str(),
                &key.entity.as_str(),
                &window_number(key.window),
                &key.resource.as_str(),
                &key.start.as_millis(),
            ],
        ),
        Key::Bucket(BucketKey { namespace, entity, resource }) => then(
            " FROM bucket WHERE ns = ?1 AND entity = ?2 AND resource = ?3",
            &[&namespace.as_str(), &entity.as_str(), &resource.as_str()],
        ),
        Key::Namespace(id) => then(" FROM namespace WHERE id = ?1", &[&id.as_str()]),
        Key::NamespaceName(name) => then(" FROM namespace_name WHERE name = ?1", &[&name.as_str()]),
        // This store records usage at once and has no tombstones.
        Key::Tombstone(_) => then(" FROM namespace WHERE 0", &[]),
    }
}

/// Reads the record under a key. `None` for a bucket: buckets are not records.
pub(crate) fn get(conn: &Connection, key: &Key) -> Result<Option<Record>, Failure> {
    type Read = fn(&Row<'_>) -> Result<Record, Failure>;
    let (columns, read): (&str, Read) = match key {
        Key::Bucket(_) | Key::Tombstone(_) => return Ok(None),
        Key::Entity(..) => (ENTITY, entity),
        Key::Config(..) => (CONFIG, config),
        Key::Audit(..) => (AUDIT, audit),
        Key::Usage(_) => (USAGE, usage),
        Key::Namespace(_) => (NAMESPACE, namespace),
        Key::NamespaceName(_) => ("SELECT name, id", namespace_name),
    };
    with_row(key, |row, params| first(conn, &format!("{columns}{row}"), params, read))
}

/// Whether the precondition holds for the row under the key.
pub(crate) fn holds(
    conn: &Connection,
    key: &Key,
    precondition: &Precondition,
) -> Result<bool, Failure> {
    match precondition {
        Precondition::Always => return Ok(true),
        Precondition::Status(status) => {
            let found = get(conn, key)?.and_then(Record::into_namespace);
            return Ok(found.is_some_and(|found| found.status() == *status));
        }
        Precondition::NameOf(id) => {
            let found = get(conn, key)?;
            return Ok(matches!(found, Some(Record::NamespaceName(_, of)) if of == *id));
        }
        Precondition::Parent(parent) => {
            let found = get(conn, key)?;
            return Ok(matches!(found, Some(Record::Entity(entity)) if entity.parent == *parent));
        }
        Precondition::Absent | Precondition::Present | Precondition::Version(_) => {}
    }
    // Reads only the version, so that a damaged record can still be replaced.
    let column = if matches!(key, Key::Config(..)) { "SELECT version" } else { "SELECT NULL" };
    let version: Option<Option<i64>> = with_row(key, |row, params| {
        let mut statement = conn.prepare_cached(&format!("{column}{row}"))?;
        statement.query_row(params, |row| row.get(0)).optional()
    })?;
    Ok(match precondition {
        Precondition::Absent => version.is_none(),
        Precondition::Version(expected) => version == Some(Some(expected.cast_signed())),
        _ => version.is_some(),
    })
}

/// Deletes the row under the key, if there is one.
pub(crate) fn delete(conn: &Connection, key: &Key) -> Result<(), Failure> {
    with_row(key, |row, params| {
        conn.prepare_cached(&format!("DELETE{row}"))?.execute(params)?;
        Ok(())
    })
}

/// Inserts the record, or replaces the one under its key.
pub(crate) fn put(conn: &Connection, record: &Record) -> Result<(), Failure> {
    let run = |sql, params: &[&dyn ToSql]| conn.prepare_cached(sql)?.execute(params);
    match record {
        Record::Entity(it) => run(
            "INSERT OR REPLACE INTO entity (ns, id, name, parent, cascade, metadata, created_at) \
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)",
            params![
                it.namespace.as_str(),
                it.id.as_str(),
                it.name,
                it.parent.as_ref().map(AsRef::<str>::as_ref),
                it.cascade,
                serde_json::to_string(&it.metadata)?,
                it.created_at.as_millis(),
            ],
        ),
        Record::Config(it) => {
            let (level, entity, resource) = level_columns(&it.level);
            run(
                "INSERT OR REPLACE INTO config \
                 (ns, level, resource, entity, version, on_unavailable, limits, audit_retention_days) \
                 VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)",
                params![
                    it.namespace.as_str(),
                    level,
                    resource,
                    entity,
                    it.version.cast_signed(),
                    it.on_unavailable.map(|choice| choice.as_str()),
                    encode_limits(&it.limits),
                    it.audit_retention_days,
                ],
            )
        }
        Record::Audit(it) => run(
            "INSERT OR REPLACE INTO audit \
             (ns, subject, id, at, action, principal, resource, details, expires_at) \
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9)",
            params![
                it.namespace.as_str(),
                it.subject.to_string(),
                it.id,
                it.at.as_millis(),
                it.action.as_str(),
                it.principal,
                it.resource.as_ref().map(AsRef::<str>::as_ref),
                serde_json::to_string(&it.details)?,
                millis(it.expires_at),
            ],
        ),
        Record::Usage(it) => run(
            "INSERT OR REPLACE INTO usage \
             (ns, entity, window, resource, start, events, consumed, expires_at) \
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)",
            params![
                it.key.namespace.as_str(),
                it.key.entity.as_str(),
                window_number(it.key.window),
                it.key.resource.as_str(),
                it.key.start.as_millis(),
                it.events.cast_signed(),
                encode_consumed(&it.consumed),
                millis(it.expires_at),
            ],
        ),
        Record::Namespace(it) => run(
            "INSERT OR REPLACE INTO namespace (id, name, created_at, deleted_at, purging) \
             VALUES (?1, ?2, ?3, ?4, ?5)",
            params![
                it.id.as_str(),
                it.name.as_str(),
                it.created_at.as_millis(),
                millis(it.deleted_at),
                it.is_purging,
            ],
        ),
        Record::NamespaceName(name, id) => run(
            "INSERT OR REPLACE INTO namespace_name (name, id) VALUES (?1, ?2)",
            params![name.as_str(), id.as_str()],
        ),
    }?;
    Ok(())
}
