use super::Misread;

/// A whole number; `_` may stand between digits, as in `10_000`.
pub(super) fn number(input: &str, part: &str, rule: &str) -> Result<u64, Misread> {
    let wrong =
        |problem: String| Err(Misread::new(input, Misread::place(input, part), problem, rule));
    let starts_with_digit = part.starts_with(|c: char| c.is_ascii_digit());
    if part.is_empty() {
        return wrong("a number is missing".to_owned());
    }
    if !starts_with_digit || !part.chars().all(|c| c.is_ascii_digit() || c == '_') {
        return wrong(format!("{part:?} is not a whole number"));
    }
    match part.replace('_', "").parse() {
        Ok(number) => Ok(number),
        Err(_) => wrong(format!("{part} is too large")),
    }
}
