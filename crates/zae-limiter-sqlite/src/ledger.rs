//! Carries out jobs on the file, within a transaction.
//!
//! Acquires, settlements and reconfigurations are hot jobs: they change cached bucket states, which
//! are written together at the end. A hot job that fails changes nothing, and the others go on.
//! All other jobs are cold: they write at once, and if one fails halfway the transaction fails.

use std::collections::HashMap;

use rusqlite::{Connection, params};
use smallvec::SmallVec;
use zae_limiter_core::bucket_state::{Booking, BucketState, admit, may_rewind, rewind, settle};
use zae_limiter_core::{
    Admission, BucketKey, BucketQuery, Key, Plan, Record, Settlement, StoreErrorKind, Target,
    Timestamp, Usage, UsageKey, UsageSettings, Write, Written, start_of_hour,
};

use crate::bucket_states::{At, BucketStates};
use crate::error::Failure;
use crate::records;

/// The most buckets that one job searches for unbooked usage.
const BOOK_MAX: usize = 256;

/// The writer's connection and its cache.
#[derive(Debug)]
pub(crate) struct Ledger {
    pub(crate) conn: Connection,
    pub(crate) states: BucketStates,
    settings: UsageSettings,
    // Usage that `store` adds to the usage records before the transaction ends.
    bookings: Vec<(BucketKey, Booking)>,
    // How buckets were rewound. States in memory are dropped whenever another process writes.
    rewound: HashMap<BucketKey, Rewound>,
}

/// How this process last rewound a bucket.
#[derive(Debug)]
struct Rewound {
    at: Timestamp,
    /// The refill time before.
    from: Timestamp,
    /// A transaction was rolled back since, perhaps the one that rewound it.
    is_unsure: bool,
}

impl Rewound {
    /// Whether the rewind was undone: the bucket still has the refill time from before.
    fn is_undone(&self, state: &BucketState) -> bool {
        self.is_unsure && self.from == state.bucket.refilled_at()
    }
}

impl Ledger {
    pub(crate) fn new(conn: Connection, settings: UsageSettings) -> Self {
        Self {
            conn,
            states: BucketStates::default(),
            settings,
            bookings: Vec::new(),
            rewound: HashMap::new(),
        }
    }

    /// Drops everything in memory after a transaction that was rolled back.
    pub(crate) fn clear(&mut self) {
        self.states.clear();
        self.bookings.clear();
        self.rewound.values_mut().for_each(|rewound| rewound.is_unsure = true);
    }

    /// Fails if SQLite has ended the transaction, which it does after some errors. Otherwise the
    /// next jobs would write outside of it.
    pub(crate) fn check(&self) -> Result<(), Failure> {
        if self.conn.is_autocommit() {
            let message = "could not be read; check the disk and try again";
            return Err(Failure::Unusable(StoreErrorKind::Unavailable, message));
        }
        Ok(())
    }

    /// Writes the changes of all hot jobs so far.
    pub(crate) fn store(&mut self) -> Result<(), Failure> {
        self.check()?;
        self.states.store(&self.conn)?;
        for (key, booking) in std::mem::take(&mut self.bookings) {
            self.book(&key, &booking)?;
        }
        Ok(())
    }

    pub(crate) fn acquire(&mut self, plan: &Plan) -> Result<Admission, Failure> {
        let mut places: SmallVec<[At; 1]> = SmallVec::new();
        for leg in &plan.legs {
            places.push(self.states.find(&self.conn, leg.target.key(), Some(&leg.target))?);
        }
        self.rewind(plan, &places);
        // On copies, because a refused plan must change nothing.
        let copies = plan.legs.iter().zip(&places).map(|(leg, at)| match self.states.get(*at) {
            Some(state) => state.clone(),
            None => BucketState::open(&leg.target, plan.now),
        });
        let mut copies: SmallVec<[BucketState; 1]> = copies.collect();
        let mut booked: SmallVec<[(usize, Booking); 1]> = SmallVec::new();
        let admission = {
            let mut states: SmallVec<[&mut BucketState; 1]> = copies.iter_mut().collect();
            admit(plan, &mut states, |leg, booking| booked.push((leg, booking)))
        };
        if let Admission::Taken(_) = admission {
            for (at, state) in places.into_iter().zip(copies) {
                self.states.set(at, state);
            }
            let keys = booked.into_iter();
            self.bookings.extend(keys.map(|(leg, b)| (plan.legs[leg].target.key().clone(), b)));
        }
        Ok(admission)
    }

