//! The scene of a run: its buckets, limits, faults and clock errors, all drawn from the seed.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use fastrand::Rng;
use zae_limiter_core::{
    BucketKey, Lifetime, Limit, LimitSet, Millitokens, Take, Takes, Target, Timestamp,
};

use super::workload::Harsh;
use super::wrong_clocks::DATE_LAG_MS;
use crate::given;
use crate::table::Faults;

/// The parameters of a run. Rates are between 0 and 1.
#[derive(Debug)]
pub(super) struct Scene {
    /// The largest error of a clock.
    pub(super) skew_us: i64,
    pub(super) faults: Faults,
    pub(super) buckets: Vec<Place>,
    pub(super) config_changes: f64,
    /// Calls that have their own limits, instead of the stored ones.
    pub(super) own_limits: f64,
    pub(super) cancels: f64,
    pub(super) crashes: u32,
    pub(super) sweeps: bool,
    /// The longest delay after which expired items are deleted, in seconds.
    pub(super) sweep_late_s: i64,
    /// How far clocks jump for a while, beyond the skew.
    pub(super) jump_us: i64,
    /// The responses of the table have a date, by which stores correct such clocks.
    pub(super) is_dated: bool,
    /// Some leases are held for up to two days.
    pub(super) long_leases: bool,
    /// Acquires that take nothing and settle afterwards.
    pub(super) post_paid: f64,
    /// Calls that delete a bucket.
    pub(super) deletions: f64,
    /// How many runtimes end, with all tasks of a client.
    pub(super) runtimes_end: u32,
    /// All clients call with short pauses.
    pub(super) rush: bool,
}

/// An hour.
const JUMP_US: i64 = 3_600_000_000;

/// A bucket, and its parent.
#[derive(Debug)]
pub(super) struct Place {
    pub(super) key: BucketKey,
    pub(super) parent: Option<usize>,
    pub(super) lifetime_factor: Option<u32>,
    /// The sets of limits that it can have, and the index of the present one.
    pub(super) versions: Vec<Arc<LimitSet>>,
    pub(super) current: Mutex<usize>,
}

impl Scene {
    pub(super) fn draw(rng: &mut Rng) -> Self {
        let skew_us = *pick(rng, &[0, 5_000, 200_000, 2_000_000]);
        let mut buckets: Vec<Place> = Vec::new();
        let (orgs, teams, keys) = (1, rng.usize(1..=2), rng.usize(1..=4));
        for number in 0..orgs + teams + keys {
            let parent = match number {
                _ if number < orgs => None,
                _ if number < orgs + teams => Some(rng.usize(..orgs)),
                _ => Some(orgs + rng.usize(..teams)),
            };
            let versions = (0..3).map(|_| draw_limits(rng)).collect();
            buckets.push(Place {
                key: given::bucket(&format!("e{number}"), "gpt-4"),
                parent,
                lifetime_factor: *pick(rng, &[None, Some(1), Some(1), Some(7)]),
                versions,
                current: Mutex::new(0),
            });
        }
        Self {
            skew_us,
            faults: draw_faults(rng),
            buckets,
            config_changes: *pick(rng, &[0.0, 0.0, 0.02, 0.1]),
            own_limits: 0.0,
            cancels: *pick(rng, &[0.0, 0.1, 0.3]),
            crashes: *pick(rng, &[0, 3, 12]),
            sweeps: rng.bool(),
            sweep_late_s: 10,
            jump_us: 0,
            is_dated: false,
            long_leases: false,
            post_paid: 0.0,
            deletions: 0.0,
            runtimes_end: 0,
            rush: false,
        }
    }

    /// Draws rare conditions, and faults that only some stores can handle.
    pub(super) fn draw_harsh(&mut self, rng: &mut Rng, harsh: Harsh) {
        self.sweep_late_s = *pick(rng, &[10, 10, 3_600, 48 * 3_600]);
        self.jump_us = *pick(rng, &[0, 0, 0, JUMP_US]);
        self.long_leases = rng.u32(..4) == 0;
        self.post_paid = *pick(rng, &[0.0, 0.05, 0.4]);
        self.rush = rng.u32(..5) == 0;
        if self.rush {
            self.config_changes = *pick(rng, &[0.0, 0.1, 0.3]);
        }
        if rng.u32(..4) == 0 {
            self.faults.hot_partition = *pick(rng, &[0.0005, 0.002, 0.005]);
        }
        let (hung, ends) = (*pick(rng, &[0.0, 0.0, 0.01, 0.05]), *pick(rng, &[0, 0, 3, 10]));
        let (dropped, panicked) = (*pick(rng, &[0.0, 0.0, 0.02]), *pick(rng, &[0.0, 0.0, 0.02]));
        let deletions = *pick(rng, &[0.0, 0.0, 0.03]);
        self.own_limits = *pick(rng, &[0.0, 0.0, 0.0, 0.02, 0.2, 1.0]);
        if harsh.hung_calls {
            self.faults.hung = hung;
        }
        if harsh.ended_tasks {
            self.runtimes_end = ends;
            (self.faults.dropped_task, self.faults.panicked_task) = (dropped, panicked);
        }
        if harsh.deletions {
            self.deletions = deletions;
        }
    }

    /// How far a clock can be ahead of the true time.
    pub(super) fn ahead_ms(&self) -> i64 {
        match self.is_dated {
            true => self.skew_us / 1_000 + DATE_LAG_MS + 1,
            false => (self.skew_us + self.jump_us) / 1_000 + 1,
        }
    }

    /// Excludes changes of limits, deletions, and clocks that jump.
    pub(super) fn keep_limits(&mut self) {
        self.config_changes = 0.0;
        self.deletions = 0.0;
        self.jump_us = 0;
        self.long_leases = false;
    }

