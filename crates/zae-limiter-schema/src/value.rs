//! Attribute values, and items made of them.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use zae_limiter_core::EntityId;

/// The value of an attribute.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Value {
    /// Text.
    S(String),
    /// A number, as DynamoDB writes it: up to 38 digits, perhaps with a fraction.
    N(String),
    /// True or false.
    Bool(bool),
    /// Nothing, said explicitly.
    Null,
    /// Attributes within an attribute.
    M(BTreeMap<String, Value>),
    /// A list.
    L(Vec<Value>),
    /// A set of texts, never empty.
    Ss(BTreeSet<String>),
    /// A kind of value that nothing of ours is stored as (binary, sets of numbers), with its size.
    Other(usize),
}

/// An item, or a part of one: attributes by name.
pub type Item = BTreeMap<String, Value>;

impl Value {
    /// A whole number.
    pub fn number(number: i64) -> Self {
        Self::N(number.to_string())
    }

    /// Text.
    pub fn text(text: impl Into<String>) -> Self {
        Self::S(text.into())
    }

    /// The whole number, if it is one that fits.
    pub fn as_i64(&self) -> Option<i64> {
        match self {
            Self::N(number) => number.parse().ok(),
            _ => None,
        }
    }

    /// The text, if it is one.
    pub fn as_str(&self) -> Option<&str> {
        match self {
            Self::S(text) => Some(text),
            _ => None,
        }
    }

    /// The bytes it counts for when DynamoDB bills the item.
    pub fn size(&self) -> usize {
        match self {
            Self::S(text) => text.len(),
            // Two digits to a byte, and one more; a sign takes another.
            Self::N(number) => {
                let digits = number.trim_start_matches('-').trim_start_matches('0');
                let digits = digits.bytes().filter(u8::is_ascii_digit).count();
                digits.div_ceil(2) + 1 + usize::from(number.starts_with('-'))
            }
            Self::Bool(_) | Self::Null => 1,
            Self::M(members) => {
                3 + members.iter().map(|(name, value)| name.len() + value.size() + 1).sum::<usize>()
            }
            Self::L(members) => 3 + members.iter().map(|value| value.size() + 1).sum::<usize>(),
            Self::Ss(texts) => texts.iter().map(String::len).sum(),
            Self::Other(size) => *size,
        }
    }
}

/// The bytes an item counts for when DynamoDB bills it.
pub fn item_size(item: &Item) -> usize {
    item.iter().map(|(name, value)| name.len() + value.size()).sum()
}

/// An item that is not what its key says: which one, which attribute, and what is wrong with it. Its text
/// goes into logs, so it names the entity by a hash; [`item`](Self::item) has the key itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Malformed {
    /// The item's key, where it is known.
    pub item: String,
    /// The attribute.
    pub attribute: String,
    /// What it should be.
    pub wanted: &'static str,
}

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let item = without_entity(&self.item);
        write!(f, "item {item}: attribute {} should be {}", self.attribute, self.wanted)
    }
}

/// A key with the entity's hash instead of its id.
fn without_entity(key: &str) -> String {
    for kind in ["/BUCKET#", "/ENTITY#", "/AUDIT#", "/PARENT#"] {
        let Some(start) = key.find(kind).map(|at| at + kind.len()) else { continue };
        let end = key[start..].find(['#', ' ']).map_or(key.len(), |length| start + length);
        if let Ok(entity) = EntityId::new(&key[start..end]) {
            return format!("{}{entity:?}{}", &key[..start], &key[end..]);
        }
    }
    key.to_owned()
}

impl std::error::Error for Malformed {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_of_a_malformed_item_names_no_entity() {
        for (key, shown) in [
            (
                "abcdefghijk/BUCKET#sk-1#gpt-4#0 #STATE",
                "abcdefghijk/BUCKET#entity:fb136a19#gpt-4#0 #STATE",
            ),
            ("abcdefghijk/ENTITY#sk-1 #META", "abcdefghijk/ENTITY#entity:fb136a19 #META"),
            ("abcdefghijk/AUDIT#sk-1 #AUDIT#01", "abcdefghijk/AUDIT#entity:fb136a19 #AUDIT#01"),
            ("abcdefghijk/AUDIT#$SYSTEM #AUDIT#01", "abcdefghijk/AUDIT#$SYSTEM #AUDIT#01"),
            ("abcdefghijk/RESOURCE#gpt-4 #CONFIG", "abcdefghijk/RESOURCE#gpt-4 #CONFIG"),
        ] {
            assert_eq!(without_entity(key), shown);
        }
    }

    #[test]
    fn sizes_are_those_that_dynamodb_bills() {
        for (value, size) in [
            (Value::text("abc"), 3),
            (Value::number(0), 1),
            (Value::number(7), 2),
            (Value::number(1_000), 3),
            (Value::number(-1_000), 4),
            (Value::Bool(true), 1),
            (Value::Null, 1),
            (Value::M(Item::from([("a".to_owned(), Value::text("b"))])), 6),
            (Value::Ss(BTreeSet::from(["ab".to_owned(), "c".to_owned()])), 3),
        ] {
            assert_eq!(value.size(), size, "{value:?}");
        }
    }
}