    /// Rewinds the buckets of a plan whose refill times are ahead of it.
    fn rewind(&mut self, plan: &Plan, places: &[At]) {
        let Some(max_skew) = plan.max_skew else { return };
        let is_ahead = |state: &BucketState| state.bucket.is_ahead(plan.now, max_skew);
        for (leg, at) in plan.legs.iter().zip(places) {
            let Some(mut state) = self.states.get(*at).filter(|one| is_ahead(one)).cloned() else {
                continue;
            };
            let (key, from) = (leg.target.key(), state.bucket.refilled_at());
            let before = self.rewound.get(key).filter(|before| !before.is_undone(&state));
            state.rewound_at = before.map(|before| before.at);
            if rewind(plan, &mut state) {
                self.rewound.retain(|_, one| !may_rewind(Some(one.at), plan.now));
                let rewound = Rewound { at: plan.now, from, is_unsure: false };
                self.rewound.insert(key.clone(), rewound);
            }
            self.states.set(*at, state);
        }
    }

    pub(crate) fn settle(
        &mut self,
        settlements: &[Settlement],
        now: Timestamp,
    ) -> Result<(), Failure> {
        let mut changed: SmallVec<[(At, Option<BucketState>); 1]> = SmallVec::new();
        let mut booked: SmallVec<[(BucketKey, Booking); 1]> = SmallVec::new();
        for settlement in settlements {
            let target = &settlement.target;
            let at = self.states.find(&self.conn, target.key(), Some(target))?;
            let place = match changed.iter().position(|(other, _)| *other == at) {
                Some(place) => place,
                None => {
                    changed.push((at, self.states.get(at).cloned()));
                    changed.len() - 1
                }
            };
            let state = &mut changed[place].1;
            settle(settlement, state, now, |b| booked.push((target.key().clone(), b)))?;
        }
        // Applied only now that all of them have succeeded.
        for (at, state) in changed {
            if let Some(state) = state {
                self.states.set(at, state);
            }
        }
        self.bookings.extend(booked);
        Ok(())
    }

    pub(crate) fn reconfigure(&mut self, target: &Target, now: Timestamp) -> Result<(), Failure> {
        let at = self.states.find(&self.conn, target.key(), Some(target))?;
        let Some(mut state) = self.states.get(at).cloned() else { return Ok(()) };
        if state.is_expired(now) {
            return Ok(());
        }
        let booking = state.reconfigure(target, now);
        self.bookings.extend(booking.map(|booking| (target.key().clone(), booking)));
        self.states.set(at, state);
        Ok(())
    }

    pub(crate) fn write(&mut self, batch: &[Write]) -> Result<Written, Failure> {
        // A precondition may concern a bucket that an earlier hot job has created or changed.
        self.store()?;
        for (at, write) in batch.iter().enumerate() {
            let holds = match write {
                Write::Put(record, precondition) => {
                    records::holds(&self.conn, &record.key(), precondition)?
                }
                Write::Delete(key, precondition) | Write::Check(key, precondition) => {
                    records::holds(&self.conn, key, precondition)?
                }
            };
            if !holds {
                return Ok(Written::Conflict(at));
            }
        }
        for write in batch {
            match write {
                Write::Put(record, _) => records::put(&self.conn, record)?,
                Write::Delete(key, _) => self.delete_one(key)?,
                Write::Check(..) => {}
            }
        }
        Ok(Written::Done)
    }

