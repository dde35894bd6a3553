//! The archive in an S3 bucket.

use std::error::Error as _;
use std::time::Duration;
use zae_limiter_core::BoxFuture;

use aws_config::BehaviorVersion;
use aws_config::timeout::TimeoutConfig;
use aws_sdk_s3::Client;
use aws_sdk_s3::error::DisplayErrorContext;
use aws_sdk_s3::primitives::ByteStream;
use aws_smithy_http_client::{Builder, tls};

use crate::archive::{Archive, ArchiveError};

/// The longest that one upload may take, retries included.
const TIMEOUT: Duration = Duration::from_secs(30);

/// An archive in an S3 bucket.
#[derive(Clone, Debug)]
pub struct Bucket {
    client: Client,
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
        // Endpoints other than AWS may not support bucket names in the host name.
        let has_endpoint =
            config.endpoint_url().is_some() || std::env::var_os("AWS_ENDPOINT_URL_S3").is_some();
        let config = aws_sdk_s3::config::Builder::from(&config).force_path_style(has_endpoint);
        Self { client: Client::from_conf(config.build()), name: name.into(), prefix: String::new() }
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
                let why = DisplayErrorContext(&error).to_string();
                let message = format!("could not write s3://{}/{key}: {why}", self.name);
                let source = error.source().map(|source| source.to_string().into());
                ArchiveError { message, source }
            })
        })
    }
}
