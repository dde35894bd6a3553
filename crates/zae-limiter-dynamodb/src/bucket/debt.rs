//! Debt of a bucket with several shards. A charge that is too large for one shard is spread over all of them, and
//! so is a refund while shards owe tokens: no shard keeps admitting while the bucket as a whole owes.

use zae_limiter_core::{
    Applied, Millitokens, Placement, Settlement, StoreError, Take, Takes, Timestamp,
};
use zae_limiter_schema::bucket::BucketItem;
use zae_limiter_schema::{BucketItemKey, Change, Transacted};

use super::decide::{Request, Snapshot, decide_batch};
use super::flow::{Note, Port};
use super::message::{Caller, Queued, Reply};
use super::reshard::{read_all, restore};
use super::shards::{self, Shards};
use crate::error::CallError;

/// How often spreading a charge is tried while other processes write. After that its own shard bears it.
const SPREADS_MAX: u32 = 16;

/// Charges all shards of a bucket, or else the shards of the settlements. All have the same limits.
pub(crate) async fn charge_all_shards<C: Caller>(
    port: &Port<C>,
    batch: Vec<(Queued<C>, Settlement)>,
) {
    let Some(sum) = sum_of(batch.iter().map(|(_, charges)| charges)) else { return };
    let done = spread(port, &sum).await;
    for (mut queued, charges) in batch {
        match done.clone().map_err(StoreError::from) {
            Ok(true) => port.note(Note::Reply(queued, Ok(Reply::Settled))),
            Err(error) if error.applied() == Applied::Maybe => {
                port.note(Note::Reply(queued, Err(error)));
            }
            // Nothing was written. Its own shard bears it, or replies with an error.
            Ok(false) | Err(_) => {
                queued.request = Request::SettleRest(charges);
                port.note(Note::Dispatch(queued));
            }
        }
    }
}

/// The sum of all charges, by limit.
fn sum_of<'a>(mut charges: impl Iterator<Item = &'a Settlement>) -> Option<Settlement> {
    let mut sum = charges.next()?.clone();
    for charge in charges.flat_map(|one| &one.differences) {
        match sum.differences.iter_mut().find(|one| one.cell == charge.cell) {
            Some(one) => one.amount = one.amount.saturating_add(charge.amount),
            None => sum.differences.push(*charge),
        }
    }
    Some(sum)
}

/// Spreads charges, or refunds, in one transaction. False if that is not possible now; nothing was written then.
pub(crate) async fn spread<C>(port: &Port<C>, charges: &Settlement) -> Result<bool, CallError> {
    for _ in 0..SPREADS_MAX {
        let all = read_all(port).await?;
        if all.iter().next().is_none() {
            return Ok(false);
        }
        if !all.is_complete() {
            for shard in all.missing(all.count()) {
                restore(port, shard).await?;
            }
            continue;
        }
        let Some((changes, left)) = changes(charges, &all, port.now()) else { return Ok(false) };
        match port.transact(&changes).await {
            Ok(Transacted::Done(_)) => {
                left.into_iter().for_each(|item| port.note(Note::Left(Box::new(item))));
                return Ok(true);
            }
            Ok(Transacted::Unmet(..)) => {}
            Err(error) if error.is_transient() => {}
            Err(error) => return Err(error),
        }
    }
    Ok(false)
}

