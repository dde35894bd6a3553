//! An axum handler behind the limiter: `cargo run -p zae-limiter --features http --example axum_429`

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::extract::State;
use axum::http::{HeaderMap, Request};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use tower::ServiceExt as _;
use zae_limiter::{Error, Limit, RateLimiter};

async fn hello(State(limiter): State<RateLimiter>, headers: HeaderMap) -> Response {
    let key = headers.get("x-api-key").and_then(|value| value.to_str().ok()).unwrap_or("anonymous");
    match greet(&limiter, key).await {
        Ok(response) => response,
        Err(error) => error.to_response().into_response(),
    }
}

async fn greet(limiter: &RateLimiter, key: &str) -> Result<Response, Error> {
    let lease = limiter.acquire(key, "hello").take("rpm", 1).await?;
    let headers = lease.headers();
    lease.commit().await?;
    Ok((headers, "hello").into_response())
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let limiter = zae_limiter::open("memory:").await?;
    limiter.ensure_resource_defaults("hello", [Limit::per_minute("rpm", 2)]).await?;
    let app = Router::new().route("/hello", get(hello)).with_state(limiter);
    for _ in 0..3 {
        let request = Request::get("/hello").header("x-api-key", "key-1").body(Body::empty())?;
        let (parts, body) = app.clone().oneshot(request).await?.into_parts();
        println!("{} {:?}", parts.status, parts.headers);
        println!("{}\n", String::from_utf8(to_bytes(body, 10_000).await?.to_vec())?);
    }
    Ok(())
}
