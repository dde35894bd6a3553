//! Reading attributes, with errors that name the item and the attribute.

use std::str::FromStr;

use crate::keys::ItemKey;
use crate::value::{Item, Malformed, Value};

/// An item that is being read.
pub(super) struct Reader<'a> {
    key: ItemKey,
    pub(super) item: &'a Item,
}

impl<'a> Reader<'a> {
    pub(super) fn new(key: ItemKey, item: &'a Item) -> Self {
        Self { key, item }
    }

    pub(super) fn malformed(&self, attribute: &str, wanted: &'static str) -> Malformed {
        Malformed { item: self.key.to_string(), attribute: attribute.to_owned(), wanted }
    }

    /// The attribute; null counts as absent.
    pub(super) fn value(&self, attribute: &str) -> Option<&'a Value> {
        self.item.get(attribute).filter(|value| **value != Value::Null)
    }

    /// A text, if there is one.
    pub(super) fn text_if_any(&self, attribute: &str) -> Result<Option<&'a str>, Malformed> {
        match self.value(attribute) {
            None => Ok(None),
            Some(Value::S(text)) => Ok(Some(text)),
            Some(_) => Err(self.malformed(attribute, "text")),
        }
    }

    /// A text that must exist.
    pub(super) fn text(&self, attribute: &str) -> Result<&'a str, Malformed> {
        self.text_if_any(attribute)?.ok_or_else(|| self.malformed(attribute, "present"))
    }

    /// A name that must exist and be valid.
    pub(super) fn name<T: FromStr>(&self, attribute: &str) -> Result<T, Malformed> {
        let text = self.text(attribute)?;
        text.parse().map_err(|_| self.malformed(attribute, "a legal name"))
    }

    /// A name, if there is one. It must be valid.
    pub(super) fn name_if_any<T: FromStr>(&self, attribute: &str) -> Result<Option<T>, Malformed> {
        let text = self.text_if_any(attribute)?;
        let name = text.map(str::parse).transpose();
        name.map_err(|_| self.malformed(attribute, "a legal name"))
    }

    /// True or false; absent is false.
    pub(super) fn flag(&self, attribute: &str) -> Result<bool, Malformed> {
        match self.value(attribute) {
            None => Ok(false),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(_) => Err(self.malformed(attribute, "true or false")),
        }
    }

    /// A whole number that is not negative; absent is 0.
    pub(super) fn count(&self, attribute: &str) -> Result<u64, Malformed> {
        match self.value(attribute) {
            None => Ok(0),
            Some(value) => {
                let number = value.as_i64().and_then(|number| u64::try_from(number).ok());
                number.ok_or_else(|| self.malformed(attribute, "a whole number of at least 0"))
            }
        }
    }

    /// A map, if there is one.
    pub(super) fn map(&self, attribute: &str) -> Result<Option<&'a Item>, Malformed> {
        match self.value(attribute) {
            None => Ok(None),
            Some(Value::M(map)) => Ok(Some(map)),
            Some(_) => Err(self.malformed(attribute, "a map")),
        }
    }
}
