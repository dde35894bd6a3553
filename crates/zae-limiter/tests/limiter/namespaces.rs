//! Namespaces: limiters on one store that see nothing of each other.

use zae_limiter::model::{AuditAction, AuditSubject, Namespace, ResourceList};
use zae_limiter::store::Store as _;
use zae_limiter::testing::Clock as _;
use zae_limiter::{Error, RateLimiter, Timestamp, Window};
use zae_limiter_testkit::{Call, Fault};

use crate::world::{
    Kind, World, child, left, ms, on_every_store, own_limits, per_minute, refusal, secs, spend,
    without_refill,
};

async fn open(world: &World, name: &str) -> Result<RateLimiter, Error> {
    world.builder().namespace(name).open().await
}

fn names(all: Vec<Namespace>) -> Vec<String> {
    let mut names: Vec<String> = all.into_iter().map(|each| each.name.to_string()).collect();
    names.sort();
    names
}

#[test]
fn default_is_registered_by_itself_and_others_must_be() {
    on_every_store(async |world| {
        let unknown = open(&world, "team-a").await;
        let Err(Error::UnknownNamespace { name }) = unknown else { panic!("{unknown:?}") };
        assert_eq!(name.as_str(), "team-a");
        let wrong = open(&world, "1 a").await;
        assert!(matches!(wrong, Err(Error::Invalid(_))), "{wrong:?}");

        let first = world.limiter().await;
        let again = world.limiter().await;
        assert_eq!(first.namespace().as_str(), "default");
        assert_eq!(first.namespace_id(), again.namespace_id());
        let registered = first.namespaces().register("team-a").await.unwrap();
        let team = open(&world, "team-a").await.unwrap();
        assert_eq!(team.namespace_id(), &registered.id);
        assert_ne!(team.namespace_id(), first.namespace_id());
    });
}

#[test]
fn registering_again_changes_nothing() {
    on_every_store(async |world| {
        let registry = world.limiter().await.namespaces();
        let first = registry.register("team-a").await.unwrap();
        world.advance(ms(5));
        let again = registry.register("team-a").await.unwrap();
        assert_eq!(again, first);
        assert_eq!(registry.get("team-a").await.unwrap(), Some(first.clone()));
        assert_eq!(registry.by_id(&first.id).await.unwrap(), Some(first));
        assert_eq!(registry.get("team-b").await.unwrap(), None);
        assert_eq!(names(registry.list().all().await.unwrap()), ["default", "team-a"]);
        let team = open(&world, "team-a").await.unwrap();
        let events = team.audit_events_of(AuditSubject::System).all().await.unwrap();
        assert_eq!(events.len(), 1);
    });
}

#[test]
fn many_that_register_the_same_name_get_the_same_namespace() {
    crate::world::on_every_store_with_threads(async |world| {
        let opened = (0..16).map(|_| tokio::spawn(world.builder().open()));
        let mut ids = Vec::new();
        for limiter in opened.collect::<Vec<_>>() {
            ids.push(limiter.await.unwrap().unwrap().namespace_id().clone());
        }
        ids.dedup();
        assert_eq!(ids.len(), 1);
    });
}

