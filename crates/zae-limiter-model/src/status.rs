//! The status of a limit.

use std::fmt::{self, Write as _};
use std::time::Duration;

use crate::json::escape;
use crate::{EntityId, LimitName, Millitokens, Rate, ResourceName};

/// The status of a limit at the moment when it was checked.
///
/// ```
/// # use std::time::Duration;
/// # use zae_limiter_model::{EntityId, Limit, LimitSet, LimitStatus, Millitokens, ResourceName};
/// # let limits = LimitSet::new([Limit::per_minute("tpm", 60)])?;
/// # let status = LimitStatus {
/// #     entity_id: EntityId::new("org-7")?, level: 1, resource: ResourceName::new("gpt-4")?,
/// #     limit_name: limits.names()[0].clone(), rate: limits.rates()[0], available: Millitokens::ZERO,
/// #     requested: Millitokens::new(1_000), exceeded: true,
/// #     retry_after: Duration::from_secs(1), full_after: Duration::from_secs(60),
/// # };
/// assert!(status.exceeded);
/// assert_eq!(status.label(), "tpm@parent"); // a limit of the caller's parent
/// assert_eq!(status.available.whole_tokens(), 0);
/// assert_eq!(status.rate.capacity().whole_tokens(), 60);
/// assert_eq!(status.retry_after, Duration::from_secs(1));
/// # Ok::<(), zae_limiter_model::Invalid>(())
/// ```
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
    /// The balance: after taking when admitted, before it when refused. Negative is debt.
    pub available: Millitokens,
    /// The amount that the call requested.
    pub requested: Millitokens,
    /// Whether this limit refused the call.
    pub exceeded: bool,
    /// The time until the balance covers the requested amount; zero if it did.
    pub retry_after: Duration,
    /// The time until the limit is full.
    pub full_after: Duration,
}

impl LimitStatus {
    /// The limit's name for callers: `tpm`, and for an ancestor's limit `tpm@parent` or `tpm@parent-2`. It never
    /// contains an entity id.
    pub fn label(&self) -> String {
        Label(&self.limit_name, self.level).to_string()
    }

    /// Appends the status as a JSON object, with the entity id: for operators. Amounts are in whole tokens,
    /// `available` rounded down; waits are in seconds, to the millisecond.
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

    /// Appends the fields that do not name the limit's owner.
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
