//! Entities: created, found, listed, deleted with all their items.

use std::collections::BTreeMap;

use zae_limiter::model::AuditAction;
use zae_limiter::{Error, RateLimiter, Window};
use zae_limiter_testkit::{Call, Fault, Gate};

use crate::world::{
    Kind, NOW, child, entity_id, finish, left, ms, on_every_store, own_limits, per_minute, spend,
    without_refill,
};

#[test]
fn an_entity_is_found_as_it_was_created() {
    on_every_store(async |world| {
        let limiter = world.limiter().await;
        assert_eq!(limiter.entity("key").await.unwrap(), None);
        limiter.create_entity("org").await.unwrap();
        let create = limiter.create_entity("key").name("My key").parent("org").cascade();
        let created = create.metadata("tier", "gold").metadata("owner", "ö").await.unwrap();
        assert_eq!(limiter.entity("key").await.unwrap().as_ref(), Some(&created));
        assert_eq!(created.name.as_deref(), Some("My key"));
        assert_eq!(created.parent, Some(entity_id("org")));
        assert!(created.cascade);
        assert_eq!(created.created_at, NOW);
        let metadata = [("tier", "gold"), ("owner", "ö")].map(|(k, v)| (k.into(), v.into()));
        assert_eq!(created.metadata, BTreeMap::from(metadata));
        let wrong = limiter.create_entity("a b").await;
        assert!(matches!(wrong, Err(Error::Invalid(_))), "{wrong:?}");
    });
}

async fn ids(limiter: &RateLimiter, parent: &str, page: usize) -> Vec<Vec<String>> {
    let mut pages = limiter.children(parent).unwrap().page_size(page);
    let mut all = Vec::new();
    while let Some(children) = pages.next_page().await.unwrap() {
        all.push(children.into_iter().map(|entity| entity.id.to_string()).collect());
    }
    all
}

#[test]
fn children_are_listed_in_pages_by_id() {
    on_every_store(async |world| {
        let limiter = world.limiter().await;
        for parent in ["org", "other"] {
            limiter.create_entity(parent).await.unwrap();
        }
        for id in ["d", "b", "e", "a", "c"] {
            limiter.create_entity(id).parent("org").await.unwrap();
        }
        child(&limiter, "x", "other").await;
        child(&limiter, "grandchild", "a").await;
        assert_eq!(ids(&limiter, "org", 2).await, [vec!["a", "b"], vec!["c", "d"], vec!["e"]]);
        assert_eq!(ids(&limiter, "org", 1_000).await, [vec!["a", "b", "c", "d", "e"]]);
        assert!(ids(&limiter, "e", 2).await.is_empty());
        limiter.delete_entity("c").await.unwrap();
        assert_eq!(ids(&limiter, "org", 3).await, [vec!["a", "b", "d"], vec!["e"]]);
    });
}

#[test]
fn deleting_an_entity_removes_what_is_its_own_and_keeps_its_audit_events() {
    on_every_store(async |world| {
        let limiter = world.limiter_with([without_refill("tpm", 100)]).await;
        for id in ["key", "key2"] {
            limiter.create_entity(id).await.unwrap();
            own_limits(&limiter, id, [without_refill("tpm", 50)]).await;
            limiter.set_limits(id, Some("gpt-5"), [without_refill("tpm", 20)]).await.unwrap();
            for on in ["gpt-4", "gpt-5"] {
                spend(&limiter, id, on, "tpm", 10).await;
            }
        }
        let usage = async |id: &str| {
            let query = limiter.usage().entity(id).window(Window::Monthly);
            query.summary().await.unwrap().records
        };
        // Usage on DynamoDB is booked by the aggregator.
        let booked = if world.is(Kind::DynamoDb) { 0 } else { 2 };
        assert_eq!(usage("key").await, booked);

        // Itself, two configurations, two buckets, two times three usage records.
        assert_eq!(limiter.delete_entity("key").await.unwrap(), 5 + 3 * booked);
        assert_eq!(limiter.entity("key").await.unwrap(), None);
        assert_eq!(limiter.limits("key", None).await.unwrap(), None);
        assert_eq!(limiter.limits("key", Some("gpt-5")).await.unwrap(), None);
        assert!(world.bucket(&limiter, "key", "gpt-4").await.is_none());
        assert_eq!(usage("key").await, 0);
        let events = limiter.audit_events("key").unwrap().all().await.unwrap();
        let actions: Vec<AuditAction> = events.iter().map(|event| event.action.clone()).collect();
        assert_eq!(actions.len(), 4);
        assert_eq!(actions[0], AuditAction::EntityDeleted);
        // Defaults hold for it at once, with a full bucket.
        assert_eq!(left(&limiter, "key", "gpt-4", "tpm").await, 100);

        assert_eq!(left(&limiter, "key2", "gpt-4", "tpm").await, 40);
        assert_eq!(left(&limiter, "key2", "gpt-5", "tpm").await, 10);
        assert_eq!(usage("key2").await, booked);
        let missing = limiter.delete_entity("key").await;
        assert!(matches!(missing, Err(Error::NotFound { .. })), "{missing:?}");
    });
}

