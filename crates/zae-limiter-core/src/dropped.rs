//! Leases that are dropped before they were committed or rolled back.

use std::collections::BTreeSet;
use std::panic::Location;
use std::sync::{Arc, Mutex, PoisonError};

use zae_limiter_model::{Millitokens, Take};

use crate::plan::{Leg, LegTaken, Settlement, Takes};

/// What happens to the estimate of a lease that is dropped before it was committed or rolled back. Settled and
/// flushed amounts are known to be used, and stay taken in either case.
///
/// ```
/// # use zae_limiter_core::{Limit, MemoryStore, OnDrop, RateLimiter};
/// # tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(async {
/// # let limiter = RateLimiter::builder(MemoryStore::new())
/// #     .default_limits([Limit::per_day("rpd", 100)]).open().await?;
/// let lease = limiter.acquire("key-1", "gpt-4").take("rpd", 1).on_drop(OnDrop::Keep).await?;
/// drop(lease); // the job goes on without its caller
/// assert_eq!(limiter.available("key-1", "gpt-4", &[]).await?[0].available.whole_tokens(), 99);
/// # Ok::<(), zae_limiter_core::Error>(())
/// # }).unwrap();
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum OnDrop {
    /// It is refunded: the work was not done, or its cost is unknown.
    #[default]
    GiveBack,
    /// It stays taken, as if the lease had been committed. For work that continues without its caller.
    Keep,
}

/// The settlements that refund everything that is not known to be used. `used` returns the used millitokens of
/// a limit; `None` if there is only an estimate.
pub(crate) fn refund_unused(
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
            // The last leg of the bucket is charged for usage above everything that was taken.
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

/// The amount of a limit that was taken from the bucket of a leg.
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

/// Warns about a lease that was dropped without a settled amount, once for each call site.
pub(crate) fn warn_once(site: &'static Location<'static>) {
    static SITES: Mutex<BTreeSet<(&str, u32, u32)>> = Mutex::new(BTreeSet::new());
    let place = (site.file(), site.line(), site.column());
    let is_new = SITES.lock().unwrap_or_else(PoisonError::into_inner).insert(place);
    if is_new {
        tracing::warn!(
            site = %site,
            "a lease was dropped without commit, settle or rollback; its tokens are refunded \
             (logged once per call site)"
        );
    }
}
