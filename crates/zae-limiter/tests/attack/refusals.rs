//! What a caller may see, and how long it has to wait.

use std::collections::BTreeSet;

use fastrand::Rng;
use serde_json::Value;
use zae_limiter::store::StoreErrorKind;
use zae_limiter::{Error, Limit, RateLimitExceeded, RateLimiter};
use zae_limiter_testkit::{Call, Fault};

use crate::world::{
    Kind, child, drive, exceeded, ms, on, on_every_store, own_limits, per_minute, secs, spend,
    without_refill,
};

/// The items of a list in a structured field: a string, and integer parameters.
fn parse_list(text: &str) -> Vec<(String, Vec<(String, u64)>)> {
    let mut items = Vec::new();
    let mut rest = text;
    loop {
        rest =
            rest.strip_prefix('"').unwrap_or_else(|| panic!("no string at {rest:?} of {text:?}"));
        let end = rest.find('"').unwrap_or_else(|| panic!("no end in {text:?}"));
        let name = rest[..end].to_owned();
        assert!(name.bytes().all(|byte| (0x20..0x7f).contains(&byte) && byte != b'\\'), "{text:?}");
        rest = &rest[end + 1..];
        let mut parameters = Vec::new();
        while let Some(after) = rest.strip_prefix(';') {
            let (key, after) = after.split_once('=').unwrap_or_else(|| panic!("{text:?}"));
            let digits = after.bytes().take_while(u8::is_ascii_digit).count();
            assert!((1..=15).contains(&digits), "{text:?}: an integer has 1 to 15 digits");
            parameters.push((key.to_owned(), after[..digits].parse().unwrap()));
            rest = &after[digits..];
        }
        items.push((name, parameters));
        match rest.strip_prefix(", ") {
            Some(after) => rest = after,
            None => break,
        }
    }
    assert!(rest.is_empty(), "{rest:?} is left of {text:?}");
    items
}

/// The same with all numbers as floats: 60 and 60.0 are the same number in JSON.
fn as_floats(value: Value) -> Value {
    match value {
        Value::Number(number) => number.as_f64().into(),
        Value::Array(items) => items.into_iter().map(as_floats).collect(),
        Value::Object(fields) => {
            fields.into_iter().map(|(name, value)| (name, as_floats(value))).collect()
        }
        other => other,
    }
}

/// Promises about one refusal, of a caller `own` below ancestors whose numbers all contain `777`.
fn check_public(refusal: &RateLimitExceeded) {
    assert_eq!(refusal.violations().count() + refusal.passed().count(), refusal.statuses().len());
    assert!(refusal.violations().all(|status| status.exceeded));
    assert!(refusal.passed().all(|status| !status.exceeded));
    let longest = refusal.violations().map(|status| status.retry_after).max().unwrap();
    assert_eq!(refusal.retry_after(), longest);
    assert_eq!(refusal.primary_violation().retry_after, longest);
    let error = Error::from(refusal.clone());
    let response = error.to_response();
    let body = response.body();
    let public: Value = serde_json::from_str(body).unwrap();
    let fields = refusal.http_fields();
    let seen = format!(
        "{refusal}\n{error}\n{body}\n{fields:?}\n{}",
        serde_json::to_string(&refusal.public()).unwrap()
    );
    assert!(!seen.contains("s3cr3t"), "{seen}");
    let numbers = seen.split(|c: char| !c.is_ascii_digit());
    let ancestors = numbers.filter(|number| number.len() >= 6 && number.starts_with("777")).count();
    assert_eq!(ancestors, 0, "{seen}");
    assert_eq!(
        as_floats(serde_json::to_value(refusal.public()).unwrap()),
        as_floats(public.clone())
    );
    let full: Value = serde_json::from_str(&refusal.to_json()).unwrap();
    assert_eq!(as_floats(serde_json::to_value(refusal).unwrap()), as_floats(full));
    // The wait in the header is not too early, and less than a second too late.
    let header: u64 = response.headers()["retry-after"].to_str().unwrap().parse().unwrap();
    // An integer of a structured field ends there: 31 million years.
    let wait = refusal.retry_after().min(secs(999_999_999_999_999));
    assert!(secs(header) >= wait, "{header} s for {wait:?}");
    assert!(secs(header) < refusal.retry_after() + secs(1));
    assert_eq!(u128::from(public["retry_after_ms"].as_u64().unwrap()), longest.as_millis());
    let policies = parse_list(response.headers()["ratelimit-policy"].to_str().unwrap());
    let limits = parse_list(response.headers()["ratelimit"].to_str().unwrap());
    let own: BTreeSet<_> = refusal
        .statuses()
        .iter()
        .filter(|s| s.level == 0)
        .map(|s| s.limit_name.to_string())
        .collect();
    assert_eq!(policies.iter().map(|(name, _)| name.clone()).collect::<BTreeSet<_>>(), own);
    for (name, parameters) in &policies {
        assert!(parameters.iter().any(|(key, value)| key == "q" && *value > 0), "{name}");
        assert!(parameters.iter().any(|(key, value)| key == "w" && *value > 0), "{name}");
    }
    for (name, parameters) in &limits {
        let status = refusal.statuses().iter().find(|status| status.label() == *name).unwrap();
        assert!(status.level == 0 || status.exceeded, "{name} is an ancestor's that passed");
        let t = parameters.iter().find(|(key, _)| key == "t").unwrap().1;
        if status.exceeded {
            let wait = status.retry_after.min(secs(999_999_999_999_999));
            assert!(secs(t) >= wait, "{name}: t={t} is too early for {wait:?}");
        }
    }
}

