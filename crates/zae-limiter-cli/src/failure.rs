//! What went wrong, as a person reads it: one sentence, the cause, and a hint.

use std::error::Error as StdError;

use serde::Serialize;
use zae_limiter::{Error, StoreErrorKind};

use crate::exit::ExitStatus;

/// Why a command could not do its work.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    /// How the program ends.
    pub status: ExitStatus,
    /// One sentence without a full stop.
    pub message: String,
    /// What lies behind it, outermost first.
    pub causes: Vec<String>,
    /// The next step, where there is one.
    pub hint: Option<String>,
}

impl Failure {
    /// A failure with nothing behind it.
    pub(crate) fn new(status: ExitStatus, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), causes: Vec::new(), hint: None }
    }

    /// Input that breaks a rule.
    pub(crate) fn usage(message: impl Into<String>) -> Self {
        Self::new(ExitStatus::Usage, message)
    }

    /// With what lies behind it.
    #[must_use]
    pub(crate) fn caused_by(mut self, error: &dyn StdError) -> Self {
        let mut next = Some(error);
        while let Some(error) = next {
            self.causes.push(error.to_string());
            next = error.source();
        }
        self
    }

    /// With the next step.
    #[must_use]
    pub(crate) fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// The failure as the JSON object that `-o json` promises, with the hint as it is shown.
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

/// The command that leads on. What the error itself says is not repeated.
fn hint_for(error: &Error) -> Option<String> {
    match error {
        Error::UnknownLimits { resource, names, .. } => {
            let first = names.split(", ").next().unwrap_or("rpm");
            Some(format!(
                "zae-limiter resource set-defaults {resource} -l {first}:100   \
                 (an acquire can also bring its own: -l {first}:100)"
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
