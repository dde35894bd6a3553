//! Limits as people write them: `name:rate[/period][:burst]`.

use std::fmt;
use std::ops::Range;
use std::str::FromStr;
use std::time::Duration;

use crate::{Invalid, Limit, LimitName, LimitSet};

const RULE: &str = "write name:rate[/period][:burst], as in rpm:100, tpm:10000/min:15000 or \
                    uploads:3/5min; the period is sec, min (default), hour or day";

/// The units of a period, largest first: their seconds, and the name that `Display` writes.
const UNITS: [(u64, &str); 4] = [(86_400, "day"), (3_600, "hour"), (60, "min"), (1, "sec")];

/// Seconds in a unit of time, by any of its names: `s`, `sec`, `min`, `hours`, `d` and so on.
pub fn unit_seconds(unit: &str) -> Option<u64> {
    Some(match unit {
        "s" | "sec" | "second" | "seconds" => 1,
        "m" | "min" | "minute" | "minutes" => 60,
        "h" | "hour" | "hours" => 3_600,
        "d" | "day" | "days" => 86_400,
        _ => return None,
    })
}

/// A text that is not a limit: what is wrong, where, and how a limit is written.
///
/// ```
/// let error = "rpm:100/week".parse::<zae_limiter_model::Limit>().unwrap_err();
/// assert_eq!(error.problem(), "\"week\" is not a period");
/// assert_eq!(&"rpm:100/week"[error.at()], "week");
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParseLimitError {
    input: String,
    at: Range<usize>,
    problem: String,
    rule: &'static str,
}

impl ParseLimitError {
    fn new(input: &str, wrong: &str, problem: String, rule: &'static str) -> Self {
        let start = wrong.as_ptr().addr().saturating_sub(input.as_ptr().addr()).min(input.len());
        let at = start..(start + wrong.len()).min(input.len());
        Self { input: input.to_owned(), at, problem, rule }
    }

    /// The bytes of the input that are wrong; empty where something is missing.
    pub fn at(&self) -> Range<usize> {
        self.at.clone()
    }

    /// What is wrong.
    pub fn problem(&self) -> &str {
        &self.problem
    }

    /// How to write it.
    pub fn rule(&self) -> &'static str {
        self.rule
    }
}

impl fmt::Display for ParseLimitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "invalid limit {:?}: {}; {}", self.input, self.problem, self.rule)
    }
}

impl std::error::Error for ParseLimitError {}

impl From<ParseLimitError> for Invalid {
    fn from(error: ParseLimitError) -> Self {
        Self::new("limit", error.input, error.rule)
    }
}

/// Reads `name:rate[/period][:burst]`: `rpm:100`, `tpm:10000/min:15000`, `uploads:3/5min`. Digits may have `_` between
/// them. The limit is checked: a text that parses is a valid limit.
impl FromStr for Limit {
    type Err = ParseLimitError;

    fn from_str(input: &str) -> Result<Self, ParseLimitError> {
        let wrong = |part: &str, problem: String| ParseLimitError::new(input, part, problem, RULE);
        let Some((name, rest)) = input.split_once(':') else {
            return Err(wrong(&input[input.len()..], "a colon is missing".to_owned()));
        };
        check_name(input, name)?;
        let (rate_and_period, burst) = match rest.split_once(':') {
            Some((rate_and_period, burst)) => (rate_and_period, Some(burst)),
            None => (rest, None),
        };
        let (rate, period_text) = match rate_and_period.split_once('/') {
            Some((rate, period)) => (rate, Some(period)),
            None => (rate_and_period, None),
        };
        let number = |part| number(part).map_err(|problem| wrong(part, problem));
        let period = match period_text {
            Some(text) => period(text).map_err(|(part, problem)| wrong(part, problem))?,
            None => Duration::from_secs(60),
        };
        let mut limit = Self::per(name, number(rate)?, period);
        if let Some(burst) = burst {
            limit = limit.burst(number(burst)?);
        }
        // The limit set checks the bounds; this finds the part of the text that is out of them.
        let Err(invalid) = LimitSet::new([limit.clone()]) else { return Ok(limit) };
        let part = match (invalid.field(), burst, period_text) {
            ("capacity", Some(burst), _) => burst,
            ("refill period", _, Some(period)) => period,
            _ => rate,
        };
        let problem = format!("{part} is out of bounds");
        Err(ParseLimitError::new(input, part, problem, invalid.rule()))
    }
}

/// Writes the limit as it is read: `rpm:100/min`, `tpm:10000/min:15000`, `uploads:3/5min`.
impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}/", self.name, self.refill_amount)?;
        let seconds = self.refill_period.as_secs();
        let fits = |(unit, _): &(u64, &str)| seconds >= *unit && seconds.is_multiple_of(*unit);
        let (unit, name) = UNITS.into_iter().find(fits).unwrap_or((1, "sec"));
        match seconds / unit {
            1 => f.write_str(name)?,
            count => write!(f, "{count}{name}")?,
        }
        match self.capacity == self.refill_amount {
            true => Ok(()),
            false => write!(f, ":{}", self.capacity),
        }
    }
}

