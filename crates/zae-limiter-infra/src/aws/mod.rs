//! [`Cloud`] over the AWS SDK.

mod convert;
mod errors;

use std::fmt;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

pub use aws_config::SdkConfig;
use aws_config::retry::RetryConfig;
use aws_config::timeout::TimeoutConfig;
use aws_credential_types::Credentials;
use aws_credential_types::provider::{ProvideCredentials, SharedCredentialsProvider, future};
use aws_sdk_cloudformation::types::Capability;
use aws_sdk_cloudwatch::primitives::DateTime;
use aws_sdk_cloudwatch::types::{Dimension, Statistic};
use aws_sdk_dynamodb::error::{ProvideErrorMetadata, SdkError};
use aws_sdk_s3::types::{Delete, ObjectIdentifier};
use aws_sdk_sqs::types::QueueAttributeName;
use zae_limiter_core::{BoxFuture, SystemClock, within};
pub use zae_limiter_dynamodb::aws::{AwsTable, DynamoAddress};
use zae_limiter_dynamodb::aws::{BadProfile, Call, Limit, Places, look, on_own_thread};
use zae_limiter_schema::{Item, ItemKey, TableError};

use crate::cloud::{
    Cloud, CloudError, CloudErrorKind, Maker, StackEvent, StackState, TableFigures, Update,
};
use crate::migrate::Scan;
use crate::plan::StackPlan;
use convert::{event, figures, parameters, stack, tags};
use errors::cloud_error;

/// The most objects that one call deletes.
const DELETE_MAX: usize = 1_000;
/// The time span of the stream's lag in milliseconds, and the length of a period in seconds.
const LAG_SPAN_MS: i64 = 600_000;
const LAG_PERIOD_S: i32 = 60;

/// The time limit of one call to AWS: connecting, credentials, retries and the whole answer. AWS answers
/// these calls within a second or two.
pub const CALL_TIMEOUT: Duration = Duration::from_secs(10);
/// What an upload may take longer, for each byte: 64 KiB a second, as over a slow mobile network.
const UPLOAD_BYTES_PER_S: u64 = 65_536;

/// An AWS account, in one region.
pub struct AwsCloud {
    /// Where its services are, for errors.
    places: Places,
    /// The time limit of one call.
    limit: Duration,
    cloudformation: aws_sdk_cloudformation::Client,
    cloudwatch: aws_sdk_cloudwatch::Client,
    dynamodb: aws_sdk_dynamodb::Client,
    s3: aws_sdk_s3::Client,
    sqs: aws_sdk_sqs::Client,
}

impl fmt::Debug for AwsCloud {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AwsCloud").finish_non_exhaustive()
    }
}

impl AwsCloud {
    /// The account and region of an address. The address's table does not matter. Each call ends within
    /// [`CALL_TIMEOUT`].
    ///
    /// # Errors
    ///
    /// If no region is set.
    pub async fn connect(address: &DynamoAddress) -> Result<Self, CloudError> {
        Self::connect_within(address, CALL_TIMEOUT).await
    }

    /// As [`connect`](Self::connect), with another time limit for each call. An upload may take longer,
    /// depending on its size.
    ///
    /// # Errors
    ///
    /// If no region is set, or the source of the settings or credentials does not answer in time.
    pub async fn connect_within(
        address: &DynamoAddress,
        limit: Duration,
    ) -> Result<Self, CloudError> {
        let config = load_config(address, limit).await?;
        Ok(Self::new(&config, limit))
    }

