//! Which limits apply: the most specific level replaces all others.

use zae_limiter::model::{ConfigLevel, ResourceList};
use zae_limiter::{Error, OnUnavailable, RateLimiter};

use crate::world::{entity_id, on_every_store, per_minute, resource, spend};

async fn holds(limiter: &RateLimiter, on: &str) -> (Vec<(String, u64)>, Option<ConfigLevel>) {
    let effective = limiter.effective_limits("key", on).await.unwrap();
    let limits = effective.limits.into_iter().map(|limit| (limit.name, limit.capacity));
    (limits.collect(), effective.level)
}

#[test]
fn the_most_specific_level_wins_as_a_whole() {
    on_every_store(async |world| {
        let builder = world.builder().default_limits([per_minute("a", 1), per_minute("b", 1)]);
        let limiter = builder.open().await.unwrap();
        let expect = async |names: &[(&str, u64)], level: Option<ConfigLevel>| {
            let names: Vec<(String, u64)> =
                names.iter().map(|(name, capacity)| ((*name).to_owned(), *capacity)).collect();
            assert_eq!(holds(&limiter, "gpt-4").await, (names.clone(), level));
            // An acquire uses the same limits: others are unknown.
            for name in ["a", "b", "c", "d", "e"] {
                let taken = limiter.acquire("key", "gpt-4").take(name, 0).await;
                assert_eq!(taken.is_ok(), names.iter().any(|(other, _)| other == name), "{name}");
            }
        };
        let (key, gpt) = (entity_id("key"), resource("gpt-4"));
        expect(&[("a", 1), ("b", 1)], None).await;
        limiter.set_system_defaults([per_minute("b", 2)], None).await.unwrap();
        expect(&[("b", 2)], Some(ConfigLevel::System)).await;
        limiter.set_resource_defaults("gpt-4", [per_minute("c", 3)]).await.unwrap();
        expect(&[("c", 3)], Some(ConfigLevel::Resource(gpt.clone()))).await;
        limiter.set_limits("key", None, [per_minute("d", 4)]).await.unwrap();
        expect(&[("d", 4)], Some(ConfigLevel::Entity(key.clone()))).await;
        limiter.set_limits("key", Some("gpt-4"), [per_minute("e", 5)]).await.unwrap();
        expect(&[("e", 5)], Some(ConfigLevel::EntityResource(key.clone(), gpt.clone()))).await;

        // Other resources and entities see none of the narrower ones.
        assert_eq!(holds(&limiter, "gpt-5").await.1, Some(ConfigLevel::Entity(key.clone())));
        let other = limiter.effective_limits("kez", "gpt-4").await.unwrap();
        assert_eq!(other.level, Some(ConfigLevel::Resource(gpt.clone())));

        limiter.delete_limits("key", Some("gpt-4")).await.unwrap();
        expect(&[("d", 4)], Some(ConfigLevel::Entity(key))).await;
        limiter.delete_limits("key", None).await.unwrap();
        expect(&[("c", 3)], Some(ConfigLevel::Resource(gpt))).await;
        limiter.delete_resource_defaults("gpt-4").await.unwrap();
        expect(&[("b", 2)], Some(ConfigLevel::System)).await;
        limiter.delete_system_defaults().await.unwrap();
        expect(&[("a", 1), ("b", 1)], None).await;
    });
}

#[test]
fn default_stands_for_all_resources_of_an_entity() {
    on_every_store(async |world| {
        let limiter = world.limiter().await;
        limiter.set_limits("key", Some("_default_"), [per_minute("rpm", 3)]).await.unwrap();
        let stored = limiter.limits("key", None).await.unwrap().unwrap();
        assert_eq!(stored.level, ConfigLevel::Entity(entity_id("key")));
        assert_eq!(limiter.limits("key", Some("_default_")).await.unwrap(), Some(stored));
        assert_eq!(limiter.limits("key", Some("gpt-4")).await.unwrap(), None);
        spend(&limiter, "key", "gpt-4", "rpm", 3).await;
        limiter.delete_limits("key", Some("_default_")).await.unwrap();
        assert_eq!(limiter.limits("key", None).await.unwrap(), None);
    });
}

#[test]
fn a_system_level_without_limits_only_says_what_to_do_without_the_store() {
    on_every_store(async |world| {
        let builder = world.builder().default_limits([per_minute("a", 1)]);
        let limiter = builder.open().await.unwrap();
        limiter.set_system_defaults([], Some(OnUnavailable::Allow)).await.unwrap();
        assert_eq!(holds(&limiter, "gpt-4").await, (vec![("a".to_owned(), 1)], None));
        // Setting limits later leaves that as it is.
        limiter.set_system_defaults([per_minute("b", 1)], None).await.unwrap();
        let stored = limiter.system_defaults().await.unwrap().unwrap();
        assert_eq!(stored.on_unavailable, Some(OnUnavailable::Allow));
        limiter
            .set_system_defaults([per_minute("b", 1)], Some(OnUnavailable::Block))
            .await
            .unwrap();
        let stored = limiter.system_defaults().await.unwrap().unwrap();
        assert_eq!(stored.on_unavailable, Some(OnUnavailable::Block));
    });
}

