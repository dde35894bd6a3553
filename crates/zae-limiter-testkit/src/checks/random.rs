//! Random runs beside the oracle, which must agree at every step.

use std::sync::Arc;
use std::time::Duration;

use fastrand::Rng;
use zae_limiter_core::{
    Admission, Bucket, BucketKey, Key, Leg, LegTaken, Lifetime, Limit, LimitSet, Millitokens,
    Placement, Plan, Settlement, SingleLeg, Store, Take, Takes, Target, Timestamp,
};

use crate::calls::{acquire, peek};
use crate::given::{NOW, bucket, limits, namespace, test_namespace};
use crate::oracle::Oracle;

const STEPS: usize = 300;

/// One seed replays one run.
const SEED_VARIABLE: &str = "ZAE_LIMITER_TESTKIT_SEED";

pub async fn a_random_run_equals_the_oracle_while_rates_change(store: Arc<dyn Store>) {
    play(&*store, Varying::Rates, Over::Buckets).await;
}

pub async fn a_random_run_equals_the_oracle_while_limits_come_and_go(store: Arc<dyn Store>) {
    play(&*store, Varying::Names, Over::Buckets).await;
}

pub async fn a_random_run_of_chains_equals_the_oracle_while_rates_change(store: Arc<dyn Store>) {
    play(&*store, Varying::Rates, Over::Chains).await;
}

pub async fn a_random_run_of_chains_equals_the_oracle_while_limits_come_and_go(
    store: Arc<dyn Store>,
) {
    play(&*store, Varying::Names, Over::Chains).await;
}

async fn play(store: &dyn Store, varying: Varying, over: Over) {
    for seed in seeds() {
        Run::new(seed, varying, over).play(store).await;
    }
}

fn seeds() -> Vec<u64> {
    match std::env::var(SEED_VARIABLE) {
        Ok(seed) => vec![seed.parse().expect("the seed is a number")],
        Err(_) => (1..=6).collect(),
    }
}

/// What changes between plans. Not both at once: whether a limit that is full and not named was
/// dropped, and so starts anew under another rate, is up to the store.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Varying {
    Rates,
    Names,
}

/// What the calls of a run are about.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Over {
    /// One bucket at a time, with a clock that never runs back. A store may refill later than the
    /// call, as long as that is not visible. A clock that runs back would make it visible.
    Buckets,
    /// Chains too. A store that takes in several steps may fail: a refused chain leaves a trace.
    Chains,
}

struct Run {
    seed: u64,
    varying: Varying,
    over: Over,
    random: Rng,
    oracle: Oracle,
    now: Timestamp,
    keys: Vec<BucketKey>,
    /// What was taken and can be settled.
    leases: Vec<(Arc<Target>, Placement, Takes)>,
}

impl Run {
    fn new(seed: u64, varying: Varying, over: Over) -> Self {
        let elsewhere = namespace(2);
        let mut keys = Vec::new();
        for number in 0..5 {
            // Runs share a store: each has keys of its own.
            let mut key = bucket(&format!("run-{seed}-{number}"), "r");
            key.namespace = if number == 4 { elsewhere.clone() } else { test_namespace() };
            keys.push(key);
        }
        let random = Rng::with_seed(seed);
        let (oracle, leases) = (Oracle::default(), Vec::new());
        Self { seed, varying, over, random, oracle, now: NOW, keys, leases }
    }

    async fn play(mut self, store: &dyn Store) {
        for step in 0..STEPS {
            self.step_clock();
            let done = match self.random.u32(0..20) {
                0..=10 => self.acquire(store).await,
                11..=15 => self.settle(store).await,
                16..=18 => self.reconfigure(store).await,
                _ => self.delete(store).await,
            };
            let place = format!(
                "step {step}, {done}, at {:?}; replay with {SEED_VARIABLE}={}",
                self.now, self.seed
            );
            for key in &self.keys {
                let found = peek(store, key, self.now).await;
                let expected = self.oracle.peek(key, self.now);
                self.compare(found, expected, &format!("{} after {place}", key.entity));
            }
        }
    }

