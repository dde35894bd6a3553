//! Prepared calls: they do what the generic call does, on every store.

use std::fmt::Debug;
use std::pin::pin;

use zae_limiter::store::StoreErrorKind;
use zae_limiter::testing::Clock as _;
use zae_limiter::{Error, Lease, OnDrop, OnUnavailable, Prepared, RateLimiter, Timestamp};
use zae_limiter_testkit::{Call, Fault};

use crate::world::{
    Kind, NOW, World, child, finish, left, ms, on, on_every_store, on_every_store_with_threads,
    own_limits, per_minute, poll_once, secs, settle_down, soon, spend, without_refill,
};

const NAMES: [&str; 2] = ["rpm", "tpm"];

fn prepare(limiter: &RateLimiter) -> Prepared<2> {
    limiter.prepare("gpt-4", NAMES).unwrap()
}

/// Tries without waiting first, as callers without a future do.
async fn take(prepared: &Prepared<2>, entity: &str, amounts: [u64; 2]) -> Result<Lease, Error> {
    let lease = match prepared.try_acquire(entity, amounts) {
        Err(Error::WouldWait) => prepared.acquire(entity, amounts).await?,
        decided => decided?,
    };
    Ok(lease.into_lease())
}

/// Text in which two results of the same call are equal.
fn text_of<T: Debug>(result: &Result<T, Error>) -> String {
    match result {
        Ok(value) => format!("{value:?}"),
        Err(error) => format!("{error:?}"),
    }
}

#[test]
fn names_are_checked_when_a_call_is_prepared() {
    on(Kind::Memory, async |world| {
        let limiter = world.limiter().await;
        let invalid = |done: Result<_, Error>, field: &str| match done {
            Err(Error::Invalid(invalid)) => assert_eq!(invalid.field(), field),
            Err(other) => panic!("{other:?}"),
            Ok(()) => panic!("{field} must be checked"),
        };
        let prepare = |resource: &str, names| limiter.prepare::<2>(resource, names).map(|_| ());
        invalid(prepare("", NAMES), "resource");
        invalid(prepare("_default_", NAMES), "resource");
        invalid(prepare("gpt-4", ["rpm", ""]), "limit name");
        invalid(prepare("gpt-4", ["rpm", "wcu"]), "limit name");
        invalid(prepare("gpt-4", ["rpm", "rpm"]), "limit name");
        invalid(limiter.prepare("gpt-4", []).map(|_| ()), "amounts");
        let many: Vec<String> = (0..33).map(|n| format!("l{n}")).collect();
        let many: [&str; 33] = std::array::from_fn(|at| many[at].as_str());
        invalid(limiter.prepare("gpt-4", many).map(|_| ()), "limits");
        let most: [&str; 32] = std::array::from_fn(|at| many[at]);
        assert_eq!(limiter.prepare("gpt-4", most).unwrap().limits().len(), 32);
    });
}

#[test]
fn many_limits_are_taken_from_at_once() {
    on_every_store(async |world| {
        let names: Vec<String> = (0..12).map(|n| format!("l{n}")).collect();
        let names: [&str; 12] = std::array::from_fn(|at| names[at].as_str());
        let limiter = world.limiter().await;
        let limits = names.map(|name| without_refill(name, 10));
        limiter.set_system_defaults(limits, None).await.unwrap();
        let prepared = limiter.prepare("gpt-4", names).unwrap();
        for _ in 0..3 {
            prepared.acquire("key", [3; 12]).await.unwrap().commit().await.unwrap();
        }
        let refused = prepared.acquire("key", [2; 12]).await;
        assert!(matches!(refused, Err(Error::Exceeded(_))), "{refused:?}");
        for name in names {
            assert_eq!(left(&limiter, "key", "gpt-4", name).await, 1, "{name}");
        }
    });
}

