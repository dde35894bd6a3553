//! Long lists: read and removed page by page, however long they are.

use std::collections::BTreeMap;
use std::sync::Arc;

use zae_limiter::Entity;
use zae_limiter::model::NamespaceId;
use zae_limiter::store::{BATCH_MAX, PAGE_MAX, Precondition, Record, Store, Write, Written};
use zae_limiter_testkit::Call;

use crate::world::{Kind, NOW, entity_id, on_every_store};

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
