//! Why there are no credentials, and what to do about it.
//!
//! The SDK quotes what a `credential_process` printed, which may be a secret. So its texts about credentials are
//! classified here, and most are not shown.

use std::error::Error as StdError;
use std::fmt;

use aws_credential_types::provider::error::CredentialsError;
use aws_credential_types::provider::{ProvideCredentials, SharedCredentialsProvider, future};
use aws_sdk_dynamodb::config::Credentials;

use super::profiles::{Source, named, selected};
use super::sdk::{FailedCall, FailedKind, causes, chain_of};

/// Credentials of the selected profile. An error is explained already, because only this place may read files.
#[derive(Debug)]
pub(super) struct OfProfile(pub(super) SharedCredentialsProvider);

impl OfProfile {
    async fn load(&self) -> Result<Credentials, FailedCall> {
        let denied = |message, cause| failed(FailedKind::Denied, message, cause);
        let source = Source::find().await.map_err(|bad| denied(bad.to_string(), "profile"))?;
        let loaded = self.0.provide_credentials().await;
        loaded.map_err(|error| match is_timeout(&error) {
            true => timed_out(),
            false => explained(&error, &source),
        })
    }
}

impl ProvideCredentials for OfProfile {
    fn provide_credentials<'a>(&'a self) -> future::ProvideCredentials<'a>
    where
        Self: 'a,
    {
        future::ProvideCredentials::new(async {
            self.load().await.map_err(|failed| CredentialsError::provider_error(Explained(failed)))
        })
    }

    fn fallback_on_interrupt(&self) -> Option<Credentials> {
        self.0.fallback_on_interrupt()
    }
}

/// An error that is a sentence already.
#[derive(Debug)]
struct Explained(FailedCall);

impl fmt::Display for Explained {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.message)
    }
}

impl StdError for Explained {}

/// What an error about credentials means. `None` for any other.
pub(super) fn explain(error: &(dyn StdError + 'static)) -> Option<FailedCall> {
    if is_timeout(error) {
        return Some(timed_out());
    }
    let mut rest = causes(error).skip_while(|cause| !cause.is::<CredentialsError>());
    let credentials = rest.next()?.downcast_ref::<CredentialsError>()?;
    match rest.find_map(|cause| cause.downcast_ref::<Explained>()) {
        Some(Explained(failed)) => Some(failed.clone()),
        // Of a client that the program has built.
        None => Some(explained(credentials, &Source::Profile(selected()))),
    }
}

fn timed_out() -> FailedCall {
    let message = format!("the source of the AWS credentials did not answer in time{}", look());
    failed(FailedKind::Unavailable, message, "a timeout")
}

/// By its text: the type of this error is private to the SDK.
fn is_timeout(error: &(dyn StdError + 'static)) -> bool {
    causes(error).any(|cause| {
        cause.to_string().starts_with("identity resolver timed out")
            || matches!(
                cause.downcast_ref::<CredentialsError>(),
                Some(CredentialsError::ProviderTimedOut(_))
            )
    })
}

/// What to do about a source that does not answer.
pub fn look() -> String {
    let whose = named().map_or(String::new(), |name| format!(" (AWS profile {name})"));
    format!("{whose}; check it, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
}

fn failed(kind: FailedKind, message: String, cause: &str) -> FailedCall {
    FailedCall { kind, message, cause: cause.to_owned() }
}

fn explained(error: &CredentialsError, source: &Source) -> FailedCall {
    // From the outermost cause to the innermost.
    let texts = &*chain_of(error);
    let denied = |message: String| failed(FailedKind::Denied, message, texts);
    let says = |words: &[&str]| words.iter().any(|word| texts.contains(word));
    let (selected, origin) = match source {
        Source::Profile(origin) => (format!("AWS profile {}", selected()), origin.clone()),
        Source::Variable(name) => ((*name).to_owned(), selected()),
        Source::Machine => ("of this machine".to_owned(), selected()),
    };
    if says(&["external process"]) {
        return of_process(texts, &origin);
    }
    match (error, source) {
        (CredentialsError::CredentialsNotLoaded(_), _) => denied(
            "there are no usable AWS credentials; set AWS_PROFILE, or AWS_ACCESS_KEY_ID and \
             AWS_SECRET_ACCESS_KEY, or log in"
                .to_owned(),
        ),
        (CredentialsError::InvalidConfiguration(_), Source::Profile(_)) => {
            denied(format!("AWS profile {origin} is not valid; correct ~/.aws/config"))
        }
        (CredentialsError::InvalidConfiguration(_), Source::Variable(name)) => {
            denied(format!("the AWS credentials could not be loaded: {name} is not valid; {ASIDE}"))
        }
        _ if says(&["dispatch failure", "timeout"]) => {
            let message = format!(
                "the source of the AWS credentials cannot be reached ({selected}); {ASIDE}"
            );
            failed(FailedKind::Unavailable, message, texts)
        }
        _ if says(&["Login token", "login/cache"]) => denied(format!(
            "AWS profile {origin} is not logged in; run aws login --profile {origin}"
        )),
        _ if says(&["SSO token", "sso/cache", "UnauthorizedException"]) => denied(format!(
            "the single sign-on of AWS profile {origin} is missing or has ended; run aws sso login \
             --profile {origin}"
        )),
        _ => denied(format!("the AWS credentials could not be loaded ({selected}); {ASIDE}")),
    }
}

const ASIDE: &str = "correct their source, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY";

/// Shows nothing of what the process printed.
fn of_process(texts: &str, profile: &str) -> FailedCall {
    let ended = texts.split_once("exited with code ").map(|(_, rest)| rest);
    let ended = ended.and_then(|rest| rest.split_once(". Stderr")).map(|(status, _)| status);
    let what = match ended {
        Some(status) => format!("failed ({status})"),
        None if texts.contains("parse") || texts.contains("decode") => {
            "printed no credentials in the JSON that AWS documents".to_owned()
        }
        None => "could not be started".to_owned(),
    };
    let message = format!(
        "the credential_process of AWS profile {profile} {what}; run its command by hand to see why"
    );
    failed(FailedKind::Denied, message, "credential_process")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_process_printed_is_not_shown() {
        for (text, says) in [
            (
                "Error retrieving credentials: external process exited with code exit status: 3. Stderr: hunter2",
                "failed (exit status: 3)",
            ),
            (
                "Error retrieving credentials: external process exited with code signal: 9 (SIGKILL). Stderr: hunter2",
                "failed (signal: 9 (SIGKILL))",
            ),
            (
                "Error retrieving credentials from external process, could not parse response: hunter2",
                "printed no credentials",
            ),
            (
                "Error retrieving credentials from external process: could not decode output as UTF-8: hunter2",
                "printed no credentials",
            ),
            ("Error retrieving credentials from external process: hunter2", "could not be started"),
        ] {
            let error = CredentialsError::provider_error(text);
            let found = explain(&error).expect("it is about credentials");
            assert!(found.message.contains(says), "{found:?}");
            assert!(!format!("{found:?}").contains("hunter2"), "{found:?}");
        }
    }

    #[test]
    fn other_errors_are_not_about_credentials() {
        assert_eq!(explain(&std::io::Error::other("external process")), None);
    }
}