    /// The account of a configuration from [`load_config`], with a time limit for each call.
    pub fn new(config: &SdkConfig, limit: Duration) -> Self {
        let places = Places::of(config);
        // All calls are safe to retry: a name can have only one stack.
        let config = config.clone().into_builder().retry_config(RetryConfig::standard()).build();
        let s3 = aws_sdk_s3::config::Builder::from(&config)
            // A local endpoint has no host name for each bucket.
            .force_path_style(config.endpoint_url().is_some())
            .build();
        Self {
            places,
            limit,
            cloudformation: aws_sdk_cloudformation::Client::new(&config),
            cloudwatch: aws_sdk_cloudwatch::Client::new(&config),
            dynamodb: aws_sdk_dynamodb::Client::new(&config),
            s3: aws_sdk_s3::Client::from_conf(s3),
            sqs: aws_sdk_sqs::Client::new(&config),
        }
    }

    fn error<E>(
        &self,
        service: &'static str,
        operation: &'static str,
        error: SdkError<E>,
    ) -> CloudError
    where
        E: ProvideErrorMetadata + std::error::Error + Send + Sync + 'static,
    {
        self.error_within(self.limit, service, operation, error)
    }

    fn error_within<E>(
        &self,
        limit: Duration,
        service: &'static str,
        operation: &'static str,
        error: SdkError<E>,
    ) -> CloudError
    where
        E: ProvideErrorMetadata + std::error::Error + Send + Sync + 'static,
    {
        let place = self.places.of_service(service);
        cloud_error(&Call { service, operation, place, limit }, &error)
    }

    async fn stack_now(&self, name: &str) -> Result<Option<StackState>, CloudError> {
        let sent = self.cloudformation.describe_stacks().stack_name(name).send().await;
        match sent {
            Ok(output) => {
                let found = output.stacks.unwrap_or_default().into_iter().next().map(stack);
                Ok(found.filter(|state| state.status.as_str() != "DELETE_COMPLETE"))
            }
            Err(error) if errors::says(&error, "does not exist") => Ok(None),
            Err(error) => Err(self.error("CloudFormation", "DescribeStacks", error)),
        }
    }

    async fn all_stacks(&self) -> Result<Vec<StackState>, CloudError> {
        let mut pages = self.cloudformation.describe_stacks().into_paginator().send();
        let mut found = Vec::new();
        while let Some(page) = pages.next().await {
            let page =
                page.map_err(|error| self.error("CloudFormation", "DescribeStacks", error))?;
            let all = page.stacks.unwrap_or_default().into_iter().map(stack);
            found.extend(all.filter(|state| state.maker() != Maker::Other));
        }
        Ok(found)
    }

