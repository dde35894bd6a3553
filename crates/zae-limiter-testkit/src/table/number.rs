//! DynamoDB's numbers: decimal, with up to 38 significant digits.

use std::cmp::Ordering;

/// The most significant digits.
const DIGITS_MAX: u32 = 38;

/// `digits / 10^scale`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Decimal {
    digits: i128,
    scale: u32,
}

impl Decimal {
    /// Parses a number without an exponent: the limiter writes none.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
        let whole_digits = whole.strip_prefix(['-', '+']).unwrap_or(whole);
        let is_digits = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit());
        if whole_digits.is_empty() || !is_digits(whole_digits) || !is_digits(fraction) {
            return None;
        }
        let fraction = fraction.trim_end_matches('0');
        let digits: i128 = format!("{whole}{fraction}").parse().ok()?;
        let scale = u32::try_from(fraction.len()).ok()?;
        Self { digits, scale }.within_bounds()
    }

    fn within_bounds(self) -> Option<Self> {
        (self.digits.unsigned_abs() < 10_u128.pow(DIGITS_MAX)).then_some(self)
    }

    /// The sum. `None` if it has too many digits.
    pub(crate) fn plus(self, other: Self) -> Option<Self> {
        let scale = self.scale.max(other.scale);
        let digits = self.at_scale(scale)?.checked_add(other.at_scale(scale)?)?;
        Self { digits, scale }.within_bounds()
    }

    fn at_scale(self, scale: u32) -> Option<i128> {
        self.digits.checked_mul(10_i128.checked_pow(scale - self.scale)?)
    }

    pub(crate) fn compare(self, other: Self) -> Ordering {
        let scale = self.scale.max(other.scale);
        match (self.at_scale(scale), other.at_scale(scale)) {
            (Some(one), Some(other)) => one.cmp(&other),
            // Too large for the scale of the other, so its sign decides.
            (None, _) => self.digits.cmp(&0),
            (_, None) => 0.cmp(&other.digits),
        }
    }

    /// The number as DynamoDB returns it.
    pub(crate) fn text(self) -> String {
        let sign = if self.digits < 0 { "-" } else { "" };
        let scale = usize::try_from(self.scale).unwrap_or(0);
        let digits = format!("{:0>width$}", self.digits.unsigned_abs(), width = scale + 1);
        let (whole, fraction) = digits.split_at(digits.len() - scale);
        let fraction = fraction.trim_end_matches('0');
        let point = if fraction.is_empty() { "" } else { "." };
        format!("{sign}{whole}{point}{fraction}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_exact() {
        let n = |text: &str| Decimal::parse(text).expect("a number");
        for (a, b, sum) in [
            ("1", "2", "3"),
            ("-5", "2", "-3"),
            ("0.1", "0.2", "0.3"),
            ("9007199254740993", "1", "9007199254740994"),
            ("1.5", "-1.5", "0"),
            ("-0.25", "0", "-0.25"),
        ] {
            assert_eq!(n(a).plus(n(b)).expect("fits").text(), sum);
        }
        assert_eq!(n("10").compare(n("9")), Ordering::Greater, "not as texts");
        assert_eq!(n("1.0").compare(n("1")), Ordering::Equal);
        assert_eq!(n(&"9".repeat(38)).compare(n("0.0001")), Ordering::Greater);
        assert!(Decimal::parse(&"9".repeat(39)).is_none());
        assert!(n(&"9".repeat(38)).plus(n("1")).is_none());
        for text in ["", "-", "1e5", "abc", "1.2.3"] {
            assert!(Decimal::parse(text).is_none(), "{text}");
        }
    }
}
