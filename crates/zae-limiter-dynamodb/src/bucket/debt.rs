//! Debt of a bucket in several shards. A charge that one shard cannot bear is spread over all of them, so that
//! none of them goes on admitting while the bucket as a whole owes tokens.

use zae_limiter_core::{Applied, Millitokens, Settlement, StoreError, Take, Takes, Timestamp};
use zae_limiter_schema::bucket::BucketItem;
use zae_limiter_schema::{BucketItemKey, Change, Transacted};

use super::decide::{Request, Snapshot, decide_batch};
use super::flow::{Note, Port};
use super::message::{Caller, Reply, Waiting};
use super::reshard::read_all;
use super::shards::Shards;
use crate::error::CallError;

/// How often a charge is spread again because others wrote meanwhile. After that it stays with its shard.
const SPREADS_MAX: u32 = 8;

/// Charges all shards of a bucket, or else the one that the settlement names.
pub(crate) async fn charge_all_shards<C: Caller>(
    port: &Port<C>,
    mut waiting: Waiting<C>,
    charges: Settlement,
) {
    match spread(port, &charges).await.map_err(StoreError::from) {
        Ok(true) => port.note(Note::Reply(waiting, Ok(Reply::Settled))),
        Err(error) if error.applied() == Applied::Maybe => {
            port.note(Note::Reply(waiting, Err(error)));
        }
        // Nothing was written. Its own shard bears it, or tells why not.
        Ok(false) | Err(_) => {
            waiting.request = Request::SettleRest(charges);
            port.note(Note::Dispatch(waiting));
        }
    }
}

/// Spreads a charge in one transaction; false when that cannot be done now, and nothing was.
async fn spread<C>(port: &Port<C>, charges: &Settlement) -> Result<bool, CallError> {
    for _ in 0..SPREADS_MAX {
        let all = read_all(port).await?;
        let Some(changes) = changes(charges, &all, port.now) else { return Ok(false) };
        match port.transact(&changes).await {
            Ok(Transacted::Done(_)) => {
                all.iter().for_each(|(shard, _)| port.note(Note::Forget(shard)));
                return Ok(true);
            }
            Ok(Transacted::Unmet(..)) => {}
            Err(error) if error.is_transient() => {}
            Err(error) => return Err(error),
        }
    }
    Ok(false)
}

/// The writes of all shards that are charged. `None` where a shard is missing, or lacks a limit.
fn changes(charges: &Settlement, all: &Shards, now: Timestamp) -> Option<Vec<Change>> {
    if !all.is_complete() {
        return None;
    }
    let items: Vec<&BucketItem> = all.iter().map(|(_, item)| item).collect();
    let mut by_shard: Vec<Takes> = vec![Takes::new(); items.len()];
    for charge in &charges.differences {
        let name = charges.target.limits().names()[charge.cell].as_str();
        let held = |item: &&BucketItem| {
            let mut bucket = item.bucket.clone();
            bucket.refill(now);
            let (cell, rate) = bucket.cell(name)?;
            Some((cell.tokens.get(), rate.capacity().get()))
        };
        let held: Vec<(i64, i64)> = items.iter().map(held).collect::<Option<_>>()?;
        for (takes, amount) in by_shard.iter_mut().zip(portions(&held, charge.amount.get())) {
            if amount > 0 {
                takes.push(Take { cell: charge.cell, amount: Millitokens::new(amount) });
            }
        }
    }
    let charged = items.into_iter().zip(by_shard).filter(|(_, takes)| !takes.is_empty());
    let change = |(item, differences): (&BucketItem, Takes)| {
        let key = BucketItemKey { bucket: charges.target.key().clone(), shard: item.shard };
        let settlement = Settlement { shard: item.shard, differences, ..charges.clone() };
        let request = Request::SettleRest(settlement);
        let decision = decide_batch(&key, &Snapshot::Item(item.clone()), &[&request], now);
        decision.update.map(Change::Update)
    };
    charged.map(change).collect()
}

/// Portions of a charge that leave shards with the same part of their ceilings, as far as none has less
/// already. `held` is what each holds, and its ceiling; the portions add up to the charge.
fn portions(held: &[(i64, i64)], charge: i64) -> Vec<i64> {
    let whole: i128 = held.iter().map(|(_, ceiling)| i128::from(*ceiling)).sum();
    let wide = |(tokens, ceiling): &(i64, i64)| (i128::from(*tokens), i128::from(*ceiling));
    // What each pays so that no more is left than its part of `level`, which is of the whole bucket.
    let paid = |level: i128| {
        let pay = move |(tokens, ceiling): (i128, i128)| {
            (tokens - (level * ceiling).div_euclid(whole.max(1))).max(0)
        };
        held.iter().map(wide).map(pay)
    };
    let charge = i128::from(charge);
    let spread: i128 = held.iter().map(|(tokens, _)| i128::from(*tokens).abs()).sum();
    // The lowest level at which they pay no more than the charge.
    let (mut low, mut high) = (-(spread + charge), (spread + 1) * whole.max(1));
    while low < high {
        let middle = low + (high - low).div_euclid(2);
        match paid(middle).sum::<i128>() <= charge {
            true => high = middle,
            false => low = middle + 1,
        }
    }
    let mut paid: Vec<i128> = paid(low).collect();
    // What rounding has left is less than a millitoken for each shard.
    let mut rest = charge - paid.iter().sum::<i128>();
    let len = i128::try_from(paid.len().max(1)).unwrap_or(1);
    for portion in &mut paid {
        let more = (rest + len - 1).div_euclid(len).min(rest);
        *portion += more;
        rest -= more;
    }
    paid.into_iter().map(|portion| i64::try_from(portion).unwrap_or(i64::MAX)).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::portions;

    #[test]
    fn a_charge_leaves_all_shards_with_the_same_part_of_their_ceilings() {
        let check = |held: &[(i64, i64)], charge, left: &[i64]| {
            let paid = portions(held, charge);
            let after: Vec<i64> = held.iter().zip(paid).map(|(one, paid)| one.0 - paid).collect();
            assert_eq!(after, left, "{held:?} less {charge}");
        };
        check(&[(250, 250), (250, 250), (250, 250), (250, 250)], 400, &[150, 150, 150, 150]);
        // The one that holds more pays first.
        check(&[(0, 250), (200, 250)], 100, &[0, 100]);
        check(&[(0, 250), (200, 250)], 300, &[-50, -50]);
        // One that owes more already pays nothing.
        check(&[(-900, 250), (100, 250)], 300, &[-900, -200]);
        check(&[(0, 100), (0, 300)], 400, &[-100, -300]);
        check(&[(0, 250), (0, 250)], 1, &[-1, 0]);
    }

    proptest! {
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
