use crate::{LimitSet, Millitokens, Rate};

/// The share of `whole` that belongs to shard `shard` of `count`.
///
/// The shares of all shards add up to exactly the whole, and differ by at most one millitoken. When
/// the count doubles, each shard shares with one new shard, `shard + count`: their shares add up to the
/// old one. So one shard can be split without reading the others. This works because the shards take
/// their shares in the order of their bit-reversed numbers.
///
/// # Panics
///
/// When `shard` is not below `count`, `count` is not a power of two, or `whole` is negative.
///
/// ```
/// # use zae_limiter_model::{Millitokens, share};
/// let shares = |count| (0..count).map(|s| share(Millitokens::new(5), s, count).get()).collect();
/// let (two, four): (Vec<i64>, Vec<i64>) = (shares(2), shares(4));
/// assert_eq!(two, [2, 3]);
/// assert_eq!(four, [1, 1, 1, 2]);
/// ```
pub fn share(whole: Millitokens, shard: u32, count: u32) -> Millitokens {
    assert!(count.is_power_of_two(), "{count} shards are not a power of two");
    assert!(shard < count, "shard {shard} of {count} does not exist");
    assert!(whole.get() >= 0, "a negative amount has no shares");
    // With one shard the shift is by all bits.
    let place = shard.reverse_bits().checked_shr(u32::BITS - count.trailing_zeros()).unwrap_or(0);
    let up_to = |place: u32| i128::from(whole.get()) * i128::from(place) / i128::from(count);
    let share = up_to(place + 1) - up_to(place);
    Millitokens::new(i64::try_from(share).expect("a share is no larger than the whole"))
}

impl Rate {
    /// A shard's share of the capacity and of the refill amount, in the same period. Each is at least
    /// one millitoken.
    ///
    /// # Panics
    ///
    /// As [`share`] does.
    #[must_use]
    pub fn share(&self, shard: u32, count: u32) -> Self {
        let least = Millitokens::new(1);
        let share_of = |whole| share(whole, shard, count).max(least);
        self.with_amounts(share_of(self.capacity()), share_of(self.refill_amount()))
    }
}

impl LimitSet {
    /// A shard's share of each limit.
    ///
    /// # Panics
    ///
    /// As [`share`] does.
    #[must_use]
    pub fn share(&self, shard: u32, count: u32) -> Self {
        self.map_rates(|rate| rate.share(shard, count))
    }
}
