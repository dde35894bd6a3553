use super::Misread;

/// A whole number; `_` may stand between digits, as in `10_000`.
pub(super) fn number(input: &str, part: &str, rule: &str) -> Result<u64, Misread> {
    let wrong =
        |problem: String| Err(Misread::new(input, Misread::place(input, part), problem, rule));
    if part.is_empty() {
        return wrong("a number is missing".to_owned());
    }
    let is_digits = |group: &str| !group.is_empty() && group.bytes().all(|b| b.is_ascii_digit());
    if !part.split('_').all(is_digits) {
        return wrong(format!("{part:?} is not a whole number"));
    }
    match part.replace('_', "").parse() {
        Ok(number) => Ok(number),
        Err(_) => wrong(format!("{part} is too large")),
    }
}