#[test]
fn namespaces_see_nothing_of_each_other() {
    on_every_store(async |world| {
        let a = world.limiter().await;
        a.namespaces().register("team-b").await.unwrap();
        let b = open(&world, "team-b").await.unwrap();
        a.set_system_defaults([without_refill("tpm", 10)], None).await.unwrap();
        a.set_resource_defaults("gpt-5", [without_refill("tpm", 10)]).await.unwrap();
        a.create_entity("org").await.unwrap();
        child(&a, "key", "org").await;
        own_limits(&a, "key", [without_refill("tpm", 10)]).await;
        a.set_limits("key", Some("gpt-6"), [without_refill("tpm", 10)]).await.unwrap();
        spend(&a, "key", "gpt-4", "tpm", 10).await;

        assert_eq!(b.entity("key").await.unwrap(), None);
        assert!(b.system_defaults().await.unwrap().is_none());
        assert!(b.resource_defaults("gpt-5").await.unwrap().is_none());
        assert!(b.limits("key", None).await.unwrap().is_none());
        assert!(b.children("org").unwrap().all().await.unwrap().is_empty());
        assert!(b.audit_events("key").unwrap().all().await.unwrap().is_empty());
        assert!(b.entities_with_limits(None).unwrap().all().await.unwrap().is_empty());
        for which in [ResourceList::WithDefaults, ResourceList::WithEntityConfigs] {
            assert!(b.resources(which).all().await.unwrap().is_empty());
        }
        let used = b.usage().entity("key").window(Window::Daily).summary().await.unwrap();
        assert_eq!(used.records, 0);
        assert_eq!(b.resource_capacity("gpt-4", "tpm").await.unwrap().entities, 0);
        b.set_system_defaults([without_refill("tpm", 7)], None).await.unwrap();
        spend(&b, "key", "gpt-4", "tpm", 7).await;
        assert_eq!(left(&a, "org", "gpt-4", "tpm").await, 0);
        b.delete_entity("key").await.unwrap();
        assert!(a.entity("key").await.unwrap().is_some());
        refusal(&a, "key", "gpt-4", "tpm", 1).await;
    });
}

#[test]
fn a_deleted_namespace_frees_its_name_and_can_be_recovered() {
    on_every_store(async |world| {
        let registry = world.limiter().await.namespaces();
        let first = registry.register("team").await.unwrap();
        let limiter = open(&world, "team").await.unwrap();
        limiter.set_system_defaults([without_refill("tpm", 10)], None).await.unwrap();
        spend(&limiter, "key", "gpt-4", "tpm", 4).await;
        world.advance(ms(1));
        let deleted = registry.delete("team").await.unwrap();
        assert_eq!(deleted.id, first.id);
        assert!(deleted.deleted_at.is_some());
        assert_eq!(registry.get("team").await.unwrap(), None);
        assert_eq!(registry.by_id(&first.id).await.unwrap(), Some(deleted));
        assert_eq!(names(registry.list().all().await.unwrap()), ["default"]);
        assert_eq!(names(registry.orphans().all().await.unwrap()), ["team"]);
        let deleted = open(&world, "team").await;
        assert!(matches!(deleted, Err(Error::UnknownNamespace { .. })), "{deleted:?}");
        let twice = registry.delete("team").await;
        assert!(matches!(twice, Err(Error::NotFound { .. })), "{twice:?}");
        // Open limiters keep working.
        spend(&limiter, "key", "gpt-4", "tpm", 1).await;

        // The name is free: a new namespace, with nothing in it.
        let second = registry.register("team").await.unwrap();
        assert_ne!(second.id, first.id);
        let anew = open(&world, "team").await.unwrap();
        assert!(anew.system_defaults().await.unwrap().is_none());
        let taken = registry.recover(&first.id).await;
        assert!(matches!(taken, Err(Error::AlreadyExists { .. })), "{taken:?}");
        let orphan = registry.by_id(&first.id).await.unwrap().unwrap();
        assert!(orphan.deleted_at.is_some(), "a failed recovery changes nothing");

        world.advance(ms(1));
        registry.delete("team").await.unwrap();
        world.advance(ms(1));
        let recovered = registry.recover(&first.id).await.unwrap();
        assert_eq!(recovered, first);
        assert_eq!(registry.recover(&first.id).await.unwrap(), first, "again changes nothing");
        let back = open(&world, "team").await.unwrap();
        assert_eq!(left(&back, "key", "gpt-4", "tpm").await, 5);
        let events = back.audit_events_of(AuditSubject::System).all().await.unwrap();
        let actions: Vec<AuditAction> = events.iter().map(|event| event.action.clone()).collect();
        assert_eq!(
            actions,
            [
                AuditAction::NamespaceRecovered,
                AuditAction::NamespaceDeleted,
                AuditAction::LimitsSet,
                AuditAction::NamespaceRegistered
            ]
        );
    });
}

