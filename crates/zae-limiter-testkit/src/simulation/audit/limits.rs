//! Checks the limits of an item: older limits never replace newer ones.
//!
//! The attribute `limits_at` is the time at which an item's limits were read. These times come from
//! the clocks of the readers, and are compared as they are, however wrong a clock is. A write may
//! *follow* a call of its client: apply the limits of that call. The call must be in progress, or
//! its outcome must be unknown. The rules:
//!
//! - a limit gets another rate only by an acquire or a reconfiguration with that rate. Its limits
//!   were read no earlier than `limits_at`, or they are the call's own, or the item has no
//!   `limits_at`;
//! - a limit is removed only by a reconfiguration without it, under the same conditions;
//! - a limit is added by any acquire or reconfiguration that has it, or by a charge on it;
//! - afterwards `limits_at` is that of the last call that was followed, and the item has all limits
//!   of that call. It is absent if those are the call's own.
//!
//! Two exceptions are accepted and counted. A `limits_at` more than [`AHEAD_MAX_MS`] ahead of the
//! call does not count. And within one write, an older call may follow one that removed
//! `limits_at`.

use std::collections::BTreeMap;

use zae_limiter_core::{Applied, Rate, Target};
use zae_limiter_schema::bucket_partition;

use super::super::reading::Reading;
use super::calls::{Call, ClientRecord, Ended, Kind};
use super::excuses::{Excuse, Excuses};

/// How far `limits_at` may be ahead of a call before it counts as wrong.
const AHEAD_MAX_MS: i64 = 10_000;

/// The limits of a bucket in a call.
#[derive(Debug)]
pub(super) struct CallLimits {
    pub(super) bucket: String,
    pub(super) rates: BTreeMap<String, Rate>,
    /// When they were read. `None` if they are the call's own.
    read_ms: Option<i64>,
}

impl CallLimits {
    pub(super) fn of(target: &Target) -> Self {
        let rates = target.limits().iter();
        Self {
            bucket: bucket_partition(target.key(), 0),
            rates: rates.map(|(name, rate)| (name.to_string(), *rate)).collect(),
            read_ms: target.limits_read_at().map(|moment| moment.as_millis()),
        }
    }
}

/// Why a write may follow a call, the best reason first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Reason {
    NotOlder,
    Forgiven(Excuse),
}

/// One write to one shard.
pub(super) struct Following<'a> {
    pub(super) bucket: &'a str,
    /// `None` if the write creates the item.
    pub(super) old: Option<&'a Reading>,
    pub(super) new: &'a Reading,
    /// Whether the item may have started anew.
    pub(super) anew: bool,
    pub(super) record: &'a ClientRecord,
}

impl<'a> Following<'a> {
    pub(super) fn check(&self, excuses: &mut Excuses) -> Result<(), String> {
        let Some(old) = self.old else { return self.check_new() };
        let mut used = Excuses::default();
        match self.check_live(old, &mut used) {
            Err(_) if self.anew => self.check_new(),
            checked => {
                excuses.add(&used);
                checked
            }
        }
    }

    fn check_live(&self, old: &Reading, excuses: &mut Excuses) -> Result<(), String> {
        let mut is_followed = self.new.limits_at != old.limits_at;
        for (limit, cell) in &old.cells {
            let reason = match self.new.cells.get(limit) {
                Some(new) if new.whole == cell.whole => continue,
                Some(new) => self.reason(|_, one| one.rates.get(limit) == Some(&new.whole)),
                None => self.reason(|call, one| {
                    call.kind == Kind::Reconfigure && !one.rates.contains_key(limit)
                }),
            };
            is_followed = true;
            forgive(reason, excuses).ok_or_else(|| {
                format!(
                    "{limit}: its limits were read at {:?}, older ones replace them",
                    old.limits_at
                )
            })?;
        }
        let added = self.new.cells.keys().filter(|limit| !old.cells.contains_key(*limit));
        added.into_iter().try_for_each(|limit| self.check_added(limit))?;
        if !is_followed {
            return Ok(());
        }
        let reason = self.reason(|_, one| self.is_last(one));
        forgive(reason, excuses).ok_or_else(|| {
            format!("limits of {:?} became limits of {:?}", old.limits_at, self.new.limits_at)
        })
    }

