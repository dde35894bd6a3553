//! Converts our values to the SDK's, and back.

use std::collections::HashMap;

use aws_sdk_dynamodb::types::AttributeValue;
use zae_limiter_schema::{Item, Value};

fn value_to_sdk(value: Value) -> AttributeValue {
    match value {
        Value::S(text) => AttributeValue::S(text),
        Value::N(number) => AttributeValue::N(number),
        Value::Bool(bool) => AttributeValue::Bool(bool),
        // We never write other types.
        Value::Null | Value::Other(_) => AttributeValue::Null(true),
        Value::M(members) => AttributeValue::M(to_sdk(members)),
        Value::L(members) => AttributeValue::L(members.into_iter().map(value_to_sdk).collect()),
        Value::Ss(texts) => AttributeValue::Ss(texts.into_iter().collect()),
    }
}

fn value_from_sdk(value: AttributeValue) -> Value {
    match value {
        AttributeValue::S(text) => Value::S(text),
        AttributeValue::N(number) => Value::N(number),
        AttributeValue::Bool(bool) => Value::Bool(bool),
        AttributeValue::Null(_) => Value::Null,
        AttributeValue::M(members) => Value::M(from_sdk(members)),
        AttributeValue::L(members) => Value::L(members.into_iter().map(value_from_sdk).collect()),
        AttributeValue::Ss(texts) => Value::Ss(texts.into_iter().collect()),
        AttributeValue::B(bytes) => Value::Other(bytes.as_ref().len()),
        AttributeValue::Bs(all) => Value::Other(all.iter().map(|bytes| bytes.as_ref().len()).sum()),
        AttributeValue::Ns(all) => {
            Value::Other(all.into_iter().map(|number| Value::N(number).size()).sum())
        }
        _ => Value::Other(1),
    }
}

pub(super) fn to_sdk(item: Item) -> HashMap<String, AttributeValue> {
    item.into_iter().map(|(name, value)| (name, value_to_sdk(value))).collect()
}

pub(super) fn from_sdk(item: HashMap<String, AttributeValue>) -> Item {
    item.into_iter().map(|(name, value)| (name, value_from_sdk(value))).collect()
}

/// `None` for no names: DynamoDB refuses an empty map of names or values.
pub(super) fn names_to_sdk(names: Vec<(String, String)>) -> Option<HashMap<String, String>> {
    (!names.is_empty()).then(|| names.into_iter().collect())
}

pub(super) fn values_to_sdk(
    values: Vec<(String, Value)>,
) -> Option<HashMap<String, AttributeValue>> {
    let to_sdk = |(alias, value)| (alias, value_to_sdk(value));
    (!values.is_empty()).then(|| values.into_iter().map(to_sdk).collect())
}
