//! What the SDK's errors mean, and what to do about them.

use std::error::Error as StdError;
use std::io;

use aws_credential_types::provider::error::CredentialsError;
use aws_sdk_dynamodb::error::{ProvideErrorMetadata, SdkError};
use aws_sdk_dynamodb::types::ThrottlingReason;
use zae_limiter_core::Applied;
use zae_limiter_schema::{TableError, TableErrorKind};

/// The error as the store sees it.
pub(super) fn told<E>(table: &str, error: SdkError<E>) -> TableError
where
    E: ProvideErrorMetadata + StdError + Send + Sync + 'static,
{
    let known = match &error {
        SdkError::ServiceError(service) => {
            let code = service.err().code().unwrap_or_default();
            let message = service.err().message().unwrap_or_default();
            let status = service.raw().status().as_u16();
            of_service(table, code, message, status)
        }
        // Nothing was sent.
        SdkError::ConstructionFailure(_) => unsent(table, &error),
        SdkError::DispatchFailure(_) => undelivered(table, &error),
        SdkError::TimeoutError(_) => no_answer(table, "did not answer in time", Applied::Maybe),
        _ => no_answer(table, "gave an answer that cannot be read", Applied::Maybe),
    };
    TableError { source: Some(Box::new(Said(chain(&error)))), ..known }
}

/// An error of the service, by its code.
pub(super) fn of_code(table: &str, code: &str, message: &str) -> TableError {
    of_service(table, code, message, 400)
}

fn of_service(table: &str, code: &str, message: &str, status: u16) -> TableError {
    // Codes may come with a namespace in front, and cancellation reasons without the ending.
    let code = code.rsplit('#').next().unwrap_or(code);
    match code {
        "ResourceNotFoundException" => no_table(table),
        "ThrottlingException" | "ThrottlingError" if names_a_key_range(message) => {
            partition_throttled(table)
        }
        "ProvisionedThroughputExceededException" | "ProvisionedThroughputExceeded" => {
            partition_throttled(table)
        }
        "ThrottlingException" | "ThrottlingError" | "RequestLimitExceeded" | "Throttling" => {
            let message = format!("{table} is throttled: too many calls for the table or account");
            TableError::new(TableErrorKind::Throttled, message)
        }
        "TransactionConflictException"
        | "TransactionConflict"
        | "TransactionInProgressException"
        | "ReplicatedWriteConflictException" => {
            let message = format!("another transaction is under way on the same item of {table}");
            TableError::new(TableErrorKind::Conflict, message)
        }
        "AccessDeniedException" | "AccessDenied" => {
            denied(format!("no permission on table {table}; give the role the policy for acquires"))
        }
        "ExpiredTokenException" | "ExpiredToken" | "RequestExpired" => {
            denied("the AWS credentials have expired; renew them".to_owned())
        }
        "UnrecognizedClientException"
        | "InvalidSignatureException"
        | "IncompleteSignature"
        | "MissingAuthenticationTokenException"
        | "MissingAuthenticationToken"
        | "InvalidClientTokenId"
        | "SignatureDoesNotMatch" => denied(
            "AWS does not accept the credentials; check access key, secret and clock".to_owned(),
        ),
        // It says that all is well, in words that nobody understands.
        _ if status < 400 => no_answer(table, "gave an answer that cannot be read", Applied::Maybe),
        _ if status >= 500 => no_answer(table, "failed inside", Applied::Maybe),
        _ => {
            let message = format!("{table} refused the call: {code} {message}");
            TableError::new(TableErrorKind::Rejected, message.trim_end().to_owned())
        }
    }
}

fn names_a_key_range(message: &str) -> bool {
    message.contains("KeyRange")
}

/// Whether throttling concerns one partition, of the table or of an index.
pub(super) fn is_key_range(reasons: &[ThrottlingReason]) -> bool {
    reasons.iter().any(|one| one.reason().is_some_and(names_a_key_range))
}

pub(super) fn partition_throttled(table: &str) -> TableError {
    let message = format!("a partition of {table} takes no more writes now");
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
    if is_about_credentials(error) {
        return no_credentials();
    }
    let message = format!("the call to {table} cannot be made as it is");
    TableError::new(TableErrorKind::Rejected, message)
}

fn undelivered(table: &str, error: &(dyn StdError + 'static)) -> TableError {
    if is_about_credentials(error) {
        return no_credentials();
    }
    // A connection that was never made has delivered nothing.
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
    no_answer(table, "was cut off before it answered", Applied::Maybe)
}

fn no_credentials() -> TableError {
    denied(
        "there are no usable AWS credentials; set AWS_PROFILE, or AWS_ACCESS_KEY_ID and \
         AWS_SECRET_ACCESS_KEY, or log in"
            .to_owned(),
    )
}

fn causes<'a>(
    error: &'a (dyn StdError + 'static),
) -> impl Iterator<Item = &'a (dyn StdError + 'static)> {
    std::iter::successors(Some(error), |error| (*error).source())
}

fn is_about_credentials(error: &(dyn StdError + 'static)) -> bool {
    causes(error).any(|cause| cause.is::<CredentialsError>())
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

/// All that the SDK said, in one line: its errors hide their causes from `Display`.
fn chain(error: &(dyn StdError + 'static)) -> String {
    let mut said: Vec<String> = Vec::new();
    for cause in causes(error) {
        let text = cause.to_string();
        if said.last().is_none_or(|last| !last.contains(&text)) {
            said.push(text);
        }
    }
    said.join(": ")
}

#[derive(Debug)]
struct Said(String);

impl std::fmt::Display for Said {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl StdError for Said {}
