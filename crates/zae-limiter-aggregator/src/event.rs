//! Parses records of a DynamoDB stream, in the JSON that Lambda passes to a function.
//!
//! An invalid record does not affect the others: if the event does not parse in one pass, every record is parsed on its
//! own. Errors never quote a record: it may contain entity ids, which are often API keys.
//!
//! Texts are borrowed from the JSON, and copied only into the parts of an item that a change is derived from.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::fmt;
use std::time::Duration;

use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;
use zae_limiter_core::Timestamp;
use zae_limiter_schema::records::booking::{Position, stream_label};
use zae_limiter_schema::{Item, ItemKey, Value, change};

/// The kind of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventKind {
    /// The item was created.
    Insert,
    /// The item was changed.
    Modify,
    /// A client deleted the item.
    Remove,
    /// DynamoDB deleted the item because it had expired.
    Expire,
}

/// One change of one item.
#[derive(Clone, Debug, PartialEq)]
pub struct StreamRecord {
    /// The kind of the change.
    pub kind: EventKind,
    /// The key of the item.
    pub key: ItemKey,
    /// The item before the change. Of a change by a client it may have only the [attributes that are
    /// compared](zae_limiter_schema::change::is_compared).
    pub old: Option<Item>,
    /// The item after the change. It may lack the [keys](zae_limiter_schema::change::is_key).
    pub new: Option<Item>,
    /// The time of the change, to the second.
    pub at: Timestamp,
    /// The position of the change in the stream.
    pub position: Position,
    /// The sequence number, which identifies the record in its stream.
    pub sequence_number: String,
}

/// A record that does not parse.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unreadable {
    /// The sequence number, if that much of the record parses.
    pub sequence_number: Option<String>,
    /// What is wrong with the record, without quoting it.
    pub message: String,
}

/// Parses an event of Lambda. An event without `Records` has none.
///
/// # Errors
///
/// If it is not an event at all.
pub fn read_event(json: &str) -> Result<Vec<Result<StreamRecord, Unreadable>>, serde_json::Error> {
    if let Ok(event) = serde_json::from_str::<Event<Read>>(json) {
        return Ok(event.records.into_iter().map(|record| record.0).collect());
    }
    let event: Event<&RawValue> = serde_json::from_str(json)?;
    Ok(event.records.into_iter().map(|record| read_record(record.get())).collect())
}

/// Parses one record.
///
/// # Errors
///
/// [`Unreadable`], with the sequence number if that much parses.
pub fn read_record(json: &str) -> Result<StreamRecord, Unreadable> {
    match serde_json::from_str::<Raw<'_>>(json) {
        Ok(record) => record.into_record(),
        Err(error) => {
            Err(Unreadable { sequence_number: number_of(json), message: unquoted(&error) })
        }
    }
}

/// Describes a JSON error by its place. Its own text would quote the value that is wrong.
pub(crate) fn unquoted(error: &serde_json::Error) -> String {
    use serde_json::error::Category;
    let what = match error.classify() {
        Category::Data => "a field is missing or has the wrong type",
        Category::Syntax => "a syntax error",
        Category::Eof | Category::Io => "it ends too early",
    };
    format!("{what} at line {}, column {}", error.line(), error.column())
}

/// The sequence number of a record whose other fields may be invalid.
fn number_of(json: &str) -> Option<String> {
    let record: serde_json::Value = serde_json::from_str(json).ok()?;
    Some(record.get("dynamodb")?.get("SequenceNumber")?.as_str()?.to_owned())
}

#[derive(Deserialize)]
struct Event<T> {
    #[serde(rename = "Records", default = "Vec::new")]
    records: Vec<T>,
}

/// A record that is converted as soon as it is parsed, so that only one is in memory twice.
struct Read(Result<StreamRecord, Unreadable>);

