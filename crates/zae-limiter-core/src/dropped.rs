//! What becomes of a lease that is dropped before it was committed or rolled back.

use std::collections::BTreeSet;
use std::panic::Location;
use std::sync::{Arc, Mutex, PoisonError};

use zae_limiter_model::{Millitokens, Take};

use crate::plan::{Leg, LegTaken, Settlement, Takes};

/// What happens to the estimate of a lease that is dropped before it was committed or rolled back. What was
/// settled or flushed is known to be used, and stays taken in either case.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum OnDrop {
    /// It is given back: the work was not done, or nobody knows what it cost.
    #[default]
    GiveBack,
    /// It stays taken, as if the lease had been committed. For work that goes on without its caller.
    Keep,
}

/// The differences to write so that of each limit what is known to be used stays taken, and nothing else.
/// `used` says how much that is, in millitokens; `None` for a limit of which there is only an estimate.
pub(crate) fn give_back_the_rest(
    held: &[(Leg, LegTaken)],
    used: impl Fn(&str) -> Option<i64>,
) -> Vec<Settlement> {
    let mut settlements = Vec::new();
    for (at, (leg, taken)) in held.iter().enumerate() {
        let names = leg.target.limits().names();
        let difference = |take: &Take| {
            let name = names[take.cell].as_str();
            let used = used(name).unwrap_or(0);
            let before = taken_of(&held[..at], leg, name);
            let after = before.saturating_add(take.amount.get());
            // The last one that took from the bucket pays for what was used beyond all that was taken.
            let is_last = !held[at + 1..].iter().any(|(other, _)| takes_from(other, leg, name));
            let keeps = if is_last { used - before } else { used.min(after) - before }.max(0);
            let keeps = if is_last { keeps } else { keeps.min(take.amount.get()) };
            Take { cell: take.cell, amount: Millitokens::new(keeps - take.amount.get()) }
        };
        let differences: Takes = leg
            .takes
            .iter()
            .map(difference)
            .filter(|difference| difference.amount != Millitokens::ZERO)
            .collect();
        if !differences.is_empty() {
            let target = Arc::clone(&leg.target);
            settlements.push(Settlement { target, placement: taken.placement, differences });
        }
    }
    settlements
}

/// What was taken of a limit from the bucket of a leg.
fn taken_of(held: &[(Leg, LegTaken)], leg: &Leg, limit: &str) -> i64 {
    let legs = held.iter().map(|(other, _)| other).filter(|other| takes_from(other, leg, limit));
    let amounts = legs.flat_map(|other| {
        let names = other.target.limits().names();
        let of_limit = move |take: &&Take| names[take.cell].as_str() == limit;
        other.takes.iter().filter(of_limit).map(|take| take.amount.get())
    });
    amounts.fold(0, i64::saturating_add)
}

fn takes_from(other: &Leg, leg: &Leg, limit: &str) -> bool {
    let names = other.target.limits().names();
    other.target.key() == leg.target.key()
        && other.takes.iter().any(|take| names[take.cell].as_str() == limit)
}

/// Warns of a lease of which nobody said what was used, once for each place in the program that acquires.
pub(crate) fn warn_once(site: &'static Location<'static>) {
    static SITES: Mutex<BTreeSet<(&str, u32, u32)>> = Mutex::new(BTreeSet::new());
    let place = (site.file(), site.line(), site.column());
    let is_new = SITES.lock().unwrap_or_else(PoisonError::into_inner).insert(place);
    if is_new {
        tracing::warn!(
            site = %site,
            "a lease was dropped without commit, settle or rollback: its tokens are given back; \
             this is said once for each place that acquires"
        );
    }
}