/// Promise: no id, no ancestor's number, valid JSON and header fields, waits that are never too early: for any names.
#[test]
fn random_refusals_show_a_caller_what_it_may_see() {
    on(Kind::Memory, async |world| {
        let mut random = Rng::with_seed(11);
        let mut refused = 0;
        for round in 0..150 {
            let limiter = world.limiter().await;
            let id = |level: usize| format!("s3cr3t:{round}@{level}.x");
            let levels = random.usize(1..6);
            let names: Vec<String> = (0..random.usize(1..4))
                .map(|at| {
                    format!("{}{}", ["r", "a.-_Z", "name"][at], "-".repeat(random.usize(0..59)))
                })
                .collect();
            let resource = format!("m{}", [":/._-", "x", "/a:b"][random.usize(0..3)]);
            for level in (0..levels).rev() {
                let parent = id(level + 1);
                let entity = id(level);
                let mut create = limiter.create_entity(&entity);
                if level + 1 < levels {
                    create = create.parent(&parent).cascade();
                }
                create.await.unwrap();
                if level > 0 && random.u8(0..4) == 0 {
                    continue;
                }
                let limits = names.iter().map(|name| {
                    let own = Limit::per(name, random.u64(1..50), secs(random.u64(1..100)))
                        .burst(random.u64(60..90));
                    let above = Limit::per(name, 777_000 + random.u64(1..900), secs(7_770_000))
                        .burst(777_000);
                    if level == 0 { own } else { above }
                });
                let limits: Vec<Limit> = limits.collect();
                limiter.set_limits(&entity, None, limits).await.unwrap();
                if level > 0 && random.bool() {
                    let all_but_ten = limiter.acquire(&entity, &resource).take(&names[0], 776_990);
                    if let Ok(lease) = all_but_ten.await {
                        lease.commit().await.unwrap();
                    }
                }
            }
            let caller = id(0);
            for _ in 0..6 {
                let mut call = limiter.acquire(&caller, &resource);
                for name in &names {
                    call = call.take(name, random.u64(1..40));
                }
                match call.await {
                    Ok(lease) => {
                        let fields = lease.http_fields();
                        assert!(!format!("{fields:?}").contains("777"), "{fields:?}");
                        for (_, value) in fields {
                            parse_list(&value);
                        }
                        lease.commit().await.unwrap();
                    }
                    Err(Error::Exceeded(refusal)) => {
                        refused += 1;
                        check_public(&refusal);
                    }
                    Err(other) => panic!("{other}"),
                }
                world.advance(ms(random.u64(0..2_000)));
            }
        }
        assert!(refused > 100, "{refused}");
    });
}

