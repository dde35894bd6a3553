//! The store under many clients and everything that can go wrong, from seeds.
//!
//! `ZAEL_SIM_SEEDS` says how many seeds are played (8), `ZAEL_SIM_BASE` from which one on (0), and
//! `ZAEL_SIM_SEED` which one alone.

use std::sync::Arc;
use std::time::Duration;

use fastrand::Rng;
use zae_limiter_core::{BoxFuture, StoreError, Target, Timestamp};
use zae_limiter_dynamodb::{DynamoOptions, DynamoStore};
use zae_limiter_testkit::{
    ClientId, Excuses, Harsh, Report, Reshard, Seeds, Simulation, Stack, StackReport,
};

const REPLAY: &str = "cargo test -p zae-limiter-dynamodb --test simulation -- --nocapture";

/// Seeds that have found a defect: calls that took from a new bucket before the same write lowered its ceiling, which
/// the auditor did not know; a refund that no shard counted; a new bucket with the limits of a call that took nothing.
const PINNED: &[u64] = &[3_100_001_854];
const PINNED_WALKS: &[u64] = &[2_394_307_663];
const PINNED_STACK: &[u64] = &[2_394_307_656];

/// Plays the seeds of a test, and prints how often the auditor could not be exact.
fn play_all(name: &str, pinned: &[u64], play: impl Fn(u64) -> Report) -> Vec<Report> {
    let seeds = Seeds::from_env(8, &format!("{REPLAY} {name}")).with_pinned(pinned);
    let reports = seeds.play_and_print(play, |reports| {
        let mut excuses = Excuses::default();
        reports.iter().for_each(|report| excuses.add(&report.excuses));
        let steps: u64 = reports.iter().map(|report| report.steps).sum();
        let asked: u64 = reports.iter().map(|report| report.totals.calls).sum();
        println!("{name}: {} runs, {steps} writes audited, {asked} table calls", reports.len());
        for (excuse, count) in excuses.iter() {
            println!("{name}: {excuse:?}: {count}");
        }
    });
    if seeds.is_alone() {
        println!("{reports:#?}");
        return Vec::new();
    }
    reports
}

/// What only a store with time limits, and with tasks of its own, can take.
const HARSH: Harsh = Harsh { hung_calls: true, ended_tasks: true, deletions: true };

/// Nearly every option, drawn from the seed and the client's number. Most clients are as they come; some lack
/// what makes them fast, and must be as right.
fn options(seed: u64, client: ClientId, shards_max: u32) -> DynamoOptions {
    let mut rng = Rng::with_seed(seed ^ (u64::from(client) << 32));
    let mut pick = |from: &[u64]| from[rng.usize(..from.len())];
    let options = DynamoOptions::default().seed(client.into()).shards_max(shards_max);
    let options = options.merge_after(Duration::from_secs(pick(&[1, 20, 20, 60])));
    let local_refusal = Duration::from_millis(pick(&[0, 50, 1_000, 1_000, 10_000]));
    let options = options.local_refusal(local_refusal);
    let remembered = usize::try_from(pick(&[1, 2, 100_000, 100_000])).unwrap_or(1);
    let options = options.remembered_buckets(remembered);
    let options = options.call_timeout(Duration::from_millis(pick(&[20, 300, 1_000, 1_000])));
    let options = options.queue_max(usize::try_from(pick(&[1, 3, 10_000, 10_000])).unwrap_or(1));
    if pick(&[0, 1, 1, 1, 1, 1, 1]) == 0 { options.without_group_commit() } else { options }
}

fn play(seed: u64) -> Report {
    // Many shards are slow to play; most is seen with few.
    let shards_max = [1, 2, 4, 4, 8, 1, 2, 4, 16, 2][usize::try_from(seed % 10).unwrap_or(0)];
    let simulation = Simulation::new(seed).harsh(HARSH).replayed_by(REPLAY);
    simulation.run(move |table, client| {
        Arc::new(DynamoStore::new(table, options(seed, client, shards_max)))
    })
}

#[test]
fn no_invariant_is_ever_violated() {
    let reports = play_all("no_invariant", PINNED, play);
    if reports.is_empty() {
        return;
    }
    // A run in which nothing happens proves nothing.
    for (what, count) in [
        ("admitted", reports.iter().map(|report| report.admitted).sum::<u64>()),
        ("refused", reports.iter().map(|report| report.refused).sum()),
        ("failed", reports.iter().map(|report| report.failed).sum()),
        ("cancelled", reports.iter().map(|report| report.cancelled).sum()),
        ("settled", reports.iter().map(|report| report.settled).sum()),
        ("crashed", reports.iter().map(|report| report.crashed).sum()),
    ] {
        println!("{what}: {count}");
        assert!(count > 0, "nothing was {what} in {} runs", reports.len());
    }
}

#[test]
fn the_same_seed_gives_the_same_run() {
    for seed in [1, 2] {
        assert_eq!(play(seed), play(seed));
    }
    assert_ne!(play(1).digest, play(2).digest);
}

/// A store that splits buckets on request.
#[derive(Debug)]
struct Resharding(DynamoStore);

impl Reshard for Resharding {
    fn reshard<'a>(
        &'a self,
        target: &'a Target,
        more: bool,
        now: Timestamp,
    ) -> BoxFuture<'a, Result<(), StoreError>> {
        match more {
            true => Box::pin(self.0.split(target.key(), now)),
            false => Box::pin(self.0.merge(target.key(), now)),
        }
    }
}

fn walk(seed: u64) -> Report {
    let simulation = Simulation::new(seed).harsh(HARSH);
    walk_of(&simulation.replayed_by(&format!("{REPLAY} walks")), seed)
}

