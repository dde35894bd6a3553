//! The seam to AWS: the handful of calls that deploying, looking and deleting make.
//!
//! The adapter over the SDK (feature `aws`) and the fake of the tests implement [`Cloud`]; what is
//! done with the answers is the same for both.

use std::collections::BTreeMap;
use std::error::Error as StdError;
use std::fmt;
use zae_limiter_core::BoxFuture;

use crate::plan::{StackPlan, tag};

/// Why AWS did not do what it was asked to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CloudErrorKind {
    /// There was no answer, or one that says to try later.
    Unavailable,
    /// The credentials do not suffice, or are missing.
    Denied,
    /// There is no such thing.
    NotFound,
    /// The call makes no sense as it is.
    Rejected,
}

/// An error of AWS, with what to do about it.
#[derive(Debug)]
pub struct CloudError {
    /// What kind it is.
    pub kind: CloudErrorKind,
    /// What happened, and what to do next.
    pub message: String,
    /// What the SDK said.
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

/// What CloudFormation says about how a stack, or a part of it, is: `UPDATE_IN_PROGRESS`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Status(pub String);

impl Status {
    /// As CloudFormation writes it.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether something is still going on.
    pub fn is_under_way(&self) -> bool {
        self.0.ends_with("_IN_PROGRESS") && self.0 != "REVIEW_IN_PROGRESS"
    }

    /// Whether the last thing that was asked for was done.
    pub fn is_good(&self) -> bool {
        ["CREATE_COMPLETE", "UPDATE_COMPLETE", "IMPORT_COMPLETE"].contains(&self.as_str())
    }

    /// Whether something failed, or was taken back because something did.
    pub fn is_bad(&self) -> bool {
        self.0.contains("ROLLBACK") || self.0.ends_with("_FAILED")
    }

    /// Whether a stack can be changed as it is.
    pub fn can_be_updated(&self) -> bool {
        self.is_good() || self.0 == "UPDATE_ROLLBACK_COMPLETE"
    }

    /// Whether a stack never came to be: it can only be deleted.
    pub fn never_was(&self) -> bool {
        ["ROLLBACK_COMPLETE", "ROLLBACK_FAILED", "CREATE_FAILED"].contains(&self.as_str())
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A stack as it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StackState {
    /// What it is called.
    pub name: String,
    /// Its ARN, by which it is still known after it was deleted.
    pub id: String,
    /// How it is.
    pub status: Status,
    /// Why, where CloudFormation says so.
    pub reason: Option<String>,
    /// When it was made, and last changed, as milliseconds since 1970.
    pub created_at: Option<i64>,
    /// When it was last changed.
    pub updated_at: Option<i64>,
    /// The parameters it has.
    pub parameters: BTreeMap<String, String>,
    /// What it puts out.
    pub outputs: BTreeMap<String, String>,
    /// Its tags.
    pub tags: BTreeMap<String, String>,
}

/// Who made a stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Maker {
    /// This program.
    Us,
    /// The Python client: the same tags, another template.
    Python,
    /// Somebody else.
    Other,
}

impl StackState {
    /// Who made it.
    pub fn maker(&self) -> Maker {
        let is_limiter = self.tags.get(tag::MANAGED_BY).is_some_and(|by| by == tag::MANAGED_BY_US);
        match (is_limiter, self.parameters.contains_key(StackPlan::CODE_KEY)) {
            (true, true) => Maker::Us,
            (true, false) => Maker::Python,
            (false, _) => Maker::Other,
        }
    }

    /// An output, unless it is empty.
    pub fn output(&self, name: &str) -> Option<&str> {
        self.outputs.get(name).map(String::as_str).filter(|value| !value.is_empty())
    }
}

/// Something that happened to a stack or to a part of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StackEvent {
    /// Which event it is.
    pub id: String,
    /// What the part is called in the template; the stack's own name for the stack.
    pub resource: String,
    /// What kind of thing it is: `AWS::DynamoDB::Table`.
    pub kind: String,
    /// What it is called in the account, once it has a name there.
    pub physical_id: String,
    /// How it is now.
    pub status: Status,
    /// Why.
    pub reason: Option<String>,
}

impl StackEvent {
    /// Whether it is about the stack itself.
    pub fn is_stack(&self) -> bool {
        self.kind == "AWS::CloudFormation::Stack"
    }
}

/// What became of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Update {
    /// It is under way.
    Started,
    /// The stack is as it should be.
    Unchanged,
}

/// What CloudWatch, the queue and the table say about a stack.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TableFigures {
    /// `ACTIVE`, for example.
    pub status: String,
    /// How many items there are; AWS counts every six hours.
    pub items: i64,
    /// How many bytes they are, likewise.
    pub bytes: i64,
    /// What each index is: its name, status and projection.
    pub indexes: Vec<(String, String, String)>,
    /// Whether it refuses to be deleted.
    pub deletion_protection: bool,
    /// Whether it has a stream.
    pub stream: bool,
}

/// The calls.
///
/// A call that returns has happened; one that failed with [`CloudErrorKind::Unavailable`] may have.
/// Lists are complete: paging is the implementation's business.
pub trait Cloud: fmt::Debug + Send + Sync {
    /// A stack by its name or ARN; `None` where there is none, or it was deleted.
    fn stack<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Result<Option<StackState>, CloudError>>;

    /// All stacks of the account and region that were made by a limiter.
    fn stacks(&self) -> BoxFuture<'_, Result<Vec<StackState>, CloudError>>;

    /// The events of a stack after that one, oldest first; all of them without one.
    fn events<'a>(
        &'a self,
        name: &'a str,
        after: Option<&'a str>,
    ) -> BoxFuture<'a, Result<Vec<StackEvent>, CloudError>>;

    /// Starts to create a stack. Gives its ARN.
    fn create<'a>(&'a self, plan: &'a StackPlan) -> BoxFuture<'a, Result<String, CloudError>>;

    /// Starts to change a stack.
    fn update<'a>(&'a self, plan: &'a StackPlan) -> BoxFuture<'a, Result<Update, CloudError>>;

    /// Starts to delete a stack.
    fn delete<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Result<(), CloudError>>;

    /// Whether a bucket holds an object.
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

    /// Deletes everything in a bucket. One that is not there is empty.
    fn empty_bucket<'a>(&'a self, bucket: &'a str) -> BoxFuture<'a, Result<u64, CloudError>>;

    /// The table; `None` where there is none.
    fn table<'a>(
        &'a self,
        name: &'a str,
    ) -> BoxFuture<'a, Result<Option<TableFigures>, CloudError>>;

    /// How far a function was behind its stream at most in the ten minutes before `now`, in
    /// milliseconds; `None` where it had nothing to do.
    fn stream_lag<'a>(
        &'a self,
        function: &'a str,
        now_ms: i64,
    ) -> BoxFuture<'a, Result<Option<f64>, CloudError>>;

    /// How many messages wait in a queue, about.
    fn queue_length<'a>(&'a self, url: &'a str) -> BoxFuture<'a, Result<u64, CloudError>>;
}
