//! Limits, and the exact arithmetic of refilling.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::tokens::MILLI;
use crate::{Invalid, LimitName, Millitokens};

/// The largest capacity or refill amount, in tokens.
pub const CAPACITY_MAX: u64 = 1_000_000_000_000;

/// The longest refill period, in seconds.
pub const PERIOD_SECONDS_MAX: u64 = 1_000_000_000;

/// The most limits that one entity can have on one resource.
pub const LIMITS_MAX: usize = 32;

/// Names that a limit cannot have: `wcu` counts writes on DynamoDB. The others are attributes of usage
/// records, which store each limit's total under the limit's name.
pub const RESERVED_LIMIT_NAMES: &[&str] = &[
    "wcu",
    "ttl",
    "resource",
    "window",
    "window_start",
    "total_events",
    "entity_id",
    "PK",
    "SK",
    "GSI1PK",
    "GSI1SK",
    "GSI2PK",
    "GSI2SK",
    "GSI3PK",
    "GSI3SK",
    "GSI4PK",
    "GSI4SK",
];

/// A limit: tokens per period, and a ceiling for unused tokens.
///
/// A constructor checks nothing. Every function that takes limits checks them first, as a [`LimitSet`]. Text is
/// checked when it is parsed: `name:rate[/period][:burst]`, with a period of `sec`, `min` (the default), `hour` or
/// `day` and a count before it, as in `5min`.
///
/// ```
/// # use zae_limiter_model::Limit;
/// let limit = Limit::per_minute("tpm", 10_000).burst(15_000);
/// assert_eq!(limit.to_string(), "tpm:10000/min:15000");
/// assert_eq!("tpm:10_000:15_000".parse(), Ok(limit));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limit {
    /// The limit's name, for example `tpm`.
    pub name: String,
    /// The ceiling of the balance, in tokens: 1 to [`CAPACITY_MAX`].
    pub capacity: u64,
    /// Tokens added per period: 1 to [`CAPACITY_MAX`].
    pub refill_amount: u64,
    /// The period, in whole seconds: 1 to [`PERIOD_SECONDS_MAX`].
    pub refill_period: Duration,
}

impl Limit {
    /// `amount` tokens per `period`, with a ceiling of `amount`.
    pub fn per(name: impl Into<String>, amount: u64, period: Duration) -> Self {
        Self { name: name.into(), capacity: amount, refill_amount: amount, refill_period: period }
    }

    /// `amount` tokens per second.
    pub fn per_second(name: impl Into<String>, amount: u64) -> Self {
        Self::per(name, amount, Duration::from_secs(1))
    }

    /// `amount` tokens per minute.
    pub fn per_minute(name: impl Into<String>, amount: u64) -> Self {
        Self::per(name, amount, Duration::from_secs(60))
    }

    /// `amount` tokens per hour. That is a rate and not a quota; see [`per_day`](Self::per_day).
    pub fn per_hour(name: impl Into<String>, amount: u64) -> Self {
        Self::per(name, amount, Duration::from_secs(3_600))
    }

    /// `amount` tokens per day. That is a rate and not a quota: a full bucket admits `amount` at once and earns as many
    /// in the next 24 hours. A smaller [`burst`](Self::burst) lowers that.
    pub fn per_day(name: impl Into<String>, amount: u64) -> Self {
        Self::per(name, amount, Duration::from_secs(86_400))
    }

    /// The same rate with another ceiling.
    #[must_use]
    pub fn burst(mut self, capacity: u64) -> Self {
        self.capacity = capacity;
        self
    }

