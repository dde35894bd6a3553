//! The interface to AWS: the calls that the commands need.
//!
//! Two types implement [`Cloud`]: the adapter over the SDK (feature `aws`), and a fake in the
//! tests.

use std::collections::BTreeMap;
use std::error::Error as StdError;
use std::fmt;
use std::time::Duration;

use zae_limiter_core::{BoxFuture, UsageSettings};

use crate::plan::{StackPlan, tag};

/// Why a call to AWS failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CloudErrorKind {
    /// AWS did not answer, or asks to retry later.
    Unavailable,
    /// The credentials are missing, invalid or insufficient.
    Denied,
    /// The stack, bucket, table or queue does not exist.
    NotFound,
    /// The endpoint does not have this service: some have tables only.
    NoService,
    /// The call is invalid.
    Rejected,
}

/// An error of AWS, with what to do about it.
#[derive(Debug)]
pub struct CloudError {
    /// The kind of the error.
    pub kind: CloudErrorKind,
    /// What happened, and what to do next.
    pub message: String,
    /// The error of the SDK.
    pub source: Option<Box<dyn StdError + Send + Sync>>,
}

impl CloudError {
    /// An error without a source.
    pub fn new(kind: CloudErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), source: None }
    }
}

impl fmt::Display for CloudError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl StdError for CloudError {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.source.as_deref().map(|source| source as &(dyn StdError + 'static))
    }
}

/// The status of a stack or resource in CloudFormation, for example `UPDATE_IN_PROGRESS`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Status(pub String);

impl Status {
    /// The status as CloudFormation spells it.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether a change is in progress.
    pub fn is_under_way(&self) -> bool {
        self.0.ends_with("_IN_PROGRESS") && self.0 != "REVIEW_IN_PROGRESS"
    }

    /// Whether the last change succeeded.
    pub fn is_good(&self) -> bool {
        ["CREATE_COMPLETE", "UPDATE_COMPLETE", "IMPORT_COMPLETE"].contains(&self.as_str())
    }

    /// Whether a change failed, or is being rolled back.
    pub fn is_bad(&self) -> bool {
        self.0.contains("ROLLBACK") || self.0.ends_with("_FAILED")
    }

    /// Whether CloudFormation accepts an update of a stack with this status.
    pub fn can_be_updated(&self) -> bool {
        self.is_good() || self.0 == "UPDATE_ROLLBACK_COMPLETE"
    }

    /// Whether the creation of the stack failed. Such a stack can only be deleted.
    pub fn is_failed_creation(&self) -> bool {
        ["ROLLBACK_COMPLETE", "ROLLBACK_FAILED", "CREATE_FAILED"].contains(&self.as_str())
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The state of a stack in AWS.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StackState {
    /// The stack's name.
    pub name: String,
    /// The stack's ARN, which stays valid after the stack is deleted.
    pub id: String,
    /// The stack's status.
    pub status: Status,
    /// The reason of the status, if CloudFormation gives one.
    pub reason: Option<String>,
    /// When the stack was created, in milliseconds since 1970.
    pub created_at: Option<i64>,
    /// When the stack was last updated, in milliseconds since 1970.
    pub updated_at: Option<i64>,
    /// The values of the template's parameters.
    pub parameters: BTreeMap<String, String>,
    /// The stack's outputs.
    pub outputs: BTreeMap<String, String>,
    /// The stack's tags.
    pub tags: BTreeMap<String, String>,
}

/// The program that created a stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Maker {
    /// This program.
    Us,
    /// Another tool, from our template: it has no tags.
    OurTemplate,
    /// The Python client: the same tags, another template.
    Python,
    /// An early release of the Python client, which set no tags.
    EarlyPython,
    /// Another program.
    Other,
}

/// A hundred years.
const DAYS_MAX: u32 = 36_500;

/// How early releases of the Python client began the names of stacks.
const EARLY_PREFIX: &str = "ZAEL-";
/// Parameters and outputs of all templates of the Python client.
const PYTHON_PARAMETERS: [&str; 2] = ["SnapshotWindows", "SchemaVersion"];
const PYTHON_OUTPUTS: [&str; 2] = ["TableName", "TableArn"];

impl StackState {
    /// The program that created the stack.
    pub fn maker(&self) -> Maker {
        let is_limiter = self.tags.get(tag::MANAGED_BY).is_some_and(|by| by == tag::MANAGED_BY_US);
        match (is_limiter, self.parameters.contains_key(StackPlan::CODE_KEY)) {
            (true, true) => Maker::Us,
            (true, false) => Maker::Python,
            (false, true) => Maker::OurTemplate,
            (false, false) if self.is_early_python() => Maker::EarlyPython,
            (false, false) => Maker::Other,
        }
    }

