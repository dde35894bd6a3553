//! What a caller gets over HTTP: the public form of a refusal, and nothing of its ancestors.

use http::StatusCode;
use zae_limiter::model::LimitSet;
use zae_limiter::{Error, Limit, MemoryStore, RateLimiter};

use crate::world::{Kind, child, on, own_limits, per_minute, spend, without_refill};

#[test]
fn a_refusal_by_a_parent_shows_the_caller_no_id_and_no_balance() {
    on(Kind::Memory, async |world| {
        let limiter = world.limiter().await;
        limiter.create_entity("org-secret").await.unwrap();
        child(&limiter, "key-secret", "org-secret").await;
        own_limits(&limiter, "key-secret", [without_refill("tpm", 1_000)]).await;
        let parents = [per_minute("tpm", 54_321), without_refill("rpd", 98_765)];
        own_limits(&limiter, "org-secret", parents).await;
        spend(&limiter, "org-secret", "gpt-4", "tpm", 54_000).await;
        let refused = limiter.acquire("key-secret", "gpt-4").take("tpm", 500).await.unwrap_err();
        let response = refused.to_response();
        assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
        let headers = response.headers();
        assert_eq!(headers["retry-after"], "1");
        assert_eq!(headers["content-type"], "application/json");
        assert_eq!(headers["ratelimit-policy"], "\"tpm\";q=1;w=1000000000");
        // The key's own limit is untouched, the parent's is named, and that is all.
        assert_eq!(headers["ratelimit"], "\"tpm\";r=1000;t=0, \"tpm@parent\";r=0;t=1");
        let body = response.body();
        assert_eq!(
            body,
            "{\"error\":\"rate_limit_exceeded\",\"message\":\"rate limit exceeded: tpm@parent on \
             gpt-4; retry in 0.198 s\",\"retry_after_seconds\":0.198,\"retry_after_ms\":198,\
             \"resource\":\"gpt-4\",\"limits\":[{\"limit_name\":\"tpm\",\"kind\":\"rate\",\
             \"capacity\":1000,\"refill_amount\":1,\"refill_period_seconds\":1000000000,\
             \"available\":1000,\"requested\":500,\"exceeded\":false,\"retry_after_seconds\":0},\
             {\"limit_name\":\"tpm@parent\",\"exceeded\":true,\"retry_after_seconds\":0.198}]}"
        );
        let everything = format!("{refused} {headers:?} {body}");
        for secret in ["secret", "54321", "54_321", "98765", "321"] {
            assert!(!everything.contains(secret), "{secret} in {everything}");
        }
        // An admitted call shows no parent either.
        let lease = limiter.acquire("key-secret", "gpt-4").take("tpm", 1).await.unwrap();
        assert!(!format!("{:?}", lease.headers()).contains("parent"), "{:?}", lease.headers());
        lease.commit().await.unwrap();
    });
}

#[test]
fn each_error_has_its_status_and_shows_no_details_of_the_store() {
    on(Kind::Memory, async |world| {
        let limiter = world.limiter_with([per_minute("rpm", 10)]).await;
        let status = |done: Result<_, Error>| done.map(drop).unwrap_err().to_response().status();
        let call = |entity, tokens| limiter.acquire(entity, "gpt-4").take("rpm", tokens);
        assert_eq!(status(call("a b", 1).await), StatusCode::BAD_REQUEST);
        assert_eq!(status(call("key", 11).await), StatusCode::PAYLOAD_TOO_LARGE);
        let unknown = limiter.acquire("key", "gpt-4").take("x", 1).await.unwrap_err();
        assert_eq!(unknown.to_response().status(), StatusCode::INTERNAL_SERVER_ERROR);
        assert_eq!(unknown.to_response().body(), "{\"error\":\"internal\"}");
        use zae_limiter::store::StoreErrorKind::{Corrupt, Unavailable};
        for (kind, expected) in [(Corrupt, 500), (Unavailable, 503)] {
            world.store.break_down(zae_limiter_testkit::Fault::FailBefore(kind));
            let (failed, _) = crate::world::drive(&world, call("key", 1).into_future()).await;
            world.store.heal();
            let response = failed.unwrap_err().to_response();
            assert_eq!(response.status().as_u16(), expected);
            assert!(!response.body().contains("message"), "{}", response.body());
            assert_eq!(response.headers().contains_key("retry-after"), expected == 503);
        }
    });
}

#[test]
fn limits_come_from_a_file() {
    let limits: LimitSet =
        serde_json::from_str("[\"rpm:100\", {\"name\":\"tpm\",\"capacity\":5}]").unwrap();
    assert_eq!(limits.to_limits(), [Limit::per_minute("rpm", 100), Limit::per_minute("tpm", 5)]);
    let policy: zae_limiter::OnUnavailable = serde_json::from_str("\"allow\"").unwrap();
    assert_eq!(policy, zae_limiter::OnUnavailable::Allow);
    drop(RateLimiter::builder(std::sync::Arc::new(MemoryStore::new())));
}