#[test]
fn what_an_entity_left_behind_without_being_created_can_be_deleted_too() {
    on_every_store(async |world| {
        let limiter = world.limiter_with([per_minute("rpm", 10)]).await;
        spend(&limiter, "key", "gpt-4", "rpm", 10).await;
        assert!(limiter.delete_entity("key").await.unwrap() >= 1);
        spend(&limiter, "key", "gpt-4", "rpm", 10).await;
    });
}

#[test]
fn the_bucket_of_a_late_charge_on_a_deleted_entity_expires_when_it_is_full() {
    on_every_store(async |world| {
        let limiter = world.limiter().await;
        limiter.create_entity("key").await.unwrap();
        own_limits(&limiter, "key", [per_minute("tpm", 60)]).await;
        let mut lease = limiter.acquire("key", "gpt-4").take("tpm", 10).await.unwrap();
        limiter.delete_entity("key").await.unwrap();
        lease.adjust("tpm", 5).unwrap();
        lease.commit().await.unwrap();
        let (tokens, _) = world.cell(&limiter, "key", "gpt-4", "tpm").await;
        assert_eq!(tokens, 55_000, "the deletion forgave the acquire, not the charge after it");
        assert!(limiter.entity("key").await.unwrap().is_none(), "the entity stays deleted");
        world.advance(ms(4_999));
        assert!(world.bucket(&limiter, "key", "gpt-4").await.is_some());
        world.advance(ms(1));
        assert!(world.bucket(&limiter, "key", "gpt-4").await.is_none(), "full, so it has expired");
    });
}

#[test]
fn a_late_refund_does_not_restore_a_deleted_entity() {
    on_every_store(async |world| {
        let limiter = world.limiter_with([without_refill("tpm", 100)]).await;
        limiter.create_entity("key").await.unwrap();
        let mut lease = limiter.acquire("key", "gpt-4").take("tpm", 10).await.unwrap();
        limiter.delete_entity("key").await.unwrap();
        lease.adjust("tpm", -5).unwrap();
        lease.commit().await.unwrap();
        assert!(world.bucket(&limiter, "key", "gpt-4").await.is_none());
        let missing = limiter.delete_entity("key").await;
        assert!(matches!(missing, Err(Error::NotFound { .. })), "{missing:?}");
    });
}

#[test]
fn a_deletion_that_was_cut_short_can_be_repeated() {
    on_every_store(async |world| {
        let limiter = world.limiter().await;
        let denied = || Fault::FailBefore(zae_limiter::store::StoreErrorKind::Denied);
        for fails in [Call::ListKeys, Call::Delete, Call::Write] {
            limiter.create_entity("key").await.unwrap();
            own_limits(&limiter, "key", [without_refill("tpm", 50)]).await;
            spend(&limiter, "key", "gpt-4", "tpm", 10).await;
            world.store.script(fails, denied());
            let failed = limiter.delete_entity("key").await;
            assert!(matches!(failed, Err(Error::Store(_))), "{failed:?}");
            assert!(limiter.entity("key").await.unwrap().is_some(), "it goes last");
            limiter.delete_entity("key").await.unwrap();
            assert!(limiter.entity("key").await.unwrap().is_none());
            assert!(limiter.limits("key", None).await.unwrap().is_none());
        }
    });
}

