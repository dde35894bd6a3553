//! Looking without taking.

use std::time::Duration;

use zae_limiter::model::EntityCapacity;
use zae_limiter::{Error, Limit, LimitStatus};

use crate::world::{
    child, left, ms, on_every_store, own_limits, per_minute, secs, spend, without_refill,
};

#[test]
fn looking_takes_nothing() {
    on_every_store(async |world| {
        let limiter = world.limiter_with([per_minute("rpm", 60)]).await;
        limiter.available("key", "gpt-4", &[("rpm", 5)]).await.unwrap();
        limiter.time_until_available("key", "gpt-4", &[("rpm", 60)]).await.unwrap();
        assert!(world.bucket(&limiter, "key", "gpt-4").await.is_none(), "not even a bucket");
        spend(&limiter, "key", "gpt-4", "rpm", 10).await;
        world.advance(ms(500));
        let before = world.cell(&limiter, "key", "gpt-4", "rpm").await;
        for _ in 0..3 {
            limiter.available("key", "gpt-4", &[("rpm", 60)]).await.unwrap();
        }
        assert_eq!(world.cell(&limiter, "key", "gpt-4", "rpm").await, before);
    });
}

#[test]
fn every_limit_of_the_chain_is_shown() {
    on_every_store(async |world| {
        let limiter = world.limiter().await;
        limiter.create_entity("org").await.unwrap();
        child(&limiter, "team", "org").await;
        child(&limiter, "key", "team").await;
        own_limits(&limiter, "key", [per_minute("rpm", 60), per_minute("tpm", 600)]).await;
        own_limits(&limiter, "org", [per_minute("rpm", 6), per_minute("other", 1)]).await;
        spend(&limiter, "key", "gpt-4", "rpm", 6).await;
        let shown = limiter.available("key", "gpt-4", &[("rpm", 1)]).await.unwrap();
        let row = |s: &LimitStatus| {
            (s.level, s.limit_name.to_string(), s.available.whole_tokens(), s.retry_after)
        };
        let expected = [
            (0, "rpm", 54, Duration::ZERO),
            (0, "tpm", 600, Duration::ZERO),
            (2, "other", 1, Duration::ZERO),
            (2, "rpm", 0, secs(10)),
        ];
        let expected = expected.map(|(l, name, left, wait)| (l, name.to_owned(), left, wait));
        assert_eq!(shown.iter().map(row).collect::<Vec<_>>(), expected);
        let wait = limiter.time_until_available("key", "gpt-4", &[("rpm", 1), ("tpm", 9)]).await;
        assert_eq!(wait.unwrap(), secs(10));
    });
}

#[test]
fn looking_and_taking_agree_exactly() {
    on_every_store(async |world| {
        let limiter = world.limiter().await;
        limiter.create_entity("org").await.unwrap();
        child(&limiter, "key", "org").await;
        let limits = [Limit::per("a", 7, secs(3)), Limit::per("b", 5, secs(11)).burst(9)];
        own_limits(&limiter, "key", limits).await;
        own_limits(&limiter, "org", [Limit::per("a", 4, secs(2)).burst(6)]).await;
        let mut random = fastrand::Rng::with_seed(7);
        let (mut admitted, mut refused, mut impossible) = (0, 0, 0);
        for step in 0..300 {
            world.advance(ms(random.u64(0..2_000)));
            let (a, b) = (random.u64(0..8), random.u64(0..11));
            // Sometimes a limit is named twice: then it is the sum that counts.
            let mut amounts = vec![("a", a), ("b", b)];
            if random.bool() {
                amounts.push(("a", random.u64(0..3)));
            }
            let wait = limiter.time_until_available("key", "gpt-4", &amounts).await;
            let shown = limiter.available("key", "gpt-4", &amounts).await;
            let mut call = limiter.acquire("key", "gpt-4");
            for (limit, tokens) in &amounts {
                call = call.take(limit, *tokens);
            }
            match call.await {
                Ok(mut lease) => {
                    admitted += 1;
                    assert_eq!(wait.unwrap(), Duration::ZERO, "step {step}");
                    if random.bool() {
                        lease.adjust("b", random.i64(0..5)).unwrap();
                        lease.commit().await.unwrap();
                    } else {
                        lease.rollback().await.unwrap();
                    }
                }
                Err(Error::Exceeded(refusal)) => {
                    refused += 1;
                    assert_eq!(wait.unwrap(), refusal.retry_after(), "step {step}");
                    assert_eq!(shown.unwrap(), refusal.statuses(), "step {step}");
                }
                Err(Error::ExceedsCapacity(refusal)) => {
                    impossible += 1;
                    let Err(Error::ExceedsCapacity(error)) = wait else { panic!("{wait:?}") };
                    assert_eq!(error, refusal, "step {step}");
                }
                Err(other) => panic!("{other:?}"),
            }
        }
        assert!(
            admitted > 50 && refused > 50 && impossible > 20,
            "{admitted} {refused} {impossible}"
        );
    });
}