    async fn events_after(
        &self,
        name: &str,
        after: Option<&str>,
    ) -> Result<Vec<StackEvent>, CloudError> {
        // CloudFormation returns the newest first.
        let mut found = Vec::new();
        let request = self.cloudformation.describe_stack_events().stack_name(name);
        let mut pages = request.into_paginator().send();
        'pages: while let Some(page) = pages.next().await {
            let page = match page {
                Ok(page) => page,
                Err(error) if errors::says(&error, "does not exist") => break,
                Err(error) => {
                    return Err(self.error("CloudFormation", "DescribeStackEvents", error));
                }
            };
            for one in page.stack_events.unwrap_or_default() {
                let one = event(one);
                if after == Some(one.id.as_str()) {
                    break 'pages;
                }
                found.push(one);
            }
        }
        found.reverse();
        Ok(found)
    }

    async fn update_now(&self, plan: &StackPlan) -> Result<Update, CloudError> {
        let sent = self
            .cloudformation
            .update_stack()
            .stack_name(plan.name.as_str())
            .template_body(&plan.template)
            .set_parameters(Some(parameters(plan)))
            .set_tags(Some(tags(plan)))
            .capabilities(Capability::CapabilityNamedIam)
            .send()
            .await;
        match sent {
            Ok(_) => Ok(Update::Started),
            Err(error) if errors::says(&error, "No updates are to be performed") => {
                Ok(Update::Unchanged)
            }
            Err(error) => Err(self.error("CloudFormation", "UpdateStack", error)),
        }
    }

    async fn empty(&self, bucket: &str) -> Result<u64, CloudError> {
        let mut deleted = 0;
        let mut pages = self.s3.list_objects_v2().bucket(bucket).into_paginator().send();
        while let Some(page) = pages.next().await {
            let page = match page {
                Ok(page) => page,
                Err(error)
                    if error.as_service_error().and_then(|e| e.code()) == Some("NoSuchBucket") =>
                {
                    return Ok(0);
                }
                Err(error) => return Err(self.error("S3", "ListObjectsV2", error)),
            };
            let keys: Vec<String> =
                page.contents.unwrap_or_default().into_iter().filter_map(|one| one.key).collect();
            for keys in keys.chunks(DELETE_MAX) {
                self.delete_objects(bucket, keys).await?;
                deleted += keys.len() as u64;
            }
        }
        Ok(deleted)
    }

    async fn delete_objects(&self, bucket: &str, keys: &[String]) -> Result<(), CloudError> {
        let rejected = |error: aws_sdk_s3::error::BuildError| {
            CloudError::new(CloudErrorKind::Rejected, format!("invalid object key: {error}"))
        };
        let mut delete = Delete::builder().quiet(true);
        for key in keys {
            delete =
                delete.objects(ObjectIdentifier::builder().key(key).build().map_err(rejected)?);
        }
        let delete = delete.build().map_err(rejected)?;
        let sent = self.s3.delete_objects().bucket(bucket).delete(delete).send().await;
        let output = sent.map_err(|error| self.error("S3", "DeleteObjects", error))?;
        match output.errors().first() {
            None => Ok(()),
            Some(error) => {
                let key = error.key().unwrap_or_default();
                let why = error.message().or(error.code()).unwrap_or("no reason given");
                let message = format!("could not delete {key} in bucket {bucket}: {why}");
                Err(CloudError::new(CloudErrorKind::Rejected, message))
            }
        }
    }

    async fn lag(&self, function: &str, now_ms: i64) -> Result<Option<f64>, CloudError> {
        let dimension = Dimension::builder().name("FunctionName").value(function).build();
        let sent = self
            .cloudwatch
            .get_metric_statistics()
            .namespace("AWS/Lambda")
            .metric_name("IteratorAge")
            .dimensions(dimension)
            .start_time(DateTime::from_millis(now_ms - LAG_SPAN_MS))
            .end_time(DateTime::from_millis(now_ms))
            .period(LAG_PERIOD_S)
            .statistics(Statistic::Maximum)
            .send()
            .await;
        let points = sent
            .map_err(|error| self.error("CloudWatch", "GetMetricStatistics", error))?
            .datapoints;
        let values = points.unwrap_or_default().into_iter().filter_map(|point| point.maximum);
        Ok(values.reduce(f64::max))
    }
}

/// The configuration for an address, with a region and with credentials that answer. Each call with it ends
/// within `limit`.
///
/// # Errors
///
/// If no region is set, or the source of the settings or credentials does not answer in time.
pub async fn load_config(
    address: &DynamoAddress,
    limit: Duration,
) -> Result<SdkConfig, CloudError> {
    let address = address.clone();
    let load = Box::pin(on_own_thread(async move {
        // A profile or the machine's metadata may name the region.
        (address.config_within(limit).await, BadProfile::find().await)
    }));
    let (config, bad) =
        within(&SystemClock, limit.max(CALL_TIMEOUT), load).await.ok_or_else(|| {
            let message = "the AWS settings could not be loaded in time; set AWS_REGION, \
                           and check that ~/.aws/config and ~/.aws/credentials can be read";
            CloudError::new(CloudErrorKind::Unavailable, message)
        })?;
    if let Some(bad) = bad {
        return Err(CloudError::new(CloudErrorKind::Denied, bad.to_string()));
    }
    if config.region().is_none() {
        let message = "no AWS region is set; give one with --region, or set AWS_REGION";
        return Err(CloudError::new(CloudErrorKind::Rejected, message));
    }
    with_credentials(config, limit).await
}