/// Promise (issue, 3): all fields of the original's `as_dict`.
#[test]
fn the_whole_refusal_has_the_fields_of_the_original() {
    on(Kind::Memory, async |world| {
        let limiter = world.limiter_with([per_minute("rpm", 60), per_minute("tpm", 100)]).await;
        spend(&limiter, "key", "gpt-4", "rpm", 60).await;
        let refusal = exceeded(limiter.acquire("key", "gpt-4").take("rpm", 1).take("tpm", 1).await);
        let json: Value = serde_json::from_str(&refusal.to_json()).unwrap();
        for field in ["error", "message", "retry_after_seconds", "retry_after_ms", "limits"] {
            assert!(json.get(field).is_some(), "{field} is missing in {json}");
        }
        assert_eq!(json["limits"].as_array().unwrap().len(), 2);
        for field in [
            "entity_id",
            "resource",
            "limit_name",
            "capacity",
            "available",
            "requested",
            "exceeded",
            "retry_after_seconds",
        ] {
            assert!(json["limits"][0].get(field).is_some(), "{field} is missing in {json}");
        }
    });
}

/// Promise: waiting exactly `retry_after` passes, one millisecond less does not; of several limits, on every store.
#[test]
fn the_wait_of_an_error_is_exact_on_every_store() {
    on_every_store(async |world| {
        let mut random = Rng::with_seed(5);
        let limiter = world.limiter().await;
        for round in 0..60 {
            let entity = format!("key-{round}");
            let limits: Vec<Limit> = ["a", "b", "c"]
                .iter()
                .map(|name| {
                    Limit::per(*name, random.u64(1..500), secs(random.u64(1..5_000)))
                        .burst(random.u64(5..50))
                })
                .collect();
            limiter.set_limits(&entity, Some("gpt-4"), limits.clone()).await.unwrap();
            let amounts: Vec<u64> =
                limits.iter().map(|limit| random.u64(1..=limit.capacity)).collect();
            let call = || {
                let call = limiter.acquire(&entity, "gpt-4");
                limits
                    .iter()
                    .zip(&amounts)
                    .fold(call, |call, (limit, amount)| call.take(&limit.name, *amount))
            };
            let mut lease = call().await.unwrap();
            if random.bool() {
                lease.adjust("a", 77).unwrap();
            }
            lease.commit().await.unwrap();
            for _ in 0..2 {
                world.advance(ms(random.u64(0..700)));
                let Err(error) = call().await else { continue };
                let wait = error.retry_after().expect("a refusal");
                assert_eq!(Some(wait), error.as_exceeded().map(RateLimitExceeded::retry_after));
                let names: Vec<_> =
                    limits.iter().zip(&amounts).map(|(l, a)| (l.name.as_str(), *a)).collect();
                assert_eq!(
                    limiter.time_until_available(&entity, "gpt-4", &names).await.unwrap(),
                    wait
                );
                world.advance(wait - ms(1));
                assert_eq!(
                    call().await.expect_err("a millisecond early").retry_after(),
                    Some(ms(1))
                );
                world.advance(ms(1));
                call().await.expect("it is time").commit().await.unwrap();
            }
        }
    });
}

/// Promise: a debt so deep that its wait does not fit is still a response.
#[test]
fn the_deepest_debt_is_a_valid_response() {
    on_every_store(async |world| {
        let limiter = world
            .limiter_with([Limit::per("rpm", 1, secs(1_000_000_000)).burst(1_000_000_000_000)])
            .await;
        let mut lease = limiter.acquire("key", "gpt-4").take("rpm", 1).await.unwrap();
        for _ in 0..20 {
            lease.adjust("rpm", 1_000_000_000_000).unwrap();
            lease.flush().await.unwrap();
        }
        lease.commit().await.unwrap();
        let error = limiter.acquire("key", "gpt-4").take("rpm", 1).await.unwrap_err();
        let wait = error.retry_after().unwrap();
        assert!(wait > secs(1_000_000_000));
        check_public(error.as_exceeded().unwrap());
        let buckets = limiter.buckets("key").unwrap().all().await.unwrap();
        assert_eq!(buckets.len(), 1);
    });
}

async fn org(limiter: &RateLimiter) {
    limiter.create_entity("org-s3cr3t").await.unwrap();
    child(limiter, "key-s3cr3t", "org-s3cr3t").await;
    own_limits(limiter, "key-s3cr3t", [without_refill("rpm", 1_000)]).await;
    own_limits(limiter, "org-s3cr3t", [without_refill("rpm", 83)]).await;
}