    fn check(&self) -> Result<(LimitName, Rate), Invalid> {
        const RANGE: &str = "use 1 to 1000000000000 tokens";
        let tokens = |field, value: u64| match i64::try_from(value) {
            Ok(fits) if (1..=CAPACITY_MAX).contains(&value) => Ok(Millitokens::new(fits * MILLI)),
            _ => Err(Invalid::new(field, value, RANGE)),
        };
        let seconds = self.refill_period.as_secs();
        if self.refill_period.subsec_nanos() != 0 || !(1..=PERIOD_SECONDS_MAX).contains(&seconds) {
            let given = format!("{:?}", self.refill_period);
            return Err(Invalid::new("refill period", given, "use 1 to 1000000000 whole seconds"));
        }
        let rate = Rate {
            capacity: tokens("capacity", self.capacity)?,
            refill_amount: tokens("refill amount", self.refill_amount)?,
            period_ms: seconds * 1_000,
        };
        Ok((LimitName::new(&self.name)?, rate))
    }
}

/// A limit's checked numbers, in the units of the arithmetic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    capacity: Millitokens,
    refill_amount: Millitokens,
    period_ms: u64,
}

impl Rate {
    /// A rate from stored numbers.
    ///
    /// # Errors
    ///
    /// [`Invalid`] for numbers out of bounds.
    pub fn new(
        capacity: Millitokens,
        refill_amount: Millitokens,
        period_ms: u64,
    ) -> Result<Self, Invalid> {
        const MILLITOKENS_MAX: i64 = CAPACITY_MAX as i64 * MILLI;
        for (field, value) in [("capacity", capacity), ("refill amount", refill_amount)] {
            if !(1..=MILLITOKENS_MAX).contains(&value.get()) {
                return Err(Invalid::new(field, value, "use 0.001 to 1000000000000 tokens"));
            }
        }
        if !(1..=PERIOD_SECONDS_MAX * 1_000).contains(&period_ms) {
            return Err(Invalid::new("refill period", period_ms, "use 1 to 1000000000000 ms"));
        }
        Ok(Self { capacity, refill_amount, period_ms })
    }

    /// The same period with other amounts.
    pub(crate) const fn with_amounts(
        &self,
        capacity: Millitokens,
        refill_amount: Millitokens,
    ) -> Self {
        Self { capacity, refill_amount, period_ms: self.period_ms }
    }

    /// The ceiling.
    pub const fn capacity(&self) -> Millitokens {
        self.capacity
    }

    /// The amount added per period.
    pub const fn refill_amount(&self) -> Millitokens {
        self.refill_amount
    }

    /// The period in milliseconds.
    pub const fn period_ms(&self) -> u64 {
        self.period_ms
    }

    /// What `elapsed_ms` earn on top of `remainder`, rounded down, and the new remainder. The first
    /// number has no ceiling yet and can be far larger than any balance.
    pub(crate) fn earned_in(&self, elapsed_ms: u64, remainder: u64) -> (i128, u64) {
        let amount = self.refill_amount.get().unsigned_abs();
        // In practice everything fits 64 bits, where division is several times faster.
        if let Some(total) = elapsed_ms.checked_mul(amount).and_then(|p| p.checked_add(remainder)) {
            return (i128::from(total / self.period_ms), total % self.period_ms);
        }
        let total = u128::from(elapsed_ms) * u128::from(amount) + u128::from(remainder);
        let period = u128::from(self.period_ms);
        let added = i128::try_from(total / period).expect("2^64 ms times 10^15 fits 127 bits");
        let left = u64::try_from(total % period).expect("a remainder is below the period");
        (added, left)
    }

    /// The balance after `elapsed_ms` on top of `tokens` and `remainder`, and the new remainder; `None` if that
    /// reaches the capacity.
    #[inline]
    pub(crate) fn earned_below(
        &self,
        tokens: Millitokens,
        elapsed_ms: u64,
        remainder: u64,
    ) -> Option<(Millitokens, u64)> {
        let amount = self.refill_amount.get().unsigned_abs();
        let product = elapsed_ms.checked_mul(amount).and_then(|p| p.checked_add(remainder));
        if let (Some(total), Some(missing)) =
            (product, self.capacity.get().checked_sub(tokens.get()))
        {
            // A bucket that is full needs no division, which costs more than the rest.
            let missing = u64::try_from(missing).unwrap_or(0);
            if u128::from(total) >= u128::from(missing) * u128::from(self.period_ms) {
                return None;
            }
            let added = i64::try_from(total / self.period_ms).expect("less than what is missing");
            return Some((Millitokens::new(tokens.get() + added), total % self.period_ms));
        }
        let (added, remainder) = self.earned_in(elapsed_ms, remainder);
        let balance = i128::from(tokens.get()) + added;
        let is_below = balance < i128::from(self.capacity.get());
        let balance = || Millitokens::new(i64::try_from(balance).expect("below the capacity"));
        is_below.then(|| (balance(), remainder))
    }

