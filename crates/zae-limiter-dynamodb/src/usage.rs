//! Lists of usage records. Windows of every length share a partition: `2026-11`, `2026-11-15`,
//! `2026-11-15T14:00:00Z`. A query for days or months would read all hours between them, and one for all
//! resources of an entity would read its whole history. So days and months are read by their keys, and the
//! resources of an entity are found with one query each.

use std::sync::Arc;
use zae_limiter_core::{
    EntityId, Key, NamespaceId, Page, PageRequest, Record, ResourceName, StoreError, Timestamp,
    UsageKey, Window,
};
use zae_limiter_schema::{
    Consistency, Index, Item, ItemKey, Query as TableQuery, Range, Step, Value, entity_partition,
    records, resource_partition,
};

use crate::cursor;
use crate::driver::{Driver, key_of};
use crate::error::CallError;
use crate::records::record_key;
use crate::walk::{Walk, labels, size};

/// The most windows that are read by their keys. With more, the whole range is queried.
const WINDOWS_MAX: usize = 4_000;
/// The most windows of a resource that are queried for one page.
const QUERIES_MAX: usize = 100;

const OF_ENTITY: &str = "usage";
const OF_RESOURCE: &str = "usage-of";

/// The times at which windows may start.
type Span = std::ops::Range<Timestamp>;

/// The starts of all windows in a span, if they are few enough to be read by their keys.
fn starts(window: Window, span: &Span) -> Option<Vec<Timestamp>> {
    if window == Window::Hourly {
        // The range has few other windows between hours.
        return None;
    }
    let mut starts = Vec::new();
    let mut start = window.start(span.start);
    while start < span.end {
        if starts.len() == WINDOWS_MAX {
            return None;
        }
        if span.contains(&start) {
            starts.push(start);
        }
        start = window.end(start);
    }
    Some(starts)
}

/// The usage of an entity.
pub(crate) struct OfEntity<'a> {
    pub(crate) ns: &'a NamespaceId,
    pub(crate) entity: &'a EntityId,
    pub(crate) window: Window,
    pub(crate) span: &'a Span,
}

impl OfEntity<'_> {
    fn partition(&self) -> String {
        entity_partition(self.ns, self.entity)
    }

    fn key(&self, resource: &ResourceName, start: Timestamp) -> Key {
        let (namespace, entity) = (self.ns.clone(), self.entity.clone());
        let resource = resource.clone();
        Key::Usage(UsageKey { namespace, entity, resource, window: self.window, start })
    }
}

/// The resource and the window that a sort key names.
fn parts(sk: &str) -> Option<(&str, &str)> {
    sk.strip_prefix("#USAGE#")?.split_once('#')
}

impl Driver {
    /// Lists the usage of an entity on one resource, or on all of them, by resource and start.
    pub(crate) async fn list_usage_of_entity(
        self: &Arc<Self>,
        of: &OfEntity<'_>,
        resource: Option<&ResourceName>,
        page: &PageRequest,
    ) -> Result<Page<Record>, StoreError> {
        let mut after = match cursor::read(page, &[OF_ENTITY])? {
            None => None,
            Some((_, texts)) => Some(cursor::only(texts)?),
        };
        let mut found: Vec<Record> = Vec::new();
        let size = size(page);
        let begun = after.as_deref().and_then(parts).and_then(|parts| parts.0.parse().ok());
        let mut current = match (resource, begun) {
            (Some(resource), _) => Some(resource.clone()),
            (None, Some(begun)) => Some(begun),
            (None, None) => self.next_resource(of, None).await?,
        };
        while let Some(one) = current {
            let left = size - found.len();
            let page = self.usage_of_both(of, &one, after.take(), left).await?;
            found.extend(page.items);
            if page.next.is_some() {
                return Ok(Page { items: found, next: page.next });
            }
            current = match resource {
                Some(_) => None,
                None => self.next_resource(of, Some(&one)).await?,
            };
            if found.len() == size
                && let Some(next) = &current
            {
                // Before all windows of the next resource.
                let next = cursor::write(OF_ENTITY, [&*format!("#USAGE#{next}#")]);
                return Ok(Page { items: found, next: Some(next) });
            }
        }
        Ok(Page { items: found, next: None })
    }

