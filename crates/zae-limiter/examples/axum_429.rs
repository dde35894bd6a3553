//! An axum handler behind the limiter. A call that is refused is answered with 429 and says when to
//! come back: `Retry-After`, and `RateLimit-Policy` and `RateLimit` of the IETF draft.
//!
//!     cargo run --release -p zae-limiter --example axum_429             # three calls, then the end
//!     cargo run --release -p zae-limiter --example axum_429 -- serve    # goes on serving

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};

use axum::Router;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use zae_limiter::{Error, Limit, RateLimiter, http_fields};

async fn hello(State(limiter): State<RateLimiter>, headers: HeaderMap) -> Response {
    let key = headers.get("x-api-key").and_then(|value| value.to_str().ok()).unwrap_or("anonymous");
    match limiter.acquire(key, "hello").take("rpm", 1).await {
        Ok(lease) => {
            let fields = http_fields(&lease.statuses());
            match lease.commit().await {
                Ok(()) => (with_fields(fields), "hello\n").into_response(),
                Err(error) => refuse(error),
            }
        }
        Err(error) => refuse(error),
    }
}

fn refuse(error: Error) -> Response {
    match error {
        Error::Exceeded(refusal) => {
            let mut headers = with_fields(refusal.http_fields());
            let json = HeaderValue::from_static("application/json");
            headers.insert(header::CONTENT_TYPE, json);
            (StatusCode::TOO_MANY_REQUESTS, headers, refusal.to_json()).into_response()
        }
        Error::Invalid(invalid) => (StatusCode::BAD_REQUEST, invalid.to_string()).into_response(),
        Error::Unavailable { .. } => StatusCode::SERVICE_UNAVAILABLE.into_response(),
        _ => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

fn with_fields(fields: Vec<(&'static str, String)>) -> HeaderMap {
    let field = |(name, value): (&'static str, String)| {
        let name = HeaderName::from_bytes(name.as_bytes()).expect("a header's name");
        (name, HeaderValue::try_from(value).expect("ASCII"))
    };
    fields.into_iter().map(field).collect()
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let folder = tempfile::tempdir()?;
    let url = format!("sqlite:{}", folder.path().join("limits.db").display());
    let limiter = zae_limiter::open(&url).await?;
    limiter.set_resource_defaults("hello", [Limit::per_minute("rpm", 2)]).await?;

    let app = Router::new().route("/hello", get(hello)).with_state(limiter);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    println!("listening on http://{address}/hello\n");
    let server = tokio::spawn(async move { axum::serve(listener, app).await });

    if std::env::args().nth(1).as_deref() == Some("serve") {
        return Ok(server.await??);
    }
    for _ in 0..3 {
        let answer = tokio::task::spawn_blocking(move || request(address)).await??;
        println!("{answer}\n");
    }
    Ok(())
}

/// A request by hand, so that the answer is seen as it comes.
fn request(address: SocketAddr) -> std::io::Result<String> {
    let mut stream = TcpStream::connect(address)?;
    let request =
        "GET /hello HTTP/1.1\r\nhost: localhost\r\nx-api-key: key-1\r\nconnection: close\r\n\r\n";
    stream.write_all(request.as_bytes())?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}
