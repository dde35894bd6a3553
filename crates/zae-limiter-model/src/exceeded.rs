//! The refusal: every limit that was checked, as text, as JSON and as HTTP header fields.

use std::fmt::{self, Write as _};
use std::time::Duration;

use crate::json::escape;
use crate::{EntityId, LimitName, Millitokens, Rate, ResourceName};

/// How one limit stood when it was looked at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LimitStatus {
    /// Whose limit it is: the caller's, or an ancestor's.
    pub entity_id: EntityId,
    /// How far up the chain that is: 0 for the entity itself, 1 for its parent.
    pub level: usize,
    /// On what.
    pub resource: ResourceName,
    /// Which limit.
    pub limit_name: LimitName,
    /// Its ceiling and rate.
    pub rate: Rate,
    /// What was there: after the taking when admitted, before it when refused.
    pub available: Millitokens,
    /// What was asked.
    pub requested: Millitokens,
    /// Whether this limit stood in the way.
    pub exceeded: bool,
    /// How long until what was asked is there; zero when it was.
    pub retry_after: Duration,
    /// How long until the limit is full again.
    pub full_after: Duration,
}

impl LimitStatus {
    /// Appends the status as a JSON object. Amounts are in whole tokens, `available` rounded down;
    /// the wait is in seconds, to the millisecond.
    pub fn write_json(&self, out: &mut String) {
        out.push_str("{\"entity_id\":");
        escape(out, self.entity_id.as_str());
        out.push_str(",\"resource\":");
        escape(out, self.resource.as_str());
        out.push_str(",\"limit_name\":");
        escape(out, self.limit_name.as_str());
        let _ = write!(
            out,
            ",\"capacity\":{},\"available\":{},\"requested\":{},\"exceeded\":{},\
             \"retry_after_seconds\":{}}}",
            self.rate.capacity().whole_tokens(),
            self.available.whole_tokens(),
            self.requested.whole_tokens(),
            self.exceeded,
            Seconds(self.retry_after),
        );
    }

    /// What the policy is called in HTTP fields. Ancestors are told apart by their level, because
    /// an entity id does not belong in a response.
    fn policy(&self) -> String {
        match self.level {
            0 => self.limit_name.to_string(),
            1 => format!("{}@parent", self.limit_name),
            level => format!("{}@parent-{level}", self.limit_name),
        }
    }
}

/// A refusal. Nothing was taken.
#[derive(Clone, PartialEq, Eq)]
pub struct RateLimitExceeded {
    statuses: Vec<LimitStatus>,
    primary: usize,
}

impl RateLimitExceeded {
    /// A refusal from the statuses of all limits that were checked.
    ///
    /// # Panics
    ///
    /// When none of them is exceeded.
    pub fn new(statuses: Vec<LimitStatus>) -> Self {
        let exceeded = statuses.iter().enumerate().filter(|(_, status)| status.exceeded);
        // Of equal waits the first: the caller's own limits come before its ancestors'.
        let longest = exceeded.rev().max_by_key(|(_, status)| status.retry_after);
        let (primary, _) = longest.expect("a refusal has at least one exceeded limit");
        Self { statuses, primary }
    }

    /// Every limit that was checked, those that passed too.
    pub fn statuses(&self) -> &[LimitStatus] {
        &self.statuses
    }

    /// The limits that stood in the way.
    pub fn violations(&self) -> impl Iterator<Item = &LimitStatus> {
        self.statuses.iter().filter(|status| status.exceeded)
    }

    /// The limit that stands in the way the longest.
    pub fn primary_violation(&self) -> &LimitStatus {
        &self.statuses[self.primary]
    }

    /// The least wait after which the same request passes if nobody else takes tokens.
    pub fn retry_after(&self) -> Duration {
        self.primary_violation().retry_after
    }

