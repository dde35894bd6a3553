//! Lists, a page at a time. Each page starts after the last key of the one before, so that rows
//! that are deleted or added meanwhile do not shift the others.

use rusqlite::types::Value;
use rusqlite::{Connection, Row, params, params_from_iter};
use zae_limiter_core::{
    BucketQuery, NamespaceId, PAGE_MAX, Page, PageRequest, Query, Record, ResourceList,
    ResourceName, StoredBucket,
};

use crate::codec::decode_state;
use crate::cursor::{self, Kind};
use crate::error::Failure;
use crate::ledger::bucket_key;
use crate::records::{self, AUDIT, CONFIG, ENTITY, NAMESPACE, USAGE, optional_time, window_number};

/// Sorts after every id.
const LAST: &str = "\u{10ffff}";

pub(crate) fn size(page: &PageRequest) -> usize {
    page.size.clamp(1, PAGE_MAX)
}

/// A list that is one query.
struct List<T> {
    /// The prefix of its cursors.
    name: &'static str,
    /// The last parameter is the `LIMIT`.
    sql: String,
    values: Vec<Value>,
    /// The columns that are the key of a row within the list.
    key: &'static [usize],
    read: fn(&Row<'_>) -> Result<T, Failure>,
}

impl<T> List<T> {
    fn page(mut self, conn: &Connection, page: &PageRequest) -> Result<Page<T>, Failure> {
        let size = size(page);
        // One row more than the page shows whether there is a next page.
        self.values.push(Value::Integer(i64::try_from(size).unwrap_or(i64::MAX) + 1));
        let mut statement = conn.prepare_cached(&self.sql)?;
        let mut rows = statement.query(params_from_iter(self.values))?;
        let (mut items, mut last, mut next) = (Vec::new(), Vec::new(), None);
        while let Some(row) = rows.next()? {
            if items.len() == size {
                next = Some(cursor::write(self.name, &last));
                break;
            }
            items.push((self.read)(row)?);
            if items.len() == size {
                last = self.key.iter().map(|at| row.get(*at)).collect::<Result<_, _>>()?;
            }
        }
        Ok(Page { items, next })
    }
}

fn text(value: impl AsRef<str>) -> Value {
    Value::Text(value.as_ref().to_owned())
}

/// The `fixed` parameters of a query, then the key to start after.
fn from_place<const N: usize>(
    fixed: [Value; N],
    place: Option<Vec<Value>>,
    first: impl IntoIterator<Item = Value>,
) -> Vec<Value> {
    let mut values = Vec::from(fixed);
    match place {
        Some(place) => values.extend(place),
        None => values.extend(first),
    }
    values
}

/// A page of records.
pub(crate) fn records(
    conn: &Connection,
    query: &Query,
    page: &PageRequest,
) -> Result<Page<Record>, Failure> {
    let list = match query {
        Query::Children(ns, parent) => {
            let place = cursor::read(page, "children", &[Kind::Text])?;
            List {
                name: "children",
                sql: format!(
                    "{ENTITY} FROM entity WHERE ns = ? AND parent = ? AND id > ? \
                     ORDER BY id LIMIT ?"
                ),
                values: from_place([text(ns), text(parent)], place, [text("")]),
                key: &[1],
                read: records::entity,
            }
        }
        Query::EntityConfigs(ns, resource) => {
            let place = cursor::read(page, "configs", &[Kind::Text])?;
            let (level, resource) = match resource {
                Some(resource) => (3, text(resource)),
                None => (2, text("")),
            };
            List {
                name: "configs",
                sql: format!(
                    "{CONFIG} FROM config WHERE ns = ? AND level = ? AND resource = ? \
                     AND entity > ? ORDER BY entity LIMIT ?"
                ),
                values: from_place([text(ns), Value::Integer(level), resource], place, [text("")]),
                key: &[3],
                read: records::config,
            }
        }
        Query::Audit(ns, subject) => {
            let place = cursor::read(page, "audit", &[Kind::Text])?;
            List {
                name: "audit",
                sql: format!(
                    "{AUDIT} FROM audit WHERE ns = ? AND subject = ? AND id < ? \
                     ORDER BY id DESC LIMIT ?"
                ),
                values: from_place([text(ns), text(subject.to_string())], place, [text(LAST)]),
                key: &[2],
                read: records::audit,
            }
        }
        Query::Namespaces => List {
            name: "namespaces",
            sql: format!("{NAMESPACE} FROM namespace WHERE id > ? ORDER BY id LIMIT ?"),
            values: from_place([], cursor::read(page, "namespaces", &[Kind::Text])?, [text("")]),
            key: &[0],
            read: records::namespace,
        },
        Query::UsageOfEntity(..) | Query::UsageOfResource(..) => usage(query, page)?,
    };
    list.page(conn, page)
}

fn usage(query: &Query, page: &PageRequest) -> Result<List<Record>, Failure> {
    let number = |time: zae_limiter_core::Timestamp| Value::Integer(time.as_millis());
    let (name, sql, values, key): (_, _, _, &[usize]) = match query {
        Query::UsageOfEntity(ns, entity, Some(resource), window, range) => {
            let place = cursor::read(page, "usage-one", &[Kind::Number])?;
            let after = match place.as_deref() {
                Some([Value::Integer(start)]) => start.saturating_add(1),
                _ => i64::MIN,
            };
            let sql = format!(
                "{USAGE} FROM usage WHERE ns = ? AND entity = ? AND window = ? AND resource = ? \
                 AND start >= ? AND start < ? ORDER BY start LIMIT ?"
            );
            let values = vec![
                text(ns),
                text(entity),
                Value::Integer(window_number(*window)),
                text(resource),
                Value::Integer(after.max(range.start.as_millis())),
                number(range.end),
            ];
            ("usage-one", sql, values, &[4])
        }
        Query::UsageOfEntity(ns, entity, None, window, range) => {
            let place = cursor::read(page, "usage-all", &[Kind::Text, Kind::Number])?;
            let sql = format!(
                "{USAGE} FROM usage WHERE ns = ? AND entity = ? AND window = ? \
                 AND start >= ? AND start < ? AND (resource, start) > (?, ?) \
                 ORDER BY resource, start LIMIT ?"
            );
            let fixed = [
                text(ns),
                text(entity),
                Value::Integer(window_number(*window)),
                number(range.start),
                number(range.end),
            ];
            let values = from_place(fixed, place, [text(""), Value::Integer(i64::MIN)]);
            ("usage-all", sql, values, &[3, 4])
        }
        Query::UsageOfResource(ns, resource, window, range) => {
            let place = cursor::read(page, "usage-of", &[Kind::Number, Kind::Text])?;
            let sql = format!(
                "{USAGE} FROM usage WHERE ns = ? AND resource = ? AND window = ? AND start < ? \
                 AND (start, entity) > (?, ?) ORDER BY start, entity LIMIT ?"
            );
            let fixed = [
                text(ns),
                text(resource),
                Value::Integer(window_number(*window)),
                number(range.end),
            ];
            // Every entity id sorts after the empty text, so the first window is included.
            let values = from_place(fixed, place, [number(range.start), text("")]);
            ("usage-of", sql, values, &[4, 1])
        }
        _ => unreachable!("only called for usage queries"),
    };
    Ok(List { name, sql, values, key, read: records::usage })
}

/// A page of buckets.
pub(crate) fn buckets(
    conn: &Connection,
    query: &BucketQuery,
    page: &PageRequest,
) -> Result<Page<StoredBucket>, Failure> {
    const COLUMNS: &str = "SELECT ns, entity, resource, expires_at, state FROM bucket";
    let place = cursor::read(page, "buckets", &[Kind::Text])?;
    let (sql, fixed, key): (_, _, &[usize]) = match query {
        BucketQuery::OfEntity(ns, entity) => (
            format!(
                "{COLUMNS} WHERE ns = ? AND entity = ? AND resource > ? ORDER BY resource LIMIT ?"
            ),
            [text(ns), text(entity)],
            &[2],
        ),
        BucketQuery::OnResource(ns, resource) => (
            format!(
                "{COLUMNS} WHERE ns = ? AND resource = ? AND entity > ? ORDER BY entity LIMIT ?"
            ),
            [text(ns), text(resource)],
            &[1],
        ),
    };
    let values = from_place(fixed, place, [text("")]);
    List { name: "buckets", sql, values, key, read: stored_bucket }.page(conn, page)
}

fn stored_bucket(row: &Row<'_>) -> Result<StoredBucket, Failure> {
    let expires_at = optional_time(row, 3)?;
    let state = row.get_ref(4)?.as_blob().map_err(rusqlite::Error::from)?;
    let state = decode_state(state, expires_at, None)?;
    Ok(StoredBucket { key: bucket_key(row)?, bucket: state.bucket, expires_at })
}

/// A page of resources that have limits. Each name costs one seek, however many entities have
/// limits on it.
pub(crate) fn resources(
    conn: &Connection,
    ns: &NamespaceId,
    which: ResourceList,
    page: &PageRequest,
) -> Result<Page<ResourceName>, Failure> {
    let level = match which {
        ResourceList::WithDefaults => 1,
        ResourceList::WithEntityConfigs => 3,
    };
    let mut after = match cursor::read(page, "resources", &[Kind::Text])?.as_deref() {
        Some([Value::Text(after)]) => after.clone(),
        _ => String::new(),
    };
    let sql = "SELECT resource FROM config WHERE ns = ?1 AND level = ?2 AND resource > ?3 \
               ORDER BY resource LIMIT 1";
    let mut statement = conn.prepare_cached(sql)?;
    let mut items: Vec<ResourceName> = Vec::new();
    loop {
        let mut rows = statement.query(params![ns.as_str(), level, after])?;
        let Some(row) = rows.next()? else {
            return Ok(Page { items, next: None });
        };
        if items.len() == size(page) {
            return Ok(Page { items, next: Some(cursor::write("resources", &[text(&after)])) });
        }
        let name: ResourceName = records::name(row, 0)?;
        after = name.to_string();
        items.push(name);
    }
}
