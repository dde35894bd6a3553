//! The refusal: every limit that was checked, as text, as JSON and as HTTP header fields.

use std::fmt::{self, Write as _};
use std::time::Duration;

use crate::json::escape;
use crate::public::PublicRefusal;
use crate::status::{Label, Seconds, millis_rounded_up};
use crate::{EntityId, LimitName, LimitStatus, Millitokens};

/// A refusal: one or more limits were exceeded, and nothing was taken.
///
/// It contains the status of every limit that was checked. Its text, [`public`](Self::public) and
/// [`http_fields`](Self::http_fields) contain no entity id and no balance of an ancestor, so they can be sent to
/// the caller. [`to_json`](Self::to_json) and [`statuses`](Self::statuses) contain everything, for operators.
///
/// ```
/// # use zae_limiter_model::{EntityId, Limit, LimitSet, LimitStatus, Millitokens, RateLimitExceeded, ResourceName};
/// # let limits = LimitSet::new([Limit::per_minute("rpm", 60)])?;
/// # let refusal = RateLimitExceeded::new(vec![LimitStatus {
/// #     entity_id: EntityId::new("key-1")?, level: 0, resource: ResourceName::new("gpt-4")?,
/// #     limit_name: limits.names()[0].clone(), rate: limits.rates()[0], available: Millitokens::ZERO,
/// #     requested: Millitokens::new(1_000), exceeded: true,
/// #     retry_after: std::time::Duration::from_secs(1), full_after: std::time::Duration::from_secs(60),
/// # }]);
/// assert_eq!(
///     refusal.to_string(),
///     "rate limit exceeded: rpm on gpt-4 has 0 of the 1 requested; retry in 1 s"
/// );
/// assert_eq!(refusal.retry_after().as_secs(), 1);
/// assert_eq!((refusal.violations().count(), refusal.passed().count()), (1, 0));
/// # Ok::<(), zae_limiter_model::Invalid>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
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
        // The first of equal waits: the caller's own limits come before its ancestors'.
        let longest = exceeded.rev().max_by_key(|(_, status)| status.retry_after);
        let (primary, _) = longest.expect("a refusal has at least one exceeded limit");
        Self { statuses, primary }
    }

    /// Every limit that was checked: those that refused the call and those that passed it.
    pub fn statuses(&self) -> &[LimitStatus] {
        &self.statuses
    }

    /// The limits that refused the call.
    pub fn violations(&self) -> impl Iterator<Item = &LimitStatus> {
        self.statuses.iter().filter(|status| status.exceeded)
    }

    /// The limits that would have admitted the call.
    pub fn passed(&self) -> impl Iterator<Item = &LimitStatus> {
        self.statuses.iter().filter(|status| !status.exceeded)
    }

    /// The violation with the longest wait.
    pub fn primary_violation(&self) -> &LimitStatus {
        &self.statuses[self.primary]
    }

    /// How long to wait until the same request passes, if nobody else takes tokens.
    pub fn retry_after(&self) -> Duration {
        self.primary_violation().retry_after
    }

    /// What the caller may see: its own limits, and the name and wait of each ancestor's limit that refused.
    pub fn public(&self) -> PublicRefusal<'_> {
        PublicRefusal::new(self)
    }

    /// The whole refusal as a JSON object, with entity ids and the balances of ancestors: for operators. The fields are
    /// those of the Python original's `as_dict`. Send [`public`](Self::public) to a caller.
    pub fn to_json(&self) -> String {
        let mut out = self.json_head();
        out.push_str(",\"contended\":false,\"limits\":[");
        for (at, status) in self.statuses.iter().enumerate() {
            if at > 0 {
                out.push(',');
            }
            status.write_json(&mut out);
        }
        out.push_str("]}");
        out
    }

    /// The start of both JSON forms: error, message and waits.
    pub(crate) fn json_head(&self) -> String {
        let mut out = String::from("{\"error\":\"rate_limit_exceeded\",\"message\":");
        escape(&mut out, &self.to_string());
        let wait = self.retry_after();
        let millis = millis_rounded_up(wait);
        let _ =
            write!(out, ",\"retry_after_seconds\":{},\"retry_after_ms\":{millis}", Seconds(wait));
        out
    }

    /// The header fields of a 429 response, with lower-case names: `retry-after`, `ratelimit-policy`, `ratelimit`.
    /// They contain what the caller may see; see [`public`](Self::public).
    pub fn http_fields(&self) -> Vec<(&'static str, String)> {
        self.public().http_fields()
    }

    /// The header fields of a 429 response, typed: see [`http_fields`](Self::http_fields).
    #[cfg(feature = "http")]
    pub fn headers(&self) -> http::HeaderMap {
        crate::headers::header_map(self.http_fields())
    }
}

