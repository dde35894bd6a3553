//! Errors of the SDK as errors of the table, with advice.

use std::error::Error as StdError;
use std::io;

use aws_sdk_dynamodb::error::{ConnectorError, ProvideErrorMetadata, SdkError};
use aws_sdk_dynamodb::types::error::{ProvisionedThroughputExceededException, ThrottlingException};
use aws_sdk_dynamodb::types::{CancellationReason, ThrottlingReason};
use zae_limiter_core::Applied;
use zae_limiter_schema::{TableError, TableErrorKind};

use super::credentials::explain;
use super::sdk::{FailedCall, FailedKind, causes, chain, unlike};

/// An earlier attempt under the same token is in progress, and may yet be applied.
pub(super) const IN_PROGRESS: &str = "TransactionInProgressException";

/// An SDK error as a [`TableError`].
pub(super) fn table_error<E>(table: &str, error: SdkError<E>) -> TableError
where
    E: ProvideErrorMetadata + StdError + Send + Sync + 'static,
{
    let described = match &error {
        SdkError::ServiceError(service) => Refusal {
            code: service.err().code().unwrap_or_default(),
            message: service.err().message().unwrap_or_default(),
            status: service.raw().status().as_u16(),
            reasons: throttling_reasons(service.err()),
        }
        .on(table),
        // Nothing was sent.
        SdkError::ConstructionFailure(_) => unsent(table, &error),
        SdkError::DispatchFailure(_) => undelivered(table, &error),
        SdkError::TimeoutError(_) => no_answer(table, "did not answer in time", Applied::Maybe),
        _ => no_answer(table, UNREADABLE, Applied::Maybe),
    };
    TableError { source: Some(Box::new(SdkMessage(chain(&error)))), ..described }
}

const UNREADABLE: &str = "sent an answer that cannot be parsed";

/// The service's error, if it refused the call with a 4xx status. Any other status is no refusal, whatever
/// the body says.
pub(super) fn refusal<E>(error: &SdkError<E>) -> Option<&E> {
    match error {
        SdkError::ServiceError(service)
            if (400..500).contains(&service.raw().status().as_u16()) =>
        {
            Some(service.err())
        }
        _ => None,
    }
}

/// Why a transaction was cancelled, unless only conditions failed. A permanent reason comes before a transient
/// one. A cancelled transaction changes nothing.
pub(super) fn of_cancellation(table: &str, reasons: &[CancellationReason]) -> Option<TableError> {
    let errors = reasons.iter().filter_map(|reason| {
        let code = reason.code().unwrap_or_default();
        let message = reason.message().unwrap_or_default();
        let is_error = !["", "None", "ConditionalCheckFailed"].contains(&code);
        is_error.then(|| Refusal { code, message, status: 400, reasons: &[] }.on(table))
    });
    let is_permanent = |error: &TableError| error.kind == TableErrorKind::Rejected;
    let error =
        errors.reduce(
            |first, next| {
                if is_permanent(&next) && !is_permanent(&first) { next } else { first }
            },
        );
    error.map(|error| TableError { applied: Applied::No, ..error })
}

/// The conditions of a retry failed, perhaps because the attempt before it was applied.
pub(super) fn unmet_after_lost_answer(table: &str) -> TableError {
    no_answer(table, "lost the answer to a transaction", Applied::Maybe)
}

/// An error response of the service.
struct Refusal<'a> {
    /// May have a namespace in front. In a cancellation it lacks the suffix `Exception`.
    code: &'a str,
    message: &'a str,
    status: u16,
    /// Why the service throttles; empty if the endpoint gives no reasons.
    reasons: &'a [ThrottlingReason],
}