/// Points at the first character that a name cannot have there, or at all of it.
fn check_name(input: &str, name: &str) -> Result<(), ParseLimitError> {
    let Err(invalid) = LimitName::new(name) else { return Ok(()) };
    // Each character is checked alone, after a letter.
    let is_wrong = |(at, c): &(usize, char)| {
        LimitName::new(format!("a{c}")).is_err()
            || (*at == 0 && LimitName::new(c.to_string()).is_err())
    };
    let part = match name.char_indices().find(is_wrong) {
        Some((at, c)) => &name[at..at + c.len_utf8()],
        // Too long, empty or reserved.
        None => name,
    };
    let problem = match part {
        _ if name.is_empty() => "the limit name is missing".to_owned(),
        _ if part.len() == name.len() && name.len() > 1 => {
            format!("{name:?} cannot be a limit name")
        }
        part => format!("{part:?} cannot stand here in a limit name"),
    };
    Err(ParseLimitError::new(input, part, problem, invalid.rule()))
}

/// A whole number; `_` may stand between digits, as in `10_000`.
fn number(text: &str) -> Result<u64, String> {
    if text.is_empty() {
        return Err("a number is missing".to_owned());
    }
    let is_digits = |group: &str| !group.is_empty() && group.bytes().all(|b| b.is_ascii_digit());
    if !text.split('_').all(is_digits) {
        return Err(format!("{text:?} is not a whole number"));
    }
    text.replace('_', "").parse().map_err(|_| format!("{text} is too large"))
}

/// `min`, `5min`. The error names the part that is wrong.
fn period(text: &str) -> Result<Duration, (&str, String)> {
    let is_digit = |c: char| c.is_ascii_digit() || c == '_';
    let (count, unit) = text.split_at(text.len() - text.trim_start_matches(is_digit).len());
    let Some(seconds) = unit_seconds(unit) else {
        return Err((
            unit,
            match unit {
                "" => "the unit of the period is missing".to_owned(),
                unit => format!("{unit:?} is not a period"),
            },
        ));
    };
    let count = match count {
        "" => 1,
        count => number(count).map_err(|problem| (count, problem))?,
    };
    // The limit set rejects a period that is too long.
    Ok(Duration::from_secs(count.saturating_mul(seconds)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CAPACITY_MAX, PERIOD_SECONDS_MAX};

    #[test]
    fn a_limit_is_read_back_as_it_was_written() {
        let seconds = [1, 59, 60, 61, 90, 300, 3_600, 5_400, 7_200, 86_400, 90_000, 604_800];
        for seconds in seconds.into_iter().chain([PERIOD_SECONDS_MAX]) {
            for amount in [1, 10_000, CAPACITY_MAX] {
                for capacity in [1, 15_000, CAPACITY_MAX] {
                    let period = Duration::from_secs(seconds);
                    let wanted = Limit::per("x.y-z_1", amount, period).burst(capacity);
                    let text = wanted.to_string();
                    assert_eq!(text.parse(), Ok(wanted), "{text}");
                }
            }
        }
        for (limit, text) in [
            (Limit::per_minute("rpm", 100), "rpm:100/min"),
            (Limit::per_minute("tpm", 10_000).burst(15_000), "tpm:10000/min:15000"),
            (Limit::per("u", 3, Duration::from_secs(300)), "u:3/5min"),
            (Limit::per("u", 3, Duration::from_secs(90)), "u:3/90sec"),
            (Limit::per_hour("u", 3), "u:3/hour"),
            (Limit::per_day("u", 3), "u:3/day"),
        ] {
            assert_eq!(limit.to_string(), text);
        }
    }

    #[test]
    fn limits_are_read_in_all_forms() {
        for (text, wanted) in [
            ("rpm:100", Limit::per_minute("rpm", 100)),
            ("rpm:100/min", Limit::per_minute("rpm", 100)),
            ("tpm:10_000/min:15000", Limit::per_minute("tpm", 10_000).burst(15_000)),
            ("tpm:10000:15000", Limit::per_minute("tpm", 10_000).burst(15_000)),
            ("x.y-z_1:1/sec", Limit::per_second("x.y-z_1", 1)),
            ("d:1/day", Limit::per_day("d", 1)),
            ("h:2/2hours", Limit::per("h", 2, Duration::from_secs(7_200))),
            ("u:3/5min", Limit::per("u", 3, Duration::from_secs(300))),
        ] {
            assert_eq!(text.parse(), Ok(wanted), "{text}");
        }
    }

    #[test]
    fn an_error_points_at_what_is_wrong() {
        for (text, wrong_part) in [
            ("", ""),
            ("rpm", ""),
            (":1", ""),
            ("r pm:1", " "),
            ("rpm#1:1", "#"),
            ("wcu:1", "wcu"),
            ("1rpm:1", "1"),
            ("rpm:", ""),
            ("rpm:x", "x"),
            ("rpm:-1", "-1"),
            ("rpm:1.5", "1.5"),
            ("rpm:0", "0"),
            ("rpm:1:0", "0"),
            ("rpm:1:", ""),
            ("rpm:1/", ""),
            ("rpm:1/5", ""),
            ("rpm:1/week", "week"),
            ("rpm:1/0min", "0min"),
            ("rpm:1/99999999days", "99999999days"),
            ("rpm:1000000000001", "1000000000001"),
            ("rpm:99999999999999999999", "99999999999999999999"),
            ("rpm:1/min:2:3", "2:3"),
            ("rüm:1", "ü"),
            ("rpm:١", "١"),
        ] {
            let error = text.parse::<Limit>().expect_err(text);
            assert_eq!(&text[error.at()], wrong_part, "{text}: {error}");
        }
    }
}
