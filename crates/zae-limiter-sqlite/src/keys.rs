//! Lists the keys of an entity or a namespace, table after table.

use rusqlite::types::Value;
use rusqlite::{Connection, Row, params_from_iter};
use zae_limiter_core::{Key, Page, PageRequest, Scope, UsageKey};

use crate::cursor::{self, Kind};
use crate::error::Failure;
use crate::list::size;
use crate::records;

/// A walk through one table.
struct Walk {
    /// The prefix of its cursors.
    name: &'static str,
    sql: &'static str,
    /// The columns of the key within the scope. The query selects them first.
    key: &'static [Kind],
    read: fn(&Row<'_>) -> Result<Key, Failure>,
}

const OF_ENTITY: &[Walk] = &[
    Walk {
        name: "entity",
        sql: "SELECT id, ns FROM entity WHERE ns = ? AND id = ? AND id > ? LIMIT ?",
        key: &[Kind::Text],
        read: |row| Ok(Key::Entity(records::name(row, 1)?, records::name(row, 0)?)),
    },
    Walk {
        name: "config",
        sql: "SELECT level, resource, ns, entity FROM config \
              WHERE ns = ? AND entity = ? AND entity <> '' AND (level, resource) > (?, ?) \
              ORDER BY level, resource LIMIT ?",
        key: &[Kind::Number, Kind::Text],
        read: |row| Ok(Key::Config(records::name(row, 2)?, records::level(row, 0, 3, 1)?)),
    },
    Walk {
        name: "bucket",
        sql: "SELECT resource, ns, entity, resource FROM bucket \
              WHERE ns = ? AND entity = ? AND resource > ? ORDER BY resource LIMIT ?",
        key: &[Kind::Text],
        read: |row| {
            Ok(Key::Bucket(zae_limiter_core::BucketKey {
                namespace: records::name(row, 1)?,
                entity: records::name(row, 2)?,
                resource: records::name(row, 0)?,
            }))
        },
    },
    Walk {
        name: "usage",
        sql: "SELECT window, resource, start, ns, entity FROM usage \
              WHERE ns = ? AND entity = ? AND (window, resource, start) > (?, ?, ?) \
              ORDER BY window, resource, start LIMIT ?",
        key: &[Kind::Number, Kind::Text, Kind::Number],
        read: |row| {
            Ok(Key::Usage(UsageKey {
                namespace: records::name(row, 3)?,
                entity: records::name(row, 4)?,
                resource: records::name(row, 1)?,
                window: records::window(row, 0)?,
                start: records::time(row, 2)?,
            }))
        },
    },
];

const OF_NAMESPACE: &[Walk] = &[
    Walk {
        name: "entities",
        sql: "SELECT id, ns FROM entity WHERE ns = ? AND id > ? ORDER BY id LIMIT ?",
        key: &[Kind::Text],
        read: |row| Ok(Key::Entity(records::name(row, 1)?, records::name(row, 0)?)),
    },
    Walk {
        name: "configs",
        sql: "SELECT level, resource, entity, ns FROM config \
              WHERE ns = ? AND (level, resource, entity) > (?, ?, ?) \
              ORDER BY level, resource, entity LIMIT ?",
        key: &[Kind::Number, Kind::Text, Kind::Text],
        read: |row| Ok(Key::Config(records::name(row, 3)?, records::level(row, 0, 2, 1)?)),
    },
    Walk {
        name: "buckets",
        sql: "SELECT entity, resource, ns FROM bucket \
              WHERE ns = ? AND (entity, resource) > (?, ?) ORDER BY entity, resource LIMIT ?",
        key: &[Kind::Text, Kind::Text],
        read: |row| {
            Ok(Key::Bucket(zae_limiter_core::BucketKey {
                namespace: records::name(row, 2)?,
                entity: records::name(row, 0)?,
                resource: records::name(row, 1)?,
            }))
        },
    },
    Walk {
        name: "audits",
        sql: "SELECT subject, id, ns FROM audit \
              WHERE ns = ? AND (subject, id) > (?, ?) ORDER BY subject, id LIMIT ?",
        key: &[Kind::Text, Kind::Text],
        read: |row| Ok(Key::Audit(records::name(row, 2)?, records::name(row, 0)?, row.get(1)?)),
    },
    Walk {
        name: "usages",
        sql: "SELECT entity, window, resource, start, ns FROM usage \
              WHERE ns = ? AND (entity, window, resource, start) > (?, ?, ?, ?) \
              ORDER BY entity, window, resource, start LIMIT ?",
        key: &[Kind::Text, Kind::Number, Kind::Text, Kind::Number],
        read: |row| {
            Ok(Key::Usage(UsageKey {
                namespace: records::name(row, 4)?,
                entity: records::name(row, 0)?,
                resource: records::name(row, 2)?,
                window: records::window(row, 1)?,
                start: records::time(row, 3)?,
            }))
        },
    },
];

/// Everything in the file.
const EVERYTHING: &[Walk] = &[
    Walk {
        name: "all-names",
        sql: "SELECT name FROM namespace_name WHERE name > ? ORDER BY name LIMIT ?",
        key: &[Kind::Text],
        read: |row| Ok(Key::NamespaceName(records::name(row, 0)?)),
    },
    Walk {
        name: "all-namespaces",
        sql: "SELECT id FROM namespace WHERE id > ? ORDER BY id LIMIT ?",
        key: &[Kind::Text],
        read: |row| Ok(Key::Namespace(records::name(row, 0)?)),
    },
    Walk {
        name: "all-entities",
        sql: "SELECT ns, id FROM entity WHERE (ns, id) > (?, ?) ORDER BY ns, id LIMIT ?",
        key: &[Kind::Text, Kind::Text],
        read: |row| Ok(Key::Entity(records::name(row, 0)?, records::name(row, 1)?)),
    },
    Walk {
        name: "all-configs",
        sql: "SELECT ns, level, resource, entity FROM config \
              WHERE (ns, level, resource, entity) > (?, ?, ?, ?) \
              ORDER BY ns, level, resource, entity LIMIT ?",
        key: &[Kind::Text, Kind::Number, Kind::Text, Kind::Text],
        read: |row| Ok(Key::Config(records::name(row, 0)?, records::level(row, 1, 3, 2)?)),
    },
    Walk {
        name: "all-buckets",
        sql: "SELECT ns, entity, resource FROM bucket WHERE (ns, entity, resource) > (?, ?, ?) \
              ORDER BY ns, entity, resource LIMIT ?",
        key: &[Kind::Text, Kind::Text, Kind::Text],
        read: |row| {
            Ok(Key::Bucket(zae_limiter_core::BucketKey {
                namespace: records::name(row, 0)?,
                entity: records::name(row, 1)?,
                resource: records::name(row, 2)?,
            }))
        },
    },
    Walk {
        name: "all-audits",
        sql: "SELECT ns, subject, id FROM audit WHERE (ns, subject, id) > (?, ?, ?) \
              ORDER BY ns, subject, id LIMIT ?",
        key: &[Kind::Text, Kind::Text, Kind::Text],
        read: |row| Ok(Key::Audit(records::name(row, 0)?, records::name(row, 1)?, row.get(2)?)),
    },
    Walk {
        name: "all-usages",
        sql: "SELECT ns, entity, window, resource, start FROM usage \
              WHERE (ns, entity, window, resource, start) > (?, ?, ?, ?, ?) \
              ORDER BY ns, entity, window, resource, start LIMIT ?",
        key: &[Kind::Text, Kind::Text, Kind::Number, Kind::Text, Kind::Number],
        read: |row| {
            Ok(Key::Usage(UsageKey {
                namespace: records::name(row, 0)?,
                entity: records::name(row, 1)?,
                resource: records::name(row, 3)?,
                window: records::window(row, 2)?,
                start: records::time(row, 4)?,
            }))
        },
    },
];

/// Values that sort before every key. No number in a key is `i64::MIN`.
fn before_all(key: &[Kind]) -> Vec<Value> {
    let first = |kind: &Kind| match kind {
        Kind::Number => Value::Integer(i64::MIN),
        Kind::Text => Value::Text(String::new()),
    };
    key.iter().map(first).collect()
}

/// A page of keys.
pub(crate) fn keys(
    conn: &Connection,
    scope: &Scope,
    page: &PageRequest,
) -> Result<Page<Key>, Failure> {
    let (walks, fixed) = match scope {
        Scope::Entity(ns, id) => (OF_ENTITY, vec![ns.as_str(), id.as_str()]),
        Scope::Namespace(ns) => (OF_NAMESPACE, vec![ns.as_str()]),
    };
    walk_all(conn, walks, &fixed, page)
}

/// A page of the keys of everything.
pub(crate) fn everything(conn: &Connection, page: &PageRequest) -> Result<Page<Key>, Failure> {
    walk_all(conn, EVERYTHING, &[], page)
}

fn walk_all(
    conn: &Connection,
    walks: &[Walk],
    fixed: &[&str],
    page: &PageRequest,
) -> Result<Page<Key>, Failure> {
    let (mut at, mut after) = match cursor::split(page) {
        None => (0, before_all(walks[0].key)),
        Some((name, text)) => {
            let found = walks.iter().position(|walk| walk.name == name);
            let at = found.ok_or(Failure::Rejected(
                "the cursor is not from this list; start again at the first page",
            ))?;
            (at, cursor::values(text, walks[at].key)?)
        }
    };
    let mut items = Vec::new();
    loop {
        let walk = &walks[at];
        let missing = i64::try_from(size(page) - items.len()).expect("a page is small");
        let mut values: Vec<Value> = fixed.iter().map(|it| Value::Text((*it).to_owned())).collect();
        values.append(&mut after);
        values.push(Value::Integer(missing));
        let mut statement = conn.prepare_cached(walk.sql)?;
        let mut rows = statement.query(params_from_iter(values))?;
        while let Some(row) = rows.next()? {
            items.push((walk.read)(row)?);
            if items.len() == size(page) {
                let last = (0..walk.key.len()).map(|column| row.get(column));
                let last: Vec<Value> = last.collect::<Result<_, _>>()?;
                return Ok(Page { items, next: Some(cursor::write(walk.name, &last)) });
            }
        }
        at += 1;
        match walks.get(at) {
            Some(walk) => after = before_all(walk.key),
            None => return Ok(Page { items, next: None }),
        }
    }
}