fn walk_of(simulation: &Simulation, seed: u64) -> Report {
    let shards_max = [4, 8, 4, 8, 4, 8, 4, 64][usize::try_from(seed % 8).unwrap_or(0)];
    simulation.run_resharding(move |table, client| {
        let store = DynamoStore::new(table, options(seed, client, shards_max));
        (store.clone(), Resharding(store))
    })
}

/// Buckets go from one shard to many and back under load, split by several clients at once, any of
/// which may crash between any two calls.
#[test]
fn walks_of_splits_and_merges_are_exact() {
    let reports = play_all("walks", PINNED_WALKS, walk);
    assert!(reports.is_empty() || reports.iter().map(|report| report.admitted).sum::<u64>() > 0);
}

fn walk_beside_originals(seed: u64) -> Report {
    let simulation = Simulation::new(seed).replayed_by(&format!("{REPLAY} original"));
    walk_of(&simulation.beside_originals(6), seed)
}

/// What the Python original does to buckets in several shards makes tokens out of nothing. Our clients
/// beside it write as exactly as ever, always get an answer, and admit no more in excess than was made.
#[test]
fn original_clients_in_the_mix_break_only_their_own_promises() {
    let reports = play_all("original", &[], walk_beside_originals);
    if reports.is_empty() {
        return;
    }
    assert!(reports.iter().map(|report| report.admitted).sum::<u64>() > 0);
    assert!(reports.iter().any(|report| report.made > 0), "the original has made nothing");
}

fn play_stack(seed: u64) -> StackReport {
    let shards_max = [1, 2, 4, 4, 8, 1, 2, 4, 16, 2][usize::try_from(seed % 10).unwrap_or(0)];
    let stack = Stack::new(seed).harsh(HARSH).replayed_by(&format!("{REPLAY} stack"));
    stack.run(move |table, client| {
        Arc::new(DynamoStore::new(table, options(seed, client, shards_max)))
    })
}

/// Clocks are wrong by minutes or a year, in both directions, and a client without a check freezes buckets. Nothing is
/// admitted beyond what the bounds of the clocks allow, and every bucket serves at the end.
#[test]
fn no_clock_freezes_a_bucket() {
    let replay = format!("{REPLAY} no_clock");
    let reports = play_all("no_clock", &[1_641_975_871], |seed| {
        let shards_max = [1, 1, 2, 4][usize::try_from(seed % 4).unwrap_or(0)];
        let simulation = Simulation::new(seed).harsh(HARSH).replayed_by(&replay);
        let simulation = simulation.with_wrong_clocks();
        match seed % 3 {
            0 => walk_of(&simulation, seed),
            _ => simulation.run(move |table, client| {
                Arc::new(DynamoStore::new(table, options(seed, client, shards_max)))
            }),
        }
    });
    let sum = |count: fn(&Report) -> u64| reports.iter().map(count).sum::<u64>();
    let (frozen, rewound) = (sum(|report| report.frozen), sum(|report| report.rewound));
    println!("no_clock: {frozen} frozen, {rewound} rewound");
    assert!(reports.is_empty() || frozen > 0 && rewound > 0);
}

/// Whole limiters with such clocks.
#[test]
fn limiters_with_wrong_clocks_keep_their_promises() {
    let seeds = Seeds::from_env(8, &format!("{REPLAY} limiters_with"));
    let reports = seeds.play_and_print(
        |seed| {
            let stack = Stack::new(seed).harsh(HARSH).with_wrong_clocks();
            let stack = stack.replayed_by(&format!("{REPLAY} limiters_with"));
            stack.run(move |table, client| {
                Arc::new(DynamoStore::new(table, options(seed, client, 4)))
            })
        },
        |_| {},
    );
    let admitted = reports.iter().map(|report| report.admitted).sum::<u64>();
    assert!(seeds.is_alone() || reports.is_empty() || admitted > 0);
}

/// Limiters with their deadlines, retries, breakers and leases, on the store, on the table.
#[test]
fn the_whole_stack_keeps_its_deadlines_and_its_confirmed_writes() {
    let seeds = Seeds::from_env(8, &format!("{REPLAY} stack")).with_pinned(PINNED_STACK);
    let reports = seeds.play_and_print(play_stack, |reports| {
        let mut excuses = Excuses::default();
        reports.iter().for_each(|report| excuses.add(&report.excuses));
        for (excuse, count) in excuses.iter() {
            println!("stack: {excuse:?}: {count}");
        }
        let unsure: u64 = reports.iter().map(|report| report.unsure).sum();
        println!("stack: not exactly kept: {unsure}");
    });
    if seeds.is_alone() {
        println!("{reports:#?}");
        return;
    }
    for (what, count) in [
        ("admitted", reports.iter().map(|report| report.admitted).sum::<u64>()),
        ("refused", reports.iter().map(|report| report.refused).sum()),
        ("degraded", reports.iter().map(|report| report.degraded).sum()),
        ("unavailable", reports.iter().map(|report| report.unavailable).sum()),
        ("committed", reports.iter().map(|report| report.committed).sum()),
        ("dropped", reports.iter().map(|report| report.dropped).sum()),
        ("reconfigured", reports.iter().map(|report| report.reconfigured).sum()),
        ("exactly kept", reports.iter().map(|report| report.exact).sum()),
        ("audited writes", reports.iter().map(|report| report.steps).sum()),
    ] {
        println!("stack: {what}: {count}");
        assert!(count > 0 || reports.is_empty(), "nothing was {what}");
    }
    assert_eq!(play_stack(1), play_stack(1));
}