    fn step_clock(&mut self) {
        let millis = match self.random.u32(0..20) {
            0..=4 => 0,
            5..=11 => self.random.i64(0..50),
            12..=16 => self.random.i64(0..5_000),
            17 => self.random.i64(0..400_000),
            18 => self.random.i64(0..4_000_000),
            _ if self.over == Over::Buckets => self.random.i64(0..20_000),
            _ => -self.random.i64(0..20_000),
        };
        self.now = Timestamp::from_millis(self.now.as_millis() + millis);
    }

    async fn acquire(&mut self, store: &dyn Store) -> String {
        self.random.shuffle(&mut self.keys);
        let levels = if self.over == Over::Chains { self.random.usize(1..=3) } else { 1 };
        let keys = self.keys[..levels].to_vec();
        let legs = keys.into_iter().map(|key| self.leg(key)).collect();
        let plan = Plan { max_skew: None, now: self.now, legs };
        // As the limiter does: on the spot if the store can.
        let on_the_spot = if self.random.bool() { store.acquire_now(&plan) } else { None };
        let found = match on_the_spot {
            Some(answer) => answer.expect("an answer"),
            None => acquire(store, &plan).await,
        };
        let mut expected = self.oracle.acquire(&plan);
        if let (Admission::Taken(found), Admission::Taken(expected)) = (&found, &mut expected) {
            for (expected, found) in expected.iter_mut().zip(found) {
                // Where in a bucket the tokens lay is up to the store.
                expected.placement = found.placement;
            }
            for (leg, taken) in plan.legs.iter().zip(found) {
                self.leases.push((Arc::clone(&leg.target), taken.placement, leg.takes.clone()));
            }
        }
        assert_eq!(
            found, expected,
            "{SEED_VARIABLE}={}: the answer to {plan:#?} differs from the oracle's",
            self.seed
        );
        if let [leg] = &plan.legs[..] {
            self.take_again(store, leg);
        }
        match found {
            Admission::Taken(_) => format!("an admitted acquire over {levels}"),
            Admission::Refused(_) => format!("a refused acquire over {levels}"),
        }
    }

    /// Calls [`Store::take_now`] with a leg that was just decided. It may do nothing, but nothing else than an acquire.
    fn take_again(&mut self, store: &dyn Store, leg: &Leg) {
        let mut left = vec![Millitokens::ZERO; leg.takes.len()];
        let single = SingleLeg { now: self.now, target: &leg.target, takes: &leg.takes };
        if !store.take_now(&single, &mut left) {
            return;
        }
        let plan = Plan { max_skew: None, now: self.now, legs: [leg.clone()].into() };
        let taken = LegTaken { placement: Placement::default(), left: left.into() };
        let found = Admission::Taken([taken.clone()].into());
        let expected = self.oracle.acquire(&plan);
        assert_eq!(found, expected, "{SEED_VARIABLE}={}: take_now of {plan:#?}", self.seed);
        self.leases.push((Arc::clone(&leg.target), taken.placement, leg.takes.clone()));
    }

    /// Asks for something of each of some limits, once in a while for nothing.
    fn leg(&mut self, key: BucketKey) -> Leg {
        let target = self.target(key);
        let mut takes = Takes::new();
        for (cell, rate) in target.limits().rates().iter().enumerate() {
            if !takes.is_empty() && self.random.u32(0..3) == 0 {
                continue;
            }
            let capacity = rate.capacity().get();
            let amount = match self.random.u32(0..8) {
                // A request for nothing may create a bucket or not: that is up to the store.
                0 if !takes.is_empty() => 0,
                1 => capacity,
                2..=4 => self.random.i64(1..=capacity),
                _ => self.random.i64(1..=capacity.min(3_000)),
            };
            takes.push(Take { cell, amount: Millitokens::new(amount) });
        }
        Leg { target, takes }
    }

    fn target(&mut self, key: BucketKey) -> Arc<Target> {
        let set = self.limits();
        // Long enough to be full again: a shorter one would only forgive what was taken.
        let lifetime = match self.random.u32(0..4) {
            0 => Lifetime::Forever,
            _ => Lifetime::Idle(set.time_to_fill() + Duration::from_secs(self.random.u64(0..30))),
        };
        Arc::new(Target::new(key, set, lifetime))
    }

