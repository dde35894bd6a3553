//! Errors as the user sees them: one sentence, the causes, and a hint.

use std::error::Error as StdError;

use serde::Serialize;
use zae_limiter::Error;
use zae_limiter::model::{ConfigLevel, LimitName, Object};
use zae_limiter::store::{Applied, StoreErrorKind};

use crate::exit::ExitStatus;
use crate::suggestion::limits_that_hold;

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
    /// Whether the limiter's store did not answer, and not AWS or an endpoint.
    is_store_silent: bool,
}

impl Failure {
    /// A failure without causes and hint.
    pub(crate) fn new(status: ExitStatus, message: impl Into<String>) -> Self {
        Self {
            status,
            message: message.into(),
            causes: Vec::new(),
            hint: None,
            is_store_silent: false,
        }
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

    /// Names the likely reason why a file does not answer, where no better hint is known.
    #[must_use]
    pub(crate) fn or_locked(self, store: &str) -> Self {
        let is_known = self.hint.is_some() || self.causes.iter().any(|it| it.contains("locked"));
        if !self.is_store_silent || is_known || !store.starts_with("sqlite:") {
            return self;
        }
        self.hint("another program may have locked the file: try again, or stop that program")
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
        let mut failure = Self::new(status_of(&error), message_of(&error));
        if let Some(source) = error.source() {
            failure = failure.caused_by(source);
        }
        failure.hint = hint_for(&error);
        failure.is_store_silent = matches!(error, Error::Unavailable { .. });
        failure
    }
}

fn status_of(error: &Error) -> ExitStatus {
    match error {
        Error::Exceeded(_) => ExitStatus::Refused,
        Error::Invalid(_) => ExitStatus::Usage,
        Error::NotFound(_)
        | Error::MissingParent { .. }
        | Error::UnknownNamespace { .. }
        | Error::NamespacePurged { .. } => ExitStatus::NotFound,
        Error::Unavailable { .. } => ExitStatus::Unavailable,
        Error::Store(error) => match error.kind() {
            StoreErrorKind::Unavailable | StoreErrorKind::Busy | StoreErrorKind::Full => {
                ExitStatus::Unavailable
            }
            StoreErrorKind::NotFound => ExitStatus::NotFound,
            _ => ExitStatus::Error,
        },
        _ => ExitStatus::Error,
    }
}

/// What happened. The library's own texts have no entity ids, because they end up in logs; whoever types a command
/// gets to see which entity is meant.
fn message_of(error: &Error) -> String {
    match error {
        Error::NotFound(object) => format!("{} does not exist", named(object)),
        Error::AlreadyExists(object) => format!("{} exists already", named(object)),
        Error::MissingParent { parent } => {
            format!("the parent {parent} does not exist; create it first")
        }
        Error::Cycle { entity } => format!("{entity} would be its own ancestor"),
        Error::TooDeep { entity, max } => {
            format!(
                "{entity} would be level {} of its hierarchy, and {max} is the most; use a flatter one",
                max + 1
            )
        }
        Error::UnknownLimits { unknown, entity, resource, configured } => {
            let names = unknown.join(", ");
            let rest = match configured.is_empty() {
                true => "; configure it at some level, or pass it with the call",
                false => "",
            };
            format!("no limit named {names} holds for {entity} on {resource}{rest}")
        }
        // Not "limits cannot be checked": the command may change limits, or list something.
        Error::Unavailable { waited, cause } => {
            let what = match cause.kind() {
                StoreErrorKind::Busy => "the bucket is busy",
                _ => "the store is unavailable",
            };
            let rest = match cause.applied() {
                Applied::No => "; nothing was changed",
                Applied::Maybe => "",
            };
            format!("{what} ({:.3} s waited){rest}", waited.as_secs_f64())
        }
        Error::ExceedsCapacity(error) => format!(
            "{} tokens of {} can never be admitted: the limit of {} holds at most {}; ask for less, or raise its burst",
            error.requested, error.limit_name, error.entity_id, error.capacity
        ),
        error => error.to_string(),
    }
}

fn named(object: &Object) -> String {
    match object {
        Object::Entity(id) => format!("entity {:?}", id.as_str()),
        Object::Namespace(name) => format!("namespace {:?}", name.as_str()),
        Object::NamespaceId(id) => format!("namespace {:?}", id.as_str()),
        Object::Limits(ConfigLevel::System) => "configuration \"system\"".to_owned(),
        Object::Limits(ConfigLevel::Resource(resource)) => {
            format!("configuration \"resource {resource}\"")
        }
        Object::Limits(ConfigLevel::Entity(id)) => format!("configuration \"entity {id}\""),
        Object::Limits(ConfigLevel::EntityResource(id, resource)) => {
            format!("configuration \"entity {id} on {resource}\"")
        }
        other => other.to_string(),
    }
}

/// The next command to run. It does not repeat what the error says.
fn hint_for(error: &Error) -> Option<String> {
    match error {
        Error::UnknownLimits { resource, unknown, configured, .. } => {
            let first = unknown.first().map_or("rpm", String::as_str);
            let held = limits_that_hold(first, configured.iter().map(LimitName::as_str));
            // Setting one limit drops the others: only where there are none is that the next step.
            held.or_else(|| {
                Some(format!(
                    "zae-limiter resource set-defaults {resource} -l {first}:100   \
                 (or pass limits to this acquire: -l {first}:100)"
                ))
            })
        }
        Error::MissingParent { parent } => Some(format!("zae-limiter entity create {parent}")),
        Error::UnknownNamespace { name } => Some(format!(
            "zae-limiter namespace register {name}   (was it deleted? zae-limiter namespace orphans)"
        )),
        Error::NotFound(Object::Namespace(_) | Object::NamespaceId(_)) => Some(
            "zae-limiter namespace list   (deleted ones: zae-limiter namespace orphans)".to_owned(),
        ),
        Error::NotFound(Object::Entity(_)) => {
            Some("check the id, and the namespace: -N NAME".to_owned())
        }
        Error::AlreadyExists(Object::Entity(name)) => {
            Some(format!("zae-limiter entity show {name}"))
        }
        Error::AlreadyExists(Object::Namespace(name)) => {
            Some(format!("zae-limiter namespace delete {name}   (frees the name; its items stay)"))
        }
        Error::Store(error) if error.kind() == StoreErrorKind::NotFound => {
            Some("zae-limiter list shows the stacks of this account and region".to_owned())
        }
        Error::NamespacePurged { name } => Some(format!(
            "zae-limiter namespace register {name}   (complete a purge: zae-limiter namespace orphans)"
        )),
        Error::NamespaceInUse { name } => Some(format!("zae-limiter namespace delete {name}")),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use zae_limiter::store::StoreError;

    use super::*;

    fn unavailable(cause: StoreError) -> Failure {
        Failure::from(Error::Unavailable { waited: Duration::from_millis(5_250), cause })
    }

    /// The words fit every command: one that lists, one that takes, one that changes limits.
    #[test]
    fn an_unavailable_store_is_called_that() {
        let locked = || StoreError::new(StoreErrorKind::Unavailable, "limits.db is locked");
        let failure = unavailable(locked()).or_locked("sqlite:limits.db");
        assert_eq!(
            failure.message,
            "the store is unavailable (5.250 s waited); nothing was changed"
        );
        assert_eq!(failure.causes, ["limits.db is locked"]);
        assert_eq!((failure.status, failure.hint), (ExitStatus::Unavailable, None));
        let unknown = unavailable(locked().maybe_applied());
        assert_eq!(unknown.message, "the store is unavailable (5.250 s waited)");
    }

    #[test]
    fn a_silent_file_may_be_locked() {
        let silent = || unavailable(StoreError::new(StoreErrorKind::Unavailable, "no answer"));
        let hint = silent().or_locked("sqlite:limits.db").hint.expect("a hint");
        assert!(hint.contains("locked the file"), "{hint}");
        assert_eq!(silent().or_locked("dynamodb:my-app").hint, None);
        let aws = Failure::new(ExitStatus::Unavailable, "AWS did not answer");
        assert_eq!(aws.or_locked("sqlite:limits.db").hint, None);
    }
}