    /// Whether the name or the template of a stack without tags is that of the Python client.
    fn is_early_python(&self) -> bool {
        let has_parameters = PYTHON_PARAMETERS.iter().all(|one| self.parameters.contains_key(*one));
        let has_outputs = PYTHON_OUTPUTS.iter().all(|one| self.outputs.contains_key(*one));
        self.name.starts_with(EARLY_PREFIX) || (has_parameters && has_outputs)
    }

    /// The windows of usage records and their retention, if the stack has a function that writes them.
    pub fn usage_settings(&self) -> Option<UsageSettings> {
        let parameter = |name: &str| self.parameters.get(name).map(String::as_str);
        if parameter("EnableAggregator") == Some("false") {
            return None;
        }
        let windows = parameter("SnapshotWindows")?.split(',').map(|word| word.trim().parse().ok());
        let mut settings =
            UsageSettings { windows: windows.collect::<Option<_>>()?, ..UsageSettings::default() };
        if let Some(days) =
            parameter("UsageRetentionDays").and_then(|days| days.parse::<u32>().ok())
        {
            settings.retention = Duration::from_secs(u64::from(days.min(DAYS_MAX)) * 86_400);
        }
        Some(settings)
    }

    /// An output. `None` if it is empty or does not exist.
    pub fn output(&self, name: &str) -> Option<&str> {
        self.outputs.get(name).map(String::as_str).filter(|value| !value.is_empty())
    }
}

/// An event of a stack or of one of its resources.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StackEvent {
    /// The id of the event.
    pub id: String,
    /// The resource's name in the template, or the stack's name.
    pub resource: String,
    /// The resource's type, for example `AWS::DynamoDB::Table`.
    pub kind: String,
    /// The resource's name or ARN in the account. Empty until it has one.
    pub physical_id: String,
    /// The resource's new status.
    pub status: Status,
    /// The reason of the status, if CloudFormation gives one.
    pub reason: Option<String>,
}

impl StackEvent {
    /// Whether the event is about the stack itself.
    pub fn is_stack(&self) -> bool {
        self.kind == "AWS::CloudFormation::Stack"
    }
}

/// The outcome of a request to update a stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Update {
    /// The update is in progress.
    Started,
    /// There was nothing to change.
    Unchanged,
}

/// What DynamoDB reports about a table.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TableFigures {
    /// The table's status, for example `ACTIVE`.
    pub status: String,
    /// The number of items. AWS updates it every six hours.
    pub items: i64,
    /// The size of all items in bytes. AWS updates it every six hours.
    pub bytes: i64,
    /// Name, status and projection of each index.
    pub indexes: Vec<(String, String, String)>,
    /// Whether deletion protection is on.
    pub deletion_protection: bool,
    /// Whether the table has a stream.
    pub stream: bool,
}

/// The calls to AWS.
///
/// A call that returns `Ok` has taken effect. One that fails with [`CloudErrorKind::Unavailable`]
/// may have taken effect. Lists are complete: the implementation fetches all pages.
pub trait Cloud: fmt::Debug + Send + Sync {
    /// A stack by its name or ARN. `None` if it does not exist or was deleted.
    fn stack<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Result<Option<StackState>, CloudError>>;

    /// All stacks of the account and region that a limiter created.
    fn stacks(&self) -> BoxFuture<'_, Result<Vec<StackState>, CloudError>>;