/// Promise: each error has a response that shows a caller no id and no ancestor's ceiling, and its documented status.
#[test]
fn every_error_is_a_response_without_secrets() {
    on(Kind::Memory, async |world| {
        let limiter = world.limiter().await;
        org(&limiter).await;
        let key = || limiter.acquire("key-s3cr3t", "gpt-4");
        let mut errors: Vec<(u16, Error)> = vec![
            (413, key().take("rpm", 500).await.unwrap_err()),
            (413, key().take("rpm", 5_000).await.unwrap_err()),
            (400, key().take("rpm", u64::MAX).await.unwrap_err()),
            (400, key().await.unwrap_err()),
            (400, limiter.acquire("key-\n s3cr3t", "gpt-4").take("rpm", 1).await.unwrap_err()),
            (400, limiter.acquire("key", "\"><script>").take("rpm", 1).await.unwrap_err()),
            (500, key().take("x", 1).await.unwrap_err()),
            (500, limiter.delete_entity("nobody-s3cr3t").await.unwrap_err()),
            (500, limiter.delete_limits("nobody-s3cr3t", Some("gpt-4")).await.unwrap_err()),
            (500, limiter.create_entity("key-s3cr3t").await.unwrap_err()),
            (500, limiter.create_entity("n").parent("nobody-s3cr3t").await.unwrap_err()),
            (500, limiter.ensure_entity("org-s3cr3t").parent("key-s3cr3t").await.unwrap_err()),
        ];
        key().take("rpm", 83).await.unwrap().commit().await.unwrap();
        errors.push((429, key().take("rpm", 1).await.unwrap_err()));
        for (kind, status) in [
            (StoreErrorKind::Unavailable, 503),
            (StoreErrorKind::Busy, 503),
            (StoreErrorKind::Full, 503),
            (StoreErrorKind::Denied, 500),
            (StoreErrorKind::Corrupt, 500),
            (StoreErrorKind::Rejected, 500),
        ] {
            world.store.break_down(Fault::FailBefore(kind));
            let (done, _) = drive(&world, key().take("rpm", 1).into_future()).await;
            world.store.heal();
            errors.push((status, done.unwrap_err()));
            world.advance(secs(120));
            // The breaker closes again.
            for _ in 0..100 {
                crate::world::settle_down().await;
                if limiter.ping().await.is_ok() && key().take("rpm", 0).await.is_ok() {
                    break;
                }
            }
        }
        for (status, error) in errors {
            let response = error.to_response();
            assert_eq!(response.status().as_u16(), status, "{error:?}");
            let json: Value = serde_json::from_str(response.body()).unwrap();
            assert!(json["error"].is_string());
            let seen = format!("{error} {} {:?}", response.body(), response.headers());
            assert!(!seen.contains("s3cr3t"), "{seen}");
            let own = error
                .as_exceeded()
                .and_then(|refusal| refusal.http_fields().pop())
                .map_or("", |_| "83000000000");
            let seen = if own.is_empty() { seen } else { seen.replace(own, "") };
            assert!(!seen.contains("83"), "the parent's ceiling: {seen}");
            assert_eq!(response.headers()["content-type"], "application/json");
            let wait = response.headers().get("retry-after");
            assert_eq!(wait.is_some(), error.retry_after().is_some(), "{error:?}");
        }
    });
}

/// Promise (`Error::retry_after`): a refusal's wait, one second for a store that does not answer, `None` where waiting
/// does not help.
#[test]
fn only_a_refusal_and_a_silent_store_have_a_wait() {
    on(Kind::Memory, async |world| {
        let limiter = world.limiter_with([per_minute("rpm", 60)]).await;
        let denied = {
            world.store.script(Call::Acquire, Fault::FailBefore(StoreErrorKind::Denied));
            limiter.acquire("key", "gpt-4").take("rpm", 1).await.unwrap_err()
        };
        assert_eq!(denied.retry_after(), None);
        world.store.break_down(Fault::FailBefore(StoreErrorKind::Unavailable));
        let (done, _) =
            drive(&world, limiter.acquire("key", "gpt-4").take("rpm", 1).into_future()).await;
        assert_eq!(done.unwrap_err().retry_after(), Some(secs(1)));
        assert_eq!(Error::NotInLease("x".to_owned()).retry_after(), None);
        let contended = Error::Contended { attempts: 5 }.retry_after();
        assert!(contended.is_none_or(|wait| wait == secs(1)), "undocumented: {contended:?}");
    });
}
