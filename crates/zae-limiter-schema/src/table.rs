//! The narrow seam of the store: the calls it makes to the table. The SDK's adapter and the
//! simulated table implement them, and nothing else knows the difference.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use zae_limiter_core::{Applied, BoxFuture};

use crate::expression::{Action, Condition};
use crate::keys::{Index, ItemKey};
use crate::value::Item;

/// The most items that one page of a query asks for.
pub const PAGE_ITEMS_MAX: usize = 1_000;

/// Work that goes on by itself.
pub type Task = Pin<Box<dyn Future<Output = ()> + Send + 'static>>;

/// What a call cost, indexes included.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Consumed {
    /// Write units.
    pub write: f64,
    /// Read units.
    pub read: f64,
}

impl std::ops::AddAssign for Consumed {
    fn add_assign(&mut self, other: Self) {
        self.write += other.write;
        self.read += other.read;
    }
}

/// One conditional update of one item, which creates the item where there is none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Update {
    /// Which item.
    pub key: ItemKey,
    /// What to do to it. Never empty.
    pub actions: Vec<Action>,
    /// What must be true of it, all of them. Without any the update always happens.
    pub conditions: Vec<Condition>,
}

/// What became of an update.
#[derive(Clone, Debug, PartialEq)]
pub enum Updated {
    /// It happened; the item as it is now.
    Done(Item, Consumed),
    /// A condition did not hold and nothing happened; the item as it is, if there is one.
    Unmet(Option<Item>, Consumed),
}

/// One part of a transaction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// Updates an item.
    Update(Update),
    /// Deletes an item under conditions.
    Delete(ItemKey, Vec<Condition>),
    /// Changes nothing; the conditions must hold.
    Check(ItemKey, Vec<Condition>),
}

impl Change {
    /// Which item.
    pub fn key(&self) -> &ItemKey {
        match self {
            Self::Update(update) => &update.key,
            Self::Delete(key, _) | Self::Check(key, _) => key,
        }
    }

    /// What must be true of it.
    pub fn conditions(&self) -> &[Condition] {
        match self {
            Self::Update(update) => &update.conditions,
            Self::Delete(_, conditions) | Self::Check(_, conditions) => conditions,
        }
    }
}

/// What became of a transaction.
#[derive(Clone, Debug, PartialEq)]
pub enum Transacted {
    /// All of it happened.
    Done(Consumed),
    /// Conditions did not hold and nothing happened: for each part, whether its own failed, and
    /// then the item as it is.
    Unmet(Vec<Option<Option<Item>>>, Consumed),
}

/// How fresh a read must be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Consistency {
    /// All that was answered before; twice the price.
    Strong,
    /// Perhaps a little old.
    Eventual,
}

impl Consistency {
    /// The freshest that can be had: an index is always eventual, and says no to anything else.
    pub fn freshest(index: Option<Index>) -> Self {
        if index.is_some() { Self::Eventual } else { Self::Strong }
    }
}

/// Items, in no particular order; absent ones are missing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BatchRead {
    /// What was found.
    pub items: Vec<Item>,
    /// What it cost.
    pub consumed: Consumed,
}

/// Which sort keys a query is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Range {
    /// All of the partition.
    All,
    /// Those that start so.
    StartsWith(String),
    /// From the first to the second, both included.
    Between(String, String),
}

/// In which order a query goes through a partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// By rising sort key.
    Forward,
    /// By falling sort key.
    Backward,
}

/// A page of one partition, of the table or of an index.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Query {
    /// The index; the table itself where there is none.
    pub index: Option<Index>,
    /// The partition.
    pub partition: String,
    /// Which part of it.
    pub range: Range,
    /// In which order.
    pub step: Step,
    /// At most so many items, 1 to [`PAGE_ITEMS_MAX`].
    pub limit: usize,
    /// The key behind which the page starts: the `next` of the page before.
    pub after: Option<Item>,
    /// How fresh; of an index eventual, or it is refused.
    pub consistency: Consistency,
}

/// A page.
#[derive(Clone, Debug, PartialEq)]
pub struct QueryOutput {
    /// The items in order; of an index that holds keys only, their keys.
    pub items: Vec<Item>,
    /// Where the next page starts; absent on the last one.
    pub next: Option<Item>,
    /// What it cost.
    pub consumed: Consumed,
}

/// Why there is no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TableErrorKind {
    /// Unreachable, or failed inside.
    Unavailable,
    /// More than the table as a whole may take.
    Throttled,
    /// More than one partition can take: other keys still answer.
    PartitionThrottled,
    /// Another transaction was under way on the same item.
    Conflict,
    /// Credentials that are missing, wrong, expired or not allowed to do this.
    Denied,
    /// There is no such table.
    NoTable,
    /// It is not a limiter's table, or one of a later release of the format.
    Incompatible,
    /// The call is wrong, whenever it is made.
    Rejected,
}

/// A call without an answer.
#[derive(Debug)]
pub struct TableError {
    /// Of which kind.
    pub kind: TableErrorKind,
    /// Whether the change may have been made all the same.
    pub applied: Applied,
    /// One sentence.
    pub message: String,
    /// What lies behind it.
    pub source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

impl TableError {
    /// An error before anything was changed.
    pub fn new(kind: TableErrorKind, message: impl Into<String>) -> Self {
        Self { kind, applied: Applied::No, message: message.into(), source: None }
    }

    /// After which the change may have been made.
    #[must_use]
    pub fn maybe_applied(mut self) -> Self {
        self.applied = Applied::Maybe;
        self
    }
}

impl fmt::Display for TableError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for TableError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_deref().map(|source| source as &(dyn std::error::Error + 'static))
    }
}

/// The calls that a store makes to its table.
///
/// None of them is repeated by the implementation after an answer that may have been lost: whether
/// that is safe is the caller's business. What DynamoDB leaves unprocessed is asked for again.
pub trait Table: fmt::Debug + Send + Sync + 'static {
    /// Updates one item.
    fn update<'a>(&'a self, update: &'a Update) -> BoxFuture<'a, Result<Updated, TableError>>;

    /// Makes at most 100 changes to different items, all or none.
    fn transact<'a>(
        &'a self,
        changes: &'a [Change],
    ) -> BoxFuture<'a, Result<Transacted, TableError>>;

    /// Reads any number of different items.
    fn read<'a>(
        &'a self,
        keys: &'a [ItemKey],
        consistency: Consistency,
    ) -> BoxFuture<'a, Result<BatchRead, TableError>>;

    /// Reads a page of a partition.
    fn query<'a>(&'a self, query: &'a Query) -> BoxFuture<'a, Result<QueryOutput, TableError>>;

    /// Deletes any number of items, whether they are there or not. May stop halfway.
    fn delete<'a>(&'a self, keys: &'a [ItemKey]) -> BoxFuture<'a, Result<Consumed, TableError>>;

    /// Completes when `wait` has passed, by the clock that the calls are made by.
    fn pause(&self, wait: Duration) -> BoxFuture<'_, ()>;

    /// Completes when a call that has been under way for so long is to be given up. A table in which no
    /// time passes never does.
    fn timeout(&self, limit: Duration) -> BoxFuture<'_, ()> {
        self.pause(limit)
    }

    /// Runs a task where the calls of this table run. `Err` hands it back: then the store runs it on a
    /// runtime of its own. A simulated table runs it in the simulated world.
    ///
    /// # Errors
    ///
    /// The task itself, which was not started.
    fn spawn(&self, task: Task) -> Result<(), Task> {
        Err(task)
    }
}