    /// The least number of milliseconds that earn `deficit` on top of `remainder`, rounded up.
    pub(crate) fn millis_to_earn(&self, deficit: i128, remainder: u64) -> u64 {
        if deficit <= 0 {
            return 0;
        }
        let amount = i128::from(self.refill_amount.get());
        let missing = deficit * i128::from(self.period_ms) - i128::from(remainder);
        let millis = (missing + amount - 1) / amount;
        u64::try_from(millis.clamp(0, i128::from(i64::MAX))).expect("clamped to what fits")
    }

    /// What `elapsed_ms` earn on top of `remainder`, rounded down, and the new remainder. The capacity
    /// does not limit the amount, only the type's range does.
    pub fn earned(&self, elapsed_ms: u64, remainder: u64) -> (Millitokens, u64) {
        let (added, left) = self.earned_in(elapsed_ms, remainder);
        (Millitokens::new(i64::try_from(added).unwrap_or(i64::MAX)), left)
    }

    /// How long it takes to earn `deficit`, rounded up to a millisecond.
    pub fn time_to_earn(&self, deficit: Millitokens) -> Duration {
        Duration::from_millis(self.millis_to_earn(i128::from(deficit.get()), 0))
    }

    /// How long an empty bucket takes to fill, rounded up to a millisecond.
    pub fn time_to_fill(&self) -> Duration {
        self.time_to_earn(self.capacity)
    }
}

/// The limits of one entity on one resource: checked, sorted by name, each name once.
///
/// ```
/// # use zae_limiter_model::{Limit, LimitSet};
/// let limits = LimitSet::new([Limit::per_minute("tpm", 10_000), Limit::per_minute("rpm", 100)])?;
/// assert_eq!(limits.position("tpm"), Some(1));
/// # Ok::<(), zae_limiter_model::Invalid>(())
/// ```
#[derive(Clone, Default, PartialEq, Eq)]
pub struct LimitSet {
    // Two arrays, so that the arithmetic reads only numbers.
    names: Arc<[LimitName]>,
    rates: Arc<[Rate]>,
}

impl LimitSet {
    /// Checks the limits and sorts them.
    ///
    /// # Errors
    ///
    /// [`Invalid`] for a limit out of bounds, a name given twice, or more than [`LIMITS_MAX`].
    pub fn new(limits: impl IntoIterator<Item = Limit>) -> Result<Self, Invalid> {
        let checked: Vec<_> = limits.into_iter().map(|l| l.check()).collect::<Result<_, _>>()?;
        Self::from_rates(checked)
    }

    /// A set from stored rates, sorted.
    ///
    /// # Errors
    ///
    /// [`Invalid`] for a name given twice, or more than [`LIMITS_MAX`].
    pub fn from_rates(rates: impl IntoIterator<Item = (LimitName, Rate)>) -> Result<Self, Invalid> {
        let mut rates: Vec<_> = rates.into_iter().collect();
        rates.sort_by(|a, b| a.0.cmp(&b.0));
        if let Some(pair) = rates.windows(2).find(|pair| pair[0].0 == pair[1].0) {
            return Err(Invalid::new("limit name", &pair[0].0, "give each limit once"));
        }
        if rates.len() > LIMITS_MAX {
            return Err(Invalid::new("limits", rates.len(), "use at most 32 limits"));
        }
        let (names, rates): (Vec<_>, Vec<_>) = rates.into_iter().unzip();
        Ok(Self { names: names.into(), rates: rates.into() })
    }

