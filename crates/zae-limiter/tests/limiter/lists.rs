//! Long lists: read and removed page by page, however long they are.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use zae_limiter::Entity;
use zae_limiter::model::NamespaceId;
use zae_limiter::store::{BATCH_MAX, PAGE_MAX, Precondition, Record, Store, Write, Written};
use zae_limiter_testkit::Call;

use crate::world::{Kind, NOW, entity_id, on_every_store, on_every_store_with_threads};

fn id(at: usize) -> String {
    format!("child-{at:06}")
}

fn record(namespace: &NamespaceId, at: usize) -> Record {
    Record::Entity(Entity {
        namespace: namespace.clone(),
        id: entity_id(&id(at)),
        name: None,
        parent: Some(entity_id("org")),
        cascade: false,
        metadata: BTreeMap::new(),
        created_at: NOW,
    })
}

/// Writes the records, many batches at once.
async fn fill(store: &Arc<dyn Store>, namespace: &NamespaceId, items: usize) {
    let batches: Vec<Vec<Write>> = (0..items)
        .collect::<Vec<_>>()
        .chunks(BATCH_MAX)
        .map(|chunk| {
            let put = |at: &usize| Write::Put(record(namespace, *at), Precondition::Always);
            chunk.iter().map(put).collect()
        })
        .collect();
    for some in batches.chunks(100) {
        let writes = some.iter().cloned().map(|batch| {
            let store = Arc::clone(store);
            tokio::spawn(async move { store.write(&batch).await })
        });
        for write in writes.collect::<Vec<_>>() {
            assert_eq!(write.await.unwrap().unwrap(), Written::Done);
        }
    }
}

#[test]
fn a_hundred_thousand_items_are_listed_and_purged_in_pages() {
    on_every_store(async |world| {
        // The simulated table goes through all of an index's partition for every page of it.
        let items = if world.is(Kind::DynamoDb) { 4 * PAGE_MAX } else { 100_000 };
        let registry = world.limiter().await.namespaces();
        let namespace = registry.register("team").await.unwrap().id;
        let team = world.builder().namespace("team").open().await.unwrap();
        fill(world.store.inner(), &namespace, items).await;

        let mut pages = team.children("org").unwrap().page_size(usize::MAX);
        let mut seen = 0;
        while let Some(children) = pages.next_page().await.unwrap() {
            assert!(children.len() <= PAGE_MAX, "{} on a page", children.len());
            for child in children {
                assert_eq!(child.id.as_str(), id(seen), "each once, in order");
                seen += 1;
            }
        }
        assert_eq!(seen, items);
        assert!(world.store.calls(Call::List) <= items / PAGE_MAX + 1);

        registry.delete("team").await.unwrap();
        let mut so_far = 0;
        let removed = registry.purge(&namespace, |removed| {
            assert!(removed > so_far && removed - so_far <= PAGE_MAX as u64, "{so_far} {removed}");
            so_far = removed;
        });
        let removed = removed.await.unwrap();
        // The children, and the events of the registration and the deletion.
        assert_eq!(removed, items as u64 + 2);
        assert_eq!(so_far, removed);
        assert!(world.store.calls(Call::ListKeys) <= items / PAGE_MAX + 2);
        assert!(team.children("org").unwrap().next_page().await.unwrap().is_none());
        assert!(registry.by_id(&namespace).await.unwrap().is_none());
    });
}

/// Changes entities until the list is read: some stay and get other metadata, others come and go between them.
async fn keep_writing(
    store: Arc<dyn Store>,
    namespace: NamespaceId,
    items: usize,
    seed: u64,
    is_read: Arc<AtomicBool>,
) -> usize {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut writes = 0;
    while !is_read.load(Ordering::Relaxed) {
        let Record::Entity(mut entity) = record(&namespace, random.usize(..items)) else {
            unreachable!("it makes entities")
        };
        if random.bool() {
            entity.metadata.insert("written".to_owned(), writes.to_string());
        } else {
            entity.id = entity_id(&format!("{}-guest", entity.id));
        }
        let key = Record::Entity(entity.clone()).key();
        let write = match entity.metadata.is_empty() && random.bool() {
            true => Write::Delete(key, Precondition::Always),
            false => Write::Put(Record::Entity(entity), Precondition::Always),
        };
        assert_eq!(store.write(&[write]).await.unwrap(), Written::Done);
        writes += 1;
        tokio::task::yield_now().await;
    }
    writes
}

#[test]
fn entities_that_stay_are_listed_once_while_others_write() {
    on_every_store_with_threads(async |world| {
        let items = if world.is(Kind::DynamoDb) { 4 * PAGE_MAX } else { 100_000 };
        let limiter = world.limiter().await;
        let namespace = limiter.namespaces().register("team").await.unwrap().id;
        let team = world.builder().namespace("team").open().await.unwrap();
        fill(world.store.inner(), &namespace, items).await;
        let is_read = Arc::new(AtomicBool::new(false));
        let writers = [1, 2].map(|seed| {
            let (store, is_read) = (Arc::clone(world.store.inner()), Arc::clone(&is_read));
            tokio::spawn(keep_writing(store, namespace.clone(), items, seed, is_read))
        });
        let mut pages = team.children("org").unwrap();
        let mut seen = 0;
        while let Some(children) = pages.next_page().await.unwrap() {
            for child in children {
                if !child.id.as_str().ends_with("-guest") {
                    assert_eq!(child.id.as_str(), id(seen), "each once, in order");
                    seen += 1;
                }
            }
        }
        is_read.store(true, Ordering::Relaxed);
        assert_eq!(seen, items);
        for writer in writers {
            assert!(writer.await.unwrap() > 0, "a writer waited for the whole list");
        }
    });
}

#[test]
fn pages_have_the_requested_size() {
    on_every_store(async |world| {
        let limiter = world.limiter().await;
        limiter.create_entity("org").await.unwrap();
        for at in 0..20 {
            limiter.create_entity(&id(at)).parent("org").await.unwrap();
        }
        for (size, expected) in [(7, vec![7, 7, 6]), (0, vec![1; 20]), (20, vec![20])] {
            let mut pages = limiter.children("org").unwrap().page_size(size);
            let mut sizes = Vec::new();
            while let Some(page) = pages.next_page().await.unwrap() {
                sizes.push(page.len());
            }
            assert_eq!(sizes, expected, "pages of {size}");
            assert!(pages.next_page().await.unwrap().is_none(), "the end stays the end");
        }
    });
}

#[test]
fn a_page_that_could_not_be_read_can_be_requested_again() {
    on_every_store(async |world| {
        let limiter = world.limiter().await;
        limiter.create_entity("org").await.unwrap();
        for at in 0..4 {
            limiter.create_entity(&id(at)).parent("org").await.unwrap();
        }
        let mut pages = limiter.children("org").unwrap().page_size(2);
        let mut ids = Vec::new();
        for fails in [true, false, true, false] {
            if fails {
                let denied = zae_limiter::store::StoreErrorKind::Denied;
                world.store.script(Call::List, zae_limiter_testkit::Fault::FailBefore(denied));
                pages.next_page().await.unwrap_err();
            } else {
                let page = pages.next_page().await.unwrap().unwrap();
                ids.extend(page.into_iter().map(|entity| entity.id.to_string()));
            }
        }
        assert_eq!(ids, [id(0), id(1), id(2), id(3)]);
    });
}
