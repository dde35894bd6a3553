//! Which calls the SDK retries, and the time limit of each attempt.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use aws_sdk_dynamodb::Client;
use aws_sdk_dynamodb::config::interceptors::{
    BeforeTransmitInterceptorContextRef, FinalizerInterceptorContextRef,
};
use aws_sdk_dynamodb::config::retry::RetryConfig;
use aws_sdk_dynamodb::config::timeout::TimeoutConfig;
use aws_sdk_dynamodb::config::{
    Builder, ConfigBag, Intercept, RuntimeComponents, SharedInterceptor,
    StalledStreamProtectionConfig,
};
use aws_sdk_dynamodb::error::BoxError;
use zae_limiter_schema::{TableError, TableErrorKind};

use super::errors;
use super::headers::KeptHeaders;

/// The time limit of connecting: DNS, TCP and TLS together. 1.5 s: TCP repeats a lost SYN after 1 s, and
/// connecting to the farthest region takes four round trips of 300 ms.
pub(super) const CONNECT_TIMEOUT: Duration = Duration::from_millis(1_500);
/// The time limit from sending a request, connecting included, to the first bytes of the answer. 2 s: DynamoDB
/// answers in some 10 ms, so after 2 s the connection is dead. The attempt ends, its connection closes, and a
/// retry uses a new one. The transfer of a large page does not count, nor does loading credentials. All calls
/// have the same limit, because the SDK pools connections by it.
pub(super) const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);
/// The same for changes of the table itself. They take longer: seconds on an emulator that has just started.
const CHANGE_TIMEOUT: Duration = Duration::from_secs(30);
/// The most attempts of reads, deletions and transactions.
const ATTEMPTS_MAX: u32 = 4;
/// The longest wait before the first retry; it doubles with each further one. 25 ms, as other SDKs have it for
/// DynamoDB: three retries then wait less than 200 ms.
const BACKOFF: Duration = Duration::from_millis(25);

/// Retries and time limits of the calls through one client.
#[derive(Clone, Debug)]
pub(super) struct CallSettings {
    /// `None` if the client has limits of its own: the SDK reads an empty `TimeoutConfig` as "no limits".
    timeouts: Option<TimeoutConfig>,
    /// The program has interceptors of its own, which may change headers.
    is_intercepted: bool,
}

impl CallSettings {
    /// A client that has a read, attempt or operation timeout keeps it.
    pub(super) fn for_client(client: &Client) -> Self {
        let is_limited = client.config().timeout_config().is_some_and(|limits| {
            limits.read_timeout().is_some()
                || limits.operation_attempt_timeout().is_some()
                || limits.operation_timeout().is_some()
        });
        let timeouts = || TimeoutConfig::builder().read_timeout(ANSWER_TIMEOUT).build();
        let is_intercepted = client.config().interceptors().next().is_some();
        Self { timeouts: (!is_limited).then(timeouts), is_intercepted }
    }

    /// A copy of the client for single updates: one attempt, whatever retries the client has. After a lost
    /// answer, a second attempt could refund twice. Both clients share connections. A copy is cheaper than
    /// overriding settings per call: then the SDK would assemble its components for every call.
    ///
    /// Without the SDK's watch over stalled streams. It is meant for transfers of minutes, and takes time from every
    /// call: it wraps both bodies and starts timers. The store ends each call after `call_timeout`.
    pub(super) fn single_attempt(&self, client: &Client) -> Client {
        let config = client
            .config()
            .to_builder()
            .retry_config(RetryConfig::disabled())
            .stalled_stream_protection(StalledStreamProtectionConfig::disabled());
        let mut config = self.limit(config);
        if !self.is_intercepted {
            config.push_interceptor(SharedInterceptor::permanent(KeptHeaders::default()));
        }
        Client::from_conf(config.build())
    }

    /// For calls that are safe to retry: reads, deletions, and transactions, which carry a token.
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

/// For changes of the table itself. The client's retries apply.
pub(super) fn table_change_settings() -> Builder {
    let timeouts = TimeoutConfig::builder().read_timeout(CHANGE_TIMEOUT).build();
    Builder::new().timeout_config(timeouts)
}

/// Records whether an attempt of a call may have been applied although its answer was lost. The SDK reports only
/// the last attempt: without this, "throttled" after a lost answer would mean "nothing was done".
#[derive(Clone, Debug, Default)]
pub(super) struct LostAnswer(Arc<Attempts>);

#[derive(Debug, Default)]
struct Attempts {
    /// The current attempt is signed and was handed to the connection.
    is_sent: AtomicBool,
    is_lost: AtomicBool,
}

impl LostAnswer {
    pub(super) fn happened(&self) -> bool {
        self.0.is_lost.load(Ordering::Relaxed)
    }

    /// Turns the error of the last attempt into the error of the whole call.
    pub(super) fn apply_to(&self, error: TableError) -> TableError {
        if !self.happened() {
            return error;
        }
        let kind = match error.kind {
            // These only say that the last attempt did nothing.
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
            // Only a refusal means that nothing was done, unless an earlier attempt is in progress.
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
