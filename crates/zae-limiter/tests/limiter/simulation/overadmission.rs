//! The oracle: balances as exact fractions, and what was admitted since each limit last changed.
//!
//! It shares no arithmetic with the limiter: a balance is kept in millitokens times the period in
//! milliseconds, so that nothing is ever rounded.

use zae_limiter::{Limit, Timestamp};

/// Everybody, with the place of the parent: three levels, two branches.
pub(super) const ENTITIES: [(&str, Option<usize>); 6] = [
    ("root", None),
    ("left", Some(0)),
    ("right", Some(0)),
    ("left-1", Some(1)),
    ("left-2", Some(1)),
    ("right-1", Some(2)),
];

/// In the order of their names.
pub(super) const LIMITS: [&str; 2] = ["rpm", "tpm"];

/// `right` does not track `rpm`.
pub(super) fn tracks(entity: usize, limit: usize) -> bool {
    !(entity == 2 && limit == 0)
}

#[derive(Debug)]
pub(super) enum Verdict {
    Taken,
    /// With the wait in milliseconds.
    Refused {
        wait: u64,
    },
    /// Above the ceiling of this entity.
    Impossible {
        whose: &'static str,
    },
}

#[derive(Clone, Debug)]
struct Tally {
    capacity: i128,
    amount: i128,
    period: i128,
    /// Millitokens times the period.
    balance: i128,
    /// Net consumption in millitokens.
    consumed: i64,
    /// Since the limit last changed: the least of (net consumption before a moment - what is earned
    /// up to it), both times the period.
    lowest: i128,
}

#[derive(Debug)]
struct Bucket {
    /// Whether anything was ever taken from it: one that does not exist is full, whatever its
    /// limits become.
    exists: bool,
    paid: Timestamp,
    tallies: [Option<Tally>; LIMITS.len()],
}

#[derive(Debug)]
pub(super) struct Auditor {
    start: Timestamp,
    buckets: Vec<Bucket>,
    admitted: usize,
}

impl Tally {
    fn full(&self) -> i128 {
        self.capacity * self.period
    }

    fn pay(&mut self, elapsed: i128) {
        self.balance = self.full().min(self.balance + elapsed * self.amount);
    }

    fn charge(&mut self, tokens: i64) {
        let milli = tokens * 1_000;
        self.balance = self.full().min(self.balance - i128::from(milli) * self.period);
        self.consumed += milli;
    }

    fn milli(&self) -> i64 {
        i64::try_from(self.balance.div_euclid(self.period)).unwrap()
    }

    /// Net consumption less what is earned, at a moment.
    fn net(&self, elapsed: i128) -> i128 {
        i128::from(self.consumed) * self.period - elapsed * self.amount
    }
}

impl Auditor {
    pub(super) fn new(start: Timestamp) -> Self {
        let bucket = |_| Bucket { exists: false, paid: start, tallies: [None, None] };
        Self { start, buckets: (0..ENTITIES.len()).map(bucket).collect(), admitted: 0 }
    }

    pub(super) fn chain(entity: usize) -> Vec<usize> {
        let mut chain = vec![entity];
        while let Some(parent) = ENTITIES[chain[chain.len() - 1]].1 {
            chain.push(parent);
        }
        chain
    }

    pub(super) fn admitted(&self) -> usize {
        self.admitted
    }

    fn elapsed(&self, now: Timestamp) -> i128 {
        i128::from(now.as_millis()) - i128::from(self.start.as_millis())
    }

    fn pay(&mut self, entity: usize, now: Timestamp) {
        let bucket = &mut self.buckets[entity];
        let elapsed = i128::from(now.as_millis() - bucket.paid.as_millis());
        bucket.paid = now;
        bucket.tallies.iter_mut().flatten().for_each(|tally| tally.pay(elapsed));
    }

