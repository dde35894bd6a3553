//! Answers that are streamed by a real server, to clients that hang up.

use std::convert::Infallible;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};

use axum::Router;
use axum::body::Body;
use axum::extract::{Path, State};
use axum::routing::get;
use futures_util::stream::unfold;
use zae_limiter::{Lease, OnDrop, RateLimiter};

use crate::world::{Kind, World, left, soon, without_refill};

/// Streams without end. The estimate is 100 tokens; the way says what becomes of it after the first chunk.
async fn answer(State(limiter): State<RateLimiter>, Path(way): Path<String>) -> Body {
    let call = limiter.acquire("key", "gpt-4").take("tpm", 100);
    let call = if way == "keep" { call.on_drop(OnDrop::Keep) } else { call };
    let lease = call.await.expect("admitted");
    let state = (lease, way, 0_u32);
    Body::from_stream(unfold(state, async |(mut lease, way, chunk): (Lease, String, u32)| {
        if chunk == 1 && way != "estimate" && way != "keep" {
            lease.settle("tpm", 40).expect("it holds 100");
        }
        if chunk == 1 && way == "flush" {
            lease.flush().await.expect("the store answers");
        }
        if chunk == 3 && way == "commit" {
            lease.commit().await.expect("the store answers");
            return None;
        }
        tokio::task::yield_now().await;
        let text = format!("chunk {chunk}\n").repeat(100);
        Some((Ok::<_, Infallible>(text), (lease, way, chunk + 1)))
    }))
}

/// Reads the third chunk, and hangs up while the server goes on.
fn hang_up(address: SocketAddr, way: &str) {
    let mut stream = TcpStream::connect(address).expect("the server listens");
    write!(stream, "GET /{way} HTTP/1.1\r\nhost: localhost\r\n\r\n").expect("sent");
    let mut seen = Vec::new();
    let mut buffer = [0; 1_024];
    while !String::from_utf8_lossy(&seen).contains("chunk 2") {
        let read = stream.read(&mut buffer).expect("an answer");
        assert!(read > 0, "the answer has ended: {}", String::from_utf8_lossy(&seen));
        seen.extend_from_slice(&buffer[..read]);
    }
}

#[test]
fn a_client_that_hangs_up_pays_for_what_was_settled() {
    for kind in Kind::ALL {
        for (way, stays) in
            [("estimate", 0), ("settle", 40), ("flush", 40), ("keep", 100), ("commit", 40)]
        {
            let runtime = tokio::runtime::Builder::new_multi_thread()
                .worker_threads(2)
                .enable_io()
                .build()
                .unwrap();
            let world = World::new(*kind);
            runtime.block_on(async {
                let limiter = world.limiter_with([without_refill("tpm", 1_000)]).await;
                let app = Router::new().route("/{way}", get(answer)).with_state(limiter.clone());
                let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
                let address = listener.local_addr().unwrap();
                let server = tokio::spawn(async move { axum::serve(listener, app).await });
                tokio::task::spawn_blocking(move || hang_up(address, way)).await.unwrap();
                let what = format!("{kind:?}: {stays} stay taken after {way}");
                soon(&what, async || left(&limiter, "key", "gpt-4", "tpm").await == 1_000 - stays)
                    .await;
                server.abort();
            });
        }
    }
}
