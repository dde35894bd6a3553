//! Attacks on the sweep (docs/namespaces.md): it removes nothing that is live, whatever others do between its calls. The
//! ignored tests show what does not hold.

use std::future::Future;

use zae_limiter::model::{Usage, UsageKey};
use zae_limiter::store::{Precondition, Record, Store as _, Write, Written};
use zae_limiter::{RateLimiter, Window};
use zae_limiter_testkit::{Call, Fault, Gate};

use crate::world::{
    Kind, NOW, World, entity_id, finish, on, on_every_store_but, resource, secs, spend,
    without_refill,
};

/// Runs `first` up to its next call of this kind, then `meanwhile`, and then the rest of `first`.
async fn amid<T>(
    world: &World,
    call: Call,
    first: impl Future<Output = T>,
    meanwhile: impl Future<Output = ()>,
) -> T {
    let gate = Gate::new();
    world.store.script(call, Fault::HoldBefore(gate.clone()));
    let mut first = Box::pin(first);
    let mut reached = Box::pin(gate.reached());
    finish(std::future::poll_fn(|context| {
        assert!(first.as_mut().poll(context).is_pending(), "it ended before the gate");
        reached.as_mut().poll(context)
    }))
    .await;
    meanwhile.await;
    gate.open();
    first.await
}

/// Net usage of an entity in an hour, in whole tokens.
async fn used(limiter: &RateLimiter, key: &str) -> i64 {
    let query = limiter.usage().entity(key).window(Window::Hourly);
    let records = query.pages().unwrap().all().await.unwrap();
    records.iter().flat_map(|it| it.consumed.values()).map(|it| it.whole_tokens()).sum()
}

/// An entity is used again while the sweep has listed what an old release left of it: the new usage stays.
#[test]
#[ignore = "known, and documented in namespaces.md: items are removed without a condition, right after a second look"]
fn usage_booked_between_the_list_and_the_removal_stays() {
    on_every_store_but(&[Kind::DynamoDb], async |world| {
        let limiter = world.limiter_with([without_refill("tpm", 10)]).await;
        limiter.create_entity("key").await.unwrap();
        limiter.delete_entity("key").await.unwrap();
        let key = UsageKey {
            namespace: limiter.namespace_id().clone(),
            entity: entity_id("key"),
            resource: resource("gpt-4"),
            window: Window::Hourly,
            start: NOW,
        };
        let left = Usage { key, consumed: Default::default(), events: 1, expires_at: None };
        let batch = [Write::Put(Record::Usage(left), Precondition::Always)];
        assert_eq!(world.store.write(&batch).await.unwrap(), Written::Done);
        world.advance(secs(1_800));
        let found = limiter.namespaces().find_orphans(|_| {}).await.unwrap();
        assert_eq!(found.deleted_usage, 1);
        let namespaces = limiter.namespaces();
        let removed = namespaces.remove_orphans(&found, |_| {});
        amid(&world, Call::Delete, removed, async {
            spend(&limiter, "key", "gpt-4", "tpm", 3).await;
            assert_eq!(used(&limiter, "key").await, 3);
        })
        .await
        .unwrap();
        assert_eq!(used(&limiter, "key").await, 3, "the sweep has removed live usage");
    });
}

/// An entity is deleted again while the sweep has listed the tombstone of its first deletion: the new tombstone stays, or
/// a lagging aggregator would bring the usage back.
#[test]
#[ignore = "known, and documented in namespaces.md: items are removed without a condition, right after a second look"]
fn a_tombstone_renewed_between_the_list_and_the_removal_stays() {
    on(Kind::DynamoDb, async |world| {
        let limiter = world.limiter_with([without_refill("tpm", 10)]).await;
        spend(&limiter, "key", "gpt-4", "tpm", 1).await;
        limiter.delete_entity("key").await.unwrap();
        world.advance(secs(4 * 86_400));
        let found = limiter.namespaces().find_orphans(|_| {}).await.unwrap();
        assert_eq!(found.tombstones(), 1);
        spend(&limiter, "key", "gpt-4", "tpm", 1).await;
        let namespaces = limiter.namespaces();
        let removed = namespaces.remove_orphans(&found, |_| {});
        amid(&world, Call::Delete, removed, async {
            limiter.delete_entity("key").await.unwrap();
        })
        .await
        .unwrap();
        world.advance(secs(4 * 86_400));
        let found = limiter.namespaces().find_orphans(|_| {}).await.unwrap();
        assert_eq!(found.tombstones(), 1, "the sweep has removed the tombstone of a new deletion");
    });
}

