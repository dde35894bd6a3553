//! Hierarchies: entities that cascade to their parents.

use zae_limiter::model::LEVELS_MAX;
use zae_limiter::{Error, RateLimiter};
use zae_limiter_testkit::Call;

use crate::world::{child, left, on_every_store, own_limits, refusal, soon, spend, without_refill};

/// `org` above `team` above `key`, all cascading, with these ceilings of `tpm`.
async fn family(limiter: &RateLimiter, key: u64, team: u64, org: u64) {
    limiter.create_entity("org").await.unwrap();
    child(limiter, "team", "org").await;
    child(limiter, "key", "team").await;
    for (who, capacity) in [("key", key), ("team", team), ("org", org)] {
        own_limits(limiter, who, [without_refill("tpm", capacity)]).await;
    }
}

/// What key, team and org have left.
async fn all_left(limiter: &RateLimiter) -> [i64; 3] {
    let mut all = [0; 3];
    for (who, left_of) in ["key", "team", "org"].into_iter().zip(&mut all) {
        *left_of = left(limiter, who, "gpt-4", "tpm").await;
    }
    all
}

#[test]
fn one_to_eight_levels_are_taken_from_together() {
    on_every_store(async |world| {
        let limiter = world.limiter_with([without_refill("tpm", 100)]).await;
        let name = |level: usize| format!("level-{level}");
        limiter.create_entity(&name(1)).await.unwrap();
        for level in 2..=LEVELS_MAX {
            child(&limiter, &name(level), &name(level - 1)).await;
        }
        for level in 1..=LEVELS_MAX {
            for temperature in ["cold", "warm"] {
                let name = name(level);
                let call = limiter.acquire(&name, "gpt-4").take("tpm", 1);
                let lease = call.await.unwrap();
                assert_eq!(lease.statuses().len(), level, "{temperature}");
                lease.commit().await.unwrap();
            }
        }
        for level in 1..=LEVELS_MAX {
            let taken = 2 * i64::try_from(LEVELS_MAX - level + 1).unwrap();
            assert_eq!(left(&limiter, &name(level), "gpt-4", "tpm").await, 100 - taken);
        }
        let ninth = limiter.create_entity("level-9").parent("level-8").cascade().await;
        let Err(Error::TooDeep { entity, max }) = ninth else { panic!("{ninth:?}") };
        assert_eq!((entity.as_str(), max), ("level-9", LEVELS_MAX));
    });
}

#[test]
fn without_cascade_nothing_is_taken_above() {
    on_every_store(async |world| {
        let limiter = world.limiter_with([without_refill("tpm", 10)]).await;
        limiter.create_entity("org").await.unwrap();
        let plain = limiter.create_entity("plain").parent("org").await.unwrap();
        assert!(!plain.cascade);
        spend(&limiter, "plain", "gpt-4", "tpm", 10).await;
        assert_eq!(left(&limiter, "org", "gpt-4", "tpm").await, 10);

        // The chain ends at the first that does not cascade.
        child(&limiter, "key", "plain").await;
        let refused = refusal(&limiter, "key", "gpt-4", "tpm", 1).await;
        assert_eq!(refused.primary_violation().entity_id.as_str(), "plain");
        assert_eq!(refused.statuses().len(), 2);
    });
}

#[test]
fn a_refusal_anywhere_leaves_every_level_untouched() {
    on_every_store(async |world| {
        for (at, ceilings) in [[5, 10, 10], [10, 5, 10], [10, 10, 5]].into_iter().enumerate() {
            let name = format!("case-{at}");
            let registry = world.limiter().await.namespaces();
            registry.register(&name).await.unwrap();
            let limiter = world.builder().namespace(&name).open().await.unwrap();
            family(&limiter, ceilings[0], ceilings[1], ceilings[2]).await;
            spend(&limiter, "key", "gpt-4", "tpm", 3).await;
            let before = all_left(&limiter).await;
            for _ in 0..3 {
                let refused = refusal(&limiter, "key", "gpt-4", "tpm", 3).await;
                assert_eq!(refused.primary_violation().level, at);
                assert_eq!(refused.violations().count(), 1);
            }
            assert_eq!(all_left(&limiter).await, before);
            spend(&limiter, "key", "gpt-4", "tpm", 2).await;
        }
    });
}