    /// The events of a stack after the event `after`, or all events. Oldest first.
    fn events<'a>(
        &'a self,
        name: &'a str,
        after: Option<&'a str>,
    ) -> BoxFuture<'a, Result<Vec<StackEvent>, CloudError>>;

    /// Starts to create a stack. Returns its ARN.
    fn create<'a>(&'a self, plan: &'a StackPlan) -> BoxFuture<'a, Result<String, CloudError>>;

    /// Starts to update a stack.
    fn update<'a>(&'a self, plan: &'a StackPlan) -> BoxFuture<'a, Result<Update, CloudError>>;

    /// Starts to delete a stack.
    fn delete<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Result<(), CloudError>>;

    /// Whether a bucket has an object.
    fn has_object<'a>(
        &'a self,
        bucket: &'a str,
        key: &'a str,
    ) -> BoxFuture<'a, Result<bool, CloudError>>;

    /// Puts an object into a bucket.
    fn put_object<'a>(
        &'a self,
        bucket: &'a str,
        key: &'a str,
        body: Vec<u8>,
    ) -> BoxFuture<'a, Result<(), CloudError>>;

    /// Deletes all objects in a bucket, and returns their number: 0 if the bucket does not exist.
    fn empty_bucket<'a>(&'a self, bucket: &'a str) -> BoxFuture<'a, Result<u64, CloudError>>;

    /// Describes a table. `None` if it does not exist.
    fn table<'a>(
        &'a self,
        name: &'a str,
    ) -> BoxFuture<'a, Result<Option<TableFigures>, CloudError>>;

    /// The function's largest lag behind its stream in the ten minutes before `now_ms`, in
    /// milliseconds. `None` if the function was idle.
    fn stream_lag<'a>(
        &'a self,
        function: &'a str,
        now_ms: i64,
    ) -> BoxFuture<'a, Result<Option<f64>, CloudError>>;

    /// The approximate number of messages in a queue.
    fn queue_length<'a>(&'a self, url: &'a str) -> BoxFuture<'a, Result<u64, CloudError>>;
}

#[cfg(test)]
mod tests {
    use zae_limiter_core::Window::{Daily, Hourly, Monthly};

    use super::*;
    use crate::options::StackOptions;

    fn empty(name: &str) -> StackState {
        StackState {
            name: name.to_owned(),
            id: String::new(),
            status: Status("CREATE_COMPLETE".to_owned()),
            reason: None,
            created_at: None,
            updated_at: None,
            parameters: BTreeMap::new(),
            outputs: BTreeMap::new(),
            tags: BTreeMap::new(),
        }
    }

    fn stack(name: &str, tagged: bool, parameters: &[&str], outputs: &[&str]) -> Maker {
        let map = |names: &[&str]| -> BTreeMap<String, String> {
            names.iter().map(|one| ((*one).to_owned(), String::new())).collect()
        };
        let managed = (tag::MANAGED_BY.to_owned(), tag::MANAGED_BY_US.to_owned());
        let state = StackState {
            parameters: map(parameters),
            outputs: map(outputs),
            tags: tagged.then_some(managed).into_iter().collect(),
            ..empty(name)
        };
        state.maker()
    }

    #[test]
    fn the_settings_of_a_deployed_function_are_those_of_its_options() {
        let options = || StackOptions::new("my-app".parse().expect("a name"));
        let settings = |options: StackOptions| {
            let parameters = options.plan().expect("valid").parameters;
            StackState { parameters, ..empty("my-app") }.usage_settings()
        };
        let found = settings(options()).expect("a function");
        let retention = UsageSettings::default().retention;
        assert_eq!((&found.windows[..], found.retention), (&[Hourly, Daily][..], retention));
        let found = settings(options().snapshot_windows([Monthly]).usage_retention_days(7));
        let week = Duration::from_secs(7 * 86_400);
        assert_eq!(found, Some(UsageSettings { windows: vec![Monthly], retention: week }));
        assert_eq!(settings(options().no_aggregator()), None);
        assert_eq!(empty("of-another-program").usage_settings(), None);
    }

    #[test]
    fn stacks_without_tags_are_recognised_by_name_and_template() {
        let (parameters, outputs) = (&PYTHON_PARAMETERS[..], &PYTHON_OUTPUTS[..]);
        for (name, tagged, parameters, outputs, maker) in [
            ("my-app", true, &[StackPlan::CODE_KEY][..], outputs, Maker::Us),
            ("my-app", false, &[StackPlan::CODE_KEY], outputs, Maker::OurTemplate),
            ("my-app", true, parameters, outputs, Maker::Python),
            ("my-app", false, parameters, outputs, Maker::EarlyPython),
            ("ZAEL-my-app", false, &[], &[], Maker::EarlyPython),
            ("my-app", false, parameters, &["TableName"], Maker::Other),
            ("my-app", false, &["SnapshotWindows"], outputs, Maker::Other),
            ("theirs-ZAEL-", false, &[], &[], Maker::Other),
        ] {
            assert_eq!(stack(name, tagged, parameters, outputs), maker, "{name} {parameters:?}");
        }
    }
}
