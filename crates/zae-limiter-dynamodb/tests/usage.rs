//! A year of usage, hour by hour, and what it costs to read some of it.
#![allow(clippy::unwrap_used, reason = "a test says what is wrong by panicking")]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use zae_limiter_core::{
    EntityId, Key, LimitName, Millitokens, NamespaceId, Page, PageRequest, Query, Record,
    ResourceName, Store, Timestamp, Usage, UsageKey, Window,
};
use zae_limiter_dynamodb::{DynamoOptions, DynamoStore};
use zae_limiter_schema::records::{self, Before};
use zae_limiter_schema::{ItemKey, Table as _, Update};
use zae_limiter_testkit::SimTable;

/// 2026-01-01T00:00:00Z.
const NEW_YEAR: Timestamp = Timestamp::from_millis(1_767_225_600_000);
const HOUR: Duration = Duration::from_secs(3_600);

fn namespace() -> NamespaceId {
    NamespaceId::new("abcdefghijk").unwrap()
}

fn entity() -> EntityId {
    EntityId::new("key-1").unwrap()
}

fn resource(name: &str) -> ResourceName {
    ResourceName::new(name).unwrap()
}

fn usage(on: &str, window: Window, start: Timestamp) -> Usage {
    let key = UsageKey {
        namespace: namespace(),
        entity: entity(),
        resource: resource(on),
        window,
        start,
    };
    let consumed = BTreeMap::from([
        (LimitName::new("rpm").unwrap(), Millitokens::new(5_000)),
        (LimitName::new("tpm").unwrap(), Millitokens::new(700_000)),
    ]);
    Usage { key, consumed, events: 5, expires_at: None }
}

struct Year {
    table: SimTable,
    store: DynamoStore,
}

impl Year {
    /// So much of a year on two resources, in windows of all kinds.
    async fn new(days: u32) -> Self {
        let table = SimTable::default();
        for on in ["gpt-4", "gpt-4-turbo"] {
            for hour in 0..days * 24 {
                let at = NEW_YEAR.saturating_add(HOUR * hour);
                for window in Window::ALL.into_iter().filter(|window| window.start(at) == at) {
                    let record = Record::Usage(usage(on, window, at));
                    let actions = records::encode(&record, Before::Absent).actions;
                    let key = ItemKey::of(&record.key());
                    table.update(&Update { key, actions, conditions: Vec::new() }).await.unwrap();
                }
            }
        }
        let store = DynamoStore::new(Arc::new(table.clone()), DynamoOptions::default());
        Self { table, store }
    }

    /// All pages of a list: how many records, and how many read units they cost.
    async fn list(&self, query: Query, size: usize) -> (usize, f64) {
        let before = self.table.totals().reads;
        let (mut count, mut after) = (0, None);
        let mut last: Option<Key> = None;
        loop {
            let page: Page<Record> =
                self.store.list(&query, &PageRequest { size, after }).await.unwrap();
            for record in page.items {
                let key = record.key();
                assert!(last.as_ref().is_none_or(|last| *last < key), "{last:?} before {key:?}");
                last = Some(key);
                count += 1;
            }
            after = page.next;
            if after.is_none() {
                return (count, self.table.totals().reads - before);
            }
        }
    }

    fn of_entity(on: Option<&str>, window: Window, days: std::ops::Range<u32>) -> Query {
        let span = NEW_YEAR.saturating_add(HOUR * 24 * days.start)
            ..NEW_YEAR.saturating_add(HOUR * 24 * days.end);
        Query::UsageOfEntity(namespace(), entity(), on.map(resource), window, span)
    }

    fn of_resource(on: &str, window: Window, days: std::ops::Range<u32>) -> Query {
        let Query::UsageOfEntity(ns, _, _, window, span) = Self::of_entity(None, window, days)
        else {
            unreachable!("just made");
        };
        Query::UsageOfResource(ns, resource(on), window, span)
    }
}

#[tokio::test]
async fn a_query_reads_what_it_needs() {
    let year = Year::new(365).await;
    let on = Some("gpt-4");
    for (what, query, records, units) in [
        // An item is about 300 bytes, and 4 KB are a unit: hours next to each other share it.
        ("a day of hours", Year::of_entity(on, Window::Hourly, 100..101), 24, 3.0),
        ("a year of hours", Year::of_entity(on, Window::Hourly, 0..365), 8_760, 700.0),
        // Others are read one by one, at a unit each, not with all the hours between them.
        ("a month of days", Year::of_entity(on, Window::Daily, 100..130), 30, 30.0),
        ("a year of days", Year::of_entity(on, Window::Daily, 0..365), 365, 365.0),
        ("a year of months", Year::of_entity(on, Window::Monthly, 0..365), 12, 12.0),
        // Two resources: a unit to find each, and one to find that there are no more.
        ("a day of hours of everything", Year::of_entity(None, Window::Hourly, 100..101), 48, 9.0),
        (
            "a year of months of everything",
            Year::of_entity(None, Window::Monthly, 0..365),
            24,
            27.0,
        ),
        (
            "a year of months of a resource",
            Year::of_resource("gpt-4", Window::Monthly, 0..365),
            12,
            18.0,
        ),
        (
            "a month of days of a resource",
            Year::of_resource("gpt-4", Window::Daily, 100..130),
            30,
            45.0,
        ),
        (
            "a day of hours of a resource",
            Year::of_resource("gpt-4", Window::Hourly, 100..101),
            24,
            25.0,
        ),
        ("nothing", Year::of_entity(on, Window::Hourly, 400..500), 0, 1.0),
    ] {
        let (found, cost) = year.list(query, 1_000).await;
        assert_eq!(found, records, "{what}");
        assert!(cost <= units, "{what}: {cost} units, at most {units}");
        println!("{what}: {found} records, {cost} units");
    }
}

#[tokio::test]
async fn pages_of_any_size_list_the_same_records() {
    let year = Year::new(42).await;
    for size in [1, 7, 24, 25, 100] {
        for (query, records) in [
            (Year::of_entity(None, Window::Hourly, 0..1), 48),
            (Year::of_entity(None, Window::Daily, 0..31), 62),
            (Year::of_entity(Some("gpt-4-turbo"), Window::Monthly, 0..365), 2),
            (Year::of_resource("gpt-4", Window::Daily, 10..40), 30),
            (Year::of_resource("gpt-4-turbo", Window::Hourly, 0..1), 24),
        ] {
            let (found, _) = year.list(query.clone(), size).await;
            assert_eq!(found, records, "{query:?} by {size}");
        }
    }
}