    fn limits(&mut self) -> Arc<LimitSet> {
        let mut all = vec![
            Limit::per_minute("rpm", 7),
            Limit::per("slow", 3, Duration::from_secs(1_009)),
            Limit::per_second("fast", 100).burst(250),
        ];
        match self.varying {
            Varying::Names => {
                let first = self.random.usize(0..all.len());
                all.swap(0, first);
                all.truncate(self.random.usize(1..=3));
            }
            Varying::Rates if self.random.u32(0..3) == 0 => {
                let limit = self.random.usize(0..all.len());
                all[limit].capacity = self.random.u64(1..20);
                all[limit].refill_amount = self.random.u64(1..20);
                all[limit].refill_period = Duration::from_secs(self.random.u64(1..100));
            }
            Varying::Rates => {}
        }
        limits(all)
    }

    async fn settle(&mut self, store: &dyn Store) -> String {
        if self.leases.is_empty() {
            return "nothing to settle".into();
        }
        let lease = self.random.usize(0..self.leases.len());
        let (target, placement, takes) = self.leases.swap_remove(lease);
        let mut differences = Takes::new();
        for take in takes {
            let amount = match self.random.u32(0..4) {
                0 => -take.amount,
                1 => Millitokens::new(self.random.i64(-5_000..5_000)),
                2 => Millitokens::new(self.random.i64(0..20_000)),
                _ => Millitokens::ZERO,
            };
            differences.push(Take { amount, ..take });
        }
        let settlement = Settlement { target, placement, differences };
        let differences = format!("{:?}", settlement.differences);
        self.oracle.settle(&settlement, self.now).expect("no overflow");
        store.settle(&[settlement], self.now).await.expect("settle must succeed");
        format!("a settlement of {differences}")
    }

    async fn reconfigure(&mut self, store: &dyn Store) -> String {
        let key = self.keys[self.random.usize(0..self.keys.len())].clone();
        let target = self.target(key);
        self.oracle.reconfigure(&target, self.now);
        store.reconfigure(&target, self.now).await.expect("reconfigure must succeed");
        format!("a reconfigure of {}", target.key().entity)
    }

    async fn delete(&mut self, store: &dyn Store) -> String {
        let key = self.keys[self.random.usize(0..self.keys.len())].clone();
        self.oracle.delete(&key);
        store.delete(&[Key::Bucket(key.clone())]).await.expect("delete must succeed");
        format!("the deletion of {}", key.entity)
    }

    fn compare(&self, found: Option<Bucket>, expected: Option<Bucket>, place: &str) {
        let (found, expected) = match (found, expected) {
            (None, None) => return,
            (Some(found), Some(expected)) => (found, expected),
            // Absent is full: a store may keep its expiries no finer than seconds.
            (Some(only), None) | (None, Some(only))
                if self.over == Over::Buckets && is_full(&only) =>
            {
                return;
            }
            (found, expected) => panic!("{place}: found {found:?}, expected {expected:?}"),
        };
        for name in found.limits().names().iter().chain(expected.limits().names()) {
            match (found.cell(name.as_str()), expected.cell(name.as_str())) {
                (Some((found, found_rate)), Some((expected, expected_rate))) => {
                    assert_eq!(found_rate, expected_rate, "rate of {name} of {place}");
                    assert_eq!(found.tokens, expected.tokens, "tokens of {name} of {place}");
                    let remainders = (found.remainder, expected.remainder);
                    assert_eq!(remainders.0, remainders.1, "remainder of {name} of {place}");
                    if self.varying == Varying::Rates && self.over == Over::Chains {
                        let consumed = (found.consumed, expected.consumed);
                        assert_eq!(consumed.0, consumed.1, "consumed of {name} of {place}");
                    }
                }
                // A full limit that no plan names may be kept or dropped.
                (one, other) => {
                    let (cell, rate) = one.or(other).expect("named by one of them");
                    assert_eq!(cell.tokens, rate.capacity(), "{name} is in one only: {place}");
                }
            }
        }
        assert_eq!(found.refilled_at(), expected.refilled_at(), "time paid out, {place}");
    }
}

fn is_full(bucket: &Bucket) -> bool {
    bucket
        .limits()
        .rates()
        .iter()
        .zip(bucket.cells())
        .all(|(rate, cell)| cell.tokens == rate.capacity())
}
