//! `name:rate[/period][:burst]` and `name:number`.

use std::time::Duration;

use zae_limiter::{AMOUNT_MAX, Limit, LimitSet};

use super::Misread;
use super::duration::unit_seconds;
use super::names::limit_name_in;
use super::number::number;

const LIMIT_RULE: &str = "write name:rate[/period][:burst], as in rpm:100, tpm:10000/min:15000 or \
                          uploads:3/5min; the period is sec, min (default), hour or day";
const AMOUNT_RULE: &str = "write name:number, as in rpm:1 or tpm:500";
const ADJUSTMENT_RULE: &str = "write name:difference, as in tpm:1500 or tpm:-200";

/// So much of a limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Amount {
    /// Which limit.
    pub limit: String,
    /// How many tokens.
    pub tokens: u64,
}

/// A signed difference to what was taken of a limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Adjustment {
    /// Which limit.
    pub limit: String,
    /// How many tokens more or less.
    pub difference: i64,
}

/// Reads a limit.
///
/// # Errors
///
/// [`Misread`], pointing at the part that is wrong.
pub fn limit(input: &str) -> Result<Limit, Misread> {
    let (name, rest) = name_and_rest(input, LIMIT_RULE)?;
    let (rate_and_period, burst) = match rest.split_once(':') {
        Some((rate_and_period, burst)) => (rate_and_period, Some(burst)),
        None => (rest, None),
    };
    let (rate, period) = match rate_and_period.split_once('/') {
        Some((rate, text)) => (rate, period(input, text)?),
        None => (rate_and_period, Duration::from_secs(60)),
    };
    let mut limit = Limit::per(name, number(input, rate, LIMIT_RULE)?, period);
    if let Some(burst) = burst {
        limit = limit.burst(number(input, burst, LIMIT_RULE)?);
    }
    // The bounds are the model's; here is only which part of the text is out of them.
    match LimitSet::new([limit.clone()]) {
        Ok(_) => Ok(limit),
        Err(invalid) => {
            let part = match (invalid.field(), burst) {
                ("capacity", Some(burst)) => burst,
                ("refill period", _) => &rate_and_period[rate.len() + 1..],
                _ => rate,
            };
            let at = Misread::place(input, part);
            Err(Misread::new(input, at, format!("{part} is out of bounds"), invalid.rule()))
        }
    }
}

/// Writes a limit as [`limit`] reads it: `rpm:100/min`, `tpm:10000/min:15000`, `uploads:3/5min`.
pub fn limit_text(limit: &Limit) -> String {
    const UNITS: [(u64, &str); 4] = [(86_400, "day"), (3_600, "hour"), (60, "min"), (1, "sec")];
    let seconds = limit.refill_period.as_secs();
    let largest =
        UNITS.into_iter().find(|(unit, _)| seconds >= *unit && seconds.is_multiple_of(*unit));
    let (unit, unit_name) = largest.unwrap_or((1, "sec"));
    let period = match seconds / unit {
        1 => unit_name.to_owned(),
        count => format!("{count}{unit_name}"),
    };
    let rate = format!("{}:{}/{period}", limit.name, limit.refill_amount);
    if limit.capacity == limit.refill_amount { rate } else { format!("{rate}:{}", limit.capacity) }
}

/// Reads an amount.
///
/// # Errors
///
/// [`Misread`], pointing at the part that is wrong.
pub fn amount(input: &str) -> Result<Amount, Misread> {
    let (name, rest) = name_and_rest(input, AMOUNT_RULE)?;
    let tokens = bounded(input, rest, number(input, rest, AMOUNT_RULE)?)?;
    Ok(Amount { limit: name.to_owned(), tokens })
}

/// Reads an adjustment.
///
/// # Errors
///
/// [`Misread`], pointing at the part that is wrong.
pub fn adjustment(input: &str) -> Result<Adjustment, Misread> {
    let (name, rest) = name_and_rest(input, ADJUSTMENT_RULE)?;
    let digits = rest.strip_prefix(['-', '+']).unwrap_or(rest);
    let tokens = bounded(input, rest, number(input, digits, ADJUSTMENT_RULE)?)?;
    let sign = if rest.starts_with('-') { -1 } else { 1 };
    // It fits: an amount is bounded far below.
    let difference = sign * i64::try_from(tokens).unwrap_or(i64::MAX);
    Ok(Adjustment { limit: name.to_owned(), difference })
}