/// The text for logs and responses: no entity id, no balance of an ancestor.
impl fmt::Display for RateLimitExceeded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let primary = self.primary_violation();
        let label = Label(&primary.limit_name, primary.level);
        write!(f, "rate limit exceeded: {label} on {}", primary.resource)?;
        if primary.level == 0 {
            write!(f, " has {} of the {} requested", primary.available, primary.requested)?;
        }
        write!(f, "; retry in {} s", Seconds(primary.retry_after))?;
        match self.violations().count() {
            1 => Ok(()),
            more => write!(f, " ({more} limits exceeded)"),
        }
    }
}

impl std::error::Error for RateLimitExceeded {}

/// A request above the ceiling of a limit: no wait would make it pass.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ExceedsCapacity {
    /// The owner of the limit.
    pub entity_id: EntityId,
    /// 0 for the caller's own limit, 1 for its parent's, and so on.
    pub level: usize,
    /// The limit's name.
    pub limit_name: LimitName,
    /// The amount that the call asked for.
    pub requested: Millitokens,
    /// The ceiling.
    pub capacity: Millitokens,
}

impl ExceedsCapacity {
    /// The refusal of a request by the limit `limit_name` of an entity `level` levels above the caller.
    pub fn new(
        (entity_id, level): (EntityId, usize),
        limit_name: LimitName,
        requested: Millitokens,
        capacity: Millitokens,
    ) -> Self {
        Self { entity_id, level, limit_name, requested, capacity }
    }
}

/// The text for logs and responses: no entity id, no ceiling of an ancestor.
impl fmt::Display for ExceedsCapacity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let label = Label(&self.limit_name, self.level);
        write!(f, "{} tokens of {label} can never be admitted: ", self.requested)?;
        match self.level {
            0 => write!(f, "the limit holds at most {}", self.capacity)?,
            _ => write!(f, "that limit holds fewer")?,
        }
        write!(f, "; ask for less, or raise its burst")
    }
}

