//! The archive in an S3 bucket.

use std::time::Duration;

use aws_config::SdkConfig;
use aws_config::retry::RetryConfig;
use aws_config::timeout::TimeoutConfig;
use aws_sdk_s3::Client;
use aws_sdk_s3::primitives::ByteStream;
use zae_limiter_core::BoxFuture;
use zae_limiter_dynamodb::aws::{Call, Places};

use crate::archive::{Archive, ArchiveError};

/// The longest that one upload may take, retries included.
const TIMEOUT: Duration = Duration::from_secs(30);

/// An archive in an S3 bucket.
#[derive(Clone, Debug)]
pub struct Bucket {
    client: Client,
    places: Places,
    name: String,
    /// Precedes the names of all files. Empty, or ends with `/`.
    prefix: String,
    /// The account that must own the bucket.
    owner: Option<String>,
}

impl Bucket {
    /// The bucket of that name, at the endpoint and with the credentials of `config`.
    pub fn new(config: &SdkConfig, name: impl Into<String>) -> Self {
        let places = Places::of(config);
        // Endpoints other than AWS may not support bucket names in the host name.
        let has_endpoint =
            config.endpoint_url().is_some() || std::env::var_os("AWS_ENDPOINT_URL_S3").is_some();
        let timeouts = TimeoutConfig::builder().operation_timeout(TIMEOUT).build();
        let config = aws_sdk_s3::config::Builder::from(config)
            .timeout_config(timeouts)
            // An upload is safe to repeat.
            .retry_config(RetryConfig::standard())
            .force_path_style(has_endpoint);
        let client = Client::from_conf(config.build());
        Self { client, places, name: name.into(), prefix: String::new(), owner: None }
    }

    /// Writes only if this account owns the bucket. If a bucket is deleted, anybody may take its name.
    #[must_use]
    pub fn owner(mut self, account: Option<String>) -> Self {
        self.owner = account;
        self
    }

    /// Stores files in a folder of the bucket.
    #[must_use]
    pub fn folder(mut self, folder: &str) -> Self {
        let folder = folder.trim_matches('/');
        self.prefix = if folder.is_empty() { String::new() } else { format!("{folder}/") };
        self
    }
}

impl Archive for Bucket {
    fn put<'a>(&'a self, name: &'a str, bytes: Vec<u8>) -> BoxFuture<'a, Result<(), ArchiveError>> {
        Box::pin(async move {
            let key = format!("{}{name}", self.prefix);
            let sent = self
                .client
                .put_object()
                .bucket(&self.name)
                .key(&key)
                .set_expected_bucket_owner(self.owner.clone())
                .content_type("application/x-ndjson")
                .content_encoding("gzip")
                .body(ByteStream::from(bytes))
                .send()
                .await;
            sent.map(drop).map_err(|error| {
                let place = self.places.of_service("S3");
                let call = Call { service: "S3", operation: "PutObject", place, limit: TIMEOUT };
                let failed = call.failed(&error);
                let message =
                    format!("could not write s3://{}/{key}: {}", self.name, failed.message);
                ArchiveError { message, source: Some(failed.cause.into()) }
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use aws_config::{BehaviorVersion, Region};
    use aws_sdk_s3::config::{Credentials, SharedCredentialsProvider};
    use aws_smithy_http_client::Builder;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;

    use super::*;

    fn config(endpoint: &str) -> SdkConfig {
        let credentials = Credentials::new("local", "local", None, None, "test");
        SdkConfig::builder()
            .behavior_version(BehaviorVersion::latest())
            .region(Region::new("us-east-1"))
            .credentials_provider(SharedCredentialsProvider::new(credentials))
            .http_client(Builder::new().build_http())
            .endpoint_url(endpoint)
            .build()
    }

    /// The head of the one request that a bucket sends.
    async fn head_of_upload(owner: Option<&str>) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let endpoint = format!("http://{}", listener.local_addr().expect("it is bound"));
        let served = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.expect("a connection");
            let mut request = vec![0; 65_536];
            let read = stream.read(&mut request).await.expect("a request");
            let answer = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n";
            stream.write_all(answer).await.expect("it listens");
            String::from_utf8_lossy(&request[..read]).to_lowercase()
        });
        let bucket = Bucket::new(&config(&endpoint), "audit").owner(owner.map(str::to_owned));
        bucket.put("one.jsonl.gz", b"x".to_vec()).await.expect("it is stored");
        served.await.expect("no panic")
    }

    #[tokio::test]
    async fn a_bucket_of_another_account_is_refused_by_s3() {
        let head = head_of_upload(Some("123456789012")).await;
        assert!(head.contains("x-amz-expected-bucket-owner: 123456789012"), "{head}");
        assert!(!head_of_upload(None).await.contains("expected-bucket-owner"));
    }

    #[tokio::test]
    async fn an_error_names_the_endpoint_and_shows_no_insides_of_the_sdk() {
        // The port is closed again before the upload.
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
        let endpoint = format!("http://{}", listener.local_addr().expect("it is bound"));
        drop(listener);
        let bucket = Bucket::new(&config(&endpoint), "audit").folder("limits");
        let error = bucket.put("one.jsonl.gz", Vec::new()).await.expect_err("nothing listens");
        let says = format!(
            "could not write s3://audit/limits/one.jsonl.gz: S3 cannot be reached at {endpoint}"
        );
        assert!(error.message.starts_with(&says), "{}", error.message);
        assert!(!error.message.contains(" { "), "{}", error.message);
    }
}