    /// A new item, or one that had expired, has the limits of calls of any age. A missing shard
    /// gets those of another shard.
    fn check_new(&self) -> Result<(), String> {
        if self.new.shard > 0 {
            return Ok(());
        }
        let creates = |(call, _): &(&Call, &CallLimits)| {
            matches!(call.kind, Kind::Acquire { .. }) || self.charges(call, None)
        };
        for (limit, cell) in &self.new.cells {
            let mut calls = self.calls().filter(creates);
            if !calls.any(|(_, one)| one.rates.get(limit) == Some(&cell.whole)) {
                return Err(format!("{limit}: created, but no call has {:?}", cell.whole));
            }
        }
        let mut calls = self.calls().filter(creates);
        match calls.any(|(_, one)| one.read_ms == self.new.limits_at) {
            true => Ok(()),
            false => Err(format!("created, but no call read limits at {:?}", self.new.limits_at)),
        }
    }

    fn check_added(&self, limit: &str) -> Result<(), String> {
        let rate = self.new.cells[limit].whole;
        let adds = |(call, one): (&Call, &CallLimits)| {
            (follows(call) || self.charges(call, Some(limit)))
                && one.rates.get(limit) == Some(&rate)
        };
        match self.calls().any(adds) {
            true => Ok(()),
            false => Err(format!("{limit}: added, but no call has {rate:?}")),
        }
    }

    /// Whether a call charges a limit, or any limit.
    fn charges(&self, call: &Call, limit: Option<&str>) -> bool {
        let is_named = |of: &str| limit.is_none_or(|limit| limit == of);
        let mut amounts = call.amounts.iter();
        call.kind == Kind::Settle
            && amounts.any(|((at, of), amount)| at == self.bucket && is_named(of) && *amount > 0)
    }

    /// Whether the write can have followed this call last.
    fn is_last(&self, one: &CallLimits) -> bool {
        let is_there = |(limit, rate): (&String, &Rate)| {
            self.new.cells.get(limit).is_some_and(|cell| cell.whole == *rate)
        };
        one.read_ms == self.new.limits_at && one.rates.iter().all(is_there)
    }

    /// The client's calls on this bucket that may still write, with their limits.
    fn calls(&self) -> impl Iterator<Item = (&'a Call, &'a CallLimits)> {
        let calls = self.record.calls.values().filter(|call| may_write(call));
        let limits = calls.flat_map(|call| call.limits.iter().map(move |one| (call, one)));
        let bucket = self.bucket.to_owned();
        limits.filter(move |(_, one)| one.bucket == bucket)
    }

    /// The best reason to follow one of the calls for which `is_one` holds.
    fn reason(&self, is_one: impl Fn(&Call, &CallLimits) -> bool) -> Option<Reason> {
        let calls = self.calls().filter(|(call, one)| follows(call) && is_one(call, one));
        calls.filter_map(|(call, one)| self.reason_for(call, one)).min()
    }

    fn reason_for(&self, call: &Call, one: &CallLimits) -> Option<Reason> {
        let limits_at = self.old.and_then(|old| old.limits_at);
        let (Some(read_ms), Some(limits_at)) = (one.read_ms, limits_at) else {
            return Some(Reason::NotOlder);
        };
        let is_own = |(call, one): (&Call, &CallLimits)| follows(call) && one.read_ms.is_none();
        match read_ms {
            _ if read_ms >= limits_at => Some(Reason::NotOlder),
            _ if limits_at > call.now.as_millis() + AHEAD_MAX_MS => {
                Some(Reason::Forgiven(Excuse::LimitsAhead))
            }
            _ if self.calls().any(is_own) => Some(Reason::Forgiven(Excuse::LimitsAfterOwn)),
            _ => None,
        }
    }
}

fn forgive(reason: Option<Reason>, excuses: &mut Excuses) -> Option<()> {
    if let Reason::Forgiven(excuse) = reason? {
        excuses.count(excuse);
    }
    Some(())
}

/// Whether a write may follow such a call.
fn follows(call: &Call) -> bool {
    matches!(call.kind, Kind::Acquire { .. } | Kind::Reconfigure)
}

/// Whether a call may still write.
fn may_write(call: &Call) -> bool {
    match call.ended {
        None | Some(Ended::Cancelled | Ended::Failed { applied: Applied::Maybe, .. }) => true,
        Some(Ended::Done | Ended::Refused | Ended::Failed { .. }) => false,
    }
}
