//! Values as serde reads and writes them, behind the feature `serde`.

use std::fmt;
use std::time::Duration;

use serde::de::{self, MapAccess, Visitor};
use serde::ser::SerializeStruct;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::{
    EntityId, Limit, LimitName, LimitSet, LimitStatus, Millitokens, NamespaceId, NamespaceName,
    PublicRefusal, RateLimitExceeded, ResourceName, StackName, Timestamp,
};

macro_rules! as_text {
    ($($name:ident),+) => {$(
        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(self.as_str())
            }
        }

        /// Checked: a name that breaks its rule is an error.
        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let text = std::borrow::Cow::<'de, str>::deserialize(deserializer)?;
                Self::new(text).map_err(de::Error::custom)
            }
        }
    )+};
}

as_text!(EntityId, LimitName, ResourceName, NamespaceName, NamespaceId, StackName);

/// Milliseconds since the epoch.
impl Serialize for Timestamp {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_i64(self.as_millis())
    }
}

/// Milliseconds since the epoch.
impl<'de> Deserialize<'de> for Timestamp {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        i64::deserialize(deserializer).map(Self::from_millis)
    }
}

/// A map of `name`, `capacity`, `refill_amount` and `refill_period_seconds`. A period with a fraction of a second, which
/// no valid limit has, is an error.
impl Serialize for Limit {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if self.refill_period.subsec_nanos() != 0 {
            return Err(serde::ser::Error::custom("a refill period has whole seconds"));
        }
        let mut map = serializer.serialize_struct("Limit", 4)?;
        map.serialize_field("name", &self.name)?;
        map.serialize_field("capacity", &self.capacity)?;
        map.serialize_field("refill_amount", &self.refill_amount)?;
        map.serialize_field("refill_period_seconds", &self.refill_period.as_secs())?;
        map.end()
    }
}

/// A text such as `tpm:10000/min:15000`, or a map. In a map, `refill_amount` defaults to the capacity and
/// `refill_period_seconds` to 60. The limit is checked.
impl<'de> Deserialize<'de> for Limit {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(LimitVisitor)
    }
}

struct LimitVisitor;

impl<'de> Visitor<'de> for LimitVisitor {
    type Value = Limit;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a limit: name:rate[/period][:burst], or a map with name and capacity")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Limit, E> {
        text.parse().map_err(E::custom)
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Limit, A::Error> {
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Fields {
            name: String,
            capacity: u64,
            refill_amount: Option<u64>,
            #[serde(default = "a_minute")]
            refill_period_seconds: u64,
        }
        const fn a_minute() -> u64 {
            60
        }
        let fields = Fields::deserialize(de::value::MapAccessDeserializer::new(map))?;
        let limit = Limit {
            name: fields.name,
            capacity: fields.capacity,
            refill_amount: fields.refill_amount.unwrap_or(fields.capacity),
            refill_period: Duration::from_secs(fields.refill_period_seconds),
        };
        LimitSet::new([limit.clone()]).map_err(de::Error::custom)?;
        Ok(limit)
    }
}

/// The list of its limits.
impl Serialize for LimitSet {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.to_limits())
    }
}

/// A list of limits, each name once.
impl<'de> Deserialize<'de> for LimitSet {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let limits = Vec::<Limit>::deserialize(deserializer)?;
        Self::new(limits).map_err(de::Error::custom)
    }
}

/// Thousandths of a token.
impl Serialize for Millitokens {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_i64(self.get())
    }
}

/// Thousandths of a token.
impl<'de> Deserialize<'de> for Millitokens {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        i64::deserialize(deserializer).map(Self::new)
    }
}

/// Seconds, to the millisecond, rounded up: a whole number where there is no fraction.
struct Seconds(u128);

impl Serialize for Seconds {
    #[expect(clippy::cast_precision_loss, reason = "exact up to 2^53 ms, which is 285,000 years")]
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match u64::try_from(self.0 / 1_000) {
            Ok(whole) if self.0.is_multiple_of(1_000) => serializer.serialize_u64(whole),
            _ => serializer.serialize_f64(self.0 as f64 / 1_000.0),
        }
    }
}

fn seconds(wait: Duration) -> Seconds {
    Seconds(crate::status::millis_rounded_up(wait))
}

/// Writes the fields that do not name the limit's owner.
fn numbers<M: SerializeStruct>(map: &mut M, status: &LimitStatus) -> Result<(), M::Error> {
    map.serialize_field("kind", "rate")?;
    map.serialize_field("capacity", &status.rate.capacity().whole_tokens())?;
    map.serialize_field("refill_amount", &status.rate.refill_amount().whole_tokens())?;
    let period = seconds(Duration::from_millis(status.rate.period_ms()));
    map.serialize_field("refill_period_seconds", &period)?;
    map.serialize_field("available", &status.available.whole_tokens())?;
    map.serialize_field("requested", &status.requested.whole_tokens())?;
    map.serialize_field("exceeded", &status.exceeded)?;
    map.serialize_field("retry_after_seconds", &seconds(status.retry_after))
}