#[test]
fn limits_that_an_ancestor_does_not_track_are_not_checked_there() {
    on_every_store(async |world| {
        let limiter = world.limiter().await;
        limiter.create_entity("org").await.unwrap();
        child(&limiter, "team", "org").await;
        child(&limiter, "key", "team").await;
        own_limits(&limiter, "key", [without_refill("rpm", 10), without_refill("tpm", 10)]).await;
        own_limits(&limiter, "team", [without_refill("other", 1)]).await;
        own_limits(&limiter, "org", [without_refill("tpm", 5)]).await;
        let call = limiter.acquire("key", "gpt-4").take("rpm", 7).take("tpm", 4);
        let lease = call.await.unwrap();
        let taken: Vec<(usize, String)> = lease
            .statuses()
            .iter()
            .map(|status| (status.level, status.limit_name.to_string()))
            .collect();
        let row = |level, name: &str| (level, name.to_owned());
        assert_eq!(taken, [row(0, "rpm"), row(0, "tpm"), row(2, "tpm")]);
        lease.commit().await.unwrap();
        assert_eq!(left(&limiter, "org", "gpt-4", "tpm").await, 1);
        assert!(world.bucket(&limiter, "team", "gpt-4").await.is_none());
        // A limit that only an ancestor has cannot be taken.
        let other = limiter.acquire("key", "gpt-4").take("other", 1).await;
        assert!(matches!(other, Err(Error::UnknownLimits { .. })), "{other:?}");
    });
}

#[test]
fn an_ancestor_without_limits_at_any_level_is_passed() {
    on_every_store(async |world| {
        let limiter = world.limiter().await;
        limiter.create_entity("org").await.unwrap();
        child(&limiter, "team", "org").await;
        child(&limiter, "key", "team").await;
        own_limits(&limiter, "key", [without_refill("tpm", 10)]).await;
        spend(&limiter, "key", "gpt-4", "tpm", 1).await;
        own_limits(&limiter, "org", [without_refill("tpm", 5)]).await;
        spend(&limiter, "key", "gpt-4", "tpm", 5).await;
        refusal(&limiter, "key", "gpt-4", "tpm", 1).await;
        assert!(world.bucket(&limiter, "team", "gpt-4").await.is_none());
    });
}

#[test]
fn ancestors_are_limited_by_defaults_too() {
    on_every_store(async |world| {
        let limiter = world.limiter_with([without_refill("tpm", 10)]).await;
        limiter.create_entity("org").await.unwrap();
        for key in ["a", "b", "c"] {
            child(&limiter, key, "org").await;
        }
        spend(&limiter, "a", "gpt-4", "tpm", 6).await;
        spend(&limiter, "b", "gpt-4", "tpm", 4).await;
        let refused = refusal(&limiter, "c", "gpt-4", "tpm", 1).await;
        assert_eq!(refused.primary_violation().entity_id.as_str(), "org");
        spend(&limiter, "c", "gpt-5", "tpm", 1).await;
    });
}

#[test]
fn differences_and_rollbacks_reach_every_level() {
    on_every_store(async |world| {
        let limiter = world.limiter().await;
        family(&limiter, 100, 200, 300).await;
        let take =
            async |tokens| limiter.acquire("key", "gpt-4").take("tpm", tokens).await.unwrap();
        let mut lease = take(10).await;
        assert_eq!(all_left(&limiter).await, [90, 190, 290]);
        lease.adjust("tpm", 150).unwrap();
        lease.commit().await.unwrap();
        assert_eq!(all_left(&limiter).await, [-60, 40, 140]);
        let mut nothing = take(0).await;
        nothing.adjust("tpm", 40).unwrap();
        nothing.flush().await.unwrap();
        assert_eq!(all_left(&limiter).await, [-100, 0, 100]);
        nothing.adjust("tpm", -15).unwrap();
        nothing.flush().await.unwrap();
        assert_eq!(all_left(&limiter).await, [-85, 15, 115]);
        nothing.rollback().await.unwrap();
        assert_eq!(all_left(&limiter).await, [-60, 40, 140]);
        let mut dropped = take(0).await;
        dropped.adjust("tpm", 7).unwrap();
        dropped.flush().await.unwrap();
        dropped.adjust("tpm", 9).unwrap();
        drop(dropped);
        assert_eq!(all_left(&limiter).await, [-67, 33, 133], "what was flushed is used");
        let mut settled = take(0).await;
        settled.settle("tpm", 3).unwrap();
        drop(settled);
        soon("charged", async || all_left(&limiter).await == [-70, 30, 130]).await;
    });
}