impl Refusal<'_> {
    fn on(&self, table: &str) -> TableError {
        let (status, message) = (self.status, self.message);
        let code = self.code.rsplit('#').next().unwrap_or(self.code);
        match code {
            // A success status whose body does not parse.
            _ if status < 400 => no_answer(table, UNREADABLE, Applied::Maybe),
            _ if status >= 500 => no_answer(table, "had an internal error", Applied::Maybe),
            "InternalServerError"
            | "InternalServerErrorException"
            | "InternalFailure"
            | "ServiceUnavailable"
            | "ServiceUnavailableException" => {
                no_answer(table, "had an internal error", Applied::Maybe)
            }
            "RequestTimeout" | "RequestTimeoutException" => {
                no_answer(table, "did not receive the whole request in time", Applied::Maybe)
            }
            "ResourceNotFoundException" => no_table(table),
            "ThrottlingException" | "ThrottlingError" | "Throttling" => self.throttled(table),
            // On-demand tables send this for one partition; if there are reasons, those decide.
            "ProvisionedThroughputExceededException" | "ProvisionedThroughputExceeded" => {
                if self.reasons.is_empty() {
                    partition_throttled(table)
                } else {
                    self.throttled(table)
                }
            }
            // Limits of the account, or of table changes at the same time.
            "RequestLimitExceeded"
            | "LimitExceededException"
            | "ThrottledException"
            | "RequestThrottled"
            | "RequestThrottledException"
            | "TooManyRequestsException"
            | "BandwidthLimitExceeded"
            | "SlowDown" => table_throttled(table),
            "TransactionConflictException"
            | "TransactionConflict"
            | "TransactionCanceledException"
            | "ReplicatedWriteConflictException" => {
                let message =
                    format!("another transaction is in progress on the same item of table {table}");
                TableError::new(TableErrorKind::Conflict, message)
            }
            IN_PROGRESS => no_answer(table, "has not finished the transaction", Applied::Maybe),
            "AccessDeniedException" | "AccessDenied" => denied(format!(
                "no permission on table {table}; give the role the policy for acquires"
            )),
            "ExpiredTokenException" | "ExpiredToken" | "RequestExpired" => {
                denied("the AWS credentials have expired; renew them".to_owned())
            }
            "UnrecognizedClientException"
            | "InvalidSignatureException"
            | "IncompleteSignature"
            | "IncompleteSignatureException"
            | "MissingAuthenticationTokenException"
            | "MissingAuthenticationToken"
            | "InvalidClientTokenId"
            | "RequestTimeTooSkewed"
            | "SignatureDoesNotMatch" => denied(
                "AWS does not accept the credentials; check access key, secret and clock"
                    .to_owned(),
            ),
            // AWS names the error in every refusal.
            "" => TableError::new(
                TableErrorKind::Rejected,
                format!("the endpoint of table {table} {}", unlike("DynamoDB", status)),
            ),
            // `ValidationException`, `ItemCollectionSizeLimitExceeded`, `DuplicateItem` and others that a
            // retry would get again.
            _ => {
                let message = format!("table {table} refused the call: {code} {message}");
                TableError::new(TableErrorKind::Rejected, message.trim_end().to_owned())
            }
        }
    }

    fn throttled(&self, table: &str) -> TableError {
        let mut reasons = self.reasons.iter().filter_map(ThrottlingReason::reason);
        if names_a_key_range(self.message) || reasons.any(names_a_key_range) {
            partition_throttled(table)
        } else {
            table_throttled(table)
        }
    }
}

/// Whether one partition of the table or of an index is throttled: others may still accept writes.
fn names_a_key_range(reason: &str) -> bool {
    reason.contains("KeyRange")
}

