//! Attribute values, and items made of them.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use zae_limiter_core::EntityId;

/// The value of an attribute.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Value {
    /// Text.
    S(String),
    /// A number as DynamoDB writes it: up to 38 digits, with or without a fraction.
    N(String),
    /// True or false.
    Bool(bool),
    /// The explicit null.
    Null,
    /// A map of attributes.
    M(BTreeMap<String, Value>),
    /// A list.
    L(Vec<Value>),
    /// A set of texts, never empty.
    Ss(BTreeSet<String>),
    /// A type that we never write (binary, set of numbers, set of binaries), with its size in bytes.
    Other(usize),
}

/// An item, or some attributes of one, by name.
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

    /// The value as a whole number, if it is one and fits.
    pub fn as_i64(&self) -> Option<i64> {
        match self {
            Self::N(number) => number.parse().ok(),
            _ => None,
        }
    }

    /// The value as text, if it is one.
    pub fn as_str(&self) -> Option<&str> {
        match self {
            Self::S(text) => Some(text),
            _ => None,
        }
    }

    /// Its size in bytes, as DynamoDB bills it.
    pub fn size(&self) -> usize {
        match self {
            Self::S(text) => text.len(),
            // Two digits a byte, one more byte, and another one for a minus sign.
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

/// The size of an item in bytes, as DynamoDB bills it.
pub fn item_size(item: &Item) -> usize {
    item.iter().map(|(name, value)| name.len() + value.size()).sum()
}

/// An item with a missing or invalid attribute. Its text goes into logs, so it shows a hash in place of
/// the entity id; [`item`](Self::item) has the key itself.
#[derive(Clone, PartialEq, Eq)]
pub struct Malformed {
    /// The item's key, with the entity id.
    pub item: String,
    /// The name of the attribute.
    pub attribute: String,
    /// What the attribute should be.
    pub wanted: &'static str,
}

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let item = without_entity(&self.item);
        write!(f, "item {item}: attribute {} should be {}", self.attribute, self.wanted)
    }
}

// By hand: `{:?}` of an error goes into logs, too.
impl fmt::Debug for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Malformed")
            .field("item", &without_entity(&self.item))
            .field("attribute", &self.attribute)
            .field("wanted", &self.wanted)
            .finish()
    }
}

/// A key with a hash of the entity id in place of the id.
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
    fn the_text_of_a_malformed_item_contains_no_entity_id() {
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
            let (item, attribute) = (key.to_owned(), "rf".to_owned());
            let malformed = Malformed { item, attribute, wanted: "a whole number" };
            for text in [malformed.to_string(), format!("{malformed:?}")] {
                assert!(text.contains(shown), "{text}");
                assert!(!text.contains("sk-1"), "{text}");
            }
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