/// The fields of [`LimitStatus::write_json`], including the entity id: for operators.
impl Serialize for LimitStatus {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_struct("LimitStatus", 12)?;
        map.serialize_field("entity_id", &self.entity_id)?;
        map.serialize_field("resource", &self.resource)?;
        map.serialize_field("limit_name", &self.limit_name)?;
        numbers(&mut map, self)?;
        map.serialize_field("soft", &false)?;
        map.end()
    }
}

fn head<M: SerializeStruct>(map: &mut M, refusal: &RateLimitExceeded) -> Result<(), M::Error> {
    map.serialize_field("error", "rate_limit_exceeded")?;
    map.serialize_field("message", &refusal.to_string())?;
    map.serialize_field("retry_after_seconds", &seconds(refusal.retry_after()))?;
    let millis = crate::status::millis_rounded_up(refusal.retry_after());
    map.serialize_field("retry_after_ms", &u64::try_from(millis).unwrap_or(u64::MAX))
}

/// The fields of [`RateLimitExceeded::to_json`]: for operators. Send the
/// [public](RateLimitExceeded::public) form to a caller.
impl Serialize for RateLimitExceeded {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_struct("RateLimitExceeded", 6)?;
        head(&mut map, self)?;
        map.serialize_field("contended", &false)?;
        map.serialize_field("limits", self.statuses())?;
        map.end()
    }
}

/// The fields of [`PublicRefusal::to_json`].
impl Serialize for PublicRefusal<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        struct Shown<'a>(&'a LimitStatus);

        impl Serialize for Shown<'_> {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                let Self(status) = self;
                let length = if status.level == 0 { 9 } else { 3 };
                let mut map = serializer.serialize_struct("PublicStatus", length)?;
                map.serialize_field("limit_name", &status.label())?;
                match status.level {
                    0 => numbers(&mut map, status)?,
                    _ => {
                        map.serialize_field("exceeded", &true)?;
                        map.serialize_field("retry_after_seconds", &seconds(status.retry_after))?;
                    }
                }
                map.end()
            }
        }

        let mut map = serializer.serialize_struct("PublicRefusal", 6)?;
        head(&mut map, self.whole())?;
        map.serialize_field("resource", &self.whole().primary_violation().resource)?;
        let shown: Vec<Shown<'_>> = self.statuses().map(Shown).collect();
        map.serialize_field("limits", &shown)?;
        map.end()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_is_read_from_text_or_a_map_and_checked() {
        let wanted = Limit::per_minute("tpm", 10_000).burst(15_000);
        let written = serde_json::to_string(&wanted).unwrap();
        assert_eq!(
            written,
            "{\"name\":\"tpm\",\"capacity\":15000,\"refill_amount\":10000,\
             \"refill_period_seconds\":60}"
        );
        for text in [&*written, "\"tpm:10000/min:15000\""] {
            assert_eq!(serde_json::from_str::<Limit>(text).unwrap(), wanted, "{text}");
        }
        let plain: Limit = serde_json::from_str("{\"name\":\"rpm\",\"capacity\":5}").unwrap();
        assert_eq!(plain, Limit::per_minute("rpm", 5));
        for wrong in [
            "\"tpm\"",
            "{\"name\":\"tpm\"}",
            "{\"name\":\"wcu\",\"capacity\":1}",
            "{\"name\":\"tpm\",\"capacity\":0}",
            "{\"name\":\"tpm\",\"capacity\":1,\"burst\":2}",
            "{\"name\":\"tpm\",\"capacity\":1,\"refill_period_seconds\":0}",
            "7",
        ] {
            assert!(serde_json::from_str::<Limit>(wrong).is_err(), "{wrong}");
        }
        let twice = "[\"rpm:1\",\"rpm:2\"]";
        assert!(serde_json::from_str::<LimitSet>(twice).is_err());
        assert_eq!(serde_json::from_str::<LimitSet>("[\"rpm:1\"]").unwrap().len(), 1);
    }

    #[test]
    fn names_are_checked() {
        let id: EntityId = serde_json::from_str("\"key-1\"").unwrap();
        assert_eq!(serde_json::to_string(&id).unwrap(), "\"key-1\"");
        let error = serde_json::from_str::<EntityId>("\"sk-live#0123456789\"").unwrap_err();
        assert!(!error.to_string().contains("0123"), "{error}");
    }

    #[test]
    fn a_refusal_is_written_as_its_own_json() {
        let limits = LimitSet::new([Limit::per_minute("tpm", 10)]).unwrap();
        let status = |level| LimitStatus {
            entity_id: EntityId::new("someone").unwrap(),
            level,
            resource: ResourceName::new("gpt-4").unwrap(),
            limit_name: limits.names()[0].clone(),
            rate: limits.rates()[0],
            available: Millitokens::new(-1),
            requested: Millitokens::new(2_000),
            exceeded: true,
            retry_after: Duration::from_millis(1_500),
            full_after: Duration::from_secs(60),
        };
        let refusal = RateLimitExceeded::new(vec![status(0), status(1)]);
        let same = |by_hand: &str, by_serde: serde_json::Value| {
            let by_hand: serde_json::Value = serde_json::from_str(by_hand).unwrap();
            assert_eq!(by_hand, by_serde);
        };
        same(&refusal.to_json(), serde_json::to_value(&refusal).unwrap());
        same(&refusal.public().to_json(), serde_json::to_value(refusal.public()).unwrap());
    }
}