/// The writes to all charged shards, and these shards afterwards; `None` if there are none, or if one of the writes
/// is not possible.
fn changes(
    charges: &Settlement,
    all: &Shards,
    now: Timestamp,
) -> Option<(Vec<Change>, Vec<BucketItem>)> {
    let items: Vec<&BucketItem> = all.iter().map(|(_, item)| item).collect();
    let mut by_shard: Vec<Takes> = vec![Takes::new(); items.len()];
    for charge in &charges.differences {
        let (limit, amount) = (charge.cell, charge.amount.get());
        let name = charges.target.limits().names()[limit].as_str();
        // Only a shard that has the limit can take a refund of it.
        let shards: Vec<usize> = (0..items.len())
            .filter(|at| amount > 0 || items[*at].bucket.limits().position(name).is_some())
            .collect();
        let held = |at: &usize| held_of(items[*at], charges, limit, now);
        let held: Vec<(i64, i64)> = shards.iter().map(held).collect();
        let portions = if amount < 0 { refunds(&held, amount) } else { portions(&held, amount) };
        for (at, amount) in shards.into_iter().zip(portions) {
            if amount != 0 {
                by_shard[at].push(Take { cell: limit, amount: Millitokens::new(amount) });
            }
        }
    }
    let charged = items.into_iter().zip(by_shard).filter(|(_, takes)| !takes.is_empty());
    let change = |(item, differences): (&BucketItem, Takes)| {
        let key = BucketItemKey { bucket: charges.target.key().clone(), shard: item.shard };
        let mut bucket = item.bucket.clone();
        bucket.refill(now);
        let left = shards::charged(item, bucket, &charges.target, &differences);
        let settlement =
            Settlement { placement: Placement::new(item.shard), differences, ..charges.clone() };
        let request = Request::SettleRest(settlement);
        let decision = decide_batch(&key, &Snapshot::of(item.clone()), &[&request], now);
        Some((Change::Update(decision.update?), left))
    };
    let (changes, left): (Vec<_>, Vec<_>) =
        charged.map(change).collect::<Option<Vec<_>>>()?.into_iter().unzip();
    (!changes.is_empty()).then_some((changes, left))
}

/// A shard's balance of a limit, and its ceiling. A missing limit counts as full.
fn held_of(item: &BucketItem, charges: &Settlement, limit: usize, now: Timestamp) -> (i64, i64) {
    let limits = charges.target.limits();
    let mut bucket = item.bucket.clone();
    bucket.refill(now);
    match bucket.cell(limits.names()[limit].as_str()) {
        Some((cell, rate)) => (cell.tokens.get(), rate.capacity().get()),
        None => {
            let full = item.share_of(limits).rates()[limit].capacity().get();
            (full, full)
        }
    }
}

/// Splits a charge so that shards end at the same fraction of their ceilings, except those that have less
/// already. `held` is the balance and ceiling of each. The portions add up to the charge.
fn portions(held: &[(i64, i64)], charge: i64) -> Vec<i64> {
    let whole: i128 = held.iter().map(|(_, ceiling)| i128::from(*ceiling)).sum();
    let wide = |(tokens, ceiling): &(i64, i64)| (i128::from(*tokens), i128::from(*ceiling));
    // What each shard pays so that its balance is at most its fraction of `level`, the bucket's balance.
    let paid = |level: i128| {
        let pay = move |(tokens, ceiling): (i128, i128)| {
            (tokens - (level * ceiling).div_euclid(whole.max(1))).max(0)
        };
        held.iter().map(wide).map(pay)
    };
    let charge = i128::from(charge);
    let spread: i128 = held.iter().map(|(tokens, _)| i128::from(*tokens).abs()).sum();
    // The lowest level at which together they pay at most the charge.
    let (mut low, mut high) = (-(spread + charge), (spread + 1) * whole.max(1));
    while low < high {
        let middle = low + (high - low).div_euclid(2);
        match paid(middle).sum::<i128>() <= charge {
            true => high = middle,
            false => low = middle + 1,
        }
    }
    let mut paid: Vec<i128> = paid(low).collect();
    // Rounding leaves less than a millitoken for each shard.
    let mut rest = charge - paid.iter().sum::<i128>();
    let len = i128::try_from(paid.len().max(1)).unwrap_or(1);
    for portion in &mut paid {
        let more = (rest + len - 1).div_euclid(len).min(rest);
        *portion += more;
        rest -= more;
    }
    paid.into_iter().map(|portion| i64::try_from(portion).unwrap_or(i64::MAX)).collect()
}