#[test]
fn errors_are_those_of_the_generic_call() {
    on_every_store(async |world| {
        let limits = [without_refill("rpm", 10), without_refill("tpm", 1_000)];
        let limiter = world.limiter_with(limits).await;
        own_limits(&limiter, "other", [without_refill("rps", 10)]).await;
        let prepared = prepare(&limiter);
        for round in 0..2 {
            for (entity, amounts) in [
                ("key", [11, 1]),
                ("key", [1, 1_001]),
                ("key", [1, u64::MAX]),
                ("key", [1_000_000_000_001, 0]),
                ("a b", [1, 1]),
                ("", [1, 1]),
                ("other", [1, 1]),
            ] {
                let [rpm, tpm] = amounts;
                let generic = limiter.acquire(entity, "gpt-4").take("rpm", rpm).take("tpm", tpm);
                let expected = text_of(&generic.await);
                let awaited = text_of(&prepared.acquire(entity, amounts).await);
                assert_eq!(awaited, expected, "{entity:?} {amounts:?} {round}");
                assert_eq!(text_of(&take(&prepared, entity, amounts).await), expected);
            }
        }
        assert_eq!(left(&limiter, "key", "gpt-4", "rpm").await, 10);
    });
}

#[test]
fn a_call_without_a_future_is_decided_or_asks_to_be_awaited() {
    on_every_store(async |world| {
        let limits = [without_refill("rpm", 10), without_refill("tpm", 1_000)];
        let limiter = world.limiter_with(limits).await;
        let prepared = prepare(&limiter);
        let waits = |done: Result<_, Error>| matches!(done, Err(Error::WouldWait));
        assert!(waits(prepared.try_acquire("key", [1, 1]).map(|_| ())), "nothing is cached");
        spend(&limiter, "key", "gpt-4", "rpm", 4).await;
        #[cfg(feature = "sqlite")]
        if world.is(Kind::Sqlite) {
            // It answers at once only while its own thread does not use the file.
            let taken = match prepared.try_acquire("key", [1, 1]) {
                Ok(lease) => lease.commit().await.map(|()| 1).unwrap(),
                Err(error) => i64::from(!matches!(error, Error::WouldWait)) * 100,
            };
            assert_eq!(left(&limiter, "key", "gpt-4", "rpm").await, 6 - taken);
            return;
        }
        if !world.is(Kind::Memory) {
            assert!(waits(prepared.try_acquire("key", [1, 1]).map(|_| ())), "it must wait");
            assert!(waits(limiter.acquire("key", "gpt-4").take("rpm", 1).try_now().map(|_| ())));
            assert_eq!(left(&limiter, "key", "gpt-4", "rpm").await, 6);
            return;
        }
        drop(prepared.try_acquire("key", [4, 4]).unwrap().commit());
        let refused = prepared.try_acquire("key", [3, 3]);
        assert!(matches!(refused, Err(Error::Exceeded(_))), "{refused:?}");
        let generic = limiter.acquire("key", "gpt-4").take("rpm", 3).try_now();
        assert!(matches!(generic, Err(Error::Exceeded(_))), "{generic:?}");
        limiter.acquire("key", "gpt-4").take("rpm", 1).try_now().unwrap().commit().await.unwrap();
        assert!(waits(prepared.acquire("key", [1, 1]).wait_up_to(secs(1)).try_now().map(|_| ())));
        world.store.script(Call::Acquire, Fault::FailBefore(StoreErrorKind::Unavailable));
        assert!(waits(prepared.try_acquire("key", [1, 1]).map(|_| ())), "the store may fail");
        assert_eq!(left(&limiter, "key", "gpt-4", "rpm").await, 1);
    });
}

/// Two worlds with the same calls, one generic and one prepared.
struct Pair {
    worlds: [World; 2],
    limiters: [RateLimiter; 2],
    prepared: Prepared<2>,
}

impl Pair {
    async fn new(world: World) -> Self {
        let worlds = [World::new_like(&world), world];
        let mut limiters = Vec::new();
        for world in &worlds {
            let limiter = world.limiter().await;
            let limits = [per_minute("rpm", 60), per_minute("tpm", 1_000).burst(3_000)];
            limiter.set_system_defaults(limits, None).await.unwrap();
            limiter.create_entity("org").await.unwrap();
            child(&limiter, "team", "org").await;
            limiters.push(limiter);
        }
        let limiters: [RateLimiter; 2] = limiters.try_into().unwrap();
        let prepared = prepare(&limiters[1]);
        Self { worlds, limiters, prepared }
    }

