//! Errors as the user sees them: one sentence, the causes, and a hint.

use std::error::Error as StdError;

use serde::Serialize;
use zae_limiter::{Error, StoreErrorKind};

use crate::exit::ExitStatus;

/// Why a command failed.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    /// The program's exit status.
    pub status: ExitStatus,
    /// One sentence without a full stop.
    pub message: String,
    /// The underlying errors, outermost first.
    pub causes: Vec<String>,
    /// The next step, where there is one.
    pub hint: Option<String>,
}

impl Failure {
    /// A failure without causes and hint.
    pub(crate) fn new(status: ExitStatus, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), causes: Vec::new(), hint: None }
    }

    /// Wrong usage: exit status 2.
    pub(crate) fn usage(message: impl Into<String>) -> Self {
        Self::new(ExitStatus::Usage, message)
    }

    /// Adds an error and its sources as causes.
    #[must_use]
    pub(crate) fn caused_by(mut self, error: &dyn StdError) -> Self {
        let mut next = Some(error);
        while let Some(error) = next {
            self.causes.push(error.to_string());
            next = error.source();
        }
        self
    }

    /// Sets the hint.
    #[must_use]
    pub(crate) fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// The JSON object for `-o json`, with the hint as it is displayed.
    pub(crate) fn to_json<'a>(&'a self, hint: Option<&'a str>) -> FailureJson<'a> {
        FailureJson {
            error: &self.message,
            cause: (!self.causes.is_empty()).then(|| self.causes.join(": ")),
            hint,
            exit_status: self.status.code(),
        }
    }
}

#[derive(Serialize)]
pub(crate) struct FailureJson<'a> {
    error: &'a str,
    cause: Option<String>,
    hint: Option<&'a str>,
    exit_status: u8,
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let mut failure = Self::new(status_of(&error), error.to_string());
        if let Some(source) = error.source() {
            failure = failure.caused_by(source);
        }
        failure.hint = hint_for(&error);
        failure
    }
}

fn status_of(error: &Error) -> ExitStatus {
    match error {
        Error::Exceeded(_) => ExitStatus::Refused,
        Error::Invalid(_) => ExitStatus::Usage,
        Error::NotFound { .. } | Error::MissingParent { .. } | Error::UnknownNamespace { .. } => {
            ExitStatus::NotFound
        }
        Error::Unavailable { .. } => ExitStatus::Unavailable,
        Error::Store(error) => match error.kind() {
            StoreErrorKind::Unavailable | StoreErrorKind::Busy | StoreErrorKind::Full => {
                ExitStatus::Unavailable
            }
            _ => ExitStatus::Error,
        },
        _ => ExitStatus::Error,
    }
}

/// The next command to run. It does not repeat what the error says.
fn hint_for(error: &Error) -> Option<String> {
    match error {
        Error::UnknownLimits { resource, names, .. } => {
            let first = names.split(", ").next().unwrap_or("rpm");
            Some(format!(
                "zae-limiter resource set-defaults {resource} -l {first}:100   \
                 (or pass limits to this acquire: -l {first}:100)"
            ))
        }
        Error::MissingParent { parent } => Some(format!("zae-limiter entity create {parent}")),
        Error::UnknownNamespace { name } => Some(format!(
            "zae-limiter namespace register {name}   (was it deleted? zae-limiter namespace orphans)"
        )),
        Error::NotFound { what: "namespace", .. } => Some(
            "zae-limiter namespace list   (deleted ones: zae-limiter namespace orphans)".to_owned(),
        ),
        Error::NotFound { what: "entity", .. } => {
            Some("check the id, and the namespace: -N NAME".to_owned())
        }
        Error::AlreadyExists { what: "entity", name } => {
            Some(format!("zae-limiter entity show {name}"))
        }
        Error::AlreadyExists { what: "namespace", name } => {
            Some(format!("zae-limiter namespace delete {name}   (frees the name; its items stay)"))
        }
        Error::NamespaceInUse { name } => Some(format!("zae-limiter namespace delete {name}")),
        _ => None,
    }
}
