//! What clients have asked for and were told, against what they have written.

use std::collections::{BTreeMap, BTreeSet};

use zae_limiter_core::{Applied, BucketKey, Timestamp};

use super::super::intervals::Place;

/// A call that changes buckets, by what it asks of them: positive takes, negative gives back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Acquire { legs: usize },
    Settle,
    Reconfigure,
}

/// What a call was told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    /// Everything was taken, or settled.
    Done,
    Refused,
    Failed(Applied),
    /// Nobody waited for the answer.
    Cancelled,
}

/// What is asked of one limit.
#[derive(Clone, Debug)]
pub(crate) struct Part {
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
    /// The ceilings under which it was made.
    pub(super) ceilings: BTreeMap<Place, i64>,
    pub(super) parts: Vec<(Place, i64)>,
    pub(super) ended: Option<Ended>,
    /// What it was to settle with may have gone away.
    pub(super) may_pass_over: bool,
}

#[derive(Debug, Default)]
pub(super) struct ClientBook {
    pub(super) in_flight: usize,
    /// A call to the table failed since the client last had nothing under way.
    pub(super) faulted: bool,
    pub(super) crashed: bool,
    pub(super) calls: BTreeMap<u64, Call>,
    /// Net taken by its writes since then.
    pub(super) net: BTreeMap<Place, i128>,
}

impl Call {
    /// What it has done, as far as can be said.
    fn outcome(&self, book: &ClientBook) -> Outcome {
        let chain = matches!(self.kind, Kind::Acquire { legs } if legs > 1);
        match (self.kind, self.ended) {
            _ if book.crashed => Outcome::Unknown,
            (_, None) => Outcome::Unknown,
            (Kind::Settle, Some(Ended::Done)) if self.may_pass_over => Outcome::Unknown,
            (_, Some(Ended::Done)) => Outcome::Whole,
            (Kind::Settle, Some(Ended::Cancelled)) => match book.faulted || self.may_pass_over {
                true => Outcome::Unknown,
                false => Outcome::Whole,
            },
            (_, Some(Ended::Failed(Applied::Maybe))) => Outcome::Unknown,
            // What was taken could not be given back: it is lost, on the safe side.
            (Kind::Acquire { .. }, Some(Ended::Refused))
                if chain && (book.faulted || self.may_pass_over) =>
            {
                Outcome::Unknown
            }
            (Kind::Acquire { .. }, Some(Ended::Failed(_))) if chain && self.may_pass_over => {
                Outcome::Unknown
            }
            (Kind::Acquire { .. }, Some(Ended::Cancelled))
                if book.faulted || self.may_pass_over =>
            {
                Outcome::Unknown
            }
            _ => Outcome::Nothing,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    Whole,
    Nothing,
    Unknown,
}

impl ClientBook {
    /// Whether what was written is what was told.
    pub(super) fn balance(&self, divided: &BTreeSet<String>) -> Result<(), String> {
        let mut places: BTreeSet<&Place> = self.net.keys().collect();
        places.extend(self.calls.values().flat_map(|call| call.parts.iter().map(|(at, _)| at)));
        for place in places {
            let written = self.net.get(place).copied().unwrap_or(0);
            let (mut told, mut unknown) = (0_i128, Vec::new());
            for call in self.calls.values() {
                let amounts = call.parts.iter().filter(|(at, _)| at == place);
                for amount in amounts.map(|(_, amount)| i128::from(*amount)) {
                    match call.outcome(self) {
                        Outcome::Whole => told += amount,
                        Outcome::Nothing => {}
                        Outcome::Unknown => unknown.push(amount),
                    }
                }
            }
            let rest = written - told;
            // What is given back to several parts may reach some of them.
            let is_explained = match divided.contains(&place.0) {
                true => is_within(rest, &unknown),
                false => is_sum_of_some(rest, &unknown),
            };
            if !is_explained {
                return Err(format!(
                    "{} {}: its writes took {written} net, its calls were told {told} and perhaps \
                     some of {unknown:?} (faulted: {}, crashed: {})\n{:#?}",
                    place.0, place.1, self.faulted, self.crashed, self.calls
                ));
            }
        }
        Ok(())
    }

    /// What its calls under way, and those just ended, may give back to, or charge, a limit.
    fn may(&self, place: &Place, wanted: impl Fn(&Call, i64) -> i64) -> i128 {
        let parts = self.calls.values().flat_map(|call| {
            call.parts.iter().filter(|(at, _)| at == place).map(move |(_, amount)| (call, *amount))
        });
        parts.map(|(call, amount)| i128::from(wanted(call, amount))).sum()
    }

    pub(super) fn may_credit(&self, place: &Place) -> i128 {
        self.may(place, |call, amount| match (call.kind, call.ended) {
            (Kind::Settle, _) => (-amount).max(0),
            // What one leg has taken is given back when another refuses, or nobody waits.
            (Kind::Acquire { legs: 1 }, Some(Ended::Done | Ended::Refused)) => 0,
            _ => amount.max(0),
        })
    }

    pub(super) fn may_charge(&self, place: &Place) -> i128 {
        self.may(place, |call, amount| if call.kind == Kind::Settle { amount.max(0) } else { 0 })
    }

    pub(super) fn lowest_ceiling(&self, place: &Place) -> Option<i64> {
        self.calls.values().filter_map(|call| call.ceilings.get(place)).copied().min()
    }

    /// The earliest moment that a write to this bucket may carry.
    pub(super) fn oldest_ms(&self, pk: &str) -> Option<i64> {
        let calls = self.calls.values().filter(|call| call.buckets.contains(pk));
        calls.map(|call| call.now.as_millis()).min()
    }
}

/// Whether some of the amounts, or none, or all, add up to the sum.
fn is_sum_of_some(sum: i128, amounts: &[i128]) -> bool {
    /// With more sums than this only the bounds are looked at.
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

/// Whether parts of the amounts can add up to the sum.
fn is_within(sum: i128, amounts: &[i128]) -> bool {
    let least: i128 = amounts.iter().filter(|amount| **amount < 0).sum();
    let most: i128 = amounts.iter().filter(|amount| **amount > 0).sum();
    (least..=most).contains(&sum)
}
