//! Compares what clients have written with the replies to their calls.

use std::collections::{BTreeMap, BTreeSet};

use zae_limiter_core::{Applied, BucketKey, StoreError, Timestamp};

use super::super::intervals::Place;
use super::excuses::{Excuse, Excuses};
use super::limits::CallLimits;

/// The kind of a call that changes buckets. Positive amounts take, negative ones refund.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Acquire {
        legs: usize,
    },
    Settle,
    Reconfigure,
    /// A split or a merge.
    Reshard,
    Delete,
}

/// How a call ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    /// Everything was taken, or settled.
    Done,
    Refused,
    Failed {
        applied: Applied,
        is_outage: bool,
    },
    /// The caller did not wait for the reply.
    Cancelled,
}

impl Ended {
    pub(crate) fn failed(error: &StoreError) -> Self {
        Self::Failed { applied: error.applied(), is_outage: error.is_outage() }
    }
}

/// The amount of a call for one limit, in millitokens.
#[derive(Clone, Debug)]
pub(crate) struct CallAmount {
    pub(crate) bucket: BucketKey,
    pub(crate) limit: String,
    pub(crate) amount: i64,
}

#[derive(Debug)]
pub(super) struct Call {
    pub(super) kind: Kind,
    pub(super) now: Timestamp,
    pub(super) began_us: u64,
    pub(super) buckets: BTreeSet<String>,
    /// The limits of its buckets.
    pub(super) limits: Vec<CallLimits>,
    pub(super) amounts: Vec<(Place, i64)>,
    pub(super) ended: Option<Ended>,
    /// How many table calls of the client were unanswered when it began.
    pub(super) unanswered: u64,
    /// Limits that may have been removed, so that refunds to them are ignored.
    pub(super) may_vanish: BTreeSet<Place>,
}

#[derive(Debug, Default)]
pub(super) struct ClientRecord {
    pub(super) in_flight: usize,
    /// A table call has failed since the client last had no calls in progress.
    pub(super) faulted: bool,
    pub(super) crashed: bool,
    /// The number of all unanswered table calls.
    pub(super) unanswered: u64,
    pub(super) calls: BTreeMap<u64, Call>,
    /// Net consumption by its writes since the client last had no calls in progress.
    pub(super) net: BTreeMap<Place, i128>,
}

impl Call {
    /// The ceiling of a limit under which it was made.
    fn ceiling(&self, place: &Place) -> Option<i64> {
        let limits = self.limits.iter().find(|one| one.bucket == place.0)?;
        limits.rates.get(&place.1).map(|rate| rate.capacity().get())
    }