impl<'de> Deserialize<'de> for Read {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Ok(Self(Raw::deserialize(deserializer)?.into_record()))
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Raw<'a> {
    #[serde(borrow)]
    event_name: Text<'a>,
    #[serde(rename = "eventSourceARN", default)]
    source: Text<'a>,
    #[serde(default)]
    user_identity: Option<UserIdentity<'a>>,
    dynamodb: RawChange<'a>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct UserIdentity<'a> {
    #[serde(borrow, default)]
    principal_id: Text<'a>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct RawChange<'a> {
    #[serde(borrow)]
    keys: Image<'a>,
    #[serde(default)]
    old_image: Option<Image<'a>>,
    #[serde(default)]
    new_image: Option<Image<'a>>,
    sequence_number: Text<'a>,
    approximate_creation_date_time: f64,
}

/// The principal that deletes expired items.
pub(crate) const EXPIRY_PRINCIPAL: &str = "dynamodb.amazonaws.com";

impl Raw<'_> {
    fn into_record(self) -> Result<StreamRecord, Unreadable> {
        let sequence_number = self.dynamodb.sequence_number.0.clone().into_owned();
        self.convert(&sequence_number)
            .map_err(|message| Unreadable { sequence_number: Some(sequence_number), message })
    }

    fn convert(self, sequence_number: &str) -> Result<StreamRecord, String> {
        let RawChange { keys, old_image, new_image, .. } = self.dynamodb;
        let expired =
            self.user_identity.is_some_and(|identity| identity.principal_id.0 == EXPIRY_PRINCIPAL);
        let kind = match &*self.event_name.0 {
            "INSERT" => EventKind::Insert,
            "MODIFY" => EventKind::Modify,
            "REMOVE" if expired => EventKind::Expire,
            "REMOVE" => EventKind::Remove,
            other => return Err(format!("eventName is {other}, not INSERT, MODIFY or REMOVE")),
        };
        let text = |name: &str| {
            let text = keys.text(name);
            text.map(str::to_owned).ok_or_else(|| format!("its key has no string {name}"))
        };
        let key = ItemKey::new(text("PK")?, text("SK")?);
        let label = stream_label(&self.source.0).ok_or("eventSourceARN names no stream")?;
        let position = Position::new(label, sequence_number)
            .ok_or_else(|| format!("SequenceNumber is not a number: {sequence_number}"))?;
        let is_whole = kind == EventKind::Expire;
        Ok(StreamRecord {
            kind,
            key,
            old: old_image
                .map(|image| image.into_item(|name| is_whole || change::is_compared(name))),
            new: new_image.map(|image| image.into_item(|name| !change::is_key(name))),
            at: moment(self.dynamodb.approximate_creation_date_time)?,
            position,
            sequence_number: sequence_number.to_owned(),
        })
    }
}

/// Parses seconds since 1970-01-01 UTC.
fn moment(seconds: f64) -> Result<Timestamp, String> {
    let since = Duration::try_from_secs_f64(seconds).ok();
    let millis = since.and_then(|since| i64::try_from(since.as_millis()).ok());
    let millis =
        millis.ok_or_else(|| format!("ApproximateCreationDateTime is out of range: {seconds}"))?;
    Ok(Timestamp::from_millis(millis))
}

/// Text that is borrowed from the JSON, unless it has escapes.
#[derive(Default)]
struct Text<'a>(Cow<'a, str>);

impl<'de: 'a, 'a> Deserialize<'de> for Text<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Any;
        impl<'de> Visitor<'de> for Any {
            type Value = Text<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("text")
            }

            fn visit_borrowed_str<E>(self, text: &'de str) -> Result<Text<'de>, E> {
                Ok(Text(Cow::Borrowed(text)))
            }

            fn visit_str<E>(self, text: &str) -> Result<Text<'de>, E> {
                Ok(Text(Cow::Owned(text.to_owned())))
            }
        }
        deserializer.deserialize_str(Any)
    }
}

/// An item in DynamoDB's JSON, in its order: `{"name": {"S": "text"}}`.
struct Image<'a>(Vec<(Text<'a>, Attribute<'a>)>);

impl Image<'_> {
    fn text(&self, name: &str) -> Option<&str> {
        let (_, value) = self.0.iter().rev().find(|(other, _)| other.0 == name)?;
        match value {
            Attribute::S(text) => Some(&text.0),
            _ => None,
        }
    }

    /// The item, as far as it is needed.
    fn into_item(self, is_needed: impl Fn(&str) -> bool) -> Item {
        let needed = self.0.into_iter().filter(|(name, _)| is_needed(&name.0));
        needed.map(|(name, value)| (name.0.into_owned(), value.into_value())).collect()
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for Image<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct All;
        impl<'de> Visitor<'de> for All {
            type Value = Image<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("attributes by name")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Image<'de>, A::Error> {
                let mut attributes = Vec::with_capacity(ATTRIBUTES);
                while let Some(attribute) = map.next_entry()? {
                    attributes.push(attribute);
                }
                Ok(Image(attributes))
            }
        }
        deserializer.deserialize_map(All)
    }
}

/// The attributes of a bucket with two limits: most images have room in one allocation.
const ATTRIBUTES: usize = 32;

/// A value in DynamoDB's JSON: an object whose only key is the type.
enum Attribute<'a> {
    S(Text<'a>),
    N(Text<'a>),
    Other(Value),
}

impl Attribute<'_> {
    fn into_value(self) -> Value {
        match self {
            Self::S(text) => Value::S(text.0.into_owned()),
            Self::N(number) => Value::N(number.0.into_owned()),
            Self::Other(value) => value,
        }
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for Attribute<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct One;
        impl<'de> Visitor<'de> for One {
            type Value = Attribute<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an attribute value such as {\"N\": \"5\"}")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Attribute<'de>, A::Error> {
                let Some(kind) = map.next_key::<Text<'_>>()? else {
                    return Err(serde::de::Error::invalid_length(0, &self));
                };
                let value = match &*kind.0 {
                    "S" => Attribute::S(map.next_value()?),
                    "N" => Attribute::N(map.next_value()?),
                    "BOOL" => Attribute::Other(Value::Bool(map.next_value()?)),
                    "NULL" => {
                        map.next_value::<IgnoredAny>()?;
                        Attribute::Other(Value::Null)
                    }
                    "M" => {
                        let members: Image<'_> = map.next_value()?;
                        Attribute::Other(Value::M(members.into_item(|_| true)))
                    }
                    "L" => {
                        let members: Vec<Self::Value> = map.next_value()?;
                        let members = members.into_iter().map(Attribute::into_value);
                        Attribute::Other(Value::L(members.collect()))
                    }
                    "SS" => Attribute::Other(Value::Ss(map.next_value::<BTreeSet<String>>()?)),
                    // The limiter stores no other types.
                    _ => {
                        map.next_value::<IgnoredAny>()?;
                        Attribute::Other(Value::Other(0))
                    }
                };
                while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
                Ok(value)
            }
        }
        deserializer.deserialize_map(One)
    }
}