fn throttling_reasons<'a>(error: &'a (dyn StdError + 'static)) -> &'a [ThrottlingReason] {
    let reasons = causes(error).find_map(|cause| {
        let by_table = cause.downcast_ref::<ThrottlingException>().map(|e| e.throttling_reasons());
        let by_units = cause
            .downcast_ref::<ProvisionedThroughputExceededException>()
            .map(|e| e.throttling_reasons());
        by_table.or(by_units)
    });
    reasons.unwrap_or_default()
}

fn table_throttled(table: &str) -> TableError {
    let message = format!("table {table} is throttled: too many calls for the table or account");
    TableError::new(TableErrorKind::Throttled, message)
}

fn partition_throttled(table: &str) -> TableError {
    let message = format!("a partition of table {table} is throttled");
    TableError::new(TableErrorKind::PartitionThrottled, message)
}

fn no_table(table: &str) -> TableError {
    let message = format!(
        "table {table} does not exist in this account and region; check the name and the region, \
         or create it"
    );
    TableError::new(TableErrorKind::NoTable, message)
}

fn denied(message: String) -> TableError {
    TableError::new(TableErrorKind::Denied, message)
}

fn no_answer(table: &str, what: &str, applied: Applied) -> TableError {
    let error = TableError::new(TableErrorKind::Unavailable, format!("table {table} {what}"));
    match applied {
        Applied::Maybe => error.maybe_applied(),
        Applied::No => error,
    }
}

fn unsent(table: &str, error: &(dyn StdError + 'static)) -> TableError {
    if let Some(failed) = explain(error) {
        return no_credentials(failed);
    }
    let message = format!("the SDK cannot build the call to table {table}");
    TableError::new(TableErrorKind::Rejected, message)
}

fn undelivered(table: &str, error: &(dyn StdError + 'static)) -> TableError {
    if let Some(failed) = explain(error) {
        return no_credentials(failed);
    }
    // Without a connection nothing was sent.
    if is_unknown_host(error) {
        return no_answer(
            table,
            "cannot be reached: its host name has no address; \
             check the endpoint, the region and the network",
            Applied::No,
        );
    }
    if is_unconnected(error) {
        return no_answer(
            table,
            "cannot be reached; check the endpoint and the network",
            Applied::No,
        );
    }
    if is_connect_timeout(error) {
        return no_answer(
            table,
            "cannot be reached in time; check the endpoint and the network",
            Applied::No,
        );
    }
    if is_timeout(error) {
        return no_answer(table, "did not answer in time", Applied::Maybe);
    }
    no_answer(table, "closed the connection before it answered", Applied::Maybe)
}

/// Whether there was never a connection, so that nothing was sent.
pub(super) fn is_undelivered(error: &(dyn StdError + 'static)) -> bool {
    is_unknown_host(error) || is_unconnected(error) || is_connect_timeout(error)
}

fn no_credentials(failed: FailedCall) -> TableError {
    let kind = match failed.kind {
        FailedKind::Unavailable => TableErrorKind::Unavailable,
        _ => TableErrorKind::Denied,
    };
    TableError::new(kind, failed.message)
}

fn is_unconnected(error: &(dyn StdError + 'static)) -> bool {
    causes(error).any(|cause| {
        cause.downcast_ref::<io::Error>().is_some_and(|io| {
            use io::ErrorKind::{
                AddrNotAvailable, ConnectionRefused, HostUnreachable, NetworkUnreachable,
            };
            matches!(
                io.kind(),
                ConnectionRefused | HostUnreachable | NetworkUnreachable | AddrNotAvailable
            )
        })
    })
}

fn is_unknown_host(error: &(dyn StdError + 'static)) -> bool {
    causes(error).any(|cause| cause.to_string().contains("dns error"))
}

fn is_timeout(error: &(dyn StdError + 'static)) -> bool {
    causes(error)
        .any(|cause| cause.downcast_ref::<ConnectorError>().is_some_and(ConnectorError::is_timeout))
}

/// By its text: the type of this error is private to the SDK.
fn is_connect_timeout(error: &(dyn StdError + 'static)) -> bool {
    causes(error).any(|cause| cause.to_string().starts_with("HTTP connect timeout"))
}

#[derive(Debug)]
struct SdkMessage(String);

impl std::fmt::Display for SdkMessage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl StdError for SdkMessage {}