/// A purge that begins while an entity is deleted, and a deletion while a purge runs: nothing is left of either.
#[test]
fn a_purge_amid_the_deletion_of_an_entity_leaves_nothing() {
    on_every_store_but(&[], async |world| {
        let default = world.limiter().await;
        for call in [Call::NoteDeletion, Call::ListKeys, Call::Delete, Call::Write] {
            let registered = default.namespaces().register("team").await.unwrap();
            let team = world.builder().namespace("team").open().await.unwrap();
            team.set_system_defaults([without_refill("tpm", 10)], None).await.unwrap();
            team.create_entity("key").await.unwrap();
            spend(&team, "key", "gpt-4", "tpm", 1).await;
            let deleted = amid(&world, call, team.delete_entity("key"), async {
                default.namespaces().delete("team").await.unwrap();
                default.namespaces().purge(&registered.id, |_| {}).await.unwrap();
            })
            .await;
            // What a call wrote after the purge is for the sweep.
            let found = default.namespaces().find_orphans(|_| {}).await.unwrap();
            default.namespaces().remove_orphans(&found, |_| {}).await.unwrap();
            let found = default.namespaces().find_orphans(|_| {}).await.unwrap();
            assert!(found.is_empty(), "{call:?}, {deleted:?}: {found:?}");
            assert!(default.namespaces().get("team").await.unwrap().is_none());
        }
    });
}

/// A sweep amid each step of registering, recovering and purging removes nothing live, and leaves the name usable.
#[test]
fn a_sweep_amid_changes_of_namespaces_changes_nothing() {
    on_every_store_but(&[], async |world| {
        let default = world.limiter().await;
        let sweep = async || {
            let found = default.namespaces().find_orphans(|_| {}).await.unwrap();
            default.namespaces().remove_orphans(&found, |_| {}).await.unwrap()
        };
        for call in [Call::Get, Call::Write] {
            let namespaces = default.namespaces();
            let name = format!("team-{call:?}").to_lowercase();
            let of = amid(&world, call, namespaces.register(&name), async {
                assert_eq!(sweep().await, 0);
            })
            .await
            .unwrap();
            let team = world.builder().namespace(name.as_str()).open().await.unwrap();
            team.set_system_defaults([without_refill("tpm", 10)], None).await.unwrap();
            spend(&team, "key", "gpt-4", "tpm", 1).await;
            world.advance(secs(3_600));
            amid(&world, call, namespaces.delete(&name), async {
                assert_eq!(sweep().await, 0);
            })
            .await
            .unwrap();
            world.advance(secs(3_600));
            amid(&world, call, namespaces.recover(&of.id), async {
                assert_eq!(sweep().await, 0);
            })
            .await
            .unwrap();
            let left = crate::world::left(&team, "key", "gpt-4", "tpm").await;
            assert_eq!(left, 9, "{call:?}");
            namespaces.delete(&name).await.unwrap();
            amid(&world, call, namespaces.purge(&of.id, |_| {}), async {
                assert_eq!(sweep().await, 0);
            })
            .await
            .unwrap();
            assert_eq!(sweep().await, 0);
        }
    });
}