#[test]
fn what_was_changed_before_an_error_is_enforced_here_at_once() {
    on_every_store(async |world| {
        let limiter = world.limiter_with([without_refill("tpm", 100)]).await;
        limiter.create_entity("org").await.unwrap();
        spend(&limiter, "key", "gpt-4", "tpm", 1).await;
        let lost = Fault::FailAfter(zae_limiter::store::StoreErrorKind::Unavailable);
        world.store.script(Call::Write, lost);
        let created = limiter.create_entity("key").parent("org").cascade().await;
        assert!(matches!(created, Err(Error::Unavailable { .. })), "{created:?}");
        spend(&limiter, "key", "gpt-4", "tpm", 1).await;
        assert_eq!(left(&limiter, "org", "gpt-4", "tpm").await, 99);

        own_limits(&limiter, "key", [without_refill("tpm", 500)]).await;
        spend(&limiter, "key", "gpt-4", "tpm", 1).await;
        world
            .store
            .script(Call::Write, Fault::FailBefore(zae_limiter::store::StoreErrorKind::Denied));
        limiter.delete_entity("key").await.unwrap_err();
        let limits = limiter.effective_limits("key", "gpt-4").await.unwrap().limits;
        assert_eq!(limits[0].capacity, 100, "its limits are deleted, its record is not");
    });
}

/// Buckets and limits alone make an entity that can be deleted, although it was never created.
#[test]
fn a_deletion_cut_short_and_repeated_leaves_an_audit_event_also_of_an_entity_never_created() {
    // The reply of the audit event may be lost, too: then the repetition writes another.
    for (cut, events_wanted) in [(Call::Delete, 1), (Call::Write, 2), (Call::ListKeys, 1)] {
        on_every_store(async |world| {
            let limiter = world.limiter_with([without_refill("rpm", 10)]).await;
            for on in ["a", "b"] {
                spend(&limiter, "key", on, "rpm", 1).await;
            }
            let lost = Fault::FailAfter(zae_limiter::store::StoreErrorKind::Denied);
            world.store.script(cut, lost);
            limiter.delete_entity("key").await.unwrap_err();
            // The repetition finds the rest, or nothing.
            let _ = limiter.delete_entity("key").await;
            let events = limiter.audit_events("key").unwrap().all().await.unwrap();
            let deleted = events.iter().filter(|event| event.action == AuditAction::EntityDeleted);
            assert_eq!(deleted.count(), events_wanted, "cut at {cut:?}");
            let none = limiter.delete_entity("key").await;
            assert!(matches!(none, Err(Error::NotFound(_))), "{none:?}");
        });
    }
}

/// Two parents that were deleted are created again at the same time, each below a child of the other.
#[test]
fn parents_created_again_at_once_close_no_cycle() {
    on_every_store(async |world| {
        let limiter = world.limiter().await;
        for (gone, orphan) in [("x", "y"), ("v", "w")] {
            limiter.create_entity(gone).await.unwrap();
            limiter.create_entity(orphan).parent(gone).await.unwrap();
            limiter.delete_entity(gone).await.unwrap();
        }
        let gate = Gate::new();
        world.store.script(Call::Write, Fault::HoldBefore(gate.clone()));
        let mut first = Box::pin(async { limiter.create_entity("x").parent("w").await });
        let mut checked = Box::pin(gate.reached());
        finish(std::future::poll_fn(|context| {
            assert!(first.as_mut().poll(context).is_pending());
            checked.as_mut().poll(context)
        }))
        .await;
        limiter.create_entity("v").parent("y").await.unwrap();
        gate.open();
        let created = first.await;
        assert!(matches!(created, Err(Error::Cycle { .. })), "{created:?}");
        assert_eq!(limiter.entity("x").await.unwrap(), None);
    });
}
