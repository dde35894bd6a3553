//! Numbers formatted for people.

/// `1234567` as `1,234,567`.
pub(crate) fn grouped(number: impl Into<i128>) -> String {
    let number = number.into();
    let digits = number.unsigned_abs().to_string();
    let mut text = if number < 0 { "-".to_owned() } else { String::new() };
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// `41234` as `41.2k`: at most five characters and a sign, rounded toward zero.
pub(crate) fn compact(number: impl Into<i128>) -> String {
    const UNITS: [&str; 7] = ["", "k", "M", "G", "T", "P", "E"];
    let number = number.into();
    let sign = if number < 0 { "-" } else { "" };
    let number = number.unsigned_abs();
    let (mut at, mut unit) = (0, 1_u128);
    while at + 1 < UNITS.len() && number >= unit * 1_000 {
        (at, unit) = (at + 1, unit * 1_000);
    }
    let tenths = number / (unit / 10).max(1);
    if at == 0 || tenths >= 1_000 || tenths.is_multiple_of(10) {
        return format!("{sign}{}{}", number / unit, UNITS[at]);
    }
    format!("{sign}{}.{}{}", tenths / 10, tenths % 10, UNITS[at])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_short_and_true() {
        for (number, with_commas, short) in [
            (0, "0", "0"),
            (7, "7", "7"),
            (999, "999", "999"),
            (1_000, "1,000", "1k"),
            (1_999, "1,999", "1.9k"),
            (-41_234, "-41,234", "-41.2k"),
            (99_999, "99,999", "99.9k"),
            (123_456, "123,456", "123k"),
            (1_234_567, "1,234,567", "1.2M"),
            (i128::from(u64::MAX), "18,446,744,073,709,551,615", "18.4E"),
        ] {
            assert_eq!(grouped(number), with_commas);
            assert_eq!(compact(number), short);
        }
    }
}