#[test]
fn what_cannot_be_set_or_deleted_is_an_error() {
    on_every_store(async |world| {
        let limiter = world.limiter().await;
        let none = [];
        let twice = [per_minute("rpm", 1), per_minute("rpm", 2)];
        for done in [
            limiter.set_limits("key", None, none.clone()).await,
            limiter.set_limits("key", Some("gpt-4"), twice.clone()).await,
            limiter.set_limits("a b", None, [per_minute("rpm", 1)]).await,
            limiter.set_limits("key", Some("a b"), [per_minute("rpm", 1)]).await,
            limiter.set_resource_defaults("gpt-4", none.clone()).await,
            limiter.set_resource_defaults("_default_", [per_minute("rpm", 1)]).await,
            limiter.set_system_defaults(none, None).await,
            limiter.set_system_defaults([per_minute("wcu", 1)], None).await,
        ] {
            assert!(matches!(done, Err(Error::Invalid(_))), "{done:?}");
        }
        for done in [
            limiter.delete_limits("key", None).await,
            limiter.delete_limits("key", Some("gpt-4")).await,
            limiter.delete_resource_defaults("gpt-4").await,
            limiter.delete_system_defaults().await,
        ] {
            assert!(matches!(done, Err(Error::NotFound { .. })), "{done:?}");
        }
        let wrong = world.builder().default_limits([per_minute("rpm", 0)]).open().await;
        assert!(matches!(wrong, Err(Error::Invalid(_))), "{wrong:?}");
    });
}

#[test]
fn versions_rise_with_each_change() {
    on_every_store(async |world| {
        let limiter = world.limiter().await;
        for version in 1..=3 {
            let limits = || [per_minute("rpm", version)];
            let set = [
                limiter.set_limits("key", None, limits()).await,
                limiter.set_limits("key", Some("gpt-4"), limits()).await,
                limiter.set_resource_defaults("gpt-4", limits()).await,
                limiter.set_system_defaults(limits(), None).await,
            ];
            for config in set {
                assert_eq!(config.unwrap().version, version);
            }
            let stored = limiter.resource_defaults("gpt-4").await.unwrap().unwrap();
            assert_eq!(stored.version, version);
        }
    });
}

#[test]
fn many_changes_at_once_each_count() {
    crate::world::on_every_store_with_threads(async |world| {
        let limiter = world.limiter().await;
        let changes = (0..8).map(|at| {
            let limiter = limiter.clone();
            tokio::spawn(async move {
                limiter.set_limits("key", None, [per_minute("rpm", 1 + at)]).await
            })
        });
        let mut versions = Vec::new();
        for change in changes.collect::<Vec<_>>() {
            versions.push(change.await.unwrap().unwrap().version);
        }
        versions.sort_unstable();
        assert_eq!(versions, [1, 2, 3, 4, 5, 6, 7, 8]);
        assert_eq!(limiter.audit_events("key").unwrap().all().await.unwrap().len(), 8);
    });
}

#[test]
fn entities_and_resources_with_limits_are_listed() {
    on_every_store(async |world| {
        let limiter = world.limiter().await;
        for (entity, on) in [("c", None), ("a", None), ("b", Some("gpt-4")), ("a", Some("gpt-4"))] {
            limiter.set_limits(entity, on, [per_minute("rpm", 1)]).await.unwrap();
        }
        for on in ["gpt-5", "claude"] {
            limiter.set_resource_defaults(on, [per_minute("rpm", 1)]).await.unwrap();
        }
        let entities = async |on| {
            let all = limiter.entities_with_limits(on).unwrap().all().await.unwrap();
            let id = |level| match level {
                ConfigLevel::Entity(id) | ConfigLevel::EntityResource(id, _) => id.to_string(),
                other => panic!("{other:?}"),
            };
            all.into_iter().map(|config| id(config.level)).collect::<Vec<_>>()
        };
        assert_eq!(entities(None).await, ["a", "c"]);
        assert_eq!(entities(Some("gpt-4")).await, ["a", "b"]);
        assert!(entities(Some("gpt-5")).await.is_empty());
        let names = async |which| {
            let all = limiter.resources(which).all().await.unwrap();
            all.into_iter().map(|name| name.to_string()).collect::<Vec<_>>()
        };
        assert_eq!(names(ResourceList::WithDefaults).await, ["claude", "gpt-5"]);
        assert_eq!(names(ResourceList::WithEntityConfigs).await, ["gpt-4"]);
    });
}