/// A limiter of a namespace that was deleted and purged while this was done.
async fn purged_meanwhile<T>(
    world: &World,
    name: &str,
    done: impl AsyncFnOnce(&RateLimiter) -> T,
) -> (RateLimiter, T) {
    let registry = world.limiter().await.namespaces();
    let id = registry.register(name).await.unwrap().id;
    let team = world.builder().namespace(name).default_limits([without_refill("tpm", 100)]);
    let team = team.open().await.unwrap();
    let done = done(&team).await;
    registry.delete(name).await.unwrap();
    registry.purge(&id, |_| {}).await.unwrap();
    // The TTL of the cache.
    world.advance(secs(61));
    (team, done)
}

async fn check_nothing_written(world: &World, team: &RateLimiter, what: &str) {
    let scope = zae_limiter::store::Scope::Namespace(team.namespace_id().clone());
    let page = zae_limiter::store::PageRequest::first(10);
    let items = world.store.list_keys(&scope, &page).await.unwrap().items;
    assert!(items.is_empty(), "{what} wrote into a purged namespace: {items:?}");
}

/// A stream that takes more, and a call that waits, notice a purge within the TTL, too.
#[test]
fn streams_and_waiting_calls_notice_a_purge_within_the_ttl() {
    on_every_store_but(&[], async |world| {
        let (team, mut lease) = purged_meanwhile(&world, "consumes", async |team| {
            team.acquire("key", "gpt-4").take("tpm", 10).await.unwrap()
        })
        .await;
        let more = lease.consume("tpm", 5).await;
        assert!(matches!(more, Err(zae_limiter::Error::NamespacePurged { .. })), "{more:?}");
        check_nothing_written(&world, &team, "consume").await;

        let (team, waiting) = purged_meanwhile(&world, "waits", async |team| {
            spend(team, "key", "gpt-4", "tpm", 100).await;
            let team = team.clone();
            let mut call = Box::pin(async move {
                let call = team.acquire("key", "gpt-4").take("tpm", 1);
                call.wait_up_to(secs(1_000_000_000)).await.map(drop)
            });
            for _ in 0..100 {
                assert!(crate::world::poll_once(call.as_mut()).is_pending());
                crate::world::turn().await;
            }
            Some(call)
        })
        .await;
        world.advance(secs(1_000_000_000));
        let waited = finish(waiting.unwrap()).await;
        assert!(waited.is_err(), "a call that waited was admitted in a purged namespace");
        check_nothing_written(&world, &team, "a waiting call").await;
    });
}

/// A stream that writes what it used learns of a purge, too, and writes nothing into it.
#[test]
fn settlements_notice_a_purge_within_the_ttl() {
    on_every_store_but(&[], async |world| {
        let (team, mut lease) = purged_meanwhile(&world, "flushes", async |team| {
            team.acquire("key", "gpt-4").take("tpm", 10).await.unwrap()
        })
        .await;
        lease.adjust("tpm", 20).unwrap();
        let flushed = lease.flush().await;
        assert!(matches!(flushed, Err(zae_limiter::Error::NamespacePurged { .. })), "{flushed:?}");
        check_nothing_written(&world, &team, "flush").await;
    });
}

/// Somebody reads usage while an entity is deleted: nothing of it is left, and the next one of that name begins at zero.
#[test]
fn a_look_at_usage_amid_a_deletion_leaves_none() {
    on_every_store_but(&[Kind::DynamoDb], async |world| {
        for is_created in [true, false] {
            for call in [Call::NoteDeletion, Call::ListKeys, Call::Delete, Call::Write] {
                let limiter = world.limiter_with([without_refill("tpm", 10)]).await;
                let key = format!("key-{is_created}-{call:?}");
                if is_created {
                    limiter.create_entity(&key).await.unwrap();
                }
                spend(&limiter, &key, "gpt-4", "tpm", 4).await;
                amid(&world, call, limiter.delete_entity(&key), async {
                    used(&limiter, &key).await;
                })
                .await
                .unwrap();
                let left = used(&limiter, &key).await;
                assert_eq!(left, 0, "usage of a deleted entity is left, at {call:?}");
                let again = limiter.delete_entity(&key).await;
                assert!(
                    matches!(again, Err(zae_limiter::Error::NotFound(_))),
                    "{call:?}: {again:?}"
                );
            }
        }
    });
}

