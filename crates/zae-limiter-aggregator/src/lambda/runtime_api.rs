//! A client of Lambda's Runtime API: fetches the next invocation and posts its response.

use http_body_util::{BodyExt as _, Full};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1::{self, SendRequest};
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use serde_json::json;
use tokio::net::TcpStream;

const VERSION: &str = "2018-06-01";
const ID: &str = "lambda-runtime-aws-request-id";

/// An invocation of the function.
pub(super) struct Invocation {
    pub(super) id: String,
    pub(super) event: String,
}

/// The Runtime API, over one connection, which is opened again after it was closed.
pub(super) struct RuntimeApi {
    address: String,
    connection: Option<SendRequest<Full<Bytes>>>,
}

impl RuntimeApi {
    pub(super) fn new(address: &str) -> Self {
        Self { address: address.to_owned(), connection: None }
    }

    /// Waits for the next invocation.
    pub(super) async fn next(&mut self) -> Result<Invocation, String> {
        let response = self.call("GET", "invocation/next", String::new()).await?;
        let id = response.headers().get(ID).and_then(|id| id.to_str().ok()).map(str::to_owned);
        let id = id.ok_or_else(|| format!("an invocation has no header {ID}"))?;
        let body = response.into_body().collect().await;
        let body = body.map_err(|error| format!("could not read the event: {error}"))?.to_bytes();
        Ok(Invocation { id, event: String::from_utf8_lossy(&body).into_owned() })
    }

    pub(super) async fn respond(&mut self, id: &str, response: &str) -> Result<(), String> {
        self.post(&format!("invocation/{id}/response"), response.to_owned()).await
    }

    /// Reports that the whole invocation failed. Lambda repeats it.
    pub(super) async fn fail(&mut self, id: &str, message: &str) -> Result<(), String> {
        let error = json!({ "errorType": "Aggregator.BadEvent", "errorMessage": message });
        self.post(&format!("invocation/{id}/error"), error.to_string()).await
    }

    /// Reports that the function cannot start.
    pub(super) async fn fail_to_start(&mut self, message: &str) -> Result<(), String> {
        let error = json!({ "errorType": "Aggregator.BadSettings", "errorMessage": message });
        self.post("init/error", error.to_string()).await
    }

    async fn post(&mut self, path: &str, body: String) -> Result<(), String> {
        let response = self.call("POST", path, body).await?;
        // The connection can be used again once the response has been read to its end.
        let _ = response.into_body().collect().await;
        Ok(())
    }

    async fn call(
        &mut self,
        method: &str,
        path: &str,
        body: String,
    ) -> Result<Response<Incoming>, String> {
        let failed = |what: &dyn std::fmt::Display| {
            format!("could not call the Runtime API ({method} {path}): {what}")
        };
        let request = Request::builder()
            .method(method)
            .uri(format!("/{VERSION}/runtime/{path}"))
            .header("host", &self.address)
            .header("content-type", "application/json")
            .body(Full::new(Bytes::from(body)))
            .map_err(|error| failed(&error))?;
        let mut connection = self.connected().await.map_err(|error| failed(&error))?;
        let response = connection.send_request(request).await.map_err(|error| failed(&error))?;
        self.connection = Some(connection);
        if !response.status().is_success() {
            return Err(failed(&response.status()));
        }
        Ok(response)
    }

    /// The open connection, or a new one.
    async fn connected(&mut self) -> Result<SendRequest<Full<Bytes>>, String> {
        if let Some(mut connection) = self.connection.take()
            && connection.ready().await.is_ok()
        {
            return Ok(connection);
        }
        let stream = TcpStream::connect(&self.address).await.map_err(|error| error.to_string())?;
        let (connection, driver) =
            http1::handshake(TokioIo::new(stream)).await.map_err(|error| error.to_string())?;
        // The driver ends with the connection. The next use of the connection reports its errors.
        tokio::spawn(async move { drop(driver.await) });
        Ok(connection)
    }
}
