//! Thousandths as decimal numbers: millitokens as tokens, milliseconds as seconds. Whole numbers have no
//! fraction; other clients read and write only those.

use crate::value::Value;

/// A number of thousandths as a decimal number.
pub(super) fn thousandths(number: i64) -> Value {
    let sign = if number < 0 { "-" } else { "" };
    let (whole, rest) = (number.unsigned_abs() / 1_000, number.unsigned_abs() % 1_000);
    Value::N(match rest {
        0 => format!("{sign}{whole}"),
        _ => format!("{sign}{whole}.{}", format!("{rest:03}").trim_end_matches('0')),
    })
}

/// A decimal number in thousandths; `None` if it has more than three decimals, or does not fit.
pub(super) fn in_thousandths(value: &Value) -> Option<i64> {
    let Value::N(number) = value else { return None };
    let (negative, digits) = match number.strip_prefix('-') {
        Some(digits) => (true, digits),
        None => (false, number.as_str()),
    };
    let (whole, fraction) = digits.split_once('.').unwrap_or((digits, ""));
    let fraction = fraction.trim_end_matches('0');
    let is_decimal = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    if fraction.len() > 3 || !is_decimal(whole) || !is_decimal(fraction) || whole.is_empty() {
        return None;
    }
    let magnitude: i128 = format!("{whole}{fraction:0<3}").parse().ok()?;
    i64::try_from(if negative { -magnitude } else { magnitude }).ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_number_is_read_as_it_was_written(number: i64) {
            prop_assert_eq!(in_thousandths(&thousandths(number)), Some(number));
        }

        #[test]
        fn any_text_is_read_or_refused(text in "[-+0-9.eE]{0,12}") {
            let _ = in_thousandths(&Value::N(text));
        }
    }

    #[test]
    fn whole_numbers_have_no_fraction() {
        for (number, text) in
            [(0, "0"), (5_000, "5"), (-1, "-0.001"), (1_500, "1.5"), (-10, "-0.01")]
        {
            assert_eq!(thousandths(number), Value::N(text.to_owned()));
        }
        for text in ["", ".5", "1.0001", "1e3", "--1", "9223372036854775.808", "+1"] {
            assert_eq!(in_thousandths(&Value::N(text.to_owned())), None, "{text}");
        }
        assert_eq!(in_thousandths(&Value::N("1.5000".to_owned())), Some(1_500));
    }
}
