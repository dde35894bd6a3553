//! What a caller may see of a refusal.

use std::fmt;
use std::time::Duration;

use crate::json::escape;
use crate::status::Seconds;
use crate::{LimitStatus, RateLimitExceeded};

/// What a caller may see of a [`RateLimitExceeded`]. It contains no entity ids. An ancestor's limit appears only if it
/// refused the call, as `tpm@parent`, without ceiling, rate or balance.
///
/// ```
/// # use zae_limiter_model::{EntityId, Limit, LimitSet, LimitStatus, Millitokens, RateLimitExceeded, ResourceName};
/// # let limits = LimitSet::new([Limit::per_minute("tpm", 60)])?;
/// # let refusal = RateLimitExceeded::new(vec![LimitStatus {
/// #     entity_id: EntityId::new("org-7")?, level: 1, resource: ResourceName::new("gpt-4")?,
/// #     limit_name: limits.names()[0].clone(), rate: limits.rates()[0], available: Millitokens::ZERO,
/// #     requested: Millitokens::new(1_000), exceeded: true,
/// #     retry_after: std::time::Duration::from_secs(1), full_after: std::time::Duration::from_secs(60),
/// # }]);
/// let body = refusal.public().to_json();
/// assert!(body.contains("tpm@parent") && !body.contains("org-7"));
/// # Ok::<(), zae_limiter_model::Invalid>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct PublicRefusal<'a>(&'a RateLimitExceeded);

impl<'a> PublicRefusal<'a> {
    pub(crate) fn new(refusal: &'a RateLimitExceeded) -> Self {
        Self(refusal)
    }

    #[cfg(feature = "serde")]
    pub(crate) fn whole(&self) -> &'a RateLimitExceeded {
        self.0
    }

    /// The limits that the caller may see: its own, and those of ancestors that refused it. Only the
    /// [label](LimitStatus::label) and the wait of an ancestor's status may be shown.
    #[cfg(feature = "serde")]
    pub(crate) fn statuses(&self) -> impl Iterator<Item = &'a LimitStatus> {
        visible(self.0.statuses())
    }

    /// How long to wait until the same request passes, if nobody else takes tokens.
    pub fn retry_after(&self) -> Duration {
        self.0.retry_after()
    }

    /// The body of a 429 response, as a JSON object.
    pub fn to_json(&self) -> String {
        let mut out = self.0.json_head();
        out.push_str(",\"resource\":");
        escape(&mut out, self.0.primary_violation().resource.as_str());
        out.push_str(",\"limits\":[");
        for (at, status) in visible(self.0.statuses()).enumerate() {
            if at > 0 {
                out.push(',');
            }
            out.push_str("{\"limit_name\":");
            escape(&mut out, &status.label());
            match status.level {
                0 => status.write_numbers(&mut out),
                _ => out.push_str(&format!(
                    ",\"exceeded\":true,\"retry_after_seconds\":{}",
                    Seconds(status.retry_after)
                )),
            }
            out.push('}');
        }
        out.push_str("]}");
        out
    }

    /// The header fields of a 429 response, with lower-case names: `retry-after`, `ratelimit-policy`, `ratelimit`.
    pub fn http_fields(&self) -> Vec<(&'static str, String)> {
        // Rounded up, so that a client that waits this long does not retry too early.
        let seconds = whole_seconds(self.retry_after()).max(1);
        let mut fields = vec![("retry-after", seconds.to_string())];
        fields.extend(http_fields(self.0.statuses()));
        fields
    }
}

impl fmt::Display for PublicRefusal<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The statuses that a caller may see: its own, and those of ancestors that refused it.
fn visible(statuses: &[LimitStatus]) -> impl Iterator<Item = &LimitStatus> {
    statuses.iter().filter(|status| status.level == 0 || status.exceeded)
}

/// `ratelimit-policy` and `ratelimit` of draft-ietf-httpapi-ratelimit-headers-11 for a response of any kind, with
/// lower-case names.
///
/// There is one policy for each limit of the caller. Its quota `q` is the amount that the limit refills in `w` seconds.
/// `r` is the balance. `t` is the wait in seconds: for an exceeded limit until the request passes, else until the limit
/// is full. An ancestor's limit appears only if it refused the call, as `"tpm@parent";r=0`: callers must not see its
/// quota and its balance.
pub fn http_fields(statuses: &[LimitStatus]) -> Vec<(&'static str, String)> {
    let policies = statuses.iter().filter(|status| status.level == 0).map(|status| {
        let seconds = status.rate.period_ms().div_ceil(1_000);
        let quota = integer(status.rate.refill_amount().whole_tokens());
        format!("\"{}\";q={quota};w={seconds}", status.label())
    });
    let current = visible(statuses).map(|status| {
        let wait = if status.exceeded { status.retry_after } else { status.full_after };
        let left = if status.level == 0 { integer(status.available.whole_tokens()) } else { 0 };
        format!("\"{}\";r={left};t={}", status.label(), whole_seconds(wait))
    });
    let list = |members: Vec<String>| members.join(", ");
    // An empty list is sent as no field at all (RFC 9651, section 3.1).
    [("ratelimit-policy", list(policies.collect())), ("ratelimit", list(current.collect()))]
        .into_iter()
        .filter(|(_, value)| !value.is_empty())
        .collect()
}

/// Clamps to the non-negative integers of a structured field (RFC 9651, section 3.3.1).
fn integer(value: i64) -> i64 {
    value.clamp(0, 999_999_999_999_999)
}

fn whole_seconds(wait: Duration) -> u64 {
    let rounded_up = wait.as_nanos().div_ceil(1_000_000_000);
    u64::try_from(rounded_up).unwrap_or(u64::MAX).min(999_999_999_999_999)
}
