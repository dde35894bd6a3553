//! The archive in an S3 bucket.

use std::time::Duration;

use aws_config::timeout::TimeoutConfig;
use aws_config::{BehaviorVersion, SdkConfig};
use aws_sdk_s3::Client;
use aws_sdk_s3::primitives::ByteStream;
use aws_smithy_http_client::{Builder, tls};
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
}

impl Bucket {
    /// The bucket of that name, with region and credentials from the environment.
    pub async fn open(name: impl Into<String>) -> Self {
        let http = Builder::new()
            .tls_provider(tls::Provider::Rustls(tls::rustls_provider::CryptoMode::Ring))
            .build_https();
        let timeouts = TimeoutConfig::builder().operation_timeout(TIMEOUT).build();
        let config = aws_config::defaults(BehaviorVersion::latest())
            .http_client(http)
            .timeout_config(timeouts)
            .load()
            .await;
        Self::with_config(&config, name.into())
    }

    fn with_config(config: &SdkConfig, name: String) -> Self {
        let places = Places::of(config);
        // Endpoints other than AWS may not support bucket names in the host name.
        let has_endpoint =
            config.endpoint_url().is_some() || std::env::var_os("AWS_ENDPOINT_URL_S3").is_some();
        let config = aws_sdk_s3::config::Builder::from(config).force_path_style(has_endpoint);
        Self { client: Client::from_conf(config.build()), places, name, prefix: String::new() }
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
    use aws_config::Region;
    use aws_sdk_s3::config::retry::RetryConfig;
    use aws_sdk_s3::config::{Credentials, SharedCredentialsProvider};

    use super::*;

    #[tokio::test]
    async fn an_error_names_the_endpoint_and_shows_no_insides_of_the_sdk() {
        // The port is closed again before the upload.
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
        let endpoint = format!("http://{}", listener.local_addr().expect("it is bound"));
        drop(listener);
        let credentials = Credentials::new("local", "local", None, None, "test");
        let config = SdkConfig::builder()
            .behavior_version(BehaviorVersion::latest())
            .region(Region::new("us-east-1"))
            .credentials_provider(SharedCredentialsProvider::new(credentials))
            .http_client(Builder::new().build_http())
            .retry_config(RetryConfig::disabled())
            .endpoint_url(&endpoint)
            .build();
        let bucket = Bucket::with_config(&config, "audit".to_owned()).folder("limits");
        let error = bucket.put("one.jsonl.gz", Vec::new()).await.expect_err("nothing listens");
        let says = format!(
            "could not write s3://audit/limits/one.jsonl.gz: S3 cannot be reached at {endpoint}"
        );
        assert!(error.message.starts_with(&says), "{}", error.message);
        assert!(!error.message.contains(" { "), "{}", error.message);
    }
}