    /// The refusal as a JSON object.
    pub fn to_json(&self) -> String {
        let mut out = String::from("{\"error\":\"rate_limit_exceeded\",\"message\":");
        escape(&mut out, &self.to_string());
        let _ =
            write!(out, ",\"retry_after_seconds\":{},\"limits\":[", Seconds(self.retry_after()));
        for (at, status) in self.statuses.iter().enumerate() {
            if at > 0 {
                out.push(',');
            }
            status.write_json(&mut out);
        }
        out.push_str("]}");
        out
    }

    /// The HTTP header fields of a 429 answer: `Retry-After`, `RateLimit-Policy`, `RateLimit`.
    pub fn http_fields(&self) -> Vec<(&'static str, String)> {
        // Whole seconds, rounded up: a client that waits as told must not come too early.
        let seconds = whole_seconds(self.retry_after()).max(1);
        let mut fields = vec![("Retry-After", seconds.to_string())];
        fields.extend(http_fields(&self.statuses));
        fields
    }
}

impl fmt::Display for RateLimitExceeded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let primary = self.primary_violation();
        write!(
            f,
            "rate limit exceeded: {} of {} on {} has {} of the {} asked for, retry in {} s",
            primary.limit_name,
            primary.entity_id,
            primary.resource,
            primary.available,
            primary.requested,
            Seconds(primary.retry_after),
        )?;
        match self.violations().count() {
            1 => Ok(()),
            more => write!(f, " ({more} limits exceeded)"),
        }
    }
}

impl fmt::Debug for RateLimitExceeded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RateLimitExceeded").field("statuses", &self.statuses).finish()
    }
}

impl std::error::Error for RateLimitExceeded {}

/// A request above the ceiling of a limit: no wait would make it pass.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExceedsCapacity {
    /// Whose limit.
    pub entity_id: EntityId,
    /// Which one.
    pub limit_name: LimitName,
    /// What was asked.
    pub requested: Millitokens,
    /// The ceiling.
    pub capacity: Millitokens,
}

impl fmt::Display for ExceedsCapacity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} tokens of {} can never be admitted: the limit of {} holds at most {}; \
             ask for less, or raise its burst",
            self.requested, self.limit_name, self.entity_id, self.capacity
        )
    }
}

impl std::error::Error for ExceedsCapacity {}

/// `RateLimit-Policy` and `RateLimit` of draft-ietf-httpapi-ratelimit-headers-11 for an answer of
/// any kind, one policy for each limit.
///
/// A policy's quota `q` is what a period `w` earns; `r` is what is there now, and `t` the seconds
/// until what was asked is there, or, where it was, until the limit is full again.
pub fn http_fields(statuses: &[LimitStatus]) -> Vec<(&'static str, String)> {
    // An empty list is not a field with an empty value but no field (RFC 9651, section 3.1).
    if statuses.is_empty() {
        return Vec::new();
    }
    let list = |member: &dyn Fn(&LimitStatus) -> String| {
        statuses.iter().map(member).collect::<Vec<_>>().join(", ")
    };
    let policy = list(&|status| {
        let seconds = status.rate.period_ms().div_ceil(1_000);
        let quota = integer(status.rate.refill_amount().whole_tokens());
        format!("\"{}\";q={quota};w={seconds}", status.policy())
    });
    let current = list(&|status| {
        let wait = if status.exceeded { status.retry_after } else { status.full_after };
        let left = integer(status.available.whole_tokens());
        format!("\"{}\";r={left};t={}", status.policy(), whole_seconds(wait))
    });
    vec![("RateLimit-Policy", policy), ("RateLimit", current)]
}

/// The range of an integer in a structured field that cannot be negative here.
fn integer(value: i64) -> i64 {
    value.clamp(0, 999_999_999_999_999)
}

fn whole_seconds(wait: Duration) -> u64 {
    let rounded_up = wait.as_nanos().div_ceil(1_000_000_000);
    u64::try_from(rounded_up).unwrap_or(u64::MAX).min(999_999_999_999_999)
}

