//! Parses records of a DynamoDB stream, in the JSON that Lambda passes to a function.
//!
//! Every record is parsed on its own, so that an invalid one does not affect the others. Errors
//! never quote a record: it may contain entity ids, which are often API keys.

use std::collections::BTreeSet;
use std::fmt;
use std::time::Duration;

use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;
use zae_limiter_core::Timestamp;
use zae_limiter_schema::records::booking::{Position, stream_label};
use zae_limiter_schema::{Item, ItemKey, Value};

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
    /// The item before the change.
    pub old: Option<Item>,
    /// The item after the change.
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
    let event: Event<'_> = serde_json::from_str(json)?;
    Ok(event.records.into_iter().map(|record| read_record(record.get())).collect())
}

/// Parses one record.
///
/// # Errors
///
/// [`Unreadable`], with the sequence number if that much parses.
pub fn read_record(json: &str) -> Result<StreamRecord, Unreadable> {
    let read = serde_json::from_str::<Raw>(json).map_err(|error| unquoted(&error));
    let record = read.and_then(Raw::into_record);
    record.map_err(|message| Unreadable { sequence_number: number_of(json), message })
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
struct Event<'a> {
    #[serde(rename = "Records", borrow, default)]
    records: Vec<&'a RawValue>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Raw {
    event_name: String,
    #[serde(rename = "eventSourceARN", default)]
    source: String,
    #[serde(default)]
    user_identity: Option<UserIdentity>,
    dynamodb: RawChange,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct UserIdentity {
    #[serde(default)]
    principal_id: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct RawChange {
    keys: Attributes,
    #[serde(default)]
    old_image: Option<Attributes>,
    #[serde(default)]
    new_image: Option<Attributes>,
    sequence_number: String,
    approximate_creation_date_time: f64,
}

/// The principal that deletes expired items.
pub(crate) const EXPIRY_PRINCIPAL: &str = "dynamodb.amazonaws.com";

impl Raw {
    fn into_record(self) -> Result<StreamRecord, String> {
        let RawChange { keys, old_image, new_image, sequence_number, .. } = self.dynamodb;
        let expired =
            self.user_identity.is_some_and(|identity| identity.principal_id == EXPIRY_PRINCIPAL);
        let kind = match self.event_name.as_str() {
            "INSERT" => EventKind::Insert,
            "MODIFY" => EventKind::Modify,
            "REMOVE" if expired => EventKind::Expire,
            "REMOVE" => EventKind::Remove,
            other => return Err(format!("eventName is {other}, not INSERT, MODIFY or REMOVE")),
        };
        let text = |name: &str| {
            let text = keys.0.get(name).and_then(Value::as_str);
            text.map(str::to_owned).ok_or_else(|| format!("its key has no string {name}"))
        };
        let key = ItemKey::new(text("PK")?, text("SK")?);
        let label = stream_label(&self.source).ok_or("eventSourceARN names no stream")?;
        let position = Position::new(label, &sequence_number)
            .ok_or_else(|| format!("SequenceNumber is not a number: {sequence_number}"))?;
        Ok(StreamRecord {
            kind,
            key,
            old: old_image.map(|image| image.0),
            new: new_image.map(|image| image.0),
            at: moment(self.dynamodb.approximate_creation_date_time)?,
            position,
            sequence_number,
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

/// An item in DynamoDB's JSON: `{"name": {"S": "text"}}`.
struct Attributes(Item);

impl<'de> Deserialize<'de> for Attributes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct All;
        impl<'de> Visitor<'de> for All {
            type Value = Attributes;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("attributes by name")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Attributes, A::Error> {
                let mut item = Item::new();
                while let Some((name, Attribute(value))) = map.next_entry::<String, Attribute>()? {
                    item.insert(name, value);
                }
                Ok(Attributes(item))
            }
        }
        deserializer.deserialize_map(All)
    }
}

/// A value in DynamoDB's JSON: an object whose only key is the type.
struct Attribute(Value);

impl<'de> Deserialize<'de> for Attribute {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct One;
        impl<'de> Visitor<'de> for One {
            type Value = Attribute;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an attribute value such as {\"N\": \"5\"}")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Attribute, A::Error> {
                let Some(kind) = map.next_key::<Kind>()? else {
                    return Err(serde::de::Error::invalid_length(0, &self));
                };
                let value = match kind {
                    Kind::S => Value::S(map.next_value()?),
                    Kind::N => Value::N(map.next_value()?),
                    Kind::Bool => Value::Bool(map.next_value()?),
                    Kind::Null => {
                        map.next_value::<IgnoredAny>()?;
                        Value::Null
                    }
                    Kind::M => Value::M(map.next_value::<Attributes>()?.0),
                    Kind::L => {
                        let members: Vec<Self::Value> = map.next_value()?;
                        Value::L(members.into_iter().map(|member| member.0).collect())
                    }
                    Kind::Ss => Value::Ss(map.next_value::<BTreeSet<String>>()?),
                    // The limiter stores no other types.
                    Kind::Other => {
                        map.next_value::<IgnoredAny>()?;
                        Value::Other(0)
                    }
                };
                while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
                Ok(Attribute(value))
            }
        }
        deserializer.deserialize_map(One)
    }
}

#[derive(Deserialize)]
enum Kind {
    S,
    N,
    #[serde(rename = "BOOL")]
    Bool,
    #[serde(rename = "NULL")]
    Null,
    M,
    L,
    #[serde(rename = "SS")]
    Ss,
    #[serde(other)]
    Other,
}
