//! The public form of a refusal: its JSON always parses, and its header fields are well-formed.

use std::collections::HashSet;
use std::time::Duration;

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use zae_limiter_model::{
    EntityId, LimitName, LimitStatus, Millitokens, RateLimitExceeded, ResourceName, escape_json,
    http_fields,
};

use crate::check;
use crate::generate::rates;
use crate::render::json::Json;

mod json;
mod structured;

fn waits() -> impl Strategy<Value = Duration> {
    let fine = any::<(u64, u32)>().prop_map(|(s, nanos)| Duration::new(s / 2, nanos));
    let millis = prop_oneof![0..=5_000_u64, any::<u64>()].prop_map(Duration::from_millis);
    let near_seconds = (0..=3_u64, select(vec![0, 1, 999_999, 1_000_000, 999_999_999]))
        .prop_map(|(seconds, nanos)| Duration::new(seconds, nanos));
    prop_oneof![3 => millis, 2 => fine, 2 => near_seconds, 1 => Just(Duration::MAX), 1 => Just(Duration::ZERO)]
}

fn statuses() -> impl Strategy<Value = LimitStatus> {
    let names = (
        "[A-Za-z0-9][A-Za-z0-9_.:@-]{0,255}".prop_map(|id| EntityId::new(id).expect("by the rule")),
        "[A-Za-z][A-Za-z0-9_./:-]{0,63}".prop_map(|r| ResourceName::new(r).expect("by the rule")),
        "[A-Za-z][A-Za-z0-9_.-]{0,63}".prop_filter_map("reserved", |l| LimitName::new(l).ok()),
    );
    let level = prop_oneof![0..=8_usize, Just(usize::MAX)];
    let tokens = || {
        let ends = select(vec![0, 1, -1, 999, i64::MIN, i64::MAX]);
        prop_oneof![ends, -5_000..=5_000_i64, any::<i64>()].prop_map(Millitokens::new)
    };
    let numbers = (rates(), tokens(), tokens(), any::<bool>(), waits(), waits());
    (names, level, numbers).prop_map(|((entity_id, resource, limit_name), level, numbers)| {
        let (rate, available, requested, exceeded, retry_after, full_after) = numbers;
        LimitStatus {
            entity_id,
            level,
            resource,
            limit_name,
            rate,
            available,
            requested,
            exceeded,
            retry_after,
            full_after,
        }
    })
}

fn refusals() -> impl Strategy<Value = RateLimitExceeded> {
    (vec(statuses(), 1..12), any::<prop::sample::Index>()).prop_map(|(mut statuses, at)| {
        let at = at.index(statuses.len());
        statuses[at].exceeded = true;
        RateLimitExceeded::new(statuses)
    })
}