    pub(crate) fn delete(&mut self, keys: &[Key]) -> Result<(), Failure> {
        self.store()?;
        keys.iter().try_for_each(|key| self.delete_one(key))
    }

    fn delete_one(&mut self, key: &Key) -> Result<(), Failure> {
        records::delete(&self.conn, key)?;
        if let Key::Bucket(key) = key {
            self.states.remove(key);
        }
        Ok(())
    }

    /// Books the unbooked usage of the next buckets after a key. Returns the last key, or `None` at
    /// the end.
    pub(crate) fn book_next(
        &mut self,
        of: &BucketQuery,
        after: Option<&BucketKey>,
    ) -> Result<Option<BucketKey>, Failure> {
        self.store()?;
        let keys = self.bucket_keys(of, after)?;
        let last = (keys.len() == BOOK_MAX).then(|| keys.last().cloned()).flatten();
        for key in keys {
            // A damaged row has no usage to book. The next acquire from it reports the damage.
            let Ok(at) = self.states.find(&self.conn, &key, None) else {
                self.check()?;
                continue;
            };
            let Some(state) = self.states.get(at).filter(|state| state.events > 0) else {
                continue;
            };
            let mut state = state.clone();
            let booking = state.take_booking();
            self.states.set(at, state);
            self.bookings.extend(booking.map(|booking| (key, booking)));
        }
        self.store()?;
        Ok(last)
    }

    fn bucket_keys(
        &self,
        of: &BucketQuery,
        after: Option<&BucketKey>,
    ) -> Result<Vec<BucketKey>, Failure> {
        let (sql, ns, name, after) = match of {
            BucketQuery::OfEntity(ns, entity) => (
                "SELECT ns, entity, resource FROM bucket \
                 WHERE ns = ?1 AND entity = ?2 AND resource > ?3 ORDER BY resource LIMIT ?4",
                ns.as_str(),
                entity.as_str(),
                after.map_or("", |key| key.resource.as_str()),
            ),
            BucketQuery::OnResource(ns, resource) => (
                "SELECT ns, entity, resource FROM bucket \
                 WHERE ns = ?1 AND resource = ?2 AND entity > ?3 ORDER BY entity LIMIT ?4",
                ns.as_str(),
                resource.as_str(),
                after.map_or("", |key| key.entity.as_str()),
            ),
        };
        let mut statement = self.conn.prepare_cached(sql)?;
        let mut rows = statement.query(params![ns, name, after, BOOK_MAX as i64])?;
        let mut keys = Vec::new();
        while let Some(row) = rows.next()? {
            keys.push(bucket_key(row)?);
        }
        Ok(keys)
    }

    /// Adds a booking to the records of its windows.
    pub(crate) fn book(&self, key: &BucketKey, booking: &Booking) -> Result<(), Failure> {
        self.check()?;
        let at = start_of_hour(booking.hour);
        for &window in &self.settings.windows {
            let key = UsageKey {
                namespace: key.namespace.clone(),
                entity: key.entity.clone(),
                resource: key.resource.clone(),
                window,
                start: window.start(at),
            };
            let expires_at = Some(window.end(at).saturating_add(self.settings.retention));
            let new = Usage { key, consumed: Default::default(), events: 0, expires_at };
            let stored = records::get(&self.conn, &Key::Usage(new.key.clone()))?;
            let mut usage = stored.and_then(Record::into_usage).unwrap_or(new);
            usage.events = usage.events.saturating_add(booking.events);
            for (name, amount) in &booking.consumed {
                let sum = usage.consumed.entry(name.clone()).or_default();
                *sum = sum.saturating_add(*amount);
            }
            records::put(&self.conn, &Record::Usage(usage))?;
        }
        Ok(())
    }
}

/// A bucket's key from the first three columns.
pub(crate) fn bucket_key(row: &rusqlite::Row<'_>) -> Result<BucketKey, Failure> {
    Ok(BucketKey {
        namespace: records::name(row, 0)?,
        entity: records::name(row, 1)?,
        resource: records::name(row, 2)?,
    })
}