#[test]
fn only_a_deleted_namespace_is_purged_and_others_keep_everything() {
    on_every_store(async |world| {
        let limiter = world.limiter_with([without_refill("tpm", 10)]).await;
        spend(&limiter, "key", "gpt-4", "tpm", 4).await;
        let registry = limiter.namespaces();
        let namespace = registry.register("team").await.unwrap();
        let team = open(&world, "team").await.unwrap();
        team.create_entity("org").await.unwrap();
        child(&team, "key", "org").await;
        own_limits(&team, "key", [per_minute("tpm", 10)]).await;
        team.set_resource_defaults("gpt-4", [per_minute("tpm", 10)]).await.unwrap();
        spend(&team, "key", "gpt-4", "tpm", 3).await;
        // Usage on DynamoDB is booked by the aggregator.
        let booked = if world.is(Kind::DynamoDb) { 0 } else { 1 };
        let used = team.usage().entity("key").summary().await.unwrap();
        assert_eq!(used.records, booked);

        let in_use = registry.purge(&namespace.id, |_| {}).await;
        let Err(Error::NamespaceInUse { name }) = in_use else { panic!("{in_use:?}") };
        assert_eq!(name.as_str(), "team");
        registry.delete("team").await.unwrap();
        let mut progress = Vec::new();
        let removed = registry.purge(&namespace.id, |so_far| progress.push(so_far)).await.unwrap();
        // Two entities, two configurations, two buckets, the records of what both used in three
        // windows each, and an event for each of the six changes.
        assert!(removed >= 2 + 2 + 2 + 3 * booked + 6, "{removed}");
        assert_eq!(progress, [removed]);
        assert_eq!(registry.by_id(&namespace.id).await.unwrap(), None);
        assert!(registry.orphans().all().await.unwrap().is_empty());
        for done in [
            registry.purge(&namespace.id, |_| {}).await.map(|_| ()),
            registry.recover(&namespace.id).await.map(|_| ()),
        ] {
            assert!(matches!(done, Err(Error::NotFound { .. })), "{done:?}");
        }
        assert!(team.entity("key").await.unwrap().is_none());
        assert!(team.audit_events("key").unwrap().all().await.unwrap().is_empty());
        assert!(world.bucket(&team, "key", "gpt-4").await.is_none());
        assert_eq!(left(&limiter, "key", "gpt-4", "tpm").await, 6);
    });
}

#[test]
fn a_purge_that_was_cut_short_can_be_repeated() {
    on_every_store(async |world| {
        let registry = world.limiter().await.namespaces();
        let id = registry.register("team").await.unwrap().id;
        let team = open(&world, "team").await.unwrap();
        team.set_system_defaults([per_minute("rpm", 10)], None).await.unwrap();
        for at in 0..1_500 {
            spend(&team, &format!("key-{at}"), "gpt-4", "rpm", 1).await;
        }
        registry.delete("team").await.unwrap();
        let denied = || Fault::FailBefore(zae_limiter::store::StoreErrorKind::Denied);
        for fails in [Call::ListKeys, Call::Delete] {
            world.store.script(fails, denied());
            registry.purge(&id, |_| {}).await.unwrap_err();
            assert_eq!(names(registry.orphans().all().await.unwrap()), ["team"]);
        }
        // The second page fails; the first is deleted.
        let mut progress = Vec::new();
        let failed = registry.purge(&id, |so_far| {
            if progress.is_empty() {
                world.store.script(Call::Delete, denied());
            }
            progress.push(so_far);
        });
        failed.await.unwrap_err();
        assert_eq!(progress, [1_000]);
        let rest = registry.purge(&id, |_| {}).await.unwrap();
        assert!(rest >= 500, "{rest}");
        assert!(registry.by_id(&id).await.unwrap().is_none());
    });
}

fn assert_purged<T: std::fmt::Debug>(result: Result<T, Error>) {
    let Err(Error::NamespacePurged { name }) = &result else { panic!("{result:?}") };
    assert_eq!(name.as_str(), "team");
    let text = result.unwrap_err().to_string();
    assert!(text.contains("register the name again and open a new limiter"), "{text}");
}

async fn take(limiter: &RateLimiter, entity: &str) -> Result<(), Error> {
    limiter.acquire(entity, "gpt-4").take("tpm", 1).await?.commit().await
}

