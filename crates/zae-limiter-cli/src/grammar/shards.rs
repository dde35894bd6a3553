use super::Misread;

/// Parses a number of shards.
///
/// # Errors
///
/// [`Misread`], when it is not a power of two up to 64.
pub fn shards(input: &str) -> Result<u32, Misread> {
    const RULE: &str = "write 1, 2, 4, 8, 16, 32 or 64, several with commas: 1,8";
    let problem = match input.parse::<u32>() {
        Ok(shards @ 1..=64) if shards.is_power_of_two() => return Ok(shards),
        Ok(1..=64) => "the number of shards is a power of two",
        Ok(_) => "a bucket has 1 to 64 shards",
        Err(_) if input.is_empty() => "a number is missing",
        Err(_) => "this is not a number",
    };
    Err(Misread::new(input, 0..input.len(), problem, RULE))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_are_powers_of_two_up_to_64() {
        for (text, number) in [("1", 1), ("2", 2), ("64", 64)] {
            assert_eq!(shards(text), Ok(number));
        }
        for text in ["", "0", "3", "128", "-1", "eight", "1.0", "99999999999"] {
            let misread = shards(text).expect_err(text);
            assert_eq!(misread.at(), 0..text.len(), "{text}");
        }
    }
}
