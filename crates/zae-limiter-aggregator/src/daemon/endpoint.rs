//! The HTTP endpoint that Prometheus reads.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::AbortHandle;
use zae_limiter_core::Clock;

use super::metrics::Metrics;

/// The most connections at once. A further one ends the oldest.
const CONNECTIONS_MAX: usize = 32;
/// How long a client may take to send its request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// The pause after a connection could not be accepted.
const ACCEPT_AGAIN_AFTER: Duration = Duration::from_millis(100);

/// Serves the metrics over HTTP until it is dropped. If a connection cannot be accepted, for example because the
/// process has too many open files, it tries again.
pub async fn serve(listener: TcpListener, metrics: Arc<Metrics>, clock: Arc<dyn Clock>) {
    let mut connections = Connections::default();
    loop {
        match listener.accept().await {
            Ok((stream, _)) => connections.add(stream, Arc::clone(&metrics)),
            Err(_) => {
                metrics.error();
                connections.make_room();
                clock.sleep(ACCEPT_AGAIN_AFTER).await;
            }
        }
    }
}

/// The open connections, the oldest first.
#[derive(Default)]
struct Connections(VecDeque<AbortHandle>);

impl Connections {
    fn add(&mut self, stream: TcpStream, metrics: Arc<Metrics>) {
        self.0.retain(|connection| !connection.is_finished());
        while self.0.len() >= CONNECTIONS_MAX {
            self.make_room();
        }
        let respond = service_fn(move |request| {
            let response = respond(&request, &metrics);
            async { Ok::<_, Infallible>(response) }
        });
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(REQUEST_TIMEOUT)
            .keep_alive(false)
            .serve_connection(TokioIo::new(stream), respond);
        // A client that closes the connection early is not an error.
        let task = tokio::spawn(async move { drop(connection.await) });
        self.0.push_back(task.abort_handle());
    }

    /// Ends the oldest connection.
    fn make_room(&mut self) {
        if let Some(oldest) = self.0.pop_front() {
            oldest.abort();
        }
    }
}

impl Drop for Connections {
    fn drop(&mut self) {
        self.0.iter().for_each(AbortHandle::abort);
    }
}

fn respond(request: &Request<Incoming>, metrics: &Metrics) -> Response<Full<Bytes>> {
    let (status, body) = match (request.method(), request.uri().path()) {
        (&Method::GET | &Method::HEAD, "/metrics") => (StatusCode::OK, metrics.text()),
        (_, "/metrics") => (StatusCode::METHOD_NOT_ALLOWED, "use GET\n".to_owned()),
        _ => (StatusCode::NOT_FOUND, "the metrics are at /metrics\n".to_owned()),
    };
    let mut response = Response::new(Full::from(body));
    *response.status_mut() = status;
    let kind = HeaderValue::from_static("text/plain; version=0.0.4");
    response.headers_mut().insert(CONTENT_TYPE, kind);
    response
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use zae_limiter_core::SystemClock;

    use super::*;

    async fn endpoint() -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("it is bound");
        tokio::spawn(serve(listener, Arc::default(), Arc::new(SystemClock)));
        address
    }

    async fn get(address: SocketAddr, request: &str) -> String {
        let mut stream = TcpStream::connect(address).await.expect("it listens");
        let request = format!("{request} HTTP/1.1\r\nhost: localhost\r\n\r\n");
        stream.write_all(request.as_bytes()).await.expect("it listens");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.expect("an answer, and its end");
        answer
    }

    #[tokio::test]
    async fn it_answers_however_many_connections_are_idle() {
        let address = endpoint().await;
        let mut idle = Vec::new();
        for _ in 0..3 * CONNECTIONS_MAX {
            let mut stream = TcpStream::connect(address).await.expect("it listens");
            stream.write_all(b"GET /metr").await.expect("it listens");
            idle.push(stream);
        }
        let answer = get(address, "GET /metrics").await;
        assert!(answer.starts_with("HTTP/1.1 200 OK"), "{answer}");
        assert!(answer.contains("\nzae_limiter_aggregator_records_total 0\n"), "{answer}");
        // The oldest connection was closed; nothing was sent to it.
        assert!(matches!(idle[0].read(&mut [0; 64]).await, Ok(0) | Err(_)));
    }

    #[tokio::test]
    async fn garbage_and_other_paths_are_answered() {
        let address = endpoint().await;
        for (request, wanted) in [
            ("\u{1}\u{2}garbage", "HTTP/1.1 400"),
            ("GET /", "HTTP/1.1 404"),
            ("POST /metrics", "HTTP/1.1 405"),
            ("GET /metrics?x=1", "HTTP/1.1 200"),
        ] {
            let answer = get(address, request).await;
            assert!(answer.starts_with(wanted), "{request:?}: {answer}");
        }
    }
}
