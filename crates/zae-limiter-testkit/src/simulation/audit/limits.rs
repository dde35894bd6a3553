//! Whose limits an item has. Older ones never replace newer ones.
//!
//! An item says at which moment its limits were read, `limits_at`. Moments are of the clocks of
//! whoever read them, and are compared as they are: however wrong a clock is, the rule holds of what
//! it showed. A write may follow a call of its client that has not ended, or of which nobody knows
//! whether it was carried out. What holds:
//!
//! - a limit gets another rate only by an acquire or a reconfiguration under that rate. It was read no
//!   earlier than `limits_at`, or brings limits of its own, or the item has no such moment;
//! - a limit goes away only by a reconfiguration without it, of which the same holds;
//! - a limit is added by any acquire or reconfiguration that has it, and by whoever charges it;
//! - afterwards `limits_at` is the moment of the last call that was followed, and the item has all
//!   limits of that one. It is absent if that one brought its own.
//!
//! Two things are forgiven, and counted. A moment that lies more than [`AHEAD_MAX_MS`] ahead of the
//! call says nothing. And in one write an older call may follow one that took the moment away.

use std::collections::BTreeMap;

use zae_limiter_core::{Applied, Rate, Target};
use zae_limiter_schema::bucket_partition;

use super::super::reading::Reading;
use super::calls::{Call, ClientRecord, Ended, Kind};
use super::excuses::{Excuse, Excuses};

/// By how much a moment may be ahead of a call before it is taken for wrong.
const AHEAD_MAX_MS: i64 = 10_000;

/// The limits of a bucket that a call goes by.
#[derive(Debug)]
pub(super) struct Brought {
    pub(super) bucket: String,
    pub(super) rates: BTreeMap<String, Rate>,
    /// When they were read; absent if they are the call's own.
    read_ms: Option<i64>,
}

impl Brought {
    pub(super) fn by(target: &Target) -> Self {
        let rates = target.limits().iter();
        Self {
            bucket: bucket_partition(target.key(), 0),
            rates: rates.map(|(name, rate)| (name.to_string(), *rate)).collect(),
            read_ms: target.limits_read_at().map(|moment| moment.as_millis()),
        }
    }
}

/// Why a call may be followed, the best reason first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Reason {
    NotOlder,
    Forgiven(Excuse),
}

/// One write to one shard.
pub(super) struct Following<'a> {
    pub(super) bucket: &'a str,
    /// Absent if the write makes the item.
    pub(super) old: Option<&'a Reading>,
    pub(super) new: &'a Reading,
    /// It may have started anew.
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

    /// An item that was not there, or had expired, has the limits of calls, of whatever age. A shard that
    /// was missing has those of another shard.
    fn check_new(&self) -> Result<(), String> {
        if self.new.shard > 0 {
            return Ok(());
        }
        let makes = |(call, _): &(&Call, &Brought)| {
            matches!(call.kind, Kind::Acquire { .. }) || self.charges(call, None)
        };
        for (limit, cell) in &self.new.cells {
            let mut calls = self.calls().filter(makes);
            if !calls.any(|(_, one)| one.rates.get(limit) == Some(&cell.whole)) {
                return Err(format!("{limit}: made, and no call has brought {:?}", cell.whole));
            }
        }
        let mut calls = self.calls().filter(makes);
        match calls.any(|(_, one)| one.read_ms == self.new.limits_at) {
            true => Ok(()),
            false => Err(format!("made, and no call has read limits at {:?}", self.new.limits_at)),
        }
    }

    fn check_added(&self, limit: &str) -> Result<(), String> {
        let rate = self.new.cells[limit].whole;
        let adds = |(call, one): (&Call, &Brought)| {
            (follows(call) || self.charges(call, Some(limit)))
                && one.rates.get(limit) == Some(&rate)
        };
        match self.calls().any(adds) {
            true => Ok(()),
            false => Err(format!("{limit}: added, and no call has brought {rate:?}")),
        }
    }

    /// Whether a call settles for more than was taken, of one limit or of any.
    fn charges(&self, call: &Call, limit: Option<&str>) -> bool {
        let is_named = |of: &str| limit.is_none_or(|limit| limit == of);
        let mut amounts = call.amounts.iter();
        call.kind == Kind::Settle
            && amounts.any(|((at, of), amount)| at == self.bucket && is_named(of) && *amount > 0)
    }

    /// Whether the item can be what a call has left that was followed last.
    fn is_last(&self, one: &Brought) -> bool {
        let is_there = |(limit, rate): (&String, &Rate)| {
            self.new.cells.get(limit).is_some_and(|cell| cell.whole == *rate)
        };
        one.read_ms == self.new.limits_at && one.rates.iter().all(is_there)
    }

    /// The client's calls on this bucket that may still write, with their limits.
    fn calls(&self) -> impl Iterator<Item = (&'a Call, &'a Brought)> {
        let calls = self.record.calls.values().filter(|call| may_write(call));
        let brought = calls.flat_map(|call| call.brought.iter().map(move |one| (call, one)));
        let bucket = self.bucket.to_owned();
        brought.filter(move |(_, one)| one.bucket == bucket)
    }

    /// The best reason to follow one of the calls of which that is true.
    fn reason(&self, is_one: impl Fn(&Call, &Brought) -> bool) -> Option<Reason> {
        let calls = self.calls().filter(|(call, one)| follows(call) && is_one(call, one));
        calls.filter_map(|(call, one)| self.reason_for(call, one)).min()
    }

    fn reason_for(&self, call: &Call, one: &Brought) -> Option<Reason> {
        let limits_at = self.old.and_then(|old| old.limits_at);
        let (Some(read_ms), Some(limits_at)) = (one.read_ms, limits_at) else {
            return Some(Reason::NotOlder);
        };
        let is_own = |(call, one): (&Call, &Brought)| follows(call) && one.read_ms.is_none();
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

/// Whether items take on limits for such a call.
fn follows(call: &Call) -> bool {
    matches!(call.kind, Kind::Acquire { .. } | Kind::Reconfigure)
}

/// Whether something of a call may be under way.
fn may_write(call: &Call) -> bool {
    match call.ended {
        None | Some(Ended::Cancelled | Ended::Failed { applied: Applied::Maybe, .. }) => true,
        Some(Ended::Done | Ended::Refused | Ended::Failed { .. }) => false,
    }
}
