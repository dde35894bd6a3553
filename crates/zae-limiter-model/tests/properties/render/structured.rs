//! A strict reader of structured fields (RFC 9651), as far as the crate writes them: lists of
//! strings with integer parameters.

/// A string with its parameters.
#[derive(Clone, Debug)]
pub(crate) struct Item {
    pub(crate) text: String,
    pub(crate) parameters: Vec<(String, i64)>,
}

/// Reads a whole field value as a list.
pub(crate) fn list(value: &str) -> Result<Vec<Item>, String> {
    let mut items = Vec::new();
    let mut rest = value;
    while !rest.is_empty() {
        if !items.is_empty() {
            rest = rest.strip_prefix(", ").ok_or_else(|| format!("no comma at {rest:?}"))?;
        }
        let (item, after) = item(rest)?;
        items.push(item);
        rest = after;
    }
    Ok(items)
}

fn item(input: &str) -> Result<(Item, &str), String> {
    let quoted = input.strip_prefix('"').ok_or_else(|| format!("no string at {input:?}"))?;
    let (text, mut rest) = quoted.split_once('"').ok_or_else(|| format!("open at {input:?}"))?;
    // A backslash would have to escape something; the crate's names hold none.
    if !text.bytes().all(|b| (0x20..0x7f).contains(&b) && b != b'\\') {
        return Err(format!("not a plain string: {text:?}"));
    }
    let mut parameters = Vec::new();
    while let Some(parameter) = rest.strip_prefix(';') {
        let end = parameter.find([';', ',']).unwrap_or(parameter.len());
        let (parameter, after) = parameter.split_at(end);
        parameters.push(key_and_integer(parameter)?);
        rest = after;
    }
    Ok((Item { text: text.to_owned(), parameters }, rest))
}

fn key_and_integer(parameter: &str) -> Result<(String, i64), String> {
    let fail = || format!("not a parameter: {parameter:?}");
    let (key, value) = parameter.split_once('=').ok_or_else(fail)?;
    let is_key = |key: &str| !key.is_empty() && key.bytes().all(|b| b.is_ascii_lowercase());
    let digits = value.strip_prefix('-').unwrap_or(value);
    let fits = (1..=15).contains(&digits.len()) && digits.bytes().all(|b| b.is_ascii_digit());
    if !is_key(key) || !fits {
        return Err(fail());
    }
    Ok((key.to_owned(), value.parse().map_err(|_| fail())?))
}
