//! A bucket: the tokens of one entity on one resource, all limits together.
//!
//! Invariants:
//! - a balance never exceeds its limit's capacity;
//! - time is credited once: `refilled_at` never moves back, except by [`Bucket::rewind`];
//! - `remainder` carries the fraction of a millitoken that a refill could not credit. A full bucket
//!   drops it.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::time::Duration;

use crate::{LimitName, LimitSet, Millitokens, Rate, Take, Timestamp};

/// One limit's balance.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cell {
    /// The balance; negative is debt.
    pub tokens: Millitokens,
    /// The earned fraction of a millitoken, in millitoken-milliseconds; below the limit's period.
    pub remainder: u64,
    /// Everything ever taken, less refunds. It saturates at 9·10^15 tokens.
    pub consumed: Millitokens,
    /// The part of `consumed` that the store has not added to a usage record yet.
    pub unbooked: Millitokens,
}

impl Cell {
    fn full(rate: &Rate) -> Self {
        Self { tokens: rate.capacity(), ..Self::default() }
    }

    #[inline]
    fn refill(&mut self, rate: &Rate, elapsed_ms: u64) {
        match rate.earned_below(self.tokens, elapsed_ms, self.remainder) {
            Some((tokens, remainder)) => {
                self.tokens = tokens;
                self.remainder = remainder;
            }
            None => {
                self.tokens = rate.capacity();
                self.remainder = 0;
            }
        }
    }

    /// Takes what the balance covers, and returns what is left.
    #[inline]
    fn take(&mut self, amount: Millitokens) -> Millitokens {
        let tokens = self.tokens.get().checked_sub(amount.get());
        self.tokens = Millitokens::new(tokens.expect("the balance covers the amount"));
        self.unbooked = self.unbooked.saturating_add(amount);
        self.consumed = self.consumed.saturating_add(amount);
        self.tokens
    }

    /// Applies a signed difference: positive takes, negative refunds, up to the capacity.
    #[inline]
    fn charge(&mut self, rate: &Rate, difference: Millitokens) -> Result<(), Overflow> {
        match self.tokens.get().checked_sub(difference.get()) {
            Some(tokens) if tokens < rate.capacity().get() => {
                self.tokens = Millitokens::new(tokens);
            }
            // Out of range: a charge is an error, a refund fills the bucket.
            None if difference > Millitokens::ZERO => return Err(Overflow),
            _ => {
                self.tokens = rate.capacity();
                self.remainder = 0;
            }
        }
        self.unbooked = self.unbooked.saturating_add(difference);
        self.consumed = self.consumed.saturating_add(difference);
        Ok(())
    }

    /// Whether the balance covers `amount`. 0 is always covered, even in debt.
    #[inline]
    fn holds(&self, amount: Millitokens) -> bool {
        amount == Millitokens::ZERO || self.tokens >= amount
    }

    fn millis_until(&self, rate: &Rate, amount: Millitokens) -> u64 {
        let deficit = i128::from(amount.get()) - i128::from(self.tokens.get());
        rate.millis_to_earn(deficit, self.remainder)
    }
}

/// A charge that would take the balance out of the range of its type. Nothing was changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Overflow;

impl fmt::Display for Overflow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the debt of the bucket would exceed 9·10^15 tokens")
    }
}

impl std::error::Error for Overflow {}

/// A bucket's balances at some time.
#[derive(Clone, Debug)]
pub struct Balances {
    cells: Cells,
    refilled_at: Timestamp,
}

/// The tokens of one entity on one resource.
#[derive(Clone, PartialEq, Eq)]
pub struct Bucket {
    limits: Arc<LimitSet>,
    cells: Cells,
    refilled_at: Timestamp,
}

impl Bucket {
    /// A full bucket: nothing was taken from it yet.
    pub fn full(limits: Arc<LimitSet>, now: Timestamp) -> Self {
        let cells = limits.rates().iter().map(Cell::full).collect();
        Self { limits, cells, refilled_at: now }
    }

