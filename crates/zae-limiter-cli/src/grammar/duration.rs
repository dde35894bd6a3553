//! `10s`, `500ms`, `1h30m`.

use std::time::Duration;

use zae_limiter::model::grammar::unit_seconds;

use super::Misread;
use super::number::number;

const RULE: &str = "write a number and a unit, as in 500ms, 10s, 5min, 1h30m or 7d";

/// The longest duration that is accepted: a hundred years.
const SECONDS_MAX: u64 = 100 * 366 * 86_400;

/// Reads a duration.
///
/// # Errors
///
/// [`Misread`], pointing at the part that is wrong.
pub fn duration(input: &str) -> Result<Duration, Misread> {
    let wrong = |part: &str, problem: String| {
        Err(Misread::new(input, Misread::place(input, part), problem, RULE))
    };
    if input.is_empty() {
        return wrong(input, "a duration is missing".to_owned());
    }
    let mut sum = Duration::ZERO;
    let mut rest = input;
    while !rest.is_empty() {
        let is_digit = |c: char| c.is_ascii_digit() || c == '_';
        let digits = rest.find(|c| !is_digit(c)).unwrap_or(rest.len());
        let (count_text, after) = rest.split_at(digits);
        if count_text.is_empty() {
            return wrong(rest, format!("{rest:?} does not start with a number"));
        }
        let count = number(input, count_text, RULE)?;
        let letters = after.find(is_digit).unwrap_or(after.len());
        let (unit, further) = after.split_at(letters);
        let part = match unit {
            "ms" => Duration::from_millis(count),
            _ => match unit_seconds(unit) {
                Some(seconds) => Duration::from_secs(count.saturating_mul(seconds)),
                None if unit.is_empty() => return wrong(unit, "a unit is missing".to_owned()),
                None => return wrong(unit, format!("{unit:?} is not a unit of time")),
            },
        };
        sum = sum.saturating_add(part);
        if sum > Duration::from_secs(SECONDS_MAX) {
            return wrong(rest, "more than a hundred years".to_owned());
        }
        rest = further;
    }
    Ok(sum)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_read_or_pointed_at() {
        for (text, millis) in [
            ("500ms", 500),
            ("10s", 10_000),
            ("0s", 0),
            ("1h30m", 5_400_000),
            ("2min", 120_000),
            ("7days", 604_800_000),
            ("1_000ms", 1_000),
        ] {
            assert_eq!(duration(text), Ok(Duration::from_millis(millis)), "{text}");
        }
        for (text, wrong_part) in [
            ("", ""),
            ("10", ""),
            ("s", "s"),
            ("1.5s", "."),
            ("-1s", "-1s"),
            ("10 s", " s"),
            ("3weeks", "weeks"),
            ("1h30", ""),
            ("99999999999d", "99999999999d"),
            ("99999999999999999999s", "99999999999999999999"),
        ] {
            assert_eq!(&text[duration(text).expect_err(text).at()], wrong_part, "{text}");
        }
    }
}