    /// The call in both worlds, which must have the same result.
    async fn call(&self, entity: &str, [rpm, tpm]: [u64; 2], what: &str) -> Option<[Lease; 2]> {
        let generic = self.limiters[0].acquire(entity, "gpt-4").take("rpm", rpm).take("tpm", tpm);
        let generic = generic.await;
        let prepared = take(&self.prepared, entity, [rpm, tpm]).await;
        let statuses = |done: &Result<Lease, Error>| match done {
            Ok(lease) => format!("{:?} {:?}", lease.statuses(), lease.http_fields()),
            Err(error) => format!("{error:?}"),
        };
        assert_eq!(statuses(&prepared), statuses(&generic), "{what}");
        Some([generic.ok()?, prepared.ok()?])
    }

    async fn on_both(&self, change: impl AsyncFn(&RateLimiter)) {
        for limiter in &self.limiters {
            change(limiter).await;
        }
    }

    async fn check_equal(&self, entity: &str, what: &str) {
        let mut found = Vec::new();
        for (world, limiter) in self.worlds.iter().zip(&self.limiters) {
            let bucket = world.bucket(limiter, entity, "gpt-4").await;
            let bucket = bucket.map(|it| (it.cells().to_vec(), it.limits().to_limits()));
            found.push(format!("{bucket:?}"));
        }
        assert_eq!(found[0], found[1], "{entity} {what}");
    }
}

async fn end(lease: Lease, how: u32, amount: u64) -> String {
    let mut lease = lease;
    let done = match how {
        0 => lease.commit().await,
        1 => lease.rollback().await,
        2 => {
            let settled = lease.settle("tpm", amount);
            lease.commit().await.and(settled)
        }
        3 => {
            let more = lease.consume("rpm", amount % 3).await;
            lease.commit().await.and(more)
        }
        4 => {
            let adjusted = lease.adjust("tpm", -amount.cast_signed());
            lease.flush().await.unwrap();
            lease.commit().await.and(adjusted)
        }
        _ => lease.release("rpm", 1).and(lease.commit().await),
    };
    format!("{done:?}")
}

#[test]
fn random_calls_have_the_same_results_and_leave_the_same_buckets() {
    on_every_store(async |world| {
        let seeds = if world.is(Kind::Memory) { 0..30 } else { 0..6 };
        for seed in seeds {
            let pair = Pair::new(World::new_like(&world)).await;
            let mut random = fastrand::Rng::with_seed(seed);
            for step in 0..60 {
                let what = format!("seed {seed}, step {step}");
                let entity = ["one", "two", "team", "org"][random.usize(..4)];
                match random.u32(..12) {
                    0 => pair.on_both(async |it| it.invalidate_cache()).await,
                    1 => {
                        let limits = [per_minute("rpm", random.u64(1..90)), per_minute("tpm", 900)];
                        let change = async |it: &RateLimiter| {
                            let limits = limits.clone();
                            it.set_limits(entity, None, limits).await.unwrap();
                        };
                        pair.on_both(change).await;
                    }
                    2 => {
                        let limits = [per_minute("tpm", random.u64(1..2_000)), per_minute("x", 1)];
                        let limits = [limits, [per_minute("rpm", 40), per_minute("y", 2)]].concat();
                        let change = async |it: &RateLimiter| {
                            it.set_system_defaults(limits.clone(), None).await.unwrap();
                        };
                        pair.on_both(change).await;
                    }
                    _ => {}
                }
                let by = ms(random.u64(..3_000));
                pair.worlds.iter().for_each(|world| world.advance(by));
                let amounts = [random.u64(..30), random.u64(..700)];
                let (how, amount) = (random.u32(..6), random.u64(..900));
                if let Some([generic, prepared]) = pair.call(entity, amounts, &what).await {
                    let generic = end(generic, how, amount).await;
                    assert_eq!(end(prepared, how, amount).await, generic, "{what}");
                }
                pair.check_equal(entity, &what).await;
            }
        }
    });
}

