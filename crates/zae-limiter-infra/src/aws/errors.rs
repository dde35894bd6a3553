//! Classifies the SDK's errors.

use std::error::Error as StdError;
use std::fmt;

use aws_sdk_cloudformation::error::{ProvideErrorMetadata, SdkError};
use zae_limiter_dynamodb::aws::{Call, FailedCall, FailedKind};

use crate::cloud::{CloudError, CloudErrorKind};

/// Whether the service's message contains a text.
pub(super) fn says<E: ProvideErrorMetadata>(error: &SdkError<E>, text: &str) -> bool {
    let service = match error {
        SdkError::ServiceError(service) => service.err(),
        _ => return false,
    };
    service.message().is_some_and(|message| message.contains(text))
}

/// The error for a command.
pub(super) fn cloud_error<E>(call: &Call, error: &SdkError<E>) -> CloudError
where
    E: ProvideErrorMetadata + StdError + 'static,
{
    let FailedCall { kind, message, cause } = call.failed(error);
    let kind = match kind {
        FailedKind::Unavailable => CloudErrorKind::Unavailable,
        FailedKind::Denied => CloudErrorKind::Denied,
        FailedKind::NotFound => CloudErrorKind::NotFound,
        FailedKind::NoService => CloudErrorKind::NoService,
        FailedKind::Rejected => CloudErrorKind::Rejected,
    };
    CloudError { kind, message, source: Some(Box::new(SdkText(cause))) }
}

#[derive(Debug)]
struct SdkText(String);

impl fmt::Display for SdkText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl StdError for SdkText {}
