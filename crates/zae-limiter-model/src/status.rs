//! How one limit stood when it was checked.

use std::fmt::{self, Write as _};
use std::time::Duration;

use crate::json::escape;
use crate::{EntityId, LimitName, Millitokens, Rate, ResourceName};

/// How one limit stood when it was checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LimitStatus {
    /// The owner of the limit: the caller, or an ancestor.
    pub entity_id: EntityId,
    /// 0 for the caller's own limit, 1 for its parent's, and so on.
    pub level: usize,
    /// The resource that the call is for.
    pub resource: ResourceName,
    /// The limit's name.
    pub limit_name: LimitName,
    /// Its ceiling and rate.
    pub rate: Rate,
    /// The balance: after the taking when admitted, before it when refused. Negative is debt.
    pub available: Millitokens,
    /// The amount that the call asked for.
    pub requested: Millitokens,
    /// Whether this limit refused the call.
    pub exceeded: bool,
    /// How long until the requested amount is there; zero when it was.
    pub retry_after: Duration,
    /// How long until the limit is full again.
    pub full_after: Duration,
}

impl LimitStatus {
    /// The limit's name for people outside: `tpm`, and for an ancestor's limit `tpm@parent` or `tpm@parent-2`. It
    /// never contains an entity id.
    pub fn label(&self) -> String {
        Label(&self.limit_name, self.level).to_string()
    }

    /// Appends the status as a JSON object, with the entity id: for logs and operators. Amounts are in whole
    /// tokens, `available` rounded down; waits are in seconds, to the millisecond.
    pub fn write_json(&self, out: &mut String) {
        out.push_str("{\"entity_id\":");
        escape(out, self.entity_id.as_str());
        out.push_str(",\"resource\":");
        escape(out, self.resource.as_str());
        out.push_str(",\"limit_name\":");
        escape(out, self.limit_name.as_str());
        self.write_numbers(out);
        out.push_str(",\"soft\":false}");
    }

    /// Everything about the limit that has no owner in it.
    pub(crate) fn write_numbers(&self, out: &mut String) {
        let _ = write!(
            out,
            ",\"kind\":\"rate\",\"capacity\":{},\"refill_amount\":{},\"refill_period_seconds\":{},\
             \"available\":{},\"requested\":{},\"exceeded\":{},\"retry_after_seconds\":{}",
            self.rate.capacity().whole_tokens(),
            self.rate.refill_amount().whole_tokens(),
            Seconds(Duration::from_millis(self.rate.period_ms())),
            self.available.whole_tokens(),
            self.requested.whole_tokens(),
            self.exceeded,
            Seconds(self.retry_after),
        );
    }
}

/// The name of a limit and the level of its owner.
pub(crate) struct Label<'a>(pub(crate) &'a LimitName, pub(crate) usize);

impl fmt::Display for Label<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.1 {
            0 => write!(f, "{}", self.0),
            1 => write!(f, "{}@parent", self.0),
            level => write!(f, "{}@parent-{level}", self.0),
        }
    }
}

/// A duration as decimal seconds with as many digits as it needs, at most three. Rounded up.
pub(crate) struct Seconds(pub(crate) Duration);

impl fmt::Display for Seconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let millis = millis_rounded_up(self.0);
        write!(f, "{}", millis / 1_000)?;
        match millis % 1_000 {
            0 => Ok(()),
            rest => write!(f, ".{}", format!("{rest:03}").trim_end_matches('0')),
        }
    }
}

pub(crate) fn millis_rounded_up(wait: Duration) -> u128 {
    wait.as_nanos().div_ceil(1_000_000)
}
