use std::fmt;
use std::ops::Neg;

use crate::Invalid;

/// Millitokens in a token.
pub const MILLI: i64 = 1_000;

/// The most tokens that one call may take or adjust by.
pub const AMOUNT_MAX: u64 = 1_000_000_000_000;

/// A balance or an amount, in thousandths of a token.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Millitokens(i64);

impl Millitokens {
    /// Nothing.
    pub const ZERO: Self = Self(0);

    /// An amount in thousandths of a token.
    pub const fn new(millitokens: i64) -> Self {
        Self(millitokens)
    }

    /// The amount in thousandths of a token.
    pub const fn get(self) -> i64 {
        self.0
    }

    /// Whole tokens, rounded down (a debt of half a token is -1).
    pub const fn whole_tokens(self) -> i64 {
        self.0.div_euclid(MILLI)
    }

    /// The sum, or `None` on overflow.
    pub const fn checked_add(self, other: Self) -> Option<Self> {
        match self.0.checked_add(other.0) {
            Some(sum) => Some(Self(sum)),
            None => None,
        }
    }

    /// The sum; it saturates at the bounds of `i64`.
    #[must_use]
    #[inline]
    pub const fn saturating_add(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }
}

impl Neg for Millitokens {
    type Output = Self;

    fn neg(self) -> Self {
        Self(-self.0)
    }
}

impl fmt::Display for Millitokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (whole, milli) = (self.0 / MILLI, (self.0 % MILLI).abs());
        let sign = if self.0 < 0 && whole == 0 { "-" } else { "" };
        if milli == 0 { write!(f, "{whole}") } else { write!(f, "{sign}{whole}.{milli:03}") }
    }
}

impl fmt::Debug for Millitokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// An amount of whole tokens as millitokens.
///
/// # Errors
///
/// [`Invalid`] above [`AMOUNT_MAX`].
#[inline]
pub fn amount(tokens: u64) -> Result<Millitokens, Invalid> {
    match i64::try_from(tokens) {
        Ok(fits) if tokens <= AMOUNT_MAX => Ok(Millitokens(fits * MILLI)),
        _ => Err(Invalid::new("amount", tokens, "use 0 to 1000000000000 tokens")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_amount_has_a_bound() {
        assert_eq!(amount(0), Ok(Millitokens::ZERO));
        assert_eq!(amount(AMOUNT_MAX).unwrap().whole_tokens(), 1_000_000_000_000);
        assert!(amount(AMOUNT_MAX + 1).is_err());
        assert!(amount(u64::MAX).is_err());
    }

    #[test]
    fn millitokens_read_as_decimals() {
        for (milli, text, whole) in [
            (0, "0", 0),
            (1_500, "1.500", 1),
            (-500, "-0.500", -1),
            (-1_000, "-1", -1),
            (-1_001, "-1.001", -2),
        ] {
            assert_eq!(Millitokens::new(milli).to_string(), text);
            assert_eq!(Millitokens::new(milli).whole_tokens(), whole);
        }
    }
}
