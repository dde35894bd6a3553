//! Lists of a table whose indexes lag, while others write: what stays is listed once.
#![allow(clippy::unwrap_used, reason = "a test says what is wrong by panicking")]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use zae_limiter_core::{
    Config, ConfigLevel, Entity, EntityId, Key, Limit, LimitSet, NamespaceId, PageRequest,
    Precondition, Query, Record, Store, Timestamp, Write,
};
use zae_limiter_dynamodb::{DynamoOptions, DynamoStore};
use zae_limiter_testkit::{Faults, World};

const ITEMS: usize = 300;
const LAG_US: u64 = 500_000;

fn ns() -> NamespaceId {
    NamespaceId::new("abcdefghijk").unwrap()
}

fn id(name: &str) -> EntityId {
    EntityId::new(name).unwrap()
}

fn child(name: &str, version: u64) -> Record {
    Record::Entity(Entity {
        namespace: ns(),
        id: id(name),
        name: None,
        parent: Some(id("org")),
        cascade: false,
        metadata: BTreeMap::from([("version".to_owned(), version.to_string())]),
        created_at: Timestamp::from_millis(0),
    })
}

fn config(name: &str, version: u64) -> Record {
    Record::Config(Config {
        namespace: ns(),
        level: ConfigLevel::Entity(id(name)),
        limits: LimitSet::new([Limit::per_minute("rpm", 10 + version)]).unwrap(),
        on_unavailable: None,
        audit_retention_days: None,
        version: version + 1,
    })
}

fn name_of(key: &Key) -> String {
    match key {
        Key::Entity(_, id) | Key::Config(_, ConfigLevel::Entity(id)) => id.to_string(),
        other => panic!("{other:?} is not in the list"),
    }
}

type Make = fn(&str, u64) -> Record;

/// Rewrites records that stay, and puts and removes others between them.
async fn keep_writing(store: Arc<DynamoStore>, make: Make, seed: u64, is_read: Arc<AtomicBool>) {
    let mut random = fastrand::Rng::with_seed(seed);
    for version in 1.. {
        if is_read.load(Ordering::Relaxed) {
            return;
        }
        let name = format!("e{:03}", random.usize(..ITEMS));
        let guest = make(&format!("{name}-guest"), version);
        let write = match random.u8(..3) {
            0 => Write::Put(make(&name, version), Precondition::Always),
            1 => Write::Put(guest, Precondition::Always),
            _ => Write::Delete(guest.key(), Precondition::Always),
        };
        store.write(&[write]).await.unwrap();
    }
}

#[test]
fn records_that_stay_are_listed_once_by_an_index_that_lags() {
    let cases: [(Query, Make); 2] =
        [(Query::Children(ns(), id("org")), child), (Query::EntityConfigs(ns(), None), config)];
    for (query, make) in cases {
        for seed in 0..10 {
            let query = query.clone();
            World::play(seed, 1, async move |world| {
                let faults = Faults { delay_us: 500..=8_000, lag_us: LAG_US, ..Faults::none() };
                world.table.set_faults(faults);
                let store = |client| {
                    let table = Arc::new(world.table.for_client(client));
                    Arc::new(DynamoStore::new(table, DynamoOptions::default().seed(seed)))
                };
                let (reader, writer) = (store(1), store(2));
                for number in 0..ITEMS {
                    let record = make(&format!("e{number:03}"), 0);
                    writer.write(&[Write::Put(record, Precondition::Always)]).await.unwrap();
                }
                world.time.sleep(Duration::from_micros(LAG_US)).await;
                let is_read = Arc::new(AtomicBool::new(false));
                let writing = keep_writing(writer, make, seed, Arc::clone(&is_read));
                let writing = tokio::spawn(writing);
                let mut listed = Vec::new();
                let mut request = PageRequest::first(7);
                loop {
                    let page = reader.list(&query, &request).await.unwrap();
                    assert!(page.items.len() <= 7);
                    listed.extend(page.items.iter().map(|record| name_of(&record.key())));
                    let Some(next) = page.next else { break };
                    request.after = Some(next);
                }
                is_read.store(true, Ordering::Relaxed);
                writing.await.unwrap();
                assert!(listed.is_sorted_by(|a, b| a < b), "each once, in order: {listed:?}");
                listed.retain(|name| !name.ends_with("-guest"));
                let expected = (0..ITEMS).map(|number| format!("e{number:03}"));
                assert!(expected.eq(listed), "seed {seed}: one that stays is missing");
            });
        }
    }
}