    /// The call's effect on one limit, as far as it is known. A charge always counts. A refund, by
    /// a settlement or by an acquire that takes nothing, is ignored if the limit no longer exists.
    fn outcome(&self, record: &ClientRecord, place: &Place, amount: i64) -> Outcome {
        let chain = matches!(self.kind, Kind::Acquire { legs } if legs > 1);
        let vanished = self.may_vanish.contains(place);
        match (self.kind, self.ended) {
            _ if amount == 0 => Outcome::Nothing,
            _ if record.crashed => Outcome::Unknown(Excuse::Crashed),
            (_, None) => Outcome::Unknown(Excuse::Unended),
            (_, Some(Ended::Failed { applied: Applied::Maybe, .. })) => {
                Outcome::Unknown(Excuse::MaybeApplied)
            }
            (Kind::Settle, Some(Ended::Cancelled)) if record.faulted => {
                Outcome::Unknown(Excuse::CancelledAndFaulted)
            }
            (Kind::Settle, Some(Ended::Done | Ended::Cancelled)) if vanished && amount < 0 => {
                Outcome::Unknown(Excuse::RefundPassedOver)
            }
            (Kind::Settle, Some(Ended::Cancelled)) | (_, Some(Ended::Done)) => Outcome::Whole,
            // The refund may have failed: then the tokens are lost, on the safe side.
            (Kind::Acquire { .. }, Some(Ended::Cancelled)) if record.faulted => {
                Outcome::Unknown(Excuse::CancelledAndFaulted)
            }
            (Kind::Acquire { .. }, Some(Ended::Refused)) if chain && record.faulted => {
                Outcome::Unknown(Excuse::RefusedAndFaulted)
            }
            (Kind::Acquire { .. }, Some(Ended::Cancelled)) if vanished => {
                Outcome::Unknown(Excuse::TakePassedOver)
            }
            (Kind::Acquire { .. }, Some(Ended::Refused | Ended::Failed { .. }))
                if chain && vanished =>
            {
                Outcome::Unknown(Excuse::TakePassedOver)
            }
            _ => Outcome::Nothing,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    Whole,
    Nothing,
    Unknown(Excuse),
}

impl ClientRecord {
    /// Checks that the writes took what the replies say. Adds buckets to `unsure` if that is
    /// unknown.
    pub(super) fn balance(
        &self,
        sharded: &BTreeSet<String>,
        unsure: &mut BTreeSet<String>,
        excuses: &mut Excuses,
    ) -> Result<(), String> {
        let mut places: BTreeSet<&Place> = self.net.keys().collect();
        places.extend(self.calls.values().flat_map(|call| call.amounts.iter().map(|(at, _)| at)));
        for place in places {
            let written = self.net.get(place).copied().unwrap_or(0);
            let (mut replied, mut unknown, mut used) = (0_i128, Vec::new(), Vec::new());
            for call in self.calls.values() {
                let amounts = call.amounts.iter().filter(|(at, _)| at == place);
                for amount in amounts.map(|(_, amount)| *amount) {
                    match call.outcome(self, place, amount) {
                        Outcome::Whole => replied += i128::from(amount),
                        Outcome::Nothing => {}
                        Outcome::Unknown(excuse) => {
                            used.push(excuse);
                            unknown.push(i128::from(amount));
                        }
                    }
                }
            }
            if !unknown.is_empty() {
                unsure.insert(place.0.clone());
            }
            let rest = written - replied;
            if rest != 0 {
                used.into_iter().for_each(|excuse| excuses.count(excuse));
            }
            let mut is_explained = is_sum_of_some(rest, &unknown);
            // A refund to several shards may reach only some of them.
            if !is_explained && sharded.contains(&place.0) && is_within(rest, &unknown) {
                excuses.count(Excuse::WithinBounds);
                is_explained = true;
            }
            if !is_explained {
                return Err(format!(
                    "{} {}: its writes took {written} net, its replies say {replied} and perhaps \
                     some of {unknown:?} (faulted: {}, crashed: {})\n{:#?}",
                    place.0, place.1, self.faulted, self.crashed, self.calls
                ));
            }
        }
        Ok(())
    }

    /// The sum of the amounts that its calls, in progress or just ended, may apply to a limit.
    fn may(&self, place: &Place, wanted: impl Fn(&Call, i64) -> i64) -> i128 {
        let amounts = self.calls.values().flat_map(|call| {
            call.amounts
                .iter()
                .filter(|(at, _)| at == place)
                .map(move |(_, amount)| (call, *amount))
        });
        amounts.map(|(call, amount)| i128::from(wanted(call, amount))).sum()
    }

    pub(super) fn may_credit(&self, place: &Place) -> i128 {
        self.may(place, |call, amount| match (call.kind, call.ended) {
            (Kind::Settle, _) => (-amount).max(0),
            // A leg is refunded if another one is refused, or if the caller leaves.
            (Kind::Acquire { legs: 1 }, Some(Ended::Done | Ended::Refused)) => 0,
            _ => amount.max(0),
        })
    }

    pub(super) fn may_charge(&self, place: &Place) -> i128 {
        self.may(place, |call, amount| if call.kind == Kind::Settle { amount.max(0) } else { 0 })
    }

    pub(super) fn lowest_ceiling(&self, place: &Place) -> Option<i64> {
        self.calls.values().filter_map(|call| call.ceiling(place)).min()
    }

    pub(super) fn highest_ceiling(&self, place: &Place) -> Option<i64> {
        self.calls.values().filter_map(|call| call.ceiling(place)).max()
    }

    /// What its calls may take or charge under ceilings for which `is_one` holds.
    pub(super) fn may_take_under(&self, place: &Place, is_one: impl Fn(i64) -> bool) -> i128 {
        self.may(place, |call, amount| match call.ceiling(place).is_some_and(&is_one) {
            true => amount.max(0),
            false => 0,
        })
    }

    /// Whether one of its calls deletes this bucket.
    pub(super) fn may_delete(&self, pk: &str) -> bool {
        self.calls.values().any(|call| call.kind == Kind::Delete && call.buckets.contains(pk))
    }

    /// The earliest time of a call that may write to this bucket.
    pub(super) fn oldest_ms(&self, pk: &str) -> Option<i64> {
        let calls = self.calls.values().filter(|call| call.buckets.contains(pk));
        calls.map(|call| call.now.as_millis()).min()
    }
}

/// Whether a subset of the amounts adds up to the sum.
fn is_sum_of_some(sum: i128, amounts: &[i128]) -> bool {
    /// With more sums than this, only the bounds are checked.
    const SUMS_MAX: usize = 1 << 16;
    let mut sums = BTreeSet::from([0_i128]);
    for amount in amounts {
        let more: Vec<i128> = sums.iter().map(|sum| sum + amount).collect();
        sums.extend(more);
        if sums.len() > SUMS_MAX {
            return is_within(sum, amounts);
        }
    }
    sums.contains(&sum)
}

/// Whether portions of the amounts can add up to the sum.
fn is_within(sum: i128, amounts: &[i128]) -> bool {
    let least: i128 = amounts.iter().filter(|amount| **amount < 0).sum();
    let most: i128 = amounts.iter().filter(|amount| **amount > 0).sum();
    (least..=most).contains(&sum)
}