/// Fails if the source of the credentials does not answer: a call would blame the service. All other errors are
/// the call's to report.
async fn with_credentials(config: SdkConfig, limit: Duration) -> Result<SdkConfig, CloudError> {
    let Some(source) = config.credentials_provider() else { return Ok(config) };
    let loaded = within(&SystemClock, limit, source.provide_credentials()).await;
    let loaded = loaded.ok_or_else(|| {
        let message = format!(
            "the source of the AWS credentials did not answer within {}{}",
            Limit(limit),
            look()
        );
        CloudError::new(CloudErrorKind::Unavailable, message)
    })?;
    let source = Loaded { first: Mutex::new(loaded.ok()), source };
    let source = SharedCredentialsProvider::new(source);
    Ok(config.into_builder().credentials_provider(source).build())
}

/// Credentials that are loaded already, and their source. A source may ask a person, so once has to be enough.
#[derive(Debug)]
struct Loaded {
    // A std mutex: it is never held across an await.
    first: Mutex<Option<Credentials>>,
    source: SharedCredentialsProvider,
}

impl ProvideCredentials for Loaded {
    fn provide_credentials<'a>(&'a self) -> future::ProvideCredentials<'a>
    where
        Self: 'a,
    {
        let first = self.first.lock().unwrap_or_else(PoisonError::into_inner).take();
        match first {
            Some(credentials) => future::ProvideCredentials::ready(Ok(credentials)),
            None => self.source.provide_credentials(),
        }
    }

    fn fallback_on_interrupt(&self) -> Option<Credentials> {
        self.source.fallback_on_interrupt()
    }
}

/// The limit of an upload.
fn upload_limit(limit: Duration, bytes: usize) -> Duration {
    limit.saturating_add(Duration::from_secs(bytes as u64 / UPLOAD_BYTES_PER_S))
}

impl Scan for AwsTable {
    fn page<'a>(
        &'a self,
        after: Option<&'a ItemKey>,
    ) -> BoxFuture<'a, Result<(Vec<Item>, Option<ItemKey>), TableError>> {
        Box::pin(self.scan_page(after))
    }
}

impl Cloud for AwsCloud {
    fn stack<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Result<Option<StackState>, CloudError>> {
        Box::pin(self.stack_now(name))
    }

