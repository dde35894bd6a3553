//! Why there are no credentials, and what to do about it.
//!
//! The SDK quotes what a `credential_process` printed, which may be a secret. So its texts about credentials are
//! classified here, and most are not shown.

use std::error::Error as StdError;
use std::fmt;

use aws_credential_types::provider::error::CredentialsError;
use aws_credential_types::provider::{ProvideCredentials, SharedCredentialsProvider, future};
use aws_sdk_dynamodb::config::Credentials;

use super::sdk::{FailedCall, FailedKind, causes, chain_of};

/// The variable that selects a profile.
const PROFILE: &str = "AWS_PROFILE";

/// The selected profile.
fn profile() -> String {
    named_profile().unwrap_or_else(|| "default".to_owned())
}

fn named_profile() -> Option<String> {
    variable(PROFILE).filter(|name| name != "default")
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// The selected profile is in none of the files, or is a role whose source is itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MissingProfile {
    name: String,
    /// The profile that is its own source, without keys.
    own_source: Option<String>,
}

impl fmt::Display for MissingProfile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, own_source } = self;
        match own_source {
            None => write!(
                f,
                "there is no AWS profile {name}; check {PROFILE}, or create the profile with aws configure \
                 --profile {name}"
            ),
            Some(source) => write!(
                f,
                "AWS profile {name} leads to no credentials: {source} is its own source_profile; correct \
                 ~/.aws/config"
            ),
        }
    }
}

impl StdError for MissingProfile {}

impl MissingProfile {
    /// Finds out whether the selected profile leads nowhere. The SDK would go on without it, with the credentials of the
    /// machine. Credentials in variables need no profile.
    pub async fn find() -> Option<Self> {
        if variable("AWS_ACCESS_KEY_ID").is_some() && variable("AWS_SECRET_ACCESS_KEY").is_some() {
            return None;
        }
        let (files, environment) = (Default::default(), Default::default());
        let found =
            aws_config::profile::load(&files, &environment, &Default::default(), None).await;
        // The SDK reports a file that does not parse.
        let profiles = found.ok()?;
        let missing = |own_source| Some(Self { name: profile(), own_source });
        let mut name = profile();
        if profiles.get_profile(&name).is_none() {
            return named_profile().and_then(|_| missing(None));
        }
        // The SDK reports a source that is missing, and a longer circle.
        for _ in profiles.profiles() {
            let found = profiles.get_profile(&name)?;
            let source = found.get("role_arn").and_then(|_| found.get("source_profile"))?;
            if source == name {
                let has_keys = found.get("aws_access_key_id").is_some();
                return if has_keys { None } else { missing(Some(name)) };
            }
            name = source.to_owned();
        }
        None
    }
}

/// Credentials of the selected profile, or an error if there is no such profile.
#[derive(Debug)]
pub(super) struct OfProfile(pub(super) SharedCredentialsProvider);

impl ProvideCredentials for OfProfile {
    fn provide_credentials<'a>(&'a self) -> future::ProvideCredentials<'a>
    where
        Self: 'a,
    {
        future::ProvideCredentials::new(async {
            match MissingProfile::find().await {
                Some(missing) => Err(CredentialsError::invalid_configuration(missing)),
                None => self.0.provide_credentials().await,
            }
        })
    }

    fn fallback_on_interrupt(&self) -> Option<Credentials> {
        self.0.fallback_on_interrupt()
    }
}

/// What an error about credentials means. `None` for any other.
pub(super) fn explain(error: &(dyn StdError + 'static)) -> Option<FailedCall> {
    if is_timeout(error) {
        let message = format!("the source of the AWS credentials did not answer in time{}", look());
        return Some(failed(FailedKind::Unavailable, message, "a timeout"));
    }
    let mut rest = causes(error).skip_while(|cause| !cause.is::<CredentialsError>());
    let credentials = rest.next()?.downcast_ref::<CredentialsError>()?;
    if let Some(missing) = rest.find_map(|cause| cause.downcast_ref::<MissingProfile>()) {
        return Some(failed(FailedKind::Denied, missing.to_string(), "no such profile"));
    }
    let texts = chain_of(credentials);
    Some(explained(credentials, &texts, &profile()))
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
    let whose = named_profile().map_or(String::new(), |name| format!(" (AWS profile {name})"));
    format!("{whose}; check it, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
}

fn failed(kind: FailedKind, message: String, cause: &str) -> FailedCall {
    FailedCall { kind, message, cause: cause.to_owned() }
}

/// `texts` are those of the SDK about the error, from the outermost cause to the innermost.
fn explained(error: &CredentialsError, texts: &str, profile: &str) -> FailedCall {
    let denied = |message: String, cause: &str| failed(FailedKind::Denied, message, cause);
    let says = |words: &[&str]| words.iter().any(|word| texts.contains(word));
    if says(&["external process"]) {
        return of_process(texts, profile);
    }
    match error {
        CredentialsError::InvalidConfiguration(_) => {
            denied(format!("AWS profile {profile} is not valid; correct ~/.aws/config"), texts)
        }
        CredentialsError::CredentialsNotLoaded(_) => denied(
            "there are no usable AWS credentials; set AWS_PROFILE, or AWS_ACCESS_KEY_ID and \
             AWS_SECRET_ACCESS_KEY, or log in"
                .to_owned(),
            texts,
        ),
        _ if says(&["dispatch failure", "timeout"]) => failed(
            FailedKind::Unavailable,
            format!("the source of the AWS credentials cannot be reached{}", look()),
            texts,
        ),
        _ if says(&["Login token", "login/cache"]) => denied(
            format!("AWS profile {profile} is not logged in; run aws login --profile {profile}"),
            texts,
        ),
        _ if says(&["SSO token", "sso/cache", "UnauthorizedException"]) => denied(
            format!(
                "the single sign-on of AWS profile {profile} is missing or has ended; run aws sso login \
                 --profile {profile}"
            ),
            texts,
        ),
        _ => denied(
            format!("the AWS credentials could not be loaded (AWS profile {profile}); {ASIDE}"),
            texts,
        ),
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