#[test]
fn a_chain_that_is_cached_costs_one_call() {
    on_every_store(async |world| {
        let limiter = world.limiter().await;
        family(&limiter, 100, 100, 100).await;
        spend(&limiter, "key", "gpt-4", "tpm", 1).await;
        let before = world.store.all_calls();
        spend(&limiter, "key", "gpt-4", "tpm", 1).await;
        assert_eq!(world.store.all_calls(), before + 1);
        assert_eq!(world.store.calls(Call::Settle), 0);
    });
}

#[test]
fn a_parent_must_exist_and_be_no_descendant() {
    on_every_store(async |world| {
        let limiter = world.limiter().await;
        let missing = limiter.create_entity("key").parent("org").await;
        assert!(
            matches!(&missing, Err(Error::MissingParent { parent }) if parent.as_str() == "org"),
            "{missing:?}"
        );
        let own = limiter.create_entity("key").parent("key").await;
        assert!(matches!(own, Err(Error::Cycle { .. })), "{own:?}");
        assert!(limiter.entity("key").await.unwrap().is_none(), "nothing was created");

        limiter.create_entity("org").await.unwrap();
        child(&limiter, "team", "org").await;
        child(&limiter, "key", "team").await;
        limiter.delete_entity("org").await.unwrap();
        for parent in ["team", "key"] {
            let cycle = limiter.create_entity("org").parent(parent).cascade().await;
            let Err(Error::Cycle { entity }) = cycle else { panic!("{cycle:?}") };
            assert_eq!(entity.as_str(), "org");
        }
        limiter.create_entity("org").await.unwrap();
        let twice = limiter.create_entity("org").await;
        assert!(matches!(twice, Err(Error::AlreadyExists { .. })), "{twice:?}");
    });
}

#[test]
fn chains_that_grew_too_deep_or_into_a_circle_are_refused_by_the_acquire() {
    on_every_store(async |world| {
        let limiter = world.limiter_with([without_refill("tpm", 10)]).await;
        let name = |level: usize| format!("level-{level}");
        // A chain of eight, and another one that its top is then put under.
        limiter.create_entity(&name(1)).await.unwrap();
        for level in 2..=LEVELS_MAX {
            child(&limiter, &name(level), &name(level - 1)).await;
        }
        limiter.create_entity("above").await.unwrap();
        limiter.delete_entity(&name(1)).await.unwrap();
        child(&limiter, &name(1), "above").await;
        for _ in 0..2 {
            let deep = limiter.acquire("level-8", "gpt-4").take("tpm", 1).await;
            assert!(matches!(deep, Err(Error::TooDeep { .. })), "{deep:?}");
            spend(&limiter, "level-7", "gpt-4", "tpm", 1).await;
        }
        // Two clients at once can close a circle that each of them alone is refused.
        let batch = |id: &str, parent: &str| {
            let mut entity = zae_limiter::Entity {
                namespace: limiter.namespace_id().clone(),
                id: crate::world::entity_id(id),
                name: None,
                parent: None,
                cascade: true,
                metadata: Default::default(),
                created_at: crate::world::NOW,
            };
            entity.parent = Some(crate::world::entity_id(parent));
            zae_limiter::store::Write::Put(
                zae_limiter::store::Record::Entity(entity),
                zae_limiter::store::Precondition::Always,
            )
        };
        let circle = [batch("hen", "egg"), batch("egg", "hen")];
        limiter.store().write(&circle).await.unwrap();
        for _ in 0..2 {
            let cycle = limiter.acquire("hen", "gpt-4").take("tpm", 1).await;
            assert!(matches!(cycle, Err(Error::Cycle { .. })), "{cycle:?}");
        }
    });
}

#[test]
fn an_entity_follows_at_once_when_its_parent_changes() {
    on_every_store(async |world| {
        let limiter = world.limiter_with([without_refill("tpm", 100)]).await;
        spend(&limiter, "key", "gpt-4", "tpm", 1).await;
        limiter.create_entity("org").await.unwrap();
        // It was limited, and remembered as one without a parent, before it was created.
        child(&limiter, "key", "org").await;
        spend(&limiter, "key", "gpt-4", "tpm", 1).await;
        assert_eq!(left(&limiter, "org", "gpt-4", "tpm").await, 99);
        limiter.delete_entity("key").await.unwrap();
        spend(&limiter, "key", "gpt-4", "tpm", 1).await;
        assert_eq!(left(&limiter, "org", "gpt-4", "tpm").await, 99);
    });
}
