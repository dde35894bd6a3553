//! Errors of the SDK as sentences. `Debug` of these errors shows whole requests, so nothing else puts them
//! before a user.

use std::error::Error as StdError;
use std::fmt;
use std::time::Duration;

use aws_config::SdkConfig;
use aws_sdk_dynamodb::error::{ProvideErrorMetadata, SdkError};

use super::credentials::explain;

/// Why a call to AWS failed, by what to do about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailedKind {
    /// AWS did not answer, or asks to retry later.
    Unavailable,
    /// The credentials are missing, invalid or insufficient.
    Denied,
    /// What the call names does not exist.
    NotFound,
    /// The endpoint does not have this service: some have tables only.
    NoService,
    /// The call is invalid, or the endpoint is not one of AWS.
    Rejected,
}

/// A failed call to AWS.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FailedCall {
    /// What to do about it.
    pub kind: FailedKind,
    /// What happened and what to do, as one sentence.
    pub message: String,
    /// What the SDK says, in one line.
    pub cause: String,
}

/// The places of an account's services.
#[derive(Clone, Debug)]
pub struct Places {
    endpoint: Option<String>,
    is_endpoint_of_all: bool,
    region: Option<String>,
}

impl Places {
    /// The places that clients with this configuration call.
    pub fn of(config: &SdkConfig) -> Self {
        Self {
            endpoint: config.endpoint_url().map(str::to_owned),
            is_endpoint_of_all: config.get_origin("endpoint_url").is_client_config(),
            region: config.region().map(|region| region.as_ref().to_owned()),
        }
    }

    /// The place of a service: `at http://127.0.0.1:8000`, `in eu-west-1`.
    pub fn of_service(&self, service: &str) -> String {
        let name = service.to_uppercase().replace(' ', "_");
        let own = match self.is_endpoint_of_all {
            true => None,
            false => std::env::var(format!("AWS_ENDPOINT_URL_{name}")).ok(),
        };
        let own = own.filter(|url| !url.is_empty());
        match (own.as_ref().or(self.endpoint.as_ref()), &self.region) {
            (Some(url), _) => format!("at {url}"),
            (None, Some(region)) => format!("in {region}"),
            (None, None) => "in no region".to_owned(),
        }
    }
}

/// A call to AWS, as its errors describe it.
#[derive(Clone, Debug)]
pub struct Call {
    /// The service, as AWS spells it in the names of variables: `DynamoDB Streams`.
    pub service: &'static str,
    /// The operation, as AWS spells it.
    pub operation: &'static str,
    /// The service's place, from [`Places::of_service`].
    pub place: String,
    /// The time limit, retries included.
    pub limit: Duration,
}

impl Call {
    /// Describes the error of this call.
    pub fn failed<E>(&self, error: &SdkError<E>) -> FailedCall
    where
        E: ProvideErrorMetadata + StdError + 'static,
    {
        let Self { service, operation, place, limit } = self;
        if let Some(failed) = explain(error) {
            return failed;
        }
        let (kind, message) = match error {
            SdkError::ServiceError(response) => {
                let code = response.err().code().unwrap_or_default();
                let message = response.err().message().unwrap_or_default();
                self.refused(code, message, response.raw().status().as_u16())
            }
            SdkError::ConstructionFailure(_) => {
                let why = causes(error).map(text).last().unwrap_or_default();
                (
                    FailedKind::Rejected,
                    format!("the request {operation} to {service} {place} is invalid: {why}"),
                )
            }
            SdkError::DispatchFailure(_) => (
                FailedKind::Unavailable,
                format!("{service} cannot be reached {place}; check the endpoint and the network"),
            ),
            SdkError::TimeoutError(_) => (
                FailedKind::Unavailable,
                format!(
                    "{service} {place} did not answer {operation} within {}; check the endpoint \
                     and the network",
                    Limit(*limit)
                ),
            ),
            _ => self.unreadable(),
        };
        FailedCall { kind, message, cause: chain(error) }
    }

    fn unreadable(&self) -> (FailedKind, String) {
        let Self { service, operation, place, .. } = self;
        let message = format!(
            "{service} {place} sent a response to {operation} that does not parse; check the endpoint"
        );
        (FailedKind::Unavailable, message)
    }

    /// What an error response means. `code` may have a namespace in front.
    fn refused(&self, code: &str, text: &str, status: u16) -> (FailedKind, String) {
        let Self { service, operation, place, .. } = self;
        match code.rsplit('#').next().unwrap_or(code) {
            "" if (400..500).contains(&status) => self.refused_without_code(status),
            "UnknownOperationException" | "UnknownOperation" | "InvalidAction"
                if (400..500).contains(&status) =>
            {
                (FailedKind::NoService, format!("there is no {service} {place}"))
            }
            "AccessDenied" | "AccessDeniedException" | "UnauthorizedOperation" => {
                (FailedKind::Denied, format!("no permission for {service}: {text}"))
            }
            "ExpiredToken" | "ExpiredTokenException" | "RequestExpired" => {
                (FailedKind::Denied, "the AWS credentials have expired; renew them".to_owned())
            }
            "InvalidClientTokenId"
            | "UnrecognizedClientException"
            | "InvalidSignatureException"
            | "SignatureDoesNotMatch"
            | "InvalidAccessKeyId"
            | "MissingAuthenticationToken"
            | "IncompleteSignature" => (
                FailedKind::Denied,
                "AWS does not accept the credentials; check access key, secret and clock"
                    .to_owned(),
            ),
            "Throttling" | "ThrottlingException" | "RequestLimitExceeded" | "SlowDown" => {
                (FailedKind::Unavailable, format!("{service} is throttling; try again later"))
            }
            // A success status whose body does not parse.
            _ if status < 400 => self.unreadable(),
            _ if status >= 500 => (
                FailedKind::Unavailable,
                format!(
                    "{service} {place} answered {operation} with HTTP status {status}; try again later"
                ),
            ),
            code if status == 404 => {
                (FailedKind::NotFound, format!("{service} did not find it: {code} {text}"))
            }
            code => {
                let message = format!("{service} rejected the request: {code} {text}");
                (FailedKind::Rejected, message.trim_end().to_owned())
            }
        }
    }