#[test]
fn a_prepared_call_takes_from_all_levels() {
    on_every_store(async |world| {
        let limiter = world.limiter().await;
        limiter.create_entity("org").await.unwrap();
        child(&limiter, "key", "org").await;
        own_limits(&limiter, "org", [without_refill("tpm", 100)]).await;
        let own = [without_refill("rpm", 100), without_refill("tpm", 1_000)];
        own_limits(&limiter, "key", own).await;
        let prepared = prepare(&limiter);
        for expected in [60, 20] {
            let lease = prepared.acquire("key", [1, 40]).await.unwrap();
            assert_eq!(lease.statuses().iter().map(|one| one.level).collect::<Vec<_>>(), [0, 0, 1]);
            lease.commit().await.unwrap();
            assert_eq!(left(&limiter, "org", "gpt-4", "tpm").await, expected);
        }
        let Err(Error::Exceeded(refusal)) = prepared.acquire("key", [1, 40]).await else {
            panic!("must be refused")
        };
        assert_eq!(refusal.primary_violation().level, 1);
        assert_eq!(left(&limiter, "key", "gpt-4", "tpm").await, 920);
    });
}

#[test]
fn a_prepared_call_follows_changed_limits() {
    on_every_store(async |world| {
        let limits = [without_refill("rpm", 10), without_refill("tpm", 100)];
        let limiter = world.limiter_with(limits).await;
        let elsewhere = world.limiter().await;
        let prepared = prepare(&limiter);
        take(&prepared, "key", [1, 1]).await.unwrap().commit().await.unwrap();

        // Its own process changes them: at once, and more often than a call remembers limit sets.
        for capacity in 2..12 {
            let limits = [without_refill("rpm", capacity), without_refill("tpm", 100)];
            own_limits(&limiter, "key", limits).await;
            let done = take(&prepared, "key", [capacity + 1, 0]).await;
            assert!(matches!(done, Err(Error::ExceedsCapacity(_))), "{capacity}: {done:?}");
            take(&prepared, "key", [1, 1]).await.unwrap().rollback().await.unwrap();
        }

        // Another process changes them: once the TTL is over.
        elsewhere.delete_limits("key", None).await.unwrap();
        let renamed = [without_refill("rpm", 10), without_refill("tpd", 100)];
        elsewhere.set_system_defaults(renamed, None).await.unwrap();
        take(&prepared, "key", [1, 1]).await.unwrap().commit().await.unwrap();
        world.advance(secs(60));
        let Err(Error::UnknownLimits { unknown, .. }) = take(&prepared, "key", [1, 1]).await else {
            panic!("tpm is gone")
        };
        assert_eq!(unknown, ["tpm"]);
        let renamed = limiter.prepare("gpt-4", ["rpm", "tpd"]).unwrap();
        renamed.acquire("key", [1, 1]).await.unwrap().commit().await.unwrap();
    });
}

#[test]
fn a_lease_settles_under_the_limits_that_it_was_acquired_with() {
    on_every_store(async |world| {
        let pair = Pair::new(world).await;
        let leases = pair.call("key", [1, 500], "before").await.unwrap();
        let lower = async |it: &RateLimiter| {
            own_limits(it, "key", [per_minute("rpm", 1), per_minute("tpm", 10)]).await;
        };
        pair.on_both(lower).await;
        for lease in leases {
            let mut lease = lease;
            lease.settle("tpm", 700).unwrap();
            lease.commit().await.unwrap();
        }
        pair.check_equal("key", "after").await;

        // An entity that was deleted meanwhile: nothing of it comes back but the charge.
        let leases = pair.call("gone", [1, 500], "before").await.unwrap();
        let delete = async |it: &RateLimiter| {
            it.delete_entity("gone").await.unwrap();
        };
        pair.on_both(delete).await;
        for lease in leases {
            let mut lease = lease;
            lease.settle("tpm", 700).unwrap();
            lease.commit().await.unwrap();
        }
        pair.check_equal("gone", "after").await;
    });
}