impl std::error::Error for ExceedsCapacity {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Limit, LimitSet, ResourceName};

    pub(super) fn status(
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
            status(1, Limit::per_minute("rpm", 7_777), 7_000, 1_000, 0),
        ])
    }

    /// Refused by the parent alone.
    fn by_parent() -> RateLimitExceeded {
        RateLimitExceeded::new(vec![
            status(0, Limit::per_minute("tpm", 10_000), 9_000_000, 500_000, 0),
            status(1, Limit::per_minute("tpm", 54_321), 123_456, 500_000, 480),
            status(2, Limit::per_minute("tpm", 98_765), 87_654_000, 500_000, 0),
        ])
    }

    #[test]
    fn the_longest_wait_is_the_primary_violation() {
        let refusal = refusal();
        assert_eq!(refusal.primary_violation().limit_name.as_str(), "tpm");
        assert_eq!(refusal.retry_after(), Duration::from_millis(3_003));
        let names = |statuses: Vec<&LimitStatus>| -> Vec<String> {
            statuses.into_iter().map(LimitStatus::label).collect()
        };
        assert_eq!(names(refusal.violations().collect()), ["tpm", "tpm@parent"]);
        assert_eq!(names(refusal.passed().collect()), ["rpm", "rpm@parent"]);
        assert_eq!(
            refusal.to_string(),
            "rate limit exceeded: tpm on gpt-4 has -0.500 of the 500 requested; \
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
    fn the_whole_refusal_renders_as_json_with_the_fields_of_the_original() {
        let refusal =
            RateLimitExceeded::new(vec![status(0, Limit::per_minute("rpm", 1), -1, 1_000, 1_500)]);
        assert_eq!(
            refusal.to_json(),
            "{\"error\":\"rate_limit_exceeded\",\"message\":\"rate limit exceeded: rpm on gpt-4 has \
             -0.001 of the 1 requested; retry in 1.5 s\",\"retry_after_seconds\":1.5,\
             \"retry_after_ms\":1500,\"contended\":false,\"limits\":[{\"entity_id\":\"key-1\",\
             \"resource\":\"gpt-4\",\"limit_name\":\"rpm\",\"kind\":\"rate\",\"capacity\":1,\
             \"refill_amount\":1,\"refill_period_seconds\":60,\"available\":-1,\"requested\":1,\
             \"exceeded\":true,\"retry_after_seconds\":1.5,\"soft\":false}]}"
        );
    }

    #[test]
    fn a_caller_sees_of_its_parent_only_which_limit_refused_and_for_how_long() {
        assert_eq!(
            by_parent().public().to_json(),
            "{\"error\":\"rate_limit_exceeded\",\"message\":\"rate limit exceeded: tpm@parent on \
             gpt-4; retry in 0.48 s\",\"retry_after_seconds\":0.48,\"retry_after_ms\":480,\
             \"resource\":\"gpt-4\",\"limits\":[{\"limit_name\":\"tpm\",\"kind\":\"rate\",\
             \"capacity\":10000,\"refill_amount\":10000,\"refill_period_seconds\":60,\
             \"available\":9000,\"requested\":500,\"exceeded\":false,\"retry_after_seconds\":0},\
             {\"limit_name\":\"tpm@parent\",\"exceeded\":true,\"retry_after_seconds\":0.48}]}"
        );
        let fields = by_parent().http_fields();
        assert_eq!(
            fields,
            [
                ("retry-after", "1".to_owned()),
                ("ratelimit-policy", "\"tpm\";q=10000;w=60".to_owned()),
                ("ratelimit", "\"tpm\";r=9000;t=60, \"tpm@parent\";r=0;t=1".to_owned()),
            ]
        );
    }

    #[test]
    fn no_text_has_an_entity_id_or_a_number_of_an_ancestor() {
        let refused = by_parent();
        let too_much = ExceedsCapacity::new(
            (EntityId::new("proj").unwrap(), 1),
            LimitName::new("tpm").unwrap(),
            Millitokens::new(60_000_000),
            Millitokens::new(54_321_000),
        );
        let mut texts = vec![
            refused.to_string(),
            format!("{refused:?}"),
            refused.public().to_json(),
            refused.public().to_string(),
            too_much.to_string(),
            format!("{too_much:?}"),
        ];
        texts.extend(refused.http_fields().into_iter().map(|(_, value)| value));
        for text in &texts {
            assert!(!text.contains("key-1") && !text.contains("proj"), "{text}");
        }
        texts.retain(|text| !text.starts_with("RateLimit") && !text.starts_with("Exceeds"));
        for text in texts {
            for secret in ["123", "54321", "98765", "87654"] {
                assert!(!text.contains(secret), "{secret} in {text}");
            }
        }
    }

    #[test]
    fn a_refusal_renders_as_http_fields() {
        assert_eq!(
            refusal().http_fields(),
            [
                ("retry-after", "4".to_owned()),
                ("ratelimit-policy", "\"rpm\";q=100;w=60, \"tpm\";q=10000;w=60".to_owned()),
                (
                    "ratelimit",
                    "\"rpm\";r=99;t=60, \"tpm\";r=0;t=4, \"tpm@parent\";r=0;t=1".to_owned()
                ),
            ]
        );
    }

    #[cfg(feature = "http")]
    #[test]
    fn header_names_and_values_are_typed() {
        let headers = refusal().headers();
        assert_eq!(headers[http::header::RETRY_AFTER], "4");
        assert_eq!(headers.len(), 3);
        for (name, value) in refusal().http_fields() {
            assert_eq!(headers[http::HeaderName::from_static(name)], value);
        }
    }
}
