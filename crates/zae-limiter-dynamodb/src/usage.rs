//! Usage records, of which windows of all kinds stand together: `2026-11`, `2026-11-15`,
//! `2026-11-15T14:00:00Z`. A walk over days or months would go through all the hours between them,
//! and one over everything that an entity has used through all times. So days and months are read by
//! their keys, and resources are found by leaping from one to the next.

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

/// More windows than this are walked through, however long the walk is.
const WINDOWS_MAX: usize = 4_000;
/// How many windows of a resource are looked at for one page.
const QUERIES_MAX: usize = 100;

const OF_ENTITY: &str = "usage";
const OF_RESOURCE: &str = "usage-of";

/// When windows may start.
type Span = std::ops::Range<Timestamp>;

/// The starts of all windows in a span, where they are few enough to be named one by one.
fn starts(window: Window, span: &Span) -> Option<Vec<Timestamp>> {
    if window == Window::Hourly {
        // Hardly anything stands between hours.
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

/// What an entity has used.
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
    /// What an entity has used of one resource, or of all of them, by resource and start.
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

    /// The first resource behind another of which there is any usage.
    async fn next_resource(
        self: &Arc<Self>,
        of: &OfEntity<'_>,
        after: Option<&ResourceName>,
    ) -> Result<Option<ResourceName>, StoreError> {
        // `$` is what follows `#`, and no resource has anything that comes before it.
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
                // Of somebody else: on behind it.
                Err(_) => from = format!("{}$", key.sk),
            }
        }
    }

    /// What an entity has used of one resource.
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
            // A place before the range is as good as none.
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

    /// What everybody has used of a resource in some days or months, by start and entity. `None`
    /// where there are too many of them to look at each.
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
        // Of a place within a window, the rest of it; behind a whole one, the next.
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