    /// AWS names the error in every refusal, but not in the answer to a HEAD request, which has no body.
    /// An endpoint with tables only has no error of other services.
    fn refused_without_code(&self, status: u16) -> (FailedKind, String) {
        let Self { service, operation, place, .. } = self;
        match status {
            403 if *operation == "HeadObject" => {
                (FailedKind::Denied, format!("no permission for {operation} on {service} {place}"))
            }
            400 | 402 | 404.. if !service.starts_with("DynamoDB") && status != 407 => {
                (FailedKind::NoService, format!("there is no {service} {place}"))
            }
            _ => (FailedKind::Rejected, format!("{service} {place} {}", unlike(service, status))),
        }
    }
}

/// An answer with an error status and no error of the service, as that of a proxy.
pub(super) fn unlike(service: &str, status: u16) -> String {
    format!(
        "answered with HTTP status {status} and no error code: this does not look like {service}; \
         check the endpoint"
    )
}

/// A time limit: `10 s`, `50 ms`.
#[derive(Clone, Copy, Debug)]
pub struct Limit(pub Duration);

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.as_millis() {
            millis if millis % 1_000 == 0 => write!(f, "{} s", millis / 1_000),
            millis => write!(f, "{millis} ms"),
        }
    }
}

/// The error and what caused it, outermost first.
pub(super) fn causes<'a>(
    error: &'a (dyn StdError + 'static),
) -> impl Iterator<Item = &'a (dyn StdError + 'static)> {
    std::iter::successors(Some(error), |error| (*error).source())
}

/// The text of one error, up to where it shows a value with its fields: some texts of the SDK end in a whole
/// request.
fn text(error: &(dyn StdError + 'static)) -> String {
    let text = error.to_string();
    let Some((words, _)) = text.split_once(" { ") else { return text };
    // The last word is the type of the value.
    let words = words.rsplit_once(' ').map_or("", |(words, _)| words);
    words.trim_end_matches([' ', ':', '(', ',']).to_owned()
}

/// The texts of the error and all its causes in one line: `Display` of the SDK's errors leaves the causes out.
pub(super) fn chain(error: &(dyn StdError + 'static)) -> String {
    explain(error).map_or_else(|| chain_of(error), |explained| explained.cause)
}

/// As [`chain`], also about credentials.
pub(super) fn chain_of(error: &(dyn StdError + 'static)) -> String {
    let mut texts: Vec<String> = Vec::new();
    for text in causes(error).map(text).filter(|text| !text.is_empty()) {
        if texts.last().is_none_or(|last| !last.contains(&text)) {
            texts.push(text);
        }
    }
    texts.join(": ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_ends_where_it_shows_the_insides_of_a_value() {
        for (full, shown) in [
            ("request has timed out", "request has timed out"),
            ("expected one of '{', '['", "expected one of '{', '['"),
            ("invalid URI: Request { uri: Uri { a } }", "invalid URI"),
            ("failed (Request { uri: a })", "failed"),
            ("Request { uri: a }", ""),
        ] {
            assert_eq!(text(&std::io::Error::other(full)), shown, "{full}");
        }
    }

    #[test]
    fn an_answer_without_an_error_code_is_not_of_aws() {
        use FailedKind::{Denied, NoService, Rejected};
        for (service, operation, status, kind) in [
            ("DynamoDB", "DescribeTable", 403, Rejected),
            ("DynamoDB", "DescribeTable", 404, Rejected),
            ("DynamoDB Streams", "ListStreams", 400, Rejected),
            ("CloudFormation", "DescribeStacks", 403, Rejected),
            ("CloudFormation", "DescribeStacks", 407, Rejected),
            ("CloudFormation", "DescribeStacks", 400, NoService),
            ("CloudFormation", "DescribeStacks", 404, NoService),
            ("S3", "HeadObject", 403, Denied),
        ] {
            let place = "at http://127.0.0.1:8000".to_owned();
            let call = Call { service, operation, place, limit: Duration::from_secs(1) };
            let (found, message) = call.refused("", "", status);
            assert_eq!(found, kind, "{service} {operation} {status}");
            assert!(message.contains(service) && message.contains("127.0.0.1:8000"), "{message}");
            let says = format!("HTTP status {status} and no error code: this does not look like");
            assert_eq!(message.contains(&says), kind == Rejected, "{message}");
        }
    }
}
