use std::collections::BTreeMap;
use std::ops::{Bound, ControlFlow, Range};
use std::sync::Mutex;

use zae_limiter_model::{EntityId, Millitokens, NamespaceId, ResourceName, Timestamp};

use super::scan::scan;
use super::smallest::{Smallest, place};
use crate::bucket_state::Booking;
use crate::error::StoreError;
use crate::page::{Page, PageRequest};
use crate::plan::BucketKey;
use crate::record::{Key, Record, Usage, UsageKey};
use crate::store::Scope;
use crate::window::{UsageSettings, Window, start_of_hour};

/// Usage records, in the order of their keys.
#[derive(Debug)]
pub(super) struct UsageTable {
    settings: UsageSettings,
    pub(super) items: BTreeMap<UsageKey, Usage>,
    /// The number of records after the last sweep.
    swept_at_len: usize,
}

impl UsageTable {
    pub(super) fn new(settings: UsageSettings) -> Self {
        Self { settings, items: BTreeMap::new(), swept_at_len: 0 }
    }

    /// Adds consumption to the records of its windows.
    pub(super) fn book(&mut self, bucket: &BucketKey, booking: Booking) {
        let at = start_of_hour(booking.hour);
        self.remove_expired(at);
        for &window in &self.settings.windows {
            let key = UsageKey {
                namespace: bucket.namespace.clone(),
                entity: bucket.entity.clone(),
                resource: bucket.resource.clone(),
                window,
                start: window.start(at),
            };
            let usage = self.items.entry(key.clone()).or_insert_with(|| Usage {
                key,
                consumed: BTreeMap::new(),
                events: 0,
                expires_at: Some(window.end(at).saturating_add(self.settings.retention)),
            });
            usage.events += booking.events;
            for (limit, consumed) in &booking.consumed {
                let total = usage.consumed.entry(limit.clone()).or_insert(Millitokens::ZERO);
                *total = total.saturating_add(*consumed);
            }
        }
    }

    fn remove_expired(&mut self, now: Timestamp) {
        if self.items.len() >= 2 * self.swept_at_len.max(512) {
            self.items.retain(|_, usage| usage.expires_at.is_none_or(|expiry| expiry > now));
            self.swept_at_len = self.items.len();
        }
    }

    pub(super) fn get(&self, key: &UsageKey) -> Option<Record> {
        self.items.get(key).cloned().map(Record::Usage)
    }

    pub(super) fn put(&mut self, usage: Usage) {
        self.items.insert(usage.key.clone(), usage);
    }

    pub(super) fn remove(&mut self, key: &UsageKey) {
        self.items.remove(key);
    }
}

/// Whose usage to list.
#[derive(Clone, Copy)]
pub(super) enum Of<'a> {
    Entity(&'a NamespaceId, &'a EntityId, Option<&'a ResourceName>),
    Resource(&'a NamespaceId, &'a ResourceName),
}

impl Of<'_> {
    /// The place of a record in the list; `None` if it does not belong.
    fn place(self, key: &UsageKey) -> Option<String> {
        match self {
            Of::Entity(namespace, entity, resource) => (key.namespace == *namespace
                && key.entity == *entity
                && resource.is_none_or(|resource| key.resource == *resource))
            .then(|| place([key.resource.as_str(), &sortable(key.start)])),
            Of::Resource(namespace, resource) => (key.namespace == *namespace
                && key.resource == *resource)
                .then(|| place([&sortable(key.start), key.entity.as_str()])),
        }
    }
}

pub(super) fn list(
    usage: &Mutex<UsageTable>,
    of: Of<'_>,
    window: Window,
    range: &Range<Timestamp>,
    page: &PageRequest,
) -> Result<Page<Record>, StoreError> {
    let mut found = Smallest::new(page)?;
    scan(
        usage,
        |usage| &usage.items,
        Bound::Unbounded,
        |key, usage| {
            if key.window == window
                && range.contains(&key.start)
                && let Some(place) = of.place(key)
            {
                found.offer(place, || Record::Usage(usage.clone()));
            }
            ControlFlow::Continue(())
        },
    );
    Ok(found.into_page())
}

pub(super) fn offer_everything(usage: &Mutex<UsageTable>, found: &mut Smallest<Key>) {
    scan(
        usage,
        |usage| &usage.items,
        Bound::Unbounded,
        |key, _| {
            let names =
                [key.namespace.as_str(), "usage", key.entity.as_str(), key.resource.as_str()];
            let place = place([&place(names), key.window.as_str(), &sortable(key.start)]);
            found.offer(place, || Key::Usage(key.clone()));
            ControlFlow::Continue(())
        },
    );
}

pub(super) fn offer_keys(usage: &Mutex<UsageTable>, scope: &Scope, found: &mut Smallest<Key>) {
    scan(
        usage,
        |usage| &usage.items,
        Bound::Unbounded,
        |key, _| {
            let belongs = match scope {
                Scope::Entity(namespace, entity) => {
                    key.namespace == *namespace && key.entity == *entity
                }
                Scope::Namespace(namespace) => key.namespace == *namespace,
            };
            if belongs {
                let (entity, resource) = (key.entity.as_str(), key.resource.as_str());
                let start = sortable(key.start);
                let place = place(["usage", entity, resource, key.window.as_str(), &start]);
                found.offer(place, || Key::Usage(key.clone()));
            }
            ControlFlow::Continue(())
        },
    );
}

/// A moment as text that sorts by time.
fn sortable(at: Timestamp) -> String {
    format!("{:016x}", at.as_millis().cast_unsigned() ^ (1 << 63))
}