/// A duration as decimal seconds with as many digits as it needs, at most three.
struct Seconds(Duration);

impl fmt::Display for Seconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let millis = self.0.as_nanos().div_ceil(1_000_000);
        write!(f, "{}", millis / 1_000)?;
        match millis % 1_000 {
            0 => Ok(()),
            rest => write!(f, ".{}", format!("{rest:03}").trim_end_matches('0')),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Limit, LimitSet};

    fn status(
        level: usize,
        limit: Limit,
        available: i64,
        requested: i64,
        wait_ms: u64,
    ) -> LimitStatus {
        let limits = LimitSet::new([limit]).unwrap();
        LimitStatus {
            entity_id: EntityId::new(if level == 0 { "key-1" } else { "proj" }).unwrap(),
            level,
            resource: ResourceName::new("gpt-4").unwrap(),
            limit_name: limits.names()[0].clone(),
            rate: limits.rates()[0],
            available: Millitokens::new(available),
            requested: Millitokens::new(requested),
            exceeded: wait_ms > 0,
            retry_after: Duration::from_millis(wait_ms),
            full_after: Duration::from_millis(59_001),
        }
    }

    fn refusal() -> RateLimitExceeded {
        RateLimitExceeded::new(vec![
            status(0, Limit::per_minute("rpm", 100), 99_000, 1_000, 0),
            status(0, Limit::per_minute("tpm", 10_000).burst(15_000), -500, 500_000, 3_003),
            status(1, Limit::per_minute("tpm", 50_000), 100_500, 500_000, 480),
        ])
    }

    #[test]
    fn the_longest_wait_is_the_primary_violation() {
        let refusal = refusal();
        assert_eq!(refusal.primary_violation().limit_name.as_str(), "tpm");
        assert_eq!(refusal.retry_after(), Duration::from_millis(3_003));
        assert_eq!(refusal.violations().count(), 2);
        assert_eq!(
            refusal.to_string(),
            "rate limit exceeded: tpm of key-1 on gpt-4 has -0.500 of the 500 asked for, \
             retry in 3.003 s (2 limits exceeded)"
        );
    }

    #[test]
    fn of_equal_waits_the_callers_own_limit_comes_first() {
        let mine = status(0, Limit::per_minute("rpm", 1), 0, 1_000, 60_000);
        let parents = status(1, Limit::per_minute("rpm", 1), 0, 1_000, 60_000);
        assert_eq!(RateLimitExceeded::new(vec![mine, parents]).primary_violation().level, 0);
    }

    #[test]
    fn a_refusal_renders_as_json() {
        let refusal =
            RateLimitExceeded::new(vec![status(0, Limit::per_minute("rpm", 1), -1, 1_000, 1_500)]);
        assert_eq!(
            refusal.to_json(),
            "{\"error\":\"rate_limit_exceeded\",\"message\":\"rate limit exceeded: rpm of key-1 on \
             gpt-4 has -0.001 of the 1 asked for, retry in 1.5 s\",\"retry_after_seconds\":1.5,\
             \"limits\":[{\"entity_id\":\"key-1\",\"resource\":\"gpt-4\",\"limit_name\":\"rpm\",\
             \"capacity\":1,\"available\":-1,\"requested\":1,\"exceeded\":true,\
             \"retry_after_seconds\":1.5}]}"
        );
    }

    #[test]
    fn a_refusal_renders_as_http_fields() {
        assert_eq!(
            refusal().http_fields(),
            [
                ("Retry-After", "4".to_owned()),
                (
                    "RateLimit-Policy",
                    "\"rpm\";q=100;w=60, \"tpm\";q=10000;w=60, \"tpm@parent\";q=50000;w=60"
                        .to_owned()
                ),
                (
                    "RateLimit",
                    "\"rpm\";r=99;t=60, \"tpm\";r=0;t=4, \"tpm@parent\";r=100;t=1".to_owned()
                ),
            ]
        );
    }
}