    /// A bucket from stored balances. Balances above the capacity are cut to it.
    ///
    /// # Panics
    ///
    /// When the number of cells is not the number of limits.
    pub fn from_parts(
        limits: Arc<LimitSet>,
        cells: impl IntoIterator<Item = Cell>,
        refilled_at: Timestamp,
    ) -> Self {
        let mut cells: Cells = cells.into_iter().collect();
        assert_eq!(limits.len(), cells.len(), "one cell for each limit");
        for (cell, rate) in cells.iter_mut().zip(limits.rates()) {
            cell.remainder = cell.remainder.min(rate.period_ms() - 1);
            // A client that ignores remainders leaves the old one behind when the bucket fills up.
            if cell.tokens >= rate.capacity() {
                cell.tokens = rate.capacity();
                cell.remainder = 0;
            }
        }
        Self { limits, cells, refilled_at }
    }

    /// The limits by which the bucket refills.
    #[inline]
    pub fn limits(&self) -> &Arc<LimitSet> {
        &self.limits
    }

    /// The balances, one for each limit, in the order of the limits.
    #[inline]
    pub fn cells(&self) -> &[Cell] {
        &self.cells
    }

    /// The moment up to which elapsed time is credited.
    #[inline]
    pub fn refilled_at(&self) -> Timestamp {
        self.refilled_at
    }

    /// The balance and the rate of the limit with this name.
    pub fn cell(&self, name: &str) -> Option<(&Cell, &Rate)> {
        let at = self.limits.position(name)?;
        Some((&self.cells[at], &self.limits.rates()[at]))
    }

    /// Credits the time up to `now` to all limits. A clock that stands or runs back credits nothing.
    #[inline]
    pub fn refill(&mut self, now: Timestamp) {
        let elapsed_ms = now.millis_since(self.refilled_at);
        if elapsed_ms == 0 {
            return;
        }
        for (cell, rate) in self.cells.iter_mut().zip(self.limits.rates()) {
            cell.refill(rate, elapsed_ms);
        }
        self.refilled_at = now;
    }

    /// Whether the refill time lies more than twice `max_skew` after `now`: a clock that was ahead has written it. A
    /// clock within the bound may have been checked against a time that differs a little from `now`.
    pub fn is_ahead(&self, now: Timestamp, max_skew: Duration) -> bool {
        // Usually it is not even after `now`: that costs less to find out.
        self.refilled_at > now && self.refilled_at > now.saturating_add(max_skew.saturating_mul(2))
    }

    /// Sets a refill time that [is ahead](Self::is_ahead) to `now`. Otherwise nothing would be earned until the clock
    /// that wrote it is right. Balances stay, and fractions of a millitoken are dropped. Returns whether it did.
    ///
    /// `now` must be right: a clock that lags by more than `max_skew` would rewind a right refill time.
    ///
    /// The time from `now` to the old refill time may then be credited a second time, at most the capacity. If the
    /// clock that was ahead goes on, that happens after each rewind. So nobody may rewind a bucket often.
    pub fn rewind(&mut self, now: Timestamp, max_skew: Duration) -> bool {
        let is_ahead = self.is_ahead(now, max_skew);
        if is_ahead {
            self.refilled_at = now;
            self.cells.iter_mut().for_each(|cell| cell.remainder = 0);
        }
        is_ahead
    }

    /// A copy of the balances, for [`restore`](Self::restore).
    pub fn balances(&self) -> Balances {
        Balances { cells: self.cells.clone(), refilled_at: self.refilled_at }
    }

    /// Restores a copy of the balances.
    ///
    /// # Panics
    ///
    /// When the number of limits has changed since the copy was made.
    pub fn restore(&mut self, before: Balances) {
        assert_eq!(self.cells.len(), before.cells.len(), "balances of the same limits");
        self.cells = before.cells;
        self.refilled_at = before.refilled_at;
    }