#[test]
fn what_cannot_be_taken_cannot_be_looked_at() {
    on_every_store(async |world| {
        let limiter = world.limiter_with([per_minute("rpm", 10)]).await;
        let unknown = limiter.available("key", "gpt-4", &[("x", 1), ("rpm", 1), ("y", 1)]).await;
        let Err(Error::UnknownLimits { unknown: names, .. }) = unknown else {
            panic!("{unknown:?}")
        };
        assert_eq!(names, ["x", "y"]);
        for amounts in [&[("rpm", u64::MAX)][..], &[("rpm", 1), ("rpm", u64::MAX)]] {
            let above = limiter.available("key", "gpt-4", amounts).await;
            assert!(matches!(above, Err(Error::Invalid(_))), "{above:?}");
        }
        let invalid = limiter.available("a b", "gpt-4", &[]).await;
        assert!(matches!(invalid, Err(Error::Invalid(_))), "{invalid:?}");
        let all = limiter.available("key", "gpt-4", &[]).await.unwrap();
        assert_eq!(all.len(), 1, "all limits are shown, asked for or not");
    });
}

#[test]
fn a_debt_is_shown_and_waited_for() {
    on_every_store(async |world| {
        let limiter = world.limiter_with([per_minute("tpm", 60)]).await;
        let mut lease = limiter.acquire("key", "gpt-4").take("tpm", 0).await.unwrap();
        lease.adjust("tpm", 90).unwrap();
        lease.commit().await.unwrap();
        assert_eq!(left(&limiter, "key", "gpt-4", "tpm").await, -30);
        let wait = async |tokens| {
            limiter.time_until_available("key", "gpt-4", &[("tpm", tokens)]).await.unwrap()
        };
        assert_eq!(wait(0).await, Duration::ZERO);
        assert_eq!(wait(1).await, secs(31));
        assert_eq!(wait(60).await, secs(90));
    });
}

#[test]
fn capacities_are_listed_by_entity_and_added_up() {
    on_every_store(async |world| {
        let limiter = world.limiter_with([per_minute("rpm", 60)]).await;
        let none = limiter.resource_capacity("gpt-4", "rpm").await.unwrap();
        assert_eq!((none.entities, none.capacity, none.available), (0, 0, 0));
        assert!(none.utilization().abs() < f64::EPSILON);
        own_limits(&limiter, "b", [per_minute("rpm", 100), without_refill("tpm", 9)]).await;
        for (entity, tokens) in [("c", 30), ("a", 60), ("b", 10)] {
            spend(&limiter, entity, "gpt-4", "rpm", tokens).await;
        }
        spend(&limiter, "a", "gpt-5", "rpm", 60).await;
        world.advance(secs(6));
        let pages = limiter.entity_capacities("gpt-4", "rpm").unwrap().page_size(2);
        let listed: Vec<(String, i64, i64)> = pages
            .all()
            .await
            .unwrap()
            .into_iter()
            .map(|c| (c.entity.to_string(), c.capacity.whole_tokens(), c.available.whole_tokens()))
            .collect();
        let row = |entity: &str, capacity, available| (entity.to_owned(), capacity, available);
        assert_eq!(listed, [row("a", 60, 6), row("b", 100, 100), row("c", 60, 36)]);
        let total = limiter.resource_capacity("gpt-4", "rpm").await.unwrap();
        assert_eq!((total.entities, total.capacity, total.available), (3, 220, 142));
        assert!((total.utilization() - 78.0 / 220.0).abs() < 1e-9);
        let tpm = limiter.resource_capacity("gpt-4", "tpm").await.unwrap();
        assert_eq!((tpm.entities, tpm.capacity), (1, 9));

        // Buckets on defaults expire, the other one stays.
        world.advance(secs(420));
        let total = limiter.resource_capacity("gpt-4", "rpm").await.unwrap();
        assert_eq!((total.entities, total.capacity, total.available), (1, 100, 100));
    });
}

