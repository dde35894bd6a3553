//! The profiles of the AWS configuration: which of them credentials come from, and which lead nowhere.

use std::error::Error as StdError;
use std::fmt;

use aws_config::profile::{Profile, ProfileSet};

/// The variable that selects a profile.
const PROFILE: &str = "AWS_PROFILE";
/// Variables that are a source of credentials by themselves, in the SDK's order.
const SOURCES: [&str; 3] = [
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
];
/// Settings by which a profile has credentials of its own.
const OWN: [&str; 7] = [
    "aws_access_key_id",
    "credential_process",
    "credential_source",
    "login_session",
    "sso_session",
    "sso_start_url",
    "web_identity_token_file",
];

/// The selected profile.
pub(super) fn selected() -> String {
    named().unwrap_or_else(|| "default".to_owned())
}

pub(super) fn named() -> Option<String> {
    variable(PROFILE).filter(|name| name != "default")
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// The selected profile, or one that it refers to, leads to no credentials.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BadProfile {
    name: String,
    problem: Problem,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Problem {
    /// The files do not have it.
    Missing,
    /// A profile without keys is its own source.
    OwnSource(String),
    /// The chain of source profiles comes back to this one.
    Circle(String),
    /// The profile takes its role from one that the files do not have.
    NoSource(String),
    /// The files do not have this `sso-session`.
    NoSession(String),
}

impl fmt::Display for BadProfile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, problem } = self;
        match problem {
            Problem::Missing => write!(
                f,
                "there is no AWS profile {name}; check {PROFILE}, or create the profile with aws configure \
                 --profile {name}"
            ),
            Problem::OwnSource(source) => write!(
                f,
                "AWS profile {name} leads to no credentials: {source} is its own source_profile; correct \
                 ~/.aws/config"
            ),
            Problem::Circle(source) => write!(
                f,
                "AWS profile {name} leads to no credentials: its source profiles lead in a circle back to {source}; \
                 correct ~/.aws/config"
            ),
            Problem::NoSource(source) => write!(
                f,
                "AWS profile {name} has source_profile = {source}, but there is no profile {source}; correct \
                 ~/.aws/config"
            ),
            Problem::NoSession(session) => write!(
                f,
                "AWS profile {name} has sso_session = {session}, but there is no [sso-session {session}]; \
                 correct ~/.aws/config, or run aws configure sso --profile {name}"
            ),
        }
    }
}

impl StdError for BadProfile {}

impl BadProfile {
    /// Finds out whether the selected profile leads nowhere. The SDK would go on without it, with the credentials of
    /// the machine, or would not say which one is meant. Credentials in variables need no profile.
    pub async fn find() -> Option<Self> {
        Source::find().await.err()
    }
}

/// Where the SDK finds credentials.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Source {
    /// The profile at the end of the chain of roles that starts at the selected one.
    Profile(String),
    /// A variable.
    Variable(&'static str),
    /// Anything else.
    Machine,
}

impl Source {
    pub(super) async fn find() -> Result<Self, BadProfile> {
        if variable("AWS_ACCESS_KEY_ID").is_some() && variable("AWS_SECRET_ACCESS_KEY").is_some() {
            return Ok(Self::Machine);
        }
        let (files, environment) = (Default::default(), Default::default());
        let found =
            aws_config::profile::load(&files, &environment, &Default::default(), None).await;
        // The SDK reports a file that does not parse.
        let Ok(profiles) = found else { return Ok(Self::Profile(selected())) };
        Self::of(&profiles, &selected(), named().is_some())
    }

    fn of(profiles: &ProfileSet, selected: &str, is_named: bool) -> Result<Self, BadProfile> {
        let bad = |name: &str, problem| Err(BadProfile { name: name.to_owned(), problem });
        let Some(mut profile) = profiles.get_profile(selected) else {
            return if is_named {
                bad(selected, Problem::Missing)
            } else {
                Ok(Self::of_variables())
            };
        };
        let mut visited: Vec<&str> = Vec::new();
        loop {
            let has_keys = profile.get("aws_access_key_id").is_some();
            let goes_on = visited.is_empty() || !has_keys;
            let Some(source) = source_of(profile).filter(|_| goes_on) else { break };
            if visited.contains(&profile.name()) {
                return bad(selected, Problem::Circle(profile.name().to_owned()));
            }
            visited.push(profile.name());
            if source == profile.name() {
                if has_keys {
                    break;
                }
                return bad(selected, Problem::OwnSource(source.to_owned()));
            }
            profile = match profiles.get_profile(source) {
                Some(found) => found,
                None => return bad(profile.name(), Problem::NoSource(source.to_owned())),
            };
        }
        let session = profile.get("sso_session");
        if let Some(missing) = session.filter(|name| profiles.sso_session(name).is_none()) {
            return bad(profile.name(), Problem::NoSession(missing.to_owned()));
        }
        let has_own = OWN.iter().any(|setting| profile.get(setting).is_some());
        // The SDK goes on after a selected profile without credentials, but not after one that a role needs.
        match has_own || profile.name() != selected {
            true => Ok(Self::Profile(profile.name().to_owned())),
            false => Ok(Self::of_variables()),
        }
    }

    fn of_variables() -> Self {
        let found = SOURCES.into_iter().find(|name| variable(name).is_some());
        found.map_or(Self::Machine, Self::Variable)
    }
}

/// The profile whose credentials this one's role is assumed with.
fn source_of(profile: &Profile) -> Option<&str> {
    let is_role =
        profile.get("role_arn").is_some() && profile.get("web_identity_token_file").is_none();
    profile.get("source_profile").filter(|_| is_role)
}
