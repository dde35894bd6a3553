//! JSON as attribute values.

use serde_json::{Map, Number, Value as Json};

use crate::value::{Item, Value};

/// The range of DynamoDB's numbers. Larger ones, and those below the inverse, are stored as text.
const MAGNITUDE_MAX: f64 = 1e125;

/// An object as attributes.
pub(super) fn to_map(object: &Map<String, Json>) -> Item {
    object.iter().map(|(key, value)| (to_key(key), to_value(value))).collect()
}

/// Attributes as an object.
pub fn to_object(map: &Item) -> Map<String, Json> {
    map.iter().map(|(key, value)| (from_key(key), from_value(value))).collect()
}

/// A key that DynamoDB accepts: it must not be empty. The empty key becomes `\`, and a key of
/// backslashes only gets one more.
pub(super) fn to_key(key: &str) -> String {
    if key.bytes().all(|byte| byte == b'\\') { format!("{key}\\") } else { key.to_owned() }
}

/// Undoes [`to_key`].
pub(super) fn from_key(key: &str) -> String {
    let is_escaped = key.bytes().all(|byte| byte == b'\\');
    key.strip_suffix('\\').filter(|_| is_escaped).unwrap_or(key).to_owned()
}

fn to_value(json: &Json) -> Value {
    match json {
        Json::Null => Value::Null,
        Json::Bool(flag) => Value::Bool(*flag),
        Json::String(text) => Value::text(text),
        Json::Array(members) => Value::L(members.iter().map(to_value).collect()),
        Json::Object(object) => Value::M(to_map(object)),
        Json::Number(number) => to_number(number),
    }
}

fn to_number(number: &Number) -> Value {
    let magnitude = number.as_f64().map_or(0.0, f64::abs);
    let fits = magnitude == 0.0 || (1.0 / MAGNITUDE_MAX..MAGNITUDE_MAX).contains(&magnitude);
    if fits { Value::N(number.to_string()) } else { Value::text(number.to_string()) }
}

/// Any attribute value as JSON; null for a type that JSON does not have.
pub(super) fn from_value(value: &Value) -> Json {
    match value {
        Value::S(text) => Json::String(text.clone()),
        Value::N(number) => from_number(number),
        Value::Bool(flag) => Json::Bool(*flag),
        Value::Null | Value::Other(_) => Json::Null,
        Value::M(map) => Json::Object(to_object(map)),
        Value::L(members) => Json::Array(members.iter().map(from_value).collect()),
        Value::Ss(texts) => Json::Array(texts.iter().cloned().map(Json::String).collect()),
    }
}

fn from_number(text: &str) -> Json {
    let whole = text.parse::<i64>().map(Number::from);
    let whole = whole.or_else(|_| text.parse::<u64>().map(Number::from)).ok();
    let number = whole.or_else(|| text.parse().ok().and_then(Number::from_f64));
    number.map_or_else(|| Json::String(text.to_owned()), Json::Number)
}
