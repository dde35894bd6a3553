use crate::Millitokens;

/// The part of `whole` that belongs to shard `shard` of `count`.
///
/// The shares of all shards add up to exactly the whole, and differ by at most one millitoken.
///
/// # Panics
///
/// When `shard` is not below `count`, or `whole` is negative.
///
/// ```
/// # use zae_limiter_model::{Millitokens, share};
/// let shares: Vec<i64> = (0..4).map(|s| share(Millitokens::new(3), s, 4).get()).collect();
/// assert_eq!(shares, [0, 1, 1, 1]);
/// ```
pub fn share(whole: Millitokens, shard: u32, count: u32) -> Millitokens {
    assert!(shard < count, "shard {shard} of {count} does not exist");
    assert!(whole.get() >= 0, "only what is there can be shared");
    let up_to = |shards: u32| i128::from(whole.get()) * i128::from(shards) / i128::from(count);
    let part = up_to(shard + 1) - up_to(shard);
    Millitokens::new(i64::try_from(part).expect("a part is no larger than the whole"))
}
