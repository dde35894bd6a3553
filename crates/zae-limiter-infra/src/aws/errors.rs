//! Classifies the SDK's errors, and says what to do about them.

use std::error::Error as StdError;
use std::fmt;
use std::time::Duration;

use aws_credential_types::provider::error::CredentialsError;
use aws_sdk_cloudformation::error::{ProvideErrorMetadata, SdkError};

use crate::cloud::{CloudError, CloudErrorKind};

/// Whether the service's message contains a text.
pub(super) fn says<E: ProvideErrorMetadata>(error: &SdkError<E>, text: &str) -> bool {
    let service = match error {
        SdkError::ServiceError(service) => service.err(),
        _ => return false,
    };
    service.message().is_some_and(|message| message.contains(text))
}

/// A call to AWS, as its errors describe it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Call<'a> {
    pub(super) service: &'static str,
    /// The operation, as AWS spells it.
    pub(super) operation: &'static str,
    /// The service's place, for example `at http://127.0.0.1:8000` or `in eu-west-1`.
    pub(super) place: &'a str,
    /// The time limit, retries included.
    pub(super) limit: Duration,
}

/// The error for a command.
pub(super) fn cloud_error<E>(call: Call<'_>, error: SdkError<E>) -> CloudError
where
    E: ProvideErrorMetadata + StdError + Send + Sync + 'static,
{
    let Call { service, operation, place, limit } = call;
    let (kind, message) = match &error {
        SdkError::ServiceError(response) => {
            let code = response.err().code().unwrap_or_default();
            let message = response.err().message().unwrap_or_default();
            of_service(call, code, message, response.raw().status().as_u16())
        }
        _ if is_credentials_timeout(&error) => (
            CloudErrorKind::Unavailable,
            "the source of the AWS credentials did not answer in time; check it, or set \
             AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
                .to_owned(),
        ),
        _ if is_about_credentials(&error) => (
            CloudErrorKind::Denied,
            "there are no usable AWS credentials; set AWS_PROFILE, or AWS_ACCESS_KEY_ID and \
             AWS_SECRET_ACCESS_KEY, or log in"
                .to_owned(),
        ),
        SdkError::ConstructionFailure(_) => {
            let why = chain(&error);
            let message = format!("the request {operation} to {service} {place} is invalid: {why}");
            (CloudErrorKind::Rejected, message)
        }
        SdkError::DispatchFailure(_) => (
            CloudErrorKind::Unavailable,
            format!("{service} cannot be reached {place}; check the endpoint and the network"),
        ),
        SdkError::TimeoutError(_) => (
            CloudErrorKind::Unavailable,
            format!(
                "{service} {place} did not answer {operation} within {}; check the endpoint and \
                 the network",
                Limit(limit)
            ),
        ),
        _ => {
            let message =
                format!("{service} {place} sent a response to {operation} that does not parse");
            (CloudErrorKind::Unavailable, message)
        }
    };
    CloudError { kind, message, source: Some(Box::new(SdkText(chain(&error)))) }
}

/// A time limit: `10 s`, `50 ms`.
pub(super) struct Limit(pub(super) Duration);

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.as_millis() {
            millis if millis % 1_000 == 0 => write!(f, "{} s", millis / 1_000),
            millis => write!(f, "{millis} ms"),
        }
    }
}

fn of_service(call: Call<'_>, code: &str, text: &str, status: u16) -> (CloudErrorKind, String) {
    let Call { service, place, .. } = call;
    let code = code.rsplit('#').next().unwrap_or(code);
    match code {
        // AWS names the error in every refusal. An endpoint with tables only has no words for it.
        "" | "UnknownOperationException" | "UnknownOperation" | "InvalidAction"
            if (400..500).contains(&status) =>
        {
            (CloudErrorKind::NoService, format!("there is no {service} {place}"))
        }
        "AccessDenied" | "AccessDeniedException" | "UnauthorizedOperation" => {
            (CloudErrorKind::Denied, format!("no permission for {service}: {text}"))
        }
        "ExpiredToken" | "ExpiredTokenException" | "RequestExpired" => {
            (CloudErrorKind::Denied, "the AWS credentials have expired; renew them".to_owned())
        }
        "InvalidClientTokenId"
        | "UnrecognizedClientException"
        | "InvalidSignatureException"
        | "SignatureDoesNotMatch"
        | "InvalidAccessKeyId"
        | "MissingAuthenticationToken"
        | "IncompleteSignature" => (
            CloudErrorKind::Denied,
            "AWS does not accept the credentials; check access key, secret and clock".to_owned(),
        ),
        "Throttling" | "ThrottlingException" | "RequestLimitExceeded" | "SlowDown" => {
            (CloudErrorKind::Unavailable, format!("{service} is throttling; try again later"))
        }
        // A success status whose body does not parse.
        _ if status < 400 => {
            let message = format!("{service} sent a response that does not parse");
            (CloudErrorKind::Unavailable, message)
        }
        _ if status >= 500 => (
            CloudErrorKind::Unavailable,
            format!("{service} has an internal error; try again later"),
        ),
        _ if status == 404 => {
            (CloudErrorKind::NotFound, format!("{service} did not find it: {code} {text}"))
        }
        _ => {
            let message = format!("{service} rejected the request: {code} {text}");
            (CloudErrorKind::Rejected, message.trim_end().to_owned())
        }
    }
}

fn causes<'a>(
    error: &'a (dyn StdError + 'static),
) -> impl Iterator<Item = &'a (dyn StdError + 'static)> {
    std::iter::successors(Some(error), |error| (*error).source())
}

/// By its text: the type of this error is private to the SDK.
fn is_credentials_timeout(error: &(dyn StdError + 'static)) -> bool {
    causes(error).any(|cause| cause.to_string().starts_with("identity resolver timed out"))
}

fn is_about_credentials(error: &(dyn StdError + 'static)) -> bool {
    causes(error).any(|cause| cause.is::<CredentialsError>())
}

/// The error and all its causes in one line: `Display` of the SDK's errors omits the causes.
fn chain(error: &(dyn StdError + 'static)) -> String {
    let mut texts: Vec<String> = Vec::new();
    for cause in causes(error) {
        let text = cause.to_string();
        if texts.last().is_none_or(|last| !last.contains(&text)) {
            texts.push(text);
        }
    }
    texts.join(": ")
}

#[derive(Debug)]
struct SdkText(String);

impl std::fmt::Display for SdkText {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl StdError for SdkText {}