#[test]
fn an_open_limiter_of_a_purged_namespace_learns_it_within_the_ttl_of_its_cache() {
    on_every_store(async |world| {
        let registry = world.limiter().await.namespaces();
        let id = registry.register("team").await.unwrap().id;
        let team = world.builder().namespace("team").default_limits([per_minute("tpm", 10)]);
        let team = team.open().await.unwrap();
        take(&team, "one").await.unwrap();
        world.advance(secs(5));
        registry.delete("team").await.unwrap();
        take(&team, "one").await.unwrap();
        registry.purge(&id, |_| {}).await.unwrap();
        // Its limits are read after the purge, without a look at the namespace: that was read less than 30 s ago.
        world.advance(secs(24));
        take(&team, "two").await.unwrap();
        let gets = world.store.calls(Call::Get);
        take(&team, "one").await.unwrap();
        assert_eq!(world.store.calls(Call::Get), gets, "the warm path reads nothing");
        world.advance(secs(36));
        // The entity whose limits are cached for another 24 s, and one that was never read.
        assert_purged(take(&team, "two").await);
        assert_purged(take(&team, "three").await);
        let own = [per_minute("tpm", 10)];
        let call = team.acquire("one", "gpt-4").take("tpm", 1).limits(own);
        assert_purged(call.await);
        let gets = world.store.calls(Call::Get);
        assert_purged(take(&team, "one").await);
        assert_eq!(world.store.calls(Call::Get), gets, "it is known now");
        assert_purged(team.available("one", "gpt-4", &[]).await);
    });
}

#[test]
fn changes_by_an_open_limiter_of_a_purged_namespace_fail_at_once() {
    on_every_store(async |world| {
        let registry = world.limiter().await.namespaces();
        let id = registry.register("team").await.unwrap().id;
        let open = async || open(&world, "team").await.unwrap();
        let limiters = [open().await, open().await, open().await, open().await, open().await];
        registry.delete("team").await.unwrap();
        registry.purge(&id, |_| {}).await.unwrap();
        let [one, two, three, four, five] = limiters;
        assert_purged(one.set_system_defaults([per_minute("tpm", 10)], None).await);
        assert_purged(two.set_limits("key", None, [per_minute("tpm", 10)]).await);
        assert_purged(three.create_entity("key").await);
        assert_purged(four.delete_entity("key").await);
        assert_purged(five.set_audit_retention(30).await);
        assert_purged(one.set_audit_retention(30).await);
        let scope = zae_limiter::store::Scope::Namespace(id);
        let page = zae_limiter::store::PageRequest::first(10);
        assert_eq!(world.store.list_keys(&scope, &page).await.unwrap().items, []);
    });
}

#[test]
fn a_purge_is_noticed_within_one_ttl_if_the_clock_is_set_back_after_it() {
    on_every_store(async |world| {
        let registry = world.limiter().await.namespaces();
        let id = registry.register("team").await.unwrap().id;
        let team = world.builder().namespace("team").default_limits([per_minute("tpm", 10)]);
        let team = team.open().await.unwrap();
        take(&team, "one").await.unwrap();
        registry.delete("team").await.unwrap();
        registry.purge(&id, |_| {}).await.unwrap();
        world.advance(secs(58));
        let now = world.clock.now().as_millis();
        world.clock.correct(Timestamp::from_millis(now - 57_000));
        world.advance(secs(2));
        assert_purged(take(&team, "one").await);
    });
}

#[test]
fn a_limiter_without_a_cache_learns_of_a_purge_within_a_second() {
    on_every_store(async |world| {
        let registry = world.limiter().await.namespaces();
        let id = registry.register("team").await.unwrap().id;
        let limits = [per_minute("tpm", 10)];
        let team = world.builder().namespace("team").default_limits(limits).cache_ttl(ms(0));
        let team = team.open().await.unwrap();
        take(&team, "one").await.unwrap();
        registry.delete("team").await.unwrap();
        registry.purge(&id, |_| {}).await.unwrap();
        world.advance(secs(1));
        assert_purged(take(&team, "one").await);
    });
}
