//! Promise (docs/aggregator.md): the endpoint of the metrics survives anything.
#![cfg(feature = "aws")]
#![allow(clippy::unwrap_used, reason = "a test says what is wrong by panicking")]

use std::net::SocketAddr;
use std::sync::Arc;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use zae_limiter_aggregator::daemon::serve;
use zae_limiter_core::SystemClock;

async fn endpoint() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(serve(listener, Arc::default(), Arc::new(SystemClock)));
    address
}

/// Sends these bytes, optionally closes this half, and reads to the end.
async fn send(address: SocketAddr, bytes: &[u8], close: bool) -> String {
    let mut stream = TcpStream::connect(address).await.unwrap();
    // The endpoint may close before it has read everything.
    let _ = stream.write_all(bytes).await;
    if close {
        let _ = stream.shutdown().await;
    }
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer).await;
    String::from_utf8_lossy(&answer).into_owned()
}

async fn check_serves(address: SocketAddr, after: &str) {
    let answer = send(address, b"GET /metrics HTTP/1.1\r\nhost: a\r\n\r\n", false).await;
    assert!(answer.starts_with("HTTP/1.1 200"), "after {after}: {answer}");
}

#[tokio::test]
async fn odd_requests_are_answered_and_the_next_one_too() {
    let address = endpoint().await;
    let huge_header =
        format!("GET /metrics HTTP/1.1\r\nhost: a\r\nx: {}\r\n\r\n", "x".repeat(2_000_000));
    let many_headers = format!("GET /metrics HTTP/1.1\r\n{}\r\n", "a: b\r\n".repeat(5_000));
    let huge_path = format!("GET /{} HTTP/1.1\r\nhost: a\r\n\r\n", "x".repeat(200_000));
    let pipelined = "GET /metrics HTTP/1.1\r\nhost: a\r\n\r\n".repeat(1_000);
    let chunked = "POST /metrics HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\nffffffffffffffff\r\n";
    let cases: &[(&str, &[u8], bool, &str)] = &[
        ("HTTP/1.0", b"GET /metrics HTTP/1.0\r\n\r\n", false, "HTTP/1.0 200"),
        ("HTTP/1.0, half closed", b"GET /metrics HTTP/1.0\r\n\r\n", true, "HTTP/1.0 200"),
        ("half closed", b"GET /metrics HTTP/1.1\r\nhost: a\r\n\r\n", true, "HTTP/1.1 200"),
        ("without a host", b"GET /metrics HTTP/1.1\r\n\r\n", false, "HTTP/1.1 "),
        ("HEAD", b"HEAD /metrics HTTP/1.1\r\nhost: a\r\n\r\n", false, "HTTP/1.1 200"),
        ("absolute", b"GET http://a/metrics HTTP/1.1\r\nhost: a\r\n\r\n", false, "HTTP/1.1 200"),
        ("CONNECT", b"CONNECT a:80 HTTP/1.1\r\nhost: a\r\n\r\n", false, "HTTP/1.1 4"),
        ("OPTIONS *", b"OPTIONS * HTTP/1.1\r\nhost: a\r\n\r\n", false, "HTTP/1.1 404"),
        ("HTTP/2", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", false, ""),
        ("TLS", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", true, ""),
        ("zeros", &[0; 10_000], true, ""),
        ("nothing", b"", true, ""),
        ("line feeds", b"\n\n\n\n\n\n\n\n", true, ""),
        ("two lengths", b"POST /metrics HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n", false, "HTTP/1.1 400"),
        ("a length beyond", b"POST /metrics HTTP/1.1\r\nhost: a\r\ncontent-length: 99999999999999999999999\r\n\r\n", false, "HTTP/1.1 4"),
        ("a body that never comes", b"POST /metrics HTTP/1.1\r\nhost: a\r\ncontent-length: 1000000\r\n\r\n", false, "HTTP/1.1 405"),
        ("expects to continue", b"POST /metrics HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\ncontent-length: 10\r\n\r\n", false, "HTTP/1.1 "),
        ("an upgrade", b"GET /metrics HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n", false, "HTTP/1.1 200"),
        ("chunks", chunked.as_bytes(), false, "HTTP/1.1 405"),
        ("pipelined", pipelined.as_bytes(), false, "HTTP/1.1 200"),
        ("a huge header", huge_header.as_bytes(), false, ""),
        ("many headers", many_headers.as_bytes(), false, ""),
        ("a huge path", huge_path.as_bytes(), false, ""),
    ];
    for (what, bytes, close, wanted) in cases {
        let answer = send(address, bytes, *close).await;
        assert!(answer.starts_with(wanted), "{what}: {:?}", answer.get(..200));
        check_serves(address, what).await;
    }
}

/// Clients that send a part of a request, or nothing, do not hold up others.
#[tokio::test]
async fn slow_clients_hold_up_nobody() {
    let address = endpoint().await;
    let mut slow = Vec::new();
    for n in 0..100 {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let request: &[u8] = match n % 3 {
            0 => b"GET /metrics HTTP/1.1\r\nhost: a\r\nx: ",
            1 => b"",
            _ => b"POST /metrics HTTP/1.1\r\nhost: a\r\ncontent-length: 1000000\r\n\r\n",
        };
        let _ = stream.write_all(request).await;
        slow.push(stream);
    }
    check_serves(address, "a hundred slow clients").await;
    for mut stream in slow.split_off(66) {
        let _ = stream.write_all(b"x").await;
    }
    check_serves(address, "slow clients").await;
}