/// Splits a refund so that shards end at the same fraction of their ceilings, except those that have more
/// already. The portions are negative and add up to the refund. The first one includes what a full bucket
/// cannot hold.
fn refunds(held: &[(i64, i64)], refund: i64) -> Vec<i64> {
    let whole: i128 = held.iter().map(|(_, ceiling)| i128::from(*ceiling)).sum();
    let gains = |level: i128| {
        held.iter().map(move |(tokens, ceiling)| {
            let full = (level * i128::from(*ceiling)).div_euclid(whole.max(1));
            (full - i128::from(*tokens)).max(0)
        })
    };
    let refund = -i128::from(refund);
    // The highest level, up to full, at which together they gain at most the refund.
    let lowest: i128 = held.iter().map(|(tokens, _)| i128::from(*tokens).min(0)).sum();
    let (mut low, mut high) = (lowest * whole.max(1) - 1, whole);
    while low < high {
        let middle = high - (high - low).div_euclid(2);
        match gains(middle).sum::<i128>() <= refund {
            true => low = middle,
            false => high = middle - 1,
        }
    }
    let mut gains: Vec<i128> = gains(low).collect();
    let mut rest = refund - gains.iter().sum::<i128>();
    for (gain, (tokens, ceiling)) in gains.iter_mut().zip(held) {
        // Rounding leaves one millitoken for some shards.
        if rest > 0 && i128::from(*tokens) + *gain < i128::from(*ceiling) {
            *gain += 1;
            rest -= 1;
        }
    }
    if let Some(first) = gains.first_mut() {
        *first += rest;
    }
    gains.into_iter().map(|gain| i64::try_from(-gain).unwrap_or(i64::MIN)).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{portions, refunds};

    #[test]
    fn a_charge_leaves_all_shards_at_the_same_fraction_of_their_ceilings() {
        let check = |held: &[(i64, i64)], charge, left: &[i64]| {
            let paid = portions(held, charge);
            let after: Vec<i64> = held.iter().zip(paid).map(|(one, paid)| one.0 - paid).collect();
            assert_eq!(after, left, "{held:?} less {charge}");
        };
        check(&[(250, 250), (250, 250), (250, 250), (250, 250)], 400, &[150, 150, 150, 150]);
        // The shard with the higher balance pays first.
        check(&[(0, 250), (200, 250)], 100, &[0, 100]);
        check(&[(0, 250), (200, 250)], 300, &[-50, -50]);
        // A shard that owes more already pays nothing.
        check(&[(-900, 250), (100, 250)], 300, &[-900, -200]);
        check(&[(0, 100), (0, 300)], 400, &[-100, -300]);
        check(&[(0, 250), (0, 250)], 1, &[-1, 0]);
    }

    #[test]
    fn a_refund_repays_the_deepest_debts_first() {
        let check = |held: &[(i64, i64)], refund, left: &[i64]| {
            let gained = refunds(held, refund);
            let after: Vec<i64> = held.iter().zip(gained).map(|(one, paid)| one.0 - paid).collect();
            assert_eq!(after, left, "{held:?} and {refund}");
        };
        check(&[(-25, 250); 4], -60, &[-10, -10, -10, -10]);
        check(&[(-100, 250), (10, 250)], -60, &[-40, 10]);
        check(&[(-100, 250), (-50, 250)], -100, &[-25, -25]);
        check(&[(-100, 250), (-50, 250)], -200, &[25, 25]);
        check(&[(-10, 250), (0, 250)], -11, &[1, 0]);
        // More than a full bucket holds: the write cuts it at the ceiling.
        check(&[(-10, 250), (250, 250)], -300, &[290, 250]);
    }

    proptest! {
        #[test]
        fn refunds_are_never_positive_and_add_up(
            held in proptest::collection::vec((-1_000_000_i64..1_000_000, 1_i64..1_000_000), 1..65),
            refund in 1_i64..=i64::MAX / 4,
        ) {
            let gained = refunds(&held, -refund);
            prop_assert!(gained.iter().all(|portion| *portion <= 0));
            prop_assert_eq!(gained.iter().map(|one| -i128::from(*one)).sum::<i128>(), i128::from(refund));
        }

        #[test]
        fn portions_are_never_negative_and_add_up_to_the_charge(
            held in proptest::collection::vec((-1_000_000_i64..1_000_000, 1_i64..1_000_000), 1..65),
            charge in 1_i64..=i64::MAX / 4,
        ) {
            let paid = portions(&held, charge);
            prop_assert!(paid.iter().all(|portion| *portion >= 0));
            prop_assert_eq!(paid.iter().map(|one| i128::from(*one)).sum::<i128>(), i128::from(charge));
        }
    }
}