fn bounded(input: &str, part: &str, tokens: u64) -> Result<u64, Misread> {
    if tokens <= AMOUNT_MAX {
        return Ok(tokens);
    }
    let at = Misread::place(input, part);
    Err(Misread::new(
        input,
        at,
        format!("{part} is out of bounds"),
        "use at most 1000000000000 tokens",
    ))
}

fn name_and_rest<'a>(input: &'a str, rule: &str) -> Result<(&'a str, &'a str), Misread> {
    let Some((name, rest)) = input.split_once(':') else {
        return Err(Misread::new(input, input.len()..input.len(), "a colon is missing", rule));
    };
    limit_name_in(input, name)?;
    Ok((name, rest))
}

/// `min`, `5min`.
fn period(input: &str, part: &str) -> Result<Duration, Misread> {
    let digits =
        part.len() - part.trim_start_matches(|c: char| c.is_ascii_digit() || c == '_').len();
    let (count_text, unit) = part.split_at(digits);
    let Some(seconds) = unit_seconds(unit) else {
        let at = Misread::place(input, unit);
        let problem = match unit {
            "" => "the unit of the period is missing".to_owned(),
            unit => format!("{unit:?} is not a period"),
        };
        return Err(Misread::new(input, at, problem, LIMIT_RULE));
    };
    let count = if count_text.is_empty() { 1 } else { number(input, count_text, LIMIT_RULE)? };
    // Too long a period is refused where all bounds are checked.
    Ok(Duration::from_secs(count.saturating_mul(seconds)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_back() {
        let seconds = [1, 59, 60, 61, 90, 300, 3_600, 5_400, 7_200, 86_400, 90_000, 604_800];
        for seconds in seconds.into_iter().chain([zae_limiter::PERIOD_SECONDS_MAX]) {
            for amount in [1, 10_000, zae_limiter::CAPACITY_MAX] {
                for capacity in [1, 15_000, zae_limiter::CAPACITY_MAX] {
                    let period = Duration::from_secs(seconds);
                    let wanted = Limit::per("x.y-z_1", amount, period).burst(capacity);
                    let text = limit_text(&wanted);
                    assert_eq!(limit(&text), Ok(wanted), "{text}");
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
            assert_eq!(limit_text(&limit), text);
        }
    }

    #[test]
    fn limits_are_read() {
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
            assert_eq!(limit(text), Ok(wanted), "{text}");
        }
    }

    #[test]
    fn a_wrong_limit_is_pointed_at() {
        for (text, wrong_part) in [
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
        ] {
            let misread = limit(text).expect_err(text);
            assert_eq!(&text[misread.at()], wrong_part, "{text}: {misread}");
        }
    }

    #[test]
    fn amounts_are_read_or_pointed_at() {
        assert_eq!(amount("tpm:0"), Ok(Amount { limit: "tpm".to_owned(), tokens: 0 }));
        let adjusted = |difference| Ok(Adjustment { limit: "tpm".to_owned(), difference });
        assert_eq!(adjustment("tpm:-200"), adjusted(-200));
        assert_eq!(adjustment("tpm:+200"), adjusted(200));
        assert_eq!(adjustment("tpm:200"), adjusted(200));
        for (text, wrong_part) in [
            ("tpm:-1", "-1"),
            ("tpm", ""),
            ("tpm:1/min", "1/min"),
            ("t:1000000000001", "1000000000001"),
        ] {
            assert_eq!(&text[amount(text).expect_err(text).at()], wrong_part, "{text}");
        }
        for (text, wrong_part) in [("tpm:--1", "-1"), ("tpm:-", ""), ("tpm:", "")] {
            assert_eq!(&text[adjustment(text).expect_err(text).at()], wrong_part, "{text}");
        }
    }
}