    pub(super) fn change(&mut self, entity: usize, limits: &[Limit], now: Timestamp) {
        self.pay(entity, now);
        let elapsed = self.elapsed(now);
        let bucket = &mut self.buckets[entity];
        for limit in limits {
            let at = LIMITS.iter().position(|name| *name == limit.name).unwrap();
            let mut tally = Tally {
                capacity: i128::from(limit.capacity) * 1_000,
                amount: i128::from(limit.refill_amount) * 1_000,
                period: i128::try_from(limit.refill_period.as_millis()).unwrap(),
                balance: i128::MAX,
                consumed: 0,
                lowest: 0,
            };
            if let Some(old) = bucket.tallies[at].as_ref().filter(|_| bucket.exists) {
                // The fraction of a millitoken is carried over, rounded down to the new unit.
                let fraction = old.balance.rem_euclid(old.period) * tally.period / old.period;
                tally.balance = i128::from(old.milli()) * tally.period + fraction;
                tally.consumed = old.consumed;
            }
            tally.balance = tally.balance.min(tally.full());
            tally.lowest = tally.net(elapsed);
            bucket.tallies[at] = Some(tally);
        }
    }

    /// Takes all or nothing, and says which.
    pub(super) fn take(
        &mut self,
        chain: &[usize],
        amounts: [Option<u64>; LIMITS.len()],
        now: Timestamp,
    ) -> Verdict {
        let mut wait = 0;
        for &entity in chain {
            self.pay(entity, now);
            let pairs = self.buckets[entity].tallies.iter().zip(amounts);
            for (tally, amount) in pairs.filter_map(|(tally, amount)| tally.as_ref().zip(amount)) {
                let asked = i128::from(amount) * 1_000 * tally.period;
                if asked > tally.full() {
                    return Verdict::Impossible { whose: ENTITIES[entity].0 };
                }
                if asked > 0 && tally.balance < asked {
                    // What is there counts in whole millitokens, and so does what is missing.
                    let missing = asked - tally.balance;
                    wait = wait.max((missing + tally.amount - 1) / tally.amount);
                }
            }
        }
        if wait > 0 {
            return Verdict::Refused { wait: u64::try_from(wait).unwrap() };
        }
        let elapsed = self.elapsed(now);
        for &entity in chain {
            let bucket = &mut self.buckets[entity];
            let tracked = bucket.tallies.iter_mut().zip(amounts);
            let mut asked = false;
            for (tally, amount) in tracked.filter_map(|(tally, amount)| tally.as_mut().zip(amount))
            {
                asked = true;
                // An interval may begin here: what was consumed before it does not count.
                tally.lowest = tally.lowest.min(tally.net(elapsed));
                tally.charge(i64::try_from(amount).unwrap());
                // Never over-admit: in no interval since the limit changed was more admitted than
                // the ceiling and what the interval earned.
                if amount > 0 {
                    let most = tally.net(elapsed) - tally.lowest;
                    assert!(most <= tally.full(), "over-admitted by {}", most - tally.full());
                }
            }
            bucket.exists |= asked;
        }
        self.admitted += 1;
        Verdict::Taken
    }

    pub(super) fn settle(
        &mut self,
        chain: &[usize],
        differences: [i64; LIMITS.len()],
        now: Timestamp,
    ) {
        let elapsed = self.elapsed(now);
        for &entity in chain {
            self.pay(entity, now);
            let bucket = &mut self.buckets[entity];
            for (tally, difference) in bucket.tallies.iter_mut().zip(differences) {
                if let Some(tally) = tally.as_mut().filter(|_| difference != 0) {
                    tally.charge(difference);
                    tally.lowest = tally.lowest.min(tally.net(elapsed));
                }
            }
        }
    }

    /// Millitokens and net consumption of each limit that the entity tracks, if its bucket exists.
    pub(super) fn balances(&mut self, entity: usize, now: Timestamp) -> Option<Vec<(i64, i64)>> {
        self.pay(entity, now);
        let bucket = &self.buckets[entity];
        let of = |tally: &Tally| (tally.milli(), tally.consumed);
        bucket.exists.then(|| bucket.tallies.iter().flatten().map(of).collect())
    }
}
