//! Limits, `name:rate[/period][:burst]`, and amounts, `name:number`.

use zae_limiter::Limit;
use zae_limiter::model::{AMOUNT_MAX, ParseLimitError};

use super::Misread;
use super::names::limit_name_in;
use super::number::number;

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
    input.parse().map_err(|error: ParseLimitError| {
        Misread::new(input, error.at(), error.problem(), error.rule())
    })
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_limit_is_pointed_at() {
        for (text, wrong_part) in [("rpm:1/week", "week"), ("r pm:1", " "), ("rpm:1:0", "0")] {
            let misread = limit(text).expect_err(text);
            assert_eq!(&text[misread.at()], wrong_part, "{text}: {misread}");
        }
        assert_eq!(limit("tpm:5:6"), Ok(Limit::per_minute("tpm", 5).burst(6)));
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