    fn stacks(&self) -> BoxFuture<'_, Result<Vec<StackState>, CloudError>> {
        Box::pin(self.all_stacks())
    }

    fn events<'a>(
        &'a self,
        name: &'a str,
        after: Option<&'a str>,
    ) -> BoxFuture<'a, Result<Vec<StackEvent>, CloudError>> {
        Box::pin(self.events_after(name, after))
    }

    fn create<'a>(&'a self, plan: &'a StackPlan) -> BoxFuture<'a, Result<String, CloudError>> {
        Box::pin(async move {
            let sent = self
                .cloudformation
                .create_stack()
                .stack_name(plan.name.as_str())
                .template_body(&plan.template)
                .set_parameters(Some(parameters(plan)))
                .set_tags(Some(tags(plan)))
                .capabilities(Capability::CapabilityNamedIam)
                .send()
                .await;
            let output =
                sent.map_err(|error| self.error("CloudFormation", "CreateStack", error))?;
            Ok(output.stack_id.unwrap_or_else(|| plan.name.to_string()))
        })
    }

    fn update<'a>(&'a self, plan: &'a StackPlan) -> BoxFuture<'a, Result<Update, CloudError>> {
        Box::pin(self.update_now(plan))
    }

    fn delete<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Result<(), CloudError>> {
        Box::pin(async move {
            let sent = self.cloudformation.delete_stack().stack_name(name).send().await;
            sent.map(drop).map_err(|error| self.error("CloudFormation", "DeleteStack", error))
        })
    }

    fn has_object<'a>(
        &'a self,
        bucket: &'a str,
        key: &'a str,
    ) -> BoxFuture<'a, Result<bool, CloudError>> {
        Box::pin(async move {
            let sent = self.s3.head_object().bucket(bucket).key(key).send().await;
            match sent {
                Ok(_) => Ok(true),
                Err(error) if error.as_service_error().is_some_and(|e| e.is_not_found()) => {
                    Ok(false)
                }
                Err(error) => Err(self.error("S3", "HeadObject", error)),
            }
        })
    }

    fn put_object<'a>(
        &'a self,
        bucket: &'a str,
        key: &'a str,
        body: Vec<u8>,
    ) -> BoxFuture<'a, Result<(), CloudError>> {
        Box::pin(async move {
            let limit = upload_limit(self.limit, body.len());
            let timeouts = TimeoutConfig::builder().operation_timeout(limit).build();
            let sent = self
                .s3
                .put_object()
                .bucket(bucket)
                .key(key)
                .body(body.into())
                .customize()
                .config_override(aws_sdk_s3::config::Builder::new().timeout_config(timeouts))
                .send()
                .await;
            sent.map(drop).map_err(|error| self.error_within(limit, "S3", "PutObject", error))
        })
    }

    fn empty_bucket<'a>(&'a self, bucket: &'a str) -> BoxFuture<'a, Result<u64, CloudError>> {
        Box::pin(self.empty(bucket))
    }

    fn table<'a>(
        &'a self,
        name: &'a str,
    ) -> BoxFuture<'a, Result<Option<TableFigures>, CloudError>> {
        Box::pin(async move {
            match self.dynamodb.describe_table().table_name(name).send().await {
                Ok(output) => Ok(output.table.map(figures)),
                Err(error)
                    if error
                        .as_service_error()
                        .is_some_and(|e| e.is_resource_not_found_exception()) =>
                {
                    Ok(None)
                }
                Err(error) => Err(self.error("DynamoDB", "DescribeTable", error)),
            }
        })
    }

    fn stream_lag<'a>(
        &'a self,
        function: &'a str,
        now_ms: i64,
    ) -> BoxFuture<'a, Result<Option<f64>, CloudError>> {
        Box::pin(self.lag(function, now_ms))
    }

    fn queue_length<'a>(&'a self, url: &'a str) -> BoxFuture<'a, Result<u64, CloudError>> {
        Box::pin(async move {
            let name = QueueAttributeName::ApproximateNumberOfMessages;
            let request = self.sqs.get_queue_attributes().queue_url(url);
            let sent = request.attribute_names(name.clone()).send().await;
            let attributes =
                sent.map_err(|error| self.error("SQS", "GetQueueAttributes", error))?.attributes;
            let count = attributes.unwrap_or_default().remove(&name);
            Ok(count.and_then(|count| count.parse().ok()).unwrap_or(0))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn every_client_has_the_limit_of_a_call() {
        let address = DynamoAddress {
            table: "my-app".to_owned(),
            region: Some("us-east-1".to_owned()),
            endpoint: Some("http://127.0.0.1:1".to_owned()),
        };
        let cloud = AwsCloud::connect(&address).await.expect("a region is set");
        assert_eq!((cloud.limit, CALL_TIMEOUT), (CALL_TIMEOUT, Duration::from_secs(10)));
        let all = [
            cloud.cloudformation.config().timeout_config().cloned(),
            cloud.cloudwatch.config().timeout_config().cloned(),
            cloud.dynamodb.config().timeout_config().cloned(),
            cloud.s3.config().timeout_config().cloned(),
            cloud.sqs.config().timeout_config().cloned(),
        ];
        for timeouts in all {
            let timeouts = timeouts.expect("it is set");
            assert_eq!(timeouts.operation_timeout(), Some(CALL_TIMEOUT));
            assert!(timeouts.connect_timeout().is_some_and(|connect| connect < CALL_TIMEOUT));
        }
        assert_eq!(upload_limit(CALL_TIMEOUT, 4 << 20), Duration::from_secs(10 + 64));
    }
}
