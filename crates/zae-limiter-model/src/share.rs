use crate::{LimitSet, Millitokens, Rate};

/// The part of `whole` that belongs to shard `shard` of `count`.
///
/// The shares of all shards add up to exactly the whole, and differ by at most one millitoken. When
/// the count doubles, a shard's share is divided between itself and the shard that is new beside it,
/// `shard + count`, to the millitoken: one shard can be divided without looking at the others. For
/// this the shards stand along the whole in the order of their numbers' bits read backwards.
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
    assert!(whole.get() >= 0, "only what is there can be shared");
    // With one shard there is no bit to read.
    let place = shard.reverse_bits().checked_shr(u32::BITS - count.trailing_zeros()).unwrap_or(0);
    let up_to = |place: u32| i128::from(whole.get()) * i128::from(place) / i128::from(count);
    let part = up_to(place + 1) - up_to(place);
    Millitokens::new(i64::try_from(part).expect("a part is no larger than the whole"))
}

impl Rate {
    /// What a shard has of it: its share of the capacity and of what is earned in the same period.
    ///
    /// # Panics
    ///
    /// As [`share`] does. A share is never less than a millitoken: nobody divides that far.
    #[must_use]
    pub fn share(&self, shard: u32, count: u32) -> Self {
        let least = Millitokens::new(1);
        let part = |whole| share(whole, shard, count).max(least);
        self.with_amounts(part(self.capacity()), part(self.refill_amount()))
    }
}

impl LimitSet {
    /// What a shard has of each limit.
    ///
    /// # Panics
    ///
    /// As [`share`] does.
    #[must_use]
    pub fn share(&self, shard: u32, count: u32) -> Self {
        self.map_rates(|rate| rate.share(shard, count))
    }
}
