//! Shares of shards: exact, even, and nested when the count doubles.

use proptest::prelude::*;
use zae_limiter_model::{Millitokens, share};

use crate::check;
use crate::generate::MILLITOKENS_MAX;

/// 1, 2, 4 and so on to 64.
fn counts() -> impl Iterator<Item = u32> {
    (0..=6).map(|splits| 1 << splits)
}

fn wholes() -> impl Strategy<Value = Millitokens> {
    let any = prop_oneof![0..=200_i64, 0..=MILLITOKENS_MAX, Just(MILLITOKENS_MAX), Just(i64::MAX)];
    any.prop_map(Millitokens::new)
}

fn shares(whole: Millitokens, count: u32) -> Vec<i64> {
    (0..count).map(|shard| share(whole, shard, count).get()).collect()
}

#[test]
fn shares_add_up_to_the_whole_and_differ_by_at_most_one() {
    check(wholes(), |whole| {
        for count in counts() {
            let shares = shares(whole, count);
            let sum: i128 = shares.iter().map(|&part| i128::from(part)).sum();
            prop_assert_eq!(sum, i128::from(whole.get()), "over {} shards", count);
            let (least, most) = (shares.iter().min(), shares.iter().max());
            let spread = most.zip(least).map(|(most, least)| most - least);
            prop_assert!(spread <= Some(1), "{:?}", shares);
        }
        Ok(())
    });
}

#[test]
fn after_a_split_two_shares_add_up_to_the_old_one() {
    check(wholes(), |whole| {
        for count in counts() {
            let halves = shares(whole, 2 * count);
            let (old, new) = halves.split_at(halves.len() / 2);
            let joined: Vec<i64> = old.iter().zip(new).map(|(old, new)| old + new).collect();
            prop_assert_eq!(joined, shares(whole, count), "{} shards", count);
        }
        Ok(())
    });
}

#[test]
fn a_split_never_raises_the_share_of_a_shard() {
    // Halfway through a split, any of the old shards may have been changed and no new one exists. Even
    // then the shares add up to at most the whole.
    check((wholes(), 0..=5_u32), |(whole, splits)| {
        let (before, after) = (shares(whole, 1 << splits), shares(whole, 2 << splits));
        for (shard, (old, new)) in before.iter().zip(&after).enumerate() {
            prop_assert!(new <= old, "shard {} of {} grew", shard, before.len());
        }
        Ok(())
    });
}