    /// The next resource, after another, with any usage.
    async fn next_resource(
        self: &Arc<Self>,
        of: &OfEntity<'_>,
        after: Option<&ResourceName>,
    ) -> Result<Option<ResourceName>, StoreError> {
        // `$` follows `#` and sorts before every character of a resource.
        let mut from = after.map_or("#USAGE#".to_owned(), |last| format!("#USAGE#{last}$"));
        loop {
            let query = TableQuery {
                index: None,
                partition: of.partition(),
                range: Range::Between(from, "#USAGE$".to_owned()),
                step: Step::Forward,
                limit: 1,
                after: None,
                consistency: Consistency::Strong,
            };
            let output = self.query(&query).await?;
            let Some(key) = output.items.first().and_then(key_of) else { return Ok(None) };
            let name = parts(&key.sk).map_or(key.sk.as_str(), |parts| parts.0).to_owned();
            match ResourceName::new(&name) {
                Ok(resource) => return Ok(Some(resource)),
                // An item of another client: continue after it.
                Err(_) => from = format!("{}$", key.sk),
            }
        }
    }

    /// The usage of an entity on one resource.
    async fn usage_of_both(
        self: &Arc<Self>,
        of: &OfEntity<'_>,
        resource: &ResourceName,
        after: Option<String>,
        size: usize,
    ) -> Result<Page<Record>, StoreError> {
        let Some(starts) = starts(of.window, of.span) else {
            let [from, to] = labels(of.window, of.span);
            let key = |label| format!("#USAGE#{resource}#{label}");
            let range = Range::Between(key(from), key(to));
            let walk = Walk::new(OF_ENTITY, None, of.partition(), range).selective();
            let place = |sk| {
                Item::from([
                    ("PK".to_owned(), Value::S(of.partition())),
                    ("SK".to_owned(), Value::S(sk)),
                ])
            };
            // A cursor before the range means the start of the range.
            let after = after.filter(|sk| parts(sk).is_some_and(|parts| !parts.1.is_empty()));
            return self
                .walk(&walk, after.map(place), size, |item| {
                    let Some(key) = key_of(item).as_ref().and_then(record_key) else {
                        return Ok(None);
                    };
                    let belongs = matches!(&key, Key::Usage(usage)
                        if usage.window == of.window && of.span.contains(&usage.start));
                    Ok(if belongs {
                        records::decode(&key, item).map_err(CallError::from)?
                    } else {
                        None
                    })
                })
                .await;
        };
        let last = after.as_deref().and_then(parts).map_or("", |parts| parts.1).to_owned();
        let mut left =
            starts.into_iter().filter(|start| *of.window.label(*start) > *last).peekable();
        let keys: Vec<Key> =
            left.by_ref().take(size).map(|start| of.key(resource, start)).collect();
        let items = self.get(&keys).await?.into_iter().flatten().collect();
        let next = left.peek().and(keys.last());
        let next = next.map(|last| cursor::write(OF_ENTITY, [&*ItemKey::of(last).sk]));
        Ok(Page { items, next })
    }

    /// Lists the usage of all entities on a resource by days or months, by start and entity. `None` if there
    /// are too many windows to query each.
    pub(crate) async fn list_usage_of_resource(
        self: &Arc<Self>,
        (ns, resource): (&NamespaceId, &ResourceName),
        (window, span): (Window, &Span),
        page: &PageRequest,
    ) -> Result<Option<Page<Record>>, StoreError> {
        let Some(starts) = starts(window, span) else { return Ok(None) };
        let partition = resource_partition(ns, resource);
        let mut after = match cursor::read(page, &[OF_RESOURCE])? {
            None => None,
            Some((_, texts)) => cursor::start(texts, Some(Index::Resource), &partition)?,
        };
        let place = after.as_ref().and_then(|key| key.get(Index::Resource.sk())?.as_str());
        let last = place.and_then(|sk| sk.strip_prefix("USAGE#")).unwrap_or_default().to_owned();
        let size = size(page);
        let mut keys: Vec<Key> = Vec::new();
        let labels = starts.into_iter().map(|start| window.label(start));
        // The rest of the cursor's window, and all windows after it.
        let mut left = labels.filter(|label| format!("{label}$") > last).peekable();
        let mut queries = 0;
        let mut next = None;
        while let Some(label) = left.next() {
            let range = Range::Between(format!("USAGE#{label}#"), format!("USAGE#{label}$"));
            let index = Some(Index::Resource);
            let walk = Walk::new(OF_RESOURCE, index, partition.clone(), range);
            let is_within = last.starts_with(&format!("{label}#"));
            let begin = after.take().filter(|_| is_within);
            let accept = |item: &Item| Ok(key_of(item).as_ref().and_then(record_key));
            let found = self.walk(&walk, begin, size - keys.len(), accept).await?;
            keys.extend(found.items);
            queries += 1;
            if found.next.is_some() {
                next = found.next;
                break;
            }
            if (keys.len() == size || queries == QUERIES_MAX) && left.peek().is_some() {
                next = Some(cursor::write(OF_RESOURCE, [&*format!("USAGE#{label}$"), "-", "-"]));
                break;
            }
        }
        let items = self.get(&keys).await?.into_iter().flatten().collect();
        Ok(Some(Page { items, next }))
    }
}