    /// Refills the bucket up to `now` and takes all amounts, as [`decide`](crate::decide) does for a chain of one
    /// bucket, but each cell must be named at most once. If a balance is too low, nothing changes, not even the refill
    /// time. Otherwise it writes the balances after taking to `left`, one for each amount. Returns whether it took them.
    ///
    /// # Panics
    ///
    /// When an amount is negative, its cell does not exist, or `left` has another length.
    #[inline]
    pub fn take(&mut self, takes: &[Take], left: &mut [Millitokens], now: Timestamp) -> bool {
        assert_eq!(takes.len(), left.len(), "one balance for each amount");
        let before = if now > self.refilled_at { Some(self.balances()) } else { None };
        self.refill(now);
        let cells = &mut self.cells[..];
        for (at, take) in takes.iter().enumerate() {
            assert!(take.amount >= Millitokens::ZERO, "an acquire never takes a negative amount");
            debug_assert!(takes[..at].iter().all(|other| other.cell != take.cell), "named twice");
            if !cells[take.cell].holds(take.amount) {
                before.into_iter().for_each(|before| self.restore(before));
                return false;
            }
        }
        for (take, left) in takes.iter().zip(left) {
            *left = cells[take.cell].take(take.amount);
        }
        true
    }

    /// Whether the balance of cell `at` covers `amount`. 0 is always covered, even in debt.
    #[inline]
    pub(crate) fn holds(&self, at: usize, amount: Millitokens) -> bool {
        self.cells[at].holds(amount)
    }

    /// Applies a signed difference to cell `at`. A positive one takes and may leave debt. A negative
    /// one refunds, up to the capacity.
    ///
    /// # Errors
    ///
    /// [`Overflow`]; nothing is changed.
    #[inline]
    pub fn charge(&mut self, at: usize, difference: Millitokens) -> Result<(), Overflow> {
        self.cells[at].charge(&self.limits.rates()[at], difference)
    }

    /// How long after `now` the balance of cell `at` covers `amount` if nobody else takes from it. Exact
    /// to the millisecond.
    pub fn wait_for(&self, at: usize, amount: Millitokens, now: Timestamp) -> Duration {
        let rate = &self.limits.rates()[at];
        // Includes what was earned since the last refill.
        let mut cell = self.cells[at];
        cell.refill(rate, now.millis_since(self.refilled_at));
        if cell.holds(amount) {
            return Duration::ZERO;
        }
        // Time is credited from `refilled_at` on, which is ahead of a clock that lags.
        let ahead = self.refilled_at.millis_since(now);
        let earning = cell.millis_until(rate, amount);
        Duration::from_millis(ahead.saturating_add(earning).min(i64::MAX.unsigned_abs()))
    }

    /// How long after `now` all limits are full if nobody takes from them.
    pub fn wait_until_full(&self, now: Timestamp) -> Duration {
        let waits = self.limits.rates().iter().enumerate();
        waits.map(|(at, rate)| self.wait_for(at, rate.capacity(), now)).max().unwrap_or_default()
    }

    /// Whether any limit is in debt.
    #[inline]
    pub fn in_debt(&self) -> bool {
        self.cells.iter().any(|cell| cell.tokens < Millitokens::ZERO)
    }

    /// Changes the bucket to `limits`. First it credits what was earned under the old ones. A lower
    /// ceiling then cuts the balance, a higher one adds nothing, and a new limit starts full.
    ///
    /// A limit that `limits` does not name stays as it is: a call with limits of its own must not
    /// erase what was taken under the stored ones. Above [`LIMITS_MAX`](crate::LIMITS_MAX) some of
    /// these are dropped, full ones first.
    pub fn follow(&mut self, limits: &Arc<LimitSet>, now: Timestamp) {
        let unchanged = |(name, rate): (&LimitName, &Rate)| {
            self.cell(name.as_str()).is_some_and(|(_, current)| current == rate)
        };
        if Arc::ptr_eq(&self.limits, limits) || limits.iter().all(unchanged) {
            return;
        }
        self.refill(now);
        let mut kept: Vec<(LimitName, Rate, Cell)> = Vec::with_capacity(limits.len());
        for (name, rate) in limits.iter() {
            let cell = match self.cell(name.as_str()) {
                Some((cell, old)) => re_rated(*cell, old, rate),
                None => Cell::full(rate),
            };
            kept.push((name.clone(), *rate, cell));
        }
        let named = kept.len();
        for ((name, rate), cell) in self.limits.iter().zip(self.cells.iter()) {
            if limits.position(name.as_str()).is_none() {
                kept.push((name.clone(), *rate, *cell));
            }
        }
        // If there are too many, full ones are dropped first.
        kept[named..].sort_by_key(|(_, rate, cell)| cell.tokens >= rate.capacity());
        self.adopt(kept, limits);
    }

