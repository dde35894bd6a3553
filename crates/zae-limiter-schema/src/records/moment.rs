//! Timestamps in the table: texts in whole seconds, and `ttl` in seconds since the epoch.

use zae_limiter_core::{Timestamp, format_time};

use super::reader::Reader;
use super::{remove, set};
use crate::bucket::ttl_of;
use crate::expression::Action;
use crate::value::{Malformed, Value};

const TTL: &str = "ttl";

/// The attribute with the milliseconds, which the first one does not have. No limit can have this name.
/// It is a text, because other clients read every number on a usage item as the usage of a limit.
fn exact(attribute: &str) -> String {
    format!("{attribute}#ms")
}

fn push_exact(actions: &mut Vec<Action>, attribute: &str, moment: Timestamp, stored: Timestamp) {
    let name = exact(attribute);
    if stored == moment {
        remove(actions, &name);
    } else {
        set(actions, &name, Value::text(moment.as_millis().to_string()));
    }
}

fn read_exact(reader: &Reader<'_>, attribute: &str) -> Result<Option<Timestamp>, Malformed> {
    let name = exact(attribute);
    let Some(text) = reader.text_if_any(&name)? else { return Ok(None) };
    let millis = text.parse().map_err(|_| reader.malformed(&name, "milliseconds"))?;
    Ok(Some(Timestamp::from_millis(millis)))
}

fn parse(text: &str) -> Option<Timestamp> {
    let moment: jiff::Timestamp = text.parse().ok()?;
    Some(Timestamp::from_millis(moment.as_millisecond()))
}

/// Writes a timestamp as text.
pub(super) fn push(actions: &mut Vec<Action>, attribute: &str, moment: Timestamp) {
    let text = format_time(moment);
    let stored = parse(&text).expect("a formatted time parses");
    set(actions, attribute, Value::S(text));
    push_exact(actions, attribute, moment, stored);
}

/// Removes a timestamp.
pub(super) fn push_none(actions: &mut Vec<Action>, attribute: &str) {
    remove(actions, attribute);
    remove(actions, &exact(attribute));
}

/// Reads a timestamp that must exist.
pub(super) fn read(reader: &Reader<'_>, attribute: &str) -> Result<Timestamp, Malformed> {
    read_if_any(reader, attribute)?.ok_or_else(|| reader.malformed(attribute, "present"))
}

/// Reads a timestamp, if there is one.
pub(super) fn read_if_any(
    reader: &Reader<'_>,
    attribute: &str,
) -> Result<Option<Timestamp>, Malformed> {
    let Some(text) = reader.text_if_any(attribute)? else { return Ok(None) };
    let stored = parse(text).ok_or_else(|| reader.malformed(attribute, "an ISO 8601 time"))?;
    let exact = read_exact(reader, attribute)?.filter(|exact| format_time(*exact) == text);
    Ok(Some(exact.unwrap_or(stored)))
}

/// Writes when an item expires.
pub(super) fn push_ttl(actions: &mut Vec<Action>, expires_at: Option<Timestamp>) {
    match expires_at {
        None => push_none(actions, TTL),
        Some(moment) => {
            let seconds = ttl_of(moment);
            set(actions, TTL, Value::number(seconds));
            push_exact(actions, TTL, moment, of_ttl(seconds));
        }
    }
}

/// Reads when an item expires.
pub(super) fn read_ttl(reader: &Reader<'_>) -> Result<Option<Timestamp>, Malformed> {
    let Some(value) = reader.value(TTL) else { return Ok(None) };
    let seconds = value.as_i64().ok_or_else(|| reader.malformed(TTL, "a whole number"))?;
    let exact = read_exact(reader, TTL)?.filter(|exact| ttl_of(*exact) == seconds);
    Ok(Some(exact.unwrap_or_else(|| of_ttl(seconds))))
}

fn of_ttl(seconds: i64) -> Timestamp {
    Timestamp::from_millis(seconds.saturating_mul(1_000))
}
