//! Which calls the SDK repeats, and how long it waits for each attempt.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use aws_sdk_dynamodb::Client;
use aws_sdk_dynamodb::config::interceptors::{
    BeforeTransmitInterceptorContextRef, FinalizerInterceptorContextRef,
};
use aws_sdk_dynamodb::config::retry::RetryConfig;
use aws_sdk_dynamodb::config::timeout::TimeoutConfig;
use aws_sdk_dynamodb::config::{Builder, ConfigBag, Intercept, RuntimeComponents};
use aws_sdk_dynamodb::error::BoxError;
use zae_limiter_schema::{TableError, TableErrorKind};

use super::errors;

/// A connection: DNS, TCP and TLS together. 1.5 s: a lost SYN is sent again after 1 s, and the farthest
/// region is four round trips of 300 ms away.
pub(super) const CONNECT_TIMEOUT: Duration = Duration::from_millis(1_500);
/// From sending a request, the connection included, to the first bytes of the answer. 2 s: DynamoDB
/// answers in some 10 ms, so after 2 s the connection is dead. The attempt ends, its connection closes, and a
/// call that may be repeated goes over a new one. The transfer of a large page does not count, nor does
/// loading credentials. All calls have the same limit: the SDK pools connections by it.
pub(super) const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);
/// The same for changes of the table itself, which take longer than calls on items: seconds on an emulator that
/// has just started.
const CHANGE_TIMEOUT: Duration = Duration::from_secs(30);
/// Reads, deletions and transactions are sent at most so often.
const ATTEMPTS_MAX: u32 = 4;
/// The SDK waits up to this long before the first repeat, and up to twice as long before each further one.
/// 25 ms, as the other SDKs do for DynamoDB: three repeats then cost less than 200 ms.
const BACKOFF: Duration = Duration::from_millis(25);

/// How calls of one client are sent.
#[derive(Clone, Debug)]
pub(super) struct CallSettings {
    /// Absent where the client's own limits hold: the SDK reads an empty `TimeoutConfig` as "no limits".
    timeouts: Option<TimeoutConfig>,
}

impl CallSettings {
    /// A client that has limits of its own for answers keeps them.
    pub(super) fn for_client(client: &Client) -> Self {
        let is_limited = client.config().timeout_config().is_some_and(|limits| {
            limits.read_timeout().is_some()
                || limits.operation_attempt_timeout().is_some()
                || limits.operation_timeout().is_some()
        });
        let timeouts = || TimeoutConfig::builder().read_timeout(ANSWER_TIMEOUT).build();
        Self { timeouts: (!is_limited).then(timeouts) }
    }

    /// A client like this one for single updates: one attempt, whatever retries the client has. After an
    /// answer that was lost, a second one could refund twice. Both use the same connections. Settings that are
    /// given with each call cost more: the SDK then puts its components together anew.
    pub(super) fn single_attempt(&self, client: &Client) -> Client {
        let config = client.config().to_builder().retry_config(RetryConfig::disabled());
        Client::from_conf(self.limit(config).build())
    }

    /// For calls that can be repeated without harm: reads, deletions, and transactions by their token.
    pub(super) fn with_retries(&self) -> Builder {
        let retries = RetryConfig::standard();
        self.with(retries.with_max_attempts(ATTEMPTS_MAX).with_initial_backoff(BACKOFF))
    }

    fn with(&self, retries: RetryConfig) -> Builder {
        self.limit(Builder::new().retry_config(retries))
    }

    fn limit(&self, settings: Builder) -> Builder {
        match &self.timeouts {
            Some(timeouts) => settings.timeout_config(timeouts.clone()),
            None => settings,
        }
    }
}

/// For changes of the table itself, with the retries of the client.
pub(super) fn table_change_settings() -> Builder {
    let timeouts = TimeoutConfig::builder().read_timeout(CHANGE_TIMEOUT).build();
    Builder::new().timeout_config(timeouts)
}

/// Remembers whether an attempt of a call may have been applied although its answer was lost. The SDK reports the
/// last attempt only: without this, "throttled" after a lost answer would read as "nothing was done".
#[derive(Clone, Debug, Default)]
pub(super) struct LostAnswer(Arc<Attempts>);

#[derive(Debug, Default)]
struct Attempts {
    /// The attempt under way has credentials and a signature, and is handed to the connection.
    is_sent: AtomicBool,
    is_lost: AtomicBool,
}

impl LostAnswer {
    pub(super) fn happened(&self) -> bool {
        self.0.is_lost.load(Ordering::Relaxed)
    }

    /// The error of the last attempt as an error of the whole call.
    pub(super) fn apply_to(&self, error: TableError) -> TableError {
        if !self.happened() {
            return error;
        }
        let kind = match error.kind {
            // These say of the last attempt that nothing was done.
            TableErrorKind::Throttled
            | TableErrorKind::PartitionThrottled
            | TableErrorKind::Conflict => TableErrorKind::Unavailable,
            kind => kind,
        };
        TableError { kind, ..error }.maybe_applied()
    }
}

impl Intercept for LostAnswer {
    fn name(&self) -> &'static str {
        "LostAnswer"
    }

    fn read_before_transmit(
        &self,
        _: &BeforeTransmitInterceptorContextRef<'_>,
        _: &RuntimeComponents,
        _: &mut ConfigBag,
    ) -> Result<(), BoxError> {
        self.0.is_sent.store(true, Ordering::Relaxed);
        Ok(())
    }

    fn read_after_attempt(
        &self,
        context: &FinalizerInterceptorContextRef<'_>,
        _: &RuntimeComponents,
        _: &mut ConfigBag,
    ) -> Result<(), BoxError> {
        let is_sent = self.0.is_sent.swap(false, Ordering::Relaxed);
        let Some(Err(error)) = context.output_or_error() else { return Ok(()) };
        let is_lost = match context.response() {
            // Only a refusal says that nothing was done; except that an earlier attempt is in progress.
            Some(response) => {
                let body = response.body().bytes().unwrap_or_default();
                !(400..500).contains(&response.status().as_u16())
                    || String::from_utf8_lossy(body).contains(errors::IN_PROGRESS)
            }
            None => error.as_connector_error().is_none_or(|error| !errors::is_undelivered(error)),
        };
        if is_sent && is_lost {
            self.0.is_lost.store(true, Ordering::Relaxed);
        }
        Ok(())
    }
}