/// The value of field `name`.
fn field<'a>(fields: &'a [(&'static str, String)], name: &str) -> &'a str {
    let mut found = fields.iter().filter(|(candidate, _)| *candidate == name);
    let (_, value) = found.next().expect("each field is there");
    assert!(found.next().is_none(), "each field is there once");
    value
}

#[test]
fn header_fields_are_well_formed_structured_fields() {
    check(refusals(), |refusal| {
        let fields = refusal.http_fields();
        let own = |status: &&LimitStatus| status.level == 0;
        let owns_any = refusal.statuses().iter().any(|status| own(&status));
        prop_assert_eq!(fields.len(), 2 + usize::from(owns_any));
        let parse = |name| match fields.iter().any(|(found, _)| *found == name) {
            true => structured::list(field(&fields, name)).map_err(TestCaseError::fail),
            false => Ok(Vec::new()),
        };
        let (policy, current) = (parse("ratelimit-policy")?, parse("ratelimit")?);
        let keys = |item: &structured::Item| {
            item.parameters.iter().map(|(key, _)| key.clone()).collect::<String>()
        };
        prop_assert!(policy.iter().all(|item| keys(item) == "qw"), "{:?}", policy);
        prop_assert!(current.iter().all(|item| keys(item) == "rt"), "{:?}", current);
        // The caller's limits have a policy each; of ancestors' limits only those that refused are named.
        let expected = refusal.statuses().iter().filter(own).map(LimitStatus::label);
        prop_assert!(policy.iter().map(|item| item.text.clone()).eq(expected));
        let visible = refusal.statuses().iter().filter(|s| own(s) || s.exceeded);
        prop_assert!(
            current
                .iter()
                .map(|item| item.text.clone())
                .eq(visible.clone().map(LimitStatus::label))
        );
        for (item, status) in current.iter().zip(visible) {
            let left = item.parameters.iter().find(|(key, _)| key == "r").map(|(_, value)| *value);
            prop_assert!(own(&status) || left == Some(0), "{:?}", current);
        }
        let numbers = policy.iter().chain(&current).flat_map(|item| &item.parameters);
        prop_assert!(numbers.clone().all(|(_, value)| *value >= 0));
        Ok(())
    });
}

#[test]
fn policies_of_different_limits_and_levels_have_different_names() {
    check(vec(statuses(), 0..12), |statuses| {
        // One name at all levels is the case that could collide.
        let limit_name = statuses.first().map(|status| status.limit_name.clone());
        let same = statuses.iter().cloned().zip(limit_name.iter().cycle());
        let same = same.map(|(status, name)| LimitStatus { limit_name: name.clone(), ..status });
        let statuses: Vec<LimitStatus> = statuses.iter().cloned().chain(same).collect();
        for (name, value) in http_fields(&statuses) {
            let of_policy = name == "ratelimit-policy";
            let shown = statuses.iter().filter(|s| s.level == 0 || (s.exceeded && !of_policy));
            let limits: HashSet<_> = shown.map(|s| (s.level, &s.limit_name)).collect();
            let items = structured::list(&value).map_err(TestCaseError::fail)?;
            let names: HashSet<&str> = items.iter().map(|item| item.text.as_str()).collect();
            prop_assert_eq!(names.len(), limits.len(), "{}: {}", name, value);
        }
        Ok(())
    });
}

#[test]
fn no_limits_make_no_header_fields() {
    // A structured field that is an empty list is left out (RFC 9651, section 3.1).
    assert_eq!(http_fields(&[]), []);
}

#[test]
fn entity_ids_stay_out_of_the_header_fields() {
    check(vec(statuses(), 1..6), |mut statuses| {
        let secret = EntityId::new("sk:secret").expect("by the rule");
        statuses.iter_mut().for_each(|status| status.entity_id = secret.clone());
        let fields = http_fields(&statuses);
        prop_assert!(fields.iter().all(|(_, value)| !value.contains("secret")), "{:?}", fields);
        Ok(())
    });
}

#[test]
fn a_client_that_waits_for_retry_after_does_not_come_too_early() {
    const WAIT_MAX: u64 = 999_999_999_999_999;
    check(refusals(), |refusal| {
        let fields = refusal.http_fields();
        let seconds: u64 = field(&fields, "retry-after").parse().expect("whole seconds");
        prop_assert!((1..=WAIT_MAX).contains(&seconds));
        let wait = refusal.retry_after();
        prop_assert!(
            seconds == WAIT_MAX || Duration::from_secs(seconds) >= wait,
            "{seconds} for {wait:?}"
        );
        let second = Duration::from_secs(1);
        prop_assert!(
            seconds == 1 || Duration::from_secs(seconds) < wait.saturating_add(second),
            "{seconds}, {wait:?}"
        );
        Ok(())
    });
}

#[test]
fn the_primary_violation_is_the_first_of_the_longest_waits() {
    check((refusals(), waits()), |(refusal, wait)| {
        let mut statuses = refusal.statuses().to_vec();
        let half = statuses.len() / 2;
        statuses[half..].iter_mut().for_each(|status| status.retry_after = wait);
        statuses[0].exceeded = true;
        let refusal = RateLimitExceeded::new(statuses.clone());
        let exceeded = || statuses.iter().enumerate().filter(|(_, status)| status.exceeded);
        let longest = exceeded().map(|(_, status)| status.retry_after).max().expect("one is");
        let first = exceeded().find(|(_, status)| status.retry_after == longest);
        let is_primary = |status: &LimitStatus| std::ptr::eq(status, refusal.primary_violation());
        prop_assert_eq!(refusal.retry_after(), longest);
        prop_assert_eq!(refusal.statuses().iter().position(is_primary), first.map(|(at, _)| at));
        prop_assert_eq!(refusal.violations().count(), exceeded().count());
        Ok(())
    });
}

#[test]
fn a_refusal_is_always_json_that_parses() {
    check(refusals(), |refusal| {
        let text = refusal.to_json();
        let parsed = json::parse(&text).map_err(TestCaseError::fail)?;
        let member = |name| parsed.get(name).cloned();
        prop_assert_eq!(member("error"), Some(Json::Text("rate_limit_exceeded".to_owned())));
        prop_assert_eq!(member("message"), Some(Json::Text(refusal.to_string())));
        let Some(Json::List(limits)) = member("limits") else {
            return Err(TestCaseError::fail(text));
        };
        prop_assert_eq!(limits.len(), refusal.statuses().len());
        for (limit, status) in limits.iter().zip(refusal.statuses()) {
            let text = |name| limit.get(name).cloned();
            prop_assert_eq!(text("entity_id"), Some(Json::Text(status.entity_id.to_string())));
            prop_assert_eq!(text("resource"), Some(Json::Text(status.resource.to_string())));
            prop_assert_eq!(text("limit_name"), Some(Json::Text(status.limit_name.to_string())));
            prop_assert_eq!(text("exceeded"), Some(Json::Flag(status.exceeded)));
            let whole = |tokens: Millitokens| Json::Number(tokens.whole_tokens().to_string());
            prop_assert_eq!(text("available"), Some(whole(status.available)));
            prop_assert_eq!(text("requested"), Some(whole(status.requested)));
            prop_assert_eq!(text("capacity"), Some(whole(status.rate.capacity())));
        }
        Ok(())
    });
}

#[test]
fn the_wait_in_json_is_the_wait_to_the_millisecond() {
    check(refusals(), |refusal| {
        let parsed = json::parse(&refusal.to_json()).map_err(TestCaseError::fail)?;
        let Some(Json::Number(shown)) = parsed.get("retry_after_seconds") else {
            return Err(TestCaseError::fail("no wait"));
        };
        let (whole, fraction) = shown.split_once('.').unwrap_or((shown, ""));
        prop_assert!(fraction.len() <= 3 && !fraction.ends_with('0'), "{}", shown);
        let millis: u128 = format!("{whole}{fraction:0<3}").parse().expect("digits");
        prop_assert_eq!(millis, refusal.retry_after().as_nanos().div_ceil(1_000_000));
        Ok(())
    });
}

#[test]
fn any_text_survives_json() {
    let ascii = vec((0..0x80_u8).prop_map(char::from), 0..60);
    let text = prop_oneof![ascii.prop_map(String::from_iter), any::<String>()];
    check(text, |text| {
        let mut out = String::new();
        escape_json(&mut out, &text);
        prop_assert_eq!(json::parse(&out), Ok(Json::Text(text)));
        Ok(())
    });
}