    /// The same limits with other numbers.
    pub(crate) fn map_rates(&self, rate: impl FnMut(&Rate) -> Rate) -> Self {
        Self { names: Arc::clone(&self.names), rates: self.rates.iter().map(rate).collect() }
    }

    /// How many limits there are.
    #[inline]
    pub fn len(&self) -> usize {
        self.rates.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.rates.is_empty()
    }

    /// The index of the limit with this name.
    #[inline]
    pub fn position(&self, name: &str) -> Option<usize> {
        // For a few short names, comparing bytes inline is faster than a binary search or memcmp.
        let wanted = name.as_bytes();
        self.names.iter().position(|candidate| {
            let bytes = candidate.as_str().as_bytes();
            bytes.len() == wanted.len() && bytes.iter().zip(wanted).all(|(a, b)| a == b)
        })
    }

    /// The names, in order.
    #[inline]
    pub fn names(&self) -> &[LimitName] {
        &self.names
    }

    /// The rates, in the order of the names.
    #[inline]
    pub fn rates(&self) -> &[Rate] {
        &self.rates
    }

    /// Names and rates.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&LimitName, &Rate)> {
        self.names.iter().zip(self.rates.iter())
    }

    /// The limits in whole tokens, rounded up. Only another client can have stored a fraction.
    pub fn to_limits(&self) -> Vec<Limit> {
        let tokens = |m: Millitokens| m.get().unsigned_abs().div_ceil(MILLI.unsigned_abs());
        self.iter()
            .map(|(name, rate)| Limit {
                name: name.to_string(),
                capacity: tokens(rate.capacity),
                refill_amount: tokens(rate.refill_amount),
                refill_period: Duration::from_millis(rate.period_ms),
            })
            .collect()
    }

    /// How long the slowest limit takes from empty to full.
    pub fn time_to_fill(&self) -> Duration {
        self.rates.iter().map(Rate::time_to_fill).max().unwrap_or_default()
    }
}

impl fmt::Debug for LimitSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.to_limits().iter().map(ToString::to_string)).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_set_has_valid_limits_only() {
        let good = Limit::per_minute("rpm", 1);
        for (limit, field) in [
            (Limit::per_minute("wcu", 1), "limit name"),
            (Limit::per_minute("rpm", 0), "capacity"),
            (good.clone().burst(0), "capacity"),
            (good.clone().burst(CAPACITY_MAX + 1), "capacity"),
            (Limit::per_minute("rpm", u64::MAX).burst(1), "refill amount"),
            (Limit::per("rpm", 1, Duration::ZERO), "refill period"),
            (Limit::per("rpm", 1, Duration::from_millis(1_500)), "refill period"),
            (Limit::per("rpm", 1, Duration::from_secs(1_000_000_001)), "refill period"),
        ] {
            let error = LimitSet::new([limit.clone()]).expect_err(&limit.to_string());
            assert_eq!(error.field(), field, "{limit}");
        }
        assert!(LimitSet::new([good.clone(), good.clone()]).is_err());
        let many = (0..33).map(|n| Limit::per_minute(format!("l{n}"), 1));
        assert!(LimitSet::new(many).is_err());
        let limits = LimitSet::new([good]).unwrap();
        assert_eq!(LimitSet::new(limits.to_limits()).unwrap(), limits);
    }

    #[test]
    fn the_bounds_do_not_overflow() {
        let longest = Duration::from_secs(PERIOD_SECONDS_MAX);
        let slow = LimitSet::new([Limit::per("x", 1, longest).burst(CAPACITY_MAX)]).unwrap();
        assert_eq!(slow.time_to_fill(), Duration::from_millis(i64::MAX as u64));
        let fast = LimitSet::new([Limit::per_second("x", CAPACITY_MAX)]).unwrap();
        let (added, left) = fast.rates()[0].earned_in(u64::MAX, 999);
        assert!(added > i128::from(u64::MAX) && left < 1_000);
    }
}