#[test]
fn a_purged_namespace_refuses_prepared_calls() {
    on_every_store(async |world| {
        let admin = world.limiter().await;
        let registry = admin.namespaces();
        let namespace = registry.register("team").await.unwrap();
        let limiter = world.builder().namespace("team").open().await.unwrap();
        let limits = [without_refill("rpm", 10), without_refill("tpm", 100)];
        limiter.set_system_defaults(limits, None).await.unwrap();
        let prepared = prepare(&limiter);
        take(&prepared, "key", [1, 1]).await.unwrap().commit().await.unwrap();
        registry.delete("team").await.unwrap();
        registry.purge(&namespace.id, |_| {}).await.unwrap();
        world.advance(secs(60));
        for _ in 0..2 {
            let done = take(&prepared, "key", [1, 1]).await;
            assert!(matches!(done, Err(Error::NamespacePurged { .. })), "{done:?}");
        }
    });
}

#[test]
fn a_prepared_call_neither_earns_nor_loses_by_a_clock_that_jumps() {
    on_every_store(async |world| {
        let pair = Pair::new(world).await;
        for jump in [180_000_i64, -180_000, 3_600_000, -3_600_000, 0, 1_000, -1_000] {
            let what = format!("{jump}");
            for world in &pair.worlds {
                let right = world.clock.now().as_millis();
                world.clock.correct(Timestamp::from_millis(right + jump));
            }
            for _ in 0..3 {
                if let Some(leases) = pair.call("key", [20, 1], &what).await {
                    for lease in leases {
                        lease.commit().await.unwrap();
                    }
                }
                pair.check_equal("key", &what).await;
            }
            for world in &pair.worlds {
                let jumped = world.clock.now().as_millis();
                world.clock.correct(Timestamp::from_millis(jumped - jump));
                world.advance(secs(70));
            }
        }
        assert!(pair.worlds[0].clock.now() > NOW);
    });
}

#[test]
fn a_prepared_call_waits_to_the_millisecond() {
    on(Kind::Memory, async |world| {
        let limits = [per_minute("rpm", 60), without_refill("tpm", 100)];
        let limiter = world.limiter_with(limits).await;
        let prepared = prepare(&limiter);
        prepared.acquire("key", [60, 0]).await.unwrap().commit().await.unwrap();
        let call = prepared.acquire("key", [3, 1]).wait_up_to(secs(60));
        let mut call = pin!(call.into_future());
        assert!(poll_once(call.as_mut()).is_pending());
        world.advance(ms(2_999));
        assert!(poll_once(call.as_mut()).is_pending());
        world.advance(ms(1));
        finish(call).await.unwrap().commit().await.unwrap();
        assert_eq!(left(&limiter, "key", "gpt-4", "rpm").await, 0);
    });
}

#[test]
fn a_prepared_call_that_is_cancelled_leaves_nothing_taken() {
    on_every_store(async |world| {
        let limits = [without_refill("rpm", 10), without_refill("tpm", 100)];
        let limiter = world.limiter_with(limits).await;
        let prepared = prepare(&limiter);
        drop(prepared.acquire("key", [1, 1]));
        drop(prepared.acquire("key", [1, 1]).into_future());
        for polls in 0..20 {
            let mut call = Box::pin(prepared.acquire("key", [7, 7]).into_future());
            for _ in 0..polls {
                if poll_once(call.as_mut()).is_ready() {
                    break;
                }
                tokio::task::yield_now().await;
            }
            drop(call);
            soon("given back", async || left(&limiter, "key", "gpt-4", "rpm").await == 10).await;
        }
    });
}