/// A lease ends after its entity was deleted, in every way that gives tokens back: nothing of the entity comes back.
#[test]
fn a_lease_that_ends_after_the_deletion_brings_nothing_back() {
    on_every_store_but(&[Kind::DynamoDb], async |world| {
        for end in ["rollback", "drop", "release", "settle", "expired"] {
            let limiter = world.limiter_with([without_refill("tpm", 10)]).await;
            limiter.create_entity(end).await.unwrap();
            limiter.create_entity(&format!("{end}-child")).parent(end).cascade().await.unwrap();
            let child = format!("{end}-child");
            let mut lease = limiter.acquire(&child, "gpt-4").take("tpm", 8).await.unwrap();
            for key in [end, &child] {
                limiter.delete_entity(key).await.unwrap();
            }
            if end == "expired" {
                world.advance(secs(40 * 86_400));
            }
            match end {
                "release" => {
                    lease.release("tpm", 5).unwrap();
                    lease.commit().await.unwrap();
                }
                "settle" => {
                    lease.settle("tpm", 0).unwrap();
                    lease.flush().await.unwrap();
                    drop(lease);
                }
                "drop" => drop(lease),
                _ => lease.rollback().await.unwrap(),
            }
            crate::world::settle_down().await;
            for key in [end, &child] {
                assert_eq!(used(&limiter, key).await, 0, "{key}, {end}");
                let again = limiter.delete_entity(key).await;
                assert!(matches!(again, Err(zae_limiter::Error::NotFound(_))), "{key}: {again:?}");
            }
        }
    });
}

/// Traffic, deletions, looks and sweeps in random order, one call at a time, over days: a sweep removes nothing of what a
/// model expects.
#[test]
fn sweeps_beside_traffic_remove_nothing_that_a_model_expects() {
    on_every_store_but(&[Kind::DynamoDb], async |world| {
        for seed in 0..15 {
            let mut random = fastrand::Rng::with_seed(seed);
            let limiter = world.limiter_with([without_refill("tpm", 1_000_000)]).await;
            let keys: Vec<String> = (0..4).map(|n| format!("s{seed}-{n}")).collect();
            // What each has used since it was last deleted, and whether it was created.
            let mut model = [(0_i64, false); 4];
            for _ in 0..150 {
                let at = random.usize(..4);
                let (key, of) = (&keys[at], &mut model[at]);
                match random.u8(..8) {
                    0 | 1 => {
                        spend(&limiter, key, "gpt-4", "tpm", 3).await;
                        of.0 += 3;
                    }
                    2 => {
                        if limiter.create_entity(key).await.is_ok() {
                            of.1 = true;
                        }
                    }
                    3 => {
                        let _ = limiter.delete_entity(key).await;
                        *of = (0, false);
                    }
                    4 => world.advance(secs(random.u64(1..40_000))),
                    5 => {
                        let lease = limiter.acquire(key, "gpt-4").take("tpm", 5).await.unwrap();
                        lease.rollback().await.unwrap();
                    }
                    _ => {
                        let found = limiter.namespaces().find_orphans(|_| {}).await.unwrap();
                        limiter.namespaces().remove_orphans(&found, |_| {}).await.unwrap();
                    }
                }
                for (key, (tokens, is_created)) in keys.iter().zip(&model) {
                    assert_eq!(used(&limiter, key).await, *tokens, "seed {seed}, {key}");
                    let found = limiter.entity(key).await.unwrap();
                    assert_eq!(found.is_some(), *is_created, "seed {seed}, {key}");
                }
            }
        }
    });
}