    /// Excludes faults of calls, crashes, and runtimes that end.
    pub(super) fn spare_calls(&mut self) {
        let Faults { delay_us, lag_us, .. } = self.faults.clone();
        self.faults = Faults { delay_us, lag_us, ..Faults::none() };
        (self.crashes, self.runtimes_end) = (0, 0);
    }

    /// A bucket with some of its limits. Without `read_at` they are the call's own.
    pub(super) fn target(
        &self,
        bucket: usize,
        version: usize,
        read_at: Option<Timestamp>,
    ) -> Arc<Target> {
        let place = &self.buckets[bucket];
        let limits = &place.versions[version];
        let lifetime = match place.lifetime_factor {
            None => Lifetime::Forever,
            Some(factor) => Lifetime::Idle(limits.time_to_fill() * factor),
        };
        let target = Target::new(place.key.clone(), Arc::clone(limits), lifetime);
        Arc::new(match read_at {
            Some(moment) => target.with_limits_read_at(moment),
            None => target,
        })
    }

    /// The bucket and its ancestors, `levels` of them in total.
    pub(super) fn chain(&self, bucket: usize, levels: usize) -> Vec<usize> {
        let above = |at: &usize| self.buckets[*at].parent;
        std::iter::successors(Some(bucket), above).take(levels).collect()
    }
}

fn pick<'a, T>(rng: &mut Rng, from: &'a [T]) -> &'a T {
    &from[rng.usize(..from.len())]
}

fn draw_limits(rng: &mut Rng) -> Arc<LimitSet> {
    Arc::new(LimitSet::new(draw_limit_list(rng)).expect("valid limits"))
}

/// One to four limits.
pub(super) fn draw_limit_list(rng: &mut Rng) -> Vec<Limit> {
    let rps = rng.u64(2..=20);
    let rpm = rng.u64(5..=600);
    let all = [
        Limit::per_second("rps", rps).burst(rps * rng.u64(1..=3)),
        Limit::per_minute("rpm", rpm).burst(rpm + rng.u64(..100)),
        Limit::per_day("tpd", rng.u64(20..=3_000)),
        // Neither number divides the other, so every refill leaves a remainder.
        Limit::per("odd", 7, Duration::from_secs(13)).burst(rng.u64(3..=9)),
    ];
    let mut kept: Vec<Limit> = all.into_iter().filter(|_| rng.u32(..3) > 0).collect();
    if kept.is_empty() {
        kept.push(Limit::per_minute("rpm", rpm));
    }
    kept
}

fn draw_faults(rng: &mut Rng) -> Faults {
    let calm = Faults { delay_us: 500..=8_000, lag_us: 200_000, ..Faults::none() };
    let slow = Faults { slow: 0.05, slow_us: 50_000..=900_000, ..calm.clone() };
    match rng.u32(..5) {
        0 => calm,
        1 => slow,
        2 => Faults { lost_request: 0.05, lost_answer: 0.05, ..slow },
        3 => Faults {
            throttled: 0.05,
            partition_throttled: 0.05,
            conflict: 0.05,
            partition_units: Some(40.0),
            ..slow
        },
        _ => Faults {
            lost_request: 0.03,
            lost_answer: 0.03,
            throttled: 0.02,
            partition_throttled: 0.02,
            conflict: 0.02,
            partition_units: Some(1_000.0),
            ..slow
        },
    }
}

/// Amounts by limit, within the capacity of every bucket that has the limit.
pub(super) fn draw_amounts(
    rng: &mut Rng,
    targets: &[Arc<Target>],
) -> BTreeMap<String, Millitokens> {
    let mut most: BTreeMap<String, i64> = BTreeMap::new();
    for target in targets {
        for (name, rate) in target.limits().iter() {
            let capacity = rate.capacity().get();
            let least = most.entry(name.to_string()).or_insert(capacity);
            *least = capacity.min(*least);
        }
    }
    let named = most.into_iter().filter(|_| rng.u32(..5) > 0).collect::<Vec<_>>();
    let amount = |rng: &mut Rng, most: i64| match rng.u32(..10) {
        0 => 0,
        1 => most,
        2..=4 => rng.i64(1..=most),
        _ => rng.i64(1..=(most / 6).max(1)),
    };
    named.into_iter().map(|(name, most)| (name, Millitokens::new(amount(rng, most)))).collect()
}

/// An amount of zero for every limit, to be settled afterwards.
pub(super) fn draw_nothing(targets: &[Arc<Target>]) -> BTreeMap<String, Millitokens> {
    let names = targets.iter().flat_map(|target| target.limits().names().iter());
    names.map(|name| (name.to_string(), Millitokens::new(0))).collect()
}

/// The cost of a call that has taken nothing: at most one and a half times the capacity.
pub(super) fn draw_payment(rng: &mut Rng, target: &Target, takes: &Takes) -> Takes {
    let payment = |take: &Take| {
        let most = target.limits().rates()[take.cell].capacity().get();
        let most = if rng.u32(..4) == 0 { most + most / 2 } else { most / 4 };
        Take { cell: take.cell, amount: Millitokens::new(rng.i64(0..=most)) }
    };
    takes.iter().map(payment).collect()
}

/// Refunds everything or some of it, or charges more.
pub(super) fn draw_differences(rng: &mut Rng, takes: &Takes) -> Takes {
    let whole = rng.u32(..3) == 0;
    let difference = |take: &Take| {
        let taken = take.amount.get();
        let amount = match rng.u32(..3) {
            _ if whole => -taken,
            0 => rng.i64(1..=5_000),
            _ => -rng.i64(0..=taken),
        };
        Take { cell: take.cell, amount: Millitokens::new(amount) }
    };
    takes.iter().map(difference).collect()
}