#[test]
fn a_dropped_lease_gives_back_or_keeps() {
    on_every_store(async |world| {
        let limits = [without_refill("rpm", 10), without_refill("tpm", 100)];
        let limiter = world.limiter_with(limits).await;
        let prepared = prepare(&limiter);
        for round in 1..3 {
            drop(prepared.acquire("key", [3, 30]).await.unwrap());
            soon("given back", async || left(&limiter, "key", "gpt-4", "tpm").await == 100).await;
            drop(prepared.acquire("kept", [1, 10]).on_drop(OnDrop::Keep).await.unwrap());
            settle_down().await;
            assert_eq!(left(&limiter, "kept", "gpt-4", "tpm").await, 100 - 10 * round);
            let mut lease = prepared.acquire("used", [1, 10]).await.unwrap();
            lease.settle("tpm", 20).unwrap();
            drop(lease);
            let expected = 100 - 20 * round;
            soon("kept", async || left(&limiter, "used", "gpt-4", "tpm").await == expected).await;
            assert_eq!(left(&limiter, "used", "gpt-4", "rpm").await, 10);
            prepared.acquire("key", [3, 30]).await.unwrap().rollback().await.unwrap();
            assert_eq!(left(&limiter, "key", "gpt-4", "rpm").await, 10);
        }
        // A commit counts when it is called, and so does a rollback.
        drop(prepared.acquire("key", [1, 1]).await.unwrap().commit());
        drop(prepared.acquire("key", [2, 2]).await.unwrap().rollback());
        soon("9 are left", async || left(&limiter, "key", "gpt-4", "rpm").await == 9).await;
    });
}

#[test]
fn a_prepared_call_is_degraded_as_the_generic_one_is() {
    on_every_store(async |world| {
        let limits = [without_refill("rpm", 10), without_refill("tpm", 100)];
        let limiter = world.limiter_with(limits).await;
        let prepared = prepare(&limiter);
        take(&prepared, "key", [1, 1]).await.unwrap().commit().await.unwrap();
        world.store.break_down(Fault::FailBefore(StoreErrorKind::Denied));
        let denied = prepared.acquire("key", [1, 1]).await;
        assert!(matches!(denied, Err(Error::Store(_))), "{denied:?}");
        world.store.break_down(Fault::Hang);
        let call = prepared.acquire("key", [1, 1]).deadline(ms(5));
        let mut call = pin!(call.on_unavailable(OnUnavailable::Allow).into_future());
        assert!(poll_once(call.as_mut()).is_pending());
        world.advance(ms(5));
        let lease = finish(call).await.unwrap();
        assert!(lease.is_degraded() && lease.statuses().is_empty());
        lease.commit().await.unwrap();
        world.store.heal();
        assert_eq!(left(&limiter, "key", "gpt-4", "rpm").await, 9);
    });
}

#[test]
fn zero_tokens_are_taken_from_a_bucket_in_debt() {
    on_every_store(async |world| {
        let limits = [without_refill("rpm", 10), without_refill("tpm", 100)];
        let limiter = world.limiter_with(limits).await;
        let prepared = prepare(&limiter);
        let mut lease = prepared.acquire("key", [1, 0]).await.unwrap();
        lease.settle("tpm", 500).unwrap();
        lease.commit().await.unwrap();
        let lease = prepared.acquire("key", [1, 0]).await.unwrap();
        assert_eq!(lease.held("tpm"), Some(0));
        lease.commit().await.unwrap();
        let refused = prepared.acquire("key", [1, 1]).await;
        assert!(matches!(refused, Err(Error::Exceeded(_))), "{refused:?}");
        assert_eq!(left(&limiter, "key", "gpt-4", "tpm").await, -400);
    });
}

#[test]
fn threads_never_take_more_than_there_is() {
    on_every_store_with_threads(async |world| {
        let limits = [without_refill("rpm", 50), without_refill("tpm", 10_000)];
        let limiter = world.limiter_with(limits).await;
        let tasks: Vec<_> = (0..8)
            .map(|_| {
                let prepared = prepare(&limiter);
                tokio::spawn(async move {
                    let mut admitted = 0;
                    for _ in 0..20 {
                        match prepared.acquire("key", [1, 7]).await {
                            Ok(lease) => {
                                lease.commit().await.unwrap();
                                admitted += 1;
                            }
                            Err(Error::Exceeded(_)) => {}
                            Err(other) => panic!("{other:?}"),
                        }
                    }
                    admitted
                })
            })
            .collect();
        let mut admitted = 0;
        for task in tasks {
            admitted += task.await.unwrap();
        }
        assert_eq!(admitted, 50);
        assert_eq!(left(&limiter, "key", "gpt-4", "tpm").await, 10_000 - 350);
    });
}