    /// Like [`follow`](Self::follow), but drops every limit that `limits` does not name. For a change
    /// of the stored configuration, which deletes those limits.
    pub fn replace_limits(&mut self, limits: &Arc<LimitSet>, now: Timestamp) {
        self.follow(limits, now);
        let named = self.limits.iter().zip(self.cells.iter());
        let kept = named
            .filter(|((name, _), _)| limits.position(name.as_str()).is_some())
            .map(|((name, rate), cell)| (name.clone(), *rate, *cell))
            .collect();
        self.adopt(kept, limits);
    }

    /// Sets cells and their limits. Shares `limits` if it names all of them.
    fn adopt(&mut self, mut kept: Vec<(LimitName, Rate, Cell)>, limits: &Arc<LimitSet>) {
        // Above the bound the named limits win: the current call uses them.
        kept.truncate(crate::LIMITS_MAX);
        kept.sort_by(|a, b| a.0.cmp(&b.0));
        self.cells = kept.iter().map(|(_, _, cell)| *cell).collect();
        self.limits = if kept.len() == limits.len() {
            Arc::clone(limits)
        } else {
            let rates = kept.into_iter().map(|(name, rate, _)| (name, rate));
            Arc::new(LimitSet::from_rates(rates).expect("each name once, within the bound"))
        };
    }

    /// Returns the consumption that is not in a usage record yet, by limit, and resets it.
    pub fn take_unbooked(&mut self) -> Vec<(LimitName, Millitokens)> {
        let mut taken = Vec::new();
        for (name, cell) in self.limits.names().iter().zip(self.cells.iter_mut()) {
            let unbooked = std::mem::take(&mut cell.unbooked);
            if unbooked != Millitokens::ZERO {
                taken.push((name.clone(), unbooked));
            }
        }
        taken
    }
}

impl fmt::Debug for Bucket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut out = f.debug_struct("Bucket");
        out.field("refilled_at", &self.refilled_at);
        for ((name, rate), cell) in self.limits.iter().zip(self.cells.iter()) {
            let shown = format_args!("{} of {}", cell.tokens, rate.capacity()).to_string();
            out.field(name.as_str(), &shown);
        }
        out.finish()
    }
}

/// The cell under another rate: cut to the new ceiling, with its remainder in the new unit.
fn re_rated(mut cell: Cell, old: &Rate, new: &Rate) -> Cell {
    if cell.tokens >= new.capacity() {
        cell.tokens = new.capacity();
        cell.remainder = 0;
    } else {
        let scaled =
            u128::from(cell.remainder) * u128::from(new.period_ms()) / u128::from(old.period_ms());
        cell.remainder = u64::try_from(scaled).expect("below the new period");
    }
    cell
}

/// How many cells are stored inline. Requests and tokens are the common pair; a bucket with more
/// limits keeps them on the heap.
const INLINE: usize = 2;

/// Cells, inline up to [`INLINE`] of them.
#[derive(Clone, Debug)]
enum Cells {
    Few([Cell; INLINE], u8),
    Many(Vec<Cell>),
}

impl FromIterator<Cell> for Cells {
    fn from_iter<I: IntoIterator<Item = Cell>>(cells: I) -> Self {
        let mut few = [Cell::default(); INLINE];
        let mut len = 0;
        let mut cells = cells.into_iter();
        while let Some(cell) = cells.next() {
            if usize::from(len) == INLINE {
                return Self::Many(few.into_iter().chain([cell]).chain(cells).collect());
            }
            few[usize::from(len)] = cell;
            len += 1;
        }
        Self::Few(few, len)
    }
}

impl Deref for Cells {
    type Target = [Cell];

    #[inline]
    fn deref(&self) -> &[Cell] {
        match self {
            Self::Few(cells, len) => &cells[..usize::from(*len)],
            Self::Many(cells) => cells,
        }
    }
}

impl DerefMut for Cells {
    #[inline]
    fn deref_mut(&mut self) -> &mut [Cell] {
        match self {
            Self::Few(cells, len) => &mut cells[..usize::from(*len)],
            Self::Many(cells) => cells,
        }
    }
}

impl PartialEq for Cells {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

impl Eq for Cells {}