#[test]
fn capacities_are_those_of_the_limits_that_hold_now() {
    on_every_store(async |world| {
        let limiter = world.limiter().await;
        limiter
            .set_resource_defaults("gpt-4", [per_minute("rpm", 60), per_minute("tpm", 9)])
            .await
            .unwrap();
        for entity in ["a", "b"] {
            spend(&limiter, entity, "gpt-4", "rpm", 10).await;
        }
        limiter.set_resource_defaults("gpt-4", [per_minute("rpm", 20)]).await.unwrap();
        own_limits(&limiter, "b", [per_minute("tpm", 5)]).await;
        let listed = limiter.entity_capacities("gpt-4", "rpm").unwrap().all().await.unwrap();
        assert_eq!(listed.len(), 1, "{listed:?}");
        assert_eq!((listed[0].entity.as_str(), listed[0].capacity.whole_tokens()), ("a", 20));
        let tpm = limiter.resource_capacity("gpt-4", "tpm").await.unwrap();
        assert_eq!((tpm.entities, tpm.capacity), (1, 5));
    });
}

#[test]
fn the_tokens_of_an_ancestor_are_added_up_once() {
    on_every_store(async |world| {
        let limiter = world.limiter().await;
        limiter.set_resource_defaults("gpt-4", [without_refill("tpm", 100)]).await.unwrap();
        limiter.create_entity("org").await.unwrap();
        limiter.create_entity("team").parent("org").cascade().await.unwrap();
        for key in ["key-1", "key-2"] {
            limiter.create_entity(key).parent("team").cascade().await.unwrap();
        }
        limiter.create_entity("plain").parent("org").await.unwrap();
        own_limits(&limiter, "org", [without_refill("tpm", 150)]).await;
        // It passes the calls of its keys on to the organisation.
        own_limits(&limiter, "team", [without_refill("rpm", 10)]).await;
        for (entity, tokens) in [("key-1", 10), ("key-2", 20), ("plain", 50)] {
            spend(&limiter, entity, "gpt-4", "tpm", tokens).await;
        }
        let listed = limiter.entity_capacities("gpt-4", "tpm").unwrap().all().await.unwrap();
        let ids = listed.iter().map(|one| &one.entity).collect();
        let within: Vec<(&str, Option<&str>)> = listed
            .iter()
            .map(|one| (one.entity.as_str(), one.within(&ids).map(|ancestor| ancestor.as_str())))
            .collect();
        let wanted =
            [("key-1", Some("org")), ("key-2", Some("org")), ("org", None), ("plain", None)];
        assert_eq!(within, wanted);
        let total = limiter.resource_capacity("gpt-4", "tpm").await.unwrap();
        assert_eq!((total.entities, total.capacity, total.available), (4, 250, 170));
    });
}

/// A deleted entity has no balance, but its children still name it as their parent.
#[test]
fn tokens_below_an_ancestor_without_a_balance_are_added_up() {
    on_every_store(async |world| {
        let limiter = world.limiter().await;
        limiter.set_resource_defaults("gpt-4", [without_refill("tpm", 100)]).await.unwrap();
        limiter.create_entity("org").await.unwrap();
        limiter.create_entity("team").parent("org").cascade().await.unwrap();
        limiter.create_entity("key").parent("team").cascade().await.unwrap();
        spend(&limiter, "key", "gpt-4", "tpm", 10).await;
        let ancestors = async || {
            let listed = limiter.entity_capacities("gpt-4", "tpm").unwrap().all().await.unwrap();
            let names = |one: &EntityCapacity| {
                let above = one.ancestors.iter().map(|it| it.as_str()).collect::<Vec<_>>();
                format!("{}: {}", one.entity, above.join(" "))
            };
            listed.iter().map(names).collect::<Vec<_>>()
        };
        assert_eq!(ancestors().await, ["key: team org", "org: ", "team: org"]);
        let total = limiter.resource_capacity("gpt-4", "tpm").await.unwrap();
        assert_eq!((total.entities, total.capacity, total.available), (3, 100, 90));

        // Above a deleted entity nothing is taken, so the organisation counts apart from the key.
        limiter.delete_entity("team").await.unwrap();
        assert_eq!(ancestors().await, ["key: team", "org: "]);
        let total = limiter.resource_capacity("gpt-4", "tpm").await.unwrap();
        assert_eq!((total.entities, total.capacity, total.available), (2, 200, 180));
    });
}
