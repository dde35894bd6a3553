//! Moments as the table has them: texts to the second, and `ttl` in seconds since the epoch.

use zae_limiter_core::{Timestamp, format_time};

use super::reader::Reader;
use super::{remove, set};
use crate::bucket::ttl_of;
use crate::expression::Action;
use crate::value::{Malformed, Value};

const TTL: &str = "ttl";

/// Where the milliseconds stand that the attribute itself cannot say. No limit can be called so, and
/// it is a text, because other clients take every number on a usage item for a limit's.
fn exact(attribute: &str) -> String {
    format!("{attribute}#ms")
}

fn push_exact(actions: &mut Vec<Action>, attribute: &str, moment: Timestamp, said: Timestamp) {
    let name = exact(attribute);
    if said == moment {
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

/// Writes a moment as text.
pub(super) fn push(actions: &mut Vec<Action>, attribute: &str, moment: Timestamp) {
    let text = format_time(moment);
    let said = parse(&text).expect("a formatted time can be read");
    set(actions, attribute, Value::S(text));
    push_exact(actions, attribute, moment, said);
}

/// Takes a moment away.
pub(super) fn push_none(actions: &mut Vec<Action>, attribute: &str) {
    remove(actions, attribute);
    remove(actions, &exact(attribute));
}

/// Reads a moment that must be there.
pub(super) fn read(reader: &Reader<'_>, attribute: &str) -> Result<Timestamp, Malformed> {
    read_if_any(reader, attribute)?.ok_or_else(|| reader.malformed(attribute, "there"))
}

/// Reads a moment, if there is one.
pub(super) fn read_if_any(
    reader: &Reader<'_>,
    attribute: &str,
) -> Result<Option<Timestamp>, Malformed> {
    let Some(text) = reader.text_if_any(attribute)? else { return Ok(None) };
    let said = parse(text).ok_or_else(|| reader.malformed(attribute, "a time of ISO 8601"))?;
    let exact = read_exact(reader, attribute)?.filter(|exact| format_time(*exact) == text);
    Ok(Some(exact.unwrap_or(said)))
}

/// Writes when an item may be deleted.
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

/// Reads when an item may be deleted.
pub(super) fn read_ttl(reader: &Reader<'_>) -> Result<Option<Timestamp>, Malformed> {
    let Some(value) = reader.value(TTL) else { return Ok(None) };
    let seconds = value.as_i64().ok_or_else(|| reader.malformed(TTL, "a whole number"))?;
    let exact = read_exact(reader, TTL)?.filter(|exact| ttl_of(*exact) == seconds);
    Ok(Some(exact.unwrap_or_else(|| of_ttl(seconds))))
}

fn of_ttl(seconds: i64) -> Timestamp {
    Timestamp::from_millis(seconds.saturating_mul(1_000))
}
